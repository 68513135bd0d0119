"""GEMM whose output is quantized: at once, as a fused kernel does, and by gemm and quantize apart."""

from __future__ import annotations

from contextlib import suppress

from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.results import as_quantized
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm import operands
from narrowgauge.harness.operations.quantize import parts_of, rotates_freely
from narrowgauge.harness.operations.stages import oracle as reference
from narrowgauge.harness.operations.stages.end_to_end import add_end_to_end
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.product import add_protection, addends, judge_product, operands_given, taken
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.harness.operations.stages.repeated import Tensors, repeated
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import find_recipe


def judge_gemm_quantized(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run gemm_quantized of x (M, K) and w (N, K), and apart from it gemm, then quantize of its output (M, N).

    The plain output is judged by its bounds, and its quantization stage by stage; what was made at once must be, byte
    for byte, what was made apart. So a wrong sum, a wrong code and a wrong fusion are each found once. A backend that
    does not quantize so is judged against the reference's quantization of its own plain output.
    """
    outcome = Outcome()
    out_dtype, rule, scale = TORCH_DTYPES[case.dtypes[2]], find_recipe(case.out_recipe), inputs.scale.get("output")
    x, w = operands(case, inputs, backend, outcome)
    a, b = x.kernel, w.kernel

    def fuse(given: Tensors) -> Tensors:
        left, right = taken(a, given, "a"), taken(b, given, "b")
        options = {"out_dtype": out_dtype, "scale": given["scale"], **addends(given)}
        return parts_of(backend.gemm_quantized(left, right, rule, **options))  # type: ignore[arg-type]

    given = {**operands_given(a, b, inputs), "scale": scale}
    outputs, protection, seconds = repeated(backend, inputs.x.device, given, fuse)
    add_protection(outcome, protection)
    output = judge_product(outcome, a, b, inputs, backend, out_dtype)
    add_end_to_end(outcome, [(x.own, w.own)])
    subject = Subject(output, rule, free=rotates_freely(backend))
    apart = reference.quantize(output, rule, scale=scale)
    with suppress(Unsupported):
        found = backend.quantize(output, rule, scale=scale)
        stages, judged = quantize_stages(subject, found, apart, prefix="output.")
        outcome.stages += stages
        outcome.judged.append(judged)
        apart = judged.kernel
    fused = as_quantized(outputs, a.codes, rule, shape=apart.shape, door="gemm_quantized")
    stages, judged = quantize_stages(subject, fused, apart, prefix="fused.")
    outcome.stages += stages
    outcome.judged.append(judged)
    outcome.outputs |= {f"fused.{name}": tensor for name, tensor in outputs.items()}
    outcome.seconds = seconds
    return outcome
