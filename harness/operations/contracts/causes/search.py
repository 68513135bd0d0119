"""Causes of wrong bytes under a contract: the same contract with one mistake, or with two.

The kernel's results are judged under each changed contract. A change that accepts all of them is a cause. The cause is
certain if the results exclude all further changes tried (`Evidence.excluded`). A mistake that is not in the list may
give the same bytes, so the sentence says how many changes were tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.machine.process import one_thread
from narrowgauge.harness.operations.contracts.causes.changes import Change, changes, short_changes
from narrowgauge.harness.operations.contracts.causes.equal_programs import equal_programs
from narrowgauge.harness.operations.contracts.causes.moved import moved_changes
from narrowgauge.harness.operations.contracts.causes.replay import (
    WRONG,
    Evidence,
    Keys,
    Replay,
    as_shown,
    has_rows,
    result_elements,
    rows_of,
)
from narrowgauge.harness.operations.stages.outcome import Limit
from narrowgauge.harness.operations.stages.possible_cause import FREE, GIVES_EVERY_BYTE, Cause, PossibleCause
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.spec.program import BEHIND, ROUTED, Program

NO_DIAGNOSIS = "no-diagnosis"
"""Name of the entry of a search without a cause."""
_ROWS = 16
"""Number of rows tried first: a change not excluded by these rows is tried on all rows."""
_PROBE = 4
"""Number of rows tried first for pairs."""
_SMALL = 2**17
"""Number of elements of results below which a single thread is faster than several."""
_NEAREST = 8
"""Number of single changes that begin pairs: the changes with results nearest to the kernel's."""


def changed_causes(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    shown: Shown,
    others: Sequence[Change],
    stage: StageResult,
    limit: Limit,
    *,
    singly: bool = False,
) -> Iterable[Cause | PossibleCause]:
    """The changes that make all results of the kernel right, or the sentence of a search without a cause.

    `others`: further changes, for example changed values of the fields of the contract. `singly`: no pairs are tried if
    no single change explains the results.
    """
    program, shown = _of_stage(program, shown, stage.stage)
    small = sum(result_elements(result) for result in shown.values()) < _SMALL
    with one_thread() if small else nullcontext():
        search = _Search(program, tensors, shown, stage, limit)
        search.try_singles(others)
        if not search.found:
            further = itertools.chain(moved_changes(program, tensors, shown), short_changes(program, tensors))
            search.try_singles(further, alone=True)
        if not search.found and not singly:
            search.try_pairs(search.nearest())
        elif search.found:
            rivals = [change for change in search.nearest() if change not in search.found]
            search.try_pairs(rivals, rivals)
        return list(search.causes())


def confirmed(
    program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown, others: Sequence[Change], cause: str
) -> str:
    """The sentence of the change with this name, or of the pair with these names, if it accepts all wrong results of a
    kernel that have numbers in common; else empty."""
    for output in program.outputs:
        part, own = _of_stage(program, shown, output)
        if len(part.outputs) < len(program.outputs):
            wrong = any(bool(each.wrong.any()) for _, each in judged(part, tensors, own))
            if wrong and (sentence := confirmed(part, tensors, own, others, cause)):
                return sentence
    sentences = []
    for name in cause.split(","):
        known = itertools.chain(
            others, changes(program), moved_changes(program, tensors, shown), short_changes(program, tensors)
        )
        change = next((change for change in known if change.name == name), None)
        if change is None:
            return ""
        program = change.program
        sentences.append(change.sentence)
    try:
        wrong = any(bool(part.wrong.any()) for _, part in judged(program, tensors, as_shown(program, shown)))
    except ValueError:  # the change hides the amax of the tensor
        return ""
    return "" if wrong else ", and ".join(sentences)


def _of_stage(program: Program, shown: Shown, stage: str) -> tuple[Program, Shown]:
    """The results that a mistake in the result of a stage may change, and the program of these."""
    output = next((name for name in program.outputs if stage == name or stage.startswith(f"{name}.")), None)
    part = program if output is None else program.beside(output)
    return part, {name: result for name, result in shown.items() if name in part.outputs}


_LONGEST = Change("", " " * 999, Program("", "", (), (), {}))


@dataclass
class _Search:
    """A search for the changes with a kernel's results."""

    program: Program
    tensors: Mapping[str, torch.Tensor]
    shown: Shown
    stage: StageResult
    limit: Limit
    others: Sequence[Change] = ()
    """Changes outside of the steps: values of the fields of the contract."""
    found: list[Change] = field(default_factory=list)
    """Changes, and pairs of changes, with all results accepted."""
    free: set[str] = field(default_factory=set)
    """Names of found values of fields with almost any bytes accepted."""
    near: list[Change] = field(default_factory=list)
    """Single changes with wrong results that no probed row excludes."""
    singles: list[Change] = field(default_factory=list)
    """Tried changes. A change with almost any bytes accepted explains no byte and is left out."""
    pairs: int = 0
    """Number of tried pairs."""
    bounds: dict[str, Evidence] = field(default_factory=dict)
    """Evidence of the results of the rows of `probe` about single changes, until the rows exclude the change."""
    totals: dict[str, Evidence] = field(default_factory=dict)
    """Evidence of all results of these rows about single changes."""

    def __post_init__(self) -> None:
        self.keys = Keys()
        rows = _wrong_rows(self.program, self.tensors, self.shown, self.stage)
        height = self.tensors[self.program.arguments[0].name].shape[0]
        self.whole = rows is None or len(rows) == height
        self.some = self._replay(None if self.whole else rows)
        alone = rows is not None and self.some.at_once(self.program) == 1
        self.probe = self._replay(rows[:_PROBE]) if alone and rows is not None else self.some
        self.known = {self.keys.of_outputs(self.program)}
        self.some.evidence(self.program, whole=True)
        numbers = dict(zip(self.program.outputs, self.keys.of_outputs(self.program), strict=True))
        self.right = {name: n for name, n in numbers.items() if n in self.some.judged and self.some.judged[n].fits}
        """Numbers of the results that are right, in the rows that are tried first."""

    def _replay(self, rows: torch.Tensor | None) -> Replay:
        shown = self.shown if rows is None else {name: rows_of(result, rows) for name, result in self.shown.items()}
        some = slice(None) if rows is None else rows
        found = Replay(self.tensors, shown, some, self.keys, rows is None)
        found.remember(self.program)
        return found

    def try_singles(self, others: Iterable[Change], *, alone: bool = False) -> None:
        """Judge the results under every single change, `others` first. `alone`: the others alone."""
        others = list(others)
        self.others = [*self.others, *others]
        every = itertools.chain(self._new(others), [] if alone else self._new(changes(self.program)))
        for change in self._tried(every, self.some):
            evidence = self._evidence(change.program)
            if self.probe is self.some and evidence.excluded:
                self.bounds[change.name] = evidence
            if not evidence.judged and not evidence.excluded and change not in others:
                continue
            self.singles.append(change)
            if evidence.fits:
                self.found.append(change)
                if not evidence.judged:
                    self.free.add(change.name)
            elif not evidence.excluded:
                self.near.append(change)

    def nearest(self) -> list[Change]:
        """The single changes with results near the kernel's, the nearest first."""
        half = _NEAREST // 2
        by_share = self._least(half, lambda evidence: (evidence.share, evidence.distance))
        by_distance = self._least(half, lambda evidence: (evidence.distance, 0.0))
        return list({change.name: change for change in (*by_share, *by_distance)}.values())

    def _least(self, count: int, key: Callable[[Evidence], tuple[float, float]]) -> list[Change]:
        """The single changes with the least evidence against them. Evidence grows with the results: a change is judged
        as a whole only if its evidence so far is among the least."""
        found: list[tuple[tuple[float, float], int, Change]] = []
        bounds = [(key(self.bounds.get(change.name, Evidence())), place) for place, change in enumerate(self.singles)]
        for bound, place in sorted(bounds):
            if self.limit.reached or (len(found) >= count and bound > sorted(found)[count - 1][0]):
                break
            change = self.singles[place]
            if change.name not in self.totals:
                self.totals[change.name] = self.probe.evidence(change.program, whole=True)
            found.append((key(self.totals[change.name]), place, change))
        return [change for _, _, change in sorted(found, key=lambda one: one[:2])[:count]]

    def try_pairs(self, firsts: Sequence[Change], seconds: Sequence[Change] | None = None) -> None:
        """Judge the results under pairs of changes. `seconds`: the second ones; None: all."""
        sentences = None if seconds is None else {change.sentence for change in seconds}
        for first in firsts:
            values = dict(self.probe.known)
            try:
                self.probe.remember(first.program)
            except ValueError:  # the change hides a quantization of several numbers, and so do its pairs
                self.probe.known = values
                continue
            some = changes(first.program, seconds)
            every = self._new(one for one in some if sentences is None or one.sentence in sentences)
            for second in self._tried(every, self.probe):
                self.pairs += 1
                if not self.probe.evidence(second.program, first=True).fits:
                    continue
                evidence = self._evidence(second.program)
                if evidence.fits and evidence.judged:
                    both = f"{first.sentence}, and {second.sentence}"
                    self.found.append(Change(f"{first.name},{second.name}", both, second.program))
            self.probe.known = values
            self.keys.forget()

    def _tried(self, some: Iterable[Change], replay: Replay) -> Iterator[Change]:
        """The changes up to the limit of work, judged together if possible."""
        left, count = iter(some), replay.at_once(self.program)
        while batch := list(itertools.islice(left, count)):
            tried = [*itertools.takewhile(lambda change: self.limit.may_try(replay.work(change.program)), batch)]
            replay.judge_together([change.program for change in tried])
            yield from tried
            if len(tried) < len(batch):
                return

    def _new(self, some: Iterable[Change]) -> Iterator[Change]:
        """The changes with different computations of the results; of changes with the same computation, the change with
        the shortest sentence."""
        unlike: dict[tuple[int, ...], Change] = {}
        for change in some:
            key = self.keys.of_outputs(change.program)
            if key not in self.known and len(change.sentence) < len(unlike.get(key, _LONGEST).sentence):
                unlike[key] = change
        self.known |= unlike.keys()
        yield from sorted(unlike.values(), key=self._spoiled)

    def _spoiled(self, change: Change) -> int:
        """The right results that a change computes in another way: a mistake that leaves them alone is tried first."""
        numbers = self.keys.of(change.program)
        return sum(numbers[change.program.outputs[name]] != number for name, number in self.right.items())

    def _evidence(self, program: Program) -> Evidence:
        """Evidence of some rows about a program, and of all rows if these accept the program."""
        across = any(step.function == "amax_of_all" for step in program.steps)
        evidence = Evidence() if across else self.some.evidence(program)
        return self._of_all_rows(program) if evidence.fits and (across or not self.whole) else evidence

    def _of_all_rows(self, program: Program) -> Evidence:
        if self.whole:
            return self.some.evidence(program, whole=True)
        found = Evidence()
        try:
            for _, part in judged(program, self.tensors, as_shown(program, self.shown)):
                found.add(part)
        except ValueError:  # the change hides the amax of the tensor
            found.wrong += 1
        return found

    def causes(self) -> Iterator[Cause | PossibleCause]:
        """The causes, or the sentence of a search without a cause."""
        pairs = f" and {self.pairs} pair{'s' * (self.pairs > 1)}" if self.pairs else ""
        tried = f"{len(self.singles)} changes{pairs}"
        if not self.found:
            yield PossibleCause(NO_DIAGNOSIS, f"none of {tried} of this contract gives these bytes")
            return
        found, plain = self._unlike(), self._of_all_rows(self.program)
        rivals = (change for change in self.near if not self._of_all_rows(change.program).excluded)
        rival = next(rivals, None)
        for change in sorted(found, key=self._width) if len(found) > 1 else found:
            sentence = f"{change.sentence}: the bytes are those of this change, among {tried} that were tried"
            if rival is not None:
                doubt = f"too few bytes exclude another change: {rival.sentence}"
                yield PossibleCause(change.name, f"{sentence}{GIVES_EVERY_BYTE}{doubt}")
            elif change.name in self.free:
                yield PossibleCause(change.name, f"{sentence}{GIVES_EVERY_BYTE}{FREE}")
            elif not plain.excluded or (plain.telling < WRONG and change not in self.others):
                few = f"{plain.strong} wrong elements in {len(plain.rows)} rows are too few to be certain"
                if plain.excluded:
                    few = "almost all wrong elements are 0, NaN or the largest code, as with many mistakes"
                yield PossibleCause(change.name, f"{sentence}{GIVES_EVERY_BYTE}{few}")
            else:
                yield change.name, sentence

    def _width(self, change: Change) -> float:
        """How many results a change leaves open."""
        return -self._of_all_rows(change.program).determined

    def _unlike(self) -> list[Change]:
        """The found changes; of causes equal on every input a field, else the cause with the fewest steps."""
        found: list[Change] = []
        names = {change.name for change in self.others}

        def plainness(change: Change) -> tuple[bool, int, int]:
            return change.name not in names, len(change.program.steps), len(change.sentence)

        for change in sorted(self.found, key=plainness):
            if not any(equal_programs(change.program, other.program, self.tensors) for other in found):
                found.append(change)
        return found


def _wrong_rows(
    program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown, stage: StageResult
) -> torch.Tensor | None:
    """At most `_ROWS` rows, wrong rows first. None if rows cannot be judged alone."""
    first = tensors[program.arguments[0].name]
    axis, height = program.arguments[0].axes[:1], first.shape[0]
    by_rows = [program.steps[number].axes[:1] == axis for number in program.outputs.values()]
    # A hidden quantization may have an amax of all rows.
    hidden = any(
        step.function in ROUTED or step.across_rows or (step.function in BEHIND and axis[0] in step.axes)
        for step in program.steps
    )
    if hidden or not all(by_rows) or not all(map(has_rows, shown.values())):
        return None
    wrong, count = stage.wrong_elements, -(-_ROWS // math.prod(first.shape[1:-1]))
    if wrong is not None and height and wrong.shape[0] % height == 0:
        return wrong.reshape(height, -1).sum(1).argsort(descending=True, stable=True)[:count]
    return torch.arange(min(height, count), device=first.device)
