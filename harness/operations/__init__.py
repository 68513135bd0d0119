"""The operations: what is run of a backend, and how it is judged. One file each."""

from collections.abc import Callable

from harness.backend import Backend
from harness.case import Case
from harness.inputs import Inputs
from harness.operations.gemm import judge_gemm
from harness.operations.grouped import judge_gemm_grouped, judge_quantize_grouped
from harness.operations.outcome import Outcome
from harness.operations.quantize import judge_quantize
from harness.operations.swizzle import judge_swizzle
from harness.operations.transform import judge_transform

JUDGES: dict[str, Callable[[Case, Inputs, Backend], Outcome]] = {
    "quantize": judge_quantize,
    "transform": judge_transform,
    "swizzle": judge_swizzle,
    "quantize-grouped": judge_quantize_grouped,
    "gemm": judge_gemm,
    "gemm-grouped": judge_gemm_grouped,
}
