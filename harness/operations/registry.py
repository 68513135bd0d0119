"""The operations: what is run of a backend, and how it is judged. One file each."""

from collections.abc import Callable

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.schema import MODULES
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.delayed import judge_update_scale
from narrowgauge.harness.operations.gemm import judge_gemm
from narrowgauge.harness.operations.gemm_grouped import judge_gemm_grouped
from narrowgauge.harness.operations.gemm_quantized import judge_gemm_quantized
from narrowgauge.harness.operations.grouped import judge_quantize_grouped
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.padded import judge_padded
from narrowgauge.harness.operations.quantize import judge_quantize
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.swizzle import judge_swizzle
from narrowgauge.harness.operations.transform import judge_transform


def _judge_gemm_grouped(case: Case, inputs: Inputs, backend: Backend) -> Outcome:
    return (judge_padded if case.padded else judge_gemm_grouped)(case, inputs, backend)


JUDGES: dict[str, Callable[[Case, Inputs, Backend], Outcome]] = {
    "quantize": judge_quantize,
    "transform": judge_transform,
    "swizzle": judge_swizzle,
    "update-scale": judge_update_scale,
    "quantize-grouped": judge_quantize_grouped,
    "gemm": judge_gemm,
    "gemm-grouped": _judge_gemm_grouped,
    "gemm-quantized": judge_gemm_quantized,
    **dict.fromkeys(MODULES, judge_module),
}
