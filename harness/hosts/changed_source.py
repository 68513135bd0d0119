"""Native kernels and modules with a changed source file, within a process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from narrowgauge.native.runtime.sources import FOLDER, replaced

MODULES = FOLDER.parent / "modules"
"""Folder of the files of `native.modules`."""
_PACKAGE = "narrowgauge.native.modules"
_OPS = "narrowgauge.native.ops"
"""Re-exports the modules."""


def changed_source(file: str, text: str, folder: str) -> AbstractContextManager[None]:
    """Context for compiled kernels, or imported modules, with a changed text in place of `file`.

    `file`: a kernel file (`common/formats.cuh`) or a file of `native.modules` (`layer.py`). `folder`: for the changed
    kernels, in place of the cache. Raises ValueError for an unknown file.
    """
    return replaced_module(file, text) if (MODULES / file).is_file() else replaced(file, text, Path(folder))


@contextmanager
def replaced_module(file: str, text: str) -> Iterator[None]:
    """Import `native.ops` and the modules anew within the context, with another text in place of `file`.

    Modules imported before keep the original text.
    """
    original = _forget()
    finder = _Finder(f"{_PACKAGE}.{Path(file).stem}", MODULES / file, text)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()
        sys.modules.update(original)
        for name, module in original.items():
            package, _, attribute = name.rpartition(".")
            setattr(sys.modules[package], attribute, module)


def _forget() -> dict[str, ModuleType]:
    """Take the modules out of `sys.modules`: the next import executes their files. Gives the modules."""
    names = [name for name in sys.modules if name == _OPS or f"{name}.".startswith(f"{_PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


class _Finder(MetaPathFinder):
    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.text = name, path, text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of the replaced module."""
        if fullname != self.name:
            return None
        return spec_from_file_location(fullname, self.path, loader=_Loader(fullname, str(self.path), self.text))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> CodeType:
        """Code of the replaced text. The bytecode cache is bypassed, because it holds the original text."""
        return self.source_to_code(self.text.encode(), self.path)
