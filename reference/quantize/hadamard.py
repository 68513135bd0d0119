"""The Hadamard transform: rotates groups along K so that an outlier is spread over its group.

Source: docs/numerics.md#hadamard-transform. y = x·R, R = diag(σ)·H·c on every group. H is Sylvester's matrix, and
c = bf16(1/√group).
"""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.blocks import slabs
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Hadamard, Recipe, find_recipe


def coefficient(group: int) -> float:
    """c, the magnitude of every entry of R, a bfloat16 number: ¼ for groups of 16."""
    return float(torch.tensor(group**-0.5).bfloat16())


def signs(rotation: Hadamard) -> torch.Tensor:
    """σ of one group, float32 (group,): the mask's 16 signs, repeated."""
    k = torch.arange(rotation.group) % 16
    return 1.0 - 2.0 * (torch.tensor(rotation.signs) >> k & 1).float()


def transform(x: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`x` (M, K), bfloat16, rotated along K by the recipe's transform: bfloat16 (M, K).

    Products are exact in float32. The sum's order is declared: log2(group) stages, the first adds and subtracts
    neighbours, each next one elements twice as far apart, every addition rounding to float32; one rounding to bfloat16
    ends it.

    Raises ValueError where the recipe has no transform, for another shape, or where K is no multiple of the group;
    TypeError for another dtype.
    """
    recipe = find_recipe(recipe)
    rotation = check_rotation(x, recipe)
    factors = (signs(rotation) * coefficient(rotation.group)).to(x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    for rows in slabs(x):
        # The groups side by side, so that what lies together is added together, twice as fast.
        y = (x[rows].reshape(-1, rotation.group) * factors).T.contiguous()
        half = 1
        while half < rotation.group:
            y = butterfly(y, half * y.shape[1])
            half *= 2
        out[rows].view(-1, rotation.group).copy_(y.T)
    return out


def butterfly(y: torch.Tensor, half: int) -> torch.Tensor:
    """One stage of the sums along K: what lies `half` apart in groups of 2·half becomes its sum and its difference."""
    pairs = y.view(-1, 2, half)
    out = torch.empty_like(pairs)
    torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
    torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
    return out.view(y.shape)
