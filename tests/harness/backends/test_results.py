"""Invalid results of methods have a message, and valid results are used without a change."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import BackendError, Unsupported
from narrowgauge.harness.backends.results import as_quantized, as_sections
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.quantize.call import quantize, quantize_halves
from narrowgauge.harness.operations.quantize_grouped.judge import quantize_grouped
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.judging import judge
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Half, joined_sections
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

NVFP4 = find_recipe("nvfp4")
X = torch.linspace(-3, 3, 32 * 48).view(32, 48).bfloat16()


# Results of quantize.


def parts(**changes):
    q = replace(reference.quantize(X, NVFP4), **changes)
    return {"codes": q.codes, "scales": q.scales, "amax": q.amax, "tensor_scale": q.tensor_scale}


GIVEN = {
    "Quantized": lambda p: reference.quantize(X, NVFP4),
    "an object": lambda p: SimpleNamespace(**p),
    "a dictionary": lambda p: p,
    "a tuple": lambda p: (p["codes"], p["scales"], p["amax"]),
    "a list": lambda p: [p["codes"], p["scales"], p["amax"]],
    "a tuple without amax": lambda p: (p["codes"], p["scales"]),
    "a tuple with no amax": lambda p: (p["codes"], p["scales"], None),
    "torch's narrow dtypes": lambda p: (p["codes"].view(torch.float4_e2m1fn_x2), p["scales"].view(torch.float8_e4m3fn)),
    "signed bytes": lambda p: (p["codes"].view(torch.int8), p["scales"].view(torch.int8)),
    "tensors with strides": lambda p: (p["codes"].T.contiguous().T, p["scales"].T.contiguous().T),
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_a_result_may_be(give):
    expected = parts()
    q = as_quantized(give(parts()), X, NVFP4, method="quantize")
    assert (q.recipe, q.shape) == (NVFP4, (32, 48))
    for name in ("codes", "scales"):
        assert getattr(q, name).dtype == torch.uint8
        assert torch.equal(getattr(q, name), expected[name])
    assert q.amax is None or torch.equal(q.amax, expected["amax"])
    assert q.tensor_scale is None or torch.equal(q.tensor_scale, expected["tensor_scale"])


WRONG = {
    "None": (lambda p: None, ["NoneType", "codes, scales and amax"]),
    "a tensor": (lambda p: p["codes"], ["Tensor", "codes, scales and amax"]),
    "numpy": (lambda p: (p["codes"].numpy(), p["scales"]), ["codes as ndarray"]),
    "scales left out": (lambda p: (p["codes"],), ["scales as NoneType"]),
    "a wrong key": (lambda p: {"codes": p["codes"], "scale": p["scales"]}, ["scales as NoneType"]),
    "amax as a number": (lambda p: (p["codes"], p["scales"], 3.0), ["amax as float"]),
    "too many": (lambda p: (p["codes"], p["scales"], p["amax"], p["tensor_scale"]), ["4 things"]),
    "codes not packed": (
        lambda p: (torch.zeros(32, 48, dtype=torch.uint8), p["scales"]),
        ["codes as uint8 of shape (32, 48)", "nvfp4 of (32, 48) has uint8 of shape (32, 24)"],
    ),
    "wide codes": (lambda p: (p["codes"].int(), p["scales"]), ["codes as int32", "has uint8 of shape (32, 24)"]),
    "decoded scales": (lambda p: (p["codes"], p["scales"].float()), ["scales as float32", "uint8 of shape (32, 3)"]),
    "swizzled scales": (
        lambda p: (p["codes"], torch.zeros(128, 4, dtype=torch.uint8)), ["shape (128, 4)", "uint8 of shape (32, 3)"],
    ),
    "amax of no dimension": (lambda p: (p["codes"], p["scales"], p["amax"][0]), ["amax", "shape ()", "shape (1,)"]),
    "amax of another dtype": (lambda p: (p["codes"], p["scales"], p["amax"].bfloat16()), ["amax as bfloat16"]),
    "another device": (lambda p: (p["codes"], p["scales"].to("meta")), ["scales on meta", "cpu"]),
}  # fmt: skip


@pytest.mark.parametrize(("give", "words"), WRONG.values(), ids=WRONG)
def test_a_result_may_not_be(give, words):
    with pytest.raises(BackendError) as raised:
        as_quantized(give(parts()), X, NVFP4, method="quantize")
    assert [word for word in words if word not in str(raised.value)] == []


# Results of quantize_grouped.

SIZES = [16, 0, 16]


def sections(**changes):
    q = reference.quantize_grouped(X, torch.tensor(SIZES), NVFP4)
    return {name: changes.get(name, getattr(q, name)) for name in ("codes", "scales", "amax", "tensor_scale")}


@pytest.mark.parametrize("columnwise", [False, True])
def test_sections_are_split_and_joined(columnwise):
    q = reference.quantize_grouped(X, torch.tensor(SIZES), NVFP4, columnwise=columnwise)
    result = as_sections(q, X, SIZES, NVFP4, Half.of(columnwise=columnwise))
    assert [s.shape for s in result] == [(48, n) if columnwise else (n, 48) for n in SIZES]
    for one, other in zip(result, q.sections(), strict=True):
        for name in ("codes", "scales", "amax", "tensor_scale"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    joined = joined_sections(result, Half.of(columnwise=columnwise))
    assert all(torch.equal(joined[name], getattr(q, name)) for name in joined)


NARROW = {
    "mxfp8-e4m3": ("float8_e4m3fn", "float8_e8m0fnu"), "mxfp8-e5m2": ("float8_e5m2", "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn"), "mxfp4": ("float4_e2m1fn_x2", "float8_e8m0fnu"),
    "mxfp6-e2m3": ("", "float8_e8m0fnu"), "fp8-current-e5m2": ("float8_e5m2", ""),
}  # fmt: skip
FLOAT8 = [*sorted(name for name in vars(torch) if name.startswith(("float8_", "float4_"))), "bool"]


@pytest.mark.parametrize("name", NARROW)
def test_codes_and_scales_have_no_dtype_of_another_format(name):
    recipe = find_recipe(name)
    q = reference.quantize(X, recipe)
    for part, own in zip(("codes", "scales"), NARROW[name], strict=True):
        if getattr(q, part).dtype != torch.uint8:
            continue
        for dtype in FLOAT8:
            changed = replace(q, **{part: getattr(q, part).view(getattr(torch, dtype))})
            if dtype == own:
                assert torch.equal(getattr(as_quantized(changed, X, recipe, method="quantize"), part), getattr(q, part))
                continue
            with pytest.raises(BackendError) as raised:
                as_quantized(changed, X, recipe, method="quantize")
            fmt = recipe.element.name if part == "codes" else recipe.scale.name
            known = ", ".join(filter(None, ("uint8", "int8", own)))
            assert str(raised.value) == f"quantize gave {part} as {dtype}; {name} has {part} of {fmt}: return {known}"


WRONG_SECTIONS = {
    "None": (lambda p: None, ["quantize_grouped gave NoneType"]),
    "too few sections": (lambda p: [reference.quantize(X, NVFP4)], ["1 sections", "sizes has 3"]),
    "too many sections": (lambda p: [reference.quantize(X, NVFP4)] * 4, ["4 sections", "sizes has 3"]),
    "another shape": (lambda p: [reference.quantize(X, NVFP4)] * 3, ["section 0", "shape (32, 24)", "shape (16, 24)"]),
    "one amax for all": (lambda p: p | {"amax": p["amax"][:1]}, ["amax", "[16, 0, 16]", "float32 of shape (3,)"]),
    "codes of fewer rows": (lambda p: p | {"codes": p["codes"][:16]}, ["shape (16, 24)", "shape (32, 24)"]),
    "no scales": (lambda p: {"codes": p["codes"]}, ["scales as NoneType"]),
}


@pytest.mark.parametrize(("give", "words"), WRONG_SECTIONS.values(), ids=WRONG_SECTIONS)
def test_sections_may_not_be(give, words):
    with pytest.raises(BackendError) as raised:
        as_sections(give(sections()), X, SIZES, NVFP4)
    assert [word for word in words if word not in str(raised.value)] == []


# Recipes other than NVFP4: float32 scales, halves stored in the layout of x, a given scale.

OTHERS = [
    "mxfp8-e4m3", "mxfp8-2d", "mxfp6-e2m3", "mxfp4", "fp8-block-1x128-e4m3-pow2", "fp8-block-128x128-e4m3-fp32",
    "fp8-current-e5m2", "fp8-delayed-e4m3",
]  # fmt: skip
TALL = torch.linspace(-3, 3, 200 * 150).view(200, 150).bfloat16()


def scale_of(recipe, parts=1):
    return {"scale": torch.arange(1.0, parts + 1)} if recipe.tensor_scale == "given" else {}


@pytest.mark.parametrize("name", OTHERS)
def test_what_every_recipe_gives_is_taken_as_it_is(name):
    recipe = find_recipe(name)
    loaded = backend(
        quantize=reference.quantize, quantize_both=reference.quantize_both, quantize_grouped=reference.quantize_grouped
    )
    q = quantize(loaded, TALL, recipe, **scale_of(recipe))
    row, column = quantize_halves(loaded, tuple(Half), TALL, recipe, **scale_of(recipe))
    expected = reference.quantize_both(TALL, recipe, **scale_of(recipe))
    for one, other in ((q, expected[0]), (row, expected[0]), (column, expected[1])):
        assert torch.equal(one.codes, other.codes)
        assert torch.equal(one.scales, other.scales)
        assert (one.shape, one.transposed) == (other.shape, other.transposed)
    assert column.transposed == (recipe.columnwise == "in-place")
    sizes = torch.tensor([130, 0, 70])
    for half in Half:
        options = scale_of(recipe, 3)
        parts = quantize_grouped(loaded, TALL, sizes, recipe, half, **options)
        whole = reference.quantize_grouped(TALL, sizes, recipe, columnwise=half is Half.COLUMN, **options)
        for one, other in zip(parts, whole.sections(), strict=True):
            assert torch.equal(one.codes, other.codes)
            assert torch.equal(one.scales, other.scales)
            assert (one.shape, one.transposed) == (other.shape, other.transposed)
        if recipe.stored_rows > 1 and not recipe.whole:  # a kernel that does not read the sizes leaves room at the end
            room = replace(whole, scales=torch.cat([whole.scales, whole.scales]))
            again = as_sections(room, TALL, sizes.tolist(), recipe, half)
            assert all(torch.equal(a.scales, b.scales) for a, b in zip(again, parts, strict=True))
        joined = joined_sections(parts, half)
        assert torch.equal(joined["codes"], whole.codes)
        assert torch.equal(joined["scales"], whole.scales)


FP8_TILES = "fp8-block-128x128-e4m3-fp32"
OF_RECIPES = [
    (FP8_TILES, {"scales": torch.zeros(2, 2, dtype=torch.uint8)}, "uint8 of shape (2, 2)", "float32 of shape (2, 2)"),
    (FP8_TILES, {"scales": torch.zeros(200, 2)}, "float32 of shape (200, 2)", "float32 of shape (2, 2)"),
    ("fp8-current-e5m2", {"scales": torch.zeros(1)}, "float32 of shape (1,)", "float32 of shape (1, 1)"),
    ("mxfp8-e4m3", {"codes": torch.zeros(150, 200, dtype=torch.uint8)}, "shape (150, 200)", "shape (200, 150)"),
]


@pytest.mark.parametrize(("name", "change", "given", "expected"), OF_RECIPES)
def test_scales_and_codes_of_another_shape_or_dtype(name, change, given, expected):
    recipe = find_recipe(name)
    loaded = backend(quantize=lambda x, recipe: replace(reference.quantize(x, recipe), **change))
    with pytest.raises(BackendError) as raised:
        quantize(loaded, TALL, recipe)
    assert f"as {given}; {name}" in str(raised.value) or given in str(raised.value)
    assert str(raised.value).endswith(expected)


def test_a_scale_is_given_where_there_is_one_and_nowhere_else():
    given = []

    def door(x, *rest, **options):
        given.append(sorted(options))
        raise NotImplementedError

    loaded = backend(quantize=door, quantize_both=door, quantize_grouped=door)
    sizes = torch.tensor([200])
    for options in ({}, {"scale": torch.ones(1)}):
        for call in (
            lambda o=options: quantize(loaded, TALL, NVFP4, **o),
            lambda o=options: quantize_halves(loaded, tuple(Half), TALL, NVFP4, **o),
            lambda o=options: quantize_grouped(loaded, TALL, sizes, NVFP4, **o),
        ):
            with pytest.raises(Unsupported):
                call()
    for out_recipe in ("nvfp4", "fp8-delayed-e4m3"):
        flags = ("tn", out_recipe)
        case = case_from_labels("gemm-quantized", "mxfp8-e4m3", (8, 64, 16), "bf16xbf16-fp32", "normal", flags)
        assert run_case(case, backend(gemm_quantized=door)).verdict == "unsupported"
    assert given == [[], [], [], ["scale"], ["scale"], ["scale"], ["out_dtype"], ["out_dtype", "scale"]]


HISTORY, SCALE = torch.ones(4, 2), torch.ones(2)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (HISTORY, "update_scale gave Tensor; it gives history and scale"),
        ((HISTORY,), "update_scale gave tuple; it gives history and scale"),
        ((HISTORY, None), "update_scale gave scale as NoneType, not a tensor"),
        ((HISTORY[1:], SCALE), "update_scale gave history as float32 of shape (3, 2), not float32 of shape (4, 2)"),
        ((HISTORY, SCALE.double()), "update_scale gave scale as float64 of shape (2,), not float32 of shape (2,)"),
        ((HISTORY, SCALE.to("meta")), "update_scale gave scale on meta; its input is on cpu"),
    ],
)
def test_an_update_may_not_be(give, message):
    case = case_from_labels("update-scale", "fp8-delayed-e4m3", (4, 2), "", "amaxes")
    with pytest.raises(BackendError) as raised:
        judge(case, make_inputs(case), backend(update_scale=lambda *_: give))
    assert str(raised.value) == message


def test_padded_sections_have_the_rows_of_their_recipe():
    case = case_from_labels(
        "gemm-grouped", "mxfp8-e4m3", (200, 150, 8), "bf16xbf16-fp32", "normal", ("rows:130,0,70", "padded")
    )
    given = []

    def judged(case, change):
        """Judge a pad_sections with a change of the reference's result."""

        def pad_sections(x, sizes, recipe):
            given.append(change(*reference.pad_sections(x, sizes, "mxfp8-e4m3"), sizes))
            return given[-1]

        doors = {name: getattr(reference, name) for name in ("unpad_sections", "gemm_grouped")}
        return judge(case, make_inputs(case), backend(pad_sections=pad_sections, **doors))

    assert all(stage.passed for stage in judged(case, lambda padded, aligned, _: (padded, aligned)).stages)
    assert (tuple(given[0][0].shape), given[0][1].tolist()) == ((256, 150), [160, 0, 96])
    with pytest.raises(BackendError) as raised:
        judged(case, lambda padded, _, sizes: (padded, sizes.int()))
    assert str(raised.value) == "pad_sections gave padded sizes as int32 of shape (3,), not int64 of shape (3,)"
    with pytest.raises(BackendError) as raised:
        judged(replace(case, recipe="fp8-current-e4m3"), lambda padded, _, sizes: (padded, sizes.int()))
    assert str(raised.value) == (
        "pad_sections gave padded as bfloat16 of shape (256, 150), not bfloat16 of shape (224, 150)"
    )
