"""The bits of a product on a missing GPU: operands, prediction, and comparison with results of the GPU.

Source: docs/accumulators.md#predict-a-product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from narrowgauge.harness.api.inputs import inputs
from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.accumulators.product import DTYPES, Composition, product
from narrowgauge.reference.numbers.decode import decode, decode_stored
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E8M0

_CODES = {"e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2}
"""Formats without a dtype: a file has their codes as uint8, two E2M1 codes in a byte, the first in the low nibble."""
_RECIPES = {
    "e4m3": "mxfp8-e4m3", "e5m2": "mxfp8-e5m2", "e2m3": "mxfp6-e2m3", "e3m2": "mxfp6-e3m2", "e2m1": "mxfp4",
}  # fmt: skip
"""Recipes that make block scales, and codes of formats without a dtype."""
_SIDES = ("a", "b")


def drawn_operands(
    model: HardwareModel, formats: tuple[str, str], shape: tuple[int, int, int], family: str, seed: int
) -> dict[str, torch.Tensor]:
    """a (M, K) and b (N, K) of an input family, with the block scales a_scales and b_scales of a model that has them.

    Without block scales, numbers are clamped to the range of an 8-bit format and rounded to it. Raises ValueError for
    an operand that the model does not multiply, and for a family or shape that the recipe does not take.
    """
    for name in formats:
        model.smallest_exponent(name)
    recipes = ["nvfp4" if model.scale == "e4m3" else _RECIPES.get(name, "fp8-current-e4m3") for name in formats]
    dtype = DTYPES.get(formats[0], torch.bfloat16)
    drawn = inputs(
        recipes[0], shape, family, seed, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype, operation="gemm"
    )
    tensors: dict[str, torch.Tensor] = {}
    for side, x, name, recipe in zip(_SIDES, drawn, formats, recipes, strict=True):
        if model.block is None and name in DTYPES:
            limits = torch.finfo(DTYPES[name])
            tensors[side] = x.float().clamp(limits.min, limits.max).to(DTYPES[name])
            continue
        q = quantize(x, recipe)
        tensors[side] = q.codes.view(DTYPES[name]) if name in DTYPES else q.codes
        if model.block is not None:
            tensors[f"{side}_scales"] = q.scales
    return tensors


def predicted_product(
    model: HardwareModel,
    formats: tuple[str, str],
    tensors: Mapping[str, torch.Tensor],
    columns: int,
    composition: Composition,
) -> torch.Tensor:
    """The product of operands as in a file, (M, N): float32, or float16 if the accumulator is float16.

    Raises ValueError for a missing tensor, or a tensor of another dtype or width than the format has.
    """
    wanted = [*_SIDES, *(f"{side}_scales" for side in _SIDES if model.block is not None)]
    if missing := [name for name in wanted if name not in tensors]:
        raise ValueError(f"the file has no {', '.join(missing)}; {model.name} needs {', '.join(wanted)}")
    values = [_values(side, tensors[side], name, columns) for side, name in zip(_SIDES, formats, strict=True)]
    scales = None
    if model.block is not None:
        scale = E4M3 if model.scale == "e4m3" else E8M0
        decoded = [decode(tensors[f"{side}_scales"].view(torch.uint8), scale, torch.float64) for side in _SIDES]
        scales = decoded[0], decoded[1]
    return product(values[0], values[1], model, operands=formats, scales=scales, composition=composition)


def _values(side: str, tensor: torch.Tensor, name: str, columns: int) -> torch.Tensor:
    dtype = DTYPES.get(name, torch.uint8)
    if tensor.dtype != dtype or tensor.ndim != 2:
        raise ValueError(f"{side} is {tensor.dtype} with {tensor.ndim} dimensions; {name} is a matrix of {dtype}")
    width = -(-columns // 2) if name == "e2m1" else columns
    if tensor.shape[1] != width:
        raise ValueError(f"{side} has {tensor.shape[1]} columns; K = {columns} of {name} takes {width}")
    return decode_stored(tensor, _CODES[name], columns) if name in _CODES else tensor


def digest(y: torch.Tensor) -> str:
    """SHA-256 of the bytes of a matrix, row by row."""
    return hashlib.sha256(y.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def differences(expected: torch.Tensor, found: torch.Tensor) -> list[tuple[int, int]]:
    """Row and column of every output with unpredicted bits, in order; a NaN equals every NaN.

    `found` may have a narrower dtype; the prediction is then rounded to nearest even. Raises ValueError for another
    shape or dtype.
    """
    if found.shape != expected.shape or not found.is_floating_point() or found.element_size() < 2:
        raise ValueError(
            f"y is {found.dtype} {tuple(found.shape)}; it must be float32, bfloat16 or float16 {tuple(expected.shape)}"
        )
    rounded = expected.to(found.dtype)
    words = torch.int64 if found.element_size() == 8 else torch.int32 if found.element_size() == 4 else torch.int16
    other = (rounded.view(words) != found.view(words)) & ~(rounded.isnan() & found.isnan())
    return [(int(row), int(column)) for row, column in other.nonzero().tolist()]
