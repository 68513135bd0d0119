"""Stages that compare two runs of a kernel, without a reference.

Rows by themselves: a row has the same bytes in a different place, in a different batch, and alone. Operations with
independent rows have this stage. Memory changed in part by a kernel: different bytes before the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.repeated import Tensors

ROWS = "rows"
"""Name of the stage."""
DEPENDENT = "rows-dependent"
"""The cause."""
PREFILL = "prefill"
"""Name of the stage of memory with different bytes before the run."""
PREFILL_DEPENDENT = "prefill-dependent"
"""Its cause."""
FAMILY = "position"
"""Family of the cases with rows run alone: all rows are different."""
INVARIANT = "invariant"
"""Value of the declaration `batch`: a row of a product has the same bytes in every batch."""
COUNTS = (1, 2, 7, 128)
"""Numbers of rows run alone: a single row, and numbers at which kernels change their path."""
_SPOILT = {"zeros": 0.0, "NaN": torch.nan, "the largest number": torch.inf}
"""Numbers placed in the neighbouring rows. Infinity stands for the largest number of the dtype."""
_NEAR = 3
"""Number of rows behind a change tried too: a path for even numbers or for tails is no threshold."""
_PATHS = 4
"""Largest number of searched changes of the bytes with M."""


@dataclass(frozen=True)
class Independent:
    """A call with independent rows, blocks of rows, sections or requests: the units of the call."""

    count: int
    """Number of units."""
    by_unit: Tensors
    """Inputs (count·n, …), n rows per unit in order, contiguous."""
    run: Callable[[Tensors], Tensors]
    """Function from inputs to results, also with rows per unit in order."""
    shared: Tensors = field(default_factory=dict)
    """Further inputs."""
    sizes: Sequence[int] = ()
    """Rows of each unit in tensors with more rows than units; empty: as many for each unit."""
    height: int = 1
    """Rows of the operation in a unit."""
    noun: str = "row"
    """Name of a unit."""

    def given(self, units: torch.Tensor, spoilt: float | None = None) -> Tensors:
        """Inputs of these units in this order. `spoilt`: number of every second unit; None: their own numbers."""
        found = {name: self.taken(tensor, units) for name, tensor in self.by_unit.items()}
        if spoilt is not None:
            odd = torch.arange(1, self.count, 2)
            for name in self._changed(spoilt):
                tensor = found[name].clone()
                value = spoilt if spoilt != torch.inf else torch.finfo(tensor.dtype).max
                tensor.view(self.count, -1)[odd.to(tensor.device)] = value
                found[name] = tensor
        return found | self.shared

    @property
    def spoils(self) -> dict[str, float]:
        """Numbers for the rows of a unit by their words; empty if units have different numbers of rows."""
        return {} if self.sizes else {words: n for words, n in _SPOILT.items() if self._changed(n)}

    def _changed(self, spoilt: float) -> list[str]:
        """The inputs open to a replacement number: every tensor of numbers, and codes for the number 0, a code of every
        format."""
        numbers = [name for name, x in self.by_unit.items() if x.is_floating_point() and x.element_size() > 1]
        return numbers + [name for name in self.by_unit if name.endswith("codes") and spoilt == 0]

    def taken(self, tensor: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """The rows of these units, in this order."""
        if self.sizes and len(tensor) != self.count:
            parts = torch.split(tensor, list(self.sizes))
            return torch.cat([parts[unit] for unit in units.tolist()])
        each = tensor.reshape(self.count, len(tensor) // self.count, *tensor.shape[1:])
        return each[units.to(tensor.device)].flatten(0, 1).contiguous()

    def different(self, before: torch.Tensor, found: torch.Tensor, units: torch.Tensor) -> torch.Tensor:
        """bool (units,): whether the bytes of a result of these units are not those of `before`, of all units."""
        expected = self.taken(before, units)
        if expected.shape != found.shape:
            return torch.ones(len(units), dtype=torch.bool)
        wrong = (element_bytes(expected) != element_bytes(found)).view(len(found), -1).any(1).cpu()
        if self.sizes and len(before) != self.count:
            heights = [self.sizes[unit] for unit in units.tolist()]
            return torch.stack([part.any() for part in torch.split(wrong, heights)])
        return wrong.view(len(units), -1).any(1)

    def among(self, units: torch.Tensor) -> Independent:
        """The call with these units alone, in this order, for reading its results."""
        return replace(self, count=len(units), by_unit={}, sizes=[self.sizes[u] for u in units.tolist() if self.sizes])

    def of_unit(self, tensor: torch.Tensor, unit: int) -> torch.Tensor:
        """The rows of a unit."""
        return self.taken(tensor, torch.tensor([unit]))

    def number(self, count: int) -> str:
        """A number of units in words: `M = 9`, or `2 sections`."""
        return f"M = {count * self.height}" if self.noun == "row" else f"{count} {self.noun}{'s'[: count != 1]}"


Runner = Callable[[Tensors, Callable[[Tensors], Tensors]], Tensors]
"""Gives the results of a function for inputs, in guarded memory for a backend."""


def add_rows(outcome: Outcome, rows: Independent | None, backend: Backend) -> None:
    """Add the stage of units by themselves to an outcome whose results are the same in two equal runs."""
    repeat = next((stage for stage in outcome.stages if stage.stage == "repeat"), None)
    if rows is None or rows.count < 2 or not rows.by_unit or (repeat is not None and not repeat.passed):
        return

    def guarded(given: Tensors, run: Callable[[Tensors], Tensors]) -> Tensors:
        prepared = backend.host.prepare(given, next(iter(given.values())).device, POISON[0])
        with backend.host.lock(), prepared.running(0) as passed:
            found = run(passed)
        return prepared.keep(found)

    stage = rows_stage(rows, guarded, refusals=(Unsupported, BackendError))
    if stage.compared:
        outcome.stages.append(stage)


def rows_stage(rows: Independent, runner: Runner, *, refusals: tuple[type[Exception], ...]) -> StageResult:
    """Run units alone, in reverse order and beside changed numbers, and compare the results with the run of all units.

    refusals: exceptions of a kernel that refuses a number of units; the number is then left out.
    """
    result = StageResult(ROWS, "repeat", compared=0)

    def results(units: torch.Tensor, spoilt: float | None = None) -> Tensors | None:
        try:
            return runner(rows.given(units, spoilt), rows.run)
        except refusals:
            return None

    every = torch.arange(rows.count)
    whole = results(every)
    if whole is None:
        return result
    for words, units, spoilt in _arrangements(rows, every):
        found = results(units, spoilt)
        for name, tensor in (found or {}).items():
            if not tensor.numel():
                continue
            wrong = rows.different(whole[name], tensor, units)
            wrong &= (units % 2 == 0) if spoilt is not None else torch.ones_like(wrong)
            result.compared += len(units) if spoilt is None else int((units % 2 == 0).sum())
            result.mismatches += int(wrong.sum())
            if bool(wrong.any()) and not result.sentence:
                result.causes = [DEPENDENT]
                place = int(wrong.nonzero()[0, 0])
                unit = int(units[place])
                pair = rows.of_unit(whole[name], unit), rows.among(units).of_unit(tensor, place)
                result.sentence = _sentence(rows, name, words, wrong, pair, unit)
                if spoilt is None:
                    result.sentence += _paths(rows, pair[0], partial(_first, rows, results, name, unit), unit)
    return result


def _arrangements(rows: Independent, every: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, float | None]]:
    """The arrangements: words, the units of the run, and the number in every second unit.

    The numbers beside a row come first, with M and every place as before: later bytes change with M or with the place.
    """
    for words, number in rows.spoils.items():
        yield f"beside rows of {words}", every, number
    for alone in COUNTS:
        if alone < rows.count:
            start = (rows.count - alone) // 2
            yield f"with {rows.number(alone)}", every[start : start + alone], None
    yield "in reverse order", every.flip(0), None


def _sentence(
    rows: Independent, name: str, words: str, wrong: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], unit: int
) -> str:
    """How many units differ, and the first element of the first one in both runs."""
    count = f"{format_count(int(wrong.sum()))} of {format_count(len(wrong))}"
    noun = f"{rows.noun}s" if rows.height == 1 else f"blocks of {rows.height} rows"
    one, other = map(element_bytes, pair)
    place = int((one != other).any(1).nonzero()[0])
    here, there = ("0x" + bytes(x[place].tolist())[::-1].hex().upper() for x in (one, other))
    first = (
        f"the first is {rows.noun} {format_count(unit * rows.height)}: element {place} is {there} in place of {here}"
    )
    return f"{count} {noun} of {name} have other bytes {words}; {first}"


# ---- the number of rows at which bytes change ------------------------------------------------------------------------


def _first(
    rows: Independent, results: Callable[[torch.Tensor], Tensors | None], name: str, unit: int, count: int
) -> bytes | None:
    """The bytes of a unit as the first of `count` units, with the units behind in a circle; None: refused."""
    units = (unit + torch.arange(count)) % rows.count
    found = results(units)
    return None if found is None else _bytes(rows.among(units).of_unit(found[name], 0))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(element_bytes(tensor).flatten().cpu().numpy())


def _paths(rows: Independent, whole: torch.Tensor, first: Callable[[int], bytes | None], unit: int) -> str:
    """At which numbers of units the bytes of a unit change, as the end of a sentence; empty if the reason is different.

    whole: its results among all units. first: its bytes as the first of a number of units.
    """
    at = cache(first)
    if unit and at(rows.count) not in (_bytes(whole), None):
        return f". Its place decides: as the first of {rows.number(rows.count)} it has other bytes too"
    seen = {count: at(count) for count in (*(n for n in COUNTS if n < rows.count), rows.count)}
    known = [count for count, found in seen.items() if found is not None]
    changes: list[int] = []
    for start, high in pairwise(known):
        low = start
        while len(changes) < _PATHS and at(low) != at(high) and (change := _change(at, low, high)):
            changes.append(change)
            low = change
    for change in changes:
        seen |= {n: at(n) for n in range(change - 1, min(change + _NEAR, rows.count) + 1)}
    return _of_changes(rows, {n: found for n, found in sorted(seen.items()) if found is not None}, changes)


def _change(at: Callable[[int], bytes | None], low: int, high: int) -> int | None:
    """The least number of units above `low` with other bytes than `low`, found by halving; None if one is refused."""
    start = at(low)
    while high - low > 1:
        middle = (low + high) // 2
        found = at(middle)
        if found is None:
            return None
        low, high = (middle, high) if found == start else (low, middle)
    return high


def _of_changes(rows: Independent, seen: Mapping[int, bytes], changes: Sequence[int]) -> str:
    """The changes in words, or the numbers of units that have equal bytes if bytes come back."""
    groups = {found: [count for count in seen if seen[count] == found] for found in seen.values()}
    if len(groups) < 2:
        return ""
    if len([1 for one, other in pairwise(seen.values()) if one != other]) == len(changes) == len(groups) - 1:
        what = "another path" if rows.spoils else "other bytes"  # then the content of further units may be the reason
        return f". From {' and from '.join(map(rows.number, sorted(changes)))} on: {what}"
    listed = "; ".join(", ".join(map(rows.number, counts[:_PATHS])) for counts in groups.values())
    return f". Numbers of {rows.noun}s with equal bytes: {listed}"


def prefill_stage(
    backend: Backend, memory: Tensors, others: Tensors, first: Tensors, written: Tensors,
    run: Callable[[Tensors], Tensors],
) -> StageResult:  # fmt: skip
    """Run again with the inverted bytes of the inputs `memory`, which the kernel changes in part.

    others: further inputs. first: results of the first run, each behind the memory. written: int8 of their leading
    axes: 1 for written elements, 0 for bytes that stay, −1 for elements not compared. run: from inputs to results.
    """
    result = StageResult(PREFILL, "repeat", compared=0)
    inverted = {name: (~tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in memory.items()}
    prepared = backend.host.prepare(inverted | others, next(iter(memory.values())).device, POISON[0])
    with backend.host.lock(), prepared.running(0) as passed:
        found = run(passed)
    for name, tensor in prepared.keep(found).items():
        axes = written[name].dim()
        one, other = (element_bytes(t.contiguous()).view(*t.shape[:axes], -1) for t in (first[name], tensor))
        mask = written[name].unsqueeze(-1).to(one.device)
        wrong = (mask >= 0) & (other != torch.where(mask == 1, one, ~one))
        result.compared += one.numel()
        result.mismatches += int(wrong.count_nonzero())
        if bool(wrong.any()) and not result.sentence:
            place = wrong.any(-1).nonzero()[0].tolist()
            keeps = "are written" if int(mask[tuple(place)]) == 1 else "stay"
            result.causes = [PREFILL_DEPENDENT]
            result.sentence = (
                f"{format_count(int(wrong.count_nonzero()))} of {format_count(one.numel())} bytes of {name} follow the "
                f"bytes before the call in another way than bytes that {keeps}; first in {place}"
            )
    return result
