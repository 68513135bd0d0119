"""What this machine can do: compilers, GPU, versions; and what to install for what is missing."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from narrowgauge.harness.machine.processors import cores

_PACKAGE = Path(__file__).parents[2]
_JUDGING = ("machine", "cases", "inputs", "backends", "checks", "operations", "diagnosis", "records", "running")
"""Folders of the harness that a record depends on. Reports and tools change none."""


@dataclass(frozen=True)
class Fact:
    """One line of `narrowgauge doctor`."""

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def facts() -> list[Fact]:
    """Every fact, in the order in which they are printed. Nothing here raises."""
    return [
        Fact("platform", f"{platform.platform()}, {cores()} cores"),
        Fact("python", sys.version.split()[0], sys.version_info >= (3, 11), "narrowgauge needs Python 3.11"),
        *(_package(name) for name in ("torch", "numpy", "pandas", "pyarrow", "pytest", "pytest-xdist", "safetensors")),
        _compiler(),
        *_gpu(),
        _commit(),
    ]


def _package(name: str) -> Fact:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Fact(name, version(name))
    except PackageNotFoundError:
        return Fact(name, "missing", ok=False, remedy=f"pip install {name}")


def _compiler() -> Fact:
    from narrowgauge.native.runtime import host
    from narrowgauge.native.runtime.sources import ToolchainError

    try:
        path = host.compiler()
        banner = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        return Fact("C++ compiler", f"{path} ({banner.splitlines()[0] if banner else 'no version'})")
    except ToolchainError as error:
        return Fact("C++ compiler", "missing", ok=False, remedy=str(error))
    except OSError as error:
        return Fact(
            "C++ compiler", f"{path} cannot be run: {error.strerror}", ok=False, remedy="set CXX to another one"
        )


def _gpu() -> list[Fact]:
    try:
        import torch
    except Exception as error:
        words = f"unknown: torch cannot be imported: {type(error).__name__}: {error}"
        return [Fact("GPU", words, ok=False, remedy="pip install torch")]
    if not torch.cuda.is_available():
        why = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no GPU"
        return [
            Fact("GPU", f"none: {why}", ok=False, remedy="only --device cuda needs one; cases run on the CPU without")
        ]
    try:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except Exception as error:
        words = f"cannot be used: {type(error).__name__}: {error}"
        return [Fact("GPU", words, ok=False, remedy="see what nvidia-smi says of the driver")]
    found = [Fact("GPU", f"{name}, compute capability {major}.{minor}"), Fact("CUDA of torch", str(torch.version.cuda))]
    try:
        import cupy

        runtime, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
        return [*found, Fact("CuPy", f"{cupy.__version__}, CUDA runtime {runtime}, driver {driver}")]
    except Exception as error:
        extra = "cuda13" if str(torch.version.cuda).startswith("13") else "cuda12"
        words = f"cannot be imported: {type(error).__name__}: {error}"
        return [*found, Fact("CuPy", words, ok=False, remedy=f"pip install 'narrowgauge[{extra}]'")]


def _commit() -> Fact:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_PACKAGE.parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return Fact("commit", "unknown: git is not installed")
    return Fact("commit", done.stdout.strip() or "unknown: not a git checkout")


@cache
def kernel_hash() -> str:
    """Eight hexadecimal digits that change with any kernel source."""
    import hashlib

    folder = _PACKAGE / "native" / "kernels"
    texts = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return hashlib.sha256(texts).hexdigest()[:8]


def source_hashes(backend: str, input_path: str = "") -> dict[str, str]:
    """Eight hexadecimal digits for each part of the code and the data that a record depends on.

    `backend` is the module file of a backend of somebody's own, without what that imports; "" where it has none.
    """
    patterns = {
        "kernels": ["native/**/*"],
        "reference": ["reference/**/*", "spec/**/*"],
        "harness": [f"harness/{folder}/**/*.py" for folder in _JUDGING],
    }
    found = {name: _hash(_sources(ours)) for name, ours in patterns.items()}
    module = _module_file(backend)
    found["backend"] = "" if module is None else _hash([module])
    if input_path:
        found["input"] = _hash([Path(input_path)])
    return found


def _sources(patterns: Iterable[str]) -> list[Path]:
    paths = {path for pattern in patterns for path in _PACKAGE.glob(pattern)}
    return sorted(path for path in paths if path.suffix in (".py", ".cu", ".cuh", ".h"))


def _hash(paths: Iterable[Path]) -> str:
    import hashlib

    state = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return state.hexdigest()[:8]


def _module_file(backend: str) -> Path | None:
    """The file of a backend's module, which is not imported: a kernel may end the process that does."""
    if ":" not in backend and "." not in backend:
        return None
    *folders, name = backend.partition(":")[0].split(".")
    for place in [Path.cwd(), *map(Path, sys.path)]:
        base = place.joinpath(*folders, name)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def switches() -> dict[str, str]:
    """What is set of the variables that training recipes of NVFP4 read when they are made (`spec.training`)."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NVTE_NVFP4_DISABLE_")}


def describe_run(*, backend: str, device: str, seed: int, schedules: int = 0, sanitize: bool = False) -> dict[str, str]:
    """What a report says above its tables: the run's settings, then every fact, then the kernels' flags and hash."""
    from narrowgauge.native.runtime import cuda, host

    host_flags = host.SANITIZED if sanitize else host.FLAGS
    return {
        "backend": backend,
        "device": device,
        "seed": str(seed),
        **({"schedules": str(schedules)} if schedules else {}),
        **{fact.name: fact.value for fact in facts()},
        "kernel flags": " ".join(host_flags if device == "cpu" else cuda.FLAGS),
        "kernel sources": kernel_hash(),
        **switches(),
    }
