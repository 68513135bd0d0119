"""The operation of the wrong results: quantize with a recipe, or a contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowgauge import adapt
from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.api.assert_result import bound
from narrowgauge.harness.api.inputs import make_case, name_of, named
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.operations import hold
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.strength.kernel import wrong_programs
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.power.trial import ContractTrial, QuantizeTrial, Results, Trial
from narrowgauge.spec.program import Program
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe


class Subject(ABC):
    """An operation."""

    label: str

    @abstractmethod
    def cases(
        self, families: Sequence[str], shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[torch.dtype]
    ) -> list[Case]:
        """A case per input family, shape and dtype. Raises ValueError for a wrong family, shape or dtype."""

    def made(
        self,
        families: Sequence[str],
        shapes: Sequence[Sequence[int]] | None,
        dtypes: Sequence[torch.dtype],
        seed: int,
    ) -> list[Trial]:
        """A trial per case of `cases`. The results of an earlier call are those of the next seed."""
        trials = list[Trial]()
        for case in self.cases(families, shapes, dtypes):
            earlier = trial_of(case, seed + 1)
            found = trial_of(case, seed, None if earlier is None else earlier.right)
            trials += [] if found is None else [found]
        return trials

    @abstractmethod
    def trial(self, label: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Trial:
        """The trial of a call. Raises ValueError and TypeError for arguments that the operation does not take."""

    def given(self, inputs: Sequence[Any]) -> list[Trial]:
        """A trial per entry of the user's inputs."""
        if not isinstance(inputs, list | tuple):
            raise TypeError(f"inputs is a list with an entry for each call, not {type(inputs).__name__}")
        return [
            self.trial(f"inputs[{n}]", *(((), one) if isinstance(one, Mapping) else ((one,), {})))
            for n, one in enumerate(inputs)
        ]


class QuantizeSubject(Subject):
    """Quantization of a matrix."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.label = recipe, f"quantize {recipe}"

    def cases(
        self, families: Sequence[str], shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[torch.dtype]
    ) -> list[Case]:
        cls = QuantizeCase
        return [
            make_case(
                cls.operation,
                self.recipe,
                {**cls.usual_keys(self.recipe, name_of(dtype)), "shape": shape, "inputs": family},
            )
            for shape in (cls.usual_shapes(self.recipe)[:1] if shapes is None else shapes)
            for dtype in dtypes
            for family in families
        ]

    def trial(self, label: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Trial:
        tensors = [x for x in (named.get("x"), *arguments, *named.values()) if is_tensor(x)]
        if not tensors:
            raise TypeError(f"{label} has no tensor x, which {self.label} needs; give x, or a mapping with x")
        scale, random = named.get("scale"), named.get("random")
        if self.recipe.rounding == "stochastic" and random is None:
            raise ValueError(f"{label} has no random, and {self.recipe} rounds stochastically; give (seed, offset)")
        own_scale = None if scale is None else adapt.tensor(scale)
        return QuantizeTrial(label, adapt.tensor(tensors[0]).detach(), self.recipe, own_scale, random)


class ContractSubject(Subject):
    """A contract."""

    def __init__(self, contract: Contract, recipe: str | None, options: Mapping[str, Any]) -> None:
        self.contract, self.recipe, self.options = contract, recipe, options
        self.label = " ".join(filter(None, (contract.name, recipe)))

    def cases(
        self, families: Sequence[str], shapes: Sequence[Sequence[int]] | None, dtypes: Sequence[torch.dtype]
    ) -> list[Case]:
        cls, recipes, found = hold(self.contract), [self.recipe] if self.recipe else [], list[Case]()
        for dtype in map(name_of, dtypes):
            main = [cls.shapes_of(cls.recipe_choices(recipes)[0], dtype)[0]] if shapes is None else shapes
            for shape in main:
                usual = cls.usual(
                    recipes, dtypes=[dtype], families=families, shapes=[shape], keys=self.options, views=False
                )
                found += [case for case, _ in usual[: len(families)]]  # behind them are values of options
        return found

    def trial(self, label: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Trial:
        tensors = [x for x in arguments if is_tensor(x) or isinstance(x, Quantized)]
        known = {name: value for name, value in named.items() if name in self.contract.tensors}
        recipes = dict.fromkeys(self.contract.recipes, self.recipe) if self.recipe else {}
        program, own = bound(self.contract, tuple(tensors), {**known, **recipes, **self.options})
        return ContractTrial(label, program, own, _changes(program))


def trial_of(case: Case, seed: int, earlier: Results | None = None) -> Trial | None:
    """The trial of a case of a contract or of a rowwise quantize; None for a case without a list of mistakes.

    `earlier`: results for further inputs of the same shapes.
    """
    made = make_inputs(case, seed=seed)
    if isinstance(case, ContractCase):
        return ContractTrial(case.id, case.program, made.tensors, _changes(case.program), earlier)
    if case.operation != QuantizeCase.operation or getattr(case, "usage", "") != "rowwise":
        return None
    recipe, random = named(case.recipe_names[0]), made.random("x")
    return QuantizeTrial(case.id, made.x, recipe, made.get("scale.x"), random, earlier)


_CHANGES: dict[str, list[Change]] = {}
"""Changes of a contract by the digest of the steps."""


def _changes(program: Program) -> list[Change]:
    if program.digest not in _CHANGES:
        _CHANGES[program.digest] = wrong_programs(program)
    return _CHANGES[program.digest]


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, of numpy, or with DLPack."""
    return hasattr(value, "__dlpack__")


def find_subject(subject: Any, recipe: Any, options: Mapping[str, Any]) -> Subject:
    """The operation of the arguments of `power`. Raises ValueError and TypeError."""
    contract = CONTRACTS.get(subject) if isinstance(subject, str) else subject
    if isinstance(contract, Contract):
        return ContractSubject(contract, None if recipe is None else str(named(recipe)), options)
    if (subject is None) == (recipe is None):
        wrong = "no recipe and no contract is given" if recipe is None else "a recipe is given twice"
        raise TypeError(f'{wrong}; it is power(judge, "nvfp4"), or power(judge, contract, recipe="nvfp4")')
    if options:
        raise ValueError(f"keys has {', '.join(options)}, which are options of a contract; quantize has none")
    return QuantizeSubject(named(recipe if subject is None else subject))
