"""Epilogues that a wrong GEMM has in place of α·acc (+ c) (+ bias) and a cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from narrowgauge.harness.checks.ordinal import INTEGER
from narrowgauge.harness.diagnosis.gemm.gemm_parts import (
    Ends,
    Finish,
    GemmDeviation,
    GemmParts,
    added,
    cast,
    finish,
    ordered,
    plus,
    scaled,
)
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.quantize.scaling import divide, used_tensor_scale

Factor = Callable[[GemmParts], torch.Tensor | None]


def epilogue_deviations() -> Iterator[GemmDeviation]:
    """Of any product; those that make no difference to it explain nothing."""
    yield from _factors()
    yield _ending("alpha-after-cast", "the sum is cast to the output's dtype before α multiplies it", _after_cast)
    yield _ending("alpha-times-c", "α multiplies c and the bias too", _times_addends)
    yield _ending("output-truncated", "outputs are truncated to the output's dtype, not rounded", _truncated)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        yield _ending(f"output-through-{name}", f"outputs are rounded to {name} on the way", _through(dtype))
        yield _ending(
            f"product-through-{name}", f"products are rounded to {name} before c is added", _product_first(dtype)
        )
    yield _ending("output-saturated", "outputs too large for the output's dtype are its largest number", _limited)
    yield _ending("c-ignored", "c is not added", _with(c=None))
    yield _ending("bias-ignored", "the bias is not added", _with(bias=None))
    yield _ending("c-and-bias-ignored", "neither c nor the bias is added", _with(c=None, bias=None))
    yield _ending("c-rounded-first", "c is rounded to bf16 before it is added", _rounded_c(torch.bfloat16))
    yield _ending("c-rounded-first", "c is rounded to fp16 before it is added", _rounded_c(torch.float16))
    yield _ending("cast-before-c", "the product is cast to the output's dtype before c is added", _cast_before_c)
    yield _ending("c-before-cast", "c is added before the cast of the product, not after it", _one_cast)
    yield _ending("bias-after-cast", "the bias is added after the cast of the rest", _bias_after_cast)
    yield _ending("bias-before-c", "the bias is added before c", _bias_before_c)
    yield _ending("bias-by-rows", "the bias is indexed by rows, not by columns", _bias_by_rows)
    yield _ending("c-twice", "c is added twice", _twice_c)
    yield _ending("bias-twice", "the bias is added twice", _twice_bias)
    yield _ending("product-missing", "what is added to a product is there, and no product", _no_product)
    yield _ending("c-transposed", "c is read as if it were transposed", _transposed_c)


def _ending(cause: str, sentence: str, wrong: Finish) -> GemmDeviation:
    return GemmDeviation(cause, sentence, finish=wrong)


# ---- the factor ------------------------------------------------------------------------------------------------------


def _factors() -> Iterator[GemmDeviation]:
    for name, order in ORDERS.items():
        yield _of_factor(f"alpha-order:{name}", f"α is {name}", order)
    yield _of_factor("alpha-missing", "α is left out", lambda t: torch.ones_like(t.factor))
    yield _of_factor("alpha-amax-twice", "α is made of a's amax twice", _twice("a"))
    yield _of_factor("alpha-amax-twice", "α is made of b's amax twice", _twice("b"))
    yield _of_factor("alpha-twice", "α is applied twice", lambda t: t.factor * t.factor)
    yield _of_factor("alpha-inverted", "1/α is applied in place of α", lambda t: divide(1.0, t.factor))
    for side in "ab":
        yield _of_factor("alpha-of-one-operand", f"α holds the factor of {side} alone", _alone(side))


def _of_factor(cause: str, sentence: str, factor: Factor) -> GemmDeviation:
    def wrong(t: GemmParts, ends: Ends) -> list[Ends]:
        return finish(t, ends)

    def change(t: GemmParts) -> GemmParts | None:
        found = None if t.promotes or t.source.a.recipe.alpha == "1" else factor(t)
        return None if found is None else replace(t, factor=found)

    return GemmDeviation(cause, sentence, change, wrong)


def _pair(t: GemmParts) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """The amaxes of a and b, (M, 1) and (1, N) or (1, 1), and the constant that their product is divided by."""
    a, b = t.source.a, t.source.b
    if a.amax is None or b.amax is None or a.recipe.whole:
        return None
    return a.amax.unsqueeze(1), b.amax.unsqueeze(0), a.recipe.max_product * b.recipe.max_product


def _decode_factors(t: GemmParts) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the numbers of a and b are multiplied by when they are decoded: amax/2688, or the tensor's one scale."""
    a, b = t.source.a, t.source.b
    if a.recipe.whole:
        return a.scales, b.scales
    if a.amax is None or b.amax is None:
        return None
    left, right = a.amax.unsqueeze(1), b.amax.unsqueeze(0)
    return left / torch.full_like(left, a.recipe.max_product), right / torch.full_like(right, b.recipe.max_product)


def _amax_order(form: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Factor:
    def order(t: GemmParts) -> torch.Tensor | None:
        pair = _pair(t)
        if pair is None:
            return None
        left, right, constant = pair
        return form(left, right, torch.full((1, 1), constant, device=left.device))

    return order


def _of_decoded(t: GemmParts) -> torch.Tensor | None:
    factors = _decode_factors(t)
    return None if factors is None or t.source.a.recipe.whole else factors[0] * factors[1]


def _of_encode(t: GemmParts) -> torch.Tensor | None:
    a, b = t.source.a, t.source.b
    if "enc" not in a.recipe.element_scale or "enc" not in b.recipe.element_scale or a.recipe.whole:
        return None
    if a.tensor_scale is None and a.recipe.statistics != "float32":
        return None
    return divide(1.0, used_tensor_scale(a).unsqueeze(1) * used_tensor_scale(b).unsqueeze(0))


ORDERS: dict[str, Factor] = {
    "(a*b)/d": _amax_order(lambda a, b, d: a * b / d),
    "(b*a)*(1/d)": _amax_order(lambda a, b, d: a * b * divide(1.0, d)),
    "(a/d)*b": _amax_order(lambda a, b, d: a / d * b),
    "(b/d)*a": _amax_order(lambda a, b, d: b / d * a),
    "(a*(1/d))*b": _amax_order(lambda a, b, d: a * divide(1.0, d) * b),
    "(b*(1/d))*a": _amax_order(lambda a, b, d: b * divide(1.0, d) * a),
    "a_dec*b_dec": _of_decoded,
    "1/(a_enc*b_enc)": _of_encode,
    "float64": _amax_order(lambda a, b, d: (a.double() * b.double() / d.double()).float()),
}
"""Forms of α, a and b the amaxes, d the constant: each operation rounds to float32, but for the last."""


def _twice(side: str) -> Factor:
    def factor(t: GemmParts) -> torch.Tensor | None:
        a, b = t.source.a, t.source.b
        if (
            a.recipe.granularity == "row"
            or b.recipe.granularity == "row"
            or a.recipe.max_product != b.recipe.max_product
        ):
            return None
        one = a if side == "a" else b
        return alpha(one, one)

    return factor


def _alone(side: str) -> Factor:
    def factor(t: GemmParts) -> torch.Tensor | None:
        factors = _decode_factors(t)
        return None if factors is None else factors["ab".index(side)]

    return factor


def _after_cast(t: GemmParts, ends: Ends) -> list[Ends]:
    return [] if t.promotes else [cast(way, t.dtype) for way in added(t, cast(ends, t.dtype), t.factor)]


def _times_addends(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.promotes:
        return []
    return [cast(scaled(plus(plus(ends, t.c), t.bias), t.factor), t.dtype)]


# ---- the addends -----------------------------------------------------------------------------------------------------


def _with(**changes: None) -> Finish:
    def wrong(t: GemmParts, ends: Ends) -> list[Ends]:
        if all(getattr(t, name) is None for name in changes):
            return []
        return finish(replace(t, **changes), ends)  # type: ignore[arg-type]

    return wrong


def _rounded_c(dtype: torch.dtype) -> Finish:
    def wrong(t: GemmParts, ends: Ends) -> list[Ends]:
        return [] if t.c is None else finish(replace(t, c=t.c.to(dtype)), ends)

    return wrong


def _cast_before_c(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.c is None or t.promotes or t.dtype == torch.float32:
        return []
    y = cast(scaled(ends, t.factor), t.dtype)
    return [cast(plus(plus(y, t.c), t.bias), t.dtype), cast(plus(cast(plus(y, t.bias), t.dtype), t.c), t.dtype)]


def _one_cast(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.c is None or not t.promotes:
        return []
    return [cast(plus(plus(ends, t.bias), t.c), t.dtype), cast(plus(plus(ends, t.c), t.bias), t.dtype)]


def _bias_after_cast(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.bias is None:
        return []
    rest = finish(replace(t, bias=None), ends)
    return [cast(plus(way, t.bias), t.dtype) for way in rest]


def _bias_before_c(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.bias is None or t.c is None or t.promotes:
        return []
    return finish(replace(t, c=t.bias, bias=t.c), ends)


def _bias_by_rows(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.bias is None:
        return []
    source = t.source.bias
    assert source is not None
    rows = torch.arange(len(t.source.output), device=source.device) % len(source)
    return finish(replace(t, bias=source[rows].unsqueeze(1)[t.rows]), ends)


def _twice_c(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.c is None:
        return []
    return [cast(plus(way, t.c), t.dtype) for way in finish(t, ends)] + finish(replace(t, c=2 * t.c), ends)


def _twice_bias(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.bias is None:
        return []
    return [cast(plus(way, t.bias), t.dtype) for way in finish(t, ends)] + finish(replace(t, bias=2 * t.bias), ends)


def _no_product(t: GemmParts, ends: Ends) -> list[Ends]:
    nothing = torch.zeros_like(ends[0])
    return finish(t, (nothing, nothing))


def _transposed_c(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.source.c is None:
        return []
    c = t.source.c
    return finish(replace(t, c=c.T.reshape(c.shape)[t.rows][:, t.columns]), ends)


# ---- the cast --------------------------------------------------------------------------------------------------------


def _wide(t: GemmParts, ends: Ends) -> list[Ends]:
    """What the last cast is given."""
    if t.promotes:
        y = plus(ends, t.bias)
        return [y if t.c is None else plus(cast(y, t.dtype), t.c)]
    return added(t, ends, t.factor)


def _through(dtype: torch.dtype) -> Finish:
    def wrong(t: GemmParts, ends: Ends) -> list[Ends]:
        return [] if t.dtype == dtype else [cast(cast(way, dtype), t.dtype) for way in _wide(t, ends)]

    return wrong


def _product_first(dtype: torch.dtype) -> Finish:
    def wrong(t: GemmParts, ends: Ends) -> list[Ends]:
        if t.c is None or t.promotes or t.dtype == dtype:
            return []
        return [cast(plus(plus(cast(scaled(ends, t.factor), dtype), t.c), t.bias), t.dtype)]

    return wrong


def _limited(t: GemmParts, ends: Ends) -> list[Ends]:
    most = torch.finfo(t.dtype).max
    return [cast((low.clamp(-most, most), high.clamp(-most, most)), t.dtype) for low, high in _wide(t, ends)]


def _truncated(t: GemmParts, ends: Ends) -> list[Ends]:
    if t.dtype == torch.float32:
        return []
    return [ordered(*(_toward_zero(end, t.dtype) for end in way)) for way in _wide(t, ends)]


def _toward_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The number of a narrower dtype that is next to `x`, float32, and not larger in magnitude."""
    near = x.to(dtype)
    bits = near.view(INTEGER[dtype])
    return torch.where(near.float().abs() > x.abs(), (bits - 1).view(dtype), near).float()
