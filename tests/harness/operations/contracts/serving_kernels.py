"""Kernels of the contracts of the package, in plain torch. A subclass changes one method."""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge

Tensor = torch.Tensor
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitudes of E2M1 by code."""
INT4 = [float(x) for x in (*range(8), *range(-8, 0))]
"""Numbers of INT4 by code."""
DTYPES = {"E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "INT8": "int8"}


class Kernels:
    """Right kernels: float32 between the casts of the default fields."""

    def quantize(self, y: Tensor, recipe: Any, scale: Tensor | None = None) -> Any:
        """The results of a contract that ends in a quantization."""
        q = narrowgauge.quantize(y, recipe, scale=scale)
        return q.codes if scale is not None else (q.codes, q.scales, q.amax)

    def total(self, squares: Tensor) -> Tensor:
        return squares.sum(-1, keepdim=True)

    def mean_square(self, z: Tensor) -> Tensor:
        return self.total(z.square()) / z.shape[-1]

    def rsqrt(self, mean: Tensor, eps: float) -> Tensor:
        return torch.rsqrt(mean + eps)

    def factor(self, weight: Tensor, zero_centered: bool) -> Tensor:
        return weight.float() + 1 if zero_centered else weight.float()

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def silu(self, gate: Tensor) -> Tensor:
        return gate / (1 + self.exp(-gate))

    def gelu(self, gate: Tensor, approximate: str) -> Tensor:
        if approximate == "erf":  # torch's own GELU has another erf on a CPU, off by up to 9 units of 2^-24
            return gate * 0.5 * (1 + torch.erf(gate * 0.5**0.5))
        return torch.nn.functional.gelu(gate, approximate=approximate)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = x.float().chunk(2, -1)
        return gate, up

    def rounded(self, y: Tensor, x: Tensor) -> Tensor:
        return y.to(x.dtype)

    def summed(self, x: Tensor, residual: Tensor) -> Tensor:
        return (x.float() + residual.float()).to(x.dtype)

    def norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        y = z * self.rsqrt(self.mean_square(z), eps) * self.factor(weight, zero_centered)
        return self.rounded(y, x)

    def rmsnorm(self, x, weight, *, eps=1e-6, zero_centered=False):
        return self.norm(x, x.float(), weight, eps, zero_centered)

    def rmsnorm_quantize(self, x, weight, recipe, *, eps=1e-6, zero_centered=False):
        return self.quantize(self.norm(x, x.float(), weight, eps, zero_centered), recipe)

    def rmsnorm_quantize_static(self, x, weight, scale, recipe, *, eps=1e-6, zero_centered=False):
        return self.quantize(self.norm(x, x.float(), weight, eps, zero_centered), recipe, scale)

    def add_rmsnorm(self, x, residual, weight, *, eps=1e-6, zero_centered=False):
        z = self.summed(x, residual)
        return z, self.norm(x, z.float(), weight, eps, zero_centered)

    def add_rmsnorm_quantize(self, x, residual, weight, recipe, *, eps=1e-6, zero_centered=False):
        z, y = self.add_rmsnorm(x, residual, weight, eps=eps, zero_centered=zero_centered)
        return {"residual": z, **dict(zip(("codes", "scales", "amax"), self.quantize(y, recipe), strict=True))}

    def add_rmsnorm_quantize_static(self, x, residual, weight, scale, recipe, *, eps=1e-6, zero_centered=False):
        z, y = self.add_rmsnorm(x, residual, weight, eps=eps, zero_centered=zero_centered)
        return {"residual": z, "codes": self.quantize(y, recipe, scale)}

    def mean(self, z: Tensor) -> Tensor:
        return z.mean(-1, keepdim=True)

    def layernorm_quantize(self, x, weight, bias, recipe, *, eps=1e-5, zero_centered=False):
        z = x.float()
        d = z - self.mean(z)
        y = d * self.rsqrt(self.mean_square(d), eps) * self.factor(weight, zero_centered) + bias.float()
        return self.quantize(self.rounded(y, x), recipe)

    def silu_mul(self, x):
        gate, up = self.split(x)
        return self.rounded(self.silu(gate) * up, x)

    def silu_mul_quantize(self, x, recipe):
        return self.quantize(self.silu_mul(x), recipe)

    def silu_mul_quantize_static(self, x, scale, recipe):
        return self.quantize(self.silu_mul(x), recipe, scale)

    def gelu_mul(self, x, *, approximate="tanh"):
        gate, up = self.split(x)
        return self.rounded(self.gelu(gate, approximate) * up, x)

    def gelu_mul_quantize(self, x, recipe, *, approximate="tanh"):
        return self.quantize(self.gelu_mul(x, approximate=approximate), recipe)

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate / (1 + self.exp(-gate * alpha)) * (up + 1)

    def swiglu_clamped_quantize(self, x, recipe, *, limit=7.0, alpha=1.702):
        return self.quantize(self.rounded(self.swiglu(*self.split(x), limit, alpha), x), recipe)

    def relu_squared_quantize(self, x, recipe):
        return self.quantize(self.rounded(x.float().relu().square(), x), recipe)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (a, b), cos, sin = x.float().chunk(2, -1), cos.float(), sin.float()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def rope_quantize(self, x, cos, sin, recipe):
        return self.quantize(self.rounded(self.rotated(x, cos, sin), x), recipe)

    def partly(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, rest = x.chunk(2, -1)
        return torch.cat([self.rounded(self.rotated(first, cos, sin), x), rest], -1)

    def rope_partial_quantize(self, x, cos, sin, recipe):
        return self.quantize(self.partly(x, cos, sin), recipe)

    # ---- products ----------------------------------------------------------------------------------------------------

    def elements(self, b: Any) -> Tensor:
        """The elements of a quantized matrix, float32."""
        stored, name = b.codes.T if b.transposed else b.codes, b.recipe.element.name
        nibbles = b.recipe.element.bits == 4
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1)[:, : b.shape[1]].long() if nibbles else stored
        if b.recipe.zero_points:
            zeros = b.zeros if b.recipe.spans_k else b.zeros.repeat_interleave(b.recipe.block[1], 1)[:, : b.shape[1]]
            return codes.float() - zeros
        if not nibbles:
            return stored.contiguous().view(getattr(torch, DTYPES[name])).float()
        return torch.tensor(INT4 if name == "INT4" else E2M1 + [-x for x in E2M1])[codes]

    def block_scales(self, b: Any) -> Tensor:
        """The scale of the block of each element, float32: 1 if a scale spans K."""
        if b.recipe.spans_k:
            return torch.ones(b.shape)
        scales = b.scales.T if b.transposed else b.scales
        if b.scale_layout != "linear":
            shape = b.shape[0], -(-b.shape[1] // b.recipe.block[1])
            scales = narrowgauge.unpack_scales(scales, shape, b.scale_layout)
        if scales.dtype == torch.uint8:
            fmt = torch.float8_e8m0fnu if b.recipe.block[1] == 32 else torch.float8_e4m3fn
            scales = scales.view(fmt).float()
        else:
            scales = scales.repeat_interleave(b.recipe.block[0], 0)[: b.shape[0]]
        return scales.repeat_interleave(b.recipe.block[1], 1)[:, : b.shape[1]]

    def outer_scale(self, b: Any) -> Tensor:
        """What multiplies a sum over K: the scale of the tensor, or the scales of the rows of b, or 1."""
        if b.recipe.spans_k:
            return b.scales if b.transposed else b.scales.T
        return torch.ones(1) if b.amax is None else b.amax / 2688

    def decoded(self, b: Any, dtype: torch.dtype) -> Tensor:
        return (self.elements(b) * self.block_scales(b)).to(dtype)

    def product(self, a: Tensor, w: Tensor) -> Tensor:
        return a.float() @ w.float().T

    def unrounded(self, a, b):
        if a.dim() == 3:
            return torch.stack([self.unrounded(*pair) for pair in zip(a, b.matrices(), strict=True)])
        return self.product(a, self.decoded(b, a.dtype)) * self.outer_scale(b)

    def weight_only_gemm(self, a, b):
        return self.unrounded(a, b).to(a.dtype)

    def with_bias(self, y: Tensor, bias: Tensor) -> Tensor:
        return y + (bias.float() if y.dim() == 2 else bias.float().unsqueeze(1))

    def weight_only_gemm_bias(self, a, b, bias):
        return self.with_bias(self.unrounded(a, b), bias).to(a.dtype)

    def scaled(self, a, b):
        if len(a.shape) == 3:
            return torch.stack([self.scaled(*pair) for pair in zip(a.matrices(), b.matrices(), strict=True)])
        left, right = (self.elements(x) * self.block_scales(x) for x in (a, b))
        scales = torch.ones(1) if not a.recipe.spans_k else a.scales.T if a.transposed else a.scales
        return self.product(left, right) * scales * self.outer_scale(b)

    def scaled_gemm(self, a, b, *, out_dtype="bfloat16"):
        return self.scaled(a, b).to(getattr(torch, out_dtype))

    def scaled_gemm_bias(self, a, b, bias, *, out_dtype="bfloat16"):
        return self.with_bias(self.scaled(a, b), bias).to(getattr(torch, out_dtype))

    # ---- training ----

    def quantize_both(self, y: Tensor, recipe: Any, random: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """The results of a contract that ends in a quantization of both orientations."""
        found = {}
        for name, q in zip(("rowwise", "columnwise"), self.halves(y, recipe, random), strict=True):
            codes, scales = (t.T if q.transposed else t for t in (q.codes, q.scales))
            found |= {f"{name}.codes": codes, f"{name}.scales": scales, f"{name}.amax": q.amax}
        return found

    def halves(self, y: Tensor, recipe: Any, random: tuple[Tensor, Tensor] | None) -> Any:
        return narrowgauge.quantize_both(y, recipe, random=random)

    def rmsnorm_quantize_both(self, x, weight, recipe, *, eps=1e-6, zero_centered=False):
        return self.quantize_both(self.norm(x, x.float(), weight, eps, zero_centered), recipe)

    def rmsnorm_quantize_both_stochastic(
        self, x, weight, random, random_columnwise, recipe, *, eps=1e-6, zero_centered=False
    ):
        return self.quantize_both(
            self.norm(x, x.float(), weight, eps, zero_centered), recipe, (random, random_columnwise)
        )

    def drawn(self, y: Tensor, recipe: Any, random: Tensor) -> Any:
        return narrowgauge.quantize(y, recipe, random=random)

    def rmsnorm_quantize_stochastic(self, x, weight, random, recipe, *, eps=1e-6, zero_centered=False):
        q = self.drawn(self.norm(x, x.float(), weight, eps, zero_centered), recipe, random)
        return q.codes, q.scales, q.amax

    def silu_mul_quantize_both(self, x, recipe):
        return self.quantize_both(self.silu_mul(x), recipe)

    def gradients(self, dy: Tensor, x: Tensor, rs: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """dx before its rounding, and the terms of dweight."""
        n, g = x * rs, dy * w
        return rs * (g - (g * n).mean(-1, keepdim=True) * n), dy * n

    def over_rows(self, terms: Tensor) -> Tensor:
        return terms.sum(0)

    def rmsnorm_backward(self, dy, x, rs, weight, *, zero_centered=False):
        dx, terms = self.gradients(dy.float(), x.float(), rs, self.factor(weight, zero_centered))
        return self.rounded(dx, x), self.over_rows(terms).to(weight.dtype)

    def rmsnorm_backward_quantize_both(self, dy, x, rs, weight, recipe, *, zero_centered=False):
        dx, dweight = self.rmsnorm_backward(dy, x, rs, weight, zero_centered=zero_centered)
        return {"dweight": dweight, **self.quantize_both(dx, recipe)}

    def silu_gradients(self, dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        s = 1 / (1 + self.exp(-gate))
        return torch.cat([dy * up * (s * (1 + gate * (1 - s))), dy * gate * s], -1)

    def dbias(self, dx: Tensor, x: Tensor) -> Tensor:
        return self.over_rows(dx).to(x.dtype)

    def silu_mul_backward(self, dy, x):
        return self.rounded(self.silu_gradients(dy.float(), *self.split(x)), x)

    def silu_mul_backward_quantize_both(self, dy, x, recipe):
        dx = self.silu_gradients(dy.float(), *self.split(x))
        return {"dbias": self.dbias(dx, x), **self.quantize_both(self.rounded(dx, x), recipe)}

    def silu_mul_backward_quantize_stochastic(self, dy, x, random, random_columnwise, recipe):
        return self.quantize_both(self.silu_mul_backward(dy, x), recipe, (random, random_columnwise))
