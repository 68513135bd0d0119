"""The fit as a sentence, as rows and as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.harness.report.text import plural
from narrowgauge.harness.tools.dialect.fit import Agreement, Fit
from narrowgauge.harness.tools.dialect.rules import Score
from narrowgauge.harness.tools.dialect.versions import versions
from narrowgauge.spec import VERSION
from narrowgauge.spec.recipes import DEFAULT_DIALECT, RULE_FIELDS, Recipe, RuleError, own_rules, save_rule

_FEW = 3
"""Largest number of changed fields with which a rule still counts as a dialect."""


def sentence(fit: Fit) -> str:
    """The dialect of the quantizer and its differences, or the nearest dialect and what no rule explains."""
    inputs = plural(fit.observed.inputs, "input")
    names, tie = _names(fit)
    if fit.matching:
        text = f"speaks {names}{tie}: every byte of {inputs}"
    elif fit.explained:
        start = f"its own rule, nearest {names}{tie}" if len(fit.changes) > _FEW else f"{names}{tie}"
        remaining = "; ".join(map(str, fit.differences))
        text = f"{start}, except: " + "; ".join(filter(None, [changes(fit), remaining]))
        text += f". This explains every byte of {inputs}"
    else:
        text = f"agrees with no dialect and no known rule; nearest {names}{tie}: {_counts(fit)} of {inputs}"
        changed = changes(fit)
        text += f". More bytes, but not all, are those of a rule in which {changed}; it leaves " if changed else "; "
        text += "; ".join(map(str, fit.differences))
    if fit.alternatives:
        listed = ", ".join(
            f"{name} {getattr(fit.rule, name)} or {' or '.join(map(str, values))}"
            for name, values in fit.alternatives.items()
        )
        text += f". The inputs do not separate: {listed}"
    if fit.observed.packing == "high-first":
        text += ". The first of two elements is in the high nibble"
    shown = fit.rules.shown_tensor_scale(fit.rule)
    if shown not in ("", "the tensor scale"):
        text += f". It shows {shown} as tensor scale"
    if skipped := fit.observed.skipped:
        text += f". Left out {plural(len(skipped), 'input')} that it does not quantize, first {skipped[0]}"
    return text


def _names(fit: Fit) -> tuple[str, str]:
    """Name of the dialect, or names that tie, and a remark."""
    tied = [agreement.dialect for agreement in fit.agreements if agreement.score == fit.nearest.score]
    names = tied if fit.nearest.dialect in tied and not fit.changes else [fit.nearest.dialect]
    if len(names) == 1:
        return names[0], ""
    return f"{', '.join(names[:-1])} or {names[-1]}", ", which no input here tells apart"


def changes(fit: Fit) -> str:
    """The fields in which the rule differs from the nearest dialect."""
    return "; ".join(f"{name} is {own} in place of {theirs}" for name, (theirs, own) in fit.changes.items())


def _counts(fit: Fit) -> str:
    return f"every byte of {fit.nearest.explained}"


def own_rule(fit: Fit, dialect: str = "own") -> Recipe:
    """The rule of the quantizer as a recipe in a dialect of its own, with the quantizer's order of nibbles."""
    base = fit.nearest.recipe
    own = {name: value for name, (_, value) in fit.changes.items()}
    own |= {"dialect": dialect, "packing": fit.observed.packing}
    try:
        return replace(base, **own)
    except ValueError:  # decode and alpha, which the bytes do not show, follow the tensor scale
        return replace(base, **own | {name: getattr(fit.rule, name) for name in ("decode", "alpha")})


def pasted(fit: Fit, dialect: str = "own") -> str:
    """Python that makes `own_rule`; empty if the rule is a named dialect."""
    base, rule = fit.nearest.recipe, own_rule(fit, dialect)
    differs = {name: getattr(rule, name) for name in RULE_FIELDS if getattr(rule, name) != getattr(base, name)}
    values = "".join(f", {name}={value!r}" for name, value in differs.items())
    return (
        f'dataclasses.replace(narrowgauge.recipe("{base.name}@{base.dialect}"), dialect="{dialect}"{values})'
        if differs
        else ""
    )


def save(fit: Fit, path: Path, backend: str) -> str:
    """Write the rule of the quantizer called `backend` into a file of rules, and return the name of the rule.

    The name is the recipe, @ and the name of the file without its suffix.

    Raises RuleError if no rule explains every byte, and as `save_rule` does.
    """
    if not fit.explained:
        raise RuleError(f"{path}: not written; no rule explains every byte of {backend}, as the differences say")
    rule, near = own_rule(fit, path.stem), fit.nearest.recipe
    base = near.dialect if str(near) not in own_rules() else DEFAULT_DIALECT
    comments = textwrap.wrap(
        f"The rule of {backend}, by narrowgauge {VERSION}: {sentence(fit)}", 116, break_on_hyphens=False
    )
    save_rule(rule, path, base=base, comments=comments)
    return f"{rule.name}@{rule.dialect}"


def rows(fit: Fit) -> list[dict[str, Any]]:
    """Numbers of bytes different from the nearest dialect, and from the rule, by input."""
    found = []
    for index_of_stack, stack in enumerate(fit.observed.stacks):
        unequal = [
            [sum(pair, Score(0, 0)) for pair in fit.rules.unequal_by_input(index_of_stack, rule)]
            for rule in (fit.nearest.plain, fit.rule)
        ]
        for index, name in enumerate(stack.names):
            dialect, rule = (of_rule[index] for of_rule in unequal)
            found.append(
                {
                    "input": name,
                    "of_dialect": {"bytes": dialect.major, "signs_and_dead": dialect.minor},
                    "of_rule": {"bytes": rule.major, "signs_and_dead": rule.minor},
                    "classes": [difference.kind for difference in fit.differences if name in difference.inputs],
                }
            )
    return found


def as_json(fit: Fit, backend: str) -> dict[str, Any]:
    """The fit of the quantizer called `backend` as plain data."""
    return {
        "backend": backend,
        "versions": versions(backend),
        "recipe": fit.recipe,
        "sentence": sentence(fit),
        "explained": fit.explained,
        "matching": [agreement.dialect for agreement in fit.matching],
        "nearest": fit.nearest.dialect,
        "changes": {name: {"dialect": a, "own": b} for name, (a, b) in fit.changes.items()},
        "not_separated": fit.alternatives,
        "differences": [
            {"class": d.kind, "explained": d.known, "count": d.count, "inputs": d.inputs, "first": d.first}
            for d in fit.differences
        ],
        "rule": pasted(fit),
        "shown_tensor_scale": fit.rules.shown_tensor_scale(fit.rule),
        "packing": fit.observed.packing,
        "inputs": fit.observed.inputs,
        "skipped": fit.observed.skipped,
        "dialects": [_agreement(agreement, fit) for agreement in fit.agreements],
        "rows": rows(fit),
    }


def _agreement(agreement: Agreement, fit: Fit) -> dict[str, Any]:
    scales, codes = fit.total
    return {
        "dialect": agreement.dialect,
        "scales": scales,
        "scales_different": agreement.scales.major,
        "codes": codes,
        "codes_different": agreement.codes.major,
        "signs_and_dead": agreement.score.minor,
        "inputs_explained": agreement.explained,
        "inputs_same_values": agreement.alike,
    }
