"""Files of `native.modules`, and replacing the text of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType

from narrowgauge.native.runtime.sources import FOLDER

NATIVE = FOLDER.parent / "modules"
MODULE_FILES: dict[str, tuple[str, ...]] = {
    "history.py": (), "kept.py": (), "products.py": (), "quantized_weight.py": (), "layer.py": (), "linear.py": (),
    "layer_norm_linear.py": ("layernorm-linear", "transformer-layer"), "grouped_linear.py": ("grouped-linear",),
    "transformer.py": ("transformer-layer",),
}  # fmt: skip
"""Operations by module file; an empty tuple: all modules. `parallel.py` needs several processes, and no case has
them: tests/test_parallel.py breaks it."""
_ABOVE = ("narrowgauge.native.modules", "narrowgauge.native.ops")
"""Modules re-exporting the layers."""


@contextmanager
def replaced_module(file: str, text: str) -> Iterator[None]:
    """Import `native.ops` and the layers anew within the context, with another text in place of `file`.

    Modules imported before keep the original text. Raises ValueError for a file outside of `MODULE_FILES`.
    """
    if file not in MODULE_FILES:
        raise ValueError(f"modules are not made of {file!r}; they are of {', '.join(MODULE_FILES)}")
    names = [_module(file_name) for file_name in MODULE_FILES] + list(_ABOVE)
    original_modules = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    finder = _Finder(_module(file), NATIVE / file, text)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(original_modules)
        for name, module in original_modules.items():
            package, _, attribute = name.rpartition(".")
            setattr(sys.modules[package], attribute, module)


def _module(file: str) -> str:
    return f"narrowgauge.native.modules.{Path(file).stem}"


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
