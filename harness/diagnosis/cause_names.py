"""Names of all causes, read from the page `causes.md`, and the writer of this page.

The ledger of known failures and the reports read the names, so this module imports no torch. After a change of a row:
`python -m narrowgauge.harness.diagnosis.cause_names` writes the page again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from itertools import chain, starmap
from pathlib import Path
from typing import Any

from narrowgauge.harness.operations.stages.deviation import Deviation

PAGE = Path(__file__).with_name("causes.md")
"""A table for each part of the project, with a row for each cause: its name, the changed step, its sentences."""
_NAMES = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
CAUSES = tuple(sorted({name for name in _NAMES if "…" not in name}))
FAMILIES = tuple(sorted({name.partition("…")[0] for name in _NAMES if "…" in name}))
"""Prefixes of names with a variable part: a number, a formula or a place."""
_PATTERNS = ("place:", "only:", "when:")
_HEAD = """# Causes

Every cause that the report of a failure can name, the step of the reference that it changes, and its sentences.
[Verdicts and diagnosis](../../docs/verdicts.md#causes) explains them. … stands for a number, a formula or a place. A
cause of several operations has a row in several tables.
"""
_SHOWN = 6
"""Values of a row whose sentences are shown one by one."""


_QUANTIZE, _GEMM = "diagnosis.quantize", "diagnosis.gemm"
_MODULES = {
    "Observed while the backend ran": ("diagnosis.explain_memory", "diagnosis.explanation"),
    "Places and classes of wrong elements": ("diagnosis.patterns.signatures",),
    "Conditions": ("diagnosis.search.conditions",),
    "Elements": (f"{_QUANTIZE}.elements.element_deviations",),
    "Stochastic rounding": (f"{_QUANTIZE}.elements.stochastic_deviations",),
    "Amax and scale of the tensor": (
        f"{_QUANTIZE}.scales.tensor_scales", f"{_QUANTIZE}.scales.observed_amaxes", f"{_QUANTIZE}.section_amaxes",
    ),
    "Block amaxes and block scales": tuple(
        f"{_QUANTIZE}.scales.{name}" for name in ("block_amaxes", "four_over_six", "e8m0_exponents", "block_scales")
    ),
    "Choices of the recipe": (f"{_QUANTIZE}.recipe_fields",),
    "Rotation": ("operations.transform.deviations", f"{_QUANTIZE}.rotation_deviations"),
    "Layout and padding": (
        "operations.pack_scales.deviations", f"{_QUANTIZE}.scale_layouts", "operations.gemm_grouped.deviations",
    ),
    "Routing of tokens to experts": ("operations.permute.deviations",),
    "Several causes": (f"{_QUANTIZE}.explain_quantize",),
    "Operands of a GEMM, and matrices that are decoded": (f"{_GEMM}.operands",),
    "Decoding": ("diagnosis.explain_decoding",),
    "Operands and results of every product and formula": (
        "diagnosis.formulas.matrix_changes", f"{_GEMM}.changed_products", "diagnosis.formulas.explain_formula",
    ),
    "Sums and outputs of a GEMM": tuple(
        f"{_GEMM}.{name}" for name in (
            "epilogues", "scale_products", "accumulators", "partial_sums", "other_declarations", "wider_format", "gain",
            "explain_fused_output", "explain_gemm",
        )
    ),
    "Delayed scaling": ("operations.update_scale.deviations",),
    "Norms, activations, attention, residuals": (
        "diagnosis.formulas.wrong_forwards", "diagnosis.formulas.wrong_backwards",
    ),
    "Mixtures of experts": ("diagnosis.formulas.wrong_experts",),
}  # fmt: skip
"""Modules with rows, by the titles of their tables."""


def is_cause(name: str) -> bool:
    """Whether `name` is the cause of some explanation."""
    return name in CAUSES or any(name.startswith(family) and name != family for family in FAMILIES)


def is_pattern(name: str) -> bool:
    """Whether the cause is a place or a class of the wrong elements or a condition of the failure, and no deviation."""
    return name.startswith(_PATTERNS)


def is_condition(name: str) -> bool:
    """Whether the cause is a condition of the failure (`harness.diagnosis.search.conditions`)."""
    return name.startswith(_PATTERNS[-1])


def tables() -> dict[str, list[Deviation[Any]]]:
    """The rows of all modules, by the titles of their tables: those of public names that no earlier module has."""
    collected: set[int] = set()
    found: dict[str, list[Deviation[Any]]] = {}
    for title, names in _MODULES.items():
        modules = (vars(import_module(f"narrowgauge.harness.{name}")) for name in names)
        rows = [row for module in modules for name, value in module.items() if name[0] != "_" for row in _rows(value)]
        found[title] = [row for row in rows if id(row) not in collected]
        collected |= {id(row) for row in rows}
    return found


def _rows(value: Any) -> Iterable[Deviation[Any]]:
    """The rows in a constant of a module: a row, or a tuple or dictionary of rows."""
    if isinstance(value, Deviation):
        return [value]
    values = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else ()
    return chain.from_iterable(map(_rows, values))


def page() -> str:
    """The text of `PAGE`."""
    return _HEAD + "".join(chain.from_iterable(starmap(_table, tables().items())))


def _table(title: str, rows: Iterable[Deviation[Any]]) -> Iterable[str]:
    yield f"\n## {title}\n\n| cause | step | sentence |\n|---|---|---|\n"
    merged: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in chain.from_iterable(map(_shown, rows)):
        steps, sentences = merged.setdefault(_plain(row.cause), ({}, {}))
        steps[row.step] = sentences[_plain(row.sentence).replace("*", r"\*")] = None
    for cause, (steps, sentences) in merged.items():
        yield f"| `{cause}` | {', '.join(steps)} | {'; or: '.join(sentences)} |\n"


def _shown(row: Deviation[Any]) -> Iterable[Deviation[Any]]:
    """The row, or a row for each of a few values that the name of the cause does not hold."""
    if not isinstance(row.over, Mapping) or len(row.over) > _SHOWN or "{" in row.cause:
        return [row]
    return [row.bound(name, value) for name, value in row.over.items()]


def _plain(words: str) -> str:
    """Words with … in place of variable parts."""
    return re.sub(r"\{[\w.\[\]:]*\}", "…", words.replace("{{", "{").replace("}}", "}"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
