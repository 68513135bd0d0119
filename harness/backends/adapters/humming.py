"""Humming as a backend: products of 16-bit activations by quantized weights, and the kernel that quantizes activations,
compiled at run time for a GPU."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from narrowgauge.adapt.words import pack_words
from narrowgauge.harness.backends.adapters.common import base_name, library, matrix
from narrowgauge.spec.formats import E4M3, FP32
from narrowgauge.spec.quantized import Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe, find_recipe

TESTED_VERSION = "humming-kernels 0.1.19"
_INSTALL = "pip install humming-kernels[cu13], for a GPU"
_MODES: dict[str, dict[str, Any]] = {
    "fp8-row-e4m3": {"quant_mode": "dynamic_token"},
    "fp8-block-1x128-e4m3-fp32": {"quant_mode": "dynamic_group", "quant_group_size": 128},
    "mxfp8-e4m3": {"quant_mode": "dynamic_group", "quant_group_size": 32, "group_scale_dtype": "float8e8m0"},
}
"""Arguments of `process_input` by recipe."""
_FP4, _INT4, _FP8 = ({"dtype": name} for name in ("float4e2m1", "uint4", "float8e4m3"))
_WEIGHTS: dict[str, dict[str, Any]] = {
    "int4-g128": _INT4 | {"group_size": 128},
    "int4-g128-zp": _INT4 | {"group_size": 128, "has_zero_point": True},
    "mxfp4": _FP4 | {"group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": _FP4 | {"group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    "fp8-block-128x128-e4m3-fp32": _FP8 | {"group_size": 128, "group_size_n": 128},
}
"""Weights of `HummingLayer` by recipe."""
_CHANNEL: dict[str, dict[str, Any]] = {"fp8-row-e4m3": _FP8 | {"scale_type": "channel"}}
"""The same with a scale per row; the sums are rounded before the scale."""
VARIANTS = ("channel",)
_DIALECT = {"nvfp4": "modelopt"}
"""Its scale of the tensor is the decode scale, as the kernel takes it."""


class Backend:
    """`HummingLayer`, with weights of groups or blocks; those of `humming:channel` have a scale for a row.
    `process_input` of FP8 stores four E8M0 scales in a word."""

    calls: ClassVar = {"": 'humming.ops.process_input(x, quant_mode=…, quant_dtype="float8e4m3", quant_group_size=…)'}
    constraints: ClassVar = {"K": 128, "N": 128, "usage": ["rowwise"]}
    conventions: ClassVar[dict[str, str]] = {}

    def __init__(self, variant: str = "") -> None:
        if variant and variant not in VARIANTS:
            raise ValueError(f"no variant {variant!r}; humming has {', '.join(VARIANTS)}")
        self._weights = _CHANNEL if variant else _WEIGHTS
        self.declares = {"weight-only-gemm": "humming-channel" if variant else "humming-weight-only"}
        quantized = {} if variant else dict.fromkeys(_MODES, ("humming",))
        self.dialects: dict[str, tuple[str, ...]] = {
            name: (*quantized.get(name, ()), *((_DIALECT.get(name, "te"),) if name in self._weights else ()))
            for name in {**quantized, **self._weights}
        }

    def check(self, device: torch.device) -> None:
        """Raise ModuleNotFoundError if the library is missing, ValueError without a GPU."""
        library("humming", _INSTALL)
        if device.type != "cuda":
            raise ValueError("the kernels need --device cuda")

    def warm_up(self, device: torch.device) -> None:
        """Compile the products of bfloat16 by each kind of weights: 10 to 14 seconds for a kind on an H200."""
        a = torch.ones(1, 128, dtype=torch.bfloat16, device=device)
        for name in self._weights:
            self.weight_only_gemm(a, _some_weights(find_recipe(f"{name}@{self.dialects[name][-1]}"), device))

    def quantize(self, x: torch.Tensor, recipe: Recipe, **options: Any) -> Any:
        """`x` (…, K). Raises NotImplementedError for refused recipes, shapes and options."""
        name = base_name(recipe, _MODES, options)
        x = matrix(x, block=128)
        codes, groups, rows = library("humming.ops", _INSTALL).process_input(
            x, quant_dtype="float8e4m3", **_MODES[name]
        )
        if name == "fp8-row-e4m3":
            return codes, rows
        return codes, groups.view(torch.uint8) if name == "mxfp8-e4m3" else groups

    def weight_only_gemm(self, a: torch.Tensor, b: Quantized) -> torch.Tensor:
        """`a` (M, K) in 16 bits, `b` (N, K): (M, N). Raises NotImplementedError for refused recipes, batches, and N or
        K that is no multiple of 128."""
        name = base_name(b.recipe, self._weights, {})
        if not isinstance(b, Quantized) or b.transposed or b.shape[0] % 128 or b.shape[1] % 128:
            raise NotImplementedError(f"HummingLayer takes a matrix with N % 128 = 0 and K % 128 = 0, not {b}")
        make = library("humming.layer", _INSTALL).HummingLayer
        inputs = {"dtype": str(a.dtype).removeprefix("torch.")}
        layer = make(*b.shape, dict(self._weights[name]), inputs, torch_dtype=a.dtype).cuda()
        layer.load_from_tensors(layer_tensors(b, name, a.dtype))
        layer.transform()
        output: torch.Tensor = layer(a.contiguous())
        return output


def _some_weights(recipe: Recipe, device: torch.device) -> Quantized:
    """Weights (128, 128) for which a kernel is compiled."""
    shape = 128, 128
    codes = torch.zeros(codes_shape(shape, recipe), dtype=torch.uint8, device=device)
    narrow = torch.float32 if recipe.scale is FP32 else torch.uint8
    scales = torch.ones(scales_shape(shape, recipe), dtype=narrow, device=device)
    zeros = torch.zeros_like(scales, dtype=torch.uint8) if recipe.zero_points else None
    amax = torch.ones(1, device=device) if recipe.scale is E4M3 else None
    return Quantized(codes, scales, amax, recipe, shape, zeros=zeros)


def layer_tensors(b: Quantized, name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of a `HummingLayer`, by their names, from weights of the recipe `name`: words of codes, unsigned of INT4;
    scales, those of rows and of INT4 in `dtype`; zero points in words of eight rows."""
    integers = name.startswith("int4")
    codes = b.codes ^ 0x88 if integers and b.zeros is None else b.codes
    narrow = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}.get(name)
    scales = b.scales if narrow is None else b.scales.view(narrow)
    rounded = integers or name in _CHANNEL
    if name in _CHANNEL and not torch.equal(scales.to(dtype).float(), scales):
        raise NotImplementedError(f"HummingLayer takes scales of rows in {dtype}; these are float32 numbers")
    found = {"weight": codes.contiguous().view(torch.int32), "weight_scale": scales.to(dtype) if rounded else scales}
    if b.tensor_scale is not None:
        found["weight_scale_2"] = b.tensor_scale.view(1)
    if b.zeros is not None:
        found["zero_point"] = pack_words(b.zeros, 4, 0)
    return found
