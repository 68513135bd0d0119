"""Operations of `native` on the device of a test: a test holds its tensors on the CPU.

`ops` moves the tensors of a call to the device and the results back, so that a test compares a GPU like a CPU. A test
marked ON_EVERY_DEVICE runs on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import fields, replace
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch

from narrowgauge.native import ops as native
from narrowgauge.native.ops import GroupedQuantized, Quantized
from narrowgauge.spec.quantized import BatchedQuantized
from tests.native.gpu import HOPPER, needs_gpu

_NO_HOPPER = "this GPU is no Hopper, or absent; the kernels of Hopper's tensor cores are not run"
needs_hopper = pytest.mark.skipif(not HOPPER, reason=_NO_HOPPER)
_GPU, _HOPPER = (pytest.param("cuda", marks=marks) for marks in (needs_gpu, needs_hopper))
_SLOW_CPU = pytest.param("cpu", marks=pytest.mark.long)
# The fixture `device` of conftest.py sets `ops.device`.
ON_EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", _GPU], indirect=True)
ON_EVERY_DEVICE_CPU_LONG = pytest.mark.parametrize("device", [_SLOW_CPU, _GPU], indirect=True)
ON_CPU_AND_HOPPER = pytest.mark.parametrize("device", ["cpu", _HOPPER], indirect=True)


def on_every_device(
    argument: str, values: Sequence[Any], each: int = 1, quick: Container[Any] = ()
) -> pytest.MarkDecorator:
    """Parametrization: a GPU takes all `values`; a CPU in `make test` takes `quick`, or the first of every `each`."""
    long = [value not in quick if quick else bool(number % each) for number, value in enumerate(values)]
    rows = [
        pytest.param("cpu", value, marks=pytest.mark.long if slow else ())
        for value, slow in zip(values, long, strict=True)
    ]
    rows += [pytest.param("cuda", value, marks=needs_gpu) for value in values]
    return pytest.mark.parametrize(("device", argument), rows, indirect=["device"])


_BUILDS = {"optimized": ("cpu", ()), "unoptimized": ("cpu", ("-O0", "-march=x86-64"))}
_GPU_BUILDS = {"cuda": ("cuda", ()), "cuda-portable": ("cuda", ("-DNARROWGAUGE_PORTABLE",))}
EVERY_BUILD = pytest.mark.parametrize(
    ("device", "flags"),
    [
        *(pytest.param(*build, id=name) for name, build in _BUILDS.items()),
        *(pytest.param(*build, id=name, marks=needs_gpu) for name, build in _GPU_BUILDS.items()),
    ],
    indirect=["device"],
)
"""Builds of device functions: for a CPU, for a GPU with the conversions of the chip, and without them."""


class Operations:
    """Functions of `narrowgauge.native.ops` for tensors of the CPU, run on `device`."""

    def __init__(self) -> None:
        self.device = "cpu"

    def __getattr__(self, name: str) -> Any:
        found = getattr(native, name)
        return partial(on_device, found) if isinstance(found, FunctionType) else found


ops = Operations()


def on_device(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Result, on the CPU, of a call on the device of the test.

    Checks that the results lie on this device and that the inputs do not change.
    """
    if ops.device == "cpu":
        return call(*arguments, **options)
    inputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def move(x: torch.Tensor) -> torch.Tensor:
        inputs.append((x, moved(x, ops.device)))
        return inputs[-1][1]

    def fetch(x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == ops.device, f"a result lies on {x.device}"
        return x.cpu()

    result = converted(call(*converted(arguments, move), **converted(options, move)), fetch)
    for before, after in inputs:
        assert torch.equal(_memory(after).cpu(), _memory(before)), "the call wrote to an input"
    return result


def converted(value: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `convert` applied to each tensor in tuples, lists, dictionaries and operands."""
    match value:
        case torch.Tensor():
            return convert(value)
        case tuple() | list():
            return type(value)(converted(each, convert) for each in value)
        case dict():
            return {name: converted(each, convert) for name, each in value.items()}
        case Quantized() | BatchedQuantized() | GroupedQuantized():
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            tensors = {name: convert(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
            return replace(value, **tensors)
        case _:
            return value


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of `x` on a device with its strides, offset and surrounding memory, guard zones included."""
    memory = _memory(x).to(device, copy=True).untyped_storage()
    return torch.tensor([], dtype=x.dtype, device=device).set_(memory, x.storage_offset(), x.shape, x.stride())


def _memory(x: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of `x`."""
    return torch.tensor([], dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
