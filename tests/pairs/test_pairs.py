"""The quick tier has every possible pair of values, the full tier every triple, and the files can be written again."""

from dataclasses import replace

import pytest

from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id
from narrowgauge.harness.inputs.pairs import sets_of, sets_of_all, size_class
from tests.matrix import all_cases
from tests.pairs.make import FUSED, PAIRS, SIZES, TRIPLES, missing, redundant

FEW = 3
"""Tries of a pair: enough to notice a new value of a key with its many pairs."""
REMEDY = "run: python -m tests.pairs.make"


@pytest.fixture(scope="module")
def cases():
    return list(all_cases())


@pytest.mark.parametrize(
    ("array", "tries"),
    [
        (PAIRS, FEW),
        (FUSED, FEW),
        *(pytest.param(array, array.tries, marks=pytest.mark.long) for array in (PAIRS, FUSED)),
    ],
)
def test_every_pair_is_in_the_quick_tier(cases, array, tries):
    assert [(pair, case.id) for pair, case in missing(cases, array, tries)] == [], REMEDY


SMALL = ("transform", "update-scale", "swizzle")
"""Operations whose triples take a second."""


@pytest.mark.parametrize(
    ("operations", "tries"), [(SMALL, FEW), pytest.param(OPERATIONS, TRIPLES.tries, marks=pytest.mark.long)]
)
def test_every_triple_is_in_the_full_tier(cases, operations, tries):
    chosen = [case for case in cases if case.operation in operations]
    assert [(triple, case.id) for triple, case in missing(chosen, TRIPLES, tries)] == [], REMEDY


def test_a_case_is_redundant_if_others_have_its_pairs(cases):
    swizzles = [case for case in cases if case.operation == "swizzle" and case.tier == "quick"]
    ids = [case.id for case in swizzles]
    leaving = redundant(swizzles, PAIRS, ids)
    kept = [case for case in swizzles if case.id not in leaving]
    assert 0 < len(kept) < len(swizzles)
    assert sets_of_all(kept) == sets_of_all(swizzles)
    assert redundant(kept, PAIRS, ids) == []


def test_a_pair_that_no_case_has_gets_one(cases):
    kept = [case for case in cases if case.operation == "transform" and not case.file.endswith(PAIRS.file("").name)]
    found = dict(missing(kept))
    assert found
    for pair, case in found.items():
        assert pair in sets_of(case)
        assert case_from_id(case.id) == case
    assert not list(missing([*kept, *found.values()]))


@pytest.mark.long
def test_fused_operations_share_their_pairs(cases):
    """Every operation has every dtype and every class of K; a pair of two keys is in any of the arrays."""
    covered = FUSED.sets_of_all(FUSED.chosen(cases))
    operations = {case.operation for case in cases if FUSED.group(case)}
    assert len(operations) == 9
    for operation in operations:
        assert {(("dtype", dtype), ("operation", operation)) for dtype in ("bf16", "fp16", "fp32")} <= covered
    others = [case for case in cases if not case.file.endswith(FUSED.file("").name)]
    found = dict(missing(others, FUSED, FEW))
    assert {key for pair in found for key, _ in pair} >= {
        "operation",
        "K",
        "M",
        "dtype",
        "dtype of vectors",
        "view",
        "ub",
    }
    assert all(pair in FUSED.sets_of(case) for pair, case in found.items())


def test_modules_share_their_pairs():
    case = case_from_id("linear/MXFP8BlockScaling/2x32x128x256/bf16/normal/steps:3+bias")
    pairs = PAIRS.sets_of(case)
    assert {(("operation", "linear"), ("steps", "more")), (("bias", "True"), ("steps", "more"))} <= pairs
    layer = replace(case, steps=2)
    assert PAIRS.sets_of(layer) == pairs
    assert PAIRS.group(case) == PAIRS.group(case_from_id("grouped-linear/MXFP8BlockScaling/24x1x48/bf16/normal/even:2"))


def test_a_field_of_a_contract_is_no_key():
    case = case_from_id("rmsnorm-quantize/fp8-row-e4m3/17x256/bf16/normal")
    names = {name for pair in sets_of(case) for name, _ in pair}
    assert "zero_centered" in names
    assert not {"rounded", "order", "subnormals"} & names


def test_an_empty_case_tests_pairs_of_its_empty_size():
    case = case_from_id("quantize/nvfp4/0x256/bf16/normal/columnwise")
    assert (("M", "0"), ("usage", "columnwise")) in sets_of(case)
    assert not any(pair[0][0] == "dtype" and pair[1][0] == "usage" for pair in sets_of(case))


def test_traits_of_one_recipe_are_no_pair():
    case = case_from_id("gemm/mxfp8-e4m3+mxfp8-e5m2/128x256x128/bf16xbf16-fp32/normal/tn")
    names = {tuple(name.partition(".")[0] for name, _ in pair) for pair in sets_of(case)}
    assert ("recipe", "w_recipe") in names
    assert ("recipe", "recipe") not in names


def test_there_is_a_size_of_each_class():
    assert sorted(map(size_class, SIZES)) == ["0", "1", "128n", "16n", "other"]
