"""What a session says: sentences, a table, a page with the curves, and every step as CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.harness.report import text
from narrowgauge.harness.report.markdown import cut
from narrowgauge.harness.report.page import template
from narrowgauge.harness.report.replace_files import replacing
from narrowgauge.harness.report.terminal import compact
from narrowgauge.harness.tools.train.curves import HEIGHT, WIDTH, figure
from narrowgauge.harness.tools.train.training import LAST, Training

if TYPE_CHECKING:
    from rich.console import Console

PAGE = "index.html"
HIGH_PRECISION = "high precision"
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
    """A training that has ended, in one line: final loss, what was judged and how much of it is wrong, its time."""
    words = [f"final loss {text.number(training.final) or 'none'}"]
    if training.judged:
        stages, wrong = (sum(getattr(step, part) for step in training.steps) for part in ("stages", "mismatches"))
        words.append(f"{text.plural(stages, 'stage')} judged, {text.number(wrong)} wrong")
    if not training.complete:
        words.append(_ended(training))
    return f"{name(training)}: {', '.join(words)}, {text.duration(training.seconds)}"


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
        "" if training.apart is None else f"{training.apart:.2g}",
        f"{len(training.steps)}/{task.steps}",
        text.number(training.agreeing) if training.judged else "",
        count(sum(step.stages for step in training.steps)) if training.judged else "",
        count(sum(step.compared for step in training.steps)) if training.judged else "",
        text.duration(training.seconds),
    ]


def complaints(training: Training, entropy: float) -> list[str]:
    """Why a training did not pass: the wrong stages first, a few of them; nothing where it did."""
    found = []
    if training.judged and (bad := [step for step in training.steps if step.mismatches]):
        stages = text.plural(sum(step.mismatches for step in bad), "wrong stage")
        found.append(f"{stages} in {len(bad)} of {text.plural(len(training.steps), 'step')}")
        found += [cut(words) for words in training.wrong[:SHOWN]]
    if training.judged and (empty := sum(not step.compared for step in training.steps)):
        found.append(f"nothing was compared in {text.plural(empty, 'step')}")
    if not training.complete:
        found.append(_ended(training))
    elif not training.learned(entropy):
        known = text.number(float(f"{entropy:.4g}"))
        found.append(f"does not learn: the loss of the last steps is {text.number(training.final)}, not below {known}")
    return [f"{name(training)}: {words}" for words in found]


def not_compared(training: Training) -> str:
    """What its layers did not report in some step; nothing where they reported everything."""
    counts = Counter(what for step in training.steps for what in step.unseen)
    named = ", ".join(f"{what} in {text.plural(count, 'step')}" for what, count in sorted(counts.items()))
    return f"{name(training)}: not compared: {named}" if named else ""


def sentence(trainings: Sequence[Training], entropy: float) -> str:
    """The session in one sentence."""
    bad = [one for one in trainings if not one.passed(entropy)]
    if bad or not trainings:
        unfinished = sum(not one.complete for one in bad)
        rest = f", {unfinished} of which did not take every step" if unfinished else ""
        return f"{len(bad)} of {text.plural(len(trainings), 'training')} did not pass{rest}"
    steps = [step for one in trainings for step in one.steps]
    judged = (
        f"{text.plural(sum(step.stages for step in steps), 'stage')}, {text.number(sum(s.compared for s in steps))}"
    )
    return f"{text.plural(len(trainings), 'training')} agree and learn: {judged} elements compared"


def print_result(trainings: Sequence[Training], entropy: float, console: Console) -> None:
    """Print the table, and what is wrong."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    marks = {v: v if console.options.ascii_only else glyph for v, glyph in text.GLYPHS.items()}
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("")
    table.add_column(COLUMNS[0], overflow="fold", min_width=12)
    table.add_column(COLUMNS[1], overflow="fold", min_width=9)
    for column in COLUMNS[2:]:
        table.add_column(column, justify="right", no_wrap=True)
    for one in trainings:
        passed = one.passed(entropy)
        row = [Text(cell) for cell in (marks["pass" if passed else "fail"], *cells(one, compact))]
        table.add_row(*row, style="" if passed else "bold red")
    console.print(table)
    console.print(Text(EXPLAINED, style="dim"))
    for words in (words for one in trainings for words in complaints(one, entropy)):
        console.print(words, markup=False, highlight=False, soft_wrap=True, style="red")
    for words in filter(None, map(not_compared, trainings)):
        console.print(words, markup=False, highlight=False, soft_wrap=True)


def write(trainings: Sequence[Training], environment: dict[str, str], entropy: float, directory: Path) -> Path:
    """Write `index.html` and `losses.csv` into `directory`; return the page's path."""
    with replacing(directory, last=PAGE) as fresh:
        with (fresh / "losses.csv").open("w", encoding="utf-8", newline="") as file:
            _write_steps(trainings, csv.writer(file))
        (fresh / PAGE).write_text(render(trainings, environment, entropy), encoding="utf-8")
    return directory / PAGE


def _write_steps(trainings: Sequence[Training], writer: csv._writer) -> None:  # type: ignore[name-defined]
    writer.writerow(
        ["recipe", "backend", "device", "seed", "step", "loss", "loss_reference", "stages", "compared", "wrong"]
    )
    for one in trainings:
        task = one.task
        for number, step in enumerate(one.steps):
            beside = "" if step.beside is None else step.beside
            writer.writerow(
                [task.recipe or HIGH_PRECISION, task.backend, task.device, task.seed, number, step.loss, beside,
                 step.stages, step.compared, step.mismatches]
            )  # fmt: skip


def render(trainings: Sequence[Training], environment: dict[str, str], entropy: float) -> str:
    """The page. Everything that is not of this file is escaped."""
    passed = [one.passed(entropy) for one in trainings]
    steps = max((one.task.steps for one in trainings), default=0)
    drawn = figure(trainings, entropy, steps)
    return template.render(
        Path(__file__).with_name("train.html"),
        name="narrowgauge train",
        verdict="pass" if trainings and all(passed) else "fail",
        sentence=sentence(trainings, entropy),
        environment=environment,
        figure=drawn,
        kinds={line.kind: line.name for panel in drawn.panels for line in panel.lines},
        width=WIDTH,
        height=HEIGHT,
        entropy=entropy,
        columns=COLUMNS,
        explained=EXPLAINED,
        rows=list(zip(passed, map(cells, trainings), strict=True)),
        sentences=[words for one in trainings for words in complaints(one, entropy)],
        left_out=list(filter(None, map(not_compared, trainings))),
    )
