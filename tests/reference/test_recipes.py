"""Recipes: names, dialects, errors, and that no option is without effect."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import torch

from reference import Recipe, recipe
from reference.formats import E2M1, E4M3
from reference.gemm import alpha
from reference.ops import quantize
from reference.recipes import recipe_names
from tests.golden import bits

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
        ("nvfp5", ["no recipe is called 'nvfp5' (did you mean 'nvfp4'?); there are nvfp4, nvfp4@te-2.8"]),
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
        ("block_scale", "amax/6", "amax*(enc*(1/6)), (amax/6)*enc"),
        ("nan", "raise", "ignore, propagate"),
        ("alpha", "a*b", "(a*b)/d, (b*a)*(1/d)"),
        ("rounding", "stochastic!", "nearest-even"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(field: str, value: str, choices: str) -> None:
    message = f"recipe nvfp4: {field} is {value!r}; it can be {choices}"
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(recipe("nvfp4"), **{field: value})


# Every option that can be chosen changes bytes on some input.


def ties() -> torch.Tensor:
    """gamax = 65, bamax = 48.75·2^j: E4M3 ties of the exact ratio, which the two orders of operations break apart."""
    x = torch.zeros(9, 32)
    x[:, 0] = 65
    x[:, 16] = 48.75 * 2.0 ** -torch.arange(9)
    return x


def scales_of_ties(recipe: Recipe) -> torch.Tensor:
    return quantize(ties(), recipe).scales


def scales_beside_nan(recipe: Recipe) -> torch.Tensor:
    return quantize(torch.tensor([[1.0] * 16 + [float("nan")] * 16]), recipe).scales


def alphas_of_amaxes(recipe: Recipe) -> torch.Tensor:
    """α of 64 pairs of amaxes: numerics.md has the two expressions differ for one pair in six."""
    ones = torch.ones(1, 16)
    five = quantize(ones, recipe, amax=torch.tensor([5.0]))
    others = [quantize(ones, recipe, amax=torch.tensor([1 + i / 64])) for i in range(64)]
    return bits(torch.cat([alpha(other, five) for other in others]))


WITNESSES = {"block_scale": scales_of_ties, "nan": scales_beside_nan, "alpha": alphas_of_amaxes}


def options() -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(Recipe)
    choices = {field.name: get_args(hints[field.name]) for field in dataclasses.fields(Recipe)}
    return {name: some for name, some in choices.items() if len(some) > 1 and isinstance(some[0], str)}


@pytest.mark.parametrize("option", options())
def test_every_value_of_an_option_gives_its_own_bytes(option: str) -> None:
    outputs = [WITNESSES[option](dataclasses.replace(recipe("nvfp4"), **{option: v})) for v in options()[option]]
    for i, one in enumerate(outputs):
        for other in outputs[i + 1 :]:
            assert not torch.equal(one, other)


def test_the_dialects_of_the_block_scale_part_on_every_constructed_tie() -> None:
    te, te_28 = (quantize(ties(), name).scales for name in (TE, TE_28))
    assert torch.equal(te[:, 0], te_28[:, 0])
    assert (te[:, 1].int() - te_28[:, 1].int()).tolist() == [1] * 9


def test_te_native_quantizes_as_te_does() -> None:
    te, native = (quantize(ties(), name) for name in (TE, TE_NATIVE))
    assert torch.equal(te.scales, native.scales)
    assert torch.equal(te.codes, native.codes)
