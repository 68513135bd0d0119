"""Dialects of NVFP4 and MX: for each dialect, the choices that differ from the choices of Transformer Engine.

The code of every library was run on constructed and on random inputs and gave the bytes of its dialect;
docs/dialects.md#nvfp4 has the counts. Not modelled for NVFP4:
- XLA's flush of subnormals on CPU (jax, qwix);
- the sign of a NaN scale (0x7F here) or of a scale 0 (FP-Quant stores 0x80 for blocks of zeros);
- codes of NaN that depend on the payload (torchao), on the dtype (compressed-tensors) or on the sign of x (qwantize),
  or in libraries without a code for NaN (vLLM, Quark);
- amaxes below 7.9e-36: 2688/amax is infinite, and in fireworks its product with 0 is NaN.
This module does not import torch.
"""

from __future__ import annotations

from typing import Any

_ONE_LEVEL = {"tensor_scale": "none", "tensor_limit": "none", "decode": "s", "alpha": "1", "nan": "propagate"}

DIALECTS: dict[str, dict[str, Any]] = {
    # Transformer Engine >= 2.14; 2.8 to 2.13; and the native GEMM path of 2.14, with an α by a reciprocal.
    "te": {},
    "te-2.8": {"block_scale": "(amax/6)*enc"},
    "te-native": {"alpha": "(b*a)*(1/d)"},
    # Transformer Engine's Python reference (git d0067d0): the thresholds of its cast give code 0 to −0.0 and to NaN.
    "te-reference": {"negative_zero": "rounded", "nan_code": 0, "nan": "propagate"},
    # The order of TensorRT-LLM, in the test references of vLLM 0.33 and FlashInfer, and in auto-round 0.16. The
    # emulation of vLLM has 1e-8 for 1/0: negative elements of a block with scale 0 get code 8, and zeros give NaN.
    "trtllm": {
        "tensor_scale": "(1/amax)*max", "tensor_limit": "0-for-0", "block_scale": "(amax*(1/6))*enc",
        "element_scale": "x*r(s*r(enc))", "zero_scale": "zeros", "negative_zero": "rounded", "nan_code": 0,
        "nan": "propagate", "decode": "s/enc", "alpha": "1/(a_enc*b_enc)",
    },
    # The same order with rcp.approx.ftz in CUDA: the quantizers of TensorRT-LLM, of vLLM 0.33 (also behind SiLU) and of
    # FlashInfer 0.7.2, whose division is a reciprocal.
    "trtllm-cuda": {
        "block_scale": "(amax*(1/6))*enc", "element_scale": "x*r(s*r(enc))", "zero_scale": "zeros", "approximate": True,
        "decode": "s/enc", "alpha": "1/(a_enc*b_enc)",
    },
    # FlashInfer 0.7.2.post1, the fused norms in CuTe DSL.
    "flashinfer-nvfp4": {
        "block_scale": "(amax*enc)*(1/6)", "element_scale": "x*(r(s)*enc)", "zero_scale": "zeros", "approximate": True,
        "decode": "s/enc", "alpha": "1/(a_enc*b_enc)",
    },
    # torchao 0.18.
    "torchao": {
        "tensor_scale": "amax/max", "tensor_limit": "none", "block_scale": "(amax/6)/dec", "smallest_scale": "2^-6",
        "element_scale": "x*((1/dec)/s)", "zero_scale": "infinity", "nan_code": 12, "nan": "propagate",
        "decode": "s*dec", "alpha": "a_dec*b_dec",
    },
    # torchao 0.18 without a tensor scale.
    "torchao-one-level": _ONE_LEVEL | {
        "block_scale": "amax/6", "smallest_scale": "2^-6", "element_scale": "x*(1/s)", "zero_scale": "infinity",
        "nan_code": 12,
    },
    # nvidia-modelopt 0.47.
    "modelopt": {
        "tensor_scale": "amax/max", "tensor_limit": "none", "block_scale": "amax/(6*dec)", "zero_block": "1",
        "smallest_scale": "2^-9", "element_scale": "x/(s*dec)", "zero_scale": "infinity", "negative_zero": "rounded",
        "nan": "propagate", "decode": "s*dec", "alpha": "a_dec*b_dec",
    },
    # compressed-tensors 0.20.
    "compressed-tensors": {
        "statistics": "input", "tensor_scale": "(1/amax)*max", "tensor_limit": "1", "block_scale": "(amax/6)*enc",
        "zero_block": "stored-2^-3", "element_scale": "x/(s/enc)", "zero_scale": "infinity",
        "negative_zero": "rounded", "nan_code": 0, "nan": "propagate", "decode": "s/enc", "alpha": "1/(a_enc*b_enc)",
    },
    # fouroversix 1.0.5 with its scale rule static 6: the amax of every block maps to 6.
    "fouroversix": {
        "tensor_limit": "0-for-0", "block_scale": "(amax/6)*enc", "element_scale": "x*(1/(s*(1/enc)))",
        "zero_scale": "zeros", "rounding": "nearest-even-wrapping", "negative_zero": "rounded", "nan_code": 11,
        "nan": "propagate",
    },
    # AMD Quark 0.13.
    "quark": {
        "tensor_scale": "amax/max", "tensor_limit": "2^-23", "block_scale": "(amax/6)/dec",
        "zero_block": "amax/6=2^-23", "element_scale": "x/(s*dec)", "zero_scale": "2^-23", "negative_zero": "never",
        "nan": "propagate",
    },
    # comfy-kitchen 0.2.40, with amax/2688 as its argument.
    "comfy-kitchen": {
        "tensor_scale": "amax/max", "tensor_limit": "none", "block_scale": "(amax/6)/dec", "element_scale": "x/(s*dec)",
        "zero_scale": "zeros", "nan_code": 12, "nan": "propagate", "packing": "high-first", "decode": "s*dec",
        "alpha": "a_dec*b_dec",
    },
    # mlx-cpu 0.32.4 with a global scale, and without one. Its further rounding of x/s changes no code without a global
    # scale, as in qwix.
    "mlx": {
        "statistics": "input-blocks", "tensor_limit": "none", "block_scale": "(amax/6)*enc",
        "element_scale": "R(x/s)*enc", "zero_scale": "zeros", "rounding": "nearest-toward-zero",
        "negative_zero": "never", "nan_code": 0, "nan": "propagate",
    },
    "mlx-one-level": _ONE_LEVEL | {
        "statistics": "input-blocks", "block_scale": "amax/6", "element_scale": "x/s", "zero_scale": "zeros",
        "rounding": "nearest-toward-zero", "negative_zero": "never", "nan_code": 0,
    },
    # The trace reference of FlashInfer 0.7.2; the kernels of FlashInfer differ. The tensor scale is an argument: this
    # dialect has the tensor scale of FlashInfer's test inputs. Further callers ignore NaN and take infinity as FLT_MAX.
    "flashinfer-trace": {
        "tensor_scale": "(1/amax)*max", "tensor_limit": "amax>=1e-12", "block_scale": "(amax/6)*enc",
        "element_scale": "(x*enc)/s", "zero_scale": "1", "rounding": "nearest-toward-zero",
        "negative_zero": "rounded", "nan_code": 0, "nan": "propagate", "decode": "s/enc", "alpha": "1/(a_enc*b_enc)",
    },
    # fireworks-prequant 0.2.
    "fireworks": {
        "tensor_scale": "(1/amax)*max", "tensor_limit": "0-for-0", "block_scale": "(amax*enc)/6",
        "element_scale": "(x*enc)*(1/s)", "zero_scale": "zeros", "rounding": "nearest-even-within-1e-6",
        "nan": "propagate",
    },
    # JAX 0.10, scaled_matmul on CPU: XLA multiplies by the reciprocals of 6 and of s.
    "jax": {
        "tensor_scale": "amax/max", "tensor_limit": "none", "block_scale": "(amax*(1/dec))*(1/6)",
        "element_scale": "(x*(1/dec))*(1/s)", "zero_scale": "infinity", "nan_code": 8, "nan": "propagate",
    },
    # FP-Quant 0.3.2.
    "fp-quant": {
        "statistics": "input-blocks", "tensor_scale": "(1/amax)*max", "tensor_limit": "refuse",
        "block_scale": "(2*amax/12)*enc", "element_scale": "R(x/R(s*(1/enc)))", "zero_scale": "1",
        "negative_zero": "rounded", "nan": "propagate",
    },
    # qwantize 0.1.1.
    "qwantize": _ONE_LEVEL | {
        "block_scale": "amax/6", "element_scale": "x/s", "rounding": "nearest-toward-zero", "negative_zero": "rounded",
    },
    # breccia 0.1.3.
    "breccia": _ONE_LEVEL | {
        "block_scale": "amax/6", "scale_rounding": "nearest-toward-zero", "element_scale": "x/s",
        "zero_scale": "2^-9", "rounding": "nearest-toward-zero", "negative_zero": "never", "nan_code": 0,
        "packing": "high-first",
    },
    # qwix 0.1.8. Its further rounding of x/s to the dtype of x changes no code: the ties, times s, are numbers of this
    # dtype, and neighbouring numbers are too far from the ties.
    "qwix": _ONE_LEVEL | {
        "statistics": "input-blocks", "block_scale": "amax*(1/6)", "zero_block": "1-below-sqrt(tiny)",
        "element_scale": "x/s", "zero_scale": "infinity", "nan_code": 8,
    },
}  # fmt: skip

_LOG2 = {"block_scale": "amax/max", "scale_rounding": "up-log2"}

MX_DIALECTS: dict[str, dict[str, Any]] = {
    # Round up to a power of two: Transformer Engine, nvidia-modelopt, vLLM, JAX, torchao's RCEIL.
    "te": {},
    # OCP MX 1.0, and torchao's FLOOR, auto-round, microxcaling, gfloat.
    "ocp": {"block_scale": "amax*2^-emax", "scale_rounding": "down", "nan": "propagate"},
    # AMD Quark, torchao's EVEN.
    "even": {"block_scale": "amax*2^-emax", "scale_rounding": "as-element", "nan": "propagate"},
    # torchao's CEIL.
    "ceil": {"block_scale": "amax*2^-emax", "scale_rounding": "up", "nan": "propagate"},
    # compressed-tensors 0.20: the midpoint above 1.5, except for E2M3. E3M2 and E5M2 are missing in the library.
    "compressed-tensors": {"block_scale": "amax*2^-emax", "scale_rounding": "up-from-1.75"},
    # The trace reference of FlashInfer 0.7.2; the kernels of FlashInfer differ.
    "floor-448": {"block_scale": "amax/max", "scale_rounding": "down"},
    # breccia 0.1.3 beside its clamp of small amaxes.
    "nearest": {"block_scale": "amax/max", "scale_rounding": "nearest-log2"},
    # torchao 0.18 RCEIL outside torch.compile, comfy-kitchen 0.2.40: a logarithm rounded to float32.
    "torchao-rceil": _LOG2 | {"nan": "propagate"},
    # nvidia-modelopt 0.47.
    "modelopt": _LOG2,
    # DeepGEMM, git 54e2261: per_token_cast_to_fp8 and per_token_cast_to_fp4 with 32 columns and powers of two.
    "deepgemm": {"block_scale": "amax/max", "smallest_amax": 1e-4, "nan": "propagate"},
    # breccia 0.1.3: amax/448 is at least 1e-10.
    "breccia": {
        "block_scale": "amax/max", "scale_rounding": "nearest-log2", "smallest_amax": 448e-10, "element_scale": "x/s",
        "zero_scale": "infinity", "rounding": "nearest-toward-zero", "negative_zero": "never", "nan": "propagate",
    },
    # mlx-cpu 0.32.4.
    "mlx": {
        "statistics": "input", "block_scale": "amax/max", "zero_block": "1", "element_scale": "x/s",
        "zero_scale": "infinity",
    },
    # microxcaling, git 7bc4195, with its default rounding. Its product with the sign turns -0.0 into 0.
    "microxcaling": {
        "block_scale": "amax*2^-emax", "scale_rounding": "down-log2", "rounding": "nearest-away",
        "negative_zero": "rounded", "nan": "propagate",
    },
    # gguf 0.19, MXFP4 only.
    "gguf": {
        "block_scale": "amax*2^-emax", "scale_rounding": "down-log2", "rounding": "nearest-toward-zero",
        "negative_zero": "never", "nan_code": 0, "nan": "propagate",
    },
    # The trace reference of FlashInfer 0.7.2, with its scale of a block of zeros.
    "flashinfer-trace": {"block_scale": "amax/max", "scale_rounding": "down", "zero_block": "1"},
    # humming-kernels 0.1.19, process_input: amax/448 is at least 1e-30.
    "humming": {"block_scale": "amax/max", "smallest_amax": 448e-30},
}  # fmt: skip
"""Dialects of the MX formats: rules for the exponent of a scale (docs/dialects.md#e8m0-scales).

Not modelled:
- the scale of a block of zeros, with codes 0 under any scale (0 here and in torchao and Quark; 120 for E4M3 in
  auto-round, 127 in FlashInfer's trace), and the scale 254 of an infinite amax in Quark;
- elements under scale code 0, divided by 2^-126 in torchao, or by 1 in its RCEIL;
- the NaN scale of a block with NaN in torchao's RCEIL;
- inexact float32 logarithms: wrong one ulp above max·2^k in torchao's RCEIL, and up to 32 ulps beside √2·2^k in
  breccia, with its epsilon in place of every smaller amax.
"""

_TIES_TOWARD_ZERO = {"rounding": "nearest-toward-zero"}
MX_DIALECTS_OF: dict[tuple[str, str], dict[str, Any]] = {
    ("modelopt", "E2M1"): _TIES_TOWARD_ZERO | {"element_scale": "x/s", "zero_scale": "infinity"},
    ("mlx", "E2M1"): _TIES_TOWARD_ZERO | {"negative_zero": "never", "nan_code": 0},
    ("deepgemm", "E2M1"): _TIES_TOWARD_ZERO | {"negative_zero": "never", "nan_code": 0},
    ("flashinfer-trace", "E2M1"): _TIES_TOWARD_ZERO | {"negative_zero": "rounded"},
    ("compressed-tensors", "E2M3"): {"scale_rounding": "as-element"},  # generate_mx_scales, of 6 bits
}
"""Choices of a dialect for a single element format, in place of the choices above."""

_AMAX_BY_MAX: dict[str, Any] = {
    "tensor_scale": "none", "tensor_limit": "none", "block_scale": "amax/max", "largest_scale": "float32",
    "element_scale": "x/s", "zero_scale": "infinity", "nan": "propagate",
}  # fmt: skip
"""Decode scale amax/max, and division by it: a block of zeros has scale 0 and NaN codes."""
_IN_INPUT = _AMAX_BY_MAX | {"statistics": "input", "element_scale": "R(x/s)"}
_TRAINING = _AMAX_BY_MAX | {
    "block_scale": "1/(max/amax)", "smallest_amax": 1e-12, "largest_scale": "none", "element_scale": "x*(max/amax)",
    "zero_scale": "saturate",
}  # fmt: skip
_BY_RECIPROCAL = _AMAX_BY_MAX | {"element_scale": "x*(1/s)"}
_GIVEN: dict[str, Any] = {"block_scale": "given", "element_scale": "x*(1/s)", "zero_scale": "infinity"}
_NAN_IS_448 = {"nan_code": 126}
_FUSED = _AMAX_BY_MAX | {"nan": "ignore"}
"""Scales of the fused norms and activations of libraries: amaxes leave NaN out."""
_BY_TENTH = {"smallest_amax": 1e-10}
_TRITON = _BY_TENTH | {"block_scale": "amax*(1/max)", "element_scale": "x*(1/s)", "approximate": True}
_BY_AMAX = _TRITON | {"element_scale": "x*(max/amax)", "zero_scale": "saturate"}
_FP8_DIALECTS_OF: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # torchao 0.18, float8 training: hp_tensor_to_float8_dynamic.
    "torchao": (("row", "current"), _TRAINING),
    # torchao 0.18: Float8Tensor.from_hp, _choose_scale_float8 and _quantize_affine_float8; amax/448 in the dtype of x.
    "torchao-affine": (("block", "row", "current"), _AMAX_BY_MAX | {"statistics": "input"}),
    # torchao 0.18, kernel.blockwise_quantization in Triton, whose x/s is off by up to 2 ulp.
    "torchao-triton": (("block",), _AMAX_BY_MAX | {"block_scale": "amax*(1/max)", "nan": "ignore"}),
    # nvidia-modelopt 0.47, FP8QTensor.quantize without scales: amax/448 and x/s in the dtype of x.
    "modelopt": (("block", "row", "current"), _IN_INPUT),
    # compressed-tensors 0.20: calculate_qparams and quantize. A scale of 0 becomes the epsilon of the dtype of x; the
    # sum with the zero point 0 turns −0.0 into 0.
    "compressed-tensors": (("block", "row", "current"), _IN_INPUT | {"zero_block": "eps", "negative_zero": "rounded"}),
    # DeepGEMM, git 54e2261: per_token_cast_to_fp8, per_block_cast_to_fp8, per_custom_dims_cast_to_fp8.
    "deepgemm": (("block", "row"), _BY_RECIPROCAL | {"smallest_amax": 1e-4}),
    # breccia 0.1.3, its path for torch tensors.
    "breccia": (("block", "current"), _AMAX_BY_MAX | {"smallest_amax": 1e-10}),
    # Fused norms and activations (narrowgauge.contracts.dialects). vLLM 0.33, csrc/quantization/fused_kernels: scales
    # are at least 1/(448·512).
    "vllm-row": (("row",), _FUSED | _NAN_IS_448 | {"smallest_amax": 2.0**-9}),
    "vllm-block": (("block",), _FUSED | _NAN_IS_448 | {"smallest_amax": 2.0**-9, "element_scale": "x*(1/s)"}),
    "vllm-silu-block": (("block",), _FUSED | _NAN_IS_448 | {"smallest_amax": 2.0**-9}),
    # vLLM 0.33, per_token_group_fp8_quant in CUDA; the same and silu_mul_quant in Triton, whose division is a product
    # with an approximate reciprocal; SGLang 0.5.23 in Triton.
    "vllm-group": (("block",), _FUSED | _BY_TENTH | {"element_scale": "x*(1/s)", "nan_code": 254}),
    "vllm-triton": (("block",), _FUSED | _TRITON | _NAN_IS_448),
    "sglang-triton": (("block",), _FUSED | _TRITON | {"nan_code": 254}),
    # SGLang 0.5.23 in CUDA with fast math: per_token_group_quant_8bit, alone and behind silu_and_mul, whose NaN is 0x7E
    # of float16 and 0x7F of bfloat16; per_token_quant_fp8, without a smallest scale.
    "sglang-group": (("block",), _FUSED | _BY_AMAX),
    "sglang-group-fp16": (("block",), _FUSED | _BY_AMAX | _NAN_IS_448),
    "sglang-row": (("row",), _FUSED | _TRITON | _NAN_IS_448 | {"smallest_amax": 0.0}),
    # vLLM 0.33.0, triton_reshape_and_cache_flash_per_token_head_quant: scales are at least 1e-6.
    "vllm-kv": (("row",), _FUSED | _NAN_IS_448 | {
        "block_scale": "amax*(1/max)", "smallest_amax": float.fromhex("0x1.d5c314p-12"), "element_scale": "x*(1/s)",
    }),
    # FlashInfer 0.7.2.post1, fused_add_rmsnorm_fp8_block_quant.
    "flashinfer-block": (("block",), _FUSED | _BY_AMAX | {"smallest_amax": 1e-4}),
    # FlashInfer 0.7.2.post1, quantized_all_reduce.
    "flashinfer-all-reduce": (("block",), _FUSED | {
        "smallest_amax": 1e-12, "element_scale": "x*(max/amax)", "zero_scale": "saturate", "approximate": True,
    }),
    # humming-kernels 0.1.19, process_input: amax/448 is at least 1e-30.
    "humming": (("block", "row"), _BY_RECIPROCAL | {"smallest_amax": 448e-30, "nan": "ignore"}),
}  # fmt: skip

FP8_DIALECTS: dict[str, dict[str, dict[str, Any]]] = {
    family: {
        "te": {},
        **{name: choices for name, (families, choices) in _FP8_DIALECTS_OF.items() if family in families},
        # vLLM 0.33, QuantFP8.forward_native: scales are at least 1/(448·512), which is amax 2^-9 for E4M3.
        "vllm": (_AMAX_BY_MAX if family == "block" else _BY_RECIPROCAL) | {"smallest_amax": 2.0**-9},
    }
    for family in ("block", "row", "current")
} | {
    "static": {
        "te": {},
        # torchao, nvidia-modelopt: the given scale is the decode scale.
        "torchao-affine": {"block_scale": "given", "element_scale": "x/s", "zero_scale": "infinity"},
        "compressed-tensors": {
            "block_scale": "given", "element_scale": "x/s", "zero_scale": "infinity", "negative_zero": "rounded",
        },
        "vllm": _GIVEN,
        # Fused norms and activations (narrowgauge.contracts.dialects): NaN is clamped to 448, or is NaN.
        "vllm-static": _GIVEN | _NAN_IS_448,
        "flashinfer": _GIVEN | {"approximate": True},
        "flashinfer-cuda": _GIVEN | {"approximate": True} | _NAN_IS_448,
    },
}  # fmt: skip
"""Dialects of the FP8 recipes by the part of their names: block, row, current and static.

Not modelled: the sign of NaN codes (0/0 on x86 gives 0xFF, here 0x7F).
"""

INT8_ROW_DIALECTS: dict[str, dict[str, Any]] = {
    "te": {},
    # vLLM 0.33, csrc/quantization/fused_kernels/layernorm_utils.cuh: scales are at least the epsilon of float32.
    "vllm-row": {"smallest_amax": 127 * 2.0**-23, "element_scale": "x*(1/s)", "zero_scale": "infinity"},
}
"""Dialects of rows of INT8."""

ALIASES = {
    "vllm-static-before-0.33": "vllm-static", "vllm-silu-static": "vllm-static", "vllm-triton-silu": "vllm-triton",
    "sglang-triton-silu": "sglang-triton", "sglang-silu": "sglang-group", "sglang-silu-dense": "sglang-group",
    "sglang-silu-fp16": "sglang-group-fp16", "vllm-silu-nvfp4": "trtllm-cuda",
    # Writes to a cache (narrowgauge.contracts.cache): vLLM 0.33.0 in CUDA, csrc/cache_kernels.cu, and in Triton;
    # conch-triton-kernels 1.3.
    "vllm-kv": "torchao-affine", "vllm-triton-kv": "flashinfer", "conch-kv": "flashinfer",
}  # fmt: skip
"""Dialects of contracts with the quantization of another one: they differ in the steps before it."""
