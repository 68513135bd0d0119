"""The operation quantize."""

from __future__ import annotations

from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.quantize.inputs import quantize_inputs
from narrowgauge.harness.operations.quantize.judge import judge_quantize, run_quantize
from narrowgauge.harness.operations.quantize.show import quantized_table

OPERATION = Operation(
    case=QuantizeCase, inputs=quantize_inputs, judge=judge_quantize, show=quantized_table, run=run_quantize,
    told_apart_by="rule",
)  # fmt: skip
