"""The proof of many tensor scales in several processes, and its journal, from which a later call goes on."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.certify.certificate import CertificateError
from narrowgauge.harness.certify.compare import Calls
from narrowgauge.harness.certify.inputs.space import Numbers, Outer, outers
from narrowgauge.harness.certify.proof import FAILING, Proof, Prover
from narrowgauge.harness.hosts.frames import Connection, FrameError
from narrowgauge.harness.hosts.remote_host import RemoteHost, hosted_backend
from narrowgauge.harness.hosts.starter import Channel
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.machine.process import ending, one_thread
from narrowgauge.harness.machine.processors import worker_gpu
from narrowgauge.harness.records.environment import source_hashes
from narrowgauge.harness.records.loaded_sources import LoadedSources
from narrowgauge.harness.running.supervisor import Died, Fork, late_or_readable
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import find_recipe

SECONDS = 3600.0
"""Seconds of all calls of a kernel host."""
_SHARD = 16
"""Tensor scales of a shard, at most."""
_SILENCE = 600.0
"""Seconds that a shard may take."""


@dataclass(frozen=True)
class Task:
    """What the shards of a proof share."""

    backend: str
    recipe: str
    dtype: str
    device: str
    seed: int
    tensor_scales: int
    places: int
    everywhere: int

    def numbers(self) -> Numbers:
        """The numbers of the proof."""
        return Numbers(TORCH_DTYPES[self.dtype], self.device)

    def outers(self) -> tuple[list[Outer], int]:
        """The tensor scales of the proof, and the number of all."""
        return outers(find_recipe(self.recipe), self.numbers(), self.tensor_scales, self.seed)

    @staticmethod
    def shards(chosen: list[Outer]) -> list[range]:
        """The numbers of the tensor scales of every shard."""
        size = max(1, min(_SHARD, len(chosen) // 64))
        return [range(first, min(first + size, len(chosen))) for first in range(0, len(chosen), size)]


class Journal:
    """Proofs of shards without a wrong byte, a line for each, behind a line with task and sources of the kernel."""

    def __init__(self, path: Path, task: Task, sources: Mapping[str, str], *, resume: bool) -> None:
        """Begin the file, or go on with it. Raises CertificateError for a file of another task or kernel, and if the
        file cannot be read or written."""
        self.path, self.proofs = path, dict[int, Proof]()
        head = {"task": asdict(task), "sources": dict(sources)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume:
                self._read(head)
            else:
                path.write_text(json.dumps(head) + "\n", encoding="utf-8")
        except OSError as error:
            remedy = "; leave --resume out" if resume else ""
            raise CertificateError(f"{path}: the journal cannot be used: {error.strerror}{remedy}") from error

    def _read(self, head: dict[str, Any]) -> None:
        whole = self.path.read_text(encoding="utf-8")
        text = whole[: whole.rfind("\n") + 1]  # an ended process may leave a part of a line
        try:
            first, *entries = map(json.loads, text.splitlines())
            proofs = {entry["first"]: Proof(**entry["proof"]) for entry in entries}
            found = first["task"] | first["sources"]
        except (ValueError, KeyError, TypeError) as error:
            raise CertificateError(f"{self.path}: is no journal of a proof; leave --resume out") from error
        wanted = head["task"] | head["sources"]
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise CertificateError(
                    f"{self.path}: is of {name} {found.get(name)}, and this proof of {wanted.get(name)}; "
                    "leave --resume out"
                )
        self.proofs = proofs
        os.truncate(self.path, len(text.encode()))

    def add(self, first: int, proof: Proof) -> None:
        """Append the proof of the shard from the tensor scale `first`. Raises OSError."""
        self.proofs[first] = proof
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"first": first, "proof": asdict(proof)}) + "\n")


class _Process(Fork):
    """A process that proves shards, as its parent sees it."""

    def __init__(self, task: Task, number: int) -> None:
        super().__init__(
            f"{__name__}:main", [asdict(task)], channels=1, gpu=worker_gpu(number, task.device), seconds=_SILENCE
        )

    def give(self, first: int) -> None:
        """Send the next shard."""
        self.send({"first": first})
        self.expect(_SILENCE)


def prove(task: Task, prover: Prover, journal: Journal, workers: int) -> Proof:
    """The proof of all tensor scales of a task, the same for every number of processes.

    `prover`: judges in this process what no other process has proved: shards with wrong bytes, and all shards if
    `workers` is 1. Raises CertificateError if the kernel fails or a process ends, and OSError if the journal cannot be
    written. Proved shards stay in the journal.
    """
    chosen, of = task.outers()
    shards = task.shards(chosen)
    waiting = deque(numbers.start for numbers in shards if numbers.start not in journal.proofs)
    if (workers := min(workers, len(waiting))) > 1:
        _prove_shards(task, waiting, journal, workers)
    proof = Proof(outers_of=of)
    for numbers in shards:
        part = journal.proofs.get(numbers.start)
        if part is None:
            most = FAILING - proof.failing
            part = prover.prove_some(chosen, numbers, task.places, task.everywhere, most)
            if not part.wrong:
                journal.add(numbers.start, part)
        proof.add(part)
        if proof.stopped:
            break
    return proof


def _prove_shards(task: Task, waiting: deque[int], journal: Journal, workers: int) -> None:
    """Prove shards in processes, in order. With `FAILING` wrong shards, no further shard begins."""
    wrong = 0
    with ExitStack() as stack:
        running: dict[_Process, int] = {}
        processes = [_Process(task, number) for number in range(workers)]
        for process in processes:
            stack.callback(process.stop)
        while running or waiting:
            for process in processes:
                if process not in running and waiting and wrong < FAILING:
                    running[process] = waiting.popleft()
                    process.give(running[process])
            if not running:
                break
            for process in late_or_readable(list(running)):
                message, first = _message(process), running.pop(process)
                wrong += "proof" not in message
                if "proof" in message:
                    journal.add(first, Proof(**message["proof"]))


def _message(process: _Process) -> dict[str, Any]:
    try:
        message = process.receive()
    except TimeoutError:
        raise CertificateError(f"a process of the proof gave no answer for {process.seconds:g} s") from None
    except Died as died:
        raise CertificateError(f"a process of the proof died ({ending(died.status)})") from None
    if "error" in message:
        raise CertificateError(message["error"])
    return message


def main(connection: Connection, hosts: Channel, settings: dict[str, Any]) -> None:
    """Prove shards in a process of its own. `settings`: fields of the task."""
    task = Task(**settings)
    chosen, _ = task.outers()
    shards = {numbers.start: numbers for numbers in task.shards(chosen)}
    with suppress(FrameError), one_thread():  # the parent ended
        try:
            with hosted_backend(task.backend, task.device, seconds=SECONDS, channel=hosts) as backend:
                prover = Prover(Calls(backend, find_recipe(task.recipe), task.seed), task.numbers(), task.seed)
                while True:
                    numbers = shards[connection.receive()[0]["first"]]
                    proof = prover.prove_some(chosen, numbers, task.places, task.everywhere, 1)
                    connection.send({} if proof.wrong else {"proof": asdict(proof)})
        except (BackendError, Unsupported, HostLost) as error:
            text = f"{task.backend}, {task.recipe}: fails on an input of the proof: {escape(str(error))}"
            connection.send({"error": text})


def sources_of(loaded: Backend, name: str) -> dict[str, str]:
    """Digests of the sources of a hosted backend called `name`, as of a run: those loaded up to now too."""
    sources, host = LoadedSources(), loaded.host
    assert isinstance(host, RemoteHost)
    host.end_case()
    for news in host.loaded:
        sources.add(news | {"declared": loaded.named})
    host.begin_case(SECONDS, room(host.device.type))
    return {part: value for part, value in source_hashes(name).items() if value} | sources.entries
