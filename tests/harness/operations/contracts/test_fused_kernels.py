"""Right kernels of the contracts of the package pass; wrong ones fail, and nine in ten are named."""

from __future__ import annotations

import pytest

from tests.harness.operations.contracts.fused_kernels import NOT_NAMED, RIGHT, WRONG, Fused

FEW = {str(kernel) for kernel in WRONG[::10]}


@pytest.mark.parametrize("right", RIGHT, ids=str)
def test_a_right_kernel_passes(right: Fused) -> None:
    assert right.verdict("quick").passed


def named(wrong: Fused) -> bool:
    """Whether every cause of a wrong kernel has the words of its mistake."""
    verdict = wrong.verdict()
    assert not verdict.passed
    found = [str(each["sentence"]) for each in verdict.explanations]
    return bool(found and wrong.words) and all(wrong.words in each for each in found)


@pytest.mark.parametrize("wrong", [kernel for kernel in WRONG if str(kernel) in FEW - NOT_NAMED], ids=str)
def test_a_mistake_is_named(wrong: Fused) -> None:
    assert named(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [kernel for kernel in WRONG if str(kernel) not in FEW], ids=str)
def test_every_mistake_is_found_and_most_are_named(wrong: Fused) -> None:
    assert named(wrong) == (str(wrong) not in NOT_NAMED)


def test_nine_in_ten_are_named() -> None:
    assert len(WRONG) >= 40
    assert len(RIGHT) >= 25
    assert len(NOT_NAMED) <= len(WRONG) / 10
    assert {str(kernel) for kernel in WRONG} >= NOT_NAMED
