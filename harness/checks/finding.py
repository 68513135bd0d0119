"""Findings: details of a wrong stage for a person, as plain data.

Keys: stage; rule; sentence; elements, a list of views of single elements (`which` is "first" or "worst", then
coordinates, input, expected and actual in bits and as values, scale, distance in words); modulo, {"row": {"16":
counts, "128": counts}, "column": …}; heat, {"rows": tile height, "columns": tile width, "counts": rows of mismatch
counts, a count for each tile}; steps, the histogram of actual minus expected (`histogram`); census, {"expected":
counts of special values, "actual": …} (`census`); table, {"title", "rows": headings, then cells; "different": places
in rows}, elements around the first wrong one, added to the first finding of a case. steps and census are empty if the
elements of a stage have no unique expected number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.distance import Comparison, Distances, format_count
from narrowgauge.harness.checks.row_chunks import cached_chunks
from narrowgauge.spec.formats import Format

Describe = Callable[[int, int], dict[str, Any]]
"""Function from (row, column) to the view of the element."""

_MODULI = (16, 32, 128)
_CHANCE = 6e3
"""Random rows or columns have one phase in a report of 1000: six moduli of rows and columns are tried."""
_HEAT_TILES = 32
"""Largest number of tiles of a heat map in each direction."""


SPECIAL_VALUES = ("nan", "inf", "negative_zero", "saturated", "subnormal", "no_code")
"""Names of a census. saturated: the largest finite magnitude. no_code: bytes above the codes of a 6-bit format."""


def sentence(wrong: torch.Tensor, distances: Distances, noun: str) -> str:
    """Number, distance and place of wrong elements: "37 of 1 048 576 codes differ, each by 1 step, all in row 3"."""
    count = f"{format_count(int(wrong.count_nonzero()))} of {format_count(wrong.numel())}"
    return f"{count} {noun} differ{distances.sentence}{_describe_place(wrong)}".replace(";,", ";").removesuffix(";")


def _describe_place(wrong: torch.Tensor) -> str:
    if wrong.dim() != 2 or wrong.numel() == 1:
        return ""
    rows, columns = (wrong.any(across).nonzero()[:, 0] for across in (1, 0))
    first = int(rows[0])
    place = f"row {first}, column {int(wrong[first].nonzero()[0])}"
    if rows.numel() == columns.numel() == 1:
        return f", at {place}"
    for name, index, extent in (("row", rows, wrong.shape[0]), ("column", columns, wrong.shape[1])):
        if extent > 1 and index.numel() == 1:
            return f", all in {name} {int(index[0])}"
        for modulus in _MODULI:
            phase = index % modulus
            if extent > modulus and modulus ** (len(index) - 1) > _CHANCE and bool((phase == phase[0]).all()):
                return f", all at {name} {int(phase[0])} modulo {modulus}"
    return f", the first at {place}"


def make_finding(
    stage: str,
    rule: str,
    text: str,
    wrong: torch.Tensor,
    distances: Distances | None,
    *,
    describe: Describe,
    comparison: Comparison | None = None,
) -> dict[str, Any]:
    """The finding of a stage with wrong elements, a bool tensor (M, N) or (1,), and their distances.

    `distances`: None if bytes have no distance, only a place. `comparison`: of results with a histogram of distances
    and a census of special values.
    """
    grid = dense(wrong.unsqueeze(0) if wrong.dim() == 1 else wrong)
    first = int(grid.view(-1).view(torch.uint8).argmax())
    worst = first if distances is None else distances.worst
    row_counts, column_counts, heat = _count_places(grid)
    elements = []
    for which, flat in (("first", first), ("worst", worst)) if worst != first else (("first", first),):
        element = {"which": which, **describe(*divmod(flat, grid.shape[1]))}
        elements.append(element if distances is None else element | {"distance": distances.words(flat)})
    return {
        "stage": stage, "rule": rule, "sentence": text, "elements": elements,
        "modulo": {"row": _count_modulo(row_counts), "column": _count_modulo(column_counts)}, "heat": heat,
        "steps": [] if comparison is None else histogram(comparison),
        "census": {} if comparison is None else census(comparison),
        "table": {},
    }  # fmt: skip


def histogram(comparison: Comparison) -> list[list[int]]:
    """Ascending bins [low, high, count]: `count` elements are `low` to `high` steps above the expected number.

    Bins are 0, 1, 2, 3 to 4, 5 to 8 and so on, and the same with negative signs. Between the first and the last
    occupied bin no bin is missing. Elements that are NaN or no code are not counted.
    """
    counts = torch.zeros(2 * _FARTHEST + 1, dtype=torch.int64, device=comparison.expected.device)
    for expected, actual, number in _weighted_pairs(comparison):
        counts += _count_steps(expected, actual, comparison.fmt, number)
    occupied = counts.nonzero()[:, 0].tolist()
    if not occupied:
        return []
    return [[*_bin_range(number - _FARTHEST), int(counts[number])] for number in range(occupied[0], occupied[-1] + 1)]


def _weighted_pairs(comparison: Comparison) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Expected numbers, actual numbers, and the number of elements with this pair of numbers; None: one each.

    A format has few pairs of codes: their number is counted for all elements at once.
    """
    chunks = cached_chunks(comparison.expected)
    if comparison.fmt is None:
        yield from ((comparison.expected[rows], comparison.actual[rows], None) for rows in chunks)
        return
    counts = torch.zeros(1 << 16, dtype=torch.int64, device=comparison.expected.device)
    for rows in chunks:
        pair = comparison.expected[rows].int() << 8 | comparison.actual[rows].int()
        counts += torch.bincount(pair.flatten(), minlength=1 << 16)
    pairs = counts.nonzero()[:, 0]
    yield pairs >> 8, pairs & 0xFF, counts[pairs]


def _count_steps(
    expected: torch.Tensor, actual: torch.Tensor, fmt: Format | None, number: torch.Tensor | None
) -> torch.Tensor:
    """Number of elements in each bin, from bin `-_FARTHEST` on. `number`: of each pair, as of `_weighted_pairs`."""
    numbers = _is_number(expected, fmt) & _is_number(actual, fmt)
    steps = (_ordinals(actual, fmt) - _ordinals(expected, fmt))[numbers]
    magnitude = steps.abs()
    size = torch.frexp((magnitude - 1).clamp(min=0).double()).exponent.long() + 1
    bins = torch.where(magnitude == 0, 0, torch.where(steps < 0, -size, size)) + _FARTHEST
    if number is None:
        return torch.bincount(bins, minlength=2 * _FARTHEST + 1)
    return torch.zeros(2 * _FARTHEST + 1, dtype=torch.int64, device=bins.device).index_add(0, bins, number[numbers])


_FARTHEST = 34
"""Last bin: the two ends of float32 are 2^33 steps apart."""


def _bin_range(number: int) -> tuple[int, int]:
    """Smallest and largest number of steps in a bin."""
    if number < 0:
        low, high = _bin_range(-number)
        return -high, -low
    return ((1 << number - 2) + 1, 1 << number - 1) if number > 1 else (number, number)


def census(comparison: Comparison) -> dict[str, dict[str, int]]:
    """Number of special values of both results, by the names of `SPECIAL_VALUES`. Names with two zeros are left out."""
    counters: dict[str, Counter[str]] = {"expected": Counter(), "actual": Counter()}
    for name, counts in counters.items():
        result = getattr(comparison, name)
        for rows in cached_chunks(result):
            counts.update(_count_special(result[rows], comparison.fmt))
    present = [name for name in SPECIAL_VALUES if any(counts.get(name) for counts in counters.values())]
    return (
        {side: {name: counts.get(name, 0) for name in present} for side, counts in counters.items()} if present else {}
    )


def _ordinals(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    return ordinal.float_ordinals(x) if fmt is None else ordinal.code_ordinals(x, fmt)


def _is_number(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """bool mask of finite and infinite numbers."""
    if fmt is None:
        return ~x.isnan()
    excluded = [SPECIAL_VALUES.index(name) for name in ("nan", "no_code")]
    return ~torch.isin(_special_indices(fmt, x.device)[x.long()], torch.tensor(excluded, device=x.device))


def _count_special(x: torch.Tensor, fmt: Format | None) -> dict[str, int]:
    if fmt is not None:
        of_codes = torch.bincount(x.flatten(), minlength=256)
        counts = torch.zeros(len(SPECIAL_VALUES) + 1, dtype=torch.int64, device=x.device)
        counts.index_add_(0, _special_indices(fmt, x.device), of_codes)
        return dict(zip(SPECIAL_VALUES, counts.tolist(), strict=False))
    limits, magnitude = torch.finfo(x.dtype), x.abs()
    masks = {
        "nan": x.isnan(), "inf": x.isinf(), "negative_zero": (x == 0) & x.signbit(),
        "saturated": magnitude == limits.max, "subnormal": (magnitude > 0) & (magnitude < limits.tiny),
    }  # fmt: skip
    return {name: int(mask.count_nonzero()) for name, mask in masks.items()}


@cache
def _special_indices(fmt: Format, device: torch.device) -> torch.Tensor:
    """For each of 256 bytes the index of its name in `SPECIAL_VALUES`; `len(SPECIAL_VALUES)` for an ordinary number."""
    return torch.tensor([_special_index(code, fmt) for code in range(256)], device=device)


def _special_index(code: int, fmt: Format) -> int:
    if code >= fmt.codes:
        return SPECIAL_VALUES.index("no_code")
    value, magnitude = fmt.value(code), code & ~fmt.sign_code
    properties = {
        "nan": math.isnan(value), "inf": math.isinf(value), "negative_zero": value == 0 and code != 0,
        "saturated": abs(value) == fmt.max, "subnormal": fmt.signed and 0 < magnitude < 1 << fmt.mantissa_bits,
    }  # fmt: skip
    return next((SPECIAL_VALUES.index(name) for name, holds in properties.items() if holds), len(SPECIAL_VALUES))


def _count_places(wrong: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Numbers of wrong elements of each row (M,), of each column (N,), int64, and the heat map of tiles."""
    # Powers of two: tiles of a different size would beat with mistakes repeated in every block, and show bands.
    height, width = (1 << max(0, (-(-extent // _HEAT_TILES) - 1).bit_length()) for extent in wrong.shape)
    of_columns = torch.zeros(wrong.shape[1], dtype=torch.float64, device=wrong.device)
    of_tile_rows = []
    for rows in cached_chunks(wrong):
        ones = wrong[rows].double()  # sums of float64 are faster than sums of bool, and exact
        of_columns += ones.sum(0)
        padded = torch.nn.functional.pad(ones, (0, -wrong.shape[1] % width))
        of_tile_rows.append(padded.view(len(ones), -1, width).sum(2))
    in_rows = torch.cat(of_tile_rows)
    padded = torch.nn.functional.pad(in_rows, (0, 0, 0, -wrong.shape[0] % height))
    tiles = padded.view(-1, height, in_rows.shape[1]).sum(1)
    heat = {"rows": height, "columns": width, "counts": tiles.long().tolist()}
    return in_rows.sum(1).long(), of_columns.long(), heat


def _count_modulo(counts: torch.Tensor) -> dict[str, list[int]]:
    histograms = {}
    for modulus in _MODULI:
        padded = torch.nn.functional.pad(counts, (0, -counts.numel() % modulus))
        histograms[str(modulus)] = padded.view(-1, modulus).sum(0).tolist()
    return histograms


def bits(value: int, width: int) -> str:
    """A code in binary without separators between sign, exponent and mantissa: 0b0101."""
    return f"0b{value:0{width}b}"


def float_view(x: torch.Tensor) -> tuple[float | str, str]:
    """The number of a tensor with a single element, as a value for JSON and as hexadecimal bits."""
    width = x.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    raw = int(x.reshape(1).contiguous().view(integer)) & ((1 << (8 * width)) - 1)
    value = float(x)
    return (value if abs(value) < float("inf") else str(value)), f"0x{raw:0{2 * width}X}"
