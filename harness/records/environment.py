"""Description of the machine: compilers, GPU, versions, and remedies for missing packages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from narrowgauge.harness.backends.loading import backend_file
from narrowgauge.harness.cases.operations import outside_contracts, outside_files
from narrowgauge.harness.machine.processors import cores
from narrowgauge.spec.program import measured_functions
from narrowgauge.spec.recipes import own_rules

RULE = "rule "
"""Beginning of the keys of rules of a user."""
CONTRACT = "contract "
"""Beginning of the keys of contracts of a user."""
_PACKAGE = Path(__file__).parents[2]
_JUDGING = (
    "machine", "cases", "inputs", "backends", "hosts", "checks", "operations", "diagnosis", "records", "running",
)  # fmt: skip
"""Folders of the harness with an influence on records. Reports and tools change no record."""


USER_COMMIT = "commit of your repository"
"""Fact of a run in a user's repository. The fact `commit` is of narrowgauge."""


@dataclass(frozen=True)
class Fact:
    """A line of `narrowgauge doctor`."""

    name: str
    value: str
    ok: bool = True
    remedy: str = ""


def facts(*, gpu: bool = True) -> list[Fact]:
    """All facts, in printed order. `gpu`: with those of the GPU, for which torch is imported. Never raises."""
    return [
        Fact("platform", f"{platform.platform()}, {cores()} cores"),
        Fact("python", sys.version.split()[0], sys.version_info >= (3, 11), "narrowgauge needs Python 3.11"),
        *(_package(name) for name in ("torch", "numpy", "pandas", "pyarrow", "pytest", "pytest-xdist", "safetensors")),
        _compiler(),
        *(_gpu() if gpu else []),
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
        message = f"unknown: torch cannot be imported: {type(error).__name__}: {error}"
        return [Fact("GPU", message, ok=False, remedy="pip install torch")]
    if not torch.cuda.is_available():
        reason = "this torch is a CPU build" if torch.version.cuda is None else "torch sees no GPU"
        return [
            Fact(
                "GPU", f"none: {reason}", ok=False, remedy="only --device cuda needs one; cases run on the CPU without"
            )
        ]
    try:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    except Exception as error:
        message = f"cannot be used: {type(error).__name__}: {error}"
        return [Fact("GPU", message, ok=False, remedy="see what nvidia-smi says of the driver")]
    gpu_facts = [
        Fact("GPU", f"{name}, compute capability {major}.{minor}"),
        Fact("CUDA of torch", str(torch.version.cuda)),
    ]
    try:
        import cupy

        runtime, driver = cupy.cuda.runtime.runtimeGetVersion(), cupy.cuda.runtime.driverGetVersion()
        return [*gpu_facts, Fact("CuPy", f"{cupy.__version__}, CUDA runtime {runtime}, driver {driver}")]
    except Exception as error:
        extra = "cuda13" if str(torch.version.cuda).startswith("13") else "cuda12"
        message = f"cannot be imported: {type(error).__name__}: {error}"
        return [*gpu_facts, Fact("CuPy", message, ok=False, remedy=f"pip install 'narrowgauge[{extra}]'")]


def _commit() -> Fact:
    try:
        described = _git(_PACKAGE.parent, "describe", "--always", "--dirty")
    except OSError:
        return Fact("commit", "unknown: git is not installed")
    return Fact("commit", described or "unknown: not a git checkout")


def _git(folder: Path, *arguments: str) -> str:
    process = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return process.stdout.strip()


def user_commit() -> dict[str, str]:
    """The commit of the repository that holds the current folder, for the fact of this name. Empty outside of a
    repository, and in the repository of narrowgauge, whose commit is a fact already."""
    try:
        top, own = (_git(folder, "rev-parse", "--show-toplevel") for folder in (Path.cwd(), _PACKAGE.parent))
        if not top or top == own:
            return {}
        commit = _git(Path.cwd(), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    except OSError:
        return {}
    if not commit:
        return {}
    dirty = " with uncommitted changes" if commit.endswith("-dirty") else ""
    return {USER_COMMIT: f"{commit.removesuffix('-dirty')}{dirty} of {Path(top).name}"}


@cache
def kernel_hash() -> str:
    """Eight hexadecimal digits that change with any kernel source."""
    import hashlib

    folder = _PACKAGE / "native" / "kernels"
    texts = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return hashlib.sha256(texts).hexdigest()[:8]


def source_hashes(backend: str, input_path: str = "") -> dict[str, str]:
    """Eight hexadecimal digits per part of the code and the data with an influence on a record.

    The key `backend` is the hash of the module file of a user's backend, without its imports. It is empty for a
    built-in backend. The key `operations` is that of the files of a user's operations, if there are any; `rule
    nvfp4@own` is the key of a rule of a user, with the file: `1a2b3c4d in own.toml`; `contract silu-mul-quantize` is
    the key of the steps of a contract of a user.
    """
    patterns = {
        "kernels": ["native/**/*"],
        "reference": ["reference/**/*", "spec/**/*", "contract/**/*", "contracts/**/*"],
        "harness": [f"harness/{folder}/**/*.py" for folder in _JUDGING],
    }
    hashes = {name: _hash(_sources(part_patterns)) for name, part_patterns in patterns.items()}
    module = _module_file(backend)
    hashes["backend"] = "" if module is None else _hash([module])
    if input_path:
        hashes["input"] = _hash([Path(input_path)])
    if files := outside_files():
        hashes["operations"] = _hash(files)
    hashes |= {
        f"{CONTRACT}{name}": f"{cls.declared.digest} in {os.path.relpath(cls.declared.file)}"
        for name, cls in outside_contracts().items()
    }
    return hashes | {f"{RULE}{name}": f"{rule.digest} in {rule.shown_file}" for name, rule in own_rules().items()}


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
    """Module file of a backend. The module is not imported, because a kernel may end the process."""
    if (file := backend_file(backend)) is not None:
        return file if file.is_file() else None
    if ":" not in backend and "." not in backend:
        return None
    *folders, name = backend.partition(":")[0].split(".")
    for folder in [Path.cwd(), *map(Path, sys.path)]:
        base = folder.joinpath(*folders, name)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def nvfp4_switches() -> dict[str, str]:
    """Environment variables that change NVFP4 training recipes (`spec.modules.training`), if they are set."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NVTE_NVFP4_DISABLE_")}


def describe_run(*, backend: str, device: str, seed: int, schedules: int = 0, sanitize: bool = False) -> dict[str, str]:
    """Facts above the tables of a report: settings of the run, facts of the machine, flags and hash of the kernels. A
    run on a CPU names no GPU."""
    rules, measured = own_rules(), measured_functions()
    if device == "cpu":
        from narrowgauge.native.runtime import host

        flags = host.SANITIZED if sanitize else host.FLAGS
    else:
        from narrowgauge.native.runtime import cuda  # imports numpy

        flags = cuda.FLAGS
    return {
        "backend": backend,
        "device": device,
        "seed": str(seed),
        **({"schedules": str(schedules)} if schedules else {}),
        **{fact.name: fact.value for fact in facts(gpu=device == "cuda")},
        **user_commit(),
        "kernel flags": " ".join(flags),
        "kernel sources": kernel_hash(),
        **nvfp4_switches(),
        **({"errors of functions": f"measured on {measured.about}"} if measured else {}),
        **({"rules": ", ".join(f"{name} ({rule.shown_file})" for name, rule in rules.items())} if rules else {}),
    }
