"""SIMD functions of a CPU give the bits of the function for a single element, for registers of any width."""

from __future__ import annotations

import numpy as np
import pytest

from tests.native import conversions
from tests.native.conversions import EVERY_HALF
from tests.native.launching import Source, run

WIDTHS = {"native": (), "avx2": ("-march=x86-64-v3",), "sse2": ("-march=x86-64",)}
EVERY_WIDTH = pytest.mark.parametrize(
    "flags",
    [pytest.param(flags, id=name, marks=pytest.mark.long if name == "sse2" else ()) for name, flags in WIDTHS.items()],
)
Flags = tuple[str, ...]

FORMATS = ("E2M1", "E2M3", "E3M2", "E4M3", "E5M2")

# `differ` counts, for each 16 elements of x, the lanes with other bits than the function for a single element.
TEXT = """
#include "common/blocks.cuh"
#include "common/hadamard.cuh"
using namespace narrowgauge;

template <class F> __device__ void cast(const float* x, u32* differ) {
    for (int i = 0; i < 16; i += SIMD_LANES) {
        const UintVector codes = nearest_even_vector<F>(load_vector<FloatVector>(x + i));
        u8 stored[SIMD_LANES];
        store_code_vector<F>(codes, stored);
        for (int j = 0; j < SIMD_LANES; ++j) {
            const u32 code = nearest_even<F>(x[i + j]);
            const u32 found = F::BITS == 4 ? stored[j / 2] >> j % 2 * 4 & 0xFu : stored[j];
            *differ += codes[j] != code || found != code;
        }
    }
}
template <class F> __device__ void draw(const float* x, u32* differ) {
    for (u32 byte = 0; byte < 256; ++byte) {
        for (int i = 0; i < 16; i += SIMD_LANES) {
            const UintVector bytes = (lane_indices() * 37u + byte) & 0xFFu;
            const UintVector codes = stochastic_vector<F>(load_vector<FloatVector>(x + i), bytes);
            for (int j = 0; j < SIMD_LANES; ++j) *differ += codes[j] != stochastic<F>(x[i + j], bytes[j]);
        }
    }
}
template <class T> __device__ void load(const T* x, u32* differ) {
    float v[16];
    load_elements(x, v);
    for (int i = 0; i < 16; ++i) *differ += __float_as_uint(v[i]) != __float_as_uint(to_float(x[i]));
}
template <class T> __device__ void narrow(const float* x, u32* differ) {
    float v[16];
    T stored[16], one;
    for (int i = 0; i < 16; ++i) v[i] = x[i];
    store_elements(v, stored);
    for (int i = 0; i < 16; ++i) {
        from_float(x[i], one);
        *differ += __builtin_memcmp(&stored[i], &one, sizeof(T)) != 0;
    }
}
template <class F> __device__ void decode(const u8* codes, u32* differ) {
    for (int i = 0; i < 16; i += SIMD_LANES) {
        const FloatVector found = narrow_to_float_vector<F>(load_code_vector<F>(codes + (F::BITS == 4 ? i / 2 : i)));
        for (int j = 0; j < SIMD_LANES; ++j) {
            const u32 code = F::BITS == 4 ? codes[(i + j) / 2] >> j % 2 * 4 & 0xFu : codes[i + j];
            *differ += __float_as_uint(found[j]) != __float_as_uint(narrow_to_float<F>(code));
        }
    }
}
__device__ void largest(const float* x, u32* differ) {
    float v[16];
    load_elements(x, v);
    for (int propagate_nan = 0; propagate_nan < 2; ++propagate_nan) {
        const u32 limit = amax_limit(propagate_nan);
        u32 most = 0;
        for (int i = 0; i < 16; ++i) update_amax(x[i], limit, most);
        *differ += amax_of_block(v, limit) != most;
    }
}
__device__ void rotate(const float* x, u32* differ) {
    const u32 signs = 0xD7E8u;
    float v[16], w[16];
    for (int i = 0; i < 16; ++i) {
        v[i] = round_to_bf16(x[i]);
        w[i] = v[i] * ((signs >> i & 1u) != 0u ? -0.25f : 0.25f);
    }
    rotate16(v, signs);
    for (int half = 1; half < 16; half *= 2) {
        for (int i = 0; i < 16; ++i) {
            if ((i & half) != 0) continue;
            const float a = w[i], b = w[i + half];
            w[i] = a + b;
            w[i + half] = a - b;
        }
    }
    FloatVector groups[16];
    for (int i = 0; i < 16; ++i) groups[i] = bit_cast<FloatVector>(UintVector{} + __float_as_uint(round_to_bf16(x[i])));
    rotate16_elementwise(groups, signs);
    for (int i = 0; i < 16; ++i) {
        const u32 expected = __float_as_uint(round_to_bf16(w[i]));
        *differ += __float_as_uint(v[i]) != expected || __float_as_uint(groups[i][i % SIMD_LANES]) != expected;
    }
}
"""
KERNELS = {
    **{f"cast_{name}": (f"cast<{name}>", "float") for name in FORMATS},
    **{f"draw_{name}": (f"draw<{name}>", "float") for name in FORMATS},
    "load_bf16": ("load", "bf16"),
    "load_fp16": ("load", "fp16"),
    **{f"decode_{name}": (f"decode<{name}>", "u8") for name in FORMATS},
    **{f"narrow_{name}": (f"narrow<{name}>", "float") for name in ("float", "bf16", "fp16")},
    "largest_of_16": ("largest", "float"),
    "rotate_16": ("rotate", "float"),
}
_KERNEL = """
extern "C" __global__ void {name}(const {given}* x, u32* differ, i64 n) {{
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (16 * i < n) {call}(x + 16 * i, differ + i);
}}
"""
WRAPPERS = {name: _KERNEL.format(name=name, call=call, given=given) for name, (call, given) in KERNELS.items()}
FUNCTIONS, TEXT = TEXT, TEXT + "".join(WRAPPERS.values())


def differing(source: str, kernel: str, x: np.ndarray, flags: Flags) -> int:
    """Elements of which `kernel` finds other bits."""
    x = np.resize(x, -(-x.size // 16) * 16)
    differ = np.zeros(x.size // 16, np.uint32)
    run(source, kernel, (-(-differ.size // 256), 1, 1), (256, 1, 1), x, differ, np.int64(x.size), flags=flags)
    return int(differ.sum())


def decisions() -> np.ndarray:
    """Decisions of a cast to any format, and every bfloat16, with infinities and NaN."""
    return np.concatenate([conversions.bf16_values(), conversions.fp16_decisions(), conversions.bf16_decisions()])


@pytest.mark.sampled(2)
@EVERY_WIDTH
@pytest.mark.parametrize("name", FORMATS)
def test_a_cast_is_that_of_one(cuda_source: Source, name: str, flags: Flags) -> None:
    assert differing(cuda_source(TEXT), f"cast_{name}", decisions(), flags) == 0


@pytest.mark.sampled(2)
@EVERY_WIDTH
@pytest.mark.parametrize("name", FORMATS)
def test_a_cast_by_random_bytes_is_that_of_one(cuda_source: Source, name: str, flags: Flags) -> None:
    """Every byte for every bfloat16."""
    assert differing(cuda_source(TEXT), f"draw_{name}", conversions.bf16_values(), flags) == 0


@EVERY_WIDTH
@pytest.mark.parametrize("kernel", ["load_bf16", "load_fp16"])
def test_every_half_is_loaded_as_one_is(cuda_source: Source, kernel: str, flags: Flags) -> None:
    assert differing(cuda_source(TEXT), kernel, EVERY_HALF, flags) == 0


@EVERY_WIDTH
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_decoded_as_one_is(cuda_source: Source, name: str, flags: Flags) -> None:
    """At every place of 16, as bytes, or as all pairs in a byte."""
    every = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), by) for by in range(16)])
    assert differing(cuda_source(TEXT), f"decode_{name}", every, flags) == 0


@pytest.mark.sampled(7)
@EVERY_WIDTH
@pytest.mark.parametrize("kernel", ["narrow_float", "narrow_bf16", "narrow_fp16", "largest_of_16"])
def test_16_are_what_each_is(cuda_source: Source, kernel: str, flags: Flags) -> None:
    """Sorted, and mixed: the largest number is at any place, and NaN lies beside numbers."""
    x = decisions()
    for mixed in (x, np.random.default_rng(8).permutation(x)):
        assert differing(cuda_source(TEXT), kernel, mixed, flags) == 0


def rounding_sums() -> np.ndarray:
    """Groups of 16 numbers of far exponents."""
    rng = np.random.default_rng(10)
    return np.ldexp(rng.standard_normal((20_000, 16)), rng.integers(-20, 20, (20_000, 16))).astype(np.float32)


@EVERY_WIDTH
def test_a_rotation_sums_in_the_declared_order(cuda_source: Source, flags: Flags) -> None:
    """Sums that round, zeros of either sign, infinities and NaN."""
    rng, x = np.random.default_rng(9), rounding_sums()
    x[::3] = np.where(rng.random(x[::3].shape) < 0.5, -0.0, 0.0)
    x[::50] = rng.permutation(conversions.bf16_values())[: x[::50].size].reshape(x[::50].shape)
    assert differing(cuda_source(TEXT), "rotate_16", x.ravel(), flags) == 0


def test_a_wrong_lane_is_seen(cuda_source: Source) -> None:
    """The comparison sees a NaN with a sign, and a sum in another order."""
    wrong = FUNCTIONS + WRAPPERS["cast_E4M3"] + WRAPPERS["rotate_16"]
    for right, other in (
        ("nearest_even<F>(x[i + j]);", "nearest_even<F>(x[i + j]) ^ (x[i + j] != x[i + j] ? F::SIGN : 0u);"),
        ("for (int half = 1; half < 16; half *= 2)", "for (int half = 8; half > 0; half /= 2)"),
    ):
        assert right in wrong
        wrong = wrong.replace(right, other)
    assert differing(cuda_source(wrong), "cast_E4M3", decisions(), ()) > 0
    assert differing(cuda_source(wrong), "rotate_16", rounding_sums().ravel(), ()) > 0
