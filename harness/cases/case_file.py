"""Case files: reading TOML, and expanding its tables to cases; and the usual cases of a file of contracts.

A file holds `[[matrix]]` tables. Each table names an operation and a tier, and gives a value or a list of values for
each key of the operation; the product of the lists is its cases. A table with a tier and `ids` lists single cases. The
key `rules` above the tables names files of rules. cases/README.md describes the files for people.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import recipes_of
from narrowgauge.harness.cases.keys import TABLE_TIERS, Key, TableTier, Tier, keys_of, nearest, one_of, shown
from narrowgauge.harness.cases.operations import (
    OPERATIONS,
    case_from_id,
    contracts_in,
    outside_operations,
)
from narrowgauge.harness.machine.collection import paused_collection
from narrowgauge.spec.recipes import RuleError, use_rules

LEDGER = "known.toml"
"""Name of the ledger of known failures (`harness.gate.ledger`), which lies among the case files."""
MOST_CASES = 100_000
"""Cases of a file."""
_NAMED = 5
"""Names in a message. The message counts further files."""
SHIPPED = "shipped"
"""Path of the case files of the package, wherever paths of case files are accepted."""
_CURRENT = Path("cases")
"""Cases of the current folder."""
_PACKAGE = Path(__file__).parents[2] / "cases"
"""Cases of the package."""
_HEAD = re.compile(r"^\s*\[\[\s*matrix\s*\]", re.MULTILINE)
"""Head of a table of cases, or of one without its last bracket."""


class CaseFileError(Exception):
    """A wrong case file: the message names the file, the key and the remedy."""


class ForeignFile(CaseFileError):
    """A TOML file that is no case file by its content (`_content`), for example the settings of a tool.

    A folder of case files may hold such files; the message is for a file that is named.
    """


def shipped_cases() -> Path:
    """The folder of the case files of the package, by its real path."""
    return Path(os.path.realpath(_PACKAGE))


def case_path(path: Path) -> Path:
    """The path of case files that a user names: `shipped` is `shipped_cases`, and `shipped/nvfp4_gemm.toml` a file
    there, unless there is a path of this name."""
    return shipped_cases().joinpath(*path.parts[1:]) if path.parts[:1] == (SHIPPED,) and not path.exists() else path


def default_cases() -> Path:
    """`cases` of the current folder if it holds a case file, else the cases of the package, by their real path."""
    return _CURRENT if any(map(_is_case_file, case_files(_CURRENT))) else shipped_cases()


def unused_default() -> list[Path]:
    """The foreign TOML files because of which `default_cases` is the package and not `cases`; empty without any."""
    return [] if default_cases() == _CURRENT else case_files(_CURRENT)


def is_default(path: str | Path) -> bool:
    """Whether a file is one of `cases` of the current folder or of the package: its cases need no name of a file."""
    return os.path.realpath(Path(path).parent) in (os.path.realpath(_CURRENT), str(shipped_cases()))


def case_files(folder: Path) -> list[Path]:
    """The TOML files of a folder except the ledger, sorted. They may include foreign files."""
    return sorted(file for file in folder.glob("*.toml") if file.name != LEDGER)


def load(path: str | Path) -> list[Case]:
    """The cases of a file, in order; a case in tables of several tiers has the first of quick, quick-cuda and full.

    Raises CaseFileError if the file cannot be read, is not TOML, or has an unknown key or value.
    """
    return _cases([(Path(path), _tables(Path(path)))])


def load_all(
    paths: Sequence[str | Path], *, foreign: list[Path] | None = None, recipes: Sequence[str] = ()
) -> list[Case]:
    """The cases of files, and of all case files of folders, each id once.

    A Python file holds contracts, and its cases are the usual ones of each contract with these `recipes`, or with the
    default of its signature. Its contracts are operations from then on. Foreign TOML files of the folders are passed
    over, and appended to `foreign`. Raises CaseFileError as `load` does, and if there is no case file.
    """
    found: list[tuple[Path, list[_Table | _Ids]]] = []
    usual: list[Case] = []
    for path in map(Path, paths):
        if path.suffix == ".py":
            usual += contract_cases(path, recipes)
            continue
        if not path.is_dir():
            found += [(path, _tables(path))] if path.name != LEDGER else []
            continue
        if not (files := case_files(path)):
            raise CaseFileError(f"{path}: holds no *.toml case file")
        others: list[Path] = []
        for file in files:
            try:
                found.append((file, _tables(file)))
            except ForeignFile:
                others.append(file)
        if len(others) == len(files):
            raise CaseFileError(f"{path}: holds no case file; {passed_over_note(others)}")
        if foreign is not None:
            foreign += others
    if paths and not found and not usual:
        raise CaseFileError(f"{', '.join(map(str, paths))}: holds known failures, and no case")
    cases = _cases(found)
    known = {case.id for case in cases}
    return [*cases, *(case for case in usual if case.id not in known)]


def contract_cases(path: Path, recipes: Sequence[str]) -> list[Case]:
    """The usual cases of the contracts of a file, which are operations from then on. Raises CaseFileError."""
    try:
        given = recipes_of(contracts_in(path), recipes)
        return [case for cls, names in given.items() for case, _ in cls.usual(names, views=False, file=str(path))]
    except ValueError as error:  # of a contract, or of a recipe
        raise CaseFileError(str(error)) from error


def passed_over_note(files: Sequence[Path]) -> str:
    """How many foreign TOML files were passed over, with their names."""
    named = ", ".join(map(str, files[:_NAMED])) + (f" and {len(files) - _NAMED} more" if len(files) > _NAMED else "")
    return f"passed over {len(files)} TOML file{'s' * (len(files) != 1)} without [[matrix]] tables of cases: {named}"


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
    tier: TableTier
    values: dict[str, list[Any]]
    """Values of each key. Their product is the cases of the table."""

    @property
    def count(self) -> int:
        """Number of cases."""
        return math.prod(map(len, self.values.values()))

    def cases(self, file: str) -> Iterator[Case]:
        """The cases, the last key fastest. Raises CaseFileError if values of different keys exclude one another."""
        cls = OPERATIONS[self.operation]
        fields = {key.name: key.field for key in keys_of(cls)}
        names = [fields[name] for name in self.values]
        outside = outside_operations()
        for values, tier in zip(itertools.product(*self.values.values()), self._tiers(), strict=True):
            point = dict(zip(names, values, strict=True))
            point["shape"] = tuple(point["shape"])
            case = cls(**point, tier=tier, file=file)
            if wrong := case.problem():
                raise CaseFileError(f"{self.where}: {wrong}")
            if self.operation in outside and case_from_id(case.id) != replace(case, tier="quick", file=""):
                raise CaseFileError(
                    f"{self.where}: the id {case.id} is also that of another case; give the keys of {self.operation} "
                    "names and words that no other key has, without / and +"
                )
            yield case

    def _tiers(self) -> Iterator[Tier]:
        """The tier of each case, in order."""
        if self.tier != "quick-values":
            return itertools.repeat(self.tier, self.count)
        quick = few_points(tuple(map(len, self.values.values())))
        return ("quick" if number in quick else "quick-cuda" for number in range(self.count))


@cache
def few_points(lengths: tuple[int, ...]) -> frozenset[int]:
    """Numbers of few points of the product of lists, the last list fastest, that have every value of every list: the
    n-th values of all lists, and the first value of a list without an n-th one."""
    numbers = set()
    for value in range(max(lengths, default=1)):
        number = 0
        for length in lengths:
            number = number * length + (value if value < length else 0)
        numbers.add(number)
    return frozenset(numbers)


@dataclass(frozen=True)
class _Ids:
    """A `[[matrix]]` table of single cases."""

    where: str
    tier: Tier
    ids: list[str]

    @property
    def count(self) -> int:
        """Number of cases."""
        return len(self.ids)

    def cases(self, file: str) -> Iterator[Case]:
        """The cases, in order. Raises CaseFileError for a text that is no id of a case."""
        for name in self.ids:
            if (case := case_from_id(name)) is None:
                raise CaseFileError(f"{self.where}: {name!r} is no id of a case; `narrowgauge list` prints ids")
            yield replace(case, tier=self.tier, file=file)


def _content(path: Path) -> dict[str, Any]:
    """The content of a case file. Raises ForeignFile for another TOML file, else CaseFileError.

    This function alone decides what a case file is: a file with a key `operation` or `tier` in its [[matrix]] tables,
    or with tables of a different name and both keys. An empty table or a value that is no table cannot be told from a
    mistake, and counts too. A file that is not TOML is a case file if any line begins with [[matrix]].
    """
    try:
        content = toml_file.parse(path, what="a case file", error=CaseFileError)
    except CaseFileError as error:
        if path.is_file() and not _HEAD.search(_beginning(path)):
            raise ForeignFile(str(error)) from error
        raise

    if not any(_holds_cases(name, value) for name, value in content.items()):
        keys = ", ".join(repr(key) for key in [*content][:_NAMED]) or "no key"
        raise ForeignFile(
            f"{path}: is no case file: it has {keys}, and no [[matrix]] table with an operation and a tier; name a "
            f"case file, a folder of case files or {SHIPPED} (cases/README.md)"
        )
    toml_file.check_keys(content, path, ["matrix", "rules"], what="a case file", error=CaseFileError)
    return content


def _holds_cases(name: str, value: Any) -> bool:
    """Whether a key of a file, `name`, holds tables of cases by the rule of `_content`."""
    tables = value if isinstance(value, list) else [value]
    counts = [sum(key in table for key in ("operation", "tier")) for table in tables if isinstance(table, dict)]
    if name != "matrix":
        return 2 in counts
    return any(counts) or not all(isinstance(table, dict) and table for table in tables) or not tables


def _beginning(path: Path) -> str:
    """The text of a file up to the largest size of a case file; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(toml_file.LARGEST).decode("utf-8", "replace")
    except OSError:
        return ""


def _is_case_file(path: Path) -> bool:
    """Whether a file is a case file by its content, correct or not."""
    try:
        _content(path)
    except ForeignFile:
        return False
    except CaseFileError:
        return True
    return True


def _tables(path: Path) -> list[_Table | _Ids]:
    """The tables of a file. Their cases are counted before a case is made."""
    content = _content(path)
    if "rules" in content:
        _use_rules(path, content["rules"])
    contents = content.get("matrix")
    if not isinstance(contents, list) or not contents:
        raise CaseFileError(f"{path}: no [[matrix]] table, so no case; see cases/README.md")
    tables = [_table(content, f"{path}: [[matrix]] {number}") for number, content in enumerate(contents, 1)]
    total = 0
    for table in tables:
        total += (count := table.count)
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


def _cases(files: Iterable[tuple[Path, list[_Table | _Ids]]]) -> list[Case]:
    """The first case of every id in files and their tables, in order, with the first tier of the cases of this id."""
    first: dict[str, Case] = {}
    with paused_collection():
        for case in (case for file, tables in files for table in tables for case in table.cases(str(file))):
            known = first.setdefault(case.id, case)
            if TABLE_TIERS.index(case.tier) < TABLE_TIERS.index(known.tier):
                first[case.id] = replace(known, tier=case.tier)
    return list(first.values())


def _table(table: Any, where: str) -> _Table | _Ids:
    """The checked content of a table. Raises CaseFileError."""
    if not isinstance(table, dict):
        raise CaseFileError(f"{where}: is {shown(table)}; a matrix is a table of keys")
    operation, tier = table.get("operation"), table.get("tier")
    if "ids" in table:
        return _table_of_ids(table, where)
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


def _table_of_ids(table: dict[str, Any], where: str) -> _Ids:
    tier, ids = table.get("tier"), table["ids"]
    if others := [name for name in table if name not in ("tier", "ids")]:
        raise CaseFileError(
            f"{where}: {others[0]} stands beside ids; a table of ids has a tier alone, since an id has it"
        )
    if tier not in TABLE_TIERS:
        raise CaseFileError(f"{where}: tier {one_of(TABLE_TIERS)(tier)}")
    if not isinstance(ids, list) or not ids or not all(isinstance(name, str) for name in ids):
        raise CaseFileError(f"{where}: ids is {shown(ids)}; it is a list of ids of cases")
    return _Ids(where, tier, ids)


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
