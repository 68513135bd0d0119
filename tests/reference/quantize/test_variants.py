"""2-D, row-scaled, 4over6, stochastic and rotated NVFP4 against the scalar twin, on nasty values and odd shapes."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.ops import quantize
from narrowgauge.spec.quantized import amax_shape
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.reference.samples import MATRICES, NASTY, matrix, words
from tests.reference.twins import assert_twin

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
NAMES = [name for name in recipe_names() if name.startswith("nvfp4-") and "@" not in name]
PLAIN = [name for name in NAMES if find_recipe(name).transform is None]
ROTATED = [name for name in NAMES if find_recipe(name).transform is not None]


@SETTINGS
@given(
    name=st.sampled_from(PLAIN),
    family=st.sampled_from(MATRICES),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 35),
    columns=st.integers(1, 35),
    nan=st.sampled_from(["ignore", "propagate"]),
)
def test_a_variant_is_its_scalar_twin(name: str, family: str, seed: int, rows: int, columns: int, nan: str) -> None:
    recipe = dataclasses.replace(find_recipe(name), nan=nan)  # type: ignore[arg-type]
    x = matrix(family, seed, rows, columns)
    bits = words(seed, rows, columns) if recipe.rounding == "stochastic" else None
    assert_twin(quantize(x, recipe, random=bits), x, words=bits)


@SETTINGS
@given(
    name=st.sampled_from(PLAIN),
    family=st.sampled_from(MATRICES),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 20),
    amax=st.sampled_from([abs(number) for number in NASTY]),
)
def test_a_variant_with_a_given_amax_is_its_scalar_twin(
    name: str, family: str, seed: int, rows: int, amax: float
) -> None:
    x = matrix(family, seed, rows, 21)
    given_amax = torch.full(amax_shape((rows, 21), find_recipe(name)), amax)
    given_amax[1::2] *= 0.75
    bits = words(seed, rows, 21) if find_recipe(name).rounding == "stochastic" else None
    assert_twin(quantize(x, name, amax=given_amax, random=bits), x, amax=given_amax, words=bits)


@SETTINGS
@given(
    name=st.sampled_from(ROTATED),
    family=st.sampled_from(MATRICES),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 18),
    groups=st.integers(1, 3),
)
def test_a_rotated_variant_is_its_scalar_twin(name: str, family: str, seed: int, rows: int, groups: int) -> None:
    """Overflow of the rotation to infinity and infinities that cancel to NaN are among the inputs."""
    rotation = find_recipe(name).transform
    assert rotation is not None
    columns = groups * rotation.group
    x = matrix(family, seed, rows if columns < 100 else 1 + rows % 3, columns).bfloat16()
    bits = words(seed, *x.shape) if find_recipe(name).rounding == "stochastic" else None
    assert_twin(quantize(x, name, random=bits), x, words=bits)
