"""The table of conventions: its page, its options, and the libraries that tests can ask."""

from __future__ import annotations

import inspect
import re
from typing import Any, get_args

import pytest
import torch

import narrowgauge
from narrowgauge import adapt
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "adapt.md").read_text(encoding="utf-8")


def test_the_page_has_the_table() -> None:
    table = PAGE.split("| argument | value | meaning | libraries |\n|---|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    assert rows == [[f"`{c.argument}`", c.value, c.meaning, c.users] for c in adapt.CONVENTIONS]


def test_the_table_has_every_option_and_every_argument() -> None:
    listed: dict[str, list[str]] = {}
    for convention in adapt.CONVENTIONS:
        listed.setdefault(convention.argument, []).append(convention.value)
    for argument, choices in (
        ("nibbles", adapt.Nibbles), ("layout", adapt.Layout), ("tensor_scale_is", adapt.TensorScaleIs),
    ):  # fmt: skip
        assert listed[argument] == list(get_args(choices))
    parameters = inspect.signature(adapt.quantized).parameters
    assert set(parameters) - set(listed) == {"recipe", "shape", "amax", "true_amax"}


def test_the_figures_of_the_page() -> None:
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)  # all mantissas
    most = torch.full_like(amax, 2688.0)
    encode, decode = most / amax, amax / most
    shares = [float((1 / scale != encode).float().mean()) for scale in (decode, 1 / encode)]
    for share, printed in zip(shares, re.findall(r"(\d+)\s+of 100", PAGE), strict=True):
        assert round(100 * share) == int(printed)


@pytest.mark.parametrize("swizzled", [False, True])
def test_results_of_torchao(swizzled: bool) -> None:
    """Packed codes, scales in tiles and decode scales in the conventions of other libraries."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao==0.18.*")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(5))
    layout: Any = "128x4" if swizzled else "linear"
    decode_scale = per_tensor_amax_to_scale(x.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=decode_scale, is_swizzled_scales=swizzled)
    tensor_scale = {"tensor_scale": theirs.per_tensor_scale, "tensor_scale_is": "decode"}
    results: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("nvfp4@torchao", theirs.qdata, theirs.scale, tensor_scale),
        ("nvfp4", theirs.qdata, theirs.scale, tensor_scale | {"true_amax": x.abs().amax()}),
    ]
    for recipe, dtype in (("mxfp8-e4m3@ocp", torch.float8_e4m3fn), ("mxfp4@ocp", torch.float4_e2m1fn_x2)):
        scale, codes = to_mx(x, dtype, 32, ScaleCalculationMode.FLOOR, is_swizzled_scales=swizzled)
        results.append((recipe, codes, scale, {}))
    for recipe, codes, scales, more in results:
        own = narrowgauge.quantize(x, recipe, swizzled=swizzled)
        got = adapt.quantized(codes, scales, recipe, x.shape, layout=layout, **more)
        assert torch.equal(got.codes, own.codes), recipe
        assert torch.equal(got.scales, own.scales), recipe
        if recipe == "nvfp4@torchao":
            assert got.tensor_scale == own.tensor_scale
        else:
            assert got.amax == own.amax
