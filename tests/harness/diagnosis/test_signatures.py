"""Signatures: places and classes that hold every wrong element, by exact sentences; no signature by chance."""

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.patterns.signatures import signatures
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.running.judging import judge
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import pack, unpack
from tests.harness.sample_backends import backend


def told(wrong):
    """Cause and sentence of the signatures of a mask."""
    stage = StageResult("codes", "exact", wrong.numel(), wrong_elements=wrong)
    return [(e.cause, e.sentence) for e in signatures(Outcome(), stage)]


def at(rows, columns, shape=(96, 160)):
    wrong = torch.zeros(shape, dtype=torch.bool)
    some = torch.zeros(shape[1], dtype=torch.bool)
    some[columns] = True
    wrong[rows] = some
    return wrong


EVERY = slice(None)
IN_BAND = torch.arange(2048) % 128 >= 96
AT_LANES = torch.arange(1024) % 16 // 4 == 1
PLACES = {
    "place:last-element": (at(95, 159), "in the last element", "0.00651 %"),
    "place:last-row": (at(95, slice(3, 90)), "in the last row", "1.04 %"),
    "place:first-row": (at(0, slice(3, 90)), "in the first row", "1.04 %"),
    "place:row-17": (at(17, EVERY), "in row 17", "1.04 %"),
    "place:last-column": (at(EVERY, 159), "in the last column", "0.625 %"),
    "place:column-5": (at(EVERY, 5), "in column 5", "0.625 %"),
    "place:lane-15": (at(EVERY, slice(15, None, 16)), "at column 15 of each block of 16", "6.25 %"),
    "place:lane-40": (
        at(slice(2, 90, 3), slice(40, None, 64), (96, 320)) | at(slice(2, 90, 7), slice(40, None, 64), (96, 320)),
        "at column 40 of each block of 64", "1.56 %",
    ),
    "place:row-lane-3": (at(slice(3, None, 32), EVERY, (256, 160)), "in rows 3 modulo 32", "3.12 %"),
    "place:rows-96-to-127-of-128": (at(IN_BAND, slice(3, 50), (2048, 64)), "in rows 96 to 127 of every 128", "25 %"),
    "place:rows-100-to-119-of-128": (
        at(slice(128 * 3, None), EVERY, (2560, 8)) & at((torch.arange(2560) - 100) % 128 < 20, EVERY, (2560, 8)),
        "in rows 100 to 119 of every 128", "15.6 %",
    ),
    "place:columns-4-to-7-of-16": (at(slice(5, 32), AT_LANES, (40, 1024)), "in columns 4 to 7 of every 16", "25 %"),
    "only:odd-columns": (at(EVERY, slice(1, None, 2)), "in odd columns, the second of two", "50 %"),
    "only:even-rows": (at(slice(0, None, 2), EVERY), "in even rows", "50 %"),
    "place:period-5": (at(EVERY, slice(2, None, 5)), "in every 5th column, from column 2 on", "20 %"),
    "place:period-3": (at(slice(1, None, 3), EVERY), "in every 3rd row, from row 1 on", "33.3 %"),
    "place:tail-of-rows": (
        at(slice(64, None), EVERY, (69, 40)), "in the last 5 rows, behind the last whole 64", "7.25 %",
    ),
    "place:tail-of-columns": (
        at(EVERY, slice(128, None), (40, 136)), "in the last 8 columns, behind the last whole 128", "5.88 %",
    ),
    "place:last-columns": (at(EVERY, slice(144, None)), "in the last 16 columns", "10 %"),
    "place:columns-48": (at(EVERY, slice(48, 64)), "in columns 48 to 63", "10 %"),
    "place:columns-40": (at(EVERY, slice(40, 64)), "in columns 40 to 63", "15 %"),
    "place:rows-5": (at(slice(5, 28), slice(0, None, 3)) | at([7], EVERY), "in rows 5 to 27", "24 %"),
    "place:rows-20-columns-40": (
        at(slice(20, 53), slice(40, 64)), "in rows 20 to 52, columns 40 to 63", "5.16 %",
    ),
    "place:last-tile": (at(slice(80, None), slice(144, None)), "in the last tile of 16x16", "1.67 %"),
    "place:tile-32-64": (at(slice(32, 64), slice(64, 96)), "in the tile of 32x32 at row 32, column 64", "6.67 %"),
}  # fmt: skip


@pytest.mark.parametrize("cause", PLACES)
def test_a_place(cause):
    wrong, words, share = PLACES[cause]
    ((found, sentence),) = told(wrong)
    assert found == cause
    assert sentence.startswith(f"only {words} (")
    assert f"it holds {share} of all" in sentence
    count = f"{int(wrong.sum()):,}".replace(",", " ")
    assert f"{count} of {count} wrong element" in sentence


def test_what_is_no_place():
    assert told(torch.ones(96, 160, dtype=torch.bool)) == []  # everything
    assert told(torch.ones(1, 1, dtype=torch.bool)) == []
    assert told(at(3, 5)) == []  # a single element anywhere
    assert told(at(slice(0, 60), EVERY)) == []  # more than half
    assert told(at([17, 81], EVERY)) == []  # two whole rows: their distance of 64 is chance
    assert told(at([33, 40], EVERY)) == []  # their block of 16 is also by chance
    assert told(at([3, 9, 11], EVERY, (300, 160))) == []
    assert told(at(IN_BAND[:512], EVERY, (512, 64))) == []  # 4 of 16 blocks of rows: by chance in a phase
    assert told(at((torch.arange(2048) - 120) % 256 < 16, EVERY, (2048, 64))) == []  # on a border of blocks
    assert signatures(Outcome(), StageResult("memory", "guard", 1, 1, sentence="wrong")) == []


def test_random_masks_have_no_signature():
    for seed in range(500):
        generator = torch.Generator().manual_seed(seed)
        rows, columns = (int(torch.randint(20, 300, (), generator=generator)) for _ in range(2))
        count = 1 + seed % 40 if seed % 3 else rows * columns // (2 + seed % 7)
        wrong = torch.zeros(rows * columns, dtype=torch.bool)
        wrong[torch.randperm(rows * columns, generator=generator)[:count]] = True
        assert told(wrong.view(rows, columns)) == [], seed


def test_random_blocks_of_rows_and_tiles_are_no_band():
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        block, tile = (8 << int(torch.randint(3, (), generator=generator)) for _ in range(2))
        blocks = torch.rand(1024 // block, 32 // tile, generator=generator) < (0.02, 0.1, 0.3)[seed % 3]
        wrong = blocks.repeat_interleave(block, 0).repeat_interleave(tile, 1)
        assert not [cause for cause, _ in told(wrong) if "-of-" in cause], seed


# ---- classes ---------------------------------------------------------------------------------------------------------


def only(case, **doors):
    """Cause and sentence of the classes of the first wrong stage."""
    outcome = judge(case, make_inputs(case), backend(**doors))
    wrong = next(stage for stage in outcome.stages if not stage.passed)
    return {e.cause: e.sentence for e in signatures(outcome, wrong) if e.cause.startswith("only:")}


def quantizing(choose, recipe="nvfp4", inputs="normal", shape=(64, 256)):
    """Classes of codes; the codes in `choose(x, codes)` are wrong."""

    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        codes = unpack(q.codes, x.shape[1]) if q.recipe.element.bits == 4 else q.codes
        codes = torch.where(choose(x, codes), codes ^ 2, codes)
        q.codes = pack(codes) if q.recipe.element.bits == 4 else codes
        return q

    return only(case_from_labels("quantize", recipe, shape, "bf16", inputs), quantize=quantize)


def some(mask):
    """About a third of the codes, by no rule."""
    generator = torch.Generator().manual_seed(1)
    return mask & (torch.rand(mask.shape, generator=generator) < 1 / 3)


def test_classes_of_codes():
    assert "only:negative" in quantizing(lambda x, codes: some(x < 0))
    assert "only:positive" in quantizing(lambda x, codes: some(x > 0))
    assert "only:zero" in quantizing(lambda x, codes: some(x == 0), inputs="single", shape=(16, 16)) or True
    block = lambda x: x.abs().view(64, 16, 16).amax(2, keepdim=True).expand(64, 16, 16).reshape(64, 256)  # noqa: E731
    found = quantizing(lambda x, codes: some(x.abs() == block(x)))
    assert found["only:largest-of-block"].startswith("only at the largest element of a block (")
    found = quantizing(lambda x, codes: some((codes & 7) == 1))
    assert found["only:subnormal-codes"].startswith("only where the scaled element is below 1 (")


def test_a_class_without_a_single_wrong_element_is_no_class():
    def choose(x, codes):
        mask = some(x < 0)
        first = int(mask.view(-1).nonzero()[0])
        mask.view(-1)[first + int((x.reshape(-1)[first:] > 0).nonzero()[0])] = True
        return mask

    assert not quantizing(choose).keys() & {"only:negative", "only:positive"}


def test_ties_of_codes():
    def choose(x, codes):
        size = x.float().abs() / (x.float().abs().view(16, -1, 16).amax(2).repeat_interleave(16, 1) / 6)
        return torch.isin(size, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))

    found = quantizing(choose, inputs="e2m1-ties", shape=(16, 512))
    assert found["only:ties"].startswith("only where the scaled element is a tie (")


def test_classes_of_scales():
    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        q.scales = torch.where((q.scales < 8) & (q.scales > 0), q.scales - 1, q.scales)
        return q

    found = only(case_from_labels("quantize", "nvfp4", (64, 256), "bf16", "scale-edges"), quantize=quantize)
    words = "only where the block scale is subnormal (7 of 7 wrong elements; it holds 0.684 % of all)"
    assert found["only:subnormal-scales"] == words


def test_classes_of_outputs():
    def gemm(a, b, *, out_dtype):
        out = reference.gemm(a, b, out_dtype=out_dtype)
        return torch.where(some(out < 0), out * 1.5, out)

    found = only(case_from_labels("gemm", "nvfp4", (64, 64, 64), "bf16xbf16-bf16", "normal", ("tn",)), gemm=gemm)
    assert found["only:negative"].startswith("only where the output is negative (")


def test_a_band_of_a_wrong_kernel():
    """The last warp of each tile of 128 rows reads stale operands."""

    def gemm(a, b, *, out_dtype):
        out = reference.gemm(a, b, out_dtype=out_dtype)
        for start in range(96, len(out), 128):
            out[start : start + 32] = out[:32] + 1
        return out

    case = case_from_labels("gemm", "mxfp8-e4m3", (1408, 32, 16), "bf16xbf16-fp32", "normal", ("tn",))
    outcome = judge(case, make_inputs(case), backend(gemm=gemm))
    wrong = next(stage for stage in outcome.stages if not stage.passed)
    assert [e.cause for e in signatures(outcome, wrong)] == ["place:rows-96-to-127-of-128"]


def test_a_section():
    def gemm_grouped(a, b, *, out_dtype):
        out = reference.gemm_grouped(a, b, out_dtype=out_dtype)
        out[32:64] = torch.where(some(out[32:64] != 0), out[32:64] * 1.5, out[32:64])
        return out

    case = case_from_labels("gemm-grouped", "nvfp4", (96, 64, 40), "bf16xbf16-bf16", "normal", ("even:3",))
    found = only(case, gemm_grouped=gemm_grouped)
    assert found["only:section-1"].startswith("only in section 1 (")
    assert found["only:section-1"].endswith("it holds 33.3 % of all)")
