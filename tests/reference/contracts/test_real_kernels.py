"""Kernels of torch, of CUDA with warp reductions, and of Triton, against their contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import narrowgauge
from narrowgauge.contract import Contract
from narrowgauge.contracts.activation import gelu_mul as gelu_mul_of_libraries
from narrowgauge.contracts.activation import silu_mul
from narrowgauge.contracts.norm import rmsnorm
from tests.reference.contracts.contracts import (
    add_rmsnorm,
    gelu_mul,
    layer_norm,
    relu_squared,
    rms_norm,
    scaled_rows,
    softmax,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
Kernel = Callable[..., Any]


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, 1)
    return gate, up


def added(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = x + residual
    h = z.float()
    return z, (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by erf. On a CPU torch's own takes an approximation of erf that is off by 5e-7 (2.13, AVX2)."""
    z = x.float()
    return F.gelu(x) if x.is_cuda else (0.5 * z * (1 + torch.erf(z * 0.5**0.5))).to(x.dtype)


TORCH: list[tuple[Contract, Kernel, dict[str, Any]]] = [
    (rmsnorm, lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), {}),
    (rmsnorm, lambda x, w: (x.float() / (x.float().norm(dim=1, keepdim=True) ** 2 / x.shape[1] + 1e-6).sqrt()
                                    * w.float()).to(x.dtype), {}),
    (add_rmsnorm, added, {}),
    (silu_mul, lambda x: F.silu(halves(x)[0]) * halves(x)[1], {"rounded": "both"}),
    (gelu_mul_of_libraries, lambda x: gelu(halves(x)[0]) * halves(x)[1], {"approximate": "erf", "rounded": "both"}),
    (gelu_mul_of_libraries, lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1], {"rounded": "both"}),
    (gelu_mul, lambda x: (F.gelu(halves(x)[0].float(), approximate="tanh") * halves(x)[1].float()).to(x.dtype), {}),
    (gelu_mul, lambda x: (F.gelu(halves(x)[0].double(), approximate="tanh") * halves(x)[1].double()).to(x.dtype), {}),
    (relu_squared, lambda x: F.relu(x.float()).square().to(x.dtype), {}),
    (layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), {}),
    (layer_norm, lambda x, w, b: F.layer_norm(x.double(), w.shape, w.double(), b.double(), 1e-5).to(x.dtype), {}),
    (rms_norm, lambda x, w: F.rms_norm(x.float(), w.shape, 1 + w.float(), 1e-6).to(x.dtype), {}),
    (softmax, lambda x: F.softmax(x, 1), {}),
    (scaled_rows, lambda x: (x.float() / x.float().abs().amax(1, keepdim=True).clamp(min=1e-10)).to(x.dtype), {}),
]  # fmt: skip


def given(contract: Contract, shape: tuple[int, int], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-6, 7, (shape[0], 1), generator=draw).float())
    made = []
    for kind, _ in contract.tensors.values():
        x = torch.randn(shape, generator=draw) * scale
        made.append((x if kind.__name__ == "Matrix" else x[0] / scale[0]).to(dtype).to(device))
    return made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("number", range(len(TORCH)))
def test_kernels_of_torch_are_right(number: int, dtype: torch.dtype, device: str) -> None:
    contract, kernel, options = TORCH[number]
    for shape in ((33, 512), (4, 4096)):
        tensors = given(contract, shape, dtype, device)
        narrowgauge.assert_result(contract, kernel(*tensors), *tensors, **options)


SOURCE = r"""
#include <cuda_bf16.h>
extern "C" __global__ void rmsnorm(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* y, int K, float eps) {
    const __nv_bfloat16* row = x + (size_t)blockIdx.x * K;
    float sum = 0;
    for (int k = threadIdx.x; k < K; k += blockDim.x) { float z = __bfloat162float(row[k]); sum = fmaf(z, z, sum); }
    for (int lane = 16; lane; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    __shared__ float warps[32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += warps[i];
    float rs = ROOT(sum * (1.0f / K) + eps);
    for (int k = threadIdx.x; k < K; k += blockDim.x)
        y[(size_t)blockIdx.x * K + k] = __float2bfloat16(__bfloat162float(row[k]) * rs * __bfloat162float(w[k]));
}
extern "C" __global__ void silu(const __nv_bfloat16* x, const __nv_bfloat16*, __nv_bfloat16* y, int K, float) {
    for (int k = threadIdx.x; k < K / 2; k += blockDim.x) {
        float g = __bfloat162float(x[(size_t)blockIdx.x * K + k]);
        float v = __bfloat162float(x[(size_t)blockIdx.x * K + K / 2 + k]);
        float act = __bfloat162float(__float2bfloat16(SILU(g)));
        y[(size_t)blockIdx.x * (K / 2) + k] = __float2bfloat16(act * v);
    }
}
"""
CUDA = [
    ("rsqrtf", "(g / (1.0f + expf(-g)))", ()),
    ("1.0f / sqrtf", "(g * (1.0f / (1.0f + expf(-g))))", ()),
    ("__frsqrt_rn", "__fdividef(g, 1.0f + exp2f(-g * 1.4426950408889634f))", ()),
    ("rsqrtf", "__fdividef(g, 1.0f + expf(-g))", ("-prec-div=false", "-prec-sqrt=false")),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("root", "silu", "flags"), CUDA)
def test_kernels_of_cuda_are_right(root: str, silu: str, flags: tuple[str, ...]) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    source = SOURCE.replace("ROOT", root).replace("SILU(g)", silu)
    module = cupy.RawModule(code=source, options=flags)
    for shape in ((64, 512), (128, 4096), (7, 1030)):
        x, w = given(rmsnorm, shape, torch.bfloat16, "cuda")
        y, act = torch.empty_like(x), torch.empty_like(x[:, : shape[1] // 2])
        for name, out in (("rmsnorm", y), ("silu", act)):
            pointers = [tensor.data_ptr() for tensor in (x, w, out)]
            module.get_function(name)((shape[0],), (256,), (*pointers, cupy.int32(shape[1]), cupy.float32(1e-6)))
        torch.cuda.synchronize()
        narrowgauge.assert_result(rmsnorm, y, x, w)
        narrowgauge.assert_result(silu_mul, act, x, rounded="both")
