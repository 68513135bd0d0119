"""Input families of MX and FP8, and histories: each has the property stated in `harness/cases/families.py`."""

import hashlib
import math

import pytest
import torch

from narrowgauge.harness.cases.operations import OPERATIONS, case_from_labels
from narrowgauge.harness.inputs.generators import GENERATORS, midpoints
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.update_scale.histories import HISTORIES
from narrowgauge.reference.ops import dequantize, quantize
from narrowgauge.reference.quantize.layout import elements, rowwise_codes
from narrowgauge.reference.quantize.scaling import element_factors, encode_scales, per_row, scale_elements
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2
from narrowgauge.spec.recipes import find_recipe

DTYPES = list(TORCH_DTYPES)
MX = ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4", "mxfp8-2d")
FP8 = ("fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2-pow2", "fp8-current-e4m3", "fp8-delayed-e5m2")


def case_of(recipe, family, shape=(256, 288), dtype="fp32", *flags, operation="quantize"):
    return case_from_labels(operation, recipe, shape, dtype, family, flags)


def quantized(recipe, family, shape=(256, 288), dtype="fp32"):
    given = make_inputs(case_of(recipe, family, shape, dtype))
    return given.x, quantize(given.x, recipe, scale=given.get("scale.x"))


def scaled(x, q):
    """The numbers that the reference rounds to codes."""
    factors = element_factors(q.scales, q.tensor_scale, q.recipe, x.dtype, block_amaxes(x, q.recipe))
    return scale_elements(x, per_row(factors, q.recipe, len(x)), q.tensor_scale, q.recipe)


def share(mask):
    return mask.double().mean().item()


def exponent_of(x):
    """Of the leading bit."""
    return torch.frexp(x.double()).exponent - 1


KNOWN = {
    ("quantize", "nvfp4-2d", (33, 77), "bf16", "tiles", ("both",)): "80394d212ebaa40b",
    ("quantize", "nvfp4-sr", (128, 128), "fp32", "position", ("strided",)): "02c04a1a65cac4fb",
    ("quantize", "nvfp4-4over6-448-mae", (65, 96), "fp16", "single", ("columnwise",)): "54ee426e0dd34f4e",
    ("quantize", "nvfp4-rowscaled", (300, 40), "bf16", "exponents", ()): "096b0514c5790c4d",
    ("quantize-grouped", "nvfp4", (333, 144), "bf16", "inf", ("ragged:3", "columnwise")): "8d4282772a360072",
    ("transform", "nvfp4-rht", (32, 48), "bf16", "spread", ()): "782b0f4284043a79",
    ("gemm", "nvfp4+nvfp4-2d", (48, 80, 33), "bf16xfp32-fp16", "cancelling", ("tn", "bias")): "1104281acdff0aab",
    ("gemm", "nvfp4", (48, 80, 33), "fp16xfp16-fp32", "lattice", ("nt",)): "3565618f5c0ecf36",
    ("gemm-grouped", "nvfp4", (333, 80, 33), "bf16xbf16-fp32", "nan", ("ragged:7",)): "1b666c1e478c40c0",
    ("swizzle", "", (130, 5), "", "position", ()): "e7c98c54a8c874a3",
}


def digest(tensors):
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


@pytest.mark.parametrize("case", KNOWN)
def test_families_of_nvfp4_keep_their_bytes(case):
    """What reports and baselines of earlier runs say of an id stays true."""
    operation, recipe, shape, dtype, inputs, flags = case
    assert (
        digest(make_inputs(case_from_labels(operation, recipe, shape, dtype, inputs, flags)).tensors.values())
        == KNOWN[case]
    )


# NVFP4 keeps its bytes.


# Every family.


@pytest.mark.parametrize("element", [E2M1, E2M3, E3M2, E4M3, E5M2])
def test_midpoints_are_all_of_them(element):
    values = sorted({v for v in element.values if math.isfinite(v) and v >= 0})
    found = midpoints(element)
    assert len(found) == len(values) - 1
    assert all(low < middle < high and middle - low == high - middle
               for low, middle, high in zip(values, found, values[1:], strict=False))  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*MX, *FP8])
def test_ties_are_exact_ties_after_scaling(name, dtype):
    x, q = quantized(name, "ties", dtype=dtype)
    value = scaled(x, q).abs()
    if "delayed" in name:  # times a power of two, which the given scale is of max/amax
        value *= 2.0 ** (exponent_of(torch.tensor(q.recipe.element.max)) - exponent_of(value.max())).item()
    middle = torch.tensor(midpoints(q.recipe.element))
    exact = torch.isin(value, middle)
    assert 0.45 < share(exact) < 0.55
    assert len(value[exact].unique()) == len(middle)  # also subnormal midpoints
    beside = torch.isin(value, torch.cat([middle, torch.tensor([q.recipe.element.max])]))
    place = torch.searchsorted(middle, value.contiguous()).clamp(max=len(middle) - 1)
    near = torch.minimum((value / middle[place] - 1).abs(), (value / middle[(place - 1).clamp(min=0)] - 1).abs())
    if dtype != "fp16":  # an ulp of its subnormal numbers is anything up to all of them
        assert bool((beside | (near <= 2 * torch.finfo(x.dtype).eps)).all())
    scales = q.scales.unique()
    assert len(scales) == 1 if q.recipe.whole else len(scales) > 1
    if not q.recipe.whole and dtype != "fp16":
        assert len(scales) > 2 if q.recipe.block[0] == 128 else len(scales) == 16


@pytest.mark.parametrize("name", ["fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2-fp32", "fp8-current-e4m3"])
def test_near_ties_let_the_last_bit_of_the_scale_decide(name):
    x, q = quantized(name, "near-ties")
    value = scaled(x, q).abs()
    middle = torch.tensor(midpoints(q.recipe.element))
    assert 0.2 < share(torch.isin(value, middle)) < 0.5
    own = encode_scales(block_amaxes(x, q.recipe), q.recipe, x.dtype)
    assert share(torch.frexp(own).mantissa == 0.5) < 0.1
    for ulp in (-1, 1):
        moved = (own.view(torch.int32) + ulp).view(torch.float32)
        other = scale_elements(x, per_row(moved, q.recipe, len(x)), moved.view(-1)[:1], q.recipe).abs()
        if q.recipe.whole:
            other = x.abs() * moved
        crossed = torch.bucketize(value, middle) != torch.bucketize(other, middle)
        assert share(crossed) > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("one", ["te", "ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest"])
def test_scale_edges_tell_every_two_rules_apart(one, dtype):
    x = make_inputs(case_of("mxfp8-e4m3", "scale-edges", (128, 128), dtype)).x
    mine = quantize(x, f"mxfp8-e4m3@{one}").scales
    for other in {"te", "ocp", "even", "ceil", "compressed-tensors", "floor-448", "nearest"} - {one}:
        assert share(mine != quantize(x, f"mxfp8-e4m3@{other}").scales) > 0.03, other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX)
def test_scale_edges_are_on_and_beside_every_edge(name, dtype):
    recipe = find_recipe(name)
    x = make_inputs(case_of(name, "scale-edges", (512, 1024) if recipe.block[0] == 1 else (1536, 1536), dtype)).x
    amax = block_amaxes(x, recipe)[:: recipe.block[0]].to(x.dtype)
    mantissa = torch.frexp(amax.float()).mantissa * 2
    element = recipe.element
    edges = (1.0, math.frexp(element.max)[0] * 2, 1.75, 2 - 2.0 ** -(element.mantissa_bits + 1))
    eps = torch.finfo(x.dtype).eps
    for edge in edges:
        above = edge + eps
        below = edge - eps if edge > 1 else 2 - eps
        for wanted in (edge, above, below):
            assert share((mantissa == wanted) & (amax > 0)) > 0.01, (edge, wanted)
    exponents = exponent_of(amax)
    limits = torch.finfo(x.dtype)
    low, high = exponent_of(torch.tensor(limits.smallest_normal)).item(), exponent_of(torch.tensor(limits.max)).item()
    assert set(range(low, high + 1)) <= set(exponents.unique().tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp8-2d", "fp8-block-1x128-e4m3-fp32"])
def test_every_exponent_is_the_amax_of_a_block(name, dtype):
    recipe = find_recipe(name)
    height, width = recipe.block
    x = make_inputs(case_of(name, "every-exponent", (24 * height, 12 * width), dtype)).x
    amax = block_amaxes(x, recipe)[:: 1 if recipe.stored_rows > 1 else height]
    limits = torch.finfo(x.dtype)
    low = exponent_of(torch.tensor(limits.smallest_normal * limits.eps, dtype=torch.float64)).item()
    high = exponent_of(torch.tensor(limits.max)).item()
    assert exponent_of(amax).unique().tolist() == list(range(low, high + 1))
    if dtype != "fp16":
        assert len(torch.frexp(amax).mantissa.unique()) > 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*MX, *FP8[:3]])
def test_position_is_told_by_codes_and_scale(name, dtype):
    x, q = quantized(name, "position", (256, 256), dtype)
    assert torch.equal(dequantize(q), x.float())  # quantizing lost no bit
    codes = elements(rowwise_codes(q), 256, q.recipe)
    for distance in (1, 2, 4, 8, 16, 32, 64):  # neighbours, lanes and rows are never the same throughout
        if distance % q.recipe.element.codes:
            assert share(codes[distance:] != codes[:-distance]) > 0.9
            assert share(codes[:, distance:] != codes[:, :-distance]) > 0.9
    if not q.recipe.whole and q.recipe.block[0] == 1:
        for distance in range(1, 8):
            assert bool((q.scales[distance:] != q.scales[:-distance]).all())
            if distance < q.scales.shape[1]:
                assert bool((q.scales[:, distance:] != q.scales[:, :-distance]).all())
    elif not q.recipe.whole:
        tiles = q.scales if q.recipe.stored_rows > 1 else q.scales[:: q.recipe.block[0]]
        assert bool((tiles[1:] != tiles[:-1]).all())
        assert bool((tiles[:, 1:] != tiles[:, :-1]).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mxfp8-e4m3", "mxfp8-2d", "fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2-pow2"])
def test_nan_fills_a_block_and_infinity_leaves_blocks_finite(name, dtype):
    recipe = find_recipe(name)
    height, width = recipe.block
    shape = (4 * height if height > 1 else 256, 4 * width)

    def blocks(mask):
        return mask.view(shape[0] // height, height, 4, width).transpose(1, 2).flatten(2)

    bad = blocks(make_inputs(case_of(name, "nan", shape, dtype)).x.isnan())
    assert bool(bad.all(2).any())
    assert bool(bad.any(2).sum() > 1)
    infinite = blocks(make_inputs(case_of(name, "inf", shape, dtype)).x.isinf()).any(2)
    assert 0 < share(infinite) < 0.75


# Given scales.


def test_a_given_scale_is_another_power_of_two_times_that_of_x():
    factors = set()
    for rows in range(1, 33):
        given = make_inputs(case_of("fp8-delayed-e4m3", "normal", (rows, 64)))
        own = encode_scales(given.x.abs().amax().view(1), find_recipe("fp8-current-e4m3"), torch.float32)
        factors.add(float(given["scale.x"] / own))
    assert factors == {2.0, 0.5, 0.25, 0.0625}


def test_every_operand_and_section_has_its_scale():
    sections = make_inputs(
        case_of("fp8-delayed-e4m3", "outliers", (64, 96), "bf16", "front:4", operation="quantize-grouped")
    )
    assert sections["scale.x"].shape == (4,)
    assert len(sections["scale.x"].unique()) == 4
    gemm = case_from_labels(
        "gemm", "fp8-delayed-e4m3+fp8-delayed-e5m2", (48, 64, 32), "bf16xbf16-bf16", "normal", ("tn",)
    )
    given = make_inputs(gemm)
    assert {name: tuple(scale.shape) for name, scale in given.under("scale.").items()} == {"x": (1,), "w": (1,)}
    others = make_inputs(case_from_labels("gemm", "nvfp4", (16, 16, 16), "bf16xbf16-bf16", "normal", ("tn",)))
    assert others.under("scale.") == {}
    assert "scale.w" in given.tensors  # part of the digest of the inputs


# Histories.


def history_of(family, shape=(16, 64)):
    given = make_inputs(case_from_labels("update-scale", "fp8-delayed-e4m3", shape, "", family))
    return given.x, given["scale.x"]


def test_every_history_has_a_family():
    assert list(HISTORIES) == list(OPERATIONS["update-scale"].families())
    assert not set(HISTORIES) & set(GENERATORS)


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_tiny_amaxes_are_on_both_sides_of_the_overflow(largest):
    history, _ = history_of("amaxes-tiny")
    assert bool((history > 0).all())
    infinite = (torch.full_like(history, largest) / history).isinf()
    assert 0.1 < share(infinite) < 0.9
    assert bool((history < torch.finfo(torch.float32).tiny).any())


@pytest.mark.parametrize(("family", "test"), [("amaxes-inf", torch.isinf), ("amaxes-nan", torch.isnan)])
def test_bad_amaxes_are_first_later_everywhere_or_nowhere(family, test):
    bad = test(history_of(family)[0])
    first, others = bad[0], bad[1:].sum(0)
    assert share(first & (others == 0)) == 0.25
    assert share(~first & (others == 1)) == 0.25
    assert share(bad.all(0)) == 0.25
    assert share(~bad.any(0)) == 0.25
