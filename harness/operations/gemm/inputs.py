"""Inputs of products."""

from __future__ import annotations

import math
from functools import cache

import torch

from narrowgauge.harness.inputs.generators import power_of_two
from narrowgauge.harness.inputs.inputs import Inputs, Maker, addend, exponents, growth
from narrowgauge.harness.operations.gemm.case import ProductCase
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe


def product_inputs(make: Maker[ProductCase], *, same: bool = False, out_recipe: Recipe | None = None) -> Inputs:
    """x (M, K), w (N, K) or, for sections, matrices one below the other (G·N, K); c (M, N) and bias (N,) or (G, N) in
    the dtype of the output; random bits and given scales.

    `same`: w is x. `out_recipe`: the recipe of the output, which may need a given scale.
    """
    case = make.case
    rows, depth, columns = case.shape
    grouped = bool(case.section_sizes)
    sizes = case.section_sizes or (rows,)
    x_dtype, w_dtype, out_dtype = (TORCH_DTYPES[name] for name in (case.x, case.w, case.out))
    w_shape = (len(sizes) * columns, depth)
    x_recipe, w_recipe = case.operand_recipes
    if make.is_captured:
        x = make.matrix("x", (rows, depth), x_dtype, x_recipe, family="normal")
        w = make.captured_matrix(w_shape, w_dtype)
    else:
        x = make.matrix("x", (rows, depth), x_dtype, x_recipe)
        w = make.matrix("w", w_shape, w_dtype, w_recipe)
    w = x if same else w
    tensors = {"x": x, "w": w}

    @cache
    def of_w() -> torch.Tensor:
        """The part of w in the exponents of typical outputs: int32 (sections, N). It takes as long as to draw w."""
        return exponents(w).view(len(sizes), columns) + growth(depth)

    if case.accumulate:
        of_rows = exponents(x).unsqueeze(1) + of_w().repeat_interleave(torch.tensor(sizes), 0)
        tensors["c"] = addend(make.draw("c"), of_rows, out_dtype, _special(case))
    if case.bias:
        # The maximum over rows: an empty x has none.
        of_x = exponents(x).amax(0, keepdim=True) if rows else torch.zeros(1, dtype=torch.int32)
        tensors["bias"] = addend(
            make.draw("bias"), of_x + (of_w() if grouped else of_w()[0]), out_dtype, _special(case)
        )
    counters = {
        role: make.counter(role)
        for role, recipe in zip("xw", case.operand_recipes, strict=True)
        if recipe.rounding == "stochastic"
    }
    matrices = torch.split(w, columns) if columns else (w,) * len(sizes)
    parts = {"x": (x_recipe, torch.split(x, list(sizes))), "w": (w_recipe, matrices)}
    tensors |= make.given_scales(parts)
    if out_recipe is not None and out_recipe.tensor_scale == "given":
        # Maps a product of typical rows into the format; the largest elements saturate.
        typical = (int(exponents(x).amax()) if rows else 0) + (int(of_w().amax()) if columns else 0)
        power = torch.tensor([max(-100, min(100, -typical))])
        tensors["scale.output"] = out_recipe.element.max / 4 * power_of_two(power)
    return Inputs(tensors, counters)


def _special(case: ProductCase) -> tuple[float, ...]:
    """Special values. c and bias hold every number at a single place."""
    if case.inputs != "special-addends":
        return ()
    return math.nan, math.inf, -math.inf, torch.finfo(TORCH_DTYPES[case.out]).max
