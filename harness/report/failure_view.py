"""The first-failure view of a record, as text for a terminal."""

from __future__ import annotations

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases.case_file import is_default
from narrowgauge.harness.diagnosis.explanation import is_hint
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.records.record import STACK
from narrowgauge.harness.report.text import OF_EARLIER_CASES, explanation, number, plural, rule

BINS = 8
"""Largest number of histogram bins in a line: the bins with most elements. The line counts the omitted bins."""
SPECIAL = {
    "nan": "NaN", "inf": "Inf", "negative_zero": "−0", "saturated": "saturated", "subnormal": "subnormal",
    "no_code": "no code",
}  # fmt: skip
"""Labels of the special values in a census (`harness.checks.finding.SPECIAL`)."""
_FAR = 64
"""Last bound of a bin below `RELATIVE_FROM`."""
_SHOWN_CAUSES = 2
"""Exact causes with lines of their own. If there are more, the report counts all after the simplest."""


def reproduction(record: dict[str, Any]) -> str:
    """The command that runs this case again as the run did, in a fresh process, and shows its stages."""
    names = ("backend", "device", "seed", "file", "recipe", "options")
    captured = ":" in record["inputs"]
    return (
        f"narrowgauge show {shlex.quote(record['case'])} {_arguments(*map(record.get, names), captured, os.getcwd())}"
    )


@cache
def _arguments(
    backend: str, device: str, seed: int, file: str, recipe: str, options: str, captured: bool, folder: str
) -> str:
    """Arguments of the command behind the id, in the current folder, `folder`. `captured`: the inputs are captured
    tensors. Most records of a run share them."""
    arguments = ["--backend", backend, "--device", device]
    if seed:
        arguments += ["--seed", str(seed)]
    if captured:
        arguments += ["--input", _from_here(file)]
        if recipe != "nvfp4":
            arguments += ["--recipe", recipe]
    elif file and not is_default(file):
        arguments = [_from_here(file), *arguments]
    return shlex.join([*arguments, *_options(options)])


def _from_here(file: str) -> str:
    """The path of a file as one types it in the current folder."""
    path, here = Path(file), Path.cwd()
    return str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else file


def _options(options: str, *, after: bool = True) -> list[str]:
    """The words of a record's options, without the earlier cases if not `after`."""
    try:
        words = shlex.split(options)
    except ValueError:  # the options of a changed journal
        words = options.split()
    return words if after or "--after" not in words else words[: words.index("--after")]


def first_failure(record: dict[str, Any]) -> str:
    """Sentence, explanation, command, baseline, and every wrong stage with its first and its worst element."""
    lines = [f"{record['verdict']}: {record['message']}", *explanation_lines(record["explanations"])]
    lines += [f"reproduce: {reproduction(record)}", *saved_lines(record)]
    if record["baseline"]:
        lines.append(f"baseline: {record['baseline']}")
    lines += finding_lines(record["findings"])
    judged = ", ".join(f"{s['stage']} {'✗' if s['sentence'] else '✓'}" for s in record["stages"])
    if judged:
        lines += ["", f"stages: {judged}"]
    lines += note_lines(record)
    return escape("\n".join(lines))  # the ledger and the baseline have added text since the record was made


def finding_lines(findings: Iterable[dict[str, Any]]) -> list[str]:
    """Every finding after an empty line: its sentence, first and worst element, counts by place and distributions."""
    lines = []
    for finding in findings:
        lines += ["", f"{finding['stage']} ({rule(finding['rule'])}): {finding['sentence']}"]
        lines += _elements(finding["elements"])
        lines += _counts(finding["modulo"])
        lines += [f"  {line}" for line in distribution_lines(finding)]
    return lines


def note_lines(record: dict[str, Any]) -> list[str]:
    """Observations that change no verdict."""
    return [_note_line(note["cause"], note["sentence"].replace("\n", "\n  ")) for note in record["notes"]]


def _note_line(cause: str, words: str) -> str:
    return f"stack, {words}" if cause == STACK else f"note, {cause}: {words}"


def saved_lines(record: dict[str, Any]) -> list[str]:
    """The command that runs a saved failure again, and the line of Python that loads its tensors."""
    lines = [record["save_note"]] if record["save_note"] else []
    if record["saved"]:
        arguments = ["narrowgauge", "show", record["case"], "--saved", record["saved"]]
        arguments += [
            "--backend",
            record["backend"],
            "--device",
            record["device"],
            *_options(record["options"], after=False),
        ]
        label = f"fails at {record['shrunk']} too" if record["shrunk"] else "as saved"
        lines += [f"{label}: {shlex.join(arguments)}", f'tensors: safetensors.torch.load_file("{record["saved"]}")']
    return lines


def group_saved_lines(records: Iterable[dict[str, Any]]) -> list[str]:
    """The `saved_lines` of the first saved record in a group of failures; without a saved record those of a save
    note."""
    saved_or_noted = [record for record in records if record["saved"] or record["save_note"]]
    return saved_lines(min(saved_or_noted, key=lambda record: not record["saved"])) if saved_or_noted else []


def explanation_lines(explanations: list[dict[str, Any]], *, every: bool = False) -> list[str]:
    """Explanations of a record: earlier calls that it needs, the deviation with exactly its bytes, possible causes, and
    patterns of its wrong elements.

    The simplest of several deviations with exactly the bytes comes first; the others are counted. `every`:
    each of them has its own line.
    """
    earlier = [entry["sentence"] for entry in explanations if entry["cause"] in OF_EARLIER_CASES]
    explanations = [entry for entry in explanations if entry["cause"] not in OF_EARLIER_CASES]
    exact = [entry["sentence"] for entry in explanations if entry["exact"]]
    lines = [f"{'explained exactly by' if len(exact) == 1 else 'explained by one of'}: {exact[0]}"] if exact else []
    if every or len(exact) == _SHOWN_CAUSES:
        lines += [f"                 or: {sentence}" for sentence in exact[1:]]
    elif len(exact) > _SHOWN_CAUSES:
        lines.append(f"                 or: {len(exact) - 1} less simple causes with the same bytes")
    return earlier + lines + [explanation(e) for e in explanations if not e["exact"] and not is_hint(e)]


def _elements(elements: list[dict[str, Any]]) -> list[str]:
    if not elements:
        return []
    names = list(dict.fromkeys(key for element in elements for key in element))
    columns = [[str(element.get(name, "")) for name in names] for element in elements]
    labels = ["element" if name == "which" else label(name) for name in names]
    label_width = max(map(len, labels))
    widths = [max(map(len, column)) for column in columns]
    return [
        "  " + "  ".join([label.ljust(label_width), *(c[i].rjust(w) for c, w in zip(columns, widths, strict=True))])
        for i, label in enumerate(labels)
    ]


def label(key: str) -> str:
    """The key of a figure of an element as words."""
    return key.replace("_", " ")


def step_counts(steps: Iterable[Sequence[int]]) -> list[tuple[int, str, int]]:
    """Elements by signed distance from the expected number: order, words and count of each occupied bin.

    `steps`: a histogram of a finding. Bins beyond ±`_FAR` steps are joined: a larger number says no more.
    """
    counts: Counter[tuple[int, str]] = Counter()
    for low, high, count in steps:
        far = _FAR + 1 if low > _FAR else -_FAR - 1 if high < -_FAR else 0
        words = f"{'above' if far > 0 else 'below'} {_signed(far - 1 if far > 0 else far + 1)}" if far else ""
        counts[far or low, words or _span(low, high)] += count
    return [(order, words, count) for (order, words), count in sorted(counts.items()) if count]


def distribution_lines(finding: dict[str, Any]) -> list[str]:
    """Elements by actual minus expected number in steps, and counts of special values, if the finding has them."""
    lines = []
    if steps := step_counts(finding.get("steps", ())):
        shown = sorted(sorted(steps, key=lambda step: -step[2])[:BINS])
        parts = [f"{number(count)} {'at ' * (words[0] in '+-0')}{words}" for _, words, count in shown]
        if len(steps) > BINS:
            parts.append(f"{plural(len(steps) - BINS, 'more bin')}")
        lines.append(f"actual minus expected, in steps: {', '.join(parts)}")
    if sides := finding.get("census"):
        expected, actual = sides["expected"], sides["actual"]
        pairs = ((SPECIAL[name], number(count), number(actual[name])) for name, count in expected.items())
        counts = (f"{name} {before}" + (f" → {after}" if after != before else "") for name, before, after in pairs)
        lines.append(f"special values, expected → actual: {', '.join(counts)}")
    return lines


def _span(low: int, high: int) -> str:
    return _signed(low) if low == high else f"{_signed(low)} to {_signed(high)}"


def _signed(steps: int) -> str:
    return f"+{number(steps)}" if steps > 0 else number(steps)


def _counts(modulo: dict[str, dict[str, list[int]]]) -> list[str]:
    return [
        f"  by {axis} modulo 16: {' '.join(map(str, counts['16']))}"
        for axis, counts in modulo.items()
        if uneven(counts["16"])
    ]


def uneven(counts: Sequence[int]) -> bool:
    """Whether counts vary more than those of elements at random places: χ² above its mean by 6 standard deviations."""
    mean = sum(counts) / len(counts)
    freedom = len(counts) - 1
    return mean > 0 and sum((count - mean) ** 2 for count in counts) / mean > freedom + 6 * math.sqrt(2 * freedom)
