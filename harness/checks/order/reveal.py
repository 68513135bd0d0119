"""The tree of additions of a GEMM, from the numbers of columns below common nodes."""

from __future__ import annotations

from narrowgauge.harness.checks.order.masks import MaskedGemm, OrderUnknown
from narrowgauge.reference.accumulators.trees import Chain

_DEPTH = 200


def reveal(gemm: MaskedGemm) -> Chain:
    """The tree of all columns. Raises OrderUnknown if the probes contradict one another."""
    if gemm.columns == 1:
        return Chain(0)
    return _chain(gemm, list(range(gemm.columns)), 0)


def _chain(gemm: MaskedGemm, columns: list[int], depth: int) -> Chain:
    """The tree of `columns`, two or more, which are all columns below one node."""
    if depth > _DEPTH:
        raise OrderUnknown(f"the tree of additions has more than {_DEPTH} levels of partial sums")
    first, second, before, last = columns[0], columns[1], columns[-2], columns[-1]
    ends = gemm.lost([(first, second), (last, before)])
    start = last if ends[1] < ends[0] == len(columns) else first  # a chain may begin with its last column
    others = [column for column in columns if column != start]
    sizes = dict(zip(others, gemm.lost([(start, other) for other in others]), strict=True))
    if len(columns) > 2 and set(sizes.values()) == {2}:
        raise OrderUnknown("no product beside M and −M is lost: the sum is exact, or keeps more bits than a mask has")
    steps: list[tuple[int | Chain, ...]] = []
    below = 1
    for size in sorted(set(sizes.values())):
        group = [column for column in others if sizes[column] == size]
        below += len(group)
        if below != size:
            raise OrderUnknown(
                f"column {start} meets {', '.join(map(str, group[:4]))} below a node of {size} columns, but {below} "
                "columns meet there: rows, tiles or calls add in different orders"
            )
        steps.append(tuple(_terms(gemm, group, size, depth)))
    return Chain(start, tuple(steps))


def _terms(gemm: MaskedGemm, group: list[int], size: int, depth: int) -> list[int | Chain]:
    """The terms that a node of `size` columns adds at once to its first term.

    If the first column is a term of its own and no two neighbours meet below the node, all columns are terms.
    """
    terms: list[int | Chain] = []
    while group:
        first, *rest = group
        if not rest:
            terms.append(first)
            break
        found = gemm.lost([(first, other) for other in rest])
        if max(found) > size:
            raise OrderUnknown(f"columns {first} and {rest[found.index(max(found))]} meet above a node that adds both")
        together = [first, *(other for other, lost in zip(rest, found, strict=True) if lost < size)]
        if len(together) == 1 and min(gemm.lost(list(zip(rest, [*rest[1:], first], strict=True)))) == size:
            return [*terms, *group]
        terms.append(first if len(together) == 1 else _chain(gemm, together, depth + 1))
        group = [column for column in group if column not in set(together)]
    return terms
