"""The quick tier has every possible pair of values of two keys, and cases/pairs.toml can be written again."""

import pytest

from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.inputs.pairs import pairs_of, size_class
from tests.matrix import all_cases
from tests.pairs.make import FILE, SIZES, TRIES, missing

FEW = 3
"""Tries of a pair: enough that a new value of a key, which has many pairs, is noticed."""
REMEDY = "run: python -m tests.pairs.make"


@pytest.fixture(scope="module")
def cases():
    return list(all_cases())


@pytest.mark.parametrize("tries", [FEW, pytest.param(TRIES, marks=pytest.mark.long)])
def test_every_pair_is_in_the_quick_tier(cases, tries):
    assert [(pair, case.id) for pair, case in missing(cases, tries)] == [], REMEDY


def test_a_pair_that_no_case_has_gets_one(cases):
    kept = [case for case in cases if case.operation == "transform" and not case.file.endswith(FILE.name)]
    found = dict(missing(kept))
    assert found
    for pair, case in found.items():
        assert pair in pairs_of(case)
        assert case_from_id(case.id) == case
    assert not list(missing([*kept, *found.values()]))


def test_an_empty_case_tests_pairs_of_its_empty_size():
    case = case_from_id("quantize/nvfp4/0x256/bf16/normal/columnwise")
    assert (("M", "0"), ("usage", "columnwise")) in pairs_of(case)
    assert not any(pair[0][0] == "dtype" and pair[1][0] == "usage" for pair in pairs_of(case))


def test_traits_of_one_recipe_are_no_pair():
    case = case_from_id("gemm/mxfp8-e4m3+mxfp8-e5m2/128x256x128/bf16xbf16-fp32/normal/tn")
    names = {tuple(name.partition(".")[0] for name, _ in pair) for pair in pairs_of(case)}
    assert ("recipe", "w_recipe") in names
    assert ("recipe", "recipe") not in names


def test_there_is_a_size_of_each_class():
    assert sorted(map(size_class, SIZES)) == ["0", "1", "128n", "16n", "other"]
