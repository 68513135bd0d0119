"""Wrong kernels, written by hand as the mistakes of kernel engineers, and the words that name each mistake.

A kernel is a torch function of the inputs and of the name of its mistake; without a name it is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.spec.recipes import find_recipe
from tests.reference.contracts.contracts import (
    add_rmsnorm,
    clamped_swiglu,
    layernorm,
    rmsnorm_quantize,
    silu_mul_quantize,
)

bf16, f32, f16 = torch.bfloat16, torch.float32, torch.float16


@c.contract
def gelu_mul_quantize(x: c.Matrix, recipe: c.Recipe):
    """GELU of the first half times the second half, quantized."""
    gate, up = c.halves(x)
    return c.quantize(c.cast(c.gelu(c.float32(gate)) * c.float32(up), x.dtype), recipe)


@c.contract
def softmax(x: c.Matrix, *, scale: float = 0.088):
    """Softmax of the scaled rows, without a maximum."""
    e = c.exp(c.float32(x) * scale)
    return c.cast(e / c.sum(e), x.dtype)


@c.contract
def router(x: c.Matrix, bias: c.Row):
    """Sigmoid of the scores, plus a bias, divided by the sum of the row."""
    s = c.sigmoid(c.float32(x))
    return {"scores": c.cast(s, x.dtype), "weights": c.cast((s + c.float32(bias)) / (c.sum(s) + 1e-20), x.dtype)}


@c.contract
def relu_squared_quantize(x: c.Matrix, recipe: c.Recipe):
    """max(x, 0)², quantized."""
    z = c.float32(x)
    return c.quantize(c.cast(c.square(c.where(z > 0, z, 0.0)), x.dtype), recipe)


# ---- inputs ----------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, seed: int, *, tiny: bool = False, offset: float = 0.0) -> torch.Tensor:
    """Normal numbers; `tiny`: the rows of the second half are small, so that an eps is seen."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=draw) + offset
    if tiny:
        x[rows // 2 :] *= torch.exp2(-torch.arange(rows - rows // 2) - 6).unsqueeze(1)
    return x.bfloat16()


def row(columns: int, seed: int) -> torch.Tensor:
    return (1 + 0.2 * torch.randn(columns, generator=torch.Generator().manual_seed(seed))).to(bf16)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def quantized(y: torch.Tensor, recipe: str, m: str = "") -> Any:
    """Codes and scales of a kernel for rows or blocks."""
    rule = find_recipe(recipe)
    if rule.name == "fp8-row-e4m3":
        z = y.float()
        a = z.abs()
        if m == "amax without abs":
            a = z
        if m == "amax without tail":
            a = a[:, :-8]
        if m == "amax over half":
            a = a[:, : a.shape[1] // 2]
        amax = a.amax(1, keepdim=True)
        if m == "amax of row 0":
            amax = amax[:1].expand_as(amax)
        if m == "amax of neighbour row":
            amax = amax.roll(-1, 0)
        if m == "amax of tensor":
            amax = amax.amax().expand_as(amax)
        top = 240.0 if m == "240" else 448.0
        s = torch.full_like(amax, top) / amax  # a number divided by a tensor is a product in torch
        scaled = z * s
        if m == "truncated codes":
            codes = _toward_zero(scaled)
        elif m == "scaled in bf16":
            codes = scaled.bfloat16().float().clamp(-448, 448).to(torch.float8_e4m3fn)
        elif m == "scaled in fp16":
            codes = scaled.half().float().clamp(-448, 448).to(torch.float8_e4m3fn)
        elif m == "stochastic codes":
            noise = torch.rand(z.shape, generator=torch.Generator().manual_seed(9)) - 0.5
            codes = (scaled * (1 + noise / 16)).clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = 1 / s
        if m == "scale inverted":
            scales = s
        if m == "amax/448":
            scales = amax / 448
            codes = (z / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        if m == "scale power of two":
            scales = torch.exp2(torch.log2(1 / s).ceil())
            codes = (z / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scales
    if m == "tile of neighbours":
        q = narrowgauge.quantize(y, rule)
        blocks = y.view(y.shape[0], -1, 16).abs().amax(2).roll(-1, 1)
        tensor = y.abs().amax().float()
        s = (blocks.float() * (2688 / tensor * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        return replace(q, scales=s.view(torch.uint8))
    fields: dict[str, Any] = {
        "ties away": {"rounding": "nearest-away"},
        "nibbles": {"packing": "high-first"},
        "no −0": {"negative_zero": "never"},
        "256": {"scale_max": 256.0},
        "scale rounded down": {"scale_rounding": "down"},
    }.get(m, {})
    q = narrowgauge.quantize(y, replace(rule, **fields) if fields else rule)
    return replace(q, recipe=rule) if fields else q


def _toward_zero(x: torch.Tensor) -> torch.Tensor:
    near = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    above = near.float().abs() > x.abs()
    return (near.view(torch.uint8) - above.to(torch.uint8)).view(torch.float8_e4m3fn)


def k_rmsnorm(m: str, x: torch.Tensor, w: torch.Tensor, recipe: str = "fp8-row-e4m3") -> Any:
    z, eps, k = x.float(), 1e-6, x.shape[1]
    squares = z * z
    if m == "squares in bf16":
        squares = (x * x).float()
    ms = squares.sum(1, keepdim=True) / k
    if m == "last vector":
        ms = squares[:, :-8].sum(1, keepdim=True) / k
    if m == "half the threads":
        ms = squares[:, : k // 2].sum(1, keepdim=True) / k
    if m == "sum of squares":
        ms = squares.sum(1, keepdim=True)
    if m == "padded K":
        ms = squares.sum(1, keepdim=True) / (-(-k // 128) * 128)
    if m == "variance":
        ms = z.var(1, unbiased=False, keepdim=True)
    if m == "mean abs":
        ms = z.abs().mean(1, keepdim=True)
    if m == "K − 1":
        ms = squares.sum(1, keepdim=True) / (k - 1)
    eps = {"eps 1e-5": 1e-5, "eps 1e-12": 1e-12, "no eps": 0.0, "eps 1e-8": 1e-8, "eps 2e-5": 3e-5}.get(m, eps)
    rs = torch.rsqrt(ms + eps)
    if m == "eps outside":
        rs = 1 / (ms.sqrt() + eps)
    if m == "eps max":
        rs = torch.rsqrt(ms.clamp(min=1e-6))
    if m == "rs in bf16":
        rs = rs.bfloat16().float()
    if m == "ms in bf16":
        rs = torch.rsqrt(ms.bfloat16().float() + eps)
    if m == "rs in fp16":
        rs = rs.half().float()
    if m == "no rsqrt":
        rs = 1 / (ms + eps)
    if m == "rs of the next row":
        rs = rs.roll(-1, 0)
    if m == "rs of row 0":
        rs = rs[:1].expand_as(rs)
    if m == "magic rsqrt":
        rs = rs * (1 - 0.0017)
    y = z * rs
    if m != "no inner cast":
        y = y.bfloat16().float()
    if m == "truncating cast":
        y = ((z * rs).view(torch.int32) & -65536).view(f32)
    wf = w.float()
    if m == "1 + w":
        wf = 1 + wf
    if m == "w of the next column":
        wf = wf.roll(-1)
    if m == "no w":
        wf = torch.ones_like(wf)
    if m == "w reversed":
        wf = wf.flip(0)
    if m == "w of lane 0":
        wf = wf.view(-1, 4)[:, :1].expand(-1, 4).reshape(-1)
    y = y * wf
    if m == "bf16 rs and 1 + w":
        y = (z * rs.bfloat16().float()).bfloat16().float() * (1 + w.float())
    if m == "no w, half the threads":
        y = (z * torch.rsqrt(squares[:, : k // 2].sum(1, keepdim=True) / k + eps)).bfloat16().float()
    if m == "amax before cast":
        y16 = y.bfloat16().float()
        amax = y.abs().amax(1, keepdim=True)
        s = torch.full_like(amax, 448) / amax
        return (y16 * s).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), 1 / s
    if m != "no outer cast":
        y = y.bfloat16()
    return quantized(y, recipe, m)


def k_add_rmsnorm(m: str, x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
    z = x.float() + r.float()
    if m == "residual in fp16":
        z = z.half().float()
    if m == "x − residual":
        z = x.float() - r.float()
    if m == "residual twice":
        z = z + r.float()
    shown = z.bfloat16()
    if m == "residual truncated":
        shown = (z.view(torch.int32) & -65536).view(f32).bfloat16()
    h = shown.float()
    squares = h
    if m == "norm of the unrounded sum":
        h = squares = z
    if m == "squares of the unrounded sum":
        squares = z
    if m == "squares of x":
        squares = x.float()
    if m == "norm of x":
        h = squares = x.float()
    if m == "norm of residual":
        h = squares = r.float()
    rs = torch.rsqrt(squares.square().mean(1, keepdim=True) + (1e-5 if m == "eps 1e-5" else 1e-6))
    if m == "rs in bf16":
        rs = rs.bfloat16().float()
    y = h * rs
    if m == "cast before w":
        y = y.bfloat16().float()
    y = y * (w.float() if m != "1 + w" else 1 + w.float())
    if m == "residual is x":
        shown = x
    if m == "stored before the sum":
        shown = r
    return shown, y.bfloat16()


def k_layernorm(m: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    z, k = x.float(), x.shape[1]
    mu = z.mean(1, keepdim=True)
    if m == "mean in bf16":
        mu = mu.bfloat16().float()
    d = z - mu
    if m == "no mean":
        d = z
    var = d.square().mean(1, keepdim=True)
    if m == "K − 1":
        var = d.square().sum(1, keepdim=True) / (k - 1)
    if m == "mean square":
        var = z.square().mean(1, keepdim=True)
    if m == "variance in fp16":
        var = var.half().float()
    if m == "sum":
        var = d.square().sum(1, keepdim=True)
    eps = {"eps 1e-6": 1e-6, "eps 1e-12": 1e-12}.get(m, 1e-5)
    rs = torch.rsqrt(var + eps)
    if m == "eps beside the root":
        rs = 1 / (var.sqrt() + eps)
    y = d * rs
    if m == "product not centred":
        y = z * rs
    if m == "cast before w":
        y = y.bfloat16().float()
    y = y * (w.float() + (m == "1 + w"))
    if m == "cast before bias":
        y = y.bfloat16().float()
    if m != "no bias":
        y = y + (b.float().roll(-1) if m == "bias of the next column" else b.float())
    if m == "bias twice":
        y = y + b.float()
    if m == "bias first":
        y = (d * rs + b.float()) * w.float()
    if m == "w and bias exchanged":
        y = d * rs * b.float() + w.float()
    if m == "half a warp":
        y = d * torch.rsqrt(d[:, : k // 2].square().mean(1, keepdim=True) + eps) * w.float() + b.float()
    return y.bfloat16()


def k_silu_mul(m: str, x: torch.Tensor, recipe: str = "fp8-row-e4m3") -> Any:
    gate, up = (half.float() for half in x.chunk(2, 1))
    if m == "halves exchanged":
        gate, up = up, gate
    if m == "interleaved":
        gate, up = x.float()[:, ::2], x.float()[:, 1::2]
    act = gate / (1 + torch.exp(-gate))
    if m == "exp2":
        act = gate / (1 + torch.exp2(-gate))
    if m == "sign":
        act = gate / (1 + torch.exp(gate))
    if m == "sigmoid":
        act = torch.sigmoid(gate)
    if m == "gelu":
        act = gate * 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    if m == "gelu tanh":
        act = torch.nn.functional.gelu(gate, approximate="tanh")
    if m == "relu":
        act = gate.clamp(min=0)
    if m == "quick gelu":
        act = gate * torch.sigmoid(1.702 * gate)
    if m == "no activation":
        act = gate
    if m == "act in bf16":
        act = act.bfloat16().float()
    if m == "act in fp16":
        act = act.half().float()
    if m == "sigmoid in bf16":
        act = gate * torch.sigmoid(gate).bfloat16().float()
    if m == "hard silu":
        act = gate * (gate / 6 + 0.5).clamp(0, 1)
    y = act * up
    if m == "gate twice":
        y = act * gate
    if m == "no up":
        y = act
    if m == "sum":
        y = act + up
    if m != "no cast":
        y = y.bfloat16()
    return quantized(y, recipe, m)


def k_gelu_mul(m: str, x: torch.Tensor, recipe: str = "nvfp4") -> Any:
    gate, up = (half.float() for half in x.chunk(2, 1))
    root = {"sqrt(pi/2)": math.sqrt(math.pi / 2), "sqrt(2)/pi": math.sqrt(2) / math.pi, "0.8": 0.8}.get(
        m, math.sqrt(2 / math.pi)
    )
    cubic = {"0.44715": 0.44715, "0.04": 0.04, "0.0447": 0.0447}.get(m, 0.044715)
    inner = gate + cubic * gate**3
    if m == "x² for x³":
        inner = gate + cubic * gate**2
    act = 0.5 * gate * (1 + torch.tanh(root * inner))
    if m == "erf":
        act = gate * 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
    if m == "silu":
        act = torch.nn.functional.silu(gate)
    if m == "quick gelu":
        act = gate * torch.sigmoid(1.702 * gate)
    if m == "no half":
        act = gate * (1 + torch.tanh(root * inner))
    if m == "tanh in bf16":
        act = 0.5 * gate * (1 + torch.tanh(root * inner).bfloat16().float())
    if m == "act in bf16":
        act = act.bfloat16().float()
    if m == "argument in bf16":
        act = 0.5 * gate * (1 + torch.tanh((root * inner).bfloat16().float()))
    y = (act * up).bfloat16()
    if m == "halves exchanged":
        y = (torch.nn.functional.gelu(up, approximate="tanh") * gate).bfloat16()
    if m == "up in fp16 act":
        y = (act.half() * up.half()).bfloat16()
    return quantized(y, recipe, m)


def k_swiglu(m: str, x: torch.Tensor) -> Any:
    gate, up = (half.float() for half in x.chunk(2, 1))
    if m == "halves exchanged":
        gate, up = up, gate
    if m == "interleaved":
        gate, up = x.float()[:, ::2], x.float()[:, 1::2]
    limit = 6.0 if m == "limit 6" else 7.0
    if m != "gate not clamped":
        gate = gate.clamp(max=limit)
    if m == "gate clamped below":
        gate = gate.clamp(min=-limit)
    if m == "up above alone":
        up = up.clamp(max=limit)
    elif m != "up not clamped":
        up = up.clamp(-limit, limit)
    alpha = {"alpha 1": 1.0, "alpha 1.7": 1.7}.get(m, 1.702)
    s = torch.sigmoid(alpha * gate)
    if m == "sigmoid in bf16":
        s = s.bfloat16().float()
    if m == "exp2":
        s = 1 / (1 + torch.exp2(-alpha * gate))
    act = gate * s
    if m == "act in bf16":
        act = act.bfloat16().float()
    y = act * (up + (m != "no + 1"))
    if m == "act + up":
        y = act + up
    if m == "clamp after":
        gate, up = (half.float() for half in x.chunk(2, 1))
        y = ((gate * torch.sigmoid(alpha * gate)).clamp(max=7)) * (up.clamp(-7, 7) + 1)
    return y.bfloat16()


def k_softmax(m: str, x: torch.Tensor) -> Any:
    z = x.float() * {"half the scale": 0.044, "no scale": 1.0}.get(m, 0.088)
    if m == "scaled in bf16":
        z = z.bfloat16().float()
    e = torch.exp2(z) if m == "exp2" else torch.exp(z)
    if m == "exp in bf16":
        e = e.bfloat16().float()
    terms = e.half().float() if m == "exp in fp16 for the sum" else e
    total = terms.sum(1, keepdim=True)
    if m == "last 4":
        total = e[:, :-4].sum(1, keepdim=True)
    if m == "sum in bf16":
        total = total.bfloat16().float()
    if m == "mean":
        total = e.mean(1, keepdim=True)
    if m == "sum of the next row":
        total = total.roll(-1, 0)
    if m == "plus one":
        total = total + 1
    y = e / total
    if m == "reciprocal in bf16":
        y = e * (1 / total).bfloat16().float()
    return y.bfloat16()


def k_router(m: str, x: torch.Tensor, bias: torch.Tensor) -> Any:
    s = torch.sigmoid(x.float())
    if m == "softplus":
        s = torch.nn.functional.softplus(x.float())
    shown = (s + bias.float()).bfloat16() if m == "scores with bias" else s.bfloat16()
    t = s.bfloat16().float() if m == "sum of rounded" else s
    total = t.sum(1, keepdim=True)
    if m == "sum with bias":
        total = (s + bias.float()).sum(1, keepdim=True)
    if m == "mean":
        total = t.mean(1, keepdim=True)
    y = (s + bias.float()) / total
    if m == "no bias":
        y = s / total
    if m == "not normalized":
        y = s + bias.float()
    if m == "bias after":
        y = s / total + bias.float()
    return shown, y.bfloat16()


def k_relu_squared(m: str, x: torch.Tensor, recipe: str = "mxfp8-e4m3") -> Any:
    z = x.float()
    r = z.clamp(min=0)
    if m == "leaky":
        r = torch.where(z > 0, z, 0.01 * z)
    if m == "no relu":
        r = z
    if m == "min":
        r = z.clamp(max=0)
    y = r * r
    if m == "not squared":
        y = r
    if m == "relu in fp8":
        y = r.to(torch.float8_e4m3fn).float().square()
    return quantized(y.bfloat16(), recipe, m)


@dataclass(frozen=True)
class Wrong:
    """A wrong kernel."""

    contract: c.Contract
    kernel: Callable[..., Any]
    mistake: str
    words: str
    """Words of the sentence about the mistake, separated by "|" for alternatives. Empty: the
    mistake is outside of the list, and no sentence may be certain."""
    inputs: tuple[torch.Tensor, ...]
    recipe: str = ""

    def __str__(self) -> str:
        return f"{self.contract.name}: {self.mistake}"

    def verdict(self, **options: Any) -> narrowgauge.Verdict:
        """The verdict on the kernel."""
        result = self.kernel(self.mistake, *self.inputs, *([self.recipe] if self.recipe else []))
        given = {"recipe": self.recipe} if self.recipe else {}
        return narrowgauge.explain(
            narrowgauge.assert_result, self.contract, result, *self.inputs, **given, diagnose="full", **options
        )


def _rows(
    contract: c.Contract, kernel: Callable[..., Any], inputs: Any, recipe: str, table: dict[str, str]
) -> list[Wrong]:
    return [Wrong(contract, kernel, mistake, words, inputs, recipe) for mistake, words in table.items()]


M, K = 48, 312
X, R, W, B = matrix(M, K, 0, tiny=True), matrix(M, K, 1, tiny=True), row(K, 2), row(K, 3)
T = matrix(M, 320, 4)

WRONG: list[Wrong] = [
    *_rows(
        rmsnorm_quantize,
        k_rmsnorm,
        (X, W),
        "fp8-row-e4m3",
        {
            "squares in bf16": "x² is rounded to bfloat16",
            "last vector": "leaves out the last 8 elements",
            "half the threads": "first half of a row alone",
            "sum of squares": "mean(x²) is not divided by K",
            "padded K": "next multiple of 128",
            "variance": "mean subtracted",
            "mean abs": "|x| is in place of x²|x is not squared",
            "K − 1": "K − 1",
            "eps 1e-5": "1e-05 in place of 1e-06",
            "eps 1e-12": "1e-12 in place of 1e-06",
            "no eps": "1e-06 is not added|0 in place of 1e-06",
            "eps 1e-8": "1e-08 in place of",
            "eps 2e-5": "",
            "eps outside": "1/(√ + constant)",
            "eps max": "lower limit",
            "rs in bf16": "rsqrt(mean(x²) + 1e-06) is rounded to bfloat16",
            "ms in bf16": "mean(x²) is rounded to bfloat16",
            "rs in fp16": "rsqrt(mean(x²) + 1e-06) is rounded to float16",
            "no rsqrt": "1/(mean(x²) + 1e-06) in place of|rsqrt(mean(x²) + 1e-06) is a factor twice",
            "rs of the next row": "mean(x²) is that of the next row",
            "rs of row 0": "mean(x²) is that of row 0",
            "magic rsqrt": "",
            "no inner cast": "x·rsqrt(mean(x²) + 1e-06) is not rounded",
            "truncating cast": "is truncated to bfloat16",
            "1 + w": "1 + weight",
            "w of the next column": "weight is that of the next column",
            "no w": "is not multiplied by weight",
            "w reversed": "",
            "w of lane 0": "",
            "bf16 rs and 1 + w": "rsqrt(mean(x²) + 1e-06) is rounded to bfloat16&1 + weight",
            "no w, half the threads": "is not multiplied by weight&first half of a row",
            "amax before cast": "before they are rounded",
            "no outer cast": "weight is not rounded to bfloat16",
            "amax without abs": "positive elements",
            "amax without tail": "the last 8 elements",
            "amax over half": "first half of a row",
            "amax of row 0": "those of row 0",
            "amax of neighbour row": "those of the next row",
            "amax of tensor": "those of the tensor",
            "240": "240 in place of 448",
            "truncated codes": "toward zero",
            "scaled in bf16": "to bfloat16 first",
            "scaled in fp16": "to float16 first",
            "stochastic codes": "",
            "scale inverted": "inverse",
            "amax/448": "amax/max|x/s",
            "scale power of two": "rounded down",
        },
    ),
    *_rows(
        add_rmsnorm,
        k_add_rmsnorm,
        (X, R, W),
        "",
        {
            "residual in fp16": "x + residual is rounded to float16",
            "x − residual": "residual is subtracted from x",
            "residual twice": "residual is taken twice",
            "residual truncated": "truncated to bfloat16",
            "norm of the unrounded sum": "x + residual is not rounded to bfloat16",
            "squares of the unrounded sum": "x + residual is not rounded to bfloat16, in (x + residual)² alone",
            "squares of x": "residual is not added to x, in (x + residual)² alone",
            "norm of x": "residual is not added to x",
            "norm of residual": "x is not added to residual",
            "eps 1e-5": "1e-05 in place of",
            "rs in bf16": "rsqrt(mean((x + residual)²) + 1e-06) is rounded to bfloat16",
            "cast before w": "is rounded to bfloat16",
            "1 + w": "1 + weight",
            "residual is x": "residual is not added to x, in the result",
            "stored before the sum": "x is not added to residual, in the result",
        },
    ),
    *_rows(
        layernorm,
        k_layernorm,
        (matrix(M, K, 5, tiny=True, offset=0.5), W, B),
        "",
        {
            "mean in bf16": "mean(x) is rounded to bfloat16",
            "no mean": "mean(x) is not subtracted from x",
            "K − 1": "K − 1",
            "mean square": "mean subtracted|is not subtracted from x, in",
            "variance in fp16": "rounded to float16",
            "sum": "not divided by K",
            "eps 1e-6": "1e-06 in place of 1e-05",
            "eps 1e-12": "1e-12 in place",
            "eps beside the root": "1/(√ + constant)",
            "product not centred": "mean(x) is not subtracted from x, in",
            "cast before w": "is rounded to bfloat16",
            "1 + w": "1 + weight",
            "cast before bias": "is rounded to bfloat16",
            "no bias": "bias is not added",
            "bias of the next column": "bias is that of the next column",
            "bias twice": "bias is taken twice",
            "bias first": "weight is a factor after the addition",
            "w and bias exchanged": "bias is in place of weight&weight is in place of bias",
            "half a warp": "half of a row alone and divides by K/2",
        },
    ),
    *_rows(
        silu_mul_quantize,
        k_silu_mul,
        (3 * T,),
        "fp8-row-e4m3",
        {
            "halves exchanged": "halves of x are exchanged",
            "interleaved": "even and its odd",
            "exp2": "exp2 in place of",
            "sign": "has the other sign|no minus sign",
            "sigmoid": "sigmoid(",
            "gelu": "gelu_erf",
            "gelu tanh": "gelu_tanh",
            "relu": "relu(",
            "quick gelu": "quick_gelu",
            "no activation": "identity(|is not divided by exp",
            "act in bf16": "rounded to bfloat16",
            "act in fp16": "rounded to float16",
            "sigmoid in bf16": "rounded to bfloat16",
            "hard silu": "",
            "gate twice": "the other half is in place of the second half|is in place",
            "no up": "is not multiplied by the second half",
            "sum": "are added in place",
            "no cast": "is not rounded to bfloat16",
            "truncated codes": "toward zero",
            "amax without abs": "positive elements",
        },
    ),
    *_rows(
        gelu_mul_quantize,
        k_gelu_mul,
        (2 * matrix(96, 768, 6),),
        "nvfp4",
        {
            "sqrt(pi/2)": "1.253314",
            "sqrt(2)/pi": "",
            "0.8": "0.8 in place of",
            "0.44715": "0.44715",
            "0.04": "",
            "0.0447": "0.0447 in",
            "x² for x³": "is not multiplied by|not squared",
            "erf": "gelu_erf",
            "silu": "silu(",
            "quick gelu": "quick_gelu",
            "no half": "0.5|1 in place",
            "tanh in bf16": "rounded to bfloat16",
            "act in bf16": "rounded to bfloat16",
            "argument in bf16": "rounded to bfloat16",
            "halves exchanged": "halves of x are exchanged",
            "up in fp16 act": "is rounded to float16 (line 27), and",
            "ties away": "nearest-away",
            "nibbles": "high-first",
            "no −0": "−0",
            "256": "256",
            "tile of neighbours": "",
        },
    ),
    *_rows(
        clamped_swiglu,
        k_swiglu,
        (5 * T,),
        "",
        {
            "halves exchanged": "halves of x are exchanged",
            "interleaved": "even and its odd",
            "limit 6": "6 in place of 7&-6 in place of -7",
            "gate not clamped": "the first half of x has no upper limit",
            "gate clamped below": "is limited to −",
            "up above alone": "no lower limit",
            "up not clamped": "no upper limit&no lower limit",
            "alpha 1": "1 in place of 1.702|is not multiplied by 1.702",
            "alpha 1.7": "1.7 in place of 1.702",
            "sigmoid in bf16": "rounded to bfloat16",
            "exp2": "exp2 in place of",
            "act in bf16": "rounded to bfloat16",
            "no + 1": "1 is not added",
            "act + up": "are added in place&1 is not added",
            "clamp after": "",
        },
    ),
    *_rows(
        softmax,
        k_softmax,
        (2 * matrix(M, K, 7),),
        "",
        {
            "half the scale": "0.044 in place",
            "no scale": "is not multiplied by 0.088|1 in place",
            "scaled in bf16": "rounded to bfloat16",
            "exp2": "exp2 in place",
            "exp in bf16": "exp(x·0.088) is rounded to bfloat16",
            "exp in fp16 for the sum": "exp(x·0.088) is rounded to float16, in sum",
            "last 4": "last 4 elements",
            "sum in bf16": "sum(exp(x·0.088)) is rounded to bfloat16",
            "mean": "divided by K",
            "sum of the next row": "is that of the next row",
            "plus one": "",
            "reciprocal in bf16": "reciprocal of",
        },
    ),
    *_rows(
        router,
        k_router,
        (matrix(M, K, 7), B),
        "",
        {
            "softplus": "",
            "scores with bias": "",
            "sum of rounded": "rounded to bfloat16, in sum",
            "sum with bias": "",
            "mean": "divided by K",
            "no bias": "bias is not added",
            "not normalized": "is not divided by",
            "bias after": "",
        },
    ),
    *_rows(
        relu_squared_quantize,
        k_relu_squared,
        (T,),
        "mxfp8-e4m3",
        {
            "leaky": "",
            "no relu": "takes x always|x is in place",
            "min": "other of the two values|<",
            "not squared": "is not squared",
            "relu in fp8": "",
            "scale rounded down": "rounded down",
        },
    ),
]
