"""The kernel sources: which kernels each holds, and its text with the headers put in."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "kernels"

_TYPED = ("fp32", "bf16", "fp16")
KERNELS = {
    "amax": tuple(f"amax_{t}" for t in _TYPED),
    "amax_blocks": tuple(f"amax_blocks_{t}" for t in _TYPED),
    "hadamard": ("hadamard",),
    "swizzle": ("swizzle", "unswizzle"),
    "quantize_mx": tuple(f"quantize_mx{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
    "quantize_nvfp4": tuple(f"quantize_nvfp4{kind}_{t}" for kind in ("", "_plain") for t in _TYPED),
    "dequantize": tuple(f"dequantize_{t}" for t in _TYPED),
    "quantize_fp8": tuple(f"quantize_fp8_{t}" for t in _TYPED),
    "delayed": ("update_scale",),
    "pad": tuple(f"pad_{size}" for size in (1, 2, 4, 8, 16)),
    "gemm_nvfp4": ("gemm_nvfp4", "gemm_grouped_nvfp4"),
    "gemm_mx": ("gemm_mx", "gemm_grouped_mx"),
    "gemm_fp8": tuple(f"gemm{grouped}_fp8_{scales}" for grouped in ("", "_grouped") for scales in ("block", "tensor")),
    "gemm_quantized_nvfp4": ("gemm_quantized_nvfp4",),
    "gemm_quantized_mx": ("gemm_quantized_mx",),
    "gemm_quantized_fp8": ("gemm_quantized_fp8_block", "gemm_quantized_fp8_tensor"),
}
"""Source file (without .cu) to the kernels in it."""

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class ToolchainError(RuntimeError):
    """Kernels cannot be compiled or run here: what is missing and how to get it."""


@cache
def text(source: str) -> str:
    """The text of `source`.cu with the project's own headers put in once each, so that it is one compilable text.

    A compiled kernel is cached by this text: a change of a header is a change of every kernel that uses it.
    """
    return _expand(FOLDER / f"{source}.cu", set())


def _expand(path: Path, seen: set[str]) -> str:
    seen.add(path.name)
    lines = path.read_text(encoding="utf-8").replace("#pragma once\n", "\n")

    def include(match: re.Match[str]) -> str:
        name = match.group(1)
        after = lines.count("\n", 0, match.start()) + 2
        return "" if name in seen else f'{_expand(FOLDER / name, seen)}\n#line {after} "{path.name}"'

    return f'#line 1 "{path.name}"\n' + _INCLUDE.sub(include, lines)
