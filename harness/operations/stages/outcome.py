"""What judging one case gives, before it becomes a record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.quantized import Judged
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.summation import Summation


@dataclass
class Product:
    """A product as it was judged."""

    a: Quantized
    b: Quantized
    """The operands as the kernel stored them, (M, K) and (N, K)."""
    c: torch.Tensor | None
    bias: torch.Tensor | None
    output: torch.Tensor
    """(M, N), in the output's dtype."""
    limits: Bounds
    order: Summation
    """What the backend declares of its sums."""
    stage: str = "output"
    """That it was judged as."""


@dataclass
class Moved:
    """What an operation was given that moves, rotates or updates numbers, and neither quantizes nor multiplies."""

    operation: str
    given: dict[str, torch.Tensor]
    found: dict[str, torch.Tensor | None]
    """What the kernel gave."""
    recipe: Recipe | None = None
    free: bool = False
    """Whether the order in which a rotation adds is free."""
    prefix: str = ""
    """What the names of its stages begin with: of a module's, the step and the layer."""


@dataclass
class Formula:
    """What stays in high precision in a module: the first tensor of it that is wrong."""

    name: str
    """Of the formula: norm, gelu, attention or residual."""
    stage: str
    given: dict[str, Any]
    """Its arguments, by name."""
    found: torch.Tensor
    """What the kernel gave, (M, N)."""


@dataclass
class Outcome:
    """Stages in order, the backend's bytes, and its values beside the reference's."""

    stages: list[StageResult] = field(default_factory=list)
    outputs: dict[str, torch.Tensor | None] = field(default_factory=dict)
    actual: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    """Values of the kernel and of the reference, for the figures that are for information."""
    products: list[Product] = field(default_factory=list)
    """Every product: one, or one a section; of a module those of all its stages."""
    limits: Bounds | None = None
    """Of a gemm: what was right for each output."""
    judged: list[Judged] = field(default_factory=list)
    """Every quantized matrix: halves, sections, operands."""
    moved: Moved | None = None
    formula: Formula | None = None
    ends: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of a transform whose order of summation is free: the least and the greatest right output."""
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    """Of a module: what quantizing cost (`harness.operations.modules.accuracy`), in no verdict."""
    seconds: float | None = None
