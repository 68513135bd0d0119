"""Right kernels of the contracts of the package pass; wrong ones fail, and nine in ten are named."""

from __future__ import annotations

import pytest

from tests.harness.operations.contracts import fused_kernels, training_kernels
from tests.harness.operations.contracts.fused_kernels import Fused

WRONG = (*fused_kernels.WRONG, *training_kernels.WRONG)
RIGHT = (*fused_kernels.RIGHT, *training_kernels.RIGHT)
NOT_NAMED = fused_kernels.NOT_NAMED | training_kernels.NOT_NAMED
FEW = {str(kernel) for kernel in WRONG[::20]}


@pytest.mark.parametrize("right", RIGHT, ids=str)
def test_a_right_kernel_passes(right: Fused) -> None:
    assert right.verdict("quick").passed


def named(wrong: Fused) -> bool:
    """Whether every cause of a wrong kernel has the words of its mistake."""
    verdict = wrong.verdict()
    assert not verdict.passed
    sentences = [str(each["sentence"]) for each in verdict.explanations]
    found = [text for text in sentences if "the bytes are those of" in text] or sentences
    return bool(found and wrong.words) and all(wrong.words in each for each in found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("wrong", [kernel for kernel in WRONG if str(kernel) in FEW - NOT_NAMED], ids=str)
def test_a_mistake_is_named(wrong: Fused) -> None:
    assert named(wrong)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [kernel for kernel in WRONG if str(kernel) not in FEW], ids=str)
def test_every_mistake_is_found_and_most_are_named(wrong: Fused) -> None:
    assert named(wrong) == (str(wrong) not in NOT_NAMED)


def test_nine_in_ten_are_named() -> None:
    assert len(fused_kernels.WRONG) >= 40
    assert len(fused_kernels.RIGHT) >= 25
    assert len(training_kernels.WRONG) >= 12
    assert len(training_kernels.RIGHT) >= 8
    assert len(NOT_NAMED) <= len(WRONG) / 10
    assert {str(kernel) for kernel in WRONG} >= NOT_NAMED
