"""The operations, found by name: folders of the package, and files and folders of a user.

An operation is a folder `<name>/` with the object `OPERATION` (`harness.operations.operation.Operation`) in
`operation.py` and its case class in `case.py`, which imports no torch; or a file `<name>.py` with both. `_` in the name
of a file stands for `-` in the name of the operation. The package's own lie in `harness/operations/`. A user's are the
files and folders of `--operations`, of the ini key `narrowgauge_operations` and of the environment variable
NARROWGAUGE_OPERATIONS, and the modules of entry points in the group `narrowgauge.operations`. A file of a user may hold
contracts instead (`narrowgauge.contract`): each is an operation with the name of its function, and its file is imported
in a process of its own. The contracts of `narrowgauge.contracts` belong to the package, and are traced in this process.

Modules are loaded by name, when their operation is first asked for. This module also makes cases from the keys of a
case file, or from the labels of a record.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase, case_class
from narrowgauge.harness.cases.contracts.traces import Answer, Declared, Request, contracts_of, declared
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.harness.cases.methods import Method
from narrowgauge.spec.program import ContractError, request_key
from narrowgauge.spec.recipes import VARIABLE as RULES

if TYPE_CHECKING:
    from narrowgauge.contract import Contract

VARIABLE = "NARROWGAUGE_OPERATIONS"
"""Environment variable with files and folders of operations, which processes of a run inherit."""
GROUP = "narrowgauge.operations"
"""Group of entry points. The name of an entry point is that of the operation, the value a module."""
_OWN = Path(__file__).parents[1] / "operations"
_PACKAGE = "narrowgauge.harness.operations"
_CONTRACTS = "narrowgauge.contracts"
_OUTSIDE = "narrowgauge_operations"
"""Beginning of the names of packages: every folder of a user is a package, with the modules of its operations."""
_DEFINES = re.compile(r"^OPERATION\b", re.MULTILINE)
_CONTRACT = re.compile(r"^@(\w+\.)*contract\b", re.MULTILINE)


class OperationError(ValueError):
    """An operation that cannot be used. The message names the file, the problem and the remedy."""


@dataclass(frozen=True)
class _Place:
    """Where an operation is."""

    module: str
    """The module or package."""
    folder: bool
    """Whether the module is a package with `operation.py`."""
    cases: bool
    """Whether the package has `case.py`."""
    source: str
    """For messages."""
    contract: type[ContractCase] | None = None
    """The case class of a contract, which has no module."""

    @property
    def main(self) -> str:
        """Name of the module with OPERATION."""
        return f"{self.module}.operation" if self.folder else self.module


class _Operations(Mapping[str, type[Case]]):
    """Case classes by the names of the operations; a module is loaded at its first use."""

    def __init__(self) -> None:
        self._found: tuple[str, dict[str, _Place]] | None = None
        """The variable, and the places with this value of it: a judge forks before it has the variable of its run."""
        self._loaded: dict[tuple[str, _Place], type[Case]] = {}

    def __getitem__(self, name: str) -> type[Case]:
        key = name, self.places[name]
        if key not in self._loaded:
            self._loaded[key] = self._load(*key)
        return self._loaded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    @property
    def places(self) -> Mapping[str, _Place]:
        """Places of all operations by name: the package's own, then those of a user. Raises OperationError."""
        value = os.environ.get(VARIABLE, "")
        if self._found is None or self._found[0] != value:
            found = {**dict(_places_in(_OWN, _PACKAGE)), **_SHIPPED}
            for name, place in _outside():
                if name in found and found[name] not in (place, _SHIPPED.get(name)):
                    raise OperationError(
                        f"{place.source}: there is an operation {name} already, {found[name].source}; rename the file"
                    )
                found[name] = place
            self._found = value, found | _HELD
        return self._found[1]

    def forget(self) -> None:
        """Find the operations again when they are next asked for."""
        self._found = None

    def let_go(self) -> None:
        """Forget the contracts that are objects of this process."""
        _HELD.clear()
        self.forget()

    def _load(self, name: str, place: _Place) -> type[Case]:
        if place.contract is not None:
            return place.contract
        module = loaded(f"{place.module}.case", place.source) if place.cases else main_module(name)
        cls = module.OPERATION.case if hasattr(module, "OPERATION") else None
        for value in vars(module).values() if cls is None else ():
            if isinstance(value, type) and issubclass(value, Case) and vars(value).get("operation") == name:
                cls = value
        if cls is None or getattr(cls, "operation", None) != name:
            has = f"{cls.__name__} of the operation {getattr(cls, 'operation', None)!r}" if cls else "no case class"
            raise OperationError(
                f"{place.source}: has {has}; the name of the file asks for a class with operation = {name!r}"
            )
        try:
            keys = keys_of(cls)
        except (TypeError, ValueError) as error:
            raise OperationError(f"{place.source}: {error}") from error
        if not next(key for key in keys if key.field == "inputs").choices:
            raise OperationError(
                f"{place.source}: {cls.__name__} takes no input family; give it `kinds`, such as (Kind.QUANTIZED,), or "
                "`own_families`"
            )
        found: type[Case] = cls
        return found


def traced_here(contract: Contract) -> Declared:
    """A contract whose steps this process traces."""

    def trace(requests: list[Request]) -> dict[str, Answer]:
        asked = list(map(vars, requests)) or list(contract.usual_requests())
        return {request_key(request): contract.answer(request) for request in asked}

    return declared(contract.description, trace)


_SHIPPED = {
    contract.name: _Place(_CONTRACTS, False, False, contract.file, case_class(traced_here(contract)))
    for contract in CONTRACTS.values()
}
"""The contracts of the package."""
_HELD: dict[str, _Place] = {}
"""Contracts that are objects of this process."""
OPERATIONS = _Operations()
"""Case classes by the names of the operations."""


def hold(contract: Contract) -> type[ContractCase]:
    """Make a contract of this process an operation of this process, in place of one of the package with its name.

    Raises OperationError if another operation has the name.
    """
    _HELD.pop(contract.name, None)
    OPERATIONS.forget()
    if contract.name in OPERATIONS:
        cls = OPERATIONS[contract.name]
        if issubclass(cls, ContractCase) and os.path.realpath(cls.declared.file) == os.path.realpath(contract.file):
            return cls
        if OPERATIONS.places[contract.name] is not _SHIPPED.get(contract.name):
            raise OperationError(
                f"{contract.file}: there is an operation {contract.name} already; give the function another name"
            )
    return hold_declared(traced_here(contract))


def hold_declared(contract: Declared) -> type[ContractCase]:
    """Make a contract an operation of this process, in place of a contract of the same name. Raises OperationError."""
    try:
        cls = case_class(contract)
    except ContractError as error:
        raise OperationError(str(error)) from error
    _HELD[contract.name] = _Place("", False, False, contract.file, cls)
    OPERATIONS.forget()
    return cls


def main_module(name: str) -> ModuleType:
    """The module with the object OPERATION of an operation. Raises OperationError if it cannot be loaded."""
    place = OPERATIONS.places[name]
    module = loaded(place.main, place.source)
    if not hasattr(module, "OPERATION"):
        raise OperationError(f"{place.source}: has no OPERATION; see docs/add.md")
    return module


def parts_of_operations(part: str) -> Iterator[ModuleType]:
    """The modules `<part>.py` in the folders of operations, for example `bench`."""
    for place in OPERATIONS.places.values():
        if place.folder and (Path(place.source) / f"{part}.py").is_file():
            yield loaded(f"{place.module}.{part}", place.source)


def loaded(module: str, source: str) -> ModuleType:
    """A module by its name. Raises OperationError with the `source` and the reason if the import fails."""
    try:
        return import_module(module)
    except OperationError:
        raise
    except Exception as error:
        raise OperationError(f"{source}: cannot be imported: {type(error).__name__}: {error}") from error


def use_operations(paths: Sequence[str | os.PathLike[str]]) -> None:
    """Add files and folders of operations for this process and for its child processes.

    Raises OperationError for a path without an operation, and for an operation that cannot be loaded.
    """
    if not paths:
        return
    known = outside_paths()
    given = [os.path.abspath(path) for path in paths]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*known, *given]))
    try:
        for name in outside_operations():
            OPERATIONS[name]
    except OperationError:
        os.environ[VARIABLE] = os.pathsep.join(known)
        raise


def outside_paths() -> list[str]:
    """Files and folders of a user's operations."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def outside_operations() -> list[str]:
    """Names of a user's operations."""
    return [name for name, place in OPERATIONS.places.items() if not _is_own(place)]


def outside_files() -> list[Path]:
    """Python files of a user's operations, with their relative imports, sorted. Contracts are not among
    them: their digests say more."""
    places = [OPERATIONS.places[name] for name in outside_operations()]
    sources = [Path(place.source) for place in places if place.contract is None]
    imported = [module.__file__ for name, module in list(sys.modules.items()) if name.startswith(f"{_OUTSIDE}_")
                and getattr(module, "__file__", None)]  # fmt: skip
    files = {file for path in sources for file in (path.rglob("*.py") if path.is_dir() else [path]) if file.is_file()}
    return sorted(files.union(map(Path, filter(None, imported))) if files else files)


def contracts_in(file: str | os.PathLike[str]) -> list[type[ContractCase]]:
    """The case classes of the contracts of a file, which are operations from then on. Raises OperationError."""
    use_operations([file])
    found = [cls for cls in outside_contracts().values() if os.path.samefile(cls.declared.file, file)]
    if not found:
        raise OperationError(f"{file}: holds no contract, a function with @contract; see docs/contracts.md")
    return found


def outside_contracts() -> dict[str, type[ContractCase]]:
    """Case classes of the contracts in files of a user by name. Objects of this process are in no run."""
    places = {name: OPERATIONS.places[name] for name in outside_operations() if name not in _HELD}
    return {name: place.contract for name, place in places.items() if place.contract is not None}


def _is_own(place: _Place) -> bool:
    """Whether an operation belongs to the package."""
    return place.module == _CONTRACTS or place.module.startswith(f"{_PACKAGE}.")


def _places_in(folder: Path, package: str, only: str = "") -> Iterator[tuple[str, _Place]]:
    """The operations in a folder, whose modules belong to the package of this name. `only`: of this entry alone."""
    for entry in sorted(folder.iterdir() if not only else [folder / only]):
        name = entry.stem.replace("_", "-")
        if (entry / "operation.py").is_file():
            yield name, _Place(f"{package}.{entry.name}", True, (entry / "case.py").is_file(), f"{entry}")
        elif entry.suffix == ".py" and package != _PACKAGE:
            text = entry.read_text(encoding="utf-8")
            if _DEFINES.search(text):
                yield name, _Place(f"{package}.{entry.stem}", False, False, f"{entry}")
            elif _CONTRACT.search(text):
                yield from _contracts_in(entry)


def _contracts_in(file: Path) -> Iterator[tuple[str, _Place]]:
    """The contracts of a file. Raises OperationError for a file that cannot be imported, and for a bad signature."""
    try:
        for name, known in contracts_of(file).items():
            yield name, _Place("", False, False, f"{file}", case_class(known))
    except ContractError as error:
        raise OperationError(str(error)) from error


def _outside() -> Iterator[tuple[str, _Place]]:
    """The operations of a user."""
    for path in map(Path, outside_paths()):
        whole = path.is_dir() and not (path / "operation.py").is_file()
        folder = path if whole else path.parent
        if not path.exists():
            raise OperationError(f"{path}: there is no such file or folder of operations")
        name = f"{_OUTSIDE}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(folder)]
        found = list(_places_in(folder, name, "" if whole else path.name))
        if not found:
            raise OperationError(
                f"{path}: holds no operation, a file or folder with an object OPERATION or with functions under "
                "@contract; see docs/add.md and docs/contracts.md"
            )
        yield from found
    for entry in entry_points(group=GROUP):
        spec = find_spec(entry.module)
        source = spec.origin if spec is not None and spec.origin else f"entry point {entry.name} = {entry.value}"
        yield entry.name, _Place(entry.module, False, False, source)


def is_composed(name: str) -> bool:
    """Whether an operation of a record is composed of others (`Case.composed`); an unknown operation is not."""
    case_class = OPERATIONS.get(name)
    return case_class is not None and case_class.composed


def is_own(name: str) -> bool:
    """Whether an operation of a record is one of narrowgauge, and composed of no others: it measures its figures."""
    return name in OPERATIONS and name not in outside_operations() and not OPERATIONS[name].composed


def stage_names(name: str) -> tuple[str, ...]:
    """Every stage in records of an operation. Empty for an unknown operation, and if the stages depend on results."""
    names = OPERATIONS[name].stage_names() if name in OPERATIONS else ()
    return tuple(dict.fromkeys([*names, "memory", "repeat"])) if names else ()


def all_methods() -> dict[str, Method]:
    """Methods of a backend that operations call, by name."""
    return {name: method for cls in OPERATIONS.values() for name, method in cls.all_methods().items()}


def all_descriptions() -> tuple[str, ...]:
    """Optional methods of a backend that describe the backend and compute no result."""
    return tuple(dict.fromkeys(name for cls in OPERATIONS.values() for name in cls.descriptions))


def every_method() -> dict[str, Method]:
    """Methods that operations call, and methods that describe a backend."""
    return all_methods() | dict.fromkeys(all_descriptions(), Method())


def case_of(operation: str, values: Mapping[str, Any], *, tier: str = "quick", file: str = "") -> Case:
    """The case of an operation with these values of keys, by the names of `keys_of`; optional keys may be absent."""
    cls = OPERATIONS[operation]
    fields = {key.field: values[key.name] for key in keys_of(cls) if key.name in values}
    arguments: dict[str, Any] = {**fields, "shape": tuple(values["shape"]), "tier": tier, "file": file}
    return cls(**arguments)


def case_from_labels(
    operation: str,
    recipe: str,
    shape: tuple[int, ...],
    dtype: str,
    inputs: str,
    flags: Iterable[str] = (),
    tier: str = "quick",
    file: str = "",
) -> Case:
    """The case with these labels, the inverse of `Case.labels`. Records have columns of the same names.

    Raises ValueError for an unknown flag.
    """
    cls = OPERATIONS[operation]
    x_recipe, _, w_recipe = recipe.partition("+")
    operands, _, out = dtype.partition("-")
    x, _, w = operands.partition("x")
    labels = {
        "recipe": x_recipe, "w_recipe": w_recipe or None, "training": recipe, "dtype": dtype, "x": x, "w": w,
        "out": out, "shape": shape, "inputs": inputs,
    }  # fmt: skip
    values = {key.name: labels[key.field] for key in keys_of(cls) if key.field in labels}
    for flag in flags:
        name, value = _read_flag(cls, flag)
        if not name:
            raise ValueError(f"a {operation} has no flag {flag!r}")
        values[name] = value
    return case_of(operation, values, tier=tier, file=file)


_FLAG_VALUES: dict[tuple[type[Any], str, str | None], tuple[str, Any]] = {}
"""Names and values of keys by case class, flag and the files of rules, whose recipes are values."""


def _read_flag(cls: type[Case], flag: str) -> tuple[str, Any]:
    """Name and value of the key with this flag; an empty name for an unknown flag."""
    place = cls, flag, os.environ.get(RULES)
    if place not in _FLAG_VALUES:
        read = ((key.name, value) for key in keys_of(cls) if (value := key.read(flag)) is not None)
        _FLAG_VALUES[place] = next(read, ("", None))
    return _FLAG_VALUES[place]


def case_from_id(name: str) -> Case | None:
    """The case with this id, of no file. None if the text is not the id of a case with an input family."""
    operation, *parts = name.split("/")
    place = next((n for n, part in enumerate(parts) if re.fullmatch(r"\d{1,18}(x\d{1,18})*", part, re.ASCII)), None)
    if operation not in OPERATIONS or place not in (0, 1):
        return None
    shape = tuple(map(int, parts[place].split("x")))
    recipe, rest = "".join(parts[:place]), parts[place + 1 :]
    for dtype, others in (("".join(rest[:1]), rest[1:]), ("", rest)):
        if not 1 <= len(others) <= 2:
            continue
        flags = others[1].split("+") if others[1:] else []
        try:
            case = case_from_labels(operation, recipe, shape, dtype, others[0], flags)
            if _is_valid(case) and case.id == name:
                return case
        except (ValueError, TypeError):  # an unknown word, or a flag that is missing
            continue
    return None


def _is_valid(case: Case) -> bool:
    """Whether the values of all keys of a case are allowed, separately and together."""
    for key in keys_of(type(case)):
        value = getattr(case, key.field)
        if value != key.default and key.check(list(value) if key.field == "shape" else value):
            return False
    return case.problem() is None
