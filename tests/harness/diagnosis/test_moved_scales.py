"""Codes of the right scales are not accused if the scales were moved after the codes were made."""

import pytest
import torch

import narrowgauge
from narrowgauge.harness.diagnosis.quantize.explain_quantize import RIGHT_CODES

MOVED = {
    "scales-of-previous-block": lambda scales: scales.roll(1, 1),
    "scales-of-next-block": lambda scales: scales.roll(-1, 1),
    "scales-of-previous-row": lambda scales: scales.roll(1, 0),
    "scales-of-next-row": lambda scales: scales.roll(-1, 0),
    "scales-transposed": lambda scales: scales.T.contiguous().view(scales.shape),
    "scales-moved": lambda scales: scales.flip(0).flip(1),
    "scales-stored-wrong": lambda scales: scales.clone().fill_(scales.flatten()[0]),
}
RECIPES = ("nvfp4", "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cause", MOVED)
def test_moved_scales_do_not_accuse_the_codes(cause, recipe):
    x = torch.randn(32, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    x *= 2.0 ** torch.arange(-8, 8).repeat_interleave(2).unsqueeze(1)  # rows of other scales
    q = narrowgauge.quantize(x, recipe)
    with pytest.raises(narrowgauge.WrongResult) as caught:
        narrowgauge.assert_quantized(x, q.codes, MOVED[cause](q.scales), recipe, amax=q.amax)
    found = [entry for entry in caught.value.verdict.explanations if entry["stage"] == "scales"]
    assert found[0]["cause"] == cause
    assert all(RIGHT_CODES in entry["sentence"] for entry in found)


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_scales_in_tiles_that_are_given_as_linear(layout):
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    x *= 2.0 ** torch.arange(-8, 8).repeat_interleave(8).unsqueeze(1)
    q = narrowgauge.quantize(x, "mxfp8-e4m3", scales=layout)
    with pytest.raises(narrowgauge.WrongResult) as caught:
        narrowgauge.assert_quantized(x, q.codes, q.scales, "mxfp8-e4m3")
    assert caught.value.verdict.explanations[0]["cause"] == f"scales-in-layout:{layout}"


def test_codes_of_the_moved_scales_are_wrong():
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    q = narrowgauge.quantize(x, "mxfp8-e4m3")
    with pytest.raises(narrowgauge.WrongResult) as caught:
        narrowgauge.assert_quantized(x, q.codes.roll(1, 1), q.scales.roll(1, 1), "mxfp8-e4m3")
    assert not any(RIGHT_CODES in entry["sentence"] for entry in caught.value.verdict.explanations)
