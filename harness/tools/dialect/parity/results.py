"""What a backend gives for cases, and how the results of two backends differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.checks.ordinal import float_ordinals
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.registry import make_inputs, operation_of
from narrowgauge.harness.operations.stages.repeated import Tensors
from narrowgauge.harness.report.text import number, share, ulps
from narrowgauge.harness.running.judging import judge

TIMEOUT = 300.0
"""Seconds that a backend may take for a case."""
_OPERANDS = ("a.", "b.", "x.", "w.", "b0.")
"""Beginnings of the names of operands in the results of a product."""


@dataclass(frozen=True)
class Results:
    """The results of a backend, by case."""

    name: str
    given: dict[str, Tensors] = field(default_factory=dict)
    """Results by the ids of the cases."""
    refused: dict[str, str] = field(default_factory=dict)
    """Messages by the ids of the cases without results."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Sentences of wrong outputs of products, which lie in no interval of the declared or of any order."""
    changing: list[str] = field(default_factory=list)
    """Cases with different bytes of two equal calls, with the sentence."""


@dataclass(frozen=True)
class Difference:
    """A result of two backends with other bytes: the first element of the first case, and counts over all cases."""

    stage: str
    compared: int
    """Elements of all cases."""
    different: int
    case: str
    place: tuple[int, ...]
    bits: tuple[str, str]
    """Of the first element, by both backends."""
    families: tuple[str, ...]
    """Input families that show the difference."""
    steps: int | None
    """The largest distance in numbers of the dtype; None of codes."""

    @property
    def sentence(self) -> str:
        """How many elements, and the first one."""
        shown = ", ".join(self.families[:4]) + (f" and {len(self.families) - 4} more" if len(self.families) > 4 else "")
        at = f"{self.case} at {list(self.place)}: {self.bits[0]} and {self.bits[1]}"
        far = f", by up to {ulps(self.steps)} steps" if self.steps is not None else ""
        part = f"{number(self.different)} of {number(self.compared)} ({share(self.different / self.compared)})"
        return f"{self.stage}: {part} differ{far}; shown by {shown}; first in {at}"


def results_of(backend: Backend, name: str, cases: Sequence[tuple[Case, bool]], *, device: str, seed: int) -> Results:
    """Run a backend on cases, and keep its results. Right or wrong by the recipe or the contract does not matter here,
    but for products."""
    found = Results(name)
    for case, _ in cases:
        inputs = make_inputs(case, seed=seed).to(device)
        try:
            backend.host.begin_case(TIMEOUT, room(device))
            outputs, stages = _run(backend, case, inputs)
            backend.host.end_case()
        except (BackendError, Unsupported, HostLost) as error:
            found.refused[case.id] = escape(str(error)) or type(error).__name__
            continue
        packed = any(recipe.element.bits == 4 for recipe in case.recipes)
        found.given[case.id] = {
            result: _nibbles(tensor) if packed and result.endswith("codes") else tensor.clone()
            for result, tensor in outputs.items()
        }
        for stage in stages:
            if stage.sentence and stage.stage == "repeat":
                found.changing.append(f"{name} in {case.id}: {stage.sentence}")
            if stage.sentence and stage.stage == "output" and case.is_product:
                found.wrong[case.id] = stage.sentence
    return found


def _run(backend: Backend, case: Case, inputs: Inputs) -> tuple[Tensors, list[StageResult]]:
    """The results of a case in the order of their stages, and what is judged of them."""
    run = operation_of(case).run
    if run is not None:
        return run(case, inputs, backend)
    outcome = judge(case, inputs, backend)
    kept = {n: x for n, x in outcome.outputs.items() if not (case.is_product and n.startswith(_OPERANDS))}
    return kept, outcome.stages


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, one in a byte, in the order of their nibbles; the nibble behind an odd K too."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2) if codes.dtype is torch.uint8 else codes


@dataclass(frozen=True)
class Compared:
    """Two backends on all cases."""

    differences: list[Difference]
    """In order of the stages."""
    elements: int
    """Elements that both backends gave."""
    cases: int
    """Cases that both backends ran."""
    refused: list[str]
    """Cases run by a single backend, with the message of the refusal; without cases that a kernel may refuse."""
    hidden: list[str]
    """Results of a single backend."""


def compared(one: Results, other: Results, cases: Sequence[tuple[Case, bool]]) -> Compared:
    """Compare the bytes of two backends. Every byte counts, also the sign of 0 and codes of NaN."""
    stages: dict[str, list[tuple[Case, torch.Tensor, torch.Tensor]]] = {}
    refused, hidden, both = [], dict[str, None](), 0
    for case, optional in cases:
        pair = one.given.get(case.id), other.given.get(case.id)
        if pair[0] is None or pair[1] is None:
            if (pair[0] is None) != (pair[1] is None) and not optional:
                refusing = one if pair[0] is None else other
                refused.append(f"{refusing.name} refuses {case.id}: {refusing.refused[case.id]}")
            continue
        both += 1
        for name in dict.fromkeys([*pair[0], *pair[1]]):
            if name in pair[0] and name in pair[1]:
                stages.setdefault(name, []).append((case, pair[0][name], pair[1][name]))
            else:
                hidden[f"{name} of {one.name if name in pair[0] else other.name}"] = None
    elements = sum(a.numel() for runs in stages.values() for _, a, _ in runs)
    differences = [found for name, runs in stages.items() if (found := _difference(name, runs)) is not None]
    return Compared(differences, elements, both, refused, list(hidden))


def _difference(stage: str, runs: Sequence[tuple[Case, torch.Tensor, torch.Tensor]]) -> Difference | None:
    different, steps = 0, None
    first: tuple[str, tuple[int, ...], tuple[str, str]] | None = None
    families = []
    for case, a, b in runs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            wrong, bits = torch.ones(a.numel(), dtype=torch.bool), (_form(a), _form(b))
        else:
            one, two = element_bytes(a), element_bytes(b)
            wrong, bits = (one != two).any(1), ("", "")
        if not bool(wrong.any()):
            continue
        different += int(wrong.sum())
        families.append(case.inputs)
        at = int(wrong.nonzero()[0])
        if first is None:
            first = case.id, _place(at, a.shape), bits if bits[0] else (_bits(one[at]), _bits(two[at]))
        if not bits[0] and a.is_floating_point() and a.element_size() in (2, 4):
            numbers = wrong.view(a.shape) & ~a.isnan() & ~b.isnan()
            far = (float_ordinals(a) - float_ordinals(b)).abs()[numbers]
            steps = max(steps or 0, int(far.max())) if far.numel() else steps
    if first is None:
        return None
    total = sum(a.numel() for _, a, _ in runs)
    return Difference(stage, total, different, *first, tuple(dict.fromkeys(families)), steps)


def _place(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return tuple(reversed(place))


def _bits(element: torch.Tensor) -> str:
    return "0x" + bytes(element.tolist())[::-1].hex().upper()


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
