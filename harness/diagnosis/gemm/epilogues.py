"""Mistakes in the epilogue of a GEMM: α·acc (+ c) (+ bias) and the cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.ordinal import INTEGER_DTYPE
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    Ends,
    Epilogue,
    GemmDeviation,
    GemmParts,
    add_addends,
    add_to_ends,
    cast_ends,
    correct_epilogue,
    ordered_ends,
    scale_ends,
)
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.quantize.scaling import divide, used_tensor_scale

Factor = Callable[[GemmParts], torch.Tensor | None]
"""Function to a factor in place of α, float32. Its result is None if the factor does not apply to the product."""


_VECTORS = (2, 4, 8, 16, 32, 64, 128)
"""Columns that a kernel adds a bias to at once."""


def epilogue_deviations() -> Iterator[GemmDeviation]:
    """Deviations of the epilogue, for every product. The search rejects a deviation without effect on the output.

    An addend that is left out comes first: with a small α, "α multiplies c" gives the same outputs.
    """
    yield _epilogue_deviation("c-ignored", "c is not added", _without_addends(c=None))
    yield _epilogue_deviation("bias-ignored", "the bias is not added", _without_addends(bias=None))
    yield _epilogue_deviation(
        "c-and-bias-ignored", "neither c nor the bias is added", _without_addends(c=None, bias=None)
    )
    yield from _factor_deviations()
    yield _epilogue_deviation(
        "alpha-after-cast", "the sum is cast to the output's dtype before α multiplies it", _alpha_after_cast
    )
    for cause, phrase, names in (
        ("alpha-times-c", "c and the bias", ("c", "bias")), ("alpha-times-c", "c", ("c",)),
        ("alpha-times-bias", "the bias", ("bias",)),
    ):  # fmt: skip
        yield _epilogue_deviation(cause, f"α multiplies {phrase} too", _alpha_times_addends(names))
    yield _epilogue_deviation(
        "output-truncated", "outputs are truncated to the output's dtype, not rounded", _truncated
    )
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield _epilogue_deviation(
            f"output-through-{name}", f"outputs are rounded to {name} on the way", _output_rounded_to(dtype)
        )
        yield _epilogue_deviation(
            f"product-through-{name}", f"products are rounded to {name} before c is added", _product_rounded_to(dtype)
        )
    yield _epilogue_deviation(
        "output-saturated", "outputs too large for the output's dtype are its largest number", _saturated
    )
    yield _epilogue_deviation(
        "overflow-to-infinity", "outputs above the largest number are infinite, those that round to it included",
        _infinite_above_largest,
    )  # fmt: skip
    yield _epilogue_deviation("output-subnormals-flushed", "subnormal outputs are taken to be 0", _flushed_outputs)
    yield _epilogue_deviation(
        "c-rounded-first", "c is rounded to bf16 before it is added", _c_rounded_to(torch.bfloat16)
    )
    yield _epilogue_deviation(
        "c-rounded-first", "c is rounded to fp16 before it is added", _c_rounded_to(torch.float16)
    )
    yield _epilogue_deviation(
        "cast-before-c", "the product is cast to the output's dtype before c is added", _cast_before_c
    )
    yield _epilogue_deviation(
        "c-before-cast", "c is added before the cast of the product, not after it", _c_before_cast
    )
    yield _epilogue_deviation("bias-after-cast", "the bias is added after the cast of the rest", _bias_after_cast)
    yield _epilogue_deviation("bias-before-c", "the bias is added before c", _bias_before_c)
    yield _epilogue_deviation("addends-first", "c and the bias are added to each other first", _addends_first)
    for width in _VECTORS:
        yield _epilogue_deviation(
            "bias-tail-dropped", f"the bias is not added to the columns behind the last whole {width}",
            _bias_without_tail(width),
        )  # fmt: skip
    yield _epilogue_deviation("bias-by-rows", "the bias is indexed by rows, not by columns", _bias_by_rows)
    yield _epilogue_deviation("c-twice", "c is added twice", _c_twice)
    yield _epilogue_deviation("bias-twice", "the bias is added twice", _bias_twice)
    yield _epilogue_deviation("product-missing", "what is added to a product is there, and no product", _no_product)
    yield _epilogue_deviation("c-of-first-row", "every row adds the first row of c", _first_row_of_c)
    yield _epilogue_deviation("c-transposed", "c is read as if it were transposed", _transposed_c)


def _epilogue_deviation(cause: str, sentence: str, epilogue: Epilogue) -> GemmDeviation:
    return GemmDeviation(cause, sentence, epilogue=epilogue)


# ---- the factor ------------------------------------------------------------------------------------------------------


def _factor_deviations() -> Iterator[GemmDeviation]:
    yield _factor_deviation("alpha-flushed", "a subnormal α is taken to be 0", _flushed_factor)
    for name, order in ORDERS.items():
        yield _factor_deviation(f"alpha-order:{name}", f"α is {name}", order)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        for sides, phrase in (("ab", "both amaxes"), ("a", "a's amax"), ("b", "b's amax")):
            yield _factor_deviation(
                f"alpha-amax-through-{name}", f"α is made of {phrase} rounded to {name}", _rounded_amaxes(sides, dtype)
            )
    yield _factor_deviation("alpha-missing", "α is left out", lambda parts: torch.ones_like(parts.factor))
    yield _factor_deviation("alpha-amax-twice", "α is made of a's amax twice", _amax_of_one_operand("a"))
    yield _factor_deviation("alpha-amax-twice", "α is made of b's amax twice", _amax_of_one_operand("b"))
    yield _factor_deviation("alpha-twice", "α is applied twice", lambda parts: parts.factor * parts.factor)
    yield _factor_deviation("alpha-inverted", "1/α is applied in place of α", lambda parts: divide(1.0, parts.factor))
    for side in "ab":
        yield _factor_deviation(
            "alpha-of-one-operand", f"α holds the factor of {side} alone", _single_decode_factor(side)
        )


def _flushed_factor(parts: GemmParts) -> torch.Tensor | None:
    subnormal = parts.factor.abs() < torch.finfo(torch.float32).smallest_normal
    return parts.factor.masked_fill(subnormal, 0) if bool((subnormal & (parts.factor != 0)).any()) else None


def _factor_deviation(cause: str, sentence: str, factor_function: Factor) -> GemmDeviation:
    def change(parts: GemmParts) -> GemmParts | None:
        without = parts.promotes or parts.source.a.recipe.alpha == "1" or parts.tensor_factors is not None
        factor = None if without else factor_function(parts)
        return None if factor is None else replace(parts, factor=factor)

    return GemmDeviation(cause, sentence, change)


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


def _rounded_amaxes(sides: str, dtype: torch.dtype) -> Factor:
    def factor_function(parts: GemmParts) -> torch.Tensor | None:
        if _amax_pair(parts) is None:
            return None
        operands = [getattr(parts.source, name) for name in "ab"]
        a, b = (
            replace(q, amax=q.amax.to(dtype).float()) if name in sides else q
            for name, q in zip("ab", operands, strict=True)
        )
        return alpha(a, b)

    return factor_function


def _amax_of_one_operand(side: str) -> Factor:
    def factor_function(parts: GemmParts) -> torch.Tensor | None:
        a, b = parts.source.a, parts.source.b
        if (
            a.recipe.granularity == "row"
            or b.recipe.granularity == "row"
            or a.recipe.max_product != b.recipe.max_product
        ):
            return None
        operand = a if side == "a" else b
        return alpha(operand, operand)

    return factor_function


def _single_decode_factor(side: str) -> Factor:
    def factor_function(parts: GemmParts) -> torch.Tensor | None:
        factors = _decode_factors(parts)
        return None if factors is None else factors["ab".index(side)]

    return factor_function


def _alpha_after_cast(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.promotes:
        return []
    candidates = add_addends(parts, cast_ends(ends, parts.dtype), parts.factor)
    return [cast_ends(candidate, parts.dtype) for candidate in candidates]


def _alpha_times_addends(names: Sequence[str]) -> Epilogue:
    """α multiplies the named addends: in the sum with the accumulator, or each alone."""

    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        addends = [getattr(parts, name) for name in names]
        if parts.promotes or any(addend is None for addend in addends):
            return []
        rest = replace(parts, **dict.fromkeys(names))  # type: ignore[arg-type]
        together, alone = ends, scale_ends(ends, parts.factor)
        for addend in addends:
            together, alone = add_to_ends(together, addend), add_to_ends(alone, parts.factor * addend.float())
        scaled = replace(rest, factor=torch.ones_like(parts.factor))
        return [*correct_epilogue(rest, together), *correct_epilogue(scaled, alone)]

    return epilogue


# ---- the addends -----------------------------------------------------------------------------------------------------


def _without_addends(**changes: None) -> Epilogue:
    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        if any(getattr(parts, name) is None for name in changes):
            return []
        return correct_epilogue(replace(parts, **changes), ends)  # type: ignore[arg-type]

    return epilogue


def _c_rounded_to(dtype: torch.dtype) -> Epilogue:
    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        return [] if parts.c is None else correct_epilogue(replace(parts, c=parts.c.to(dtype)), ends)

    return epilogue


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


def _bias_without_tail(width: int) -> Epilogue:
    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        columns = parts.source.output.shape[1]
        if parts.bias is None or columns % width == 0:
            return []
        return correct_epilogue(replace(parts, bias=parts.bias.masked_fill(_tail(parts, width), 0)), ends)

    return epilogue


def _tail(parts: GemmParts, width: int) -> torch.Tensor:
    return parts.columns >= parts.source.output.shape[1] // width * width


def _bias_by_rows(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None:
        return []
    bias = parts.source.bias
    assert bias is not None
    rows = torch.arange(len(parts.source.output), device=bias.device) % len(bias)
    return correct_epilogue(replace(parts, bias=bias[rows].unsqueeze(1)[parts.rows]), ends)


def _c_twice(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.c is None:
        return []
    added_again = [cast_ends(add_to_ends(once, parts.c), parts.dtype) for once in correct_epilogue(parts, ends)]
    return added_again + correct_epilogue(replace(parts, c=2 * parts.c), ends)


def _bias_twice(parts: GemmParts, ends: Ends) -> list[Ends]:
    if parts.bias is None:
        return []
    added_again = [cast_ends(add_to_ends(once, parts.bias), parts.dtype) for once in correct_epilogue(parts, ends)]
    return added_again + correct_epilogue(replace(parts, bias=2 * parts.bias), ends)


def _no_product(parts: GemmParts, ends: Ends) -> list[Ends]:
    zeros = torch.zeros_like(ends[0])
    return correct_epilogue(parts, (zeros, zeros))


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


def _output_rounded_to(dtype: torch.dtype) -> Epilogue:
    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        if parts.dtype == dtype:
            return []
        return [cast_ends(cast_ends(y, dtype), parts.dtype) for y in before_last_cast(parts, ends)]

    return epilogue


def _product_rounded_to(dtype: torch.dtype) -> Epilogue:
    def epilogue(parts: GemmParts, ends: Ends) -> list[Ends]:
        if parts.c is None or parts.promotes or parts.dtype == dtype:
            return []
        product = cast_ends(scale_ends(ends, parts.factor), dtype)
        return [cast_ends(add_to_ends(add_to_ends(product, parts.c), parts.bias), parts.dtype)]

    return epilogue


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
