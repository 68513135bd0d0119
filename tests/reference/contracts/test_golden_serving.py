"""Bytes of serving kernels on an H200 lie inside their dialects, and outside of others.

tests/golden/serving/README.md says where the vectors come from.
"""

from __future__ import annotations

import pytest

from tests.golden.verify import problems
from tests.paths import ROOT
from tests.reference.contracts.golden_serving import INDISTINGUISHABLE, KERNELS, Kernel


def test_every_recorded_file_has_its_digest() -> None:
    assert not problems(ROOT / "tests" / "golden" / "serving")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_recorded_bytes_lie_inside(kernel: Kernel) -> None:
    compared = determined = wrong = 0
    for _, part in kernel.judged():
        wrong += int(part.wrong.sum())
        compared, determined = compared + part.actual.numel(), determined + part.determined
    assert wrong == kernel.known
    assert compared > 500
    # A quarter of the rows is special, and tanh.approx is documented to 2^-11.
    assert determined > (0.7 if "gelu_tanh" in kernel.names.values() else 0.9) * compared, (determined, compared)


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_every_other_dialect_is_refused_or_named(kernel: Kernel) -> None:
    same = [name for name in kernel.others if kernel.wrong(name) <= kernel.known]
    assert same == sorted(INDISTINGUISHABLE.get(str(kernel), ()), key=kernel.others.index)


def test_every_dialect_refuses_another_library() -> None:
    """The table of dialects with equal bytes is not complete: bytes tell dialects apart."""
    named = {str(kernel): kernel for kernel in KERNELS}
    assert INDISTINGUISHABLE.keys() <= named.keys()
    assert len(named) == len(KERNELS)
    told = {name for kernel in KERNELS for name in set(kernel.others) - set(INDISTINGUISHABLE.get(str(kernel), ()))}
    unrecorded = {"flashinfer-nvfp4", "trtllm", "vllm-static-before-0.33"}
    assert {kernel.dialect for kernel in KERNELS} - told <= unrecorded, told
