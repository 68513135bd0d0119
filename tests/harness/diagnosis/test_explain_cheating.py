"""Results that share memory or stay when the inputs change: explanations of wrong outcomes, never of right outcomes."""

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explain import explain
from narrowgauge.harness.diagnosis.explain_memory import ALIAS_CAUSES, Run, explain_same_results
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.judging import judge
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness.sample_backends import GEMM, QUANTIZE, backend

SAME = "same-result-for-other-inputs"
SWIZZLE = case_from_labels("swizzle", "", (129, 5), "", "bytes")
WRONG = StageResult("codes", "exact", 4, mismatches=4, sentence="4 of 4 codes differ")


def explained(case, *, aliases=(), doors):
    """The explanations of a case with the backend `doors`; the case runs again on the inputs of a second seed."""
    right = {name: getattr(reference, name) for name in doors}

    def run(seed):
        inputs = make_inputs(case, seed=seed)
        outcome, expected = (judge(case, inputs, backend(**given)) for given in (doors, right))
        return outcome, Run(inputs.tensors, outcome.outputs, expected.outputs)

    outcome, first = run(0)
    outcome.aliases = [{"cause": cause, "sentence": ALIAS_CAUSES[cause].sentence} for cause in aliases]
    return explain(outcome, SearchHistory(), runs=lambda: (first, run(1)[1]))


def stored(name, change):
    """A method that gives the changed result of its first call in all later calls."""
    results = []

    def door(*arguments, **options):
        if not results:
            results.append(change(getattr(reference, name)(*arguments, **options)))
        return results[0]

    return door


def every_time(name, change):
    return lambda *arguments, **options: change(getattr(reference, name)(*arguments, **options))


def other_codes(q):
    return q.codes ^ 0x37, q.scales, q.amax


def swapped_nibbles(q):
    return q.codes << 4 | q.codes >> 4, q.scales, q.amax


CHANGES = {
    "quantize": (QUANTIZE, other_codes, "codes is the same"),
    "gemm": (GEMM, lambda out: torch.where(out > 0, out * 3, out * 5), "output is the same"),
    "swizzle": (SWIZZLE, lambda out: out ^ 1, "swizzled is the same"),
}


def test_an_untrusted_run_names_a_stored_result():
    record = run_case(QUANTIZE, backend(quantize=stored("quantize", other_codes)), untrusted=True)
    assert SAME in [explanation["cause"] for explanation in record.explanations]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHANGES)
def test_a_stored_result_is_named(name):
    case, change, sentence = CHANGES[name]
    quantize = {"quantize": reference.quantize} if name == "gemm" else {}
    stays = explained(case, doors=quantize | {name: stored(name, change)})
    assert [e.sentence.startswith(sentence) for e in stays if e.cause == SAME] == [True]
    assert all(e.exact for e in stays if e.cause == SAME)
    changes = explained(case, doors=quantize | {name: every_time(name, change)})
    assert SAME not in [e.cause for e in changes]


def tensors(**numbers):
    return {name: torch.tensor(values, dtype=torch.uint8) for name, values in numbers.items()}


FIRST = Run(tensors(x=[1, 2]), tensors(codes=[7, 7], amax=[5]), tensors(codes=[1, 1], amax=[4]))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (
            Run(tensors(x=[3, 4]), tensors(codes=[7, 7], amax=[5]), tensors(codes=[2, 2], amax=[3])),
            "codes and amax are",
        ),
        (Run(tensors(x=[3, 4]), tensors(codes=[7, 7], amax=[6]), tensors(codes=[2, 2], amax=[3])), "codes is"),
        (Run(tensors(x=[3, 4]), tensors(codes=[7, 7], amax=[5]), tensors(codes=[2, 2], amax=[4])), "codes is"),
        (Run(tensors(x=[3, 4]), tensors(codes=[7, 7]), tensors(codes=[1, 1])), ""),  # the reference is the same too
        (Run(tensors(x=[1, 2]), tensors(codes=[7, 7]), tensors(codes=[2, 2])), ""),  # the inputs are the same
        (Run(tensors(x=[3, 4]), tensors(codes=[7, 8]), tensors(codes=[2, 2])), ""),
        (Run(tensors(x=[3, 4]), {}, {}), ""),  # the second run has no result
    ],
)
def test_which_results_count(other, named):
    found = [explanation.sentence for explanation in explain_same_results(WRONG, FIRST, other, exact=True)]
    assert found == ([f"{named} the same for the inputs of another seed"] if named else [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cause", ALIAS_CAUSES)
def test_shared_memory_is_named_if_nothing_else_gives_the_bytes(cause):
    """A deviation with the kernel's bytes comes first: a kernel may reuse its memory and have a separate mistake."""
    doors = {"quantize": every_time("quantize", other_codes)}
    (found,) = (e for e in explained(QUANTIZE, aliases=[cause], doors=doors) if e.cause == cause)
    assert (found.exact, found.stage, found.sentence) == (True, "codes", ALIAS_CAUSES[cause].sentence)
    doors = {"quantize": every_time("quantize", swapped_nibbles)}
    first, *others = explained(QUANTIZE, aliases=[cause], doors=doors)
    assert (first.cause, first.exact) == ("nibbles-swapped", True)
    assert [e.exact for e in others if e.cause == cause] == [False]


def test_a_right_outcome_has_no_explanation():
    """Shared memory and stored results fail no case."""
    assert not explained(QUANTIZE, aliases=ALIAS_CAUSES, doors={"quantize": reference.quantize})
