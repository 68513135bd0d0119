"""A kernel host, as seen by its judge.

The judge places inputs in shared memory, sends calls, and copies the results out of the shared memory before it looks
at them. A host that ends, hangs or writes bytes that are no message costs the case that runs: `HostLost`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.guarded_memory import (
    ALIGNMENT,
    ZONE,
    contiguous_strides,
    copy_elements,
    element_bytes,
    element_extent,
    padded_size,
    tensor_at,
)
from narrowgauge.harness.backends.host import CaseEnd, Facts, HostLost, PreparedRun, Tensors
from narrowgauge.harness.backends.results import BackendError, Unsupported, dtype_name
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.cases.operations import all_descriptions, every_method
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.frames import Connection, FrameError, pair, readable
from narrowgauge.harness.hosts.left_processes import LeftProcesses
from narrowgauge.harness.hosts.memory import CAPACITY, KEPT, GpuMemory, SharedFile, copy_in, equal_bytes, fill
from narrowgauge.harness.hosts.output import Stack, StackFile, forward
from narrowgauge.harness.hosts.starter import Channel, StarterError, starter
from narrowgauge.harness.machine.gpu_lock import needs_lock
from narrowgauge.harness.machine.process import ending
from narrowgauge.harness.machine.timing import count_as_other

if TYPE_CHECKING:
    from narrowgauge.harness.backends.module_driver import Plan, Step

_END = 5.0
"""Seconds that a host has to end by itself after it closed its connection."""
_FAR = 1 << 20
"""Bytes from the begin of a storage to a tensor, from which on the slot does not begin with the storage."""
BEHIND = 1 << 16
"""Bytes of poison behind the guard zones of an input. A kernel that reads on to the end of a tile of 128 rows reads
behind the guard zone. Bytes of another input or of an earlier case there may be the same in every run."""
_VIOLATIONS = ("outside", "changed")
_SMALLEST = 1 << 26
"""Bytes of new shared memory of a GPU."""


class Interpreter(Protocol):
    """An interpreter of its own for a host."""

    variables: dict[str, str]
    """Environment variables of its start."""

    def finding(self, process: int) -> str:
        """Reason of the interpreter for the end of a process. Empty without a reason."""


@dataclass(frozen=True)
class HostSettings:
    """Settings of a kernel host."""

    backend: str = "native"
    device: str = "cpu"
    schedules: int = 0
    workers: int = 1
    """Number of hosts that share the cores."""
    untrusted: bool = False
    """Whether the reference is blocked in the host."""
    sanitized: bool = False
    """Whether the host has the sanitizers."""
    change: tuple[str, str, str] | None = None
    """A changed source file of the native kernels: its name, its text, and the folder of its compiled kernels."""


class Region:
    """Shared memory for inputs, of which the first `used` bytes are in use."""

    def __init__(self, number: int, memory: SharedFile | GpuMemory) -> None:
        self.number, self.memory, self.used = number, memory, 0

    @property
    def room(self) -> int:
        """Bytes that are not in use."""
        return self.memory.capacity - self.used


class RemoteHost:
    """Runs the methods of a backend in a process of its own."""

    def __init__(
        self, settings: HostSettings, channel: Channel, *, load: float = 300.0, interpreter: Interpreter | None = None
    ) -> None:
        """`load`: seconds that the backend may take to load. `interpreter`: of the host; None: the host is a fork.

        Raises BackendError if the backend cannot be loaded.
        """
        self.settings, self.schedules = settings, settings.schedules
        self.device = torch.device(settings.device)
        self.aliases: list[dict[str, str]] = []
        self.process: int | None = None
        self.orphaned = False
        """Whether the process that starts the hosts has ended: a backend can kill its parent."""
        self._channel, self._load, self._interpreter = channel, load, interpreter
        self._marker = f"narrowgauge-{secrets.token_hex(8)}"
        self._regions: list[Region] = []
        """Memory of the inputs that the host has opened."""
        self._results: dict[str, SharedFile | GpuMemory] = {}
        """Memory of the results that the host has opened, by its kind."""
        self._region_count = 0
        self._touched = 0
        """Largest number of bytes of inputs or of results that the case used."""
        self._notes: list[dict[str, str]] = []
        self.loaded: list[dict[str, Any]] = []
        """Modules and packages that the backend has loaded, as `harness.backends.loading.Loaded.news` gives them. The
        reader empties the list."""
        self._outbox: list[dict[str, Any]] = []
        self._variations: list[str] | None = None
        """Names of the ways of running, from the first answer of the host."""
        self._problem = ""
        """Reason why the backend cannot be loaded."""
        self._deadline, self._limit, self._seconds = float("inf"), CAPACITY, load
        self._poison = POISON[0]
        self.pending = 0
        """Prepared runs that have not ended: their inputs stay in the shared memory."""
        self._own_slots: list[PlacedSlot] = []
        """Slots of a call outside of runs."""
        self._run: RemoteRun | None = None
        self._recorded: RemoteRun | None = None
        """The run whose calls are in `_script`."""
        self._script: list[Call | dict[str, Any]] = []
        """Calls and seeds of the last run that was not replayed."""
        self._replay: list[Call | dict[str, Any]] | None = None
        """Calls and seeds that the host has replayed for this run. None: the run goes call by call."""
        self._replay_end: dict[str, Any] | None = None
        self._start()

    # ---- the process -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the process and load the backend. Raises BackendError, and again if it was raised before."""
        if self._problem:
            raise BackendError(self._problem)
        try:
            self._launch()
        except BackendError as error:
            self._problem = str(error)
            raise

    def _launch(self) -> None:
        ours, theirs = pair()
        self._output, written = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        self._stacks = StackFile()
        self._connection = Connection(ours)
        try:
            variables = self._interpreter.variables if self._interpreter else None
            descriptors = [theirs.fileno(), written, self._stacks.descriptor]
            self.process = self._channel.start(descriptors, environment=variables)
        except StarterError as error:
            self._connection.close()
            self._stacks.close()
            os.close(self._output)
            self.orphaned = True
            raise BackendError(str(error)) from error
        finally:
            theirs.close()
            os.close(written)
        self._exit: int | None = None
        self._asked = 0
        with suppress(OSError, AttributeError):
            self._exit = os.pidfd_open(self.process)
        self._printed = 0
        self._outbox, self._variations = [], None
        self._left = LeftProcesses(self.process, self._marker)
        self._deadline = time.monotonic() + self._load
        try:
            methods = {name: asdict(method) for name, method in every_method().items()}
            answer = self._ask(asdict(self.settings) | {"methods": methods})
        except HostLost as lost:
            message = f": {lost}"
            if lost.verdict == "timeout":
                place = str(lost).removeprefix(self._too_late)
                message = f" did not load within {self._load:g} s{place}; a longer --timeout gives it more"
            raise BackendError(f"backend {self.settings.backend}{message}") from lost
        if "failed" in answer:
            self.close()
            raise BackendError(str(answer["failed"])[: codec.TEXT])
        try:
            with self._reading("facts"):
                self._room = _byte(answer["room"])
                self.facts = self._facts(answer)
                self._notes += _sentences(answer["notes"])
                self.loaded += _news(answer["loaded"])
        except HostLost as lost:
            raise BackendError(f"backend {self.settings.backend}: {lost}") from lost

    def room(self) -> int:
        """Bytes of memory that were free when the host had loaded the backend, on its device."""
        return self._room

    def _facts(self, answer: dict[str, Any]) -> Facts:
        methods = frozenset(str(name) for name in answer["methods"]) & every_method().keys()
        declares = codec.decode_result(answer["declares"], codec.no_tensor)
        offers = codec.decode_result(answer["offers"], codec.no_tensor)
        return Facts(self.settings.backend, methods, declares, offers, takes_shuffles=answer["takes_shuffles"] is True)

    def close(self, *, wait: float = 0.0, keeps_stacks: bool = False) -> int | None:
        """End the process, after `wait` seconds, and its descendants. Gives its exit status. `keeps_stacks`: do not
        close the file of its stacks."""
        if self.process is None:
            return None
        self._forward()
        self._connection.close()
        os.close(self._output)
        if not keeps_stacks:
            self._stacks.close()
        if self._exit is not None:
            os.close(self._exit)
        pid, self.process = self.process, None
        self._run, self.pending = None, 0
        self._free()
        try:
            return self._channel.end(pid, wait=wait)
        except StarterError:
            self.orphaned = True
            return None

    def _lose(self, verdict: str, message: str = "", *, cause: str = "") -> HostLost:
        """The exception for a host that is ended now. Without a message: how the process ended. A host that crashed or
        gave no result says in which line of the user it was."""
        pid = self.process
        if verdict == "timeout" and pid is not None:
            self._stacks.ask(pid)
        status = self.close(wait=0.0 if message else _END, keeps_stacks=True)
        stack = self._stacks.read() if verdict in ("crash", "timeout") else Stack()
        self._stacks.close()
        if self._interpreter is not None and pid is not None and (found := self._interpreter.finding(pid)):
            return HostLost("crash", f"sanitizer: {found}")
        if self.orphaned and not message:
            return HostLost(verdict, "the process died, and so did the process that starts kernel hosts")
        message = message or f"the process died ({ending(status)})"
        place = f" at {stack.place}" if stack.place else ""
        return HostLost(verdict, f"{message}{place}", cause=cause, stack=stack.frames)

    # ---- messages --------------------------------------------------------------------------------------------------

    def _post(self, message: dict[str, Any]) -> None:
        """Send a message without an answer, together with the next message: each wakes the host."""
        if self.process is None:
            self._start()
        self._outbox.append(message)

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message without an answer."""
        if self.process is None:
            self._start()
        messages, self._outbox = [*self._outbox, message], []
        try:
            if descriptors and len(messages) > 1:
                self._connection.send(*messages[:-1], deadline=self._deadline)
                messages = messages[-1:]
            self._connection.send(*messages, descriptors=descriptors, deadline=self._deadline)
        except TimeoutError:
            raise self._lose("timeout", self._too_late) from None
        except FrameError:
            raise self._lose("crash") from None

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message. Raises HostLost if there is none."""
        asked = time.monotonic()
        self._asked += 1
        self._send(message | {"id": self._asked})
        watched = [self._connection, self._output]
        if self._exit is not None:
            watched.append(self._exit)
        while True:
            ready = readable(watched, self._deadline)
            if not ready:
                raise self._lose("timeout", self._too_late)
            if self._output in ready and not self._forward():
                watched.remove(self._output)
            if self._connection in ready:
                try:
                    answer, descriptors = self._connection.receive(deadline=self._deadline)
                except TimeoutError:
                    raise self._lose("timeout", self._too_late) from None
                except FrameError as error:
                    closed = "clos" in str(error)
                    words = "" if closed else f"the backend wrote into the connection of its process: {error}"
                    raise self._lose("crash", words) from None
                for descriptor in descriptors:
                    os.close(descriptor)
                waited = answer.get("waited")
                if isinstance(waited, float) and 0 < waited < time.monotonic() - asked:
                    count_as_other(waited)
                if "fault" in answer:
                    raise self._write_to_input(answer["fault"])
                if answer.get("id") != self._asked:
                    raise self._lose("crash", "the backend wrote into the connection of its process: a false answer")
                return answer
            if self._exit in ready:
                raise self._lose("crash")

    @contextmanager
    def _reading(self, noun: str) -> Iterator[None]:
        """Read an answer. The host is ended if the answer cannot be read."""
        try:
            yield
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            words = f"the process of the backend sent {noun} that cannot be read: {type(error).__name__}: {error}"
            raise self._lose("crash", words[: codec.TEXT]) from error

    @property
    def _too_late(self) -> str:
        return f"no result after {self._seconds:g} s"

    def _forward(self) -> bool:
        """Print what the host printed. Returns whether more may follow."""
        self._printed, open_ = forward(self._output, self._printed)
        return open_

    def _write_to_input(self, offset: Any) -> HostLost:
        """The end of a host that wrote to an input."""
        place = "its inputs"
        for slot in self._slots:
            byte = offset - slot.start if isinstance(offset, int) else -ZONE - 1
            if slot.region.memory.kind == "cpu" and -ZONE <= byte < slot.size + ZONE:
                side = "before" if byte < 0 else "behind"
                inside = 0 <= byte < slot.size
                place = f"{slot.name}, at byte {byte} of {slot.size}" if inside else f"memory {side} {slot.name}"
        return self._lose("error", f"writes to its input: {place}", cause="changes-its-input")

    # ---- cases -----------------------------------------------------------------------------------------------------

    def begin_case(self, seconds: float, memory: int) -> None:
        """Begin a case of `seconds` at most, whose results have `memory` bytes at most."""
        self._seconds, self._limit = seconds, memory
        self.aliases = []
        self._printed = 0
        if self.process is None:
            self._start()
        self._deadline = time.monotonic() + seconds
        self._post({"op": "case"})

    def end_case(self) -> CaseEnd:
        """End a case. A host whose GPU does not answer is ended."""
        notes, self._notes = self._notes, []
        if self.process is None:
            return CaseEnd(notes=notes)
        self._deadline = max(self._deadline, time.monotonic() + _END)
        self._run, self.pending, self._script, self._recorded = None, 0, [], None
        answer = self._ask({"op": "settle", "lock": needs_lock(self.device.type)})
        with self._reading("an end of the case"):
            gpu_error = str(answer["gpu_error"])[: codec.TEXT]
            end = CaseEnd(
                gpu_error, answer["usable"] is True, _byte(answer["peak"]), notes + _sentences(answer["notes"])
            )
            self.loaded += _news(answer["loaded"])
        if left := self._left.new():
            names = ", ".join(f"{process.name} ({process.pid})" for process in left[:5])
            sentence = f"the case left {len(left)} process{'es' * (len(left) > 1)} behind: {names}"
            end.notes.append({"cause": "leaves-processes", "sentence": sentence})
        self._forward()
        if self._touched > KEPT:
            self._free()
        if not end.usable:
            self.close()
        return end

    def seed(self, random: object) -> None:
        """Seed torch's generators in the host."""
        message = {"op": "seed", "random": repr(random)}
        if self._replay is not None:
            if self._replay and self._replay.pop(0) == message:
                return
            self._leave_replay()
        elif self._run is not None:
            self._script.append(message)
        self._post(message)

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running."""
        if self._variations is None:
            answer = self._ask({"op": "variations", "device": str(device)})
            if "error" in answer:
                raise BackendError(str(answer["error"])[: codec.TEXT])
            with self._reading("variations"):
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
        run = self._run
        if run is None:
            self.reset()
        homes: list[torch.device] = []
        spans: list[dict[str, Any]] = []
        placed: list[torch.Tensor] = []

        def place_of(tensor: torch.Tensor) -> list[Any]:
            number, byte = None, 0
            if tensor.numel():
                homes.append(tensor.device)
                found = self._slot(tensor)
                if found is None:
                    span, copies = self.place({"an argument": tensor}, self._poison, self._slots)
                    assert span is not None
                    spans.append(span)
                    placed.append(tensor)
                    found = self._slot(copies["an argument"])
                    assert found is not None
                number, byte = found[0].number, found[1]
            return [number, byte, dtype_name(tensor.dtype), list(tensor.shape), list(tensor.stride())]

        encoded = codec.encode_argument([list(arguments), options], place_of)
        home = run.home if run else homes[0] if homes else torch.device("cpu")
        kind = self._kind(home)
        self._open_results(kind)
        message = {
            "op": "call", "method": method, "spans": spans, "home": kind, "arguments": encoded,
            "lock": needs_lock(self.device.type),
        }  # fmt: skip
        entry = self._replayed(message)
        answer = self._ask(message) if entry is None else entry.answer
        while (need := answer.get("need", answer.get("used"))) is not None:
            if not isinstance(need, int) or need > self._limit:
                raise self._lose(
                    "error", f"{method} gave results of {need} bytes; results of this case have at most {self._limit}"
                )
            if "need" not in answer:
                break
            self._open_results(kind, need)
            answer = self._ask({"op": "deliver", "home": kind})
        with self._reading("a result"):
            return self._result(Call(message, answer, placed=placed), entry, home)

    def _result(self, recorded: Call, replayed: Call | None, home: torch.device) -> Any:
        """The result of a call, from its answer. `replayed`: the call of the first run with the same arguments."""
        message, answer = recorded.message, recorded.answer
        if replayed is None and self._run is not None:
            self._script.append(recorded)
        if "unsupported" in answer:
            raise Unsupported(str(answer["unsupported"])[: codec.TEXT])
        if "error" in answer:
            raise BackendError(str(answer["error"])[: codec.TEXT])
        self.aliases += _sentences(answer["aliases"])
        memory, start = self._results[message["home"]].bytes, _byte(answer["first"])
        if replayed is not None and replayed.first_answer is not None:
            first = replayed.first_answer
            fits = start + replayed.bytes.numel() <= memory.numel()
            if first.get("result") == answer["result"] and fits and equal_bytes(memory, start, replayed.bytes):
                return replayed.result  # the same bytes as in the first run
        reader = _Reader(memory, start, _byte(answer["used"]), self._limit, home)
        recorded.result = codec.decode_result(answer["result"], reader.tensor)
        recorded.bytes = reader.private
        self._touched = max(self._touched, start + reader.private.numel())
        return recorded.result

    # ---- runs ------------------------------------------------------------------------------------------------------

    def begin(self, run: RemoteRun, variation: int) -> None:
        """Begin a run. If it is a repetition of the run before, the host replays the calls of that run."""
        message = {"variation": variation, "poison": run.poison, "span": run.span}
        script = self._script if variation and run.same_as(self._recorded) else []
        self._run, self._poison, self._replay, self._replay_end = run, run.poison, None, None
        if not script or any(isinstance(entry, Call) and entry.message["spans"] for entry in script):
            self._script, self._recorded = [], run
            run.script = self._script
            self._post({"op": "begin", **message})
            return
        calls = [entry.message if isinstance(entry, Call) else entry for entry in script]
        answer = self._ask({"op": "replay", "script": calls, "lock": needs_lock(self.device.type), **message})
        with self._reading("a replay"):
            answers = iter([dict(found) for found in answer["answers"]])
            self._replay_end = dict(answer["end"])
        self._replay = []
        for entry in script:
            if not isinstance(entry, Call):
                self._replay.append(entry)
            elif (found := next(answers, None)) is not None:
                self._replay.append(Call(entry.message, found, entry.answer, entry.result, entry.bytes))
        with self._reading("a replay"):
            calls_again = [entry for entry in self._replay if isinstance(entry, Call)]
            if len(self._replay) == len(script) and all(map(self._same_result, calls_again)):
                run.repeated = self._recorded
                for entry in calls_again:
                    self.aliases += _sentences(entry.answer["aliases"])

    def _same_result(self, replayed: Call) -> bool:
        """Whether a replayed call gave the bytes of the first run. False also for an error."""
        answer, first = replayed.answer, replayed.first_answer
        if first is None or "result" not in answer or answer["result"] != first.get("result"):
            return False
        memory, start = self._results[replayed.message["home"]].bytes, _byte(answer["first"])
        fits = start + replayed.bytes.numel() <= memory.numel()
        return fits and answer["used"] == first["used"] and equal_bytes(memory, start, replayed.bytes)

    def _replayed(self, message: dict[str, Any]) -> Call | None:
        """The replayed call with these arguments. None: the call has not been replayed."""
        if self._replay is None:
            return None
        entry = self._replay.pop(0) if self._replay else None
        if isinstance(entry, Call) and entry.message == message:
            return entry
        self._leave_replay()
        return None

    def _leave_replay(self) -> None:
        """Run the rest of a run call by call: the calls differ from those of the first run."""
        assert self._run is not None
        self._replay = None
        self._post({"op": "begin", "variation": self._run.variation, "poison": self._poison, "span": self._run.span})

    def end_run(self) -> tuple[float, list[str], list[str]]:
        """End a run. Gives its seconds, and the sentences of its violations."""
        replayed, diverged = self._replay_end, self._replay is None
        self.leave_run()
        ends = [] if replayed is None else [replayed]
        if replayed is None or diverged:
            ends.insert(0, self._ask({"op": "end", "lock": needs_lock(self.device.type)}))
        with self._reading("an end of the run"):
            seconds = float(ends[0]["seconds"])
            if not 0 <= seconds < 1e9:
                raise ValueError(f"{seconds} seconds")
            outside, changed = ([str(text)[: codec.TEXT] for end in ends for text in end[key]] for key in _VIOLATIONS)
        return seconds, outside, changed

    def leave_run(self) -> None:
        """Forget the run, also after an exception."""
        self._run, self._poison, self._replay, self._replay_end = None, POISON[0], None, None

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
        self._open_results(home, count * sum(part.numel() for part in expected))
        messages = []
        for (prepared, _), script in zip(pairs, scripts, strict=True):
            placed = [tensor for entry in script for tensor in entry.placed]
            # Slots get the numbers that they had in the finished run.
            spans = [self.place({"an argument": tensor}, prepared.poison, prepared.slots)[0] for tensor in placed]
            entries = [
                {**entry.message, "result": entry.answer["result"], "used": entry.bytes.numel()} for entry in script
            ]
            messages.append({"spans": [prepared.span, *spans], "script": entries})
        request = {"op": "repeat", "kind": kind, "count": count, "home": home, "runs": messages}
        try:
            answer = self._ask({**request, "lock": needs_lock(self.device.type)})
        finally:
            self.pending = max(0, self.pending - len(pairs))
        with self._reading("repeated calls"):
            if "unsupported" in answer:
                raise Unsupported(str(answer["unsupported"])[: codec.TEXT])
            if "error" in answer:
                raise BackendError(str(answer["error"])[: codec.TEXT])
            wrong = [{int(number) for number in numbers} for numbers in answer["other_forms"]]
            memory, start = self._results[home].bytes, 0
            for numbers, part in zip(wrong, expected, strict=True):
                stop = start + count * part.numel()
                different = (memory[start:stop].view(count, part.numel()) != part).any(1)
                numbers |= {1 + int(number) for number in different.nonzero().flatten()}
                start = stop
        self._touched = max(self._touched, start)
        return [sorted(numbers) for numbers in wrong]

    # ---- shared memory ---------------------------------------------------------------------------------------------

    def _kind(self, home: torch.device) -> str:
        """Kind of the shared memory for tensors of a device. Without CUDA IPC tensors of a GPU are copied to a CPU."""
        return "cuda" if home.type == "cuda" and self.device.type == "cuda" and gpu_memory_is_shared() else "cpu"

    def _region(self, kind: str, size: int) -> Region:
        """Memory of a kind with room for `size` bytes of inputs, opened by the host."""
        for region in self._regions:
            if region.memory.kind == kind and region.room >= size:
                return region
        memory = self._new_memory(kind, "inputs", size)
        self._region_count += 1
        self._regions.append(Region(self._region_count, memory))
        self._send(
            {"op": "inputs", "number": self._region_count, "memory": memory.description}, list(memory.descriptors)
        )
        return self._regions[-1]

    def _new_memory(self, kind: str, content: str, size: int) -> SharedFile | GpuMemory:
        """New memory of a kind for `inputs`, which the host only reads, or for `results`."""
        if kind == "cuda":
            return GpuMemory(max(size, _SMALLEST))
        name = f"{self._marker}-{content}"
        return SharedFile(name, read_only=content == "inputs", capacity=max(size, CAPACITY))

    def _open_results(self, kind: str, size: int = 0) -> None:
        """Memory of a kind for results of `size` bytes, opened by the host."""
        if kind in self._results and self._results[kind].capacity >= size:
            return
        memory = self._new_memory(kind, "results", size)
        if kind in self._results:
            self._results.pop(kind).close()
        self._results[kind] = memory
        self._send({"op": "results", "memory": memory.description}, memory.descriptors)

    def _free(self) -> None:
        """Give all shared memory back."""
        for memory in [*(region.memory for region in self._regions), *self._results.values()]:
            memory.close()
        self._regions, self._results, self._own_slots, self._touched = [], {}, [], 0
        if self.process is not None:
            self._post({"op": "forget"})

    def reset(self) -> None:
        """Forget all slots, unless a prepared run needs its inputs."""
        if not self.pending:
            self._own_slots = []
            for region in self._regions:
                region.used = 0

    @property
    def _slots(self) -> list[PlacedSlot]:
        """The slots of the run, or of the call."""
        return self._own_slots if self._run is None else self._run.slots

    def place(
        self, tensors: Mapping[str, torch.Tensor], poison: int, placed: list[PlacedSlot]
    ) -> tuple[dict[str, Any] | None, Tensors]:
        """Copy tensors of a device into slots of the shared memory, between guard zones. Tensors of a storage share a
        slot, and keep their strides, their offset and their alignment.

        Gives the part of the shared memory for the message, None without elements, and the copies.
        """
        copies = {}
        groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                groups.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
            else:
                copies[name] = tensor
        if not groups:
            return None, copies
        extents = {storage: _extent([tensor for _, tensor in group]) for storage, group in groups.items()}
        home = next(iter(groups.values()))[0][1].device
        needed = sum(padded_size(stop - start) + BEHIND for start, stop in extents.values())
        region = self._region(self._kind(home), needed)
        start, memory = region.used, region.memory.bytes
        address = memory.data_ptr()
        slots = []
        for storage, group in groups.items():
            base, stop = extents[storage]
            size = stop - base
            names = " and ".join(name for name, _ in group)
            slot = PlacedSlot(region, len(placed), region.used + ZONE, size, names, address + region.used + ZONE)
            end = region.used + padded_size(size) + BEHIND
            if len(group) == 1 and group[0][1].numel() * group[0][1].element_size() == size:
                fill(memory, region.used, slot.start, poison)
                fill(memory, slot.start + size, end, poison)
            else:
                fill(memory, region.used, end, poison)
            for name, tensor in group:
                byte = slot.start + int(tensor.storage_offset()) * tensor.element_size() - base
                copy_in(memory, byte, tensor, tensor.shape, tensor.stride())
                copies[name] = tensor_at(memory, byte, tensor.dtype, tensor.shape, tensor.stride())
            placed.append(slot)
            slots.append([slot.number, slot.start, size, slot.name])
            region.used = end
        self._touched = max(self._touched, region.used)
        if region.memory.kind == "cuda":
            torch.cuda.synchronize()  # the host works on a stream of its own
        span = {"region": region.number, "kind": region.memory.kind, "start": start, "end": region.used, "slots": slots}
        return span, copies

    def check_slots(
        self, span: dict[str, Any], inputs: Tensors, given: Tensors, poison: int
    ) -> tuple[list[str], list[str]]:
        """Sentences on overwritten zones and on changed inputs of a part of the shared memory."""
        outside, changed = [], []
        region = next(region for region in self._regions if region.number == span["region"])
        memory = region.memory.bytes
        zones = [
            (f"{side} input {name}", memory[zone])
            for _, start, size, name in span["slots"]
            for side, zone in (
                ("before", slice(start - ZONE, start)), ("behind", slice(start + size, start + size + ZONE)),
            )
        ]  # fmt: skip
        # A single comparison for all zones: each comparison synchronizes the GPU.
        if bool((torch.cat([zone for _, zone in zones]) != poison).any()):
            for place, zone in zones:
                if written := int((zone != poison).sum()):
                    outside.append(f"{written} bytes {place} were written")
        counts = [_different_bytes(given[name], inputs[name]) for name in inputs if inputs[name].numel()]
        for name, count in zip([n for n in inputs if inputs[n].numel()], torch.stack(counts).tolist(), strict=True):
            changed += [f"{count} bytes of input {name} were changed"] if count else []
        return outside, changed

    def _slot(self, tensor: torch.Tensor) -> tuple[PlacedSlot, int] | None:
        """The slot of a tensor in the shared memory, and its first byte in the slot."""
        address = tensor.data_ptr()
        for slot in self._slots:
            byte = address - slot.address
            if 0 <= byte < slot.size:
                return slot, byte
        return None


class PlacedSlot(NamedTuple):
    """A part of the shared memory for inputs, between guard zones."""

    region: Region
    number: int
    start: int
    """First byte in the region."""
    size: int
    name: str
    address: int
    """Address of the first byte in this process."""


@dataclass
class Call:
    """A call of a run."""

    message: dict[str, Any]
    answer: dict[str, Any]
    first_answer: dict[str, Any] | None = None
    """Answer of the call with the same arguments in the first run."""
    result: Any = None
    bytes: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The bytes of the result."""
    placed: list[torch.Tensor] = field(default_factory=list)
    """Arguments that are no inputs of the run, such as results of earlier calls: the judge placed them for the call."""


class RemoteRun:
    """A prepared run in a kernel host."""

    def __init__(self, host: RemoteHost, inputs: Tensors, home: torch.device, poison: int) -> None:
        self._host, self.home, self.poison, self._inputs = host, home, poison, inputs
        host.reset()
        host.pending += 1
        self.slots: list[PlacedSlot] = []
        self.span, self._given = host.place(inputs, poison, self.slots)
        self.seconds, self.variation = 0.0, 0
        self._violations: list[list[str]] = [[], []]
        self.script: list[Call | dict[str, Any]] = []
        """Calls and seeds of the run, if the host did not replay them."""
        self.repeated: RemoteRun | None = None
        """The run with the same calls and the same bytes of every result."""
        self._outputs: Tensors | None = None

    def same_as(self, other: RemoteRun | None) -> bool:
        """Whether the inputs of another run have the same names, places and values."""
        return other is not None and self._inputs is other._inputs

    @contextmanager
    def running(self, variation: int) -> Iterator[Tensors]:
        """Run under a variation, by number."""
        host, self.variation = self._host, variation
        try:
            host.begin(self, variation)
            yield self._given
            self.seconds, *self._violations = host.end_run()
        finally:
            host.pending = max(0, host.pending - 1)
            host.leave_run()

    def replayed(self) -> Tensors | None:
        """The results of the run with the same calls and bytes."""
        return None if self.repeated is None else self.repeated._outputs

    def keep(self, outputs: Mapping[str, torch.Tensor]) -> Tensors:
        """The results: the judge's copies."""
        self._outputs = dict(outputs)
        return dict(outputs)

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""
        outside, changed = self._violations
        if self.span is not None and self.span["kind"] == "cuda":
            more, written = self._host.check_slots(self.span, self._inputs, self._given, self.poison)
            outside, changed = outside + more, changed + written
        return outside, changed


class _Reader:
    """Copies the tensors of a result from the shared memory."""

    def __init__(self, memory: torch.Tensor, first: int, used: int, limit: int, home: torch.device) -> None:
        """`first`, `used`: first byte and bytes of the results, as the host says."""
        if used > limit:
            raise ValueError(f"results of {used} bytes at byte {first}; the limit of the case is {limit}")
        # A kernel may write to the shared memory at any time: nothing reads it but this copy.
        self.private = memory[first : first + used].clone()
        self._left, self._home = limit, home

    def tensor(self, place: Any) -> torch.Tensor:
        """The tensor at a place: first byte, dtype, shape, strides or None. Raises ValueError for a place outside the
        memory, and for strides of another number than the shape. Strides that need too much memory are not kept."""
        start, name, shape, strides = place
        dtype = codec.DTYPES[name]
        if not all(isinstance(n, int) and n >= 0 for n in (start, *shape, *(strides or ()))) or start % ALIGNMENT:
            raise ValueError(f"a tensor of shape {shape} and strides {strides} at byte {start}")
        count = 1
        for extent in shape:
            count *= extent
        size = count * dtype.itemsize
        self._left -= size
        if self._left < 0 or start + size > self.private.numel():
            raise ValueError(f"a tensor of {size} bytes at byte {start} exceeds the results")
        tensor = tensor_at(self.private, start, dtype, shape, contiguous_strides(shape))
        tensor = tensor if tensor.device.type == self._home.type else tensor.to(self._home)
        if strides is None:
            return tensor
        extent = element_extent(shape, strides) * dtype.itemsize
        if extent > self._left:
            return tensor
        self._left -= extent
        plain = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor  # float4 cannot be copied
        strided = torch.empty_strided(shape, strides, dtype=plain.dtype, device=tensor.device)
        copy_elements(plain, strided)
        return strided.view(dtype)


def _extent(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """First and last byte of a slot in the storage of its tensors. The slot begins with the storage, or at a multiple
    of the alignment for a tensor far behind the begin."""
    starts = [int(tensor.storage_offset()) * tensor.element_size() for tensor in tensors]
    ends = [
        start + element_extent(tensor.shape, tensor.stride()) * tensor.element_size()
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    first = min(starts)
    return (first // ALIGNMENT * ALIGNMENT if first > _FAR else 0), max(ends)


def _byte(number: Any) -> int:
    """A number of bytes of an answer. Raises ValueError if it is none."""
    if not isinstance(number, int) or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} bytes")
    return number


def _sentences(entries: Any) -> list[dict[str, str]]:
    """Causes and sentences of an answer. Raises KeyError or TypeError if it has others."""
    return [{key: str(entry[key])[: codec.TEXT] for key in ("cause", "sentence")} for entry in entries]


def _news(loaded: Any) -> list[dict[str, Any]]:
    """Modules and packages of an answer, if there are any. Raises KeyError or TypeError if it has others."""
    if not loaded:
        return []
    names = {key: [str(name)[: codec.TEXT] for name in loaded[key]] for key in ("files", "packages")}
    return [{**names, "folder": str(loaded["folder"])[: codec.TEXT]}]


def _different_bytes(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Number of bytes that differ, as a tensor."""
    a, b = (element_bytes(tensor) for tensor in (one, other))
    return torch.count_nonzero(a != b)


@cache
def gpu_memory_is_shared() -> bool:
    """Whether CUDA IPC is available. Some containers refuse it; then tensors are copied by way of a CPU."""
    try:
        GpuMemory(1)
    except RuntimeError:
        return False
    return True


@contextmanager
def hosted_backend(
    name: str, device: str = "cpu", *, seconds: float = 300.0, settings: HostSettings | None = None
) -> Iterator[Backend]:
    """The backend called `name` in a kernel host, for commands that judge in their own process. `seconds`: for all
    calls together, until the next `begin_case`.

    Raises BackendError if the backend cannot be loaded. A call raises HostLost if the host ends.
    """
    with closing(Channel(starter().connect())) as channel:
        host = RemoteHost(settings or HostSettings(name, device), channel)
        try:
            host.begin_case(seconds, room(device))
            yield Backend(host)
        finally:
            host.close()
