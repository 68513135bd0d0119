"""Slices of K that are summed apart, and how their sums are joined: docs/tolerance.md#declared-order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from narrowgauge.reference.numbers.blocks import split_columns
from narrowgauge.spec.summation import Summation

Sum = TypeVar("Sum")


@dataclass(frozen=True)
class SplitK:
    """Slices of K and the order and dtype in which their sums are added."""

    slices: int | tuple[int, ...] = 1
    """Number of slices, or the columns at which slices behind the first one start."""
    tree: bool = False
    """Whether neighbouring sums are added first; else in order of K."""
    dtype: torch.dtype = torch.float32
    """The dtype to which the sums of slices, and each of their additions, are rounded."""

    @classmethod
    def of(cls, declared: Summation, out_dtype: torch.dtype) -> SplitK:
        """The slices of a declared order, for outputs of `out_dtype`."""
        dtype = out_dtype if declared.joined_in_output else torch.float32
        return cls(declared.slices, declared.joined_as_tree, dtype)

    def columns(self, columns: int, step: int) -> Iterator[slice]:
        """The nonempty slices of `columns` columns, in blocks of `step` columns."""
        return split_columns(columns, step, self.slices)

    def joined(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the sums of one or more slices, float32. A single sum is not rounded."""
        if len(sums) == 1:
            return sums[0].float()
        return join([x.to(self.dtype) for x in sums], lambda x, y: x + y, tree=self.tree).float()


def join(sums: Sequence[Sum], add: Callable[[Sum, Sum], Sum], *, tree: bool) -> Sum:
    """One or more sums, added from left to right, or neighbours first in each round of a tree."""
    terms = list(sums)
    while len(terms) > 1:
        pairs = len(terms) // 2 if tree else 1
        terms = [*(add(terms[2 * k], terms[2 * k + 1]) for k in range(pairs)), *terms[2 * pairs :]]
    return terms[0]
