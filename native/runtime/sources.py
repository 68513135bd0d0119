"""Kernel sources: the kernels of each source file, and its text with expanded headers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
"""Folder of the kernel sources. A kernel file is named by its path in this folder, a source by its file stem."""

_TYPED = ("fp32", "bf16", "fp16")
_MADE_BY_MACROS = {
    "amax_blocks": (*(f"amax_blocks_{t}" for t in _TYPED), "amax_tiles_bf16"),
    "quantize_mx": (
        *(f"quantize_mx{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
        "quantize_mx_tiles_bf16",
    ),
    "quantize_nvfp4": (
        *(f"quantize_nvfp4{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
        "quantize_nvfp4_tiles_bf16",
    ),
    "dequantize": tuple(f"dequantize{kind}_{t}" for kind in ("", "_lines", "_rows") for t in _TYPED),
    "quantize_fp8": (*(f"quantize_fp8_{t}" for t in _TYPED), "quantize_fp8_tiles_bf16", "store_scales"),
    **{
        f"{kernel}_quantize": tuple(f"{kernel}_quantize_{t}" for t in _TYPED)
        for kernel in ("activation", "norm", "rope")
    },
    "produced_mx": tuple(f"produced_mx_{t}" for t in _TYPED),
    "produced_nvfp4": tuple(f"{kernel}_{t}" for kernel in ("produced_nvfp4", "produced_amax") for t in _TYPED),
    "produced_rows": tuple(f"{kernel}_{t}" for kernel in ("produced_rows", "column_sums") for t in _TYPED),
    "sum_ranks": tuple(f"sum_{kind}_{t}" for t in _TYPED for kind in ("codes", "values")),
    "pad": tuple(f"pad_{size}" for size in (1, 2, 4, 8, 16)),
    "permute": (
        *(f"{kernel}_{ids}" for kernel in ("count", "place") for ids in ("i32", "i64")),
        *(f"gather_{size}" for size in (1, 2, 4, 8, 16)),
    ),
}
"""Kernels of the sources that make them by macros."""
_ATTRIBUTE = r"(?:__\w+__\((?:[^()]|\([^()]*\))*\)|[A-Z_]+)\s+"
_KERNEL = re.compile(rf'^extern "C" __global__ void (?:{_ATTRIBUTE})*(\w+)\(', re.MULTILINE)

KERNELS: dict[str, tuple[str, ...]] = {
    path.stem: _MADE_BY_MACROS.get(path.stem) or tuple(_KERNEL.findall(path.read_text(encoding="utf-8")))
    for path in sorted(FOLDER.rglob("*.cu"))
}
"""Stem of a source file to its kernels: the functions that the file declares, or those of `_MADE_BY_MACROS`."""

_OF_ARCHITECTURES = ("attention_prefill", "attention_tensor", "gemm_fused", "gemm_skinny", "gemm_wgmma")
CPU_SOURCES = tuple(name for name in KERNELS if not name.startswith(_OF_ARCHITECTURES))
"""Sources that a call on a CPU may need. Only tests run the kernels of GPU architectures on a CPU."""

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class ToolchainError(RuntimeError):
    """Kernels cannot be compiled or run on this machine. The message names the missing part and its installation."""


_replaced: dict[str, tuple[str, Path]] = {}
"""Kernel file to its replaced text in this process, and to the folder of compiled kernels."""


@contextlib.contextmanager
def replaced(file: str, text_of_file: str, scratch: Path) -> Iterator[None]:
    """Within the context, the kernel file `file` (`common/formats.cuh`) has another text in this process.

    Kernels with the replaced file go into the folder `scratch` instead of the cache. The file on disk does not change.
    Raises ValueError for an unknown kernel file.
    """
    if file not in kernel_files():
        raise ValueError(f"no kernel file is called {file!r}; there are {', '.join(kernel_files())}")
    before = _replaced.get(file)
    _replaced[file] = text_of_file, scratch
    text.cache_clear()
    try:
        yield
    finally:
        del _replaced[file]
        if before is not None:
            _replaced[file] = before
        text.cache_clear()


def kernel_files() -> list[str]:
    """Paths in `FOLDER` of all kernel sources and headers, without the runtime of the CPU (`cpu/`)."""
    return sorted(_name(path) for path in FOLDER.rglob("*.cu*"))


def file_text(file: str) -> str:
    """Text of a kernel file, or of the replacement in `replaced`."""
    return _replaced[file][0] if file in _replaced else (FOLDER / file).read_text(encoding="utf-8")


def files_of(source: str) -> set[str]:
    """Files of `source`.cu: the source and all its headers."""
    seen: set[str] = set()
    _expand(_file(source), seen)
    return seen


def scratch_of(source: str) -> Path | None:
    """Folder of the compiled `source`.cu if one of its files is replaced. None: the cache."""
    changed = files_of(source) & _replaced.keys() if _replaced else ()
    return next((_replaced[file][1] for file in changed), None)


@cache
def text(source: str) -> str:
    """Text of `source`.cu with every header of the project expanded once.

    The text is part of the key of the cache: a change of a header recompiles every kernel with this header.
    """
    return expanded(_file(source))


def expanded(file: str) -> str:
    """Text of a kernel file with every header of the project expanded once."""
    return _expand(file, set())


def _file(source: str) -> str:
    """Path of `source`.cu in `FOLDER`."""
    return _name(next(FOLDER.rglob(f"{source}.cu")))


def _name(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def _expand(file: str, seen: set[str]) -> str:
    seen.add(file)
    lines = file_text(file).replace("#pragma once\n", "\n")

    def include(match: re.Match[str]) -> str:
        name = match.group(1)
        after = lines.count("\n", 0, match.start()) + 2
        return "" if name in seen else f'{_expand(name, seen)}\n#line {after} "{file}"'

    return f'#line 1 "{file}"\n' + _INCLUDE.sub(include, lines)
