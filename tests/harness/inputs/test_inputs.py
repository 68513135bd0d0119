"""Every input family has the property stated in `harness/cases/families.py`, measured through the reference."""

import hashlib
import math

import pytest
import torch

from narrowgauge.harness.cases.axes import size_of
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import FAMILIES, RANK_FAMILIES
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_labels
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import GENERATORS, generate
from narrowgauge.harness.inputs.inputs import earlier_scale, laid_out
from narrowgauge.harness.operations.contracts.inputs import OWN as CODES_AND_SCALES
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.harness.operations.permute.case import PermuteCase
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.swizzle.operation import SCALE_BYTES
from narrowgauge.harness.operations.transformer_layer.case import PEAKS
from narrowgauge.harness.operations.update_scale.histories import HISTORIES
from narrowgauge.reference.bounds.bounds import Bounds, bounds
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.reference.numbers.blocks import block_amax, pad_columns
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.ops import quantize
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.reference.quantize.layout import unpack
from narrowgauge.reference.quantize.scaling import element_factors
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Hadamard, find_recipe
from tests.matrix import quick_cases

DTYPES = list(TORCH_DTYPES)
NVFP4 = find_recipe("nvfp4")
AWKWARD = [(1, 1), (1, 16), (3, 17), (16, 130), (129, 272)]


def quantize_case(family: str, shape: tuple[int, int] = (256, 272), dtype: str = "fp32", *flags: str) -> Case:
    return case_from_labels("quantize", "nvfp4", shape, dtype, family, flags)


def gemm_case(family: str, shape: tuple[int, int, int], dtypes: str = "bf16xbf16-fp32", *flags: str) -> Case:
    return case_from_labels("gemm", "nvfp4", shape, dtypes, family, ("tn", *flags))


def quantized(family: str, shape: tuple[int, int] = (256, 272), dtype: str = "fp32") -> tuple[torch.Tensor, Quantized]:
    x = make_inputs(quantize_case(family, shape, dtype)).x
    return x, quantize(x, "nvfp4")


def multiplied(family: str, depth: int, dtype: str = "bf16") -> tuple[Bounds, torch.Tensor, torch.Tensor]:
    """Bounds, the exact sums S and the sums of magnitudes A of a (96, depth, 80) gemm."""
    given = make_inputs(gemm_case(family, (96, depth, 80), f"{dtype}x{dtype}-fp32"))
    a, b = quantize(given.x, "nvfp4"), quantize(given["w"], "nvfp4")
    left, right = operand(a), operand(b)
    return bounds(a, b, out_dtype=torch.float32), left @ right.T, left.abs() @ right.abs().T


def share(mask: torch.Tensor) -> float:
    return mask.double().mean().item()


def codes(q: Quantized) -> torch.Tensor:
    return unpack(q.codes, q.shape[1])


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


ATTENTION = {family.name for family in PEAKS}


# The door: determinism, orientation, addends.


def test_every_family_has_a_generator():
    assert set(GENERATORS) == {*FAMILIES, *ATTENTION, "codes"}
    own = {family for cls in OPERATIONS.values() for family in cls.families()} - FAMILIES.keys()
    layouts = {"bytes", "position-high", "powers", "mantissas"}
    others = {family.name for family in (*RANK_FAMILIES, *PermuteCase.own_families)} - FAMILIES.keys()
    assert own - RULES.keys() == {*ATTENTION, "codes", *layouts, *HISTORIES, *CODES_AND_SCALES, *others}
    assert set(SCALE_BYTES) == set(OPERATIONS["swizzle"].families())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", GENERATORS)
def test_any_shape_and_dtype(family, dtype):
    for rows, columns in [*AWKWARD, (0, 16), (16, 0)]:
        if family in OPERATIONS["quantize"].families():
            x = make_inputs(quantize_case(family, (rows, columns), dtype)).x
        else:
            x = make_inputs(gemm_case(family, (rows, columns, 1), f"{dtype}x{dtype}-fp32")).x
        assert x.shape == (rows, columns)
        assert x.dtype == TORCH_DTYPES[dtype]
        assert x.is_contiguous()
        if family not in ("nan", "inf", "codes"):  # of special-addends, c and bias are not finite
            assert bool(torch.isfinite(x.float()).all())


def test_the_axes_of_a_case_are_those_of_its_tensors():
    """Cropping and saved failures go by the names of the axes."""
    smallest: dict[tuple[object, ...], Case] = {}
    for case in quick_cases():
        if case.axes and case.work:
            recipes = {(recipe.granularity, recipe.columnwise, recipe.tensor_scale) for recipe in case.recipes}
            key = case.operation, frozenset(recipes), case.flags
            smallest[key] = min(smallest.get(key, case), case, key=lambda case: case.work)
    for case in smallest.values():
        for name, tensor in make_inputs(case).tensors.items():
            sizes = [size_of(axis, case.sizes) for axis in case.tensors[name]]
            assert list(tensor.shape[tensor.dim() - len(sizes) + 1 :]) == sizes[1:], (case.id, name)
            assert tensor.numel() == math.prod(sizes), (case.id, name)


def test_bytes_are_the_same_on_every_machine():
    known = {
        "normal": "6a2bb94e875971b4",
        "e2m1-ties": "c083d0f124a11b5a",
        "e4m3-ties": "0e14ce96cab703df",
        "subnormal": "055533e9284f3d81",
        "position": "57cbb72346189b12",
    }
    assert {family: digest(make_inputs(quantize_case(family)).x) for family in known} == known


def test_case_id_seed_and_role_decide_the_bytes():
    case = gemm_case("normal", (32, 32, 32), "bf16xbf16-bf16", "accumulate")
    again, first = make_inputs(case), make_inputs(case)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first["c"], again["c"])
    assert not torch.equal(first.x, first["w"])
    assert not torch.equal(first.x, make_inputs(case, seed=1).x)
    assert not torch.equal(first.x, make_inputs(gemm_case("normal", (32, 32, 32))).x)


def test_every_family_of_random_numbers_depends_on_its_key():
    same = set()
    for family in GENERATORS:
        first, *others = (generate(family, Draw(key), (32, 128), torch.bfloat16, "x", NVFP4) for key in "abcd")
        if all(torch.equal(first.view(torch.int16), other.view(torch.int16)) for other in others):
            same.add(family)
    assert same == {"zeros", "negative-zeros", "half-edges"}


@pytest.mark.parametrize(
    ("view", "stride", "offset"),
    [
        ("contiguous", (5, 1), 0), ("pitched", (13, 1), 0), ("strided", (18, 2), 0), ("transposed", (1, 3), 0),
        ("offset-2", (5, 1), 1), ("offset-8", (5, 1), 4),
    ],
)  # fmt: skip
def test_a_view_has_its_strides_and_the_same_numbers(view, stride, offset):
    x = torch.arange(15.0).bfloat16().view(3, 5)
    found = laid_out(x, view)
    assert (found.stride(), found.storage_offset()) == (stride, offset)
    assert torch.equal(found, x)


def test_columnwise_is_the_transpose_with_blocks_along_its_rows():
    x = make_inputs(quantize_case("tiles", (256, 128), "bf16", "columnwise")).x
    assert x.shape == (128, 256)
    assert torch.equal(torch.frexp(block_amax(x, 16)).mantissa.unique(), torch.tensor([0.5]))


def test_gemm_operands_are_logical_in_every_layout():
    for layout in ("tn", "nn", "nt"):
        given = make_inputs(case_from_labels("gemm", "nvfp4", (48, 64, 32), "fp32xbf16-fp16", "normal", (layout,)))
        assert given.x.shape == (48, 64)
        assert given["w"].shape == (32, 64)
        assert (given.x.dtype, given["w"].dtype) == (torch.float32, torch.bfloat16)
        assert (given.get("c"), given.get("bias")) == (None, None)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("family", OPERATIONS["gemm"].families())
def test_addends_are_of_the_output(family, out):
    given = make_inputs(gemm_case(family, (48, 64, 32), f"bf16xbf16-{out}", "accumulate", "bias"))
    assert given["c"].shape == (48, 32)
    assert given["bias"].shape == (32,)
    for addend in (given["c"], given["bias"]):
        assert addend.dtype == TORCH_DTYPES[out]
        special = addend[~torch.isfinite(addend)].tolist()
        assert len(special) == 3 * (family == "special-addends")
        assert (math.inf in special, -math.inf in special) == (bool(special), bool(special))
        assert bool((addend != 0).any())


# Families of quantize.


def scaled(x: torch.Tensor, q: Quantized) -> torch.Tensor:
    """The numbers that the reference rounds to E2M1: fl(x·e)."""
    factors = element_factors(q.scales, q.tensor_scale, q.recipe).unsqueeze(2)
    blocks = pad_columns(x.float(), 16).view(x.shape[0], -1, 16)
    return (blocks * factors).view(x.shape[0], -1)[:, : x.shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 17), (128, 128), (256, 272)])
def test_e2m1_ties_are_exact_ties_after_scaling(shape, dtype):
    x, q = quantized("e2m1-ties", shape, dtype)
    value = scaled(x, q).abs()
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert share(torch.isin(value, midpoints)) > 0.3
    # Half away from zero takes the upper neighbour of these, half to even the lower one.
    assert share(torch.isin(value, torch.tensor([0.25, 1.25, 2.5, 5.0]))) > 0.15
    # The rest lie beside a midpoint, by a step of the dtype, or are their block's amax.
    beside = (value.unsqueeze(2) / midpoints - 1).abs().amin(2)
    near = beside <= 2 * torch.finfo(x.dtype).eps
    assert bool((near | (value == 6)).all())
    assert share(near & (beside > 0)) > 0.15
    for sign in (1, -1):
        assert bool((x.sign() == sign).any())
    if x.numel() > 1000:
        assert len(q.scales.unique()) == 16
        assert len(codes(q).unique()) == 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128, 128), (256, 272), (304, 304)])
def test_e4m3_ties_tell_the_order_of_operations(shape, dtype):
    x, q = quantized("e4m3-ties", shape, dtype)
    other = quantize(x, "nvfp4@te-2.8")
    assert share(q.scales != other.scales) > 0.2
    assert q.amax.item() / 2.0 ** torch.frexp(q.amax).exponent.item() == 65 / 128
    assert len(q.scales.unique()) > 64


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-row-e4m3", "fp8-block-128x128-e4m3-pow2"])
def test_zero_rows_have_blocks_of_zeros_beside_others(recipe):
    x = make_inputs(case_from_labels("quantize", recipe, (300, 640), "bf16", "zero-rows")).x
    zero = block_amaxes(x, find_recipe(recipe)) == 0
    assert 0.1 < float(zero.float().mean()) < 0.9
    assert bool((x == 0).all(1).any()), "a row of zeros"


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rows_have_subnormal_scales_and_scales_of_zero(dtype):
    _, q = quantized("low-rows", dtype=dtype)
    assert share(q.scales == 0) > 0.05
    assert share((q.scales > 0) & (q.scales < 8)) > 0.1
    assert len(q.scales.unique()) > 110
    first_three = quantize(make_inputs(quantize_case("low-rows", (3, 64), dtype)).x, "nvfp4").scales
    assert bool((first_three[2] == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_first_single_and_a_whole_block(dtype):
    x, q = quantized("nan", dtype=dtype)
    bad = x.isnan()
    assert bool(bad[0, 0])
    blocks = bad.view(256, -1, 16)
    assert bool(blocks.all(2).any())
    assert bool((blocks.sum(2) == 1).any())
    assert share(bad) < 0.01
    signs = torch.signbit(x[bad].float())
    assert bool(signs.any())
    assert not bool(signs.all())
    assert bool((codes(q)[bad] == E2M1.max_code).all())
    assert q.amax.item() < 10


@pytest.mark.parametrize("role", ["x", "w"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_position_is_told_by_codes_and_scale(dtype, role):
    given = make_inputs(gemm_case("position", (256, 256, 256), f"{dtype}x{dtype}-fp32"))
    q = quantize(given[role], "nvfp4")
    every = codes(q).view(256, 16, 16)
    assert bool((every.sort(dim=2).values == torch.arange(16)).all())  # in a block no code comes twice
    word = (every.long() << (4 * torch.arange(16))).sum(2)  # the block's 64 bits
    for rows in (slice(0, 128), slice(128, 256)):
        for blocks in (slice(0, 8), slice(8, 16)):
            pairs = torch.stack([word[rows, blocks].flatten(), q.scales[rows, blocks].long().flatten()], 1)
            assert len(pairs.unique(dim=0)) == 1024
    for distance in range(1, 113):
        assert bool((q.scales[distance:] != q.scales[:-distance]).all())
    for distance in range(1, 9):
        assert bool((q.scales[:, distance:] != q.scales[:, :-distance]).all())
    assert q.tensor_scale.frexp().mantissa.item() == 0.5


@pytest.mark.parametrize("group", [16, 32, 128])
def test_spread_makes_the_order_of_a_rotation_s_sum_show(group):
    x = make_inputs(case_from_labels("transform", "nvfp4-rht", (256, 256), "bf16", "spread")).x
    products = x.float().view(-1, group) * signs(Hadamard(group)) * coefficient(group)
    rows = products.unbind(1)
    forward, backward = torch.zeros(len(products)), torch.zeros(len(products))
    for one, other in zip(rows, reversed(rows), strict=True):  # the first row of Sylvester's matrix adds all elements
        forward, backward = forward + one, backward + other
    assert share(forward != backward) > 0.3
    if group == 16:  # the cancelling elements are the largest of a block
        assert share(forward.bfloat16() != backward.bfloat16()) > 1e-3
    exponents = torch.frexp(x.float()).exponent.view(-1, 16)
    assert (exponents.amax(1) - exponents.amin(1)).float().median() > 40


# Families of swizzle.


def test_places_are_told_by_bytes():
    scales = make_inputs(case_from_labels("swizzle", "", (512, 32), "", "position")).x
    tiles = scales.view(4, 128, 8, 4).transpose(1, 2)
    for tile in tiles.reshape(-1, 128, 4):
        assert len(tile.unique()) == 256
        assert len(tile.contiguous().view(torch.int32).unique()) == 128  # every row is told by its four bytes
        assert all(len(column.unique()) == 128 for column in tile.T)
        assert all(len(row.unique()) == 4 for row in tile)
    for down, across in ((1, 0), (0, 1), (1, 1)):  # no place has the byte of a neighbouring tile
        assert bool((tiles[down:, across:] != tiles[: 4 - down, : 8 - across]).all())
    assert bool((tiles[1:, :-1] != tiles[:-1, 1:]).all())


# Families of gemm.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [17, 512, 3072])
def test_lattice_is_exact_at_any_depth(depth, dtype):
    limits, _, _ = multiplied("lattice", depth, dtype)
    assert bool(limits.exact.all())
    given = make_inputs(gemm_case("lattice", (96, depth, 80), f"{dtype}x{dtype}-fp32"))
    q = quantize(given.x, "nvfp4")
    assert bool((q.scales == E4M3.max_code).all())
    scale = given.x.float().abs().max() / 6
    assert bool((decode(codes(q), E2M1) * scale == given.x.float()).all())  # quantizing lost no bit
    assert scale.frexp().mantissa.item() == 0.5


def test_no_given_scale_is_the_own_one() -> None:
    """A kernel that ignores a given scale then has different bytes."""
    recipe = find_recipe("fp8-delayed-e4m3")
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    own = torch.tensor(448.0) / x.abs().amax()
    scales = {float(earlier_scale(Draw(str(number)), x, recipe)) for number in range(64)}
    assert len(scales) == 4
    assert float(own) not in scales
