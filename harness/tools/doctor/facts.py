"""Facts of `narrowgauge doctor` on what is tried (sanitizers, Triton) and on what the tests of narrowgauge have run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from narrowgauge.harness.records.environment import Fact

_CAST = """
import triton, triton.language as tl, torch  # a missing Triton is said at once

@triton.jit
def cast(x, y):
    tl.store(y, tl.load(x).to(tl.float8e4nv).to(tl.float32))

y = torch.zeros(1)
cast[(1,)](torch.tensor([127.6]), y)
print(triton.__version__, y.item())
"""


def tool_facts() -> list[Fact]:
    """Facts on the tools for `--sanitize`, `narrowgauge sanitize` and Triton kernels without a GPU, which are run for
    some seconds, and on the devices that have run the tests of narrowgauge. Never raises."""
    return [_host_sanitizers(), _compute_sanitizer(), _triton(), *_verified()]


def _host_sanitizers() -> Fact:
    from narrowgauge.native.runtime import host, sanitizer
    from narrowgauge.native.runtime.sources import ToolchainError

    name = "sanitizers of the compiler"
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        try:
            command = [host.compiler(), *host.SANITIZED, "-x", "c++", "-o", f"{folder}/empty.so", "-"]
            process = subprocess.run(
                command, input="int empty() { return 0; }", capture_output=True, text=True, check=False
            )
            if process.returncode != 0:
                reason = " ".join(process.stderr.split())[:300]
                remedy = (
                    "only --sanitize needs them; they come with g++ (Fedora: dnf install libasan libubsan), or set CXX "
                    "to another compiler"
                )
                return Fact(name, f"do not link: {reason}", ok=False, remedy=remedy)
            sanitizer.environment(Path(folder) / "findings")
        except ToolchainError as error:
            return Fact(name, "missing", ok=False, remedy=str(error))
        except OSError as error:
            return Fact(name, f"cannot be tried: {error.strerror}", ok=False, remedy="set CXX to another compiler")
    return Fact(name, "address and undefined link and run, for --sanitize")


def _compute_sanitizer() -> Fact:
    from narrowgauge.harness.tools.sanitize.compute_sanitizer import ComputeSanitizerError, find_tool

    try:
        return Fact("compute-sanitizer", find_tool())
    except ComputeSanitizerError as error:
        return Fact("compute-sanitizer", "missing", ok=False, remedy=f"only `narrowgauge sanitize` needs it: {error}")


def _triton() -> Fact:
    """Whether Triton's interpreter runs a kernel on a CPU. A kernel needs a source file and a process of its own: the
    interpreter is chosen at import."""
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as folder:
        program = Path(folder) / "cast.py"
        try:
            program.write_text(_CAST, encoding="utf-8")
            environment = os.environ | {"TRITON_INTERPRET": "1"}
            process = subprocess.run(
                [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False
            )
        except OSError as error:
            return Fact("Triton", f"cannot be tried: {error.strerror}", ok=False)
    if process.returncode != 0:
        reason = (process.stderr.strip().splitlines() or ["no output"])[-1][:300]
        missing = "No module named 'triton'" in reason
        remedy = "only Triton kernels need it: pip install 'narrowgauge[triton]'"
        return Fact("Triton", "missing" if missing else f"its interpreter fails: {reason}", ok=False, remedy=remedy)
    version, value = process.stdout.split()
    casts = "127.6 to E4M3 is 128" if float(value) == 128 else f"but casts wrongly: 127.6 to E4M3 is {value}, not 128"
    return Fact("Triton", f"{version}; its interpreter runs on a CPU with TRITON_INTERPRET=1, {casts}")


def _verified() -> list[Fact]:
    from narrowgauge.native.runtime import cuda

    here = _architecture()
    known = here is None or here in cuda.RUN_ON
    remedy = f"`make test DEVICE=cuda` in a checkout tests kernels and reference on {here}"
    run = "a CPU and on " + ", ".join(f"{name} ({gpus})" for name, gpus in cuda.RUN_ON.items())
    if here is not None:
        run += f"; this GPU is {here}" + ("" if known else ", which has run no test")
    compiled = ", ".join(name for name in cuda.COMPILED_FOR if name.rstrip("a") not in cuda.RUN_ON)
    return [
        Fact("native kernels", f"verified on {run}; compiled alone for {compiled}", ok=known, remedy=remedy),
        Fact("reference", f"verified on {run}", ok=known, remedy=remedy),
    ]


def _architecture() -> str | None:
    """sm_90 for compute capability 9.0. None without a GPU usable by torch."""
    try:
        import torch

        return "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    except Exception:
        return None
