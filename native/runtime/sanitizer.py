"""Kernels on a CPU built with the address and the undefined-behaviour sanitizer, in processes that have their runtime.

The runtime has to be in a process from its first instruction, so one that runs such kernels is started with the
environment that `environment` gives. The first finding ends it, and stands in a file that `finding` reads.
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
"""Environment variable: what the names of the files of findings begin with; monitor.h reads it."""
_PRELOAD = "LD_PRELOAD"

# Memory that nobody freed at the end of a Python process is no finding. Libraries of kernels have equal names in them.
# The monitor has to come before the runtime, whose hooks it has. A fiber's stack is used again by another thread. A
# failed allocation is torch's to report.
_OPTIONS = (
    "detect_leaks=0:detect_odr_violation=0:verify_asan_link_order=0:detect_stack_use_after_return=0:"
    "allocator_may_return_null=1:handle_abort=0"
)


@cache
def _runtime() -> tuple[Path, ...]:
    """The shared runtimes of the compiler's sanitizers. Raises ToolchainError where there are none."""
    names = ["libclang_rt.asan-x86_64.so"] if is_clang() else ["libasan.so", "libubsan.so"]
    found = []
    for name in names:
        # A compiler that has no such file gives the name back.
        done = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = Path(done.stdout.strip())
        if not path.is_absolute() or not path.exists():
            raise ToolchainError(
                f"--sanitize needs {name} of {compiler()}, and it is not installed; install the compiler's sanitizers "
                "(Debian: they come with g++; Fedora: dnf install libasan libubsan), or set CXX to another compiler"
            )
        found.append(path.resolve())
    return tuple(found)


def _monitor() -> Path:
    """The compiled monitor.h. Raises ToolchainError where it does not compile."""
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
    """What a process needs in its environment to run sanitized kernels and write what is found to `findings`.<pid>.

    Raises ToolchainError where the compiler has no sanitizers, or a Python with their runtime does not start.
    """
    wanted = {
        _PRELOAD: " ".join(map(str, (_monitor(), *_runtime()))), "ASAN_OPTIONS": _OPTIONS, SANITIZE: "1",
        FINDINGS: str(findings),
    }  # fmt: skip
    _try(wanted[_PRELOAD])
    return wanted


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
    """In a process that was started with `environment`: what it starts itself, compilers above all, runs without."""
    if sanitized():
        os.environ.pop(_PRELOAD, None)


def finding(findings: Path, process: int | None) -> str:
    """What ended a process, in a sentence: kind, what happened, file, line, thread. Empty where it was no finding."""
    path = Path(f"{findings}.{process}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    if not lines:
        return ""
    kind, what, place, thread = (lines[0].split("\t") + [""] * 4)[:4]
    return f"{kind}: {what}" + (f" at {place}" if place else "") + (f", {thread}" if thread else "")
