"""A kernel host: imports a backend, and runs its methods on the tensors that a judge shares.

The judge sends a message and waits for the answer. Every message has a key `op`, the name of a method of `_Server`.
Arguments and results are `codec` values; a tensor argument is a slot of the inputs with the place in the slot, a tensor
result a place in the results. The judge believes no word of this process in favour of a kernel.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from narrowgauge.harness.backends.concurrency import Run, execute
from narrowgauge.harness.backends.guard import Guard
from narrowgauge.harness.backends.guarded_memory import (
    ALIGNMENT,
    Allocation,
    Slot,
    contiguous_strides,
    element_bytes,
    element_extent,
)
from narrowgauge.harness.backends.loading import Loaded, error_location, load_implementation
from narrowgauge.harness.backends.local_host import LocalHost, synchronize
from narrowgauge.harness.backends.results import BackendError, Unsupported, dtype_name
from narrowgauge.harness.backends.transfer import BATCH_BYTES, KeptResults, tensors_in
from narrowgauge.harness.cases.cost import KEPT, room
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.frames import Connection, FrameError
from narrowgauge.harness.hosts.layer_driver import LayerDriver
from narrowgauge.harness.hosts.memory import Opened, copy_in, fill
from narrowgauge.harness.hosts.write_fault import on_write
from narrowgauge.harness.machine.float_environment import changes, read_environment
from narrowgauge.harness.machine.gpu_lock import lock_gpu
from narrowgauge.harness.machine.process import prepare_process, wait_for_gpus_asleep

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
DRIVEN = ("run_module", "start_layer", "forward_layer", "backward_layer")
"""Methods that the host has in place of the backend: they call the backend's modules."""


def serve(connection: Connection, settings: dict[str, Any]) -> None:
    """Load the backend of the settings, and answer the judge until it closes the connection."""
    process = os.getpid()
    server = _Server(connection, settings)
    with ExitStack() as stack:
        connection.send(server.load(stack) | {"id": settings["id"]})
        while True:
            try:
                message, descriptors = connection.receive()
            except FrameError:  # the judge is gone
                return
            asked = time.perf_counter()
            # A judge that holds the lock itself asks for none.
            with lock_gpu("cuda" if message.get("lock") else "cpu"):
                waited = time.perf_counter() - asked
                answer = getattr(server, f"on_{message['op']}")(message, descriptors)
            if os.getpid() != process:
                os._exit(0)  # a copy of this process that the backend forked
            sys.stdout.flush()  # a kernel's output belongs to its case
            sys.stderr.flush()
            if answer is not None:
                connection.send(answer | {"waited": waited, "id": message.get("id")})


class _Server:
    def __init__(self, connection: Connection, settings: dict[str, Any]) -> None:
        self.connection, self.settings = connection, settings
        self.device = torch.device(settings["device"])
        self.inputs: dict[int, Opened] = {}
        """Shared memory of inputs by its number."""
        self.results: dict[str, Opened] = {}
        """Shared memory of results by its kind."""
        self.run: _Run | None = None
        self.pending: Any = None
        """A result that does not fit into the shared memory."""
        self.earlier: list[tuple[weakref.ref[torch.Tensor], str]] = []
        """Results of the case that may still be alive, with their method."""
        self.kept = KeptResults()
        self.environment: dict[str, Any] = {}
        self.layers: LayerDriver | None = None
        """Layers of a training."""
        self.threads: set[threading.Thread] = set()
        """Threads of Python before the case."""

    # ---- start -----------------------------------------------------------------------------------------------------

    def load(self, stack: ExitStack) -> dict[str, Any]:
        """Import the backend. The answer has its facts, or the reason why it cannot be loaded."""
        settings = self.settings
        prepare_process(settings["workers"], self.device.type)
        if self.device.type == "cuda":
            wait_for_gpus_asleep()
        before = read_environment()
        try:
            if settings["untrusted"]:
                from narrowgauge.harness.hosts.separation import refuse_imports

                refuse_imports()
            if settings["sanitized"]:
                os.environ.pop("LD_PRELOAD", None)  # compilers that a backend starts have no sanitizers
            if settings["change"]:
                from narrowgauge.harness.hosts.changed_source import changed_source

                stack.enter_context(changed_source(*settings["change"]))
            methods = {name: Method(**entry) for name, entry in settings["methods"].items()}
            self.loaded = Loaded(settings["backend"])
            implementation = load_implementation(settings["backend"], settings["device"], methods)
            if callable(warm_up := getattr(implementation, "warm_up", None)):
                warm_up(self.device)
            self.host = LocalHost(
                settings["backend"], implementation, self.device, settings["schedules"], restores=False,
                methods=methods,
            )  # fmt: skip
        except Exception as error:
            return {"failed": str(error)[: codec.TEXT]}
        facts = self.host.facts
        declares = facts.declares
        self.environment = read_environment()
        return {
            "name": facts.name, "methods": sorted(facts.methods), "takes_shuffles": facts.takes_shuffles,
            "declares": codec.encode_result(declares, _no_tensor),
            "offers": codec.encode_result(facts.offers, _no_tensor), "notes": changes(before, self.environment),
            "room": room(settings["device"]), "loaded": self.loaded.news(),
        }  # fmt: skip

    def on_inputs(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Open shared memory for inputs."""
        memory = self.inputs[message["number"]] = Opened(message["memory"], descriptors, read_only=True)
        if memory.kind == "cpu":
            start, size = memory.bytes.data_ptr(), memory.bytes.numel()
            on_write(
                lambda address: address - start if start <= address < start + size else None,
                lambda offset: self.connection.send({"fault": offset}),
            )

    def on_results(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Open shared memory for results."""
        memory = Opened(message["memory"], descriptors, read_only=False)
        self.results[memory.kind] = memory

    def on_forget(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Close all shared memory."""
        self.inputs.clear()
        self.results.clear()

    # ---- cases -----------------------------------------------------------------------------------------------------

    def on_case(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Begin a case."""
        self.earlier.clear()
        self.kept = KeptResults()
        self.threads = set(threading.enumerate())
        if self.device.type == "cuda":
            if torch.cuda.memory_reserved() > KEPT:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def on_settle(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """End a case."""
        self.run = self.pending = None
        self.kept = KeptResults()
        end = self.host.end_case()
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" and end.usable else 0
        before, self.environment = self.environment, read_environment()
        return {
            "gpu_error": end.gpu_error, "usable": end.usable, "peak": peak,
            "notes": changes(before, self.environment) + self._left(), "loaded": self.loaded.news(),
            "timers": any(signal.getitimer(timer)[0] for timer in _TIMERS),
            "inputs": [[number, memory.bytes.data_ptr()] for number, memory in self.inputs.items()],
        }  # fmt: skip

    def _left(self) -> list[dict[str, str]]:
        """A note on the running threads of Python started by the case."""
        names = sorted(thread.name for thread in set(threading.enumerate()) - self.threads)
        if not names:
            return []
        sentence = f"the case left {len(names)} thread{'s' * (len(names) > 1)} behind: {', '.join(names[:5])}"
        return [{"cause": "leaves-threads", "sentence": sentence}]

    def on_join(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Join a group of processes, which meet in a file."""
        from narrowgauge.harness.machine.process_group import join

        try:
            join(descriptors[0], message["rank"], message["count"], self.device.type)
        except Exception as error:
            return {
                "error": f"the group of {message['count']} processes: {type(error).__name__}: {error}"[: codec.TEXT]
            }
        return {}

    def on_variations(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Names of the ways of running."""
        try:
            return {"names": self.host.variations(torch.device(message["device"]))}
        except BackendError as error:
            return {"error": str(error)[: codec.TEXT]}

    def on_seed(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Seed torch's generators."""
        self.host.seed(message["random"])

    # ---- runs ------------------------------------------------------------------------------------------------------

    def on_begin(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Begin a run."""
        self.run = _Run(self.host, _Slots(self.inputs, self.device), message)

    def on_end(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """End a run. The answer has its seconds, overwritten zones and changed inputs."""
        run, self.run = self.run, None
        assert run is not None
        return run.end()

    def on_call(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Call a method, or run a module."""
        method, run, self.host.autograd = message["method"], self.run, message["autograd"]
        slots = _Slots(self.inputs, self.device) if run is None else run.slots
        for span in message["spans"]:
            slots.add(span) if run is None else run.add(span)
        arguments, options = codec.decode_argument(message["arguments"], slots.tensor)
        start = time.perf_counter()
        try:
            with nullcontext() if run is None else run.guarded():
                synchronize(self.device)
                start = time.perf_counter()
                result = self._result(method, arguments, options)
                synchronize(self.device)
        except Unsupported as error:
            return {"unsupported": str(error)[: codec.TEXT]}
        except BackendError as error:
            return {"error": str(error)[: codec.TEXT]}
        except Exception as error:  # a variation, or a fault of a kernel that the synchronization shows
            words = f"{method} raised {type(error).__name__}: {error}{error_location(error)}"
            return {"error": words[: codec.TEXT]}
        finally:
            if run is not None:
                run.seconds += time.perf_counter() - start
        self.pending = (method, message["home"], result, slots, list(tensors_in((arguments, options))))
        return self.on_deliver(message, descriptors)

    def _result(self, method: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """The result of a method of the backend, or of a method in `DRIVEN`."""
        if method in DRIVEN:
            return self._driven(method)(*arguments, **options)
        return self.host.run(method, getattr(self.host.implementation, method), *arguments, **options)

    def on_repeat(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Run recorded calls many times, without guard zones, and write all results in sequence. The answer has the
        numbers of the calls, per run, with results of a form not recorded."""
        runs = [self._repeated_calls(run) for run in message["runs"]]
        other_forms: list[list[int]] = []
        memory, first = self.results[message["home"]].bytes, 0
        try:
            results = execute(message["kind"], message["count"], runs, self.device)
            synchronize(self.device)
            for run, found in zip(message["runs"], results, strict=True):
                other_forms.append([])
                for number, outputs in enumerate(found, 1):
                    for entry, output in zip(run["script"], outputs, strict=True):
                        writer = _Writer(memory, first, self.device, keeps_strides=entry["method"] not in DRIVEN)
                        if codec.encode_result(output, writer.place) == entry["result"]:
                            writer.copy()
                        elif number not in other_forms[-1]:
                            other_forms[-1].append(number)
                        first += entry["used"]
        except Unsupported as error:
            return {"unsupported": str(error)[: codec.TEXT]}
        except Exception as error:  # of a thread, a stream or a result, too
            words = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
            return {"error": words[: codec.TEXT]}
        return {"other_forms": other_forms}

    def _repeated_calls(self, run: dict[str, Any]) -> Run:
        """The calls of a run on its inputs."""
        slots = _Slots(self.inputs, self.device)
        for span in run["spans"]:
            slots.add(span)
        script = [(entry["method"], codec.decode_argument(entry["arguments"], slots.tensor)) for entry in run["script"]]
        inputs = list(tensors_in([arguments for _, arguments in script]))
        return Run(inputs, lambda: [self._result(method, given, options) for method, (given, options) in script])

    def _driven(self, method: str) -> Callable[..., Any]:
        """The function of a method in `DRIVEN`."""
        if method == "run_module":
            return self.host.run_module
        if self.layers is None:
            self.layers = LayerDriver(self.host, self.device)
        return getattr(self.layers, method.removesuffix("_layer"))  # type: ignore[no-any-return]

    def on_deliver(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Copy the pending result to the shared memory. If the memory is too small, the answer has the bytes needed."""
        method, home, result, slots, given = self.pending
        memory = self.results[home].bytes
        # The judge passes a result to the next method as it was given; a module makes no results for other methods.
        writer = _Writer(memory, 0, self.device, keeps_strides=method not in DRIVEN)
        try:
            encoded = codec.encode_result(result, writer.place)
            if writer.used > memory.numel():
                return {"need": writer.used}
            writer.copy()
            # The steps of a module report its inputs and its parameters too.
            aliases = [] if method in DRIVEN else self._aliases(method, writer.tensors, slots)
            if method not in DRIVEN:
                self.kept.see(method, writer.tensors, given)
        except Exception as error:
            self.pending = None
            return {
                "error": f"{method} gave a result that cannot be read: {type(error).__name__}: {error}"[: codec.TEXT]
            }
        self.pending = None
        places = [] if self.run is None or method in DRIVEN else map(self.run.place_of, writer.tensors)
        return {
            "result": encoded, "used": writer.used, "aliases": aliases, "guarded": list(filter(None, places)),
            "reused": self.kept.reused,
        }  # fmt: skip

    def on_first(self, message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
        """Copy the first result of a method to the shared memory, as it is now."""
        writer = _Writer(self.results[message["home"]].bytes, 0, self.device, keeps_strides=True)
        for tensor in self.kept.first[message["method"]]:
            writer.place(tensor)
        writer.copy()
        return {"used": writer.used}

    def _aliases(self, method: str, results: list[torch.Tensor], slots: _Slots) -> list[dict[str, str]]:
        """The results that share memory with an input or with a result still held by the backend."""
        found = []
        alive = {}
        for ref, name in self.earlier:
            if (tensor := ref()) is not None:
                alive[tensor.untyped_storage().data_ptr()] = name
        for tensor in results:
            if tensor.numel():
                storage = tensor.untyped_storage().data_ptr()
                if slots.hold(storage):
                    found.append(("returns-its-input", f"a result of {method} is memory of its input"))
                if storage in alive:
                    sentence = f"a result of {method} is memory of a result of {alive[storage]}"
                    found.append(("returns-earlier-result", sentence))
        self.earlier = [(ref, name) for ref, name in self.earlier if ref() is not None]
        self.earlier += [(weakref.ref(tensor), method) for tensor in results]
        return [{"cause": cause, "sentence": sentence} for cause, sentence in dict.fromkeys(found)]


class _Slots:
    """Slots of the inputs: memory of the tensors that a judge passes."""

    def __init__(self, memory: dict[int, Opened], device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._storages: dict[int, torch.UntypedStorage] = {}
        """A storage for each slot: a kernel sees the storage offset of the judge's tensor."""
        self._addresses: set[int] = set()
        """Addresses of the storages."""
        self._copies: list[tuple[Allocation, torch.Tensor, list[Slot]]] = []
        """Copies on a GPU: the allocation, its bytes before the run, and its slots."""

    def add(self, span: dict[str, Any] | None) -> list[Slot]:
        """Add the slots of a part of the shared memory. Gives the slots that lie in memory of a CPU."""
        if span is None:
            return []
        memory = self._memory[span["region"]]
        slots = []
        if span["kind"] == "cpu" and self._device.type == "cuda":
            allocation = Allocation(memory.bytes[span["start"] : span["end"]].to(self._device))
            for number, start, size, name in span["slots"]:
                slots.append(Slot(allocation, start - span["start"], size, name))
                self._add(number, allocation.tensor, start - span["start"], size)
            self._copies.append((allocation, allocation.tensor.clone(), slots))
            return []
        allocation = Allocation(memory.bytes)
        for number, start, size, name in span["slots"]:
            self._add(number, memory.bytes, start, size)
            if span["kind"] == "cpu":
                slots.append(Slot(allocation, start, size, name))
        return slots

    def _add(self, number: int, memory: torch.Tensor, start: int, size: int) -> None:
        """Add the slot of `size` bytes from `start` of a memory."""
        storage = memory.untyped_storage()[start : start + size]
        self._storages[number] = storage
        self._addresses.add(storage.data_ptr())

    def tensor(self, place: list[Any]) -> torch.Tensor:
        """The tensor of an argument: slot, first byte in the slot, dtype, shape, stride. No slot: an empty tensor."""
        number, byte, name, shape, stride = place
        dtype = codec.DTYPES[name]
        if number is None:
            return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)
        storage = self._storages[number]
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        return tensor.set_(storage, byte // dtype.itemsize, tuple(shape), tuple(stride))

    def hold(self, address: int) -> bool:
        """Whether a storage at this address is that of a slot."""
        return address in self._addresses

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten zones and on changed inputs, of copies on a GPU. The judge checks other slots."""
        outside, changed = [], []
        for allocation, before, slots in self._copies:
            if torch.equal(allocation.tensor, before):
                continue
            for slot in slots:
                count = int(torch.count_nonzero(slot.bytes != slot.bytes_in(before)))
                changed += [f"{count} bytes of input {slot.description} were changed"] if count else []
                for zone, side in zip(slot.zones, ("before", "behind"), strict=True):
                    written = int(torch.count_nonzero(allocation.tensor[zone] != before[zone]))
                    outside += [f"{written} bytes {side} input {slot.description} were written"] if written else []
        return outside, changed


class _Run:
    """A run of a variation, with guarded memory."""

    def __init__(self, host: LocalHost, slots: _Slots, message: dict[str, Any]) -> None:
        self._host, self._variation = host, message["variation"]
        self._stack: ExitStack | None = None
        self._guard = Guard(message["poison"])
        self.slots = slots
        self.seconds = 0.0
        self.add(message["span"])

    def add(self, span: dict[str, Any] | None) -> None:
        """Add slots of the inputs."""
        for slot in self.slots.add(span):
            self._guard.forbid_zones(slot)

    def guarded(self) -> Guard:
        """Enter the variation, once, and give the context of a call. This process guards no memory of its own."""
        if self._stack is None:
            self._stack = ExitStack()
            self._stack.enter_context(self._host.variation(self._variation))
        return self._guard

    def place_of(self, tensor: torch.Tensor) -> list[int] | None:
        """As `Guard.place_of`, for a result in memory of a CPU: the judge reads the guard zones of these itself."""
        return self._guard.place_of(tensor) if tensor.device.type == "cpu" else None

    def end(self) -> dict[str, Any]:
        """Leave the variation. The answer has the seconds of the calls and the violations."""
        if self._stack is not None:
            self._stack.close()
        outside, changed = self.slots.violations()
        more, _ = self._guard.violations()
        return {"seconds": self.seconds, "outside": outside + more, "changed": changed}


class _Writer:
    """Writes the tensors of a result to shared memory."""

    def __init__(self, memory: torch.Tensor, first: int, device: torch.device, *, keeps_strides: bool) -> None:
        """`keeps_strides`: whether places have the strides of tensors that are not contiguous."""
        self.tensors: list[torch.Tensor] = []
        self.used = 0
        self._keeps_strides = keeps_strides
        self._memory, self._first, self._device = memory, first, device
        self._starts: list[int] = []

    def place(self, tensor: torch.Tensor) -> list[Any]:
        """The place of a tensor: first byte, dtype, shape, and strides or None. The bytes are contiguous.

        Raises ValueError for a tensor outside of the backend's device, and for a tensor without the memory of its
        shape.
        """
        if tensor.device.type != self._device.type:
            raise ValueError(f"a tensor on {tensor.device}; its input is on {self._device}")
        _require_memory(tensor)
        start = self.used
        self.tensors.append(tensor)
        self._starts.append(start)
        self.used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        strides = list(tensor.stride()) if self._keeps_strides and not tensor.is_contiguous() else None
        return [start, dtype_name(tensor.dtype), list(tensor.shape), strides]

    def copy(self) -> None:
        """Copy all tensors."""
        for tensor, start in zip(self.tensors, self._starts, strict=True):  # equal results are equal bytes
            first = self._first + start + tensor.nbytes
            if gap := -tensor.nbytes % ALIGNMENT:
                fill(self._memory, first, first + gap, 0)
        if self._device.type != self._memory.device.type and 0 < self.used <= BATCH_BYTES:
            self._copy_together()
            return
        for tensor, start in zip(self.tensors, self._starts, strict=True):
            if tensor.numel():
                plain = tensor.detach()
                plain = plain.view(torch.uint8) if plain.element_size() == 1 else plain
                copy_in(self._memory, self._first + start, plain, plain.shape, contiguous_strides(plain.shape))
        synchronize(self._memory.device)

    def _copy_together(self) -> None:
        """Copy all tensors from a GPU at once: every copy synchronizes the GPU."""
        gap = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=self._device)
        parts = []
        for tensor in self.tensors:
            parts += [element_bytes(tensor).view(-1), gap[: -tensor.nbytes % ALIGNMENT]]
        self._memory[self._first : self._first + self.used].copy_(torch.cat(parts))


def _require_memory(tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose elements cannot be read: the process would die."""
    kind = type(tensor).__name__
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"a {kind} of layout {tensor.layout}; a result is a dense tensor")
    storage = tensor.untyped_storage()
    last = int(tensor.storage_offset()) + element_extent(tensor.shape, tensor.stride())
    if storage.device.type != tensor.device.type or (tensor.numel() and last * tensor.itemsize > storage.nbytes()):
        raise ValueError(
            f"a {kind} of shape {tuple(tensor.shape)} without its memory: it was freed, or is a fake tensor"
        )


def _no_tensor(tensor: torch.Tensor) -> Any:
    return None
