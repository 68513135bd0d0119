"""A kernel host, as seen by its judge.

The judge places inputs in shared memory, sends calls, and copies the results out of the shared memory before reading. A
host that ends, hangs or writes bytes that are no message costs the running case: `HostLost`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.guarded_memory import ZONE
from narrowgauge.harness.backends.host import CaseEnd, Facts, HostLost, PreparedRun, Tensors
from narrowgauge.harness.backends.results import BackendError, Unsupported, dtype_name
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.cases.keys import Autograd
from narrowgauge.harness.cases.operations import all_descriptions, every_method
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.memory import CAPACITY, KEPT
from narrowgauge.harness.hosts.remote.inputs import InputMemory, PlacedSlot, memory_kind
from narrowgauge.harness.hosts.remote.process import HostProcess
from narrowgauge.harness.hosts.remote.ranks import RankedHost
from narrowgauge.harness.hosts.remote.results import ResultMemory, settle_copies
from narrowgauge.harness.hosts.remote.transport import Interpreter, Transport, number_of_bytes
from narrowgauge.harness.hosts.separation import NAMESPACES, NOT_SEPARATED, NOTHING, SENTENCES
from narrowgauge.harness.hosts.starter import Channel, starter
from narrowgauge.harness.machine.gpu_lock import needs_lock
from narrowgauge.harness.machine.processors import gpus_of_ranks

if TYPE_CHECKING:
    from narrowgauge.harness.backends.module_driver import Plan, Step

_NOTES, _NOTE = 20, 2000
"""Largest number of notes kept of an answer, and of characters of a note. A kernel decides about the words of a
host."""
_NAMES = 10_000
"""Largest number of kept files and packages of an answer."""
_SLOW = 10.0
"""Seconds of an import of a backend that make a note: every kernel host imports it."""
_SETTLE = 5.0
"""Least number of seconds for the end of a case."""


@dataclass(frozen=True)
class HostSettings:
    """Settings of a kernel host."""

    backend: str = "native"
    device: str = "cpu"
    schedules: int = 0
    workers: int = 1
    """Number of hosts on the shared cores."""
    untrusted: bool = False
    """Whether the host is separated from the reference (`harness.hosts.separation`)."""
    sanitized: bool = False
    """Whether the host has the sanitizers."""
    change: tuple[str, str, str] | None = None
    """A changed source file of the native kernels: its name, its text, and the folder of its compiled kernels."""
    hidden: tuple[str, ...] = ()
    """Folders of the run hidden from a separated host."""


class RemoteHost:
    """Runs the methods of a backend in a process of its own."""

    def __init__(
        self,
        settings: HostSettings,
        channel: Channel,
        *,
        load: float = 300.0,
        interpreter: Interpreter | None = None,
        gpu: str = "",
        takes_lock: bool = True,
    ) -> None:
        """`load`: largest number of seconds for loading the backend. `interpreter`: of the host; None: the host is a
        fork.
        `gpu`: as of `Channel.start`. `takes_lock`: whether the host takes the lock of its GPU; else another one does.

        Raises BackendError if the backend cannot be loaded.
        """
        self.settings, self.schedules, self._load = settings, settings.schedules, load
        self.autograd: Autograd = "plain"
        self.device = torch.device(settings.device)
        self.aliases: list[dict[str, str]] = []
        self.reused = False
        self._first: dict[str, tuple[str, torch.Tensor]] = {}
        """Kind of the memory, and bytes, of the first result of each method of the case."""
        self.loaded: list[dict[str, Any]] = []
        """Modules and packages loaded by the backend, in the form of `harness.backends.loading.Loaded.news`. The
        reader empties the list."""
        self._notes: list[dict[str, str]] = []
        self.loading = 0.0
        """Seconds in which the process loaded the backend."""
        self._limits: list[tuple[int, int]] = []
        """Limits of the resources of the process before the case."""
        self._variations: list[str] | None = None
        """Names of the ways of running, from the first answer of the host."""
        self._limit = CAPACITY
        self._run: RemoteRun | None = None
        self._channel, self._interpreter, self._takes_lock = channel, interpreter, takes_lock
        self.group = 0
        """Number of ranks of the joined group of the process; 0: none."""
        self._others: list[RemoteHost] = []
        """Hosts of the ranks from 1 on, which have the same parent: the end of one host ends all."""
        self._family: list[RemoteHost] = self._others
        """Hosts that end with this host."""
        self._begun: list[RemoteHost] = []
        """Hosts of ranks in the case."""
        self._ended_with_rank = False
        """Whether the process ended with the process of a further rank."""
        marker = f"narrowgauge-{secrets.token_hex(8)}"
        hidden = settings.hidden if settings.untrusted else None
        self.transport = Transport(channel, marker, interpreter, hidden, gpu)
        self.inputs = InputMemory(self.transport, self.device, f"{marker}-inputs")
        self.results = ResultMemory(self.transport, f"{marker}-results")
        self.transport.on_start = self._load_backend
        self.transport.on_end += [self.leave_run, self._end_with_ranks]
        self.transport.start()

    # ---- the process -----------------------------------------------------------------------------------------------

    @property
    def process(self) -> int | None:
        """Process id of the running host, or None."""
        return None if self.transport.process is None else self.transport.process.pid

    @property
    def orphaned(self) -> bool:
        """Whether the process that starts the hosts has ended: a backend can kill its parent."""
        return self.transport.orphaned

    def _load_backend(self) -> None:
        """Load the backend in a new process. Raises BackendError."""
        self._variations, begun, self._ended_with_rank = None, time.monotonic(), False
        self.transport.expect(self._load)
        try:
            methods = {name: asdict(method) for name, method in every_method().items()}
            answer = self.transport.ask(asdict(self.settings) | {"methods": methods})
        except HostLost as lost:
            message = f": {lost}"
            if lost.verdict == "timeout":
                place = str(lost).removeprefix(self.transport.too_late)
                message = f" did not load within {self._load:g} s{place}; a longer --timeout gives it more"
            raise BackendError(f"backend {self.settings.backend}{message}") from lost
        if "failed" in answer:
            self.close()
            raise BackendError(str(answer["failed"])[: codec.TEXT])
        try:
            with self.transport.reading("facts"):
                self._room = number_of_bytes(answer["room"])
                self.facts = self._facts(answer)
                self._notes += _sentences(answer["notes"]) + self._separation_notes()
                self.loading = time.monotonic() - begun
                if self.loading >= _SLOW:
                    sentence = f"loading the backend took {self.loading:.0f} s; each kernel host of the run loads it"
                    self._notes.append({"cause": "slow-import", "sentence": sentence})
                self.loaded += _news(answer["loaded"])
        except HostLost as lost:
            raise BackendError(f"backend {self.settings.backend}: {lost}") from lost

    def _separation_notes(self) -> list[dict[str, str]]:
        """A note if the system cannot separate the host as `--untrusted` promises."""
        process = self.transport.process
        mechanism = process.separation if process is not None and self.settings.untrusted else NAMESPACES
        if mechanism == NAMESPACES:
            return []
        return [{"cause": NOT_SEPARATED, "sentence": SENTENCES.get(mechanism, SENTENCES[NOTHING])}]

    def room(self) -> int:
        """Bytes of memory that were free when the host had loaded the backend, on its device."""
        return self._room

    def _facts(self, answer: dict[str, Any]) -> Facts:
        methods = frozenset(str(name) for name in answer["methods"]) & every_method().keys()
        declares = codec.decode_result(answer["declares"], codec.no_tensor)
        offers = codec.decode_result(answer["offers"], codec.no_tensor)
        return Facts(self.settings.backend, methods, declares, offers, takes_shuffles=answer["takes_shuffles"] is True)

    def close(self) -> None:
        """End the process and its descendants, and all ranks of its group."""
        self.transport.close()
        for other in self._others:
            other.transport.abandon()

    # ---- groups ----------------------------------------------------------------------------------------------------

    def ranks(self, count: int) -> RankedHost:
        """The hosts of a group of `count` processes, of which this host is rank 0, within a case.

        Raises Unsupported if there are too few GPUs, and BackendError if a backend cannot be loaded.
        """
        if self.settings.untrusted or self.settings.sanitized:
            option = "--untrusted" if self.settings.untrusted else "--sanitize"
            raise Unsupported(f"a group of processes is not run with {option}")
        gpus = gpus_of_ranks(count) if self.device.type == "cuda" else [""] * count
        if len(gpus) < count:
            raise Unsupported(f"{count} ranks need {count} GPUs, and {len(gpus)} are visible")
        while len(self._others) < count - 1:
            self._others.append(self._of_rank(gpus[len(self._others) + 1]))
        self._begun = self._others[: count - 1]
        for other in self._begun:
            other.begin_case(self.transport.deadline - time.monotonic(), self._limit)
        hosts = [self, *self._begun]
        pids = [pid for host in hosts if (pid := host.process) is not None]
        for host in hosts:
            if host.transport.process is not None:
                host.transport.process.left.expect(*pids)
        ranked = RankedHost(hosts)
        ranked.join()
        return ranked

    def _of_rank(self, gpu: str) -> RemoteHost:
        """A new host with the same settings, on the GPU `gpu`."""
        host = RemoteHost(
            self.settings, self._channel, load=self._load, interpreter=self._interpreter, gpu=gpu, takes_lock=False
        )
        host._family = [self, *self._others]
        return host

    def join(self, rank: int, count: int, meeting: int) -> None:
        """Join a group. `meeting`: descriptor of the file in which its processes meet."""
        message = {"op": "join", "rank": rank, "count": count}
        _raise_error(self.transport.ask(message, [meeting]))
        self.group = count

    def _end_with_ranks(self) -> None:
        self.group = 0
        for other in self._family:
            other._ended_with_rank = True

    def _locks(self) -> bool:
        """Whether the host has to take the lock of the GPU for its work."""
        return self._takes_lock and needs_lock(self.device.type)

    def _free(self) -> None:
        """Give all shared memory back."""
        self.inputs.free()
        self.results.free()
        if self.process is not None:
            self.transport.post({"op": "forget"})

    # ---- cases -----------------------------------------------------------------------------------------------------

    def begin_case(self, seconds: float, memory: int) -> None:
        """Begin a case of `seconds` at most, whose results have `memory` bytes at most."""
        self._limit, self.aliases, self.reused, self._first = memory, [], False, {}
        if self._ended_with_rank:
            self.transport.abandon()
        self._begun = []
        process = self.transport.start()
        process.printed, self._limits = 0, process.limits()
        self.transport.expect(seconds)
        self.transport.post({"op": "case"})

    def end_case(self) -> CaseEnd:
        """End a case. A host whose GPU does not answer is ended."""
        notes, self._notes = self._notes, []
        process = self.transport.process
        if process is None:
            return CaseEnd(notes=notes)
        notes += [note for other in self._begun for note in other.end_case().notes]
        self.transport.deadline = max(self.transport.deadline, time.monotonic() + _SETTLE)
        self.leave_run()
        self.inputs.pending = 0
        answer = self.transport.ask({"op": "settle", "lock": self._locks()})
        with self.transport.reading("an end of the case"):
            gpu_error = str(answer["gpu_error"])[: codec.TEXT]
            peak = number_of_bytes(answer["peak"])
            end = CaseEnd(gpu_error, answer["usable"] is True, peak, notes + _sentences(answer["notes"]))
            self.loaded += _news(answer["loaded"])
            harm = self._harm(process, answer)
        end.notes += [{"cause": cause, "sentence": f"the case left {sentence}"} for cause, sentence in harm.items()]
        if left := process.left.new():
            names = ", ".join(f"{process.name} ({process.pid})" for process in left[:5])
            sentence = f"the case left {len(left)} process{'es' * (len(left) > 1)} behind: {names}"
            end.notes.append({"cause": "leaves-processes", "sentence": sentence})
        process.look_for_files()
        process.forward()
        if max(self.inputs.touched, self.results.touched) > KEPT:
            self._free()
        if not end.usable or harm:
            self.close()
        return end

    def _harm(self, process: HostProcess, answer: dict[str, Any]) -> dict[str, str]:
        """Sentences by causes: harm to later cases, left by the case in its process. The process is ended."""
        found = {}
        if self.inputs.replaced({int(number): int(place) for number, place in answer["inputs"]}, process.memory):
            found["leaves-mappings"] = "other memory in place of its inputs"
        limits = zip(chain(*process.limits()), chain(*self._limits), strict=False)
        if any(_lower(now, before) for now, before in limits):
            found["leaves-limits"] = "lower limits of resources (setrlimit)"
        if answer["timers"]:
            found["leaves-timers"] = "a timer that sends a signal (setitimer)"
        return found

    def seed(self, random: object) -> None:
        """Seed torch's generators in the host."""
        message = {"op": "seed", "random": repr(random)}
        if self._run is not None:
            self._run.script.append(message)
        self.transport.post(message)

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running."""
        if self._variations is None:
            answer = self.transport.ask({"op": "variations", "device": str(device)})
            if "error" in answer:
                raise BackendError(str(answer["error"])[: codec.TEXT])
            with self.transport.reading("variations"):
                self._variations = [str(name) for name in answer["names"]]
        return self._variations

    # ---- calls -----------------------------------------------------------------------------------------------------

    def run_module(self, plan: Plan, given: Mapping[str, torch.Tensor]) -> list[Step]:
        """The steps of a module."""
        steps = self.call("run_module", plan, dict(given))
        if not isinstance(steps, list):
            raise BackendError(f"the steps of {plan.kind} cannot be read")
        return steps

    def lock(self) -> AbstractContextManager[None]:
        """Nothing: the host takes the lock of the GPU for the time of its own work."""
        return nullcontext()

    def prepare(self, inputs: Tensors, home: torch.device, poison: int) -> RemoteRun:
        """Place inputs of the device `home` between guard zones, in shared memory."""
        return RemoteRun(self, inputs, home, poison)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method, in memory of the judge."""
        run, memory = self._run, self.inputs
        if run is None:
            memory.reset()
        homes: list[torch.device] = []
        spans: list[dict[str, Any]] = []
        placed: list[torch.Tensor] = []

        def place_of(tensor: torch.Tensor) -> list[Any]:
            number, byte = None, 0
            if tensor.numel():
                homes.append(tensor.device)
                found = memory.slot(tensor)
                if found is None:
                    span, copies = memory.place({"an argument": tensor}, run.poison if run else POISON[0], memory.slots)
                    assert span is not None
                    spans.append(span)
                    placed.append(tensor)
                    found = memory.slot(copies["an argument"])
                    assert found is not None
                number, byte = found[0].number, found[1]
            return [number, byte, dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())]

        encoded = codec.encode_argument([list(arguments), options], place_of)
        home = run.home if run else homes[0] if homes else torch.device("cpu")
        kind = memory_kind(home, self.device)
        self.results.open(kind)
        message = {
            "op": "call", "method": method, "spans": spans, "home": kind, "arguments": encoded,
            "autograd": self.autograd, "lock": self._locks(),
        }  # fmt: skip
        answer = self._within_limit(method, self.transport.ask(message))
        if "need" in answer:
            self.results.open(kind, answer["need"])
            answer = self._within_limit(method, self.transport.ask({"op": "deliver", "home": kind}))
        with self.transport.reading("a result"):
            _raise_error(answer)
            self.aliases += _sentences(answer["aliases"])
            result, content = self.results.read(answer, kind, self._limit, home)
            self.reused |= answer.get("reused") is True
        if method in self.facts.methods:  # no steps of a module
            self._first.setdefault(method, (kind, content))
        if run is not None:
            run.script.append(Call(message, answer, content, placed))
        return result

    def _within_limit(self, method: str, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer whose results fit into the memory of the case. Raises HostLost."""
        size = answer.get("need", answer.get("used"))
        if size is None or (isinstance(size, int) and size <= self._limit):
            return answer
        words = f"{method} gave results of {size!r} bytes"[: codec.TEXT]
        raise self.transport.lose("error", f"{words}; results of this case have at most {self._limit}")

    def overwritten(self) -> list[str]:
        """As `Host.overwritten`: the judge compares the bytes."""
        found = []
        for method, (kind, then) in self._first.items():
            request = {"op": "first", "method": method, "home": kind, "lock": self._locks()}
            answer = self.transport.ask(request)
            with self.transport.reading("a first result"):
                same = answer["used"] == then.numel() and torch.equal(self.results.bytes(kind, then.numel()), then)
            found += [] if same else [method]
        return found

    # ---- runs ------------------------------------------------------------------------------------------------------

    def begin(self, run: RemoteRun, variation: int) -> None:
        """Begin a run."""
        self._run, self.inputs.slots = run, run.slots
        self.transport.post({"op": "begin", "variation": variation, "poison": run.poison, "span": run.span})

    def end_run(self) -> tuple[float, list[str], list[str]]:
        """End a run. Gives its seconds, and the sentences of its violations."""
        written = self._written_zones()
        self.leave_run()
        end = self.transport.ask({"op": "end", "lock": self._locks()})
        with self.transport.reading("an end of the run"):
            seconds = float(end["seconds"])
            if not 0 <= seconds < 1e9:
                raise ValueError(f"{seconds} seconds")
            outside, changed = ([str(text)[: codec.TEXT] for text in end[key]] for key in ("outside", "changed"))
        return seconds, outside or written, changed  # a host that says nothing proves nothing

    def _written_zones(self) -> list[str]:
        """Sentences on overwritten guard zones of the results of the run, which this process reads in the memory of the
        host."""
        process, run, written = self.transport.process, self._run, list[str]()
        if process is None or run is None:
            return written
        calls = [entry for entry in run.script if isinstance(entry, Call)]
        with self.transport.reading("guard zones"):
            for call, place in ((entry, place) for entry in calls for place in entry.answer["guarded"]):
                begin, size = map(number_of_bytes, place)
                for side, start in (("before", begin - ZONE), ("behind", begin + size)):
                    zone = process.memory(start, ZONE)
                    if zone is not None and (count := len(zone) - zone.count(run.poison)):
                        written.append(f"{count} bytes {side} a result of {call.message['method']} were written")
        return written

    def leave_run(self) -> None:
        """Forget the run, also after an exception."""
        self._run, self.inputs.slots = None, []

    def repeat(
        self, kind: str, count: int, runs: Sequence[tuple[PreparedRun, PreparedRun]], call: Callable[[Tensors], Tensors]
    ) -> list[list[int]]:
        """As `Host.repeat`: the host runs the recorded calls, and the judge compares their bytes."""
        pairs = [(new, old) for new, old in runs if isinstance(new, RemoteRun) and isinstance(old, RemoteRun)]
        scripts = [[entry for entry in finished.script if isinstance(entry, Call)] for _, finished in pairs]
        if any(len(script) != len(pair[1].script) for script, pair in zip(scripts, pairs, strict=True)):
            raise BackendError("calls with random bits of the backend cannot be repeated")
        described = all_descriptions()
        scripts = [[e for e in script if e.message["method"] not in described] for script in scripts]
        home = scripts[0][0].message["home"]
        expected = [torch.cat([entry.bytes for entry in script]) for script in scripts]
        total = count * sum(part.numel() for part in expected)
        self.results.open(home, total)
        # Other bytes than those expected: a host that does not write a result gives a wrong result.
        self.results.bytes(home, total).copy_(torch.cat([~part.repeat(count) for part in expected]))
        settle_copies(home)
        messages = []
        for (prepared, _), script in zip(pairs, scripts, strict=True):
            placed = [tensor for entry in script for tensor in entry.placed]
            # Slots get the numbers that they had in the finished run.
            spans = [
                self.inputs.place({"an argument": tensor}, prepared.poison, prepared.slots)[0] for tensor in placed
            ]
            entries = [
                {**entry.message, "result": entry.answer["result"], "used": entry.bytes.numel()} for entry in script
            ]
            messages.append({"spans": [prepared.span, *spans], "script": entries})
        request = {"op": "repeat", "kind": kind, "count": count, "home": home, "runs": messages}
        try:
            answer = self.transport.ask({**request, "lock": self._locks()})
        finally:
            self.inputs.pending = max(0, self.inputs.pending - len(pairs))
        with self.transport.reading("repeated calls"):
            _raise_error(answer)
            wrong = [{int(number) for number in numbers} for numbers in answer["other_forms"]]
            memory, start = self.results.bytes(home, total), 0
            for numbers, part in zip(wrong, expected, strict=True):
                stop = start + count * part.numel()
                different = (memory[start:stop].view(count, part.numel()) != part).any(1)
                numbers |= {1 + int(number) for number in different.nonzero().flatten()}
                start = stop
        return [sorted(numbers) for numbers in wrong]


@dataclass
class Call:
    """A call of a run."""

    message: dict[str, Any]
    answer: dict[str, Any]
    bytes: torch.Tensor
    """The bytes of the result."""
    placed: list[torch.Tensor]
    """Arguments beside the inputs of the run, for example results of earlier calls: the judge placed them for the
    call."""


class RemoteRun:
    """A prepared run in a kernel host."""

    def __init__(self, host: RemoteHost, inputs: Tensors, home: torch.device, poison: int) -> None:
        self._host, self.home, self.poison, self._inputs = host, home, poison, inputs
        host.inputs.reset()
        host.inputs.pending += 1
        self.slots: list[PlacedSlot] = []
        self.span, self._given = host.inputs.place(inputs, poison, self.slots)
        self.seconds = 0.0
        self._violations: list[list[str]] = [[], []]
        self.script: list[Call | dict[str, Any]] = []
        """Calls and seeds of the run."""

    @contextmanager
    def running(self, variation: int) -> Iterator[Tensors]:
        """Run under a variation, by number."""
        host = self._host
        try:
            host.begin(self, variation)
            yield self._given
            self.seconds, *self._violations = host.end_run()
        finally:
            host.inputs.pending = max(0, host.inputs.pending - 1)
            host.leave_run()

    def keep(self, outputs: Mapping[str, torch.Tensor]) -> Tensors:
        """The results: the judge's copies."""
        return dict(outputs)

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""
        outside, changed = self._violations
        if self.span is not None and self.span["kind"] == "cuda":
            more, written = self._host.inputs.check_slots(self.span, self._inputs, self._given, self.poison)
            outside, changed = outside + more, changed + written
        return outside, changed


def _lower(limit: int, other: int) -> bool:
    """Whether a limit of a resource is lower than another. -1: no limit."""
    return limit != other and (other < 0 or 0 <= limit < other)


def _raise_error(answer: dict[str, Any]) -> None:
    """Raise Unsupported or BackendError if an answer says so."""
    if "unsupported" in answer:
        raise Unsupported(str(answer["unsupported"])[: codec.TEXT])
    if "error" in answer:
        raise BackendError(str(answer["error"])[: codec.TEXT])


def _sentences(entries: Any) -> list[dict[str, str]]:
    """Causes and sentences of an answer, the first `_NOTES` of them, cut. Raises KeyError or TypeError for any further
    entries."""
    kept = [{key: str(entry[key])[:_NOTE] for key in ("cause", "sentence")} for entry in entries[:_NOTES]]
    if len(entries) > _NOTES:
        kept.append({"cause": "more-notes", "sentence": f"{len(entries) - _NOTES} more notes of the case are left out"})
    return kept


def _news(loaded: Any) -> list[dict[str, Any]]:
    """Modules and packages of an answer, or empty. Raises KeyError or TypeError for an answer of a wrong form."""
    if not loaded:
        return []
    names = {key: [str(name)[:_NOTE] for name in loaded[key][:_NAMES]] for key in ("files", "packages")}
    return [{**names, "folder": str(loaded["folder"])[: codec.TEXT]}]


@contextmanager
def hosted_backend(
    name: str, device: str = "cpu", *, seconds: float = 300.0, settings: HostSettings | None = None,
    channel: Channel | None = None,
) -> Iterator[Backend]:  # fmt: skip
    """The backend called `name` in a kernel host, for commands that judge in their own process. `seconds`: for all
    calls together, until the next `begin_case`. `channel`: to the starter, in a fork of the server; None: a new one.

    Raises BackendError if the backend cannot be loaded. A call raises HostLost if the host ends.
    """
    with nullcontext(channel) if channel else closing(Channel(starter().connect())) as hosts:
        host = RemoteHost(settings or HostSettings(name, device), hosts)
        try:
            host.begin_case(seconds, room(device))
            yield Backend(host)
        finally:
            host.close()
