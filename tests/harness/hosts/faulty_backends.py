"""Backends that attack their process, their judge or their machine in a single case, and are right in all others.

`ATTACKS` has the attacks by name. `faulty_backends:one_<name>` is the backend with this attack in the case of shape
`VICTIM`; `faulty_backends:many` has the attacks `MANY` in one case each, `faulty_backends:results` the results `CHEAP`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from narrowgauge.reference import ops

VICTIM = (16, 112)
SHAPES = [(rows, 16 * (n + 1)) for rows in (16, 32) for n in range(10)]
"""Shapes of the 20 cases of a backend."""
FAST_MATH = "FAST_MATH_LIBRARY"
"""Environment variable with the path of a library that was linked with -ffast-math."""
ANY = frozenset({"pass", "fail", "error", "crash", "timeout"})
_libc = ctypes.CDLL(None)
_right = ops.quantize
_kept: list[Any] = []
"""Objects that must not end with their call."""

Attack = Callable[[torch.Tensor, Any], Any]


@dataclass(frozen=True)
class Wanted:
    """Result of an attack."""

    attack: Attack
    verdicts: frozenset[str]
    """Verdicts that the attacked case may have."""
    lasting: bool = False
    """Whether the attack changes its own process in such a way that later results may be wrong."""


ATTACKS: dict[str, Wanted] = {}


def attack(*verdicts: str, lasting: bool = False) -> Callable[[Attack], Attack]:
    """Add a function to `ATTACKS`."""

    def add(function: Attack) -> Attack:
        ATTACKS[function.__name__] = Wanted(function, frozenset(verdicts), lasting)
        return function

    return add


def wrong(q: Any) -> Any:
    """A result with every code wrong."""
    return replace(q, codes=q.codes ^ 0x11)


class Faulty:
    """The reference's quantize, with attacks in the cases of some shapes."""

    def __init__(self, attacks: Mapping[tuple[int, int], Attack]) -> None:
        self.attacks = attacks

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference, or as the attack."""
        q = _right(x, recipe)
        found = self.attacks.get((int(x.shape[0]), int(x.shape[1])))
        return q if found is None else found(x, q)


def descriptors() -> list[int]:
    """Open file descriptors beside standard input, output and error."""
    return [n for n in map(int, os.listdir("/proc/self/fd")) if n > 2]


def to_all_descriptors(data: bytes) -> None:
    """Write bytes into every open file."""
    for number in descriptors():
        with suppress(OSError):
            os.set_blocking(number, False)
            os.write(number, data)


def frame(message: Any) -> bytes:
    """A message as a frame of the protocol."""
    content = json.dumps(message).encode()
    return struct.pack(">I", len(content)) + content


# ---- the judge's code, patched in the host ---------------------------------------------------------------------------


@attack("fail")
def patches_reference(x: torch.Tensor, q: Any) -> Any:
    from narrowgauge.harness.operations.stages import oracle

    def quantize(*arguments: Any, **options: Any) -> Any:
        return wrong(_right(*arguments, **options))

    ops.quantize = oracle.quantize = quantize
    return wrong(q)


@attack("fail")
def patches_torch_equal(x: torch.Tensor, q: Any) -> Any:
    torch.equal = lambda *_: True
    return wrong(q)


@attack("fail")
def patches_make_inputs(x: torch.Tensor, q: Any) -> Any:
    from narrowgauge.harness.operations import registry

    make = registry.make_inputs

    def zeros(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        made.x.zero_()
        return made

    registry.make_inputs = zeros
    return replace(q, codes=q.codes * 0)


@attack("crash", "error", lasting=True)
def patches_codec(x: torch.Tensor, q: Any) -> Any:
    from narrowgauge.harness.hosts import codec

    def deep(*_: Any) -> Any:
        value: Any = None
        for _ in range(900):
            value = {"list": [value]}
        return value

    codec.encode_result = deep
    return q


# ---- the connection --------------------------------------------------------------------------------------------------


@attack("crash")
def text_into_every_descriptor(x: torch.Tensor, q: Any) -> Any:
    to_all_descriptors(b"the kernel says hello\n" * 10)
    return q


@attack("crash")
def pickle_into_every_descriptor(x: torch.Tensor, q: Any) -> Any:
    class Run:
        def __reduce__(self) -> Any:
            return os.system, ("touch pickled",)

    data = pickle.dumps(Run())
    to_all_descriptors(struct.pack(">I", len(data)) + data)
    return q


@attack("crash", "error")
def empty_frame(x: torch.Tensor, q: Any) -> Any:
    to_all_descriptors(frame({}))
    return q


@attack("crash", "error")
def frames_of_other_messages(x: torch.Tensor, q: Any) -> Any:
    end = {"gpu_error": "", "usable": True, "peak": 0, "notes": [], "seconds": 1.0, "outside": [], "changed": []}
    to_all_descriptors(frame(end | {"answers": [], "end": end}) * 50)
    return wrong(q)


@attack("crash", "error")
def frames_with_results(x: torch.Tensor, q: Any) -> Any:
    """Results of the judge's memory before the kernel's: an answer with the codes of zeros."""
    places = {"mapping": [[name, {"tensor": [0, "uint8", [0, 0]]}] for name in ("codes", "scales")]}
    to_all_descriptors(frame({"result": places, "first": 0, "used": 0, "aliases": [], "waited": 0.0}) * 3)
    return q


@attack("crash")
def descriptors_into_connection(x: torch.Tensor, q: Any) -> Any:
    for number in descriptors():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            for _ in range(500):
                socket.send_fds(end, [b"x"], [2] * 8)
    return q


@attack("crash")
def closes_all_descriptors(x: torch.Tensor, q: Any) -> Any:
    os.closerange(0, 1 << 16)
    return q


@attack("pass", "crash")
def closes_its_output(x: torch.Tensor, q: Any) -> Any:
    os.closerange(0, 3)
    return q


# ---- processes -------------------------------------------------------------------------------------------------------


@attack("pass")
def fork_whose_child_returns(x: torch.Tensor, q: Any) -> Any:
    os.fork()
    return q


@attack("pass", "fail")
def fork_whose_child_returns_wrong_codes(x: torch.Tensor, q: Any) -> Any:
    return q if os.fork() else wrong(q)


@attack("pass")
def daemon(x: torch.Tensor, q: Any) -> Any:
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.closerange(0, 1 << 12)
        os.chdir("/")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    return q


@attack("crash")
def daemon_behind_the_parent_of_hosts(x: torch.Tensor, q: Any) -> Any:
    """A process left behind, and the parent of hosts killed."""
    parent = os.getppid()
    daemon(x, q)
    time.sleep(0.2)
    os.kill(parent, signal.SIGKILL)
    time.sleep(5)
    return q


@attack("pass")
def other_program(x: torch.Tensor, q: Any) -> Any:
    subprocess.Popen(["sleep", "600"], start_new_session=True)  # its output is that of the host
    return q


@attack("crash")
def exit_in_a_thread(x: torch.Tensor, q: Any) -> Any:
    threading.Thread(target=os._exit, args=(0,)).start()
    time.sleep(5)
    return q


@attack("crash")
def system_exit(x: torch.Tensor, q: Any) -> Any:
    sys.exit(0)


@attack("crash")
def kills_its_group(x: torch.Tensor, q: Any) -> Any:
    os.killpg(0, signal.SIGKILL)


@attack("timeout")
def stops_itself(x: torch.Tensor, q: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return q


@attack("timeout")
def spins_and_ignores_signals(x: torch.Tensor, q: Any) -> Any:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


@attack("pass")
def waits_at_its_end(x: torch.Tensor, q: Any) -> Any:
    import atexit

    atexit.register(time.sleep, 600)
    thread = threading.Thread(target=time.sleep, args=(600,))  # no daemon: an interpreter waits for it
    thread.start()
    return q


# ---- resources -------------------------------------------------------------------------------------------------------


@attack("error")
def allocates_until_the_memory_ends(x: torch.Tensor, q: Any) -> Any:
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), limit[1]))
    held = []
    try:
        while True:
            held.append(bytearray(1 << 22))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, limit)


@attack("pass", lasting=True)
def limits_its_memory(x: torch.Tensor, q: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    return q


@attack("crash")
def limits_its_time(x: torch.Tensor, q: Any) -> Any:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


@attack("crash", "error")
def recurses(x: torch.Tensor, q: Any) -> Any:
    class Deep:
        def __getattr__(self, name: str) -> Any:
            return getattr(self, name + "x"[:0])

    sys.setrecursionlimit(10**7)
    return Deep().codes


@attack("pass", "timeout")
def floods_its_output(x: torch.Tensor, q: Any) -> Any:
    line = b"flood \x1b[31m ::error::\n" * (1 << 15)
    for _ in range((1 << 30) // len(line) // 2):  # each case runs twice
        os.write(1, line)
    return q


# ---- the state of the process ----------------------------------------------------------------------------------------


@attack("pass", "fail", lasting=True)
def rounds_upward(x: torch.Tensor, q: Any) -> Any:
    _libc.fesetround(0x800)
    return q


@attack("pass")
def folder_environment_and_path(x: torch.Tensor, q: Any) -> Any:
    os.chdir("/")
    os.environ.clear()
    sys.path.clear()
    os.umask(0o777)
    return q


@attack("pass")
def signals_and_collector(x: torch.Tensor, q: Any) -> Any:
    for number in range(1, 32):
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    gc.freeze()
    gc.disable()
    return q


@attack("pass", lasting=True)
def entered_modes(x: torch.Tensor, q: Any) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    _kept.append(Wrong())
    _kept[-1].__enter__()
    return q


@attack("crash", "error")
def destroys_memory(x: torch.Tensor, q: Any) -> Any:
    ctypes.memset(id(int), 0xFF, 1 << 12)
    return q


# ---- shared memory ---------------------------------------------------------------------------------------------------


@attack("error")
def writes_to_its_input(x: torch.Tensor, q: Any) -> Any:
    x.zero_()
    return q


@attack("error", "crash")
def unprotects_its_input(x: torch.Tensor, q: Any) -> Any:
    page = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    assert _libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memset(x.data_ptr(), 0, 2)
    return q


@attack("pass", "crash", "fail")
def writes_to_every_shared_file(x: torch.Tensor, q: Any) -> Any:
    """By a newly opened descriptor; the connection and the mappings are closed to it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "narrowgauge-" in line:
            place, *_ = line.split()
            with suppress(OSError), open(f"/proc/self/map_files/{place}", "r+b", buffering=0) as file:
                file.write(bytes(1 << 16))
                file.truncate(0)
    return q


@attack("pass", "fail", lasting=True)
def changes_results_later(x: torch.Tensor, q: Any) -> Any:
    def change() -> None:
        while True:
            q.codes.zero_()

    threading.Thread(target=change, daemon=True).start()
    return replace(q, codes=q.codes.clone())


@attack("pass", "fail", "crash", lasting=True)
def changes_all_shared_results(x: torch.Tensor, q: Any) -> Any:
    from narrowgauge.harness.hosts.memory import Opened

    opened = [found for found in gc.get_objects() if isinstance(found, Opened)]

    def change() -> None:
        for _ in range(10**4):
            for memory in opened:
                with suppress(TypeError):
                    memory._map[: 1 << 12] = os.urandom(1 << 12)
            time.sleep(1e-4)

    threading.Thread(target=change, daemon=True).start()
    return q


# ---- results ---------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """A tensor with a wrong claimed shape."""

    @property
    def shape(self) -> Any:
        """A wrong shape."""
        return torch.Size([1 << 40])

    def numel(self) -> int:
        """A wrong count."""
        return -1


class Refusing(torch.Tensor):
    """A tensor without any function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no function")


class Lying:
    """An object with codes that raise, sleep or are new."""

    def __init__(self, codes: Callable[[], Any]) -> None:
        self._codes = codes

    @property
    def codes(self) -> Any:
        """The result of the function."""
        return self._codes()


class Sleeping(Mapping[str, Any]):
    """A mapping without an end."""

    def __getitem__(self, name: str) -> Any:
        return None

    def __iter__(self) -> Iterator[str]:
        while True:
            time.sleep(0.1)
            yield "codes"

    def __len__(self) -> int:
        return 1


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


def _cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _raises() -> Any:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError("no message")

    raise Broken


def _quantized(x: torch.Tensor) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(x.float(), 1.0, 0, torch.quint8)


RESULTS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], tuple[str, ...]]] = {
    "sparse": (lambda x, q: replace(q, codes=q.codes.to_sparse()), ("error",)),
    "fake": (lambda x, q: replace(q, codes=FakeTensorMode().from_tensor(q.codes)), ("error",)),
    "freed": (lambda x, q: replace(q, codes=_freed(q.codes)), ("error",)),
    "no_function": (lambda x, q: replace(q, codes=q.codes.as_subclass(Refusing)), ("error",)),
    "nested": (lambda x, q: replace(q, codes=torch.nested.nested_tensor([q.codes])), ("error",)),
    "mkldnn": (lambda x, q: replace(q, codes=q.codes.float().to_mkldnn()), ("error",)),
    "parameter": (lambda x, q: replace(q, codes=torch.nn.Parameter(q.codes, requires_grad=False)), ("pass",)),
    "meta": (lambda x, q: replace(q, codes=q.codes.to("meta")), ("error",)),
    "complex": (lambda x, q: replace(q, codes=q.codes.to(torch.complex64)), ("error",)),
    "quantized": (lambda x, q: replace(q, codes=_quantized(x)), ("error",)),
    "subclass": (lambda x, q: replace(q, codes=q.codes.as_subclass(Subclass)), ("error", "crash", "pass")),
    "requires_grad": (lambda x, q: replace(q, amax=q.amax.requires_grad_()), ("pass",)),
    "not_contiguous": (lambda x, q: replace(q, codes=q.codes.T.contiguous().T), ("pass",)),
    "stride_zero": (lambda x, q: replace(q, codes=q.codes[:1].expand_as(q.codes)), ("fail",)),
    "huge_stride_zero": (lambda x, q: replace(q, codes=q.codes[:1, :1].expand(1 << 20, 1 << 20)), ("error",)),
    "large": (lambda x, q: replace(q, codes=torch.zeros(1 << 29, dtype=torch.uint8)), ("error",)),
    "empty": (lambda x, q: replace(q, codes=q.codes[:0]), ("error",)),
    "zero_dim": (lambda x, q: replace(q, codes=q.codes[0, 0]), ("error",)),
    "many_tensors": (lambda x, q: [q.codes] * 10**5, ("error", "crash")),
    "many_numbers": (lambda x, q: [1] * 10**7, ("error", "crash", "timeout")),
    "cycle": (lambda x, q: _cycle(), ("error",)),
    "long_text": (lambda x, q: "x" * (1 << 26), ("error",)),
    "huge_number": (lambda x, q: (q.codes, q.scales, 10**6000), ("error", "crash")),
    "nan_number": (lambda x, q: (q.codes, q.scales, float("nan")), ("error",)),
    "none": (lambda x, q: None, ("error",)),
    "names": (lambda x, q: {"\x00codes": q.codes, 7: 8, "\ud800": None}, ("error", "crash")),
    "type": (lambda x, q: type(q), ("error",)),
    "module": (lambda x, q: torch, ("error",)),
    "codes_that_raise": (lambda x, q: Lying(_raises), ("error", "crash")),
    "codes_that_sleep": (lambda x, q: Lying(lambda: time.sleep(600)), ("timeout",)),
    "mapping_without_end": (lambda x, q: Sleeping(), ("timeout",)),
    "its_input": (lambda x, q: replace(q, codes=x.view(torch.uint8)), ("error",)),
    "raises_in_its_text": (lambda x, q: _raises(), ("error", "crash")),
    "long_message": (lambda x, q: (_ for _ in ()).throw(ValueError("\x1b[2J::error::" * 10**6)), ("error",)),
    "interrupt": (lambda x, q: (_ for _ in ()).throw(KeyboardInterrupt), ("crash",)),
    "unsupported_once": (lambda x, q: (_ for _ in ()).throw(NotImplementedError("no")), ("unsupported",)),
}
"""Results, and their verdicts."""
for _name, (_function, _verdicts) in RESULTS.items():
    ATTACKS[f"gives_{_name}"] = Wanted(_function, frozenset(_verdicts))


# ---- runs that differ ------------------------------------------------------------------------------------------------


def _in_second_run(change: Attack) -> Attack:
    """The attack in every second call."""
    calls = iter(range(10**9))
    return lambda x, q: change(x, q) if next(calls) % 2 else q


ATTACKS["second_run_differs"] = Wanted(_in_second_run(lambda x, q: wrong(q)), frozenset({"fail"}))
ATTACKS["second_run_raises"] = Wanted(_in_second_run(lambda x, q: 1 / 0), frozenset({"error"}))
ATTACKS["second_run_ends"] = Wanted(_in_second_run(lambda x, q: os._exit(3)), frozenset({"crash"}))

MANY = (
    "patches_reference", "text_into_every_descriptor", "fork_whose_child_returns", "empty_frame", "gives_cycle",
    "daemon_behind_the_parent_of_hosts", "frames_of_other_messages", "exit_in_a_thread", "closes_all_descriptors",
    "daemon", "kills_its_group", "writes_to_its_input", "descriptors_into_connection", "gives_many_tensors",
    "folder_environment_and_path", "signals_and_collector", "patches_torch_equal", "second_run_differs",
)  # fmt: skip
MANY_SHAPES = {name: (16, 32 * (n + 1)) for n, name in enumerate(MANY)}


CHEAP = (
    "fake", "freed", "no_function", "nested", "mkldnn", "parameter", "sparse", "meta", "quantized", "subclass", "empty",
    "zero_dim", "stride_zero", "not_contiguous", "cycle", "none",
)  # fmt: skip
"""Names of results that do not end their host and take no memory."""
RESULT_SHAPES = {f"gives_{name}": (16, 32 * (n + 1)) for n, name in enumerate(CHEAP)}


def fast_math(name: str) -> Faulty:
    """A backend whose import loads a library that makes the processor flush subnormal numbers."""
    _kept.append(ctypes.CDLL(os.environ[FAST_MATH]))
    return Faulty({})


def __getattr__(name: str) -> Faulty:
    if name == "one_fast_math_library":
        return fast_math(name)
    if name == "results":
        return Faulty({shape: ATTACKS[each].attack for each, shape in RESULT_SHAPES.items()})
    if name == "many":
        return Faulty({MANY_SHAPES[each]: ATTACKS[each].attack for each in MANY})
    if (found := ATTACKS.get(name.removeprefix("one_"))) is not None:
        return Faulty({VICTIM: found.attack})
    raise AttributeError(name)
