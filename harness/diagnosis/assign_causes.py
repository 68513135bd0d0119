"""Causes of a run: an explanation for every failing record, with few different causes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

Explained = tuple[dict[str, Any], list[dict[str, Any]]]
"""An explanation as an entry of a record, and the records that it explains."""


def assign_causes(records: Iterable[dict[str, Any]]) -> list[Explained]:
    """Assign an explanation to each failing record. The explanation of most records comes first.

    Several deviations can give the bytes of a case if its inputs cannot tell them apart. The causes are therefore
    chosen greedily: the cause that explains most of the remaining records, and among equal causes the cause that is
    higher in their lists. Inexact explanations (places and classes) are assigned only to records without an exact
    explanation. Records without any explanation are left out.
    """
    failing = [record for record in records if record["explanations"]]
    with_bytes = [record for record in failing if any(e["exact"] for e in record["explanations"])]
    without_bytes = [record for record in failing if not any(e["exact"] for e in record["explanations"])]
    return [*_cover(with_bytes, exact=True), *_cover(without_bytes, exact=False)]


def _cover(records: list[dict[str, Any]], *, exact: bool) -> list[Explained]:
    assigned = []
    remaining = records
    while remaining:
        counts: Counter[str] = Counter()
        ranks: defaultdict[str, int] = defaultdict(int)
        for record in remaining:
            for rank, explanation in enumerate(record["explanations"]):
                if explanation["exact"] == exact:
                    counts[explanation["cause"]] += 1
                    ranks[explanation["cause"]] += rank
        best = min(counts, key=lambda cause: (-counts[cause], ranks[cause], cause))
        explained = [record for record in remaining if _explanation_of(record, best) is not None]
        explanation = _explanation_of(explained[0], best)
        assert explanation is not None
        assigned.append((explanation, explained))
        remaining = [record for record in remaining if _explanation_of(record, best) is None]
    return assigned


def _explanation_of(record: dict[str, Any], cause: str) -> dict[str, Any] | None:
    return next((explanation for explanation in record["explanations"] if explanation["cause"] == cause), None)
