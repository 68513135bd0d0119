"""Recipes: names, dialects, errors, and no option without effect."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations, product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.ops import dequantize, quantize, quantize_both, update_scale
from narrowgauge.reference.quantize.scaling import block_scales, tensor_scale
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP32
from narrowgauge.spec.recipes import RHT_SIGNS, WHOLE, Delayed, Hadamard, Recipe, find_recipe, recipe_names, recipes
from tests.golden import bits
from tests.reference.edges import edges

MX, BLOCK, CURRENT = "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32", "fp8-current-e4m3"


@pytest.mark.parametrize("name", recipe_names())
def test_every_listed_name_names_a_recipe_that_prints_it(name: str) -> None:
    assert str(find_recipe(name)) == name


def test_no_two_names_give_the_same_choices() -> None:
    choices = [dataclasses.replace(find_recipe(name), name="", dialect="te") for name in recipe_names()]
    assert len(set(choices)) == len(choices)


def test_nvfp4_is_what_numerics_md_says() -> None:
    nvfp4 = find_recipe("nvfp4")
    assert (nvfp4.element, nvfp4.block, nvfp4.scale, nvfp4.max_product) == (E2M1, (1, 16), E4M3, 2688.0)


def test_the_parts_of_a_name_set_what_they_say() -> None:
    assert find_recipe("nvfp4-2d").block == (16, 16)
    assert find_recipe("nvfp4-rht").transform == Hadamard(16, RHT_SIGNS)
    assert find_recipe("nvfp4-rht32-nosign").transform == Hadamard(32, 0)
    assert find_recipe("nvfp4-sr").rounding == "stochastic"
    assert find_recipe("nvfp4-rowscaled").granularity == "row"
    chosen = find_recipe("nvfp4-4over6-256-mse@te-2.8")
    assert (chosen.candidates, chosen.max_product, chosen.dialect) == ("4-or-6-mse", 1536.0, "te-2.8")


@pytest.mark.parametrize(
    ("name", "element", "block", "scale"),
    [
        ("mxfp8-e4m3", E4M3, (1, 32), E8M0),
        ("mxfp8-e5m2-2d", E5M2, (32, 32), E8M0),
        ("mxfp8-2d", E4M3, (32, 32), E8M0),
        ("mxfp6-e3m2", E3M2, (1, 32), E8M0),
        ("mxfp6-e2m3-2d-sr", E2M3, (32, 32), E8M0),
        ("mxfp4-sr", E2M1, (1, 32), E8M0),
        ("fp8-block-1x128-e5m2-pow2", E5M2, (1, 128), FP32),
        ("fp8-block-128x128-e4m3-fp32", E4M3, (128, 128), FP32),
        ("fp8-current-e5m2-pow2", E5M2, (WHOLE, WHOLE), FP32),
        ("fp8-delayed-e4m3-bulk", E4M3, (WHOLE, WHOLE), FP32),
    ],
)
def test_mx_and_fp8_are_what_their_names_say(name: str, element: Any, block: tuple[int, int], scale: Any) -> None:
    recipe = find_recipe(name)
    assert (recipe.element, recipe.block, recipe.scale) == (element, block, scale)
    assert recipe.whole == (block[0] == WHOLE)
    assert recipe.stored_rows == (block[0] if scale is FP32 else 1)
    assert (recipe.rounding == "stochastic") == name.endswith("-sr")
    assert (recipe.scale_rounding == "down") == ("pow2" in name)


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("mxfp8", "mxfp8-e4m3"),
        ("mxfp8-e4m3-2d", "mxfp8-2d"),
        ("mxfp8-2d-sr", "mxfp8-e4m3-2d-sr"),
        ("fp8-block-1x128", "fp8-block-1x128-e4m3-pow2"),
        ("fp8-block-128x128-e5m2", "fp8-block-128x128-e5m2-pow2"),
        ("fp8-block-1x128-eps0.000001", "fp8-block-1x128-e4m3-pow2-eps1e-06"),
        ("fp8-current", "fp8-current-e4m3"),
        ("fp8-current-eps1e-6", "fp8-current-e4m3-eps1e-06"),
        ("fp8-current-eps0", "fp8-current-e4m3"),
        ("fp8-delayed-margin0", "fp8-delayed-e4m3"),
        ("fp8-delayed-recent-bulk", "fp8-delayed-e4m3-recent-bulk"),
    ],
)
def test_what_a_name_leaves_out_is_in_the_recipes_own(short: str, full: str) -> None:
    assert find_recipe(short) == find_recipe(full)
    assert find_recipe(find_recipe(short).name) == find_recipe(short)


@pytest.mark.parametrize("margin", [0, 1, 2, 17])
def test_a_delayed_recipe_has_the_rule_that_its_name_says(margin: int) -> None:
    part = f"-margin{margin}" if margin else ""
    assert find_recipe(f"fp8-delayed-e5m2{part}").delayed == Delayed("max", margin, "single")
    assert find_recipe(f"fp8-delayed-e5m2-recent{part}-bulk").delayed == Delayed("most-recent", margin, "bulk")
    assert find_recipe("fp8-current").delayed is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4-2d-rowscaled", "row scaling and 2-D blocks do not go together: a tile of 16 rows has a single scale"),
        ("nvfp4-rht-rowscaled", "row scaling and a rotation do not go together: row scaling is for forward"),
        ("nvfp4-sr-rowscaled", "row scaling and stochastic rounding do not go together: row scaling is for forward"),
        ("nvfp4-rht-4over6-448-mae", "4over6 and a rotation do not go together: the choice between 4 and 6 is by"),
        ("nvfp4-sr-4over6-448-mae", "4over6 and stochastic rounding do not go together: the choice between 4 and 6"),
    ],
)
def test_parts_that_exclude_each_other_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"recipe {name}: {message}")):
        find_recipe(name)


def test_a_rotation_has_groups_and_signs_that_exist() -> None:
    with pytest.raises(ValueError, match="a Hadamard group has 2, 4, 8, 16, 32, 64, 128 elements, not 12"):
        Hadamard(12)
    with pytest.raises(ValueError, match="signs of a Hadamard transform are a mask of 16 bits, not 0x10000"):
        Hadamard(16, 1 << 16)


def test_recipes_are_listed_without_importing_torch() -> None:
    code = (
        "import sys; from narrowgauge.spec import recipes; recipes.find_recipe('nvfp4'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Errors.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("nvfp5", "'nvfp4', 'nvfp4-sr' or 'nvfp4-2d'?"), ("zzz", ""), ("", ""), ("nvfp5@te-2.8", "'nvfp4'"),
        ("nvfp4@te-2.9", "'te-2.8'?); it has te, te-2.8"), ("nvfp4@qqq", "; it has te, te-2.8, te-native"),
        ("mxfp8-e4m4", "'mxfp8-e4m3', "), ("mxfp6", "'mxfp"), ("mxfp8-e4m3-rht", "'mxfp8-e4m3"),
        ("mxfp4-e2m1", "'mxfp"), ("fp8-block-64x64", "'fp8-block-"), ("fp8-block-1x128-e4m3-sr", "'fp8-block-1x128-e4"),
        ("fp8-curent-e4m3", "'fp8-current-e4m3', "), ("fp8-current-eps", "'fp8-current-e"),
        ("fp8-delayed-e4m3-margin", "'fp8-delayed-e"), ("mxfp8-2d@oct", "'ocp'?); it has te, ocp, even, ceil"),
        ("mxfp8-e4m3@torchao", "'torchao-rceil'?); it has "), ("fp8-current@ocp", "; it has te, torchao"),
        ("fp8-delayed@vllm", "; it has te"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=r"^(no recipe|recipe \S+ has)") as caught:
        find_recipe(name)
    message = str(caught.value)
    dialect = name.partition("@")[2]
    unknown = f"no dialect {dialect!r}" if "it has" in message else f"no recipe is called {name!r}"
    assert unknown in message
    assert nearest in message
    assert ("did you mean" in message) == nearest.startswith("'")
    assert ("narrowgauge.recipes() lists those of quantize" in message) == unknown.startswith("no recipe")
    assert len(message) < 360


def test_the_recipes_are_those_of_their_names() -> None:
    assert [str(recipe) for recipe in recipes()] == recipe_names()
    assert len(set(recipes())) == len(recipes())


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("block_scale", "amax", "amax*(enc*(1/6)), (amax/6)*enc"),
        ("nan", "raise", "ignore, propagate"),
        ("alpha", "a*b", "(a*b)/d, (b*a)*(1/d)"),
        ("nan_code", 5, "7, 0, 8, 11, 12"),
        ("packing", "both", "low-first, high-first"),
        ("rounding", "stochastic!", "nearest-even"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_choices(field: str, value: str, choices: str) -> None:
    message = f"recipe nvfp4: {field} is {value!r}; it can be {choices}"
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(find_recipe("nvfp4"), **{field: value})


LEVEL = {"tensor_scale": "none", "block_scale": "amax/6", "element_scale": "x/s"}
TOGETHER = "do not go together"
# A recipe, its changed choices, and words of the error in their order.
INCOMPATIBLE: list[tuple[str, dict[str, Any], str]] = [
    *(("nvfp4", {field: value}, f"{field} {value} tensor_scale max/amax enc") for field, value in (
        ("block_scale", "(amax/6)/dec"), ("block_scale", "amax/6"), ("element_scale", "x/s"), ("decode", "s*dec"),
        ("decode", "s"), ("alpha", "1"))),
    ("nvfp4", {"tensor_scale": "amax/max"}, "block_scale amax*(enc*(1/6)) tensor_scale amax/max dec"),
    ("nvfp4", LEVEL, "decode (s*amax)*(1/max) tensor_scale none no factor"),
    ("nvfp4", {"zero_scale": "zeros"}, "element_scale x*min(1/(s*(1/enc)),FLT_MAX) zero_scale zeros saturate"),
    ("nvfp4", {"element_scale": "x*r(s*r(enc))"}, "zero_scale saturate zeros"),
    ("nvfp4", {"element_scale": "x*(1/(s*(1/enc)))"}, "zero_scale saturate infinity, zeros"),
    ("nvfp4", {"element_scale": "x*r(s*r(enc))", "zero_scale": "infinity"}, "zero_scale infinity zeros"),
    ("nvfp4", {"statistics": "input-blocks"}, f"statistics dtype of x block scale amax/6 {TOGETHER}"),
    ("nvfp4", {"zero_block": "amax/6=2^-23"}, f"smallest amax/6 block scale {TOGETHER}"),
    ("nvfp4", {"candidates": "4-or-6-mae", "negative_zero": "never"}, f"4over6 another library {TOGETHER}"),
    ("nvfp4", {"candidates": "4-or-6-mae", **LEVEL}, f"4over6 another library {TOGETHER}"),
    ("nvfp4", {"granularity": "row", "tensor_scale": "none"}, f"one level of scales row scaling {TOGETHER}"),
    (MX, {"block_scale": "amax/6"}, "block_scale amax/6 E8M0 amax*(1/max), amax/max, amax*2^-emax"),
    (MX, {"scale_rounding": "nearest-even"}, "scale_rounding nearest-even E8M0 up, down, as-element"),
    (MX, {"element_scale": "x*(max/amax)"}, "element_scale x*(max/amax) E8M0 x*(1/s), x/s"),
    (BLOCK, {"scale_rounding": "up-log2"}, "scale_rounding up-log2 FP32 none, down, up"),
    (BLOCK, {"zero_block": "1"}, "zero_block 1 FP32 keep, eps"),
    ("nvfp4@qwix", {"element_scale": "R(x/s)", "zero_scale": "saturate"}, "element_scale R(x/s) E4M3"),
    ("nvfp4@qwix", {"element_scale": "x*(1/s)", "zero_scale": "saturate"}, "element_scale x*(1/s) saturate infinity"),
    ("nvfp4@qwantize", {"block_scale": "amax*(1/max)"}, "block_scale amax*(1/max) E4M3 amax*(enc*(1/6))"),
    ("nvfp4", {"scale_rounding": "up"}, "scale_rounding up E4M3 nearest-even, nearest-toward-zero"),
    *((name, changes, "a scale that spans K and alpha s_a*s_b") for name, changes in (
        (CURRENT, {"block": (1, 128)}), (BLOCK, {"block": (WHOLE, WHOLE)}), (BLOCK, {"alpha": "s_a*s_b"}))),
    ("fp8-current@vllm", {"block_scale": "given"}, "a scale of the tensor block_scale 1/enc or given allxall none"),
    (CURRENT, {"delayed": Delayed()}, "delayed block_scale 'given' tensor_scale 'given', not max/amax"),
    ("nvfp4", {"nan_code": 31}, "nan_code 31 no code of E2M1"),
    ("mxfp6-e3m2", {"nan_code": 127}, "nan_code 127 no code of E3M2"),
    (MX, {"rounding": "nearest-even-wrapping"}, f"rounding of E2M1 another element {TOGETHER}"),
    (MX, {"packing": "high-first"}, f"first element high another element than E2M1 {TOGETHER}"),
    ("mxfp4", {"columnwise": "in-place"}, f"columnwise half in place E2M1 {TOGETHER}"),
    (BLOCK, {"columnwise": "in-place"}, f"columnwise half in place float32 scales {TOGETHER}"),
    (MX, {"zero_block": "eps"}, "zero_block eps E8M0 keep, 1"),
    (BLOCK, {"smallest_scale": "2^-9"}, "smallest scale another format than E4M3"),
    (BLOCK, {"statistics": "input"}, f"quotient amax/max dtype of x block scale {TOGETHER}"),
    ("nvfp4", {"smallest_amax": 1e-6}, f"smallest amax E4M3 {TOGETHER}"),
    ("fp8-delayed", {"smallest_amax": 1e-6}, f"smallest amax given scale {TOGETHER}"),
    (CURRENT, {"largest_scale": "input"}, f"largest scale float32 block scale {TOGETHER}"),
    (BLOCK, {"rounding": "stochastic"}, f"float32 scales stochastic rounding {TOGETHER}"),
    (CURRENT, {"transform": Hadamard()}, f"float32 scales rotation {TOGETHER}"),
    (CURRENT, {"granularity": "row"}, f"row scaling 2-D blocks {TOGETHER}"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), INCOMPATIBLE)
def test_incompatible_choices_are_refused_with_the_reason(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^recipe .*: .*" + ".*".join(map(re.escape, words.split(" ")))):
        dataclasses.replace(find_recipe(name), **changes)


def test_a_tensor_scale_of_one_level_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe nvfp4@qwix has no tensor scale"):
        tensor_scale(torch.ones(1), find_recipe("nvfp4@qwix"))


def test_a_scale_that_rounds_to_the_dtype_of_x_needs_dtype() -> None:
    with pytest.raises(ValueError, match="recipe nvfp4@compressed-tensors rounds to the dtype of x; give dtype"):
        tensor_scale(torch.ones(1), find_recipe("nvfp4@compressed-tensors"))


# Every choice of an option changes bytes on some input.


def ties() -> torch.Tensor:
    """gamax = 65, bamax = 48.75·2^j: E4M3 ties of the exact ratio, which the two orders of operations break apart."""
    x = torch.zeros(9, 32)
    x[:, 0] = 65
    x[:, 16] = 48.75 * 2.0 ** -torch.arange(9)
    return x


def options() -> dict[str, tuple[str | int, ...]]:
    """Every choice field with its values."""
    hints = get_type_hints(Recipe)
    return {f.name: get_args(hints[f.name]) for f in dataclasses.fields(Recipe) if get_origin(hints[f.name]) is Literal}


# Further choices required by a value of a field, and by all values of a field.
ENC, DEC, ONE = "x*(1/(s*(1/enc)))", "x*((1/dec)/s)", {"tensor_scale": "none", "decode": "s", "alpha": "1"}
OTHERS: dict[str, dict[str | int, dict[str, Any]]] = {
    "tensor_scale": {
        "given": {"delayed": Delayed()},
        "amax/max": {"block_scale": "(amax/6)/dec", "element_scale": DEC},
        "none": ONE | {"block_scale": "amax/6", "element_scale": "x/s"},
    },
    "block_scale": {
        **{e: {"tensor_scale": "amax/max", "element_scale": DEC}
           for e in ("(amax/6)/dec", "(amax*(1/6))/dec", "amax/(6*dec)", "(amax*(1/dec))*(1/6)")},
        **{e: ONE | {"element_scale": "x/s"} for e in ("amax/6", "amax*(1/6)")},
    },
    "zero_block": {},
    "zero_scale": {"zeros": {"element_scale": DEC}},
    "element_scale": {
        "x*min(1/(s*(1/enc)),FLT_MAX)": {"zero_scale": "saturate"},
        "x*r(s*r(enc))": {"zero_scale": "zeros"},
        **{e: {"tensor_scale": "amax/max", "block_scale": "(amax/6)/dec"}
           for e in (DEC, "(x*(1/dec))*(1/s)", "x/(s*dec)")},
        "x/s": ONE | {"block_scale": "amax/6"},
    },
    "decode": {
        "s*dec": {"tensor_scale": "amax/max", "block_scale": "(amax/6)/dec", "element_scale": DEC},
        "s": ONE | {"block_scale": "amax/6", "element_scale": "x/s"},
    },
    "alpha": {
        "a_dec*b_dec": {"tensor_scale": "amax/max", "block_scale": "(amax/6)/dec", "element_scale": DEC},
        "1": ONE | {"block_scale": "amax/6", "element_scale": "x/s"},
    },
}  # fmt: skip
LOOSE = {"element_scale": ENC, "zero_scale": "infinity", "tensor_limit": "none"}
BESIDE: dict[str, dict[str, Any]] = {
    "statistics": {"block_scale": "(amax/6)*enc"},
    "tensor_scale": LOOSE | {"block_scale": "(amax/6)*enc"},
    "tensor_limit": LOOSE | {"tensor_scale": "(1/amax)*max"},
    "block_scale": LOOSE,
    "zero_block": {"block_scale": "(amax/6)*enc"},
    "zero_scale": {"tensor_scale": "amax/max", "block_scale": "(amax/6)/dec", "element_scale": "x/(s*dec)"},
    "element_scale": LOOSE | {"block_scale": "(amax/6)*enc"},
    "rounding": LOOSE | {"element_scale": "x/(s/enc)"},
    "decode": LOOSE,
    "alpha": LOOSE,
}


# Recipes that allow all tested values of a field, with further required choices; default nvfp4.
# Block scales and roundings of scales that belong to a format of scales are tried in a recipe of this format.
DECODE_SCALE = {"largest_scale": "float32", "block_scale": "amax/max", "element_scale": "x/s", "zero_scale": "infinity"}
DOWN = {"scale_rounding": "down"}  # up, 448·2^k rounds the same by a product and by a quotient
ELSEWHERE: dict[str, tuple[str, dict[str | int, dict[str, Any]]]] = {
    "nan_code": (MX, {value: {} for value in (7, 0, 8, 11, 12, 31, 126, 127, 128, 254)}),
    "largest_scale": (BLOCK, {"float32": {}, "input": {}, "none": {}}),
    "columnwise": (MX, {"transposed": {}, "in-place": {}}),
}
OF_FORMAT: dict[str, list[tuple[str, dict[str | int, dict[str, Any]]]]] = {
    "block_scale": [
        (MX, {"amax*(1/max)": DOWN, "amax/max": DOWN, "amax*2^-emax": DOWN}),
        (BLOCK, {"1/(max/amax)": {}}),
        (CURRENT, {"1/enc": {}}),
        ("fp8-static-e4m3", {"given": {"element_scale": "x*(1/s)", "zero_scale": "infinity"}}),
    ],
    "zero_block": [(BLOCK, {"eps": DECODE_SCALE})],
    "scale_rounding": [
        (MX, {rule: {"block_scale": "amax*2^-emax"}
              for rule in ("up", "down", "as-element", "up-from-1.75", "nearest-log2", "up-log2", "down-log2")}),
        (BLOCK, {"none": {}}),
    ],
    "element_scale": [(MX, {"x*(1/s)": {}}), (BLOCK, {"x*(max/amax)": {}, "R(x/s)": DECODE_SCALE}),
                      (CURRENT, {"x*enc": {}})],
    "alpha": [(CURRENT, {"s_a*s_b": {}})],
}  # fmt: skip


def with_value(field: str, value: str | int) -> Recipe:
    if field in ELSEWHERE:
        base, others = ELSEWHERE[field]
        return dataclasses.replace(find_recipe(base), **(others[value] | {field: value}))
    for base, others in OF_FORMAT.get(field, []):
        if value in others:
            return dataclasses.replace(find_recipe(base), **(others[value] | {field: value}))
    beside = BESIDE.get(field, {}) | OTHERS.get(field, {}).get(value, {})
    return dataclasses.replace(find_recipe("nvfp4"), **(beside | {field: value}))


# Inputs, as functions of bytes, that separate all values of a field.


def everything(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """All results of `quantize`, as bytes."""
    words = torch.full((x.shape[0], -(-x.shape[1] // 4)), -1, dtype=torch.int32)
    scale = torch.tensor([5.0]) if recipe.tensor_scale == "given" else None
    q = quantize(x, recipe, scale=scale, random=words if recipe.rounding == "stochastic" else None)
    return torch.cat([q.scales.contiguous().flatten().view(torch.uint8), q.codes.flatten()])


def test_a_block_of_zeros_has_the_scale_that_its_choice_says() -> None:
    zeros = torch.zeros(1, 128).bfloat16()
    for name, scales in (("fp8-row-e4m3@modelopt", [0.0]), ("fp8-row-e4m3@compressed-tensors", [2.0**-7])):
        assert quantize(zeros, name).scales.tolist() == [scales]
    assert quantize(zeros, "mxfp4@mlx").scales.tolist() == [[127] * 4]
    assert quantize(zeros, "mxfp4@gguf").scales.tolist() == [[0] * 4]


def random_matrix() -> torch.Tensor:
    """bfloat16 elements on ties."""
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def limits(recipe: Recipe) -> torch.Tensor:
    """The tensor scales of amaxes that are 0, infinite or NaN."""
    found = []
    for amax in (0.0, 1e-13, 1e-40, float("inf"), float("nan")):
        try:
            found.append(float(tensor_scale(torch.tensor([amax]), recipe)))
        except ValueError:
            found.append(float("nan"))
    return bits(torch.tensor(found))


def scales_of_edges(recipe: Recipe) -> torch.Tensor:
    """Scale bytes of blocks near every midpoint of E4M3 under several amaxes of the tensor, and one above FLT_MAX/2."""
    scale = torch.tensor([5.0]) if recipe.tensor_scale == "given" else None
    parts = [quantize(edges(65.0 * 1.07**step), recipe, scale=scale).scales.flatten() for step in range(64)]
    parts.append(quantize(edges(2688.0), recipe, scale=scale).scales.flatten())
    alone = scale
    if recipe.tensor_scale not in ("none", "given"):
        alone = tensor_scale(torch.tensor([3.3e38]), recipe)
    largest = torch.tensor([[2e38, float(torch.tensor(448.0).nextafter(torch.tensor(0.0)))]])
    parts.append(block_scales(largest, alone, recipe, torch.float32).flatten())
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def exponents(recipe: Recipe) -> torch.Tensor:
    """Scale bytes of blocks whose amaxes have mantissas beside the thresholds of every rule; of E4M3, near ties."""
    x = torch.zeros(10, 32)
    x[:, 5] = torch.tensor([1.0, 1.25, 1.4375, 1.625, 1.75, 1.875, 1.9375, 1.984375, 1 + 2**-22, 2 - 2**-22]) * 2**-9
    return torch.cat([everything(x, recipe), everything(edges(2688.0), recipe)])


def both_halves(recipe: Recipe) -> torch.Tensor:
    """Codes and scales of the columnwise half as stored."""
    _, column = quantize_both(random_matrix(), recipe)
    assert column is not None
    return torch.cat([column.codes.flatten(), column.scales.flatten()])


def small_blocks(recipe: Recipe) -> torch.Tensor:
    """Scale bytes of blocks of 0, of next to nothing, and of little, under an amax of 2688·2^-14."""
    x = torch.zeros(1, 80)
    x[0, [0, 32, 48, 64]] = torch.tensor([2688 * 2.0**-14, 1e-29, 6 * 2.0**-14 * 2.0**-10.9, 6 * 2.0**-14 * 2.0**-8.2])
    return quantize(x, recipe).scales.view(torch.uint8)


def elements(*values: float) -> torch.Tensor:
    """A row with the scaled elements `values`: amax 2688, scales 448."""
    return torch.tensor([[6.0, *values, *[0.0] * (15 - len(values))]]) * 448


def zero_scales(recipe: Recipe) -> torch.Tensor:
    x = torch.zeros(1, 32)
    x[0, 0] = 2688 * 2.0**14
    x[0, 16:19] = torch.tensor([0.6, 1e-3, -1e-7])
    return quantize(x, recipe).codes


def any_elements(recipe: Recipe) -> torch.Tensor:
    """Codes of elements on ties of every scale, and of a tensor whose amax has no finite encode factor."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scales = torch.tensor(E4M3.values[8:0x7F]).view(-1, 1)
    tiny = torch.tensor([[1e-38, -1e-40] + [0.0] * 30])
    parts = [everything(tiny, recipe), everything(random_matrix(), recipe)]
    for step in range(64):
        amax = 65.0 * 1.07**step
        x = torch.cat([torch.full_like(scales, 6.0), ties.expand(len(scales), 7)], 1) * scales * (amax / 2688)
        parts.append(everything(torch.nn.functional.pad(x, (0, 8)), recipe))
    return torch.cat(parts)


def roundings(recipe: Recipe) -> torch.Tensor:
    """Ties, a near tie, and a block with a scale of 2^-9 far below amax/6: an element becomes 8.7."""
    x = torch.cat([elements(0.75, 1.25, 5.0, -1.75, 0.75 - 3e-7), torch.full((1, 16), 6 * 1.45 * 2.0**-9)])
    return everything(x, recipe)


def values_back(recipe: Recipe) -> torch.Tensor:
    return bits(torch.cat([dequantize(quantize(random_matrix() * factor, recipe)) for factor in (0.3, 0.5, 0.7)]))


def alphas_of_amaxes(recipe: Recipe) -> torch.Tensor:
    """α of 64 pairs of amaxes: by docs/numerics.md#nvfp4-gemm the two expressions differ for one pair in six."""
    ones = torch.ones(1, 16)
    numbers = [5.0, *(1 + i / 64 for i in range(64))]
    five, *others = (quantize(ones * number, recipe) for number in numbers)
    return bits(torch.cat([alpha(other, five) for other in others]))


WITNESSES: dict[str, Callable[[Recipe], torch.Tensor]] = {
    "statistics": lambda r: everything(random_matrix() * 0.7, r),
    "granularity": lambda r: everything(random_matrix(), r),
    "tensor_scale": scales_of_edges,
    "tensor_limit": limits,
    "block_scale": scales_of_edges,
    "zero_block": small_blocks,
    "smallest_scale": small_blocks,
    "scale_rounding": exponents,
    "largest_scale": lambda r: everything(torch.full((1, 128), 1e-40).bfloat16(), r),
    "columnwise": both_halves,
    "candidates": lambda r: everything(random_matrix(), r),
    "zero_scale": zero_scales,
    "element_scale": any_elements,
    "rounding": roundings,
    "negative_zero": lambda r: everything(elements(-0.0, -0.1), r),
    "nan_code": lambda r: everything(elements(float("nan")), r),
    "packing": lambda r: everything(elements(1.0), r),
    "nan": lambda r: everything(torch.tensor([[1.0] * 16 + [float("nan")] * 16]), r),
    "decode": values_back,
    "alpha": alphas_of_amaxes,
}


def same_bytes(outputs: dict[Any, torch.Tensor]) -> list[tuple[Any, ...]]:
    """The pairs with equal outputs."""
    return [pair for pair in combinations(outputs, 2) if torch.equal(*(outputs[value] for value in pair))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", options())
def test_every_value_of_an_option_gives_its_own_bytes(option: str) -> None:
    outputs = {value: WITNESSES[option](with_value(option, value)) for value in options()[option]}
    assert same_bytes(outputs) == []


FP8_OPTIONS: dict[str, list[dict[str, Any]]] = {
    BLOCK: [{}, {"scale_rounding": "down"}, {"smallest_amax": 3.0}, {"smallest_amax": 3.5}],
    CURRENT: [{}, {"scale_rounding": "down"}, {"smallest_amax": 4.5}, {"smallest_amax": 5.5}],
    "fp8-row-e4m3@torchao-affine": [
        {},
        {"statistics": "float32"},
        {"scale_rounding": "up"},
        {"smallest_amax": 5.5},
        {"element_scale": "R(x/s)"},
        {"element_scale": "x*(1/s)"},
        {"statistics": "float32", "block_scale": "amax*(1/max)"},
        {"rounding": "nearest-toward-zero"},
        {"rounding": "nearest-away"},
    ],
}


@pytest.mark.parametrize("name", FP8_OPTIONS)
def test_options_of_float32_scales_give_their_own_bytes(name: str) -> None:
    rules = [dataclasses.replace(find_recipe(name), **changes) for changes in FP8_OPTIONS[name]]
    assert same_bytes({number: everything(random_matrix(), recipe) for number, recipe in enumerate(rules)}) == []


def test_every_choice_of_a_delayed_rule_changes_the_scales() -> None:
    """Two tensors, of which the first has no amax."""
    history, scale = torch.tensor([[3.0, 0.0], [7.0, 7.0], [1.0, 2.0]]), torch.ones(2)
    outputs = {}
    for algorithm, margin, kernel in product(("max", "most-recent"), (0, 1), ("single", "bulk")):
        recipe = Delayed(algorithm, margin, kernel)
        found = update_scale(history, scale, dataclasses.replace(find_recipe("fp8-delayed-e4m3"), delayed=recipe))
        outputs[recipe] = torch.cat([part.flatten() for part in found])
    assert same_bytes(outputs) == []
