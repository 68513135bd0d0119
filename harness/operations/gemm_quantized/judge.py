"""GEMM whose output is quantized: at once, as a fused kernel does, and by gemm and quantize apart."""

from __future__ import annotations

from contextlib import suppress

import torch

from narrowgauge.harness.backends.backend import Backend, Unsupported, non_default
from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.checks.bit_equality import same_bytes
from narrowgauge.harness.checks.rotation_interval import Interval
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.end_to_end import add_end_to_end
from narrowgauge.harness.operations.gemm.judge import judge_operands
from narrowgauge.harness.operations.gemm.product import (
    add_protection,
    addends,
    judge_product,
    order_of,
    product_arguments,
)
from narrowgauge.harness.operations.gemm_quantized.case import QuantizedGemmCase
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.harness.operations.quantize.judge import parts_of, rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.operations.stages.quantized import Subject, made_of, quantize_stages
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import LINEAR


def judge_gemm_quantized(case: QuantizedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run gemm_quantized of x (M, K) and w (N, K), and separately gemm and quantize of its output (M, N).

    The output of gemm is judged by its bounds, and its quantization stage by stage; the fused result must have the same
    bytes as the two separate steps. A wrong sum, a wrong code and a wrong fusion are separate findings. If the
    backend does not quantize the output, the reference's quantization of the backend's output takes its place. The
    fused result of a backend without gemm is judged by the bounds of the output.
    """
    outcome = Outcome()
    out_dtype, recipe, scale = TORCH_DTYPES[case.out], find_recipe(case.out_recipe), inputs.get("scale.output")
    x, w = judge_operands(case, inputs, backend, outcome)
    a, b = x.kernel, w.kernel

    def fuse(given: Tensors) -> Tensors:
        left, right = made_of(given, a, "a."), made_of(given, b, "b.")
        options = non_default(scale=given.get("scale"), **addends(given))
        fused = backend.call("gemm_quantized", left, right, recipe, out_dtype=out_dtype, **options)
        shape = (left.shape[0], right.shape[0])
        q = as_quantized(fused, left.codes, recipe, shape=shape, method="gemm_quantized")
        return present(parts_of(q))

    given = {**product_arguments(a, b, inputs, case.view), "scale": scale}
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, fuse)
    add_protection(outcome, protection)
    fused = as_quantized(outputs, a.codes, recipe, shape=(a.shape[0], b.shape[0]), method="gemm_quantized")
    outcome.outputs |= {f"fused.{name}": tensor for name, tensor in outputs.items()}
    if not backend.has("gemm"):
        linear = with_layout(a, LINEAR), with_layout(b, LINEAR)
        subject = _of_any_sums(outcome, linear, fused, inputs, backend, out_dtype)
        _add_fused(outcome, subject, fused, reference.quantize(subject.matrix, recipe, scale=scale))
        outcome.seconds = seconds
        return outcome
    output = judge_product(outcome, a, b, inputs, backend, out_dtype, view=case.view)
    if not backend.brief:
        add_end_to_end(outcome, [(x.own, w.own)])
    subject = Subject(output, recipe, free=rotates_freely(backend))
    apart = reference.quantize(output, recipe, scale=scale)
    with suppress(Unsupported):
        kernel = quantize(backend, output, recipe, scale=scale)
        stages, judged = quantize_stages(subject, kernel, apart, prefix="output.")
        outcome.stages += stages
        outcome.judged.append(judged)
        apart = judged.kernel
    _add_fused(outcome, subject, fused, apart)
    outcome.seconds = seconds
    return outcome


def _add_fused(outcome: Outcome, subject: Subject, fused: Quantized, apart: Quantized) -> None:
    """Judge the result of gemm_quantized. `apart`: the quantization of the output."""
    stages, judged = quantize_stages(subject, fused, apart, prefix="fused.")
    outcome.stages += stages
    outcome.judged.append(judged)


def _of_any_sums(
    outcome: Outcome,
    operands: tuple[Quantized, Quantized],
    fused: Quantized,
    inputs: Inputs,
    backend: Backend,
    out_dtype: torch.dtype,
) -> Subject:
    """The output (M, N) of a product in the bounds of the declared order, or of any order, as what `fused` quantizes.
    The outcome keeps the product for the diagnosis.

    Raises Unsupported if a sum is not known and the scales of the recipe, or the codes, follow from more than its
    bounds.
    """
    order, recipe, c, bias = order_of(backend, *operands), fused.recipe, inputs.get("c"), inputs.get("bias")
    limits = bounds(*operands, out_dtype=out_dtype, c=c, bias=bias, order=order)
    outcome.products.append(Product(*operands, c, bias, limits.expected, limits, order))
    # The sign of a sum of zero depends on the order.
    lower = torch.where((limits.lower == 0) & limits.zero_sum, -0.0, limits.lower)
    upper = torch.where((limits.upper == 0) & limits.zero_sum, 0.0, limits.upper)
    free = bool(limits.undetermined.any())
    if same_bytes(lower, upper) and not free:
        return Subject(limits.expected, recipe)
    known = bool(((lower == upper) | (lower.isnan() & upper.isnan())).all())
    shown = recipe.tensor_scale in ("none", "given") or fused.amax is not None
    fixed = recipe.candidates == "6" and recipe.granularity == "tensor" and (recipe.scale is not FP32 or recipe.whole)
    if free or not (known or (shown and fixed)):
        remedy = "return the amax too" if fixed and not free else "check gemm, and quantize of its output, apart"
        raise Unsupported(f"these sums depend on their order, and so do scales of {recipe}; {remedy}")
    return Subject(limits.expected, recipe, ends=Interval(lower, upper, limits.undetermined))
