"""Norms and activations of the adapters: torch on a CPU, and the calls of libraries that need a GPU, by stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.adapters import flashinfer, vllm
from narrowgauge.harness.backends.adapters import torch as torch_adapter
from narrowgauge.spec.recipes import find_recipe

EVERY = pytest.mark.parametrize("operation", ["rmsnorm", "add-rmsnorm", "silu-mul", "gelu-mul"])
EAGER = torch_adapter.Backend()


def operands(operation: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((16, 64), (16, 64), (64,)))
    return {"rmsnorm": (x, weight), "add-rmsnorm": (x, residual, weight)}.get(operation, (x,))


def judge(operation: str, result: Any, **fields: Any) -> None:
    narrowgauge.assert_result(CONTRACTS[operation], result, *operands(operation), **fields)


@EVERY
def test_eager_torch(operation: str) -> None:
    method = getattr(EAGER, operation.replace("-", "_"))
    judge(operation, method(*operands(operation)), **EAGER.declares.get(operation, {}))


@pytest.mark.long
@EVERY
def test_compiled_torch(operation: str) -> None:
    compiled = torch_adapter.Backend("compiled")
    assert operation not in compiled.declares
    judge(operation, getattr(compiled, operation.replace("-", "_"))(*operands(operation)))


def add_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    found = EAGER.add_rmsnorm(x, residual, weight, eps=eps)
    x.copy_(found["output"])
    residual.copy_(found["residual"])


def per_token(x: Any, weight: Any, eps: float, dtype: torch.dtype, ub: Any, residual: Any) -> Any:
    """vLLM's formula: R(R(z·rs)·w), and scales of rows from 2^-9 on."""
    assert dtype == torch.float8_e4m3fn
    z = x.float() if residual is None else x.float() + residual.float()
    if residual is not None:
        residual.copy_(z)
    y = (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)).to(x.dtype).float() * weight.float()
    y = y.to(x.dtype).float()
    amax = y.abs().amax(-1, keepdim=True)
    scale = (amax if ub is None else torch.minimum(amax, ub)).clamp(min=2.0**-9) / torch.tensor(448.0)
    return (y / scale).clamp(-448, 448).to(dtype), scale


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules with the functions of the libraries, in torch."""
    norms = SimpleNamespace(rmsnorm=lambda x, w, eps: EAGER.rmsnorm(x, w, eps=eps), fused_add_rmsnorm=add_in_place)
    activations = SimpleNamespace(
        silu_and_mul=EAGER.silu_mul, gelu_tanh_and_mul=EAGER.gelu_mul,
        gelu_and_mul=lambda x: EAGER.gelu_mul(x, approximate="erf"),
    )  # fmt: skip
    own = SimpleNamespace(
        rms_norm=lambda out, x, w, eps: out.copy_(EAGER.rmsnorm(x, w, eps=eps)), fused_add_rms_norm=add_in_place,
        rms_norm_dynamic_per_token_quant=per_token,
    )  # fmt: skip
    for name, module in (("flashinfer.norm", norms), ("flashinfer.activation", activations), ("vllm._custom_ops", own)):
        monkeypatch.setitem(sys.modules, name.partition(".")[0], SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, module)
    for adapter in (flashinfer, vllm):
        monkeypatch.setattr(adapter, "on_gpu", lambda x, name: None)
    monkeypatch.setattr(
        torch.ops, "_C", SimpleNamespace(
            silu_and_mul=lambda out, x: out.copy_(EAGER.silu_mul(x)),
            gelu_tanh_and_mul=lambda out, x: out.copy_(EAGER.gelu_mul(x)),
        ), raising=False,
    )  # fmt: skip


@EVERY
@pytest.mark.parametrize("adapter", [flashinfer, vllm])
def test_arguments_of_libraries(adapter: Any, operation: str, stand_ins: None) -> None:
    before = [tensor.clone() for tensor in operands(operation)]
    given = operands(operation)
    judge(
        operation, getattr(adapter.Backend(), operation.replace("-", "_"))(*given), **EAGER.declares.get(operation, {})
    )
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("operation", ["rmsnorm", "add-rmsnorm"])
def test_scales_of_rows_with_an_upper_bound(operation: str, stand_ins: None) -> None:
    name, recipe = f"{operation}-quantize", "fp8-row-e4m3@vllm-row"
    method = getattr(vllm.Backend(), name.replace("-", "_"))
    for ub in ({}, {"ub": 0.5}):
        result = method(*operands(operation), find_recipe(recipe), **ub)
        fields = {"sum_of": "unrounded"} if operation == "add-rmsnorm" else {}
        narrowgauge.assert_result(CONTRACTS[name], result, *operands(operation), recipe=recipe, **ub, **fields)
    with pytest.raises(NotImplementedError, match="gives fp8-row-e4m3@vllm-row, not fp8-row-e4m3"):
        method(*operands(operation), find_recipe("fp8-row-e4m3"))


def test_a_cpu_has_no_such_kernels() -> None:
    for adapter in (flashinfer, vllm):
        with pytest.raises(NotImplementedError, match="for a GPU: --device cuda"):
            adapter.Backend().silu_mul(torch.zeros(2, 4))
