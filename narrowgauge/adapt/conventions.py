"""The conventions in which libraries store a quantized matrix, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.adapt.own_layouts import OwnLayout, is_own
from narrowgauge.spec.scale_layouts import LAYOUTS, ScaleLayout
from narrowgauge.spec.scale_layouts import Layout as ScaleLayoutRow

Nibbles = Literal["low-first", "high-first", "halves", "unpacked", "dense"]
"""Places of the codes of 4 bits; `dense` also of 6 bits."""
Layout = Literal[ScaleLayout, "padded"]
"""Order of the block scales in memory."""
AnyLayout = Layout | ScaleLayoutRow | OwnLayout
"""A layout by name, a `Layout` of `narrowgauge.spec.scale_layouts`, a function or a permutation."""
TensorScaleIs = Literal["amax", "encode", "decode"]
"""Meaning of the tensor scale."""


@dataclass(frozen=True)
class Convention:
    """A convention of libraries for one part of a quantized matrix."""

    argument: str
    """Argument of `quantized` that names the convention, or whose dtype or presence is the convention."""
    value: str
    """Value of the argument; for `codes`, `scales` and `tensor_scale` the kind of value."""
    meaning: str
    users: str
    """Libraries with this convention."""


CONVENTIONS = (
    Convention("nibbles", "low-first", "element 2j in the low nibble of byte j, element 2j + 1 in the high nibble",
               "Transformer Engine, torchao, modelopt, compressed-tensors, vLLM, FlashInfer, cuBLAS"),
    Convention("nibbles", "high-first", "element 2j in the high nibble of byte j", "breccia, comfy-kitchen"),
    Convention("nibbles", "halves", "byte j of a block of 2h elements: element j in the low nibble, element j + h in "
               "the high nibble", "GGML (gguf, llama.cpp)"),
    Convention("nibbles", "unpacked", "one code in a byte or integer, below 16", "ml_dtypes, JAX arrays in memory"),
    Convention("nibbles", "dense", "the bits of the codes one behind another, the first code lowest: four codes of 6 "
               "bits in three bytes; of 4 bits low-first", "FP6 of cuBLAS and CUTLASS (dense), AMD MFMA"),
    Convention("codes", "bytes", "uint8 or int8", "Transformer Engine, FlashInfer, vLLM, modelopt"),
    Convention("codes", "narrow dtype", "float4_e2m1fn_x2 (two codes in a byte), float8_e4m3fn, float8_e5m2, or the "
               "dtypes of ml_dtypes", "torch, torchao, DeepGEMM, JAX"),
    Convention("codes", "words", "words of 32 or 64 bits, lowest byte first; their bytes are the packed codes", "mlx"),
    Convention("codes", "decoded values", "numbers of the element format before the multiplication with a scale, in "
               "float32, bfloat16, float16 or float64", "emulations of vLLM and FlashInfer"),
    Convention("scales", "bytes", "uint8 or int8 codes of the scale format", "Transformer Engine, FlashInfer, mlx"),
    Convention("scales", "narrow dtype", "float8_e4m3fn for E4M3 scales, float8_e8m0fnu for E8M0 and for float32 "
               "scales that are powers of two", "torch, torchao, compressed-tensors, modelopt, vLLM"),
    Convention("scales", "words", "words of 32 or 64 bits, lowest byte first: four or eight E4M3 or E8M0 codes of a "
               "row; for float32 scales E8M0 codes. Spare bytes of the last word need layout padded",
               "DeepGEMM, vLLM (packed UE8M0)"),
    Convention("scales", "numbers", "values of the scale format in float32, bfloat16, float16 or float64: powers of "
               "two for E8M0; float32 for float32 scales", "DeepGEMM, DeepSeek, emulations"),
    *(Convention("layout", layout.name, layout.meaning, layout.users) for layout in LAYOUTS.values()),
    Convention("layout", "padded", "linear, with further rows below and columns on the right, of any content",
               "Transformer Engine"),
    Convention("transposed", "True", "codes (K, M) and linear scales (⌈K/block⌉, M), as stored or as a view; packed "
               "codes (⌈K/2⌉, M)", "column-major operands of torch._scaled_mm, columnwise MX halves"),
    Convention("tensor_scale_is", "amax", "the largest magnitude of the tensor", "Transformer Engine, mlx"),
    Convention("tensor_scale_is", "encode", "2688/amax, a factor of the elements",
               "compressed-tensors, vLLM, FlashInfer, TensorRT-LLM"),
    Convention("tensor_scale_is", "decode", "amax/2688, a factor of the decoded values",
               "modelopt, torchao, comfy-kitchen, AMD Quark"),
    Convention("tensor_scale", "None", "the library does not report a tensor scale", "JAX"),
)  # fmt: skip
"""All conventions that `quantized` understands. 2688 stands for `Recipe.max_product`, which is 448 or 57344 for FP8."""


def check_choice(argument: str, value: object) -> None:
    """Raises ValueError unless `value` is a convention of `argument`: nibbles, layout or tensor_scale_is.

    A layout may also be a `Layout`, a function or a permutation.
    """
    if argument == "layout" and (isinstance(value, ScaleLayoutRow) or is_own(value)):
        return
    choices = [known.value for known in CONVENTIONS if known.argument == argument]
    if value not in choices:
        raise ValueError(f"{argument} is {value!r}; it can be {', '.join(map(repr, choices))}")
