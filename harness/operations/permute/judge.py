"""Judgement of permute: exact, up to the order of the rows inside a section."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import TensorForm
from narrowgauge.harness.checks.exact import exact_floats, exact_integers
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.permute.case import PermuteCase
from narrowgauge.harness.operations.permute.deviations import Routing, wrong_routing, wrong_rows
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import float_views
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated

STABLE = "stable"


def judge_permute(case: PermuteCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge permute.

    Stages: `sizes`; `source_rows`, each choice once in the section of its expert, in the order of tokens and choices if
    the backend declares it; and `x`, the rows that the kernel's own source_rows name. Rows of no choice have any x.
    """
    x, ids = inputs.x, inputs["expert_ids"]
    options = {name: getattr(case, name) for name in ("alignment", "capacity")}
    passed = {name: value for name, value in options.items() if value != getattr(type(case), name)}
    right = reference.permute(x, ids, experts=case.experts, **options)
    names = ("x", "source_rows", "sizes")
    forms = {name: TensorForm(tuple(t.shape), t.dtype) for name, t in zip(names, right, strict=True)}
    stable = backend.declares.get("permute") == STABLE
    # The order of a section may differ between runs, and rows of no choice need not be written.
    free = {"x": torch.ones_like(right[0], dtype=torch.bool)}
    if not stable:
        free["source_rows"] = torch.ones_like(right[1], dtype=torch.bool)

    def call(given: Tensors) -> Tensors:
        return backend.results("permute", forms, given["x"], given["expert_ids"], experts=case.experts, **passed)

    outputs, protection, seconds = repeated(backend, x.device, {"x": x, "expert_ids": ids}, call, free=free)
    found = {name: dense(tensor) for name, tensor in outputs.items()}
    outcome = Outcome(protection, outputs, seconds=seconds)
    routing = Routing(case, ids, right[1], right[2], stable)
    sources = routing.comparable(found["source_rows"])
    search = partial(wrong_routing, routing, sources, found["sizes"])
    outcome.causes |= {"sizes": search, "source_rows": search, "x": partial(wrong_rows, routing, x, found)}
    outcome.stages.append(_integers("sizes", found["sizes"], right[2], "sizes"))
    outcome.stages.append(_integers("source_rows", sources, right[1], "source rows"))
    outcome.stages.append(_rows(found["x"], found["source_rows"], x, case))
    outcome.actual, outcome.expected = found["x"], right[0]
    return outcome


def _integers(name: str, actual: torch.Tensor, expected: torch.Tensor, noun: str) -> StageResult:
    def describe(row: int, _: int) -> dict[str, Any]:
        return {"row": row, "column": 0, "expected": int(expected[row]), "actual": int(actual[row])}

    one, other = actual.view(-1, 1), expected.view(-1, 1)
    return exact_integers(name, one, other, noun=noun, describe=describe)


def _rows(actual: torch.Tensor, sources: torch.Tensor, x: torch.Tensor, case: PermuteCase) -> StageResult:
    """Compare the rows that name a choice with the rows of its token."""
    named = ((sources >= 0) & (sources < len(x) * case.choices)).nonzero()[:, 0]
    own, expected = actual[named], x[sources[named] // case.choices]

    def describe(row: int, column: int) -> dict[str, Any]:
        here, token = int(named[row]), int(sources[named[row]]) // case.choices
        return {"row": here, "column": column, "token": token, **float_views(expected[row, column], own[row, column])}

    return exact_floats("x", own, expected, noun="elements of x", describe=describe)
