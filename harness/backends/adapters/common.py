"""Parts shared by the adapters: loading a library, and refusing arguments unknown to a library."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from narrowgauge.spec.kv_cache import Cache


def library(module: str, install: str) -> Any:
    """The module of a library. Raises ModuleNotFoundError with the remedy `install` if the module is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{module} is not installed ({error}); {install}") from error


def on_gpu(x: torch.Tensor, library_name: str) -> None:
    """Raise NotImplementedError for a tensor on a CPU, for which a library has no kernel."""
    if not x.is_cuda:
        raise NotImplementedError(f"{library_name} has these kernels for a GPU: --device cuda")


def plain_library(module: str, install: str, stand_ins: Mapping[str, Mapping[str, Any]] | None = None) -> Any:
    """A Python module of a library, also without the compiled parts of the library.

    The library is imported as usual, if it can be. Else the module is loaded without the `__init__` of the packages
    around it, which import the compiled parts. `stand_ins`: attributes of the modules that take the place of modules of
    the library, by name. Raises ModuleNotFoundError with the remedy `install` if the library is missing.
    """
    if module not in _LOADED:
        _LOADED[module] = _load(module, install, stand_ins or {})
    return _LOADED[module]


_LOADED: dict[str, Any] = {}
"""Modules loaded by `plain_library`."""


def _load(module: str, install: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> Any:
    top, *inner = module.split(".")
    found = importlib.util.find_spec(top)
    if found is None:
        raise ModuleNotFoundError(f"{top} is not installed; {install}")
    own = {top, *(name.partition(".")[0] for name in stand_ins)}
    before = {name: loaded for name, loaded in sys.modules.items() if name.partition(".")[0] in own}
    try:
        return importlib.import_module(module)
    except Exception:  # of any kind: a missing package, a missing shared library, no driver
        _forget(own, before)
    try:
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        for depth in range(len(inner)):
            name = ".".join([top, *inner[:depth]])
            sys.modules[name] = package = ModuleType(name)
            package.__path__ = [str(folder.joinpath(*inner[:depth])) for folder in folders]
        for name, attributes in stand_ins.items():
            sys.modules[name] = stand_in = ModuleType(name)
            vars(stand_in).update(attributes)
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{module} cannot be imported ({error}); {install}") from error
    finally:
        _forget(own, before)


def _forget(own: set[str], before: Mapping[str, ModuleType]) -> None:
    """Restore the modules of the packages `own`: a later import of the library starts anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    sys.modules.update(before)


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


def fp8_cache(cache: Cache, k_scale: torch.Tensor, v_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache as float8_e4m3fn (pages, page, heads, columns), views of its bytes.

    Raises NotImplementedError for a page layout but nhd, stored scales, and given scales of heads.
    """
    if cache.layout != "nhd" or cache.key_scales is not None or k_scale.numel() != 1 or v_scale.numel() != 1:
        raise NotImplementedError("the library takes pages in the layout nhd, and one scale for k and one for v")
    return cache.keys.view(torch.float8_e4m3fn), cache.values.view(torch.float8_e4m3fn)
