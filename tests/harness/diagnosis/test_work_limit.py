"""A limit of work removes explanations of a wrong result, leaves none exact, and reports the removed causes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.explain import explain
from narrowgauge.harness.diagnosis.explanation import UNTRIED_RIVALS
from narrowgauge.harness.diagnosis.gemm import explain_gemm
from narrowgauge.harness.diagnosis.quantize import explain_quantize, kernel_matrix
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import CALL, WorkLimit
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.harness.operations.stages.quantized import Judged, Subject, quantize_stages, values_stage
from narrowgauge.harness.operations.transform.judge import add_rotated
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.quantize.layout import swap_nibbles
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation

ROWS, COLUMNS = 40, 96


def matrix(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def swapped(q: Quantized) -> Quantized:
    return replace(q, codes=swap_nibbles(q.codes))


def quantized() -> Outcome:
    """Codes with both nibbles of a byte exchanged."""
    x, recipe = matrix(), find_recipe("nvfp4")
    right = ops.quantize(x, recipe)
    kernel = swapped(right)
    stages, judged = quantize_stages(Subject(x, recipe), kernel, right)
    return Outcome(stages, {"codes": kernel.codes, "scales": kernel.scales}, judged=[judged])


def product(change: Callable[[torch.Tensor], None] = lambda output: None) -> Outcome:
    """A product of an operand with exchanged nibbles, further changed by `change`."""
    a, b = (ops.quantize(matrix(seed), "nvfp4") for seed in (1, 2))
    output = ops.gemm(a, swapped(b), out_dtype=torch.bfloat16)
    change(output)
    limits = bounds(a, b, out_dtype=torch.bfloat16)
    outcome = Outcome([output_stage("output", output, limits, figures=False)], {"output": output}, limits=limits)
    outcome.products.append(Product(a, b, None, None, output, limits, Summation()))
    return outcome


def decoded(change: Callable[[torch.Tensor, torch.Tensor], None] = lambda values, right: None) -> Outcome:
    """Values with the two elements of a byte exchanged; `change` gets these values and the correct values."""
    q = ops.quantize(matrix(), "nvfp4")
    values = ops.dequantize(swapped(q), torch.bfloat16)
    change(values, ops.dequantize(q, torch.bfloat16))
    judged = Judged("", Subject(values, q.recipe), q, q, q)
    return Outcome([values_stage(q, values)], {"values": values}, judged=[judged])


def rotation(change: Callable[[torch.Tensor, torch.Tensor], None] = lambda output, right: None) -> Outcome:
    """A matrix without rotation; `change` gets the matrix and the correct rotation."""
    x, recipe = matrix(), find_recipe("nvfp4-rht")
    output = x.clone()
    change(output, ops.transform(x, recipe))
    outcome = Outcome(outputs={"output": output})
    add_rotated(outcome, Subject(x, recipe, free=False), output)
    return outcome


CASES = {quantized: "nibbles-swapped", product: "nibbles-swapped", decoded: "nibbles-swapped",
         rotation: "rotation-missing"}  # fmt: skip


def exact_causes(outcome: Outcome, limit: WorkLimit | None = None) -> list[str]:
    return [e.cause for e in explain(outcome, SearchHistory(), limit=limit) if e.exact]


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_matrix, "SLAB_ELEMENTS", 4 * COLUMNS)
    monkeypatch.setattr(explain_gemm, "_SLAB_OUTPUTS", {"cpu": 4 * ROWS})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_limit_tries_all(case) -> None:
    limit = WorkLimit()
    assert CASES[case] in exact_causes(case(), limit)
    assert exact_causes(case(), limit) == exact_causes(case())
    assert limit.tried
    assert (limit.note, limit.skipped) == ("", 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_limit_of_0_claims_no_cause_and_says_so(case) -> None:
    limit = WorkLimit(0)
    assert exact_causes(case(), limit) == []
    assert limit.tried == 0
    assert f"0 of {limit.skipped} known deviations tried" in limit.note
    assert "diagnose='full'" in limit.note


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_limit_only_removes_explanations(case) -> None:
    """The matrices are small, so the work of a call tells how many calls there are."""
    outcome, complete = case(), exact_causes(case())
    notes, possible = [], set()
    for calls in (*range(1, 12), 20, 40, 80, 160, 320, 2000):
        limit = WorkLimit(calls * CALL)
        found = explain(outcome, SearchHistory(), limit=limit)
        exact = [each.cause for each in found if each.exact]
        demoted = [each.cause for each in found if each.sentence.endswith(UNTRIED_RIVALS)]
        assert exact == ([] if limit.note else complete)
        assert [cause for cause in complete if cause in demoted] == demoted
        notes.append(limit.note)
        possible |= set(demoted)
    assert notes[0]
    assert not notes[-1]
    assert CASES[case] in possible


def test_a_cause_without_complete_verification_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is reached after the second slab of the deviation."""
    slabs = count()

    def verify(self: WorkLimit, cause: str, elements: float) -> bool:
        return may_verify(self, cause, math.inf if cause == "nibbles-swapped" and next(slabs) == 1 else elements)

    may_verify = WorkLimit.may_verify
    monkeypatch.setattr(WorkLimit, "may_verify", verify)
    limit = WorkLimit(1e9)
    assert exact_causes(quantized(), limit) == []
    assert "nibbles-swapped fits the elements tried" in limit.note


def test_a_cause_is_not_exact_before_its_further_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is reached when the search for deviations has ended; the inputs for a refutation are tried next
    time."""
    families = []
    confirm = explain_quantize._Search.confirm

    def confirm_later(search, *args):
        search.limit.spent = math.inf
        return confirm(search, *args)

    def further(family: str) -> Outcome:
        families.append(family)
        return quantized()

    history = SearchHistory()
    with monkeypatch.context() as patch:
        patch.setattr(explain_quantize._Search, "confirm", confirm_later)
        limit = WorkLimit(1e9)
        stopped = explain(quantized(), history, limit=limit, further=further)
    assert (stopped[0].cause, stopped[0].exact, families) == ("nibbles-swapped", False, [])
    assert "further inputs" in limit.note
    assert explain(quantized(), history, limit=WorkLimit(), further=further)[0].exact
    assert families


def test_a_search_that_was_stopped_does_not_count_as_a_search() -> None:
    for case in (quantized, product):
        history = SearchHistory()
        explain(case(), history, limit=WorkLimit(0))
        assert not sum(history.searches.values())


def test_shared_memory_has_no_exact_cause_after_a_stop() -> None:
    outcome = quantized()
    outcome.aliases.append({"cause": "returns-its-input", "sentence": "codes share memory with x"})
    for limit in (WorkLimit(0), WorkLimit()):
        (alias,) = (e for e in explain(outcome, SearchHistory(), limit=limit) if e.cause == "returns-its-input")
        assert not alias.exact


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, ROWS - 1), (17, 30), (ROWS - 1, 0)])
def test_a_product_that_fits_partly_has_no_exact_cause(place) -> None:
    def change(output: torch.Tensor) -> None:
        output[place] = 2 * output[place] + 1

    assert exact_causes(product()) == ["nibbles-swapped"]
    assert exact_causes(product(change)) == []


@pytest.mark.parametrize("case", [decoded, rotation], ids=lambda case: case.__name__)
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_a_cause_of_the_first_wrong_rows_alone_is_not_exact(case, row) -> None:
    def change(output: torch.Tensor, right: torch.Tensor) -> None:
        output[row] = right[row]

    assert exact_causes(case(change)) == []


def test_a_run_says_that_the_diagnosis_of_a_case_stopped() -> None:
    def quantize(x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        q.codes = q.codes ^ 1
        return q

    case = case_from_labels("quantize", "nvfp4", (16, 64), "bf16", "normal")
    kernel = Backend.local("wrong", SimpleNamespace(quantize=quantize))
    (note,) = run_case(case, kernel, diagnosis=0.0).notes
    assert note["cause"] == "diagnosis-stopped"
    assert "stopped at its limit of work" in note["sentence"]
    assert note["sentence"].endswith("narrowgauge show has no limit")
    assert run_case(case, kernel, diagnosis=math.inf).notes == []
