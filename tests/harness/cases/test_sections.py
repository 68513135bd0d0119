"""How rows are divided into sections."""

import re

import pytest

from narrowgauge.harness.cases.sections import MOST, section_sizes


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("even:4", 64, (16, 16, 16, 16)), ("even:1", 7, (7,)), ("even:4", 0, (0, 0, 0, 0)),
        ("front:4", 64, (0, 16, 16, 32)), ("middle:4", 64, (16, 16, 0, 32)), ("end:4", 64, (32, 16, 16, 0)),
        ("front:2", 64, (0, 64)), ("end:2", 64, (64, 0)), ("middle:3", 48, (16, 0, 32)),
        ("middle:5", 5, (1, 1, 0, 1, 2)),
        ("rows:17,0,47", 64, (17, 0, 47)), ("rows:5", 5, (5,)),
        ("empty:3", 0, (0, 0, 0)), ("ragged:1", 7, (7,)), ("ragged:2", 48, (12, 36)),
    ],
)  # fmt: skip
def test_sizes(text, rows, expected):
    assert section_sizes(text, rows) == expected


@pytest.mark.parametrize("count", [*range(1, 65), 96, MOST])
def test_every_count_divides_its_rows(count):
    for kind, least in (("even", 1), ("front", 2), ("middle", 3), ("end", 2)):
        if count >= least:
            for whole in (1, 16):
                sizes = section_sizes(f"{kind}:{count}", 16 * count, whole=whole)
                assert (len(sizes), sum(sizes)) == (count, 16 * count)
                assert sizes.count(0) == (kind != "even")
    assert section_sizes(f"empty:{count}", 0) == (0,) * count


@pytest.mark.parametrize("count", [*range(2, 65), 96, MOST])
def test_ragged_sections_end_inside_a_tile(count):
    for whole, tile in ((1, 16), (16, 128), (32, 128), (64, 64), (128, 128)):
        rows = whole * (40 * count + 3 * count**2)
        sizes = section_sizes(f"ragged:{count}", rows, whole=whole)
        assert (len(sizes), sum(sizes), min(sizes) > 0) == (count, rows, True)
        assert all(size % whole == 0 for size in sizes)
        assert len(set(sizes)) > count / 2
        if whole <= 32:
            assert all(size % tile for size in sizes)
    assert section_sizes("ragged:7", 300) == section_sizes("ragged:7", 300)


@pytest.mark.parametrize(
    ("text", "rows", "whole", "message"),
    [
        ("rows:17,0", 16, 1, "is 'rows:17,0', 17 rows together; M is 16"),
        ("rows:16,24", 40, 16, "is 'rows:16,24'; 24 rows are no whole groups of 16, which the recipe rotates"),
        ("rows:", 0, 1, "is 'rows:'; rows are numbers with commas between them: rows:17,0,48"),
        ("rows:4,-4", 0, 1, "is 'rows:4,-4'; rows are numbers with commas between them: rows:17,0,48"),
        ("rows:" + ",".join("1" * (MOST + 1)), MOST + 1, 1, f"there can be 1 to {MOST} sections"),
        ("row:4", 4, 1, "is 'row:4' (did you mean 'rows'?); sections are a kind and a count, even:4; kinds are even, "),
    ],
)
def test_rows_that_are_given(text, rows, whole, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        section_sizes(text, rows, whole=whole)
