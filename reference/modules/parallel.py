"""Tensor parallelism: the amax of a tensor that several processes hold shards of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.quantize import as_matrix, block_amaxes
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.recipes import recipe as find_recipe

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
    collective, a maximum, for both halves. Source: numerics.md, "Modules", last paragraph.

    Raises in every process if one has bad input: there what `quantize_both` raises, in the others ValueError. That too
    where this process is not in the group, neither half is wanted, or the recipe has an amax for every row.
    """
    recipe = find_recipe(recipe)
    rank = check_group(group)
    if not (rowwise or columnwise):
        raise ValueError("sharded_amax finds the amax of a rowwise or a columnwise half, or both; neither is wanted")
    if recipe.granularity == "row":
        raise ValueError(f"recipe {recipe} has an amax for every row, and none of the tensor that shards could share")
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
    if failed := int(numbers[-1]):
        raise ValueError(f"process {failed - 1} of the group cannot quantize its shard; its own error says why")
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
    if dim not in (0, 1):
        raise ValueError(f"shards lie along dimension 0 or 1 of a matrix (M, K), not {dim}")
    mine = torch.tensor([x.shape[:-1].numel(), x.shape[-1]], device=x.device)
    shapes = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shapes, mine, group=group)
    found = [tuple(shape.tolist()) for shape in shapes]
    listed = ", ".join(map(str, found))
    if len({shape[1 - dim] for shape in found}) > 1:
        raise ValueError(f"shards along dimension {dim} have one extent along the other; these are {listed}")
    step = extent(recipe, dim, rowwise=rowwise, columnwise=columnwise)
    filled = [rank for rank, shape in enumerate(found) if shape[dim]]
    for rank in filled[:-1]:
        if found[rank][dim] % step:
            raise ValueError(
                f"recipe {recipe} has blocks of {step} along dimension {dim}, and one would lie in two shards: that of "
                f"process {rank} has {found[rank][dim]} {('rows', 'columns')[dim]}, no multiple of {step} (shards: "
                f"{listed}); give every shard but the last a multiple of {step}"
            )


def extent(recipe: Recipe, dim: int, *, rowwise: bool, columnwise: bool) -> int:
    """Elements along `dim` of a matrix that the largest block, tile or rotated group of its halves has; 1 for none."""
    if recipe.whole:
        return 1
    extents = [1]
    if rowwise:
        extents.append(recipe.block[dim])
    if columnwise:
        extents.append(recipe.block[1 - dim])
        if recipe.transform is not None and dim == 0:
            extents.append(recipe.transform.group)
    return max(extents)  # powers of two all, so that a multiple of the largest is one of the others


def check_group(group: dist.ProcessGroup) -> int:
    """The rank of this process in `group`. Raises ValueError where it has none: torch would warn and reduce nothing."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group that the amax is reduced over; give it the group it is in")
    return rank
