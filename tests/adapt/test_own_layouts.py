"""Layouts of a user by a function, a permutation or a row of digits, and entries with codes, scales and numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge import adapt
from narrowgauge.spec.scale_layouts import TILED, Layout
from tests.paths import ROOT


def columns_first(scales: torch.Tensor) -> torch.Tensor:
    """Columns of scales, each padded with zeros to a multiple of 16 rows."""
    return torch.nn.functional.pad(scales.T, (0, -len(scales) % 16))


PLACES = torch.nn.functional.pad(torch.arange(70 * 6).view(70, 6).T, (0, 10), value=-1)
"""The same layout as a permutation, for scales (70, 6)."""
DIGITS = Layout("mine", "m c:16", "k", "k m c", "0", "columns, padded to 16 rows", "tests")


def quantized() -> tuple[torch.Tensor, narrowgauge.Quantized]:
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    return x, narrowgauge.quantize(x, "nvfp4")


@pytest.mark.parametrize("layout", [columns_first, PLACES, DIGITS], ids=["function", "permutation", "digits"])
def test_an_own_layout_is_written_read_and_judged(layout: Any) -> None:
    x, q = quantized()
    codes, scales = adapt.stored_as(q, layout=layout)
    assert scales.shape == (6, 80)
    assert torch.equal(scales, columns_first(q.scales))
    read = adapt.quantized(codes, scales, "nvfp4", x.shape, layout=layout, amax=q.amax)
    assert torch.equal(read.scales, q.scales)
    assert not adapt.padding(scales, "nvfp4", x.shape, layout=layout).any()
    assert adapt.padding(scales, "nvfp4", x.shape, layout=layout).numel() == 60
    narrowgauge.assert_quantized(x, codes, scales, layout=layout, amax=q.amax)
    narrowgauge.assert_quantized(x, codes, scales.view(torch.float8_e4m3fn), layout=layout, amax=q.amax)
    scales[2, 7] ^= 8
    with pytest.raises(narrowgauge.WrongResult, match=r"1 of 420 block scales"):
        narrowgauge.assert_quantized(x, codes, scales, layout=layout, amax=q.amax)


def test_padding_of_digits_is_judged() -> None:
    x, q = quantized()
    codes, scales = adapt.stored_as(q, layout=DIGITS)
    scales[-1, -1] = 1
    with pytest.raises(narrowgauge.WrongResult, match="1 of 60 padding bytes are not 0"):
        narrowgauge.assert_quantized(x, codes, scales, layout=DIGITS, amax=q.amax)


def test_pack_scales_takes_digits() -> None:
    _, q = quantized()
    packed = narrowgauge.pack_scales(q.scales, DIGITS)
    assert torch.equal(packed.view(6, 80), columns_first(q.scales))
    assert torch.equal(narrowgauge.unpack_scales(packed, (70, 6), DIGITS), q.scales)


@pytest.mark.parametrize("layout", TILED.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3"])
def test_every_named_layout_is_written_read_and_judged(recipe: str, layout: Layout) -> None:
    x = torch.randn(96, 1024, generator=torch.Generator().manual_seed(2)).bfloat16()
    q = narrowgauge.quantize(x, recipe)
    name: Any = layout.name
    if layout.by_group or layout.scale not in ("", q.recipe.scale.name):
        with pytest.raises(ValueError, match=f"layout {name} holds .*; recipe {recipe} has rows of"):
            adapt.stored_as(q, layout=name)
        return
    codes, scales = adapt.stored_as(q, layout=name)
    assert torch.equal(scales, layout.pack(q.scales))
    stored = scales.view(torch.int32) if layout.word == "int32" else scales
    narrowgauge.assert_quantized(x, codes, stored, recipe, layout=name, amax=q.amax)
    scales.view(-1)[5] ^= 1
    with pytest.raises(narrowgauge.WrongResult):
        narrowgauge.assert_quantized(x, codes, stored, recipe, layout=name, amax=q.amax)


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (lambda scales: scales[:-1], ValueError, r"layout packs scale \(69, 0\) of scales \(70, 6\) 0 times"),
        (lambda scales: torch.cat([scales, scales[:1]]), ValueError, r"layout packs scale \(0, 0\) .* 2 times"),
        (lambda scales: scales.float(), TypeError, "gives packed scales in the dtype of its argument"),
        (torch.arange(421), ValueError, "layout packs a place above 419 of scales"),
        (columns_first, ValueError, r"layout packs scales \(70, 6\) into 480 cells; these have 420"),
    ],
    ids=["left out", "twice", "cast", "beyond", "size"],
)
def test_a_wrong_layout_is_refused(layout: Any, error: type[Exception], message: str) -> None:
    x, q = quantized()
    with pytest.raises(error, match=message):
        adapt.quantized(q.codes, q.scales, "nvfp4", x.shape, layout=layout)


# Entries.


def test_entries_are_codes_scales_and_numbers() -> None:
    entry = adapt.ENTRIES["mla-656"]
    assert entry.size == 656
    generator = torch.Generator().manual_seed(5)
    stored = torch.randint(0, 256, (2, 3, 656), generator=generator).to(torch.uint8)
    parts = adapt.entry_parts(stored, "mla-656")
    assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == {
        "codes": ((2, 3, 512), torch.uint8), "scales": ((2, 3, 4), torch.float32), "rope": ((2, 3, 64), torch.bfloat16),
    }  # fmt: skip
    assert bytes(stored[1, 2, 516:520].tolist()) == parts["scales"][1, 2, 1].numpy().tobytes()
    assert torch.equal(adapt.entries_of(parts, entry), stored)
    for given, error, message in (
        (stored[..., 1:], ValueError, "entries mla-656 have 656 bytes, not shape"),
        (stored.int(), TypeError, "entries are bytes, not int32"),
    ):
        with pytest.raises(error, match=message):
            adapt.entry_parts(given, "mla-656")
    with pytest.raises(ValueError, match="entry is 'mla'; it can be 'mla-656'"):
        adapt.entry_parts(stored, "mla")
    with pytest.raises(ValueError, match="scales of mla-656 has 4 numbers"):
        adapt.entries_of(parts | {"scales": parts["scales"][..., :3]}, "mla-656")
    with pytest.raises(TypeError, match="rope of mla-656 is bfloat16"):
        adapt.entries_of(parts | {"rope": parts["rope"].float()}, "mla-656")


def test_entries_that_vllm_wrote_hold_the_quantized_rows() -> None:
    """Recorded on an H200: 512 numbers in groups of 128 with scales UP2(max(amax/448, 1e-4)), and 64 plain numbers."""
    archive = np.load(ROOT / "tests" / "golden" / "serving" / "vllm_gather_and_maybe_dequant_cache.npz")
    found = json.loads(bytes(archive["_meta"]))["vectors"]
    number = next(n for n, vector in enumerate(found) if vector.get("kind") == "fp8_ds_mla")
    names = ("kv_c", "k_pe", "slots", "cache")
    read = {name: torch.from_numpy(archive[f"v{number:02}.{name}"].copy()) for name in names}
    written = read["slots"] >= 0
    parts = adapt.entry_parts(read["cache"], "mla-656")
    x = read["kv_c"].view(torch.bfloat16)[written]
    assert torch.equal(parts["rope"].view(torch.int16), read["k_pe"].view(torch.int16)[written])
    amax = x.float().abs().view(len(x), 4, 128).amax(2)
    bits = (amax / 448).clamp(min=1e-4).view(torch.int32)
    expected = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    assert torch.equal(parts["scales"], expected)
    scaled = x.float() / parts["scales"].repeat_interleave(128, 1)
    assert torch.equal(parts["codes"], scaled.to(torch.float8_e4m3fn).view(torch.uint8))
    values = parts["codes"].view(torch.float8_e4m3fn).float() * parts["scales"].repeat_interleave(128, 1)
    narrowgauge.assert_dequantized(parts["codes"], parts["scales"], values, "fp8-block-1x128-e4m3-pow2")
