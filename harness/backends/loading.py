"""Loading the object that implements a backend: `native`, `reference`, a library, `package.module[:Name]` or
`folder/file.py[:Name]`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.operations import all_methods

BUILT_IN = {"native": "narrowgauge.native.ops", "reference": "narrowgauge.reference.ops"}
LIBRARIES = tuple(
    sorted(
        path.stem.replace("_", "-")
        for path in (Path(__file__).parent / "adapters").glob("*.py")
        if path.stem not in ("__init__", "common")
    )
)
"""Libraries with an adapter: `harness/backends/adapters/<name>.py`."""

_FILE = re.compile(r"(.+\.py)((?::\w+)?)")
"""A backend by its file, and the name in it."""
_OWN = str(Path(__file__).parents[2])
"""Folder of this package."""
_LIBRARY = sysconfig.get_paths()["stdlib"]


def backend_file(name: str) -> Path | None:
    """The file of a backend `folder/file.py[:Name]`, an absolute path; None for any other name."""
    match = _FILE.fullmatch(name)
    return None if match is None else Path(os.path.abspath(match[1]))


def normal_name(name: str, base: str | os.PathLike[str] = "") -> str:
    """The name of a backend, that of a file relative to the current folder if the file lies below it, else absolute.

    Runs and baselines of a backend thus have a single name. `base`: folder of a relative path (default: the current).
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return name
    path = Path(os.path.abspath(Path(base, match[1])))
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}{match[2]}"


def check_name(name: str) -> None:
    """Raise BackendError if no backend can have this name: a built-in name, a file that is not there, or
    `package.module[:Name]` whose package is not found in the current folder or on `sys.path`. Nothing is imported."""
    _check_form(name)
    if (file := backend_file(name)) is not None:
        if not file.is_file():
            siblings = [path.name for path in file.parent.glob("*.py")]
            close = nearest(file.name, siblings)
            raise BackendError(f"backend {name}: there is no file {file}{close}; give its path from the current folder")
        return
    _search_here()
    package = _place(name).partition(":")[0].partition(".")[0]
    try:
        found = package in sys.modules or importlib.util.find_spec(package) is not None
    except ValueError:  # an empty name
        found = False
    if not found:
        raise BackendError(
            f"backend {name}: there is no module {package!r} in the current folder or on the path of Python; change "
            "the folder, or set PYTHONPATH"
        )


def _check_form(name: str) -> None:
    if name not in BUILT_IN and name not in LIBRARIES and ":" not in name and "." not in name:
        known = (*BUILT_IN, *LIBRARIES)
        raise BackendError(
            f"no backend is called {name!r}{nearest(name, known)}; "
            f"there are {', '.join(known)}, and your own as package.module:Name or folder/file.py:Name"
        )


def _place(name: str) -> str:
    """`package.module[:Name]` of a backend."""
    library = name.partition(":")[0]
    if library in LIBRARIES:
        return f"{__package__}.adapters.{library.replace('-', '_')}:Backend"
    return BUILT_IN.get(name, name)


def _search_here() -> None:
    """Find modules in the current folder, as `python -m` does."""
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)


def extra_folder(name: str) -> str:
    """Folder of `sys.path` with the module of a backend, if a new interpreter in the current folder does not search it:
    pytest adds the folders of tests. Else empty. Nothing is imported."""
    if backend_file(name) is not None:
        return ""
    package = _place(name).partition(":")[0].partition(".")[0]
    folders = [Path(entry or ".").resolve() for entry in sys.path]
    found = importlib.machinery.PathFinder.find_spec(package, list(map(str, folders)))
    places = [] if found is None else [*(found.submodule_search_locations or ()), found.origin or ""]
    if not places or not places[0]:
        return ""
    folder = Path(places[0]).resolve().parent
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    searched = [Path.cwd(), *(Path(entry).resolve() for entry in given if entry), *map(Path, site.getsitepackages())]
    known = folder in searched or folder.is_relative_to(_LIBRARY) or folder not in folders
    return "" if known else str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def _module_of_file(path: Path) -> ModuleType:
    """A module by its file. It can import modules beside it, and relatively if its folder is a package."""
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    name, found = ".".join(parts), None
    if "." not in path.stem:
        importlib.invalidate_caches()
        found = importlib.util.find_spec(name)
    if found is not None and found.origin == str(path):
        return importlib.import_module(name)
    # Another module has the name.
    name = f"narrowgauge_backend_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class _BuiltIn:
    """A module of functions, and functions of operations that have another place."""

    def __init__(self, module: ModuleType, places: Mapping[str, str]) -> None:
        self._module, self._places = module, places

    def __getattr__(self, name: str) -> Any:
        if name not in self._places:
            return getattr(self._module, name)
        module, _, function = self._places[name].partition(":")
        return getattr(importlib.import_module(module), function)


def load_implementation(name: str, device: str = "", methods: Mapping[str, Method] | None = None) -> Any:
    """The module or object called `native`, `reference`, `package.module[:Name]`, `folder/file.py[:Name]`, or
    `library[:variant]` of `LIBRARIES`. A class is instantiated, that of a library with the variant, if there is one.

    `methods`: those of operations, for a process that does not know these. Modules are found as by `python -m`, also in
    the current folder. Raises BackendError if the backend cannot be loaded, or if its `check` rejects `device` (if
    given).
    """
    _check_form(name)
    _search_here()
    file = backend_file(name)
    if file is not None:
        check_name(name)
    module_name, _, attribute = _place(name).partition(":")
    try:
        implementation: Any = importlib.import_module(module_name) if file is None else _module_of_file(file)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {name}: module {module_name} cannot be imported: {reason}") from error
    if name in BUILT_IN:
        methods = all_methods() if methods is None else methods
        places = {method: place for method, described in methods.items() if (place := getattr(described, name))}
        implementation = _BuiltIn(implementation, places) if places else implementation
    if attribute:
        if not hasattr(implementation, attribute):
            names = [n for n in vars(implementation) if not n.startswith("_")]
            own = [n for n in names if inspect.isclass(found := vars(implementation)[n])
                   and found.__module__ == implementation.__name__]  # fmt: skip
            listed = f"its classes are {', '.join(own)}" if own else "it has no class"
            close = nearest(attribute, names)
            raise BackendError(f"backend {name}: module {module_name} has no {attribute!r}{close}; {listed}")
        implementation = getattr(implementation, attribute)
    if inspect.isclass(implementation):
        try:
            library, _, variant = name.partition(":")
            implementation = implementation(*([variant] if variant and library in LIBRARIES else []))
        except Exception as error:
            raise BackendError(f"backend {name}: {attribute}() raised {type(error).__name__}: {error}") from error
    if device and callable(check := getattr(implementation, "check", None)):
        import torch

        try:
            check(torch.device(device))
        except Exception as error:
            raise BackendError(f"backend {name} cannot run on {device}: {error}") from error
    return implementation


def error_location(error: BaseException) -> str:
    """` (at file:line)`: innermost frame outside of installed packages, of the standard library and of this package;
    without such a frame, of this package in a checkout. Else empty."""
    location = own = ""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_file() and not {"site-packages", "dist-packages"} & set(path.parts):
            place = f" (at {path.name}:{trace.tb_lineno})"
            if path.is_relative_to(_OWN):
                own = place
            elif not path.is_relative_to(_LIBRARY):
                location = place
        trace = trace.tb_next
    return location or own
