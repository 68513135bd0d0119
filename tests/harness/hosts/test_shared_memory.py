"""Shared memory: a host cannot change inputs or sizes, and tensors keep their bytes, strides, offset and aliases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.guarded_memory import ALIGNMENT
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.hosts.codec import DTYPES
from narrowgauge.harness.hosts.memory import SharedFile
from narrowgauge.harness.hosts.remote.results import Reader
from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost
from narrowgauge.harness.hosts.starter import Channel, starter
from tests.paths import ROOT

SIZE = 1 << 16
WAYS = """
import ctypes, mmap, os, resource, sys
from contextlib import suppress
descriptor, size = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
refused = []

def attempt(name, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (OSError, ValueError) as error:
        refused.append(name)

def change(number):
    attempt("map", mmap.mmap, number, size)
    attempt("map beyond", mmap.mmap, number, size + 4096, prot=mmap.PROT_READ)
    attempt("write", os.pwrite, number, b"x", 0)
    attempt("shrink", os.ftruncate, number, 4096)
    attempt("grow", os.ftruncate, number, size + 4096)
    attempt("hole", fallocate, number)

def fallocate(number):
    if libc.fallocate(number, 3, ctypes.c_long(0), ctypes.c_long(4096)):  # FALLOC_FL_PUNCH_HOLE | KEEP_SIZE
        raise OSError(ctypes.get_errno(), "fallocate")

def mprotect():
    mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    import torch
    address = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), 3):
        raise OSError(ctypes.get_errno(), "mprotect")

def unseal():
    import fcntl
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

change(descriptor)
attempt("seal", unseal)
attempt("mprotect", mprotect)
print(sorted(refused))
refused.clear()
again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
change(again)
print(sorted(refused))
"""


@pytest.mark.long
@pytest.mark.parametrize("read_only", [True, False])
def test_a_host_cannot_change_the_size_or_inputs(read_only: bool) -> None:
    memory = SharedFile("test", read_only=read_only, capacity=SIZE)
    memory.bytes.fill_(7)
    before = memory.bytes.clone()
    words = [sys.executable, "-W", "ignore", "-c", WAYS, str(memory.descriptor), str(SIZE)]
    done = subprocess.run(words, capture_output=True, text=True, pass_fds=memory.descriptors, cwd=ROOT, check=False)
    size = {"grow", "map beyond", "shrink"}
    refused = size | ({"map", "write", "hole"} if read_only else set())
    other = {"seal"} | ({"mprotect"} if read_only else set())
    assert done.stdout.splitlines() == [str(sorted(refused | other)), str(sorted(refused))], done.stderr
    assert torch.equal(memory.bytes, before) == read_only
    memory.close()


BACKEND = """
import torch


class Backend:
    def quantize(self, first, *others):
        tensors = [first, *others]
        facts = [
            {
                "shape": tuple(t.shape), "stride": tuple(t.stride()), "offset": t.storage_offset(),
                "dtype": str(t.dtype), "address": t.data_ptr() % 512, "first": t.data_ptr() - first.data_ptr(),
                "size": t.untyped_storage().nbytes(), "mode": t.untyped_storage().data_ptr() == storage(first),
            }
            for t in tensors
        ]
        return facts, tensors


def storage(tensor):
    return tensor.untyped_storage().data_ptr()
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteHost]:
    """A host whose quantize gives back its arguments, and the form in which they came."""
    folder = tmp_path_factory.mktemp("backend")
    (folder / "echo_backend.py").write_text(BACKEND)
    channel = Channel(starter().connect())
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        made = RemoteHost(HostSettings("echo_backend:Backend"), channel)
    made.variations(torch.device("cpu"))
    yield made
    made.close()
    channel.close()


def echoed(host: RemoteHost, *tensors: torch.Tensor) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Form and bytes of tensors, as the host got them within a run."""
    host.begin_case(60, 1 << 28)
    named = {f"t{n}": tensor for n, tensor in enumerate(tensors)}
    run = host.prepare(named, torch.device("cpu"), 0xFF)
    with run.running(0) as given:
        facts, found = host.call("quantize", *[given[name] for name in named])
    assert run.violations() == ([], [])
    return facts, found


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes as a tensor of a dtype."""
    count = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype == torch.bool else 256
    return torch.randint(0, limit, (count,), dtype=torch.uint8).view(dtype).view(shape)


SHAPES = [(3, 5), (1,), (0, 4), (2, 0, 3), (0,)]
USABLE = [name for name, dtype in DTYPES.items() if not name.startswith(("q", "bits"))]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental")
@pytest.mark.parametrize("name", USABLE)
def test_every_dtype_and_shape_survives(name: str, host: RemoteHost) -> None:
    try:
        tensors = [random(DTYPES[name], *shape) for shape in SHAPES]
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch has no views as {name}: {error}")
    tensors.append(tensors[1][0])
    facts, found = echoed(host, *tensors)
    assert [each["shape"] for each in facts] == [tuple(t.shape) for t in tensors]
    assert {each["dtype"] for each in facts} == {str(DTYPES[name])}
    for tensor, result in zip(tensors, found, strict=True):
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(result) == bytes_of(tensor)


BASE = torch.arange(4096.0).view(64, 64)
VIEWS = {
    "transposed": BASE.T,
    "every second column": BASE[:, ::2],
    "offset": BASE[3:, 5:60],
    "a row": BASE[7],
    "permuted": torch.randn(4, 5, 6).permute(2, 0, 1),
    "far behind the begin": torch.randn(1 << 19)[(1 << 19) - 100 :],
    "odd offset of bytes": torch.arange(100, dtype=torch.uint8)[13:40],
    "rows that share memory": torch.arange(5.0).expand(3, 5),
    "an extent of 1 with stride 0": torch.ones(()).expand(1, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_offset_and_alignment_survive(name: str, host: RemoteHost) -> None:
    view = VIEWS[name]
    (facts,), (found,) = echoed(host, view)
    assert facts["stride"] == tuple(view.stride())
    start = view.storage_offset() * view.element_size()
    assert facts["address"] == start % ALIGNMENT
    if name != "far behind the begin":
        assert facts["offset"] == view.storage_offset()
    assert torch.equal(found, view)
    assert found.stride() == view.stride() or found.is_contiguous() == view.is_contiguous() is True


def test_strides_that_need_too_much_memory_are_not_kept() -> None:
    memory = torch.arange(1 << 10).view(torch.uint8)
    for strides, kept in (([100, 1], [100, 1]), ([1 << 40, 1], [4, 1])):
        reader = Reader(memory, memory.numel(), 1 << 16, torch.device("cpu"))
        found = reader.tensor([512, "int64", [2, 4], strides])
        assert (list(found.stride()), found.tolist()) == (kept, [[64, 65, 66, 67], [68, 69, 70, 71]])
    for strides in ([-1, 1], [1], [1, 1, 1], ["4", 1]):
        with pytest.raises(ValueError, match=r"strides|shorter|longer"):
            Reader(memory, memory.numel(), 1 << 16, torch.device("cpu")).tensor([512, "int64", [2, 4], strides])


def test_results_beyond_the_memory_of_a_case_end_its_host() -> None:
    channel = Channel(starter().connect())
    host = RemoteHost(HostSettings("reference"), channel)
    host.variations(torch.device("cpu"))
    host.begin_case(60, 1 << 12)
    run = host.prepare({"scales": torch.zeros(128, 64, dtype=torch.uint8)}, torch.device("cpu"), 0xFF)
    with pytest.raises(HostLost, match=r"gave results of .* at most 4096"), run.running(0) as given:
        host.call("swizzle", given["scales"])
    host.close()
    channel.close()


ALIASES = {
    "one tensor twice": (BASE, BASE),
    "a tensor and its transpose": (BASE, BASE.T),
    "overlapping rows": (BASE[:40], BASE[20:]),
    "columns between columns": (BASE[:, ::2], BASE[:, 1::2]),
    "a part of another dtype": (BASE, BASE.view(torch.uint8)[2:, 7:9]),
}


@pytest.mark.parametrize("name", ALIASES)
def test_aliases_survive(name: str, host: RemoteHost) -> None:
    tensors = ALIASES[name]
    facts, found = echoed(host, *tensors)
    assert [each["first"] for each in facts] == [t.data_ptr() - tensors[0].data_ptr() for t in tensors]
    assert all(each["mode"] for each in facts)
    assert [bytes_of(t) for t in found] == [bytes_of(t) for t in tensors]
