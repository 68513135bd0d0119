"""`narrowgauge.metrics` against a scalar definition with fractions, on all codes of every format of one byte."""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.harness.api.error_figures import metrics as module
from narrowgauge.harness.api.error_figures.metrics import DTYPES, Metrics, metrics
from narrowgauge.spec.formats import E2M1, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Format

FORMATS = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float8_e8m0fnu: E8M0, torch.float4_e2m1fn_x2: E2M1,
    torch.float8_e4m3fnuz: E4M3FNUZ, torch.float8_e5m2fnuz: E5M2FNUZ,
}  # fmt: skip
SPECIAL = {
    torch.float32: [0x0000_0001, 0x8000_0001, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_0001],
    torch.bfloat16: [0x0001, 0x8001, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1],
    torch.float16: [0x0001, 0x8001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01],
}


def number(value: float) -> Fraction | None:
    return Fraction(value) if math.isfinite(value) else None


def place(value: float, ladder: list[float]) -> int:
    """Position of a number among all numbers of its format, of which a zero counts once."""
    return ladder.index(value)


def expected_metrics(actual: list[float], expected: list[float], ladder: list[float]) -> dict[str, Any]:
    """The figures by their definitions, one element at a time."""
    found: dict[str, Any] = dict.fromkeys(
        ("unequal", "nan_mismatches", "inf_mismatches", "zero_sign_mismatches", "max_ulp"), 0
    )
    bins: dict[tuple[int, int], int] = {}
    noise, signal, infinite, largest = Fraction(0), Fraction(0), False, Fraction(0)
    for a, e in zip(actual, expected, strict=True):
        signal += (number(e) or 0) ** 2
        if math.isnan(a) or math.isnan(e):
            one = math.isnan(a) != math.isnan(e)
            found["nan_mismatches"] += one
            found["unequal"] += one
            infinite |= one
            continue
        steps = place(a, ladder) - place(e, ladder)
        found["max_ulp"] = max(found["max_ulp"], abs(steps))
        low, high = 0, 0
        if steps:
            high = 1 << (abs(steps) - 1).bit_length()
            low = high // 2 + 1 if high > 2 else high
            low, high = (low, high) if steps > 0 else (-high, -low)
        bins[low, high] = bins.get((low, high), 0) + 1
        found["unequal"] += a != e
        found["zero_sign_mismatches"] += a == e == 0 and math.copysign(1, a) != math.copysign(1, e)
        if a != e and (math.isinf(a) or math.isinf(e)):
            found["inf_mismatches"] += 1
            infinite = True
        elif a != e:
            difference = abs(Fraction(a) - Fraction(e))
            noise, largest = noise + difference**2, max(largest, difference)
    relative = math.inf if infinite or (noise and not signal) else math.sqrt(noise / signal) if noise else 0.0
    return found | {
        "elements": len(actual), "max_abs_error": math.inf if infinite else float(largest), "relative_error": relative,
        "sqnr_db": -20 * math.log10(relative) if relative else math.inf,
        "histogram": tuple((low, high, count) for (low, high), count in sorted(bins.items())),
    }  # fmt: skip


def check(result: Metrics, right: dict[str, Any]) -> None:
    for name, value in right.items():
        found = getattr(result, name)
        if isinstance(value, float):
            assert found == pytest.approx(value, rel=1e-12, abs=0), name
        else:
            assert found == value, name
    assert len(right) == len(result.__dataclass_fields__)


def ladder_of(fmt: Format) -> list[float]:
    return sorted({value for value in fmt.values if not math.isnan(value)})


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shift", [0, 1, 3, 128, 200])
def test_every_code_of_a_narrow_dtype(dtype: torch.dtype, shift: int) -> None:
    fmt = FORMATS[dtype]
    codes = np.arange(256, dtype=np.uint8)
    others = np.roll(codes, shift)
    read = (
        (lambda c: [v for byte in c for v in (fmt.values[byte & 15], fmt.values[byte >> 4])])
        if fmt is E2M1
        else (lambda c: [fmt.values[byte] for byte in c])
    )
    actual, expected = (torch.from_numpy(c).view(dtype) for c in (codes, others))
    check(metrics(actual, expected), expected_metrics(read(codes), read(others), ladder_of(fmt)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_65536_numbers_of_a_dtype_beside_their_neighbours(dtype: torch.dtype) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    actual, expected = (b.to(torch.int16).view(dtype) for b in (bits, bits.roll(1)))
    result = metrics(actual, expected)
    a, e = (x.double().numpy() for x in (actual, expected))
    nan = np.isnan(a) ^ np.isnan(e)
    both = ~np.isnan(a) & ~np.isnan(e)
    inf = both & (np.isinf(a) | np.isinf(e)) & (a != e)
    assert result.nan_mismatches == int(nan.sum()) == 4
    assert result.inf_mismatches == int(inf.sum()) == 2
    assert result.zero_sign_mismatches == 0
    assert result.unequal == int((both & (a != e)).sum()) + 4
    ladder = {value: n for n, value in enumerate(sorted(set(a[~np.isnan(a)])))}
    steps = [ladder[x] - ladder[y] for x, y in zip(a[both], e[both], strict=True)]
    assert result.max_ulp == max(map(abs, steps))
    assert sum(count for _, _, count in result.histogram) == int(both.sum())
    assert {(low, high): count for low, high, count in result.histogram}[1, 1] == steps.count(1)
    finite = np.isfinite(a) & np.isfinite(e)
    rest = metrics(actual[torch.from_numpy(finite)], expected[torch.from_numpy(finite)])
    assert rest.max_abs_error == np.abs(a - e)[finite].max()
    assert rest.relative_error == pytest.approx(np.linalg.norm((a - e)[finite]) / np.linalg.norm(e[finite]), rel=1e-12)
    assert rest.sqnr_db == pytest.approx(-20 * math.log10(rest.relative_error))


@pytest.mark.parametrize("dtype", SPECIAL, ids=str)
def test_pairs_of_special_numbers(dtype: torch.dtype) -> None:
    integer, one = (torch.int32, 0x3F80_0000) if dtype == torch.float32 else (torch.int16, 0x3C00)
    zero = 1 << (8 * dtype.itemsize - 1)
    words = torch.tensor([0, zero, one, *SPECIAL[dtype]], dtype=torch.int64).to(integer).view(dtype)
    pairs = list(itertools.product(range(len(words)), repeat=2))
    for pair in pairs:
        actual, expected = (words[[n]] for n in pair)
        a, e = float(actual), float(expected)
        result = metrics(actual, expected)
        nan, equal = math.isnan(a) != math.isnan(e), a == e or (math.isnan(a) and math.isnan(e))
        assert (result.unequal, result.nan_mismatches) == (not equal, nan)
        assert result.inf_mismatches == (not equal and not nan and (math.isinf(a) or math.isinf(e)))
        difference = 0.0 if equal else math.inf if nan or result.inf_mismatches else abs(a - e)
        assert result.max_abs_error == difference
        assert result.relative_error == pytest.approx(
            0.0 if equal else difference / abs(e) if e and math.isfinite(e) and difference < math.inf else math.inf
        )
        assert result.zero_sign_mismatches == (a == e == 0 and math.copysign(1, a) != math.copysign(1, e))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_a_narrow_result_beside_a_float32_reference(dtype: torch.dtype) -> None:
    """Steps are those of float32."""
    raw = torch.arange(1, 65, dtype=torch.uint8).view(8, 8)
    actual = raw.view(dtype) if dtype in FORMATS else raw.to(dtype)
    fmt = FORMATS.get(dtype)
    values = (
        raw.double()
        if fmt is None
        else torch.tensor(fmt.values, dtype=torch.float64)[
            (torch.stack([raw & 15, raw >> 4], -1).flatten(1) if fmt is E2M1 else raw).long()
        ]
    )
    expected = values.float()
    assert metrics(actual, expected).max_ulp == 0
    up = torch.nextafter(expected, torch.tensor(torch.inf))
    assert metrics(actual, up).histogram == ((-1, -1, up.numel()),)


def test_chunks_strides_and_dimensions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(5, 7, 9, generator=generator)
    actual = expected + torch.randn(5, 7, 9, generator=generator) * 1e-3
    actual[1, 2, 3], expected[4, 4, 4] = torch.inf, torch.nan
    whole = metrics(actual.flatten(), expected.flatten())
    assert metrics(actual.permute(2, 0, 1), expected.permute(2, 0, 1)).histogram == whole.histogram
    monkeypatch.setattr(module, "CHUNK", 8)
    assert metrics(actual, expected) == whole
    assert (whole.nan_mismatches, whole.inf_mismatches) == (1, 1)
    clean = actual.nan_to_num(posinf=1.0), expected.nan_to_num(nan=1.0)
    parts = metrics(*clean)
    monkeypatch.undo()
    assert metrics(*clean).relative_error == pytest.approx(parts.relative_error, rel=1e-12)


@pytest.mark.parametrize(
    ("actual", "expected", "error", "text"),
    [
        (torch.zeros(2), torch.zeros(3), ValueError, "actual has shape (2,); expected has (3,)"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), TypeError, "convert expected to float32"),
        (torch.zeros(2).half(), torch.zeros(2).bfloat16(), TypeError, "convert expected to float16 or float32"),
        (torch.zeros(2).double(), torch.zeros(2), TypeError, "actual is float64; metrics takes float32, bfloat16"),
        (torch.zeros(2), torch.zeros(2).int(), TypeError, "expected is int32; metrics takes"),
        (torch.zeros(2), [0.0, 0.0], TypeError, "list"),
    ],
)
def test_arguments_that_do_not_fit_are_named(actual: Any, expected: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        metrics(actual, expected)
