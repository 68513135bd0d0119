"""Wrong and right kernels of the contracts of training, as `fused_kernels` has them of norms and activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import narrowgauge
from tests.harness.operations.contracts.fused_kernels import Fused as OfAllColumns
from tests.harness.operations.contracts.fused_kernels import bf16
from tests.harness.operations.contracts.serving_kernels import Tensor

_NB, _NS, _AB = "rmsnorm-quantize-both", "rmsnorm-quantize-stochastic", "silu-mul-quantize-both"
_NG, _NGB = "rmsnorm-backward", "rmsnorm-backward-quantize-both"
_AG, _AGB, _AGS = "silu-mul-backward", "silu-mul-backward-quantize-both", "silu-mul-backward-quantize-stochastic"
_MX = "mxfp8-e4m3"
Fused = partial(OfAllColumns, columns=64)
"""Few columns: the rows of both orientations cannot be judged alone."""


def _both(row: Callable[..., Any], column: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Both orientations, each a function of the matrix (M, K) or (K, M), the recipe and the random bits."""

    def halves(self, y, recipe, random):
        bits, recipe = random or (None, None), narrowgauge.recipe(recipe)
        return row(y, recipe, bits[0]), column(y.T.contiguous(), recipe, bits[1])

    return {"halves": halves}


def _plain(y: Tensor, recipe: Any, random: Tensor | None = None) -> Any:
    return narrowgauge.quantize(y, recipe, random=random)


def _unrotated(y: Tensor, recipe: Any, random: Tensor | None = None) -> Any:
    return replace(narrowgauge.quantize(y, recipe.rowwise, random=random), recipe=recipe)


def _norm_gradients(change: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """dx before its rounding, and the terms of dweight, of (dy, x, n, g, rs, weight)."""
    return {"gradients": lambda self, dy, x, rs, w: change(dy, x, x * rs, dy * w, rs, w)}


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _silu_gradients(change: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    """The gradient of (dy, gate, up, sigmoid)."""
    return {"silu_gradients": lambda self, dy, g, u: change(dy, g, u, 1 / (1 + torch.exp(-g)))}


def _gates(dy: Tensor, g: Tensor, u: Tensor, s: Tensor) -> Tensor:
    return torch.cat([dy * u * (s * (1 + g * (1 - s))), dy * g * s], -1)


def _in_pairs(self, terms):
    """Rows two by two."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = torch.cat([terms[:half] + terms[half : 2 * half], terms[2 * half :]])
    return terms[0]


def _in_tiles(self, terms):
    """Partial sums of 16 rows, in the order of the blocks of threads."""
    tiles = [tile.sum(0) for tile in terms.split(16)]
    return sum(tiles[1:], tiles[0])


def _drawn(change: Callable[[Tensor], Tensor]) -> dict[str, Callable[..., Any]]:
    return {"drawn": lambda self, y, recipe, random: _plain(y, recipe, change(random))}


def _flipped(words: Tensor) -> Tensor:
    return words.view(torch.uint8).view(*words.shape, 4).flip(-1).contiguous().view(torch.int32).squeeze(-1)


def _to_nearest(self, y, recipe, random):
    return narrowgauge.quantize(y, "nvfp4")


WRONG = (
    # both orientations
    Fused(_NB, "the transpose is not rotated", "is not rotated", _both(_unrotated_row := lambda y, r, b: _plain(
        y, r.rowwise), _unrotated), recipe="nvfp4-rht"),
    Fused(_NB, "a rotation without signs", "no signs", _both(_unrotated_row, lambda y, r, b: replace(
        _plain(y, "nvfp4-rht-nosign"), recipe=r)), recipe="nvfp4-rht"),
    Fused(_NB, "groups of 32", "groups of 32", _both(_unrotated_row, lambda y, r, b: replace(
        _plain(y, "nvfp4-rht32"), recipe=r)), recipe="nvfp4-rht"),
    Fused(_NB, "both halves are rotated", "", _both(_plain, _plain), recipe="nvfp4-rht"),
    Fused(_AB, "no cast", "is not rounded to bfloat16", {"rounded": lambda s, y, x: y}, recipe=_MX),
    Fused(_AB, "base 2", "exp2", {"exp": lambda s, x: torch.exp2(x)}, recipe=_MX),
    # stochastic rounding
    Fused(_NS, "to nearest", "are rounded nearest", {"drawn": _to_nearest}, recipe="nvfp4-sr"),
    Fused(_NS, "the highest byte first", "from the highest on", _drawn(_flipped), recipe="nvfp4-sr"),
    Fused(_NS, "bits of the first row", "row 0", _drawn(lambda b: b[:1].expand_as(b).contiguous()), recipe="nvfp4-sr"),
    # the backward of RMSNorm
    Fused(_NG, "no projection", "is not subtracted", _norm_gradients(lambda dy, x, n, g, rs, w: (rs * g, dy * n))),
    Fused(_NG, "the sum for the mean", "is not divided by K", _norm_gradients(
        lambda dy, x, n, g, rs, w: (rs * (g - (g * n).sum(-1, keepdim=True) * n), dy * n))),
    Fused(_NG, "dx without rs", "is not multiplied by", _norm_gradients(
        lambda dy, x, n, g, rs, w: (g - _mean(g * n) * n, dy * n))),
    Fused(_NG, "dweight of x", "rs", _norm_gradients(
        lambda dy, x, n, g, rs, w: (rs * (g - _mean(g * n) * n), dy * x))),
    Fused(_NG, "dweight with the weight", "", _norm_gradients(
        lambda dy, x, n, g, rs, w: (rs * (g - _mean(g * n) * n), g * n))),
    Fused(_NG, "the last 8 rows are left out", "leaves out the last 8", {"over_rows": lambda s, t: t[:-8].sum(0)}),
    Fused(_NGB, "the mean of dy·n", "weight", _norm_gradients(
        lambda dy, x, n, g, rs, w: (rs * (g - _mean(dy * n) * n), dy * n)), recipe=_MX),
    # the backward of SwiGLU
    Fused(_AG, "exchanged halves", "exchanged", {"rounded": lambda s, y, x: y.roll(y.shape[1] // 2, 1).to(x.dtype)}),
    Fused(_AG, "the slope is s", "first half of x", _silu_gradients(
        lambda dy, g, u, s: torch.cat([dy * u * s, dy * g * s], -1))),
    Fused(_AG, "the slope with s for 1 − s", "are multiplied in place of 1 −", _silu_gradients(
        lambda dy, g, u, s: torch.cat([dy * u * (s * (1 + g * s)), dy * g * s], -1))),
    Fused(_AG, "dgate without up", "second half", _silu_gradients(
        lambda dy, g, u, s: torch.cat([dy * (s * (1 + g * (1 - s))), dy * g * s], -1))),
    Fused(_AGB, "dbias of rounded numbers", "is rounded to bfloat16",
          {"dbias": lambda s, dx, x: dx.to(bf16).float().sum(0).to(bf16)}, recipe=_MX),
    Fused(_AGB, "dbias of half of the rows", "of a column", {"dbias": lambda s, dx, x: dx[:32].sum(0).to(bf16)},
          recipe=_MX),
    Fused(_AGS, "bits of the other half", "", _both(
        lambda y, r, b: _plain(y, r.rowwise, b), lambda y, r, b: _plain(y, r, b.flip(0))), recipe="nvfp4-rht-sr"),
)  # fmt: skip

RIGHT = (
    Fused(_NB, "torch", methods={"norm": lambda s, x, z, w, eps, c: torch.nn.functional.rms_norm(
        z, z.shape[1:], w.float(), eps).to(x.dtype)}, recipe="nvfp4-rht"),
    Fused(_NB, "tiles of 16", recipe="nvfp4-2d"),
    Fused(_AB, "g times the sigmoid", methods={"silu": lambda s, g: g * torch.sigmoid(g)}, recipe=_MX),
    Fused(_NS, "float64", methods={"total": lambda s, q: q.double().sum(-1, keepdim=True).float()}, recipe="nvfp4-sr"),
    Fused(_NG, "rows in pairs", methods={"over_rows": _in_pairs}),
    Fused(_NG, "tiles of rows", methods={"over_rows": _in_tiles}),
    Fused(_NG, "float64", methods=_norm_gradients(lambda dy, x, n, g, rs, w: (
        (rs.double() * (g.double() - _mean(g.double() * n.double()) * n.double())).float(), dy.double() * n.double()))),
    Fused(_NGB, "a fused product", methods=_norm_gradients(
        lambda dy, x, n, g, rs, w: (rs * torch.addcmul(g, -_mean(g * n), n), dy * n)), recipe=_MX),
    Fused(_AG, "autograd", methods={"silu_gradients": lambda s, dy, g, u: torch.cat([
        torch.ops.aten.silu_backward(dy * u, g), dy * torch.nn.functional.silu(g)], -1)}),
    Fused(_AG, "s + x·s·(1 − s)", methods=_silu_gradients(
        lambda dy, g, u, s: torch.cat([(s + g * s * (1 - s)) * dy * u, g * s * dy], -1))),
    Fused(_AGB, "rows in pairs", methods={"over_rows": _in_pairs}, recipe=_MX),
    Fused(_AGS, "float64", methods=_silu_gradients(
        lambda dy, g, u, s: _gates(dy.double(), g.double(), u.double(), s.double()).float()), recipe="nvfp4-rht-sr"),
)  # fmt: skip

NOT_NAMED = {
    f"{_NB}: both halves are rotated", f"{_NG}: dweight with the weight", f"{_AGS}: bits of the other half",
}  # fmt: skip
"""Mistakes of a step that the list of changes does not have: another product, or a rotation or bits in its place."""
