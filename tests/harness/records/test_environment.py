"""What `doctor` and every report say of the machine: nothing raises, and what is missing has a remedy."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.records import environment
from narrowgauge.harness.records.environment import describe_run, facts

NAMES = [
    "platform", "python", "torch", "numpy", "pandas", "pyarrow", "pytest", "pytest-xdist", "safetensors",
    "C++ compiler", "GPU", "commit",
]  # fmt: skip


def fact(name):
    (found,) = (f for f in facts() if f.name == name)
    return found


@pytest.fixture
def gpu(monkeypatch):
    """A torch that sees a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_every_fact_in_its_order():
    found = facts()
    if not torch.cuda.is_available():
        assert [f.name for f in found] == NAMES
    assert all(f.value for f in found)
    assert all(f.remedy for f in found if not f.ok)
    assert fact("torch").value == importlib.metadata.version("torch")
    assert fact("python").ok


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "pyarrow":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert fact("pyarrow") == environment.Fact("pyarrow", "missing", ok=False, remedy="pip install pyarrow")
    assert fact("pandas").ok


def test_an_old_python_is_not_enough(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    found = fact("python")
    assert (found.ok, found.remedy) == (False, "narrowgauge needs Python 3.11")


def test_a_torch_that_cannot_be_imported_is_a_fact(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = fact("GPU")
    assert not found.ok
    assert found.value.startswith("unknown: torch cannot be imported: ModuleNotFoundError")


def test_a_missing_compiler_says_how_to_get_one(monkeypatch, fresh_compiler):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    found = fact("C++ compiler")
    assert (found.value, found.ok) == ("missing", False)
    assert "g++ or clang++ or c++ is not on the PATH" in found.remedy
    assert "apt install g++" in found.remedy


def test_a_missing_compiler_of_ones_own_is_named(monkeypatch, fresh_compiler):
    monkeypatch.setenv("CXX", "g++-99")
    assert "g++-99 is not on the PATH" in fact("C++ compiler").remedy


def test_a_compiler_that_cannot_be_run(monkeypatch, fresh_compiler, tmp_path):
    broken = tmp_path / "g++"
    broken.write_bytes(b"\x7fnothing")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = fact("C++ compiler")
    assert not found.ok
    assert found.value.startswith(f"{broken} cannot be run: ")
    assert found.remedy


def test_a_compiler_without_a_version(monkeypatch, fresh_compiler, tmp_path):
    silent = tmp_path / "g++"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    monkeypatch.setenv("CXX", str(silent))
    assert fact("C++ compiler").value == f"{silent} (no version)"


@pytest.mark.parametrize(("cuda", "why"), [(None, "this torch is a CPU build"), ("13.0", "torch sees no GPU")])
def test_why_there_is_no_gpu(monkeypatch, cuda, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = fact("GPU")
    assert (found.value, found.ok) == (f"none: {why}", False)
    assert "--device cuda" in found.remedy


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda13"), ("12.8", "cuda12")])
def test_a_gpu_without_cupy_says_which_to_install(monkeypatch, gpu, cuda, extra):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert fact("GPU").value == "NVIDIA H200, compute capability 9.0"
    assert fact("CUDA of torch").value == cuda
    found = fact("CuPy")
    assert not found.ok
    assert found.value.startswith("cannot be imported: ModuleNotFoundError")
    assert found.remedy == f"pip install 'narrowgauge[{extra}]'"


def test_a_gpu_with_cupy(monkeypatch, gpu):
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13010)
    cupy = SimpleNamespace(__version__="14.0.0", cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert fact("CuPy").value == "14.0.0, CUDA runtime 13000, driver 13010"


def test_a_driver_that_fails_is_a_fact(monkeypatch, gpu):
    def fails():
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    found = fact("GPU")
    assert not found.ok
    assert "CUDA driver version is insufficient" in found.value


def test_without_git_the_commit_is_unknown(monkeypatch):
    def run(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert environment._commit().value == "unknown: git is not installed"


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch):
    monkeypatch.setattr(
        environment.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 128, "", "fatal: not a git")
    )
    assert environment._commit().value == "unknown: not a git checkout"


def test_a_run_is_described_by_its_settings_then_the_machine():
    described = describe_run(backend="native", device="cpu", seed=5)
    assert list(described)[:3] == ["backend", "device", "seed"]
    assert (described["backend"], described["device"], described["seed"]) == ("native", "cpu", "5")
    assert described.keys() >= {f.name for f in facts()}
    assert "-ffp-contract=off" in described["kernel flags"]
    assert all(isinstance(value, str) for value in described.values())


def test_the_kernel_hash_follows_the_kernel_sources(monkeypatch, tmp_path):
    kernels = tmp_path / "native" / "kernels"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path)
    hashes = []
    for text in ("first", "second", "first"):
        (kernels / "amax.cu").write_text(text)
        environment.kernel_hash.cache_clear()
        hashes.append(environment.kernel_hash())
    environment.kernel_hash.cache_clear()
    assert hashes[0] == hashes[2] != hashes[1]
    assert len(hashes[0]) == 8
