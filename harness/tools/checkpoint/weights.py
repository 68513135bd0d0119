"""Judging codes and scales with their original weights, slab by slab.

- Codes are judged given the stored scales. A code is right if any order of float32 operations gives the code: the exact
  quotient of weight and scale, times 1 ± `ROUNDINGS`·2^-24, rounds to it. A code that is right only with quotients
  rounded to the dtype of the weights (dialect mlx) gets a note. −0 equals 0, and blocks with scale 0 have no code to
  judge, because dialects differ in both (docs/dialects.md).
- Block scales are compared with the scales of every dialect. If no dialect has the scales, they were given
  (calibrated), and the codes under these scales are still judged.
- The decoded matrix must be nearer to the weights than a matrix of zeros is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import torch

from narrowgauge.harness.tools.checkpoint.files import CheckpointError, StoredTensor, scalar
from narrowgauge.harness.tools.checkpoint.findings import Finding, LayerResult
from narrowgauge.harness.tools.checkpoint.layouts import Layer
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import swap_nibbles, unpack
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, encode_elements, stored_scales
from narrowgauge.spec.dialects import DIALECTS, MX_DIALECTS
from narrowgauge.spec.formats import E2M1, E4M3, FP32
from narrowgauge.spec.recipes import Recipe, find_recipe

ROUNDINGS = 8
"""Float32 roundings between a weight and its scaled value, at most, in any dialect: the reciprocals of tensor scale and
block scale, their products, the product with the weight, and the conversions of this module."""
INPUT_ROUNDINGS = 2
"""Roundings to the dtype of the weights between a weight and its scaled value, at most, in any dialect."""
TIE = {"E2M1": 1e-6, "E4M3": 0.0, "E5M2": 0.0, "E4M3FNUZ": 0.0, "E5M2FNUZ": 0.0}
"""Distance from a tie that rounds as a tie: `nearest-even-within-1e-6` of spec.dialects."""
SLAB = 1 << 20
"""Elements that are judged at once."""
SAMPLE = 1 << 18
"""Elements at the beginning of a matrix whose codes decide between dialects with equal scales."""
_KINDS = {"amax/max": "decode", "max/amax": "encode", "(1/amax)*max": "encode"}
"""Kind of the tensor scale of a dialect."""


class Weights:
    """Rows of the weights of a layer: (M, K) as the layer has them, or experts (E, K, M/E) as in gpt-oss.

    Raises CheckpointError if the shape does not fit.
    """

    def __init__(self, tensor: StoredTensor, layer: Layer) -> None:
        self.tensor, self.layer = tensor, layer
        shape = tensor.rows, tensor.columns
        self.transposed = False
        if layer.expert is not None and len(tensor.shape) == 3 and layer.expert < tensor.shape[0]:
            tensor = self.tensor = tensor.part(layer.expert)
            shape = tensor.rows, tensor.columns
        if shape != layer.shape:
            experts = layer.codes.shape[0] if layer.layout == "gpt-oss" and len(layer.codes.shape) == 4 else 1
            if not (len(tensor.shape) == 3 and tensor.shape == (experts, layer.shape[1], layer.shape[0] // experts)):
                raise CheckpointError(
                    f"{tensor.path}: {tensor.name} has shape {'x'.join(map(str, tensor.shape))}; the quantized matrix "
                    f"is {layer.shape[0]}x{layer.shape[1]}; give the weights that it was made from"
                )
            self.transposed = True
            self._expert: tuple[int, torch.Tensor] | None = None

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` in their dtype, (rows, K)."""
        if not self.transposed:
            return self.tensor.numbers(start, stop)
        columns, height = self.tensor.shape[1:]
        parts = []
        while start < stop:
            number, first = divmod(start, height)
            if self._expert is None or self._expert[0] != number:
                self._expert = number, self.tensor.numbers(number * columns, (number + 1) * columns).T.contiguous()
            last = min(height, first + stop - start)
            parts.append(self._expert[1][first:last])
            start += last - first
        return torch.cat(parts)


@dataclass
class _Fit:
    """A dialect compared with a layer."""

    recipe: Recipe
    wrong_scales: int = 0
    wrong_codes: int = 0
    """Wrong codes of the sample."""
    first_scale: str = ""


@dataclass
class _Judged:
    """Counts of a layer over its slabs."""

    fits: list[_Fit]
    codes: int = 0
    input_codes: int = 0
    """Codes that are right only with quotients rounded to the dtype of the weights."""
    first_code: str = ""
    order: str = ""
    """Other order of the nibbles, in words, with which the codes of the first wrong slab are right."""
    tensor_form: str = ""
    """Form of the tensor scale, for example `amax/448`, if no form of a layout."""
    signal: float = 0.0
    error: float = 0.0
    scales: int = 0
    absmax: int = 0
    """Float32 scales that are amax over the largest number, up to roundings, or the power of two above."""
    findings: list[Finding] = field(default_factory=list)


@cache
def _dialects(recipe: str) -> tuple[Recipe, ...]:
    found = []
    for name in DIALECTS if recipe == "nvfp4" else MX_DIALECTS:
        try:
            found.append(find_recipe(f"{recipe}@{name}"))
        except ValueError:  # the dialect does not exist for this recipe
            continue
    return tuple(found)


def judge_weights(layer: Layer, tensor: StoredTensor, result: LayerResult, amaxes: dict[str, float]) -> None:
    """Judge a layer with its weights; `result` gets dialect, figures and findings.

    `amaxes`: amax of the weights of each judged layer by name, for tensor scales that several layers share. Raises
    CheckpointError if the weights do not fit.
    """
    weights = Weights(tensor, layer)
    if not tensor.is_float:
        raise CheckpointError(f"{tensor.path}: {tensor.name} has dtype {tensor.dtype}; weights are F32, BF16 or F16")
    step = max(layer.block[0], 1)
    step = max(step, SLAB // max(1, layer.shape[1]) // step * step)
    ranges = [(start, min(start + step, layer.shape[0])) for start in range(0, layer.shape[0], step)]
    amax = max((float(_finite(weights.rows(*part)).abs().amax()) for part in ranges if layer.shape[1]), default=0.0)
    amaxes[layer.name] = amax
    judged = _Judged([] if layer.scale is FP32 else [_Fit(recipe) for recipe in _dialects(layer.recipe)])
    stored = scalar(layer.tensor_scale) if layer.tensor_scale is not None else None
    if stored is not None and stored.numel() != 1:
        raise CheckpointError(f"{layer.tensor_scale} holds {stored.numel()} numbers; with weights one is judged")
    if stored is not None:
        judged.findings += _judge_tensor_scale(layer, float(stored), amax, tensor, amaxes)
        judged.tensor_form = _tensor_form(float(stored), amax)
    for start, stop in ranges:
        _judge_slab(layer, weights.rows(start, stop), start, stop, stored, amax, judged)
    _conclude(layer, judged, result)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x.float(), 0.0, 0.0, 0.0)


def _judge_slab(
    layer: Layer, x: torch.Tensor, start: int, stop: int, stored: torch.Tensor | None, amax: float, judged: _Judged
) -> None:
    codes, scales = layer.read(start, stop)
    if layer.scale is FP32:
        _float_scales(layer, x, scales, amax, judged)
    else:
        for fit in judged.fits:
            _compare(layer, fit, x, codes, scales, start, stored, amax)
    judged.scales += scales.numel() if layer.block[0] or not start else 0
    single = unpack(codes, layer.shape[1]) if layer.element is E2M1 else codes
    factors = _decode_factors(layer, scales, stored, x.shape)
    float32 = ROUNDINGS * 2.0**-24
    wrong = _wrong_codes(layer, x, single, factors, float32)
    if wrong.any() and x.dtype is not torch.float32:
        outside = _wrong_codes(layer, x, single, factors, float32 + INPUT_ROUNDINGS * torch.finfo(x.dtype).eps / 2)
        judged.input_codes += int((wrong & ~outside).count_nonzero())
        wrong = outside
    if count := int(wrong.count_nonzero()):
        if not judged.first_code:
            row, column = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            byte, value = int(single[row, column]), float(x[row, column])
            scaled = value / float(factors[row, column])
            judged.first_code = (
                f"row {start + row}, column {column}: code 0x{byte:X} = {layer.element.value(byte):g}, "
                f"weight {value!r}, weight over scale {scaled:.8g}"
            )
            for order, moved in _orders(layer, codes, single).items():
                if not judged.order and not bool(_wrong_codes(layer, x, moved, factors, float32).any()):
                    judged.order = order
        judged.codes += count
    values = decode(single, layer.element).double() * factors
    exact = x.double()
    fine = values.isfinite() & exact.isfinite()
    judged.signal += float(exact.where(fine, 0).square().sum())
    judged.error += float((values - exact).where(fine, 0).square().sum())


def _orders(layer: Layer, codes: torch.Tensor, single: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes of other orders of the nibbles, by the words of a finding."""
    width = layer.block[1]
    if layer.element is not E2M1:
        return {}
    if single.shape[1] % width:
        return {"swapped nibbles": unpack(swap_nibbles(codes), layer.shape[1])}
    halves = single.view(len(single), -1, 2, width // 2)
    pairs = single.view(len(single), -1, width // 2, 2)
    exchanged, swapped = halves.flip(2).reshape(single.shape), pairs.flip(3).reshape(single.shape)
    if layer.layout == "GGUF":
        other = f"elements 2i and 2i + 1 in a byte, not i and i + {width // 2} as in GGML"
        return {"swapped nibbles": exchanged, other: halves.transpose(2, 3).reshape(single.shape)}
    other = f"elements i and i + {width // 2} of a block in a byte, as in GGML"
    return {"swapped nibbles": swapped, other: pairs.transpose(2, 3).reshape(single.shape)}


def _decode_factors(layer: Layer, scales: torch.Tensor, stored: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Factor of each code, float64 (M, K)."""
    numbers = scales.double() if layer.scale is FP32 else decode(scales, layer.scale, torch.float64)
    if stored is not None:
        tensor = stored.double()
        numbers = numbers / tensor if layer.tensor_scale_is == "encode" else numbers * tensor
    height, width = layer.block
    rows, columns = shape
    if width:
        numbers = numbers.repeat_interleave(width, 1)[:, :columns]
    numbers = numbers.expand(-1, columns)
    if height > 1:
        numbers = numbers.repeat_interleave(height, 0)[:rows]
    return numbers.expand(rows, columns)


def _wrong_codes(
    layer: Layer, x: torch.Tensor, codes: torch.Tensor, factors: torch.Tensor, error: float
) -> torch.Tensor:
    """bool (M, K): codes that no quotient of weight and stored scale within the relative `error` gives."""
    scaled = x.double() / factors
    mask = layer.element.sign_code - 1
    zero = (codes & mask) == 0
    right = torch.zeros_like(codes, dtype=torch.bool)
    for sign in (-1, 1):  # the ends lie on both sides of a tie, so both of its neighbours are right
        limit = scaled * (1 + sign * error) + sign * scaled.sign() * TIE[layer.element.name]
        end = encode(limit.clamp(-1e38, 1e38).float(), layer.element)
        right |= (codes == end) | (zero & ((end & mask) == 0))
    return ~right & (factors != 0) & factors.isfinite() & x.isfinite()


def _compare(
    layer: Layer, fit: _Fit, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, start: int,
    stored: torch.Tensor | None, amax: float,
) -> None:  # fmt: skip
    """Compare scales, and codes of the sample, with a dialect."""
    recipe = fit.recipe
    own = torch.tensor([amax])
    tensor = _in_dialect(layer, recipe, stored, own, x.dtype)
    blocks = block_amaxes(x, recipe)
    expected = stored_scales(x, blocks, own, tensor, recipe)
    wrong = expected != scales
    if recipe.scale is E4M3:
        wrong &= ((expected & 0x7F) != 0) | ((scales & 0x7F) != 0)
    if (count := int(wrong.count_nonzero())) and not fit.first_scale:
        row, block = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
        byte, other = int(scales[row, block]), int(expected[row, block])
        fit.first_scale = (
            f"row {start + row}, block {block}: 0x{byte:02X} = {layer.scale.value(byte):g}, and 0x{other:02X} = "
            f"{layer.scale.value(other):g} in dialect {recipe.dialect}"
        )
    fit.wrong_scales += count
    if start * x.shape[1] < SAMPLE:
        rows = slice(0, max(1, SAMPLE // max(1, x.shape[1]) - start))
        made = encode_elements(x[rows], scales[rows], tensor, recipe)
        columns = layer.shape[1]
        found, given = unpack(made, columns), unpack(codes[rows], columns)
        if layer.element is not E2M1:
            found, given = made, codes[rows]
        elif recipe.packing == "high-first":
            found = unpack(swap_nibbles(made), columns)
        different = (found != given) & ((found & 7 != 0) | (given & 7 != 0) if layer.element is E2M1 else True)
        fit.wrong_codes += int(different.count_nonzero())


def _in_dialect(
    layer: Layer, recipe: Recipe, stored: torch.Tensor | None, amax: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """The stored tensor scale as the dialect uses it: enc or dec, float32 (1,).

    A scale of the other kind is the reciprocal of a rounded number. If it is the reciprocal of the dialect's own scale,
    the dialect has its own scale.
    """
    if recipe.tensor_scale == "none" or stored is None:
        return None if recipe.tensor_scale == "none" else torch.ones(1)
    if _KINDS[recipe.tensor_scale] == layer.tensor_scale_is:
        return stored
    try:
        own = tensor_scale(amax, recipe, dtype)
    except ValueError:  # the dialect refuses the amax
        own = torch.full((1,), math.nan)
    reciprocal = torch.ones(1) / stored
    return own if bool((torch.ones(1) / own == stored) | (own == reciprocal)) else reciprocal


def _judge_tensor_scale(
    layer: Layer, stored: float, amax: float, tensor: StoredTensor, amaxes: dict[str, float]
) -> list[Finding]:
    """Findings about a tensor scale, given the amax of the weights."""
    if not (0 < stored < math.inf) or not amax:
        return []  # found without weights, or no scale is wrong
    assert layer.tensor_scale is not None
    name, formula = layer.tensor_scale.name, {"encode": "2688/amax", "decode": "amax/2688"}[layer.tensor_scale_is]
    implied = 2688 / stored if layer.tensor_scale_is == "encode" else 2688 * stored
    inverse = 2688 / implied * 2688  # the amax that the reciprocal implies
    exact = f"{2688 / amax if layer.tensor_scale_is == 'encode' else amax / 2688:.9g}"
    # float32 roundings, and the three roundings to bfloat16 of compressed-tensors
    near = 2.0**-22 if tensor.dtype == "F32" else 2.0**-7 + 2.0**-8
    if abs(implied / amax - 1) <= near:
        return []
    if abs(inverse / amax - 1) <= near:
        text = f"is inverted: {stored:.9g} is the reciprocal of {formula} for the amax {amax:.9g} of the weights"
        return [Finding("fail", "inverted", name, text, expected=exact)]
    parent = layer.name.rpartition(".")[0]
    siblings = ((other, its) for other, its in amaxes.items() if other.rpartition(".")[0] == parent and its)
    sharing = [other for other, its in siblings if abs(implied / its - 1) <= near]
    if implied > amax:
        text = f"has the amax {implied:.9g}, and the weights {amax:.9g}: " + (
            f"shared with {sharing[0]}" if sharing else "shared with other layers, or calibrated"
        )
        return [Finding("note", "shared-scale", name, text, expected=f"{exact} for these weights alone")]
    text = f"has the amax {implied:.9g}, below the amax {amax:.9g} of the weights, so the largest weights saturate"
    return [Finding("warning", "saturated", name, text, expected=exact)]


def _tensor_form(stored: float, amax: float) -> str:
    """The form in which a tensor scale is this amax, or the empty string."""
    if not amax:
        return ""
    for divisor in (1.0, 6.0, 448.0):
        name = f"/{divisor:g}" if divisor > 1 else ""
        for form, number in ((f"amax{name}", amax / divisor), (f"{divisor:g}/amax", divisor / amax)):
            if abs(stored / number - 1) <= 2.0**-22:
                return form
    return ""


def _float_scales(layer: Layer, x: torch.Tensor, scales: torch.Tensor, amax: float, judged: _Judged) -> None:
    """Count float32 scales of amax over the largest number, up to float32 roundings, or powers of two above it."""
    height, width = layer.block
    magnitudes = _finite(x).abs()
    if not width:
        blocks = magnitudes.amax(1, keepdim=True) if height else torch.full((1, 1), amax)
    else:
        rows, columns = x.shape
        padded = torch.nn.functional.pad(magnitudes, (0, -columns % width, 0, -rows % height))
        blocks = padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))
    exact = blocks.double() / layer.element.max
    ratio = scales.double() / exact
    mantissa = torch.frexp(scales)[0]
    stored = layer.scales.dtype if layer.scales is not None else "F32"
    near = 2.0**-22 if stored == "F32" else 2.0**-7
    fits = (ratio - 1).abs() <= near
    fits |= (mantissa == 0.5) & (ratio >= 1 - 2.0**-22) & (ratio < 2 + 2.0**-21)
    judged.absmax += int((fits | (blocks == 0)).sum())


def _conclude(layer: Layer, judged: _Judged, result: LayerResult) -> None:
    """Dialect, figures and findings of a judged layer."""
    scales = layer.codes.name if layer.scales is None else layer.scales.name
    result.compared = layer.shape[0] * layer.shape[1]
    result.findings += judged.findings
    zeros = judged.signal == 0
    if judged.error > 0 and not zeros:
        result.sqnr_db = round(10 * math.log10(judged.signal / judged.error), 2)
    if judged.codes:
        text = "codes are not the weights rounded under the stored scales, in any order of operations"
        text += (
            f"; with {judged.order} they are"
            if judged.order
            else ", and not with swapped nibbles" * (layer.element is E2M1)
        )
        text += "" if judged.order else ": other weights, weights changed by calibration (GPTQ, AWQ), or wrong codes"
        kind = "nibbles" if judged.order else "codes-given-scales"
        result.findings.append(
            Finding("fail", kind, layer.codes.name, text, judged.codes, result.compared, judged.first_code)
        )
    if judged.input_codes:
        text = "codes need quotients rounded to the dtype of the weights, as dialect mlx has them"
        result.findings.append(
            Finding("note", "codes-input-dtype", layer.codes.name, text, judged.input_codes, result.compared)
        )
    if not zeros and judged.error >= judged.signal:
        text = f"the decoded matrix is further from the weights than zeros are: SQNR {result.sqnr_db} dB"
        result.findings.append(Finding("fail", "worse-than-zeros", layer.codes.name, text, expected="above 0 dB"))
        if judged.tensor_form and layer.tensor_scale is not None:
            formula = {"encode": "2688/amax", "decode": "amax/2688"}[layer.tensor_scale_is]
            text = f"is {judged.tensor_form} of the weights; the layout {layer.layout} has {formula}"
            result.findings.insert(0, Finding("fail", "tensor-scale", layer.tensor_scale.name, text, expected=formula))
    if layer.scale is FP32:
        given = judged.scales - judged.absmax if layer.block[0] else 1 - min(1, judged.absmax)
        expected, first = f"amax/{layer.element.max:g}, or the power of two above", ""
        result.scales = "given" if given else "absmax"
    else:
        best = min(judged.fits, key=lambda fit: (fit.wrong_scales, fit.wrong_codes))
        names = [fit.recipe.dialect for fit in judged.fits if not fit.wrong_scales and not fit.wrong_codes]
        given, first = best.wrong_scales, best.first_scale
        expected = f"a scale of a dialect; nearest {best.recipe.dialect}"
        result.scales = "given" if given else "absmax"
        result.dialect = " or ".join(names[:3]) + (f" or {len(names) - 3} more" if len(names) > 3 else "")
        if not names and not given:
            result.dialect = f"scales of {best.recipe.dialect}; {best.wrong_codes} codes of the sample differ at ties"
    if given:
        share = "calibrated scales, or a rule of none of the dialects; codes are judged given these scales"
        text = f"block scales are not the absmax scales of any dialect: {share}"
        result.findings.append(
            Finding("warning", "calibrated", scales, text, given, judged.scales or 1, first, expected)
        )
