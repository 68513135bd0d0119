"""Hypotheses for quantized matrices: a kernel with a single known deviation is told by its name."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.diagnosis.cause_names import is_cause
from narrowgauge.harness.diagnosis.quantize.explain_quantize import MAX_EXPLANATIONS
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.blocks import block_amax
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.philox import philox
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.hadamard import signs
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.reference.quantize.scaling import element_factors, per_row, tensor_scale, unrounded_scales
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax, stored_scales
from narrowgauge.spec.formats import E2M1, E4M3, E5M2
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import TILED
from tests.harness.wrong_steps import (
    STEPS,
    by_lane,
    bytes_of,
    case,
    causes,
    cut_down,
    exchanged,
    grid,
    nearest_by_distance,
    record_of,
    right_amax,
    rotated,
    signed_blocks,
    ties_away,
    truncated_to,
    unclamped,
    wrong,
    wrong_amax,
    wrong_tensor,
)

pytestmark = pytest.mark.usefixtures("history")


def by_code(change):
    return lambda s: change(element_codes(s.scaled, s.recipe, s.bytes), s)


def upward(values, fmt):
    """Codes rounded away from zero, at most the largest number."""
    points = grid(fmt).double()
    code = (values.abs().double().unsqueeze(-1) > points).sum(-1).clamp(max=len(points) - 1)
    return code.to(torch.uint8) | values.signbit().byte() * fmt.sign_code


def without_carry(values, fmt):
    """Codes rounded to nearest. Where the exponent of the code above is larger, the rounded code has the lower one."""
    dtype = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}[fmt]
    nearest = values.clamp(-fmt.max, fmt.max).to(dtype).view(torch.uint8)
    low, high = (codes & 0x7F for codes in (cut_down(values, fmt), nearest))
    carried = (low >> fmt.mantissa_bits != high >> fmt.mantissa_bits) & (low >> fmt.mantissa_bits > 0)
    return torch.where(carried, nearest - (1 << fmt.mantissa_bits), nearest)


def toward(sign):
    """Codes rounded toward +infinity for sign 1, toward -infinity for sign -1."""
    return {"codes": lambda s: torch.where(s.scaled * sign > 0, upward(s.scaled, E2M1), cut_down(s.scaled, E2M1))}


def flushed(s):
    return torch.where(s.matrix.abs() < 2.0**-126, 0 * s.matrix, s.matrix)


def without_tail(s):
    """Zeros in the columns behind the last whole block."""
    width = s.recipe.block[1]
    whole = s.matrix.shape[1] // width * width
    return torch.where(torch.arange(s.matrix.shape[1]) < whole, s.matrix, torch.zeros_like(s.matrix))


def zero_for_zero(s):
    return torch.where(decode(s.scales, E4M3) == 0, 0.0, unclamped(s))


def own_amax(s):
    """The amax of the matrix before a step changed the matrix."""
    return s.matrix.abs().float().amax().view(1)


def right_scales(s):
    return stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe)


def right_tensor_scale(s):
    return tensor_scale(s.amax, s.recipe, s.x.dtype)


def right_factors(s):
    return per_row(element_factors(s.scales, s.tensor, s.recipe, s.x.dtype, s.blocks), s.recipe, len(s.matrix))


ELEMENTS = [
    ("rows-rolled", case("nvfp4"), {"x": lambda s: s.matrix.roll(-1, 0), "amax": right_amax}),
    ("rows-rolled", case("mxfp8-e4m3"), {"x": lambda s: s.matrix.roll(1, 0)}),
    ("input-transposed", case("nvfp4", shape=(64, 64)), {"x": lambda s: s.matrix.T.contiguous()}),
    ("input-transposed", case("mxfp8-e5m2"), {"x": lambda s: s.matrix.T.reshape(s.matrix.shape)}),
    ("input-through-bf16", case("nvfp4", dtype="fp32"), {"x": lambda s: s.matrix.bfloat16().float(), "amax": own_amax}),
    ("input-truncated:bf16", case("nvfp4", "e4m3-ties", dtype="fp32"), {
        "x": lambda s: truncated_to(16)(s.matrix), "amax": right_amax
    }),
    ("input-truncated:bf16", case("mxfp8-e4m3", dtype="fp32"), {"x": lambda s: truncated_to(16)(s.matrix)}),
    ("input-truncated:tf32", case("nvfp4", "uniform", dtype="fp32", shape=(128, 256)), {
        "x": lambda s: truncated_to(19)(s.matrix)
    }),
    *((f"amax-truncated:{name}", case("nvfp4", "uniform", dtype="fp32"), {
        "amax": lambda s, bits=bits: truncated_to(bits)(right_amax(s))
    }) for name, bits in (("tf32", 19), ("bf16", 16))),
    ("nan-read-as-number", case("mxfp8-e4m3", "nan"), {
        "codes": by_code(lambda c, s: torch.where(s.x.isnan(), s.x.signbit() * 128 + 126, c).to(torch.uint8))
    }),
    ("scales-of-next-block", case("nvfp4"), {"factors": lambda s: right_factors(s).roll(-1, 1)}),
    ("scales-of-previous-block", case("mxfp8-e4m3"), {"factors": lambda s: right_factors(s).roll(1, 1)}),
    ("ties-away", case("nvfp4", "e2m1-ties"), {"codes": lambda s: nearest_by_distance(s.scaled, E2M1, tie_up=True)}),
    ("ties-away", case("mxfp8-e4m3", "ties"), {"codes": lambda s: nearest_by_distance(s.scaled, E4M3, tie_up=True)}),
    ("ties-toward-zero", case("fp8-current-e5m2", "ties"), {
        "codes": lambda s: nearest_by_distance(s.scaled, E5M2, tie_up=False)
    }),
    ("ties-toward-zero", case("nvfp4-4over6-448-mae", "e2m1-ties"), {
        "codes": lambda s: nearest_by_distance(s.scaled, E2M1, tie_up=False)
    }),
    ("truncated", case("nvfp4-2d"), {"codes": lambda s: cut_down(s.scaled, E2M1)}),
    ("truncated", case("nvfp4-sr"), {"codes": lambda s: cut_down(s.scaled, E2M1)}),
    ("truncated", case("fp8-block-1x128", shape=(8, 256)), {"codes": lambda s: cut_down(s.scaled, E4M3)}),
    ("element-through-bf16", case("nvfp4", "near-ties", dtype="fp32"), {
        "codes": lambda s: encode(s.scaled.bfloat16().float(), E2M1)
    }),
    ("element-through-fp16", case("mxfp8-e5m2", dtype="fp32"), {
        "codes": lambda s: encode(s.scaled.half().float(), E5M2)
    }),
    ("element-order:x*(enc/s)", case("nvfp4", "near-ties", dtype="fp32", shape=(128, 128)), {
        "factors": lambda s: s.tensor / decode(s.scales, E4M3)
    }),
    ("element-order:(x*enc)/s", case("nvfp4", "near-ties", dtype="fp32", shape=(128, 128)), {
        "scaled": lambda s: s.x * s.tensor / decode(s.scales, E4M3).repeat_interleave(16, 1)
    }),
    ("element-order:x*(1/s)", case("fp8-block-1x128-e4m3-fp32", "near-ties", dtype="fp32"), {
        "factors": lambda s: torch.ones_like(s.scales) / s.scales
    }),
    ("negative-zero-lost", case("nvfp4"), {"codes": by_code(lambda codes, s: codes.masked_fill(codes == 8, 0))}),
    ("negative-zero-lost", case("mxfp8-e4m3", "negative-zeros"), {
        "codes": by_code(lambda codes, s: codes.masked_fill(codes == 0x80, 0))
    }),
    ("negative-zero-kept", case("nvfp4@breccia", "negative-zeros"), {
        "codes": by_code(lambda c, s: torch.where(c == 0, s.scaled.signbit().byte() * 8, c))
    }),
    *(("carry-lost", case(recipe), {"codes": lambda s, fmt=fmt: without_carry(s.scaled, fmt)})
      for recipe, fmt in (("mxfp8-e4m3", E4M3), ("fp8-current-e5m2", E5M2))),
    ("rounded-up", case("nvfp4"), {"codes": lambda s: upward(s.scaled, E2M1)}),
    ("rounded-toward-infinity", case("nvfp4"), toward(1)),
    ("rounded-toward-minus-infinity", case("nvfp4"), toward(-1)),
    ("factor-through-bf16", case("nvfp4", "near-ties", dtype="fp32", shape=(128, 128)), {
        "factors": lambda s: right_factors(s).bfloat16().float()
    }),
    ("nibbles-swapped", case("nvfp4"), {"stored": exchanged}),
    ("nibbles-swapped", case("nvfp4-4over6-256-mse"), {"stored": exchanged}),
    ("overflow-to-nan", case("mxfp8-e4m3@ocp"), {"codes": lambda s: encode(s.scaled, E4M3, saturate=False)}),
    ("overflow-to-nan", case("fp8-delayed-e5m2", "normal", shape=(64, 116)), {
        "codes": by_code(lambda codes, s: torch.where(s.scaled.abs() >= 61440, codes & 0x80 | 0x7F, codes))
    }),
    ("overflow-to-infinity", case("fp8-delayed-e5m2", "normal", shape=(64, 116)), {
        "codes": lambda s: encode(s.scaled, E5M2, saturate=False)
    }),
    ("subnormal-codes-flushed", case("nvfp4"), {
        "codes": by_code(lambda codes, s: torch.where(codes & 7 == 1, codes & 8, codes))
    }),
    ("subnormal-codes-flushed", case("mxfp8-e4m3", "ties"), {
        "codes": by_code(lambda codes, s: torch.where(codes & 0x7F < 8, codes & 0x80, codes))
    }),
    ("inputs-flushed", case("nvfp4", "subnormal"), {"x": flushed}),
    ("inputs-flushed", case("mxfp4", "subnormal"), {"x": flushed}),
    ("factor-not-clamped", case("nvfp4", "zeros"), {"factors": unclamped}),
    ("zero-scale:zeros", case("nvfp4", "huge"), {"factors": zero_for_zero}),
    ("zero-block-nan", case("fp8-block-1x128", "zeros", shape=(4, 256)), {
        "codes": by_code(lambda codes, s: codes.masked_fill((s.blocks == 0).repeat_interleave(128, 1), 0x7F))
    }),
    ("nan-code:0", case("nvfp4", "nan"), {"codes": by_code(lambda codes, s: codes.masked_fill(s.x.isnan(), 0))}),
    ("nan-keeps-sign", case("nvfp4", "nan"), {
        "codes": by_code(lambda codes, s: torch.where(s.x.isnan(), codes | s.x.signbit().byte() * 8, codes))
    }),
    ("signs-lost", case("nvfp4-2d"), {"codes": by_code(lambda codes, s: codes & 7)}),
    ("top-binade-saturated", case("fp8-current-e4m3"), {
        "codes": by_code(lambda codes, s: torch.where(codes & 0x78 == 0x78, codes & 0x80 | 0x7E, codes))
    }),
    ("element-factor-ulp", case("nvfp4", "near-ties", dtype="fp32", shape=(128, 128)), {
        "factors": lambda s: torch.nextafter(unclamped(s), torch.tensor(torch.inf))
    }),
    ("padding-not-zeroed", case("mxfp4", shape=(5, 33)), {
        "stored": lambda s: torch.cat([(p := pack(s.codes))[:, :-1], p[:, -1:] | 0x30], 1)
    }),
    ("tail-dropped", case("mxfp8-e4m3", shape=(8, 97)), {"x": without_tail}),
    ("tail-dropped", case("nvfp4", shape=(8, 41)), {
        "x": without_tail, "amax": lambda s: row_amax(block_amaxes(s.matrix, s.recipe)).amax().view(1)
    }),
]  # fmt: skip


def check(cause, wanted, steps, *, first=False):
    record = record_of(wanted, quantize=wrong(**steps))
    found = causes(record)
    assert cause in found, (record.message, record.explanations)
    if first:
        assert found[0] == cause, record.explanations
    assert len(found) <= MAX_EXPLANATIONS
    assert len(set(found)) == len(found)
    assert {explanation["stage"] for explanation in record.explanations} == {record.stage}


def test_an_amax_of_0_beside_nan_is_that_of_no_part():
    record = record_of(case("fp8-current-e4m3", "nan", shape=(128, 256)), quantize=wrong(amax=lambda s: torch.zeros(1)))
    assert causes(record) == []
    assert record.explanations[0]["cause"] == "amax-too-small"


def names(table):
    return [f"{cause}/{wanted.recipe}/{wanted.inputs}" for cause, wanted, *_ in table]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("cause", "wanted", "steps"), ELEMENTS, ids=names(ELEMENTS))
def test_elements(cause, wanted, steps):
    check(cause, wanted, steps)


def scaled_scale(s):
    return unrounded_scales(s.blocks, s.tensor, s.recipe, s.x.dtype)


def by_scale(change):
    """Stored scales of E4M3 from the unrounded numbers."""
    return {"scales": lambda s: change(scaled_scale(s))}


def by_exponent(change):
    """Stored scales of E8M0 from v = amax/max and its exponent."""

    def scales(s):
        value = s.blocks * (1.0 / s.recipe.element.max)
        return change(value, torch.frexp(value).exponent - 1 + 127, stored_scales(s.x, s.blocks, None, None, s.recipe))

    return {"scales": scales}


def transposed_tiles(s):
    tiles = stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe)[::16]
    return tiles.T.reshape(tiles.shape).repeat_interleave(16, 0)


def tiles_of_a_square(s):
    """Block amaxes of 4x4 tiles, each the amax of the tile across the diagonal; 0 outside of the matrix."""
    tiles = block_amaxes(s.x, s.recipe)[::16]
    wide = torch.zeros(-(-len(tiles) // 4) * 4, -(-tiles.shape[1] // 4) * 4)
    wide[: len(tiles), : tiles.shape[1]] = tiles
    for row in range(0, len(wide), 4):
        for column in range(0, wide.shape[1], 4):
            square = slice(row, row + 4), slice(column, column + 4)
            wide[square] = wide[square].T.clone()
    return wide[: len(tiles), : tiles.shape[1]].repeat_interleave(16, 0)[: len(s.x)]


def powers(value):
    return torch.ldexp(torch.ones_like(value), torch.frexp(value).exponent - 1)


def in_turn(values):
    total = torch.zeros(values.shape[:-1])
    for value in values.unbind(-1):
        total = total + value
    return total


def candidate_errors(s, add=in_turn, measure=torch.abs, divided=lambda back, most: back / torch.full_like(back, most)):
    """The errors of the scales of 6 and of 4, and the scales."""
    scales = [encode(v, E4M3) for v in (scaled_scale(s), scaled_scale(s) * 1.5)]
    x = s.x.float().view(len(s.x), -1, 16)
    errors = []
    for each in scales:
        codes = encode(x * element_factors(each, s.tensor, s.recipe).unsqueeze(2), E2M1)
        back = decode(codes, E2M1) * decode(each, E4M3).unsqueeze(2) * s.amax.view(-1, 1, 1)
        errors.append(add(measure(divided(back, s.recipe.max_product) - x)))
    return errors, scales


def halves(values):
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def fused_squares(errors):
    total = torch.zeros(errors.shape[:-1])
    for error in errors.unbind(-1):
        total = (error.double() ** 2 + total.double()).float()
    return total


def truncated_choice(s):
    """Both candidates rounded down; a tile's rows are added in a tree."""
    six, four = (cut_down(v, E4M3) for v in (scaled_scale(s), scaled_scale(s) * 1.5))
    x = s.x.float().view(len(s.x), -1, 16)
    errors = []
    for each in (six, four):
        codes = encode(x * element_factors(each, s.tensor, s.recipe).unsqueeze(2), E2M1)
        back = decode(codes, E2M1) * decode(each, E4M3).unsqueeze(2) * s.amax.view(-1, 1, 1)
        error = in_turn((back / torch.full_like(back, s.recipe.max_product) - x).square())
        errors.append(halves(error.view(-1, 16, error.shape[1]).transpose(1, 2)).repeat_interleave(16, 0))
    return torch.where(errors[1] < errors[0], four, six)


def without_last_row_of_tiles(s):
    last = torch.arange(len(s.x)).unsqueeze(1) % 16 == 15
    return block_amaxes(s.x.masked_fill(last, 0), s.recipe)


def not_clamped(s):
    """The scale of 4, beyond 448, is NaN, and never nearer."""
    errors, (six, four) = candidate_errors(s)
    over = scaled_scale(s) * 1.5 > 464
    return torch.where((errors[1] < errors[0]) & ~over, four, six)


def chosen(pick, **options):
    def scales(s):
        errors, (six, four) = candidate_errors(s, **options)
        return torch.where(pick(*errors), four, six)

    return {"scales": scales}


SCALES = [
    ("scale-truncated", case("nvfp4"), by_scale(lambda v: cut_down(v, E4M3))),
    ("scale-truncated", case("nvfp4-2d", dtype="fp32"), by_scale(lambda v: cut_down(v, E4M3))),
    ("scale-ties-away", case("nvfp4", "e4m3-ties", dtype="fp32"), by_scale(
        lambda v: nearest_by_distance(v, E4M3, tie_up=True)
    )),
    ("scale-rounded-up", case("nvfp4-rowscaled"), by_scale(
        lambda v: ((v.double().unsqueeze(-1) > grid(E4M3).double()).sum(-1)).clamp(max=126).byte()
    )),
    ("scale-through-bf16", case("nvfp4", "uniform", shape=(128, 512)), by_scale(
        lambda v: encode(v.bfloat16().float(), E4M3)
    )),
    ("scale-through-fp16", case("nvfp4", "e4m3-ties", dtype="fp32"), by_scale(
        lambda v: encode(v.half().float(), E4M3)
    )),
    ("scale-order:(amax/6)*enc", case("nvfp4", "e4m3-ties"), {
        "scales": lambda s: encode(s.blocks / 6 * s.tensor, E4M3)
    }),
    ("scale-order:amax*(enc/6)", case("nvfp4", "e4m3-ties"), {
        "scales": lambda s: encode(s.blocks * (s.tensor / 6), E4M3)
    }),
    ("scale-order:amax*enc", case("nvfp4"), {"scales": lambda s: encode(s.blocks * s.tensor, E4M3)}),
    ("scale-order:amax/max", case("fp8-block-1x128-e4m3-fp32"), {"scales": lambda s: s.blocks / 448}),
    ("scale-through-bf16", case("fp8-block-128x128-e4m3-fp32", shape=(256, 256)), {
        "scales": lambda s: stored_scales(s.x, s.blocks, None, None, s.recipe).bfloat16().float()
    }),
    ("tensor-scale-through-bf16", case("nvfp4"), wrong_tensor(
        lambda s, a: (torch.full_like(a, 2688) / a).bfloat16().float()
    )),
    ("tensor-scale-flushed", case("nvfp4@modelopt", "subnormal", dtype="fp32"), wrong_tensor(
        lambda s, a: torch.where(a / 2688 < 2.0**-126, 0 * a, a / 2688)
    )),
    ("power-of-two-scales", case("nvfp4"), by_scale(lambda v: encode(powers(v), E4M3))),
    ("subnormal-scales-raised", case("nvfp4", "low-rows"), by_scale(
        lambda v: torch.where((c := encode(v, E4M3)) > 0, c.clamp(min=8), c)
    )),
    ("zero-scale-raised", case("nvfp4", "huge"), by_scale(lambda v: encode(v, E4M3).clamp(min=1))),
    ("subnormal-scales-flushed", case("nvfp4", "low-rows"), by_scale(
        lambda v: (c := encode(v, E4M3)).masked_fill(c < 8, 0)
    )),
    ("subnormal-amaxes-flushed", case("fp8-block-1x128-e4m3-pow2", "subnormal", dtype="fp32"), {
        "blocks": lambda s: (b := block_amaxes(s.x, s.recipe)).masked_fill(b < 2.0**-126, 0)
    }),
    ("block-amax-without-fabs", case("nvfp4"), {"blocks": signed_blocks, "amax": right_amax}),
    ("block-amax-without-fabs", case("mxfp8-e4m3"), {"blocks": signed_blocks}),
    ("block-amax-without-fabs", case("fp8-block-1x128", shape=(16, 512)), {"blocks": signed_blocks}),
    ("block-amax-without-fabs", case("nvfp4-rht"), {"blocks": signed_blocks}),
    ("block-amax-of-tensor", case("mxfp8-e4m3"), {"blocks": lambda s: s.x.abs().float().amax().expand(64, 4)}),
    ("block-amax-through-bf16", case("mxfp8-e4m3", "scale-edges", dtype="fp32", shape=(128, 256)), {
        "blocks": lambda s: block_amax(s.x, 32).bfloat16().float()
    }),
    ("block-amax-exponent:up", case("nvfp4"), {
        "blocks": lambda s: torch.exp2(block_amax(s.x, 16).log2().ceil())
    }),
    ("block-amax-skips:15", case("nvfp4"), by_lane(lambda lane: lane != 15)),
    ("block-amax-skips:0", case("nvfp4-2d", shape=(256, 256)), by_lane(lambda lane: lane != 0)),
    ("block-amax-skips:31", case("mxfp8-e4m3", shape=(128, 256)), by_lane(lambda lane: lane != 31)),
    ("block-amax-skips:12-15", case("nvfp4"), by_lane(lambda lane: lane < 12)),
    ("block-amax-skips:row-15", case("nvfp4-2d", shape=(256, 256)), {"blocks": without_last_row_of_tiles}),
    ("block-amax-half", case("nvfp4"), by_lane(lambda lane: lane < 8)),
    ("block-amax-half", case("mxfp8-e5m2"), by_lane(lambda lane: lane >= 16)),
    ("block-amax-half", case("fp8-block-1x128", shape=(16, 512)), by_lane(lambda lane: lane < 64)),
    ("block-amax-spans-two", case("nvfp4"), {"blocks": lambda s: block_amax(s.x, 32).repeat_interleave(2, 1)}),
    ("block-amax-spans-two", case("mxfp4"), {"blocks": lambda s: block_amax(s.x, 64).repeat_interleave(2, 1)}),
    ("block-amax-before-transform", case("nvfp4-rht"), {
        "blocks": lambda s: block_amax(s.matrix, 16), "amax": right_amax
    }),
    ("block-amax-first-row", case("nvfp4-2d"), {
        "blocks": lambda s: block_amax(s.x, 16)[::16].repeat_interleave(16, 0), "amax": right_amax
    }),
    ("tiles-ignored", case("nvfp4-2d"), {"blocks": lambda s: block_amax(s.x, 16)}),
    ("tiles-ignored", case("mxfp8-2d"), {"blocks": lambda s: block_amax(s.x, 32)}),
    ("tiles-transposed", case("nvfp4-2d", shape=(64, 64)), {"scales": transposed_tiles}),
    ("tiles-transposed", case("nvfp4-2d", shape=(80, 112)), {"blocks": tiles_of_a_square, "amax": right_amax}),
    ("tail-dropped", case("mxfp6-e2m3", shape=(8, 97)), {"blocks": lambda s: block_amax(without_tail(s), 32)}),
    ("zero-block-not-one", case("fp8-block-1x128-e4m3-fp32", "zeros", shape=(4, 256), dtype="fp32"), {
        "scales": lambda s: torch.where(s.blocks == 0, 1 / torch.finfo(torch.float32).max, right_scales(s))
    }),
    ("scales-transposed", case("nvfp4"), {
        "scales": lambda s: (t := stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe)).T.reshape(t.shape)
    }),
    ("scales-of-next-block", case("nvfp4-4over6-448-mae"), {
        "scales": lambda s: stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe).roll(-1, 1)
    }),
    ("nan-spread", case("mxfp8-e4m3", "nan"), {"blocks": lambda s: block_amax(s.x, 32, propagate_nan=True)}),
    ("nan-dropped", case("mxfp8-e4m3@ocp", "nan"), {"blocks": lambda s: block_amax(s.x, 32)}),
    ("scale-not-clamped", case("nvfp4-rowscaled-4over6-448-mae"), {"scales": not_clamped}),
    ("scale-not-clamped", case("fp8-block-1x128-e4m3-fp32", "subnormal", shape=(16, 256), dtype="fp32"), {
        "scales": lambda s: torch.where(torch.full_like(s.blocks, 448) / s.blocks == torch.inf, 0.0, right_scales(s))
        .masked_fill(s.blocks == 0, 1.0)
    }),
    ("four-over-six-ties", case("nvfp4-4over6-448-mae", "single"), chosen(lambda six, four: four <= six)),
    ("four-over-six-always-4", case("nvfp4-4over6-448-mse"), chosen(lambda six, four: torch.ones_like(six).bool())),
    ("four-over-six-never-4", case("nvfp4-4over6-256-mae"), chosen(lambda six, four: torch.zeros_like(six).bool())),
    ("four-over-six-larger-error", case("nvfp4-rowscaled-4over6-256-mae"), chosen(lambda six, four: four > six)),
    ("four-over-six-other-measure", case("nvfp4-4over6-448-mae"), chosen(
        lambda six, four: four < six, measure=torch.square
    )),
    ("four-over-six-each-row", case("nvfp4-2d-4over6-448-mae"), chosen(lambda six, four: four < six)),
    ("four-over-six-order:tree", case("nvfp4-4over6-448-mae", "e2m1-ties", shape=(256, 256), dtype="fp32"), chosen(
        lambda six, four: four < six, add=halves
    )),
    ("four-over-six-errors", case("nvfp4-4over6-448-mae"), chosen(
        lambda six, four: four < six, measure=lambda error: error[..., ::2].abs()
    )),
    ("four-over-six-total", case("nvfp4-rowscaled-4over6-256-mse"), chosen(
        lambda six, four: four < six, add=lambda errors: errors.amax(-1)
    )),
    ("four-over-six-fma", case("nvfp4-4over6-448-mse", "e2m1-ties", shape=(256, 256), dtype="fp32"), chosen(
        lambda six, four: four < six, measure=lambda error: error, add=fused_squares
    )),
    ("scale-truncated", case("nvfp4-2d-4over6-256-mse"), {"scales": truncated_choice}),
    ("four-over-six-reciprocal", case("nvfp4-4over6-448-mae", "spread", shape=(256, 256)), chosen(
        lambda six, four: four < six, divided=lambda back, most: back * (1 / torch.full_like(back, most))
    )),
    ("exponent:down", case("mxfp8-e5m2"), by_exponent(lambda v, e, right: e.byte())),
    ("exponent:none", case("fp8-block-1x128", shape=(16, 256)), {
        "scales": lambda s: (torch.full_like(s.blocks, 448) / s.blocks).reciprocal()
    }),
    ("exponent:nearest", case("mxfp8-e4m3"), by_exponent(lambda v, e, right: (e + (v > 1.5 * powers(v)).int()).byte())),
    ("exponent-power-of-two", case("mxfp8-e4m3", "scale-edges", dtype="fp32", shape=(128, 256)), by_exponent(
        lambda v, e, right: torch.where((v == powers(v)) & (v >= 2.0**-126) & v.isfinite(), e + 1, right).byte()
    )),
    ("exponent-code-0", case("mxfp8-e4m3", "zeros"), by_exponent(lambda v, e, right: right.masked_fill(v == 0, 127))),
    ("exponent-code-255", case("mxfp8-e4m3@ocp", "nan"), by_exponent(
        lambda v, e, right: right.masked_fill(right == 255, 127)
    )),
    ("exponent-code-254", case("mxfp8-e4m3", "inf"), by_exponent(
        lambda v, e, right: right.masked_fill(right == 254, 255)
    )),
]  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("cause", "wanted", "steps"), SCALES, ids=names(SCALES))
def test_scales(cause, wanted, steps):
    check(cause, wanted, steps)


def unsigned(name):
    recipe = find_recipe(name)
    return replace(recipe, transform=replace(recipe.transform, signs=0))


def rotated_by_halves(x):
    """Two halves of each group, rotated by a matrix of 8 in the order of the reference, with the factor of 16."""
    y = x.float() * (signs(find_recipe("nvfp4-rht").transform) * 0.25).repeat(x.shape[1] // 16)
    for half in (1, 2, 4):
        pairs = y.view(-1, 2, half)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).view(x.shape)
    return y.bfloat16()


def last_group_unrotated(s):
    y = reference.transform(s.matrix, s.recipe)
    y[:, -16:] = s.matrix[:, -16:]
    return y


TENSORS = [
    ("amax-without-fabs", case("nvfp4-rowscaled"), {"amax": lambda s: s.x.clamp(min=0).float().amax(1)}),
    ("tensor-scale-ignored", case("fp8-delayed-e4m3"), wrong_tensor(
        lambda s, a: torch.full((1,), 448.0) / s.x.abs().float().amax()
    )),
    ("tensor-scale-constant:2240", case("nvfp4"), wrong_tensor(lambda s, a: 2240 / a)),
    ("tensor-scale-exponent:down", case("nvfp4"), wrong_tensor(
        lambda s, a: torch.exp2(torch.log2(right_tensor_scale(s)).floor())
    )),
    ("rows-of-other", case("nvfp4"), {"x": lambda s: s.matrix.flip(0)}),
    ("rows-of-other", case("mxfp8-e4m3"), {"factors": lambda s: STEPS["factors"](s).roll(1, 0)}),
    ("columns-of-other", case("mxfp8-e4m3"), {"factors": lambda s: STEPS["factors"](s)[:, torch.arange(4) ^ 1]}),
    ("last-row-of-other", case("mxfp8-e4m3"), {"factors": lambda s: STEPS["factors"](s)[torch.arange(64) % 63]}),
    ("last-column-of-other", case("mxfp8-e4m3"), {"factors": lambda s: STEPS["factors"](s)[:, [0, 1, 2, 2]]}),
    ("amax-partial", case("nvfp4-rowscaled"), {"amax": lambda s: s.x[:, ::2].abs().float().amax(1)}),
        ("amax-before-transform", case("nvfp4-rht"), wrong_amax(lambda s: s.matrix)),
    ("amax-exponent:up", case("nvfp4"), wrong_amax(lambda s: torch.exp2(s.x.abs().amax().float().log2().ceil()))),
    ("amax-exponent:down", case("nvfp4-rowscaled"), {
        "amax": lambda s: torch.exp2(s.x.abs().float().amax(1).log2().floor())
    }),
    ("amax-through-bf16", case("nvfp4", dtype="fp32"), wrong_amax(lambda s: s.x.bfloat16())),
    ("subnormal-amaxes-flushed", case("nvfp4", "subnormal", dtype="fp32"), wrong_tensor(
        lambda s, a: torch.where(a < 2.0**-126, 1.0, right_tensor_scale(s))
    )),
    ("amax-of-tensor", case("nvfp4-rowscaled"), {"amax": lambda s: s.blocks.amax().repeat(64)}),
    ("nan-spread", case("nvfp4", "nan"), {"amax": lambda s: s.x.float().abs().amax().view(1)}),
    ("infinity-dropped", case("nvfp4", "inf"), wrong_amax(lambda s: s.x.masked_fill(s.x.isinf(), 0))),
    ("tensor-scale-inverted", case("fp8-current-e5m2"), wrong_tensor(
        lambda s, a: torch.ones_like(a) / (torch.full_like(a, 57344) / a)
    )),
    ("tensor-scale-order:(1/amax)*max", case("nvfp4", "normal-1e-3", shape=(64, 116)), wrong_tensor(
        lambda s, a: a.reciprocal() * 2688
    )),
    ("tensor-scale-order:1/(amax/max)", case("fp8-current-e5m2", "uniform"), wrong_tensor(
        lambda s, a: (a / 57344).reciprocal()
    )),
    ("tensor-scale-not-clamped", case("nvfp4", "zeros"), wrong_tensor(lambda s, a: torch.full_like(a, 2688) / a)),
    ("scale-max-256", case("nvfp4"), wrong_tensor(lambda s, a: torch.full_like(a, 1536) / a)),
    ("scale-max-448", case("nvfp4-4over6-256-mae"), wrong_tensor(lambda s, a: torch.full_like(a, 2688) / a)),
    ("zero-block-not-one", case("fp8-current-e4m3", "zeros"), wrong_tensor(
        lambda s, a: torch.where(a == 0, torch.finfo(torch.float32).max, right_tensor_scale(s))
    )),
    ("rotation-signs-along-row", case("nvfp4-rht4"), {
        "x": lambda s: reference.transform(
            s.matrix * signs(find_recipe("nvfp4-rht").transform).repeat(8).bfloat16(), unsigned("nvfp4-rht4")
        )
    }),
    ("rotation-stage-missing", case("nvfp4-rht-sr"), {
        "x": lambda s: rotated_by_halves(s.matrix)
    }),
    ("exponent:none", case("fp8-current-e4m3-pow2"), wrong_tensor(
        lambda s, a: tensor_scale(a, replace(s.recipe, scale_rounding="none"), s.x.dtype)
    )),
    ("rotation-missing", case("nvfp4-rht"), {"x": lambda s: s.matrix}),
    ("rotation-without-factor", case("nvfp4-rht"), {"x": lambda s: rotated(s, factor=False).bfloat16()}),
    ("rotation-without-signs", case("nvfp4-rht32"), {"x": lambda s: rotated(s, first=False).bfloat16()}),
    ("rotation-signs-after", case("nvfp4-2d-rht"), {"x": lambda s: rotated(s, first=False, after=True).bfloat16()}),
    ("rotation-not-rounded", case("nvfp4-rht"), {"x": lambda s: rotated(s).float()}),
    ("rotation-last-group-skipped", case("nvfp4-rht-sr"), {"x": last_group_unrotated}),
    ("rotation-group:32", case("nvfp4-rht"), {
        "x": lambda s: reference.transform(s.matrix, "nvfp4-rht32")
    }),
    ("rotation-not-wanted", case("nvfp4"), {"x": lambda s: reference.transform(s.matrix, "nvfp4-rht")}),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("cause", "wanted", "steps"), TENSORS, ids=names(TENSORS))
def test_tensors_and_rotations(cause, wanted, steps):
    check(cause, wanted, steps, first=True)


def split_of_rows(s):
    padded = TILED["128x4"].pad(s.scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 32, 4, columns // 4, 4).permute(0, 3, 1, 2, 4).reshape(rows, columns)


def tiles_by_column(s):
    padded = TILED["128x4"].pad(s.scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(3, 0, 2, 1, 4).reshape(rows, columns)


def padding_of_ones(s):
    inside = reference.swizzle(torch.ones_like(s.scales)) == 1
    return torch.where(inside, reference.swizzle(s.scales), 0xFF)


SWIZZLED = case("nvfp4", "tiles", "swizzled", shape=(200, 192))
LAYOUTS = [
    ("not-swizzled", SWIZZLED, {"layout": lambda s: TILED["128x4"].pad(s.scales)}),
    ("swizzle-32-4", SWIZZLED, {"layout": split_of_rows}),
    ("swizzle-tiles-by-column", SWIZZLED, {"layout": tiles_by_column}),
    ("padding-not-zeroed", SWIZZLED, {"layout": padding_of_ones}),
    ("scales-transposed", SWIZZLED, {"layout": lambda s: reference.swizzle(s.scales.T.reshape(s.scales.shape))}),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("cause", "wanted", "steps"), LAYOUTS, ids=names(LAYOUTS))
def test_layouts(cause, wanted, steps):
    check(cause, wanted, steps, first=True)


def drawn(numbers):
    """Codes of stochastic rounding with a second number of 256 as the byte."""

    def codes(s):
        points = grid(s.recipe.element).double()
        magnitude = s.scaled.abs().double().clamp(max=points[-1])
        code = ((magnitude.unsqueeze(-1) >= points).sum(-1) - 1).clamp(max=len(points) - 2)
        share = (magnitude - points[code]) / (points[code + 1] - points[code])
        up = numbers(s.bytes.double(), share * 256) | (magnitude == points[-1])
        return (code + up).byte() | s.scaled.signbit().byte() * s.recipe.element.sign_code

    return {"codes": codes}


def placed(place):
    """The byte of a neighbouring element."""
    return {"bytes": lambda s: bytes_of(s)[:, place(torch.arange(s.matrix.shape[1]))]}


def seven_rounds(s):
    rows, columns = s.matrix.shape
    words = philox(*s.random, torch.arange(rows * columns // 16), rounds=7)
    return words.to(torch.int32).view(torch.uint8).view(rows, columns)


def right_but(b, f):
    return torch.floor(f) + b >= 256


DRAWN = [
    ("nearest-not-stochastic", case("nvfp4-sr"), {"bytes": lambda s: None}),
    ("nearest-not-stochastic", case("mxfp8-e4m3-sr"), {"bytes": lambda s: None}),
    ("stochastic-biased", case("nvfp4-sr", shape=(64, 256)), drawn(lambda b, f: right_but(b + 1, f))),
    ("stochastic-seven-bits", case("mxfp4-sr"), drawn(lambda b, f: right_but(b // 2 * 2, f))),
    ("stochastic-seven-bits", case("nvfp4-rht-sr"), drawn(lambda b, f: right_but(b % 128 * 2, f))),
    ("stochastic-bits:4", case("nvfp4-sr"), drawn(lambda b, f: right_but(b // 16 * 16, f))),
    ("stochastic-inclusive", case("nvfp4-sr", "e2m1-ties"), drawn(lambda b, f: f + b > 256)),
    ("stochastic-complemented", case("nvfp4-sr"), drawn(lambda b, f: b < f)),
    ("stochastic-bits-shared", case("nvfp4-sr"), placed(lambda i: i // 2 * 2)),
    ("stochastic-bits-shared", case("nvfp4-sr"), placed(lambda i: i // 16 * 16 + i % 16 // 2)),
    ("stochastic-bits-shared", case("nvfp4-sr", "normal", "words"), placed(lambda i: i // 4 * 4)),
    ("stochastic-bytes-reversed", case("nvfp4-2d-sr"), placed(lambda i: i // 4 * 4 + 3 - i % 4)),
    ("stochastic-offset:+1", case("nvfp4-sr"), {"bytes": lambda s: bytes_of(s, (s.random[0], s.random[1] + 1))}),
    ("stochastic-philox-rounds", case("nvfp4-sr"), {"bytes": seven_rounds}),
    ("stochastic-blocks-by-column", case("nvfp4-sr"), {
        "bytes": lambda s: bytes_of(s).view(-1, len(s.matrix), 16).transpose(0, 1).reshape(s.matrix.shape)
    }),
    ("stochastic-other-block:+1", case("mxfp8-e5m2-sr"), {"bytes": lambda s: bytes_of(s, first=1)}),
    ("stochastic-other-block:6-bits", case("nvfp4-sr", shape=(96, 16)), {
        "bytes": lambda s: torch.cat([bytes_of(s)[:64], bytes_of(s)[:32]])
    }),
    ("stochastic-other-block:16-bits", case("nvfp4-sr", shape=(65552, 16)), {
        "bytes": lambda s: torch.cat([bytes_of(s)[: 1 << 16], bytes_of(s)[:16]])
    }),
    ("stochastic-other-block:18-bits", case("nvfp4-sr", shape=(262160, 16)), {
        "bytes": lambda s: torch.cat([bytes_of(s)[: 1 << 18], bytes_of(s)[:16]])
    }),
    ("stochastic-offset:32-bits", case("nvfp4-sr"), {
        "bytes": lambda s: bytes_of(s, (s.random[0], s.random[1] & 0xFFFFFFFF))
    }),
    ("stochastic-seed:swapped", case("nvfp4-sr"), {"bytes": lambda s: bytes_of(s, s.random[::-1])}),
    ("stochastic-seed:32-bits", case("nvfp4-sr"), {
        "bytes": lambda s: bytes_of(s, (s.random[0] & 0xFFFFFFFF, s.random[1]))
    }),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("cause", "wanted", "steps"),
    # 16 bits stay in `make test`.
    [pytest.param(*each, marks=pytest.mark.long if "18-bits" in each[0] else ()) for each in DRAWN],
    ids=names(DRAWN),
)
def test_stochastic_rounding(cause, wanted, steps):
    check(cause, wanted, steps, first=True)


def test_a_kernel_that_draws_where_it_should_round():
    steps = {"codes": lambda s: element_codes(s.scaled, find_recipe("nvfp4-sr"), bytes_of(s, (0, 0)))}
    check("stochastic-not-nearest", case("nvfp4"), steps, first=True)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        (lambda s: bytes_of(s, (5, 9)), True),  # unknown random bits
        (lambda s: bytes_of(s, (5, 9)) // 2, False),  # rounded up too rarely
        (lambda s: torch.where(bytes_of(s, (5, 9)) < 64, 255, 127), False),  # as often for every distance
    ],
)
def test_unknown_random_bits_are_told_by_their_frequencies(numbers, named):
    codes = {"codes": lambda s: element_codes(s.scaled, find_recipe("nvfp4-sr"), numbers(s).byte())}
    record = record_of(case("nvfp4"), quantize=wrong(**codes))
    found = {explanation["cause"]: explanation["exact"] for explanation in record.explanations}
    assert found.get("stochastic-not-nearest") == (False if named else None)


DIALECTS = [
    ("dialect:torchao", "nvfp4", "normal"), ("dialect:modelopt", "nvfp4", "low-rows"),
    ("dialect:trtllm", "nvfp4-2d", "huge"), ("dialect:qwantize", "nvfp4", "normal"),
    ("dialect:fp-quant", "nvfp4", "normal"), ("dialect:te", "nvfp4@torchao", "normal"),
    ("dialect:ocp", "mxfp8-e4m3", "nan"), ("dialect:even", "mxfp4", "normal"),
    ("dialect:floor-448", "mxfp8-2d", "normal"), ("dialect:te", "mxfp6-e2m3@nearest", "normal"),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "recipe", "inputs"), DIALECTS)
def test_dialects(cause, recipe, inputs):
    other = find_recipe(recipe.partition("@")[0] + "@" + cause.removeprefix("dialect:"))

    def quantize(x, recipe):
        return replace(reference.quantize(x, other), recipe=recipe)

    record = record_of(case(recipe, inputs, shape=(128, 128)), quantize=quantize)
    assert cause in causes(record), record.explanations


OTHER_RECIPES = [
    ("recipe:fp8-block-1x128-e4m3-fp32@vllm", "fp8-block-1x128", "zeros", "none of 128 scales is a power of two"),
    (
        "epsilon-unwanted",
        "fp8-block-1x128-eps0.0001",
        "exponents",
        "as recipe fp8-block-1x128-e4m3-pow2-eps0.0001 does",
    ),
    ("recipe:fp8-row-e4m3@torchao", "fp8-row", "zeros", "in place of fp8-row-e4m3"),
    ("recipe:fp8-static-e4m3@vllm", "fp8-static", "normal", "the given scale is taken for a decode scale"),
    ("recipe:fp8-block-1x128-e4m3-fp32 with nan propagate", "fp8-block-1x128", "nan", "with nan propagate"),
]


@pytest.mark.parametrize(("cause", "recipe", "inputs", "words"), OTHER_RECIPES)
def test_the_recipe_that_an_fp8_kernel_follows_is_named(cause, recipe, inputs, words):
    name, _, policy = cause.removeprefix("recipe:").partition(" with nan ")
    other = find_recipe(name if cause.startswith("recipe:") else recipe)
    other = replace(other, nan=policy) if policy else other

    def quantize(x, recipe, **options):
        return replace(reference.quantize(x, other, **options), recipe=recipe)

    record = record_of(case(recipe.partition("-eps")[0], inputs, shape=(64, 256)), quantize=quantize)
    assert cause in causes(record), record.explanations
    assert words in " ".join(explanation["sentence"] for explanation in record.explanations)
    assert all(is_cause(explanation["cause"]) for explanation in record.explanations)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-block-1x128"])
def test_codes_of_zero_are_named_first(recipe):
    record = record_of(
        case(recipe), quantize=wrong(codes=lambda s: torch.zeros_like(element_codes(s.scaled, s.recipe)))
    )
    assert causes(record) == ["codes-zero"]


CHOICES = [
    ("scale-order:(amax/6)*enc", "nvfp4", "e4m3-ties", {"block_scale": "(amax/6)*enc"}),
    ("tensor-scale-not-clamped", "nvfp4", "subnormal", {"tensor_limit": "none"}),
    ("zero-scale:infinity", "nvfp4@fireworks", "huge", {"zero_scale": "infinity"}),
    ("zero-block:1", "nvfp4", "zeros", {"zero_block": "1"}),
    ("smallest-scale:2^-6", "nvfp4", "low-rows", {"smallest_scale": "2^-6"}),
    ("rounding:nearest-even-wrapping", "nvfp4", "low-rows", {"rounding": "nearest-even-wrapping"}),
    ("rounding:nearest-even", "nvfp4@breccia", "e2m1-ties", {"rounding": "nearest-even"}),
    ("largest-scale:float32", "fp8-block-1x128-e4m3-fp32", "subnormal", {"largest_scale": "float32"}),
    ("scale-ties-even", "nvfp4@breccia", "normal", {"scale_rounding": "nearest-even"}),
    ("candidates:4-or-6-mae", "nvfp4", "normal", {"candidates": "4-or-6-mae"}),
    ("tensor-limit:0-for-0", "nvfp4", "zeros", {"tensor_limit": "0-for-0"}),
    ("epsilon-unwanted", "fp8-current-e4m3", "subnormal", {"smallest_amax": 1e-12}),
    ("epsilon-ignored", "fp8-current-e4m3-eps1000.0", "normal", {"smallest_amax": 0.0}),
    ("statistics:input", "nvfp4@trtllm", "normal", {"statistics": "input"}),
    ("element-format:E5M2", "mxfp8-e4m3", "normal", {"element": E5M2}),
    ("scale-max-256", "nvfp4-4over6-448-mae", "normal", {"scale_max": 256.0}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("cause", "recipe", "inputs", "fields"), CHOICES)
def test_choices_of_a_recipe(cause, recipe, inputs, fields):
    other = replace(find_recipe(recipe), **fields)

    def quantize(x, recipe):
        return replace(reference.quantize(x, other), recipe=recipe)

    record = record_of(case(recipe, inputs, shape=(128, 256)), quantize=quantize)
    assert cause in causes(record), record.explanations


# Two deviations at once, and deviations that explain a part.


def test_two_deviations_are_named_together():
    record = record_of(
        case("nvfp4", "e2m1-ties"), quantize=wrong(codes=lambda s: ties_away(s).masked_fill(ties_away(s) == 8, 0))
    )
    first = record.explanations[0]
    assert (first["cause"], first["exact"]) == ("both:negative-zero-lost,ties-away", True)
    assert "ties round away from zero" in first["sentence"]
    assert "-0 is stored as 0" in first["sentence"]
    assert is_cause(first["cause"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("count", [1, 9])
def test_a_deviation_of_most_wrong_elements_is_not_exact(count):
    def codes(s):
        changed = ties_away(s)
        changed[3, :count] ^= 4
        return changed

    record = record_of(case("nvfp4", "e2m1-ties"), quantize=wrong(codes=codes))
    first = record.explanations[0]
    assert (first["cause"], first["exact"]) == ("ties-away", False)
    assert "; explains 99." in first["sentence"]
    assert first["sentence"].endswith(" % of the wrong elements")


def test_a_deviation_of_one_stage_alone_is_not_exact():
    def scales(s):
        changed = stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe)
        changed[5, 3] ^= 1
        return changed

    record = record_of(case("nvfp4", "e2m1-ties"), quantize=wrong(scales=scales, codes=ties_away))
    assert record.stage == "scales"
    assert not any(explanation["exact"] for explanation in record.explanations)


@pytest.mark.parametrize("unit", ["row", "block"])
def test_equal_seeds(unit):
    def one_seed(s):
        right = bytes_of(s)
        first = right[:1] if unit == "row" else right[:1, :16].repeat(1, right.shape[1] // 16)
        return first.expand(right.shape)

    record = record_of(case("nvfp4-sr"), quantize=wrong(bytes=one_seed))
    assert "stochastic-equal-seeds" in causes(record)
