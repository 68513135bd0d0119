"""The operation update-scale."""

from __future__ import annotations

import torch

from narrowgauge.harness.checks.finding import float_view
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table, neighbours, wrong_element
from narrowgauge.harness.operations.update_scale.case import UpdateScaleCase
from narrowgauge.harness.operations.update_scale.histories import HISTORIES
from narrowgauge.harness.operations.update_scale.judge import judge_update_scale


def inputs(make: Maker[UpdateScaleCase]) -> Inputs:
    """x: the history (H, N). scale.x (N,): the scales before the update."""
    rows, tensors = make.case.shape
    history = HISTORIES[make.case.inputs](make.draw("x"), rows, tensors)
    # Scales that do not follow from the history: an unchanged scale differs from a computed scale.
    return Inputs({"x": history, "scale.x": 1.5 + 0.5 * make.draw("scale of x").uniform(tensors)})


def scales_table(inputs: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """Scale of a tensor, with the scales around it."""
    actual, expected = outcome.actual, outcome.expected
    assert actual is not None
    assert expected is not None
    if not actual.numel():
        return None
    wrong = wrong_element(outcome, "scale") or wrong_element(outcome, "history") or {"tensor": 0}
    tensor = min(place[1], len(actual) - 1) if place is not None else wrong["tensor"]
    table = Table("scales", ("tensor", "first amax", "largest amax", "before", "expected", "", "actual", ""))
    for _, n in neighbours(0, tensor, actual.unsqueeze(0)):
        amaxes, before = inputs.x[:, n], inputs["scale.x"][n]
        largest = amaxes.nan_to_num(nan=0.0, posinf=torch.inf).amax()
        cells = [str(n), *(str(float(number)) for number in (amaxes[0], largest, before))]
        cells += [str(part) for number in (expected[n], actual[n]) for part in float_view(number)]
        table.add_row(*cells, style="" if float_view(expected[n]) == float_view(actual[n]) else "bold red")
    return table


OPERATION = Operation(case=UpdateScaleCase, inputs=inputs, judge=judge_update_scale, show=scales_table)
