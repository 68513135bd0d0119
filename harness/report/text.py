"""Text: the sentences and figures that page, summary and terminal share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from narrowgauge.harness.records.record import OUTCOMES, elements_compared, outcome
from narrowgauge.spec.recipes import Recipe, find_recipe

_QUANTIZED = ("amax", "tensor scale", "scales", "codes")
_PRODUCT = (*(f"{operand}.{stage}" for operand in "xw" for stage in _QUANTIZED), "output")
STAGES = {
    "quantize": (*_QUANTIZED, "values"),
    "transform": ("output",),
    "swizzle": ("layout", "unswizzle"),
    "update-scale": ("history", "scale"),
    "quantize-grouped": _QUANTIZED,
    "gemm": _PRODUCT,
    "gemm-grouped": _PRODUCT,
    "gemm-quantized": (*_PRODUCT, *(f"{made}.{stage}" for made in ("output", "fused") for stage in _QUANTIZED)),
}
"""What a kernel can show of an operation. A stage that a record lacks was not observed."""
_PADDED = ("padding", *_PRODUCT[:-1], "rows", "output", "unpadding")
_HALVES = (*(f"{half}.{stage}" for half in ("rowwise", "columnwise") for stage in _QUANTIZED), "halves")


@cache
def stages_of(operation: str, flags: str, recipes: str = "") -> tuple[str, ...]:
    """The stages of a record's operation: of both halves where it quantizes both, of padding where it pads.

    An operand whose recipe has no tensor scale has neither that stage nor an amax.
    """
    given = flags.split("+")
    found = _HALVES if "both" in given else _PADDED if "padded" in given else STAGES.get(operation, ())
    x, _, w = recipes.partition("+")
    made = next((flag for flag in given if _rule(flag)), x)
    of = {"w": w or x, "output": made, "fused": made}
    return tuple(
        stage
        for stage in found
        if not stage.endswith(_TENSOR_STAGES) or _has_tensor_scale(of.get(stage.partition(".")[0], x))
    )


_TENSOR_STAGES = _QUANTIZED[:2]


def stage_names(operation: str) -> tuple[str, ...]:
    """Every stage that a record of an operation may have; none of a module, which has as many as results."""
    if operation not in STAGES:
        return ()
    found = [*STAGES[operation], "memory", "repeat"]
    if operation == "quantize":
        found += [*_HALVES, "layout", "rowwise.layout", "columnwise.layout"]
    if operation == "gemm-grouped":
        found += [*_PADDED, "unpadded"]
    return tuple(dict.fromkeys(found))


@cache
def _rule(name: str) -> Recipe | None:
    """The recipe of a name, None where a record has a name that is none."""
    try:
        return find_recipe(name)
    except ValueError:
        return None


def _has_tensor_scale(name: str) -> bool:
    recipe = _rule(name)
    return recipe is None or recipe.tensor_scale != "none"


GLYPHS = {
    "pass": "✓", "fail": "✗", "error": "!", "crash": "‼", "timeout": "…", "unsupported": "–", "unexpected": "?",
    "known": "○",
}  # fmt: skip


def number(value: float | str | None) -> str:
    """A figure for people: thousands apart, four digits of a fraction, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.4g}" if isinstance(value, float) else value


def share(value: float | None) -> str:
    """A share as percent. It says 100 % and 0 % only of all and none."""
    if value is None:
        return ""
    percent = f"{100 * value:.3g}"
    if percent == "100" and value < 1:
        percent = "> 99.9"
    return f"{percent} %"


def duration(seconds: float | None) -> str:
    """Seconds to three digits, or minutes and seconds."""
    if seconds is None or math.isnan(seconds):
        return ""
    if seconds >= 99.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    return f"{seconds:.3g} s"


def plural(count: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{number(count)} {noun}" + ("" if count == 1 else "s")


def verdict_counts(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Records of each outcome that occurs, in the order of `OUTCOMES`."""
    counts = Counter(map(outcome, records))
    return {name: counts[name] for name in OUTCOMES if counts[name]}


REASONS = 5
"""Reasons of what is not supported that a line names."""


def verdict_line(records: list[dict[str, Any]], elapsed: float | None = None) -> str:
    """The run in one sentence. A run without a case is red, and one that compared nothing."""
    duration_of_run = f" in {duration(elapsed)}" if elapsed is not None else ""
    if not records:
        return f"nothing ran{duration_of_run}: no case, so no verdict"
    counts = verdict_counts(records)
    passed, unexpected, known = (counts.pop(name, 0) for name in ("pass", "unexpected", "known"))
    beside = f"; {plural(unexpected, 'case')} passed though known to fail" if unexpected else ""
    beside += f"; {plural(known, 'known failure')}" if known else ""
    if not counts:
        compared = sum(map(elements_compared, records))
        what = f"{number(compared)} elements compared" if compared else "but nothing was compared"
        return f"{plural(passed, 'case')} passed{duration_of_run}, {what}{beside}"
    named = ", ".join(f"{number(count)} {verdict}" for verdict, count in counts.items())
    wrong = f"{number(sum(counts.values()))} of {plural(len(records), 'case')} did not pass"
    return f"{wrong}{duration_of_run}: {named}{beside}"


def not_compared(records: list[dict[str, Any]]) -> str:
    """What the run says nothing about: cases without a result, and stages that a result did not show.

    What is not supported is named by what the backend said of it, a door that it lacks, say.
    """
    cases: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    for record in records:
        if record["verdict"] not in ("pass", "fail"):
            cases[record["verdict"]] += 1
            if record["verdict"] == "unsupported" and record["message"]:
                reasons[record["message"]] += 1
            continue
        empty = "0" in record["shape"].split("x")  # there a stage rightly compares nothing
        if not empty and not elements_compared(record):
            cases["without a compared element"] += 1
        shown = {entry.get("stage"): empty or bool(entry.get("compared")) for entry in record["stages"]}
        expected = dict.fromkeys([*stages_of(record["operation"], record["flags"], record["recipe"]), *shown])
        stages.update(f"{record['operation']} {stage}" for stage in expected if not shown.get(stage))
    parts = []
    if cases:
        parts.append("cases: " + ", ".join(f"{number(count)} {what}" for what, count in sorted(cases.items())))
    if reasons:
        named = [f"{reason} ({number(count)})" for reason, count in reasons.most_common(REASONS)]
        if len(reasons) > REASONS:
            named.append(plural(len(reasons) - REASONS, "more reason"))
        parts.append(f"not supported: {', '.join(named)}")
    if stages:
        listed = (f"{stage} in {plural(count, 'case')}" for stage, count in stages.most_common())
        parts.append(f"stages not observed: {', '.join(listed)}")
    otherwise = "no case and no stage" if records else "everything"
    return f"Not compared: {'; '.join(parts) or otherwise}."


def explanation(found: dict[str, Any] | None) -> str:
    """What a record or a group is explained by: exactly, or by what its wrong elements share."""
    if found is None:
        return ""
    return f"{'explained exactly by' if found['exact'] else 'wrong elements'}: {found['sentence']}"


def sentence(record: dict[str, Any]) -> str:
    """What is wrong with a record: its message, or its first finding's sentence."""
    return record["message"] or next((s for f in record["findings"] if (s := f.get("sentence"))), "")


def clipped(value: str, most: int) -> str:
    """Text of `most` characters at most; what is longer ends in `…`."""
    return value if len(value) <= most else value[: most - 1] + "…"
