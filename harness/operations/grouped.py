"""Sections of a matrix: quantized each with its own amax, and each multiplied by its own matrix."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from harness.backend import Backend, Unsupported
from harness.case import Case
from harness.checks.stage import merged
from harness.inputs import TORCH_DTYPES, Inputs, Random
from harness.operations.gemm import operand
from harness.operations.outcome import Outcome
from harness.operations.product import add_output
from harness.operations.quantize import add_judged, columnwise_subject, rotates_freely
from harness.operations.repeated import Tensors, repeated, timed
from harness.operations.stages import Subject
from harness.results import PARTS, join_sections, split_sections
from reference import ops as reference
from reference.bounds import Bounds, bounds
from reference.quantized import GroupedQuantized, Quantized
from reference.recipes import recipe


def judge_quantize_grouped(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge quantize_grouped of x (M, K): the stages of quantize, those of all sections as one."""
    columnwise = case.usage == "columnwise"
    x, random = inputs.x, inputs.random.get("x")

    def call(given: Tensors) -> Tensors:
        return join_sections(_quantized(case, given, random, backend, columnwise), columnwise=columnwise)

    sizes = torch.tensor(case.sections, device=x.device)
    outputs, protection, seconds = repeated(backend, x.device, {"x": x, "sizes": sizes}, call)
    rule = recipe(case.recipe)
    oracle, seconds_reference = timed(
        x.device,
        lambda: reference.quantize_grouped(x, sizes, rule, columnwise=columnwise, random=random),  # type: ignore[arg-type]
    )
    outcome = Outcome(protection, outputs, seconds=seconds, seconds_reference=seconds_reference)
    kernels = split_sections(outputs, list(case.sections), x.shape[1], rule, columnwise=columnwise)
    _judge_sections(outcome, case, inputs, kernels, oracle.sections(), free=rotates_freely(backend))
    return outcome


def _quantized(
    case: Case, given: Tensors, random: Random | None, backend: Backend, columnwise: bool = False
) -> list[Quantized]:
    x, sizes = given["x"], given["sizes"]
    rule = recipe(case.recipes[0])
    return backend.quantize_grouped(x, sizes, rule, columnwise=columnwise, random=random)  # type: ignore[arg-type]


def _judge_sections(
    outcome: Outcome,
    case: Case,
    inputs: Inputs,
    kernels: list[Quantized],
    oracles: list[Quantized],
    *,
    free: bool,
    prefix: str = "",
) -> None:
    """Judge every section, and add to the outcome one stage for all of them; the first wrong one is named."""
    rule = recipe(case.recipes[0])
    found = []
    first = 0
    for part, kernel, oracle in zip(torch.split(inputs.x, list(case.sections)), kernels, oracles, strict=True):
        random = inputs.random.get("x")
        if case.usage == "columnwise":
            subject = replace(columnwise_subject(part.T.contiguous(), rule, random, free=free), first=first)
        else:
            subject = Subject(part, rule, random, first, free=free)
        one = Outcome(expected=outcome.expected, actual=outcome.actual)
        add_judged(one, subject, kernel, oracle, prefix)
        first += oracle.scales.numel()
        found.append(one.stages)
        outcome.judged += one.judged
        outcome.expected, outcome.actual = one.expected, one.actual
    outcome.stages += merged(found, "section")


def judge_gemm_grouped(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge the product of each section of x (M, K) with its own w (N, K), on the kernel's own operands."""
    assert inputs.w is not None
    outcome = Outcome()
    x, sizes = inputs.x, torch.tensor(case.sections, device=inputs.x.device)
    out_dtype = TORCH_DTYPES[case.dtypes[2]]
    rule, w_rule = map(recipe, case.recipes)
    free = rotates_freely(backend)
    random = inputs.random.get("x")
    oracle = reference.quantize_grouped(x, sizes, rule, random=random)  # type: ignore[arg-type]
    sections = oracle.sections()
    try:
        kernels = _quantized(case, {"x": x, "sizes": sizes}, random, backend)
        _judge_sections(outcome, case, inputs, kernels, sections, free=free, prefix="x.")
        sections = [judged.kernel for judged in outcome.judged]
    except Unsupported:
        pass  # it is given the reference's sections
    left = join_sections(sections)
    right = _matrices(inputs, case, backend, outcome)
    shape = (x.shape[0], case.shape[2])

    def call(given: Tensors) -> Tensors:
        parts = {name: given[f"a.{name}"] for name in PARTS}
        a = GroupedQuantized(**parts, recipe=rule, shape=oracle.shape, sizes=given["sizes"])  # type: ignore[arg-type]
        b = [
            Quantized(**{name: given[f"b{n}.{name}"] for name in PARTS}, recipe=w_rule, shape=q.shape)  # type: ignore[arg-type]
            for n, q in enumerate(right)
        ]
        options = {key: given[key] for key in ("c", "bias") if given[key] is not None}
        return {"output": backend.tensor("gemm_grouped", shape, out_dtype, a, b, out_dtype=out_dtype, **options)}

    given: Tensors = {"sizes": sizes, "c": inputs.c, "bias": inputs.bias}
    given |= {f"a.{name}": left[name] for name in PARTS}
    given |= {f"b{n}.{name}": getattr(q, name) for n, q in enumerate(right) for name in PARTS}
    outputs, protection, outcome.seconds = repeated(backend, x.device, given, call)
    outcome.stages += protection
    limits, outcome.seconds_reference = timed(x.device, lambda: _bounds(sections, right, inputs, out_dtype))
    output = outputs["output"]
    assert output is not None
    add_output(outcome, output, limits)
    operands = {name: tensor for name, tensor in given.items() if name.endswith((".codes", ".scales"))}
    outcome.outputs = {**operands, **outputs}
    return outcome


def _matrices(inputs: Inputs, case: Case, backend: Backend, outcome: Outcome) -> list[Quantized]:
    """The w of every section, quantized by the backend, their stages judged as one."""
    assert inputs.w is not None
    rule, random = recipe(case.recipes[1]), inputs.random.get("w")
    quantized, stages = [], []
    for number, matrix in enumerate(inputs.w.view(len(case.sections), case.shape[2], case.shape[1])):
        own = (random[0], random[1] + number) if isinstance(random, tuple) else None
        one = Outcome()
        quantized.append(operand("w", matrix, rule, own, backend, one))
        stages.append(one.stages)
        outcome.judged += one.judged
    outcome.stages += merged(stages, "matrix")
    return quantized


def _bounds(sections: list[Quantized], matrices: list[Quantized], inputs: Inputs, out_dtype: torch.dtype) -> Bounds:
    """Bounds of every section, one below the other."""
    found = []
    start = 0
    for number, (a, b) in enumerate(zip(sections, matrices, strict=True)):
        rows = slice(start, start + a.shape[0])
        start = rows.stop
        c = None if inputs.c is None else inputs.c[rows]
        bias = None if inputs.bias is None else inputs.bias[number]
        found.append(bounds(a, b, out_dtype=out_dtype, c=c, bias=bias))
    return Bounds(**{field.name: torch.cat([getattr(one, field.name) for one in found]) for field in fields(Bounds)})
