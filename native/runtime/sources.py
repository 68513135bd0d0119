"""The kernel sources: which kernels each holds, and its text with the headers put in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "kernels"
"""The kernel sources. A kernel file is known by its path in this folder, a source by its name without a folder."""

_TYPED = ("fp32", "bf16", "fp16")
KERNELS = {
    "amax": tuple(f"amax_{t}" for t in _TYPED),
    "amax_blocks": (*(f"amax_blocks_{t}" for t in _TYPED), "amax_tiles_bf16"),
    "hadamard": ("hadamard",),
    "swizzle": ("swizzle", "unswizzle"),
    "quantize_mx": (
        *(f"quantize_mx{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
        "quantize_mx_tiles_bf16",
    ),
    "quantize_nvfp4": (
        *(f"quantize_nvfp4{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
        "quantize_nvfp4_tiles_bf16",
    ),
    "dequantize": tuple(f"dequantize{kind}_{t}" for kind in ("", "_lines", "_rows") for t in _TYPED),
    "quantize_fp8": (*(f"quantize_fp8_{t}" for t in _TYPED), "quantize_fp8_tiles_bf16"),
    "delayed": ("update_scale",),
    "pad": tuple(f"pad_{size}" for size in (1, 2, 4, 8, 16)),
    "gemm_nvfp4": ("gemm_nvfp4", "gemm_grouped_nvfp4"),
    "gemm_mx": ("gemm_mx", "gemm_grouped_mx"),
    "gemm_fp8": tuple(f"gemm{grouped}_fp8_{scales}" for grouped in ("", "_grouped") for scales in ("block", "tensor")),
    "gemm_skinny_nvfp4": ("gemm_skinny_nvfp4",),
    "gemm_skinny_nvfp4_wide": ("gemm_skinny_nvfp4_wide",),
    "gemm_skinny_mx": ("gemm_skinny_mx",),
    "gemm_skinny_fp8": ("gemm_skinny_fp8_tensor", "gemm_skinny_fp8_block"),
    "gemm_tensor": (
        "pack",
        "gemm_tensor",
        "gemm_tensor_grouped",
        "gemm_mx_refused",
        "gemm_grouped_mx_refused",
    ),
    "gemm_quantized_nvfp4": ("gemm_quantized_nvfp4",),
    "gemm_quantized_mx": ("gemm_quantized_mx",),
    "gemm_quantized_fp8": ("gemm_quantized_fp8_block", "gemm_quantized_fp8_tensor"),
}
"""Source file (without .cu) to the kernels in it."""

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class ToolchainError(RuntimeError):
    """Kernels cannot be compiled or run here: what is missing and how to get it."""


_replaced: dict[str, tuple[str, Path]] = {}
"""Kernel files that have another text in this process, and where what is compiled of them goes."""


@contextlib.contextmanager
def replaced(file: str, text_of_file: str, scratch: Path) -> Iterator[None]:
    """Within the context, the kernel file `file` (`common/formats.cuh`) has another text in this process.

    What is compiled of it goes into the folder `scratch`, and not into the cache. The files themselves stay as they
    are. Raises ValueError for a file that is no kernel file.
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
    """The paths in `FOLDER` of all kernel files and their headers. The runtime of the CPU (`cpu/`) is left out."""
    return sorted(_name(path) for path in FOLDER.rglob("*.cu*"))


def file_text(file: str) -> str:
    """The text of a kernel file: the one that replaces it, where there is one."""
    return _replaced[file][0] if file in _replaced else (FOLDER / file).read_text(encoding="utf-8")


def files_of(source: str) -> set[str]:
    """The files that `source`.cu is made of: itself, and its headers with theirs."""
    seen: set[str] = set()
    _expand(_file(source), seen)
    return seen


def scratch_of(source: str) -> Path | None:
    """Where what is compiled of `source`.cu goes while one of its files is replaced; else None: into the cache."""
    changed = files_of(source) & _replaced.keys() if _replaced else ()
    return next((_replaced[file][1] for file in changed), None)


@cache
def text(source: str) -> str:
    """The text of `source`.cu with the project's own headers put in once each, so that it is one compilable text.

    A compiled kernel is cached by this text: a change of a header is a change of every kernel that uses it.
    """
    return _expand(_file(source), set())


def _file(source: str) -> str:
    """The path in `FOLDER` of `source`.cu."""
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
