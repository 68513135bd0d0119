"""Words of GPTQ, AWQ and compressed-tensors, against loops over plain integers and against the library."""

from __future__ import annotations

import pytest
import torch

from narrowgauge import adapt
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import unpack

ROWS, COLUMNS, GROUP = 16, 64, 32
LAYOUTS = ("gptq", "gptq-v2", "awq", "pack-quantized")
Rows = list[list[int]]


def drawn(bits: int, rows: int, columns: int) -> Rows:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator).tolist()


def along_columns(rows: Rows, bits: int, order: tuple[int, ...]) -> Rows:
    """Words of neighbours in a row: the number `order[i]` in the i-th lowest bits."""
    per = 32 // bits
    places = order if per == 8 else range(per)
    return [
        [sum(row[start + place] << bits * bit for bit, place in enumerate(places)) for start in range(0, len(row), per)]
        for row in rows
    ]


def turned(rows: Rows) -> Rows:
    return [list(column) for column in zip(*rows, strict=True)]


def words_of(rows: Rows) -> torch.Tensor:
    return torch.tensor(rows).to(torch.uint32).view(torch.int32)


def stored(layout: str, codes: Rows, zeros: Rows, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of codes (N, K) and of zero points (N, G), as AutoGPTQ, AutoAWQ and compressed-tensors pack them."""
    order = (0, 2, 4, 6, 1, 3, 5, 7) if layout == "awq" else tuple(range(8))
    if layout == "pack-quantized":
        return words_of(along_columns(codes, bits, order)), words_of(turned(along_columns(turned(zeros), bits, order)))
    points = words_of(along_columns(turned(zeros), bits, order))
    if layout == "awq":
        return words_of(along_columns(turned(codes), bits, order)), points
    return words_of(turned(along_columns(codes, bits, order))), points


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int4_with_zero_points_has_the_numbers_of_the_formula(layout: str) -> None:
    codes, zeros = drawn(4, ROWS, COLUMNS), drawn(3, ROWS, COLUMNS // GROUP)
    scales = torch.arange(1, ROWS * COLUMNS // GROUP + 1).view(ROWS, -1) / 64
    words, points = stored(layout, codes, zeros, 4)
    q = adapt.integers(layout, words, scales if layout == "pack-quantized" else scales.T, points)
    moved = torch.tensor(zeros) + (layout == "gptq")
    groups = torch.tensor(codes).view(ROWS, -1, GROUP) - moved.unsqueeze(-1)
    assert str(q.recipe) == "int4-g32-zp"
    assert torch.equal(ops.dequantize(q, torch.float32), (groups * scales.unsqueeze(-1)).view(ROWS, COLUMNS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_codes_lose_half_of_their_range(layout: str, bits: int) -> None:
    codes = drawn(bits, ROWS, COLUMNS)
    scales = torch.ones(ROWS, 2, dtype=torch.bfloat16)
    words, _ = stored(layout, codes, drawn(3, ROWS, 8), bits)
    q = adapt.integers(layout, words, scales if layout == "pack-quantized" else scales.T, bits=bits)
    assert str(q.recipe) == f"int{bits}-g32"
    assert torch.equal(ops.dequantize(q, torch.float32), torch.tensor(codes).float() - (1 << bits - 1))


@pytest.mark.parametrize(("bits", "dim"), [(4, 0), (4, -1), (8, 0), (8, 1)])
@pytest.mark.parametrize("order", [tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)])
def test_packing_is_the_inverse(bits: int, dim: int, order: tuple[int, ...]) -> None:
    codes = torch.tensor(drawn(bits, 16, 24), dtype=torch.uint8)
    words = adapt.pack_words(codes, bits, dim, order)
    assert words.numel() * 32 == codes.numel() * bits
    assert torch.equal(adapt.unpack_words(words, bits, dim, order), codes)


def test_the_words_are_those_of_compressed_tensors() -> None:
    """Bytes of pack_to_int32 of compressed-tensors 0.20, of the codes −8 to 7 in a row."""
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    recorded = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    assert torch.equal(adapt.pack_words(codes, 4), recorded)
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        codes = torch.tensor(drawn(bits, 16, 32), dtype=torch.uint8)
        signed = (codes.int() - (1 << bits - 1)).to(torch.int8)
        for dim in (0, 1):
            assert torch.equal(helpers.pack_to_int32(signed, bits, dim), adapt.pack_words(codes, bits, dim))


def test_spare_codes_of_the_last_words() -> None:
    codes = torch.tensor(drawn(4, 8, 40), dtype=torch.uint8)
    words = adapt.pack_words(torch.nn.functional.pad(codes, (0, 24)), 4)
    q = adapt.integers("pack-quantized", words, torch.ones(8, 1), shape=(8, 32))
    assert torch.equal(unpack(q.codes, 32), codes[:, :32] ^ 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "exllama"}, "layout is 'exllama'; words have the layout gptq, gptq-v2, awq, pack-quantized"),
        ({"bits": 3}, "bits is 3; words hold codes of 4 or 8 bits"),
        ({"scales": torch.ones(8, 3)}, r"codes of \(8, 8\) words and scales \(8, 3\) do not fit a matrix of 8x64"),
        ({"bits": 8, "zeros": torch.zeros(2, 2).int()}, "no recipe has INT8 elements with zero points"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_error(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "layout": "pack-quantized", "codes": torch.zeros(8, 8).int(), "scales": torch.ones(8, 1), "zeros": None,
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        adapt.integers(**given)  # type: ignore[arg-type]


def test_a_word_holds_whole_codes() -> None:
    with pytest.raises(ValueError, match="axis -1 has 12 codes; a word has 8 codes of 4 bits: pad the axis with zeros"):
        adapt.pack_words(torch.zeros(2, 12, dtype=torch.uint8), 4)
