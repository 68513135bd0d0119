"""Tensor parallelism: the amax of a tensor that several processes hold shards of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.quantize import block_amaxes
from narrowgauge.spec.arguments import as_matrix, check_halves, check_rotated
from narrowgauge.spec.module_arguments import (
    check_dimension,
    check_extents,
    check_failed_shard,
    check_group,
    check_sharded_recipe,
)
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
    """The amaxes that `quantize_both` takes of a tensor whose shards the processes of `group` hold: `x` (M, K) is one.

    float32 (1,) for either half, that of the columnwise one after its rotation, and the same in every process: the
    largest of the shards' own, an empty one counting 0; a NaN is left out, or makes it NaN, as the recipe says. None
    for a half that is not wanted, and for recipes without an amax of the tensor (MX, FP8 blocks), which need nothing of
    the other shards. Delayed scaling records the amax and quantizes by its scale. With them the bytes of the shards are
    those of the whole tensor, if no block lies in two shards (`check_shards`) and stochastic rounding is given the
    words of each. Every process of the group calls it, in the same order, also where its shard is empty: there is one
    collective, a maximum, for both halves. Source: docs/numerics.md#modules, last paragraph.

    Raises in every process if one has bad input: there what `quantize_both` raises, in the others ValueError. That too
    where this process is not in the group, neither half is wanted, or the recipe has an amax for every row.
    """
    recipe = find_recipe(recipe)
    rank = check_group(group)
    check_halves(rowwise=rowwise, columnwise=columnwise, method="sharded_amax")
    check_sharded_recipe(recipe)
    if recipe.tensor_scale == "none":
        return None, None
    failure: Exception | None = None
    own = [torch.zeros(1, device=x.device)] * 2
    try:
        own = _own_amaxes(x.detach(), recipe, columnwise=columnwise)
    except Exception as error:  # whatever it is: raised behind the collective, where the others would wait for ever
        failure = error
    amax = torch.cat(own)
    # What a maximum over processes makes of a NaN depends on the library, so NaN travels as a number of its own.
    numbers = torch.cat([amax.nan_to_num(nan=0.0, posinf=torch.inf), amax.isnan().float(), amax.new_zeros(1)])
    numbers[-1] = 0 if failure is None else 1 + rank
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    check_failed_shard(int(numbers[-1]))
    largest = torch.where(numbers[2:4] > 0, torch.nan, numbers[:2])
    return (largest[:1] if rowwise else None), (largest[1:] if columnwise else None)


def _own_amaxes(x: torch.Tensor, recipe: Recipe, *, columnwise: bool) -> list[torch.Tensor]:
    """The amax of either half of this process's shard, each (1,); 0 for a columnwise one that is not wanted."""
    x = as_matrix(x).contiguous()
    plain = tensor_amax(block_amaxes(x, recipe.rowwise))
    if recipe.transform is None:
        return [plain, plain]
    if not columnwise:
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
    """Raises ValueError, in every process, where the shards of a tensor do not quantize to what the whole tensor does.

    `x` (M, K) is the shard of this process; those of `group` lie one behind the other along `dim`, 0 or 1, in the order
    of its ranks. It matters where a block of scales, a tile or a group of a rotation, of a half that is wanted, has
    several elements along `dim`: then every shard but the last that is not empty has to be a multiple of them, or one
    would lie in two shards and have two scales. Where there is one scale for the whole tensor, or blocks lie across
    `dim` (rowwise 1×16 blocks of shards along M), shards may have any extent. Every process of the group calls it, once
    for the shapes that it shards; extents along the other dimension have to be equal.
    """
    recipe = find_recipe(recipe)
    check_group(group)
    check_dimension(dim)
    mine = torch.tensor([x.shape[:-1].numel(), x.shape[-1]], device=x.device)
    shapes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shapes, mine, group=group)
    found = [(int(rows), int(columns)) for rows, columns in (shape.tolist() for shape in shapes)]
    check_extents(found, recipe, dim, rowwise=rowwise, columnwise=columnwise)
