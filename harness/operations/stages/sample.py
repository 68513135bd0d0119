"""Normal inputs, and calls of a backend on these, for conventional tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.spec.modules.training import training_recipe
from narrowgauge.spec.recipes import Recipe, find_recipe

ROWS, COLUMNS, SUM = 256, 512, 1024
"""M, N and K."""
SEED = 20260101
SIZES = (64, 0, 128, 64)
"""Rows of sections."""

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SampleInputs:
    """Normal inputs: x (M, K), w (N, K) (also used by each section), c (M, N), bfloat16; the recipes of x, w and an
    output."""

    x: torch.Tensor
    w: torch.Tensor
    c: torch.Tensor
    recipes: tuple[Recipe, ...]
    training: str = ""
    """Training recipe of a module. `recipes` are then its recipes of x, w and the output's gradient."""

    @property
    def r(self) -> Recipe:
        """Recipe of x."""
        return self.recipes[0]

    @property
    def exact(self) -> torch.Tensor:
        """Product of the unquantized operands, float64."""
        return self.x.double() @ self.w.double().T


@dataclass(frozen=True)
class Door:
    """A call of a conventional test: from the methods of a backend and inputs to a value for comparison and all
    bytes."""

    call: Callable[[Any, SampleInputs], tuple[torch.Tensor, Parts]]
    of_module: bool = False
    """Whether the call is of a module: its recipe is a training recipe."""
    gives_x: bool = False
    """Whether the value without error is x, and not the product of unquantized operands."""


def make_sample(names: str, *, module: bool) -> SampleInputs:
    draw = torch.Generator().manual_seed(SEED)
    x, w, c = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((ROWS, SUM), (COLUMNS, SUM), (ROWS, COLUMNS))
    )
    if module:
        training = training_recipe(names)
        return SampleInputs(x, w, c, (training.input, training.weight, training.grad), names)
    x_name, *others = names.split("+") if names else ["nvfp4"]
    w_name, out_name = [*others, *[x_name] * 2][:2]
    return SampleInputs(x, w, c, (find_recipe(x_name), find_recipe(w_name), find_recipe(out_name)))


def options_of(x: torch.Tensor, recipe: Recipe, number: int, count: int = 1) -> dict[str, Any]:
    """Keyword arguments of quantize for this recipe."""
    options: dict[str, Any] = {}
    if recipe.rounding == "stochastic":
        options["random"] = (SEED, number)
    if recipe.delayed:
        options["scale"] = (recipe.element.max / x.float().abs().max()).repeat(count)
    return options


def bytes_of(q: Any, name: str) -> Parts:
    parts = ((part, getattr(q, part)) for part in ("codes", "scales", "amax", "tensor_scale"))
    return {f"{name}.{part}": tensor for part, tensor in parts if tensor is not None}
