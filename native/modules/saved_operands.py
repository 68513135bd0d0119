"""Operands saved by a forward pass for its backward pass, as tensors visible to autograd's hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.spec.quantized import GroupedQuantized, Quantized

Operand = Quantized | torch.Tensor
"""Operand of a GEMM: quantized, or in high precision."""
Saved = Operand | GroupedQuantized | None

_PARTS = ("codes", "scales", "amax", "tensor_scale")


def save_operands(ctx: Any, operands: Sequence[Saved]) -> None:
    """Saves operands for `load_operands`, by save_for_backward: a checkpoint frees and recomputes no other tensors."""
    tensors: list[torch.Tensor | None] = []
    without_tensors: list[Saved] = []
    for operand in operands:
        if operand is None or isinstance(operand, torch.Tensor):
            tensors.append(operand)
            without_tensors.append(None)
        else:
            tensors += [getattr(operand, part) for part in _PARTS]
            empty = operand.codes.new_empty(0)
            without_tensors.append(replace(operand, codes=empty, scales=empty, amax=None, tensor_scale=None))
    ctx.operands_without_tensors = without_tensors
    ctx.save_for_backward(*tensors)


def load_operands(ctx: Any) -> list[Any]:
    """The operands of `save_operands`, in order."""
    tensors = iter(ctx.saved_tensors)
    return [
        next(tensors) if operand is None else replace(operand, **{part: next(tensors) for part in _PARTS})
        for operand in ctx.operands_without_tensors
    ]
