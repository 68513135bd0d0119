"""A mutant: one change of one file of kernels or modules, what it imitates, and what is to be found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.cases.schema import nearest
from narrowgauge.harness.tools.mutants.module_files import MODULE_FILES, NATIVE
from narrowgauge.harness.tools.mutants.yardsticks import DOORS, MODULE_DOORS
from narrowgauge.native.runtime.sources import FOLDER, kernel_files
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.training import training_recipe

MUTANTS = Path(__file__).parent / "changes"
"""The folder with the files of mutants."""
CLASSES = (
    "element rounding", "element scaling", "element range", "block scale", "tensor scale", "power-of-two scale",
    "zeros and limits", "amax", "NaN", "transform", "stochastic rounding", "choice of 4 or 6", "tails and sections",
    "layout", "nibbles", "tiles", "epilogue", "accumulator", "operand", "fused output", "delayed scaling", "memory",
    "order of threads", "operand of a module", "gradient of a weight", "step of a module", "norm",
    "sections of a module",
)  # fmt: skip
"""What kind of mistake it is."""
NEEDED = ("name", "class", "file", "find", "replace", "imitates", "cause", "door")
OPTIONAL = ("url", "recipe", "cases", "equivalent")


class MutantFileError(Exception):
    """A file of mutants that says something it should not: the file, the mutant and what is wrong."""


@dataclass(frozen=True)
class Mutant:
    """One wrong kernel."""

    name: str
    kind: str
    """One of CLASSES."""
    file: str
    """The kernel file, or the file of modules, that is changed."""
    find: str
    """Text that occurs in it exactly once."""
    replace: str
    imitates: str
    """What mistake of real kernels this is."""
    causes: tuple[str, ...]
    """Causes of `harness.diagnosis` that name it; any of them is right."""
    door: str
    """What the yardsticks call: one of `yardsticks.DOORS`."""
    recipe: str = ""
    """Recipe, `recipe+w_recipe`, or of a module training recipe, that the yardsticks use; none for doors without."""
    cases: str = ""
    """Keyword expression: of the cases that run the changed file, those that the change touches; none: all."""
    equivalent: str = ""
    """Why no result differs, of a mutant that no test can find."""
    url: str = ""
    """The public bug that it imitates, where there is one."""

    @property
    def of_module(self) -> bool:
        """Whether a file of modules is changed, and none of kernels."""
        return self.file in MODULE_FILES

    def changed_text(self) -> str:
        """The text of the file with the change. Raises MutantFileError where `find` does not occur once."""
        text = ((NATIVE if self.of_module else FOLDER) / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise MutantFileError(
                f"mutant {self.name!r}: the text to find occurs {count} times in {self.file}, and has to occur once: "
                f"{self.find.strip().splitlines()[0]!r}"
            )
        return text.replace(self.find, self.replace)


def load(path: Path) -> list[Mutant]:
    """The mutants of one file, in order. Raises MutantFileError for what is wrong in it."""
    tables = toml_file.read(path, "mutant", what="a file of mutants", error=MutantFileError)
    if not isinstance(tables, list) or not tables:
        raise MutantFileError(f"{path}: a file of mutants holds [[mutant]] tables, at least one")
    return [_mutant(table, f"{path}: [[mutant]] {number}") for number, table in enumerate(tables, 1)]


def load_all(folder: Path = MUTANTS) -> list[Mutant]:
    """The mutants of every *.toml file of a folder. Raises MutantFileError, also where two have one name."""
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for mutant in load(path):
            if mutant.name in found:
                raise MutantFileError(f"{path}: two mutants are called {mutant.name!r}")
            found[mutant.name] = mutant
    if not found:
        raise MutantFileError(f"{folder}: holds no *.toml file of mutants")
    return list(found.values())


def _mutant(table: Any, where: str) -> Mutant:
    if not isinstance(table, dict):
        raise MutantFileError(f"{where}: is {table!r}; a mutant is a table of keys")
    if isinstance(table.get("name"), str):
        where = f"{where}, {table['name']!r}"
    known = (*NEEDED, *OPTIONAL)
    for key in table:
        if key not in known:
            raise MutantFileError(f"{where}: unknown key {key!r}{nearest(key, known)}; a mutant has {', '.join(known)}")
    given = {key: table.get(key, "") for key in known}
    causes = given["cause"] if isinstance(given["cause"], list) else [given["cause"]]
    for key, value in [*given.items(), *(("cause", cause) for cause in causes)]:
        if (key != "cause" and not isinstance(value, str)) or (key == "cause" and not isinstance(value, str | list)):
            raise MutantFileError(f"{where}: {key} is {value!r}, not a text")
        if key in NEEDED and key != "replace" and not value and not (key == "cause" and given["equivalent"]):
            raise MutantFileError(f"{where}: {key} is missing; a mutant needs {', '.join(NEEDED)}")
    _check_choice(where, "class", given["class"], CLASSES)
    of_module = given["file"] in MODULE_FILES
    _check_choice(where, "file", given["file"], [*kernel_files(), *MODULE_FILES])
    _check_choice(where, "door", given["door"], MODULE_DOORS if of_module else DOORS)
    for name in given["recipe"].split("+") if given["recipe"] else []:
        try:
            (training_recipe if of_module else find_recipe)(name)
        except ValueError as error:
            raise MutantFileError(f"{where}: recipe is {name!r}: {error}") from error
    found = Mutant(
        given["name"], given["class"], given["file"], given["find"], given["replace"], given["imitates"],
        tuple(cause for cause in causes if cause), given["door"], given["recipe"], given["cases"],
        given["equivalent"], given["url"],
    )  # fmt: skip
    try:
        found.changed_text()
    except MutantFileError as error:
        raise MutantFileError(f"{where}: {error}") from error
    return found


def _check_choice(where: str, key: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise MutantFileError(f"{where}: {key} is {value!r}{nearest(value, known)}; it can be {', '.join(known)}")
