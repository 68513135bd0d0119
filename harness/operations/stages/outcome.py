"""The outcome of judging a case, before it becomes a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.possible_cause import Cause, PossibleCause
from narrowgauge.harness.operations.stages.quantized import Judged, dense_parts
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import Packing
from narrowgauge.spec.summation import Summation


class Limit(Protocol):
    """Limit of a diagnosis (`harness.diagnosis.search.work_limit`)."""

    @property
    def reached(self) -> bool:
        """Whether the work is done."""

    def may_try(self, elements: float) -> bool:
        """Whether a further mistake may be tried on so many elements."""

    def may_verify(self, cause: str, elements: float) -> bool:
        """Whether the verification of a mistake may go on with so many elements."""


CauseSearch = Callable[[StageResult, Limit], Iterable[Cause | PossibleCause]]
"""From a wrong stage to the mistakes that give the kernel's bytes."""


@dataclass
class Product:
    """A judged product."""

    a: Quantized
    b: Quantized
    """The operands as the kernel stored them, (M, K) and (N, K)."""
    c: torch.Tensor | None
    bias: torch.Tensor | None
    output: torch.Tensor
    """(M, N), in the output's dtype. This tensor and those of the operands are contiguous."""
    limits: Bounds
    order: Summation
    """Declarations of the backend about its sums."""
    stage: str = "output"
    """Name of the stage of the output."""
    others: Callable[[], dict[str, torch.Tensor]] = dict
    """Further matrices of the step and of other steps by name, which a kernel may take for an operand."""
    batches: int = 1
    """Batches that the rows of the output are divided into. 1: a single one, or an unknown number."""

    def __post_init__(self) -> None:
        self.a, self.b, self.output = dense_parts(self.a), dense_parts(self.b), dense(self.output)


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized operand of a formula."""

    scale: float
    """Decode scale."""
    before: torch.Tensor | None
    """Matrix before its quantization; None if the module did not report the matrix."""


@dataclass
class Formula:
    """The first wrong tensor of a module that is computed in high precision."""

    name: str
    """Name of the formula (`harness.diagnosis.formulas.explain_formula.FORMULAS`)."""
    stage: str
    given: dict[str, Any]
    """Arguments of the known wrong formulas by name."""
    found: torch.Tensor
    """Result of the kernel, (M, N), contiguous."""
    expected: Bounded | None = None
    compute: Callable[..., Bounded] | None = None
    """The formula, from its operands by name. None: only the known wrong formulas are tried."""
    operands: dict[str, torch.Tensor] = field(default_factory=dict)
    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors of the step and of other steps, which a kernel may take for an operand or give as the result."""
    batches: int = 1
    """Batches that the rows of the operands are divided into; 1 if their numbers of rows differ."""
    quantized: Mapping[str, QuantizedOperand] = field(default_factory=dict)
    """Quantized operands, of this formula and of others, by name."""

    def __post_init__(self) -> None:
        self.found = dense(self.found)


@dataclass
class Outcome:
    """Stages in order, the bytes of the backend, and values of the backend and of the reference."""

    stages: list[StageResult] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    actual: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    """Values of the kernel and of the reference, for the figures that are for information."""
    products: list[Product] = field(default_factory=list)
    """All products: a gemm has a single product, a grouped gemm a product per section, a module the products of all its
    stages."""
    limits: Bounds | None = None
    """Bounds of the outputs of a gemm."""
    judged: list[Judged] = field(default_factory=list)
    """All quantized matrices: halves, sections, operands."""
    decoded: Quantized | None = None
    """The matrix that dequantize was given."""
    causes: dict[str, CauseSearch] = field(default_factory=dict)
    """Known mistakes of a stage, by its name."""
    subject: str = ""
    """Name of the contract whose mistakes are known: causes and searches of another contract say nothing here."""
    packing: Packing | None = None
    """Layout of packed scales, the result `swizzled`."""
    confirms: Callable[[str], str] | None = None
    """The sentence of the mistake with this name if it gives the bytes, without a search for others; else empty. None:
    only a search can tell."""
    formula: Formula | None = None
    ends: tuple[torch.Tensor, torch.Tensor] | None = None
    """Least and greatest right output of a transform with a free order of summation."""
    parts: dict[str, Part] = field(default_factory=dict)
    """The accepted values of the results of a contract, by the names of the stages."""
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    """Loss of accuracy of a module by quantizing (`harness.operations.modules.accuracy`); decides no verdict."""
    numbers: str = ""
    """Coverage of numbers by the inputs (`harness.inputs.reached`)."""
    seconds: float | None = None
    notes: list[dict[str, str]] = field(default_factory=list)
    """Observations that change no verdict: cause, sentence."""
    aliases: list[dict[str, str]] = field(default_factory=list)
    """Results that share memory with an input or with an earlier result of the backend: cause, sentence."""
