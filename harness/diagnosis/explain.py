"""Explanations of a wrong outcome, the best first."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explain_decoding import explain_decoding
from narrowgauge.harness.diagnosis.explain_memory import Run, explain_aliases, explain_memory, explain_same_results
from narrowgauge.harness.diagnosis.explanation import Explanation, gives_every_byte, is_weak
from narrowgauge.harness.diagnosis.formulas.explain_formula import explain_formula
from narrowgauge.harness.diagnosis.gemm.explain_fused_output import explain_fused_output
from narrowgauge.harness.diagnosis.gemm.explain_gemm import explain_gemm
from narrowgauge.harness.diagnosis.patterns.signatures import signatures
from narrowgauge.harness.diagnosis.quantize.explain_quantize import explain_quantize
from narrowgauge.harness.diagnosis.quantize.further_inputs import FurtherRun
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.possible_cause import GIVES_EVERY_BYTE, PossibleCause

VARIATIONS = frozenset({"order-of-threads", "not-repeatable"})
"""Observed causes that are symptoms: a kernel with a wrong step may vary too."""
_FURTHER = ("normal", "uniform", "outliers", "lattice", "rounding")
"""Families on which an exact cause of a product or formula gives the bytes too: the first that shows the mistake."""
_RUN = 1 << 21
"""Work of a run and a judgement on further inputs."""
_PROOFS = 2
"""Cases of a backend in which further inputs confirm a cause."""
_SEARCHES = 2
"""Searches of all pairs of changes, seconds each, that find no exact cause."""


def explain(
    outcome: Outcome,
    history: SearchHistory,
    *,
    runs: Callable[[], tuple[Run, Run] | None] | None = None,
    limit: WorkLimit | None = None,
    further: FurtherRun | None = None,
) -> list[Explanation]:
    """Explanations of the first wrong stage: deviations that give the kernel's bytes, then shared memory and results
    that do not depend on the inputs, then signatures. Deviations of the first wrong result stand before results that
    vary from run to run.

    `history`: searches of earlier outcomes of the backend. This search is added to it. `runs`: a function that runs the
    case again; it gives the tensors of this run and those of the same case with the inputs of another seed, or None if
    the second run gave no results. It is called for a wrong outcome only. `limit`: stops the search for deviations;
    afterwards its `note` says what was left out, and no deviation is exact if it left out any. None: no limit.
    `further`: runs the case on inputs of other families, which an exact deviation must explain too.
    """
    limit = WorkLimit() if limit is None else limit
    wrong_stage = next((stage for stage in outcome.stages if not stage.passed), None)
    if wrong_stage is None:
        return []
    deviations = _deviations(outcome, wrong_stage, history, limit, further)
    explanations = explain_memory(outcome, wrong_stage) + deviations
    if not VARIATIONS.isdisjoint(wrong_stage.causes):  # results that vary are a symptom, and a step may be wrong too
        later = [stage for stage in outcome.stages if not stage.passed and not stage.causes]
        steps = _deviations(outcome, later[0], history, limit, further) if later else []
        explanations = [step for step in steps if step.exact] + explanations
    exact = not limit.note and not any(explanation.exact for explanation in explanations)
    # A kernel may return the amax that it is given.
    returns_amax = any(judged.subject.amax_given for judged in outcome.judged)
    explanations += explain_aliases(outcome, wrong_stage, exact=exact and not returns_amax)
    if runs is not None and (pair := runs()) is not None:
        explanations += explain_same_results(wrong_stage, *pair, exact=exact)
    return [*explanations, *signatures(outcome, wrong_stage)]


def _deviations(
    outcome: Outcome, wrong_stage: StageResult, history: SearchHistory, limit: WorkLimit, further: FurtherRun | None
) -> list[Explanation]:
    """Deviations that give the kernel's bytes of a wrong stage."""
    found = explain_quantize(outcome, wrong_stage, history, limit, further)
    if not any(each.exact for each in found):
        others = _other_deviations(outcome, wrong_stage, history, limit)
        if further is not None and outcome.confirms is None and not limit.note:
            again = partial(_other_deviations, outcome, wrong_stage, history, limit)
            others = _confirmed(others, again, history, limit, further)
        found += others
    # Deviations that were not tried may give the bytes too.
    return [each.with_untried_rivals() for each in found] if limit.note else found


def _other_deviations(
    outcome: Outcome,
    wrong_stage: StageResult,
    history: SearchHistory,
    limit: WorkLimit,
    refuted: frozenset[str] = frozenset(),
) -> list[Explanation]:
    """Deviations of products, formulas and decoding, and mistakes that the operation knows. `refuted`: causes of
    products that further inputs refute."""
    found = explain_fused_output(outcome, wrong_stage, limit)
    found += explain_gemm(outcome, wrong_stage, history, limit, refuted)
    found += _known_mistakes(outcome, wrong_stage, history, limit)
    found += explain_formula(outcome, wrong_stage, limit)
    return found + explain_decoding(outcome, wrong_stage, limit)


def _confirmed(
    explanations: list[Explanation],
    again: Callable[[frozenset[str]], list[Explanation]],
    history: SearchHistory,
    limit: WorkLimit,
    further: FurtherRun,
    without: frozenset[str] = frozenset(),
) -> list[Explanation]:
    """The explanations that other inputs do not refute. If no exact one is left and a search `again` `without` the
    refuted ones finds exact ones: these.

    The case runs on inputs of the first family of `_FURTHER` on which the kernel is wrong at the same stage, or in the
    same fused matrix. A cause that does not give the bytes there is refuted. A cause is confirmed `_PROOFS` times.
    """
    exact = [each for each in explanations if each.exact and history.confirmed[each.cause] < _PROOFS]
    for family in _FURTHER if exact else ():
        if not limit.may_compare(_RUN) or (outcome := further(family)) is None:
            continue
        wrong = next((stage for stage in outcome.stages if not stage.passed), None)
        if wrong is None or _subject(wrong.stage) != _subject(exact[0].stage):
            continue
        there = _other_deviations(outcome, wrong, SearchHistory(), limit)
        if limit.note:
            break
        given = {_kind(each.cause) for each in there if gives_every_byte(each.to_dict())}
        history.confirmed.update(each.cause for each in exact if _kind(each.cause) in given)
        weak = {_kind(each.cause) for each in there if is_weak(each.to_dict())}
        refuted = [each for each in exact if _kind(each.cause) not in given | weak]
        if not given and not refuted:
            continue
        kept = [each for each in explanations if each not in refuted]
        if any(each.exact for each in kept):
            return kept
        without |= {each.cause for each in refuted}
        others = [each for each in again(without) if each.exact and each.cause not in without]
        if others and not limit.note:
            return _confirmed(others, again, history, limit, further, without)
        return kept
    return explanations


def _kind(cause: str) -> str:
    """The cause without its numbers: a range of columns follows from the inputs."""
    return re.sub(r"\d[\d.]*", "#", cause)


def _subject(stage: str) -> str:
    """The quantized matrix of a stage, or the stage itself."""
    matrix, point, _ = stage.rpartition(".")
    return matrix if point else stage


def _known_mistakes(
    outcome: Outcome, wrong_stage: StageResult, history: SearchHistory, limit: WorkLimit
) -> list[Explanation]:
    """Mistakes of the wrong stage that its operation knows (`Outcome.causes`), if they give the kernel's result.

    If one mistake can be confirmed without a search, the causes of earlier cases are tried first: an exact one is the
    cause, and after `_SEARCHES` searches without an exact cause the others are possible causes.
    """
    confirms, stage, subject = outcome.confirms, wrong_stage.stage, outcome.subject
    given_up = history.searches[subject, stage, False] >= _SEARCHES
    if confirms is not None:
        for (contract, earlier), exact in sorted(history.confirmable.items(), key=lambda item: not item[1]):
            if contract == subject and (exact or given_up) and (sentence := confirms(earlier)):
                doubt = "" if exact else f"{GIVES_EVERY_BYTE}too few bytes exclude another change"
                words = f"{sentence}: the bytes are those of this change, as in an earlier case{doubt}"
                return [Explanation(earlier, words, stage, exact)]
        if given_up:
            return _still_ambiguous(confirms, history, subject, stage)
    search = outcome.causes.get(stage)
    explanations: dict[str, Explanation] = {}
    for cause in search(wrong_stage, limit) if search is not None else ():
        exact = not isinstance(cause, PossibleCause) or cause.exact
        explanations.setdefault(cause[0], Explanation(cause[0], cause[1], stage, exact=exact))
    found = list(explanations.values())
    if confirms is not None and not limit.note:
        alone = len([each for each in found if each.exact]) == 1
        history.searches[subject, stage, alone] += 1
        for each in found if alone or len(found) == 1 else ():
            history.confirmable[subject, each.cause] = each.exact
        if len(found) > 1 and not alone:
            history.ambiguous[subject] = {each.cause: each.exact for each in found}
    return found


def _still_ambiguous(
    confirms: Callable[[str], str], history: SearchHistory, subject: str, stage: str
) -> list[Explanation]:
    """Those of the causes of an earlier case that give the bytes of this case too. The others are refuted for good."""
    earlier = history.ambiguous.get(subject, {})
    left = {cause: sentence for cause in earlier if (sentence := confirms(cause))}
    if left:
        history.ambiguous[subject] = {cause: earlier[cause] for cause in left}
    return [
        Explanation(
            cause, f"{sentence}: the bytes are those of this change, as in an earlier case", stage, earlier[cause]
        )
        for cause, sentence in left.items()
    ]
