"""Large tensors are checked in chunks of rows, and every word and figure equals the result for the whole tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks import row_chunks
from narrowgauge.harness.checks.exact import exact_codes, exact_floats
from narrowgauge.harness.checks.rounding_boundary import Sources, boundary_codes, boundary_floats
from narrowgauge.harness.checks.row_chunks import map_row_chunks
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.formats import E4M3
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, gemm, quantize

SMALL = 96
"""Two rows of the case's 48 columns: chunks end behind rows 1, 3, 5 and so on."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch):
    """Makes chunks small, from its call on."""
    return lambda: monkeypatch.setattr(row_chunks, "CHUNK", SMALL)


def test_chunks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK", 10)
    for shape in ((7, 3), (6, 5), (1, 100), (9,), (0, 4), (3, 0), (2, 3, 4)):
        x = torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [x[rows] for rows in row_chunks.row_chunks(x)]
        assert torch.equal(torch.cat(parts), x)
        assert all(part.numel() <= max(10, part[:1].numel()) for part in parts)
        twice, sums = map_row_chunks(lambda part: (part * 2, part.flatten(1).sum(1) if part.dim() > 1 else part), x)
        assert torch.equal(twice, x * 2)
        assert sums.shape[0] == shape[0]


def spoil_codes(q):
    """Errors in the last row of a chunk and the first of the next, in the first and the last row."""
    q.codes[torch.tensor([0, 1, 2, 15, 16, 31]), torch.tensor([0, 3, 3, 8, 9, 23])] ^= 0x13


def spoil_scales(q):
    q.scales[torch.tensor([1, 2, 31])] += torch.tensor([1, 2, 3], dtype=torch.uint8).unsqueeze(1)


def spoil_output(out):
    out.view(-1)[torch.tensor([0, 95, 96, 97, 300])] *= torch.tensor([1.5, -1.0, float("nan"), float("inf"), 1 + 2**-7])


CASES = [
    (replace(QUANTIZE, inputs="nan"), {"quantize": quantize(spoil_codes)}),
    (QUANTIZE, {"quantize": quantize(spoil_scales)}),
    (replace(QUANTIZE, recipe="nvfp4-rht"), {"quantize": quantize(spoil_codes)}),
    (replace(QUANTIZE, recipe="mxfp6-e2m3"), {"quantize": quantize(spoil_codes)}),
    (GEMM, {"gemm": gemm(spoil_output)}),
    (replace(GEMM, inputs="rounding", accumulate=True), {"gemm": gemm(spoil_output)}),
    (case_from_labels("transform", "nvfp4-rht", (32, 48), "bf16", "spread"), {"transform": lambda x, recipe: -x}),
    (QUANTIZE, {"quantize": quantize(lambda q: None)}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("case", "doors"), CASES, ids=lambda value: getattr(value, "id", ""))
def test_a_record_does_not_depend_on_chunks(case, doors, small) -> None:
    whole = run_case(case, backend(**doors)).to_dict()
    small()
    parts = run_case(case, backend(**doors)).to_dict()
    for record in (whole, parts):
        if record["sqnr_db"] is not None:
            record["sqnr_db"] = round(record["sqnr_db"], 9)  # sums of parts round otherwise
    assert whole["verdict"] == ("fail" if case is not QUANTIZE or doors != CASES[-1][1] else "pass")
    assert {n: v for n, v in parts.items() if not n.startswith("seconds")} == {
        n: v for n, v in whole.items() if not n.startswith("seconds")
    }


def result_of(check, *given, **options):
    found = check("codes", *given, noun="codes", describe=lambda row, column: {"row": row, "column": column}, **options)
    return {
        **vars(found),
        "wrong_elements": None if found.wrong_elements is None else found.wrong_elements.tolist(),
        "tests": [],
    }, found.tests


def test_every_rule_gives_in_parts_what_it_gives_of_the_whole(small) -> None:
    draw = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (31, 48), generator=draw, dtype=torch.uint8)
    other = codes.clone()
    other[torch.tensor([0, 1, 2, 30]), torch.tensor([5, 47, 0, 3])] ^= 0x21
    x = torch.randn(31, 48, generator=draw).bfloat16()
    x[7, 7] = torch.nan
    y = x.clone()
    y.view(-1)[torch.tensor([1, 95, 96, 337 + 7 * 48])] = torch.tensor([0.0, torch.nan, -0.0, 3.0]).bfloat16()
    sources = Sources(x, 1, 16)
    low, high = (torch.nextafter(x, torch.full_like(x, end)) for end in (-torch.inf, torch.inf))
    moved = torch.where(torch.arange(48) % 5 == 0, high, x)
    checks = [
        lambda: result_of(exact_codes, other, codes, E4M3),
        lambda: result_of(exact_floats, y, x),
        lambda: result_of(boundary_codes, other, codes, (codes, codes), E4M3, sources),
        lambda: result_of(boundary_floats, y, x, (low, high), sources),
        lambda: result_of(boundary_floats, moved, x, (x, high), sources),
    ]
    whole = [check() for check in checks]
    small()
    parts = [check() for check in checks]
    for (one, chances), (other_one, others) in zip(whole, parts, strict=True):
        assert one == other_one
        assert [(c.name, c.log_p, c.sentence) for c in chances] == [(c.name, c.log_p, c.sentence) for c in others]
        assert one["mismatches"] or chances
    assert len(whole[-1][1]) == 1
