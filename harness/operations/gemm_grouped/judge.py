"""Grouped GEMM: every section of a matrix multiplied by a matrix of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, TensorForm
from narrowgauge.harness.checks.stage import merge_stages
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.end_to_end import Operand, add_end_to_end
from narrowgauge.harness.operations.gemm.judge import Source, judge_operand, quantize_sources
from narrowgauge.harness.operations.gemm.product import (
    add_output,
    add_protection,
    addends,
    named,
    note_any_order,
    order_of,
)
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.quantize.judge import rotates_freely
from narrowgauge.harness.operations.quantize_grouped.judge import judge_sections, quantize_grouped
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.black_box import makes_own_bits
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.quantized import made_of
from narrowgauge.harness.operations.stages.repeated import Arguments, Tensors, present, repeated
from narrowgauge.harness.operations.stages.rows import INVARIANT, Independent, add_rows
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import GroupedQuantized, Quantized, joined_sections
from narrowgauge.spec.summation import Summation


def judge_gemm_grouped(case: GroupedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge the product of each section of x (M, K) with its own w (N, K), on the kernel's own operands.

    The output is also compared with the product of the reference's own operands, which decides no verdict.
    """
    outcome = Outcome()
    sizes = torch.tensor(case.section_sizes, device=inputs.x.device)
    x = judge_x(outcome, inputs.x, sizes, case, inputs, backend)
    w = judge_w(outcome, case, inputs, backend)
    sections, matrices = [operand.kernel for operand in x], [operand.kernel for operand in w]
    out_dtype = TORCH_DTYPES[case.out]
    arguments = grouped_arguments(sections, matrices, inputs.get("c"), inputs.get("bias"))

    def call(given: Tensors) -> Tensors:
        return {"output": grouped_product(given, sections, matrices, backend, out_dtype)}

    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, arguments, call)
    add_protection(outcome, protection)
    order = order_of(backend, sections, matrices)
    add_grouped_output(outcome, outputs["output"], sections, matrices, inputs, order)
    note_any_order(outcome, backend, order)
    if not backend.brief:
        add_end_to_end(outcome, [(a.own, b.own) for a, b in zip(x, w, strict=True)])
    outcome.outputs = {**codes_and_scales(arguments), **outputs}
    if backend.declares.get("batch") == INVARIANT:
        add_rows(outcome, _sections(sections, matrices, present(arguments), backend, out_dtype), backend)
    return outcome


def _sections(
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    given: Tensors,
    backend: Backend,
    out_dtype: torch.dtype,
) -> Independent | None:
    """The sections of a grouped product, each with its matrix. No stage for scales of several rows: these scales have
    neither a row for each section nor a row for each row of a."""
    if sections[0].recipe.stored_rows > 1 and not sections[0].recipe.whole:
        return None
    parts = [name for name in QUANTIZED_PARTS if f"b0.{name}" in given]
    own = {name: tensor for name, tensor in given.items() if not name.startswith("b") or name == "bias"}
    own |= {f"b.{part}": torch.stack([given[f"b{n}.{part}"] for n in range(len(matrices))]) for part in parts}

    def run(units: Tensors) -> Tensors:
        heights = units["sizes"].tolist()
        matrices_of_units = [replace(matrices[0], codes=codes) for codes in units["b.codes"]]
        named_parts = {f"b{n}.{part}": units[f"b.{part}"][n] for n in range(len(heights)) for part in parts}
        shapes = [replace(sections[0], shape=(rows, sections[0].shape[1])) for rows in heights]
        return {"output": grouped_product(units | named_parts, shapes, matrices_of_units, backend, out_dtype)}

    return Independent(len(sections), own, run, sizes=[q.shape[0] for q in sections], noun="section")


def judge_x(
    outcome: Outcome,
    x: torch.Tensor,
    sizes: torch.Tensor,
    case: GroupedGemmCase,
    inputs: Inputs,
    backend: Backend,
) -> list[Operand]:
    """The sections of `x` (M, K), quantized by the backend, with their stages judged; else those of the reference."""
    recipe, random, scale = case.operand_recipes[0], inputs.counters.get("x"), inputs.get("scale.x")
    oracles = own_sections(x, sizes, case, inputs)
    if own := makes_own_bits(backend, recipe):
        backend.host.seed(random)
    with suppress(Unsupported):
        kernels = quantize_grouped(backend, x, sizes, recipe, scale=scale, random=random)
        before = len(outcome.judged)
        parts = torch.split(x, sizes.tolist())
        free = rotates_freely(backend)
        judge_sections(outcome, parts, kernels, oracles, random=random, free=free, own=own, prefix="x.")
        return [Operand(judged.kernel, judged.oracle) for judged in outcome.judged[before:]]
    return [Operand(oracle, oracle) for oracle in oracles]


def own_sections(x: torch.Tensor, sizes: torch.Tensor, case: GroupedGemmCase, inputs: Inputs) -> list[Quantized]:
    """The sections of `x` (M, K) as the reference quantizes them."""
    recipe, random, scale = case.operand_recipes[0], inputs.counters.get("x"), inputs.get("scale.x")
    return reference.quantize_grouped(x, sizes, recipe, scale=scale, random=random).sections()


def judge_w(outcome: Outcome, case: GroupedGemmCase, inputs: Inputs, backend: Backend) -> list[Operand]:
    """The w of each section, quantized by the backend, with their stages judged and merged."""
    recipe, random, scale = case.operand_recipes[1], inputs.counters.get("w"), inputs.get("scale.w")
    sources = []
    for number, matrix in enumerate(inputs["w"].view(len(case.section_sizes), case.shape[2], case.shape[1])):
        bits = None if random is None else (random[0], random[1] + number)
        scale_of_matrix = None if scale is None else scale[number : number + 1]
        sources.append(Source("w", matrix, recipe, random=bits, scale=scale_of_matrix))
    operands, stages = [], []
    for source, result in zip(sources, quantize_sources(sources, backend), strict=True):
        outcome_of_matrix = Outcome()
        operands.append(judge_operand(source, *result, backend, outcome_of_matrix))
        stages.append(outcome_of_matrix.stages)
        outcome.judged += outcome_of_matrix.judged
    outcome.stages += merge_stages(stages, "matrix")
    return operands


def grouped_arguments(
    sections: Sequence[Quantized], matrices: Sequence[Quantized], c: torch.Tensor | None, bias: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """The arguments of a grouped product by name."""
    sizes = torch.tensor([q.shape[0] for q in sections], device=matrices[0].codes.device)
    joined = joined_sections(list(sections))
    arguments = {"sizes": sizes, "c": c, "bias": bias, **{f"a.{part}": joined.get(part) for part in QUANTIZED_PARTS}}
    for number, matrix in enumerate(matrices):
        arguments |= named(matrix, f"b{number}")
    return arguments


def codes_and_scales(arguments: Arguments) -> Tensors:
    """Codes and scales of all operands among the arguments of a product."""
    return {name: tensor for name, tensor in present(arguments).items() if name.endswith((".codes", ".scales"))}


def grouped_product(
    given: Tensors,
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    backend: Backend,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """gemm_grouped of the arguments that `grouped_arguments` names."""
    shape = (sum(q.shape[0] for q in sections), sections[0].shape[1])
    a = GroupedQuantized(
        given["a.codes"], given["a.scales"], given.get("a.amax"), sections[0].recipe, shape, given["sizes"],
        given.get("a.tensor_scale"),
    )  # fmt: skip
    b = [made_of(given, q, f"b{number}.") for number, q in enumerate(matrices)]
    shape_of_output = (shape[0], matrices[0].shape[0])
    form = {"output": TensorForm(shape_of_output, out_dtype)}
    return backend.results("gemm_grouped", form, a, b, out_dtype=out_dtype, **addends(given))["output"]


def add_grouped_output(
    outcome: Outcome,
    output: torch.Tensor,
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    inputs: Inputs,
    order: Summation,
) -> None:
    """Judge the output (M, N) of a grouped product by the bounds of all sections, one below the other."""
    products = _products(sections, matrices, inputs, output, order)
    outcome.products += products
    together = [torch.cat([getattr(product.limits, field.name) for product in products]) for field in fields(Bounds)]
    add_output(outcome, output, Bounds(*together))


def _products(
    sections: Sequence[Quantized],
    matrices: Sequence[Quantized],
    inputs: Inputs,
    output: torch.Tensor,
    order: Summation,
) -> list[Product]:
    """The product of each section and its matrix, with its bounds."""
    products = []
    addend, biases = inputs.get("c"), inputs.get("bias")
    start = 0
    for number, (a, b) in enumerate(zip(sections, matrices, strict=True)):
        rows = slice(start, start + a.shape[0])
        start = rows.stop
        c = None if addend is None else addend[rows]
        bias = None if biases is None else biases[number]
        limits = bounds(a, b, out_dtype=output.dtype, c=c, bias=bias, order=order)
        products.append(Product(a, b, c, bias, output[rows], limits, order))
    return products
