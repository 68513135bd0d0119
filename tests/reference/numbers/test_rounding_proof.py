"""A second proof of rounding to nearest even: the source of the reference, run on symbols, compares with midpoints.

z3 decides if a float32 magnitude exists whose code differs. The proof is of `nearest_even` with the clamp to the
largest code, for magnitudes up to infinity. Scales, signs and NaN have no proof here.
"""

from __future__ import annotations

import struct
from typing import Any, Self

import pytest
import torch

from narrowgauge.reference.numbers.rounding import FLOAT32_INF_BITS, nearest_even
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format

z3 = pytest.importorskip("z3", reason="z3 is not installed: pip install z3-solver")
pytestmark = pytest.mark.long


class Symbol:
    """The tensor operations of `nearest_even` on a 32-bit word, an expression of z3. Sums round to nearest even."""

    def __init__(self, word: Any, *, real: bool = False) -> None:
        self.word, self.real = word, real

    @staticmethod
    def _of(value: Symbol | int) -> Any:
        return value.word if isinstance(value, Symbol) else z3.BitVecVal(value, 32)

    def _set(self, word: Any) -> Self:
        assert not self.real
        self.word = word
        return self

    def __add__(self, other: Symbol) -> Symbol:
        assert self.real
        assert other.real
        floats = [z3.fpBVToFP(each.word, z3.Float32()) for each in (self, other)]
        return Symbol(z3.fpToIEEEBV(z3.fpAdd(z3.RNE(), *floats)), real=True)

    def add_(self, other: Symbol | int) -> Self:
        return self._set(self.word + self._of(other))

    def sub_(self, other: Symbol | int) -> Self:
        return self._set(self.word - self._of(other))

    def bitwise_and_(self, other: int) -> Self:
        return self._set(self.word & self._of(other))

    def bitwise_right_shift_(self, count: int) -> Self:
        return self._set(self.word >> count)

    def clamp(self, low: int, high: int) -> Symbol:
        low_word, high_word = self._of(low), self._of(high)
        raised = z3.If(self.word < low_word, low_word, self.word)
        return Symbol(z3.If(raised > high_word, high_word, raised))

    def view(self, dtype: torch.dtype) -> Symbol:
        assert dtype in (torch.float32, torch.int32)
        return Symbol(self.word, real=dtype == torch.float32)


def bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def by_comparison(magnitude: Any, fmt: Format) -> Any:
    """The number of midpoints at or below a magnitude; a midpoint below an odd code is a tie that goes down."""
    code = z3.BitVecVal(0, 32)
    points = fmt.values[: fmt.max_code + 1]
    for upper in range(1, len(points)):
        midpoint = (points[upper - 1] + points[upper]) / 2
        assert struct.unpack("<f", struct.pack("<f", midpoint))[0] == midpoint
        code = z3.If(magnitude >= bits(midpoint) + upper % 2, z3.BitVecVal(upper, 32), code)
    return code


@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("wrong", [False, True])
def test_rounding_is_comparison_with_midpoints(fmt: Format, wrong: bool) -> None:
    magnitude = z3.BitVec("magnitude", 32)
    symbol: Any = Symbol(magnitude)
    code = nearest_even(symbol, fmt).clamp(0, fmt.max_code).word
    expected = by_comparison(magnitude, fmt)
    if wrong:  # the tie below code 1 goes up
        expected = z3.If(magnitude == bits(fmt.values[1] / 2), z3.BitVecVal(1, 32), expected)
    solver = z3.SolverFor("QF_BVFP")
    solver.add(magnitude >= 0, magnitude <= FLOAT32_INF_BITS, code != expected)
    found = solver.check()
    if not wrong:
        assert found == z3.unsat
        return
    assert found == z3.sat
    assert solver.model()[magnitude].as_long() == bits(fmt.values[1] / 2)
