"""Whether two changed contracts are one: their results are equal on inputs of many magnitudes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from narrowgauge.reference.contracts.evaluate import Evaluation, evaluated, of_rows
from narrowgauge.reference.contracts.interval import Interval
from narrowgauge.spec.program import BITS, INDEX, Program, Tensor

_SIZES = ((64, 144), (96, 112))
"""Rows and columns of the inputs: whole groups of a rotation. Two different sums may agree on one width."""


def equal_programs(one: Program, other: Program, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all values that are shown or quantized, and the quantizations, are equal on drawn inputs of the
    dtypes of `tensors`."""
    if [one.steps[n].options for n in one.outputs.values() if one.steps[n].recipe] != [
        other.steps[n].options for n in other.outputs.values() if other.steps[n].recipe
    ]:
        return False
    for seed, (height, width) in enumerate(_SIZES):
        given = _inputs(one, tensors, seed, height, width)
        for a, b in zip(_results(one, given), _results(other, given), strict=True):
            pairs = ((a.low.nan_to_num(), b.low.nan_to_num()), (a.high.nan_to_num(), b.high.nan_to_num()))
            if not torch.equal(a.may_be_nan, b.may_be_nan) or not all(torch.equal(x, y) for x, y in pairs):
                return False
    return True


def _inputs(
    program: Program, tensors: Mapping[str, torch.Tensor], seed: int, height: int, width: int
) -> dict[str, torch.Tensor]:
    """Numbers of many magnitudes, or small integers."""
    draw, sizes = torch.Generator().manual_seed(seed), {"1": 1, program.arguments[0].axes[0]: height}
    found = {}
    sequences = any(argument.of_cache for argument in program.arguments)
    for argument in program.arguments:
        if sequences:  # whose lengths and pages fit together
            found[argument.name] = _like(argument, tensors[argument.name], draw)
            continue
        parts = [axis.split("/") for axis in argument.axes]
        shape = [
            sizes[axis] if axis in sizes else -(-sizes.get(name, width) // math.prod(map(int, divisors)))
            for axis, (name, *divisors) in zip(argument.axes, parts, strict=True)
        ]
        if argument.dtype == "uint8":  # bytes of middling scales, and any codes
            found[argument.name] = torch.randint(48, 80, shape, generator=draw).byte()
            continue
        if argument.dtype == INDEX:
            found[argument.name] = torch.randint(width, shape, generator=draw)
            continue
        if argument.dtype == BITS:
            found[argument.name] = torch.randint(-(2**31), 2**31, shape, generator=draw, dtype=torch.int32)
            continue
        numbers = torch.randn(shape, generator=draw)
        if seed == 0:
            powers = torch.randint(-10, 11, shape[:1], generator=draw).float().view(*shape[:1], *[1] * (len(shape) - 1))
            numbers = numbers * torch.exp2(powers)
        else:
            numbers = (2 * numbers).round()
        found[argument.name] = numbers.to(tensors[argument.name].dtype)
    return found


def _like(argument: Tensor, tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Other numbers in place of those of a tensor: codes of a cache and rows of numbers; the other tensors stay."""
    if argument.of_cache:
        return torch.randint(32, 64, tensor.shape, generator=draw).to(tensor)
    return (
        torch.randn(tensor.shape, generator=draw).to(tensor)
        if tensor.dim() > 1 and tensor.is_floating_point()
        else tensor
    )


def _results(program: Program, tensors: Mapping[str, torch.Tensor]) -> list[Interval]:
    """The values that are shown or quantized."""
    evaluation = Evaluation(program, of_rows(program, tensors, slice(None)), rows=slice(0, 0))
    found = []
    shown = set(program.outputs.values())
    if any(argument.of_cache for argument in program.arguments):
        return [evaluation.values[number] for number in sorted(shown)]
    for number, step in enumerate(program.steps):
        if step.recipe is not None:
            found += [evaluation.values[operand] for operand in step.operands]
            continue
        evaluation.values[number] = evaluated(evaluation, step)
        if number in shown:
            found.append(evaluation.values[number])
    return found
