"""Judging one case, and the explanations of a wrong outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported, error_location
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case

if TYPE_CHECKING:
    from narrowgauge.harness.diagnosis.explain_memory import Run
    from narrowgauge.harness.diagnosis.explanation import Explanation
    from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
    from narrowgauge.harness.inputs.inputs import Inputs
    from narrowgauge.harness.operations.stages.outcome import Outcome


BETWEEN_RUNS = ("memory", "repeat")
"""Stages that compare the variations of a backend: they need all of them."""
_CONDITIONS = 2
"""Failures of a stage whose conditions are searched."""
_SECONDS = 1.0
"""Estimated seconds of a core (`Case.seconds`) for the runs of a search for conditions."""
_LEAST = 16
"""Runs that exclude chance at least: 8 inputs with each value of a key."""


def judge(case: Case, inputs: Inputs, backend: Backend, *, sharing: int = 1, brief: bool = False) -> Outcome:
    """The outcome of a case. `sharing`: number of cases of the run that share its false alarms. `brief`: a single
    variation of the backend runs, without figures for information.

    Raises BackendError and Unsupported, as the backend does.
    """
    from narrowgauge.harness.checks.statistics.decision import decide
    from narrowgauge.harness.diagnosis.search.history import history_of
    from narrowgauge.harness.operations.registry import operation_of

    backend.repeats, backend.concurrency, backend.host.autograd = case.repeats, case.concurrency, case.autograd
    backend.brief = brief
    outcome = operation_of(case)(case, inputs, backend)
    tensors = [(judged.oracle.amax, judged.oracle.shape) for judged in outcome.judged if judged.oracle.amax is not None]
    single = [(float(amax), shape) for amax, shape in tensors if amax.numel() == 1]
    history_of(backend).begin_case([amax for amax, _ in single], [shape for _, shape in single])
    decide(outcome.stages, sharing)
    return outcome


def explained(
    outcome: Outcome,
    backend: Backend,
    *,
    runs: Callable[[], tuple[Run, Run] | None] | None = None,
    limit: WorkLimit | None = None,
    further: FurtherCases | None = None,
    part: bool = False,
) -> list[dict[str, Any]]:
    """Explanations of a wrong outcome of `backend`. A diagnosis that fails costs itself, not the verdict.

    `runs`, `limit` and `further`: as of `harness.diagnosis.explain.explain`. `part`: the outcome is of a part of
    the inputs of a case before, and is no further evidence.
    """
    from narrowgauge.harness.diagnosis.explain import explain
    from narrowgauge.harness.diagnosis.search.history import history_of

    history = history_of(backend)
    evidence, signs = len(history.left_out), dict(history.signs)
    try:
        condition = further.autograd_cause if further is not None and further.needs_autograd() else ""
        if condition:
            next(stage for stage in outcome.stages if not stage.passed).causes.append(condition)
        found = explain(outcome, history, runs=runs, limit=limit, further=further)
        # In plain calls the kernel has no deviation: one that gives the bytes is no rival of the condition.
        if further is not None and not condition:
            found += further.conditions(outcome)
        entries = [explanation.to_dict() for explanation in found]
        return [entry | {"exact": entry["exact"] and condition in ("", entry["cause"])} for entry in entries]
    except HostLost:
        raise
    except Exception as error:
        words = f"no diagnosis: {type(error).__name__}: {error}{error_location(error)}"
        return [{"cause": "no-diagnosis", "sentence": words, "stage": "", "exact": False}]
    finally:
        if part:
            del history.left_out[evidence:]
            history.signs = signs


def two_runs(case: Case, inputs: Inputs, outcome: Outcome, backend: Backend, seed: int) -> tuple[Run, Run] | None:
    """The tensors of a case, and of the same case on the inputs of another seed. None if a run has no results."""
    from narrowgauge.harness.diagnosis.explain_memory import Run
    from narrowgauge.harness.operations.registry import make_inputs
    from narrowgauge.reference import ops

    reference = Backend.local("reference", ops)
    others = make_inputs(case, seed=seed).to(str(inputs.x.device.type))
    try:
        other = judge(case, others, backend)
    except (BackendError, Unsupported):
        return None
    first = Run(inputs.tensors, outcome.outputs, judge(case, inputs, reference).outputs)
    return first, Run(others.tensors, other.outputs, judge(case, others, reference).outputs)


class FurtherCases:
    """Runs a failing case again: on inputs of other families, in plain calls, and with changed values of its keys."""

    def __init__(self, case: Case, inputs: Inputs, backend: Backend, seed: int, *, brief: bool = False) -> None:
        """`brief`: a single run shows whether the kernel is wrong (`judge`)."""
        self._case, self._inputs, self._backend, self._seed, self._brief = case, inputs, backend, seed, brief
        self._device = inputs.x.device.type
        self._lost = False

    def __call__(self, family: str) -> Outcome | None:
        """The outcome on inputs of `family`. None for the family of the case, for a family that the operation does not
        have, and if the backend has no result."""
        if family == self._case.inputs:
            return None
        return self._outcome(replace(self._case, inputs=family, repeats=0, concurrency="sequential"))

    @property
    def autograd_cause(self) -> str:
        """The cause of a case that fails in these calls alone (`harness.diagnosis.explain_memory`)."""
        return f"autograd:{self._case.autograd}"

    def needs_autograd(self) -> bool:
        """Whether the case passes in plain calls, and fails in the calls of its key `autograd`."""
        if self._case.autograd == "plain":
            return False
        plain = self._outcome(replace(self._case, autograd="plain", repeats=0, concurrency="sequential"), self._inputs)
        return plain is not None and all(stage.passed for stage in plain.stages)

    def conditions(self, outcome: Outcome) -> list[Explanation]:
        """Values of keys of the case without which the kernel is right (`harness.diagnosis.search.conditions`).

        They are searched in the first `_CONDITIONS` failures of a stage of an operation and recipe, for `_SECONDS` of
        estimated time, and not for a kernel with random bits of its own: its judgement takes many draws.
        """
        from narrowgauge.harness.diagnosis.search.conditions import Stopped, conditions
        from narrowgauge.harness.diagnosis.search.history import history_of

        case, searches = self._case, history_of(self._backend).conditions
        stage = next(stage.stage for stage in outcome.stages if not stage.passed)
        kind = case.operation, case.recipe_label, stage
        own = case.chance and self._backend.declares.get("random") == "own"
        if own or _LEAST * _estimated(case) > _SECONDS or searches[kind] >= _CONDITIONS:
            return []
        searches[kind] += 1
        spent = 0.0
        plain = replace(case, repeats=0, concurrency="sequential")
        if not self._is_drawn() and "normal" in case.families():
            plain = replace(plain, inputs="normal")

        def passes(changed: Case, drawn: Case, number: int) -> bool | None:
            nonlocal spent
            spent += _estimated(changed)
            if spent > _SECONDS:
                raise Stopped
            try:
                given = self._inputs_of(changed, drawn, self._seed + 1 + number)
                found = None if given is None else self._outcome(changed, given)
            except HostLost:
                raise
            except Exception:  # a changed case without inputs or judgement is no evidence
                return None
            return None if found is None else all(stage.passed for stage in found.stages)

        return conditions(plain, stage, passes)

    def _inputs_of(self, case: Case, drawn: Case, seed: int) -> Inputs | None:
        """The inputs of a case, with the numbers of another case if the shapes are equal. None: a dtype does not hold
        the numbers."""
        from narrowgauge.harness.inputs.inputs import Inputs
        from narrowgauge.harness.operations.registry import make_inputs

        own = make_inputs(case, seed=seed)
        if case.shape != drawn.shape or case is drawn:
            return own.to(self._device)
        tensors, others = dict(own.tensors), make_inputs(drawn, seed=seed).tensors
        for name, tensor in tensors.items():
            if name in others and others[name].shape == tensor.shape:
                tensors[name] = others[name].to(tensor.dtype)
                back = tensors[name].to(others[name].dtype)
                if not bool(((back == others[name]) | (others[name] != others[name])).all()):
                    return None
        return Inputs(tensors, own.counters).to(self._device)

    def _is_drawn(self) -> bool:
        """Whether the inputs depend on the seed."""
        from narrowgauge.harness.operations.registry import make_inputs

        try:
            others = make_inputs(self._case, seed=self._seed + 1).tensors
        except ValueError:  # a captured tensor
            return False
        return any(not others[name].equal(tensor.cpu()) for name, tensor in self._inputs.tensors.items())

    def _outcome(self, case: Case, inputs: Inputs | None = None) -> Outcome | None:
        """The outcome of a case, on its own inputs or on these.

        None if the inputs cannot be made, or the kernel gives no result.
        """
        from narrowgauge.harness.operations.registry import make_inputs

        if self._lost or case.inputs not in (*case.families(), self._case.inputs) or case.problem() is not None:
            return None
        try:
            given = make_inputs(case, seed=self._seed).to(self._device) if inputs is None else inputs
            return judge(case, given, self._backend, brief=self._brief)
        except HostLost:  # the next call starts a new host
            self._lost = True
        except (BackendError, Unsupported, ValueError):
            pass
        return None


def _estimated(case: Case) -> float:
    """Seconds of a core for a case, the same on every machine."""
    fixed, each = case.seconds
    return fixed + each * case.work
