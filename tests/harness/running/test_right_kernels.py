"""Correct kernels that share no arithmetic, order or memory layout with the reference: none may fail.

Every kernel of `KERNELS` has its own doors and cases. It is written from docs/numerics.md, with torch and numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

FLT_MAX = torch.finfo(torch.float32).max
SIXTH = torch.tensor(1 / 6, dtype=torch.float32)
NARROW = {"E2M1": torch.float4_e2m1fn_x2, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
Doors = dict[str, Any]
Tensor = torch.Tensor


def cases(operation: str, recipes: str, shapes: list[tuple[int, ...]], families: str, *flags: str, dtypes="bf16"):
    """Every recipe with every family, with the shapes and the dtypes in turn."""
    made = []
    for recipe in recipes.split():
        for family in families.split():
            number = len(made)
            dtype = dtypes.split()[number % len(dtypes.split())]
            made.append(case_from_labels(operation, recipe, shapes[number % len(shapes)], dtype, family, flags))
    return made


# ---- memory layouts of results ---------------------------------------------------------------------------------------


def as_made(x: Tensor) -> Tensor:
    return x


def column_major(x: Tensor) -> Tensor:
    return x.T.contiguous().T if x.dim() == 2 else x


def in_wide_rows(x: Tensor) -> Tensor:
    """Rows whose pitch is larger than their length."""
    return pad(x.view(torch.uint8) if x.element_size() == 1 else x, (0, 5))[..., : x.shape[-1]].view(x.dtype)


def from_its_storage(x: Tensor) -> Tensor:
    """Every third number of a new tensor, at an offset from the begin of the storage."""
    room = torch.empty(5 + 3 * x.numel(), dtype=x.dtype)
    strides = (3 * x.shape[1], 3) if x.dim() == 2 else (3,)
    return room.as_strided(x.shape, strides, 5).copy_(x)


def in_a_workspace(x: Tensor) -> Tensor:
    """A workspace that grows to the size of the result."""
    return torch.empty(1, dtype=x.dtype).resize_(x.numel()).view(x.shape).copy_(x)


def every_other(x: Tensor) -> Tensor:
    """Every other number of a larger tensor, from its second row on."""
    room = x.new_zeros(x.shape[0] + 1, *(2 * n for n in x.shape[1:]))[1:]
    view = room[:, ::2] if x.dim() == 2 else room
    view.copy_(x)
    return view


def expanded(x: Tensor) -> Tensor:
    """Equal rows share the memory of one. An extent of 1 has the stride 0."""
    if x.numel() and bool((x == x[:1]).all()):
        return x[:1].expand(x.shape)
    return x


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = (E2M1[1:] + E2M1[:-1]) / 2


def by_comparisons(v: Tensor) -> Tensor:
    """Codes of magnitudes: midpoints between an even and an odd code go down, the others up."""
    v = v.unsqueeze(-1)
    return (v > MIDPOINTS[::2]).sum(-1) + (v >= MIDPOINTS[1::2]).sum(-1)


def by_search(v: Tensor) -> Tensor:
    code = torch.searchsorted(MIDPOINTS, v.contiguous())
    tie = (code < 7) & (v == MIDPOINTS[code.clamp(max=6)])
    return code + (tie & (code % 2 == 1))


def by_grid(v: Tensor) -> Tensor:
    """torch rounds halves to even, in steps of the binade, in float64."""
    v = v.double().clamp(max=6)
    step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
    rounded = (v / step).round() * step
    return (rounded.unsqueeze(-1) == E2M1.double()).int().argmax(-1)


def by_distance(v: Tensor) -> Tensor:
    """The nearest number; of two at the same distance the even code, which is listed first."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    v = v.double().clamp(max=6).unsqueeze(-1)
    return order[(v - E2M1.double()[order]).abs().argmin(-1)]


def by_magic_number(v: Tensor) -> Tensor:
    """Adding and subtracting a large number rounds to a multiple of its last bit."""
    v = v.clamp(max=6)
    magic = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0)) * 1.5 * 2.0**23
    return torch.searchsorted(E2M1, ((v + magic) - magic).contiguous())


def cast_e4m3(d: Tensor) -> Tensor:
    return d.clamp(max=448).to(torch.float8_e4m3fn)


E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def search_e4m3(d: Tensor) -> Tensor:
    middle = (E4M3[1:] + E4M3[:-1]) / 2
    code = torch.searchsorted(middle, d.double().clamp(max=448).contiguous())
    tie = (code < 126) & (d.double() == middle[code.clamp(max=125)])
    return (code + (tie & (code % 2 == 1))).to(torch.uint8)


def grid_e4m3(d: Tensor) -> Tensor:
    d = d.double().clamp(max=448)
    exponent = torch.frexp(d.clamp(min=2.0**-6)).exponent - 4
    steps = (torch.ldexp(d, -exponent)).round()  # 8 to 16 for a normal number
    return (steps + 8 * (exponent + 9)).to(torch.uint8).view(torch.int8)


def in_float32(operation: Callable[..., Tensor], *numbers: Tensor) -> Tensor:
    return operation(*numbers)


def in_float64(operation: Callable[..., Tensor], *numbers: Tensor) -> Tensor:
    """A product or a quotient of float32 numbers, rounded to float64 and then to float32, is rounded as if once."""
    return operation(*(number.double() for number in numbers)).float()


def in_numpy(operation: Callable[..., Tensor], *numbers: Tensor) -> Tensor:
    function = {torch.mul: np.multiply, torch.div: np.divide}[operation]
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(function(*(number.numpy() for number in numbers)), dtype=np.float32))


def largest(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.abs().nan_to_num(nan=0.0, posinf=math.inf).amax(axes)


def largest_by_ends(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    numbers = torch.where(x.isnan(), 0, x)
    return torch.maximum(numbers.amax(axes), -numbers.amin(axes)).abs()


def largest_by_halves(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Maxima of pairs, then of pairs of maxima, on the bits of the magnitudes."""
    bits = torch.where(x.isnan(), 0, x.view(torch.int32) & 0x7FFFFFFF)
    for axis in sorted(axes, reverse=True):
        while bits.shape[axis] > 1:
            half = bits.shape[axis] // 2
            rest = bits.narrow(axis, 2 * half, bits.shape[axis] % 2)
            bits = torch.cat([torch.maximum(bits.narrow(axis, 0, half), bits.narrow(axis, half, half)), rest], axis)
    return bits.view(torch.float32).squeeze(axes)


def nvfp4(code=by_comparisons, e4m3=cast_e4m3, compute=in_float32, maximum=largest, give=None, layout=as_made) -> Doors:
    """A quantizer to NVFP4, with one scale for 16 elements or for 16x16."""

    def quantize(x: Tensor, recipe: Any) -> Any:
        if str(recipe) not in ("nvfp4", "nvfp4-2d"):
            raise NotImplementedError(f"no kernel for {recipe}")
        height = recipe.block[0]
        x = x.reshape(-1, x.shape[-1]).float()
        rows, columns = x.shape
        tiles = pad(x, (0, -columns % 16, 0, -rows % height))
        tiles = tiles.view(tiles.shape[0] // height, height, tiles.shape[1] // 16, 16)
        amax = maximum(x, (0, 1)).view(1) if x.numel() else torch.zeros(1)
        encode = torch.ones(1)
        if 0 < amax < math.inf:
            encode = compute(torch.div, torch.tensor([2688.0]), amax).clamp(max=FLT_MAX)
        blocks = maximum(tiles, (1, 3)) if x.numel() else tiles.new_zeros(tiles.shape[0], tiles.shape[2])
        unrounded = compute(torch.mul, blocks, compute(torch.mul, encode, SIXTH)).clamp(max=FLT_MAX)
        scales = e4m3(unrounded)
        decoded = compute(
            torch.mul, scales.view(torch.float8_e4m3fn).float(), compute(torch.div, torch.ones(1), encode)
        )
        factors = compute(torch.div, torch.ones(()), decoded).clamp(max=FLT_MAX)
        scaled = compute(torch.mul, tiles, factors[:, None, :, None]).reshape(-1, tiles.shape[2] * 16)[:rows, :columns]
        scaled = pad(scaled, (0, columns % 2))
        codes = code(scaled.abs().nan_to_num(nan=math.inf)) + 8 * (scaled.signbit() & ~scaled.isnan())
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        stored = scales.view(torch.uint8).repeat_interleave(height, 0)[:rows]
        parts = layout(packed), layout(stored), layout(amax)
        return give(*parts) if give else parts

    return {"quantize": quantize}


NVFP4_CASES = [
    *cases("quantize", "nvfp4", [(48, 64), (1, 48), (33, 80), (3, 37), (0, 32), (128, 16)],
           "normal outliers e2m1-ties e4m3-ties nan inf zeros negative-zeros huge subnormal every-exponent low-rows "
           "near-ties single", dtypes="bf16 fp32 fp16 fp32"),
    *cases("quantize", "nvfp4-2d", [(48, 64), (40, 50)], "normal nan e4m3-ties huge"),
]  # fmt: skip

# ---- MX and FP8 ------------------------------------------------------------------------------------------------------


def exponent_by_bits(v: Tensor) -> Tensor:
    bits = v.view(torch.int32)
    code = torch.where(v < 2.0**-126, torch.where(bits <= 0x400000, 0, 1), bits + 0x7FFFFF >> 23)
    return code.clamp(max=254)


def exponent_by_frexp(v: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(v.double().clamp(max=FLT_MAX))
    return torch.where(v > 0, (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254), 0)


def exponent_by_search(v: Tensor) -> Tensor:
    powers = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(-127, 128))
    return torch.searchsorted(powers, v.double().contiguous()).clamp(max=254)


def cast_element(v: Tensor, fmt: Any) -> Tensor:
    """Casts of torch round to nearest even; saturation comes first. NaN of any sign gets 0x7F or 0xFF."""
    return v.clamp(-fmt.max, fmt.max).to(NARROW[fmt.name]).view(torch.uint8)


def grid_element(v: Tensor, fmt: Any) -> Tensor:
    """Multiples of the step of the binade, in float64, and their codes by arithmetic."""
    size = v.abs().double().clamp(max=fmt.max)
    exponent = torch.frexp(size.clamp(min=2.0 ** (1 - fmt.bias))).exponent - 1
    steps = torch.ldexp(size, fmt.mantissa_bits - exponent).round()
    code = steps + (1 << fmt.mantissa_bits) * (exponent + fmt.bias - 1)
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    return torch.where(v.isnan(), nan, code + fmt.sign_code * v.signbit()).to(torch.uint8)


def search_element(v: Tensor, fmt: Any) -> Tensor:
    points = torch.tensor([fmt.value(code) for code in range(fmt.max_code + 1)], dtype=torch.float64)
    middle, size = (points[1:] + points[:-1]) / 2, v.abs().double().nan_to_num(nan=math.inf).contiguous()
    code = torch.searchsorted(middle, size)
    tie = (code < fmt.max_code) & (size == middle[code.clamp(max=fmt.max_code - 1)])
    code = code + (tie & (code % 2 == 1)) + fmt.sign_code * (v.signbit() & ~v.isnan())
    return torch.where(v.isnan() & (fmt.nan_code is not None), fmt.nan_code or 0, code).to(torch.uint8)


def negative_nans(element: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """0/0 on x86 is a NaN with its sign set."""
    return lambda v, fmt: torch.where(v.isnan(), element(v, fmt) | 0x80, element(v, fmt))


def packed(codes: Tensor, fmt: Any) -> Tensor:
    if fmt.bits != 4:
        return codes
    codes = pad(codes, (0, codes.shape[1] % 2))
    return codes[:, ::2] | codes[:, 1::2] << 4


def mx(exponent=exponent_by_bits, element=grid_element, compute=in_float32, maximum=largest, layout=as_made) -> Doors:
    """A quantizer to MX formats: rowwise, and both halves of the formats of 8 and 6 bits."""

    def rowwise(x: Tensor, fmt: Any) -> tuple[Tensor, Tensor]:
        rows, columns = x.shape
        blocks = pad(x.float(), (0, -columns % 32)).view(rows, -(-columns // 32), 32)
        amax = maximum(blocks, (2,)) if x.numel() else blocks.new_zeros(blocks.shape[:2])
        scales = exponent(compute(torch.mul, amax, (1 / torch.tensor(fmt.max, dtype=torch.float32)))).int()
        factors = torch.exp2(127.0 - scales.double()).float()
        scaled = compute(torch.mul, blocks, factors.unsqueeze(2)).reshape(rows, -1)[:, :columns]
        return element(scaled, fmt), scales.to(torch.uint8)

    def quantize(x: Tensor, recipe: Any) -> Any:
        if recipe.block != (1, 32) or recipe.rounding == "stochastic":
            raise NotImplementedError(f"no kernel for {recipe}")
        codes, scales = rowwise(x.reshape(-1, x.shape[-1]), recipe.element)
        return layout(packed(codes, recipe.element)), layout(scales)

    def quantize_both(x: Tensor, recipe: Any, *, rowwise: bool = True, columnwise: bool = True) -> Any:
        if recipe.columnwise != "in-place" or recipe.block != (1, 32) or recipe.rounding == "stochastic":
            raise NotImplementedError(f"no kernel for both halves of {recipe}")
        matrix = x.reshape(-1, x.shape[-1])
        second = None
        if columnwise:
            codes, scales = doors["rowwise"](matrix.T, recipe.element)
            second = {"codes": layout(codes.T), "scales": layout(scales.T)}
        return quantize(x, recipe) if rowwise else None, second

    doors = {"rowwise": rowwise}
    return {"quantize": quantize, "quantize_both": quantize_both}


MX_CASES = [
    *cases("quantize", "mxfp8-e4m3 mxfp8-e5m2", [(40, 64), (1, 33), (33, 96)],
           "normal ties scale-edges nan inf zeros every-exponent subnormal", dtypes="bf16 fp32 fp16"),
    *cases("quantize", "mxfp8-e4m3", [(40, 64), (37, 70)], "normal nan inf low-rows", "both"),
]  # fmt: skip
NARROW_MX_CASES = cases(
    "quantize",
    "mxfp6-e2m3 mxfp6-e3m2 mxfp4",
    [(40, 64), (5, 33)],
    "normal ties scale-edges nan inf amax-2m126-first amax-2m120-row-end amax-2p50-first",
    dtypes="fp32 bf16",
)


def fp8(element=cast_element, compute=in_float32, maximum=largest, layout=as_made) -> Doors:
    """A quantizer to FP8 with float32 scales: for 128 elements, for 128x128, or for the tensor."""

    def quantize(x: Tensor, recipe: Any) -> Any:
        name, fmt = str(recipe), recipe.element
        if not name.startswith(("fp8-block-", "fp8-current-")) or "-eps" in name:
            raise NotImplementedError(f"no kernel for {recipe}")
        dtype, x = x.dtype, x.reshape(-1, x.shape[-1]).float()
        rows, columns = x.shape
        height, width = (max(1, rows), max(1, columns)) if recipe.whole else recipe.block
        tiles = pad(x, (0, -columns % width, 0, -rows % height))
        tiles = tiles.view(max(1, tiles.shape[0] // height), min(height, max(tiles.shape[0], 0)), -1, width)
        amax = maximum(tiles, (1, 3)) if x.numel() else torch.zeros(tiles.shape[0], max(1, tiles.shape[2]))
        scale = compute(torch.div, torch.full_like(amax, fmt.max), amax)
        most = FLT_MAX if recipe.whole else torch.finfo(dtype).max
        scale = torch.where((amax == 0) | amax.isinf(), 1.0, torch.where(scale.isinf(), most, scale))
        if name.endswith("pow2"):
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        scaled = compute(torch.mul, tiles, scale[:, None, :, None])
        codes = element(scaled.reshape(-1, tiles.shape[2] * width)[:rows, :columns], fmt)
        stored = compute(torch.div, torch.ones_like(scale), scale)
        found = {"codes": layout(codes.view(NARROW[fmt.name])), "scales": layout(stored)}
        return found | ({"amax": layout(amax.view(1))} if recipe.whole else {})

    return {"quantize": quantize}


FP8_CASES = cases(
    "quantize", "fp8-block-1x128-e4m3-pow2 fp8-block-128x128-e5m2-fp32 fp8-current-e4m3 fp8-current-e5m2-pow2",
    [(130, 140), (3, 128), (40, 300)], "normal nan inf zeros ties huge subnormal", dtypes="bf16 fp32",
)  # fmt: skip

# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def stochastic(generate: Callable[[tuple[int, int], tuple[int, int]], np.ndarray]) -> Doors:
    """A quantizer to MXFP8 that adds random bytes of its own to the bits below the mantissa of the element."""

    def quantize(x: Tensor, recipe: Any, *, random: tuple[int, int]) -> Any:
        if str(recipe) != "mxfp8-e4m3-sr":
            raise NotImplementedError(f"no kernel for {recipe}")
        fmt = recipe.element
        codes, scales = mx(element=lambda v, fmt: v)["quantize"](x, find_recipe("mxfp8-e4m3"))
        size = codes.abs().double().nan_to_num(nan=0.0).clamp(max=fmt.max)
        exponent = torch.frexp(size.clamp(min=2.0 ** (1 - fmt.bias))).exponent - 1
        steps = torch.ldexp(size, fmt.mantissa_bits - exponent)
        bytes_ = torch.from_numpy(generate(random, tuple(x.shape))).double() / 256
        up = (steps + bytes_).floor() + (1 << fmt.mantissa_bits) * (exponent + fmt.bias - 1)
        up = up.clamp(max=fmt.max_code) + fmt.sign_code * codes.signbit()
        return torch.where(codes.isnan(), 0xFF, up).to(torch.uint8), scales

    return {"quantize": quantize, "declares": {"random": "own"}}


def pcg_bytes(random: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(random)).integers(0, 256, shape)


def sha_like_bytes(random: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """splitmix64 of a counter: the top byte."""
    with np.errstate(over="ignore"):
        z = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(
            (random[0] * 0x9E3779B9 + (random[1] << 40)) % 2**64
        )
        z = z * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(56)).astype(np.int64).reshape(shape)


STOCHASTIC_CASES = cases("quantize", "mxfp8-e4m3-sr", [(256, 256)], "normal nan")

# ---- products --------------------------------------------------------------------------------------------------------


def codes_of(q: Quantized) -> Tensor:
    """Numbers of the codes, float64 (M, K)."""
    values, codes = torch.tensor(q.recipe.element.values, dtype=torch.float64), q.codes.T if q.transposed else q.codes
    if q.recipe.element.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, : q.shape[1]]
    return values[codes.long()]


def scales_of(q: Quantized) -> Tensor:
    """Numbers of the scales, float64 (M, blocks)."""
    recipe, scales = q.recipe, q.scales.T if q.transposed else q.scales
    if scales.dtype == torch.uint8:
        scales = torch.tensor(recipe.scale.values, dtype=torch.float64)[scales.long()]
    return scales.double().repeat_interleave(recipe.stored_rows, 0)[: q.shape[0]]


def decoded(q: Quantized) -> Tensor:
    """Codes times block scales, float64 (M, K)."""
    width = q.shape[1] if q.recipe.whole else q.recipe.block[1]
    return codes_of(q) * (1 if q.recipe.whole else scales_of(q).repeat_interleave(width, 1)[:, : q.shape[1]])


def factor_of(a: Quantized, b: Quantized) -> Tensor:
    if a.recipe.whole:
        return (a.scales * b.scales.T).view(())
    if a.amax is None or b.amax is None:
        return torch.ones(())
    return (a.amax * b.amax / torch.tensor(36.0 * 448 * 448)).view(())


def nearest_float32(number: Fraction) -> float:
    """Rounded once: `float` alone would round to float64 first."""
    near = np.float32(float(number))
    candidates = [near, np.nextafter(near, np.float32(math.inf)), np.nextafter(near, np.float32(-math.inf))]
    return float(min(candidates, key=lambda n: (abs(Fraction(float(n)) - number), int(n.view(np.int32)) & 1)))


def finished(total: Tensor, a: Quantized, b: Quantized, options: dict[str, Any], *, fused: bool = False) -> Tensor:
    """α, c, bias and the cast."""
    y, c, bias = total.float(), options.get("c"), options.get("bias")
    factor = factor_of(a, b)
    if fused and c is not None:
        numbers = zip(y.flatten().tolist(), c.expand_as(y).flatten().tolist(), strict=True)
        exact = [Fraction(s) * Fraction(float(factor)) + Fraction(added) for s, added in numbers]
        y, c = torch.tensor([nearest_float32(number) for number in exact]).view(y.shape), None
    else:
        y = factor * y
    y = y if c is None else y + c.float()
    return (y if bias is None else y + bias.float()).to(options["out_dtype"])


def in_turn(terms: Tensor) -> Tensor:
    total = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        total = total + term
    return total


def pairwise(terms: Tensor) -> Tensor:
    while terms.shape[-1] > 1:
        terms = pad(terms, (0, terms.shape[-1] % 2))
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms.sum(-1)


def compensated(terms: Tensor) -> Tensor:
    total = lost = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        added = term - lost
        after = total + added
        lost, total = (after - total) - added, after
    return total


def compensated_twice(terms: Tensor) -> Tensor:
    """Neumaier's sum: what is lost is kept apart."""
    total = lost = torch.zeros(terms.shape[:-1])
    for term in terms.unbind(-1):
        after = total + term
        lost = lost + torch.where(total.abs() >= term.abs(), (total - after) + term, (term - after) + total)
        total = after
    return total + lost


def in_slices(number: int) -> Callable[[Tensor], Tensor]:
    return lambda terms: in_turn(torch.stack([in_turn(part) for part in terms.tensor_split(number, -1)], -1))


def in_blocks(width: int) -> Callable[[Tensor], Tensor]:
    return lambda terms: in_turn(torch.stack([pairwise(part) for part in terms.split(width, -1)], -1))


def by_lanes(number: int) -> Callable[[Tensor], Tensor]:
    """Lane i sums the terms i, i + lanes, …; then the lanes are summed as by a shuffle."""
    return lambda terms: pairwise(torch.stack([in_turn(terms[..., i::number]) for i in range(number)], -1))


def by_magnitude(terms: Tensor) -> Tensor:
    order = terms.abs().nan_to_num(nan=math.inf).argsort(-1)
    return in_turn(terms.gather(-1, order))


def shuffled(terms: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(7)).permutation(terms.shape[-1]))
    return in_turn(terms[..., order])


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": in_turn,
    "reversed": lambda terms: in_turn(terms.flip(-1)),
    "pairwise": pairwise,
    "shuffled": shuffled,
    "smallest first": by_magnitude,
    "Kahan": compensated,
    "Neumaier": compensated_twice,
    **{f"split-K {number}": in_slices(number) for number in range(2, 9)},
    **{f"blocks of {width}": in_blocks(width) for width in (16, 32, 64, 128)},
    **{f"{number} lanes": by_lanes(number) for number in (4, 32)},
    "float64": lambda terms: terms.double().sum(-1),
}


def gemm(add: Callable[[Tensor], Tensor], layout=as_made, *, fused: bool = False) -> Doors:
    """A product that adds float32 products of decoded operands, and rounds to float32 if `add` does not."""

    def door(a: Quantized, b: Quantized, **options: Any) -> Tensor:
        products = (decoded(a).unsqueeze(1) * decoded(b).unsqueeze(0)).float()
        return layout(finished(add(products), a, b, options, fused=fused))

    return {"gemm": door}


def of_matrices(multiply: Callable[[Tensor, Tensor], Tensor], layout=as_made) -> Doors:
    """A product of two matrices of decoded operands, as a library multiplies them."""
    return {"gemm": lambda a, b, **options: layout(finished(multiply(decoded(a), decoded(b)), a, b, options))}


def of_block_sums(scale: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Doors:
    """Products of codes are summed in a block without rounding, multiplied by both scales, and added block by block."""

    def door(a: Quantized, b: Quantized, **options: Any) -> Tensor:
        width, total = a.recipe.block[1], torch.zeros(a.shape[0], b.shape[0])
        left, right = (codes_of(q).split(width, 1) for q in (a, b))
        for number, (x, w) in enumerate(zip(left, right, strict=True)):
            s, t = scales_of(a)[:, number, None].float(), scales_of(b)[None, :, number].float()
            total = total + scale((x @ w.T).float(), s, t)
        return finished(total, a, b, options)

    return {"gemm": door}


def promoted(add: Callable[[Tensor], Tensor]) -> Doors:
    """FP8 with block scales: float32 sums of code products of each block, times both scales."""

    def door(a: Quantized, b: Quantized, **options: Any) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[0])
        for number, (x, w) in enumerate(zip(codes_of(a).split(128, 1), codes_of(b).split(128, 1), strict=True)):
            s, t = scales_of(a)[:, number, None].float(), scales_of(b)[None, :, number].float()
            total = total + add((x.unsqueeze(1) * w.unsqueeze(0)).float()).float() * s * t
        out, bias = options["out_dtype"], options.get("bias")
        return (total if bias is None else total + bias.float()).to(out)

    return {"gemm": door}


GEMM_SHAPES = [(17, 160, 12), (1, 96, 9), (8, 320, 1), (5, 48, 7), (16, 33, 16)]
GEMM_CASES = [
    *cases("gemm", "nvfp4", GEMM_SHAPES, "normal rounding cancelling positive lattice nan inf outliers low-rows zeros",
           "tn", dtypes="bf16xbf16-fp32 bf16xbf16-bf16 fp16xfp16-fp16"),
    *cases("gemm", "mxfp8-e4m3 mxfp4", GEMM_SHAPES, "normal rounding nan", "tn",
           dtypes="bf16xbf16-bf16 bf16xbf16-fp32"),
    *cases("gemm", "fp8-current-e4m3", GEMM_SHAPES, "rounding inf", "tn", dtypes="bf16xbf16-bf16 bf16xbf16-fp32"),
    *cases("gemm", "nvfp4 mxfp8-e5m2+mxfp6-e3m2", GEMM_SHAPES, "rounding", "nn", "accumulate", "bias",
           dtypes="bf16xbf16-fp32"),
    *cases("gemm", "mxfp8-e4m3", GEMM_SHAPES, "cancelling", "nt", "bias", dtypes="bf16xbf16-bf16"),
]  # fmt: skip
MX_INF_CASES = cases("gemm", "mxfp8-e4m3 mxfp4 mxfp8-2d", GEMM_SHAPES, "inf zeros", "tn", dtypes="bf16xbf16-fp32")
"""An infinite element gives its block the scale 2^127. Codes times this scale exceed float32, and exact products of two
operands need not. A kernel that decodes to float32 has an infinite operand, and a declaration."""
PROMOTED_CASES = cases(
    "gemm", "fp8-block-1x128-e4m3-pow2 fp8-block-1x128-e4m3-fp32+fp8-block-128x128-e4m3-fp32",
    [(9, 300, 7), (1, 160, 5)], "normal rounding cancelling nan inf", "tn", dtypes="bf16xbf16-fp32 bf16xbf16-bf16",
)  # fmt: skip

# ---- rotations, values, layouts --------------------------------------------------------------------------------------

SIGNS = torch.tensor([1.0 if 0xD7E8 >> k & 1 == 0 else -1.0 for k in range(16)])
HADAMARD = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])


def rotation(rotate: Callable[[Tensor], Tensor], layout=as_made, **declares: str) -> Doors:
    """A Hadamard rotation of groups of 16, rounded to bfloat16. The factor 1/4 is exact."""

    def transform(x: Tensor, recipe: Any) -> Tensor:
        if recipe.transform.group != 16:
            raise NotImplementedError(f"no kernel for {recipe}")
        signed = x.float().view(-1, 16) * (SIGNS if recipe.transform.signs else 1) / 4
        return layout(rotate(signed).float().bfloat16().view(x.shape))

    return {"transform": transform, "declares": declares}


def butterflies(x: Tensor) -> Tensor:
    for distance in (1, 2, 4, 8):
        pairs = x.view(-1, 8 // distance, 2, distance)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, 16)
    return x


def butterflies_from_afar(x: Tensor) -> Tensor:
    for distance in (8, 4, 2, 1):
        pairs = x.view(-1, 8 // distance, 2, distance)
        x = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(-1, 16)
    return x


def radix_four(x: Tensor) -> Tensor:
    four = HADAMARD[:4, :4]
    return (four @ (x.view(-1, 4, 4) @ four)).reshape(-1, 16)


ROTATED_CASES = cases(
    "transform", "nvfp4-rht nvfp4-rht-nosign", [(48, 64), (1, 16), (7, 160)],
    "normal spread nan inf zeros negative-zeros huge subnormal",
)  # fmt: skip


def dequantizer(multiply: Callable[[Tensor, Tensor], Tensor], layout=as_made, *, negative: bool = False) -> Doors:
    """Values of NVFP4 and MX. quantize is that of this file."""

    def dequantize(q: Quantized, dtype: torch.dtype) -> Tensor:
        scales = scales_of(q).float()
        if q.amax is not None:
            scales = scales * q.amax / torch.tensor(2688.0)
        if q.recipe.whole:
            raise NotImplementedError
        wide = scales.repeat_interleave(q.recipe.block[1], 1)[:, : q.shape[1]]
        values = multiply(codes_of(q).float(), wide).float()
        return layout((torch.where(values.isnan(), -values.abs(), values) if negative else values).to(dtype))

    def quantize(x: Tensor, recipe: Any) -> Any:
        return (nvfp4 if str(recipe) in ("nvfp4", "nvfp4-2d") else mx)()["quantize"](x, recipe)

    return {"quantize": quantize, "dequantize": dequantize}


VALUE_CASES = [
    *cases("quantize", "nvfp4", [(48, 64), (5, 37)], "normal nan inf zeros huge", dtypes="bf16 fp32"),
    *cases("quantize", "mxfp8-e4m3 mxfp6-e2m3", [(48, 64), (5, 37)], "normal nan inf subnormal", dtypes="bf16 fp16"),
]


def swizzler(layout=as_made) -> Doors:
    """The 128x4 layout by the formula of each byte."""

    def places(rows: int, columns: int) -> Tensor:
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        tiles = -(-columns // 4)
        return ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4

    def swizzle(scales: Tensor) -> Tensor:
        rows, columns = scales.shape
        found = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
        found.view(-1)[places(rows, columns)] = scales
        return layout(found)

    def unswizzle(swizzled: Tensor, shape: tuple[int, int]) -> Tensor:
        return layout(swizzled.flatten()[places(*shape)])

    return {"swizzle": swizzle, "unswizzle": unswizzle}


SWIZZLE_CASES = [
    case_from_labels("swizzle", "", shape, "", family, ())
    for shape in [(256, 12), (100, 7), (1, 1)] for family in ("position", "bytes")
]  # fmt: skip

# ---- the table -------------------------------------------------------------------------------------------------------

QUANTIZERS: dict[str, Doors] = {
    "searchsorted against midpoints": nvfp4(by_search),
    "halves to even in float64": nvfp4(by_grid, compute=in_float64),
    "nearest by distance": nvfp4(by_distance),
    "a magic number": nvfp4(by_magic_number, search_e4m3),
    "numpy's arithmetic": nvfp4(compute=in_numpy),
    "maxima of pairs, on bits": nvfp4(maximum=largest_by_halves, e4m3=grid_e4m3),
    "maximum and minimum": nvfp4(by_search, maximum=largest_by_ends, compute=in_float64),
    "column-major codes and scales": nvfp4(layout=column_major),
    "rows of a larger pitch": nvfp4(by_search, layout=in_wide_rows),
    "every other byte": nvfp4(layout=every_other),
    "an offset from the begin of the storage": nvfp4(layout=from_its_storage),
    "a workspace that grows": nvfp4(by_search, layout=in_a_workspace),
    "expanded scales": nvfp4(layout=expanded),
    "int8 codes and scales": nvfp4(give=lambda codes, scales, amax: (codes.view(torch.int8), scales.view(torch.int8))),
    "torch's narrow dtypes": nvfp4(
        give=lambda codes, scales, amax: {
            "codes": codes.view(torch.float4_e2m1fn_x2), "scales": scales.view(torch.float8_e4m3fn), "amax": amax
        }
    ),
    "neither amax nor tensor scale": nvfp4(give=lambda codes, scales, amax: [codes, scales]),
}  # fmt: skip


def table() -> Iterator[tuple[str, Doors, list[Case]]]:
    """Name, doors and cases of every kernel."""
    for number, (name, doors) in enumerate(QUANTIZERS.items()):
        yield f"NVFP4: {name}", doors, NVFP4_CASES[number % 2 :: 2] + NVFP4_CASES[-4:]
    for name, doors in {
        "bits and a grid": mx(),
        "frexp and torch's casts": mx(exponent_by_frexp, cast_element),
        "searches": mx(exponent_by_search, search_element, in_float64, largest_by_ends),
        "negative NaN": mx(element=negative_nans(cast_element), maximum=largest_by_halves),
        "column-major": mx(element=negative_nans(grid_element), layout=column_major),
        "expanded": mx(compute=in_numpy, layout=expanded),
    }.items():
        yield f"MX: {name}", doors, MX_CASES
    for name, doors in {"a grid": mx(), "searches": mx(exponent_by_search, search_element, layout=every_other)}.items():
        yield f"MXFP6 and MXFP4: {name}", doors, NARROW_MX_CASES
    for name, doors in {
        "torch's casts": fp8(),
        "a grid in float64": fp8(grid_element, in_float64, largest_by_ends),
        "searches, column-major": fp8(search_element, in_numpy, layout=column_major),
        "negative NaN, expanded": fp8(negative_nans(cast_element), layout=expanded),
        "rows of a larger pitch": fp8(negative_nans(grid_element), layout=in_wide_rows),
    }.items():
        yield f"FP8: {name}", doors, FP8_CASES
    yield "stochastic: PCG64", stochastic(pcg_bytes), STOCHASTIC_CASES
    yield "stochastic: splitmix64", stochastic(sha_like_bytes), STOCHASTIC_CASES
    for number, (name, add) in enumerate(SUMS.items()):
        yield f"GEMM: {name}", gemm(add), GEMM_CASES + MX_INF_CASES[number % 2 :: 2]
    for name, layout in {
        "column-major": column_major, "wide rows": in_wide_rows, "every other": every_other,
        "an offset from the begin of the storage": from_its_storage, "a workspace that grows": in_a_workspace,
    }.items():  # fmt: skip
        yield f"GEMM: {name}", gemm(pairwise, layout), GEMM_CASES
    yield "GEMM: α and c in one rounding", gemm(in_turn, fused=True), GEMM_CASES
    yield "GEMM: declared in order", gemm(in_turn) | {"declares": {"gemm": "sequential"}}, GEMM_CASES
    yield "GEMM: declared tree", gemm(pairwise) | {"declares": {"gemm": "tree"}}, GEMM_CASES
    for name, multiply in {
        "float32 of a library": lambda a, b: a.float() @ b.float().T,
        "the transpose": lambda a, b: (b.float() @ a.float().T).T,
        "einsum": lambda a, b: torch.einsum("mk,nk->mn", a.float(), b.float()),
        "float64 of a library": lambda a, b: a @ b.T,
        "numpy": lambda a, b: torch.from_numpy(a.float().numpy() @ b.float().numpy().T),
    }.items():
        yield f"GEMM: {name}", of_matrices(multiply), GEMM_CASES
    declared = of_matrices(lambda a, b: a.float() @ b.float().T) | {"declares": {"operands": "decoded-float32"}}
    yield "GEMM: decoded to float32 first, declared", declared, MX_INF_CASES
    for name, scale in {
        "scales one by one": lambda p, s, t: p * s * t,
        "the product of scales": lambda p, s, t: p * (s * t),
        "in float64": lambda p, s, t: (p.double() * s * t).float(),
    }.items():
        blocked = [case for case in GEMM_CASES if "fp8" not in case.id]
        yield f"GEMM of block sums: {name}", of_block_sums(scale), blocked
    for name in ("in order", "pairwise", "float64", "split-K 4", "Kahan"):
        yield f"FP8 by blocks: {name}", promoted(SUMS[name]), PROMOTED_CASES
    for name, doors in {
        "butterflies": rotation(butterflies, transform="butterfly"),
        "butterflies from afar": rotation(butterflies_from_afar),
        "a matrix product": rotation(lambda x: x @ HADAMARD),
        "a matrix product in float64": rotation(lambda x: x.double() @ HADAMARD.double()),
        "radix 4": rotation(radix_four),
        "in order, column-major": rotation(lambda x: in_turn(x.unsqueeze(1) * HADAMARD), column_major),
    }.items():
        yield f"rotation: {name}", doors, ROTATED_CASES
    for name, doors in {
        "in order": dequantizer(torch.mul),
        "in float64, negative NaN": dequantizer(lambda q, f: q.double() * f.double(), negative=True),
        "column-major": dequantizer(torch.mul, column_major),
        "every other": dequantizer(torch.mul, every_other),
    }.items():
        yield f"values: {name}", doors, VALUE_CASES
    for layout in (as_made, column_major, in_wide_rows):
        yield f"swizzle: {layout.__name__}", swizzler(layout), SWIZZLE_CASES


KERNELS = {name: (doors, selected) for name, doors, selected in table()}


@pytest.mark.sampled(87)
@pytest.mark.parametrize("name", KERNELS)
def test_a_right_kernel_passes(name):
    doors, selected = KERNELS[name]
    failed = []
    for case in selected:
        record = run_case(case, backend(**doors))
        if record.verdict != "pass":
            failed.append(f"{name}: {case.id}: {record.verdict}: {record.message}")
    assert not failed, "\n".join(failed)
