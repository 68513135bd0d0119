"""Writes cases/pairs.toml, cases/pairs_fused.toml and cases/triples_*.toml: cases until the quick tier has every
possible pair of values of two keys, and the full tier every possible triple of values of three keys.

    python -m tests.pairs.make

The cases of the other files are the seed. For an uncovered set of values, known cases get its values and up to three
random values of other keys. For an uncovered set, the valid case with the least time is added. A set without a
valid case in `Array.tries` attempts counts as impossible, and so does a triple with an impossible pair. Cases of a file
stay, and missing cases are appended: a new value of a key changes no id.

The fused contracts share their kernels, and share a covering array: the operation is a further key, and a pair of keys
is covered by any operation. So do `linear`, `layernorm-linear` and `grouped-linear` in the quick tier.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from narrowgauge.contract import Contract
from narrowgauge.contracts import activation, norm, rotary
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import case_files, load_all, shipped_cases
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.cost import estimated_seconds
from narrowgauge.harness.cases.keys import Key, keys_of, sizes_of
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.inputs.pairs import (
    TRAITS,
    Value,
    Values,
    key_of,
    sets_of,
    size_class,
    sizes,
    value_class,
    values_of,
)
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.spec.recipes import DEFAULT_DIALECT, find_recipe

SIZES = (0, 1, 37, 48, 128)
"""A size of each class."""
LARGEST = 1 << 17
"""Work of a case at most, unless the smallest case of its operation has more."""
_HEAD = """\
# Every possible set of {0.size} values of different keys is in the {0.tier} tier: sets absent from all further files.
# Written by `python -m tests.pairs.make`: these ids stay, and missing ids are appended.
"""


@dataclass(frozen=True)
class Array:
    """A covering array: every possible set of `size` values of different keys is in the cases of a tier."""

    name: str
    """Name of the files with new cases. {} stands for an operation: a file has a limit."""
    size: int
    tier: str
    tries: int
    """Attempts to find a valid case for a set of values."""
    enough: int
    """Valid cases of a set of values of which the cheapest is taken."""
    group: Callable[[Case], str | None]
    """Name of the operations that share the sets of a case; None: the case is in no set."""
    sizes: tuple[int, ...] = SIZES
    """Sizes of new cases."""

    def file(self, operation: str) -> Path:
        """The case file with the cases of an operation."""
        return shipped_cases() / f"{self.name.format(operation.replace('-', '_'))}.toml"

    @property
    def ids(self) -> list[str]:
        """Ids in the files."""
        return [case.id for case in load_all(sorted(shipped_cases().glob(self.file("*").name)))]

    def chosen(self, cases: Iterable[Case]) -> Iterator[Case]:
        """The cases of the tier on a CPU."""
        for case in cases:
            if self.group(case) is not None and self.tier in ("full", case.tier_on("cpu")):
                yield case

    def sets_of(self, case: Case) -> set[Values]:
        """`sets_of`, of the values that the operations of a group share."""
        if self.group(case) == case.operation:
            return sets_of(case, self.size)
        empty = {(name, "0") for name, size in sizes(case).items() if size == 0}
        return {
            values
            for values in combinations(_values(case), self.size)
            if len({key_of(value) for value in values}) == self.size and (not empty or not empty.isdisjoint(values))
        }

    def sets_of_all(self, cases: Iterable[Case]) -> set[Values]:
        """The sets of all cases of a group. Cases of different input families have the same sets."""
        different = {tuple(_values(case)): case for case in cases}
        return {values for case in different.values() for values in self.sets_of(case)}

    def write(self, ids: Iterable[str]) -> None:
        """Write the files."""
        files: dict[Path, str] = defaultdict(str)
        for name in ids:
            files[self.file(name.partition("/")[0])] += f'  "{name}",\n'
        for file, lines in files.items():
            text = f'{_HEAD.format(self)}\n[[matrix]]\ntier = "{self.tier}"\nids = [\n{lines}]\n'
            file.write_text(text, encoding="utf-8")


def _own(case: Case) -> str | None:
    return None if isinstance(case, ContractCase) else case.operation


_FUSED = {
    contract.name
    for contract in [*vars(norm).values(), *vars(activation).values(), *vars(rotary).values()]
    if isinstance(contract, Contract) and contract.recipes and "scale" not in contract.tensors
}


def _fused(case: Case) -> str | None:
    """Of rules that the native kernels have: no dialects and no rotations."""
    if case.operation not in _FUSED:
        return None
    known = [find_recipe(name) for name in case.recipe_names]
    return "fused" if all(one.dialect == DEFAULT_DIALECT and one.transform is None for one in known) else None


def _vector_dtypes(case: ContractCase) -> list[Key]:
    """The keys of the dtypes of vectors, which may differ from that of the matrices."""
    names = {f"{name}_dtype" for name, (kind, _, _) in case.declared.tensors.items() if kind == "Row"}
    return [key for key in keys_of(type(case)) if key.name in names]


def _single(case: Case) -> str | None:
    """Modules share their sets. Modules made of modules have no array: a case would take a core-second."""
    if case.operation in ("transformer-layer", "moe-layer"):
        return None
    return "modules" if isinstance(case, ModuleCase) else _own(case)


OPERATION, DTYPES = "operation", "dtype of vectors"
PAIRS, TRIPLES = Array("pairs", 2, "quick", 300, 24, _single), Array("triples_{}", 3, "full", 40, 6, _own)
FUSED = Array("pairs_fused", 2, "quick", 300, 24, _fused, SIZES[1:])


def _values(case: Case) -> list[Value]:
    """The values of a case and its operation, sorted. Of a contract, whether its vectors have the dtype of its first
    argument."""
    values = values_of(case)
    if isinstance(case, ContractCase):
        if dtypes := {values[key.name] for key in _vector_dtypes(case)}:
            values[DTYPES] = "equal" if dtypes == {values["dtype"]} else "other"
        values = {name: value for name, value in values.items() if not name.endswith("_dtype")}
    return sorted([*values.items(), (OPERATION, case.operation)])


class Domain:
    """The values that cases of a group may have, and cases with chosen values."""

    def __init__(self, cases: list[Case], array: Array) -> None:
        self._array = array
        self._limit = max(LARGEST, 2 * min(case.work for case in cases))
        self._cases = [case for case in cases if case.work <= self._limit and not getattr(case, "bands", False)]
        self._settings: dict[Value, dict[Any, None]] = defaultdict(dict)
        """What a key may be set to for a value of `values_of`: several recipes have a trait."""
        for case in self._cases:
            for key in keys_of(type(case)):
                name, given = key.name, getattr(case, key.field)
                if name not in TRAITS:
                    self._settings[name, value_class(name, given)][given] = None
                elif given is not None:
                    for trait, text in TRAITS[name](given).items():
                        self._settings[f"{name}.{trait}", text][given] = None

    @cached_property
    def values(self) -> dict[str, list[str]]:
        """Every value of every key, sorted."""
        found: dict[str, set[str]] = defaultdict(set)
        for case in self._cases:
            for name, value in _values(case):
                found[name].add(value)
        if DTYPES in found:
            found[DTYPES].add("other")
        if len(found[OPERATION]) == 1:
            del found[OPERATION]
        for name in sizes(self._cases[0]):
            found[name] |= set(map(size_class, self._array.sizes))
        return {name: sorted(found[name]) for name in sorted(found)}

    def sets(self, size: int, possible: Collection[Values]) -> Iterator[Values]:
        """All sets of values of different keys, sorted. Of more than two values, sets with possible pairs."""
        every = [(name, value) for name, values in self.values.items() for value in values]
        for chosen in combinations(every, size):
            pairs = combinations(chosen, 2)
            if all(key_of(one) != key_of(other) if size == 2 else (one, other) in possible for one, other in pairs):
                yield chosen

    def candidates(self, values: Values, tries: int) -> Iterator[Case]:
        """Different valid cases with all these values, which depend on the values and the cases alone."""
        draw = random.Random(repr(values))
        found: set[str] = set()
        for number in range(tries):
            case: Case | None = draw.choice(self._cases)
            others = [(name, draw.choice(self.values[name])) for name in draw.sample(sorted(self.values), number % 4)]
            # Twice: a value may be lost when a second value is set, for example a size by sections.
            for value in (*others, *values, *values):
                case = None if case is None else self._changed(case, value, draw)
            if case is None:
                continue
            family = "normal" if "normal" in case.families() else case.inputs
            case = replace(case, inputs=family, tier="quick", file="", repeats=0, concurrency="sequential")
            if case.id in found or case.problem() or case.work > self._limit or not _tests(case, values):
                continue
            if (case := case_from_id(case.id)) is None or not _tests(case, values):  # a value that its key refuses
                continue
            found.add(case.id)
            yield case

    def _changed(self, case: Case, value: Value, draw: random.Random) -> Case | None:
        """The case with one value set; None if the value has no setting. It may have a problem."""
        name, text = value
        names = sizes_of(type(case))
        if name == OPERATION:
            others = [one for one in self._cases if one.operation == text]
            return case if case.operation == text else draw.choice(others)
        if name == DTYPES:
            assert isinstance(case, ContractCase)
            dtypes = _vector_dtypes(case)
            equal = replace(case, **dict.fromkeys((key.field for key in dtypes), None))
            if not dtypes or text == "equal":
                return equal
            other = draw.choice(dtypes[0].choices)
            return replace(equal, **{key.field: other for key in dtypes})
        if name in names or name in sizes(case):
            place = len(case.shape) - len(names) + names.index(name) if name in names else 1
            before = case.shape[:place] if name in names else (1,)  # M rows of (B, S, …)
            chosen = [size for size in SIZES if size_class(size) == text]
            return replace(case, shape=(*before, *chosen, *case.shape[place + 1 :])) if chosen else None
        if name == "dimensions":
            return replace(case, shape=draw.choice([one.shape for one in self._cases if str(len(one.shape)) == text]))
        key = name.partition(".")[0]
        settings = self._settings.get(value)
        field = next((known.field for known in keys_of(type(case)) if known.name == key), None)
        if not settings or field is None:
            return None
        setting = draw.choice(sorted(settings, key=str))
        if key == "sections":
            return replace(case, sections=setting, shape=draw.choice([
                one.shape for one in self._cases if getattr(one, "sections", "") == setting
            ]))  # fmt: skip
        return replace(case, **{field: setting})


def _tests(case: Case, values: Values) -> bool:
    """Whether a case has all these values and, if the case is empty, a size of 0 among them."""
    has = dict(_values(case))
    empty = 0 not in case.shape or any(value == "0" and name in sizes(case) for name, value in values)
    return empty and all(has.get(name) == value for name, value in values)


def missing(cases: Iterable[Case], array: Array = PAIRS, tries: int = 0) -> Iterator[tuple[Values, Case]]:
    """Sets of values missing in the cases of the tier on a CPU, with their cheapest cases. `tries`: 0 for those of
    the array."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if (name := array.group(case)) is not None:
            groups[name].append(case)
    for group in groups.values():
        domain = Domain(group, array)
        covered = array.sets_of_all(array.chosen(group))
        possible = replace(array, size=2).sets_of_all(group)
        for values in domain.sets(array.size, possible):
            if values in covered:
                continue
            found = []
            for case in islice(domain.candidates(values, tries or array.tries), array.enough):
                new = array.sets_of(case) - covered
                found.append((estimated_seconds(case) / len(new), case.id, case, new))
            if found:
                *_, best, new = min(found)
                covered |= new
                yield values, best


def redundant(cases: Iterable[Case], array: Array, among: Collection[str]) -> list[str]:
    """Ids, of these, of cases whose sets of values are all in other cases of the tier; the slowest first."""
    left: Counter[tuple[str | None, Values]] = Counter()
    found: dict[str, set[tuple[str | None, Values]]] = {}
    known: dict[tuple[Any, ...], set[tuple[str | None, Values]]] = {}
    chosen = list(array.chosen(cases))
    for case in chosen:
        values = tuple(_values(case))
        if values not in known:
            known[values] = {(array.group(case), one) for one in array.sets_of(case)}
        left.update(known[values])
        found[case.id] = known[values]
    leaving = []
    for case in sorted(chosen, key=lambda case: (-estimated_seconds(case), case.id)):
        if case.id in among and all(left[values] > 1 for values in found[case.id]):
            left.subtract(found[case.id])
            leaving.append(case.id)
    return leaving


def shipped() -> list[Case]:
    """All cases of the package."""
    return load_all(case_files(shipped_cases()))


def main() -> None:
    """Write the files: present ids, then an id for each missing set of values, without redundant new pairs."""
    for array in (PAIRS, FUSED, TRIPLES):
        ids, new = array.ids, list[str]()
        while added := [case.id for _, case in missing(shipped(), array)]:  # a new case may have further values
            new += added
            array.write(ids + new)
            print(f"{array.name}: {len(ids)} cases, {len(new)} new ones", flush=True)
        if new and array is not TRIPLES:  # the triples of all cases take gigabytes
            unneeded = set(redundant(shipped(), array, new))
            new = [name for name in new if name not in unneeded]
            array.write(ids + new)
        print(f"{array.name}: {len(ids)} cases, {len(new)} added", flush=True)


if __name__ == "__main__":
    main()
