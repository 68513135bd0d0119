"""The fields of a contract that a kernel follows, fitted to its bytes field by field and confirmed on all families."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.operations.contracts.as_operation import called
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.program import HIDDEN, Program
from narrowgauge.spec.quantized import Quantized

FIRST = ("normal", "ladder", "position")
"""Families to which the fields are fitted; all further families confirm the fields, and show fields invisible in these
families."""

Fields = Mapping[str, Any]
"""Values of the fields of a contract by name."""


@dataclass(frozen=True)
class Called:
    """A case that the kernel has run."""

    case: ContractCase
    tensors: dict[str, torch.Tensor]
    shown: Shown

    def wrong(self, program: Program) -> int:
        """Elements that the steps do not explain."""
        return sum(int(part.wrong.sum()) for _, part in judged(program, self.tensors, self.shown))


@dataclass(frozen=True)
class Fit:
    """The values of the fields with which the fewest elements are wrong."""

    contract: str
    fields: dict[str, Any]
    others: dict[str, dict[Any, int]]
    """By field the other values and their wrong elements, the rest as fitted. 0: the inputs do not tell them apart."""
    compared: int
    """Elements of all cases."""
    wrong: int
    """Elements of all cases that the fitted values do not explain."""
    changed: dict[str, Any]
    """The values that are not the defaults of the contract."""
    cases: int
    unsupported: int
    dialects: list[str]
    """Dialects of the contract with these values."""

    @property
    def explained(self) -> bool:
        """Whether the values explain every element."""
        return self.cases > 0 and not self.wrong

    def lines(self) -> Iterator[str]:
        """The fit for people."""
        if not self.cases:
            yield f"{self.contract}: the backend supports none of {self.unsupported} cases"
            return
        for name, value in self.fields.items():
            excluded = [f"{other!r}: {count} wrong" for other, count in self.others[name].items() if count]
            same = [repr(other) for other, count in self.others[name].items() if not count]
            notes = [*excluded, *([f"not told apart from {', '.join(same)}"] if same else [])]
            yield f"{name} = {value!r}   {'; '.join(notes)}"
        count = f"{self.compared} elements of {self.cases} cases"
        yield f"explains all {count}" if not self.wrong else f"{self.wrong} of {count} are explained by no values"
        if self.explained and self.fields:
            said = self.dialects[0] if self.dialects else self.changed
            yield f"declares = {{{self.contract!r}: {said!r}}}" if self.changed else "as the defaults say"
            if self.dialects:
                yield f"the fields of {', '.join(self.dialects)}"

    def as_json(self) -> dict[str, Any]:
        """The fit as JSON can hold it."""
        others = {name: [{"value": v, "wrong": n} for v, n in known.items()] for name, known in self.others.items()}
        return {**vars(self), "others": others, "explained": self.explained}


def fit_contract(backend: Backend, cls: type[ContractCase], recipes: Sequence[str], seed: int) -> Fit:
    """Fit the fields of a contract to the method of a backend on the CPU. Raises ValueError for a missing recipe."""
    ran, unsupported = [], 0
    for case, _ in cls.usual(recipes, views=False):
        assert isinstance(case, ContractCase)
        inputs = make_inputs(case, seed=seed)
        try:
            ran.append(Called(case, inputs.tensors, called(case, inputs, backend)[0][0]))
        except Unsupported:
            unsupported += 1
        except BackendError:  # a kernel may refuse a shape; `run` says why
            unsupported += 1
    choices = {name: cls.declared.choices[name] for name in cls.declared.fields}
    fields = {name: cls.declared.options[name] for name in choices}
    declared = cls.declared_fields(backend.declares)
    hidden = {name: value for name, value in declared.items() if name == HIDDEN}
    first = [one for one in ran if one.case.inputs in FIRST]

    def wrong(values: Fields, cases: Sequence[Called]) -> int:
        return sum(one.wrong(one.case.declared_program({**hidden, **values})) for one in cases)

    def best_of(names: Sequence[str], cases: Sequence[Called] = first) -> dict[str, Any]:
        sets = (dict(zip(names, values, strict=True)) for values in itertools.product(*(choices[n] for n in names)))
        return min(({**fields, **chosen} for chosen in sets), key=lambda values: wrong(values, cases))

    for name in choices:  # field by field; a field may show only beside the right value of another
        fields = best_of([name])
    if wrong(fields, first):
        for pair in itertools.combinations(choices, 2):
            fields = best_of(pair)
    elif wrong(fields, ran):  # other families show a field, such as flushed subnormals
        for name in choices:
            fields = best_of([name], ran)
    others = {
        name: {value: wrong({**fields, name: value}, ran) for value in values if value != fields[name]}
        for name, values in choices.items()
    }
    compared = sum(sum(t.numel() for t in _tensors(one.shown)) for one in ran)
    changed = {name: value for name, value in fields.items() if value != cls.declared.options[name]}
    defaults = {name: cls.declared.options[name] for name in choices}
    dialects = [name for name, own in cls.declared.dialects.items() if {**defaults, **own} == fields]
    return Fit(cls.operation, fields, others, compared, wrong(fields, ran), changed, len(ran), unsupported, dialects)


def _tensors(shown: Shown) -> Iterator[torch.Tensor]:
    for result in shown.values():
        if isinstance(result, Stored):
            yield from result.parts.values()
        else:
            yield from (result.codes, result.scales) if isinstance(result, Quantized) else (result,)
