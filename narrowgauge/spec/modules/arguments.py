"""Checks of the arguments of modules and shards: reference and kernels raise the same error for the same mistake."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from narrowgauge.spec.arguments import check_tensor, dtype_name
from narrowgauge.spec.dtypes import INPUT_DTYPES
from narrowgauge.spec.modules.training import TrainingRecipe
from narrowgauge.spec.recipes import Recipe

NORMS = ("layer", "rms")


def check_layer(
    kind: str,
    in_features: int,
    out_features: int,
    dtype: torch.dtype,
    seed: int,
    *,
    accumulate: bool,
    quantized_parameters: bool,
) -> None:
    """Raises TypeError or ValueError for invalid options of a layer of the class `kind`."""
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"{kind} has the dtype float32, bfloat16 or float16, not {dtype_name(dtype)}")
    if min(in_features, out_features) < 1:
        raise ValueError(f"{kind} has at least one feature in and out, not {in_features} and {out_features}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"the seed of {kind} is a number of 64 bits, not {seed}")
    if quantized_parameters and not accumulate:
        raise ValueError(
            f"{kind} with quantized_parameters has no weight with a .grad; its gradient goes to main_grad: "
            "give accumulate=True"
        )


def check_norm(kind: str, norm: str, eps: float) -> None:
    """Raises ValueError unless `norm` is "layer" or "rms" and `eps` is above 0."""
    if norm not in NORMS:
        raise ValueError(f"the norm of {kind} is one of {', '.join(NORMS)}, not {norm!r}")
    if not eps > 0:
        raise ValueError(f"eps of {kind} is above 0, not {eps}")


def check_groups(groups: int) -> None:
    """Raises ValueError unless a GroupedLinear has a group."""
    if groups < 1:
        raise ValueError(f"GroupedLinear has at least one group, not {groups}")


def check_heads(hidden: int, heads: int) -> None:
    """Raises ValueError unless the heads divide the hidden size."""
    if heads < 1 or hidden % heads:
        raise ValueError(f"the heads of a TransformerLayer divide its hidden size: {heads} do not divide {hidden}")


def check_input(
    kind: str, x: torch.Tensor, in_features: int, dtype: torch.dtype, recipe: TrainingRecipe | None
) -> None:
    """Raises TypeError or ValueError unless the layer and the recipe accept the input `x` (…, K)."""
    if x.dtype != dtype:
        raise TypeError(f"{kind} of {dtype_name(dtype)} takes x of that dtype, not {dtype_name(x.dtype)}; convert it")
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise ValueError(f"{kind} takes x (…, {in_features}), not shape {tuple(x.shape)}")
    if recipe is not None and recipe.input.transform is not None and x.dtype != torch.bfloat16:
        raise TypeError(
            f"{recipe} rotates bfloat16, and this {kind} has the dtype {dtype_name(x.dtype)}; use bfloat16, or switch "
            "the rotation off (NVFP4BlockScaling-norht)"
        )


def check_rotated_rows(x: torch.Tensor, in_features: int, recipe: TrainingRecipe | None) -> None:
    """Raises ValueError if the recipe rotates groups of rows and the rows of `x` (…, K) do not fill whole groups."""
    if recipe is None or recipe.input.transform is None:
        return
    rows, group = x.numel() // in_features, recipe.input.transform.group
    if rows % group:
        raise ValueError(
            f"{recipe} rotates groups of {group} rows; x of shape {tuple(x.shape)} has {rows}: pad it, or switch the "
            "rotation off (NVFP4BlockScaling-norht)"
        )


def check_batch(x: torch.Tensor, hidden: int) -> None:
    """Raises ValueError unless `x` is an input (B, S, hidden) of a TransformerLayer."""
    if x.dim() != 3 or x.shape[2] != hidden:
        raise ValueError(f"TransformerLayer takes x (B, S, {hidden}), not shape {tuple(x.shape)}")


def check_splits(m_splits: Sequence[int], groups: int, x: torch.Tensor, in_features: int) -> None:
    """Raises ValueError unless `m_splits` has a number of rows per group, with the sum of the rows of `x` (…, K)."""
    rows = x.numel() // in_features
    if len(m_splits) != groups or min(m_splits) < 0 or sum(m_splits) != rows:
        raise ValueError(
            f"m_splits are {groups} numbers of rows, not negative, that sum to the {rows} rows of x "
            f"{tuple(x.shape)}; these are {list(m_splits)}"
        )


def check_history_length(kind: str, rows: int, recipe: TrainingRecipe) -> None:
    """Raises ValueError unless the amax history of a layer has the length named by the recipe."""
    if rows != recipe.history:
        raise ValueError(
            f"the amax history of this {kind} has {rows} rows, but {recipe} has {recipe.history}; run a module with "
            "a single length, or set its amax_history to None to begin again"
        )


def check_holds_quantized(kind: str, *, quantized_parameters: bool) -> None:
    """Raises RuntimeError unless the weights of a layer are quantized parameters."""
    if not quantized_parameters:
        raise RuntimeError(
            f"{kind} without quantized_parameters has its weight as a parameter; copy into the parameter, or make the "
            "layer with quantized_parameters=True"
        )


def check_active(recipe: TrainingRecipe | None) -> TrainingRecipe:
    """The recipe of write_weight. Raises RuntimeError for None."""
    if recipe is None:
        raise RuntimeError(
            "write_weight quantizes by the recipe of an autocast, and no autocast is active; enter an autocast, or "
            "give recipe="
        )
    return recipe


def check_masters(weights: Sequence[torch.Tensor], count: int, shape: tuple[int, int]) -> None:
    """Raises TypeError or ValueError unless `count` weights of `shape` (N, K) are given to write_weight."""
    if len(weights) != count:
        raise ValueError(f"write_weight takes {count} weights {shape}, not {len(weights)}")
    for weight in weights:
        check_tensor(weight, "the weight given to write_weight", INPUT_DTYPES, shape)


def check_written(
    shape: tuple[int, int], written: TrainingRecipe | None, recipe: TrainingRecipe | None
) -> TrainingRecipe:
    """The recipe of a written weight. Raises RuntimeError before the first write, ValueError for another recipe."""
    if written is None:
        raise RuntimeError(
            f"the quantized weight {shape} was not written yet; call write_weight with the high-precision weight, or "
            "load a state"
        )
    if recipe != written:
        active = "in high precision" if recipe is None else f"under {recipe}"
        raise ValueError(
            f"the weight {shape} was written under {written}, and this forward is {active}; enter that recipe's "
            "autocast, or call write_weight again"
        )
    return written


def check_main_grad(
    grad: torch.Tensor, name: str, shape: tuple[int, ...], device: torch.device, attribute: str = "main_grad"
) -> None:
    """Raises TypeError or ValueError unless a main gradient is float32, with the shape and device of the weight."""
    check_tensor(grad, f"{attribute} of {name}", (torch.float32,), shape)
    if grad.device != device:
        raise ValueError(f"{attribute} of {name} lies on {grad.device}, and the weight on {device}; move it")


def check_delays(kind: str, *, delay_wgrad: bool) -> None:
    """Raises RuntimeError unless a layer delays the gradients of its weights."""
    if not delay_wgrad:
        raise RuntimeError(f"{kind} has no gradients waiting; make it with delay_wgrad=True")


def check_group(group: dist.ProcessGroup) -> int:
    """The rank of this process in `group`. Raises ValueError outside the group: torch would warn and not reduce."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group of the amax reduction; give a group with this process")
    return rank


def check_sharded_recipe(recipe: Recipe) -> None:
    """Raises ValueError for a recipe with an amax for every row: shards share the amax of the tensor."""
    if recipe.granularity == "row":
        raise ValueError(f"recipe {recipe} has an amax for every row, so shards share no amax of the tensor")


def check_failed_shard(failed: int) -> None:
    """Raises ValueError in every process if process `failed` − 1 could not quantize its shard; 0: none failed."""
    if failed:
        raise ValueError(
            f"process {failed - 1} of the group cannot quantize its shard; "
            f"see the error that process {failed - 1} raised"
        )


def check_dimension(dim: int) -> None:
    """Raises ValueError unless shards lie along dimension 0 or 1."""
    if dim not in (0, 1):
        raise ValueError(f"shards lie along dimension 0 or 1 of a matrix (M, K), not {dim}")


def check_extents(
    shapes: Sequence[tuple[int, int]], recipe: Recipe, dim: int, *, rowwise: bool, columnwise: bool
) -> None:
    """Raises ValueError if a block lies in two shards of these shapes, adjacent along `dim`.

    Extents along the other dimension are equal. Every nonempty shard but the last is a multiple of `step_of`.
    """
    listed = ", ".join(map(str, shapes))
    if len({shape[1 - dim] for shape in shapes}) > 1:
        raise ValueError(f"shards along dimension {dim} have equal extents along the other dimension, not {listed}")
    step = step_of(recipe, dim, rowwise=rowwise, columnwise=columnwise)
    filled = [rank for rank, shape in enumerate(shapes) if shape[dim]]
    for rank in filled[:-1]:
        if shapes[rank][dim] % step:
            raise ValueError(
                f"recipe {recipe} has blocks of {step} along dimension {dim}, and a block would lie in two shards: the "
                f"shard of process {rank} has {shapes[rank][dim]} {('rows', 'columns')[dim]}, no multiple of {step} "
                f"(shards: {listed}); give every shard but the last a multiple of {step}"
            )


def step_of(recipe: Recipe, dim: int, *, rowwise: bool, columnwise: bool) -> int:
    """Elements along `dim` in a block, a tile or a rotated group: the maximum over the wanted halves."""
    if recipe.whole:
        return 1
    along, across = recipe.block[dim], recipe.block[1 - dim]
    group = recipe.transform.group if recipe.transform is not None and dim == 0 else 1
    return max(along if rowwise else 1, max(across, group) if columnwise else 1)
