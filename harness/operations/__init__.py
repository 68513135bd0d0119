"""The operations: what is run of a backend, and how it is judged. One file each."""

from collections.abc import Callable

from harness.backend import Backend
from harness.case import Case
from harness.inputs import Inputs
from harness.operations.delayed import judge_update_scale
from harness.operations.gemm import judge_gemm
from harness.operations.gemm_grouped import judge_gemm_grouped
from harness.operations.gemm_quantized import judge_gemm_quantized
from harness.operations.grouped import judge_quantize_grouped
from harness.operations.modules import judge_module
from harness.operations.outcome import Outcome
from harness.operations.padded import judge_padded
from harness.operations.quantize import judge_quantize
from harness.operations.swizzle import judge_swizzle
from harness.operations.transform import judge_transform
from harness.schema import MODULES


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
