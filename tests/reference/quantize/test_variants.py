"""2-D, row-scaled, 4over6, stochastic and rotated NVFP4 against the scalar twin, on nasty values and odd shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.ops import quantize, quantize_both
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PLAIN)
def test_the_input_dtype_is_only_a_carrier(name: str, dtype: torch.dtype) -> None:
    x = matrix("normal", 1, 33, 50).to(dtype)
    bits = words(1, 33, 50) if find_recipe(name).rounding == "stochastic" else None
    for one, other in zip(
        dataclasses.astuple(quantize(x, name, random=bits)),
        dataclasses.astuple(quantize(x.float(), name, random=bits)),
        strict=True,
    ):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("shape", [(0, 0), (0, 32), (5, 0), (0, 128)])
@pytest.mark.parametrize("name", NAMES)
def test_an_empty_matrix_gives_empty_halves(name: str, shape: tuple[int, int]) -> None:
    recipe = find_recipe(name)
    x = torch.zeros(shape, dtype=torch.bfloat16)
    if recipe.transform is not None and shape[0]:
        x = torch.zeros(256, 0, dtype=torch.bfloat16)  # whole groups along M, for the columnwise half
    random = (1, 2) if recipe.rounding == "stochastic" else None
    rows, columns = x.shape
    for q, (m, k) in zip(quantize_both(x, recipe, random=random), [(rows, columns), (columns, rows)], strict=True):
        assert q is not None
        assert q.amax is not None
        assert q.shape == (m, k)
        assert tuple(q.codes.shape) == (m, -(-k // 2))
        assert tuple(q.scales.shape) == (m, -(-k // 16))
        assert q.amax.tolist() == [0.0] * (m if recipe.granularity == "row" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_inputs_come_back_unchanged(name: str) -> None:
    recipe = find_recipe(name)
    x = matrix("normal", 2, 128, 128).bfloat16()
    random = (words(2, 128, 128), words(3, 128, 128)) if recipe.rounding == "stochastic" else None
    amax = torch.full(amax_shape((128, 128), recipe), 3.0)
    given_tensors = [x, amax, *(random or ())]
    before = [tensor.clone() for tensor in given_tensors]
    quantize_both(x, recipe, amax=(amax, amax), random=random, swizzled=True)
    for tensor, copy in zip(given_tensors, before, strict=True):
        assert torch.equal(tensor, copy)
