"""A result belongs to its caller: a later call on other inputs leaves its bytes, unless the backend declares it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.backends.transfer import KeptResults
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import GEMM

QUANTIZE = case_from_labels("quantize", "mxfp8-e4m3", (4, 64), "bf16", "normal", ())
SWIZZLE = case_from_labels("swizzle", "", (4, 4), "", "position", ())
CASES = {"quantize": QUANTIZE, "swizzle": SWIZZLE, "gemm": GEMM}


class Fresh:
    """The reference. Each result passes `place`."""

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference."""
        q = ops.quantize(x, recipe)
        return replace(q, codes=self.place(q.codes, x))

    def swizzle(self, scales: torch.Tensor) -> Any:
        """As the reference."""
        return self.place(ops.swizzle(scales), scales)

    def gemm(self, a: Any, b: Any, *, out_dtype: torch.dtype) -> Any:
        """As the reference."""
        return self.place(ops.gemm(a, b, out_dtype=out_dtype), a.codes)

    def place(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The tensor that the backend gives."""
        return result


class Static(Fresh):
    """A buffer per shape."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def place(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """A view of the buffer: no tensor that an earlier call gave."""
        buffer = self.buffers.setdefault((result.shape, result.dtype), torch.empty_like(result))
        return buffer.copy_(result)[:]


class Declared(Static):
    """The same, declared."""

    declares: ClassVar = {"results": "reused"}


class Remembered(Fresh):
    """The same tensor for equal inputs, and a new tensor for new inputs."""

    def __init__(self) -> None:
        self.results: dict[bytes, torch.Tensor] = {}

    def place(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The result of the first call with this input."""
        key = bytes(given.contiguous().view(torch.uint8).flatten().tolist())
        return self.results.setdefault(key, result)


class Arena(Fresh):
    """Parts of the same storage, without repetition."""

    def __init__(self) -> None:
        self.memory, self.used = torch.zeros(1 << 20, dtype=torch.uint8), 0

    def place(self, result: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The next part."""
        start, self.used = self.used, self.used + -(-result.nbytes // 64) * 64
        part = self.memory[start : start + result.nbytes].view(result.dtype).view(result.shape)
        return part.copy_(result)


KINDS = (Fresh, Static, Declared, Remembered, Arena)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["local", "host"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_static_buffer_fails_unless_declared(name: str, kind: type[Fresh], form: str) -> None:
    """A cache and an arena share memory too, and are right."""
    if form == "local":
        record = run_case(CASES[name], Backend.local("sample", kind()))
    else:
        with hosted_backend(f"{__name__}:{kind.__name__}") as backend:
            record = run_case(CASES[name], backend)
    if kind is not Static:
        assert (record.verdict, record.message) == ("pass", "")
        assert record.declares == ("results: reused" if kind is Declared else "")
        return
    assert (record.verdict, record.stage) == ("fail", "memory")
    assert f"first result of {name}" in record.message
    assert record.explanations[0]["cause"] == "overwrites-earlier-result"


def test_memory_of_an_argument_is_that_of_the_caller() -> None:
    """Results in memory of the arguments are not kept: the caller may write there."""
    kept, x = KeptResults(), torch.zeros(8)
    assert kept.see("method", [x[2:]], [x[:2]])
    assert not kept.see("method", [x[2:]], [x[:2]])
    assert not kept.reused
    y = torch.zeros(8)
    kept.see("other", [y], [x])
    kept.see("method", [y[4:]], [x])
    assert kept.reused


def test_unknown_value_of_the_declaration_is_refused() -> None:
    backend = Fresh()
    backend.declares = {"results": "shared"}  # type: ignore[attr-defined]
    with pytest.raises(BackendError, match=r"'results' to be 'shared'.*'reused'"):
        Backend.local("sample", backend)
