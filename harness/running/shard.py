"""Shards: the cases of a run, divided among independent machines into parts of equal time."""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import estimated_seconds

if TYPE_CHECKING:
    from narrowgauge.harness.records.journal import RecordedRun


class ShardError(Exception):
    """An impossible shard: the message has the request, and the possible values."""


@dataclass(frozen=True)
class Shard:
    """A part of a run, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard of `2/4`, the second of four. Raises ShardError."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None:
            raise ShardError(f"--shard is {text!r}; it is a number and a count: 2/4 is the second of four shards")
        number, count = int(found[1]), int(found[2])
        if not 1 <= number <= count:
            raise ShardError(f"--shard is {text!r}; of {count} shards there are 1/{count} to {count}/{count}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class Part:
    """The cases of a shard, and its data about the whole run."""

    shard: Shard
    cases: list[Case]
    sharing: int
    """Number of cases of all shards that share the run's false alarms (`harness.checks.statistics.holm`)."""
    selection: str
    """Of the cases of all shards: the result of `digest`."""


def part_of(cases: Sequence[Case], shard: Shard, seconds: Mapping[str, float] | None = None) -> Part:
    """The part of `shard` of the selected `cases`; `seconds`: known seconds of cases, by id.

    The part depends only on the ids of the cases and on `seconds`: neither on their order nor on the machine.
    Raises ShardError for more shards than cases, or if `seconds` has no case of the selection.
    """
    from narrowgauge.harness.checks.statistics.holm import count_chance_cases

    costs = durations({case.id: case for case in cases}, seconds or {})
    if shard.count > len(costs):
        raise ShardError(f"--shard is {str(shard)!r}, but {len(costs)} cases are selected, and no shard is empty")
    mine = split(costs, shard.count)[shard.number - 1]
    return Part(shard, [case for case in cases if case.id in mine], count_chance_cases(cases), digest(costs))


def split(costs: Mapping[str, float], count: int) -> list[set[str]]:
    """Ids in `count` sets of about equal cost: the costliest first, to the set with the least cost so far.

    The largest sum is at most 4/3 of the smallest that is possible. Source: Graham, "Bounds on multiprocessing timing
    anomalies" (1969). Ids of equal cost go by their names, sets of equal sums by their numbers.
    """
    parts: list[set[str]] = [set() for _ in range(count)]
    # Whole microseconds, at least one: sums are exact in every order, and sets of free cases are not empty.
    heap = [(0, number) for number in range(count)]
    ordered = sorted((-max(1, round(1e6 * cost)), name) for name, cost in costs.items())
    for cost, name in ordered:
        total, number = heapq.heappop(heap)
        parts[number].add(name)
        heapq.heappush(heap, (total - cost, number))
    return parts


def durations(cases: Mapping[str, Case], seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the cases, by id: recorded, else an estimate from the size, scaled by the recorded cases.

    Raises ShardError if seconds are recorded, but not of these cases.
    """
    estimates = {name: estimated_seconds(case) for name, case in cases.items()}
    known = sorted(estimates.keys() & seconds.keys())
    if seconds and not known:
        raise ShardError(f"--durations knows {len(seconds)} cases, and none of the {len(cases)} that are selected")
    # fsum is exact to the last bit on every machine.
    scale = math.fsum(seconds[name] for name in known) / math.fsum(estimates[name] for name in known) if known else 1.0
    return {name: seconds.get(name, scale * guess) for name, guess in estimates.items()}


def recorded(run: RecordedRun) -> dict[str, float]:
    """Seconds of the cases of an earlier run, by id; of several seeds the longest."""
    found: dict[str, float] = {}
    for record in run.records:
        taken = record["seconds_total"]
        if taken is not None and math.isfinite(taken):
            found[record["case"]] = max(taken, found.get(record["case"], 0.0))
    return found


def read_durations(path: Path) -> dict[str, float]:
    """Seconds of the cases of an earlier run: the folder of its report, or its journal.

    Raises ShardError for a run without seconds, JournalError for an unreadable run.
    """
    from narrowgauge.harness.records.journal import read

    found = recorded(read(path))
    if not found:
        raise ShardError(f"{path}: no record says how long its case took")
    return found


def digest(ids: Iterable[str]) -> str:
    """Sixteen hexadecimal digits of a set of ids: equal for equal ids in any order."""
    return hashlib.blake2b("\n".join(sorted(set(ids))).encode(), digest_size=8).hexdigest()
