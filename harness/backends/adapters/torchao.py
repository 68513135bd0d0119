"""torchao as a backend: `nvfp4_quantize`, `to_mx`, the FP8 casts of inference and of float8 training, and its Triton
kernels for blocks of FP8."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.harness.backends.adapters.common import amax, base_name, library, matrix
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

TESTED_VERSION = "0.18.0"
_INSTALL = 'pip install "narrowgauge[torchao]"'
_MX = {"mxfp8-e4m3": torch.float8_e4m3fn, "mxfp8-e5m2": torch.float8_e5m2, "mxfp4": "float4_e2m1fn_x2"}
_MODES = {"torchao-rceil": "rceil", "ocp": "floor", "even": "even", "ceil": "ceil"}
"""Mode of the scales of each MX dialect."""
_FP8 = ("fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e4m3-fp32", "fp8-row-e4m3", "fp8-current-e4m3")
VARIANTS = ("rceil", "floor", "even", "ceil", "one-level", "training", "triton")
"""What a recipe without a dialect gets: a mode of MX scales, NVFP4 without a tensor scale, FP8 of float8 training, or
the Triton kernels of a GPU."""


class Backend:
    """The dialect of a recipe chooses the function. `variant` (`torchao:floor`) chooses for recipes without one."""

    calls: ClassVar = {
        "nvfp4": "nvfp4_quantize(x, per_tensor_scale=…)",
        "mxfp8-e4m3": "to_mx(x, torch.float8_e4m3fn, 32, mode)",
        "mxfp8-e5m2": "to_mx(x, torch.float8_e5m2, 32, mode)",
        "mxfp4": "to_mx(x, torch.float4_e2m1fn_x2, 32, mode)",
        "": "_quantize_affine_float8(x, scale) or hp_tensor_to_float8_dynamic(x, …)",
    }
    dialects: ClassVar = {
        "nvfp4": ("torchao", "torchao-one-level"),
        **dict.fromkeys(_MX, tuple(_MODES)),
        **dict.fromkeys(_FP8[:2], ("torchao-affine",)),
        **dict.fromkeys(_FP8[2:], ("torchao-affine", "torchao")),
    }
    constraints: ClassVar = {"K": 32, "usage": ["rowwise"]}
    conventions: ClassVar = {"tensor_scale_is": "decode"}

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; torchao has {', '.join(VARIANTS)}")
        self._variant = variant
        if variant == "triton":
            self.calls = {"": "fp8_blockwise_act_quant(x) or fp8_blockwise_weight_quant(x)"}  # type: ignore[misc]
            self.dialects = dict.fromkeys(_FP8[:2], ("torchao-triton",))  # type: ignore[misc]
            self.gemm = _triton_gemm
            self.declares = {"accumulator": "truncating"}

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError for Triton kernels without a GPU."""
        library("torchao", _INSTALL)
        if self._variant == "triton" and device.type != "cuda":
            raise ValueError("the Triton kernels need --device cuda")

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes, dtypes and options."""
        name = base_name(recipe, self.dialects, options)
        if self._variant == "triton":
            return _triton(x, name)
        dialect = recipe.dialect
        if name == "nvfp4":
            return _nvfp4(x, one_level="torchao-one-level" in (dialect, f"torchao-{self._variant}"))
        if name in _MX:
            mode = _MODES.get(dialect) or (self._variant if self._variant in _MODES.values() else "rceil")
            return _mx(x, _MX[name], mode)
        training = dialect == "torchao" or (dialect == "te" and self._variant == "training")
        return (_training if training else _affine)(matrix(x, block=recipe_block(name)[1]), recipe)


def recipe_block(name: str) -> tuple[int, int]:
    """Rows and columns that the shape of an FP8 matrix is a multiple of."""
    return {"fp8-block-1x128-e4m3-fp32": (1, 128), "fp8-block-128x128-e4m3-fp32": (128, 128)}.get(name, (1, 1))


def _nvfp4(x: torch.Tensor, *, one_level: bool) -> Any:
    module = library("torchao.prototype.mx_formats.nvfp4_tensor", _INSTALL)
    x = _no_fp16(matrix(x, block=16))
    largest = amax(x)
    decode = None if one_level else module.per_tensor_amax_to_scale(largest)
    scales, codes = module.nvfp4_quantize(x, per_tensor_scale=decode)
    return {"codes": codes, "scales": scales} | ({} if one_level else {"amax": largest, "tensor_scale": decode})


def _mx(x: torch.Tensor, element: Any, mode: str) -> Any:
    module = library("torchao.prototype.mx_formats.mx_tensor", _INSTALL)
    x = _no_fp16(matrix(x, block=32))
    element = getattr(torch, element) if isinstance(element, str) else element
    scales, codes = module.to_mx(x, element, 32, module.ScaleCalculationMode(mode))
    return codes.view(torch.uint8), scales


def _affine(x: torch.Tensor, recipe: Recipe) -> Any:
    module = library("torchao.quantization.quant_primitives", _INSTALL)
    rows, columns = recipe_block(str(recipe).partition("@")[0])
    if (rows, columns) == (1, 1):
        rows, columns = (1 if "row" in recipe.name else x.shape[0]), x.shape[1]
    if x.shape[0] % rows:
        raise NotImplementedError(f"shape {tuple(x.shape)}: the library takes M % {rows} = 0")
    scale = module._choose_scale_float8(x, [rows, columns], torch.float8_e4m3fn)
    return module._quantize_affine_float8(x, scale, torch.float8_e4m3fn), scale


def _training(x: torch.Tensor, recipe: Recipe) -> Any:
    cast = library("torchao.float8.float8_scaling_utils", _INSTALL).hp_tensor_to_float8_dynamic
    granularity = library("torchao.float8.config", _INSTALL).ScalingGranularity
    row = "row" in recipe.name
    result = cast(
        x, torch.float8_e4m3fn, None, scaling_granularity=granularity.AXISWISE if row else granularity.TENSORWISE,
        axiswise_dim=-1 if row else None,
    )  # fmt: skip
    return result._data, 1.0 / result._scale


def _triton(x: torch.Tensor, name: str) -> Any:
    module = library("torchao.kernel.blockwise_quantization", _INSTALL)
    rows, columns = recipe_block(name)
    function = module.fp8_blockwise_act_quant if rows == 1 else module.fp8_blockwise_weight_quant
    return function(matrix(x, block=columns, rows=rows))


def _triton_gemm(a: Quantized, b: Quantized, *, out_dtype: torch.dtype) -> torch.Tensor:
    """`a` (M, K) in blocks of 1x128, `b` (N, K) in blocks of 128x128: the output (M, N), bfloat16."""
    names = (base_name(a.recipe, _FP8[:1], {}), base_name(b.recipe, _FP8[1:2], {}))
    if out_dtype is not torch.bfloat16 or a.shape[1] % 128 or b.shape[0] % 128:
        raise NotImplementedError(f"blockwise_fp8_gemm of {names} takes N and K % 128 = 0 and gives bfloat16")
    module = library("torchao.kernel.blockwise_quantization", _INSTALL)
    left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))
    output: torch.Tensor = module.blockwise_fp8_gemm(left, a.scales, right, b.scales)
    return output


def _no_fp16(x: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float16:
        raise NotImplementedError("torchao takes bfloat16 and float32 here, not float16")
    return x
