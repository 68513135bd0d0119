"""A third opinion: NVIDIA's own cuda_fp4.h, cuda_fp6.h and cuda_fp8.h, compiled for the host.

`encode` promises the result of `cvt.rn.satfinite`, and these headers are NVIDIA's software for the instruction.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.exponents import exponent_codes
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from narrowgauge.spec.recipes import find_recipe
from tests.reference.mx_exponents import NAMES
from tests.reference.quantize.test_exponents import amaxes
from tests.reference.samples import every_input

# Reads float32 numbers or codes from stdin and writes the results of the header that the first argument names.
PROGRAM = r"""
#include <cstdint>
#include <cstdio>
#include <cstring>
#include "cuda_fp4.h"
#include "cuda_fp6.h"
#include "cuda_fp8.h"

static uint8_t encode(const char* name, float x) {
    if (!strcmp(name, "E2M1")) return __nv_cvt_float_to_fp4(x, __NV_E2M1, cudaRoundNearest);
    if (!strcmp(name, "E2M3")) return __nv_cvt_float_to_fp6(x, __NV_E2M3, cudaRoundNearest);
    if (!strcmp(name, "E3M2")) return __nv_cvt_float_to_fp6(x, __NV_E3M2, cudaRoundNearest);
    if (!strcmp(name, "E4M3")) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    if (!strcmp(name, "E5M2")) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
    if (!strcmp(name, "E8M0-up")) return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf);
    if (!strcmp(name, "E8M0-down")) return __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero);
    if (!strcmp(name, "E4M3-nosat")) return __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3);
    return __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2);
}

static float decode(const char* name, uint8_t code) {
    if (!strcmp(name, "E8M0")) {
        uint32_t bits = uint32_t(__nv_cvt_e8m0_to_bf16raw(code).x) << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    __half_raw half;
    if (!strcmp(name, "E2M1")) half = __nv_cvt_fp4_to_halfraw(code, __NV_E2M1);
    if (!strcmp(name, "E2M3")) half = __nv_cvt_fp6_to_halfraw(code, __NV_E2M3);
    if (!strcmp(name, "E3M2")) half = __nv_cvt_fp6_to_halfraw(code, __NV_E3M2);
    if (!strcmp(name, "E4M3")) half = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
    if (!strcmp(name, "E5M2")) half = __nv_cvt_fp8_to_halfraw(code, __NV_E5M2);
    return __half2float(__half(half));
}

int main(int, char** argv) {
    if (!strcmp(argv[1], "decode")) {
        for (int code; (code = getchar()) != EOF;) {
            float value = decode(argv[2], uint8_t(code));
            fwrite(&value, 4, 1, stdout);
        }
    } else {
        for (float x; fread(&x, 4, 1, stdin) == 1;) putchar(encode(argv[2], x));
    }
}
"""


PACKAGES = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
CUDA_13 = [PACKAGES / "cu13/include", PACKAGES / "cu13/include/cccl"]
INCLUDE = {"cuda-12": [PACKAGES / "cuda_runtime/include", *CUDA_13], "cuda-13": CUDA_13}
"""Include folders of the wheels of the extra `test`. The headers of CUDA 12 and 13 convert with different code. `crt/`
and `nv/` are of CUDA 13 for both: here they have nothing but macros of the compiler, and the choice of host code."""


@pytest.fixture(scope="module", params=INCLUDE)
def headers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program, or a skip with the missing file as reason."""
    include = INCLUDE[request.param]
    # torch with CUDA brings cuda_fp4.h without the files that the header includes.
    for name, folders in (("cuda_fp4.h", include[:1]), ("crt/host_defines.h", include), ("nv/target", include)):
        if not any((folder / name).is_file() for folder in folders):
            pytest.skip(f"no {name} for {request.param}: pip install 'narrowgauge[test]'")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler: set CXX, or put g++, c++ or clang++ on PATH")
    folder = tmp_path_factory.mktemp("headers")
    source = folder / "cast.cpp"
    source.write_text(PROGRAM)
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        *(f"-I{folder}" for folder in include),
        str(source),
        "-o",
        str(folder / "cast"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{' '.join(command)}\n{built.stderr}"
    return folder / "cast"


def ask(program: Path, verb: str, name: str, data: np.ndarray, dtype: type) -> np.ndarray:
    done = subprocess.run([program, verb, name], input=data.tobytes(), capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype)


def formats(*some: Format) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", some, ids=lambda fmt: fmt.name)


@pytest.mark.sampled(2)
@formats(E2M1, E2M3, E3M2, E4M3, E5M2)
def test_encode_is_nvidias_cast_with_satfinite(headers: Path, fmt: Format) -> None:
    x = every_input(fmt)  # NaN of every payload and infinities among them
    theirs = ask(headers, "encode", fmt.name, x, np.uint8)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), fmt).numpy(), theirs)


@formats(E4M3, E5M2)
def test_encode_is_nvidias_cast_without_saturation(headers: Path, fmt: Format) -> None:
    x = every_input(fmt)
    theirs = ask(headers, "encode", f"{fmt.name}-nosat", x, np.uint8)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), fmt, saturate=False).numpy(), theirs)


@pytest.mark.parametrize(("dialect", "rounding"), [("te", "up"), ("floor-448", "down")])
@formats(E2M1, E2M3, E3M2, E4M3, E5M2)
def test_exponents_of_scales_are_nvidias_cast_to_e8m0(headers: Path, fmt: Format, dialect: str, rounding: str) -> None:
    """`cvt.rp.satfinite.ue8m0` and `cvt.rz` of amax/max, every 16-bit number and threshold, infinity, NaN and 0."""
    x = np.concatenate([every_input(fmt), amaxes()])
    amax = torch.from_numpy(x[~np.signbit(x)])
    quotient = amax * (1.0 / fmt.max) if dialect == "te" else amax / torch.full_like(amax, fmt.max)
    theirs = ask(headers, "encode", f"E8M0-{rounding}", quotient.numpy(), np.uint8)
    found = exponent_codes(amax, find_recipe(f"{NAMES[fmt]}@{dialect}")).numpy()
    np.testing.assert_array_equal(found, theirs)
    assert {0, 254, 255} <= set(found.tolist())


@formats(E2M1, E2M3, E3M2, E4M3, E5M2, E8M0)
def test_every_code_means_what_nvidias_headers_say(headers: Path, fmt: Format) -> None:
    codes = np.arange(fmt.codes, dtype=np.uint8)
    theirs = ask(headers, "decode", fmt.name, codes, np.float32)
    ours = np.array(fmt.values)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[~np.isnan(ours)]), np.signbit(theirs[~np.isnan(ours)]))
