"""Keeps the reference from the backend in the process of a kernel host (`--untrusted`).

`block_reference` closes these ways to the reference, the checks and the diagnosis:

- import statements, `__import__`, `importlib.import_module`, `importlib.util.find_spec`, `pkgutil.resolve_name`, and
  the public functions of `narrowgauge`, such as `narrowgauge.quantize`, which load the reference on first use;
- the same files by another name: a folder of the checkout on `sys.path` (`import reference`), a symbolic link, a
  loader for the path of the file, `runpy`, and `exec` of the text that `open` reads from the file;
- all of these in a child that `os.fork` makes.

It cannot close the ways outside the Python of this process:

- a subprocess (`python -c …`, `cat`), a compiled extension or ctypes that reads the files, a path relative to a file
  descriptor (`dir_fd`), and any other copy of the files on the disk;
- objects that exist already: a module that was loaded before the call stays reachable by its references and by
  `gc.get_objects()`. So the host calls `block_reference` before it loads a blocked module or the backend.

docs/untrusted.md names the remedy: a container in which the user of the host cannot read these files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCKED = (
    "narrowgauge.reference", "narrowgauge.harness.checks", "narrowgauge.harness.operations",
    "narrowgauge.harness.diagnosis", "narrowgauge.harness.records", "narrowgauge.harness.running",
    "narrowgauge.harness.report", "narrowgauge.harness.gate", "narrowgauge.harness.tools", "narrowgauge.harness.cli",
    "narrowgauge.harness.pytest_plugin",
)  # fmt: skip
"""Packages that a backend cannot import: the reference, and the folders of the harness that judge and run cases."""
_PACKAGE = "narrowgauge"
_EVENTS = ("open", "os.link", "os.rename")
"""Audit events whose first argument is the path of an existing file."""


def block_reference() -> None:
    """Refuse the blocked packages to all code of this process and of its forks, until the process ends.

    From then on an import of a blocked module raises ImportError, and opening one of its files raises PermissionError;
    the messages name the module or the file. Modules that are loaded already are removed from `sys.modules` and from
    their packages. A second call changes nothing.
    """
    if any(isinstance(finder, _RefusingFinder) for finder in sys.meta_path):
        return
    folders = _folders()
    _unload(folders)
    sys.meta_path.insert(0, _RefusingFinder(folders))
    # A backend can remove the finder from sys.meta_path. It cannot remove an audit hook.
    sys.addaudithook(_file_hook(folders))


class _RefusingFinder:
    """Finder of imports that raises for blocked modules and leaves other modules to the finders behind it."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, so that the next finder looks for the module. Raises ImportError for a blocked module."""
        blocked = _is_blocked(name)
        if not blocked and not name.startswith(f"{_PACKAGE}."):
            spec = PathFinder.find_spec(name, path)
            places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            blocked = any(place and _inside(place, self.folders) for place in places)
        if blocked:
            raise ImportError(f"--untrusted: the reference is not available to a backend: {name}", name=name)
        return None


def _file_hook(folders: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """Audit hook that refuses the files in these folders."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and isinstance(arguments[0], str | bytes) and _inside(arguments[0], folders):
            path = os.fsdecode(arguments[0])
            raise PermissionError(f"--untrusted: the reference is not available to a backend: {path}")

    return hook


def _folders() -> tuple[str, ...]:
    """Real paths of the folders of the blocked packages, each with a separator at its end."""
    package = Path(__file__).parents[2]
    relative = (name.removeprefix(f"{_PACKAGE}.").replace(".", os.sep) for name in BLOCKED)
    return tuple(os.path.realpath(package / folder) + os.sep for folder in relative)


def _inside(path: str | bytes, folders: tuple[str, ...]) -> bool:
    """Whether the file or folder behind a path, links followed, lies in one of the folders."""
    try:
        return f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(folders)
    except (OSError, ValueError):  # no path, such as one with a null character
        return False


def _is_blocked(name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{blocked}." for blocked in BLOCKED))


def _unload(folders: tuple[str, ...]) -> None:
    """Remove the blocked modules, and the names in other modules of the project that lead to them."""
    for name, module in list(sys.modules.items()):
        if _is_blocked(name) or _inside(getattr(module, "__file__", None) or "", folders):
            del sys.modules[name]
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{_PACKAGE}."):
            for attribute, value in list(vars(module).items()):
                home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
                if isinstance(home, str) and _is_blocked(home):
                    delattr(module, attribute)
