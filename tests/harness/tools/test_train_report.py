"""Results of a session of trainings: table, complaints, page, CSV; and the conditions of success."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.harness.tools.train import report
from narrowgauge.harness.tools.train.train import TrainingStep, TrainingTask
from narrowgauge.harness.tools.train.training import Training
from tests.harness.pages import LOOKS, needs_axe, violations

NASTY = """<script>alert(1)</script>&"'"""
ENTROPY = 1.5
RIGHT = {"reference_loss": 1.25, "stages": 10, "compared": 1000}


def training(*losses: float, recipe: str | None = "MXFP8BlockScaling", **task: object) -> Training:
    """A training with every step right."""
    given = TrainingTask(recipe, steps=len(losses))
    judged = {} if recipe is None else RIGHT
    return Training(replace(given, **task), [TrainingStep(loss, **judged) for loss in losses], seconds=2.0)  # type: ignore[arg-type]


def wrong() -> Training:
    result = training(3.0, 1.0)
    result.steps[1] = TrainingStep(1.0, 1.5, 10, 1000, [f"layer 1, step 2 fc1.y: {NASTY}"], 2)
    return result


def session() -> list[Training]:
    return [training(1.5, 1.0), wrong(), training(1.5, 1.25, recipe=None), training(1.5, 1.0, backend="reference")]


def test_final_loss_learning_and_agreement() -> None:
    one = training(9.0, *[1.0, 2.0] * 10)
    assert one.final == 1.5
    assert not one.learned(1.5)
    assert one.learned(1.5 + 1e-9)
    assert not training(math.nan).learned(ENTROPY)
    assert not training().learned(ENTROPY)
    assert training(1.0).passed(ENTROPY)
    assert not wrong().passed(ENTROPY)
    silent = training(1.0)
    silent.steps[0] = TrainingStep(1.0, 1.0)
    assert not silent.passed(ENTROPY)  # no element was compared
    assert training(1.0, recipe=None).passed(ENTROPY)  # no stage to judge
    stopped = training(1.0, steps=2)
    assert not stopped.passed(ENTROPY)
    assert training(1.0, 1.75).loss_difference == 0.5
    assert training(1.0, recipe=None).loss_difference is None


def test_complaints() -> None:
    assert report.failure_reasons(training(1.0), ENTROPY) == []
    first, second, third = report.failure_reasons(wrong(), ENTROPY)
    assert first == "MXFP8BlockScaling, native: 2 wrong stages in 1 of 2 steps"
    assert second == f"MXFP8BlockScaling, native: layer 1, step 2 fc1.y: {NASTY}"
    assert third == "MXFP8BlockScaling, native: does not learn: the loss of the last steps is 2, not below 1.5"
    died = Training(TrainingTask("Float8BlockScaling", steps=5), error="its process died (signal SIGSEGV)")
    assert report.failure_reasons(died, ENTROPY) == [
        "Float8BlockScaling, native: ended after 0 of 5 steps: its process died (signal SIGSEGV)"
    ]
    silent = training(1.0)
    silent.steps[0] = TrainingStep(1.0, 1.0)
    assert report.failure_reasons(silent, ENTROPY) == ["MXFP8BlockScaling, native: nothing was compared in 1 step"]


def test_a_training_that_ran_too_short_is_not_accused() -> None:
    """The reference in high precision has not learned in as many steps either."""
    short = training(2.0, 1.75)
    reference = training(2.0, 1.75, recipe=None, backend="reference")
    (reason,) = report.failure_reasons(short, ENTROPY, [short, reference])
    assert reason == (
        "MXFP8BlockScaling, native: right in every step, but too short to learn: the loss of the last steps is 1.875, "
        "not below 1.5, nor is the reference's in high precision after 2 steps; give more --steps"
    )
    summary = report.sentence([short, reference], ENTROPY)
    assert summary == "2 trainings of 2 steps: right, and too short to learn; give more --steps"
    html = report.render([short, reference], {}, ENTROPY)
    assert '<h1 class="banner unsupported">' in html
    assert html.count('<span class="badge unsupported">– too short</span>') == 2
    assert "✗" not in html
    some = [short, reference, wrong()]
    assert report.sentence(some, ENTROPY).endswith(
        "3 trainings did not pass; 2 of them are right and too short to learn"
    )
    assert '<h1 class="banner fail">' in report.render(some, {}, ENTROPY)
    assert report.failure_reasons(reference, ENTROPY, [reference])[0].startswith("high precision, reference: too short")
    assert not short.passed(ENTROPY)
    wrong_step, learned = wrong(), training(1.0, 1.0, recipe=None, backend="reference")
    native = training(2.0, 1.75, recipe=None)
    unfinished = training(2.0, recipe=None, backend="reference", steps=2)
    diverged = training(2.0, math.nan)
    for one, other in (
        (short, learned), (short, native), (short, unfinished), (wrong_step, reference), (diverged, reference)
    ):  # fmt: skip
        assert not one.too_short([one, other], ENTROPY)


def test_page_and_steps(tmp_path: Path) -> None:
    path = report.write(session(), {"backend": NASTY}, ENTROPY, tmp_path)
    html = path.read_text(encoding="utf-8")
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert") == 2
    assert '<h1 class="banner fail">' in html
    assert html.count("<polyline") == 4  # in the panel of the only recipe: high precision and all three runs
    assert 'class="curve backend plain"' in html
    assert 'class="curve reference"' in html
    with (tmp_path / "losses.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[3] == {
        "recipe": "MXFP8BlockScaling", "backend": "native", "device": "cpu", "seed": "0", "step": "1", "loss": "1.0",
        "loss_reference": "1.5", "stages": "10", "compared": "1000", "wrong": "2",
    }  # fmt: skip
    assert rows[4]["recipe"] == "high precision"
    assert rows[4]["loss_reference"] == ""


@needs_axe
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_accessibility(width: int, dark: bool, tmp_path: Path) -> None:
    page = report.write(session(), {"backend": NASTY}, ENTROPY, tmp_path)
    assert violations(page, tmp_path, width, dark=dark) == ("", [])
