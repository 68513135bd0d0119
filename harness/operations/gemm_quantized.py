"""GEMM whose output is quantized: at once, as a fused kernel does, and by gemm and quantize apart."""

from __future__ import annotations

from contextlib import suppress

from harness import oracle as reference
from harness.backend import Backend, Unsupported
from harness.case import Case
from harness.inputs import TORCH_DTYPES, Inputs
from harness.operations.end_to_end import add_end_to_end
from harness.operations.gemm import operands
from harness.operations.outcome import Outcome
from harness.operations.product import add_protection, addends, judge_product, operands_given, taken
from harness.operations.quantize import parts_of, rotates_freely
from harness.operations.repeated import Tensors, repeated
from harness.operations.stages import Subject, quantize_stages
from harness.results import as_quantized
from reference.recipes import recipe


def judge_gemm_quantized(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    """Run gemm_quantized of x (M, K) and w (N, K), and apart from it gemm, then quantize of its output (M, N).

    The plain output is judged by its bounds, and its quantization stage by stage; what was made at once must be, byte
    for byte, what was made apart. So a wrong sum, a wrong code and a wrong fusion are each found once. A backend that
    does not quantize so is judged against the reference's quantization of its own plain output.
    """
    outcome = Outcome()
    out_dtype, rule, scale = TORCH_DTYPES[case.dtypes[2]], recipe(case.out_recipe), inputs.scale.get("output")
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
