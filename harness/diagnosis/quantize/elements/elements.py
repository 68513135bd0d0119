"""What kernels do to the elements of a block in place of what their recipe says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Hook, QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.elements import grids
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.harness.diagnosis.quantize.scales.amaxes import without_tail
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import elements, swap_nibbles
from narrowgauge.reference.quantize.scaling import divide, per_row
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe

CODES = frozenset({"codes"})
_OF_STATISTICS = frozenset({"amax", "scales", "codes"})


@lru_cache(maxsize=256)
def element_deviations(recipe: Recipe) -> tuple[QuantizeDeviation, ...]:
    """Deviations of a recipe's codes, the most plausible first; those that draw at random are in `drawing`."""
    return (*_rounded(recipe), *_special(recipe), *_scaled(recipe))


def _of(cause: str, sentence: str, hook: Hook) -> QuantizeDeviation:
    odd = cause.startswith("element-order") or "-through-" in cause
    return QuantizeDeviation(cause, f"elements: {sentence}", CODES, hooks={"codes": hook}, odd=odd)


def _rounding(rounding: grids.Rounding) -> Hook:
    """The recipe's codes, but for the rounding."""

    def codes(run: Run) -> torch.Tensor:
        return run.packed(_finished(rounding(run.scaled, run.recipe.element), run.scaled, run.recipe))

    return codes


def _finished(codes: torch.Tensor, scaled: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Codes with the recipe's own zeros and NaN."""
    sign = recipe.element.sign_code
    if recipe.negative_zero == "rounded":
        codes = codes.masked_fill(scaled == 0, 0)
    elif recipe.negative_zero == "never":
        codes = codes.masked_fill(codes == sign, 0)
    return codes if recipe.element is not E2M1 else codes.masked_fill(scaled.isnan(), recipe.nan_code)


def _rounded(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    if recipe.rounding != "stochastic":
        yield _of("ties-away", "ties round away from zero", _rounding(grids.ties_away))
        yield _of("ties-toward-zero", "ties round toward zero", _rounding(grids.ties_toward_zero))
        yield _of("truncated", "rounded toward zero, not to the nearest", _rounding(grids.truncated))
        yield _of("rounded-up", "rounded away from zero, not to the nearest", _rounding(grids.rounded_up))
        yield _of("rounded-toward-infinity", "rounded toward +infinity", _rounding(grids.toward_infinity))
        yield _of("rounded-toward-minus-infinity", "rounded toward -infinity", _rounding(grids.toward_minus_infinity))
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            yield _of(
                f"element-through-{name}", f"scaled elements are rounded to {name} first",
                _rounding(grids.through(dtype)),
            )  # fmt: skip
    if recipe.rounding == "stochastic":
        return
    if recipe.element.mantissa_bits > 1:
        yield _of(
            "top-binade-saturated", "the largest number in place of all that have its exponent",
            _rounding(grids.top_binade_saturated),
        )  # fmt: skip
    if recipe.element.nan_code is not None:
        for rounding, words in ((grids.overflow_to_nan, ""), (grids.unsigned_overflow, ", without a sign,")):
            yield _of("overflow-to-nan", f"NaN{words} where they overflow", _rounding(rounding))
    if recipe.element.inf_code is not None:
        yield _of("overflow-to-infinity", "infinity where they overflow", _rounding(grids.unsaturated))


def _special(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    sign = recipe.element.sign_code

    def after(change: Callable[[torch.Tensor, Run], torch.Tensor]) -> Hook:
        return lambda run: run.packed(change(run.coded(run.scaled), run))

    yield _of("negative-zero-lost", "-0 is stored as 0", after(lambda codes, run: codes.masked_fill(codes == sign, 0)))
    if recipe.element.bits == 4:
        yield _of(
            "nibbles-swapped",
            "the two of a byte are exchanged",
            lambda run: swap_nibbles(Run(run.evidence).stage("codes")),
        )
    yield _of(
        "negative-zero-lost", "-0 is stored as 0, but not of negative numbers that round to it",
        after(lambda codes, run: codes.masked_fill(run.scaled == 0, 0)),
    )  # fmt: skip
    yield _of(
        "negative-zero-lost", "negative numbers that round to zero lose their sign",
        after(lambda codes, run: codes.masked_fill((codes == sign) & (run.scaled != 0), 0)),
    )  # fmt: skip
    if recipe.negative_zero != "keep":
        yield _of(
            "negative-zero-kept", "-0 keeps its sign",
            after(lambda codes, run: torch.where(codes == 0, run.scaled.signbit().byte() * sign, codes)),
        )  # fmt: skip
    for zero, words in ((sign, ""), (0, ", without its sign")):
        yield _of(
            "subnormal-codes-flushed", f"0{words} in place of subnormal codes",
            after(partial(_flushed, recipe.element, zero)),
        )  # fmt: skip
    if recipe.rounding != "stochastic":
        yield _of(
            "subnormal-codes-flushed", "flushed to 0 below the least normal number", _rounding(grids.flushed_before)
        )
    yield _of("signs-lost", "signs are lost", after(lambda codes, run: codes & (sign - 1)))
    yield _of("nan-keeps-sign", "the code of a NaN has the sign of the element", after(
        lambda codes, run: torch.where(run.scaled.isnan(), codes | run.x.signbit().byte() * sign, codes)
    ))  # fmt: skip
    if recipe.element.bits == 4:
        yield _of("padding-not-zeroed", "the nibble behind an odd number of columns is not 0", _padded)
    yield _of(
        "zero-block-nan", "NaN in blocks whose scale is 0",
        lambda run: run.packed(run.coded(run.scaled).masked_fill(_per_element(run, run.blocks == 0), recipe.nan_code)),
    )  # fmt: skip


def _padded(run: Run) -> torch.Tensor:
    """The right codes, and behind them whatever the kernel left there."""
    codes, shown = Run(run.evidence).stage("codes"), run.evidence.shown["codes"]
    if run.x.shape[1] % 2 == 0:
        raise ValueError("an even number of columns fills all bytes")
    behind = 0xF0 if run.recipe.packing == "low-first" else 0xF
    codes[:, -1] = codes[:, -1] & (0xFF ^ behind) | shown[:, -1] & behind
    return codes


def _per_element(run: Run, blocks: torch.Tensor) -> torch.Tensor:
    """A bool for each element from one for each stored scale."""
    rows = per_row(blocks, run.recipe, run.x.shape[0])
    width = 1 if run.recipe.whole else run.recipe.block[1]
    wide = rows.expand(-1, run.x.shape[1]) if run.recipe.whole else rows.repeat_interleave(width, 1)
    return wide[:, : run.x.shape[1]]


def _scaled(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Other inputs and other factors."""

    def factors(change: Callable[[Run], torch.Tensor]) -> Hook:
        return lambda run: run.packed(run.coded(run.scaled_by(change(run))))

    def wide(number: Callable[[Run], torch.Tensor]) -> Hook:
        """Of a number for each stored scale."""
        return factors(lambda run: per_row(number(run), run.recipe, run.x.shape[0]))

    def whole(values: Callable[[Run, torch.Tensor, torch.Tensor], torch.Tensor]) -> Hook:
        """Of x and the stored scale of each element, two float32 matrices (M, K)."""

        def codes(run: Run) -> torch.Tensor:
            stored = per_row(_decoded(run), run.recipe, run.x.shape[0])
            columns = run.x.shape[1]
            spread = stored if run.recipe.whole else stored.repeat_interleave(run.recipe.block[1], 1)[:, :columns]
            return run.packed(run.coded(values(run, run.x.float(), spread)))

        return codes

    if recipe.element_scale == "x*min(1/(s*(1/enc)),FLT_MAX)":
        yield _of(
            "factor-not-clamped", "the factor is not limited to the largest number, and is infinite for a scale of 0",
            wide(lambda run: divide(1.0, _decoded(run) * divide(1.0, _encode(run)))),
        )  # fmt: skip
    if recipe.tensor_scale == "max/amax" and recipe.scale is E4M3:
        for limit, words in ((_LARGEST, ""), (torch.inf, ", not limited to the largest number")):
            for expression, number in (
                ("x*(enc/s)", lambda run: _encode(run) / _decoded(run)),
                ("x*((1/s)*enc)", lambda run: divide(1.0, _decoded(run)) * _encode(run)),
            ):
                yield _of(
                    f"element-order:{expression}", f"scaled as {expression}{words}",
                    wide(partial(_limited, number, limit)),
                )  # fmt: skip
        yield _of(
            "element-order:x/(s*(1/enc))", "scaled as x/(s*(1/enc))",
            whole(lambda run, x, s: torch.where(x == 0, x, x / (s * divide(1.0, _encode(run))))),
        )  # fmt: skip
        yield _of(
            "subnormal-factors-flushed", "1/enc and s*(1/enc) are flushed to 0 where they are subnormal",
            wide(lambda run: divide(1.0, flush(_decoded(run) * flush(divide(1.0, _encode(run))))).clamp(max=_LARGEST)),
        )  # fmt: skip
    if recipe.scale is FP32:
        yield _of("element-order:x*(1/s)", "scaled as x*(1/s)", wide(lambda run: divide(1.0, run.scales)))
        yield _of("element-order:x/s", "scaled as x/s", whole(lambda run, x, s: torch.where(x == 0, x, x / s)))
    if recipe.scale is E8M0:
        yield _of(
            "subnormal-factors-flushed", "factors are flushed to 0 where they are subnormal, as 2^-127 is, of code 0",
            factors(lambda run: flush(run.factors)),
        )  # fmt: skip
    for step, words in ((1, "larger"), (-1, "smaller")):
        yield QuantizeDeviation(
            "element-factor-ulp", f"elements: the factor is one step of float32 {words}", CODES, odd=True,
            hooks={"codes": factors(partial(_factors_moved, step))},
        )  # fmt: skip
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _of(
            f"factor-through-{name}", f"the factor is rounded to {name}",
            factors(partial(_factors_through, dtype)),
        )  # fmt: skip
        yield QuantizeDeviation(
            f"input-through-{name}", f"inputs are rounded to {name}", _OF_STATISTICS,
            hooks={"x": partial(_inputs_through, dtype)}, odd=True,
        )  # fmt: skip
        yield _of(
            f"input-through-{name}", f"rounded to {name} before they are scaled",
            partial(_scaled_through, dtype),
        )  # fmt: skip
    yield QuantizeDeviation(
        "inputs-flushed", "inputs are flushed to 0 where they are subnormal", _OF_STATISTICS,
        hooks={"x": lambda run: flush(run.evidence.subject.x)},
    )  # fmt: skip
    yield _of(
        "inputs-flushed", "flushed to 0 where they are subnormal, before they are scaled",
        lambda run: run.packed(run.coded(run.scaled_by(run.factors, flush(run.x)))),
    )  # fmt: skip
    if not recipe.whole:
        yield QuantizeDeviation(
            "tail-dropped", "columns behind the last whole block are taken for 0", frozenset({"scales", "codes"}),
            hooks={"x": lambda run: without_tail(run.recipe.block[1], run.evidence.subject.x)},
            lenient=frozenset({"amax"}),
        )  # fmt: skip
    if recipe.tensor_scale in ("max/amax", "(1/amax)*max"):
        yield _of(
            "tensor-scale-ignored", "scaled without the tensor's scale",
            whole(lambda run, x, s: torch.where(x == 0, x, x / s) if not run.recipe.whole else x),
        )  # fmt: skip


_LARGEST = torch.finfo(torch.float32).max


def _limited(number: Callable[[Run], torch.Tensor], limit: float, run: Run) -> torch.Tensor:
    return number(run).clamp(max=limit)


def _flushed(fmt: Format, zero: int, codes: torch.Tensor, _: Run) -> torch.Tensor:
    return torch.where(codes & (fmt.sign_code - 1) < 1 << fmt.mantissa_bits, codes & zero, codes)


def _factors_moved(step: int, run: Run) -> torch.Tensor:
    moved = (run.factors.view(torch.int32) + step).view(torch.float32)
    return torch.where((run.factors > 0) & (run.factors < _LARGEST), moved, run.factors)


def _factors_through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return run.factors.to(dtype).float().clamp(max=_LARGEST)


def _inputs_through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return run.evidence.subject.x.to(dtype).to(run.evidence.subject.x.dtype)


def _scaled_through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return run.packed(run.coded(run.scaled_by(run.factors, run.x.to(dtype).float())))


def _decoded(run: Run) -> torch.Tensor:
    return run.scales if run.recipe.scale is FP32 else decode(run.scales, run.recipe.scale)


def _encode(run: Run) -> torch.Tensor:
    assert run.used is not None
    return run.used.unsqueeze(1)


def flush(x: torch.Tensor) -> torch.Tensor:
    """`x` with a zero of the same sign where it is subnormal."""
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, torch.zeros_like(x).copysign(x), x)


def constant_nan(found: Sequence[Evidence]) -> Iterator[QuantizeDeviation]:
    """Where elements that are NaN before they are rounded have one code, which is another than the recipe's."""
    codes = []
    for each in found:
        run = Run(each)
        shown = elements(each.shown["codes"], each.subject.matrix.shape[1], each.subject.recipe)
        codes.append(shown[run.scaled.isnan()])
    given = torch.unique(torch.cat(codes))
    if len(given) != 1:
        return
    code = int(given)

    def coded(run: Run) -> torch.Tensor:
        return run.packed(run.coded(run.scaled).masked_fill(run.scaled.isnan(), code))

    yield _of(f"nan-code:{code}", f"the code of a NaN is {code}", coded)
