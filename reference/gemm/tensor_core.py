"""The sum of a tensor core, simulated bit for bit: products are aligned, truncated and added.

Source: docs/tolerance.md#declared-order. An H200 settled the open questions: the exponent of a product is not
normalised, a subnormal factor has the exponent of the smallest normal number, and sums keep no more bits than terms.
With F = 13 and W = 32 all bits of torch._scaled_mm agree, for E4M3 and for E5M2 by E4M3; without `use_fast_accum` with
P = 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowgauge.reference.gemm.operands import element_values, scale_values
from narrowgauge.reference.gemm.split_k import SplitK
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.summation import ACCUMULATOR_BITS, Alignment

_EXPONENT_MASK = 0x7FF << 52
SMALLEST_ALIGNMENT = 2.0**-900
"""The last bit of an alignment of zeros only; smaller than the last bit of any other alignment."""


@dataclass
class Factors:
    """An operand (M, K) of a tensor core, float64, finite."""

    values: torch.Tensor
    powers: torch.Tensor
    """Power of two of the exponent of each value; of a subnormal value, of the smallest normal number; 0 for 0."""

    def columns(self, columns: slice) -> Factors:
        return Factors(self.values[:, columns], self.powers[:, columns])

    def rows(self, rows: slice | torch.Tensor) -> Factors:
        return Factors(self.values[rows], self.powers[rows])

    def decoded(self) -> Factors:
        """The factors as normal numbers of a format with a wider exponent."""
        return Factors(self.values, power_of_two(self.values))


def factors_of_elements(values: torch.Tensor, fmt: Format) -> Factors:
    """Elements of a format, without scales; infinities and NaN are replaced by 0."""
    finite = values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Factors(finite, power_of_two(finite).clamp_(min=2.0 ** (1 - fmt.bias)).mul_(finite != 0))


def factors_of_operand(q: Quantized) -> Factors:
    """Elements with the scales of their blocks; float32 scales are left out."""
    elements = factors_of_elements(element_values(q), q.recipe.element)
    if q.recipe.scale is FP32:
        return elements
    scales = scale_values(q).nan_to_num(nan=0.0).repeat_interleave(q.recipe.block[1], 1)[:, : q.shape[1]]
    return Factors(elements.values * scales, elements.powers * power_of_two(scales))


def tensor_core_sum(
    left: Factors, right: Factors, model: Alignment, exact: torch.Tensor, *, split: SplitK | None = None
) -> torch.Tensor:
    """Σ_k left[i, k]·right[j, k] as added by a tensor core: (M, K) and (N, K) to (M, N), float32 numbers in float64.

    With `model.decoded` no factor is subnormal: a kernel multiplied elements and scales to numbers of a wider format.
    With `model.promoted` the accumulator restarts at 0 after every `model.promoted` columns, and each accumulator is
    added to a float32 sum, rounded to nearest. `split` cuts K into slices, of whole steps of `model.promoted` or
    `model.width` columns, and joins their sums. `exact` (M, N): IEEE sums; where `exact` is infinite or NaN, it is the
    result. Factors are 0 or from 2^-200 to 2^200.
    """
    if model.decoded:
        left, right = left.decoded(), right.decoded()
    split = split or SplitK()
    parts = split.columns(left.values.shape[1], model.promoted or model.width)
    out = split.joined([_promoted_accumulators(left.columns(part), right.columns(part), model) for part in parts])
    return out.add_(0.0).double().where(exact.isfinite(), exact)  # + 0 makes a sum of zeros +0


def _promoted_accumulators(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """The float32 sum of the accumulators of a slice of K, (M, N)."""
    columns = left.values.shape[1]
    length = model.promoted or max(1, columns)
    out = torch.zeros(left.values.shape[0], right.values.shape[0], device=left.values.device)
    for start in range(0, columns, length):
        chunk = slice(start, start + length)
        out += _accumulator(left.columns(chunk), right.columns(chunk), model).float()
    return out


def _accumulator(left: Factors, right: Factors, model: Alignment) -> torch.Tensor:
    """A single accumulator of (M, K) and (N, K), float64 (M, N), from 0, `model.width` products at a time."""
    accumulator = left.values.new_zeros(left.values.shape[0], right.values.shape[0])
    for start in range(0, left.values.shape[1], model.width):
        block = slice(start, start + model.width)
        x, y = left.columns(block), right.columns(block)
        products = x.values.unsqueeze(1) * y.values
        largest = (x.powers.unsqueeze(1) * y.powers).amax(2)
        accumulator = add_aligned(products, largest, accumulator, model, dim=2)
    return accumulator


def add_aligned(
    products: torch.Tensor, largest: torch.Tensor, accumulator: torch.Tensor, model: Alignment, *, dim: int
) -> torch.Tensor:
    """The accumulator after a step of the tensor core. Overwrites `products`.

    1. The largest exponent among the products along `dim` and the accumulator: the exponent of a product is the sum of
       the exponents of its factors, as a power of two in `largest`.
    2. Products and accumulator are truncated toward zero behind `model.fraction` bits of this exponent.
    3. Their sum, which is exact, is truncated to the bits of the accumulator.
    """
    last_bit = torch.maximum(largest, power_of_two(accumulator)).mul_(2.0**-model.fraction)
    last_bit.clamp_(min=SMALLEST_ALIGNMENT)
    terms = products.div_(last_bit.unsqueeze(dim), rounding_mode="trunc").sum(dim)
    total = terms.add_(accumulator.div(last_bit, rounding_mode="trunc")).mul_(last_bit)
    return truncate_to_accumulator(total, model)


def accumulator_fraction_bits(model: Alignment) -> int:
    """Fraction bits of the accumulator."""
    return min(model.fraction, ACCUMULATOR_BITS - 1)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above |x|, float64; 0 for 0."""
    return (x.contiguous().view(torch.int64) & _EXPONENT_MASK).view(torch.float64)


def truncate_to_accumulator(x: torch.Tensor, model: Alignment) -> torch.Tensor:
    """float64 numbers, truncated toward zero to the fraction bits of the accumulator."""
    return (x.view(torch.int64) & ~((1 << (52 - accumulator_fraction_bits(model))) - 1)).view(torch.float64)
