"""Every kernel compiles for every architecture with NVRTC, on a machine without a GPU, to the instructions it needs."""

from __future__ import annotations

import re

import pytest
import torch

from narrowgauge.native.quantize import nvfp4
from narrowgauge.native.quantize.variants import unit_flags, variant_flags
from narrowgauge.native.runtime import cuda
from narrowgauge.native.runtime.sources import KERNELS
from narrowgauge.spec.recipes import find_recipe
from tests.native import conversions, nvrtc
from tests.native.launching import Source
from tests.native.quantize import test_stochastic

MISSING, MISSING_12 = nvrtc.missing(13), nvrtc.missing(12)
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

ARCHITECTURES = list(cuda.COMPILED_FOR)
"""Without sm_90: a test shows that its PTX equals sm_90a except tensor cores."""
ELEMENTS = ("E2M1", "E2M3", "E3M2", "E4M3", "E5M2")
SOURCES = [(source, ()) for source in KERNELS if source not in ("quantize_mx", "dequantize")]
SOURCES += [("gemm_wgmma_fp8", ("-DA_ELEMENT=E5M2", "-DB_ELEMENT=E4M3", "-DSLICES=2", "-DTILES_OF_B=1"))]
SOURCES += [(f"gemm_fused_{family}", ("-DSLICES=2",)) for family in ("nvfp4", "mx")]
SOURCES += [
    ("gemm_skinny_weight_only", ("-DWEIGHT=Weight::NVFP4", *macros))
    for macros in (("-DSTRIPS=2",), ("-DTEAM_WARPS=8", "-DROWS_OF_A=64"))
]
SOURCES += [(source, (f"-DELEMENT={e}",)) for source in ("quantize_mx", "dequantize") for e in ELEMENTS]
NEAREST, STOCHASTIC = (
    variant_flags(
        nvfp4._VARIANT,
        nvfp4.variant(find_recipe(name), rotation="NO_ROTATION", layout="linear", random_given=False),
        torch.device("cuda"),
    )
    for name in ("nvfp4", "nvfp4-sr")
)
"""Flags of two variants of quantize_nvfp4, which NVRTC compiles separately: nearest even, and stochastic rounding."""
SOURCES += [("quantize_nvfp4", NEAREST), ("quantize_nvfp4", STOCHASTIC)]


def instructions(text: str) -> set[str]:
    """Every PTX instruction with its modifiers."""
    return set(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.\w+)+)\s", text, re.MULTILINE))


def entries(text: str) -> set[str]:
    return set(re.findall(r"^\.visible \.entry (\w+)\(", text, re.MULTILINE))


# All elements of MX on sm_90a, with twins for most instructions, and on sm_100a, with all instructions; else E4M3.
# Assembly takes most of the time, and there the chips hardly differ: Hopper and a Blackwell chip are assembled.
ASSEMBLED = ("sm_90a", "sm_100a")
# `make test` assembles nothing. The test makes the PTX of every source for Hopper once, except of products with
# quantized outputs, whose parts are compiled too. For Blackwell, with different instructions for conversions, the test
# makes the PTX of the sources with most conversions.
STAY = [
    ("compute_90a", source, flags)
    for source, flags in SOURCES
    if flags in ((), ("-DELEMENT=E4M3",)) and not source.startswith("gemm_quantized")
]
STAY += [("compute_100a", "quantize_nvfp4", NEAREST), ("compute_100a", "quantize_mx", ("-DELEMENT=E4M3",))]
LONG = [
    (architecture, source, flags)
    for architecture in ARCHITECTURES
    for source, flags in SOURCES
    if architecture in ASSEMBLED or flags in ((), ("-DELEMENT=E4M3",))
]
COMPILED = [
    pytest.param(*one, id="-".join((*one[:2], *(f.split("=")[1] for f in one[2]))), marks=marks)
    for several, marks in ((STAY, ()), (LONG, pytest.mark.long))
    for one in several
]


HOPPERS = {
    "attention_prefill", "gemm_wgmma", "gemm_wgmma_grouped", "gemm_wgmma_fp8", "gemm_wgmma_int8", "gemm_fused_nvfp4",
    "gemm_fused_mx",
}  # fmt: skip
"""Sources with instructions of sm_90a alone."""
FUSED = {"gemm_fp8", "gemm_quantized_fp8", "gemm_skinny_fp8", "gemm_skinny_mx", "gemm_wgmma_fp8"}
"""Sources with documented fma: docs/numerics.md#fp8-with-float32-scales, y = fma(partial·s_x, s_w, y); and for an
exact product, gemm_skinny_e4m3.cuh, `moderate_base`."""
FUSED |= {"attention", "attention_prefill", "attention_tensor"}
FUSED |= {"activation_quantize", "gemm_weight_only", "kv_write", "norm_quantize"}
FUSED |= {"produced_mx", "produced_nvfp4", "produced_rows", "rope_quantize"}
"""Each step of a contract may round or not (docs/contracts.md)."""
APPROXIMATE = {
    "attention": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},  # rcp.approx is part of tanhf
    "attention_prefill": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "attention_tensor": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "activation_quantize": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "norm_quantize": {"rsqrt.approx.f32"},
    "produced_mx": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "produced_nvfp4": {"ex2.approx.ftz.f32", "rcp.approx.ftz.f32"},
    "produced_rows": {"ex2.approx.ftz.f32", "rsqrt.approx.f32"},
}
"""Functions with documented errors: functions.cuh."""
NEAREST_SUMS, SUMS = {"fma.rn.f32"}, {"fma.rn.f32", "fma.rz.f32"}
"""packed_bf16.cuh, rotate16_unrounded: sums of exact products, which round once, and nudge_ties, whose comment gives
its roundings; formats.cuh, e2m1_by_addition: a number plus a power of two, whose single rounding counts steps, and
truncates after a stochastic rounding."""


@pytest.mark.sampled(66)
@pytest.mark.parametrize(("architecture", "source", "flags"), COMPILED)
def test_no_kernel_flushes_fuses_or_approximates(architecture: str, source: str, flags: tuple[str, ...]) -> None:
    """Kernels of MX convert elements and scales by instructions of the chip, if the chip has them."""
    chip = architecture.partition("_")[2]
    sliced = "-DSLICES=2" in flags
    kernels = {kernel for kernel in KERNELS[source] if not (sliced and ("grouped" in kernel or "batch" in kernel))}
    if architecture in ASSEMBLED:
        cubin, text = nvrtc.cubin_and_ptx(source, architecture, *flags)
        assert cubin.startswith(b"\x7fELF")
        for kernel in kernels:
            assert f"\0.text.{kernel}\0".encode() in cubin
    else:
        text = nvrtc.ptx(source, f"compute_{chip}", *flags)
    assert entries(text) == kernels
    if architecture == "sm_90a":
        plain = nvrtc.ptx(source, "compute_90", *flags)
        if source in HOPPERS:
            assert entries(plain) == entries(text)
            assert not {i for i in instructions(plain) if i.startswith("wgmma")}
        else:
            assert plain == text.replace(".target sm_90a", ".target sm_90")
    assert ("wgmma.mma_async" in text) == (source in HOPPERS and chip == "90a")
    assert ("mbarrier.try_wait" in text) == (source in HOPPERS and chip == "90a")

    found = instructions(text)
    assert {i.split(".")[0] for i in found} >= {"ld", "st", "mov", "setp"}, "instructions are recognized"
    floats = {i for i in found if re.search(r"\.f32|\.f64|\.f16", i)}
    assert {i for i in floats if re.search(r"\.(ftz|approx|full)", i)} == APPROXIMATE.get(source, set())
    fused = {i for i in floats if i.startswith(("fma.", "mad."))}
    narrow = chip in ("100a", "120a")
    by_sums = set()
    if source in ("quantize_nvfp4", "produced_nvfp4") and not narrow:
        by_sums = NEAREST_SUMS if flags == NEAREST else SUMS
    by_sums = by_sums | ({"fma.rm.f32"} if source.startswith("produced") else set())  # expf
    rotates = source == "amax_blocks" or (source == "quantize_nvfp4" and not flags)
    assert fused == by_sums | ({"fma.rn.f32"} if source in FUSED or rotates else set())
    assert not {i for i in floats if ".f64" in i}, "a double constant has crept in"

    packs = source.startswith(("quantize_nvfp4", "produced_nvfp4", "gemm_quantized", "kv_write")) or (
        flags == ("-DELEMENT=E2M1",) and source == "quantize_mx"
    )
    assert (CVT["e2m1"] in text) == (packs and narrow)
    assert RANDOM not in text
    if source == "quantize_mx":
        element = flags[0].partition("=")[2].lower()
        has = narrow or (element in FP8 and chip != "80")
        assert {name for name, cvt in CVT.items() if cvt in found} == ({element} if has else set())
        assert (POWER in found) == narrow


@pytest.mark.skipif(MISSING_12 is not None, reason=str(MISSING_12))
@pytest.mark.parametrize(
    "source",
    [pytest.param(one, marks=() if one == "quantize_nvfp4" else pytest.mark.long) for one in KERNELS],
)
def test_kernels_compile_with_cuda_12(source: str) -> None:
    """Assembled for Hopper. A launch compiles the variants of quantize_nvfp4 separately."""
    flags = STOCHASTIC if source == "quantize_nvfp4" else ("-DELEMENT=E4M3",) if source == "quantize_mx" else ()
    assert nvrtc.cubin(12, source, "sm_90a", *flags).startswith(b"\x7fELF")


def test_the_flag_for_nvrtc_12_6_is_given_to_no_other() -> None:
    assert cuda.flags_of("quantize_nvfp4", (12, 6)) == ("-DNARROWGAUGE_PORTABLE",)
    assert cuda.flags_of("quantize_nvfp4", (12, 8)) == cuda.flags_of("quantize_mx", (12, 6)) == ()


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("quantize_nvfp4", NEAREST),
        ("quantize_mx", ("-DELEMENT=E4M3",)),
        ("quantize_fp8", ("-DVARIANT={WHOLE, 0, 0, 0}",)),
    ],
)
def test_a_launch_compiles_the_kernels_of_its_unit(source: str, flags: tuple[str, ...]) -> None:
    kernels = KERNELS[source]
    units = {kernel: unit_flags(kernel, torch.device("cuda")) for kernel in kernels}
    assert len(set(units.values())) == 4
    for unit in set(units.values()):
        compiled = entries(nvrtc.ptx(source, "compute_90a", *flags, *unit))
        assert compiled == {kernel for kernel in kernels if units[kernel] == unit}


def test_what_those_flags_keep_out_would_be_seen() -> None:
    fast = instructions(nvrtc.ptx("gemm_nvfp4", "compute_90", "--ftz=true", "--prec-div=false", "--fmad=true"))
    assert any(".ftz" in i for i in fast)
    assert any(".approx" in i or ".full" in i for i in fast)
    assert any(i.startswith("fma.rn.") and i.endswith(".f32") for i in fast)


CVT = {name: f"cvt.rn.satfinite.{name}x2.f32" for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")}
POWER = "cvt.rp.satfinite.ue8m0x2.f32"
FP8 = {"e4m3", "e5m2"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("target", "flags", "used"),
    [
        ("compute_80", (), set()),
        ("compute_89", (), FP8),
        ("compute_90", (), FP8),
        ("compute_90a", (), FP8),
        ("compute_100", (), FP8),
        ("compute_100a", (), {*CVT, "e8m0"}),
        ("compute_120a", (), {*CVT, "e8m0"}),
        ("compute_90", ("-DNARROWGAUGE_PORTABLE",), set()),
        ("compute_100a", ("-DNARROWGAUGE_PORTABLE",), set()),
    ],
)
def test_conversions_of_the_chip_are_used_where_it_has_them(
    cuda_source: Source, target: str, flags: tuple[str, ...], used: set[str]
) -> None:
    found = instructions(nvrtc.ptx(cuda_source(conversions.TEXT), target, *flags))
    assert {name for name, cvt in {**CVT, "e8m0": POWER}.items() if cvt in found} == used


RANDOM = "cvt.rs.satfinite.e2m1x4.f32"
ASKED = ("-DNARROWGAUGE_CVT_RS",)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("target", "flags", "random"),
    [("compute_103a", ASKED, True), ("compute_100a", ASKED, True), ("compute_103a", (), False)],
)
def test_random_conversion_is_used_only_where_it_is_asked_for(
    target: str, flags: tuple[str, ...], random: bool
) -> None:
    """Its bits differ from its twin. The test above covers compute_100a without the flag."""
    found = instructions(nvrtc.ptx("quantize_nvfp4", target, *STOCHASTIC, *flags))
    assert (RANDOM in found) == random
    assert CVT["e4m3"] in found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", ["compute_80", "compute_90a", "compute_100", "compute_120a"])
def test_a_chip_without_the_random_conversion_keeps_its_twin(cuda_source: Source, target: str) -> None:
    assert RANDOM not in instructions(nvrtc.ptx(cuda_source(test_stochastic.TEXT), target, *ASKED))


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("80", "sm_80"), ("89", "sm_89"), ("90", "sm_90a"), ("100", "sm_100a"), ("103", "sm_103a"), ("120", "sm_120a")],
)
def test_a_device_gets_its_own_instructions_from_hopper_on(capability: str, expected: str) -> None:
    assert cuda.architecture(capability) == expected
