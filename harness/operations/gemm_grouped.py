"""Grouped GEMM: every section of a matrix multiplied by a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.results import PARTS, join_sections
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.checks.stage import merged
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm import Asked, operand, quantized
from narrowgauge.harness.operations.grouped import judge_sections
from narrowgauge.harness.operations.quantize import rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits, seed_torch
from narrowgauge.harness.operations.stages.end_to_end import Operand, add_end_to_end
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.product import add_output, add_protection, addends, named, order_of, taken
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation


def judge_gemm_grouped(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge the product of each section of x (M, K) with its own w (N, K), on the kernel's own operands.

    End to end, against the reference's own operands, it is measured.
    """
    outcome = Outcome()
    sizes = torch.tensor(case.sections, device=inputs.x.device)
    x = quantized_sections(outcome, inputs.x, sizes, case, inputs, backend)
    w = quantized_matrices(outcome, case, inputs, backend)
    sections, matrices = [one.kernel for one in x], [one.kernel for one in w]
    out_dtype = TORCH_DTYPES[case.dtypes[2]]
    given = grouped_given(sections, matrices, inputs.c, inputs.bias)

    def call(given: Tensors) -> Tensors:
        return {"output": grouped_product(given, sections, matrices, backend, out_dtype)}

    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, given, call)
    add_protection(outcome, protection)
    add_grouped_output(outcome, outputs["output"], sections, matrices, inputs, order_of(backend, sections, matrices))
    add_end_to_end(outcome, [(a.own, b.own) for a, b in zip(x, w, strict=True)])
    operands = {name: tensor for name, tensor in given.items() if name.endswith((".codes", ".scales"))}
    outcome.outputs = {**operands, **outputs}
    return outcome


def quantized_sections(
    outcome: Outcome, x: torch.Tensor, sizes: torch.Tensor, case: Case, inputs: Inputs, backend: Backend
) -> list[Operand]:
    """Sections of `x` (M, K), quantized by the backend, their stages judged; else by the reference."""
    rule, random, scale = find_recipe(case.recipes[0]), inputs.random.get("x"), inputs.scale.get("x")
    oracles = own_sections(x, sizes, case, inputs)
    if own := makes_own_bits(backend, rule):
        seed_torch(random)
    with suppress(Unsupported):
        kernels = backend.quantize_grouped(x, sizes, rule, scale=scale, random=random)  # type: ignore[arg-type]
        before = len(outcome.judged)
        parts = torch.split(x, sizes.tolist())
        free = rotates_freely(backend)
        judge_sections(outcome, parts, kernels, oracles, random=random, free=free, own=own, prefix="x.")
        return [Operand(judged.kernel, judged.oracle) for judged in outcome.judged[before:]]
    return [Operand(oracle, oracle) for oracle in oracles]


def own_sections(x: torch.Tensor, sizes: torch.Tensor, case: Case, inputs: Inputs) -> list[Quantized]:
    """Sections of `x` (M, K) as the reference quantizes them."""
    rule, random, scale = find_recipe(case.recipes[0]), inputs.random.get("x"), inputs.scale.get("x")
    return reference.quantize_grouped(x, sizes, rule, scale=scale, random=random).sections()  # type: ignore[arg-type]


def quantized_matrices(outcome: Outcome, case: Case, inputs: Inputs, backend: Backend) -> list[Operand]:
    """The w of every section, quantized by the backend, their stages judged as one."""
    assert inputs.w is not None
    rule, random, scale = find_recipe(case.recipes[1]), inputs.random.get("w"), inputs.scale.get("w")
    asked = []
    for number, matrix in enumerate(inputs.w.view(len(case.sections), case.shape[2], case.shape[1])):
        bits = (random[0], random[1] + number) if isinstance(random, tuple) else None
        own = None if scale is None else scale[number : number + 1]
        asked.append(Asked("w", matrix, rule, random=bits, scale=own))
    found, stages = [], []
    for each, kernel in zip(asked, quantized(asked, backend), strict=True):
        one = Outcome()
        found.append(operand(each, kernel, backend, one))
        stages.append(one.stages)
        outcome.judged += one.judged
    outcome.stages += merged(stages, "matrix")
    return found


def grouped_given(
    sections: Sequence[Quantized], matrices: Sequence[Quantized], c: torch.Tensor | None, bias: torch.Tensor | None
) -> Tensors:
    """What a grouped product is given, by name."""
    device = matrices[0].codes.device
    given: Tensors = {"sizes": torch.tensor([q.shape[0] for q in sections], device=device), "c": c, "bias": bias}
    given |= {f"a.{name}": tensor for name, tensor in join_sections(list(sections)).items()}
    for number, matrix in enumerate(matrices):
        given |= named(matrix, f"b{number}")
    return given


def grouped_product(
    given: Tensors,
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    backend: Backend,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """gemm_grouped of what `grouped_given` gave."""
    parts = {name: given[f"a.{name}"] for name in PARTS}
    shape = (sum(q.shape[0] for q in sections), sections[0].shape[1])
    a = GroupedQuantized(**parts, recipe=sections[0].recipe, shape=shape, sizes=given["sizes"])  # type: ignore[arg-type]
    b = [taken(q, given, f"b{number}") for number, q in enumerate(matrices)]
    wanted = (shape[0], matrices[0].shape[0])
    return backend.tensor("gemm_grouped", wanted, out_dtype, a, b, out_dtype=out_dtype, **addends(given))


def add_grouped_output(
    outcome: Outcome,
    output: torch.Tensor | None,
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    inputs: Inputs,
    order: Summation,
) -> None:
    """Judge the output (M, N) of sections by the bounds of every one, one below the other."""
    assert output is not None
    products = _products(sections, matrices, inputs, output, order)
    outcome.products += products
    together = [torch.cat([getattr(one.limits, field.name) for one in products]) for field in fields(Bounds)]
    add_output(outcome, output, Bounds(*together))


def _products(
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    inputs: Inputs,
    output: torch.Tensor,
    order: Summation,
) -> list[Product]:
    """Each section times its matrix, with its bounds."""
    found = []
    start = 0
    for number, (a, b) in enumerate(zip(sections, matrices, strict=True)):
        rows = slice(start, start + a.shape[0])
        start = rows.stop
        c = None if inputs.c is None else inputs.c[rows]
        bias = None if inputs.bias is None else inputs.bias[number]
        limits = bounds(a, b, out_dtype=output.dtype, c=c, bias=bias, order=order)
        found.append(Product(a, b, c, bias, output[rows], limits, order))
    return found
