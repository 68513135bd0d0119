"""The proof of a `dequantize`: every code under every stored scale, at every place of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.certify.inputs.space import Grid, Numbers, Outer
from narrowgauge.harness.certify.proof import WrongSet, shown_code, shown_number
from narrowgauge.harness.certify.wrong import Feature, find_rule
from narrowgauge.harness.checks.bit_equality import different_bits
from narrowgauge.harness.operations.quantize.call import dequantize
from narrowgauge.harness.report.text import number
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized, amax_shape
from narrowgauge.spec.recipes import Recipe

_SCALES = 1024
"""Float32 scales of a proof, beside the ends and powers of two."""
_WHOLE = 64
"""Float32 scales, and calls, for a recipe with one scale for a tensor."""
_PLACES = 16
"""Places of a code in a block."""
_OUTERS = 1024
"""Most tensor amaxes of a proof."""
_EVERYWHERE = 64
"""Tensor amaxes with `_PLACES` places; further ones have one."""


@dataclass
class Decoding:
    """Result of the proof."""

    pairs: int = 0
    """Pairs of a code and a scale, under all tensor amaxes."""
    outers: int = 0
    complete: bool = True
    """Whether every stored scale was tried, as for scales of 8 bits, under every tensor amax of the proof."""
    of_bytes: bool = True
    """Whether scales have 8 bits."""
    wrong: list[WrongSet] = field(default_factory=list)

    def sentence(self) -> str:
        """The proved or sampled pairs."""
        scales = "every stored scale" if self.of_bytes else "a sample of the float32 scales"
        under = f" under {number(self.outers)} tensor amaxes" if self.outers > 1 else ""
        places = f"each at {_PLACES} places of a block" + (
            f" under {_EVERYWHERE} of them" * (self.outers > _EVERYWHERE)
        )
        return f"values: every code under {scales}{under}: {number(self.pairs)} pairs, {places}"


def stored_scales(recipe: Recipe, device: str, seed: int) -> torch.Tensor:
    """Stored scales of a recipe: all uint8 codes without a sign, NaN if the recipe stores NaN; or a float32 sample."""
    if recipe.scale is not FP32:
        codes = list(range(recipe.scale.max_code + 1))
        if recipe.nan == "propagate" and recipe.scale.nan_code is not None:
            codes.append(recipe.scale.nan_code)
        return torch.tensor(codes, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF], dtype=torch.int32)
    powers = torch.arange(1, 255, 16, dtype=torch.int32) << 23
    drawn = torch.randint(1, 0x7F800000, (_SCALES,), generator=generator, dtype=torch.int32)
    scales = torch.cat([ends, powers, drawn]).view(torch.float32).to(device)
    return scales[:_WHOLE] if recipe.whole else scales


def prove_decoding(backend: Backend, recipe: Recipe, numbers: Numbers, outers: Sequence[Outer], seed: int) -> Decoding:
    """Judge `dequantize` of a backend for every tensor amax. Raises Unsupported, BackendError and HostLost."""
    proof = Decoding(complete=recipe.scale is not FP32, of_bytes=recipe.scale is not FP32)
    scales = stored_scales(recipe, numbers.device, seed)
    chosen = outers[:: -(-len(outers) // _OUTERS)] if recipe.decode != "s" else outers[:1]
    proof.complete &= len(chosen) == len(outers) or recipe.decode == "s"
    for count, outer in enumerate(chosen):
        wrong: list[torch.Tensor] = []
        first = None
        try:
            places = range(_PLACES) if count < _EVERYWHERE else [count * 5 % _PLACES]
            matrices = list(_matrices(recipe, numbers, outer, scales, places))
        except ValueError:  # the recipe refuses this tensor amax
            continue
        for q, codes, owners in matrices:
            expected, actual = reference.dequantize(q, numbers.dtype), dequantize(backend, q, numbers.dtype)
            different = different_bits(expected, actual)
            if bool(different.any()):
                wrong.append(torch.unique(owners[different] * 256 + codes[different].long()))
                first = first or _first(recipe, numbers, scales, (different, codes, owners, expected, actual))
        proof.outers += 1
        proof.pairs += len(scales) * recipe.element.codes
        if first is not None:
            proof.wrong.append(_wrong_set(recipe, scales, outer, torch.unique(torch.cat(wrong)), first))
    return proof


def _matrices(
    recipe: Recipe, numbers: Numbers, outer: Outer, scales: torch.Tensor, places: Iterable[int]
) -> Iterator[tuple[Quantized, torch.Tensor, torch.Tensor]]:
    """Matrices of all codes under all scales, a matrix for every place; for a recipe with one scale for a tensor, a
    matrix for every scale. Beside a matrix its codes, uint8 (M, K), and the numbers of their scales, int64 (M, K)."""
    grid, element = Grid.of(recipe), recipe.element
    many = -(-element.codes // grid.size)
    step = max(1, 128 // grid.height) * grid.across
    for group in torch.split(scales, 1) if recipe.whole else [scales]:
        count = -(-len(group) * many // step) * step
        block = torch.arange(count, device=numbers.device)
        number = block // many % len(group)
        lane = (block % many).view(-1, 1) * grid.size + torch.arange(grid.size, device=numbers.device)
        owners = grid.matrix(
            (number + (scales == group[0]).nonzero()[0, 0]).view(-1, 1).expand(-1, grid.size).contiguous()
        )
        shape = (owners.shape[0], owners.shape[1])
        for place in places:
            codes = grid.matrix((lane + place).remainder(element.codes).to(torch.uint8))
            yield _quantized(recipe, numbers, outer, codes, _laid_out(recipe, group[number], shape)), codes, owners


def _laid_out(recipe: Recipe, scales: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Scales of blocks (n,) as they are stored for a matrix of `shape`."""
    if recipe.whole:
        return scales[:1].view(1, 1)
    if recipe.spans_k:
        return scales.view(shape[0], 1)
    rows = scales.view(shape[0] // recipe.block[0], -1)
    return rows.repeat_interleave(recipe.block[0] // recipe.stored_rows, 0)


def _quantized(recipe: Recipe, numbers: Numbers, outer: Outer, codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
    """The stored matrix of codes (M, K) and scales. Raises ValueError if the recipe refuses the tensor amax."""
    shape = (codes.shape[0], codes.shape[1])
    amax, factor = None, outer.given(numbers.device)
    if outer.amax is not None:
        value = numbers.float(torch.tensor([outer.amax], dtype=torch.int32, device=numbers.device))
        amax = value.expand(amax_shape(shape, recipe)).contiguous()
        factor = tensor_scale(amax, recipe, numbers.dtype)
    return Quantized(pack_codes(codes, recipe), scales.contiguous(), amax, recipe, shape, factor)


def _first(
    recipe: Recipe, numbers: Numbers, scales: torch.Tensor, parts: tuple[torch.Tensor, ...]
) -> dict[str, dict[str, str]]:
    """The first wrong value. `parts`: mask of wrong values, codes, numbers of scales, right and wrong values."""
    different, codes, owners, expected, actual = parts
    scale = scales[owners[different][:1]]
    bits = scale.view(torch.int32) if recipe.scale is FP32 else scale
    return {
        "code": shown_code(int(codes[different][0]), recipe.element),
        "scale": shown_code(int(bits), recipe.scale),
        "expected": shown_number(expected[different][:1], numbers),
        "actual": shown_number(actual[different][:1], numbers),
    }


def _wrong_set(
    recipe: Recipe, scales: torch.Tensor, outer: Outer, keys: torch.Tensor, first: dict[str, dict[str, str]]
) -> WrongSet:
    """The set of wrong pairs with these keys: number of the scale · 256 + code."""
    element = recipe.element
    every = torch.arange(len(scales) * element.codes, device=scales.device)
    code, owner = (every % element.codes).to(torch.uint8), every // element.codes
    values = decode(code, element).double()
    stored = (scales if recipe.scale is FP32 else decode(scales, recipe.scale)).double()[owner]
    features = {
        "NaN code": Feature(values.isnan().long(), ("no", "yes")),
        "sign of the code": Feature(((code & element.sign_code) != 0).long(), ("+", "−")),
        "magnitude of the code": Feature(values.abs().nan_to_num(nan=float("inf"), posinf=float("inf"))),
        "scale": Feature(stored.nan_to_num(nan=float("inf"), posinf=float("inf"))),
    }
    rule = find_rule(torch.isin(owner * 256 + code.long(), keys), features)
    listed = [
        {"scale": int(number), "numbers": [[int(code), int(code)] for code in keys[keys // 256 == number] % 256]}
        for number in torch.unique(keys // 256).tolist()
    ]
    return WrongSet("values", outer, len(keys), len(every), rule, listed, first, steady=True)
