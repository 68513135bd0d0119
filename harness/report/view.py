"""What a person sees of one record in a terminal: the first-failure view, as far as a terminal goes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

from narrowgauge.harness.report.text import number, plural

BINS = 8
"""Bins of a histogram of steps that a line has: those of most elements. It says how many it left out."""
SPECIAL = {
    "nan": "NaN", "inf": "Inf", "negative_zero": "−0", "saturated": "saturated", "subnormal": "subnormal",
    "no_code": "no code",
}  # fmt: skip
"""What a census counts (`harness.checks.finding.SPECIAL`), as people call it."""


def reproduction(record: dict[str, Any]) -> str:
    """The line that runs this case again and shows its stages."""
    words = ["narrowgauge", "show", record["case"], "--backend", record["backend"], "--device", record["device"]]
    if record["seed"]:
        words += ["--seed", str(record["seed"])]
    if record["inputs"] and ":" in record["inputs"]:
        words += ["--input", record["file"]]
        if record["recipe"] != "nvfp4":
            words += ["--recipe", record["recipe"]]
    return shlex.join(words)


def first_failure(record: dict[str, Any]) -> str:
    """Sentence, explanation, reproduction, baseline, then every wrong stage with its first and its worst element."""
    lines = [f"{record['verdict']}: {record['message']}", *explanation_lines(record["explanations"])]
    lines += [f"reproduce: {reproduction(record)}", *saved_lines(record)]
    if record["baseline"]:
        lines.append(f"baseline: {record['baseline']}")
    for found in record["findings"]:
        lines += ["", f"{found['stage']} ({found['rule']}): {found['sentence']}"]
        lines += _elements(found["elements"])
        lines += _counts(found["modulo"])
        lines += [f"  {line}" for line in distribution_lines(found)]
    judged = ", ".join(f"{s['stage']} {'✗' if s['sentence'] else '✓'}" for s in record["stages"])
    if judged:
        lines += ["", f"stages: {judged}"]
    return "\n".join(lines)


def saved_lines(record: dict[str, Any]) -> list[str]:
    """Where a failure lies, the line that runs it again from there, and the line of Python that loads it."""
    lines = [record["save_note"]] if record["save_note"] else []
    if record["saved"]:
        words = ["narrowgauge", "show", record["case"], "--saved", record["saved"]]
        words += ["--backend", record["backend"], "--device", record["device"]]
        what = f"fails at {record['shrunk']} too" if record["shrunk"] else "as saved"
        lines += [f"{what}: {shlex.join(words)}", f'tensors: safetensors.torch.load_file("{record["saved"]}")']
    return lines


def saved_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """The `saved_lines` of the first record that is saved, of several that fail in one way; else those of a note."""
    told = [record for record in records if record["saved"] or record["save_note"]]
    return saved_lines(min(told, key=lambda record: not record["saved"])) if told else []


def explanation_lines(explanations: list[dict[str, Any]]) -> list[str]:
    """What explains a record: deviations of the reference that give its bytes, and what wrong elements share."""
    exact = [found["sentence"] for found in explanations if found["exact"]]
    shared = [found["sentence"] for found in explanations if not found["exact"]]
    lines = [f"explained exactly by: {exact[0]}"] if exact else []
    lines += [f"              or by: {sentence}" for sentence in exact[1:]]
    return lines + [f"wrong elements: {sentence}" for sentence in shared]


def _elements(elements: list[dict[str, Any]]) -> list[str]:
    if not elements:
        return []
    names = list(dict.fromkeys(key for element in elements for key in element))
    rows = [names, *([str(element.get(name, "")) for name in names] for element in elements)]
    label = max(len(name) for name in names)
    widths = [max(len(row[i]) for i in range(len(names))) for row in rows[1:]]
    return [
        "  " + "  ".join([name.ljust(label), *(row[i].rjust(w) for row, w in zip(rows[1:], widths, strict=True))])
        for i, name in enumerate(names)
    ]


def distribution_lines(found: dict[str, Any]) -> list[str]:
    """Of a finding: elements by signed steps from what is expected, and special values, where either was counted."""
    lines = []
    if steps := [(low, high, count) for low, high, count in found.get("steps", ()) if count]:
        shown = sorted(sorted(steps, key=lambda step: -step[2])[:BINS])
        parts = [f"{number(count)} at {_span(low, high)}" for low, high, count in shown]
        if len(steps) > BINS:
            parts.append(f"{plural(len(steps) - BINS, 'more bin')}")
        lines.append(f"by steps above what is expected: {', '.join(parts)}")
    if sides := found.get("census"):
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
        if any(counts["16"])
    ]
