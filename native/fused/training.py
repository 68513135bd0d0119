"""Forms of training: norms and activations quantized in both orientations, stochastically, and their gradients."""

from __future__ import annotations

import torch

from narrowgauge.native.fused.produced import (
    Produced,
    pass_over_rows,
    produced,
    quantize_produced,
    quantize_rowwise,
    rmsnorm,
)
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe

Results = dict[str, torch.Tensor | Quantized]


def rmsnorm_quantize_both(
    x: torch.Tensor, weight: torch.Tensor, recipe: str | Recipe, *, eps: float = 1e-6, zero_centered: bool = False
) -> Results:
    """RMSNorm of the rows of `x` (M, K) times `weight` (K,), quantized in both orientations: `rowwise` (M, K) and
    `columnwise`, the transpose (K, M), which alone is rotated by a recipe with a transform.

    `x`, `weight`: float32, bfloat16 or float16; `zero_centered`: times 1 + weight. The product is rounded to the dtype
    of `x` once. x is read by a pass over rows, for the numbers 1/√(mean x² + eps), by the quantization, and by a pass
    for the amax if the recipe has an amax of the tensor. Raises TypeError or ValueError for tensors of another dtype or
    shape, NotImplementedError for a recipe that `quantize_produced` does not have and for rows longer than
    `rows.LONGEST_ROW`, ToolchainError if kernels cannot be compiled.
    """
    return _halves(rmsnorm(x, weight, eps, zero_centered=zero_centered), recipe)


def rmsnorm_quantize_stochastic(
    x: torch.Tensor,
    weight: torch.Tensor,
    random: torch.Tensor,
    recipe: str | Recipe = "nvfp4-sr",
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Quantized:
    """RMSNorm of the rows of `x` (M, K), quantized with stochastic rounding by `random`, int32 (M, ⌈K/4⌉).

    Raises as `rmsnorm_quantize_both`, and for a recipe that rounds to nearest.
    """
    return quantize_rowwise(rmsnorm(x, weight, eps, zero_centered=zero_centered), recipe, random)


def rmsnorm_quantize_both_stochastic(
    x: torch.Tensor,
    weight: torch.Tensor,
    random: torch.Tensor,
    random_columnwise: torch.Tensor,
    recipe: str | Recipe = "nvfp4-rht-sr",
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Results:
    """`rmsnorm_quantize_both` with stochastic rounding by `random`, int32 (M, ⌈K/4⌉), and `random_columnwise`, int32
    (K, ⌈M/4⌉).

    Raises as `rmsnorm_quantize_both`, and for a recipe that rounds to nearest.
    """
    return _halves(rmsnorm(x, weight, eps, zero_centered=zero_centered), recipe, (random, random_columnwise))


def silu_mul_quantize_both(x: torch.Tensor, recipe: str | Recipe) -> Results:
    """SiLU of the first half of the columns of `x` (M, 2K), times the second half, quantized in both orientations.

    Raises as `rmsnorm_quantize_both`, and ValueError for an odd number of columns.
    """
    return _halves(produced("SILU_MUL", x), recipe)


def rmsnorm_backward(
    dy: torch.Tensor, x: torch.Tensor, rs: torch.Tensor, weight: torch.Tensor, *, zero_centered: bool = False
) -> Results:
    """Gradients of RMSNorm: `dx` (M, K) = rs·(g − mean(g·n)·n), g = dy·weight, n = x·rs, of the dtype of `x`, and
    `dweight` (K,) = Σ dy·n over the rows, of the dtype of `weight`.

    `dy`, `x`: (M, K) of one dtype. `rs`, float32 (M, 1): 1/√(mean x² + eps) of the forward pass. Each is read once.
    Raises as `rmsnorm_quantize_both`.
    """
    made = produced("RMSNORM_BACKWARD", x, dy=dy, rs=rs, weight=weight, zero_centered=zero_centered)
    dx = torch.empty(made.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty_like(weight)
    pass_over_rows(made, y=dx, sums=dweight)
    return {"dx": dx, "dweight": dweight}


def rmsnorm_backward_quantize_both(
    dy: torch.Tensor,
    x: torch.Tensor,
    rs: torch.Tensor,
    weight: torch.Tensor,
    recipe: str | Recipe,
    *,
    zero_centered: bool = False,
) -> Results:
    """`rmsnorm_backward`, with dx quantized in both orientations: `dweight`, `rowwise`, `columnwise`.

    Raises as `rmsnorm_quantize_both`.
    """
    made = produced("RMSNORM_BACKWARD", x, dy=dy, rs=rs, weight=weight, zero_centered=zero_centered)
    made.fields["projection"] = projection = torch.empty(made.shape[0], dtype=torch.float32, device=x.device)
    dweight = torch.empty_like(weight)
    pass_over_rows(made, numbers=projection, sums=dweight)
    return {"dweight": dweight, **_halves(made, recipe)}


def silu_mul_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient (M, 2K) of SiLU of the gate times up, the halves of the columns of `x` (M, 2K), by `dy` (M, K).

    Rounded once to the dtype of `x`, which is that of `dy`. Each is read once. Raises as `silu_mul_quantize_both`.
    """
    made = produced("SILU_MUL_BACKWARD", x, dy=dy)
    dx = torch.empty(made.shape, dtype=x.dtype, device=x.device)
    pass_over_rows(made, y=dx)
    return dx


def silu_mul_backward_quantize_both(dy: torch.Tensor, x: torch.Tensor, recipe: str | Recipe) -> Results:
    """`silu_mul_backward`, quantized in both orientations, and `dbias` (2K,), the sum over the rows of the gradient
    before it is rounded, of the dtype of `x`.

    Raises as `silu_mul_quantize_both`.
    """
    made = produced("SILU_MUL_BACKWARD", x, dy=dy)
    dbias = torch.empty(made.shape[1], dtype=x.dtype, device=x.device)
    pass_over_rows(made, sums=dbias)
    return {"dbias": dbias, **_halves(made, recipe)}


def silu_mul_backward_quantize_stochastic(
    dy: torch.Tensor,
    x: torch.Tensor,
    random: torch.Tensor,
    random_columnwise: torch.Tensor,
    recipe: str | Recipe = "nvfp4-rht-sr",
) -> Results:
    """`silu_mul_backward`, quantized in both orientations with stochastic rounding by `random`, int32 (M, ⌈2K/4⌉), and
    `random_columnwise`, int32 (2K, ⌈M/4⌉).

    Raises as `silu_mul_quantize_both`, and for a recipe that rounds to nearest.
    """
    return _halves(produced("SILU_MUL_BACKWARD", x, dy=dy), recipe, (random, random_columnwise))


def _halves(made: Produced, recipe: str | Recipe, random: tuple[object, object] = (None, None)) -> Results:
    row, column = quantize_produced(made, recipe, tuple(Half), random=random)
    assert row is not None
    assert column is not None
    return {"rowwise": row, "columnwise": column}
