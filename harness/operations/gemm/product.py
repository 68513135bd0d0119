"""The product of quantized operands: run on guarded copies, and judged by what its order of summation can give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.backends.guarded_memory import dense
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, TensorForm
from narrowgauge.harness.cases.axes import block_rows
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.inputs.inputs import Inputs, laid_out
from narrowgauge.harness.operations.gemm.case import PROBES, TRUNCATING
from narrowgauge.harness.operations.gemm.probed_order import ProbedOrder
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.harness.operations.stages.quantized import made_of
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.harness.operations.stages.rows import INVARIANT, Independent, add_rows
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR
from narrowgauge.spec.summation import ORDERS, Summation, is_order

Operands = Quantized | Sequence[Quantized]
"""An operand of a product, or the operands of all sections of a grouped product."""


def order_of(backend: Backend, a: Operands, b: Operands) -> Summation:
    """Declarations of the backend about the sums of a product: operands, order, accumulator, subnormal numbers.

    An order of this product replaces the declaration of operands.
    """
    declared, order = backend.declares, gemm_order(backend, a, b)
    return Summation(
        None if order == TRUNCATING else order,
        operands=declared.get("operands") if order in (None, TRUNCATING) else None,
        truncates=TRUNCATING in (order, declared.get("accumulator")),
        flushes=declared.get("subnormals") == "flushed",
    )


def gemm_order(backend: Backend, a: Operands, b: Operands) -> str | None:
    """Summation order of a product, or of the products of all sections. None or TRUNCATING: any order.

    The backend is asked on its own device. Raises BackendError if it returns an unknown name.
    """
    if not backend.has("gemm_order"):
        return None if probes_order(backend) else backend.declares.get("gemm")
    order: str | None = backend.call("gemm_order", a, b)
    if order not in (None, TRUNCATING) and not is_order(order):
        names = ", ".join(map(repr, (*ORDERS, TRUNCATING)))
        raise BackendError(f"gemm_order gave {order!r}; the order of a sum is {names}, or None for any")
    return order


def probes_order(backend: Backend) -> bool:
    """Whether the backend asks for a probe of the order of its products."""
    return backend.declares.get("gemm") in PROBES


def named(q: Quantized, name: str) -> dict[str, torch.Tensor | None]:
    """The tensors of an operand by name, such as `a.codes`; `made_of` is the inverse."""
    return {f"{name}.{part}": getattr(q, part) for part in QUANTIZED_PARTS}


def addends(given: Tensors) -> Tensors:
    """c and bias, if they are among the arguments."""
    return {name: given[name] for name in ("c", "bias") if name in given}


def product_arguments(
    a: Quantized, b: Quantized, inputs: Inputs, view: str = "contiguous"
) -> dict[str, torch.Tensor | None]:
    """The arguments of a product by name. `view`: memory of c and bias (`laid_out`)."""
    c, bias = (None if addend is None else laid_out(addend, view) for addend in (inputs.get("c"), inputs.get("bias")))
    return {**named(a, "a"), **named(b, "b"), "c": c, "bias": bias}


def judge_product(
    outcome: Outcome,
    a: Quantized,
    b: Quantized,
    inputs: Inputs,
    backend: Backend,
    out_dtype: torch.dtype,
    *,
    view: str = "contiguous",
    bands: Sequence[slice] = (),
) -> torch.Tensor:
    """Run and judge gemm of two operands, and return the output (M, N). `view`: memory of c and bias (`laid_out`).
    `bands`: the rows of the output that are judged, and returned; empty: all rows.
    """
    shape = (a.shape[0], b.shape[0])

    orders: list[Summation] = []

    def call(given: Tensors) -> Tensors:
        left, right = made_of(given, a, "a."), made_of(given, b, "b.")
        form = {"output": TensorForm(shape, out_dtype)}
        outputs = backend.results("gemm", form, left, right, out_dtype=out_dtype, **addends(given))
        if not orders:  # one call, with operands that are on the device of the backend
            orders.append(order_of(backend, left, right))
        return outputs

    arguments = product_arguments(a, b, inputs, view)
    outputs, protection, outcome.seconds = repeated(backend, inputs.x.device, arguments, call)
    add_protection(outcome, protection)
    (order,) = orders
    operands = _rows_of(with_layout(a, LINEAR), bands), with_layout(b, LINEAR)
    outputs = {"output": _in_bands(outputs["output"], bands)}
    limits = bounds(*operands, out_dtype=out_dtype, c=inputs.get("c"), bias=inputs.get("bias"), order=order)
    if probes_order(backend) and order.order is None:
        addend = inputs.get("c") is not None or inputs.get("bias") is not None
        probed = ProbedOrder.of(backend, a, b, out_dtype, addend=addend)
        narrowed = probed.narrowed(operands, limits, order, out_dtype)
        outcome.notes.append({"cause": "order-probed", "sentence": narrowed.sentence})
        limits, order = narrowed.limits, narrowed.order
    output = outputs["output"]
    add_output(outcome, output, limits)
    outcome.products.append(Product(*operands, inputs.get("c"), inputs.get("bias"), output, limits, order))
    stored = {"a.codes": a.codes, "a.scales": a.scales, "b.codes": b.codes, "b.scales": b.scales}
    outcome.outputs = {**outcome.outputs, **stored, **outputs}
    if backend.declares.get("batch") == INVARIANT and not bands:
        add_rows(outcome, _rows(a, b, present(arguments), backend, out_dtype), backend)
    return output


def _rows(a: Quantized, b: Quantized, given: Tensors, backend: Backend, out_dtype: torch.dtype) -> Independent | None:
    """The rows of a product, or its blocks of rows. None: the scales are in a layout, or a is stored transposed."""
    height = block_rows(a.recipe)
    if a.transposed or a.scale_layout != LINEAR or a.shape[0] % height:
        return None
    count = a.shape[0] // height
    own = {"a.codes", "c"} | (set() if a.recipe.whole else {"a.scales"})
    own |= {"a.amax", "a.tensor_scale"} if a.recipe.granularity == "row" else set()
    by_unit = {name: dense(tensor) for name, tensor in given.items() if name in own}

    def run(units: Tensors) -> Tensors:
        rows = len(units["a.codes"])
        left = replace(made_of(units, a, "a."), shape=(rows, a.shape[1]))
        form = {"output": TensorForm((rows, b.shape[0]), out_dtype)}
        return backend.results("gemm", form, left, made_of(units, b, "b."), out_dtype=out_dtype, **addends(units))

    return Independent(count, by_unit, run, {n: x for n, x in given.items() if n not in own}, height=height)


def note_any_order(outcome: Outcome, backend: Backend, order: Summation) -> None:
    """Say why a grouped product is judged in any order if the backend asks for a probe.

    A library may choose a different kernel for a single section: a probe of a section proves nothing about the call.
    """
    if probes_order(backend) and order.order is None:
        text = "judged in any order: the products of a grouped GEMM are not probed"
        outcome.notes.append({"cause": "order-probed", "sentence": text})


def _in_bands(tensor: torch.Tensor, bands: Sequence[slice]) -> torch.Tensor:
    return torch.cat([tensor[band] for band in bands]) if bands else tensor


def _rows_of(q: Quantized, bands: Sequence[slice]) -> Quantized:
    """The rows of an operand that lie in the bands. All rows have scales of their own, or the operand has a single
    scale."""
    if not bands:
        return q
    codes, scales = _in_bands(q.codes, bands), q.scales if q.recipe.whole else _in_bands(q.scales, bands)
    return replace(q, codes=codes, scales=scales, shape=(len(codes), q.shape[1]))


def add_protection(outcome: Outcome, protection: list[StageResult]) -> None:
    """Keep the stages `memory` and `repeat` of a run, joined with those of an earlier run."""
    known = {stage.stage: stage for stage in outcome.stages}
    for stage in protection:
        if stage.stage in known:
            known[stage.stage].add(stage)
        else:
            outcome.stages.append(stage)


def add_output(outcome: Outcome, output: torch.Tensor, limits: Bounds) -> None:
    """Judge the output (M, N) and keep it."""
    outcome.stages.append(output_stage("output", output, limits))
    outcome.actual, outcome.expected, outcome.limits = output, limits.expected, limits
