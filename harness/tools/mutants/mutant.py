"""A mutant: a change of a kernel file or module file, the mistake it imitates, and the expected causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.hosts.changed_source import MODULES
from narrowgauge.harness.tools.mutants.conventional_tests import doors
from narrowgauge.native.runtime.sources import FOLDER, kernel_files
from narrowgauge.spec.modules.training import training_recipe
from narrowgauge.spec.recipes import find_recipe

MUTANTS = Path(__file__).parents[4] / "tests" / "mutants" / "kernels"
"""Folder of a checkout with the files of mutants. The wheel lacks it: the module has the kernels without changes."""
CLASSES = (
    "element rounding", "element scaling", "element range", "block scale", "tensor scale", "power-of-two scale",
    "zeros and limits", "amax", "NaN", "rotation", "stochastic rounding", "choice of 4 or 6", "tails and sections",
    "layout", "nibbles", "tiles", "epilogue", "accumulator", "operand", "fused output", "delayed scaling", "memory",
    "order of threads", "operand of a module", "gradient of a weight", "step of a module", "norm",
    "sections of a module",
)  # fmt: skip
"""Classes of mistakes."""
NEEDED = ("name", "class", "file", "find", "replace", "imitates", "cause", "door")
OPTIONAL = ("url", "recipe", "cases", "equivalent")
NOT_RUN = ("__init__", "parallel")
"""Files of `native.modules` without mutants: `parallel.py` needs several processes, and no case has them.
tests/test_parallel.py breaks it."""


def module_files() -> list[str]:
    """Files of `native.modules` that a mutant may change."""
    return sorted(path.name for path in MODULES.glob("*.py") if path.stem not in NOT_RUN)


@cache
def _files() -> list[str]:
    """Files that a mutant may change."""
    return [*kernel_files(), *module_files()]


class MutantFileError(Exception):
    """An invalid file of mutants. The message names the file, the mutant and the problem."""


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel."""

    name: str
    kind: str
    """One of CLASSES."""
    file: str
    """Changed kernel file or module file."""
    find: str
    """Text that occurs exactly once in the file."""
    replace: str
    imitates: str
    """Mistake of real kernels that the mutant imitates."""
    causes: tuple[str, ...]
    """Expected causes of `harness.diagnosis`. Any listed cause is accepted."""
    door: str
    """Call of the conventional tests: a key of `conventional_tests.doors`."""
    recipe: str = ""
    """Recipe for the conventional tests: `recipe`, `recipe+w_recipe`, or the training recipe of a module. May be
    empty."""
    cases: str = ""
    """Keyword expression: selects the affected cases of the change, among the cases that run the file. Empty: all."""
    equivalent: str = ""
    """Why no result differs, for a mutant that no test can detect."""
    url: str = ""
    """Public bug imitated by the mutant, or empty."""

    @property
    def of_module(self) -> bool:
        """Whether the changed file belongs to a module."""
        return self.file in module_files()

    def changed_text(self) -> str:
        """The changed text of the file. Raises MutantFileError unless `find` occurs exactly once."""
        text = ((MODULES if self.of_module else FOLDER) / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise MutantFileError(
                f"mutant {self.name!r}: the text to find occurs {count} times in {self.file}, and has to occur once: "
                f"{self.find.strip().splitlines()[0]!r}"
            )
        return text.replace(self.find, self.replace)


def load(path: Path) -> list[Mutant]:
    """The mutants of a file, in order. Raises MutantFileError for an invalid file."""
    tables = toml_file.read(path, "mutant", what="a file of mutants", error=MutantFileError)
    if not isinstance(tables, list) or not tables:
        raise MutantFileError(f"{path}: a file of mutants holds [[mutant]] tables, at least one")
    return [_mutant(table, f"{path}: [[mutant]] {number}") for number, table in enumerate(tables, 1)]


def load_all(folder: Path = MUTANTS) -> list[Mutant]:
    """The mutants of all *.toml files of a folder. Raises MutantFileError for an invalid file or a duplicate name, and
    outside of a checkout of narrowgauge."""
    if not folder.is_dir():
        raise MutantFileError(
            f"{folder}: there is no such folder: the wrong kernels of narrowgauge are in its repository, not in the "
            "installed package. Run `narrowgauge mutants` in a checkout, or with --operations FILE for the known "
            "mistakes of your own operations"
        )
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for mutant in load(path):
            if mutant.name in mutants:
                raise MutantFileError(f"{path}: two mutants are called {mutant.name!r}")
            mutants[mutant.name] = mutant
    if not mutants:
        raise MutantFileError(f"{folder}: holds no *.toml file of mutants")
    return list(mutants.values())


def _mutant(table: Any, location: str) -> Mutant:
    if not isinstance(table, dict):
        raise MutantFileError(f"{location}: is {table!r}; a mutant is a table of keys")
    if isinstance(table.get("name"), str):
        location = f"{location}, {table['name']!r}"
    keys = (*NEEDED, *OPTIONAL)
    for key in table:
        if key not in keys:
            raise MutantFileError(
                f"{location}: unknown key {key!r}{nearest(key, keys)}; a mutant has {', '.join(keys)}"
            )
    entry = {key: table.get(key, "") for key in keys}
    causes = entry["cause"] if isinstance(entry["cause"], list) else [entry["cause"]]
    for key, value in [*entry.items(), *(("cause", cause) for cause in causes)]:
        if (key != "cause" and not isinstance(value, str)) or (key == "cause" and not isinstance(value, str | list)):
            raise MutantFileError(f"{location}: {key} is {value!r}, not a text")
        if key in NEEDED and key != "replace" and not value and not (key == "cause" and entry["equivalent"]):
            raise MutantFileError(f"{location}: {key} is missing; a mutant needs {', '.join(NEEDED)}")
    _check_choice(location, "class", entry["class"], CLASSES)
    of_module = entry["file"] in module_files()
    _check_choice(location, "file", entry["file"], _files())
    _check_choice(
        location, "door", entry["door"], [name for name, door in doors().items() if door.of_module is of_module]
    )
    for name in entry["recipe"].split("+") if entry["recipe"] else []:
        try:
            (training_recipe if of_module else find_recipe)(name)
        except ValueError as error:
            raise MutantFileError(f"{location}: recipe is {name!r}: {error}") from error
    mutant = Mutant(
        entry["name"], entry["class"], entry["file"], entry["find"], entry["replace"], entry["imitates"],
        tuple(cause for cause in causes if cause), entry["door"], entry["recipe"], entry["cases"],
        entry["equivalent"], entry["url"],
    )  # fmt: skip
    try:
        mutant.changed_text()
    except MutantFileError as error:
        raise MutantFileError(f"{location}: {error}") from error
    return mutant


def _check_choice(location: str, key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise MutantFileError(
            f"{location}: {key} is {value!r}{nearest(value, choices)}; it can be {', '.join(choices)}"
        )
