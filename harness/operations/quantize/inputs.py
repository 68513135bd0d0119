"""Inputs of operations on one matrix: quantize, quantize-grouped, transform."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from narrowgauge.harness.cases.sections import band_rows
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.quantize.case import MatrixCase, QuantizeCase
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import Half, words_shape


def quantize_inputs(make: Maker[QuantizeCase]) -> Inputs:
    """x (M, K), its transpose if that is quantized, or (…, K); random bits, a given scale and given amaxes."""
    case = make.case
    rows, columns = case.extents["M"], case.extents["K"]
    bands = band_rows(rows, columns) if case.bands else []
    x = (
        spread_bands(_matrix(make, sum(band.stop - band.start for band in bands)), bands, rows)
        if bands
        else _matrix(make)
    )
    words, counters = {}, {}
    names = [half.pick(("x", "xT")) for half in case.halves or (Half.ROW,)]
    if case.recipes[0].rounding == "stochastic" and case.random == "words":
        shapes = {"x": (x.shape[0], x.shape[1]), "xT": (x.shape[1], x.shape[0])}
        for name in names:
            words[f"random.{name}"] = make.draw(f"random of {name}").words(*words_shape(shapes[name]))
    elif case.recipes[0].rounding == "stochastic":
        counters["x"] = make.counter("x")
    scale = make.given_scales({"x": (case.recipes[0], (x,))})
    amax = given_amaxes(make, (x,), names) if case.amax else {}
    return Inputs({"x": x.view(case.shape) if case.physical else x, **words, **scale, **amax}, counters)


def grouped_inputs(make: Maker[MatrixCase], *, amax: bool) -> Inputs:
    """x (M, K), and random bits, given scales and, with `amax`, given amaxes of its sections (G,)."""
    case = make.case
    x = _matrix(make)
    parts = torch.split(x, list(case.section_sizes))
    counters = {"x": make.counter("x")} if case.recipes[0].rounding == "stochastic" else {}
    given = make.given_scales({"x": (case.recipes[0], parts)}) | (given_amaxes(make, parts, ("x",)) if amax else {})
    return Inputs({"x": x, **given}, counters)


def transform_inputs(make: Maker[MatrixCase]) -> Inputs:
    """x (M, K)."""
    return Inputs({"x": _matrix(make)})


def _matrix(make: Maker[MatrixCase], rows: int = 0) -> torch.Tensor:
    """x as it is passed: (M, K), or its transpose. `rows`: only so many rows of (M, K).

    Generated in the orientation that is quantized: the blocks of a family are the kernel's blocks in both usages.
    """
    case = make.case
    shape = (rows or case.extents["M"], case.extents["K"])
    dtype = TORCH_DTYPES[case.dtype]
    if make.is_captured:
        x = make.captured_matrix(shape, dtype)
        return x if case.physical else x.T.contiguous()
    x = make.matrix("x", case.half.shape(shape), dtype, case.recipes[0])
    return x.T.contiguous() if case.half is Half.COLUMN and case.physical else x


def spread_bands(x: torch.Tensor, bands: Sequence[slice], rows: int) -> torch.Tensor:
    """A matrix (rows, K) with the rows of `x` (judged rows, K) in its bands, and NaN elsewhere."""
    spread = x.new_full((rows, x.shape[1]), torch.nan)
    for band, part in zip(bands, torch.split(x, [band.stop - band.start for band in bands]), strict=True):
        spread[band] = part
    return spread


def given_amaxes(
    make: Maker[MatrixCase], parts: Sequence[torch.Tensor], roles: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Amaxes of a tensor whose parts are shards: 1 to 2 times the largest magnitude that the part can have.

    A rotation of n elements grows a magnitude by √n at most. A part of zeros has the amax of another shard. `roles`: x,
    and xT of the transpose if both halves are quantized.
    """
    recipe, ties = make.case.recipes[0], make.case.inputs.endswith("ties")
    growth = math.sqrt(recipe.transform.group) if recipe.transform else 1.0

    def amaxes(role: str, axis: int) -> torch.Tensor:
        draw = make.draw(f"amax of {role}")
        found = []
        for part in parts:
            magnitudes = part.float().abs().nan_to_num_(nan=0.0, posinf=0.0)
            if not magnitudes.numel():
                own = torch.zeros(part.shape[1 - axis] if recipe.granularity == "row" else 1)
            else:
                own = magnitudes.amax(axis) if recipe.granularity == "row" else magnitudes.amax().view(1)
            factor = 2.0 ** draw.below(3, len(own)) if ties else 1.0 + draw.uniform(len(own))  # ties stay ties
            found.append(torch.where(own > 0, own * growth, 1.0) * factor)
        return torch.cat(found).clamp(max=torch.finfo(torch.float32).max)

    return {f"amax.{role}": amaxes(role, 0 if role == "xT" else 1) for role in roles}
