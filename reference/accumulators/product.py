"""Products of matrices as a matrix instruction adds them, with slices of K and promotion to float32.

Source: docs/accumulators.md#order-of-a-product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.accumulators.steps import Side, side, step
from narrowgauge.reference.gemm.fast.tensor_core_sum import fast_tensor_core_sum
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.reference.gemm.tensor_core import Factors
from narrowgauge.reference.numbers.blocks import pad_columns
from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.spec.summation import Alignment

DTYPES = {
    "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
"""Dtype of the numbers of each operand format that has a dtype."""


@dataclass(frozen=True)
class Composition:
    """How a kernel joins accumulators along K. Raises ValueError for a count that is not positive."""

    promoted: int | None = None
    """Columns after which the accumulator is added to a float32 sum and restarts at 0; None: never."""
    splits: int | tuple[int, ...] = 1
    """Slices of K, of ⌈steps/splits⌉ steps each; with promotion of ⌈chunks/splits⌉ promoted chunks each. Or the columns
    at which slices behind the first one start, as stream-K cuts K, each moved up to the next step or promoted chunk."""
    reduction: Literal["in-order", "tree"] = "in-order"
    """The order in which the sums of slices are added: in order of K, or neighbours first."""
    reduced_in: torch.dtype = torch.float32
    """The dtype to which the sums of slices, and each of their additions, are rounded."""

    def __post_init__(self) -> None:
        splits = self.splits if isinstance(self.splits, tuple) else (self.splits,)
        for name, count in (("promoted", self.promoted), *(("splits", one) for one in splits)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}; it is a number of columns or slices, at least 1")
        if self.reduction not in ("in-order", "tree"):
            raise ValueError(f"reduction is {self.reduction!r}; it is 'in-order' or 'tree'")

    @property
    def split(self) -> SplitK:
        """The slices of K and how their sums are joined."""
        return SplitK(self.splits, self.reduction == "tree", self.reduced_in)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    model: HardwareModel,
    *,
    operands: tuple[str, str] | None = None,
    c: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    composition: Composition | None = None,
) -> torch.Tensor:
    """a·bᵀ + c as the hardware adds it: a (M, K), b (N, K), c (M, N) to float32 (M, N), float16 if the model has it.

    a, b: numbers of the formats `operands`, two of `model.operands`, in any floating-point dtype. By default the
    formats of their dtypes, such as E5M2 of float8_e5m2, or the first format of the model.
    scales: of a (M, ⌈K/block⌉) and b (N, ⌈K/block⌉), for a model with a block; their signs are ignored.
    c is where the first accumulator starts; columns of K are padded with zeros to whole steps. Every NaN of the result
    has the bits 0x7FFFFFFF, or 0x7FFF in float16, as on NVIDIA; no bits are published for AMD. Raises ValueError for
    scales that are missing or not expected, and for a composition whose promoted chunk is no multiple of the width, or
    with a float16 accumulator.
    """
    how = composition or Composition()
    names = operands or (_format(a, model), _format(b, model))
    if (scales is None) != (model.block is None):
        wanted = "no scales" if model.block is None else f"a scale for every {model.block} columns of a and of b"
        raise ValueError(f"{model.name} takes {wanted}")
    if how.promoted is not None and how.promoted % model.width:
        raise ValueError(f"promotion after {how.promoted} columns is no multiple of the {model.width} of {model.name}")
    if model.half and how != Composition():
        raise ValueError(f"{model.name} has a float16 accumulator, which is neither promoted nor split")
    factors = [
        side(pad_columns(x, model.width), model, name, None if scales is None else _scales(scales[k], model))
        for k, (x, name) in enumerate(zip((a, b), names, strict=True))
    ]
    left, right = factors
    out = None if c is not None else _by_tensor_core(left, right, model, how)
    if out is not None:
        return _canonical(out, model)
    out = torch.empty(len(a), len(b), dtype=torch.float16 if model.half else torch.float32, device=a.device)
    start = out.new_zeros(out.shape) if c is None else c
    for rows in slabs(out.new_empty(1, 1).expand(out.shape[0], out.shape[1] * model.width)):
        sums = _composed(_rows(left, rows), right, start[rows].double(), model, how)
        out[rows] = sums.to(out.dtype)
    return _canonical(out, model)


def _format(x: torch.Tensor, model: HardwareModel) -> str:
    """Format of the numbers of an operand, by its dtype."""
    return next((name for name in model.operands if DTYPES.get(name) == x.dtype), model.operands[0])


def _canonical(out: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """The result with the bits of NVIDIA in every NaN."""
    nan = torch.tensor(0x7FFF if model.half else 0x7FFFFFFF, dtype=torch.int16 if model.half else torch.int32)
    return torch.where(out.isnan(), nan.view(out.dtype).to(out.device), out)


def _by_tensor_core(left: Side, right: Side, model: HardwareModel, how: Composition) -> torch.Tensor | None:
    """The product by `fast_tensor_core_sum`, float32 (M, N), if it has the same bits, else None.

    A tensor core of this function has no subnormal or infinite sums and no exponent of zero terms: the smallest
    nonzero term must stay a normal float32 number when it is aligned, and the sum of the largest terms finite.
    """
    if model.kind != "aligned" or model.block is not None or model.nearest or model.kept != min(model.fraction, 23):
        return None
    sides = []
    smallest, largest = 1.0, float(4 * left.values.shape[1])
    for factor in (left, right):
        nonzero = factor.values != 0
        if not bool(nonzero.any()) or not bool(factor.values.isfinite().all()):
            return None
        smallest *= float(factor.powers.where(nonzero, torch.inf).amin())
        largest *= float(factor.powers.amax())
        sides.append(Factors(factor.values, factor.powers.where(nonzero, 0.0)))
    if smallest * 2.0**-model.fraction < 2.0**-126 or largest >= 2.0**127:
        return None
    alignment = Alignment(model.fraction, model.width, how.promoted)
    return fast_tensor_core_sum(sides[0], sides[1], alignment, None, split=how.split).float()


def _scales(scales: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    """Magnitudes of the scales, padded with 1 to whole steps."""
    assert model.block is not None
    count = model.width // model.block
    missing = -scales.shape[1] % count
    return torch.nn.functional.pad(scales.double().abs(), (0, missing), value=1.0)


def _rows(factor: Side, rows: slice) -> Side:
    scales = None if factor.scales is None else factor.scales[rows]
    return Side(factor.values[rows], factor.powers[rows], scales)


def _columns(factor: Side, columns: slice, model: HardwareModel) -> Side:
    scales = factor.scales
    if scales is not None and model.block is not None:
        scales = scales[:, columns.start // model.block : columns.stop // model.block]
    return Side(factor.values[:, columns], factor.powers[:, columns], scales)


def _composed(left: Side, right: Side, start: torch.Tensor, model: HardwareModel, how: Composition) -> torch.Tensor:
    """The slices of K and their reduction, float64 (M, N)."""
    width = how.promoted or model.width
    sums = [
        _slice_sum(left, right, columns, start if columns.start == 0 else torch.zeros_like(start), model, how)
        for columns in how.split.columns(left.values.shape[1], width)
    ]
    return how.split.joined(sums).double()


def _slice_sum(
    left: Side, right: Side, columns: slice, start: torch.Tensor, model: HardwareModel, how: Composition
) -> torch.Tensor:
    """The steps of a slice of K, float64 (M, N)."""
    if how.promoted is None:
        return _chain(left, right, columns, start, model)
    total = start.float()
    for first in range(columns.start, columns.stop, how.promoted):
        chunk = slice(first, min(first + how.promoted, columns.stop))
        total = total + _chain(left, right, chunk, torch.zeros_like(start), model).float()
    return total.double()


def _chain(left: Side, right: Side, columns: slice, start: torch.Tensor, model: HardwareModel) -> torch.Tensor:
    accumulator = start
    for first in range(columns.start, columns.stop, model.width):
        here = slice(first, first + model.width)
        accumulator = step(_columns(left, here, model), _columns(right, here, model), accumulator, model)
    return accumulator
