"""The kernel hosts of a group of processes: all ranks call a method of the backend on their own inputs.

Rank 0 is the host of the judge; the hosts of the further ranks start on first use. The ranks meet in a file without a
name, whose descriptor the judge passes. If a rank dies, hangs or raises, all hosts are ended: a collective waits for
every rank.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from narrowgauge.harness.backends.host import Facts, Host, HostLost, PreparedRun, Tensors
from narrowgauge.harness.backends.results import BackendError, Unsupported

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.cases.keys import Autograd
    from narrowgauge.harness.hosts.remote.transport import Transport

_GRACE = 1.0
"""Seconds for the answers of the remaining ranks after a failed rank."""
_OF_RANK = re.compile(r"(.+) of rank (\d+)")


def of_rank(name: str, rank: int) -> str:
    """The name of an input of a single rank."""
    return f"{name} of rank {rank}"


def inputs_of(given: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The inputs of a rank, by the names without the rank."""
    found = {}
    for name, value in given.items():
        match = _OF_RANK.fullmatch(name)
        if match and int(match[2]) == rank:
            found[match[1]] = value
    return found


class RankHost(Host, Protocol):
    """The host of a rank (`harness.hosts.remote_host.RemoteHost`)."""

    transport: Transport
    group: int
    """Number of ranks of the joined group of the process; 0: none."""

    @property
    def process(self) -> int | None:
        """Process id of the running host, or None."""

    @property
    def device(self) -> torch.device:
        """Device of the backend."""

    def join(self, rank: int, count: int, meeting: int) -> None:
        """Join a group. `meeting`: descriptor of the file in which its processes meet."""

    def close(self) -> None:
        """End the process."""


class RankedHost:
    """A `Host` whose `call` takes and gives a sequence: the arguments and the results of the ranks."""

    def __init__(self, hosts: Sequence[RankHost]) -> None:
        """`hosts`: started, in the order of the ranks."""
        self.hosts = hosts
        self.schedules = 0

    @property
    def facts(self) -> Facts:
        """The facts of the backend."""
        return self.hosts[0].facts

    @property
    def device(self) -> torch.device:
        """Device of the backend."""
        return self.hosts[0].device

    @property
    def autograd(self) -> Autograd:
        """How methods are called."""
        return self.hosts[0].autograd

    @property
    def reused(self) -> bool:
        """Whether a result of the case lies in memory of the first result of a method."""
        return any(host.reused for host in self.hosts)

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running."""
        names: list[str] = self.together([partial(host.variations, device) for host in self.hosts])[0]
        return names

    def lock(self) -> nullcontext[None]:
        """Nothing: the host of rank 0 takes the lock of the GPU for all."""
        return nullcontext()

    def overwritten(self) -> list[str]:
        """Methods of the case with changed bytes in their first result."""
        return list(dict.fromkeys(method for host in self.hosts for method in host.overwritten()))

    def prepare(self, inputs: Tensors, home: torch.device, poison: int) -> RankedRun:
        """Place the inputs of the ranks; names end with the rank (`of_rank`)."""
        parts = [inputs_of(inputs, rank) for rank in range(len(self.hosts))]
        return RankedRun([host.prepare(part, home, poison) for host, part in zip(self.hosts, parts, strict=True)])

    def call(self, method: str, *arguments: tuple[Sequence[Any], Mapping[str, Any]], **options: Any) -> list[Any]:
        """The results of a method on the ranks. `arguments`: the arguments of the ranks, by place and by name."""
        calls = zip(self.hosts, arguments, strict=True)
        return self.together([partial(host.call, method, *by_place, **named, **options)
                              for host, (by_place, named) in calls])  # fmt: skip

    def join(self) -> None:
        """Make the hosts a group, if not yet a group. Raises BackendError and Unsupported."""
        count = len(self.hosts)
        if all(host.group == count for host in self.hosts):
            return
        meeting = os.memfd_create("narrowgauge-meeting", os.MFD_CLOEXEC)
        try:
            self.together([partial(host.join, rank, count, meeting) for rank, host in enumerate(self.hosts)])
        finally:
            os.close(meeting)

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of a simultaneous call of all hosts.

        Raises the exception of the first failing rank, with the rank, after the end of all hosts, unless all answered
        that the case is unsupported.
        """
        deadline = self.hosts[0].transport.deadline
        for host in self.hosts:  # this thread keeps the time, and asks all hosts for their stacks
            host.transport.deadline = deadline + 4 * _GRACE
        ends: list[float] = [float("inf")] * len(calls)

        def timed(rank: int) -> Any:
            try:
                return calls[rank]()
            finally:
                ends[rank] = self.hosts[rank].transport.lost_at or time.monotonic()

        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(timed, rank) for rank in range(len(calls))]
            seconds = max(0.0, deadline - time.monotonic())
            done, late = wait(futures, seconds if seconds < threading.TIMEOUT_MAX else None, FIRST_EXCEPTION)
            failed = any(future.exception() is not None for future in done)
            if failed:
                late = wait(late, _GRACE).not_done
            message, stacks = "", ""
            if late and not failed:
                message, stacks = self._too_late([rank for rank, future in enumerate(futures) if future in late])
            ended = time.monotonic()
            for host, future in zip(self.hosts, futures, strict=True):
                if future in late and host.process is not None:
                    with suppress(OSError):
                        os.kill(host.process, signal.SIGKILL)
            wait(futures)
        for host in self.hosts:
            host.transport.deadline = deadline
        if message:
            self.close()
            raise HostLost("timeout", message, stack=stacks)
        if failed:
            self._raise_first(futures, ends, ended)
        return [future.result() for future in futures]

    def _too_late(self, ranks: Sequence[int]) -> tuple[str, str]:
        """The message and the stacks of ranks without an answer."""
        places, frames = [], []
        for rank in ranks:
            process = self.hosts[rank].transport.process
            if process is not None:
                process.stacks.ask(process.pid)
                stack = process.stacks.look()
                places.append(f"rank {rank}" + (f" is at {stack.place}" if stack.place else ""))
                frames.append(f"rank {rank}:\n{stack.frames}")
        return f"{self.hosts[0].transport.too_late}; {', '.join(places)}", "\n".join(frames)

    def _raise_first(self, futures: Sequence[Future[Any]], ends: Sequence[float], ended: float) -> None:
        """Raise the first failure before this process ended hosts: of a dead process, else of a call."""
        failures = [(ends[rank], rank, error) for rank, future in enumerate(futures)
                    if (error := future.exception()) is not None and ends[rank] <= ended]  # fmt: skip
        failures.sort(key=lambda failure: failure[:2])
        _, rank, error = next((f for f in failures if isinstance(f[2], HostLost)), failures[0])
        unsupported = all(isinstance(future.exception(), Unsupported) for future in futures)
        if not unsupported:
            self.close()
        words = str(error) if unsupported else f"rank {rank}: {error}"
        if isinstance(error, HostLost):
            raise HostLost(error.verdict, words, cause=error.cause, stack=error.stack) from error
        if isinstance(error, Unsupported | BackendError):
            raise type(error)(words) from error
        raise error

    def close(self) -> None:
        """End all processes."""
        for host in reversed(self.hosts):
            host.close()


class RankedRun:
    """The prepared runs of the ranks."""

    def __init__(self, runs: Sequence[PreparedRun]) -> None:
        self._runs = runs

    @property
    def seconds(self) -> float:
        """Seconds of the slowest rank."""
        return max(run.seconds for run in self._runs)

    @contextmanager
    def running(self, variation: int) -> Iterator[Tensors]:
        """Run under a variation, by number."""
        with ExitStack() as stack:
            parts = [stack.enter_context(run.running(variation)) for run in self._runs]
            yield {of_rank(name, rank): tensor for rank, part in enumerate(parts) for name, tensor in part.items()}

    def keep(self, outputs: Mapping[str, torch.Tensor]) -> Tensors:
        """The results: the judge's copies."""
        return dict(outputs)

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""
        found = [run.violations() for run in self._runs]
        outside, changed = (
            [f"{text} (rank {rank})" for rank, texts in enumerate(found) for text in texts[kind]] for kind in (0, 1)
        )
        return outside, changed
