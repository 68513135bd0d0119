"""Report of a session: sentences, a table, a page with the curves, and every step as CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.harness.report import text
from narrowgauge.harness.report.markdown import cut
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.replace_files import replace_files
from narrowgauge.harness.tools.train.loss_figure import HEIGHT, WIDTH, loss_figure
from narrowgauge.harness.tools.train.training import LAST, Training

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "index.html"
HIGH_PRECISION = "high precision"
SHORT = "unsupported"
"""Outcome with the mark and colour of a training that is right and too short to learn: no verdict on its kernels."""
SHOWN = 5
"""Wrong stages of a training that are printed."""
COLUMNS = ("recipe", "layers", "final loss", "apart", "steps", "agree", "stages", "elements", "time")
EXPLAINED = (
    f"final loss: mean of the last {LAST} steps, in nats. apart: the largest distance from the reference's loss of the "
    "same weights, in no verdict. agree: steps of which every stage is right, given the layer's own result of the one "
    "before."
)


def name(training: Training) -> str:
    """What was trained: `NVFP4BlockScaling, native`."""
    return f"{training.task.recipe or HIGH_PRECISION}, {training.task.backend}"


def line(training: Training) -> str:
    """A finished training as a line: final loss, judged elements and wrong elements, its time."""
    parts = [f"final loss {text.number(training.final) or 'none'}"]
    if training.judged:
        stages, wrong = (sum(getattr(step, count) for step in training.steps) for count in ("stages", "mismatches"))
        parts.append(f"{text.plural(stages, 'stage')} judged, {text.number(wrong)} wrong")
    if not training.complete:
        parts.append(_ended(training))
    return f"{name(training)}: {', '.join(parts)}, {text.duration(training.seconds)}"


def _ended(training: Training) -> str:
    """How far a training came that is not complete, and why no further."""
    steps = f"{len(training.steps)} of {text.plural(training.task.steps, 'step')}"
    return f"ended after {steps}: {cut(training.error)}" if training.error else f"after {steps} not at its end yet"


def cells(training: Training, count: Callable[[int], str] = text.number) -> list[str]:
    """A row of the table, its large counts as `count` writes them. What was not measured is empty."""
    task = training.task
    return [
        task.recipe or HIGH_PRECISION,
        task.backend,
        text.number(training.final),
        "" if training.loss_difference is None else f"{training.loss_difference:.2g}",
        f"{len(training.steps)}/{task.steps}",
        text.number(training.agreeing) if training.judged else "",
        count(sum(step.stages for step in training.steps)) if training.judged else "",
        count(sum(step.compared for step in training.steps)) if training.judged else "",
        text.duration(training.seconds),
    ]


def failure_reasons(training: Training, entropy: float, trainings: Sequence[Training] = ()) -> list[str]:
    """Reasons why a training did not pass: a few wrong stages first. Empty for a passed training. `trainings`: all of
    the session, which show if the steps are too few to learn."""
    reasons = []
    if training.judged and (wrong_steps := [step for step in training.steps if step.mismatches]):
        stages = text.plural(sum(step.mismatches for step in wrong_steps), "wrong stage")
        reasons.append(f"{stages} in {len(wrong_steps)} of {text.plural(len(training.steps), 'step')}")
        reasons += [cut(reason) for reason in training.wrong[:SHOWN]]
    if training.judged and (empty := sum(not step.compared for step in training.steps)):
        reasons.append(f"nothing was compared in {text.plural(empty, 'step')}")
    if not training.complete:
        reasons.append(_ended(training))
    elif not training.learned(entropy):
        limit = text.number(float(f"{entropy:.4g}"))
        loss = f"the loss of the last steps is {text.number(training.final)}, not below {limit}"
        if training.too_short(trainings, entropy):
            right = "right in every step, but " if training.judged else ""
            steps = text.plural(training.task.steps, "step")
            reasons.append(
                f"{right}too short to learn: {loss}, nor is the reference's in high precision after {steps}; give more "
                "--steps"
            )
        else:
            reasons.append(f"does not learn: {loss}")
    return [f"{name(training)}: {reason}" for reason in reasons]


def not_compared(training: Training) -> str:
    """Values that the layers did not report, with their numbers of steps. Empty if all values were reported."""
    counts = Counter(stage for step in training.steps for stage in step.not_reported)
    stages = ", ".join(f"{stage} in {text.plural(count, 'step')}" for stage, count in sorted(counts.items()))
    return f"{name(training)}: not compared: {stages}" if stages else ""


def outcome(training: Training, trainings: Sequence[Training], entropy: float) -> str:
    """Outcome whose mark and colour a training of a session has: `pass`, `fail`, or `SHORT`."""
    if training.passed(entropy):
        return "pass"
    return SHORT if training.too_short(trainings, entropy) else "fail"


def sentence(trainings: Sequence[Training], entropy: float) -> str:
    """The session as a sentence."""
    failed = [training for training in trainings if not training.passed(entropy)]
    if failed or not trainings:
        unfinished = sum(not training.complete for training in failed)
        rest = f", {unfinished} of which did not take every step" if unfinished else ""
        short = sum(training.too_short(trainings, entropy) for training in failed)
        if failed and short == len(failed):
            length = text.plural(failed[0].task.steps, "step")
            return f"{text.plural(short, 'training')} of {length}: right, and too short to learn; give more --steps"
        if short:
            rest += f"; {short} of them are right and too short to learn"
        return f"{len(failed)} of {text.plural(len(trainings), 'training')} did not pass{rest}"
    steps = [step for training in trainings for step in training.steps]
    judged = (
        f"{text.plural(sum(step.stages for step in steps), 'stage')}, {text.number(sum(s.compared for s in steps))}"
    )
    return f"{text.plural(len(trainings), 'training')} agree and learn: {judged} elements compared"


def print_result(trainings: Sequence[Training], entropy: float, console: Console) -> None:
    """Print the table and the failures."""
    from rich.text import Text

    from narrowgauge.harness.report.terminal import print_table

    marks = {v: v if console.options.ascii_only else glyph for v, glyph in text.GLYPHS.items()}
    verdicts = [outcome(training, trainings, entropy) for training in trainings]
    rows = []
    for verdict, training in zip(verdicts, trainings, strict=True):
        recipe, layers, *figures = cells(training, text.compact)
        rows.append([f"{marks[verdict]} {recipe}, {layers}", *figures])
    colours = {"pass": "", SHORT: "yellow", "fail": "bold red"}
    styles = [colours[verdict] for verdict in verdicts]
    print_table((", ".join(COLUMNS[:2]), *COLUMNS[2:]), rows, console, styles=styles)
    console.print(Text(EXPLAINED, style="dim"))
    for training, verdict in zip(trainings, verdicts, strict=True):
        for line_ in failure_reasons(training, entropy, trainings):
            style = "yellow" if verdict == SHORT else "red"
            console.print(line_, markup=False, highlight=False, soft_wrap=True, style=style)
    for line_ in filter(None, map(not_compared, trainings)):
        console.print(line_, markup=False, highlight=False, soft_wrap=True)


def write(trainings: Sequence[Training], environment: dict[str, str], entropy: float, directory: Path) -> Path:
    """Write `index.html` and `losses.csv` into `directory`. Returns the page's path."""
    with replace_files(directory, last=PAGE) as fresh:
        with (fresh / "losses.csv").open("w", encoding="utf-8", newline="") as file:
            _write_steps(trainings, csv.writer(file))
        (fresh / PAGE).write_text(render(trainings, environment, entropy), encoding="utf-8")
    return directory / PAGE


def _write_steps(trainings: Sequence[Training], writer: csv._writer) -> None:  # type: ignore[name-defined]
    writer.writerow(
        ["recipe", "backend", "device", "seed", "step", "loss", "loss_reference", "stages", "compared", "wrong"]
    )
    for training in trainings:
        task = training.task
        for number, step in enumerate(training.steps):
            reference_loss = "" if step.reference_loss is None else step.reference_loss
            writer.writerow(
                [task.recipe or HIGH_PRECISION, task.backend, task.device, task.seed, number, step.loss, reference_loss,
                 step.stages, step.compared, step.mismatches]
            )  # fmt: skip


def render(trainings: Sequence[Training], environment: dict[str, str], entropy: float) -> str:
    """The page. Text from trainings and the environment is escaped."""
    outcomes = [outcome(training, trainings, entropy) for training in trainings]
    steps = max((training.task.steps for training in trainings), default=0)
    drawn = loss_figure(trainings, entropy, steps)
    return template.render(
        Path(__file__).with_name("train.html"),
        name="narrowgauge train",
        verdict=next((name for name in ("fail", SHORT) if name in outcomes), "pass") if trainings else "fail",
        short=SHORT,
        sentence=sentence(trainings, entropy),
        environment=environment,
        figure=drawn,
        kinds={line.kind: line.name for panel in drawn.panels for line in panel.lines},
        width=WIDTH,
        height=HEIGHT,
        entropy=entropy,
        columns=COLUMNS,
        explained=EXPLAINED,
        rows=list(zip(outcomes, map(cells, trainings), strict=True)),
        sentences=[reason for training in trainings for reason in failure_reasons(training, entropy, trainings)],
        left_out=list(filter(None, map(not_compared, trainings))),
    )
