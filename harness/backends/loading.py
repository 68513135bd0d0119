"""Loading the object that implements a backend: `native`, `reference`, a library, `package.module[:Name]` or
`folder/file.py[:Name]`. A function is a backend with one method: `folder/file.py:function@method`."""

from __future__ import annotations

import ctypes
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
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.operations import all_methods
from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
from narrowgauge.spec.recipes import Recipe

BUILT_IN = {"native": "narrowgauge.native.ops", "reference": "narrowgauge.reference.ops"}
LIBRARIES = tuple(
    sorted(
        path.stem.replace("_", "-")
        for path in (Path(__file__).parent / "adapters").glob("*.py")
        if path.stem not in ("__init__", "common")
    )
)
"""Libraries with an adapter: `harness/backends/adapters/<name>.py`."""

_FILE = re.compile(r"(.+\.py)((?::\w+(?:@\w+)?)?)")
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


def parameters_of(function: Any) -> frozenset[str]:
    """Names of the parameters of a Python function or of a custom op; empty for a function without a signature."""
    import torch

    op: Any = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    overloads = [op]
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads = [getattr(op, name) for name in op.overloads()]  # type: ignore[no-untyped-call]
    if all(isinstance(overload, torch._ops.OpOverload) for overload in overloads):
        return frozenset(argument.name for overload in overloads for argument in overload._schema.arguments)
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def passed(
    parameters: frozenset[str], optional: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function is called with in place of a method: the operands by position, and by name the recipe, which may
    be that of an operand, and the options, of those that it has a parameter for.

    `optional`: options that a function may lack (`Method.optional`). Raises NotImplementedError for any other.
    """
    for name in options:
        if name not in parameters and name not in optional:
            raise NotImplementedError(f"the function has no parameter {name!r}")
    recipes = [argument for argument in arguments if isinstance(argument, Recipe)]
    stored = (Quantized, BatchedQuantized, GroupedQuantized)
    recipes += [argument.recipe for argument in arguments if isinstance(argument, stored)]
    named = {**options, **({"recipe": recipes[0]} if recipes else {})}
    operands = tuple(argument for argument in arguments if not isinstance(argument, Recipe))
    return operands, {name: value for name, value in named.items() if name in parameters}


class OneFunction:
    """A function as the only method of a backend."""

    def __init__(self, function: Any, name: str, method: Method) -> None:
        """`name`: of the method."""
        parameters = parameters_of(function)
        self.declares = {"random": "own"} if method.converted and "random" not in parameters else {}

        def call(*arguments: Any, **options: Any) -> Any:
            operands, named = passed(parameters, method.optional, arguments, options)
            return function(*operands, **named)

        setattr(self, name, call)


def load_implementation(name: str, device: str = "", methods: Mapping[str, Method] | None = None) -> Any:
    """The module or object called `native`, `reference`, `package.module[:Name]`, `folder/file.py[:Name]`, or
    `library[:variant]` of `LIBRARIES`. A class is instantiated, that of a library with the variant, if there is one.

    A name with `@method` is that of a function. `methods`: those of operations, for a process that does not know these.
    Modules are found as by `python -m`, also in the current folder. Raises BackendError if the backend cannot be
    loaded, or if its `check` rejects `device` (if given).
    """
    _check_form(name)
    _search_here()
    file = backend_file(name)
    if file is not None:
        check_name(name)
    module_name, _, attribute = _place(name).partition(":")
    attribute, _, method = attribute.partition("@")
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
    elif method:
        methods = all_methods() if methods is None else methods
        if method not in methods or not callable(implementation):
            wrong = f"{attribute} is no function" if method in methods else f"no method is called {method!r}"
            raise BackendError(f"backend {name}: {wrong}{nearest(method, methods)}; it is function@method")
        return OneFunction(implementation, method, methods[method])
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
        if path.is_file():
            place = f" (at {path.name}:{trace.tb_lineno})"
            owner = owner_of(str(path))
            own, location = place if owner == "narrowgauge" else own, place if owner == "user" else location
        trace = trace.tb_next
    return location or own


@lru_cache(maxsize=4096)
def owner_of(file: str) -> str:
    """Owner of a Python file or a shared library: `installed` for installed packages, `library` for the standard
    library, `narrowgauge`, and `user` for all others."""
    if {"site-packages", "dist-packages"} & set(file.split(os.sep)):
        return "installed"
    if file.startswith(_OWN + os.sep):
        return "narrowgauge"
    return "library" if file.startswith((_LIBRARY + os.sep, "<")) else "user"


class _SharedObject(ctypes.Structure):
    """The begin of struct dl_phdr_info of glibc."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("name", ctypes.c_char_p), ("headers", ctypes.c_void_p),
        ("count", ctypes.c_uint16), ("loaded", ctypes.c_ulonglong),
    )  # fmt: skip


_VISIT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_SharedObject), ctypes.c_size_t, ctypes.c_void_p)


class Loaded:
    """What a backend brings into its process: modules, shared libraries and installed packages, also those that a
    method imports."""

    def __init__(self, backend: str) -> None:
        """Call it before the backend is imported. A built-in backend brings nothing of a user."""
        self._counts = backend not in BUILT_IN
        self._module = _place(backend).partition(":")[0]
        self._modules = set(sys.modules)
        self._sent: set[str] = set()
        self._roots: list[str] = []
        self._here = os.getcwd()
        """The current folder before the backend can leave it."""
        self._libraries = self._pending = -1
        """Number of shared libraries that the loader has loaded: at the last look, and in the present one."""
        self._sent.update(self._new_libraries())

    def news(self) -> dict[str, Any]:
        """What is new since the last call: `files`, absolute paths of the user's modules and libraries; `packages`,
        names of installed top-level modules; `folder`, that of the module of the backend. Empty without news."""
        if not self._counts:
            return {}
        first = not self._roots
        new = {name: sys.modules.get(name) for name in sys.modules.keys() - self._modules}
        self._modules.update(new)
        files = {name: self._path(file) for name, module in new.items() if (file := _file_of(module))}
        if first:
            self._roots = _roots(self._path(_file_of(sys.modules.get(self._module)) or "x"), self._here)
        paths = [file for file in files.values() if owner_of(file) == "user"]
        paths += [file for file in self._new_libraries() if _is_below(file, self._roots)]
        found = [path for path in paths if not _is_scratch(path, self._roots)]
        packages = {name.partition(".")[0] for name, file in files.items() if owner_of(file) == "installed"}
        fresh = {"files": sorted({*found} - self._sent), "packages": sorted(packages - self._sent)}
        self._sent |= {*found, *packages}
        return {**fresh, "folder": self._roots[0]} if first or any(fresh.values()) else {}

    def _path(self, file: str) -> str:
        return os.path.normpath(os.path.join(self._here, file))

    def _new_libraries(self) -> list[str]:
        """Shared libraries of the user, if a library was loaded since the last call."""
        names: list[str] = []

        def note(info: Any, size: int, data: object) -> int:
            if info.contents.loaded == self._libraries:
                return 1  # the loader has loaded nothing since
            self._pending = info.contents.loaded
            names.append(os.fsdecode(info.contents.name or b""))
            return 0

        if sys.platform == "linux":
            ctypes.CDLL(None).dl_iterate_phdr(_VISIT(note), None)
            self._libraries = self._pending
        paths = [self._path(name) for name in names if os.sep in name]
        return [path for path in paths if owner_of(path) == "user"]


def _file_of(module: Any) -> str | None:
    """File of a module. Without `getattr`: some modules import others when they are asked for an attribute."""
    try:
        file = vars(module).get("__file__")
    except Exception:  # any object can be in place of a module
        return None
    return file if isinstance(file, str) else None


def _roots(module_file: str, here: str) -> list[str]:
    """Folders of the user's code: that of the module of the backend, the current folder, the user's folders of
    `sys.path`, and the repositories of the first two."""
    folder = os.path.dirname(module_file)
    roots = [folder, here, *(os.path.join(here, entry) for entry in sys.path if isinstance(entry, str))]
    roots += [top for start in roots[:2] if (top := repository_of(start))]
    return [roots[0], *(root for root in dict.fromkeys(roots) if owner_of(root + os.sep) == "user")]


def repository_of(folder: str) -> str:
    """The git repository of a folder. Empty without one."""
    path = Path(folder)
    return next((str(parent) for parent in (path, *path.parents) if (parent / ".git").exists()), "")


def _is_below(path: str, folders: list[str]) -> bool:
    return any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)


def _is_scratch(path: str, roots: list[str]) -> bool:
    """Whether a file is in a folder of generated files, and no root in this folder has the file."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    inside = [folder for folder in (tempfile.gettempdir(), cache) if _is_below(path, [os.path.abspath(folder)])]
    return any(not _is_below(path, [root for root in roots if _is_below(root + os.sep, [f])]) for f in inside)
