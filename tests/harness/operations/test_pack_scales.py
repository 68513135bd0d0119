"""Layouts of scales: right kernels pass, and each wrong kernel fails with the name of its mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.scale_layouts import LAYOUTS, Layout, Packing
from tests.harness.operation_cases import packing_case
from tests.harness.sample_backends import backend

Pack = Callable[..., torch.Tensor]
SECTIONS = torch.tensor([0, 1, 127, 128, 129])


def judged(case: Any, pack: Pack, unpack: Pack = reference.unpack_scales) -> Any:
    return run_case(case, backend(pack_scales=pack, unpack_scales=unpack))


def bytes_of(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dtype == torch.uint8 else (scales.view(torch.int32) >> 23).to(torch.uint8)


def shaped(packed: torch.Tensor, scales: torch.Tensor, layout: str, sections: torch.Tensor | None) -> torch.Tensor:
    """The bytes in the shape that the layout asks for, cut, or with zeros behind them."""
    packing = Packing(LAYOUTS[layout], tuple(scales.shape), None if sections is None else tuple(sections.tolist()))
    size = sum(packing.part_sizes)
    flat = packed.flatten()[:size]
    return torch.nn.functional.pad(flat, (0, size - len(flat))).view(packing.packed_shape)


def packing_in(change: Callable[[Layout], Layout]) -> Pack:
    """A kernel that packs in a wrong layout."""

    def pack(scales: torch.Tensor, layout: str, *, sections: torch.Tensor | None = None) -> torch.Tensor:
        other = change(LAYOUTS[layout])
        parts = tuple(scales.shape), None if sections is None else tuple(sections.tolist())
        return shaped(Packing(other, *parts).pack(bytes_of(scales)), scales, layout, sections)

    return pack


def as_one_matrix(scales: torch.Tensor, layout: str, *, sections: torch.Tensor | None = None) -> torch.Tensor:
    rows = scales.reshape(-1, scales.shape[-1])
    return shaped(LAYOUTS[layout].pack(rows), scales, layout, sections)


def whole_tiles_only(scales: torch.Tensor, layout: str) -> torch.Tensor:
    height, width = LAYOUTS[layout].tile
    kept = torch.zeros_like(scales)
    rows, columns = len(scales) // height * height, scales.shape[1] // width * width
    kept[:rows, :columns] = scales[:rows, :columns]
    return reference.pack_scales(kept, layout)


def big_endian(scales: torch.Tensor, layout: str) -> torch.Tensor:
    packed = reference.pack_scales(scales, layout)
    return packed.view(-1, 4).flip(1).reshape(packed.shape)


def rows_as_stride(scales: torch.Tensor, layout: str) -> torch.Tensor:
    packed = reference.pack_scales(scales, layout)
    return shaped(packed[:, : 4 * len(scales)], scales, layout, None)


def unmasked(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """DeepGEMM's shifts without its assertion."""
    bits = torch.nn.functional.pad(scales.view(torch.int32).long(), (0, -scales.shape[1] % 4, 0, -len(scales) % 4))
    one, two, three, four = (bits[:, byte::4] for byte in range(4))
    words = ((one >> 23) | (two >> 15) | (three >> 7) | (four << 1)) & 0xFFFFFFFF
    return words.T.contiguous().to(torch.uint32).view(torch.uint8)


def dirty(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Padding that is not 0, in a layout with 0."""
    packed = reference.pack_scales(scales, layout)
    packed[Packing(LAYOUTS[layout], tuple(scales.shape)).cells("0")] = 7
    return packed


def unwritten(scales: torch.Tensor, layout: str) -> torch.Tensor:
    """Padding that no thread writes."""
    inside = reference.pack_scales(torch.ones_like(scales), layout) != 0
    return torch.empty(inside.shape, dtype=torch.uint8).masked_scatter_(
        inside, reference.pack_scales(scales, layout)[inside]
    )


def half_of_the_absent(scales: torch.Tensor, layout: str) -> torch.Tensor:
    packed = unwritten(scales, layout)
    zeros = Packing(LAYOUTS[layout], tuple(scales.shape)).cells("0")
    packed[zeros] = 0
    packed[0, -4:] = 0
    return packed


def exchanged(field: str, before: str, after: str) -> Pack:
    return packing_in(lambda layout: replace(layout, **{field: getattr(layout, field).replace(before, after)}))


def other(name: str) -> Pack:
    return packing_in(lambda _: LAYOUTS[name])


WRONG: list[tuple[str, Any, Pack, str, str]] = [
    ("digits b and c", packing_case("128x4", shape=(300, 20)), exchanged("order", "c b", "b c"), "packed",
     "swizzle-linear-tiles"),
    ("the split of the row", packing_case("128x4", shape=(300, 20)), exchanged("rows", "b:4 c:32", "c:32 b:4"),
     "packed", "swizzle-32-4"),
    ("8x4 asked, 128x4 written", packing_case("8x4", shape=(130, 9)), other("128x4"), "packed", "layout-is:128x4"),
    ("128x4 asked, 8x4 written", packing_case("128x4", shape=(130, 9)), other("8x4"), "packed", "layout-is:8x4"),
    ("linear", packing_case("ue8m0-int32"), other("linear"), "packed", "layout-is:linear"),
    ("columns padded to 4", packing_case("blackwell-ragged", shape=(257, 9)), other("128x4"), "packed",
     "layout-is:128x4"),
    ("4 warps for 8", packing_case("hopper-mxfp4", shape=(300, 6)), other("hopper-mxfp4-4"), "packed",
     "layout-is:hopper-mxfp4-4"),
    ("64 for 32", packing_case("marlin-32", shape=(7, 192)), other("marlin-64"), "packed", "layout-is:marlin-64"),
    ("not swapped", packing_case("marlin-64-swapped", shape=(7, 192)), other("marlin-64"), "packed",
     "layout-is:marlin-64"),
    ("batches together", packing_case("8x4", "batch:3", shape=(33, 9)), as_one_matrix, "packed",
     "batches-padded-together"),
    ("batches together in 128x4", packing_case("128x4", "batch:2", shape=(130, 9)), as_one_matrix, "packed",
     "batches-padded-together"),
    ("sections together", packing_case("blackwell-ragged", "rows:0,1,127,128,129", shape=(385, 9)), as_one_matrix,
     "packed", "sections-padded-together"),
    ("last tile", packing_case("8x4", shape=(33, 9)), whole_tiles_only, "packed", "last-tile-left-out"),
    ("big-endian words", packing_case("ue8m0-int32"), big_endian, "packed", "words-big-endian"),
    ("stride M", packing_case("ue8m0-int32", shape=(33, 9)), rows_as_stride, "packed", "rows-not-padded"),
    ("mantissa bits", packing_case("ue8m0-int32", inputs="mantissas", shape=(33, 9)), unmasked, "packed",
     "mantissa-bits-in-words"),
    ("nonzero padding", packing_case("blackwell-ragged", shape=(33, 9)), dirty, "padding", "padding-not-zeroed"),
    ("padding never written", packing_case("hopper-mxfp4-4", shape=(33, 9)), unwritten, "repeat", "never-written"),
    ("nonzero columns of words", packing_case("ue8m0-int32", shape=(33, 9)), dirty, "padding", "padding-not-zeroed"),
    ("absent cells", packing_case("ue8m0-int32", shape=(33, 9)), half_of_the_absent, "padding",
     "absent-cells-written"),
    ("columns of the tile", packing_case("cdna4-mxfp4", shape=(64, 16)), exchanged("order", "i c", "c i"), "packed",
     "digits-exchanged:i and c of memory"),
    ("quarters", packing_case("kv-v-swizzled", shape=(16, 24)), exchanged("columns", "s:4 r", "r s:4"), "packed",
     "digits-exchanged:s and r of the column"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "pack", "stage", "cause"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_wrong_layout_is_named(case: Any, pack: Pack, stage: str, cause: str) -> None:
    record = judged(case, pack)
    assert record.verdict == "fail", record.message
    assert next(entry["stage"] for entry in record.stages if entry["sentence"]) == stage
    assert cause in [explanation["cause"] for explanation in record.explanations]


@pytest.mark.parametrize("name", ["layout-is:8x4", "layout-is:linear"])
def test_a_wrong_read_is_named(name: str) -> None:
    """The packed scales are right, and are read back in another layout."""

    def unpack(packed: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
        other = LAYOUTS[name.partition(":")[2]]
        size = torch.Size(other.packed_shape(shape)).numel()
        return other.unpack(packed.flatten()[:size], shape)

    record = judged(packing_case("ue8m0-int32", shape=(32, 8), inputs="bytes"), reference.pack_scales, unpack)
    assert [entry["stage"] for entry in record.stages if entry["sentence"]] == ["unpacked"]
    assert name in [explanation["cause"] for explanation in record.explanations]


RIGHT: dict[str, Pack] = {
    "padding of any bytes": unwritten,
    "int32 words": lambda scales, layout: reference.pack_scales(scales, layout).view(torch.int32),
    "zeros": reference.pack_scales,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_passes(name: str) -> None:
    layout = {"padding of any bytes": "8x4", "int32 words": "ue8m0-int32"}.get(name, "ue8m0-int32")
    record = judged(packing_case(layout), RIGHT[name])
    assert (record.verdict, record.message) == ("pass", "")


def test_two_positions_show_the_whole_map() -> None:
    """No two scales of a case with fewer than 251² scales have the same bytes in both families."""
    from narrowgauge.harness.operations.registry import make_inputs

    low, high = (make_inputs(packing_case("128x4", inputs=name, shape=(250, 251))).x for name in
                 ("position", "position-high"))  # fmt: skip
    pairs = low.int() * 256 + high
    assert len(pairs.unique()) == pairs.numel()
    assert not bool((low == 0).any() | (high == 0).any())
