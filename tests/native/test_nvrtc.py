"""Every kernel compiles for every architecture with NVRTC, on a machine without a GPU, to the instructions it needs."""

from __future__ import annotations

import re

import pytest

from native import cuda
from native.sources import KERNELS
from tests.native import conversions, nvrtc, test_stochastic
from tests.native.launching import Source

MISSING = nvrtc.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ARCHITECTURES = ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_120a"]
EVERY_SOURCE = pytest.mark.parametrize("source", KERNELS)


def ptx(source: str, target: str, *flags: str) -> str:
    return nvrtc.compiled(source, target, *flags).decode()


def instructions(text: str) -> set[str]:
    """Every PTX instruction with its modifiers."""
    return set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s", text, re.MULTILINE))


def entries(text: str) -> set[str]:
    return set(re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE))


@EVERY_SOURCE
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_in_the_cubin(source: str, architecture: str) -> None:
    cubin = nvrtc.compiled(source, architecture)
    assert cubin.startswith(b"\x7fELF")
    for kernel in KERNELS[source]:
        assert f"\0.text.{kernel}\0".encode() in cubin


@EVERY_SOURCE
@pytest.mark.parametrize("target", ["compute_90", "compute_100a"])
def test_bit_exact_kernels_flush_nothing_fuse_nothing_and_approximate_nothing(source: str, target: str) -> None:
    text = ptx(source, target)
    assert RANDOM not in text
    assert (E2M1 in text) == (source == "quantize_nvfp4" and target == "compute_100a")
    assert entries(text) == set(KERNELS[source])
    found = instructions(text)
    assert {i.split(".")[0] for i in found} >= {"ld", "st", "mov", "setp"}, "instructions are recognized"
    floats = {i for i in found if re.search(r"\.f32|\.f64|\.f16", i)}
    assert not {i for i in floats if ".ftz" in i}
    assert not {i for i in floats if i.startswith(("fma.", "mad."))}
    assert not {i for i in floats if ".approx" in i or ".full" in i}
    assert not {i for i in floats if ".f64" in i}, "a double constant has crept in"


def test_what_those_flags_keep_out_would_be_seen() -> None:
    fast = instructions(ptx("gemm_nvfp4", "compute_90", "--ftz=true", "--prec-div=false", "--fmad=true"))
    assert any(".ftz" in i for i in fast)
    assert any(".approx" in i or ".full" in i for i in fast)
    assert any(i.startswith("fma.rn.") and i.endswith(".f32") for i in fast)


E4M3, E2M1 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e2m1x2.f32"


@pytest.mark.parametrize(
    ("target", "flags", "e4m3", "e2m1"),
    [
        ("compute_80", (), False, False),
        ("compute_89", (), True, False),
        ("compute_90", (), True, False),
        ("compute_90a", (), True, False),
        ("compute_100", (), True, False),
        ("compute_100a", (), True, True),
        ("compute_120a", (), True, True),
        ("compute_90", ("-DNARROWGAUGE_PORTABLE",), False, False),
        ("compute_100a", ("-DNARROWGAUGE_PORTABLE",), False, False),
    ],
)
def test_the_chips_conversions_are_used_where_it_has_them_unless_portable_ones_are_asked_for(
    cuda_source: Source, target: str, flags: tuple[str, ...], e4m3: bool, e2m1: bool
) -> None:
    found = instructions(ptx(cuda_source(conversions.TEXT), target, *flags))
    assert (E4M3 in found) == e4m3
    assert (E2M1 in found) == e2m1


RANDOM = "cvt.rs.satfinite.e2m1x4.f32"
ASKED = ("-DNARROWGAUGE_CVT_RS",)


@pytest.mark.parametrize(
    ("target", "flags", "random"),
    [("compute_100a", ASKED, True), ("compute_103a", ASKED, True), ("compute_103a", (), False)],
)
def test_quantize_rounds_by_the_chips_random_conversion_only_where_it_is_asked_to(
    target: str, flags: tuple[str, ...], random: bool
) -> None:
    """It has other bits than its twin. That compute_100a does not have it unasked is seen above."""
    found = instructions(ptx("quantize_nvfp4", target, *flags))
    assert (RANDOM in found) == random
    assert E4M3 in found


@pytest.mark.parametrize("target", ["compute_80", "compute_90a", "compute_100", "compute_120a"])
def test_a_chip_without_the_random_conversion_keeps_its_twin(cuda_source: Source, target: str) -> None:
    assert RANDOM not in instructions(ptx(cuda_source(test_stochastic.TEXT), target, *ASKED))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("80", "sm_80"), ("89", "sm_89"), ("90", "sm_90a"), ("100", "sm_100a"), ("103", "sm_103a"), ("120", "sm_120a")],
)
def test_a_device_gets_its_own_instructions_from_hopper_on(capability: str, expected: str) -> None:
    assert cuda.architecture(capability) == expected
