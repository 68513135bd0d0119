"""Causes of a run: an explanation for every failing record, with few different causes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from narrowgauge.harness.diagnosis.cause_names import is_condition
from narrowgauge.harness.diagnosis.explanation import gives_every_byte, is_free, is_hint, is_weak

Explained = tuple[dict[str, Any], list[dict[str, Any]]]
"""An explanation as an entry of a record, and the records that it explains."""
SO_IN = "; so in "
"""Beginning of the number of records of which a sentence holds."""
_BEHIND_CLAIM = re.compile(r"; |: the bytes are those of | \(")


def assign_causes(records: Iterable[dict[str, Any]]) -> list[Explained]:
    """Assign an explanation to each failing record. The explanation of most records comes first.

    Several deviations can give the bytes of a case if its inputs cannot tell them apart. The causes are therefore
    chosen greedily: the cause that explains most of the remaining records, and among equal causes the cause that is
    higher in their lists, which are in the order of simplicity. A cause that too few elements of a record separate from
    a right kernel counts if another record of the same kind proves it. Other inexact explanations are assigned only to
    records without an exact explanation. A cause that accepts almost any bytes of a record counts if it gives those of
    every record of its kind. Conditions are assigned to no record. Records without any explanation are left out.

    An assigned explanation is exact only if the cause gives the bytes of every record of its kind: of every record with
    the operation, the recipe and the first wrong stage of a record that it explains; and if no other cause gives the
    bytes of all these records, among which at least one has a complete diagnosis. Otherwise the explanation is not
    exact, and its sentence has the number of records that it explains, or the sentences of the other causes.
    """
    records = list(records)
    causes = _proved_causes(records)
    failing = [record for record in records if causes[id(record)]]
    proved = {(_kind(r), entry["cause"]) for r in failing for entry in causes[id(r)] if gives_every_byte(entry)}
    fitting = {id(record): _fitting_causes(record, causes[id(record)], proved) for record in failing}
    with_bytes = [record for record in failing if fitting[id(record)]]
    without_bytes = [record for record in failing if not fitting[id(record)]]
    possible = {id(r): [entry["cause"] for entry in causes[id(r)] if not is_hint(entry)] for r in without_bytes}
    exact = [(_of_all(explanation, members, records), members) for explanation, members in _cover(with_bytes, fitting)]
    return [*exact, *_cover([record for record in without_bytes if possible[id(record)]], possible)]


def _proved_causes(records: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The causes of each record, by the id of its object: without conditions, and without causes that accept almost any
    bytes of it and not those of all records of its kind."""
    free = {(_kind(record), e["cause"]) for record in records for e in record["explanations"] if is_free(e)}
    unproved = {
        (kind, cause)
        for kind, cause in free
        if not all(_has_bytes(record, cause) for record in records if _kind(record) == kind)
    }
    return {
        id(record): [
            entry
            for entry in record["explanations"]
            if not is_condition(entry["cause"]) and (_kind(record), entry["cause"]) not in unproved
        ]
        for record in records
    }


def _fitting_causes(
    record: dict[str, Any], causes: list[dict[str, Any]], proved: set[tuple[tuple[str, str, str], str]]
) -> list[str]:
    """Causes that give the bytes of the record: alone, or since another record of its kind proves them."""
    return [
        entry["cause"]
        for entry in causes
        if gives_every_byte(entry) or (is_weak(entry) and (_kind(record), entry["cause"]) in proved)
    ]


def _of_all(
    explanation: dict[str, Any], members: list[dict[str, Any]], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """The explanation of `members`, made inexact if some of all records of their kinds have other bytes."""
    kinds = {_kind(record) for record in members}
    alike = [record for record in records if _kind(record) in kinds]
    explained = sum(_has_bytes(record, explanation["cause"]) for record in alike)
    if explained == len(alike):
        return _with_rivals(explanation, members)
    sentence = f"{explanation['sentence']}; explains {explained} of {len(alike)} cases that fail at this stage"
    return {**explanation, "sentence": sentence, "exact": False}


def _with_rivals(explanation: dict[str, Any], members: list[dict[str, Any]]) -> dict[str, Any]:
    """The explanation of `members`, made inexact if the records cannot separate it from other causes."""
    if not explanation["exact"]:
        return explanation
    complete = [record for record in members if _complete_explanation(record, explanation["cause"])]
    rivals = [
        entry["sentence"]
        for entry in complete[0]["explanations"]
        if entry["cause"] != explanation["cause"] and all(_has_bytes(record, entry["cause"]) for record in complete)
    ]
    if not rivals:
        return explanation
    return {**explanation, "sentence": "; or: ".join([explanation["sentence"], *rivals]), "exact": False}


def _kind(record: dict[str, Any]) -> tuple[str, str, str]:
    return record["operation"], record["recipe"], record["stage"]


def _has_bytes(record: dict[str, Any], cause: str) -> bool:
    """Whether a deviation with this cause, which gives the bytes of some record, gives those of this record."""
    return any(
        entry["cause"] == cause and (gives_every_byte(entry) or is_weak(entry)) for entry in record["explanations"]
    )


def _complete_explanation(record: dict[str, Any], cause: str) -> dict[str, Any] | None:
    """The exact explanation of the record with this cause. None: the limit of work ended its diagnosis, for example."""
    return next((entry for entry in record["explanations"] if entry["exact"] and entry["cause"] == cause), None)


def _cover(records: list[dict[str, Any]], causes_of: dict[int, list[str]]) -> list[Explained]:
    """Few causes for all records. `causes_of`: causes of each record that count, by the id of the record's object."""
    assigned = []
    remaining = records
    while remaining:
        counts: Counter[str] = Counter()
        ranks: defaultdict[str, int] = defaultdict(int)
        for record in remaining:
            for rank, cause in enumerate(dict.fromkeys(causes_of[id(record)])):
                counts[cause] += 1
                ranks[cause] += rank
        best = min(counts, key=lambda cause: (-counts[cause], ranks[cause], cause))
        explained = [record for record in remaining if _explanation_of(record, best) is not None]
        assigned.append((_of_most(best, explained), explained))
        remaining = [record for record in remaining if _explanation_of(record, best) is None]
    return assigned


def _of_most(cause: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The explanation of most of the records by a cause, an exact one if a record has one.

    Sentences about one cause can name different numbers. The sentence then says in how many records it is so.
    """
    entries = [entry for record in records if (entry := _explanation_of(record, cause)) is not None]
    ((claim, count),) = Counter(_claim(entry) for entry in entries).most_common(1)
    first = max((entry for entry in entries if _claim(entry) == claim), key=lambda entry: bool(entry["exact"]))
    exact = bool(first["exact"]) or any(_complete_explanation(record, cause) for record in records)
    claims = gives_every_byte(first) or is_weak(first)  # not a sentence about a search that found nothing
    words = f"{SO_IN}{count} of {len(entries)} cases" if claims and count < len(entries) else ""
    return {**first, "sentence": first["sentence"] + words, "exact": exact}


def _claim(entry: dict[str, Any]) -> str:
    """The sentence of an entry without counts and doubts."""
    return _BEHIND_CLAIM.split(str(entry["sentence"]), maxsplit=1)[0]


def _explanation_of(record: dict[str, Any], cause: str) -> dict[str, Any] | None:
    return next((explanation for explanation in record["explanations"] if explanation["cause"] == cause), None)
