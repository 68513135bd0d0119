"""The bytes of a quantizer on every input family, stacked to a matrix per dtype.

A stack has the inputs joined along the rows. A tensor scale becomes a number per row: the reference computes a rule on
all inputs at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.cases.keys import DTYPES
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.formats import E2M1
from narrowgauge.spec.recipes import Recipe, find_recipe

TIMEOUT = 300.0
"""Seconds that the backend may take for an input."""


@dataclass
class Given:
    """An input of the quantizer."""

    family: str
    dtype: str
    x: torch.Tensor
    random: Random | None = None
    """Random bits for stochastic rounding."""
    scale: torch.Tensor | None = None
    """Encode scale of delayed scaling."""


@dataclass
class Stack:
    """All inputs of a dtype quantized by the backend, and the resulting bytes."""

    names: list[str]
    """Name of each input: family and dtype."""
    x: torch.Tensor
    """(n·M, K)"""
    scales: torch.Tensor
    """Stored block scales, linear: uint8 or float32, (n·rows, ⌈K/block⌉); (n, 1) if a tensor has a single scale."""
    codes: torch.Tensor
    """uint8 (n·M, K), one code in a byte."""
    random: torch.Tensor | None = None
    """Random byte of each element, uint8 (n·M, K), for stochastic rounding."""
    given: torch.Tensor | None = None
    """Given encode scales, float32 (n,), of delayed scaling."""
    tensor_scale: torch.Tensor | None = None
    """Shown tensor scales of the backend, float32, a scale per input or row; None if not shown."""

    @property
    def height(self) -> int:
        """Rows of an input."""
        return len(self.x) // len(self.names)


@dataclass
class Observed:
    """Everything that a backend gave."""

    recipe: Recipe
    """The recipe that the backend was asked for."""
    stacks: list[Stack]
    skipped: list[str]
    """Inputs that the backend did not quantize, with its messages."""
    packing: str = "low-first"
    """Order of the nibbles, by the signs of the elements."""

    @property
    def inputs(self) -> int:
        """Number of inputs that the backend quantized."""
        return sum(len(stack.names) for stack in self.stacks)


def shape_of(recipe: Recipe) -> tuple[int, int]:
    """(M, K) of every input: whole tiles of the recipe, with enough blocks for all patterns of a family."""
    return (128 if recipe.stored_rows > 64 and not recipe.whole else 64), 256


def observe(
    backend: Backend,
    recipe: Recipe,
    *,
    device: str = "cpu",
    seed: int = 0,
    given: list[Given] | None = None,
) -> Observed:
    """Quantize every family in every dtype with `backend`, or given inputs.

    If the backend quantizes no input, the first exception is raised: BackendError, Unsupported, or HostLost if an input
    ended the host.
    """
    skipped: list[str] = []
    first: Exception | None = None
    parts: dict[str, list[Stack]] = {}
    for one in _families(recipe, device, seed) if given is None else given:
        x, name, random = one.x, f"{one.family} {one.dtype}", one.random
        try:
            backend.host.begin_case(TIMEOUT, room(device))
            kernel = quantize(backend, x, recipe, scale=one.scale, random=random)
            backend.host.end_case()
        except (BackendError, Unsupported, HostLost) as error:
            first = first or error
            skipped.append(f"{name}: {escape(str(error))}")
            continue
        drawn = None
        if random is not None:
            drawn = random_bytes(random, (x.shape[0], x.shape[1]), slice(0, len(x)), x.device, recipe.block[1])
        stack = Stack([name], x, linear_scales(kernel), kernel.codes, drawn, one.scale, kernel.tensor_scale)
        parts.setdefault(one.dtype, []).append(stack)
    if first is not None and not parts:
        raise first
    return _stacked(recipe, parts, skipped)


def _families(recipe: Recipe, device: str, seed: int) -> Iterator[Given]:
    for family in QuantizeCase.families():
        for dtype in DTYPES:
            case = QuantizeCase(recipe=str(recipe), shape=shape_of(recipe), dtype=dtype, inputs=family)
            if not case.problem():
                inputs = make_inputs(case, seed=seed).to(device)
                yield Given(family, dtype, inputs.x, inputs.random("x"), inputs.get("scale.x"))


def _stacked(recipe: Recipe, parts: dict[str, list[Stack]], skipped: list[str]) -> Observed:
    stacks, agreeing = [], [0, 0]
    orders = ("low-first", "high-first") if recipe.element is E2M1 else ("low-first",)
    unpacked: list[list[torch.Tensor]] = []
    for ones in parts.values():
        x, stored = torch.cat([one.x for one in ones]), torch.cat([one.codes for one in ones])
        columns = x.shape[1]
        low_first = elements(stored, columns, find_recipe(recipe.name))
        codes = [low_first, low_first.view(len(x), -1, 2).flip(2).reshape(low_first.shape)][: len(orders)]
        unpacked.append(codes)
        for number, order_codes in enumerate(codes):
            agreeing[number] += _equal_signs(x, order_codes, recipe)
        stacks.append(
            Stack(
                [name for one in ones for name in one.names], x, torch.cat([one.scales for one in ones]), codes[0],
                _joined([one.random for one in ones]), _joined([one.given for one in ones]),
                _joined([one.tensor_scale for one in ones]),
            )
        )  # fmt: skip
    best = int(agreeing[1] > agreeing[0])
    for stack, codes in zip(stacks, unpacked, strict=True):
        stack.codes = codes[best]
    return Observed(recipe, stacks, skipped, orders[best])


def _equal_signs(x: torch.Tensor, codes: torch.Tensor, recipe: Recipe) -> int:
    """Elements with a code of the element's sign, among elements that are not 0 or NaN, with nonzero codes."""
    sign = recipe.element.sign_code
    seen = (x != 0) & ~x.isnan() & ((codes & (sign - 1)) != 0)
    return int((((codes & sign) != 0) == x.signbit())[seen].sum())


def _joined(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known) if known and len(known) == len(tensors) else None
