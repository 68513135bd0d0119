"""A GEMM as fields of the kernels' parameter structs, which `kernels/gemm/parameters.cuh` declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from narrowgauge.native.quantize.layout import linear_scales
from narrowgauge.native.runtime.arguments import check_operand, supported
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct, StructValue, Value, enumerators
from narrowgauge.spec.arguments import check_columns, check_epilogue, check_pair
from narrowgauge.spec.formats import E2M1, E4M3, E8M0
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import WHOLE, Recipe
from narrowgauge.spec.scale_layouts import LINEAR

_HEADER = "gemm/parameters.cuh"
_GEMM = KernelStruct(_HEADER, "GemmParameters")
_GROUPED_GEMM = KernelStruct(_HEADER, "GroupedGemmParameters")
_ALPHA = KernelStruct(_HEADER, "Alpha")
_GROUPED_ALPHA = KernelStruct(_HEADER, "GroupedAlpha")
_STORED = KernelStruct("layout/store_words.cu", "StoredWords")
_WORDS = _STORED.fields[-1].count or 0
"""Words of a launch."""
_LAYOUT = enumerators(_HEADER, "Layout")
_DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_ALPHA_ORDERS = {"(a*b)/d": "DIVIDE", "(b*a)*(1/d)": "MULTIPLY"}

_ROW = (1, WHOLE)
"""Block of a recipe with a scale for each row."""

Fields = dict[str, Value]


class Product(NamedTuple):
    """a @ b.T of (M, K) by (N, K), or of the sections of a with a matrix each."""

    family: str
    """`product_family` of the recipes."""
    m: int
    n: int
    k: int
    a: Fields
    """OperandParameters."""
    b: Fields
    """OperandParameters, or MatricesParameters of a grouped GEMM."""
    epilogue: Fields
    """EpilogueParameters without `out`."""
    alpha: Fields
    """Alpha, or GroupedAlpha."""
    sizes: torch.Tensor | None = None
    """Rows of each section of a grouped GEMM, int64 (G,)."""
    starts: torch.Tensor | None = None
    """First row of each section, int64 (G,); None: sections lie one behind another."""
    expected_rows: int = 0
    """Rows of all sections together, as far as they are known: they decide between kernels."""

    def parameters(self, out: torch.Tensor) -> StructValue:
        """GemmParameters, or GroupedGemmParameters, with the output."""
        shape = {"m": self.m, "n": self.n, "k": self.k}
        epilogue = self.epilogue_parameters(out)
        if self.sizes is None:
            return _GEMM(a=self.a, b=self.b, epilogue=epilogue, **shape)
        return _GROUPED_GEMM(sizes=self.sizes, a=self.a, b=self.b, epilogue=epilogue, **shape)

    def epilogue_parameters(self, out: torch.Tensor) -> Fields:
        """EpilogueParameters with the output."""
        return {**self.epilogue, "out": out}

    def alpha_parameters(self) -> StructValue:
        """Alpha, or GroupedAlpha."""
        return (_ALPHA if self.sizes is None else _GROUPED_ALPHA)(**self.alpha)


def product_family(a: Recipe, b: Recipe) -> str:
    """Family of the kernels for two recipes: nvfp4, mx, fp8_block, or fp8_tensor for scales of tensors and of rows.

    Raises ValueError if the recipes cannot be multiplied, NotImplementedError if the kernels lack a recipe.
    """
    for recipe in (a, b):
        supported(recipe, **({"block": (_ROW,)} if recipe.block == _ROW else {}))
    check_pair(a, b)
    if a.scale is E4M3:
        return "nvfp4"
    return "mx" if a.scale is E8M0 else "fp8_tensor" if a.spans_k else "fp8_block"


def kernel_source(family: str, kind: str = "gemm") -> str:
    """Source file of the portable kernels of a family."""
    return f"{kind}_{family.split('_', maxsplit=1)[0]}"


def product(
    a: Quantized,
    b: Quantized,
    family: str,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Product:
    """a @ b.T (+ c) (+ bias) with c (M, N) and bias (N,). `family`: `product_family` of the recipes.

    Raises TypeError or ValueError if a part of an operand, c or bias has a wrong shape, dtype or memory layout, or the
    rows of a and b differ in length.
    """
    check_columns(a, b)
    (a_fields, a_amax), (b_fields, b_amax) = operand_fields(a, "a"), operand_fields(b, "b")
    (m, k), n = a.shape, b.shape[0]
    alpha = alpha_fields(a.recipe, b.recipe, family, (a_fields["scales"], b_fields["scales"]), (a_amax, b_amax))
    alpha |= {
        f"{name}_per_row": q.recipe.block == _ROW or (amax is not None and len(amax) != 1)
        for name, q, amax in (("a", a, a_amax), ("b", b, b_amax))
    }
    return Product(family, m, n, k, a_fields, b_fields, epilogue_fields((m, n), out_dtype, c, bias), alpha)


def operand_fields(q: Quantized, name: str) -> tuple[Fields, torch.Tensor | None]:
    """OperandParameters of an operand with linear scales, and its amax if its recipe has a tensor amax.

    Raises TypeError or ValueError if a part of it has a wrong shape, dtype or memory layout.
    """
    amax = check_operand(q, name)
    if q.transposed and q.recipe.element is E2M1:
        raise ValueError(
            f"{name} of recipe {q.recipe} is stored transposed, with elements of two rows in a byte; the GEMM reads "
            f"codes of E2M1 along K, of shape {(q.shape[0], -(-q.shape[1] // 2))}"
        )
    element, layout = q.recipe.element.name, layout_of(q.recipe, q)
    return {"codes": q.codes, "scales": linear_scales(q), "element": element, "layout": layout}, amax


def mixed_fields(q: Quantized, name: str) -> Fields:
    """OperandParameters of an operand of a product of FP8 and MX, in which the scales of MX multiply the elements.

    Raises as `operand_fields`, and NotImplementedError for recipes that the kernels do not have.
    """
    supported(q.recipe, **({"block": (_ROW,)} if q.recipe.block == _ROW else {}))
    fields, _ = operand_fields(q, name)
    if q.recipe.scale is E8M0:
        layout = fields["layout"]
        assert isinstance(layout, int)
        fields["layout"] = layout | _LAYOUT["SCALES_IN_ELEMENTS"]
    return fields


def layout_of(recipe: Recipe, q: Quantized | None = None) -> int:
    """Flags of Layout for codes and linear scales: of the sections of a recipe, or of `q`.

    Scales of another layout are in the order of the matrix, even if its codes are transposed.
    """
    layout = _LAYOUT["SCALES_OF_128_ROWS"] if recipe.stored_rows == 128 else 0
    layout |= _LAYOUT["SCALE_OF_ROW"] if recipe.block == _ROW else 0
    if q is not None and q.transposed:
        layout |= _LAYOUT["CODES_TRANSPOSED"] | (_LAYOUT["SCALES_TRANSPOSED"] if q.scale_layout == LINEAR else 0)
    return layout


def rows_per_scale(operand: Fields) -> int:
    """Rows of an operand that share a scale, 1 or 128. `operand`: OperandParameters."""
    layout = operand["layout"]
    return 128 if isinstance(layout, int) and layout & _LAYOUT["SCALES_OF_128_ROWS"] else 1


def epilogue_fields(
    shape: tuple[int, int],
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    sections: int | None = None,
) -> Fields:
    """EpilogueParameters without `out`, for an output (M, N).

    c and bias may have any strides; the kernels read a contiguous copy of other memory. Raises TypeError or ValueError
    if c (M, N) or bias, (N,) or (sections, N), has a wrong shape or dtype.
    """
    check_epilogue(shape, out_dtype, c, bias, sections)
    c, bias = (None if tensor is None else tensor.contiguous() for tensor in (c, bias))
    c_type, bias_type = ("FLOAT32" if tensor is None else _DTYPES[tensor.dtype] for tensor in (c, bias))
    return {"c": c, "bias": bias, "c_type": c_type, "bias_type": bias_type, "out_type": _DTYPES[out_dtype]}


def alpha_fields(a: Recipe, b: Recipe, family: str, scales: tuple[Value, Value], amaxes: tuple[Value, Value]) -> Fields:
    """GroupedAlpha of two operands. NVFP4: from the amaxes and the divisor of docs/numerics.md#nvfp4-gemm. FP8 with
    tensor scales: the product of the scales. Others: 1."""
    if family == "nvfp4":
        divisor = a.max_product * b.max_product
        order = _ALPHA_ORDERS[a.alpha]
        return {"a": amaxes[0], "b": amaxes[1], "order": order, "divisor": divisor, "reciprocal": 1 / divisor}
    left, right = scales if family == "fp8_tensor" else (None, None)
    return {"a": left, "b": right, "order": "MULTIPLY", "divisor": 1.0, "reciprocal": 1.0}


def stored(words: Sequence[int], device: torch.device) -> torch.Tensor:
    """Words below 2^64 in memory of a device, int64 (words,).

    They travel as parameters of a kernel, so that the CPU waits for nothing and a CUDA graph has them.
    """
    out = torch.empty(len(words), dtype=torch.int64, device=device)
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS]
        values = _STORED(out=out[first:], count=len(part), words=[*part, *[0] * (_WORDS - len(part))])
        launch("store_words", "store_words", (1,), (_WORDS,), [values], device=device)
    return out
