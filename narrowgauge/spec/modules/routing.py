"""Sections of the rows of experts: how many rows a buffer has, and checks of the arguments of routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.spec.arguments import check_rows

if TYPE_CHECKING:
    import torch


def permuted_rows(choices: int, experts: int, alignment: int, capacity: int) -> int:
    """Rows of the buffer of permuted rows: experts·capacity, or enough for any sizes of the sections, a multiple of
    `alignment`. `choices`: of all tokens."""
    if capacity:
        return experts * capacity
    return -(-(choices + experts * (alignment - 1)) // alignment) * alignment


def check_routing(x: torch.Tensor, expert_ids: torch.Tensor, experts: int, alignment: int, capacity: int) -> None:
    """Raises TypeError or ValueError unless `x` is (T, K) and `expert_ids` are int32 or int64 (T, k), on a CPU below
    `experts`, and the numbers are positive; a capacity of 0 is none."""
    import torch

    check_rows(x, "x")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert_ids is {expert_ids.dtype}; it can be int32 or int64")
    if expert_ids.dim() != 2 or len(expert_ids) != len(x):
        raise ValueError(f"expert_ids has shape {tuple(expert_ids.shape)}; for x {tuple(x.shape)} it is ({len(x)}, k)")
    for name, number, least in (("experts", experts, 1), ("alignment", alignment, 1), ("capacity", capacity, 0)):
        if number < least:
            raise ValueError(f"{name} is {number}; it is at least {least}")
    if expert_ids.device.type == "cpu" and expert_ids.numel() and int(expert_ids.max()) >= experts:
        raise ValueError(f"expert_ids holds {int(expert_ids.max())}; there are the experts 0 to {experts - 1}")
