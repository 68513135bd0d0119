"""Case files: reading TOML, and expanding its tables to cases.

A file holds `[[matrix]]` tables. Each table names an operation and a tier, and gives a value or a list of values for
each key of the operation; the product of the lists is its cases. The key `rules` above the tables names files of rules.
cases/README.md describes the files for people.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import TABLE_TIERS, Key, Tier, keys_of, nearest, one_of, shown
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id, outside_operations
from narrowgauge.spec.recipes import RuleError, use_rules

LEDGER = "known.toml"
"""Name of the ledger of known failures (`harness.gate.ledger`), which lies among the case files."""
MOST_CASES = 100_000
"""Cases of a file."""
_CURRENT = Path("cases")
"""Cases of the current folder."""
_SHIPPED = Path(__file__).parents[2] / "cases"
"""Cases of the package."""


class CaseFileError(Exception):
    """A wrong case file: the message names the file, the key and the remedy."""


def default_cases() -> Path:
    """`cases` of the current folder if it holds a case file, else the cases of the package, by their real path."""
    return _CURRENT if any(_CURRENT.glob("*.toml")) else Path(os.path.realpath(_SHIPPED))


def is_default(path: str | Path) -> bool:
    """Whether a file lies in `default_cases`: a command then finds its cases without the name of the file."""
    folder = Path(path).parent
    return folder == _CURRENT or os.path.realpath(folder) == os.path.realpath(default_cases())


def load(path: str | Path) -> list[Case]:
    """The cases of a file, in order; a case in tables of several tiers has the first of quick, quick-cuda and full.

    Raises CaseFileError if the file cannot be read, is not TOML, or has an unknown key or value.
    """
    return _cases([Path(path)])


def load_all(paths: Sequence[str | Path]) -> list[Case]:
    """The cases of files, and of all *.toml files of folders except the ledger, each id once.

    Raises CaseFileError as `load` does, and if there is no case file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        given = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        case_files = [file for file in given if file.name != LEDGER]
        if path.is_dir() and not case_files:
            raise CaseFileError(f"{path}: holds no *.toml case file")
        files += case_files
    if paths and not files:
        raise CaseFileError(f"{', '.join(map(str, paths))}: holds known failures, and no case")
    return _cases(files)


def line_of(path: Path, name: str) -> int:
    """The line, counted from 1, of the first table of a file with the case of this id; 1 if the line is unknown."""
    if path.suffix != ".toml":  # a file of captured tensors, perhaps of gigabytes
        return 1
    try:
        tables = _tables(path)
        number = next(i for i, table in enumerate(tables) if any(case.id == name for case in table.cases("")))
        lines = path.read_text(encoding="utf-8").splitlines()
    except (CaseFileError, StopIteration, OSError):
        return 1
    heads = [i for i, line in enumerate(lines, 1) if re.match(r"\s*\[\[\s*matrix\s*\]\]", line)]
    # A string of several lines may look like a table, and a table may be written in another form.
    return heads[number] if len(heads) == len(tables) else 1


@dataclass(frozen=True)
class _Table:
    """A `[[matrix]]` table with correct keys and values."""

    where: str
    """File and number of the table, for messages."""
    operation: str
    tier: Tier
    values: dict[str, list[Any]]
    """Values of each key. Their product is the cases of the table."""

    def cases(self, file: str) -> Iterator[Case]:
        """The cases, the last key fastest. Raises CaseFileError if values of different keys exclude one another."""
        cls = OPERATIONS[self.operation]
        fields = {key.name: key.field for key in keys_of(cls)}
        names = [fields[name] for name in self.values]
        outside = outside_operations()
        for values in itertools.product(*self.values.values()):
            point = dict(zip(names, values, strict=True))
            point["shape"] = tuple(point["shape"])
            case = cls(**point, tier=self.tier, file=file)
            if wrong := case.problem():
                raise CaseFileError(f"{self.where}: {wrong}")
            if self.operation in outside and case_from_id(case.id) != replace(case, tier="quick", file=""):
                raise CaseFileError(
                    f"{self.where}: the id {case.id} is also that of another case; give the keys of {self.operation} "
                    "names and words that no other key has, without / and +"
                )
            yield case


def _tables(path: Path) -> list[_Table]:
    """The tables of a file. Their cases are counted before a case is made."""
    content = toml_file.read_all(path, ("matrix", "rules"), what="a case file", error=CaseFileError)
    if "rules" in content:
        _use_rules(path, content["rules"])
    contents = content.get("matrix")
    if not isinstance(contents, list) or not contents:
        raise CaseFileError(f"{path}: no [[matrix]] table, so no case; see cases/README.md")
    tables = [_table(content, f"{path}: [[matrix]] {number}") for number, content in enumerate(contents, 1)]
    total = 0
    for table in tables:
        total += (count := math.prod(map(len, table.values.values())))
        if total > MOST_CASES:
            raise CaseFileError(
                f"{table.where}: its lists make {count} cases, {total} with the tables before it; a file has at most "
                f"{MOST_CASES}: shorten the lists, or divide the file"
            )
    return tables


def _use_rules(path: Path, given: Any) -> None:
    """Make the rules known that a case file names, relative to its folder. Raises CaseFileError."""
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) for name in names):
        raise CaseFileError(f'{path}: rules is {shown(given)}; it is a file of rules or a list of files: "own.toml"')
    try:
        use_rules([path.parent / name for name in names])
    except RuleError as error:
        raise CaseFileError(f"{path}: rules: {error}") from error


def _cases(files: Iterable[Path]) -> list[Case]:
    """The first case of every id, in order, with the first tier of the cases with this id."""
    first: dict[str, Case] = {}
    collecting = gc.isenabled()
    gc.disable()  # cases are no garbage; collections would take a third of the time
    try:
        for case in (case for file in files for table in _tables(file) for case in table.cases(str(file))):
            known = first.setdefault(case.id, case)
            if TABLE_TIERS.index(case.tier) < TABLE_TIERS.index(known.tier):
                first[case.id] = replace(known, tier=case.tier)
    finally:
        if collecting:
            gc.enable()
    return list(first.values())


def _table(table: Any, where: str) -> _Table:
    """The checked content of a table. Raises CaseFileError."""
    if not isinstance(table, dict):
        raise CaseFileError(f"{where}: is {shown(table)}; a matrix is a table of keys")
    operation, tier = table.get("operation"), table.get("tier")
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise CaseFileError(f"{where}: operation {one_of(OPERATIONS)(operation)}, or one of --operations")
    keys = keys_of(OPERATIONS[operation])
    known = ["operation", "tier", *(key.name for key in keys)]
    for name in table:
        if name not in known:
            raise CaseFileError(
                f"{where}: unknown key {name!r}{nearest(name, known)}; a {operation} has {', '.join(known)}"
            )
    if tier not in TABLE_TIERS:
        raise CaseFileError(f"{where}: tier {one_of(TABLE_TIERS)(tier)}")
    required = [key.name for key in keys if key.required]
    if missing := [name for name in required if name not in table]:
        raise CaseFileError(f"{where}: {missing[0]} is missing; a {operation} needs {', '.join(required)}")
    values = {key.name: _values(key, table[key.name], where) for key in keys if key.name in table}
    return _Table(where, operation, tier, values)


def _values(key: Key, given: Any, where: str) -> list[Any]:
    """The values of a key in a table. Raises CaseFileError for a wrong value."""
    values = given if isinstance(given, list) else [given]
    if key.name == "shape" and not any(isinstance(value, list) for value in values):  # a shape is itself a list
        values = [given]
    if not values:
        raise CaseFileError(f"{where}: {key.name} is an empty list, which selects nothing")
    for value in values:
        if wrong := key.check(value):
            raise CaseFileError(f"{where}: {key.name} {wrong}")
    return [float(value) for value in values] if type(key.default) is float else values
