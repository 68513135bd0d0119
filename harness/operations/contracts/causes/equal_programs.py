"""Whether two changed contracts are equal: their results are equal on inputs of many magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from narrowgauge.reference.contracts.evaluate import Evaluation, evaluated, of_rows
from narrowgauge.reference.contracts.interval import Interval, exactly
from narrowgauge.reference.contracts.layout.pages import given_scale, slots
from narrowgauge.spec.program import BITS, HALF, INDEX, READ, SCORES, WRITTEN, Program

_SIZES = ((64, 144), (96, 112))
"""Rows and columns of the inputs: whole groups of a rotation. Two different sums may agree on a single width."""


def equal_programs(one: Program, other: Program, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all values that are shown or quantized, and the quantizations, are equal on drawn inputs of the
    dtypes of `tensors`. False if a program hides a quantization of several numbers of these inputs."""
    if list(_stored(one)) != list(_stored(other)):
        return False
    cached = any(argument.of_cache or argument.kind == "Positions" for argument in one.arguments)
    for seed, (height, width) in enumerate(_SIZES):
        given = _cached(tensors, one, seed) if cached else _inputs(one, tensors, seed, height, width)
        try:
            results = _results(one, given), _results(other, given)
        except ValueError:
            return False
        for a, b in zip(*results, strict=True):
            pairs = ((a.low.nan_to_num(), b.low.nan_to_num()), (a.high.nan_to_num(), b.high.nan_to_num()))
            if (
                a.shape != b.shape
                or not torch.equal(a.may_be_nan, b.may_be_nan)
                or not all(torch.equal(x, y) for x, y in pairs)
            ):
                return False
    return True


def _stored(program: Program) -> Iterator[Mapping[str, Any]]:
    """The options of stored results, and of their quantizations."""
    for number in program.outputs.values():
        step = program.steps[number]
        if step.is_stored:
            yield step.options
            yield from (program.steps[n].options for n in step.operands[:1] if step.function == WRITTEN)


def _cached(tensors: Mapping[str, torch.Tensor], program: Program, seed: int) -> dict[str, torch.Tensor]:
    """New numbers and new slots, of the same sizes."""
    draw, found = torch.Generator().manual_seed(seed), dict(tensors)
    for argument in program.arguments:
        tensor = tensors[argument.name]
        if argument.kind == "Slots":
            found[argument.name] = tensor[torch.randperm(len(tensor), generator=draw)]
        elif argument.kind == "Pages":
            found[argument.name] = tensor.flatten()[torch.randperm(tensor.numel(), generator=draw)].view(tensor.shape)
        elif argument.dtype == "uint8":
            found[argument.name] = torch.randint(48, 80, tensor.shape, generator=draw).byte()
        elif argument.dtype != INDEX:
            numbers = torch.randn(tensor.shape, generator=draw)
            found[argument.name] = (numbers.abs() if argument.of_cache else numbers).to(tensor.dtype)
    return found


def _inputs(
    program: Program, tensors: Mapping[str, torch.Tensor], seed: int, height: int, width: int
) -> dict[str, torch.Tensor]:
    """Numbers of many magnitudes, or small integers."""
    draw, sizes = torch.Generator().manual_seed(seed), {"1": 1, program.arguments[0].axes[0]: height}
    found = {}
    for argument in program.arguments:
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


def _results(program: Program, tensors: Mapping[str, torch.Tensor]) -> list[Interval]:
    """The shown or quantized values."""
    evaluation = Evaluation(program, of_rows(program, tensors, slice(None)), rows=slice(0, 0))
    found = []
    shown = set(program.outputs.values())
    if any(step.function == SCORES for step in program.steps):  # a result is no matrix that is stored
        return [evaluation.values[number] for number in sorted(shown)]
    for number, step in enumerate(program.steps):
        if step.function == HALF or step.dtype == INDEX:
            continue
        if step.function == WRITTEN:
            found.append(exactly(slots(program, evaluation.tensors, step.operands[2]).double()))
            continue
        if step.function == READ and number in program.cone(*shown):
            evaluation.values[number] = evaluated(evaluation, step)
            continue
        if step.recipe is not None:
            scale = given_scale(program, step, evaluation.tensors)
            found += [] if scale is None else [exactly(scale)]
            found += [evaluation.values[operand] for operand in step.operands]
            continue
        evaluation.values[number] = evaluated(evaluation, step)
        if number in shown:
            found.append(evaluation.values[number])
    return found
