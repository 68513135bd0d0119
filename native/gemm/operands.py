"""What the GEMM kernels are told of the operands of a product, and of what is added to it."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.quantize.layout import linear_scales
from narrowgauge.native.runtime.arguments import check_contiguous, check_operand, supported, type_code
from narrowgauge.native.runtime.launch import Argument
from narrowgauge.spec.arguments import check_columns, check_epilogue, check_pair
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

_ELEMENTS = (E2M1, E2M3, E3M2, E4M3, E5M2)
_CODES_TRANSPOSED, _SCALES_TRANSPOSED, SCALES_OF_128_ROWS = 1, 2, 4
_ALPHA_ORDER = {"(a*b)/d": 0, "(b*a)*(1/d)": 1}


def rule_of(a: Recipe, b: Recipe) -> str:
    """What the kernels call the rule by which they add blocks: nvfp4, mx, fp8_block or fp8_tensor.

    Raises ValueError where the two cannot be multiplied, NotImplementedError where the kernels do not have one.
    """
    supported(a)
    supported(b)
    check_pair(a, b)
    if a.scale is E4M3:
        return "nvfp4"
    return "mx" if a.scale is E8M0 else "fp8_tensor" if a.whole else "fp8_block"


def source_of(rule: str, kind: str = "gemm") -> str:
    """The source file of the kernels with a rule."""
    return f"{kind}_{rule.split('_', maxsplit=1)[0]}"


def operand(q: Quantized, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, linear scales and, where it has one, the amax of an operand.

    Raises TypeError or ValueError where a part of it has not its shape, dtype or memory layout.
    """
    amax = check_operand(q, name)
    if q.transposed and q.recipe.element is E2M1:
        raise ValueError(
            f"{name} of recipe {q.recipe} is stored transposed, with elements of two rows in a byte; the GEMM reads "
            f"codes of E2M1 along K, of shape {(q.shape[0], -(-q.shape[1] // 2))}"
        )
    return q.codes, linear_scales(q), amax


def element_of(r: Recipe) -> np.int32:
    """The number of its element format."""
    return np.int32(_ELEMENTS.index(r.element))


def layout_of(r: Recipe, q: Quantized | None = None) -> int:
    """How codes and linear scales of an operand lie in memory: of sections of a recipe, or of `q`, which is of it.

    Scales that were swizzled are in the order of the matrix, also where its codes are transposed.
    """
    layout = SCALES_OF_128_ROWS if r.stored_rows == 128 else 0
    if q is not None and q.transposed:
        layout |= _CODES_TRANSPOSED | (0 if q.swizzled else _SCALES_TRANSPOSED)
    return layout


def product_arguments(a: Quantized, b: Quantized) -> tuple[list[Argument], list[Argument]]:
    """What a kernel is told of the operands, and what its rule needs beyond that.

    Raises as `operand` does, and ValueError where the rows of the two are not of one length.
    """
    check_columns(a, b)
    parts: list[Argument] = []
    amaxes: list[Argument] = []
    for q, name in ((a, "a"), (b, "b")):
        codes, scales, amax = operand(q, name)
        parts += [codes, scales, element_of(q.recipe), np.int32(layout_of(q.recipe, q))]
        if amax is not None:
            amaxes += [amax, np.int32(len(amax) != 1)]
    return parts, [*amaxes, *alpha_of(a.recipe, b.recipe)] if amaxes else []


def epilogue(
    shape: tuple[int, int, int],
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    sections: int | None = None,
) -> list[Argument]:
    """M, N and K, and the types of c, bias and the output.

    Raises TypeError or ValueError where c (M, N) or bias (N,), or (G, N) of so many sections, does not fit.
    """
    m, n, k = shape
    check_epilogue((m, n), out_dtype, c, bias, sections)
    check_contiguous(c=c, bias=bias)
    types = [0 if tensor is None else type_code(tensor.dtype) for tensor in (c, bias)]
    return [np.int64(m), np.int64(n), np.int64(k), *(np.int32(code) for code in (*types, type_code(out_dtype)))]


def alpha_of(a: Recipe, b: Recipe) -> list[Argument]:
    """The order of α, its divisor d and fl(1/d), of two operands with tensor amaxes."""
    divisor = a.max_product * b.max_product
    return [np.int32(_ALPHA_ORDER[a.alpha]), np.float32(divisor), np.float32(1 / divisor)]
