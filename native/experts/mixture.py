"""A mixture of experts by the native kernels of its stages, which shows its end alone."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.native.experts.products import gemm_contiguous
from narrowgauge.native.experts.rows import combine, permute
from narrowgauge.native.fused.activation import silu_mul_quantize
from narrowgauge.native.quantize.quantize import quantize
from narrowgauge.spec.quantized import BatchedQuantized, Quantized
from narrowgauge.spec.recipes import Recipe


def moe(
    x: torch.Tensor, w13: Quantized, w2: Quantized, expert_ids: torch.Tensor, weights: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """Σ of the choices of each token: w2·quantize(silu(gate)·up), gate and up the halves of w13·quantize(x).

    `x`: (T, K) in 16 bits. `w13`: (experts·2F, K), `w2`: (experts·K, F), the matrices of all experts in sequence, with
    rows in whole blocks and a single amax. `expert_ids`: int32 or int64 (T, k), negative of no choice;
    `weights`: float32 (T, k). Returns (T, K) in the dtype of x. Raises as `gemm_contiguous`.
    """
    experts, choices = w2.shape[0] // max(1, x.shape[1]), expert_ids.shape[1]
    rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    _, source, sizes = permute(rows, expert_ids, experts=experts)
    numbers = torch.arange(experts, device=x.device)
    owner = torch.repeat_interleave(torch.cat([numbers, numbers.new_tensor([-1])]),
                                    torch.cat([sizes, len(source) - sizes.sum(0, keepdim=True)]))  # fmt: skip
    token = source.clamp(min=0) // max(1, choices)
    q = _with_amaxes(quantize(x, recipe), experts)
    taken = replace(q, codes=q.codes[token], scales=q.scales[token], shape=(len(source), x.shape[1]))
    products = gemm_contiguous(taken, _matrices(w13, experts), owner, out_dtype=x.dtype)
    products = products.masked_fill((source < 0).unsqueeze(1), 0)  # rows of no choice, which are not written
    activated = _with_amaxes(silu_mul_quantize(products, recipe), experts)
    results = gemm_contiguous(activated, _matrices(w2, experts), owner, out_dtype=x.dtype)
    positions = torch.full((x.shape[0] * choices + 1,), -1, device=x.device)
    positions[source] = torch.arange(len(source), device=x.device)  # the last one is of rows of no choice
    return combine(results, positions[:-1].view(expert_ids.shape), weights)


def _with_amaxes(q: Quantized, experts: int) -> Quantized:
    """The quantization with its amax for each expert."""
    return q if q.amax is None else replace(q, amax=q.amax.expand(experts).contiguous())


def _matrices(q: Quantized, experts: int) -> list[Quantized]:
    """The matrices of experts in sequence."""
    codes, scales = (part.view(experts, -1, part.shape[1]) for part in (q.codes, q.scales))
    amax = None if q.amax is None else q.amax.expand(experts, 1)
    shape = experts, q.shape[0] // experts, q.shape[1]
    return BatchedQuantized(codes, scales, amax, q.recipe, shape).matrices()
