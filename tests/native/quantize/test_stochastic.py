"""The device functions of stochastic rounding: Philox by published vectors, narrow formats by every byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge.native.quantize.nvfp4 import philox_keys
from narrowgauge.native.runtime.launch import launch
from narrowgauge.native.runtime.structs import KernelStruct
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.philox import philox
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from tests.native import conversions
from tests.native.devices import EVERY_BUILD, ON_EVERY_DEVICE, ops
from tests.native.launching import Source

Flags = tuple[str, ...]
KEYS = KernelStruct("common/philox.cuh", "PhiloxKeys")

TEXT = """
#include "common/philox.cuh"
using namespace narrowgauge;

extern "C" __global__ void words(const u64* given, u32* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 four[4];
    philox(given[3 * i], given[3 * i + 1], given[3 * i + 2], four);
    for (int j = 0; j < 4; ++j) out[4 * i + j] = four[j];
}

extern "C" __global__ void words_with_offset(PhiloxKeys keys, const u32* given, u32* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 four[4];
    philox_with_offset(keys, given[i], four);
    for (int j = 0; j < 4; ++j) out[4 * i + j] = four[j];
}

template <class Format>
__device__ void every_byte(const float* x, u8* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    for (u32 byte = 0; byte < 256; ++byte) out[256 * i + byte] = static_cast<u8>(stochastic<Format>(x[i], byte));
}
extern "C" __global__ void every_byte_E2M1(const float* x, u8* out, i64 n) { every_byte<E2M1>(x, out, n); }
extern "C" __global__ void every_byte_E2M3(const float* x, u8* out, i64 n) { every_byte<E2M3>(x, out, n); }
extern "C" __global__ void every_byte_E3M2(const float* x, u8* out, i64 n) { every_byte<E3M2>(x, out, n); }
extern "C" __global__ void every_byte_E4M3(const float* x, u8* out, i64 n) { every_byte<E4M3>(x, out, n); }
extern "C" __global__ void every_byte_E5M2(const float* x, u8* out, i64 n) { every_byte<E5M2>(x, out, n); }

extern "C" __global__ void blocks(const float* x, const u32* given, u8* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float values[16];
    u32 four[4];
    u8 packed[8];
    for (int j = 0; j < 16; ++j) values[j] = x[16 * i + j];
    for (int j = 0; j < 4; ++j) four[j] = given[4 * i + j];
    e2m1x16_stochastic(values, four, packed);
    for (int j = 0; j < 8; ++j) out[8 * i + j] = packed[j];
}
"""


def run(
    source: str, kernel: str, arguments: list[np.ndarray], out: np.ndarray, count: int, flags: Flags = ()
) -> np.ndarray:
    """Result in `out` of a kernel with `count` threads."""
    result = torch.from_numpy(out).to(ops.device)
    given = [torch.from_numpy(array).to(ops.device) for array in arguments]
    grid = (-(-count // 256),)
    launch(source, kernel, grid, (256,), (*given, result, np.int64(count)), device=result.device, extra_flags=flags)
    return result.cpu().numpy()


# Philox.


def words(source: str, given: np.ndarray, flags: Flags) -> np.ndarray:
    """The four words of every (seed, offset, subsequence), (n, 3)."""
    return run(source, "words", [given], np.zeros((len(given), 4), np.uint32), len(given), flags)


@pytest.mark.sampled(2)
@EVERY_BUILD
def test_philox_gives_the_published_words(cuda_source: Source, flags: Flags) -> None:
    """The known answers of Random123 1.14 for philox4x32 of 10 rounds: counter, key, words."""
    ones, zeros = (1 << 64) - 1, 0
    given = [
        (zeros, zeros, zeros),
        (ones, ones, ones),
        (0x299F31D0A4093822, 0x85A308D3243F6A88, 0x0370734413198A2E),
    ]
    assert words(cuda_source(TEXT), np.array(given, np.uint64), flags).tolist() == [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]


@pytest.mark.sampled(2)
@EVERY_BUILD
def test_philox_is_the_references(cuda_source: Source, flags: Flags) -> None:
    """Every single bit of seed, offset and subsequence, and many bits at once."""
    single = [[1 << bit if place == at else 0 for at in range(3)] for place in range(3) for bit in range(64)]
    many = np.random.default_rng(5).integers(0, 1 << 64, (300, 3), dtype=np.uint64).tolist()
    given = np.array(single + many, np.uint64)
    got = words(cuda_source(TEXT), given, flags)
    assert len({tuple(row) for row in got.tolist()}) == len(given)
    for (seed, offset, subsequence), row in zip(given.tolist(), got, strict=True):
        signed = torch.tensor([subsequence - (1 << 64) if subsequence >> 63 else subsequence])
        np.testing.assert_array_equal(row, philox(seed, offset, signed)[0])


@EVERY_BUILD
def test_philox_with_the_offset_in_its_keys_is_the_references(cuda_source: Source, flags: Flags) -> None:
    """Every single bit of seed and offset, and many bits at once; subsequences below 2^32."""
    source = cuda_source(TEXT)
    single = [(1 << bit, 0) for bit in range(64)] + [(0, 1 << bit) for bit in range(64)]
    generator = np.random.default_rng(7)
    many = generator.integers(0, 1 << 64, (20, 2), dtype=np.uint64).tolist()
    given = np.array([0, *(1 << bit for bit in range(32)), *generator.integers(0, 1 << 32, 20)], np.uint32)
    for seed, offset in [*single, *many]:
        out = torch.zeros((len(given), 4), dtype=torch.int32, device=ops.device)
        keys = KEYS(words=philox_keys(seed, offset))
        arguments = (keys, torch.from_numpy(given.view(np.int32)).to(out.device), out, np.int64(len(given)))
        launch(source, "words_with_offset", (1,), (256,), arguments, device=out.device, extra_flags=flags)
        expected = philox(seed, offset, torch.from_numpy(given.astype(np.int64)))
        np.testing.assert_array_equal(out.cpu().numpy().view(np.uint32), expected)


# A number by a random byte.


def reference_codes(x: np.ndarray, fmt: Format = E2M1) -> torch.Tensor:
    """Codes of every number in `x` for every byte, (n, 256)."""
    every = torch.arange(256, dtype=torch.uint8).expand(len(x), 256)
    return encode(stochastic(torch.from_numpy(x).unsqueeze(1).expand(-1, 256), fmt, every), fmt)


def codes(source: str, x: np.ndarray, flags: Flags = (), fmt: Format = E2M1) -> torch.Tensor:
    """Codes of every number in `x` for every byte, (n, 256)."""
    out = np.zeros((len(x), 256), np.uint8)
    given = [np.ascontiguousarray(x)]
    return torch.from_numpy(run(source, f"every_byte_{fmt.name}", given, out, len(x), flags))


def decisions() -> np.ndarray:
    """Numbers at which |x| + byte/256·step meets the grid, ± 1 ulp, for every byte, and the ends of float32."""
    points = np.array([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    bytes_ = np.arange(256) / 256
    meets = [points - bytes_[:, None] * step for step in (0.5, 1.0, 2.0)]
    exact = np.concatenate([m[m >= 0].ravel() for m in meets])
    ends = np.array([0.0, 2.0**-149, 2.0**-126, 8.0, 2.0**24, np.finfo(np.float32).max], np.float32)
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, -0.0], np.float32)
    return np.unique(np.concatenate([conversions.around(exact), ends, -ends, special]).view(np.uint32)).view(np.float32)


@EVERY_BUILD
def test_every_bfloat16_under_every_byte(cuda_source: Source, flags: Flags) -> None:
    """Numbers below 8, infinities, NaN of every payload, and some larger numbers; every 16th unoptimized."""
    x = conversions.bf16_values()
    x = x[(np.abs(x) < 8) | ~np.isfinite(x) | (np.arange(x.size) % 97 == 0)]
    for part in np.array_split(x[:: 16 if "-O0" in flags else 1], 8):
        assert torch.equal(codes(cuda_source(TEXT), part, flags), reference_codes(part))


@ON_EVERY_DEVICE
def test_every_decision_under_every_byte_is_the_references(cuda_source: Source) -> None:
    x = decisions()
    got = codes(cuda_source(TEXT), x)
    assert torch.equal(got, reference_codes(x))
    assert set(got.unique().tolist()) == set(range(16))


def crossings(fmt: Format) -> np.ndarray:
    """Numbers that a byte lifts over the next grid point, or just not: 16 bytes for each step of the grid."""
    points = np.array(fmt.values[: fmt.max_code + 1])
    low, step = points[:-1, None], np.diff(points)[:, None]
    exact = low + step * (np.arange(0, 256, 16) + np.arange(len(low))[:, None] % 16) / 256
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, -0.0, 2 * fmt.max, -2 * fmt.max], np.float32)
    return np.concatenate([conversions.around(np.append(exact.ravel(), points)), special])


@pytest.mark.sampled(4)
@EVERY_BUILD
@pytest.mark.parametrize("fmt", [E2M1, E2M3, E3M2, E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_narrow_format_is_rounded_by_a_byte(cuda_source: Source, fmt: Format, flags: Flags) -> None:
    values = conversions.bf16_values()[:: 31 if "-O0" in flags else 5]
    for x in (values, crossings(fmt)[:: 16 if "-O0" in flags else 1]):
        got = codes(cuda_source(TEXT), x, flags, fmt=fmt)
        assert torch.equal(got, reference_codes(x, fmt))
    nan = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    assert (codes(cuda_source(TEXT), np.array([np.nan, -np.nan], np.float32), flags, fmt=fmt) == nan).all()


@EVERY_BUILD
def test_a_block_takes_the_lowest_byte_of_its_words_first(cuda_source: Source, flags: Flags) -> None:
    rng = np.random.default_rng(9)
    x = rng.uniform(-7, 7, (500, 16)).astype(np.float32)
    given = rng.integers(0, 1 << 32, (500, 4), dtype=np.uint32)
    out = run(cuda_source(TEXT), "blocks", [x, given], np.zeros((500, 8), np.uint8), 500, flags)
    bytes_ = torch.from_numpy(given.astype("<u4").view(np.uint8))
    expected = encode(stochastic(torch.from_numpy(x), E2M1, bytes_), E2M1).numpy()
    np.testing.assert_array_equal(out, expected[:, ::2] | expected[:, 1::2] << 4)
