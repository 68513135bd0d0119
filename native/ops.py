"""Public functions of the native kernels, with the interface of `reference.ops`. Tensors on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from narrowgauge.native.attention.attention import attention, attention_sinks, merge_attention
from narrowgauge.native.attention.cache import kv_read, kv_write
from narrowgauge.native.collectives import all_gather, all_reduce, all_reduce_norm_quantize, reduce_scatter
from narrowgauge.native.experts.mixture import moe
from narrowgauge.native.experts.products import gemm_contiguous, gemm_masked
from narrowgauge.native.experts.rows import combine, permute
from narrowgauge.native.fused.activation import (
    gelu_mul_quantize,
    relu_squared_quantize,
    silu_mul_quantize,
    silu_mul_quantize_static,
    swiglu_clamped_quantize,
)
from narrowgauge.native.fused.norm import (
    add_rmsnorm_quantize,
    add_rmsnorm_quantize_static,
    layernorm_quantize,
    rmsnorm_quantize,
    rmsnorm_quantize_static,
)
from narrowgauge.native.fused.rotary import rope_partial_quantize, rope_quantize
from narrowgauge.native.fused.training import (
    rmsnorm_backward,
    rmsnorm_backward_quantize_both,
    rmsnorm_quantize_both,
    rmsnorm_quantize_both_stochastic,
    rmsnorm_quantize_stochastic,
    silu_mul_backward,
    silu_mul_backward_quantize_both,
    silu_mul_backward_quantize_stochastic,
    silu_mul_quantize_both,
)
from narrowgauge.native.gemm.gemm import gemm, gemm_grouped, gemm_order
from narrowgauge.native.gemm.quantized import gemm_quantized
from narrowgauge.native.gemm.scaled import scaled_gemm, scaled_gemm_bias
from narrowgauge.native.gemm.weight_only import weight_only_gemm, weight_only_gemm_bias
from narrowgauge.native.modules import GroupedLinear, LayerNormLinear, Linear, MoELayer, TransformerLayer
from narrowgauge.native.quantize.amax import amax, another_grid
from narrowgauge.native.quantize.delayed import update_scale
from narrowgauge.native.quantize.dequantize import dequantize
from narrowgauge.native.quantize.hadamard import transform
from narrowgauge.native.quantize.layout import pack_scales, swizzle, unpack_scales, unswizzle
from narrowgauge.native.quantize.quantize import quantize, quantize_both, quantize_grouped
from narrowgauge.native.quantize.sections import pad_sections, unpad_sections
from narrowgauge.native.runtime import cuda, host
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe

__all__ = [
    "GroupedLinear", "GroupedQuantized", "LayerNormLinear", "Linear", "MoELayer", "Quantized", "TransformerLayer",
    "add_rmsnorm_quantize", "add_rmsnorm_quantize_static", "all_gather", "all_reduce", "all_reduce_norm_quantize",
    "amax", "attention", "attention_sinks", "check", "combine", "declares", "dequantize", "find_recipe",
    "gelu_mul_quantize", "gemm", "gemm_contiguous", "gemm_grouped", "gemm_masked", "gemm_order", "gemm_quantized",
    "kv_read", "kv_write", "layernorm_quantize", "merge_attention", "moe", "pack_scales", "pad_sections", "permute",
    "quantize", "quantize_both", "quantize_grouped", "reduce_scatter", "relu_squared_quantize", "rmsnorm_backward",
    "rmsnorm_backward_quantize_both", "rmsnorm_quantize", "rmsnorm_quantize_both",
    "rmsnorm_quantize_both_stochastic", "rmsnorm_quantize_static", "rmsnorm_quantize_stochastic",
    "rope_partial_quantize", "rope_quantize", "scaled_gemm", "scaled_gemm_bias", "silu_mul_backward",
    "silu_mul_backward_quantize_both", "silu_mul_backward_quantize_stochastic", "silu_mul_quantize",
    "silu_mul_quantize_both", "silu_mul_quantize_static", "swiglu_clamped_quantize", "swizzle", "transform",
    "unpack_scales", "unpad_sections", "unswizzle", "update_scale", "variations", "weight_only_gemm",
    "weight_only_gemm_bias",
]  # fmt: skip

_REDUCING = ("all-reduce", "reduce-scatter", "all-reduce-norm-quantize")
_WEIGHT_ONLY = {"decode": "rounded-scale"}
declares: dict[str, Any] = {
    "transform": "butterfly", **{name: {"reduce": "rank-order"} for name in _REDUCING},
    "weight-only-gemm": _WEIGHT_ONLY, "weight-only-gemm-bias": _WEIGHT_ONLY,
}  # fmt: skip
"""Declared orders of summation, and fields of contracts. A rotation adds in the butterfly order of the reference and
gives the same bytes. `gemm_order` names the order of a GEMM."""


def check(device: torch.device) -> None:
    """Raises ToolchainError if kernels cannot be compiled or launched for `device`: no C++ compiler, no CuPy."""
    (cuda if device.type == "cuda" else host).check()


def variations(device: torch.device, shuffles: int = 1) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Contexts in which a kernel must give the same bytes: on a CPU the orders of threads, on a GPU two grids.

    `shuffles`: number of shuffled orders on a CPU, with different seeds.
    """
    if device.type == "cpu":
        ways: dict[str, Callable[[], AbstractContextManager[None]]]
        ways = {f"{order} threads": partial(host.thread_order, order) for order in host.ORDERS}
        for seed in range(2, shuffles + 1):
            ways[f"shuffled threads (seed {seed})"] = partial(host.thread_order, "shuffled", seed)
        return ways
    return {"first run": nullcontext, "second run, another grid": another_grid}
