"""Yardsticks: what the tests that others write would have seen of a wrong kernel, on normal inputs of a usual size.

Three are common. An end-to-end comparison of values by allclose(8e-3), both operands quantized and multiplied by the
kernels; a comparison of all their bytes with those of a reference; and the signal-to-noise ratio of the product, beside
the one of unquantized operands, above a limit. A door without a product takes the place of the product; of a module its
output and gradients do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.running.runner import ALLCLOSE
from narrowgauge.reference import ops as reference
from narrowgauge.spec.autocast import autocast
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.training import training_recipe

SQNR_DB = 15.8
"""What a product has to be above."""
ROWS, COLUMNS, SUM = 256, 512, 1024
"""M, N and K."""
SEED = 20260101
SIZES = (64, 0, 128, 64)
"""Rows of sections."""
LAYER = (128, 256, 4)
"""Hidden size, that of the feed-forward part, and heads."""

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Given:
    """Normal inputs: x (M, K), w (N, K), c (M, N), bfloat16; w of each section; the recipes of x, w and an output."""

    x: torch.Tensor
    w: torch.Tensor
    c: torch.Tensor
    recipes: tuple[Recipe, ...]
    training: str = ""
    """The training recipe of a module, which has those of x, w and the gradient of the output."""

    @property
    def r(self) -> Recipe:
        """The recipe of x."""
        return self.recipes[0]

    @property
    def exact(self) -> torch.Tensor:
        """The product of unquantized operands, float64."""
        return self.x.double() @ self.w.double().T


def _made(names: str, *, module: bool) -> Given:
    draw = torch.Generator().manual_seed(SEED)
    x, w, c = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((ROWS, SUM), (COLUMNS, SUM), (ROWS, COLUMNS))
    )
    if module:
        training = training_recipe(names)
        return Given(x, w, c, (training.input, training.weight, training.grad), names)
    x_name, *others = names.split("+") if names else ["nvfp4"]
    w_name, out_name = [*others, *[x_name] * 2][:2]
    return Given(x, w, c, (find_recipe(x_name), find_recipe(w_name), find_recipe(out_name)))


def _options(x: torch.Tensor, recipe: Recipe, number: int, count: int = 1) -> dict[str, Any]:
    """What quantizing takes beside the tensor."""
    options: dict[str, Any] = {}
    if recipe.rounding == "stochastic":
        options["random"] = (SEED, number)
    if recipe.delayed:
        options["scale"] = (recipe.element.max / x.float().abs().max()).repeat(count)
    return options


def _bytes(q: Any, name: str) -> Parts:
    parts = ((part, getattr(q, part)) for part in ("codes", "scales", "amax", "tensor_scale"))
    return {f"{name}.{part}": tensor for part, tensor in parts if tensor is not None}


def _product(ops: Any, given: Given, a: Any, b: Any, **options: Any) -> tuple[torch.Tensor, Parts]:
    out = ops.gemm(a, b, out_dtype=torch.bfloat16, **options)
    return out, {**_bytes(a, "x"), **_bytes(b, "w"), "output": out}


def _gemm(ops: Any, given: Given, **options: Any) -> tuple[torch.Tensor, Parts]:
    recipe, other, _ = given.recipes
    a = ops.quantize(given.x, recipe, **_options(given.x, recipe, 0))
    b = ops.quantize(given.w, other, **_options(given.w, other, 1))
    return _product(ops, given, a, b, **options)


def _gemm_with_c(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    return _gemm(ops, given, c=given.c)


def _gemm_nt(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    halves = [
        ops.quantize_both(matrix.T.contiguous(), recipe, rowwise=False, **_options(matrix, recipe, number))[1]
        for number, (matrix, recipe) in enumerate(zip((given.x, given.w), given.recipes, strict=False))
    ]
    return _product(ops, given, *halves)


def _gemm_swizzled(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    operands: list[Any] = []
    parts: Parts = {}
    for name, matrix, recipe in zip("xw", (given.x, given.w), given.recipes, strict=False):
        swizzled = ops.quantize(matrix, recipe, swizzled=True)
        plain = ops.quantize(matrix, recipe)
        # No product takes swizzled scales as they are: they are brought back as its user would do it.
        scales = reference.unswizzle(swizzled.scales, plain.scales.shape)
        operands.append(type(plain)(swizzled.codes, scales, swizzled.amax, recipe, plain.shape, swizzled.tensor_scale))
        parts |= _bytes(swizzled, f"{name}, swizzled")
    out, of_product = _product(ops, given, *operands)
    return out, parts | of_product


def _gemm_grouped(ops: Any, given: Given, *, padded: bool = False) -> tuple[torch.Tensor, Parts]:
    sizes = torch.tensor(SIZES)
    recipe, other, _ = given.recipes
    x, counts = (ops.pad_sections(given.x, sizes, recipe)) if padded else (given.x, sizes)
    a = ops.quantize_grouped(x, counts, recipe, **_options(given.x, recipe, 0, len(SIZES)))
    b = ops.quantize(given.w, other, **_options(given.w, other, 1))
    out = ops.gemm_grouped(a, [b] * len(SIZES), out_dtype=torch.bfloat16)
    whole = ops.unpad_sections(out, sizes, recipe) if padded else out
    return whole, {"padded": x, **_bytes(a, "x"), **_bytes(b, "w"), "output": out}


def _gemm_padded(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    return _gemm_grouped(ops, given, padded=True)


def _gemm_quantized(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    recipe, other, out_rule = given.recipes
    a = ops.quantize(given.x, recipe, **_options(given.x, recipe, 0))
    b = ops.quantize(given.w, other, **_options(given.w, other, 1))
    scale = torch.tensor([out_rule.element.max / float(given.exact.abs().max())])
    options = {"scale": scale} if out_rule.delayed else {}
    q = ops.gemm_quantized(a, b, out_rule, out_dtype=torch.bfloat16, **options)
    return reference.dequantize(q), {**_bytes(a, "x"), **_bytes(b, "w"), **_bytes(q, "output")}


def _dequantize(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    values = ops.dequantize(ops.quantize(given.x, given.r, **_options(given.x, given.r, 0)), torch.bfloat16)
    return values, {"values": values}


def _transform(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    rotated = ops.transform(given.x, given.r)
    return rotated, {"rotated": rotated}


def _scales(given: Given) -> torch.Tensor:
    return (given.x.view(torch.uint8)[:, : SUM // 16]).contiguous()


def _swizzle(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    swizzled = ops.swizzle(_scales(given))
    return swizzled.float(), {"swizzled": swizzled}


def _unswizzle(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    scales = _scales(given)
    linear = ops.unswizzle(reference.swizzle(scales), tuple(scales.shape))
    return linear.float(), {"linear": linear}


def _update_scale(ops: Any, given: Given) -> tuple[torch.Tensor, Parts]:
    history, scale = given.x[:16].float().abs(), given.x[16].float().abs()
    moved, new = ops.update_scale(history, scale, given.r)
    return new, {"history": moved, "scale": new}


def _trained(ops: Any, given: Given, *, kind: str = "Linear", steps: int = 1) -> tuple[torch.Tensor, Parts]:
    """Output and gradients of a module's steps; gradients of its weights accumulate over several in float32."""
    x, dy = given.x, given.c
    sizes: tuple[int, ...] = (SUM, COLUMNS)
    if kind == "GroupedLinear":
        sizes = (len(SIZES), *sizes)
    if kind == "TransformerLayer":
        (hidden, _, _) = sizes = LAYER
        x, dy = (matrix[:, :hidden].reshape(-1, SIZES[0], hidden) for matrix in (x, dy))
    layer = getattr(ops, kind)(*sizes, accumulate=steps > 1)
    draw = torch.Generator().manual_seed(SEED)
    parameters = dict(sorted(layer.named_parameters()))
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 16 + ("norm_weight" in name))
    ends: list[torch.Tensor] = []
    for number in range(steps):
        leaf = (x * 2.0**number).requires_grad_()
        with autocast(given.training):
            y = layer(leaf, list(SIZES)) if kind == "GroupedLinear" else layer(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        ends += [y.detach(), leaf.grad]
    ends += [p.main_grad if p.grad is None else p.grad for p in parameters.values()]
    return torch.cat([end.flatten().float() for end in ends]), {f"end {number}": end for number, end in enumerate(ends)}


MODULE_DOORS: dict[str, Callable[[Any, Given], tuple[torch.Tensor, Parts]]] = {
    "Linear": _trained,
    "Linear, two steps": partial(_trained, steps=2),
    "LayerNormLinear": partial(_trained, kind="LayerNormLinear"),
    "GroupedLinear": partial(_trained, kind="GroupedLinear"),
    "TransformerLayer": partial(_trained, kind="TransformerLayer"),
}
"""The same of what a mutant of a module calls."""
DOORS: dict[str, Callable[[Any, Given], tuple[torch.Tensor, Parts]]] = {
    "gemm": _gemm,
    "gemm with c": _gemm_with_c,
    "gemm of columnwise halves": _gemm_nt,
    "gemm of swizzled operands": _gemm_swizzled,
    "gemm_grouped": _gemm_grouped,
    "gemm_grouped of padded sections": _gemm_padded,
    "gemm_quantized": _gemm_quantized,
    "dequantize": _dequantize,
    "transform": _transform,
    "swizzle": _swizzle,
    "unswizzle": _unswizzle,
    "update_scale": _update_scale,
}
"""What is called: the backend's doors and inputs in, a value to compare and all bytes out."""


@dataclass(frozen=True)
class Noticed:
    """Whether each yardstick would have noticed."""

    allclose: bool
    compare_bytes: bool
    sqnr: bool


class Yardsticks:
    """The yardsticks of one door under one recipe. Made before the kernels are changed, then asked."""

    def __init__(self, door: str, names: str, kernels: Any) -> None:
        self._call, self._given = {**DOORS, **MODULE_DOORS}[door], _made(names, module=door in MODULE_DOORS)
        self._expected = self._call(reference, self._given)
        self._right = self._call(kernels, self._given)

    def notice(self, kernels: Any) -> Noticed:
        """What they say of the changed kernels, where they would let the right ones pass."""
        value, parts = self._call(kernels, self._given)
        wanted = self._expected[1]
        same = [name for name, part in self._right[1].items() if _equal(part, wanted[name])]
        return Noticed(
            allclose=self._close(self._right[0]) and not self._close(value),
            compare_bytes=any(not _equal(parts[name], wanted[name]) for name in same),
            sqnr=self._sqnr(value) <= SQNR_DB < self._sqnr(self._right[0]),
        )

    def _close(self, value: torch.Tensor) -> bool:
        expected = self._expected[0].float()
        return torch.allclose(value.float(), expected, rtol=ALLCLOSE, atol=ALLCLOSE, equal_nan=True)

    def _sqnr(self, value: torch.Tensor) -> float:
        """Signal over noise in dB: beside the product of unquantized operands, or what the door is to give."""
        signal = self._given.exact if value.shape == self._given.c.shape else self._expected[0].double()
        if value.shape == self._given.x.shape:
            signal = self._given.x.double() if self._call is _dequantize else signal
        noise = float(((value.double() - signal) ** 2).sum().nan_to_num(nan=torch.inf))
        return float(10 * torch.log10((signal**2).sum() / noise)) if noise else float("inf")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
