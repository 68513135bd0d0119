"""Groups of kernel hosts: what a rank does is one clear error with the rank, and no process stays behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.backends.results import BackendError, Unsupported
from narrowgauge.harness.hosts.remote.ranks import RankedHost
from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost, hosted_backend
from narrowgauge.harness.machine.process_group import GROUP

KERNELS = """
import os
import time

import torch.distributed as dist


class Backend:
    def quantize(self, x, mode, group):
        if mode == "unsupported":
            raise NotImplementedError("no such sum")
        if dist.get_rank(group) == 1:
            if mode == "exit":
                os._exit(3)
            if mode == "raise":
                raise ValueError("a rank is wrong")
            if mode == "sleep":
                time.sleep(600)
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "summing_kernels.py").write_text(KERNELS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "summing_kernels:Backend"


def summed(backend: Backend, ranks: int, mode: str = "") -> list[torch.Tensor]:
    calls = [([torch.full((2, 3), rank + 1.0), mode, GROUP], dict[str, Any]()) for rank in range(ranks)]
    found: list[torch.Tensor] = backend.ranks(ranks).call("quantize", *calls)
    return found


def processes(backend: Backend) -> list[int]:
    host = backend.host
    assert isinstance(host, RankedHost)
    return [one.process for one in host.hosts if one.process is not None]


def runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}/exe") and os.path.realpath(f"/proc/{pid}/exe") != f"/proc/{pid}/exe"


def test_ranks_call_and_answer_together(kernels: str) -> None:
    with hosted_backend(kernels, seconds=60) as backend:
        for ranks in (2, 3):
            assert all(torch.equal(y, torch.full((2, 3), sum(range(1, ranks + 1)))) for y in summed(backend, ranks))


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("exit", HostLost, r"^rank 1: the process died \(exit status 3\)"),
        ("raise", BackendError, r"^rank 1: quantize raised ValueError: a rank is wrong"),
        ("unsupported", Unsupported, r"^no such sum"),
        ("sleep", HostLost, r"^no result after .*; rank 0 is at .*, rank 1 is at .*summing_kernels.py:18"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_all(kernels: str, mode: str, error: type, words: str) -> None:
    with hosted_backend(kernels, seconds=60) as backend:
        group = backend.ranks(2)
        pids = processes(group)
        if mode == "sleep":
            for host in group.host.hosts:  # type: ignore[attr-defined]
                host.transport.expect(1.5)
        with pytest.raises(error, match=words) as raised:
            summed(backend, 2, mode)
        if isinstance(raised.value, HostLost):
            assert raised.value.verdict == ("timeout" if mode == "sleep" else "crash")
        until = time.monotonic() + 5
        while mode != "unsupported" and any(map(runs, pids)) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(map(runs, pids)) == (mode == "unsupported")
        assert isinstance(backend.host, RemoteHost)
        backend.host.begin_case(60, 1 << 20)
        assert torch.equal(summed(backend, 2)[1], torch.full((2, 3), 3.0))


def test_a_group_needs_processes(kernels: str) -> None:
    local = Backend.local("local", __import__("summing_kernels").Backend())
    with pytest.raises(Unsupported, match="a collective runs in a process for each rank: use `narrowgauge run`"):
        local.ranks(2)


def test_a_separated_host_joins_no_group(kernels: str) -> None:
    with (
        hosted_backend(kernels, settings=HostSettings(kernels, untrusted=True)) as backend,
        pytest.raises(Unsupported, match="a group of processes is not run with --untrusted"),
    ):
        backend.ranks(2)
