"""The sanitizers find kernels that are wrong on purpose, each at its line and thread."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.native.runtime import host, sanitizer
from narrowgauge.native.runtime.sources import ToolchainError, text
from tests.paths import ROOT

WRONG = Path(__file__).parents[1] / "wrong" / "memory.cu"
TEXT = WRONG.read_text(encoding="utf-8")
KERNELS = re.findall(r"__global__ void (\w+)\(", TEXT)


def line(words: str) -> int:
    """The number of the only line of memory.cu that holds `words`."""
    (found,) = (number for number, text in enumerate(TEXT.splitlines(), 1) if words in text)
    return found


# Finding, text of the wrong line, and the wrong thread.
FOUND = {
    "reads_behind_an_input": (
        "heap-buffer-overflow: reads 4 bytes at byte 160 of an allocation of 160", "= x[t];  // the mistake: t < n", 40,
    ),
    "writes_before_an_output": (
        "heap-buffer-overflow: writes 4 bytes at byte -4 of an allocation of 160", "out[t - 1]", 0,
    ),
    "writes_outside_shared_memory": ("global-buffer-overflow: writes 4 bytes", "mine[t] = ", 4),
    "reads_outside_a_local_array": ("stack-buffer-overflow: reads 4 bytes", "= from[", 4),
    "overflows": (
        "signed-integer-overflow: Signed integer overflow: 1 + 2147483647 cannot be represented in type 'int'",
        "0x7FFFFFFF", 0,
    ),
    "shifts_too_far": (
        "invalid-shift-exponent: Shift exponent 32 is too large for 32-bit type 'int'", "<< (t + 28)", 4,
    ),
    "loads_misaligned": (
        "misaligned-pointer-use: Load of misaligned address 0xADDRESS for type 'const int', which requires 4 byte "
        "alignment", "reinterpret_cast<const char*>(x) + t", 1,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the sanitizers say of every kernel."""
    folder = tmp_path_factory.mktemp("sanitized")
    shutil.copy(WRONG, folder)
    environ = os.environ | sanitizer.environment(folder / "found") | {"NARROWGAUGE_CACHE": str(folder)}
    command = [sys.executable, "-m", "tests.native.sanitized", str(folder), *KERNELS]
    root = ROOT
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout)
    return said


@pytest.mark.long
def test_a_right_kernel_runs_to_its_end(found: dict[str, str]) -> None:
    assert found["right"] == ""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernel", FOUND)
def test_a_wrong_kernel_is_found_with_line_and_thread(kernel: str, found: dict[str, str]) -> None:
    what, words, thread = FOUND[kernel]
    said = re.sub("0x[0-9a-f]+", "0xADDRESS", found[kernel])
    assert said == f"{what} at memory.cu:{line(words)}, thread ({thread}, 0, 0) of block (0, 0, 0) of {kernel}"


def test_flags_of_the_sanitizers_make_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a process with the sanitizers would load a kernel that was built without."""
    seen = []

    class Stop(Exception):
        pass

    def cached(name: str, *_: object, **__: object) -> None:
        seen.append(name)
        raise Stop

    monkeypatch.setattr(host, "cached", cached)
    for value in ("", "1"):
        monkeypatch.setenv(host.SANITIZE, value)
        with pytest.raises(Stop):
            host.library("swizzle", ("-DANOTHER",))
    assert len(set(seen)) == 2


def test_a_compiler_without_the_runtime_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking = tmp_path / "g++"
    lacking.write_text('#!/bin/sh\necho "${1#-print-file-name=}"\n')
    lacking.chmod(0o755)
    monkeypatch.setattr(sanitizer, "compiler", lambda: str(lacking))
    monkeypatch.setattr(sanitizer, "is_clang", lambda: False)
    monkeypatch.setattr(sanitizer, "_monitor", lambda: tmp_path / "monitor.so")
    sanitizer._runtime.cache_clear()
    try:
        with pytest.raises(
            ToolchainError, match=re.escape(f"--sanitize needs libasan.so of {lacking}, and it is not ins")
        ):
            sanitizer.environment(tmp_path / "found")
    finally:
        sanitizer._runtime.cache_clear()


def test_a_runtime_that_does_not_load_is_one_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(ToolchainError, match=r"--sanitize: Python does not run with the sanitizers of .*broken\.so"):
        sanitizer._try(str(broken))


def test_headers_of_the_library_lie_outside_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sanitizer.SANITIZE, "1")
    program = host._program("norm_quantize", text("norm_quantize"))
    assert program.index("#include <cmath>") < program.index("\nnamespace {\n")
