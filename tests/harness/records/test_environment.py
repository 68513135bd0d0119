"""The description of the machine in `doctor` and in reports: no exception, and a remedy for every missing part."""

import importlib.metadata
import sys

import pytest
import torch

from narrowgauge.harness.records import environment
from narrowgauge.harness.records.environment import describe_run, facts


def fact(name):
    (fact_,) = (f for f in facts() if f.name == name)
    return fact_


@pytest.fixture
def gpu(monkeypatch):
    """A torch with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "pyarrow":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert fact("pyarrow") == environment.Fact("pyarrow", "missing", ok=False, remedy="pip install pyarrow")
    assert fact("pandas").ok


def test_a_missing_compiler_says_how_to_get_one(monkeypatch, fresh_compiler):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    fact_ = fact("C++ compiler")
    assert (fact_.value, fact_.ok) == ("missing", False)
    assert "g++ or clang++ or c++ is not on the PATH" in fact_.remedy
    assert "apt install g++" in fact_.remedy


@pytest.mark.parametrize(("cuda", "extra"), [("13.0", "cuda13"), ("12.8", "cuda12")])
def test_a_gpu_without_cupy_says_which_to_install(monkeypatch, gpu, cuda, extra):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert fact("GPU").value == "NVIDIA H200, compute capability 9.0"
    assert fact("CUDA of torch").value == cuda
    fact_ = fact("CuPy")
    assert not fact_.ok
    assert fact_.value.startswith("cannot be imported: ModuleNotFoundError")
    assert fact_.remedy == f"pip install 'narrowgauge[{extra}]'"


def test_a_driver_that_fails_is_a_fact(monkeypatch, gpu):
    def fails():
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    fact_ = fact("GPU")
    assert not fact_.ok
    assert "CUDA driver version is insufficient" in fact_.value


def test_a_run_is_described_by_its_settings_then_the_machine():
    described = describe_run(backend="native", device="cpu", seed=5)
    assert list(described)[:3] == ["backend", "device", "seed"]
    assert (described["backend"], described["device"], described["seed"]) == ("native", "cpu", "5")
    assert described.keys() >= {f.name for f in facts(gpu=False)}
    assert "GPU" not in described
    assert "GPU" in describe_run(backend="native", device="cuda", seed=5)
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
