"""Launches on a GPU: streams, arithmetic, compilation and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.sources import ToolchainError
from narrowgauge.reference import ops as reference
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.launching import Source
from tests.native.samples import assert_equal, matrix, to

pytestmark = needs_gpu

# Streams.

X = matrix("normal", 64, 256, torch.float32)
Y = matrix("outliers", 64, 256, torch.float32)


def operations() -> dict[str, tuple[torch.Tensor, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]]:
    """Two inputs on the CPU for each operation, and its call with an input on the GPU."""
    one, other = (reference.quantize(x, "nvfp4") for x in (X, Y))

    def operand(codes: torch.Tensor) -> ops.Quantized:
        scales, amax = on_gpu
        return replace(one, codes=codes, scales=scales, amax=amax, tensor_scale=None)

    on_gpu = (one.scales.to(DEVICE), one.amax.to(DEVICE))
    return {
        "amax": (X, Y, ops.amax),
        "quantize": (X, Y, lambda x: ops.quantize(x, "nvfp4").codes),
        "dequantize": (one.codes, other.codes, lambda codes: ops.dequantize(operand(codes))),
        "gemm": (one.codes, other.codes, lambda codes: ops.gemm(operand(codes), operand(codes), out_dtype=torch.half)),
    }


@pytest.mark.parametrize("operation", ["amax", "quantize", "dequantize", "gemm"])
def test_a_kernel_is_queued_on_torchs_current_stream(operation: str) -> None:
    """A side stream sleeps, changes x and calls the operation; until then the default stream sees the old x."""
    before, after, call = operations()[operation]
    old, new = before.to(DEVICE), after.to(DEVICE)
    x = old.clone()
    side = torch.cuda.Stream()
    expected_old, expected_new = call(old), call(new)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):  # no first compilation or allocation while the stream sleeps
        call(x)
    torch.cuda.synchronize()

    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)  # cycles, about a second
        x.copy_(new)
        late = call(x)
    early = call(x).cpu()
    assert not side.query(), "the side stream was to sleep until here; the launch waited for it, or the sleep is short"
    torch.cuda.synchronize()
    assert not torch.equal(expected_old, expected_new)
    assert_equal(early, expected_old)
    assert_equal(late, expected_new)


# Compilation.


BROKEN = """#include "common/formats.cuh"

extern "C" __global__ void broken(float* out) {
    out[0] = undeclared_name;
}
"""


def test_a_kernel_that_does_not_compile_is_named_with_its_line(cuda_source: Source) -> None:
    source = cuda_source(BROKEN)
    with pytest.raises(ToolchainError, match=rf"{source}\.cu .* for sm_\w+: {source}\.cu\(4\).*undeclared_name"):
        launch(source, "broken", (1,), (1,), (torch.zeros(1, device=DEVICE),), device=torch.device(DEVICE, 0))


# Errors.


def test_a_tensor_on_another_device_is_refused() -> None:
    q = ops.quantize(X.to(DEVICE), "nvfp4")
    here = q.codes.device
    calls: list[tuple[str, Callable[[], object]]] = [
        ("quantize_nvfp4_plain_fp32", lambda: ops.quantize(X.to(DEVICE), "nvfp4", amax=torch.ones(1))),
        ("dequantize_lines_fp32", lambda: ops.dequantize(replace(q, scales=q.scales.cpu()))),
        ("gemm_nvfp4", lambda: ops.gemm(q, to(q, "cpu"), out_dtype=torch.float32)),
        ("gemm_nvfp4", lambda: ops.gemm(q, q, out_dtype=torch.float32, c=torch.ones(64, 64))),
    ]
    for kernel, call in calls:
        message = f"kernel {kernel} runs on {here}, but a tensor lies on cpu; move it first"
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU at most")
def test_a_kernel_runs_on_the_device_of_its_tensors() -> None:
    with torch.cuda.device(0):
        q = ops.quantize(Y.to("cuda:1"), "nvfp4")
    assert q.codes.device == torch.device("cuda:1")
    assert_equal(q.codes, reference.quantize(Y, "nvfp4").codes)
    with pytest.raises(ValueError, match="runs on cuda:1, but a tensor lies on cuda:0; move it first"):
        ops.quantize(Y.to("cuda:1"), "nvfp4", amax=torch.ones(1, device="cuda:0"))
