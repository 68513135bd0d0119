"""The proof of a contract that quantizes a function of single numbers: every number of a dtype as a gate.

The results of a contract are intervals. A gate is a number of the input, or of its first half; then the factor of the
gate is the number of the second half.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.certify.certificate import Certificate, CertificateError
from narrowgauge.harness.certify.compare import over_elements
from narrowgauge.harness.certify.inputs.space import Effort, Grid, Numbers, Outer, outers
from narrowgauge.harness.certify.proof import (
    FAILING,
    WrongSet,
    number_features,
    shown_code,
    shown_number,
)
from narrowgauge.harness.certify.trials import Repeated, outside, trials, tried_sentence
from narrowgauge.harness.certify.wrong import Feature, find_rule, runs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.contracts.as_operation import call_contract
from narrowgauge.harness.operations.contracts.judge import assumed
from narrowgauge.harness.operations.contracts.results import fitting, named_results
from narrowgauge.harness.report.text import number, share
from narrowgauge.reference.contracts.accepted import Part
from narrowgauge.reference.contracts.evaluate import Evaluation, judged
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.program import QUANTIZE, Program
from narrowgauge.spec.recipes import Recipe, find_recipe

FACTORS = (1.0, -1.0, 0.5, 2.0, 2.0**-9, 2.0**9)
"""Factors of every gate: powers of two, so that a product rounds nothing but for subnormal numbers."""
_LARGER, _LARGEST = 24, 2.0**8
"""Blocks of which amaxes hold every smaller result: so many powers of two, from this one down."""
SHAPE = (16, 256)
"""Shape of the case whose method is certified."""
_ALONE = frozenset({
    "argument", "constant", "float32", "cast", "add", "subtract", "multiply", "divide", "maximum", "minimum", "square",
    "absolute", "negative", "where", "compare", "any_of", "sum_of", "roundings", "part", QUANTIZE, *FUNCTIONS,
})  # fmt: skip
"""Steps whose elements depend on no other column, but for the scales of a quantization."""


class ContractCalls:
    """Calls of the method of a contract, judged by its intervals."""

    elements = 1 << 17
    """Elements of the input of a trial."""

    def __init__(self, backend: Backend, case: ContractCase) -> None:
        """Raises CertificateError for a contract without a proof."""
        self.backend, self.case, self.count = backend, case, 0
        self.program = case.declared_program(case.declared_fields(backend.declares))
        self._matrix, self._scale = _arguments(self.program)
        self._output = next(iter(self.program.outputs.values()))
        self.recipe: Recipe = find_recipe(str(self.program.steps[self._output].recipe))

    @cached_property
    def gated(self) -> bool:
        """Whether the input has two halves."""
        return any(step.function == "part" for step in self.program.steps)

    def options(self, scale: torch.Tensor | None) -> dict[str, Any]:
        """The given scale."""
        return {"scale": scale}

    def input_of(self, x: torch.Tensor) -> torch.Tensor:
        """A matrix of gates; beside each row of them the same numbers in another order, if the input has two halves."""
        return torch.cat([x, x.flip(1)], 1) if self.gated else x

    def tensors(self, x: torch.Tensor, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The arguments of a call."""
        return {self._matrix: x} | ({} if self._scale is None else {self._scale: options["scale"]})

    def results(self, gates: torch.Tensor, factor: float, options: Mapping[str, Any]) -> torch.Tensor:
        """Largest magnitude of the quantized number of each gate (n,), float64; infinity if it may be NaN."""
        x = gates.view(1, -1)
        row = torch.cat([x, torch.full_like(x, factor)], 1) if self.gated else x
        source = self.program.steps[self._output].operands[0]
        found = Evaluation(self.program, self.tensors(row, options)).values[source]
        return torch.maximum(found.low.abs(), found.high.abs()).nan_to_num(nan=torch.inf).view(-1)

    def parts(self, x: torch.Tensor, options: Mapping[str, Any]) -> list[tuple[str, Part]]:
        """The results of a call, with what is accepted of them. Raises as `judged` of `Tried`."""
        given, method = self.tensors(x, options), next(iter(self.case.all_methods()))
        self.count += 1
        result = call_contract(self.case, self.backend, given)
        with fitting(method):
            shown = named_results(self.program, given, result)
        return list(judged(self.program, given, shown))

    def judged(self, x: torch.Tensor, options: dict[str, Any]) -> tuple[int, int]:
        """As of `Tried`."""
        parts = self.parts(x, options)
        return x.numel() // Grid.of(self.recipe).size, sum(int(part.wrong.sum()) for _, part in parts)


def _arguments(program: Program) -> tuple[str, str | None]:
    """The names of the matrix and of the given scale. Raises CertificateError for a contract without a proof."""
    name, kinds = program.name, {argument.kind: argument.name for argument in program.arguments}
    if not kinds.keys() <= {"Matrix", "Scale"} or len(kinds) < len(program.arguments) or "Matrix" not in kinds:
        raise CertificateError(f"contract {name} takes {', '.join(a.name for a in program.arguments)}; a certificate "
                               "needs a matrix, and at most a scale beside it")  # fmt: skip
    steps = [program.steps[number] for number in program.outputs.values()]
    if len(steps) != 1 or steps[0].recipe is None:
        raise CertificateError(f"contract {name} gives {', '.join(program.outputs)}; a certificate needs one quantize")
    for step in program.steps:
        if step.function not in _ALONE:
            raise CertificateError(f"contract {name} has the step {step.function} (line {step.line}); a certificate "
                                   "needs steps of which each number depends on one column")  # fmt: skip
    return kinds["Matrix"], kinds.get("Scale")


# ---- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gates:
    """Every number of a dtype as a gate with one factor, ascending by the magnitude of its result."""

    bits: torch.Tensor
    """int32 (n,)."""
    sizes: torch.Tensor
    """Magnitudes of the results, float64 (n,), infinity of NaN."""

    @staticmethod
    def of(calls: ContractCalls, numbers: Numbers, factor: float, options: Mapping[str, Any]) -> Gates:
        """The gates of a contract."""
        bits = numbers.arange(2 * numbers.sign) - numbers.sign
        sizes, order = calls.results(numbers.tensor(bits), factor, options).sort(stable=True)
        return Gates(bits[order], sizes)

    @property
    def finite(self) -> int:
        """Number of the gates with finite results."""
        return int(self.sizes.isfinite().sum())

    def blocks(self, count: int, grid: Grid, *, larger: bool) -> torch.Tensor:
        """Blocks (n, elements) of places in `bits` of the first `count` gates: each beside gates of like results and,
        if `larger`, below amaxes that are powers of two apart. As many blocks as a matrix of 128 rows or more has."""
        device = self.bits.device
        found = [_in_blocks(torch.arange(count, device=device), grid.size)]
        if larger:
            top = min(float(self.sizes[min(count, self.finite) - 1]), _LARGEST)
            tops = top * 2.0 ** -torch.arange(_LARGER, device=device, dtype=torch.float64)
            for place in torch.unique(torch.searchsorted(self.sizes, tops, right=True) - 1).clamp(min=0).tolist():
                smaller = _in_blocks(torch.arange(place + 1, device=device), grid.size - 1)
                found.append(torch.nn.functional.pad(smaller, (1, 0), value=place))
        every = torch.cat(found)
        step = max(1, 128 // grid.height) * grid.across
        return every[torch.arange(-(-len(every) // step) * step, device=device) % len(every)]


def _in_blocks(places: torch.Tensor, size: int) -> torch.Tensor:
    """Places (n,) in blocks of a size, the last one repeated."""
    count = -(-len(places) // size) * size
    return places[torch.arange(count, device=places.device).clamp(max=len(places) - 1)].view(-1, size)


# ---- proof -----------------------------------------------------------------------------------------------------------


@dataclass
class _Proof:
    outers: int = 0
    outers_of: int = 1
    places: int = 0
    codes: int = 0
    determined: int = 0
    wrong: list[WrongSet] = field(default_factory=list)


@dataclass
class _Found:
    """Wrong gates of a part as keys, number of the factor and bits, and the first one."""

    keys: list[torch.Tensor] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)


def certificate_of_contract(
    backend: Backend, subject: str, case: Case, numbers: Numbers, effort: Effort, seed: int
) -> Certificate:
    """The certificate of the method of a contract, without the digests of its sources.

    `case`: any case of the contract. Raises CertificateError for a contract without a proof, and if the kernel fails on
    an input.
    """
    if not isinstance(case, ContractCase):
        raise CertificateError(f"{case.operation} is no contract; certify {case.operation} by --recipe")
    if not numbers.complete:
        raise CertificateError("a certificate of a contract has every number of bfloat16 or float16; its dtype is fp32")
    begun, calls = time.monotonic(), ContractCalls(backend, case)
    recipe = calls.recipe
    chosen, of = outers(recipe, numbers, effort.tensor_scales, seed)
    try:
        before = Repeated(calls, numbers, chosen[0].given(numbers.device), seed)
        proof = _prove(calls, numbers, chosen, of, effort.places)
        tried = list(trials(calls, numbers, chosen[0].given(numbers.device), seed))
        tried.append(before.again())
    except (BackendError, Unsupported, HostLost) as error:
        raise CertificateError(f"{subject}, {case.operation}: fails on an input: {escape(str(error))}") from error
    depends = "a scale depends on the results of its block alone, and a code on its gate"
    depends += f"{', its factor' * calls.gated} and this scale alone"
    proved, sampled = _sentences(calls, proof, Grid.of(recipe).size)
    return Certificate(
        subject, f"{case.operation} {recipe}", str(numbers.dtype).removeprefix("torch."), numbers.device,
        tried_sentence(depends, tried), tried, proved, sampled, outside(tried), proof.wrong, {},
        seconds=time.monotonic() - begun, seed=seed,
    )  # fmt: skip


def _sentences(calls: ContractCalls, proof: _Proof, size: int) -> tuple[list[str], list[str]]:
    """Sentences on the proved and on the sampled inputs."""
    factors = f" with the factors {', '.join(f'{factor:g}' for factor in FACTORS)}" if calls.gated else ""
    given = calls.recipe.tensor_scale == "given"
    scales = "" if given else " beside gates of like results and below larger amaxes"
    exact = f"{share(proof.determined / max(1, proof.codes))} with a single right code"
    gates = "every gate, NaN and infinity included,"
    if calls.recipe.tensor_scale not in ("none", "given"):
        gates = "every gate with a result up to the tensor amax,"
    proved = [f"codes: {gates}{factors}{scales}: {number(proof.codes)} codes, {exact}"]
    if rests := assumed(calls.program):
        proved.append(f"the accepted codes rest on the errors of {rests}")
    sampled = ["factors that are no powers of two: those of the trials"] if calls.gated else []
    if proof.outers_of > 1:
        tensor = f"tensor scales: {number(proof.outers)} of {number(proof.outers_of)}"
        (proved if proof.outers == proof.outers_of else sampled).append(tensor)
    (proved if proof.places == size else sampled).append(f"places of each gate in a block: {proof.places} of {size}")
    return proved, sampled


def _prove(calls: ContractCalls, numbers: Numbers, chosen: Sequence[Outer], of: int, places: int) -> _Proof:
    grid, proof = Grid.of(calls.recipe), _Proof(outers_of=of)
    count = min(places, grid.size)
    moves = sorted({place * grid.size // count for place in range(count)})
    proof.places = len(moves)
    factors = FACTORS if calls.gated else FACTORS[:1]
    for outer in chosen:
        options = calls.options(outer.given(numbers.device))
        every = [Gates.of(calls, numbers, factor, options) for factor in factors]
        found: dict[str, _Found] = {}
        for at, (factor, gates) in enumerate(zip(factors, every, strict=True)):
            under = len(gates.bits)
            if outer.amax is not None:  # the results up to the tensor amax
                amax = float(numbers.float(torch.tensor(outer.amax, dtype=torch.int32)))
                under = max(1, int(torch.searchsorted(gates.sizes, amax, right=True)))
            blocks = gates.blocks(under, grid, larger=factor == 1 and outer.scale is None)
            for place in moves:
                _judge(calls, numbers, gates, blocks.roll(place, 1), (at, factor), options, found, proof)
        proof.outers += 1
        proof.wrong += [_wrong_set(name, outer, one, numbers, len(factors)) for name, one in found.items()]
        if len({wrong.outer for wrong in proof.wrong}) >= FAILING:
            break
    return proof


def _judge(
    calls: ContractCalls, numbers: Numbers, gates: Gates, blocks: torch.Tensor, factor: tuple[int, float],
    options: Mapping[str, Any], found: dict[str, _Found], proof: _Proof,
) -> None:  # fmt: skip
    """Judge a matrix of blocks, whose elements are places in `gates`."""
    grid = Grid.of(calls.recipe)
    index = grid.matrix(blocks)
    gate = numbers.tensor(gates.bits[index])
    x = torch.cat([gate, torch.full_like(gate, factor[1])], 1) if calls.gated else gate
    for name, part in calls.parts(x, options):
        codes = part.wrong.shape == index.shape
        if name.endswith("codes"):
            proof.codes += part.actual.numel()
            proof.determined += part.determined
        if not bool(part.wrong.any()):
            continue
        if codes:
            places = index[part.wrong]
        elif name.endswith("scales"):
            shape = (index.shape[0], index.shape[1])
            places = blocks[grid.blocks(over_elements(part.wrong, shape, calls.recipe)).any(1)].amax(1)
        else:  # of all rows, or of a row
            places = blocks.amax().view(1)
        one = found.setdefault(name, _Found())
        one.keys.append(torch.unique(factor[0] << 32 | gates.bits[places].long() & 0xFFFFFFFF))
        if not one.first:
            one.first = {"gate": shown_number(numbers.tensor(gates.bits[places[:1]]), numbers), "factor": factor[1]}
            one.first |= _shown_part(part)


def _shown_part(part: Part) -> dict[str, Any]:
    """The first wrong result, and the accepted ones."""
    if not isinstance(part, Part):  # a hidden number that no row explains
        return {}
    fmt = part.fmt or FP32
    bits = [(x.view(torch.int32) if x.dtype == torch.float32 else x)[part.wrong][0] for x in
            (part.lower, part.upper, part.actual)]  # fmt: skip
    low, high, actual = (shown_code(int(one), fmt) for one in bits)
    ends = {"expected": low} if low == high else {"expected": low, "or up to": high}
    return ends | {"actual": actual}


def _wrong_set(stage: str, outer: Outer, found: _Found, numbers: Numbers, factors: int) -> WrongSet:
    keys = torch.unique(torch.cat(found.keys))
    bits = numbers.arange(2 * numbers.sign) - numbers.sign
    every = torch.cat([factor << 32 | bits.long() & 0xFFFFFFFF for factor in range(factors)])
    values = torch.tensor(FACTORS[:factors], dtype=torch.float64, device=numbers.device)
    features = {
        **number_features("gate", numbers, bits.repeat(factors)),
        "factor": Feature(values.repeat_interleave(len(bits))),
    }
    rule = find_rule(torch.isin(every, keys), features)
    listed = [{"scale": 0, "numbers": runs(torch.unique(keys & (2 * numbers.sign - 1)))}]
    return WrongSet(f"gates.{stage}", outer, len(keys), len(every), rule, listed, found.first, steady=True)
