"""Writes cases/pairs.toml: cases until the quick tier has every possible pair of values of two keys.

    python -m tests.pairs.make

The cases of the other files are the seed. For an uncovered pair, known cases get both values and up to three random
values of other keys. The valid case that takes the least time for each uncovered pair is added. A pair without a valid
case in `TRIES` attempts counts as impossible. Cases of pairs.toml stay, and missing ones are added behind them, so that
a new value of a key changes no id.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import case_files, load_all, shipped_cases
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.cost import estimated_seconds
from narrowgauge.harness.cases.keys import keys_of, sizes_of
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.inputs.pairs import (
    TRAITS,
    Pair,
    Value,
    key_of,
    pairs_of,
    pairs_of_all,
    size_class,
    sizes,
    values_of,
)

FILE = shipped_cases() / "pairs.toml"
TRIES = 300
ENOUGH = 24
"""Valid cases of a pair of which the cheapest is taken."""
SIZES = (0, 1, 37, 48, 128)
"""A size of each class."""
LARGEST = 1 << 17
"""Work of a case at most, unless the smallest case of its operation has more."""
_HEAD = """\
# Every possible pair of values of two keys is in the quick tier: the pairs that no other file has.
# Written by `python -m tests.pairs.make`, which keeps these ids and adds missing ones behind them.
"""


class Domain:
    """The values that cases of one operation may have, and cases with chosen values."""

    def __init__(self, cases: list[Case]) -> None:
        self._cls = type(cases[0])
        self._limit = max(LARGEST, 2 * min(case.work for case in cases))
        self._cases = [case for case in cases if case.work <= self._limit and not getattr(case, "bands", False)]
        self._sizes = sizes_of(self._cls)
        self._fields = {key.name: key.field for key in keys_of(self._cls)}
        self._settings: dict[Value, dict[Any, None]] = defaultdict(dict)
        """What a key may be set to for a value of `values_of`: several recipes have a trait."""
        for case in self._cases:
            for name, field in self._fields.items():
                given = getattr(case, field)
                if name not in TRAITS:
                    self._settings[name, str(given).partition(":")[0]][given] = None
                elif given is not None:
                    for trait, text in TRAITS[name](given).items():
                        self._settings[f"{name}.{trait}", text][given] = None

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """Every value of every key, sorted."""
        found: dict[str, set[str]] = defaultdict(set)
        for case in self._cases:
            for name, value in values_of(case).items():
                found[name].add(value)
        for name in sizes(self._cases[0]):
            found[name] |= set(map(size_class, SIZES))
        return {name: sorted(found[name]) for name in sorted(found)}

    def pairs(self) -> list[Pair]:
        """All pairs of values of two keys, possible or not, sorted."""
        every = [(name, value) for name, values in self.values.items() for value in values]
        return [(one, other) for one in every for other in every if one < other and key_of(one) != key_of(other)]

    def candidates(self, pair: Pair, tries: int) -> Iterator[Case]:
        """Different valid cases with both values, at most `ENOUGH`. They depend on the pair and the cases alone."""
        draw = random.Random(repr(pair))
        found: set[str] = set()
        for number in range(tries):
            case: Case | None = draw.choice(self._cases)
            others = [(name, draw.choice(self.values[name])) for name in draw.sample(sorted(self.values), number % 4)]
            # Twice: a value may be lost when the other one is set, such as a size by sections.
            for value in (*others, *pair, *pair):
                case = None if case is None else self._changed(case, value, draw)
            if case is None:
                continue
            family = "normal" if "normal" in case.families() else case.inputs
            case = replace(case, inputs=family, tier="quick", file="", repeats=0, concurrency="sequential")
            if case.id in found or case.problem() or case.work > self._limit or pair not in pairs_of(case):
                continue
            if (case := case_from_id(case.id)) is None or pair not in pairs_of(case):  # a value that its key refuses
                continue
            found.add(case.id)
            yield case
            if len(found) == ENOUGH:
                return

    def _changed(self, case: Case, value: Value, draw: random.Random) -> Case | None:
        """The case with one value set; None if the value has no setting. It may have a problem."""
        name, text = value
        if name in self._sizes or name in sizes(case):
            place = len(case.shape) - len(self._sizes) + self._sizes.index(name) if name in self._sizes else 1
            before = case.shape[:place] if name in self._sizes else (1,)  # M rows of (B, S, …)
            chosen = [size for size in SIZES if size_class(size) == text]
            return replace(case, shape=(*before, *chosen, *case.shape[place + 1 :])) if chosen else None
        if name == "dimensions":
            return replace(case, shape=draw.choice([one.shape for one in self._cases if str(len(one.shape)) == text]))
        settings = self._settings.get(value)
        if not settings:
            return None
        key, setting = name.partition(".")[0], draw.choice(sorted(settings, key=str))
        if key == "sections":
            return replace(case, sections=setting, shape=draw.choice([
                one.shape for one in self._cases if getattr(one, "sections", "") == setting
            ]))  # fmt: skip
        return replace(case, **{self._fields[key]: setting})


def missing(cases: Iterable[Case], tries: int = TRIES) -> Iterator[tuple[Pair, Case]]:
    """Pairs that no case of the quick tier on a CPU has, each with the cheapest case for it.

    Not of contracts: their 330 cases would take 15 core-seconds.
    """
    by_operation: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if not isinstance(case, ContractCase):
            by_operation[case.operation].append(case)
    for of_operation in by_operation.values():
        domain = Domain(of_operation)
        covered = {pair for _, pair in pairs_of_all(case for case in of_operation if case.tier_on("cpu") == "quick")}
        for pair in domain.pairs():
            if pair in covered:
                continue
            found = [
                (estimated_seconds(case) / len(pairs_of(case) - covered), case.id, case)
                for case in domain.candidates(pair, tries)
            ]
            if found:
                *_, best = min(found)
                covered |= pairs_of(best)
                yield pair, best


def redundant(cases: Iterable[Case], among: Collection[str]) -> list[str]:
    """Ids, of these, of cases whose pairs are all in other cases of the quick tier on a CPU; the slowest first."""
    left: Counter[tuple[str, Pair]] = Counter()
    found: dict[str, set[tuple[str, Pair]]] = {}
    known: dict[tuple[Any, ...], set[tuple[str, Pair]]] = {}
    quick = [case for case in cases if case.tier_on("cpu") == "quick" and not isinstance(case, ContractCase)]
    for case in quick:
        values = (case.operation, *values_of(case).items())
        if values not in known:
            known[values] = {(case.operation, pair) for pair in pairs_of(case)}
        left.update(known[values])
        found[case.id] = known[values]
    leaving = []
    for case in sorted(quick, key=lambda case: (-estimated_seconds(case), case.id)):
        if case.id in among and all(left[pair] > 1 for pair in found[case.id]):
            left.subtract(found[case.id])
            leaving.append(case.id)
    return leaving


def shipped() -> list[Case]:
    """All cases of the package."""
    return load_all(case_files(shipped_cases()))


def main() -> None:
    """Write the file: its present ids, then an id for each missing pair, without redundant new ones."""
    ids = [case.id for case in load_all([FILE])] if FILE.exists() else []
    new: list[str] = []
    while added := [case.id for _, case in missing(shipped())]:  # a new case may have values for other pairs
        new += added
        _write(ids + new)
    unneeded = set(redundant(shipped(), new))
    new = [name for name in new if name not in unneeded]
    _write(ids + new)
    print(f"{FILE.name}: {len(ids)} cases, {len(new)} added", flush=True)


def _write(ids: Iterable[str]) -> None:
    lines = "".join(f'  "{name}",\n' for name in ids)
    FILE.write_text(f'{_HEAD}\n[[matrix]]\ntier = "quick"\nids = [\n{lines}]\n', encoding="utf-8")


if __name__ == "__main__":
    main()
