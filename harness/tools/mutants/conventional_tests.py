"""Conventional tests: whether common tests of other projects would detect a wrong kernel, on normal inputs.

There are three: values of the product of two quantized operands, end to end, by allclose(8e-3); all bytes of operands
and product against a reference; signal-to-noise ratio of the product, against the product of unquantized operands,
above a limit. A method without a product is tested by its own result, a module by its output and gradients.
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
"""Smallest accepted signal-to-noise ratio of a product."""
ROWS, COLUMNS, SUM = 256, 512, 1024
"""M, N and K."""
SEED = 20260101
SIZES = (64, 0, 128, 64)
"""Rows of sections."""
LAYER = (128, 256, 4)
"""Hidden size, feed-forward size, and heads."""

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SampleInputs:
    """Normal inputs: x (M, K), w (N, K) (also used by each section), c (M, N), bfloat16; the recipes of x, w and an
    output."""

    x: torch.Tensor
    w: torch.Tensor
    c: torch.Tensor
    recipes: tuple[Recipe, ...]
    training: str = ""
    """Training recipe of a module. `recipes` are then its recipes of x, w and the output's gradient."""

    @property
    def r(self) -> Recipe:
        """Recipe of x."""
        return self.recipes[0]

    @property
    def exact(self) -> torch.Tensor:
        """Product of the unquantized operands, float64."""
        return self.x.double() @ self.w.double().T


def _make_inputs(names: str, *, module: bool) -> SampleInputs:
    draw = torch.Generator().manual_seed(SEED)
    x, w, c = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((ROWS, SUM), (COLUMNS, SUM), (ROWS, COLUMNS))
    )
    if module:
        training = training_recipe(names)
        return SampleInputs(x, w, c, (training.input, training.weight, training.grad), names)
    x_name, *others = names.split("+") if names else ["nvfp4"]
    w_name, out_name = [*others, *[x_name] * 2][:2]
    return SampleInputs(x, w, c, (find_recipe(x_name), find_recipe(w_name), find_recipe(out_name)))


def _options(x: torch.Tensor, recipe: Recipe, number: int, count: int = 1) -> dict[str, Any]:
    """Keyword arguments of quantize for this recipe."""
    options: dict[str, Any] = {}
    if recipe.rounding == "stochastic":
        options["random"] = (SEED, number)
    if recipe.delayed:
        options["scale"] = (recipe.element.max / x.float().abs().max()).repeat(count)
    return options


def _bytes(q: Any, name: str) -> Parts:
    parts = ((part, getattr(q, part)) for part in ("codes", "scales", "amax", "tensor_scale"))
    return {f"{name}.{part}": tensor for part, tensor in parts if tensor is not None}


def _product(ops: Any, inputs: SampleInputs, a: Any, b: Any, **options: Any) -> tuple[torch.Tensor, Parts]:
    out = ops.gemm(a, b, out_dtype=torch.bfloat16, **options)
    return out, {**_bytes(a, "x"), **_bytes(b, "w"), "output": out}


def _gemm(ops: Any, inputs: SampleInputs, **options: Any) -> tuple[torch.Tensor, Parts]:
    recipe, w_recipe, _ = inputs.recipes
    a = ops.quantize(inputs.x, recipe, **_options(inputs.x, recipe, 0))
    b = ops.quantize(inputs.w, w_recipe, **_options(inputs.w, w_recipe, 1))
    return _product(ops, inputs, a, b, **options)


def _gemm_with_c(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    return _gemm(ops, inputs, c=inputs.c)


def _gemm_nt(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    halves = [
        ops.quantize_both(matrix.T.contiguous(), recipe, rowwise=False, **_options(matrix, recipe, number))[1]
        for number, (matrix, recipe) in enumerate(zip((inputs.x, inputs.w), inputs.recipes, strict=False))
    ]
    return _product(ops, inputs, *halves)


def _gemm_swizzled(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    operands: list[Any] = []
    parts: Parts = {}
    for name, matrix, recipe in zip("xw", (inputs.x, inputs.w), inputs.recipes, strict=False):
        swizzled = ops.quantize(matrix, recipe, swizzled=True)
        linear = ops.quantize(matrix, recipe)
        # No product takes swizzled scales: they are unswizzled first, as a user of the kernel would do.
        scales = reference.unswizzle(swizzled.scales, linear.scales.shape)
        operands.append(
            type(linear)(swizzled.codes, scales, swizzled.amax, recipe, linear.shape, swizzled.tensor_scale)
        )
        parts |= _bytes(swizzled, f"{name}, swizzled")
    out, of_product = _product(ops, inputs, *operands)
    return out, parts | of_product


def _gemm_grouped(ops: Any, inputs: SampleInputs, *, padded: bool = False) -> tuple[torch.Tensor, Parts]:
    sizes = torch.tensor(SIZES)
    recipe, w_recipe, _ = inputs.recipes
    x, counts = (ops.pad_sections(inputs.x, sizes, recipe)) if padded else (inputs.x, sizes)
    a = ops.quantize_grouped(x, counts, recipe, **_options(inputs.x, recipe, 0, len(SIZES)))
    b = ops.quantize(inputs.w, w_recipe, **_options(inputs.w, w_recipe, 1))
    out = ops.gemm_grouped(a, [b] * len(SIZES), out_dtype=torch.bfloat16)
    unpadded = ops.unpad_sections(out, sizes, recipe) if padded else out
    return unpadded, {"padded": x, **_bytes(a, "x"), **_bytes(b, "w"), "output": out}


def _gemm_padded(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    return _gemm_grouped(ops, inputs, padded=True)


def _gemm_quantized(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    recipe, w_recipe, out_recipe = inputs.recipes
    a = ops.quantize(inputs.x, recipe, **_options(inputs.x, recipe, 0))
    b = ops.quantize(inputs.w, w_recipe, **_options(inputs.w, w_recipe, 1))
    scale = torch.tensor([out_recipe.element.max / float(inputs.exact.abs().max())])
    options = {"scale": scale} if out_recipe.delayed else {}
    q = ops.gemm_quantized(a, b, out_recipe, out_dtype=torch.bfloat16, **options)
    return reference.dequantize(q), {**_bytes(a, "x"), **_bytes(b, "w"), **_bytes(q, "output")}


def _dequantize(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    values = ops.dequantize(ops.quantize(inputs.x, inputs.r, **_options(inputs.x, inputs.r, 0)), torch.bfloat16)
    return values, {"values": values}


def _transform(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    rotated = ops.transform(inputs.x, inputs.r)
    return rotated, {"rotated": rotated}


def _scales(inputs: SampleInputs) -> torch.Tensor:
    return (inputs.x.view(torch.uint8)[:, : SUM // 16]).contiguous()


def _swizzle(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    swizzled = ops.swizzle(_scales(inputs))
    return swizzled.float(), {"swizzled": swizzled}


def _unswizzle(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    scales = _scales(inputs)
    linear = ops.unswizzle(reference.swizzle(scales), tuple(scales.shape))
    return linear.float(), {"linear": linear}


def _update_scale(ops: Any, inputs: SampleInputs) -> tuple[torch.Tensor, Parts]:
    history, scale = inputs.x[:16].float().abs(), inputs.x[16].float().abs()
    new_history, new_scale = ops.update_scale(history, scale, inputs.r)
    return new_scale, {"history": new_history, "scale": new_scale}


def _trained(ops: Any, inputs: SampleInputs, *, kind: str = "Linear", steps: int = 1) -> tuple[torch.Tensor, Parts]:
    """Output and gradients of a module's steps. Gradients of the weights accumulate over several steps in float32."""
    x, dy = inputs.x, inputs.c
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
    results: list[torch.Tensor] = []
    for number in range(steps):
        leaf = (x * 2.0**number).requires_grad_()
        with autocast(inputs.training):
            y = layer(leaf, list(SIZES)) if kind == "GroupedLinear" else layer(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        results += [y.detach(), leaf.grad]
    results += [p.main_grad if p.grad is None else p.grad for p in parameters.values()]
    return torch.cat([result.flatten().float() for result in results]), {
        f"end {number}": result for number, result in enumerate(results)
    }


MODULE_DOORS: dict[str, Callable[[Any, SampleInputs], tuple[torch.Tensor, Parts]]] = {
    "Linear": _trained,
    "Linear, two steps": partial(_trained, steps=2),
    "LayerNormLinear": partial(_trained, kind="LayerNormLinear"),
    "GroupedLinear": partial(_trained, kind="GroupedLinear"),
    "TransformerLayer": partial(_trained, kind="TransformerLayer"),
}
"""Calls for mutants of modules."""
DOORS: dict[str, Callable[[Any, SampleInputs], tuple[torch.Tensor, Parts]]] = {
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
"""Calls by name: from the backend's methods and inputs to a value for comparison and all bytes."""


@dataclass(frozen=True)
class Detections:
    """Whether each conventional test detects the mutant."""

    allclose: bool
    compare_bytes: bool
    sqnr: bool


class ConventionalTests:
    """The conventional tests of a call under a recipe. Created with the real kernels, then applied to changed
    kernels."""

    def __init__(self, door: str, names: str, kernels: Any) -> None:
        self._call, self._given = {**DOORS, **MODULE_DOORS}[door], _make_inputs(names, module=door in MODULE_DOORS)
        self._expected = self._call(reference, self._given)
        self._right = self._call(kernels, self._given)

    def notice(self, kernels: Any) -> Detections:
        """Tests that fail with the changed kernels and pass with the real kernels."""
        value, parts = self._call(kernels, self._given)
        expected = self._expected[1]
        comparable = [name for name, part in self._right[1].items() if _equal(part, expected[name])]
        return Detections(
            allclose=self._close(self._right[0]) and not self._close(value),
            compare_bytes=any(not _equal(parts[name], expected[name]) for name in comparable),
            sqnr=self._sqnr(value) <= SQNR_DB < self._sqnr(self._right[0]),
        )

    def _close(self, value: torch.Tensor) -> bool:
        expected = self._expected[0].float()
        return torch.allclose(value.float(), expected, rtol=ALLCLOSE, atol=ALLCLOSE, equal_nan=True)

    def _sqnr(self, value: torch.Tensor) -> float:
        """Signal over noise in dB, against the product of unquantized operands, or the expected result of the call."""
        signal = self._given.exact if value.shape == self._given.c.shape else self._expected[0].double()
        if value.shape == self._given.x.shape:
            signal = self._given.x.double() if self._call is _dequantize else signal
        noise = float(((value.double() - signal) ** 2).sum().nan_to_num(nan=torch.inf))
        return float(10 * torch.log10((signal**2).sum() / noise)) if noise else float("inf")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
