"""Wrong kernels of the contracts of the package, as the mistakes of kernel engineers, with the words that name each
mistake; and right kernels that are unlike the formulas of `Kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.api.verdict import Verdict
from tests.harness.operations.contracts.serving_kernels import Kernels, Tensor

bf16, f16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Fused:
    """A kernel with some methods of `Kernels` replaced."""

    operation: str
    name: str
    words: str = ""
    """Words of the sentence that names the mistake; empty of a right kernel, and of a mistake outside of the list."""
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)
    inputs: str = "normal"
    recipe: str = "fp8-row-e4m3"
    columns: int = 256
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operation}: {self.name}"

    def verdict(self, diagnose: str = "full", seed: int = 0) -> Verdict:
        """The verdict on the results of the kernel."""
        contract = CONTRACTS[self.operation]
        given = self._tensors(seed)
        kernel = getattr(type("Fused", (Kernels,), self.methods)(), self.operation.replace("-", "_"))
        recipe = {"recipe": self.recipe} if contract.recipes else {}
        result = kernel(*given, *recipe.values(), **self.options)
        known = {**recipe, **self.options}
        return narrowgauge.explain(narrowgauge.assert_result, contract, result, *given, diagnose=diagnose, **known)

    def _tensors(self, seed: int) -> list[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        sizes, found = {"M": 64, "K": self.columns, "1": 1}, []
        for kind, axes in CONTRACTS[self.operation].tensors.values():
            parts = [axis.split("/") for axis in axes]
            shape = [sizes[name] // math.prod(map(int, divisors)) for name, *divisors in parts]
            if len(axes) == 1:
                found.append((torch.randn(shape, generator=draw) * 0.5 + 1.25).to(bf16))
                continue
            if kind is c.Bits:
                found.append(torch.randint(-(2**31), 2**31, shape, generator=draw, dtype=torch.int32))
                continue
            x = torch.randn(shape, generator=draw) * 2 ** torch.linspace(-2, 2, shape[0]).view(-1, 1)
            if kind is c.Column:
                found.append(x.abs() + 0.25)
                continue
            if self.inputs == "tiny":
                x = x * 2.0**-10
            if self.inputs == "large":
                x = x * 8
            if self.inputs == "offset":
                x = x + 1
            found.append(x.to(bf16))
        return found


def _truncated(y: Tensor) -> Tensor:
    return (y.contiguous().view(torch.int32) & -65536).view(torch.float32).to(bf16)


def _rms(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Any]]:
    """A norm as a function of z, rs and the weight."""

    def norm(self, x, z, weight, eps, zero_centered):
        return change(z, self.rsqrt(self.mean_square(z), eps), weight.float())

    return {"norm": norm}


def _layer(change: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    def layernorm_quantize(self, x, weight, bias, recipe, *, eps=1e-5, zero_centered=False):
        z = x.float()
        m = z.mean(-1, keepdim=True)
        return self.quantize(change(z, m, weight.float(), bias.float(), eps).to(x.dtype), recipe)

    return {"layernorm_quantize": layernorm_quantize}


def _halves(change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Any]]:
    def silu_mul(self, x):
        return change(*x.float().chunk(2, -1)).to(x.dtype)

    return {"silu_mul": silu_mul}


def _with_residual(change: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    def add_rmsnorm(self, x, residual, weight, *, eps=1e-6, zero_centered=False):
        return change(self, x.float(), residual.float(), lambda z: self.norm(x, z, weight, eps, zero_centered))

    return {"add_rmsnorm": add_rmsnorm}


def _quantized(change: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    def quantize(self, y, recipe, scale=None):
        return change(y, recipe)

    return {"quantize": quantize}


def _pairs(change: Callable[..., Tensor]) -> dict[str, Callable[..., Any]]:
    def rotated(self, x, cos, sin):
        return change(x.float(), cos.float(), sin.float())

    return {"rotated": rotated}


def _inverse(deviation: Tensor, eps: float, count: int) -> Tensor:
    return torch.rsqrt(deviation.square().sum(-1, keepdim=True) / count + eps)


def _halved(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def _neighbours(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x[:, ::2], x[:, 1::2]
    return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(1)


def _by_row(y: Tensor, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, None]:
    """Codes and scales of rows from y and amax."""
    scaled, scale = change(y.float(), y.float().abs().amax(-1, keepdim=True))
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale, None


def _truncated_int8(y: Tensor) -> tuple[Tensor, Tensor, None]:
    scale = narrowgauge.quantize(y, "int8-row").scales
    return (y.float() / scale).to(torch.int8), scale, None


def _clamped(gate: Tensor, up: Tensor, alpha: float, plus: float = 1.0) -> Tensor:
    return gate * torch.sigmoid(alpha * gate) * (up + plus)


def _torch_norm(self, x, z, weight, eps, zero_centered):
    return functional.rms_norm(z, z.shape[1:], weight.float(), eps).to(x.dtype)


def _two_passes(z: Tensor, m: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    d = z.double() - z.double().mean(-1, keepdim=True)
    return (d * _inverse(d, eps, z.shape[1]) * w + b).float()


def _in_bfloat16(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    ac, bs, bc, as_ = ((p * q).to(bf16).float() for p, q in ((a, c), (b, s), (b, c), (a, s)))
    return torch.cat([ac - bs, bc + as_], -1)


def _without_sign(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * c + b * s, b * c + a * s], -1)


def _fused_products(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([torch.addcmul(a * c, -b, s), torch.addcmul(b * c, a, s)], -1)


def _silu(g: Tensor) -> Tensor:
    return g / (1 + torch.exp(-g))


_R, _A, _L = "rmsnorm-quantize", "add-rmsnorm-quantize", "layernorm-quantize"
_S, _G, _O = "silu-mul-quantize", "gelu-mul-quantize", "rope-quantize"
_P = "rope-partial-quantize"
_C, _Q = "swiglu-clamped-quantize", "relu-squared-quantize"

WRONG = (
    # the mean square and its root
    Fused(_R, "eps left out", "1e-06", {"rsqrt": lambda s, m, eps: torch.rsqrt(m)}, "tiny"),
    Fused(_R, "eps of 1e-5", "1e-05 in place of 1e-06", {"rsqrt": lambda s, m, eps: torch.rsqrt(m + 1e-5)}, "tiny"),
    Fused(_R, "eps behind the root", "1e-06", {"rsqrt": lambda s, m, eps: 1 / (m.sqrt() + eps)}, "tiny"),
    Fused(_R, "mean over K − 1", "divides by K − 1",
          {"mean_square": lambda s, z: s.total(z.square()) / (z.shape[1] - 1)},
          columns=64),
    Fused(_R, "mean over a padded row", "multiple of", {"mean_square": lambda s, z: s.total(z.square()) / 256},
          columns=240),
    Fused(_R, "sum for mean", "is not divided", {"mean_square": lambda s, z: s.total(z.square())}),
    Fused(_R, "the last element", "leaves out the last element",
          {"total": lambda s, q: q[:, :-1].sum(-1, keepdim=True)}),
    Fused(_R, "the last vector", "leaves out the last 8", {"total": lambda s, q: q[:, :-8].sum(-1, keepdim=True)}),
    Fused(_R, "half of the row", "first half", {"total": lambda s, q: q[:, :128].sum(-1, keepdim=True)}),
    Fused(_R, "every second element", "every second", {"total": lambda s, q: q[:, ::2].sum(-1, keepdim=True)}),
    Fused(_R, "rs in bfloat16", "bfloat16", {"rsqrt": lambda s, m, eps: torch.rsqrt(m + eps).to(bf16).float()}),
    Fused(_R, "rs in float16", "float16", {"rsqrt": lambda s, m, eps: torch.rsqrt(m + eps).to(f16).float()}),
    Fused(_R, "rs inverted", "rsqrt", {"rsqrt": lambda s, m, eps: torch.sqrt(m + eps)}),
    Fused(_R, "no root", "rsqrt", {"rsqrt": lambda s, m, eps: 1 / (m + eps)}),
    Fused(_R, "about the mean", "mean", {"mean_square": lambda s, z: z.var(-1, keepdim=True, correction=0)}, "offset"),
    Fused(_R, "rs of the next row", "next row", _rms(lambda z, rs, w: (z * rs.roll(-1, 0) * w).to(bf16))),
    # the products and their casts
    Fused(_R, "no cast", "is not rounded to bfloat16", _rms(lambda z, rs, w: z * rs * w)),
    Fused(_R, "a cast before the weight", "rounded to bfloat16",
          _rms(lambda z, rs, w: ((z * rs).to(bf16) * w).to(bf16))),
    Fused(_R, "the weight first", "rounded to bfloat16", _rms(lambda z, rs, w: ((z * w).to(bf16) * rs).to(bf16))),
    Fused(_R, "through float16", "float16", _rms(lambda z, rs, w: (z * rs * w).to(f16).to(bf16))),
    Fused(_R, "a truncating cast", "truncated", _rms(lambda z, rs, w: _truncated(z * rs * w))),
    Fused(_R, "1 + weight", "1 + weight", {"factor": lambda s, w, zero_centered: w.float() + 1}),
    Fused(_R, "no weight", "weight", {"factor": lambda s, w, zero_centered: torch.ones_like(w.float())}),
    Fused(_R, "the weight twice", "weight", {"factor": lambda s, w, zero_centered: w.float().square()}),
    Fused(_R, "the weight of the next column", "next column",
          {"factor": lambda s, w, zero_centered: w.float().roll(-1)}),
    # the residual
    Fused(_A, "no residual", "residual", _with_residual(lambda s, x, r, norm: (x.to(bf16), norm(x)))),
    Fused(_A, "the residual twice", "residual",
          _with_residual(lambda s, x, r, norm: ((z := (x + 2 * r).to(bf16)), norm(z.float())))),
    Fused(_A, "x − residual", "residual",
          _with_residual(lambda s, x, r, norm: ((z := (x - r).to(bf16)), norm(z.float())))),
    Fused(_A, "x is the next residual", "residual",
          _with_residual(lambda s, x, r, norm: (x.to(bf16), norm((x + r).to(bf16).float())))),
    Fused(_A, "the norm of x", "behind the result that is shown",
          _with_residual(lambda s, x, r, norm: ((x + r).to(bf16), norm(x)))),
    Fused(_A, "the norm of the unrounded sum", "not rounded to bfloat16",
          _with_residual(lambda s, x, r, norm: ((x + r).to(bf16), norm(x + r)))),
    # LayerNorm
    Fused(_L, "no bias", "bias", _layer(lambda z, m, w, b, eps: (z - m) * _inverse(z - m, eps, z.shape[1]) * w)),
    Fused(_L, "bias before the weight", "bias",
          _layer(lambda z, m, w, b, eps: ((z - m) * _inverse(z - m, eps, z.shape[1]) + b) * w)),
    Fused(_L, "no mean", "mean",
          _layer(lambda z, m, w, b, eps: z * _inverse(z - m, eps, z.shape[1]) * w + b), "offset"),
    Fused(_L, "deviation over K − 1", "K − 1",
          _layer(lambda z, m, w, b, eps: (z - m) * _inverse(z - m, eps, z.shape[1] - 1) * w + b), columns=64),
    Fused(_L, "the mean square of z", "mean",
          _layer(lambda z, m, w, b, eps: (z - m) * _inverse(z, eps, z.shape[1]) * w + b), "offset"),
    # gated activations
    Fused(_S, "base 2", "exp2", {"exp": lambda s, x: torch.exp2(x)}),
    Fused(_S, "e^x", "minus sign", {"exp": lambda s, x: torch.exp(-x)}),
    Fused(_S, "exchanged halves", "halves", _halves(lambda g, u: _silu(u) * g)),
    Fused(_S, "interleaved halves", "even and its odd",
          {"split": lambda s, x: (x.float()[:, ::2], x.float()[:, 1::2])}),
    Fused(_S, "no up", "second half", _halves(lambda g, u: _silu(g))),
    Fused(_S, "the sigmoid alone", "sigmoid", _halves(lambda g, u: torch.sigmoid(g) * u)),
    Fused(_S, "GELU", "gelu", _halves(lambda g, u: functional.gelu(g, approximate="tanh") * u)),
    Fused(_S, "ReLU", "relu", _halves(lambda g, u: g.relu() * u)),
    Fused(_S, "a cast of the activation", "rounded to bfloat16",
          _halves(lambda g, u: _silu(g).to(bf16).float() * u)),
    Fused(_S, "up added", "are added", _halves(lambda g, u: _silu(g) + u)),
    Fused(_G, "erf for tanh", "erf", {"gelu": lambda s, g, a: g * 0.5 * (1 + torch.erf(g * 0.5**0.5))},
          recipe="nvfp4"),
    Fused(_G, "quick GELU", "quick_gelu", {"gelu": lambda s, g, a: g * torch.sigmoid(1.702 * g)}),
    Fused(_C, "no upper limit of the gate", "no upper limit 7",
          {"swiglu": lambda s, g, u, m, a: _clamped(g, u.clamp(-m, m), a)}, inputs="large"),
    Fused(_C, "up without 1", "1", {"swiglu": lambda s, g, u, m, a: _clamped(g.clamp(max=m), u.clamp(-m, m), a, 0)}),
    Fused(_C, "alpha of 1", "1.702", {"swiglu": lambda s, g, u, m, a: _clamped(g.clamp(max=m), u.clamp(-m, m), 1)}),
    Fused(_C, "no lower limit of up", "no lower limit -7",
          {"swiglu": lambda s, g, u, m, a: _clamped(g.clamp(max=m), u.clamp(max=m), a)}, "large"),
    Fused(_Q, "no square", "is not squared",
          {"relu_squared_quantize": lambda s, x, r: s.quantize(x.float().relu().to(bf16), r)}),
    Fused(_Q, "no ReLU", "no lower limit 0",
          {"relu_squared_quantize": lambda s, x, r: s.quantize(x.float().square().to(bf16), r)}),
    # rotary embedding
    Fused(_O, "pairs of neighbours", "pairs", _pairs(_neighbours)),
    Fused(_O, "the other direction", "is subtracted", _pairs(lambda x, c, s: _halved(x, c, -s))),
    Fused(_O, "cos and sin exchanged", "cos", _pairs(lambda x, c, s: _halved(x, s, c))),
    Fused(_O, "no sign", "exchanged", _pairs(_without_sign)),
    Fused(_O, "products in bfloat16", "bfloat16", _pairs(_in_bfloat16)),
    Fused(_P, "the last half is rotated", "halves",
          {"partly": lambda s, x, c, r: torch.cat([x[:, :128], s.rotated(x[:, 128:], c, r).to(bf16)], -1)}),
    Fused(_P, "pairs of neighbours", "pairs", _pairs(_neighbours)),
    Fused(_O, "angles of the next row", "next row", _pairs(lambda x, c, s: _halved(x, c.roll(-1, 0), s.roll(-1, 0)))),
    # the quantization
    Fused(_R, "powers of two", "scales are rounded", _quantized(lambda y, r: (
        (q := narrowgauge.quantize(y, "fp8-row-e4m3-pow2")).codes, q.scales, None))),
    Fused(_R, "inverse scales", "inverse", _quantized(lambda y, r: (
        (q := narrowgauge.quantize(y, r)).codes, 1 / q.scales, None))),
    Fused(_R, "amax of 240", "", _quantized(lambda y, r: _by_row(y, lambda y, amax: (y * (240 / amax), amax / 240)))),
    Fused(_R, "truncated rows of INT8", "rounded toward zero", _quantized(lambda y, r: _truncated_int8(y)),
          recipe="int8-row"),
)  # fmt: skip


def _sum_of_chunks(size: int) -> Callable[..., Tensor]:
    """A sum in chunks of `size`, in the order of a warp's shuffles."""

    def total(self, squares):
        parts = functional.pad(squares, (0, -squares.shape[1] % size)).unflatten(1, (-1, size)).sum(1)
        while parts.shape[1] > 1:
            half = parts.shape[1] // 2
            parts = torch.cat([parts[:, :half] + parts[:, half : 2 * half], parts[:, 2 * half :]], 1)
        return parts

    return total


def _one_by_one(self, squares):
    found = squares[:, :1]
    for column in range(1, squares.shape[1]):
        found = found + squares[:, column : column + 1]
    return found


def _welford(z, m, w, b, eps):
    mean, deviation = z[:, :1], torch.zeros_like(z[:, :1])
    for count in range(2, z.shape[1] + 1):
        delta = z[:, count - 1 : count] - mean
        mean = mean + delta / count
        deviation = deviation + delta * (z[:, count - 1 : count] - mean)
    return (z - mean) * torch.rsqrt(deviation / z.shape[1] + eps) * w + b


def _double(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda z, rs, w: change(z.double(), rs.double(), w.double()).float().to(bf16)


RIGHT = (
    *(Fused(_R, f"chunks of {size}", methods={"total": _sum_of_chunks(size)}) for size in (1, 2, 4, 8, 32, 128)),
    *(Fused(_R, f"chunks of {size}, {columns} columns", methods={"total": _sum_of_chunks(size)}, columns=columns)
      for size, columns in ((32, 40), (64, 2880), (256, 1000))),
    Fused(_R, "one by one", methods={"total": _one_by_one}),
    Fused(_R, "backwards", methods={"total": lambda s, q: _one_by_one(s, q.flip(1))}),
    Fused(_R, "float64", methods={"total": lambda s, q: q.double().sum(-1, keepdim=True).float()}),
    Fused(_R, "products in float64", methods=_rms(_double(lambda z, rs, w: z * rs * w))),
    Fused(_R, "1/sqrt", methods={"rsqrt": lambda s, m, eps: 1 / torch.sqrt(m + eps)}),
    Fused(_R, "mean by a reciprocal", methods={"mean_square": lambda s, z: s.total(z.square()) * (1 / z.shape[1])},
          columns=240),
    Fused(_R, "torch", methods={"norm": _torch_norm}),
    Fused(_R, "rows of INT8", recipe="int8-row"),
    Fused(_A, "torch", methods={"norm": _torch_norm}),
    Fused(_A, "chunks of 8", methods={"total": _sum_of_chunks(8)}),
    Fused(_A, "tiny rows", inputs="tiny"),
    Fused(_L, "torch", methods=_layer(lambda z, m, w, b, eps: functional.layer_norm(z, z.shape[1:], w, b, eps))),
    Fused(_L, "Welford", methods=_layer(_welford), inputs="offset"),
    Fused(_L, "two passes in float64", methods=_layer(_two_passes)),
    Fused(_S, "torch", methods=_halves(lambda g, u: functional.silu(g) * u)),
    Fused(_S, "g times the sigmoid", methods=_halves(lambda g, u: g * torch.sigmoid(g) * u)),
    Fused(_S, "float64", methods=_halves(lambda g, u: (_silu(g.double()) * u).float())),
    Fused(_S, "exp2 of x·log2 e", methods={"exp": lambda s, x: torch.exp2(x * 1.4426950408889634)}),
    Fused(_G, "torch", methods={"gelu": lambda s, g, a: functional.gelu(g, approximate="tanh")}),
    Fused(_G, "a sigmoid",
          methods={"gelu": lambda s, g, a: g * torch.sigmoid(1.5957691216057308 * (g + 0.044715 * g**3))}),
    Fused(_G, "erf", options={"approximate": "erf"}),
    Fused(_C, "a product", methods={"swiglu": lambda s, g, u, m, a: _clamped(g.clamp(max=m), u.clamp(-m, m), a)}),
    Fused(_Q, "the square of a maximum",
          methods={"relu_squared_quantize": lambda s, x, r: s.quantize((x.float().clamp(min=0) ** 2).to(bf16), r)}),
    Fused(_P, "float64", methods=_pairs(lambda x, c, s: _halved(x.double(), c.double(), s.double()).float())),
    Fused(_O, "float64", methods=_pairs(lambda x, c, s: _halved(x.double(), c.double(), s.double()).float())),
    Fused(_O, "fused products", methods=_pairs(_fused_products)),
)  # fmt: skip

NOT_NAMED = {
    f"{_R}: the weight first", f"{_L}: bias before the weight", f"{_G}: erf for tanh",
    f"{_O}: cos and sin exchanged", f"{_R}: amax of 240",
}  # fmt: skip
"""Mistakes of two steps at once, and one that these inputs do not tell from an approximate tanh."""
