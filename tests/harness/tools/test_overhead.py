"""The harness's own time: whose code is whose, what a timer sees, and the row of an operation."""

from __future__ import annotations

import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from narrowgauge.harness import cli
from narrowgauge.harness.backends.results import join_sections, split_sections
from narrowgauge.harness.tools.bench.overhead import (
    INTERVAL,
    SAMPLE,
    Overhead,
    attribute_seconds,
    code_owner,
    overheads,
    sample_cases,
)
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import GEMM, QUANTIZE, backend
from tests.paths import ROOT

SOURCE = """
def call(inner):
    return inner()


def burn(done):
    while not done():
        pass
"""


def code_of(file: str) -> dict[str, Any]:
    """Functions that seem to stand in a file of the project."""
    result: dict[str, Any] = {}
    exec(compile(SOURCE, str(ROOT / "narrowgauge" / file), "exec"), result)
    return result


def through(*files: str) -> FrameType:
    """A frame outside the project, called through functions of these files, the outermost first."""
    inner: Callable[[], FrameType] = sys._getframe
    for file in reversed(files):
        inner = partial(code_of(file)["call"], inner)
    return inner()


@pytest.mark.parametrize(
    ("files", "part"),
    [
        (["harness/running/runner.py"], "harness"),
        (["harness/running/runner.py", "harness/checks/exact.py"], "check"),
        (["harness/running/runner.py", "harness/checks/exact.py", "reference/numbers/decode.py"], "reference"),
        (["harness/running/runner.py", "native/ops.py"], "kernel"),
        (["harness/running/runner.py", "native/ops.py", "harness/backends/guard.py"], "harness"),
        (["harness/running/runner.py", "native/ops.py", "references/else.py"], "kernel"),
        (["elsewhere/main.py"], "harness"),
    ],
)
def test_what_runs_is_that_of_the_innermost_code_of_the_project(files: list[str], part: str) -> None:
    assert code_owner(through(*files)) == part
    assert code_owner(None) == "harness"


def test_the_time_since_the_last_look_is_that_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("narrowgauge.harness.tools.bench.overhead.time", SimpleNamespace(thread_time=lambda: clock[0]))
    timers: list[tuple[float, ...]] = []
    monkeypatch.setattr(
        "narrowgauge.harness.tools.bench.overhead.signal.setitimer", lambda _, *seconds: timers.append(seconds)
    )
    spent: defaultdict[str, float] = defaultdict(float)
    with attribute_seconds(spent):
        for file, seconds in {"reference/a.py": 2.0, "native/a.py": 3.0}.items():
            clock[0] += seconds
            code_of(file)["call"](partial(signal.raise_signal, signal.SIGPROF))
        clock[0] += 4.0
    assert spent == {"reference": 2.0, "kernel": 3.0, "harness": 4.0}
    assert timers == [(INTERVAL, INTERVAL), (0.0,)]


def test_a_clock_that_goes_back_counts_no_second_twice_and_takes_none_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 4.0, 7.0, 6.0])
    monkeypatch.setattr(
        "narrowgauge.harness.tools.bench.overhead.time", SimpleNamespace(thread_time=lambda: next(clock))
    )
    seconds: defaultdict[str, float] = defaultdict(float)
    with attribute_seconds(seconds):
        for file in ("reference/a.py", "native/a.py", "reference/a.py"):
            code_of(file)["call"](partial(signal.raise_signal, signal.SIGPROF))
    assert seconds == {"reference": 7.0, "kernel": 0.0, "harness": 0.0}


def test_a_timer_looks_by_itself() -> None:
    seconds: defaultdict[str, float] = defaultdict(float)
    with attribute_seconds(seconds):
        for file, part in {"reference/a.py": "reference", "native/a.py": "kernel"}.items():
            code_of(file)["burn"](lambda part=part: seconds[part])
    assert seconds["reference"] > 0
    assert seconds["kernel"] > 0


def test_a_row_for_each_operation() -> None:
    kernels = backend(quantize=reference.quantize, gemm=reference.gemm)
    rows = overheads([QUANTIZE, GEMM, QUANTIZE], kernels, "cpu")
    assert {row.operation: row.cases for row in rows} == {"quantize": 2, "gemm": 1}
    assert all(0 < row.harness <= row.milliseconds for row in rows)
    assert rows[0].harness >= rows[1].harness


def test_a_sample_is_spread_over_the_cases() -> None:
    assert sample_cases([QUANTIZE] * 3) == [QUANTIZE] * 3
    many = [QUANTIZE] * 2 * SAMPLE + [GEMM] * SAMPLE
    assert sample_cases(many) == [QUANTIZE] * (2 * SAMPLE // 3) + [GEMM] * (SAMPLE // 3)


def test_bench_prints_it_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Overhead("gemm", 1, 30.0, 4.0), Overhead("quantize", 3, 10.0, 2.0)]
    monkeypatch.setattr("narrowgauge.harness.tools.bench.overhead.overheads", lambda cases, kernels, device: found)
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(cli.app, ["bench", "--overhead", "cases/nvfp4_layout.toml"])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[-3:] == ["gemm 30.0 4.0 1", "quantize 10.0 2.0 3", "together 15.0 2.5 4"]
    assert re.search("ms a case +the harness's own", result.output)


class Counting(TorchDispatchMode):
    """Counts the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("columnwise", [False, True])
def test_sections_are_split_by_a_few_calls_of_torch(columnwise: bool) -> None:
    """Between guard zones a call costs ten times as much, and a result of 64 sections took 512 of them."""
    sizes = [16, 0, 48] * 16
    x = torch.randn(sum(sizes), 32)
    parts = torch.split(x, sizes)
    whole = [reference.quantize(part.T.contiguous() if columnwise else part, "nvfp4") for part in parts]
    joined = join_sections(whole, columnwise=columnwise)
    with Counting() as counting:
        result = split_sections(joined, sizes, 32, find_recipe("nvfp4"), columnwise=columnwise)
    assert counting.calls < 10 + (2 * len(sizes) if columnwise else 0)
    for section, expected in zip(result, whole, strict=True):
        for name in ("codes", "scales", "amax", "tensor_scale"):
            assert torch.equal(getattr(section, name), getattr(expected, name)), name
        assert section.shape == expected.shape
