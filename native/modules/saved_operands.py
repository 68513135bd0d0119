"""Operands that a forward pass keeps for its backward pass, as tensors that autograd's hooks see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.spec.quantized import GroupedQuantized, Quantized

Operand = Quantized | torch.Tensor
"""Of a product: quantized, or in high precision."""
Kept = Operand | GroupedQuantized | None

_PARTS = ("codes", "scales", "amax", "tensor_scale")


def keep(ctx: Any, operands: Sequence[Kept]) -> None:
    """Saves operands for `kept`. Only what goes through save_for_backward is let go and made again by a checkpoint."""
    tensors: list[torch.Tensor | None] = []
    shells: list[Kept] = []
    for operand in operands:
        if operand is None or isinstance(operand, torch.Tensor):
            tensors.append(operand)
            shells.append(None)
        else:
            tensors += [getattr(operand, part) for part in _PARTS]
            nothing = operand.codes.new_empty(0)
            shells.append(replace(operand, codes=nothing, scales=nothing, amax=None, tensor_scale=None))
    ctx.shells = shells
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """The operands that `keep` saved, in their order."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if shell is None else replace(shell, **{part: next(tensors) for part in _PARTS})
        for shell in ctx.shells
    ]
