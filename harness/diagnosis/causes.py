"""Causes of a run: one explanation for every failing record, as few different ones as can be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

Explained = tuple[dict[str, Any], list[dict[str, Any]]]
"""An explanation, as a record keeps it, and the records that it explains."""


def assign(records: Iterable[dict[str, Any]]) -> list[Explained]:
    """The explanations of failing records, the one that explains most of them first; each record has one.

    Several deviations can give the bytes of one case, where its inputs cannot tell them apart. So the causes are a
    cover, chosen greedily: what gives the bytes of most of the records that are left, then what stands higher in
    their lists. What only says where elements are wrong comes in only where nothing gives the bytes. A record without
    an explanation is in no list.
    """
    failing = [record for record in records if record["explanations"]]
    with_bytes = [record for record in failing if any(e["exact"] for e in record["explanations"])]
    without = [record for record in failing if not any(e["exact"] for e in record["explanations"])]
    return [*_cover(with_bytes, exact=True), *_cover(without, exact=False)]


def _cover(records: list[dict[str, Any]], *, exact: bool) -> list[Explained]:
    found = []
    left = records
    while left:
        counts: Counter[str] = Counter()
        ranks: defaultdict[str, int] = defaultdict(int)
        for record in left:
            for rank, explanation in enumerate(record["explanations"]):
                if explanation["exact"] == exact:
                    counts[explanation["cause"]] += 1
                    ranks[explanation["cause"]] += rank
        best = min(counts, key=lambda cause: (-counts[cause], ranks[cause], cause))
        taken = [record for record in left if _has(record, best) is not None]
        explanation = _has(taken[0], best)
        assert explanation is not None
        found.append((explanation, taken))
        left = [record for record in left if _has(record, best) is None]
    return found


def _has(record: dict[str, Any], cause: str) -> dict[str, Any] | None:
    return next((explanation for explanation in record["explanations"] if explanation["cause"] == cause), None)
