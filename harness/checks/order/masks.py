"""Masks: probes that find the products added between two products.

Source: FPRev, arXiv 2411.00442. A large product M at column i and −M at column j absorb every small product that is
added to their sum before the two meet. The number of small products lost is the number of columns below the lowest
common node of i and j. A term that is aligned and truncated is lost in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from narrowgauge.harness.checks.order.operands import RANGES, OperandDtype, dtypes_of, operand

GemmFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""function(a, b): a (M, K) and b (N, K) to (M, N)."""
_WIDE = (torch.float32, torch.bfloat16)
"""Dtypes with the range of float32: a mask needs large factors in one operand only."""
_COUNTED = 4096
"""Small products of a probe, at most."""
_ABSORBED = 2.0**-26
"""Part of a mask that every known accumulator loses."""


class OrderUnknown(Exception):
    """No order of summation explains the results of the probes. The message says why."""


class MaskedGemm:
    """A GEMM of fixed shape and dtype, whose additions are probed."""

    def __init__(
        self, function: GemmFunction, shape: tuple[int, int, int], dtype: OperandDtype, device: torch.device | str
    ) -> None:
        """shape: (M, K, N). dtype: of both operands, or of a and of b. Raises ValueError for a dtype without masks."""
        self.function, self.dtypes, self.device = function, dtypes_of(dtype), device
        self.rows, self.columns, self.others = shape
        self.calls = 0
        ranges = [RANGES.get(one, (0, 0)) for one in self.dtypes]  # E2M1 has no masks
        self.two_sided = not set(self.dtypes) <= set(_WIDE)
        """Whether a mask needs large factors in both operands: then a probe has a row and a column of its own."""
        self.large, self.small = (tuple(2.0 ** one[k] for one in ranges) for k in (0, 1))
        """Factors of a mask and of a small product, in a and in b. In b they are 1 unless `two_sided`."""
        if not self.two_sided:
            self.large, self.small = (self.large[0], 1.0), (self.small[0], 1.0)
        self.counted = 1
        """Small products that a probe counts exactly."""
        self._ones: torch.Tensor | None = None
        """The second operand of probes with masks in the first alone."""
        self.single = False
        """Whether only the first output is probed, with a call for each probe."""
        self.out_dtype = torch.float32
        """The dtype of the last result."""

    @property
    def dtype(self) -> OperandDtype:
        """The dtype of both operands, or of a and of b."""
        return self.dtypes[0] if self.dtypes[0] is self.dtypes[1] else self.dtypes

    @property
    def batch(self) -> int:
        """Probes of a call."""
        if self.single:
            return 1
        return min(self.rows, self.others) if self.two_sided else self.rows

    def run(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The results of the function as float64. a (M, K), b (N, K), float32 numbers of the dtype.

        Raises OrderUnknown if the function does not return a floating-point (M, N) tensor.
        """
        self.calls += 1
        y = self.function(*(operand(x.to(self.device), one) for x, one in zip((a, b), self.dtypes, strict=True)))
        if not isinstance(y, torch.Tensor) or y.shape != (self.rows, self.others) or not y.is_floating_point():
            shape = tuple(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise OrderUnknown(
                f"the function returned {shape}, not a floating-point ({self.rows}, {self.others}) tensor"
            )
        self.out_dtype = y.dtype
        return y.double().cpu()

    def measured(self, rows: Sequence[dict[int, float]]) -> list[float]:
        """The results of several sums: a probe has products, signed powers of two, at a few columns, and 0 elsewhere.

        Raises OrderUnknown if equal rows or columns give unequal sums.
        """
        results: list[float] = []
        for start in range(0, len(rows), self.batch):
            part = rows[start : start + self.batch]
            a = torch.zeros(self.rows, self.columns)
            b = torch.zeros(self.others, self.columns) if self.two_sided else torch.ones(self.others, self.columns)
            for row, products in enumerate(part):
                at = torch.tensor(list(products), dtype=torch.int64)
                values = torch.tensor(list(products.values()), dtype=torch.float64)
                if self.two_sided:
                    exponents = torch.log2(values.abs())
                    (most, most_b), (least, least_b) = (tuple(map(math.log2, x)) for x in (self.large, self.small))
                    half = (exponents / 2).floor().maximum(exponents - most).minimum(exponents - least)
                    half = half.clamp(least_b, most_b)
                    a[row, at], b[row, at] = (values.sign() * 2.0 ** (exponents - half)).float(), (2.0**half).float()
                else:
                    a[row, at] = values.float()
            results += self._sums(self.run(a, b), len(part))
        return results

    def scale(self) -> tuple[float, float]:
        """The product of a mask, and a small product."""
        return math.prod(self.large), math.prod(self.small)

    def _narrow_to_float16(self) -> None:
        """Take smaller masks, 2^15, if a partial sum of M overflows in an accumulator of float16.

        Then products of 2^-22 are far enough below a mask to count many.
        """
        last = self.columns - 1
        if self.out_dtype is not torch.float16 or last < 1 or self.scale()[0] < 2.0**16:
            return
        large = self.scale()[0]
        if self.measured([{0: large, last: -large}, {0: large, 1: -large}]) == [0.0, 0.0]:
            return
        if self.two_sided:
            self.large = (2.0**8, 2.0**7)
            self.small = tuple(2.0 ** (-9 if one is torch.float8_e4m3fn else -11) for one in self.dtypes)
        else:
            self.large, self.small = (2.0**15, 1.0), (2.0**-22, 1.0)

    def calibrate(self) -> None:
        """Find how many small products are counted exactly. Raises OrderUnknown if not even 8 are."""
        self.measured([{0: self.scale()[1]}])  # gives the dtype of the output
        self._narrow_to_float16()
        large, small = self.scale()
        bits = int(2 / torch.finfo(self.out_dtype).eps)
        count = max(1, min(self.columns, _COUNTED, bits, int(large * _ABSORBED / small)))
        while True:
            starts = range(0, self.columns, count)
            parts = [range(start, min(start + count - less, self.columns)) for start in starts for less in (0, 1)]
            sums = self.measured([dict.fromkeys(part, small) for part in parts])
            if sums == [len(part) * small for part in parts]:
                self.counted = count
                return
            if count <= min(8, self.columns):
                raise OrderUnknown(f"a sum of {count} products of {small:g} is {sums[0]:g}")
            count = max(count // 2, 1)

    def lost(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        """For each pair of columns: the number of columns below their lowest common node, both included.

        Raises OrderUnknown if a result is no count.
        """
        starts = range(0, self.columns, self.counted)
        parts = [range(start, min(start + self.counted, self.columns)) for start in starts]
        kept = self._kept([(i, j, part) for i, j in pairs for part in parts])
        return [
            self.columns - sum(kept[number * len(parts) : (number + 1) * len(parts)]) for number in range(len(pairs))
        ]

    def lost_in_order(self, start: int, others: Sequence[int]) -> list[int]:
        """`lost` of pairs of `start` and a later column, if only columns `start` to e are below every node.

        If a probe counts few products, a first probe has a product in every n-th column, and a second one in the
        columns between two of these. Raises OrderUnknown if the results contradict the assumption.
        """
        if self.counted >= self.columns:
            return self.lost([(start, other) for other in others])
        step = -(-self.columns // self.counted)
        coarse = range(start, self.columns, step)
        kept = self._kept([(start, other, coarse) for other in others])
        windows = []
        for other, count in zip(others, kept, strict=True):
            on_grid = other in coarse
            lost = len(coarse) - 1 - on_grid - count  # of the columns of the grid besides `start` and `other`
            last, following = (number + (on_grid and number >= (other - start) // step) for number in (lost, lost + 1))
            least = max(other, coarse[last])
            most = coarse[following] - 1 if following < len(coarse) else self.columns - 1
            if least > most or most - least >= self.counted:
                raise OrderUnknown(f"columns {start} and {other} have a node of columns that are not in order")
            windows.append(range(least + 1, most + 1))
        kept = self._kept([(start, other, window) for other, window in zip(others, windows, strict=True)])
        return [window.stop - count - start for window, count in zip(windows, kept, strict=True)]

    def _kept(self, probes: Sequence[tuple[int, int, range]]) -> list[int]:
        """For each probe (i, j, columns): the small products left of those at `columns`, besides masks at i and j.

        Columns i and j have no small product and count as lost. Raises OrderUnknown if a result is no count.
        """
        sums: list[float] = []
        for first in range(0, len(probes), self.batch):
            sums += self._masked(probes[first : first + self.batch])
        large, small = self.scale()
        counts = [total / small for total in sums]
        for (i, j, columns), count in zip(probes, counts, strict=True):
            most = len(columns) - (i in columns) - (j in columns)
            if not (0 <= count <= most and count == int(count)):
                raise OrderUnknown(
                    f"with {large:g} and {-large:g} at columns {i} and {j}, {count:g} of {most} other products are "
                    "left in the sum, which is no count"
                )
        return [int(count) for count in counts]

    def _masked(self, probes: Sequence[tuple[int, int, range]]) -> list[float]:
        """The sums of a call: for each probe (i, j, columns) small products at the columns, and two masks."""
        numbers = torch.tensor([(i, j, part.start, part.stop, part.step) for i, j, part in probes]).to(self.device)
        i, j, start, stop, step = numbers.unsqueeze(2).unbind(1)
        at = torch.arange(self.columns, device=self.device)
        small = (at >= start) & (at < stop) & ((at - start) % step == 0)
        rows, others = (
            (small * least).where((at != i) & (at != j), most)
            for least, most in zip(self.small, self.large, strict=True)
        )
        rows = rows.where(at != j, -self.large[0])
        a = torch.nn.functional.pad(rows, (0, 0, 0, self.rows - len(rows)))
        if self.two_sided:
            b = torch.nn.functional.pad(others, (0, 0, 0, self.others - len(rows)))
        elif self._ones is None:
            b = self._ones = torch.ones(self.others, self.columns, device=self.device, dtype=self.dtypes[1])
        else:
            b = self._ones
        return self._sums(self.run(a, b), len(probes))

    def _sums(self, y: torch.Tensor, count: int) -> list[float]:
        """The results of `count` probes in an output. Raises OrderUnknown if the columns of a probe disagree."""
        if self.two_sided:
            return list(y.diagonal()[:count].tolist())
        if not self.single and not bool((y[:count] == y[:count, :1]).all()):
            raise OrderUnknown("the columns of the output add in different orders")
        return list(y[:count, 0].tolist())
