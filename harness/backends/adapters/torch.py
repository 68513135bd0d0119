"""torch as a backend: `torch._scaled_mm` on FP8 operands with a scale for each tensor or each row, `torch._int_mm` of
INT8, on a GPU `torch.nn.functional.scaled_mm` of blocks of 1x128 and 128x128; norms and gated activations, eager and
compiled; `scaled_dot_product_attention` of the decoded rows of an FP8 cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from narrowgauge.contracts.attention import SCALE
from narrowgauge.harness.backends.adapters.common import base_name, fp8_cache
from narrowgauge.spec.kv_cache import Cache, slots_of
from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
from narrowgauge.spec.recipe import Recipe

TESTED_VERSION = "2.13.0 on a CPU, 2.11 on an H200"
_RECIPES = ("fp8-current-e4m3", "fp8-row-e4m3")
_BLOCKS = {"fp8-block-1x128-e4m3-fp32": "BlockWise1x128", "fp8-block-128x128-e4m3-fp32": "BlockWise128x128"}
"""Recipes of a GPU, and their `ScalingType`."""
_INT8, _FEW_INT8 = "int8-row", 16
"""Recipe of `torch._int_mm`, and rows of a that it refuses on a GPU."""
_WHOLE_K = 1024
"""K up to which no product of blocks had slices of K, on an H200."""


VARIANTS = ("compiled",)
"""What torch.compile makes of the norms and activations."""
_EAGER = {"rounded": "both"}
"""Eager activations are tensors before they are multiplied; compiled ones are rounded once."""


class Backend:
    """On a CPU torch decodes both operands to float32 first. On a GPU the order is that of cuBLAS or CUTLASS."""

    dialects: ClassVar = {**dict.fromkeys((*_RECIPES, *_BLOCKS, _INT8), "te"), "fp8-static-e4m3": "vllm"}
    constraints: ClassVar = {"K": 16, "N": 16, "out": ["bf16", "fp32"], "layout": ["tn"]}

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; torch has {', '.join(VARIANTS)}")
        self._made: Callable[..., Any] = torch.compile(dynamic=True) if variant else lambda function: function
        fields = {} if variant else {"silu-mul": _EAGER, "gelu-mul": _EAGER}
        self.declares: dict[str, Any] = {"operands": "decoded-float32", "attention": {"decode": "rounded"}, **fields}

    def check(self, device: torch.device) -> None:
        """On a GPU, FP8 tensor cores keep 13 fraction bits of a sum, and no operand is decoded first."""
        if device.type == "cuda":
            del self.declares["operands"]
            self.declares["gemm"] = "probe-13"
            self.gemm_order = _order_on_gpu

    def scaled_gemm(
        self, a: Quantized | BatchedQuantized, b: Quantized | BatchedQuantized, *, out_dtype: str = "bfloat16"
    ) -> torch.Tensor:
        """`gemm`, and products of INT8 with a scale for each row: R((acc·s_a)·s_b) of the int32 sums. The products of a
        batch are calls of their own. Raises NotImplementedError as `gemm` does, and for shapes of INT8."""
        if isinstance(a, BatchedQuantized) and isinstance(b, BatchedQuantized):
            pairs = zip(a.matrices(), b.matrices(), strict=True)
            return torch.stack([self.scaled_gemm(*pair, out_dtype=out_dtype) for pair in pairs])
        assert isinstance(a, Quantized)
        assert isinstance(b, Quantized)
        dtype = getattr(torch, out_dtype)
        if str(a.recipe) != _INT8:
            return self.gemm(a, b, out_dtype=dtype)
        if str(b.recipe) != _INT8 or a.transposed or b.transposed or (a.codes.is_cuda and a.shape[0] <= _FEW_INT8):
            raise NotImplementedError(f"torch._int_mm takes INT8 rows of K, on a GPU more than {_FEW_INT8}; a is {a}")
        sums = torch._int_mm(a.codes.view(torch.int8), b.codes.view(torch.int8).T)
        return (sums.float() * a.scales * b.scales.T).to(dtype)

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6) -> torch.Tensor:
        """`torch.nn.functional.rms_norm` of the rows of `x` (M, K)."""
        y: torch.Tensor = self._made(_rmsnorm)(x, weight, eps)
        return y

    def add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6
    ) -> dict[str, torch.Tensor]:
        """The sum of `x` and `residual`, and its norm."""
        total, y = self._made(_add_rmsnorm)(x, residual, weight, eps)
        return {"residual": total, "output": y}

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """`torch.nn.functional.silu` of the first half of the columns, times the second half."""
        y: torch.Tensor = self._made(_silu_mul)(x)
        return y

    def gelu_mul(self, x: torch.Tensor, *, approximate: str = "tanh") -> torch.Tensor:
        """`torch.nn.functional.gelu` of the first half of the columns, times the second half."""
        y: torch.Tensor = self._made(_gelu_mul)(x, {"tanh": "tanh", "erf": "none"}[approximate])
        return y

    def attention(
        self, q: torch.Tensor, cache: Cache, pages: torch.Tensor, lengths: torch.Tensor, q_lengths: torch.Tensor,
        recipe: Recipe, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
        scale: float = SCALE, causal: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """`torch.nn.functional.scaled_dot_product_attention` of each request, whose keys and values are decoded to the
        dtype of q. Raises NotImplementedError for other caches than `fp8_cache` takes."""
        if k_scale is None or v_scale is None:
            raise NotImplementedError(f"the adapter decodes FP8 with a scale for k and one for v, not {recipe}")
        slots, counts = slots_of(pages, lengths, cache.page), lengths.tolist()
        halves = zip(fp8_cache(cache, k_scale, v_scale), (k_scale, v_scale), strict=True)
        keys, values = (
            torch.split((half.flatten(0, 1)[slots].float() * factor).to(q.dtype), counts) for half, factor in halves
        )
        results = []
        for rows, *tokens in zip(torch.split(q, q_lengths.tolist()), keys, values, strict=True):
            queries, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (rows, *tokens))
            seen = torch.ones(queries.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            mask = seen.tril(k.shape[2] - queries.shape[2]) if causal else None
            found = torch.nn.functional.scaled_dot_product_attention(
                queries, k, v, attn_mask=mask, scale=scale, enable_gqa=True
            )
            results.append(found.squeeze(0).transpose(0, 1))
        return torch.cat(results)

    def gemm(self, a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
        """`a` (M, K), `b` (N, K): the output (M, N). Raises NotImplementedError for refused recipes, for row scales
        with float32 outputs on a GPU, and for blocks on a CPU."""
        if str(a.recipe) in _BLOCKS:
            return _blocks(a, b, out_dtype)
        name = base_name(a.recipe, _RECIPES, {})
        if base_name(b.recipe, _RECIPES, {}) != name:
            raise NotImplementedError(f"torch._scaled_mm takes operands of one recipe, not {a.recipe} and {b.recipe}")
        scales: Any = (a.scales, b.scales.T.contiguous()) if "row" in name else (a.scales.view(()), b.scales.view(()))
        if "row" in name and out_dtype is not torch.bfloat16 and a.codes.is_cuda:
            raise NotImplementedError("torch._scaled_mm with row scales gives bfloat16 on a GPU")
        fp8 = torch.float8_e4m3fn
        operands = a.codes.view(fp8), b.codes.view(fp8).T
        return torch._scaled_mm(*operands, scale_a=scales[0], scale_b=scales[1], out_dtype=out_dtype)

    def gemm_grouped(
        self, a: GroupedQuantized, b: list[Quantized], *, out_dtype: torch.dtype
    ) -> torch.Tensor:  # fmt: skip
        """`torch._scaled_grouped_mm` of rows, on a GPU. Raises NotImplementedError for refused recipes and outputs."""
        names = {base_name(q.recipe, ("fp8-row-e4m3",), {}) for q in (a, *b)}
        if not names or not a.codes.is_cuda or out_dtype is not torch.bfloat16:
            raise NotImplementedError("torch._scaled_grouped_mm is for a GPU, and gives bfloat16")
        left, right = (codes.view(torch.float8_e4m3fn) for codes in (a.codes, torch.stack([q.codes for q in b])))
        scales = a.scales.view(-1), torch.stack([q.scales.view(-1) for q in b])
        ends = torch.as_tensor(a.sizes, device=left.device).cumsum(0).int()
        return torch._scaled_grouped_mm(left, right.transpose(1, 2), *scales, offs=ends, out_dtype=out_dtype)


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps)


def _add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return total, _rmsnorm(total, weight, eps)


def _silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _gelu_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def _blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """The product of blocks. cuBLAS takes the scales of 1x128 in columns, and those of 128x128 in rows of a multiple of
    four scales."""
    names = [base_name(q.recipe, _BLOCKS, {}) for q in (a, b)]
    if not a.codes.is_cuda or out_dtype is not torch.bfloat16 or a.shape[1] % 128:
        raise NotImplementedError("scaled_mm takes blocks on a GPU, with K % 128 = 0, and gives bfloat16")
    kinds = torch.nn.functional.ScalingType
    scales = [
        q.scales.T.contiguous().T
        if name.startswith("fp8-block-1x128")
        else torch.nn.functional.pad(q.scales, (0, -q.scales.shape[1] % 4)).T
        for q, name in zip((a, b), names, strict=True)
    ]
    return torch.nn.functional.scaled_mm(
        a.codes.view(torch.float8_e4m3fn), b.codes.view(torch.float8_e4m3fn).T,
        scales[0], getattr(kinds, _BLOCKS[names[0]]), scales[1], getattr(kinds, _BLOCKS[names[1]]),
        output_dtype=out_dtype,
    )  # fmt: skip


def _order_on_gpu(a: Quantized | list[Quantized], b: Quantized | list[Quantized]) -> str:
    """The order of blocks, and of sections. Any order, truncated, for other scales, which are probed, and for K that
    cuBLAS may cut into slices."""
    first = a if isinstance(a, Quantized) else a[0]
    if first.shape[1] > _WHOLE_K or not (isinstance(a, list) or str(first.recipe) in _BLOCKS):
        return "truncating"
    return "aligned-13-32-128" if isinstance(a, list) else "aligned-13-32"
