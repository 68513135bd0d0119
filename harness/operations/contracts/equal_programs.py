"""Whether two changed contracts are one: their results are equal on inputs of many magnitudes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from narrowgauge.reference.contracts.evaluate import STEPS, Evaluation, of_rows
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.spec.program import Program

_HEIGHT = 8
"""Rows of the inputs."""


def equal_programs(one: Program, other: Program, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all values that are shown or quantized, and the quantizations, are equal on drawn inputs, which have the
    axes of `tensors`."""
    if [one.steps[n].options for n in one.outputs.values() if one.steps[n].recipe] != [
        other.steps[n].options for n in other.outputs.values() if other.steps[n].recipe
    ]:
        return False
    for seed in range(2):
        given = _inputs(one, tensors, seed)
        for a, b in zip(_results(one, given), _results(other, given), strict=True):
            nan = torch.equal(a.may_be_nan, b.may_be_nan)
            if not nan or not all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in ((a.low, b.low), (a.high, b.high))):
                return False
    return True


def _inputs(program: Program, tensors: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Numbers of many magnitudes, or small integers."""
    draw, rows = torch.Generator().manual_seed(seed), program.arguments[0].axes[:1]
    found = {}
    for argument in program.arguments:
        tensor = tensors[argument.name]
        height = min(_HEIGHT, tensor.shape[0]) if argument.axes[:1] == rows and tensor.dim() > 1 else None
        shape = tensor.shape if height is None else (height, *tensor.shape[1:])
        numbers = torch.randn(shape, generator=draw)
        if seed == 0:
            powers = torch.randint(-10, 11, (*shape[:1], *[1] * (len(shape) - 1)), generator=draw)
            numbers = numbers * torch.exp2(powers.float())
        else:
            numbers = (2 * numbers).round()
        found[argument.name] = numbers.to(tensor.dtype)
    return found


def _results(program: Program, tensors: Mapping[str, torch.Tensor]) -> list[Interval]:
    """The values that are shown or quantized."""
    evaluation = Evaluation(program, of_rows(program, tensors, slice(None)), {})
    found = []
    shown = set(program.outputs.values())
    for number, step in enumerate(program.steps):
        if step.recipe is not None:
            found += [evaluation.values[operand] for operand in step.operands]
            continue
        evaluation.values[number] = STEPS[step.function](evaluation, step)
        if number in shown:
            found.append(evaluation.values[number])
    return found
