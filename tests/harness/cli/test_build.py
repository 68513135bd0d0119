"""`narrowgauge build`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from narrowgauge.harness.cli import app
from narrowgauge.native.runtime import host, sources
from narrowgauge.native.runtime.sources import CPU_SOURCES, KERNELS


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the compiled sources. The cache is empty, and there are two sources."""
    names: list[str] = []
    real = host._compile
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "CPU_SOURCES", ("pad", "swizzle"))
    monkeypatch.setattr(host, "_library", host._library.__wrapped__)  # a process keeps its libraries
    monkeypatch.setattr(host, "_compile", lambda source, *rest: (names.append(source), real(source, *rest)))
    return names


def run_build() -> Result:
    return CliRunner().invoke(app, ["build", "-n", "2"])


@pytest.mark.long
def test_build_fills_the_cache_that_calls_use(compiled: list[str], tmp_path: Path) -> None:
    result = run_build()
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "cache") in result.stdout
    assert sorted(compiled) == ["pad", "swizzle"]
    host.library("pad")
    assert run_build().exit_code == 0
    assert len(compiled) == 2, "kernels of the cache are compiled again"


@pytest.mark.long
def test_build_says_which_source_does_not_compile(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = host.text
    monkeypatch.setattr(host, "text", lambda source: real(source) + "\n#error broken" * (source == "pad"))
    result = run_build()
    assert result.exit_code == 2
    assert "pad.cu does not compile" in result.stderr
    assert "Traceback" not in result.stderr


def test_sources_of_a_cpu_are_those_without_hopper() -> None:
    left = set(KERNELS) - set(CPU_SOURCES)
    assert {"gemm_wgmma", "gemm_wgmma_fp8", "gemm_skinny_nvfp4"} <= left
    assert all(name.startswith("gemm") or name in ("attention_tensor", "attention_prefill") for name in left)
