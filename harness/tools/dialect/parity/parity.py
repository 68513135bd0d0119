"""Parity of kernels: equal bytes on all cases, or the choice in which two kernels differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from narrowgauge.contract import Contract
from narrowgauge.harness.api.check import selected_cases, settings_kept
from narrowgauge.harness.api.function_backend import FunctionBackend, name_of_function
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.loading import parameters_of
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.registry import operation_of
from narrowgauge.harness.report.text import number, plural
from narrowgauge.harness.tools.dialect.contract import Fit as ContractFit
from narrowgauge.harness.tools.dialect.fit import Fit
from narrowgauge.harness.tools.dialect.parity.choices import (
    Choice,
    Own,
    contract_choices,
    contract_fit,
    contract_own,
    order_of,
    quantizer_choices,
    quantizer_fit,
    quantizer_own,
)
from narrowgauge.harness.tools.dialect.parity.results import Compared, Results, compared, results_of
from narrowgauge.spec.recipes import Recipe

Cases = Sequence[tuple[Case, bool]]
"""Cases, and whether a right kernel may refuse each."""
SHOWN = 5
"""Largest number of refused cases, and of results of a single side, named in a message."""


@dataclass(frozen=True)
class Parity:
    """Two kernels, compared. True only if all bytes are equal."""

    names: tuple[str, str]
    subject: str
    """Operation and recipe."""
    found: Compared
    choices: list[Choice] = field(default_factory=list)
    """Choices that explain different bytes, the first stage first."""
    own: tuple[Own, ...] = ()
    """Each kernel beside its own dialect or contract, if bytes differ."""
    changing: list[str] = field(default_factory=list)
    """Cases in which a kernel gave different bytes in two equal calls."""

    def __bool__(self) -> bool:
        found = self.found
        return bool(found.elements) and not (found.differences or found.refused or self.changing)

    @property
    def first(self) -> str:
        """The first stage with other bytes; empty if there is none."""
        return self.found.differences[0].stage if self.found.differences else ""

    def lines(self) -> list[str]:
        """The result for people."""
        one, other = self.names
        over = f"{self.subject}, {plural(self.found.cases, 'case')}, {number(self.found.elements)} elements"
        if self:
            return [f"{one} and {other} give equal bytes: {over}", *self._notes()]
        if not self.found.elements:
            return [f"{one} and {other}: nothing was compared: {over}", *self._notes()]
        lines = [f"{one} and {other} differ{f' from {self.first} on' if self.first else ''}: {over}"]
        lines += [f"  {choice.sentence(self.names)}" for choice in self.choices]
        lines += [f"  {difference.sentence}" for difference in self.found.differences]
        lines += [f"  {each.name}: {each.sentence}" for each in self.own]
        return [*lines, *(f"  {text}" for text in self.changing[:SHOWN]), *self._notes()]

    def _notes(self) -> list[str]:
        notes = [f"  {text}" for text in self.found.refused[:SHOWN]]
        if len(self.found.refused) > SHOWN:
            notes.append(f"  and {len(self.found.refused) - SHOWN} more refused cases")
        if self.found.hidden:
            notes.append(f"  not compared, given by one alone: {', '.join(self.found.hidden[:SHOWN])}")
        return notes

    def __str__(self) -> str:
        return escape("\n".join(self.lines()))

    def as_json(self) -> dict[str, Any]:
        """The result as JSON can hold it."""
        return {
            "kernels": list(self.names), "subject": self.subject, "equal": bool(self), "cases": self.found.cases,
            "elements": self.found.elements, "first": self.first,
            "choices": [{**vars(choice), "sentence": choice.sentence(self.names)} for choice in self.choices],
            "differences": [{**vars(each), "sentence": each.sentence} for each in self.found.differences],
            "own": [vars(each) for each in self.own], "refused": self.found.refused, "hidden": self.found.hidden,
            "changing": self.changing,
        }  # fmt: skip


@dataclass
class Kernel:
    """A kernel on the cases of a subject. The explanation of its bytes is found on demand of a pair."""

    name: str
    backend: Backend
    cases: Cases
    device: str
    seed: int

    @cached_property
    def results(self) -> Results:
        """What the kernel gives."""
        return results_of(self.backend, self.name, self.cases, device=self.device, seed=self.seed)

    @cached_property
    def rule(self) -> Fit | str:
        """The rule of a quantizer."""
        return quantizer_fit(self.backend, self.cases[0][0].recipes[0], self.device, self.seed)

    @cached_property
    def fields(self) -> ContractFit | str:
        """The fields of a contract."""
        case = self.cases[0][0]
        assert isinstance(case, ContractCase)
        recipes = list(dict.fromkeys(name for each, _ in self.cases for name in each.recipe_names))
        return contract_fit(self.backend, type(case), recipes, self.seed)


def beside(one: Kernel, other: Kernel, subject: str) -> Parity:
    """Two kernels on the same cases."""
    names, changing = (one.name, other.name), [*one.results.changing, *other.results.changing]
    found = compared(one.results, other.results, one.cases)
    if not found.differences:
        return Parity(names, subject, found, changing=changing)
    case = next(case for case, _ in one.cases if case.id == found.differences[0].case)
    told_apart_by = operation_of(case).told_apart_by
    explained: list[Choice] = []
    own: tuple[Own, ...] = ()
    if told_apart_by == "fields":
        explained, own = _of_contract(one, other)
    elif told_apart_by == "rule" and case.called == next(iter(case.all_methods())):
        explained, own = _of_quantizer(one, other)
    elif told_apart_by == "order":
        explained, own = _of_product(one, other, case)
    return Parity(names, subject, found, explained, own, changing)


Explained = tuple[list[Choice], tuple[Own, ...]]


def _of_quantizer(one: Kernel, other: Kernel) -> Explained:
    rules = one.rule, other.rule
    own = tuple(quantizer_own(kernel.name, rule) for kernel, rule in zip((one, other), rules, strict=True))
    fits = [rule for rule in rules if isinstance(rule, Fit)]
    return quantizer_choices(*fits) if len(fits) == 2 else [], own


def _of_contract(one: Kernel, other: Kernel) -> Explained:
    fitted = one.fields, other.fields
    own = tuple(contract_own(kernel.name, found) for kernel, found in zip((one, other), fitted, strict=True))
    fits = [found for found in fitted if isinstance(found, ContractFit)]
    return contract_choices(*fits) if len(fits) == 2 else [], own


def _of_product(one: Kernel, other: Kernel, case: Case) -> Explained:
    orders, own = [], []
    for kernel in (one, other):
        dtype = kernel.results.given[case.id]["output"].dtype
        order, known = order_of(kernel.backend, case, dtype, seed=kernel.seed, device=kernel.device)
        wrong = kernel.results.wrong
        right = "every output lies in the interval of its order" if not wrong else next(iter(wrong.values()))
        own.append(Own(kernel.name, not wrong, right if known else f"{right}; {order}"))
        orders += [order] if known else []
    differ = len(set(orders)) == 2
    return [Choice("order of summation", "output", (orders[0], orders[1]))] if differ else [], tuple(own)


def pairs(kernels: Sequence[Kernel], subject: str) -> list[Parity]:
    """Every pair of kernels on the same cases."""
    return [beside(one, other, subject) for one, other in combinations(kernels, 2)]


def parity(
    f: Callable[..., Any],
    g: Callable[..., Any],
    subject: str | Recipe | Case | Iterable[Case | str] | Contract | None = None,
    *,
    recipe: str | Recipe | Case | Iterable[Case | str] | None = None,
    operation: str | None = None,
    families: Sequence[str] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    keys: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    names: tuple[str, str] = ("", ""),
) -> Parity:
    """Whether two functions give equal bytes on all input families, shapes and dtypes of a recipe or a contract.

    f, g: functions as `narrowgauge.check` takes them. subject, recipe, operation, families, shapes, keys, device, seed:
    as of `check`. dtypes: of x, or of the output of a gemm. names: of the two in the result; default: of the functions.

    The result is true only if all bytes are equal, in every case that one of the two runs. A case that kernels may
    refuse (docs/checking.md#the-cases) counts only if both run it. No verdict of either function is needed: two wrong
    kernels can be equal. If bytes differ, `choices` has the fields of the dialect or of the contract that differ,
    `own` each function beside its own dialect, and `found.differences` the counts and the first elements.

    Raises ValueError and TypeError for arguments that do not fit together.
    """
    chosen = {"families": families, "shapes": shapes, "dtypes": dtypes, "keys": keys or {}}
    known = parameters_of(f) & parameters_of(g)
    _, operation, cases = selected_cases(subject, recipe, operation, chosen, parameters=known)
    if not cases:
        raise ValueError("families, shapes or dtypes is empty; leave it out for the default")
    one, other = names[0] or name_of_function(f), names[1] or name_of_function(g)
    if one == other:
        one, other = f"{one} (first)", f"{other} (second)"
    device = str(torch.device(device))
    with settings_kept("parity", device):
        kernels = [
            Kernel(name, FunctionBackend(name, function, cases[0][0], operation), cases, device, seed)
            for name, function in ((one, f), (other, g))
        ]
        return beside(kernels[0], kernels[1], subject_of(operation, cases))


class _Only(Backend):
    """A backend with some of its methods."""

    def __init__(self, backend: Backend, methods: frozenset[str]) -> None:
        super().__init__(backend.host)
        self._methods = methods

    def has(self, method: str) -> bool:
        return method in self._methods and super().has(method)


def only(backend: Backend, cases: Cases) -> Backend:
    """The backend without the methods that the cases do not name: a product then has the operands of the reference,
    the same for every backend."""
    return _Only(backend, frozenset(name for case, _ in cases for name in (case.called, *case.descriptions)))


def subject_of(operation: str, cases: Cases) -> str:
    """Operation and recipes in words."""
    return " ".join(dict.fromkeys([operation, *(case.recipe_label for case, _ in cases)])).strip()
