"""Kernels on a CPU with the address sanitizer and the undefined-behaviour sanitizer.

The runtime of the sanitizers must be loaded when a process starts, so a process with sanitized kernels is started with
the variables of `environment`. The first finding ends the process and is written to a file. `finding` reads the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from narrowgauge.native.runtime.cache import cache_key, cached
from narrowgauge.native.runtime.host import SANITIZE, compiler, is_clang, sanitized
from narrowgauge.native.runtime.sources import FOLDER, ToolchainError

FINDINGS = "NARROWGAUGE_FINDINGS"
"""Environment variable: path of the files of findings without their suffix `.<pid>`. Read by monitor.h."""
_PRELOAD = "LD_PRELOAD"

# detect_leaks: a Python process ends with allocated memory. detect_odr_violation: libraries of kernels define equal
# names. verify_asan_link_order: the monitor implements hooks of the runtime and is loaded first.
# detect_stack_use_after_return: threads reuse the stacks of fibers. allocator_may_return_null: torch reports a failed
# allocation.
_OPTIONS = (
    "detect_leaks=0:detect_odr_violation=0:verify_asan_link_order=0:detect_stack_use_after_return=0:"
    "allocator_may_return_null=1:handle_abort=0"
)


@cache
def _runtime() -> tuple[Path, ...]:
    """Shared libraries of the compiler's sanitizers. Raises ToolchainError if they are not installed."""
    names = ["libclang_rt.asan-x86_64.so"] if is_clang() else ["libasan.so", "libubsan.so"]
    paths = []
    for name in names:
        # Without such a file, the compiler prints the bare name.
        done = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = Path(done.stdout.strip())
        if not path.is_absolute() or not path.exists():
            raise ToolchainError(
                f"--sanitize needs {name} of {compiler()}, and it is not installed; install the compiler's sanitizers "
                "(Debian: they come with g++; Fedora: dnf install libasan libubsan), or set CXX to another compiler"
            )
        paths.append(path.resolve())
    return tuple(paths)


def _monitor() -> Path:
    """Library of monitor.h. Raises ToolchainError if it does not compile."""
    source = FOLDER / "cpu" / "monitor.h"
    text = source.read_text(encoding="utf-8")
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-x", "c++")

    def build(built: Path) -> None:
        code = built.with_suffix(".cpp")
        code.write_text(text.replace("#pragma once\n", "\n"), encoding="utf-8")
        command = [compiler(), *flags, "-o", str(built), str(code)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ToolchainError(f"monitor.h does not compile: {done.stderr.strip()[:2000]}")

    return cached(f"monitor-{cache_key(text, *flags, compiler())}.so", build)


def environment(findings: Path) -> dict[str, str]:
    """Environment variables of a process with sanitized kernels. The process writes its finding to `findings`.<pid>.

    Raises ToolchainError if the compiler has no sanitizers, or Python does not start with their runtime.
    """
    variables = {
        _PRELOAD: " ".join(map(str, (_monitor(), *_runtime()))), "ASAN_OPTIONS": _OPTIONS, SANITIZE: "1",
        FINDINGS: str(findings),
    }  # fmt: skip
    _try(variables[_PRELOAD])
    return variables


@cache
def _try(preload: str) -> None:
    environ = os.environ | {_PRELOAD: preload, "ASAN_OPTIONS": _OPTIONS}
    command = [sys.executable, "-S", "-c", "import ctypes; ctypes.CDLL(None).__asan_poison_memory_region"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolchainError(
            f"--sanitize: Python does not run with the sanitizers of {compiler()} loaded: {done.stderr.strip()[:500]}"
        )


def settle() -> None:
    """Removes the preloaded runtime from the environment of child processes, above all compilers."""
    if sanitized():
        os.environ.pop(_PRELOAD, None)


def finding(findings: Path, process: int | None) -> str:
    """Finding at the end of a process: kind, description, file, line and thread. Empty without a finding."""
    path = Path(f"{findings}.{process}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    if not lines:
        return ""
    kind, description, place, thread = (lines[0].split("\t") + [""] * 4)[:4]
    return f"{kind}: {description}" + (f" at {place}" if place else "") + (f", {thread}" if thread else "")
