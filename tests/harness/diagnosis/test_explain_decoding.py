"""Wrong dequantizers, each by a single defect: the diagnosis names the defect, and no cause for unknown defects."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.explain_decoding import decoding_deviations, values_of
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.spec.formats import E2M1, E4M3, E8M0
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend


def causes(dequantize, recipe="nvfp4", inputs="normal", dtype="fp32", shape=(32, 64)):
    """Exact causes of a case with this dequantize and the reference's remaining methods."""
    case = case_from_labels("quantize", recipe, shape, dtype, inputs)
    record = run_case(case, backend(quantize=reference.quantize, dequantize=dequantize))
    assert (record.verdict, record.stage) == ("fail", "values"), record.message
    return [e["cause"] for e in record.explanations if e["exact"]]


def changed(**changes):
    """The reference's values of a changed matrix: `change(q)`."""

    def dequantize(q, dtype=torch.float32):
        return reference.dequantize(replace(q, **{name: change(q) for name, change in changes.items()}), dtype)

    return dequantize


def by(factor, wide=16, keep_zero=True):
    """Codes of E2M1 times factor(stored scales, amax). Without `keep_zero` the code of -0 gives 0."""

    def dequantize(q, dtype=torch.float32):
        factors = factor(decode(q.scales, q.recipe.scale), q.amax).repeat_interleave(wide, 1)
        codes = decode(unpack(q.codes, q.shape[1]), E2M1)
        return ((codes if keep_zero else codes + 0) * factors).to(dtype)

    return dequantize


def test_codes():
    assert causes(changed(codes=lambda q: q.codes >> 4 | q.codes << 4)) == ["nibbles-swapped"]
    assert causes(lambda q, dtype: reference.dequantize(q, dtype).abs()) == ["signs-lost"]
    assert causes(lambda q, dtype: reference.dequantize(q, dtype) + 0) == ["negative-zero-lost"]


@pytest.mark.parametrize(
    "lost", [lambda q: reference.dequantize(q) + 0, by(lambda s, amax: s * amax * (1.0 / 2688.0), keep_zero=False)]
)
def test_negative_zeros_lost_before_values_are_rounded(lost):
    """-0 of the values that a dtype of 16 bits has no other number for stays."""
    assert causes(lambda q, dtype: lost(q).to(dtype), inputs="subnormal", dtype="bf16") == ["negative-zero-lost"]


def test_values_too_large_for_their_dtype():
    def saturated(q, dtype):
        return reference.dequantize(q).clamp(-65504, 65504).to(dtype)

    assert causes(saturated, "mxfp8-e4m3", "inf", "fp16") == ["values-saturated"]


def test_factors_of_a_neighbouring_block():
    def last_of_next(q, dtype):
        values, moved = (reference.dequantize(replace(q, scales=s), dtype) for s in (q.scales, q.scales.roll(-1, 1)))
        values[:, 15:-16:16] = moved[:, 15:-16:16]
        return values

    assert causes(last_of_next) == ["factor-of-other-block"]


def test_scales():
    assert causes(changed(scales=lambda q: q.scales.roll(-1, 1).contiguous())) == ["scale-of-next-block"]
    assert causes(changed(scales=lambda q: q.scales.roll(1, 1).contiguous())) == ["scale-of-previous-block"]
    assert "scale-of-first-block" in causes(changed(scales=lambda q: q.scales[:, :1].expand_as(q.scales)))
    two = changed(scales=lambda q: q.scales[:, torch.arange(4) % 2])
    assert causes(two) == ["scale-of-first-step"]
    assert causes(changed(scales=lambda q: torch.full_like(q.scales, 127)), "mxfp8-e4m3", "spread") == [
        "scales-ignored"
    ]


def in_two_steps(q, dtype=torch.float32):
    values = decode(unpack(q.codes, q.shape[1]), E2M1) * decode(q.scales, q.recipe.scale).repeat_interleave(16, 1)
    return (values * (q.amax * (1 / 2688))).to(dtype)


def test_factors():
    assert "decode-order:(code*s)*dec" in causes(in_two_steps)
    assert causes(by(lambda s, amax: s)) == ["tensor-scale-ignored"]
    # A single amax does not separate all forms.
    assert "decode-order:s*(amax*(1/max))" in causes(by(lambda s, amax: s * (amax * (1 / 2688))))
    assert "decode-order:(s*amax)/max" in causes(by(lambda s, amax: s * amax / torch.full_like(s, 2688)))
    found = causes(by(lambda s, amax: (s * amax * (1 / 2688)).bfloat16().float()))
    assert found == ["decode-through-bf16"]
    found = causes(by(lambda s, amax: s.masked_fill(s == 2.0**-127, 0), 32), "mxfp4", "subnormal")
    assert "subnormal-factors-flushed" in found


def test_roundings_of_values():
    found = causes(lambda q, dtype: reference.dequantize(q).bfloat16().to(dtype))
    assert found == ["values-through-bf16"]
    cut = causes(
        lambda q, dtype: (reference.dequantize(q).view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype),
        dtype="bf16",
    )
    assert cut == ["values-truncated"]


@pytest.mark.parametrize(("number", "known"), [(torch.inf, True), (2.0**127, False)])
def test_nan_scales_read_as_numbers(number, known):
    def dequantize(q, dtype=torch.float32):
        factors = decode(q.scales, E8M0).masked_fill(q.scales == 255, number).repeat_interleave(32, 1)
        return (decode(q.codes, q.recipe.element) * factors[:, : q.shape[1]]).to(dtype)

    found = causes(dequantize, "mxfp8-e4m3", "codes", shape=(131, 144))
    assert ("nan-read-as-number" in found) == known


def test_a_columnwise_half_in_place():
    """Codes and scales lie along columns."""

    def dequantize(q, dtype=torch.float32):
        return reference.dequantize(replace(q, scales=q.scales.roll(-1, 0).contiguous()), dtype)

    def both(x, recipe, *, rowwise=True, **options):
        return reference.quantize_both(x, recipe, rowwise=rowwise, **options)

    case = case_from_labels("quantize", "mxfp8-e4m3", (96, 64), "fp32", "spread", ("columnwise",))
    doors = {"quantize": reference.quantize, "quantize_both": both, "dequantize": dequantize}
    record = run_case(case, backend(**doors))
    assert record.stage == "values", record.message
    assert [e["cause"] for e in record.explanations if e["exact"]] == ["scale-of-next-block"]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4@torchao", "mxfp8-e5m2", "fp8-block-1x128-e4m3-fp32", "fp8-current"])
def test_right_values_are_another_thing_than_most_deviations(recipe):
    """A deviation with right values for spread inputs would explain no failure."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 16).unsqueeze(1)
    q = reference.quantize(x, find_recipe(recipe))
    right = reference.dequantize(q)
    made = [(row.cause, values_of(row, q, torch.float32)) for row in decoding_deviations(q)]
    different = {cause for cause, values in made if values is not None and not torch.equal(values, right)}
    assert "signs-lost" in different
    assert ("nibbles-swapped" in different) == (q.recipe.element is E2M1)
    assert ("tensor-scale-ignored" in different) == (q.recipe.scale is E4M3)
    assert ("scale-of-next-block" in different) == (not q.recipe.whole)
    assert q.recipe.scale is not E8M0 or not any(cause.startswith("decode-order") for cause in different)
