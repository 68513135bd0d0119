"""Limits of the messages of a kernel host, and notes on its memory and remains."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.loading import Loaded
from narrowgauge.harness.hosts import remote_host
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import QUANTIZE


class Kernels:
    """The reference."""

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference."""
        return ops.quantize(x, recipe)


class Many(Kernels):
    """The reference. Its host names many loaded files, and a file with a long name."""

    def __init__(self) -> None:
        names = {"files": ["f" * 5000, *["f"] * 20_000], "packages": ["p"] * 20_000, "folder": "."}
        Loaded.news = lambda self: names  # type: ignore[method-assign, assignment]


class Orphans(Kernels):
    """The reference, which leaves another program in a session of its own, without a parent."""

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference."""
        if not (child := os.fork()):
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execv("/bin/sleep", ["sleep", "600"])
        os.waitpid(child, 0)
        time.sleep(0.1)
        return ops.quantize(x, recipe)


def test_names_of_loaded_files_are_limited() -> None:
    with hosted_backend(f"{__name__}:Many") as backend:
        (news,) = backend.host.loaded
        assert [len(news[key]) for key in ("files", "packages")] == [remote_host._NAMES] * 2
        assert max(map(len, news["files"])) == remote_host._NOTE
        assert run_case(QUANTIZE, backend).verdict == "pass"


class Ending(Kernels):
    """The reference. Writes a line per load of a host, and ends its host in a case of 16 rows."""

    def __init__(self) -> None:
        with open(os.environ["LOADED"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference."""
        if len(x) == 16:
            os._exit(1)
        return ops.quantize(x, recipe)


def test_a_host_loads_its_backend_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the host after a crash loads it again."""
    monkeypatch.setenv("LOADED", str(tmp_path / "loaded"))
    loaded, verdicts = [], []
    with hosted_backend(f"{__name__}:Ending") as backend:
        for case in (QUANTIZE, QUANTIZE, replace(QUANTIZE, shape=(16, 48)), QUANTIZE, QUANTIZE):
            verdicts.append(run_case(case, backend).verdict)
            loaded.append(len((tmp_path / "loaded").read_text().splitlines()))
    assert (verdicts, loaded) == (["pass", "pass", "crash", "pass", "pass"], [1, 1, 1, 2, 2])


class Slow(Kernels):
    """The reference, which takes longer to warm up than a case may take."""

    def warm_up(self, device: torch.device) -> None:
        """Sleep."""
        time.sleep(12.0)


@pytest.mark.long
def test_the_time_of_a_warm_up_belongs_to_no_case() -> None:
    """Also in a replacement host within a case."""
    with hosted_backend(f"{__name__}:Slow") as backend:
        assert backend.host.loading >= 12.0
        backend.host.close()
        record = run_case(QUANTIZE, backend, timeout=10.0)
    assert (record.verdict, record.message) == ("pass", "")


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_import_is_said_once(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the record of the first case of its host."""
    monkeypatch.setattr(remote_host, "_SLOW", 0.0 if slow else float("inf"))
    with hosted_backend(f"{__name__}:Kernels") as backend:
        first, second = (run_case(QUANTIZE, backend) for _ in range(2))
    assert [note["cause"] for note in first.notes] == ["slow-import"] * slow
    assert (first.verdict, second.verdict, second.notes) == ("pass", "pass", [])


def test_an_orphan_of_another_program_is_named_and_ended() -> None:
    """Its parents have ended, and nothing in its memory is of its host."""
    with hosted_backend(f"{__name__}:Orphans") as backend:
        record = run_case(QUANTIZE, backend)
        (left,) = [note["sentence"] for note in record.notes if note["cause"] == "leaves-processes"]
    pids = [int(word.split(")")[0]) for word in left.split("sleep (")[1:]]
    assert pids, left
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
