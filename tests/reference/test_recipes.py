"""Recipes: names, dialects, errors, and that no option is without effect."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from reference import Recipe, recipe
from reference.formats import E2M1, E4M3
from reference.gemm import alpha
from reference.ops import dequantize, quantize
from reference.recipes import RHT_SIGNS, Hadamard, recipe_names
from reference.scaling import block_scales, tensor_scale
from tests.golden import bits
from tests.reference.edges import edges

TE, TE_28, TE_NATIVE = "nvfp4", "nvfp4@te-2.8", "nvfp4@te-native"


@pytest.mark.parametrize("name", recipe_names())
def test_every_listed_name_names_a_recipe_that_prints_it(name: str) -> None:
    assert str(recipe(name)) == name


def test_the_listed_names_are_those_of_the_contract() -> None:
    assert {TE, TE_28, TE_NATIVE} <= set(recipe_names())
    assert len(set(recipe_names())) == len(recipe_names())


def test_no_two_names_give_the_same_choices() -> None:
    choices = [dataclasses.replace(recipe(name), name="", dialect="te") for name in recipe_names()]
    assert len(set(choices)) == len(choices)


def test_a_name_without_a_dialect_means_transformer_engines() -> None:
    assert recipe("nvfp4@te") == recipe("nvfp4")
    assert recipe("nvfp4").dialect == "te"
    assert recipe("nvfp4@") == recipe("nvfp4")


def test_nvfp4_is_what_numerics_md_says() -> None:
    nvfp4 = recipe("nvfp4")
    assert (nvfp4.element, nvfp4.block, nvfp4.scale, nvfp4.max_product) == (E2M1, (1, 16), E4M3, 2688.0)


def test_the_parts_of_a_name_set_what_they_say() -> None:
    assert recipe("nvfp4-2d").block == (16, 16)
    assert recipe("nvfp4-rht").transform == Hadamard(16, RHT_SIGNS)
    assert recipe("nvfp4-rht32-nosign").transform == Hadamard(32, 0)
    assert recipe("nvfp4-sr").rounding == "stochastic"
    assert recipe("nvfp4-rowscaled").granularity == "row"
    chosen = recipe("nvfp4-4over6-256-mse@te-2.8")
    assert (chosen.candidates, chosen.max_product, chosen.dialect) == ("4-or-6-mse", 1536.0, "te-2.8")


def test_the_rowwise_half_is_not_rotated() -> None:
    assert recipe("nvfp4-2d-rht32-nosign-sr").rowwise == recipe("nvfp4-2d-sr")
    assert recipe("nvfp4-2d").rowwise == recipe("nvfp4-2d")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4-2d-rowscaled", "row scaling and 2-D blocks do not go together: a tile of 16 rows has one scale"),
        ("nvfp4-rht-rowscaled", "row scaling and a rotation do not go together: row scaling is for forward"),
        ("nvfp4-sr-rowscaled", "row scaling and stochastic rounding do not go together: row scaling is for forward"),
        ("nvfp4-rht-4over6-448-mae", "4over6 and a rotation do not go together: the choice between 4 and 6 is by"),
        ("nvfp4-sr-4over6-448-mae", "4over6 and stochastic rounding do not go together: the choice between 4 and 6"),
    ],
)
def test_parts_that_exclude_each_other_are_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"recipe {name}: {message}")):
        recipe(name)


def test_a_rotation_has_groups_and_signs_that_exist() -> None:
    with pytest.raises(ValueError, match="a Hadamard group has 2, 4, 8, 16, 32, 64, 128 elements, not 12"):
        Hadamard(12)
    with pytest.raises(ValueError, match="signs of a Hadamard transform are a mask of 16 bits, not 0x10000"):
        Hadamard(16, 1 << 16)


def test_a_recipe_is_returned_as_it_is() -> None:
    mine = dataclasses.replace(recipe("nvfp4"), name="mine")
    assert recipe(mine) is mine


def test_a_recipe_is_data() -> None:
    nvfp4 = recipe("nvfp4")
    assert nvfp4 == recipe("nvfp4")
    assert hash(nvfp4) == hash(recipe("nvfp4"))
    assert nvfp4 != recipe("nvfp4@te-2.8")
    assert nvfp4 != dataclasses.replace(nvfp4, nan="propagate")
    with pytest.raises(dataclasses.FrozenInstanceError):
        nvfp4.nan = "propagate"  # type: ignore[misc]


def test_recipes_are_listed_without_importing_torch() -> None:
    code = "import sys, reference; reference.recipe('nvfp4'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Errors.


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("nvfp5", ["no recipe is called 'nvfp5' (did you mean 'nvfp4'?); there are nvfp4, nvfp4-2d, ", ", nvfp4@qwix"]),
        ("zzz", ["no recipe is called 'zzz'; there are nvfp4, "]),
        ("", ["no recipe is called ''; there are nvfp4, "]),
        ("nvfp5@te-2.8", ["no recipe is called 'nvfp5@te-2.8' (did you mean 'nvfp4'?)"]),
        ("nvfp4@te-2.9", ["recipe nvfp4 has no dialect 'te-2.9' (did you mean 'te-2.8'?); it has te, te-2.8"]),
        ("nvfp4@qqq", ["recipe nvfp4 has no dialect 'qqq'; it has te, te-2.8, te-native"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_with_all(name: str, texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^(no recipe|recipe nvfp4 has)") as caught:
        recipe(name)
    for text in texts:
        assert text in str(caught.value)


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
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(field: str, value: str, choices: str) -> None:
    message = f"recipe nvfp4: {field} is {value!r}; it can be {choices}"
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(recipe("nvfp4"), **{field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_scale": "(amax/6)/dec"}, "block_scale (amax/6)/dec does not fit tensor_scale max/amax, which gives "
         "enc"),
        ({"block_scale": "amax/6"}, "block_scale amax/6 does not fit tensor_scale max/amax, which gives enc"),
        ({"element_scale": "x/s"}, "element_scale x/s does not fit tensor_scale max/amax, which gives enc"),
        ({"decode": "s*dec"}, "decode s*dec does not fit tensor_scale max/amax, which gives enc"),
        ({"decode": "s"}, "decode s does not fit tensor_scale max/amax, which gives enc"),
        ({"alpha": "1"}, "alpha 1 does not fit tensor_scale max/amax, which gives enc"),
        ({"tensor_scale": "amax/max"},
         "block_scale amax*(enc*(1/6)) does not fit tensor_scale amax/max, which gives dec"),
        ({"tensor_scale": "none", "block_scale": "amax/6", "element_scale": "x/s"},
         "decode (s*amax)*(1/max) does not fit tensor_scale none, which gives no factor"),
        ({"zero_scale": "zeros"},
         "element_scale x*min(1/(s*(1/enc)),FLT_MAX) does not go with zero_scale zeros; it goes with saturate"),
        ({"element_scale": "x*r(s*r(enc))"}, "does not go with zero_scale saturate; it goes with zeros"),
        ({"element_scale": "x*(1/(s*(1/enc)))"}, "does not go with zero_scale saturate; it goes with infinity, zeros"),
        ({"element_scale": "x/(s/enc)", "zero_scale": "zeros"},
         "does not go with zero_scale zeros; it goes with saturate, infinity, 1, 2^-9, 2^-23"),
        ({"statistics": "input-blocks"},
         "statistics of blocks in the dtype of x and a block scale that never forms amax/6 do not go together"),
        ({"zero_block": "amax/6=2^-23"},
         "the smallest amax/6 and a block scale that never forms amax/6 do not go together"),
        ({"candidates": "4-or-6-mae", "negative_zero": "never"},
         "4over6 and choices of another library do not go together: the errors that choose are those of Transformer"),
        ({"candidates": "4-or-6-mae", "tensor_scale": "none", "block_scale": "amax/6", "element_scale": "x/s"},
         "4over6 and choices of another library do not go together"),
        ({"granularity": "row", "tensor_scale": "none"},
         "one level of scales and row scaling do not go together: no amax is used but those of blocks"),
    ],
)  # fmt: skip
def test_choices_that_do_not_fit_are_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe nvfp4: .*{re.escape(message)}"):
        dataclasses.replace(recipe("nvfp4"), **changes)


def test_a_tensor_scale_of_one_level_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe nvfp4@qwix has no tensor scale"):
        tensor_scale(torch.ones(1), recipe("nvfp4@qwix"))


def test_a_scale_that_rounds_to_the_dtype_of_x_must_be_told_it() -> None:
    with pytest.raises(ValueError, match="recipe nvfp4@compressed-tensors rounds to the dtype of x; give dtype"):
        tensor_scale(torch.ones(1), recipe("nvfp4@compressed-tensors"))


# Every option that can be chosen changes bytes on some input.


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


# What else a value of a field has to have beside it, and what all values of a field have beside them.
ENC, DEC, ONE = "x*(1/(s*(1/enc)))", "x*((1/dec)/s)", {"tensor_scale": "none", "decode": "s", "alpha": "1"}
OTHERS: dict[str, dict[str | int, dict[str, Any]]] = {
    "tensor_scale": {
        "amax/max": {"block_scale": "(amax/6)/dec", "element_scale": DEC},
        "none": ONE | {"block_scale": "amax/6", "element_scale": "x/s"},
    },
    "block_scale": {
        **{e: {"tensor_scale": "amax/max", "element_scale": DEC}
           for e in ("(amax/6)/dec", "amax/(6*dec)", "(amax*(1/dec))*(1/6)")},
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


def with_value(field: str, value: str | int) -> Recipe:
    others = BESIDE.get(field, {}) | OTHERS.get(field, {}).get(value, {})
    return dataclasses.replace(recipe("nvfp4"), **(others | {field: value}))


# Inputs on which all values of a field part. Each gives bytes.


def everything(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """All that `quantize` gives, as bytes."""
    words = torch.full((x.shape[0], -(-x.shape[1] // 4)), -1, dtype=torch.int32)
    q = quantize(x, recipe, random=words if recipe.rounding == "stochastic" else None)
    return torch.cat([q.scales.flatten(), q.codes.flatten()])


def random_matrix() -> torch.Tensor:
    """bfloat16, whose elements lie on ties."""
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def limits(recipe: Recipe) -> torch.Tensor:
    """The tensor scales of amaxes that have no proper one."""
    found = []
    for amax in (0.0, 1e-13, 1e-40, float("inf")):
        try:
            found.append(float(tensor_scale(torch.tensor([amax]), recipe)))
        except ValueError:
            found.append(float("nan"))
    return bits(torch.tensor(found))


def scales_of_edges(recipe: Recipe) -> torch.Tensor:
    """Scale bytes of blocks near every midpoint of E4M3 under several amaxes of the tensor, and one above FLT_MAX/2."""
    parts = [quantize(edges(65.0 * 1.07**step), recipe).scales.flatten() for step in range(64)]
    parts.append(quantize(edges(2688.0), recipe).scales.flatten())
    alone = tensor_scale(torch.tensor([3.3e38]), recipe) if recipe.tensor_scale != "none" else None
    parts.append(block_scales(torch.tensor([[2e38]]), alone, recipe).flatten())
    return torch.cat(parts)


def small_blocks(recipe: Recipe) -> torch.Tensor:
    """Scale bytes of blocks of 0, of next to nothing, and of little, under an amax of 2688·2^-14."""
    x = torch.zeros(1, 80)
    x[0, [0, 32, 48, 64]] = torch.tensor([2688 * 2.0**-14, 1e-29, 6 * 2.0**-14 * 2.0**-10.9, 6 * 2.0**-14 * 2.0**-8.2])
    return quantize(x, recipe).scales


def elements(*values: float) -> torch.Tensor:
    """A row whose elements are `values` once they are scaled: amax 2688, scales 448."""
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
    """Ties, a near tie, and a block whose scale of 2^-9 is so far below amax/6 that an element comes to 8.7."""
    x = torch.cat([elements(0.75, 1.25, 5.0, -1.75, 0.75 - 3e-7), torch.full((1, 16), 6 * 1.45 * 2.0**-9)])
    return everything(x, recipe)


def values_back(recipe: Recipe) -> torch.Tensor:
    return bits(torch.cat([dequantize(quantize(random_matrix() * factor, recipe)) for factor in (0.3, 0.5, 0.7)]))


def alphas_of_amaxes(recipe: Recipe) -> torch.Tensor:
    """α of 64 pairs of amaxes: numerics.md has the two expressions differ for one pair in six."""
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
    "scale_rounding": lambda r: everything(edges(2688.0), r),
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


@pytest.mark.parametrize("option", options())
def test_every_value_of_an_option_gives_its_own_bytes(option: str) -> None:
    outputs = {value: WITNESSES[option](with_value(option, value)) for value in options()[option]}
    same = [pair for pair in combinations(outputs, 2) if torch.equal(*(outputs[value] for value in pair))]
    assert same == []


def test_the_dialects_of_the_block_scale_part_on_every_constructed_tie() -> None:
    te, te_28 = (quantize(ties(), name).scales for name in (TE, TE_28))
    assert torch.equal(te[:, 0], te_28[:, 0])
    assert (te[:, 1].int() - te_28[:, 1].int()).tolist() == [1] * 9


def test_te_native_quantizes_as_te_does() -> None:
    te, native = (quantize(ties(), name) for name in (TE, TE_NATIVE))
    assert torch.equal(te.scales, native.scales)
    assert torch.equal(te.codes, native.codes)
