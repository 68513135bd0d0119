"""Causes of wrong products of a batch: operands of a wrong product, or scales at a wrong stride.

The results of all products are judged by the right contract on the operands that such a kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from narrowgauge.harness.cases.contracts.case import ProductCase
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.contracts.causes.replay import Evidence, result_elements
from narrowgauge.harness.operations.contracts.causes.search import NO_DIAGNOSIS
from narrowgauge.harness.operations.stages.outcome import Limit, Outcome
from narrowgauge.harness.operations.stages.possible_cause import GIVES_EVERY_BYTE, Cause, PossibleCause
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.spec.program import Program
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, Packing

Tensors = Mapping[str, torch.Tensor]
Causes = Iterable[Cause | PossibleCause]
_PARTS = {
    "codes": "the codes of {} are those", "scales": "the scales of {} are those",
    "zeros": "the zero points of {} are those", "amax": "the tensor scale of {} is that",
    "tensor_scale": "the tensor scale of {} is that",
}  # fmt: skip
"""Beginning of a sentence, by the part of an operand."""


class Mistake(NamedTuple):
    """Wrong operands of the products of a batch."""

    name: str
    sentence: str
    products: Sequence[Tensors]


def batch_mistakes(case: ProductCase, products: Sequence[Tensors]) -> Iterator[Mistake]:
    """Operands, and parts of operands, of wrong products; packed scales at wrong strides."""
    groups: dict[str, tuple[str, list[str]]] = {"results": ("the result of each product is that", list(products[0]))}
    for name in products[0]:
        operand, _, part = name.partition(".")
        groups.setdefault(operand, (f"{operand} is that", []))[1].append(name)
        if part:
            sentence = _PARTS[part].format(operand)
            groups.setdefault(sentence, (sentence, []))[1].append(name)
    for group, (sentence, names) in groups.items():
        for move, (words, taken) in _moves(len(products)).items():
            pairs = zip(products, taken, strict=True)
            moved = [{**own, **{name: products[other][name] for name in names}} for own, other in pairs]
            yield Mistake(f"batch:{group.replace(' ', '-')}-{move}", f"{sentence} of {words}", moved)
    for operand in case.declared.quantized:
        if (layout := case.layout_of(case.recipe_of(operand))) != LINEAR:
            yield from _strides(operand, layout, products)


def _moves(count: int) -> dict[str, tuple[str, list[int]]]:
    """The wrong product per product, by the name of the mistake."""
    own = list(range(count))
    other = "the next product of the batch" if count > 2 else "the other product of the batch"
    moves = {
        "next": (other, own[1:] + own[:1]),
        "previous": ("the previous product of the batch", own[-1:] + own[:-1]),
        "first": ("the first product of the batch", [0] * count),
        "last": ("the last product of the batch", own[-1:] * count),
        "reversed": ("the product at this place from the end of the batch", own[::-1]),
    }
    unlike = {tuple(taken): name for name, (_, taken) in reversed(moves.items()) if taken != own}
    return {name: moves[name] for name in moves if name in unlike.values()}


def _strides(operand: str, layout: str, products: Sequence[Tensors]) -> Iterator[Mistake]:
    """Scales read from memory of products with padding, at the addresses of products without padding."""
    name = f"{operand}.scales"
    packing = Packing(LAYOUTS[layout], tuple(products[0][name].shape))
    (rows, columns), size = packing.shape, packing.part_sizes[0]
    padded_rows, padded_columns = packing.layout.padded_shape((rows, columns))
    packed = torch.cat([packing.pack(tensors[name]).flatten() for tensors in products])
    strides = {rows * padded_columns: "rows", padded_rows * columns: "columns", rows * columns: "rows and columns"}
    for stride, unpadded in strides.items():
        parts = [packed[n * stride : n * stride + size] for n in range(len(products))]
        if stride == size or size * len(products) != len(packed):
            continue
        moved = [{**own, name: packing.unpack(part)} for own, part in zip(products, parts, strict=True)]
        begin = f"the scales of {operand} of each product begin {stride} scales behind those of the product before"
        yield Mistake(f"batch:{name}-stride-{stride}", f"{begin}, not {size}: its {unpadded} are not padded", moved)


def batch_causes(
    case: ProductCase, program: Program, calls: Sequence[tuple[Tensors, Shown]],
    steps: Callable[..., Causes], stage: StageResult, limit: Limit,
) -> Causes:  # fmt: skip
    """Mistakes of a batch with all results; without a mistake of a batch the causes of `steps`.

    A mistake is certain if the results exclude the contract and every other mistake, and no change of a step fits.
    """
    products = [tensors for tensors, _ in calls]
    work = len(program.steps) * sum(result_elements(result) for _, shown in calls for result in shown.values())
    found: list[Mistake] = []
    doubt = ""
    for mistake in batch_mistakes(case, products):
        if not limit.may_try(work):
            break
        evidence = evidence_of(program, calls, mistake.products)
        if evidence.fits and evidence.judged:
            found.append(mistake)
        elif not evidence.excluded:
            doubt = mistake.sentence
    if not found:
        return steps(stage, limit)
    rivals = [cause for cause in steps(stage, limit, singly=True) if cause[0] != NO_DIAGNOSIS]
    if not doubt and not evidence_of(program, calls, products).excluded:
        doubt = "too few wrong elements to be certain"
    if len(found) == 1 and not rivals and not doubt:
        return [(found[0].name, found[0].sentence)]
    doubt = doubt or "another mistake gives them too"
    return [*(PossibleCause(one.name, f"{one.sentence}{GIVES_EVERY_BYTE}{doubt}") for one in found), *rivals]


def add_batch_causes(
    outcome: Outcome, case: ProductCase, program: Program, calls: Sequence[tuple[Tensors, Shown]]
) -> None:  # fmt: skip
    """Let the causes of the outcome of a batch begin with the mistakes of a batch."""
    confirms = outcome.confirms
    for stage, steps in outcome.causes.items():
        outcome.causes[stage] = partial(batch_causes, case, program, calls, steps)

    def confirmed(cause: str) -> str:
        if not cause.startswith("batch:"):
            return confirms(cause) if confirms is not None else ""
        named = (one for one in batch_mistakes(case, [tensors for tensors, _ in calls]) if one.name == cause)
        fits = (one.sentence for one in named if evidence_of(program, calls, one.products).fits)
        return next(fits, "")

    outcome.confirms = confirmed


def evidence_of(program: Program, calls: Sequence[tuple[Tensors, Shown]], products: Sequence[Tensors]) -> Evidence:
    """The evidence of the results of all products, if the kernel has read these operands."""
    found = Evidence()
    for (_, shown), tensors in zip(calls, products, strict=True):
        for _, part in judged(program, tensors, shown):
            found.add(part)
    return found
