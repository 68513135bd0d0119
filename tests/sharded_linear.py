"""A linear layer divided among several processes, and its expected operands, joined."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.reference.ops import Quantized
from narrowgauge.spec.modules.autocast import autocast
from tests.shards import joined_differs, same

Observed = dict[str, list[Any]]
STEPS = 2
"""The second step quantizes by scales of delayed scaling, from the amaxes of the first step."""
DIMENSIONS: dict[str, tuple[int | None, int | None, int | None]] = {
    "column-parallel": (None, 0, 1),
    "row-parallel": (1, 1, None),
    "sequence-parallel": (0, None, 0),
}
"""Dimension along which x (M, K), the weight (N, K) and dy (M, N) are sharded; None for a whole tensor everywhere."""


@dataclass(frozen=True)
class ShardedLinear:
    """A layer, and its division: `extents` of N, of K or of M, for each process."""

    recipe: str
    division: str
    extents: tuple[int, ...]
    held: bool
    """Whether the layer holds its weight quantized."""

    def __str__(self) -> str:
        of = f"{self.recipe}, {self.division} {'+'.join(map(str, self.extents))}"
        return f"{of}, quantized parameters" if self.held else of

    def operands(self, step: int) -> list[torch.Tensor]:
        """x, weight and dy of a step, bfloat16, each with numbers of a different magnitude in every shard."""
        total, other = sum(self.extents), 128 if self.recipe == "Float8BlockScaling" else 32
        m, n, k = {
            "column-parallel": (32, total, other),
            "row-parallel": (32, other, total),
            "sequence-parallel": (total, other, other),
        }[self.division]
        found = []
        for number, (shape, dim) in enumerate(zip(((m, k), (n, k), (m, n)), self.dimensions, strict=True)):
            generator = torch.Generator().manual_seed(
                zlib.crc32(f"{self} {number} {step if number != 1 else 0}".encode())
            )
            x = torch.randn(shape, generator=generator)
            parts = [x] if dim is None else list(x.split(self.extents, dim))
            for part, power in zip(parts, torch.randperm(len(parts), generator=generator).tolist(), strict=True):
                part.mul_(2.0 ** (3 * power - step))
            found.append(x.bfloat16())
        return found

    @property
    def dimensions(self) -> tuple[int | None, int | None, int | None]:
        return DIMENSIONS[self.division]

    def observe(
        self, layer: Callable[..., Any], device: torch.device, rank: int | None = None, group: Any = None
    ) -> Observed:
        """What a `Linear` shows in two steps, of the whole layer or of the part of a process."""

        def part(step: int) -> list[torch.Tensor]:
            whole = zip(self.operands(step), self.dimensions, strict=True)
            return [
                (x if rank is None or dim is None else x.split(self.extents, dim)[rank].contiguous()).to(device)
                for x, dim in whole
            ]

        weight = part(0)[1]
        linear = layer(
            weight.shape[1], weight.shape[0], bias=False, device=device, seed=3, amax_group=group,
            quantized_parameters=self.held, accumulate=self.held,
        )  # fmt: skip
        with torch.no_grad():
            linear.write_weight(weight, self.recipe) if self.held else linear.weight.copy_(weight)
        found: Observed = defaultdict(list)
        linear.observer = lambda name, value: found[name].append(value)
        for step in range(STEPS):
            x, _, dy = part(step)
            with autocast(self.recipe):
                y = linear(x.requires_grad_())
            (y * dy).sum().backward()  # y.backward(dy) would import sympy, half a second for every process
        return dict(found)


def sharded_linears(world: int) -> list[ShardedLinear]:
    """Layers divided among so many processes; shards of batches may be empty."""
    found = []
    for number, (name, division) in enumerate(_LAYERS if world == 2 else _LAYERS[:_OF_MANY]):
        block = 128 if name == "Float8BlockScaling" else 32
        counts = (1, 2, 1, 1) if division != "sequence-parallel" else (0, 2, 1, 0) if number % 2 else (1, 0, 2, 1)
        held = name == "Float8CurrentScaling" and division == "column-parallel"
        found.append(ShardedLinear(name, division, tuple(block * count for count in counts[:world]), held))
    return found


# A process with a part of dy draws for its part: stochastic rounding gives the bytes of the whole for a whole dy.
_LAYERS = (
    ("NVFP4BlockScaling-nosr", "column-parallel"),
    ("NVFP4BlockScaling", "row-parallel"),
    ("NVFP4BlockScaling-nosr", "sequence-parallel"),
    ("DelayedScaling-recent-margin1-history4", "column-parallel"),
    ("DelayedScaling", "row-parallel"),
    ("DelayedScaling-history4", "sequence-parallel"),
    ("NVFP4BlockScaling-norht-nosr-no2d", "column-parallel"),
    ("Float8CurrentScaling", "column-parallel"),
    ("Float8CurrentScaling", "row-parallel"),
    ("MXFP8BlockScaling", "row-parallel"),
    ("Float8BlockScaling", "column-parallel"),
)
_OF_MANY = 4


def operand_differences(parts: Sequence[Observed], whole: Observed, case: ShardedLinear) -> list[str]:
    """Operands, histories and scales that differ from the whole layer, bit for bit."""
    found = []
    for name, dim in zip(("x", "w", "dy"), case.dimensions, strict=True):
        for columnwise in (False, True):
            key = f"{name} columnwise" if columnwise else name
            for step, expected in enumerate(whole[key]):
                halves: list[Quantized] = [part[key][step] for part in parts]
                if dim is None:
                    differ = [field for half in halves for field in joined_differs([half], expected, 0)]
                else:
                    differ = joined_differs(halves, expected, 1 - dim if columnwise else dim)
                found += [f"{key} {field} of step {step}" for field in differ]
    for name in ("history", "scale"):
        for part in parts:
            one, other = part.get(name, []), whole.get(name, [])
            if len(one) != len(other) or not all(map(same, one, other)):
                found.append(name)
    return found
