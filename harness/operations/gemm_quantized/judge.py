"""GEMM whose output is quantized: at once, as a fused kernel does, and by gemm and quantize apart."""

from __future__ import annotations

from contextlib import suppress

from narrowgauge.harness.backends.backend import Backend, Unsupported, non_default
from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.end_to_end import add_end_to_end
from narrowgauge.harness.operations.gemm.judge import judge_operands
from narrowgauge.harness.operations.gemm.product import add_protection, addends, judge_product, product_arguments
from narrowgauge.harness.operations.gemm_quantized.case import QuantizedGemmCase
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.harness.operations.quantize.judge import parts_of, rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject, made_of, quantize_stages
from narrowgauge.harness.operations.stages.repeated import Tensors, present, repeated
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import find_recipe


def judge_gemm_quantized(case: QuantizedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run gemm_quantized of x (M, K) and w (N, K), and separately gemm and quantize of its output (M, N).

    The output of gemm is judged by its bounds, and its quantization stage by stage; the fused result must have the same
    bytes as the two separate steps. So a wrong sum, a wrong code and a wrong fusion are one finding each. If the
    backend does not quantize the output, the reference's quantization of the backend's output takes its place.
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
    output = judge_product(outcome, a, b, inputs, backend, out_dtype, view=case.view)
    add_end_to_end(outcome, [(x.own, w.own)])
    subject = Subject(output, recipe, free=rotates_freely(backend))
    apart = reference.quantize(output, recipe, scale=scale)
    with suppress(Unsupported):
        kernel = quantize(backend, output, recipe, scale=scale)
        stages, judged = quantize_stages(subject, kernel, apart, prefix="output.")
        outcome.stages += stages
        outcome.judged.append(judged)
        apart = judged.kernel
    fused = as_quantized(outputs, a.codes, recipe, shape=apart.shape, method="gemm_quantized")
    stages, judged = quantize_stages(subject, fused, apart, prefix="fused.")
    outcome.stages += stages
    outcome.judged.append(judged)
    outcome.outputs |= {f"fused.{name}": tensor for name, tensor in outputs.items()}
    outcome.seconds = seconds
    return outcome
