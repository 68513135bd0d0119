"""GEMM of quantized operands, and grouped GEMM of sections with their own matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from narrowgauge.native.gemm import fused, wgmma, wgmma_fp8, wgmma_grouped
from narrowgauge.native.gemm import skinny as gemm_skinny
from narrowgauge.native.gemm.operands import (
    Product,
    alpha_fields,
    epilogue_fields,
    kernel_source,
    layout_of,
    operand_fields,
    product,
    product_family,
    stored,
)
from narrowgauge.native.gemm.paths import (
    FP8,
    FUSED,
    MANY,
    PORTABLE,
    ROWS_BESIDE,
    ROWS_FUSED,
    SKINNY,
    TENSOR,
    order_of,
    path_of,
    slices_of,
)
from narrowgauge.native.runtime.arguments import blocks_for, check_tensor, supported
from narrowgauge.native.runtime.launch import Argument, launch
from narrowgauge.spec.arguments import check_sections_of_product
from narrowgauge.spec.formats import E4M3, FP32
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, codes_shape, scales_shape
from narrowgauge.spec.recipes import Recipe

_TILE = 64
_THREADS = 64


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a @ b.T (+ c) (+ bias): (M, K) and (N, K) to (M, N) in float32, bfloat16 or float16. Any M, N and K.

    `c` (M, N) and `bias` (N,) have one of these dtypes. FP8 with block scales casts the output before it adds `c`.
    `spec.recipe` says which recipes may be multiplied. Sums are in the order that `gemm_order` names. Raises TypeError
    or ValueError if operands do not fit, and as `quantize` does.
    """
    family = product_family(a.recipe, b.recipe)
    terms = product(a, b, family, out_dtype=out_dtype, c=c, bias=bias)
    out = torch.empty(terms.m, terms.n, dtype=out_dtype, device=a.codes.device)
    path = path_for(a, b, family)
    if path == SKINNY:
        gemm_skinny.multiply(terms, out)
    elif path == FUSED:
        fused.multiply(terms, out, slices=_fused_slices(a, b, family))
    elif path == FP8:
        wgmma_fp8.multiply(terms, out, slices=_slices(a, b, path))
    elif path == TENSOR:
        wgmma.multiply(terms, out, slices=_slices(a, b, path))
    else:
        multiply_portable(terms, out, f"gemm_{family}")
    return out


def path_for(a: Quantized, b: Quantized, family: str) -> str:
    """Path of the GEMM of two operands: a key of `ORDERS`. `family`: `product_family` of their recipes."""
    (m, k), n = a.shape, b.shape[0]
    taken = {"skinny": gemm_skinny, "fused": fused, "fp8": wgmma_fp8}
    return path_of(m, n, k, family, a.codes.device, **{name: by.takes(a, b, family) for name, by in taken.items()})


def grouped_path_for(m: int, codes: torch.Tensor, recipe: Recipe, b: Sequence[Quantized], family: str) -> str:
    """Path of the grouped GEMM of sections with `m` rows together: FUSED, FP8, TENSOR or PORTABLE. `codes`: of all
    sections, or of the first one."""
    n, k = b[0].shape
    path = path_of(m, n, k, family, codes.device, fp8=wgmma_fp8.takes_sections(codes, recipe, b, family))
    few = m <= ROWS_FUSED * len(b) and n * k >= MANY and (family == "nvfp4" or recipe.element is E4M3)
    return FUSED if path == TENSOR and few and fused.takes_matrices(b, family) else path


def _slices(a: Quantized, b: Quantized, path: str) -> int:
    """Slices of K of the GEMM of two operands on a path."""
    (m, k), n = a.shape, b.shape[0]
    return slices_of(m, n, k, wgmma.multiprocessors(a.codes.device)) if path in (FP8, TENSOR) else 1


def _fused_slices(a: Quantized, b: Quantized, family: str) -> tuple[int, ...]:
    (m, k), n = a.shape, b.shape[0]
    return fused.slices_of(m, n, k, family, wgmma.multiprocessors(a.codes.device))


def multiply_portable(terms: Product, out: torch.Tensor, kernel: str) -> None:
    """Computes a product into `out` by a kernel of kernels/gemm/portable."""
    sections = 1 if terms.sizes is None else len(terms.sizes)
    grid = (blocks_for(terms.n, _TILE), blocks_for(terms.m, _TILE), sections)
    arguments: list[Argument] = [terms.parameters(out), *([] if terms.sizes is None else [terms.starts])]
    if terms.family == "nvfp4":
        arguments.append(terms.alpha_parameters())
    launch(kernel_source(terms.family), kernel, grid, (_THREADS,), arguments, device=out.device)


def gemm_grouped(
    a: GroupedQuantized,
    b: Sequence[Quantized],
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each section of `a` (M, K), quantized rowwise, times its own matrix of `b` (N, K). Returns (M, N).

    The kernel reads the sizes of the sections on the device. `c` is (M, N), `bias` (G, N). Raises as `gemm`
    does, and ValueError if the numbers of sections and matrices differ.
    """
    check_sections_of_product(a, b)
    check_matrices(a.recipe, a.shape[1], b)
    parts = a.codes, _section_scales(a), a.amax
    return multiply_sections(parts, a.recipe, a.shape, b, Rows(a.sizes, None, a.shape[0]), out_dtype, c=c, bias=bias)


class Rows(NamedTuple):
    """Where the rows of the sections of a grouped GEMM lie."""

    sizes: torch.Tensor
    """Rows of each section, int64 (G,)."""
    starts: torch.Tensor | None
    """First row of each section, int64 (G,); None: sections lie one behind another."""
    expected: int
    """Rows of all sections together, if known: the number decides between kernels."""


def check_matrices(a: Recipe, k: int, b: Sequence[Quantized]) -> None:
    """Raises NotImplementedError for sections of a recipe that the kernels do not have, and ValueError unless all
    matrices have one shape and recipe, and one amax each."""
    supported(a)
    n = b[0].shape[0]
    for number, matrix in enumerate(b):
        if matrix.recipe != b[0].recipe or matrix.shape != (n, k) or matrix.recipe.granularity == "row":
            raise ValueError(
                f"gemm_grouped multiplies sections (m, {k}) by matrices {(n, k)} of one recipe with one amax each; "
                f"b[{number}] is {matrix.shape}, {matrix.recipe}"
            )


def multiply_sections(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], recipe: Recipe, shape: tuple[int, int],
    b: Sequence[Quantized], rows: Rows, out_dtype: torch.dtype, *, c: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Sections of a (M, K) times a matrix (N, K) each: (M, N). Rows of no section are not written.

    `parts`: codes, scales and amaxes of a; with given starts each row has its scales, or each section has one. Raises
    as `gemm`.
    """
    (a_codes, a_scales, amax), (m, k), n = parts, shape, b[0].shape[0]
    family, device = product_family(recipe, b[0].recipe), a_codes.device
    operands = [operand_fields(matrix, f"b[{number}]") for number, matrix in enumerate(b)]
    matrices, amaxes = [fields for fields, _ in operands], [amax for _, amax in operands if amax is not None]
    parts_of_b: list[Sequence[object]] = [[fields[part] for fields in matrices] for part in ("codes", "scales")]
    words = [_address(tensor, device) for tensors in (*parts_of_b, amaxes) for tensor in tensors]
    words += [fields["layout"] for fields in matrices if isinstance(fields["layout"], int)]
    codes, scales, *b_amaxes, layouts = stored(words, device).view(-1, len(b))
    terms = Product(
        family, m, n, k,
        a={"codes": a_codes, "scales": a_scales, "element": recipe.element.name, "layout": layout_of(recipe)},
        b={"codes": codes, "scales": scales, "element": b[0].recipe.element.name, "layouts": layouts},
        epilogue=epilogue_fields((m, n), out_dtype, c, bias, len(b)),
        alpha=alpha_fields(
            recipe, b[0].recipe, family, (a_scales, scales), (amax, b_amaxes[0] if b_amaxes else None)
        ),
        sizes=rows.sizes, starts=rows.starts, expected_rows=rows.expected,
    )  # fmt: skip
    out = torch.empty(m, n, dtype=out_dtype, device=device)
    path = grouped_path_for(rows.expected, a_codes, recipe, b, family)
    if path == FUSED:
        fused.multiply_grouped(terms, out, matrices)
    elif path == FP8:
        wgmma_fp8.multiply_grouped(terms, out, matrices)
    elif path == PORTABLE:
        multiply_portable(terms, out, f"gemm_grouped_{family}")
    elif wgmma_grouped.takes(rows.expected, n, k, matrices, ROWS_BESIDE):
        wgmma_grouped.multiply(terms, out)
    else:
        wgmma.multiply(terms, out)
    return out


def gemm_order(a: Quantized | Sequence[Quantized], b: Quantized | Sequence[Quantized]) -> str:
    """Order in which `gemm` adds the products of two operands: a name of `spec.summation.ORDERS`, or "truncating" for
    any order with a truncating accumulator.

    For two lists of operands, the order of `gemm_grouped` on all sections. The order depends on the shape and the
    device, and for MX on the values, so that the call may wait for the device.
    """
    single = isinstance(a, Quantized)
    left, right = ([q] if isinstance(q, Quantized) else list(q) for q in (a, b))
    family = product_family(left[0].recipe, right[0].recipe)
    if single:
        path = path_for(left[0], right[0], family)
    else:
        path = grouped_path_for(sum(q.shape[0] for q in left), left[0].codes, left[0].recipe, right, family)
    if path in (TENSOR, FUSED) and family == "mx" and any(map(_refused, (*left, *right))):
        path = PORTABLE
    if path == FUSED and single:
        k, starts = left[0].shape[1], _fused_slices(left[0], right[0], family)
        equal = k == len(starts) * starts[1]
        return order_of(path, family, len(starts), () if equal else starts[1:])
    return order_of(path, family, _slices(left[0], right[0], path) if single else 1)


def _refused(q: Quantized) -> bool:
    fields, _ = operand_fields(q, "q")
    return wgmma.refuses(fields, *q.shape)


def _section_scales(a: GroupedQuantized) -> torch.Tensor:
    """Scales of all sections. Raises TypeError or ValueError if a part of `a` has a wrong shape or dtype.

    The last row of tiles of a section may have fewer than 128 rows. The scales are padded to the largest number of
    rows that any sizes of this many sections can need, so that wrong sizes do not read beyond the scales.
    """
    recipe, count = a.recipe, len(a.sizes)
    check_tensor(a.codes, "a.codes", (torch.uint8,), codes_shape(a.shape, recipe))
    if recipe.decode != "s":
        if a.amax is None:
            raise ValueError(f"a.amax is None; {recipe} has a tensor scale")
        check_tensor(a.amax, "a.amax", (torch.float32,), (count,))
    check_tensor(a.sizes, "a.sizes", (torch.int64,), (count,))
    height, width = (count, 1) if recipe.whole else scales_shape(a.shape, recipe)
    dtype = torch.float32 if recipe.scale is FP32 else torch.uint8
    if recipe.stored_rows == 1 or recipe.whole:
        check_tensor(a.scales, "a.scales", (dtype,), (height, width))
        return a.scales
    check_tensor(a.scales, "a.scales", (dtype,), (len(a.scales), width))
    missing = a.shape[0] // recipe.stored_rows + count - len(a.scales)
    return torch.nn.functional.pad(a.scales, (0, 0, 0, missing)) if missing > 0 else a.scales


def _address(tensor: object, device: torch.device) -> int:
    """Address of a tensor. Raises ValueError if the tensor lies on another device."""
    assert isinstance(tensor, torch.Tensor)
    if tensor.device != device:
        raise ValueError(f"gemm_grouped runs on {device}, but a part of b lies on {tensor.device}; move it first")
    return tensor.data_ptr()
