"""Blocks of 16 bfloat16 numbers in words of memory (packed_bf16.cuh): the codes of their products with a factor."""

from __future__ import annotations

import numpy as np
import torch

from narrowgauge.native.runtime.launch import launch
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.spec.formats import E2M1
from tests.native import conversions
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.gpu import DEVICE, needs_gpu
from tests.native.launching import Source
from tests.native.quantize import test_stochastic

TEXT = """
#include "common/packed_bf16.cuh"
using namespace narrowgauge;

__device__ PackedE2m1 codes_of(const PackedBf16& x, float factor, const u32 (*random)[4]) {
    const PackedE2m1 of_any = e2m1x16_of_products(x, factor, random);
#ifdef HAS_E2M1_BY_ADDITION
    const float largest = __uint_as_float(magnitude_bound(x)) * factor;
    if (!(largest < (random != nullptr ? 8.0f : 7.0f))) return of_any;
#ifdef HAS_MAX_MAGNITUDE
    const u32 bits = __float_as_uint(factor);
    if (random == nullptr && ((bits & 0x007FFFFFu) == 0u || bits == 0x00400000u)) {
        PackedBf16 even_first;
        for (int j = 0; j < 8; ++j) {
            const u32* pair = x.words + j / 4 * 4 + j % 2 * 2;
            even_first.words[j] = pack_halves(pair[0], pair[1], j % 4 / 2 == 1);
        }
        const PackedE2m1 of_power = e2m1x16_of_exact_products_below_7(even_first, factor);
        for (int j = 0; j < 2; ++j) {
            if (of_power.words[j] != of_any.words[j]) return {{~of_any.words[0], ~of_any.words[1]}};
        }
    }
#endif
    const PackedE2m1 of_small = random == nullptr
                                    ? e2m1x16_of_products_below_7(x, factor)
                                    : e2m1x16_of_products_below_8(x, factor * STOCHASTIC_FACTOR_SCALE, *random);
    for (int j = 0; j < 2; ++j) {
        if (of_small.words[j] != of_any.words[j]) return {{~of_any.words[0], ~of_any.words[1]}};  // wrong codes
    }
#endif
    return of_any;
}

extern "C" __global__ void codes(const u32* x, const float* factors, const u32* given, u8* out, int stochastic, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 four[4];
    for (int j = 0; j < 4; ++j) four[j] = given[4 * i + j];
    store_codes(codes_of(load_packed(x + 8 * i), factors[i], stochastic ? &four : nullptr), out + 8 * i);
}

// Compares codes of a block with codes of a single number: for float32 numbers from the bits `first` on, as factors of
// 1 and -1, rounded to nearest even, and by the 16 bytes around the first byte that lifts a number.
extern "C" __global__ void disagreements(u32 first, i64 n, u32* different) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = __uint_as_float(first + static_cast<u32>(i));
    const u32 cut = stochastic<E2M1>(v, 0u);
    u32 least = 0, most = 256;
    while (least < most) {
        const u32 byte = (least + most) / 2;
        if (stochastic<E2M1>(v, byte) > cut) most = byte;
        else least = byte + 1;
    }
    PackedBf16 x;
    u32 four[4] = {0u, 0u, 0u, 0u};
    for (u32 j = 0; j < 8; ++j)
        x.words[j] = 0x3F803F80u | (j % 2 != 0 ? 0x8000u : 0u) | (j % 3 != 0 ? 0x80000000u : 0u);
    for (u32 j = 0; j < 16; ++j) four[j / 4] |= (least + 248u + j & 0xFFu) << j % 4 * 8;
    const PackedE2m1 nearest = codes_of(x, v, nullptr), lifted = codes_of(x, v, &four);
    for (u32 j = 0; j < 16; ++j) {
        const u32 sign = (x.words[j / 2] >> (16 * (j % 2) + 15) & 1u) << 3, place = j % 8 * 4;
        const u32 byte = four[j / 4] >> j % 4 * 8 & 0xFFu;
        if ((nearest.words[j / 8] >> place & 15u) != (nearest_even<E2M1>(v) | sign)) different[0] = 1u;
        if ((lifted.words[j / 8] >> place & 15u) != ((byte >= least ? cut + 1u : cut) | sign)) different[1] = 1u;
    }
}
"""


def codes(source: str, x: np.ndarray, factors: np.ndarray, given: np.ndarray, *, rounded: bool) -> np.ndarray:
    """Codes, one a byte, of bfloat16 numbers (n, 16) by factors (n,): nearest even, or by bytes (n, 16)."""
    words = (x.view(np.uint32) >> 16).astype(np.uint16)
    out = torch.zeros((len(x), 8), dtype=torch.uint8, device=ops.device)
    arrays = [torch.from_numpy(array).to(out.device) for array in (words.view(np.uint8), factors, given)]
    arguments = (*arrays, out, np.int32(not rounded), np.int64(len(x)))
    launch(source, "codes", (-(-len(x) // 256),), (256,), arguments, device=out.device)
    packed = out.cpu().numpy()
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1, 16)


def check(source: str, x: np.ndarray, factors: np.ndarray, given: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        products = torch.from_numpy(x * factors[:, None])
    by_bytes = encode(stochastic(products, E2M1, torch.from_numpy(given)), E2M1)
    for rounded, expected in ((True, encode(products, E2M1)), (False, by_bytes)):
        np.testing.assert_array_equal(codes(source, x, factors, given, rounded=rounded), expected.numpy())


@ON_EVERY_DEVICE
def test_decisions_are_the_references(cuda_source: Source) -> None:
    """Numbers at which a rounding decides (every fifth on a CPU), as the factor of 1 and -1, under every byte."""
    near = np.concatenate([test_stochastic.decisions(), conversions.grid_decisions(np.array(E2M1.values), 8.0)])
    factors = np.unique(near[near >= 0])[:: 5 if ops.device == "cpu" else 1].repeat(16)
    x = np.where(np.random.default_rng(3).random((len(factors), 16)) < 0.5, np.float32(-1), np.float32(1))
    check(cuda_source(TEXT), x, factors, np.resize(np.arange(256, dtype=np.uint8), (len(factors), 16)))


@ON_EVERY_DEVICE
def test_every_bfloat16_is_rounded_as_the_reference_does(cuda_source: Source) -> None:
    """Beside its neighbours and zeros of either sign, by a factor with products below 7 or not finite, also by a power
    of two."""
    rng = np.random.default_rng(4)
    x = np.sort(conversions.bf16_values()).reshape(-1, 16)
    largest = np.abs(np.nan_to_num(x, posinf=1.0, neginf=1.0)).max(axis=1)
    factors = (rng.uniform(1, 7, len(x)) / np.maximum(largest, 2.0**-125)).astype(np.float32)
    given = rng.integers(0, 256, x.shape, dtype=np.uint8)
    for values in (x, np.where(given < 64, np.copysign(np.float32(0), x), x)):
        for chosen in (factors, (factors.view(np.uint32) & 0x7F800000).view(np.float32)):
            check(cuda_source(TEXT), values, chosen, given)


@needs_gpu
def test_every_float32_below_8_alone_and_in_a_block(cuda_source: Source) -> None:
    different = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    count = int(np.float32(8).view(np.int32))
    arguments = (np.uint32(0), np.int64(count), different)
    launch(cuda_source(TEXT), "disagreements", (-(-count // 256),), (256,), arguments, device=different.device)
    assert different.tolist() == [0, 0]
