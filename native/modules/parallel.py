"""Tensor parallelism: the amax of a sharded tensor."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from narrowgauge.native.quantize.amax import amax, oriented_amax
from narrowgauge.native.quantize.hadamard import transform
from narrowgauge.native.runtime.arguments import supported
from narrowgauge.spec.arguments import as_matrix, check_rotated, wanted_halves
from narrowgauge.spec.modules.arguments import (
    check_dimension,
    check_extents,
    check_failed_shard,
    check_group,
    check_sharded_recipe,
)
from narrowgauge.spec.quantized import Half
from narrowgauge.spec.recipes import Recipe


def sharded_amax(
    x: torch.Tensor,
    recipe: str | Recipe,
    group: dist.ProcessGroup,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Amaxes of a tensor for `quantize_both`. The processes of `group` hold its shards; `x` (M, K) is this process's.

    float32 (1,) for the rowwise and for the columnwise half, equal in every process. The columnwise amax is computed
    after the rotation. An empty shard counts as 0. One read of x and one collective for both halves. An amax is None if
    its flag is False, or the recipe has no tensor amax. Delayed scaling records the amax and quantizes by its scale.
    Every process of the group must call the function, in the same order, also with an empty shard. `check_shards`
    checks that the shards give the bytes of the whole tensor. Waits for the device, so that an error in a process is
    reported by all processes instead of a deadlock.

    With bad input in a process, that process raises as `quantize_both` does, and all others raise ValueError. Raises
    ValueError if this process is not in the group, both flags are False, or the recipe has an amax for every row.
    """
    recipe = supported(recipe)
    rank = check_group(group)
    halves = wanted_halves(rowwise=rowwise, columnwise=columnwise, method="sharded_amax")
    check_sharded_recipe(recipe)
    if recipe.tensor_scale == "none":
        return None, None
    failure: Exception | None = None
    own: list[torch.Tensor | None] = [None, None]
    try:
        own = _own_amaxes(x.detach(), recipe, halves)
    except Exception as error:  # any error: the other processes already wait in the collective
        failure = error
    # Magnitudes are reduced as integers, because libraries treat NaN in a maximum differently: bits of magnitudes have
    # the order of the magnitudes, with NaN above infinity. The third element is the number of a failed process.
    bits = torch.zeros(3, dtype=torch.int32, device=x.device)
    for place, shard_amax in enumerate(own):
        if shard_amax is not None:
            bits[place] = shard_amax.view(torch.int32)[0]
    if failure is not None:
        bits[2] = 1 + rank
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    check_failed_shard(int(bits[2]))
    largest = bits.view(torch.float32)
    row, column = (half.pick((largest[:1], largest[1:2])) if half in halves else None for half in Half)
    return row, column


def _own_amaxes(x: torch.Tensor, recipe: Recipe, halves: Collection[Half]) -> list[torch.Tensor | None]:
    """Amaxes of the rowwise and the columnwise half of this process's shard; None for a half that is not wanted."""
    x = as_matrix(x)
    propagate_nan = recipe.nan == "propagate"
    if recipe.transform is None or Half.COLUMN not in halves:
        plain = _amax(x, propagate_nan=propagate_nan)
        return [plain if half in halves else None for half in Half]
    check_rotated(x, x.shape[0], recipe)
    if recipe.transform.group == 16:  # the amax kernel rotates groups of 16
        return list(
            oriented_amax(
                x,
                plain=Half.ROW in halves,
                rotated=True,
                along_rows=False,
                signs=recipe.transform.signs,
                propagate_nan=propagate_nan,
            )
        )
    rotated = amax(transform(x.T, recipe), propagate_nan=propagate_nan)
    return [_amax(x, propagate_nan=propagate_nan) if Half.ROW in halves else None, rotated]


def _amax(x: torch.Tensor, *, propagate_nan: bool) -> torch.Tensor:
    for view in (x, x.T):
        if view.is_contiguous():
            return amax(view, propagate_nan=propagate_nan)
    plain, _ = oriented_amax(x, plain=True, rotated=False, along_rows=True, propagate_nan=propagate_nan)
    assert plain is not None
    return plain


def check_shards(
    x: torch.Tensor,
    recipe: str | Recipe,
    group: dist.ProcessGroup,
    *,
    dim: int,
    rowwise: bool = True,
    columnwise: bool = True,
) -> None:
    """Raises ValueError, in every process, if the shards of a tensor do not quantize to the bytes of the whole tensor.

    `x` (M, K) is the shard of this process. The tensor is the concatenation of the shards of `group` along `dim`, 0 or
    1, in the order of ranks. Every process must call the function, once for its shapes. The extent along `dim` of every
    shard except the last nonempty shard must be a multiple of the blocks, tiles and rotated groups of the requested
    halves. Otherwise a block would lie in two shards and get two scales. The condition does not apply to recipes with
    one scale for the whole tensor. Extents along the other dimension must be equal.
    """
    recipe = supported(recipe)
    check_group(group)
    check_dimension(dim)
    rows, columns = as_matrix(x).shape
    extents = torch.zeros(dist.get_world_size(group), 2, dtype=torch.int64, device=x.device)
    extents[dist.get_rank(group)] = torch.tensor([rows, columns])
    dist.all_reduce(extents, group=group)
    shapes: list[tuple[int, int]] = [(m, k) for m, k in extents.tolist()]
    check_extents(shapes, recipe, dim, rowwise=rowwise, columnwise=columnwise)
