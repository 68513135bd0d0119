"""Norms and activations of the adapters: torch on a CPU, and the calls of libraries that need a GPU, by stand-ins."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.adapt.words import unpack_words
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.adapters import conch, flashinfer, humming, liger, vllm
from narrowgauge.harness.backends.adapters import torch as torch_adapter
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.quantized import Quantized
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # of torch's own import
@pytest.mark.long
@EVERY
def test_compiled_torch(operation: str) -> None:
    compiled = torch_adapter.Backend("compiled")
    assert operation not in compiled.declares
    judge(operation, getattr(compiled, operation.replace("-", "_"))(*operands(operation)))


@pytest.mark.parametrize("family", ["one-hot-ends", "two-level"])
def test_torch_attends_to_decoded_rows(family: str) -> None:
    case = case_from_labels("attention", "fp8-static-e4m3@vllm", (3, 4, 64, 5, 16, 2, 64, 2, 2), "bf16", family)
    record = run_case(case, Backend.local("torch", torch_adapter.Backend()))
    assert record.verdict == "pass", record.message


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


def norm_of_liger(x: Any, weight: Any, eps: float, offset: float, mode: str) -> torch.Tensor:
    """`LigerRMSNormFunction`: a cast before the weight, but in the mode gemma."""
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    y = y.to(x.dtype).float() if mode == "llama" else y
    return (y * (weight.float() + offset)).to(x.dtype)


def add_norm_of_liger(x: Any, residual: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return norm_of_liger(x + residual, *rest), x + residual


def write_rows(k: Any, v: Any, keys: Any, values: Any, slots: Any, dtype: str, k_scale: Any, v_scale: Any) -> None:
    assert dtype == "fp8"
    for x, cache, scale in ((k, keys, k_scale), (v, values, v_scale)):
        codes = (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        cache.flatten(0, 1)[slots[slots >= 0]] = codes[slots >= 0]


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
    of_conch = SimpleNamespace(
        rms_norm=norms.rmsnorm, fused_add_rms_norm=lambda x, r, w, eps: (add_in_place(x, r, w, eps), (x, r))[1],
        silu_and_mul=EAGER.silu_mul, reshape_and_cache=write_rows,
    )  # fmt: skip
    of_liger = {
        "rms_norm": ("RMSNorm", norm_of_liger),
        "fused_add_rms_norm": ("FusedAddRMSNorm", add_norm_of_liger),
        "swiglu": ("SiLUMul", lambda gate, up: EAGER.silu_mul(torch.cat([gate, up], 1))),
        "geglu": ("GELUMul", lambda gate, up: EAGER.gelu_mul(torch.cat([gate, up], 1))),
    }
    modules: dict[str, Any] = {"flashinfer.norm": norms, "flashinfer.activation": activations, "vllm._custom_ops": own}
    places = ("normalization.rms_norm", "activation.silu_and_mul", "vllm.reshape_and_cache")
    modules |= dict.fromkeys((f"conch.ops.{place}" for place in places), of_conch)
    for module, (name, apply) in of_liger.items():
        modules[f"liger_kernel.ops.{module}"] = SimpleNamespace(
            **{f"Liger{name}Function": SimpleNamespace(apply=apply)}
        )
    for name, module in modules.items():
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
@pytest.mark.parametrize("adapter", [conch, flashinfer, vllm])
def test_arguments_of_libraries(adapter: Any, operation: str, stand_ins: None) -> None:
    if not hasattr(adapter.Backend, operation.replace("-", "_")):
        pytest.skip("the adapter has no such kernel")
    before = [tensor.clone() for tensor in operands(operation)]
    given = operands(operation)
    judge(
        operation, getattr(adapter.Backend(), operation.replace("-", "_"))(*given), **EAGER.declares.get(operation, {})
    )
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("variant", ["", "gemma"])
@pytest.mark.parametrize("centred", [False, True])
@EVERY
def test_liger_declares_its_dialects(operation: str, centred: bool, variant: str, stand_ins: None) -> None:
    backend = liger.Backend(variant)
    dialect = backend.declares[operation]
    fields = dict(CONTRACTS[operation].dialects[dialect])
    options = {"zero_centered": True} if centred and "norm" in operation else {}
    result = getattr(backend, operation.replace("-", "_"))(*operands(operation), **options)
    judge(operation, result, **fields, **options)
    if "norm" in operation:
        other = {"rounded": "result" if fields["rounded"] == "both" else "both"}
        with pytest.raises(AssertionError):
            judge(operation, result, **fields | other, **options)


def test_a_weight_of_minus_zero_behind_an_offset(stand_ins: None) -> None:
    x, weight = operands("rmsnorm")
    weight[3] = -0.0
    result = liger.Backend().rmsnorm(x, weight)
    fields = dict(CONTRACTS["rmsnorm"].dialects["liger"])
    narrowgauge.assert_result(CONTRACTS["rmsnorm"], result, x, weight, **fields)
    with pytest.raises(AssertionError, match="16 of 1 024 elements of output differ"):
        narrowgauge.assert_result(CONTRACTS["rmsnorm"], result, x, weight, **fields | {"zero_weight": "kept"})


def test_humming_takes_words_and_narrow_scales() -> None:
    codes = torch.arange(128 * 128, dtype=torch.int32).remainder(251).to(torch.uint8).view(128, 128)
    points, scales = torch.arange(128, dtype=torch.uint8).view(128, 1) % 16, torch.full((128, 1), 1.001)
    q = Quantized(codes[:, :64].contiguous(), scales, None, find_recipe("int4-g128-zp"), (128, 128), zeros=points)
    found = humming.layer_tensors(q, "int4-g128-zp", torch.bfloat16)
    assert torch.equal(unpack_words(found["weight"], 4), unpack(q.codes, 128))
    assert torch.equal(unpack_words(found["zero_point"], 4, 0), points)
    assert torch.equal(found["weight_scale"], scales.bfloat16())
    q = Quantized(q.codes, scales, None, find_recipe("int4-g128"), (128, 128))
    assert torch.equal(unpack_words(humming.layer_tensors(q, "int4-g128", torch.float16)["weight"], 4) ^ 8,
                       unpack(q.codes, 128))  # fmt: skip
    rows = Quantized(codes, scales, None, find_recipe("fp8-row-e4m3"), (128, 128))
    with pytest.raises(NotImplementedError, match=r"takes scales of rows in torch\.bfloat16"):
        humming.layer_tensors(rows, "fp8-row-e4m3", torch.bfloat16)


@pytest.mark.parametrize("variant", ["", "channel"])
def test_humming_compiles_each_kind_of_weights_when_it_is_loaded(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    class Layer:
        """Stands in for HummingLayer and keeps its arguments."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(arguments[:2])

        def cuda(self) -> Layer:
            return self

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            assert tensors["weight"].shape[0] == 128

        def transform(self) -> None:
            pass

        def __call__(self, a: torch.Tensor) -> torch.Tensor:
            return a

    monkeypatch.setattr(humming, "library", lambda *_: SimpleNamespace(HummingLayer=Layer))
    backend = humming.Backend(variant)
    backend.warm_up(torch.device("cpu"))
    assert made == [(128, 128)] * (1 if variant else 5)


def test_conch_writes_rows_of_a_cache(stand_ins: None) -> None:
    recipe = find_recipe("fp8-static-e4m3@conch-kv")
    k, v = (torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    before = Cache(torch.zeros(3, 8, 4, 64).byte(), torch.zeros(3, 8, 4, 64).byte(), None, None, recipe, "nhd", 8)
    slots, scales = (
        torch.tensor([23, 0, -1, 9, 8, 7]),
        {"k_scale": torch.tensor([0.01]), "v_scale": torch.tensor([0.5])},
    )
    after = conch.Backend().kv_write(k, v, before.copy(), slots, recipe, **scales)
    narrowgauge.assert_result(CONTRACTS["kv-write"], after, k, v, before, slots, **scales)
    for change in ({"layout": "hnd"}, {}):
        given = scales if change else scales | {"k_scale": torch.ones(4)}
        with pytest.raises(NotImplementedError, match="pages in the layout nhd, and one scale for k and one for v"):
            conch.Backend().kv_write(k, v, replace(before, **change), slots, recipe, **given)


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
    with pytest.raises(NotImplementedError, match="for a GPU: --device cuda"):
        flashinfer.Backend().silu_mul(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="no variant 'llama'; liger has gemma"):
        liger.Backend("llama")


def test_a_cpu_has_kernels_of_its_own_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "library", lambda name, install: None)
    backend = vllm.Backend()
    assert backend.declares["rmsnorm"] == "vllm-static"
    backend.check(torch.device("cpu"))
    assert set(backend.declares.values()) == {"vllm-cpu"}


@pytest.mark.long
def test_one_row_of_compiled_torch_is_another_function() -> None:
    """With M = 1 inductor fuses the sum into the mean, and drops its cast; more rows have a kernel for each."""
    compiled = torch_adapter.Backend("compiled")
    x, residual, weight = operands("add-rmsnorm")
    rows = [compiled.add_rmsnorm(x[i : i + 1], residual[i : i + 1], weight) for i in range(len(x))]
    alone = {name: torch.cat([row[name] for row in rows]) for name in ("residual", "output")}
    judge("add-rmsnorm", alone, sum_of="unrounded", product_of="stored")
    judge("add-rmsnorm", compiled.add_rmsnorm(x, residual, weight))
    with pytest.raises(AssertionError):
        judge("add-rmsnorm", alone)
