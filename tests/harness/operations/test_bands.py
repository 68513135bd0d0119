"""Cases of more than 2^31 elements, with a small threshold in place of 2^31: judged and unjudged rows."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from narrowgauge.harness.cases import sections
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.sections import BAND, band_rows
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference import ops as reference
from tests.harness.operation_cases import fails, gemm_case, passes, quantize_case

ROWS, COLUMNS = 8 * BAND, 48
FAR = (3 * BAND * COLUMNS, 3 * BAND * COLUMNS + 5 * COLUMNS, 1 << 32)
RECIPES = ("nvfp4", "nvfp4-2d", "mxfp8-e4m3", "fp8-block-1x128-e4m3-pow2", "fp8-block-128x128-e4m3-pow2")


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(sections, "FAR", FAR)


def case_of(recipe: str, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Case:
    case = quantize_case(recipe, "bands", shape=shape)
    assert case.problem() is None
    return case


def wrong_from(element: int, columns: int = COLUMNS):
    """A quantizer that is wrong from an element of x on, like a kernel with a short index."""

    def quantize(x, recipe, **options):
        q = reference.quantize(x, recipe, **options)
        codes = q.codes.clone()
        codes[element // columns :] ^= 1
        return q.__class__(**(vars(q) | {"codes": codes}))

    return quantize


def test_bands_are_whole_tiles_at_both_ends_and_at_the_limits() -> None:
    assert band_rows(ROWS, COLUMNS) == [slice(0, 128), slice(256, 512), slice(896, 1024)]
    assert band_rows(ROWS - 1, COLUMNS)[-1] == slice(896, 1023)
    assert band_rows(3 * BAND + 1, COLUMNS) == [slice(0, 128), slice(256, 385)]
    sections.FAR = (1 << 30, 1 << 31, 1 << 32)
    for rows, columns in ((65664, 32784), (131328, 32784), (131072128, 17), (1 << 32, 1)):
        bands = band_rows(rows, columns)
        assert bands[0].start == 0
        assert bands[-1].stop == rows
        assert all(a.stop <= b.start for a, b in pairwise(bands))
        for far in (far for far in sections.FAR if far < rows * columns):
            assert any(band.start <= (far - 1) // columns and far // columns < band.stop for band in bands)


def test_x_is_nan_outside_the_bands() -> None:
    x = make_inputs(case_of("nvfp4")).x
    judged = torch.zeros(ROWS, dtype=torch.bool)
    for band in band_rows(ROWS, COLUMNS):
        judged[band] = True
    assert bool(x[~judged].isnan().all())
    assert not bool(x[judged].isnan().any())


ENDS = (FAR[0], FAR[0] - 1, FAR[1], (ROWS - 1) * COLUMNS)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("recipe", "element"), list(product(RECIPES, ENDS)))
def test_a_short_index_fails_and_the_message_has_the_rows(recipe: str, element: int) -> None:
    record = fails(case_of(recipe), "codes", quantize=wrong_from(element))
    assert "0 to 127, 256 to 511, 896 to 1023" in record.message


def test_dequantize_of_the_whole_result_is_judged() -> None:
    def dequantize(q, dtype):
        values = reference.dequantize(q, dtype)
        values[FAR[1] // COLUMNS :] = 0
        return values

    fails(case_of("mxfp8-e4m3"), "values", dequantize=dequantize)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3"])
def test_an_output_is_judged_in_its_bands(recipe: str) -> None:
    case = gemm_case(recipe, "tn", "bands", "bias", shape=(ROWS, 32, COLUMNS))
    assert case.problem() is None
    output = next(stage for stage in passes(case).stages if stage["stage"] == "output")
    assert output["compared"] == 512 * COLUMNS

    def gemm(a, b, **options):
        y = reference.gemm(a, b, **options)
        y[FAR[1] // COLUMNS] += 1000
        return y

    fails(case, "output", gemm=gemm)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (quantize_case("nvfp4", "bands", shape=(16, 16)), "judged whole"),
        (quantize_case("nvfp4-sr", "bands", shape=(ROWS, COLUMNS)), "depend on others"),
        (quantize_case("nvfp4-rowscaled", "bands", shape=(ROWS, COLUMNS)), "depend on others"),
        (quantize_case("nvfp4", "both", "bands", shape=(ROWS, COLUMNS)), "usage rowwise"),
        (gemm_case("nvfp4", "tn", "bands", "accumulate", shape=(ROWS, 32, COLUMNS)), "without accumulate"),
        (gemm_case("nvfp4", "tn", "bands", shape=(16, 32, COLUMNS)), "judged whole"),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else "",
)  # fmt: skip
def test_other_cases_are_refused(case: Case, words: str) -> None:
    assert words in (case.problem() or "")
