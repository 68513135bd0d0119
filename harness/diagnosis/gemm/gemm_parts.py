"""A GEMM split into its parts (operands, factor, addends, epilogue), so that a deviation can change a single part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.outcome import Product
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.bounds.decoded_first import DTYPES, TensorFactor, decoded, decoded_bounds, tensor_factor
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import element_values, operand, promotes, scale_values
from narrowgauge.reference.numbers.exact import fma
from narrowgauge.reference.quantize.layout import rowwise_codes
from narrowgauge.reference.quantize.scaling import over_elements
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import WHOLE, Recipe, find_recipe
from narrowgauge.spec.summation import FLT_MAX, SMALLEST_NORMAL, UNIT, Summation, summation

Ends = tuple[torch.Tensor, torch.Tensor]
"""Smallest and largest possible value of each number. Both are equal if the number is known."""


@dataclass
class Sums:
    """Bounds of the final accumulators before α, float32 (M, N). For FP8 with block scales: of the promoted sum y."""

    lower: torch.Tensor
    upper: torch.Tensor
    undetermined: torch.Tensor
    """bool: sums that can be infinite or NaN."""

    @property
    def ends(self) -> Ends:
        return self.lower, self.upper


@dataclass(frozen=True)
class GemmParts:
    """The parts of a GEMM. A deviation replaces single parts."""

    left: Quantized
    right: Quantized
    """Operands (M, K) and (N, K) without a tensor factor: codes along rows, low nibble first, a scale for each row."""
    factor: torch.Tensor
    """α, float32, broadcast to (M, N); 1 if the kernel declares decoded operands."""
    c: torch.Tensor | None
    bias: torch.Tensor | None
    """(1, N). A wrong bias can be (M, 1) or (M, N)."""
    output: torch.Tensor
    """Output of the kernel, (M, N)."""
    wrong: torch.Tensor
    """bool mask of the wrong outputs, (M, N)."""
    rows: torch.Tensor
    columns: torch.Tensor
    """Row and column numbers in the whole product, int64 (M,) and (N,)."""
    order: Summation
    """Operands and order of summation that the kernel declares."""
    source: Product
    """The whole product."""
    sections: Sequence[GemmParts] = field(default=(), repr=False)
    """Parts of all sections of a grouped GEMM, in order."""
    number: int = 0
    """Index of these parts in `sections`."""
    tensor_factors: tuple[TensorFactor, TensorFactor] | None = None
    """Tensor factors of the operands if the kernel declares decoded operands, which hold them; else None."""

    @property
    def promotes(self) -> bool:
        """Whether block scales are float32 numbers, so that the accumulator holds the promoted sum y."""
        return promotes(self.left.recipe)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the output."""
        return self.output.dtype

    def sums(self) -> Sums:
        """Bounds of the accumulators in the declared order, or of the sums of decoded operands if they are declared."""
        if self.order.operands is not None and self.tensor_factors is not None:
            dtype, flushes = DTYPES[self.order.operands], self.order.flushes
            x, w = (
                decoded(q, factor, dtype, flushes=flushes)
                for q, factor in zip((self.left, self.right), self.tensor_factors, strict=True)
            )
            of_decoded = decoded_bounds(x, w, self.order)
            return Sums(of_decoded.lower, of_decoded.upper, of_decoded.overflow)
        limits = bounds(self.left, self.right, out_dtype=torch.float32, order=self.order, joined_in=self.dtype)
        lower = torch.where(limits.exact, limits.expected, limits.lower)
        upper = torch.where(limits.exact, limits.expected, limits.upper)
        return Sums(lower, upper, limits.undetermined)

    def loose_sums(self) -> Sums:
        """Wider bounds than `sums`, computed faster: S ± (K + 8)·2u·A. If a tensor core is simulated, or
        operands are decoded, `sums`.

        8 covers the factors of a term and the rounding of S in float64. 2^-126 for each term covers underflow.
        """
        if not self.order.accepts_reference:
            return self.sums()
        left, right = (operand_values(q) for q in (self.left, self.right))
        total, size = left @ right.T, left.abs() @ right.abs().T
        columns = left.shape[1]
        error = (columns + 8) * 2 * UNIT * size + columns * SMALLEST_NORMAL
        undetermined = ~(size * (1 + 2.0**-8) < FLT_MAX)
        lower, upper = (total - error).float(), (total + error).float()
        lower, upper = lower.masked_fill_(undetermined, -torch.inf), upper.masked_fill_(undetermined, torch.inf)
        return Sums(lower, upper, undetermined)

    @property
    def any_order(self) -> GemmParts:
        """The parts with any order of summation, if the bounds of any order contain those of the declared order."""
        return self if self.order.aligned else replace(self, order=replace(self.order, order=None))

    def select(self, rows: torch.Tensor, columns: torch.Tensor) -> GemmParts:
        """The parts of a product with only these rows and columns, given by their numbers."""
        factor = _select_broadcast(self.factor, rows, columns)
        c, bias = (
            None if addend is None else _select_broadcast(addend, rows, columns) for addend in (self.c, self.bias)
        )
        factors = self.tensor_factors
        if factors is not None:
            factors = (factors[0].select(rows), factors[1].select(columns))
        return replace(
            self, left=select_rows(self.left, rows), right=select_rows(self.right, columns), factor=factor, c=c,
            bias=bias, output=self.output[rows][:, columns], wrong=self.wrong[rows][:, columns], rows=self.rows[rows],
            columns=self.columns[columns], tensor_factors=factors,
        )  # fmt: skip


Epilogue = Callable[[GemmParts, Ends], list[Ends]]
"""Function from bounds of the accumulators to bounds of the outputs, for each of several permitted epilogues."""


def split_products(products: Sequence[Product], wrong: torch.Tensor | None) -> list[GemmParts]:
    """Parts of each product. `wrong`: bool masks of the wrong outputs of all products, joined along rows."""
    product_parts: list[GemmParts] = []
    start = 0
    for number, product in enumerate(products):
        rows = slice(start, start + product.output.shape[0])
        start = rows.stop
        mask = torch.zeros_like(product.output, dtype=torch.bool) if wrong is None else wrong[rows]
        bias = None if product.bias is None else product.bias.view(1, -1)
        row_numbers, column_numbers = (torch.arange(extent, device=mask.device) for extent in mask.shape)
        left, right = without_tensor_factor(product.a), without_tensor_factor(product.b)
        order = summation(product.order)
        factor, tensor_factors = alpha(product.a, product.b), None
        if order.operands is not None:
            factor, tensor_factors = torch.ones_like(factor), (tensor_factor(product.a), tensor_factor(product.b))
        product_parts.append(
            GemmParts(
                left, right, factor, product.c, bias, product.output, mask, row_numbers, column_numbers, order, product,
                product_parts, number, tensor_factors,
            )
        )  # fmt: skip
    return product_parts


def without_tensor_factor(q: Quantized) -> Quantized:
    """The operand without its tensor factor: codes along rows, low nibble first, linear scales for each row."""
    if q.recipe.spans_k:
        scales = torch.ones(1, 1, device=q.codes.device)
    elif q.recipe.scale is FP32:
        scales = scale_values(q).float()
    else:
        scales = q.scales.T.contiguous() if q.transposed else q.scales
    return Quantized(rowwise_codes(q), scales, None, _carrier_recipe(q.recipe), q.shape)


@lru_cache(maxsize=64)
def _carrier_recipe(recipe: Recipe) -> Recipe:
    """A recipe with the same elements and scales, blocks of a single row, and no tensor factor."""
    if recipe.spans_k:
        return replace(recipe, block=(WHOLE, WHOLE), packing="low-first")
    if recipe.alpha == "1":
        return replace(recipe, block=(1, recipe.block[1]), packing="low-first", transform=None)
    return replace(find_recipe("nvfp4@qwix"), block=(1, recipe.block[1]), packing="low-first")


def select_rows(q: Quantized, rows: torch.Tensor) -> Quantized:
    """These rows of an operand `without_tensor_factor`, given by their numbers."""
    scales = q.scales if q.recipe.whole else q.scales[rows]
    return replace(q, codes=q.codes[rows], scales=scales, shape=(len(rows), q.shape[1]))


def select_columns(q: Quantized, columns: slice) -> Quantized:
    """These columns of an operand `without_tensor_factor`: whole blocks, or an even start if a scale spans all of K."""
    per_byte = 2 if q.recipe.element.bits == 4 else 1
    codes = q.codes[:, columns.start // per_byte : -(-columns.stop // per_byte)].contiguous()
    scales = q.scales
    if not q.recipe.whole:
        width = q.recipe.block[1]
        scales = scales[:, columns.start // width : -(-columns.stop // width)].contiguous()
    return replace(q, codes=codes, scales=scales, shape=(q.shape[0], columns.stop - columns.start))


def _select_broadcast(numbers: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    selected = numbers[rows] if numbers.shape[0] > 1 else numbers
    return selected[:, columns] if numbers.shape[1] > 1 else selected


def operand_values(q: Quantized) -> torch.Tensor:
    """code·scale of an operand `without_tensor_factor`, float64 (M, K)."""
    if not promotes(q.recipe):
        return operand(q)
    return over_elements(element_values(q), scale_values(q), q.recipe, torch.mul).contiguous()


def ordered_ends(left: torch.Tensor, right: torch.Tensor) -> Ends:
    """The ends in ascending order. NaN stays NaN."""
    return torch.minimum(left, right), torch.maximum(left, right)


def correct_epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
    """The correct epilogues: cast of α·acc (+ c) (+ bias), with a fused or separate first addition.

    For FP8 with block scales: cast of y + bias, then c added and cast.
    """
    if parts.promotes:
        y = add_to_ends(ends, parts.bias)
        return [cast_ends(add_to_ends(cast_ends(y, parts.dtype), parts.c), parts.dtype)]
    return [cast_ends(y, parts.dtype) for y in add_addends(parts, ends, parts.factor)]


def add_addends(parts: GemmParts, ends: Ends, factor: torch.Tensor) -> list[Ends]:
    """factor·acc (+ c) (+ bias) in float32. Every step rounds; the first addition may be fused with the product."""
    addends = [x for x in (parts.c, parts.bias) if x is not None]
    candidates = [scale_ends(ends, factor)]
    for number, addend in enumerate(addends):
        fused = [_fused_multiply_add(ends, factor, addend)] if number == 0 else []
        candidates = [add_to_ends(candidate, addend) for candidate in candidates] + fused
    return candidates


def scale_ends(ends: Ends, factor: torch.Tensor) -> Ends:
    """Ends of fl(factor·x). Rounding is monotone, so the ends of x give the ends of the result."""
    return ordered_ends(ends[0] * factor, ends[1] * factor)


def add_to_ends(ends: Ends, addend: torch.Tensor | None) -> Ends:
    """Ends of fl(x + addend), or of x without an addend."""
    return ends if addend is None else (ends[0] + addend.float(), ends[1] + addend.float())


def cast_ends(ends: Ends, dtype: torch.dtype) -> Ends:
    """Ends rounded to a dtype, as float32."""
    return ends[0].to(dtype).float(), ends[1].to(dtype).float()


def _fused_multiply_add(ends: Ends, factor: torch.Tensor, addend: torch.Tensor) -> Ends:
    shape = ends[0].shape
    wide_factor, wide_addend = (x.float().expand(shape).contiguous() for x in (factor, addend))
    low, high = ordered_ends(*(fma(end.contiguous(), wide_factor, wide_addend) for end in ends))
    return low, high


def fits(
    output: torch.Tensor, candidates: Sequence[Ends], undetermined: torch.Tensor, sums: Ends | None = None
) -> torch.Tensor:
    """bool mask of the outputs between the ends of a candidate. The payload of NaN is free, and so is the sign of zero,
    unless the ends of the `sums` exclude 0: a sum that underflows behind its last addition keeps its sign."""
    value = output.float()
    is_nan = value.isnan()
    fitting = undetermined & ~value.isfinite()
    zero = value == 0
    signed = zero & ((sums[0] > 0) | (sums[1] < 0)) if sums is not None and bool(zero.any()) else None
    for low, high in candidates:  # NaN is in no interval
        inside = (value >= low) & (value <= high)
        if signed is not None:
            other = (low.signbit() == high.signbit()) & (low.signbit() != value.signbit())
            inside &= ~(signed & (low == 0) & (high == 0) & other)
        fitting |= inside | ((low.isnan() | high.isnan()) & is_nan)
    return fitting


EPILOGUE, FACTOR = "epilogue", "factor"
"""Steps of deviations whose `change` gives an epilogue's result (`Epilogue`), or a factor in place of α: float32, or
None if it does not apply. The change of every other step gives the changed parts, or None."""


def changed_parts(deviation: Deviation[GemmParts], parts: GemmParts) -> GemmParts | None:
    """The parts with the deviation. None if it does not apply to the product."""
    if deviation.step == EPILOGUE:
        return parts
    if deviation.step != FACTOR:
        changed: GemmParts | None = deviation.result(parts)
        return changed
    without = parts.promotes or parts.source.a.recipe.alpha == "1" or parts.tensor_factors is not None
    factor = None if without else deviation.result(parts)
    return None if factor is None else replace(parts, factor=factor)


def changed_outputs(deviation: Deviation[GemmParts], parts: GemmParts, ends: Ends) -> list[Ends]:
    """Ends of the outputs of the changed parts, for each permitted epilogue."""
    outputs: list[Ends] = (deviation.result if deviation.step == EPILOGUE else correct_epilogue)(parts, ends)
    return outputs
