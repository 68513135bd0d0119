"""The operations: types of case and inputs, and the function that runs and judges a backend. A file for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import GemmCase, GroupedGemmCase, QuantizedGemmCase
from narrowgauge.harness.cases.modules import (
    GroupedLinearCase,
    LayerNormLinearCase,
    LinearCase,
    TransformerLayerCase,
)
from narrowgauge.harness.cases.quantize import (
    GroupedQuantizeCase,
    QuantizeCase,
    SwizzleCase,
    TransformCase,
    UpdateScaleCase,
)
from narrowgauge.harness.inputs.inputs import Inputs, ModuleInputs, ProductInputs
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

CaseT = TypeVar("CaseT", bound=Case)
InputsT = TypeVar("InputsT", bound=Inputs)


@dataclass(frozen=True)
class Operation(Generic[CaseT, InputsT]):
    """An operation: calling it runs and judges a backend."""

    case: type[CaseT]
    inputs: type[InputsT]
    judge: Callable[[CaseT, InputsT, Backend], Outcome]

    def __call__(self, case: Case, inputs: Inputs, backend: Backend) -> Outcome:
        """The outcome of a case. Raises TypeError for a case or inputs of another operation."""
        if not isinstance(case, self.case) or not isinstance(inputs, self.inputs):
            raise TypeError(f"{self.case.__name__} takes no {type(case).__name__} with {type(inputs).__name__}")
        return self.judge(case, inputs, backend)


def _judge_gemm_grouped(case: GroupedGemmCase, inputs: ProductInputs, backend: Backend) -> Outcome:
    return (judge_padded if case.padded else judge_gemm_grouped)(case, inputs, backend)


JUDGES: dict[str, Callable[[Case, Inputs, Backend], Outcome]] = {
    QuantizeCase.operation: Operation(QuantizeCase, Inputs, judge_quantize),
    TransformCase.operation: Operation(TransformCase, Inputs, judge_transform),
    SwizzleCase.operation: Operation(SwizzleCase, Inputs, judge_swizzle),
    UpdateScaleCase.operation: Operation(UpdateScaleCase, Inputs, judge_update_scale),
    GroupedQuantizeCase.operation: Operation(GroupedQuantizeCase, Inputs, judge_quantize_grouped),
    GemmCase.operation: Operation(GemmCase, ProductInputs, judge_gemm),
    GroupedGemmCase.operation: Operation(GroupedGemmCase, ProductInputs, _judge_gemm_grouped),
    QuantizedGemmCase.operation: Operation(QuantizedGemmCase, ProductInputs, judge_gemm_quantized),
    LinearCase.operation: Operation(LinearCase, ModuleInputs, judge_module),
    LayerNormLinearCase.operation: Operation(LayerNormLinearCase, ModuleInputs, judge_module),
    GroupedLinearCase.operation: Operation(GroupedLinearCase, ModuleInputs, judge_module),
    TransformerLayerCase.operation: Operation(TransformerLayerCase, ModuleInputs, judge_module),
}
"""The operations by name."""
