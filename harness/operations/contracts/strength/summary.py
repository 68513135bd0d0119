"""The strength of the inputs of one contract, as text and as data: of its families, or of the cases of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.operations.contracts.strength.aim import aim
from narrowgauge.harness.operations.contracts.strength.kernel import wrong_programs
from narrowgauge.harness.operations.contracts.strength.table import (
    SHAPES,
    StrengthRow,
    strength_json,
    strength_table,
    table_of,
    unseen,
)
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference.contracts.evaluate import Tensors
from narrowgauge.spec.program import Program


@dataclass(frozen=True)
class Summary:
    """The verdicts of inputs about the mistakes of a contract."""

    label: str
    """Contract, recipe and dtype."""
    program: Program
    rows: list[StrengthRow]
    inputs: str
    """Source of the inputs: "family of inputs" or "case of the run"."""
    search: bool = False
    """Whether inputs are searched for the mistakes that no inputs of the table show."""

    @cached_property
    def hidden(self) -> dict[str, bool]:
        """The mistakes shown by no inputs; bool: invisible (`unseen`)."""
        return unseen(self.rows)

    @cached_property
    def aimed(self) -> dict[str, str | None]:
        """The sentences of the mistakes shown by no inputs, though visible inputs exist, and the family found by a
        search."""
        missed = [change for change in wrong_programs(self.program) if self.hidden.get(change.name) is False]
        found = {change.sentence: aim(self.program, change, SHAPES[0]) if self.search else None for change in missed}
        return {sentence: None if shown is None else shown.family for sentence, shown in found.items()}

    @property
    def complete(self) -> bool:
        """Whether inputs were found for every mistake that can be seen."""
        return None not in self.aimed.values()

    @property
    def count(self) -> str:
        """How many mistakes are shown, in a sentence."""
        names = {row.name for row in self.rows}
        return f"{len(names) - len(self.hidden)} of {len(names)} mistakes are shown by a {self.inputs}"

    @property
    def text(self) -> str:
        """The mistakes shown by no inputs, a line per mistake, and the result of a search."""
        sentences = {row.name: row.sentence for row in self.rows}
        invisible = [sentences[name] for name, never in self.hidden.items() if never]
        lines = []
        if invisible:
            lines.append("invisible on these inputs, since every byte of such a kernel is right:")
            lines += [f"  {sentence}" for sentence in invisible]
        if self.aimed:
            advice = "not shown" if self.search else "not shown; narrowgauge contract FILE --aim searches inputs"
            lines.append(f"{advice}:")
            lines += [
                f"  {sentence}{f': shown by {family}' if family else ': no inputs were found' if self.search else ''}"
                for sentence, family in self.aimed.items()
            ]
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """The table for a program: the fields of `StrengthRow`."""
        rows = json.loads(strength_json(self.rows))
        return {"contract": self.label, "digest": self.program.digest, "rows": rows, "aimed": self.aimed}


def of_families(cls: type[ContractCase], recipe: str | None, dtype: str, *, whole: bool, search: bool) -> Summary:
    """The strength of the input families at `SHAPES`. Raises ContractError for a function that is no contract."""
    program = cls.example(recipe, dtype).program
    label = " ".join(filter(None, (cls.operation, recipe, dtype)))
    return Summary(label, program, strength_table(program, whole=whole), "family of inputs", search)


def of_cases(cases: Sequence[ContractCase], seed: int, *, whole: bool, search: bool) -> list[Summary]:
    """The strength of the inputs of a run, for each contract with its recipe, dtypes and options."""
    groups: dict[str, tuple[ContractCase, dict[str, dict[str, Tensors]]]] = {}
    for case in cases:
        _, inputs = groups.setdefault(case.program.digest, (case, {}))
        shape = "x".join(map(str, case.shape))
        inputs.setdefault(shape, {}).setdefault(case.inputs, make_inputs(case, seed=seed).tensors)
    return [
        Summary(_label(case), case.program, table_of(case.program, inputs, whole=whole), "case of the run", search)
        for case, inputs in groups.values()
    ]


def _label(case: ContractCase) -> str:
    """The id of a case without its shape and its inputs."""
    left = {"x".join(map(str, case.shape)), case.inputs}
    return " ".join(part for part in case.id.split("/") if part not in left)
