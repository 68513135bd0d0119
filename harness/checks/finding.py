"""A finding: what a person needs to see of a wrong stage, as plain data.

Keys: stage; rule; sentence; elements, a list of views of single elements (`which` is "first" or "worst", then
coordinates, input, expected and actual in bits and as values, scale, distance in steps); modulo, {"row": {"16":
counts, "128": counts}, "column": …}; heat, {"rows": tile height, "columns": tile width, "counts": rows of mismatch
counts a tile}; steps, the histogram of actual minus expected (`histogram`); census, {"expected": counts of special
values, "actual": …} (`census`). The last two are empty where a stage has no single expected number an element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.chunks import chunks
from narrowgauge.spec.formats import Format

Describe = Callable[[int, int], dict[str, Any]]
"""(row, column) of an element to what is known of it."""

_MODULI = (16, 32, 128)
_HEAT = 32
"""A heat map has at most this many tiles a side."""


SPECIAL = ("nan", "inf", "negative_zero", "saturated", "subnormal", "no_code")
"""What a census counts. saturated: the largest finite magnitude. no_code: bytes above the codes of a 6-bit format."""


@dataclass(frozen=True)
class Sides:
    """The two results that a stage compares, both (M, N), in the coordinates of its finding."""

    expected: torch.Tensor
    actual: torch.Tensor
    fmt: Format | None = None
    """Of what they are the codes, uint8, one an element; None of floating-point numbers."""


def sentence(wrong: torch.Tensor, distance: torch.Tensor, noun: str) -> str:
    """How many, how far, where: "37 of 1 048 576 codes differ, each by 1 step, all at column 15 modulo 16"."""
    count, total = int(wrong.sum()), wrong.numel()
    far = [part for rows in chunks(wrong) if (part := distance[rows][wrong[rows]]).numel()]
    low, high = min(int(part.amin()) for part in far), max(int(part.amax()) for part in far)
    steps = f"{spaced(high)} step{'s' if high != 1 else ''}"
    # A distance of 0 is a sign of zero.
    how_far = "each the other zero" if high == 0 else f"each by {steps}" if low == high else f"by up to {steps}"
    return f"{spaced(count)} of {spaced(total)} {noun} differ, {how_far}{_where(wrong)}"


def spaced(count: int) -> str:
    """A count with a space between thousands."""
    return f"{count:,}".replace(",", " ")


def _where(wrong: torch.Tensor) -> str:
    if wrong.dim() != 2 or wrong.numel() == 1:
        return ""
    rows, columns = (wrong.any(across).nonzero()[:, 0] for across in (1, 0))
    first = int(rows[0])
    here = f"row {first}, column {int(wrong[first].nonzero()[0])}"
    if rows.numel() == columns.numel() == 1:
        return f", at {here}"
    for name, index, extent in (("row", rows, wrong.shape[0]), ("column", columns, wrong.shape[1])):
        if extent > 1 and index.numel() == 1:
            return f", all in {name} {int(index[0])}"
        for modulus in _MODULI:
            phase = index % modulus
            if extent > modulus and bool((phase == phase[0]).all()):
                return f", all at {name} {int(phase[0])} modulo {modulus}"
    return f", the first at {here}"


def finding(
    stage: str,
    rule: str,
    text: str,
    wrong: torch.Tensor,
    distance: torch.Tensor,
    *,
    describe: Describe,
    sides: Sides | None = None,
) -> dict[str, Any]:
    """The finding of a stage with wrong elements, a bool tensor (M, N) or (1,), and their distances in steps."""
    grid = wrong.view(1, -1) if wrong.dim() == 1 else wrong
    steps = distance.view(grid.shape)
    width = grid.shape[1]
    first, worst = int(grid.view(-1).view(torch.uint8).argmax()), int(steps.view(-1).argmax())
    elements = []
    for which, flat in (("first", first), ("worst", worst)) if worst != first else (("first", first),):
        row, column = divmod(flat, width)
        elements.append({"which": which, **describe(row, column), "distance": int(steps[row, column])})
    return {
        "stage": stage, "rule": rule, "sentence": text, "elements": elements,
        "modulo": {"row": _modulo(grid, 1), "column": _modulo(grid, 0)}, "heat": _heat(grid),
        "steps": [] if sides is None else histogram(sides), "census": {} if sides is None else census(sides),
    }  # fmt: skip


def histogram(sides: Sides) -> list[list[int]]:
    """[low, high, count]: how many elements are low to high steps above what is expected, in order, without a gap.

    Bins are 0, 1, 2, 3 to 4, 5 to 8 and so on, and the same below. Elements that are NaN, or no code, are not counted.
    """
    counts = sum(_steps(sides.expected[rows], sides.actual[rows], sides.fmt) for rows in chunks(sides.expected))
    assert isinstance(counts, torch.Tensor)
    some = counts.nonzero()[:, 0].tolist()
    if not some:
        return []
    return [[*_span(number - _FARTHEST), int(counts[number])] for number in range(some[0], some[-1] + 1)]


def _steps(expected: torch.Tensor, actual: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """Elements of each bin, from `-_FARTHEST` on."""
    steps = (_ordinals(actual, fmt) - _ordinals(expected, fmt))[_numbers(expected, fmt) & _numbers(actual, fmt)]
    far = steps.abs()
    size = torch.frexp((far - 1).clamp(min=0).double()).exponent.long() + 1
    bins = torch.where(far == 0, 0, torch.where(steps < 0, -size, size))
    return torch.bincount(bins + _FARTHEST, minlength=2 * _FARTHEST + 1)


_FARTHEST = 34
"""The last bin, of the two ends of float32: 2^33 steps."""


def _span(number: int) -> tuple[int, int]:
    """The least and the greatest number of steps of a bin."""
    if number < 0:
        low, high = _span(-number)
        return -high, -low
    return ((1 << number - 2) + 1, 1 << number - 1) if number > 1 else (number, number)


def census(sides: Sides) -> dict[str, dict[str, int]]:
    """How many special values either side has, by the names of `SPECIAL`; those that neither has are left out."""
    both: dict[str, Counter[str]] = {"expected": Counter(), "actual": Counter()}
    for rows in chunks(sides.expected):
        for name, counts in both.items():
            counts.update(_special(getattr(sides, name)[rows], sides.fmt))
    present = [name for name in SPECIAL if any(counts.get(name) for counts in both.values())]
    return {side: {name: counts.get(name, 0) for name in present} for side, counts in both.items()} if present else {}


def _ordinals(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    return ordinal.of_floats(x) if fmt is None else ordinal.of_codes(x, fmt)


def _numbers(x: torch.Tensor, fmt: Format | None) -> torch.Tensor:
    """bool: what is a number, or infinite."""
    if fmt is None:
        return ~x.isnan()
    nameless = [SPECIAL.index(name) for name in ("nan", "no_code")]
    return ~torch.isin(_kinds(fmt, x.device)[x.long()], torch.tensor(nameless, device=x.device))


def _special(x: torch.Tensor, fmt: Format | None) -> dict[str, int]:
    if fmt is not None:
        counts = torch.bincount(_kinds(fmt, x.device)[x.long()].view(-1), minlength=len(SPECIAL)).tolist()
        return dict(zip(SPECIAL, counts, strict=False))
    limits, far = torch.finfo(x.dtype), x.abs()
    kinds = {
        "nan": x.isnan(), "inf": x.isinf(), "negative_zero": (x == 0) & x.signbit(), "saturated": far == limits.max,
        "subnormal": (far > 0) & (far < limits.tiny),
    }  # fmt: skip
    return {name: int(found.sum()) for name, found in kinds.items()}


@cache
def _kinds(fmt: Format, device: torch.device) -> torch.Tensor:
    """For every byte, what of `SPECIAL` it is; the next number of what is nothing special."""
    return torch.tensor([_kind(code, fmt) for code in range(256)], device=device)


def _kind(code: int, fmt: Format) -> int:
    if code >= fmt.codes:
        return SPECIAL.index("no_code")
    value, magnitude = fmt.value(code), code & ~fmt.sign_code
    found = {
        "nan": math.isnan(value), "inf": math.isinf(value), "negative_zero": value == 0 and code != 0,
        "saturated": abs(value) == fmt.max, "subnormal": fmt.signed and 0 < magnitude < 1 << fmt.mantissa_bits,
    }  # fmt: skip
    return next((SPECIAL.index(name) for name, holds in found.items() if holds), len(SPECIAL))


def _modulo(wrong: torch.Tensor, summed: int) -> dict[str, list[int]]:
    counts = wrong.sum(summed)
    found = {}
    for modulus in _MODULI:
        padded = torch.nn.functional.pad(counts, (0, -counts.numel() % modulus))
        found[str(modulus)] = padded.view(-1, modulus).sum(0).tolist()
    return found


def _heat(wrong: torch.Tensor) -> dict[str, Any]:
    height, width = (max(16, -(-extent // _HEAT)) for extent in wrong.shape)
    padded = torch.nn.functional.pad(wrong.view(torch.uint8), (0, -wrong.shape[1] % width, 0, -wrong.shape[0] % height))
    tiles = padded.view(padded.shape[0] // height, height, -1, width).sum((1, 3))
    return {"rows": height, "columns": width, "counts": tiles.tolist()}


def bits(value: int, width: int) -> str:
    """A code in binary, its sign, exponent and mantissa together: 0b0101."""
    return f"0b{value:0{width}b}"


def float_view(x: torch.Tensor) -> tuple[float | str, str]:
    """A single number of a tensor, as a value that JSON can hold and as hexadecimal bits."""
    width = x.element_size()
    integer = {4: torch.int32, 2: torch.int16, 8: torch.int64}[width]
    raw = int(x.reshape(1).contiguous().view(integer)) & ((1 << (8 * width)) - 1)
    value = float(x)
    return (value if abs(value) < float("inf") else str(value)), f"0x{raw:0{2 * width}X}"
