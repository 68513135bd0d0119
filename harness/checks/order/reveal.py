"""The tree of additions of a GEMM, from the numbers of columns below common nodes.

A probe of columns i and j (`MaskedGemm.lost`) counts the columns below the lowest common node of i and j:

            ┌──── + ────┐          second column       1  2  3  4  5
         ┌─ + ─┐        │          lost with column 0  2  3  4  6  6
      ┌─ + ─┐  3     ┌─ + ─┐       chain of column 0   + 1, + 2, + 3, + the term of columns 4 and 5
    ┌ + ┐   2        4     5       lost(4, 5) = 2      the term is a chain of its own, 4 + 5
    0   1                          lost(4, 5) = 6      4 and 5 would be two terms, added at once

The counts with the first column of a chain give its steps (`_Revealed.chain`); the counts among the columns of a step
give its terms (`_Revealed._probed_terms`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

from narrowgauge.harness.checks.order.masks import MaskedGemm, OrderUnknown
from narrowgauge.reference.accumulators.trees import Chain

_DEPTH = 200
_FEW = 40
"""Largest number of columns of a node for a probe of every pair."""
_PROBED_FIRST = 24
"""Number of columns of a node for the first probes: has the node consecutive columns?"""
_SAMPLED = 4
"""Number of probed pairs with the first column, and of neighbours, in a group of columns added at once."""
_VERIFIED, _LEAST_VERIFIED = 192, 48
"""Number of random pairs of columns, and of pairs of neighbours, for the verification of an inferred tree; the least
number if a pair takes several probes."""


def reveal(gemm: MaskedGemm, *, infers: bool = True) -> Chain:
    """The tree of all columns. Raises OrderUnknown if the probes contradict one another.

    `infers`: nodes of many columns in order are probed at a few columns, and a group of columns with the distances of
    an earlier group is taken to have the same terms. The tree is then verified on random pairs of columns; after a
    contradiction every node is probed at every column.
    """
    if gemm.columns == 1:
        return Chain(0)
    if infers and gemm.columns > _FEW:
        try:
            revealed = _Revealed(gemm, infers=True)
            tree = revealed.chain(list(range(gemm.columns)), 0)
            if not revealed.inferred or _holds(gemm, tree):
                return tree
        except OrderUnknown:
            pass
    return _Revealed(gemm, infers=False).chain(list(range(gemm.columns)), 0)


class _Revealed:
    """Parts of the tree of a GEMM."""

    def __init__(self, gemm: MaskedGemm, *, infers: bool) -> None:
        self.gemm, self.infers = gemm, infers
        self.inferred = False
        """Whether a part of the tree was not probed at every column."""
        self._terms_of: dict[tuple[int, ...], list[int | Chain]] = {}
        """Terms of groups of columns, by the distances of the columns from the first column; the terms begin at column
        0."""

    def chain(self, columns: list[int], depth: int, known: list[int] | None = None) -> Chain:
        """The tree of `columns`, two or more: all columns below a node.

        `known`: results of `lost` for the first column with every later column.
        """
        if depth > _DEPTH:
            raise OrderUnknown(f"the tree of additions has more than {_DEPTH} levels of partial sums")
        first, second, before, last = columns[0], columns[1], columns[-2], columns[-1]
        ends = self.gemm.lost([(first, second), (last, before)])
        start = last if ends[1] < ends[0] == len(columns) else first  # a chain may begin with its last column
        others = [column for column in columns if column != start]
        found = known if start == first else None
        if found is None and start == first and self._infers(columns):
            found = self._in_order(start, others)
        sizes = dict(zip(others, found or self.gemm.lost([(start, other) for other in others]), strict=True))
        if len(columns) > 2 and set(sizes.values()) == {2}:
            raise OrderUnknown(
                "no product beside M and −M is lost: the sum is exact, or keeps more bits than a mask has"
            )
        groups: dict[int, list[int]] = {}
        for column in others:
            groups.setdefault(sizes[column], []).append(column)
        steps: list[tuple[int | Chain, ...]] = []
        below = 1
        for size, group in sorted(groups.items()):
            below += len(group)
            if below != size:
                raise OrderUnknown(
                    f"column {start} meets {', '.join(map(str, group[:4]))} below a node of {size} columns, but "
                    f"{below} columns meet there: rows, tiles or calls add in different orders"
                )
            steps.append(tuple(self._terms(group, size, depth)))
        return Chain(start, tuple(steps))

    def _infers(self, columns: list[int]) -> bool:
        return self.infers and len(columns) > _FEW and columns[-1] - columns[0] == len(columns) - 1

    def _in_order(self, start: int, others: list[int]) -> list[int] | None:
        """`lost` of `start` with every column of `others`, which follow `start`, if every node has consecutive columns.

        Few columns are probed, for two reasons. Let f(c) be `lost` of `start` and column c:

            column  a   a+1  …  b
            f       16  16   …  16     f(a) = f(b): both columns meet `start` in the same node, and so do all between
            f       9   10   …  40     f(c) = c − start + 1 at a, a+1 and b: each is the last column of its node,
                                       and so are all between: a chain with a column per step

        None if a probe contradicts.
        """
        found: dict[int, int] = {}

        def probe(columns: Sequence[int]) -> None:
            wanted = sorted(set(columns) - set(found))
            found.update(zip(wanted, self.gemm.lost_in_order(start, wanted), strict=True))

        first = sorted({others[0], others[-1], *random.Random(len(others)).sample(others, _PROBED_FIRST)})
        open_ranges = list(pairwise(first))
        try:
            probe(first)
        except OrderUnknown:
            return None
        if [found[column] for column in first] != sorted(found.values()):
            return None
        self.inferred = True
        while open_ranges:
            differing = [(low, high) for low, high in open_ranges if found[low] != found[high]]
            probe([column for low, high in differing for column in (low + 1, (low + high) // 2)])
            further: list[tuple[int, int]] = []
            for low, high in open_ranges:
                last = all(found[column] == column - start + 1 for column in (low, high, min(low + 1, high)))
                if found[low] == found[high] or last:
                    step = 0 if found[low] == found[high] else 1
                    found.update({column: found[low] + step * (column - low) for column in range(low, high)})
                elif high - low > 1:
                    middle = (low + high) // 2
                    further += [part for part in ((low, middle), (middle, high)) if part[1] > part[0]]
            open_ranges = further
        return [found[column] for column in others]

    def _terms(self, group: list[int], size: int, depth: int) -> list[int | Chain]:
        """`_probed_terms`, or the terms of an earlier group of columns with the same distances."""
        if not self.infers or len(group) < 2:
            return self._probed_terms(group, size, depth)
        first = group[0]
        distances = tuple(column - first for column in group)
        if distances in self._terms_of:
            self.inferred = True
        else:
            self._terms_of[distances] = [_moved(term, -first) for term in self._probed_terms(group, size, depth)]
        return [_moved(term, first) for term in self._terms_of[distances]]

    def _probed_terms(self, group: list[int], size: int, depth: int) -> list[int | Chain]:
        """The terms added at once to the first term of a node of `size` columns.

        If the first column is a term of its own and no two neighbours meet below the node, all columns are terms.
        """
        terms: list[int | Chain] = []
        if self.infers and _SAMPLED * 2 < len(group) == group[-1] - group[0] + 1:
            draws = random.Random(len(group))
            pairs = [(group[0], other) for other in (group[1], group[-1], *draws.sample(group[2:-1], _SAMPLED))]
            if set(self.gemm.lost(pairs + draws.sample(list(pairwise(group)), _SAMPLED))) == {size}:
                self.inferred = True
                return list(group)
        while group:
            first, *rest = group
            if not rest:
                terms.append(first)
                break
            if self._infers(group) and self.gemm.lost([(first, group[-1])])[0] == len(group) < size:
                return [*terms, self.chain(group, depth + 1)]
            found = self.gemm.lost([(first, other) for other in rest])
            if max(found) > size:
                raise OrderUnknown(
                    f"columns {first} and {rest[found.index(max(found))]} meet above a node that adds both"
                )
            together = [first, *(other for other, lost in zip(rest, found, strict=True) if lost < size)]
            if len(together) == 1 and min(self.gemm.lost(list(zip(rest, [*rest[1:], first], strict=True)))) == size:
                return [*terms, *group]
            known = found if len(together) == len(group) else None
            terms.append(first if len(together) == 1 else self.chain(together, depth + 1, known))
            group = [column for column in group if column not in set(together)]
        return terms


def _moved(term: int | Chain, by: int) -> int | Chain:
    """The term with every column moved by a number of columns."""
    if isinstance(term, int):
        return term + by
    return Chain(_moved(term.first, by), tuple(tuple(_moved(one, by) for one in step) for step in term.steps))


def _holds(gemm: MaskedGemm, tree: Chain) -> bool:
    """Whether the probes of random pairs of columns, and of neighbours, agree with the tree."""
    draws = random.Random(gemm.columns)
    count = max(_LEAST_VERIFIED, _VERIFIED * gemm.counted // gemm.columns)
    pairs = [(first, second) for first, second in (draws.sample(range(gemm.columns), 2) for _ in range(count))]
    every = list(pairwise(range(gemm.columns)))
    pairs += draws.sample(every, min(count, len(every)))
    paths: dict[int, list[tuple[int, int, int]]] = {}
    _add_paths(tree, [], paths)
    return gemm.lost(pairs) == [_common(paths[first], paths[second]) for first, second in pairs]


def _add_paths(chain: Chain, path: list[tuple[int, int, int]], paths: dict[int, list[tuple[int, int, int]]]) -> None:
    """The path of every column below `chain`: per chain the number of the step, the number of the term, and the number
    of columns added up to the step.
    """
    below = 0
    for number, step in enumerate(((chain.first,), *chain.steps)):
        below += sum(1 if isinstance(one, int) else len(one.columns()) for one in step)
        for term, one in enumerate(step):
            here = [*path, (number, term, below)]
            if isinstance(one, int):
                paths[one] = here
            else:
                _add_paths(one, here, paths)


def _common(one: list[tuple[int, int, int]], other: list[tuple[int, int, int]]) -> int:
    """The columns below the lowest common node of two columns, from their paths."""
    return next(max(x[2], y[2]) for x, y in zip(one, other, strict=False) if x != y)
