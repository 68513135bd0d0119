"""Further inputs that separate rules: block amaxes and elements at the boundaries of rounding, under any tensor amax.

The input families have a single mantissa for the tensor amax where block scales are on ties. Orders of operations that
differ in the last bit of a scale need different tensor amaxes, and numbers several ulps from a tie.
"""

from __future__ import annotations

import math

import torch

from narrowgauge.harness.tools.dialect.inputs import Given, shape_of
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.formats import E4M3, E8M0, Format
from narrowgauge.spec.recipes import Recipe

_INPUTS = {"fp32": 24, "bf16": 6, "fp16": 6}
"""Number of inputs of each dtype."""
_ULPS = 3
"""Largest distance from a boundary in ulps."""
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def probes(recipe: Recipe, seed: int, device: str) -> list[Given]:
    """Inputs at boundaries. None for recipes with random bits or given scales."""
    if recipe.rounding == "stochastic" or recipe.tensor_scale == "given":
        return []
    draw = torch.Generator().manual_seed(seed)
    return [
        Given("boundaries", name, _boundaries(recipe, TORCH_DTYPES[name], draw).to(device))
        for name, count in _INPUTS.items()
        for _ in range(count)
    ]


def _boundaries(recipe: Recipe, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    """(M, K): elements at and beside the midpoints of the element, block scales at and beside the boundaries of their
    rounding, and a random tensor amax. A quarter of the blocks is near the ends of the dtype or of the scales."""
    rows, columns = shape_of(recipe)
    width = columns if recipe.spans_k else recipe.block[1]
    blocks = (rows, columns // width)
    end = 14 if dtype == torch.float16 else 100
    power = int(torch.randint(-end // 2, end // 2, (), generator=draw))
    tensor = math.ldexp(1 + float(torch.rand((), generator=draw, dtype=torch.float64)), power)
    tensor = float(torch.tensor(tensor, dtype=dtype))
    low = torch.rand(blocks, generator=draw) < 0.25
    down = torch.randint(0, 10, blocks, generator=draw).masked_fill_(low, 16)
    if recipe.scale is E4M3:
        ties = _midpoints(E4M3)[64:]  # of normal numbers; the scales of the lowest blocks are subnormal
        amax = _chosen(ties, blocks, draw) * torch.ldexp(torch.ones(blocks).double(), -down) * tensor / 448
    else:
        top = math.frexp(recipe.element.max)[0] * 2
        edges = [1.0, 1.5, 1.75, 1.875, 1.9375, top, top / math.sqrt(2)] if recipe.scale is E8M0 else [top]
        exponent = torch.randint(-end, end, blocks, generator=draw)
        smallest = math.frexp(torch.finfo(dtype).tiny)[1]
        exponent = torch.where(low, smallest + exponent % 10, exponent.clamp(min=smallest))
        amax = _chosen(torch.tensor(edges).double(), blocks, draw) * torch.ldexp(torch.ones(blocks).double(), exponent)
        if recipe.scale is not E8M0:
            amax = amax * (1 + torch.rand(blocks, generator=draw, dtype=torch.float64)) / 2
    largest = torch.finfo(dtype).max
    amax = _stepped(amax.clamp(max=largest).to(dtype), draw).double()
    over = amax.repeat_interleave(width, 1)
    middles = _midpoints(recipe.element)
    x = _stepped((_chosen(middles, (rows, columns), draw) / recipe.element.max * over).to(dtype), draw).double()
    x = x.clamp(max=over) * torch.where(torch.rand(x.shape, generator=draw) < 0.5, -1.0, 1.0)
    pinned = torch.arange(columns) % width == torch.randint(0, width, (rows, 1), generator=draw)
    x = torch.where(pinned, over, x)
    if recipe.scale is E4M3:
        x[0, 0] = tensor
    return x.to(dtype)


def _midpoints(fmt: Format) -> torch.Tensor:
    values = torch.tensor(fmt.values[: fmt.max_code + 1], dtype=torch.float64)
    return (values[1:] + values[:-1]) / 2


def _chosen(values: torch.Tensor, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    return values[torch.randint(0, len(values), shape, generator=draw)]


def _stepped(x: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Non-negative numbers, a few ulps up or down."""
    bits = x.view(_INTEGERS[x.dtype])
    step = torch.randint(-_ULPS, _ULPS + 1, x.shape, generator=draw).to(bits.dtype)
    largest = int(torch.tensor(torch.finfo(x.dtype).max, dtype=x.dtype).view(_INTEGERS[x.dtype]))
    return (bits + step).clamp_(0, largest).view(x.dtype)
