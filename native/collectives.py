"""Collectives of quantized matrices: bytes travel by torch.distributed, and kernels quantize, decode and add them.

A process group of gloo has tensors on a CPU, a group of NCCL on GPUs, a GPU per rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from narrowgauge.native.fused.norm import add_rmsnorm_quantize, add_rmsnorm_quantize_static
from narrowgauge.native.quantize.dequantize import dequantize
from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.native.runtime.arguments import blocks_for, suffix
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.spec.arguments import check_tensor
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.formats import E4M3, E5M2, E8M0, FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.scale_layouts import LINEAR, ScaleLayout

_SUM = KernelStruct("collective/sum_ranks.cu", "SumRanksParameters")
_CHUNK, _THREADS = 16, 256


def all_gather(q: Quantized, group: ProcessGroup) -> tuple[torch.Tensor | None, ...]:
    """Codes and scales of all ranks, rank 0 first, and the amaxes of recipes with one: (ranks·M, …).

    `q`: of one recipe and shape on all ranks.
    """
    return tuple(None if part is None else _gathered(part, group).flatten(0, 1) for part in (q.codes, q.scales, q.amax))


def all_reduce(x: torch.Tensor, recipe: str | Recipe, group: ProcessGroup) -> torch.Tensor:
    """The sum of `x` (M, K) of all ranks, in the dtype of x, with FP8 on the wire: the dialect of no library.

    Each rank quantizes x, sums a stripe of rows in rank order in float32, quantizes the sum, and decodes the stripes of
    all ranks. Raises TypeError or ValueError for another dtype or shape, NotImplementedError for a recipe other than
    FP8 with scales of rows, of groups of a row, or MXFP8, ToolchainError if kernels cannot be compiled.
    """
    recipe = _supported(recipe)
    total = _summed_stripe(x, recipe, group, torch.float32)
    q = quantize(total, recipe)
    ranks, (height, columns) = dist.get_world_size(group), total.shape
    codes, scales = (_gathered(part, group).flatten(0, 1) for part in (q.codes, q.scales))
    every = Quantized(codes, scales, None, recipe, (ranks * height, columns))
    return dequantize(every, x.dtype)[: x.shape[0]]


def reduce_scatter(x: torch.Tensor, recipe: str | Recipe, group: ProcessGroup) -> torch.Tensor:
    """Rows of the sum of `all_reduce`, not quantized again: rank r has ⌈M/ranks⌉, from r·⌈M/ranks⌉ on.

    Raises as `all_reduce`.
    """
    stripe = _summed_stripe(x, _supported(recipe), group, x.dtype)
    first = dist.get_rank(group) * stripe.shape[0]
    return stripe[: max(0, x.shape[0] - first)]


def all_reduce_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    recipe: str | Recipe,
    group: ProcessGroup,
    *,
    residual: torch.Tensor,
    eps: float = 1e-6,
    bias: float = 0.0,
    scale: torch.Tensor | None = None,
    scales: ScaleLayout = LINEAR,
) -> dict[str, torch.Tensor | Quantized]:
    """`add_rmsnorm_quantize` of the sum of `x` (M, K) of all ranks, rounded to its dtype once, and of the residual.

    bias: 0, or 1 for a weight around 0. scale: float32 (1,), of a recipe with a given scale. scales: layout of the
    scales. Raises as `add_rmsnorm_quantize`, and NotImplementedError for another bias.
    """
    if bias not in (0.0, 1.0):
        raise NotImplementedError(f"bias is {bias}; the kernels add 0 or 1 to the weight")
    check_tensor(x, "x", INPUT_DTYPES)
    values = _gathered(x.contiguous(), group)
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch("sum_values", values, None, total, x.shape[1], E4M3.name)
    options: dict[str, Any] = {"eps": eps, "zero_centered": bias == 1.0}
    if scale is None:
        return add_rmsnorm_quantize(total, residual, weight, recipe, scales=scales, **options)
    return {**add_rmsnorm_quantize_static(total, residual, weight, scale, recipe, **options)}


def _supported(recipe: str | Recipe) -> Recipe:
    """The recipe. Raises NotImplementedError for a recipe without scales of FP8 rows or groups of a row."""
    recipe = find_recipe(recipe) if isinstance(recipe, str) else recipe
    rows = recipe.tensor_scale == "none" and recipe.stored_rows == 1 and not recipe.whole
    if recipe.element not in (E4M3, E5M2) or recipe.scale not in (FP32, E8M0) or not rows or recipe.transform:
        raise NotImplementedError(
            f"collectives have FP8 with scales of rows or of groups of a row, not recipe {recipe}"
        )
    return recipe


def _gathered(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks, (ranks, …), sent as bytes."""
    sent = part.contiguous().view(torch.uint8)
    found = torch.empty((dist.get_world_size(group), *sent.shape), dtype=torch.uint8, device=part.device)
    dist.all_gather(list(found.unbind()), sent, group=group)
    return found.view(part.dtype)


def _exchanged(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The stripe of this rank of the tensors of all ranks, along a first axis."""
    sent = part.contiguous().view(torch.uint8)
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found.view(part.dtype)


def _summed_stripe(x: torch.Tensor, recipe: Recipe, group: ProcessGroup, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the stripe of this rank, (⌈M/ranks⌉, K) in `dtype`; rows behind M are those of zeros."""
    check_tensor(x, "x", INPUT_DTYPES)
    ranks, (rows, columns) = dist.get_world_size(group), x.shape
    height = -(-rows // ranks)
    padded = torch.nn.functional.pad(x, (0, 0, 0, ranks * height - rows))
    q = quantize(padded, recipe)
    codes, scales = (_exchanged(part, group) for part in (q.codes, q.scales))
    out = torch.empty(height, columns, dtype=dtype, device=x.device)
    block = columns if recipe.spans_k else recipe.block[1]
    _launch("sum_codes", codes.view(ranks, height, columns), scales, out, block, recipe.element.name)
    return out


def _launch(
    kernel: str, source: torch.Tensor, scales: torch.Tensor | None, out: torch.Tensor, block: int, element: str
) -> None:
    """Add the matrices of `source` (ranks, M, K)."""
    ranks, rows, columns = source.shape
    parameters = _SUM(
        source=source, scales=scales, out=out, rows=rows, columns=columns, block=max(1, block), ranks=ranks,
        e8m0=scales is not None and scales.dtype == torch.uint8,
    )  # fmt: skip
    blocks = blocks_for(rows * -(-columns // _CHUNK), _THREADS)
    if out.numel():
        launch(
            "sum_ranks", f"{kernel}_{suffix(out.dtype)}", (blocks,), (_THREADS,), (parameters,), device=out.device,
            extra_flags=(f"-DELEMENT={element}",),
        )  # fmt: skip
