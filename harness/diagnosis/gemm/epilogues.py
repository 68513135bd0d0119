"""Mistakes in the epilogue of a GEMM: α·acc (+ c) (+ bias) and the cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.checks.ordinal import INTEGER_DTYPE
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    EPILOGUE,
    FACTOR,
    Ends,
    GemmParts,
    add_addends,
    add_to_ends,
    cast_ends,
    correct_epilogue,
    ordered_ends,
    scale_ends,
)
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW
from narrowgauge.harness.operations.stages.deviation import Deviation, in_turn
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.quantize.scaling import divide, used_tensor_scale
from narrowgauge.spec.quantized import Quantized


def _has_alpha(parts: GemmParts) -> bool:
    """Whether a factor of the tensors or rows multiplies the sums."""
    return any(q.recipe.alpha != "1" for q in (parts.source.a, parts.source.b))


# ---- the factor ------------------------------------------------------------------------------------------------------


def _flushed_factor(parts: GemmParts) -> torch.Tensor | None:
    subnormal = parts.factor.abs() < torch.finfo(torch.float32).smallest_normal
    return parts.factor.masked_fill(subnormal, 0) if bool((subnormal & (parts.factor != 0)).any()) else None


def _amax_pair(parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Amaxes of a and b, (M, 1) and (1, N) or (1, 1), and the constant by which their product is divided."""
    a, b = parts.source.a, parts.source.b
    if a.amax is None or b.amax is None or a.recipe.whole:
        return None
    return a.amax.unsqueeze(1), b.amax.unsqueeze(0), a.recipe.max_product * b.recipe.max_product


def _decode_factors(parts: GemmParts) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tensor factors of a and b in dequantization: amax/2688, or the only scale of the tensor."""
    a, b = parts.source.a, parts.source.b
    if a.recipe.spans_k:
        return a.scales.view(-1, 1), b.scales.view(1, -1)
    if a.amax is None or b.amax is None:
        return None
    left, right = a.amax.unsqueeze(1), b.amax.unsqueeze(0)
    return left / torch.full_like(left, a.recipe.max_product), right / torch.full_like(right, b.recipe.max_product)


Factor = Callable[[GemmParts], torch.Tensor | None]
"""Function to a factor in place of α, float32. Its result is None if the factor does not apply to the product."""


def _order_of_amaxes(form: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Factor:
    def order(parts: GemmParts) -> torch.Tensor | None:
        pair = _amax_pair(parts)
        if pair is None:
            return None
        left, right, constant = pair
        return form(left, right, torch.full((1, 1), constant, device=left.device))

    return order


def _decode_factor_product(parts: GemmParts) -> torch.Tensor | None:
    factors = _decode_factors(parts)
    return None if factors is None or parts.source.a.recipe.whole else factors[0] * factors[1]


def _encode_scale_product(parts: GemmParts) -> torch.Tensor | None:
    a, b = parts.source.a, parts.source.b
    if "enc" not in a.recipe.element_scale or "enc" not in b.recipe.element_scale or a.recipe.whole:
        return None
    if a.tensor_scale is None and a.recipe.statistics != "float32":
        return None
    return divide(1.0, used_tensor_scale(a).unsqueeze(1) * used_tensor_scale(b).unsqueeze(0))


_AMAXES = {"both amaxes": "ab", "a's amax": "a", "b's amax": "b"}
ORDERS: dict[str, Factor] = {
    "(a*b)/d": _order_of_amaxes(lambda a, b, d: a * b / d),
    "(b*a)*(1/d)": _order_of_amaxes(lambda a, b, d: a * b * divide(1.0, d)),
    "(a/d)*b": _order_of_amaxes(lambda a, b, d: a / d * b),
    "(b/d)*a": _order_of_amaxes(lambda a, b, d: b / d * a),
    "(a*(1/d))*b": _order_of_amaxes(lambda a, b, d: a * divide(1.0, d) * b),
    "(b*(1/d))*a": _order_of_amaxes(lambda a, b, d: b * divide(1.0, d) * a),
    "a_dec*b_dec": _decode_factor_product,
    "1/(a_enc*b_enc)": _encode_scale_product,
    "float64": _order_of_amaxes(lambda a, b, d: (a.double() * b.double() / d.double()).float()),
}
"""Orders of operations of α from the amaxes a and b and the constant d. Operations round to float32, except float64."""


def _rounded_amaxes(rounded: tuple[str, torch.dtype], parts: GemmParts) -> torch.Tensor | None:
    if _amax_pair(parts) is None:
        return None
    sides, dtype = rounded
    operands = [getattr(parts.source, name) for name in "ab"]
    a, b = (
        replace(q, amax=q.amax.to(dtype).float()) if name in sides else q
        for name, q in zip("ab", operands, strict=True)
    )
    return alpha(a, b)


def _amax_of_one_operand(side: str, parts: GemmParts) -> torch.Tensor | None:
    a, b = parts.source.a, parts.source.b
    if a.recipe.max_product != b.recipe.max_product:
        return None
    return alpha(a, _with_factors_of(a, b)) if side == "a" else alpha(_with_factors_of(b, a), b)


def _with_factors_of(one: Quantized, other: Quantized) -> Quantized:
    """`one` in place of `other`: a number for each row is read for the row of the same number, modulo the rows."""

    def of_rows(numbers: torch.Tensor | None) -> torch.Tensor | None:
        if numbers is None or len(numbers) < 2:
            return numbers
        return numbers[torch.arange(other.shape[0], device=numbers.device) % len(numbers)]

    scales = of_rows(one.scales) if one.recipe.spans_k else one.scales
    assert scales is not None
    return replace(one, amax=of_rows(one.amax), tensor_scale=of_rows(one.tensor_scale), scales=scales)


def _single_decode_factor(side: str, parts: GemmParts) -> torch.Tensor | None:
    factors = _decode_factors(parts)
    return None if factors is None else factors["ab".index(side)]


def _alpha_after_cast(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.promotes:
        return []
    candidates = add_addends(parts, cast_ends(ends, parts.dtype), parts.factor)
    return [cast_ends(candidate, parts.dtype) for candidate in candidates]


def _alpha_times_addends(names: Sequence[str], parts: GemmParts, ends: Ends) -> list[Ends]:
    """α multiplies the named addends: in the sum with the accumulator, or each alone."""
    addends = [getattr(parts, name) for name in names]
    if parts.promotes or any(addend is None for addend in addends):
        return []
    rest = replace(parts, **dict.fromkeys(names))  # type: ignore[arg-type]
    together, alone = ends, scale_ends(ends, parts.factor)
    for addend in addends:
        together, alone = add_to_ends(together, addend), add_to_ends(alone, parts.factor * addend.float())
    scaled = replace(rest, factor=torch.ones_like(parts.factor))
    return [*correct_epilogue(rest, together), *correct_epilogue(scaled, alone)]


# ---- the addends -----------------------------------------------------------------------------------------------------


def _with(parts: GemmParts, name: str, addend: torch.Tensor | None) -> GemmParts:
    return replace(parts, c=addend) if name == "c" else replace(parts, bias=addend)


def _changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor | None] = lambda addend: None
) -> Callable[[GemmParts, Ends], list[Ends]]:
    """Epilogue with the addend `name` changed, or without it."""

    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        addend = getattr(parts, name)
        return [] if addend is None else correct_epilogue(_with(parts, name, change(addend)), ends)

    return epilogue


def _without_addends(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None or parts.bias is None:
        return []
    return correct_epilogue(replace(parts, c=None, bias=None), ends)


def _c_rounded(dtype: torch.dtype, parts: GemmParts, ends: Ends) -> list[Ends]:
    return _changed("c", lambda c: c.to(dtype))(parts, ends)


def _cast_before_c(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None or parts.promotes or parts.dtype == torch.float32:
        return []
    y = cast_ends(scale_ends(ends, parts.factor), parts.dtype)
    bias_first = cast_ends(add_to_ends(y, parts.bias), parts.dtype)
    candidates = [add_to_ends(add_to_ends(y, parts.c), parts.bias), add_to_ends(bias_first, parts.c)]
    return [cast_ends(candidate, parts.dtype) for candidate in candidates]


def _c_before_cast(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None or not parts.promotes:
        return []
    orders = ((parts.bias, parts.c), (parts.c, parts.bias))
    return [cast_ends(add_to_ends(add_to_ends(ends, first), second), parts.dtype) for first, second in orders]


def _bias_after_cast(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None:
        return []
    without_bias = correct_epilogue(replace(parts, bias=None), ends)
    return [cast_ends(add_to_ends(candidate, parts.bias), parts.dtype) for candidate in without_bias]


def _bias_before_c(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None or parts.c is None or parts.promotes:
        return []
    return correct_epilogue(replace(parts, c=parts.bias, bias=parts.c), ends)


def _addends_first(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None or parts.c is None or parts.promotes:
        return []
    return correct_epilogue(replace(parts, c=parts.c.float() + parts.bias.float(), bias=None), ends)


def _bias_without_tail(width: int, parts: GemmParts, ends: Ends) -> list[Ends]:
    columns = parts.source.output.shape[1]
    if parts.bias is None or columns % width == 0:
        return []
    tail = parts.columns >= columns // width * width
    return correct_epilogue(replace(parts, bias=parts.bias.masked_fill(tail, 0)), ends)


def _bias_by_rows(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None:
        return []
    bias = parts.source.bias
    assert bias is not None
    rows = torch.arange(len(parts.source.output), device=bias.device) % len(bias)
    return correct_epilogue(replace(parts, bias=bias[rows].unsqueeze(1)[parts.rows]), ends)


def _twice(name: str, parts: GemmParts, ends: Ends) -> list[Ends]:
    """The addend is added again to the output, or is doubled."""
    addend = getattr(parts, name)
    if addend is None:
        return []
    added_again = [cast_ends(add_to_ends(once, addend), parts.dtype) for once in correct_epilogue(parts, ends)]
    return added_again + correct_epilogue(_with(parts, name, 2 * addend), ends)


def _no_product(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None and parts.bias is None:
        return []
    zeros = torch.zeros_like(ends[0])
    return correct_epilogue(parts, (zeros, zeros))


def _zeros(_: GemmParts, ends: Ends) -> list[Ends]:
    zeros = torch.zeros_like(ends[0])
    return [(zeros, zeros)]


def _first_row_of_c(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.source.c is None or len(parts.source.c) < 2:
        return []
    return correct_epilogue(replace(parts, c=parts.source.c[:1, parts.columns]), ends)


def _transposed_c(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.source.c is None:
        return []
    c = parts.source.c
    return correct_epilogue(replace(parts, c=c.T.reshape(c.shape)[parts.rows][:, parts.columns]), ends)


# ---- the cast --------------------------------------------------------------------------------------------------------


def before_last_cast(parts: GemmParts, ends: Ends) -> list[Ends]:
    """Ends of the outputs before the last cast, for each permitted epilogue."""
    if parts.promotes:
        y = add_to_ends(ends, parts.bias)
        return [y if parts.c is None else add_to_ends(cast_ends(y, parts.dtype), parts.c)]
    return add_addends(parts, ends, parts.factor)


def _output_rounded(dtype: torch.dtype, parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.dtype == dtype:
        return []
    return [cast_ends(cast_ends(y, dtype), parts.dtype) for y in before_last_cast(parts, ends)]


def _product_rounded(dtype: torch.dtype, parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None or parts.promotes or parts.dtype == dtype:
        return []
    product = cast_ends(scale_ends(ends, parts.factor), dtype)
    return [cast_ends(add_to_ends(add_to_ends(product, parts.c), parts.bias), parts.dtype)]


def _saturated(parts: GemmParts, ends: Ends) -> list[Ends]:
    largest = torch.finfo(parts.dtype).max
    clamped = [[end.clamp(-largest, largest) for end in y] for y in before_last_cast(parts, ends)]
    return [cast_ends((low, high), parts.dtype) for low, high in clamped]


def _infinite_above_largest(parts: GemmParts, ends: Ends) -> list[Ends]:
    largest = torch.finfo(parts.dtype).max
    if parts.dtype == torch.float32:
        return []
    overflowing = [
        [torch.where(end.abs() > largest, torch.inf * end.sign(), end) for end in y]
        for y in before_last_cast(parts, ends)
    ]
    return [cast_ends((low, high), parts.dtype) for low, high in overflowing]


def _truncated(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.dtype == torch.float32:
        return []
    return [ordered_ends(*(_toward_zero(end, parts.dtype) for end in y)) for y in before_last_cast(parts, ends)]


def _flushed_outputs(parts: GemmParts, ends: Ends) -> list[Ends]:
    smallest = torch.finfo(parts.dtype).smallest_normal
    rounded = [cast_ends(y, parts.dtype) for y in before_last_cast(parts, ends)]
    return [(_flushed_below(low, smallest), _flushed_below(high, smallest)) for low, high in rounded]


def _flushed_below(x: torch.Tensor, smallest: float) -> torch.Tensor:
    return torch.where(x.abs() < smallest, 0.0, x)


def _toward_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` (float32) truncated to a narrower dtype, as float32."""
    nearest = x.to(dtype)
    bits = nearest.view(INTEGER_DTYPE[dtype])
    return torch.where(nearest.float().abs() > x.abs(), (bits - 1).view(dtype), nearest).float()


def _of_alpha(*rows: Deviation[GemmParts]) -> tuple[Deviation[GemmParts], ...]:
    """Rows for products that have an α."""
    return tuple(replace(row, when=_has_alpha) for row in rows)


# ---- the table -------------------------------------------------------------------------------------------------------

EPILOGUES: tuple[Deviation[GemmParts], ...] = (
    # An addend that is left out comes first: with a small α, "α multiplies c" gives the same outputs.
    Deviation("c-ignored", "c is not added", EPILOGUE, _changed("c")),
    Deviation("bias-ignored", "the bias is not added", EPILOGUE, _changed("bias")),
    Deviation("c-and-bias-ignored", "neither c nor the bias is added", EPILOGUE, _without_addends),
    *_of_alpha(
        Deviation("alpha-flushed", "a subnormal α is taken to be 0", FACTOR, _flushed_factor),
        Deviation("alpha-order:{}", "α is {}", FACTOR, lambda order, parts: order(parts), ORDERS),
        Deviation("alpha-amax-through-fp16", "α is made of {} rounded to fp16", FACTOR, _rounded_amaxes,
                  {phrase: (sides, torch.float16) for phrase, sides in _AMAXES.items()}),
        Deviation("alpha-amax-through-bf16", "α is made of {} rounded to bf16", FACTOR, _rounded_amaxes,
                  {phrase: (sides, torch.bfloat16) for phrase, sides in _AMAXES.items()}),
        Deviation("alpha-missing", "α is left out", FACTOR, lambda parts: torch.ones_like(parts.factor)),
        Deviation("alpha-amax-twice", "α is made of the amaxes or scales of {} twice", FACTOR, _amax_of_one_operand,
                  {"a": "a", "b": "b"}),
        Deviation("alpha-twice", "α is applied twice", FACTOR, lambda parts: parts.factor * parts.factor),
        Deviation("alpha-inverted", "1/α is applied in place of α", FACTOR, lambda parts: divide(1.0, parts.factor)),
        Deviation("alpha-of-one-operand", "α holds the factor of {} alone", FACTOR, _single_decode_factor,
                  {"a": "a", "b": "b"}),
        Deviation("alpha-after-cast", "the sum is cast to the output's dtype before α multiplies it", EPILOGUE,
                  _alpha_after_cast),
        Deviation("alpha-times-c", "α multiplies {} too", EPILOGUE, _alpha_times_addends,
                  {"c and the bias": ("c", "bias"), "c": ("c",)}),
        Deviation("alpha-times-bias", "α multiplies {} too", EPILOGUE, _alpha_times_addends, {"the bias": ("bias",)}),
    ),
    # An α of 0 says more.
    Deviation("outputs-zero", "all outputs are 0", EPILOGUE, _zeros),
    Deviation("output-truncated", "outputs are truncated to the output's dtype, not rounded", EPILOGUE, _truncated),
    *in_turn(
        NARROW,
        Deviation("output-through-{}", "outputs are rounded to {} on the way", EPILOGUE, _output_rounded),
        Deviation("product-through-{}", "products are rounded to {} before c is added", EPILOGUE, _product_rounded),
    ),
    Deviation("output-saturated", "outputs too large for the output's dtype are its largest number", EPILOGUE,
              _saturated),
    Deviation("overflow-to-infinity", "outputs above the largest number are infinite, those that round to it included",
              EPILOGUE, _infinite_above_largest),
    Deviation("output-subnormals-flushed", "subnormal outputs are taken to be 0", EPILOGUE, _flushed_outputs),
    Deviation("c-rounded-first", "c is rounded to {} before it is added", EPILOGUE, _c_rounded, NARROW),
    Deviation("cast-before-c", "the product is cast to the output's dtype before c is added", EPILOGUE, _cast_before_c),
    Deviation("c-before-cast", "c is added before the cast of the product, not after it", EPILOGUE, _c_before_cast),
    Deviation("bias-after-cast", "the bias is added after the cast of the rest", EPILOGUE, _bias_after_cast),
    Deviation("bias-before-c", "the bias is added before c", EPILOGUE, _bias_before_c),
    Deviation("addends-first", "c and the bias are added to each other first", EPILOGUE, _addends_first),
    Deviation("bias-tail-dropped", "the bias is not added to the columns behind the last whole {}", EPILOGUE,
              _bias_without_tail, {str(width): width for width in (2, 4, 8, 16, 32, 64, 128)}),
    Deviation("bias-by-rows", "the bias is indexed by rows, not by columns", EPILOGUE, _bias_by_rows),
    Deviation("c-twice", "c is added twice", EPILOGUE, partial(_twice, "c")),
    Deviation("bias-twice", "the bias is added twice", EPILOGUE, partial(_twice, "bias")),
    Deviation("product-missing", "what is added to a product is there, and no product", EPILOGUE, _no_product),
    Deviation("c-of-first-row", "every row adds the first row of c", EPILOGUE, _first_row_of_c),
    Deviation("c-transposed", "c is read as if it were transposed", EPILOGUE, _transposed_c),
)  # fmt: skip
"""Wrong epilogues, for every product. The search rejects a deviation without effect on the output."""
