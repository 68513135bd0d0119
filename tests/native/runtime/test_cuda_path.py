"""Calls of CuPy and torch by a launch on a GPU, recorded by a fake CuPy: no GPU is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from narrowgauge.native.runtime import cuda
from narrowgauge.native.runtime.sources import ToolchainError

SHARED_LIMIT = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h."""


class FakeDriver:
    """The driver of a machine with two GPUs and a current GPU."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = SHARED_LIMIT

    def __init__(self) -> None:
        self.current = 0
        self.streams = {0: 100, 1: 200}
        self.context = 7
        self.loaded: list[tuple[str, str, int]] = []
        self.limits: list[tuple[int, int, int]] = []
        self.bound = 0
        self.launches: list[dict[str, Any]] = []
        self.sizes: list[int] = []
        """Bytes of each parameter of the kernel."""
        self.declared: dict[str, int] = {}
        """Static shared memory of kernels by name, in bytes; default 0."""
        self.functions: dict[str, Any] = {}
        self.architecture = 90

    def ctxGetCurrent(self) -> int:
        return self.context

    def free(self, pointer: int) -> None:
        assert pointer == 0
        self.bound += 1
        self.context = 7

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.limits.append((function, attribute, value))

    def launchKernel(self, function: int, *geometry: int) -> None:
        *sizes, shared, stream, parameters, extra = geometry
        assert extra == 0
        addresses = (ctypes.c_size_t * len(self.sizes)).from_address(parameters)
        self.launches.append(
            {
                "function": function, "grid": tuple(sizes[:3]), "block": tuple(sizes[3:]), "shared": shared,
                "stream": stream, "device": self.current,
                "parameters": [ctypes.string_at(*place) for place in zip(addresses, self.sizes, strict=True)],
            }
        )  # fmt: skip

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def module(self, source: str, kernels: str, device: int, flags: tuple[str, ...]) -> Any:
        def function(name: str) -> Any:
            assert self.current == device, "a module is loaded into the context that is current"
            self.loaded.append((kernels, name, device))
            self.functions[name] = SimpleNamespace(
                kernel=SimpleNamespace(ptr=1000 + len(self.loaded)),
                shared_size_bytes=self.declared.get(name, 0),
                preferred_shared_memory_carveout=-1,
                binary_version=self.architecture,
            )
            return self.functions[name]

        return SimpleNamespace(get_function=function)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(driver=fake, runtime=SimpleNamespace(free=fake.free), Device=fake.device)
    )
    monkeypatch.setattr(cuda, "_cupy", lambda: cupy)
    monkeypatch.setattr(cuda, "_module", fake.module)
    monkeypatch.setattr(cuda, "text", lambda source: f"text of {source}")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: fake.streams[index], raising=False)
    cuda._kernel.cache_clear()
    yield fake
    cuda._kernel.cache_clear()


def launch(
    *arguments: np.generic | int | bytes, kernel: str = "fill", index: int | None = None, **options: Any
) -> None:
    device = torch.device("cuda", index) if index is not None else torch.device("cuda")
    cuda.launch("fills", kernel, (3, 2, 1), (64, 1, 1), arguments, device=device, **options)


def test_every_parameter_has_its_bytes(driver: FakeDriver) -> None:
    """The bytes of a number of its type; a struct is its bytes."""
    numbers = (
        np.int32(-5), np.int64(-(1 << 50)), np.float32(np.finfo(np.float32).max), np.uint32(7), np.uint64(2**64 - 1),
        np.float64(0.1),
    )  # fmt: skip
    struct = bytes((ctypes.c_uint32 * 3)(1, 2, 0))
    expected = [
        (1 << 40).to_bytes(8, "little"),
        *(number.tobytes() for number in numbers),
        struct,
        numbers[0].tobytes(),
    ]
    driver.sizes = [len(each) for each in expected]
    launch(1 << 40, *numbers, struct, numbers[0])
    assert driver.launches[0]["parameters"] == expected
    driver.sizes = [4]
    launch(np.int32(9))
    assert driver.launches[1]["parameters"] == [np.int32(9).tobytes()]


def test_a_launch_has_its_geometry_and_the_current_stream(driver: FakeDriver) -> None:
    launch(np.int32(1))
    driver.streams[0] = 101
    launch(np.int32(1))
    assert [one["stream"] for one in driver.launches] == [100, 101]
    assert {(one["grid"], one["block"], one["shared"]) for one in driver.launches} == {((3, 2, 1), (64, 1, 1), 0)}


def test_a_kernel_is_loaded_once_for_each_text_and_device(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (0, 0, 1, None, 1):
        launch(index=index)
    assert [(name, device) for _, name, device in driver.loaded] == [("fill", 0), ("fill", 1)]
    assert [(one["function"], one["device"], one["stream"]) for one in driver.launches] == [
        (1001, 0, 100), (1001, 0, 100), (1002, 1, 200), (1001, 0, 100), (1002, 1, 200),
    ]  # fmt: skip
    assert driver.current == 0, "the device that was current is again"
    launch(kernel="other")
    monkeypatch.setattr(cuda, "text", lambda source: "another text")
    launch()
    launch(extra_flags=("-DVARIANT=1",))
    assert [one["function"] for one in driver.launches[5:]] == [1003, 1004, 1005]


def test_the_limit_of_dynamic_shared_memory_grows(driver: FakeDriver) -> None:
    for shared in (0, 100_000, 50_000, 200_000, 100_000):
        launch(shared_bytes=shared)
    assert driver.limits == [(1001, SHARED_LIMIT, 100_000), (1001, SHARED_LIMIT, 200_000)]
    assert [one["shared"] for one in driver.launches] == [0, 100_000, 50_000, 200_000, 100_000]


@pytest.mark.parametrize(("declared", "carveout"), [(16 * 1024, -1), (16 * 1024 + 4, 100)])
def test_kernels_with_much_shared_memory_get_the_carveout(driver: FakeDriver, declared: int, carveout: int) -> None:
    driver.declared["fill"] = declared
    launch()
    assert driver.functions["fill"].preferred_shared_memory_carveout == carveout


def test_a_thread_without_a_context_gets_a_context(driver: FakeDriver) -> None:
    driver.context = 0
    launch()
    launch()
    assert driver.bound == 1
    assert len(driver.launches) == 2


def test_no_launch_for_a_grid_without_blocks(driver: FakeDriver) -> None:
    cuda.launch("fills", "fill", (1, 0, 1), (64, 1, 1), (), device=torch.device("cuda"))
    assert not driver.launches
    assert driver.loaded, "what does not compile is an error all the same"


def test_an_early_kernel_has_the_attribute_of_cuda(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION has the number 6 in cuda.h."""
    launched: list[tuple[Any, ...]] = []
    errors = [0, 719]

    def launch_early(configuration: Any, function: Any, parameters: Any, extra: None) -> int:
        given = configuration._obj
        (attribute,) = given.attributes[: given.count]
        geometry = (*given.sizes, given.shared_bytes, given.stream)
        (address,) = (ctypes.c_size_t * 1).from_address(parameters.value)
        launched.append((function.value, geometry, attribute.id, attribute.value, ctypes.string_at(address, 4)))
        return errors[len(launched) - 1]

    monkeypatch.setattr(cuda, "library", lambda: SimpleNamespace(cuLaunchKernelEx=launch_early))
    launch(np.int32(5), shared_bytes=64, early=True)
    assert launched == [(1001, (3, 2, 1, 64, 1, 1, 64, 100), 6, 1, np.int32(5).tobytes())]
    assert not driver.launches
    with pytest.raises(ToolchainError, match="cuLaunchKernelEx returned error 719"):
        launch(np.int32(5), early=True)


def test_a_kernel_below_sm_90_is_not_early(driver: FakeDriver) -> None:
    """sm_89 has no griddepcontrol.wait, and the driver launches without the attribute."""
    driver.architecture = 89
    driver.sizes = [4]
    launch(np.int32(5), early=True)
    assert [one["parameters"] for one in driver.launches] == [[np.int32(5).tobytes()]]


def test_an_argument_of_another_type_is_refused(driver: FakeDriver) -> None:
    with pytest.raises(KeyError, match="int8"):
        launch(np.int8(1))
