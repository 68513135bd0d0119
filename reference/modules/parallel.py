"""Tensor parallelism: the amax of a tensor with its shards in several processes."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.arguments import as_matrix, check_rotated, wanted_halves
from narrowgauge.spec.modules.arguments import (
    check_dimension,
    check_extents,
    check_failed_shard,
    check_group,
    check_sharded_recipe,
)
from narrowgauge.spec.quantized import Half
from narrowgauge.spec.recipes import Recipe, find_recipe

Amaxes = tuple[torch.Tensor | None, torch.Tensor | None]


def sharded_amax(
    x: torch.Tensor,
    recipe: str | Recipe,
    group: dist.ProcessGroup,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Amaxes:
    """Amaxes of a sharded tensor, as arguments of `quantize_both`. `x` (M, K): the shard of this process of `group`.

    Returns float32 (1,) for the rowwise and the columnwise half (after the rotation), the same in every process: the
    maximum of the amaxes of all shards. An empty shard counts as 0. A NaN is ignored or propagated, by the recipe.
    None for an unwanted half, and for recipes without an amax of the tensor (MX, FP8 blocks), which need no other
    shard. Delayed scaling records the amax and quantizes by its scale.

    Quantized with these amaxes, the shards have the bytes of the whole tensor if no block lies in two shards
    (`check_shards`) and stochastic rounding gets the random words of each shard. Every process of the group makes the
    call, in the same order, also with an empty shard: both halves share a collective, a maximum.
    Source: docs/numerics.md#modules, last paragraph.

    If a process has bad input, every process raises: this process the error of `quantize_both`, all others ValueError.
    Also raises ValueError if this process is not in the group, if neither half is wanted, or if the recipe has an amax
    for every row.
    """
    recipe = find_recipe(recipe)
    rank = check_group(group)
    halves = wanted_halves(rowwise=rowwise, columnwise=columnwise, method="sharded_amax")
    check_sharded_recipe(recipe)
    if recipe.tensor_scale == "none":
        return None, None
    failure: Exception | None = None
    own = [torch.zeros(1, device=x.device)] * 2
    try:
        own = _own_amaxes(x.detach(), recipe, halves)
    except Exception as error:  # raised after the collective: otherwise the remaining processes would wait for ever
        failure = error
    amax = torch.cat(own)
    # The maximum of a NaN over processes depends on the library, so NaN is sent as a separate flag.
    numbers = torch.cat([amax.nan_to_num(nan=0.0, posinf=torch.inf), amax.isnan().float(), amax.new_zeros(1)])
    numbers[-1] = 0 if failure is None else 1 + rank
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    check_failed_shard(int(numbers[-1]))
    largest = torch.where(numbers[2:4] > 0, torch.nan, numbers[:2])
    row, column = (half.pick((largest[:1], largest[1:])) if half in halves else None for half in Half)
    return row, column


def _own_amaxes(x: torch.Tensor, recipe: Recipe, halves: Collection[Half]) -> list[torch.Tensor]:
    """The amaxes of the shard of this process, (1,) for each half; 0 for an unwanted columnwise half."""
    x = as_matrix(x).contiguous()
    plain = tensor_amax(block_amaxes(x, recipe.rowwise))
    if recipe.transform is None:
        return [plain, plain]
    if Half.COLUMN not in halves:
        return [plain, torch.zeros_like(plain)]
    check_rotated(x, x.shape[0], recipe)
    return [plain, tensor_amax(block_amaxes(transform(x.T, recipe), recipe))]


def check_shards(
    x: torch.Tensor,
    recipe: str | Recipe,
    group: dist.ProcessGroup,
    *,
    dim: int,
    rowwise: bool = True,
    columnwise: bool = True,
) -> None:
    """Raises ValueError, in every process, if the shards of a tensor quantize to other bytes than the whole tensor.

    `x` (M, K): the shard of this process. The shards of `group` are adjacent along `dim`, 0 or 1, in order of ranks.
    If a block, a tile or a rotated group of a wanted half has several elements along `dim`, the extent of every
    nonempty shard but the last must be a multiple of this number: else a block lies in two shards and has two scales.
    Shards may have any extent if the whole tensor has a single scale, or if blocks lie across `dim`, like rowwise 1×16
    blocks of shards along M. Extents along the other dimension must be equal. Every process of the group makes the
    call, once per shape.
    """
    recipe = find_recipe(recipe)
    check_group(group)
    check_dimension(dim)
    own_shape = torch.tensor([x.shape[:-1].numel(), x.shape[-1]], device=x.device)
    gathered = [torch.empty_like(own_shape) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own_shape, group=group)
    shapes = [(int(rows), int(columns)) for rows, columns in (shape.tolist() for shape in gathered)]
    check_extents(shapes, recipe, dim, rowwise=rowwise, columnwise=columnwise)
