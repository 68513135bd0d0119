"""The device of a test, and kernels with their text in a test, compiled and launched like kernels of `native`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.native.runtime import host, sources
from tests.native import devices

HEADERS = sources.FOLDER
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\(\w+\)\s+)?(\w+)\(")


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of `devices.ops`: the CPU, but for a test marked with several devices."""
    found: str = getattr(request, "param", "cpu")
    monkeypatch.setattr(devices.ops, "device", found)
    return found


@pytest.fixture(autouse=True)
def compiled_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles kernels that no case runs on a CPU (of tests, of Hopper) in a third of the time, with -O1."""
    real = host._flags

    def flags(source: str) -> tuple[str, ...]:
        of_tests = source not in sources.CPU_SOURCES
        return tuple("-O1" if of_tests and flag == host.OPTIMIZATION else flag for flag in real(source))

    monkeypatch.setattr(host, "_flags", flags)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the sources of `native` during the test: a copy of the headers."""
    shutil.copytree(HEADERS, tmp_path, ignore=shutil.ignore_patterns("*.cu", "cpu"), dirs_exist_ok=True)
    monkeypatch.setattr(sources, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def cuda_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Adds a text to the sources of `native`: `launch(cuda_source(TEXT), "kernel", …)` runs a kernel of the text.

    The name of the source is a hash of the text, so that a run compiles a text once, into a separate cache.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of all workers
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(base / "kernels"))

    def add(text: str) -> str:
        name = f"test_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        (folder / f"{name}.cu").write_text(text, encoding="utf-8")
        monkeypatch.setitem(sources.KERNELS, name, tuple(_KERNEL.findall(text)))
        return name

    return add
