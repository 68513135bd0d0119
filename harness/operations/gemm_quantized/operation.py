"""The operation gemm-quantized."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.gemm.inputs import product_inputs
from narrowgauge.harness.operations.gemm.show import output_table
from narrowgauge.harness.operations.gemm_quantized.case import QuantizedGemmCase
from narrowgauge.harness.operations.gemm_quantized.judge import judge_gemm_quantized
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.quantize.show import quantized_table
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.table import Place, Table
from narrowgauge.spec.recipes import find_recipe


def inputs(make: Maker[QuantizedGemmCase]) -> Inputs:
    """Inputs of a product, and the given scale of its output."""
    return product_inputs(make, same=make.case.same, out_recipe=find_recipe(make.case.out_recipe))


def shown(given: Inputs, outcome: Outcome, place: Place | None) -> Table | None:
    """The outputs of a row, or a block of the fused result if no output was seen."""
    return (quantized_table if outcome.limits is None else output_table)(given, outcome, place)


OPERATION = Operation(case=QuantizedGemmCase, inputs=inputs, judge=judge_gemm_quantized, show=shown)
