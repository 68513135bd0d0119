"""The choice in which two kernels differ: a field of a recipe or of a contract, or the order of a sum."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.checks.order.probe import accumulation_order
from narrowgauge.harness.operations.gemm.probed_gemm import operand_dtype, product_of
from narrowgauge.harness.tools.dialect.contract import Fit as ContractFit
from narrowgauge.harness.tools.dialect.contract import fit_contract
from narrowgauge.harness.tools.dialect.fit import Fit, agreement_with, fit, simplified
from narrowgauge.harness.tools.dialect.report import sentence
from narrowgauge.harness.tools.dialect.rules import ELEMENT_FIELDS, with_fields
from narrowgauge.spec.recipes import Recipe

_NOUNS = {
    "statistics": "precision of scales", "scale_rounding": "rounding of block scales",
    "element_scale": "scaled element", "rounding": "rounding of elements", "nan_code": "code of NaN",
    "nan": "NaN in an amax", "negative_zero": "sign of zero codes", "zero_scale": "elements under a block scale of 0",
    "zero_block": "block scale of 0", "tensor_limit": "tensor scale of a special amax", "packing": "order of nibbles",
    "smallest_scale": "least block scale", "smallest_amax": "least amax",
    "largest_scale": "scale of an infinite quotient",
}  # fmt: skip
"""Fields in words; others are their names, `_` a space."""
_RECIPROCAL = re.compile(r"\b1/|\br\(")
"""A reciprocal in the expression of a field."""


@dataclass(frozen=True)
class Own:
    """A kernel beside the rules that are known."""

    name: str
    explained: bool | None
    """Whether a dialect, or the values of the fields of a contract, explain every byte. None: nothing was fitted."""
    sentence: str


@dataclass(frozen=True)
class Choice:
    """A choice in which two kernels differ."""

    field: str
    stage: str
    """The first stage decided by the choice; empty if the fields of a contract say nothing of stages."""
    values: tuple[Any, Any]

    def sentence(self, names: tuple[str, str]) -> str:
        """`scaled element: A divides, x/s; B multiplies by the reciprocal, x*(1/s)`."""
        noun = _NOUNS.get(self.field, self.field.replace("_", " "))
        verbs = tuple(_verb(value) for value in self.values)
        if verbs[0] != verbs[1] and all(verbs):
            words = [f"{verb}, {value}" for verb, value in zip(verbs, self.values, strict=True)]
        else:
            words = [f"has {value}" for value in self.values]
        return f"{noun}: " + "; ".join(f"{name} {text}" for name, text in zip(names, words, strict=True))


def _verb(value: Any) -> str:
    """What an expression of a field does; empty for a value that is no expression."""
    if not isinstance(value, str) or not re.search(r"[*/]", value) or "=" in value:
        return ""
    if _RECIPROCAL.search(value):
        return "multiplies by the reciprocal"
    return "divides" if "/" in value else "multiplies"


_STAGES = ("amax", "tensor scale", "scales", "codes")


def _stage(name: str, rule: Recipe) -> str:
    if name in ("tensor_scale", "tensor_limit") or (name == "nan" and rule.tensor_scale != "none"):
        return "amax" if name == "nan" else "tensor scale"
    return "codes" if name in ELEMENT_FIELDS or name == "packing" else "scales"


# ---- quantizers ------------------------------------------------------------------------------------------------------


def quantizer_fit(backend: Backend, recipe: Recipe, device: str, seed: int) -> Fit | str:
    """The rule of a quantizer, or why none is fitted."""
    try:
        return fit(backend, str(recipe), device=device, seed=seed)
    except (ValueError, BackendError, Unsupported, HostLost) as error:
        return str(error)


def quantizer_choices(one: Fit, other: Fit) -> list[Choice]:
    """The fields in which the rule of the second quantizer has to differ from that of the first one, by stage, and of a
    stage first the fields without which most bytes are wrong."""
    rule, _, changes = simplified(other.rules, other.rule, agreement_with(other.rules, one.rule))
    found = [Choice(name, _stage(name, rule), values) for name, values in changes.items()]
    packings = one.observed.packing, other.observed.packing
    if packings[0] != packings[1]:
        found.append(Choice("packing", "codes", packings))

    def rank(choice: Choice) -> tuple[int, float]:
        back = None if choice.field == "packing" else with_fields(rule, **{choice.field: choice.values[0]})
        return _STAGES.index(choice.stage), -math.inf if back is None else -other.rules.score(back).major

    return sorted(found, key=rank)


def quantizer_own(name: str, found: Fit | str) -> Own:
    """A quantizer beside the dialects."""
    if isinstance(found, str):
        return Own(name, None, f"no rule is fitted: {found}")
    return Own(name, found.explained, sentence(found))


# ---- contracts -------------------------------------------------------------------------------------------------------


def contract_choices(one: ContractFit, other: ContractFit) -> list[Choice]:
    """The fields of a contract with other values, if the inputs tell the values apart for one of the kernels."""
    found = []
    for name in one.fields:
        a, b = one.fields[name], other.fields[name]
        if a != b and (one.others[name].get(b) or other.others[name].get(a)):
            found.append(Choice(name, "", (a, b)))
    return found


def contract_fit(backend: Backend, cls: type[ContractCase], recipes: Sequence[str], seed: int) -> ContractFit | str:
    """The values of the fields of a contract, or why none are fitted."""
    try:
        return fit_contract(backend, cls, recipes, seed)
    except (ValueError, BackendError, HostLost) as error:
        return str(error)


def contract_own(name: str, found: ContractFit | str) -> Own:
    """A kernel beside its contract."""
    if isinstance(found, str):
        return Own(name, None, f"no fields are fitted: {found}")
    return Own(name, found.explained, "; ".join(list(found.lines())[len(found.fields) :]))


# ---- products --------------------------------------------------------------------------------------------------------


def order_of(backend: Backend, case: Case, dtype: torch.dtype, *, seed: int, device: str) -> tuple[str, bool]:
    """The order of a product in words, or why it is not known, and whether it predicts random products to the bit."""
    x, w = case.recipes
    if x != w:
        return f"order not probed: its operands have two recipes, {x} and {w}", False
    rows, columns, others = case.shape
    try:
        function = product_of(backend, x, dtype)
        order = accumulation_order(function, rows, columns, others, dtype=operand_dtype(x), device=device, seed=seed)
    except (ValueError, BackendError, Unsupported, HostLost) as error:
        return f"order not probed: {error}", False
    return str(order), order.confirmed
