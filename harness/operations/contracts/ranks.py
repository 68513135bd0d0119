"""Judging contracts of a group of processes: all ranks call the method of the backend, and all results are judged.

Results of ranks with equal bytes are judged once. A result that belongs to a stripe of rows, and wrong bytes that no
change explains on all rows, are judged stripe by stripe: rank j reduces stripe j: its mistakes lie in stripe j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.guarded_memory import dense, element_bytes
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.hosts.remote.ranks import inputs_of, of_rank
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.process_group import GROUP
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.causes.replay import rows_of
from narrowgauge.harness.operations.contracts.causes.search import NO_DIAGNOSIS, changed_causes, confirmed
from narrowgauge.harness.operations.contracts.judge import judge_calls
from narrowgauge.harness.operations.contracts.results import fitting, named_results, result_tensors
from narrowgauge.harness.operations.stages.outcome import Limit, Outcome
from narrowgauge.harness.operations.stages.possible_cause import Cause, PossibleCause
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.program import DEQUANTIZE, OWN_STRIPE, Program, Step, stripe
from narrowgauge.spec.quantized import PARTS, Quantized
from narrowgauge.spec.recipes import find_recipe

RANKS_DIFFER = "ranks-differ"
"""The cause of results with wrong differences between ranks."""
STRIPES_EXCHANGED = "stripes-exchanged"
"""The cause of stripes of rows in the place of a wrong stripe."""
OTHER_SLICES = "other-slices"
"""The cause of gathered slices with codes or scales of another rank."""


@dataclass(frozen=True)
class _Call:
    """Results to judge together."""

    rank: int
    """The rank that returns the results, or that reduces their stripe."""
    tensors: Tensors
    shown: Shown


def judge_ranks(
    case: ContractCase, inputs: Inputs, backend: Backend, program: Program, others: list[Change]
) -> Outcome:
    """Run the method on all ranks, and judge their results. `others`: changed values of the fields of the contract.

    Raises BackendError and Unsupported, as the backend does, and BackendError for results that do not fit.
    """
    method = next(iter(case.all_methods()))
    if not backend.has(method):
        raise Unsupported(f"backend {backend.name} has no {method}")
    group = backend.ranks(case.ranks)
    given = {
        of_rank(name, rank): tensor
        for rank in range(case.ranks) for name, tensor in _tensors_of(case, inputs.tensors, rank).items()
    }  # fmt: skip

    def call(given: Tensors) -> Tensors:
        arguments, named = zip(*(_arguments(case, inputs_of(given, rank)) for rank in range(case.ranks)), strict=True)
        found = group.call(method, *zip(arguments, named, strict=True), **case.passed)
        with fitting(method):
            parts = [result_tensors(_returned(program), one) for one in found]
        return {of_rank(name, rank): tensor for rank, part in enumerate(parts) for name, tensor in part.items()}

    outputs, protection, seconds = repeated(group, inputs.x.device, given, call)
    outcome = Outcome(protection, outputs, seconds=seconds)
    results = [{name: dense(t) for name, t in inputs_of(outputs, rank).items()} for rank in range(case.ranks)]
    with fitting(method):
        calls = list(_calls(program, inputs.tensors, results))
    outcome = judge_calls(program, [(call.tensors, call.shown) for call in calls], outcome, others)
    diagnosis = _Diagnosis(program, inputs.tensors, calls, others, case.ranks)
    outcome.causes = dict.fromkeys(outcome.causes, diagnosis.causes)
    outcome.confirms = diagnosis.confirmed
    if OWN_STRIPE not in program.outputs or len(program.outputs) > 1:
        outcome.stages.append(_equality(program, results))
    return outcome


# ---- calls -----------------------------------------------------------------------------------------------------------


def _tensors_of(case: ContractCase, tensors: Tensors, rank: int) -> Tensors:
    """The tensors of a rank, by the names of the parameters and of the parts of quantized parameters."""
    found: Tensors = {}
    for name, (kind, _, _) in case.declared.tensors.items():
        own = tensors.get(f"{name}.{rank}" if kind.endswith("Ranks") else name)
        if own is None:
            continue
        if kind == "QuantizedRanks":
            q = quantize(own, find_recipe(case.recipe_names[0]))
            found |= {f"{name}.{part}": value for part in PARTS if (value := getattr(q, part)) is not None}
        else:
            found[name] = own
    return found


def _arguments(case: ContractCase, given: Tensors) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a rank by place, the group last, and by name."""
    declared, known = case.declared, dict[str, Any](given)
    recipes = dict(zip(declared.recipes, map(find_recipe, case.recipe_names), strict=True))
    quantized = [name for name, (kind, _, _) in declared.tensors.items() if kind == "QuantizedRanks"]
    for name in quantized:
        parts: dict[str, Any] = {part: given.get(f"{name}.{part}") for part in PARTS}
        shape = next(a for a in case.program.arguments if a.name == f"{name}.0").axes
        known[name] = Quantized(**parts, recipe=recipes["recipe"], shape=(case.sizes[shape[0]], case.sizes[shape[1]]))
    known |= {} if quantized else recipes
    by_place = [known[name] for name in declared.parameters if name in known and name not in declared.by_name]
    return [*by_place, GROUP], {name: known[name] for name in declared.by_name if name in known}


# ---- results ---------------------------------------------------------------------------------------------------------


def _gathered(program: Program) -> bool:
    """Whether the results of the contract are the results of all ranks, joined along the rows."""
    return all(name.startswith("rank") for name in program.outputs)


def _returned(program: Program) -> Program:
    """The program with the results of a rank."""
    if _gathered(program):
        return replace(program, outputs={"quantized": next(iter(program.outputs.values()))})
    whole = {name: number for name, number in program.outputs.items() if name != OWN_STRIPE}
    return replace(program, outputs=whole or program.outputs)


def _calls(program: Program, tensors: Tensors, results: Sequence[Tensors]) -> Iterator[_Call]:
    """The results of all ranks, without repetition of equal results. Raises TypeError and ValueError for results that
    do not fit."""
    ranks, rows = len(results), next(iter(tensors.values())).shape[0]
    seen: list[dict[str, bytes]] = []
    for rank, result in enumerate(results):
        if _gathered(program):
            parts = {
                f"rank{r}.{name}": part
                for name, tensor in result.items() for r, part in enumerate(_equal_parts(name, tensor, ranks))
            }  # fmt: skip
            calls = [_Call(rank, tensors, named_results(program, tensors, parts))]
        elif OWN_STRIPE not in program.outputs:
            calls = [_Call(rank, tensors, named_results(program, tensors, result))]
        elif len(program.outputs) == 1:
            own = of_stripe(program, tensors, stripe(rows, ranks, rank))
            calls = [_Call(rank, own, named_results(program, own, result))]
        else:
            shown = named_results(_returned(program), tensors, result)
            calls = [_stripe_of_rank(program, tensors, shown, stripe(rows, ranks, j), j, rank) for j in range(ranks)]
        for call in calls:
            key = {f"{call.rank} {name}": _bytes(part) for name, part in call.shown.items()}
            key = key if OWN_STRIPE in program.outputs else {name.partition(" ")[2]: b for name, b in key.items()}
            if key not in seen and all(t.numel() for t in call.tensors.values()):
                seen.append(key)
                yield call


def _stripe_of_rank(program: Program, tensors: Tensors, shown: Shown, rows: slice, owner: int, rank: int) -> _Call:
    """The rows of a stripe in the result of a rank, which keeps its own stripe unquantized."""
    index = torch.arange(rows.start, rows.stop)
    part = {name: rows_of(result, index) for name, result in shown.items()}
    if owner == rank:
        output = part.pop("output")
        part = {OWN_STRIPE: output}  # the codes are those that the rank sends
    return _Call(owner, of_stripe(program, tensors, rows), part)


def of_stripe(program: Program, tensors: Mapping[str, torch.Tensor], rows: slice) -> Tensors:
    """The inputs of the given rows."""
    axis = program.arguments[0].axes[:1]
    return {a.name: tensors[a.name][rows] if a.axes[:1] == axis else tensors[a.name] for a in program.arguments}


def _equal_parts(name: str, tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    if tensor.dim() == 0 or tensor.shape[0] % count:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which is not {count} equal parts, one of each rank")
    return list(tensor.chunk(count))


def _bytes(result: Any) -> bytes:
    parts = [result] if isinstance(result, torch.Tensor) else [result.codes, result.scales, result.amax]
    return b"".join(element_bytes(t.contiguous()).numpy().tobytes() for t in parts if t is not None)


def _equality(program: Program, results: Sequence[Tensors]) -> StageResult:
    """The stage of equal bytes on all ranks, but for the stripes that a rank keeps."""
    stage, ranks = StageResult("ranks", "repeat", compared=0), len(results)
    for name, first in results[0].items():
        if not all(name in result for result in results):
            continue
        rows = first.shape[0] if first.dim() else 0
        for rank in range(1, ranks):
            pairs = [(0, rank, slice(None))]
            if OWN_STRIPE in program.outputs and name == "output":
                # Rank 0 proves nothing about its own stripe, nor `rank` about its kept stripe.
                pairs = [(0, rank, stripe(rows, ranks, j)) for j in range(ranks) if j not in (0, rank)]
                pairs += [(1, rank, stripe(rows, ranks, 0))] if rank > 1 else []
            for one, other, some in pairs:
                a, b = (element_bytes(results[r][name][some].contiguous()) for r in (one, other))
                wrong = int((a != b).any(1).sum())
                stage.compared += len(a)
                stage.mismatches += wrong
                if wrong and not stage.sentence:
                    stage.causes = [RANKS_DIFFER]
                    stage.sentence = (
                        f"{format_count(wrong)} of {format_count(len(a))} elements of {name} have other bytes on rank "
                        f"{other} than on rank {one}"
                    )
    return stage


# ---- causes ----------------------------------------------------------------------------------------------------------


def rank_changes(program: Program, rank: int) -> list[Change]:
    """Mistakes of rank `rank` in several steps at once."""
    steps = program.steps
    of_inputs = [n for n, s in enumerate(steps) if s.recipe is not None and steps[s.operands[0]].function == "argument"]
    decoded = [n for n, s in enumerate(steps) if s.function == DEQUANTIZE and s.operands[0] in of_inputs]
    if not decoded:
        return []
    own = of_inputs[rank]

    def changed(name: str, sentence: str, numbers: Sequence[int], edit: Callable[[Step], Step]) -> Change:
        new = tuple(edit(step) if number in numbers else step for number, step in enumerate(steps))
        return Change(name, sentence, replace(program, steps=new))

    def scaled_by_own_amax(step: Step) -> Step:
        operands = (*step.operands, steps[own].operands[0])
        return replace(step, operands=operands, options={**step.options, "statistics": True})

    again = [n for n, step in enumerate(steps) if step.recipe is not None and n not in of_inputs]
    return [
        changed(
            "scales-of-own-rank", "a rank decodes the codes of all ranks with its own scales",
            [n for n in decoded if steps[n].operands[0] != own],
            lambda step: replace(step, operands=(*step.operands, own)),
        ),
        changed(
            "sum-of-codes", "codes are added in place of values: no scales are multiplied", decoded,
            lambda step: replace(step, options={**step.options, "view": "scales-one"}),
        ),
        *([changed("amax-of-own-rank", "the scales of the sum are those of the rank's own input", again,
                   scaled_by_own_amax)] if again else []),
    ]  # fmt: skip


@dataclass(frozen=True)
class _Diagnosis:
    """The search for the mistake in the results of a group."""

    program: Program
    tensors: Tensors
    calls: Sequence[_Call]
    others: Sequence[Change]
    """Other values of the fields of the contract."""
    ranks: int

    @property
    def places(self) -> Iterator[tuple[_Call, str]]:
        """Wrong results, of all rows and then of stripes, with the words for the place."""
        wrong = [call for call in self.calls if self._is_wrong(call)]
        if not wrong:
            return
        first, rows = wrong[0], next(iter(self.tensors.values())).shape[0]
        yield first, ""
        if OWN_STRIPE not in self.program.outputs and not _gathered(self.program):
            for rank in range(self.ranks):
                some = stripe(rows, self.ranks, rank)
                index = torch.arange(some.start, some.stop)
                part = {name: rows_of(result, index) for name, result in first.shown.items()}
                call = _Call(rank, of_stripe(self.program, self.tensors, some), part)
                if some.start < some.stop < rows and self._is_wrong(call):
                    yield call, f", in the rows that rank {rank} reduces"
                    return

    def causes(self, stage: StageResult, limit: Limit) -> Iterable[Cause | PossibleCause]:
        """The changes that explain the first wrong results, or a sentence without a cause."""
        if (cause := self._moved()) is not None:
            return [cause]
        found: list[Cause | PossibleCause] = []
        places = list(self.places)
        for (call, words), singly in [*((place, True) for place in places), *((place, False) for place in places[:1])]:
            changes = [*self.others, *rank_changes(self.program, call.rank)]
            here = replace(stage, wrong_elements=None) if words else stage
            found = list(changed_causes(self.program, call.tensors, call.shown, changes, here, limit, singly=singly))
            if any(name != NO_DIAGNOSIS for name, *_ in found):
                return [c if isinstance(c, PossibleCause) else (c[0], f"{c[1]}{words}") for c in found]
        return found

    def confirmed(self, cause: str) -> str:
        """The sentence of the mistake with this name if it gives the bytes; else empty."""
        if (moved := self._moved()) is not None:
            return moved[1] if moved[0] == cause else ""
        for call, words in self.places:
            changes = [*self.others, *rank_changes(self.program, call.rank)]
            if sentence := confirmed(self.program, call.tensors, call.shown, changes, cause):
                return f"{sentence}{words}"
        return ""

    def _is_wrong(self, call: _Call) -> bool:
        return any(bool(part.wrong.any()) for _, part in judged(self.program, call.tensors, call.shown))

    def _moved(self) -> Cause | None:
        """The cause of results with right parts in wrong places."""
        if _gathered(self.program):
            return self._other_slices()
        rows = next(iter(self.tensors.values())).shape[0]
        if rows % self.ranks:
            return None
        for shift in range(1, self.ranks):
            if not any(self._is_wrong(call) for call in self._shifted(rows, shift)):
                return STRIPES_EXCHANGED, f"stripe j of the result holds the rows of stripe j + {shift} of {self.ranks}"
        return None

    def _shifted(self, rows: int, shift: int) -> Iterator[_Call]:
        """The results in the place of the stripes that lie `shift` behind."""
        index = torch.arange(rows).roll(shift * (rows // self.ranks))
        for call in self.calls:
            if len(next(iter(call.tensors.values()))) == rows:
                yield replace(call, shown={name: rows_of(result, index) for name, result in call.shown.items()})
            else:
                other = stripe(rows, self.ranks, (call.rank + shift) % self.ranks)
                yield replace(call, tensors=of_stripe(self.program, self.tensors, other))

    def _other_slices(self) -> Cause | None:
        """The cause of gathered slices with the codes or the scales of a wrong rank."""
        right = [quantize(x, find_recipe(self.program.steps[number].recipe or ""))
                 for x, number in zip(self.tensors.values(), self.program.outputs.values(), strict=True)]  # fmt: skip
        for call in self.calls:
            words = []
            for rank, result in enumerate(call.shown.values()):
                for part in PARTS[:2]:
                    own = getattr(result, part)
                    from_ranks = [r for r, q in enumerate(right) if torch.equal(own, getattr(q, part))]
                    if not from_ranks:
                        return None
                    if rank not in from_ranks:
                        words.append(f"the {part} of rank {from_ranks[0]} in slice {rank}")
            if words:
                return OTHER_SLICES, f"rank {call.rank} holds {', '.join(words[:3])}"
        return None
