"""Sums of products in a given tree of additions, with the arithmetic of its nodes.

Source: docs/accumulators.md#trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.accumulators.steps import Side, accumulator_powers, aligned, convert
from narrowgauge.reference.gemm.tensor_core import power_of_two
from narrowgauge.reference.numbers.exact import addcmul_rounds_once, fma


@dataclass(frozen=True)
class Chain:
    """A sum that starts with a term and takes further terms step by step. A term is a column of K or another chain."""

    first: int | Chain
    steps: tuple[tuple[int | Chain, ...], ...] = ()
    """The terms of each step, in ascending order of their first columns. Several terms of a step are added at once."""

    def columns(self) -> list[int]:
        """All columns of K below the chain, in order of the additions."""
        found: list[int] = []
        for term in (self.first, *(term for step in self.steps for term in step)):
            found += [term] if isinstance(term, int) else term.columns()
        return found

    @property
    def width(self) -> int:
        """The largest number of products that are added at once; 1 if every addition has two terms."""
        inner = [term.width for step in ((self.first,), *self.steps) for term in step if isinstance(term, Chain)]
        first = 2 if isinstance(self.first, int) and self.steps and len(self.steps[0]) > 1 else 1
        own = [len(step) + (first - 1 if number == 0 else 0) for number, step in enumerate(self.steps)]
        return max([1, *inner, *own])


Inputs = Literal["exact", "truncated", "ties-away", "nearest-even"]
"""Operands of a product: as given, or float32 numbers that are first converted to TF32, with 10 fraction bits:
truncated as by the tensor core, rounded with ties away as by `cvt.rna.tf32.f32`, or to nearest even."""
INPUTS: tuple[Inputs, ...] = ("exact", "truncated", "ties-away", "nearest-even")
_DROPPED = 13
"""Fraction bits of float32 that TF32 lacks."""


def converted_inputs(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The operand that is multiplied, float32 if it is converted to TF32. Finite numbers only."""
    if inputs == "exact":
        return x
    bits = x.float().contiguous().view(torch.int32)
    half = 1 << (_DROPPED - 1)
    if inputs == "ties-away":
        bits = bits + half
    elif inputs == "nearest-even":
        bits = bits + (half - 1) + ((bits >> _DROPPED) & 1)
    return (bits & -(1 << _DROPPED)).view(torch.float32)


@dataclass(frozen=True)
class NodeArithmetic:
    """The arithmetic of the additions in a tree."""

    model: HardwareModel | None = None
    """The additions of products: an aligned model, or None for float32 additions that round to nearest. Its first
    operand is the format of a, its last one that of b."""
    fused: bool = True
    """Without a model: whether a product is added by a fused multiply-add, or rounded to float32 first."""
    reduced_in: torch.dtype = torch.float32
    """The dtype to which the sums of chains, and their additions to other chains, are rounded."""
    inputs: Inputs = "exact"


def tree_sum(chain: Chain, a: torch.Tensor, b: torch.Tensor, arithmetic: NodeArithmetic) -> torch.Tensor:
    """Σ_k a[i, k]·b[j, k] in the order of a tree: (M, K) and (N, K), of any floating-point dtype, to float32 (M, N).

    Raises ValueError for a step that joins chains and products, or several chains, at once: no model defines it.
    """
    a, b = (converted_inputs(side, arithmetic.inputs) for side in (a, b))
    if arithmetic.model is None:
        x, y = (side.float().T.contiguous() for side in (a, b))
        return _nearest_sum(chain, x.unsqueeze(2), y.unsqueeze(1), arithmetic)
    x, y = a.unsqueeze(1), b.unsqueeze(0)
    return _aligned_sum(chain, *_with_powers((x, y), arithmetic.model), arithmetic)


def tree_sum_of_pairs(chain: Chain, a: torch.Tensor, b: torch.Tensor, arithmetic: NodeArithmetic) -> torch.Tensor:
    """Σ_k a[i, k]·b[i, k], else as `tree_sum`: (S, K) and (S, K) to float32 (S,)."""
    a, b = (converted_inputs(side, arithmetic.inputs) for side in (a, b))
    if arithmetic.model is None:
        x, y = (side.float().T.contiguous().unsqueeze(1) for side in (a, b))
        return _nearest_sum(chain, x, y, arithmetic).squeeze(0)
    left, right = _with_powers((a.unsqueeze(1), b.unsqueeze(1)), arithmetic.model)
    return _aligned_sum(chain, left, right, arithmetic).squeeze(1)


def _with_powers(values: tuple[torch.Tensor, torch.Tensor], model: HardwareModel) -> tuple[Side, Side]:
    smallest = [2.0 ** model.smallest_exponent(name) for name in (model.operands[0], model.operands[-1])]
    left, right = (
        Side(x.double(), power_of_two(x.double()).clamp_(min=least)) for x, least in zip(values, smallest, strict=True)
    )
    return left, right


def _joined(
    total: torch.Tensor, step: tuple[int | Chain, ...], other: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if len(step) > 1:
        raise ValueError(f"{len(step)} sums are added at once; no model defines such an addition")
    return (total.to(dtype) + other.to(dtype)).float()


def _nearest_sum(chain: Chain, a: torch.Tensor, b: torch.Tensor, arithmetic: NodeArithmetic) -> torch.Tensor:
    """a (K, M, 1) and b (K, 1, N) to (M, N), or (K, 1, S) and (K, 1, S) to (1, S), float32."""
    in_place = arithmetic.fused and a.shape == b.shape and addcmul_rounds_once(str(a.device))

    def term(one: int | Chain) -> torch.Tensor:
        return a[one] * b[one] if isinstance(one, int) else _nearest_sum(one, a, b, arithmetic)

    total = term(chain.first)
    for step in chain.steps:
        if len(step) > 1:
            raise ValueError(f"{len(step)} terms are added at once; no float32 addition does")
        one = step[0]
        if isinstance(one, Chain):
            total = _joined(total, step, term(one), arithmetic.reduced_in)
        elif in_place:  # `total` is a new tensor
            total.addcmul_(a[one], b[one].squeeze(0))
        elif arithmetic.fused:
            total = fma(a[one].expand(total.shape), b[one].expand(total.shape), total)
        else:
            total = total + term(one)
    return total


def _aligned_sum(chain: Chain, a: Side, b: Side, arithmetic: NodeArithmetic) -> torch.Tensor:
    """a (M, 1, K) and b (1, N, K) to (M, N), or (S, 1, K) and (S, 1, K) to (S, 1)."""
    model = arithmetic.model
    assert model is not None

    def products(columns: list[int], total: torch.Tensor) -> torch.Tensor:
        # A range is a view, a list is a copy.
        at = slice(columns[0], columns[-1] + 1) if columns[-1] - columns[0] == len(columns) - 1 else columns
        values = a.values[:, :, at] * b.values[:, :, at]
        powers = a.powers[:, :, at] * b.powers[:, :, at]
        zero = 2.0**model.zero_exponent
        powers = powers.where(values != 0, zero)
        added = accumulator_powers(total, model).where(total != 0, zero)
        terms = torch.cat([values, total.unsqueeze(2)], 2)
        return convert(aligned((terms, torch.maximum(powers.amax(2), added)), model), model)

    zeros = a.values.new_zeros(a.values.shape[0], b.values.shape[1])
    steps = list(chain.steps)
    if isinstance(chain.first, Chain):
        total = _aligned_sum(chain.first, a, b, arithmetic).double()
    else:
        beside = [one for one in steps[0] if isinstance(one, int)] if steps and len(steps[0]) > 1 else []
        if beside and len(beside) < len(steps[0]):
            raise ValueError("products and sums are added at once; no model defines such an addition")
        steps = steps[1:] if beside else steps
        total = products([chain.first, *beside], zeros)
    for step in steps:
        columns = [one for one in step if isinstance(one, int)]
        if columns and len(columns) < len(step):
            raise ValueError("products and sums are added at once; no model defines such an addition")
        if columns:
            total = products(columns, total)
        else:
            one = step[0]
            assert isinstance(one, Chain)
            other = _aligned_sum(one, a, b, arithmetic)
            total = _joined(total.float(), step, other, arithmetic.reduced_in).double()
    return total.float()
