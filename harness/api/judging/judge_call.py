"""Calls of an assertion: default settings, judgement, diagnosis, and the exception for a wrong result."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import torch

from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.judging.save_arguments import reproduction
from narrowgauge.harness.api.verdict import Verdict, WrongResult
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.diagnosis.explain import explain
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import ASSERTION, PER_ELEMENT, WorkLimit
from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.spec.arguments import dtype_name

P = ParamSpec("P")
DIAGNOSES = ("quick", "full")


@dataclass
class Judgement:
    """The result of an assertion, before the diagnosis."""

    outcome: Outcome
    label: str
    """Recipe and shape: `nvfp4 2048x2048`."""
    subject: torch.Tensor
    """The tensor with the dtype and device of the report."""
    diagnose: str
    saved: dict[str, Any] = field(default_factory=dict)
    """Arguments saved in place of the call's arguments: recorded results in place of a function."""


Judge = Callable[..., Judgement]
_JUDGES: dict[Callable[..., None], Judge] = {}


def assertion(judge: Callable[P, Judgement]) -> Callable[P, None]:
    """The function that raises `WrongResult` if `judge` finds the result wrong."""

    @functools.wraps(judge)
    def assert_correct(*args: P.args, **kwargs: P.kwargs) -> None:
        __tracebackhide__ = True  # pytest shows the line of the caller
        verdict, judgement = verdict_of(judge, args, kwargs)
        if not verdict.passed:
            raise WrongResult(_with_reproduction(verdict, judgement, judge, args, kwargs))

    assert_correct.__signature__ = inspect.signature(judge).replace(return_annotation=None)  # type: ignore[attr-defined]
    assert_correct.__annotations__ = judge.__annotations__ | {"return": None}
    _JUDGES[assert_correct] = judge
    return assert_correct


def judge_of(function: Callable[..., None]) -> Judge:
    """The judge of an assertion. Raises TypeError for any other object."""
    try:
        return _JUDGES[function]
    except (KeyError, TypeError):
        raise TypeError(
            f"explain takes an assertion, such as narrowgauge.assert_quantized, and its arguments; not {function!r}"
        ) from None


def verdict_of(judge: Judge, args: Any, kwargs: Mapping[str, Any]) -> tuple[Verdict, Judgement]:
    """The verdict of a call, and its judgement."""
    global _apart_from_graphs  # noqa: PLW0603  # the compiler warns of caches of functions and of changed lists
    if "torch._dynamo" not in sys.modules:
        return _judge(judge, args, kwargs)
    # The caller may be compiled: a judge is not, and the graph breaks here. Importing the compiler takes seconds.
    if _apart_from_graphs is None:
        reason = "narrowgauge judges results outside of compiled graphs"
        _apart_from_graphs = torch.compiler.disable(_judge, reason=reason)  # type: ignore[no-untyped-call]
    return _apart_from_graphs(judge, args, kwargs)


_apart_from_graphs: Callable[..., tuple[Verdict, Judgement]] | None = None
"""`_judge`, not compiled."""


def _judge(judge: Judge, args: Any, kwargs: Mapping[str, Any]) -> tuple[Verdict, Judgement]:
    with default_settings():
        if type(torch.empty(0)) is not torch.Tensor:
            raise TypeError(
                f"{judge.__name__} needs the numbers of its arguments; under FakeTensorMode tensors have none: call it "
                "outside of the mode"
            )
        judgement = judge(*args, **kwargs)
        if judgement.diagnose not in DIAGNOSES:
            raise ValueError(f"diagnose is {' or '.join(map(repr, DIAGNOSES))}, not {judgement.diagnose!r}")
        outcome = judgement.outcome
        decide(outcome.stages)
        wrong = [stage for stage in outcome.stages if not stage.passed]
        explanations, note = _diagnose(outcome, _limit(judgement.diagnose, outcome)) if wrong else ([], "")
    subject = judgement.subject
    verdict = Verdict(
        judge.__name__,
        f"{judgement.label} {dtype_name(subject.dtype)} on {subject.device}",
        f"{wrong[0].stage}: {wrong[0].sentence}" if wrong else "",
        plain_value(explanations),
        plain_value([stage.finding for stage in wrong if stage.finding is not None]),
        plain_value([stage.entry() for stage in outcome.stages]),
        note,
    )
    return verdict, judgement


def _limit(diagnose: str, outcome: Outcome) -> WorkLimit:
    """Limit of the diagnosis of an outcome."""
    if diagnose == "full":
        return WorkLimit()
    return WorkLimit(ASSERTION + PER_ELEMENT * sum(tensor.numel() for tensor in outcome.outputs.values()))


def _diagnose(outcome: Outcome, limit: WorkLimit) -> tuple[list[dict[str, Any]], str]:
    """Explanations of a wrong outcome, and the reason if not all deviations were tried. The diagnosis of a call does
    not depend on earlier calls. A diagnosis that fails costs itself, not the verdict."""
    try:
        return [explanation.to_dict() for explanation in explain(outcome, SearchHistory(), limit=limit)], limit.note
    except Exception as error:
        return [], f"no diagnosis: {type(error).__name__}: {error}"


def _with_reproduction(
    verdict: Verdict, judgement: Judgement, judge: Judge, args: Any, kwargs: Mapping[str, Any]
) -> Verdict:
    """The verdict with a command that repeats the failure on saved arguments."""
    bound = inspect.signature(judge).bind(*args, **kwargs)
    # Arguments without a name of their own are saved by the judge, under the names that it gives them.
    unnamed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {n: v for n, v in bound.arguments.items() if bound.signature.parameters[n].kind not in unnamed}
    arguments = named | judgement.saved
    line = reproduction(judge.__name__, arguments, judgement.label)
    return replace(verdict, reproduction=line)
