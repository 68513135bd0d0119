"""Drawn cases: valid, new, like their originals, and a function of the secret alone."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_labels
from narrowgauge.harness.inputs.drawn_cases import BITS, ZEROS, drawn_cases, input_seed, new_secret
from narrowgauge.harness.running.runner import run_case
from tests.matrix import quick_cases

SECRET = 20261123


@cache
def quick() -> list[Case]:
    return list(quick_cases())


@cache
def drawn(secret: int = SECRET) -> list[Case]:
    return drawn_cases(quick(), secret)


def drawn_sample(secret: int = SECRET) -> list[Case]:
    """Of every eighth case: a draw of all takes seconds."""
    return drawn_cases(quick()[::8], secret)


def gemm(*shape: int, inputs: str = "normal", layout: str = "tn") -> Case:
    return case_from_labels("gemm", "nvfp4", shape, "bf16xbf16-bf16", inputs, (layout,))


@pytest.mark.long
def test_drawn_cases_are_valid_and_keep_the_remaining_fields() -> None:
    for case, original in zip(drawn(), quick(), strict=True):
        assert case.problem() is None, case.id
        assert case.inputs in case.families(), case.id
        kept, before = ({key: value for key, value in vars(c).items() if key in fields(c)} for c in (case, original))
        assert kept == before, case.id
        assert [size == 0 for size in case.shape] == [size == 0 for size in original.shape], case.id
        assert case.inputs not in ZEROS or original.inputs in ZEROS, case.id


def fields(case: Case) -> set[str]:
    """Unchanged fields. The rows of given sections follow the shape."""
    given = str(getattr(case, "sections", "")).startswith("rows:")
    return set(type(case).__dataclass_fields__) - {"shape", "inputs", *(["sections"] if given else [])}


@pytest.mark.long
def test_drawn_cases_are_new() -> None:
    """Only a single byte, and layouts that shapes must divide, have neither a size of about the same work nor a family
    more."""
    known = {case.id for case in quick()}
    assert len({case.id for case in drawn()}) == len(drawn())
    assert {case.shape_label for case in drawn() if case.id in known and case.operation != "pack-scales"} <= {"1x1"}
    assert sum(case.shape == before.shape for case, before in zip(drawn(), quick(), strict=True)) < len(drawn()) / 7


def test_families_and_alignments_vary() -> None:
    """Families in equal parts, and as many ragged shapes as in the matrix."""
    families = Counter(case.inputs for case in drawn() if case.operation == "quantize")
    assert set(families) == set(OPERATIONS["quantize"].families())
    ragged = [
        sum(case.shape[-1] % 16 != 0 for case in cases if case.operation == "gemm") for cases in (quick(), drawn())
    ]
    assert ragged[1] >= ragged[0]


@pytest.mark.long
def test_the_secret_decides_all() -> None:
    first, again, other = (drawn_sample(secret) for secret in (SECRET, SECRET, SECRET + 1))
    assert again == first
    assert sum(case.id == before.id for case, before in zip(other, first, strict=True)) < len(other) / 20
    assert input_seed(SECRET) != input_seed(SECRET + 1)
    assert 0 <= input_seed(SECRET) < 2**31
    secrets = {new_secret() for _ in range(10)}
    assert len(secrets) == 10
    assert all(0 <= secret < 2**BITS for secret in secrets)


@pytest.mark.parametrize(
    ("known", "divisors"),
    [
        ([], (128, 128, 128)),
        ([(256, 256, 48)], (128, 128, 16)),
        ([(33, 256, 48), (256, 32, 256)], (1, 32, 16)),
    ],
)
def test_no_size_is_finer_than_the_known_ones(known: list[tuple[int, ...]], divisors: tuple[int, ...]) -> None:
    """A kernel for multiples of 128 gets no further multiples, unless the matrix has such cases."""
    matrix = [gemm(*shape) for shape in known]
    cases = [case for secret in range(40) for case in drawn_cases([gemm(512, 1024, 384)], secret, matrix=matrix)]
    for axis, divisor in enumerate(divisors):
        assert all(case.shape[axis] % divisor == 0 for case in cases)
        assert len({case.shape[axis] for case in cases}) > 2
        assert divisor == 128 or any(case.shape[axis] % (2 * divisor) for case in cases)


def test_known_cases_are_not_drawn() -> None:
    """A product without elements changes its family alone, until all families are known."""
    families = [family for family in OPERATIONS["gemm"].families() if family not in ZEROS]
    case = gemm(0, 0, 0, inputs=families[0])
    for count in range(1, len(families)):
        matrix = [gemm(0, 0, 0, inputs=family) for family in families[:count]]
        assert drawn_cases([case], SECRET, matrix=matrix)[0].inputs in families[count:]
    assert drawn_cases([case], SECRET, matrix=[gemm(0, 0, 0, inputs=family) for family in families]) == [case]


@pytest.mark.sampled(24)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in CONTRACTS])
def test_the_reference_passes_drawn_cases(operation: str) -> None:
    """Inputs, bounds and checks of every operation hold for drawn shapes."""
    reference = load_backend("reference")
    small = sorted((case for case in drawn() if case.operation == operation), key=lambda case: case.work)
    for case in small[len(small) // 6 : 2 * len(small) // 3 : max(1, len(small) // 6)]:
        record = run_case(case, reference, seed=input_seed(SECRET))
        assert record.verdict == "pass", (case.id, record.message)
