"""What the adapters share: loading a library, and refusing arguments that a library does not take."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch


def library(module: str, install: str) -> Any:
    """The module of a library. Raises ModuleNotFoundError with the remedy `install` if the module is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{module} is not installed ({error}); {install}") from error


def base_name(recipe: Any, known: Iterable[str], options: dict[str, Any]) -> str:
    """The name of `recipe` without its dialect. Raises NotImplementedError for a recipe outside of `known`, and for
    any keyword argument of `quantize`."""
    name = str(recipe).partition("@")[0]
    if name not in known or options:
        raise NotImplementedError(f"no function for {recipe} with the arguments {sorted(options)}")
    return name


def matrix(x: torch.Tensor, *, block: int, rows: int = 1) -> torch.Tensor:
    """`x` (…, K) as a contiguous matrix. Raises NotImplementedError if the matrix is empty, if K is no multiple of
    `block`, or if the number of rows is no multiple of `rows`."""
    result = x.reshape(-1, x.shape[-1]).contiguous() if x.numel() else x
    if not x.numel() or x.shape[-1] % block or result.shape[0] % rows:
        raise NotImplementedError(f"shape {tuple(x.shape)}: the library takes K % {block} = 0 and M % {rows} = 0")
    return result


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of `x`, float32 (1,); NaN if an element is NaN."""
    return x.abs().amax().float().view(1)
