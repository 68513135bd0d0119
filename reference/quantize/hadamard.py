"""The Hadamard transform: rotates groups along K, so that an outlier is spread over its group.

Source: docs/numerics.md#hadamard-transform. y = x·R, R = diag(σ)·H·c for each group. H is Sylvester's matrix, and
c = bf16(1/√group).
"""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.slabs import slabs
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Hadamard, Recipe, find_recipe


def coefficient(group: int) -> float:
    """c, the magnitude of the entries of R, a bfloat16 number: ¼ for groups of 16."""
    return float(torch.tensor(group**-0.5).bfloat16())


def signs(rotation: Hadamard) -> torch.Tensor:
    """σ of a group, float32 (group,): the 16 signs of the mask, repeated."""
    k = torch.arange(rotation.group) % 16
    return 1.0 - 2.0 * (torch.tensor(rotation.signs) >> k & 1).float()


@torch.no_grad()  # autograd refuses sums with out=
def transform(x: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    """`x` (M, K), bfloat16, rotated along K by the transform of the recipe: bfloat16 (M, K).

    Source: docs/numerics.md#hadamard-transform, steps 1 to 3. Raises ValueError if the recipe has no transform, `x` is
    no matrix or K is no multiple of the group; TypeError for a wrong dtype.
    """
    recipe = find_recipe(recipe)
    rotation = check_rotation(x, recipe)
    factors = (signs(rotation) * coefficient(rotation.group)).to(x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    for rows in slabs(x):
        # Step 1: y_k = x_k·σ_k·c. Column g of y is group g: additions of whole rows are twice as fast.
        y = (x[rows].reshape(-1, rotation.group) * factors).T.contiguous()

        # Step 2: butterflies of elements 1, 2, 4, … apart.
        distance = 1
        while distance < rotation.group:
            y = butterfly(y, distance * y.shape[1])
            distance *= 2

        # Step 3: one rounding to bfloat16.
        out[rows].view(-1, rotation.group).copy_(y.T)
    return out


def butterfly(y: torch.Tensor, half: int) -> torch.Tensor:
    """A stage of step 2: in groups of 2·half numbers, (a, b) `half` apart become (fl(a + b), fl(a − b))."""
    pairs = y.view(-1, 2, half)
    out = torch.empty_like(pairs)
    torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
    torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
    return out.view(y.shape)
