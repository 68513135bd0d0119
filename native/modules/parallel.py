"""Tensor parallelism: the amax of a tensor that several processes hold shards of."""

from __future__ import annotations

import torch
import torch.distributed as dist

from narrowgauge.native.quantize.amax import amax, oriented_amax
from narrowgauge.native.quantize.hadamard import transform
from narrowgauge.native.runtime.arguments import supported
from narrowgauge.spec.arguments import as_matrix, check_halves, check_rotated
from narrowgauge.spec.module_arguments import (
    check_dimension,
    check_extents,
    check_failed_shard,
    check_group,
    check_sharded_recipe,
)
from narrowgauge.spec.recipes import Recipe


def sharded_amax(
    x: torch.Tensor,
    recipe: str | Recipe,
    group: dist.ProcessGroup,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amaxes that `quantize_both` takes of a tensor whose shards the processes of `group` hold: `x` (M, K) is one.

    float32 (1,) for either half, that of the columnwise one after its rotation, the same in every process; an empty
    shard counts 0. One read of x and one collective for both halves. None for a half that is not wanted, and for
    recipes without an amax of the tensor. Delayed scaling records the amax and quantizes by its scale. Every process of
    the group calls it, in the same order, also where its shard is empty. `check_shards` says which shards give the
    bytes of the whole tensor. Waits for the device, to say what went wrong in another process instead of hanging.

    Raises in every process if one has bad input: there what `quantize_both` raises, in the others ValueError. That too
    where this process is not in the group, neither half is wanted, or the recipe has an amax for every row.
    """
    r = supported(recipe)
    rank = check_group(group)
    check_halves(rowwise=rowwise, columnwise=columnwise, method="sharded_amax")
    check_sharded_recipe(r)
    if r.tensor_scale == "none":
        return None, None
    failure: Exception | None = None
    own: list[torch.Tensor | None] = [None, None]
    try:
        own = _own_amaxes(x.detach(), r, rowwise=rowwise, columnwise=columnwise)
    except Exception as error:  # without a compiler too: the others are in the collective already, waiting for this one
        failure = error
    # The bits of a magnitude are ordered as it is, those of a NaN above infinity's: integers, so that no library's
    # idea of a maximum with NaN matters. Behind the two stands which process failed.
    bits = torch.zeros(3, dtype=torch.int32, device=x.device)
    for place, found in enumerate(own):
        if found is not None:
            bits[place] = found.view(torch.int32)[0]
    if failure is not None:
        bits[2] = 1 + rank
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    if failure is not None:
        raise failure
    check_failed_shard(int(bits[2]))
    largest = bits.view(torch.float32)
    return (largest[0:1] if rowwise else None), (largest[1:2] if columnwise else None)


def _own_amaxes(x: torch.Tensor, r: Recipe, *, rowwise: bool, columnwise: bool) -> list[torch.Tensor | None]:
    """The amax of either half of this process's shard, None for one that is not wanted."""
    x = as_matrix(x)
    propagate_nan = r.nan == "propagate"
    if r.transform is None or not columnwise:
        plain = _amax(x, propagate_nan=propagate_nan)
        return [plain if rowwise else None, plain if columnwise else None]
    check_rotated(x, x.shape[0], r)
    if r.transform.group == 16:  # the kernel's own
        return list(
            oriented_amax(
                x, plain=rowwise, rotated=True, along_rows=False, signs=r.transform.signs, propagate_nan=propagate_nan
            )
        )
    rotated = amax(transform(x.T, r), propagate_nan=propagate_nan)
    return [_amax(x, propagate_nan=propagate_nan) if rowwise else None, rotated]


def _amax(x: torch.Tensor, *, propagate_nan: bool) -> torch.Tensor:
    for view in (x, x.T):
        if view.is_contiguous():
            return amax(view, propagate_nan=propagate_nan)
    found, _ = oriented_amax(x, plain=True, rotated=False, along_rows=True, propagate_nan=propagate_nan)
    assert found is not None
    return found


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
    of its ranks, and every process calls it, once for the shapes that it shards. Every shard but the last that is not
    empty is a multiple along `dim` of the blocks, tiles and rotated groups of the halves that are wanted, where these
    have several elements along it, and there is not one scale for the whole tensor; or one would lie in two shards and
    get two scales. Extents along the other dimension are equal.
    """
    r = supported(recipe)
    check_group(group)
    check_dimension(dim)
    rows, columns = as_matrix(x).shape
    every = torch.zeros(dist.get_world_size(group), 2, dtype=torch.int64, device=x.device)
    every[dist.get_rank(group)] = torch.tensor([rows, columns])
    dist.all_reduce(every, group=group)
    shapes: list[tuple[int, int]] = [(m, k) for m, k in every.tolist()]
    check_extents(shapes, r, dim, rowwise=rowwise, columnwise=columnwise)
