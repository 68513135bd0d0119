"""Dialects of the contracts: values of the fields by the names of libraries, with the release that they hold for.

The bytes of the kernels are in tests/golden/serving; each lies inside of its dialect. Recipes of the same name
(`narrowgauge.spec.dialects`) have the scale, the factor of the elements and the code of NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STORED = {"sum_of": "stored", "product_of": "stored"}
_UNROUNDED = {"sum_of": "unrounded", "product_of": "unrounded"}
_FLUSHED = {"subnormals": "flushed"}
_OFFSET = {"zero_weight": "free"}

NORMS: Mapping[str, Mapping[str, Any]] = {
    # vLLM 0.33.0, csrc/layernorm_kernels.cu and csrc/layernorm_quant_kernels.cu; before (0112cf2) with a further cast.
    "vllm-static": {**_STORED, "rounded": "result"},
    "vllm-static-before-0.33": {**_STORED, "rounded": "both"},
    # vLLM 0.33.0, csrc/quantization/fused_kernels/layernorm_utils.cuh: scales of rows, and of groups of 64 or 128.
    "vllm-row": {**_UNROUNDED, "rounded": "both"},
    "vllm-block": {**_UNROUNDED, "rounded": "both"},
    # vLLM 0.32.0, csrc/cpu/layernorm.cpp, of float16; results of bfloat16 are truncated on a CPU with AVX2 alone.
    "vllm-cpu": {"sum_of": "unrounded", "product_of": "stored", "rounded": "result"},
    # FlashInfer 0.7.2.post1: norm/kernels (CuTe DSL, the default), and include/flashinfer/norm.cuh with fast math.
    "flashinfer": {**_UNROUNDED, **_OFFSET, "rounded": "none"},
    "flashinfer-cuda": {**_UNROUNDED, **_OFFSET, "rounded": "none", **_FLUSHED},
    "flashinfer-norm": {**_UNROUNDED, **_OFFSET, "rounded": "result"},
    "flashinfer-norm-cuda": {**_UNROUNDED, **_OFFSET, "rounded": "result", **_FLUSHED},
    "flashinfer-block": {**_UNROUNDED, "rounded": "result", **_FLUSHED},
    "flashinfer-nvfp4": {**_UNROUNDED, "rounded": "first", "order": "weight-first"},
    # TensorRT-LLM in FlashInfer 0.7.2.post1, include/flashinfer/comm/trtllm_allreduce_fusion.cuh.
    "trtllm": {**_STORED, **_OFFSET, "rounded": "result"},
    # SGLang 0.5.23: ops/layernorm/rmsnorm_fp8_e8m0.py, Triton, with scales of UE8M0, and the fused sum with and without
    # cast_x_before_out_mul, jit_kernel/csrc/elementwise/fused_add_rmsnorm.cuh.
    "sglang-e8m0": {**_UNROUNDED, "rounded": "result"},
    "sglang-add": {"sum_of": "unrounded", "product_of": "stored", "rounded": "result", "order": "weight-first"},
    "sglang-add-cast": {**_UNROUNDED, "rounded": "both"},
    # conch-triton-kernels 1.3.
    "conch": {**_STORED, "rounded": "both"},
    # liger-kernel 0.8.5, casting_mode llama and gemma.
    "liger": {**_STORED, **_OFFSET, "rounded": "both"},
    "liger-gemma": {**_STORED, **_OFFSET, "rounded": "result"},
    # torch 2.11.0, torch.nn.functional.rms_norm.
    "torch": {**_UNROUNDED, "rounded": "result"},
}

ACTIVATIONS: Mapping[str, Mapping[str, Any]] = {
    # vLLM 0.33.0, csrc/activation_kernels.cu and csrc/quantization/activation_kernels.cu.
    "vllm-silu-static": {"rounded": "both"},
    "vllm-activation": {"rounded": "both"},
    "vllm-silu-nvfp4": {"rounded": "result", "fast_math": True},
    "vllm-silu-block": {"rounded": "none"},
    "vllm-cpu": {"rounded": "result"},  # 0.32.0, csrc/cpu/activation.cpp
    # vLLM 0.33.0, Triton: silu_mul_per_token_group_quant_fp8_colmajor, with scales of float32, and
    # silu_mul_quant_fp8_packed_triton.
    "vllm-triton-silu": {"rounded": "both"},
    "vllm-triton-silu-packed": {"rounded": "result"},
    # SGLang 0.5.23, the group quantizer jit_kernel/csrc/gemm/per_token_group_quant.cuh: its older kernel and its kernel
    # for dense rows, with fast math. Of float16 the older kernel clamps NaN to 448. In Triton: ep_moe_kernels.
    "sglang-silu": {"rounded": "both", **_FLUSHED},
    "sglang-silu-fp16": {"rounded": "both", **_FLUSHED},
    "sglang-silu-dense": {"rounded": "result", **_FLUSHED},
    "sglang-triton-silu": {"rounded": "both"},
    # FlashInfer 0.7.2.post1, include/flashinfer/activation.cuh, with fast math.
    "flashinfer-activation": {"rounded": "result", "fast_math": True, **_FLUSHED},
    # conch-triton-kernels 1.3; liger-kernel 0.8.5; humming-kernels 0.1.19, process_input.
    "conch-activation": {"rounded": "both"},
    "liger": {"rounded": "both"},
    "humming": {"rounded": "none"},
}

COLLECTIVES: Mapping[str, Mapping[str, Any]] = {
    # FlashInfer 0.7.2.post1, quantized_all_reduce: groups of 256, sums in rank order.
    "flashinfer-all-reduce": {"reduce": "rank-order", "own_stripe": True},
    # TensorRT-LLM in FlashInfer 0.7.2.post1, include/flashinfer/comm/trtllm_allreduce_fusion.cuh, one-shot.
    "trtllm": {"reduce": "rank-order", "zeros": "positive", **_STORED, "rounded": "result"},
}

SCALED: Mapping[str, Mapping[str, Any]] = {
    # torch 2.11.0 on an H200: _scaled_mm with scales of rows, and use_fast_accum; scaled_mm of 1x128 by 128x128, 1x128.
    "torch-rowwise": {"accumulator": "aligned-13-32-128"},
    "torch-rowwise-fast": {"accumulator": "aligned-13-32"},
    "torch-blockwise": {"accumulator": "aligned-13-32", "promotion": "scales-first"},
    "torch-blockwise-1x128": {"accumulator": "aligned-13-32", "promotion": "sum-first"},
    # vLLM 0.33.0: w8a8_triton_block_scaled_mm; csrc/cutlass_extensions/epilogue/scaled_mm_epilogues_c3x.hpp.
    "vllm-triton-block": {"accumulator": "aligned-13-32", "promotion": "sum-first"},
    "vllm-cutlass": {"epilogue": "b-first"},
    # DeepGEMM at 54e2261, deep_gemm/include, on Hopper.
    "deepgemm": {"accumulator": "aligned-13-32", "promotion": "scales-first"},
    # conch-triton-kernels 1.3, scaled_gemm. humming-kernels 0.1.19, FP8 activations and FP8 or MXFP4 weights.
    "conch-scaled": {"accumulator": "aligned-13-32", "epilogue": "scales-first"},
    "humming-fp8": {"accumulator": "aligned-13-32", "epilogue": "rounded-between"},
}

WEIGHT_ONLY: Mapping[str, Mapping[str, Any]] = {
    # humming-kernels 0.1.19: scales of blocks are rounded at load; one scale for a row of weights.
    "humming-weight-only": {"decode": "rounded-scale"},
    "humming-channel": {"epilogue": "sum-first"},
    # conch-triton-kernels 1.3, mixed_precision_gemm, on Hopper.
    "conch-mixed": {"accumulator": "fraction-25-16"},
    # vLLM 0.33.0, csrc/quantization/marlin/marlin_template.h: biases; one group for a column; INT4 with zero points;
    # use_fp32_reduce=False.
    "marlin": {"bias_added": "rounded"},
    "marlin-channel": {"epilogue": "sum-first", "bias_added": "rounded"},
    "marlin-zero-points": {"decode": "zero-apart", "bias_added": "rounded"},
    "marlin-reduce": {"reduce": "output"},
}

COMBINED: Mapping[str, Mapping[str, Any]] = {
    # vLLM 0.33.0, csrc/moe: moe_unpermute and moe_sum.
    "vllm-unpermute": {"order": "choices"},
    # Atomic additions of 16 bits, such as red.global.add.bf16: runs may differ.
    "atomic": {"accumulate": "output"},
}

MIXTURES: Mapping[str, Mapping[str, Any]] = {
    **COMBINED,
    # vLLM 0.33.0, vllm/model_executor/layers/fused_moe/fused_moe.py: fused_moe_kernel multiplies the float32 sums
    # of the second product by the weight and rounds once; silu_and_mul and moe_sum are those of csrc.
    "vllm-fused-moe": {"router_weight": "product", "rounded": "both", "order": "choices"},
    # DeepGEMM 54e2261, deep_gemm/include/deep_gemm/impls/sm100_fp8_fp4_mega_moe.cuh, and deep_gemm/mega/__init__.py:
    # gate and up by turns of 8 rows; the weight is in the activation, which is quantized as it is.
    "deepgemm-mega": {
        "router_weight": "activation",
        "gate_up": "interleaved-8",
        "rounded": "none",
        "fast_math": True,
        "order": "choices",
    },
}

ATTENTION: Mapping[str, Mapping[str, Any]] = {
    # vLLM 0.33.0, vllm/v1/attention/ops/triton_unified_attention.py, with 16-bit q.
    "vllm-attention": {"p": "input", "l": "exact", "exponential": "accurate", "decode": "rounded"},
    # FlashInfer 0.7.2.post1, include/flashinfer/attention: decode on CUDA cores; prefill and decode by FA2.
    "flashinfer-decode": {"p": "float32", "l": "exact", "exponential": "accurate", "output": "two", "base": "2"},
    "flashinfer-fa2": {"p": "input", "l": "rounded", "exponential": "accurate", "output": "two", "base": "2"},
    # Dao-AILab/flash-attention at 0251105: hopper/softmax.h with FP8; flash_attn/cute/softmax.py on Blackwell.
    "flash-attention-3": {"p": "e4m3", "l": "exact", "exponential": "accurate"},
    "flash-attention-4": {"p": "input", "l": "exact"},
}
