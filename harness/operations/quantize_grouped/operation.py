"""The operation quantize-grouped."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.quantize.inputs import grouped_inputs
from narrowgauge.harness.operations.quantize.show import quantized_table
from narrowgauge.harness.operations.quantize_grouped.case import GroupedQuantizeCase
from narrowgauge.harness.operations.quantize_grouped.judge import judge_quantize_grouped


def inputs(make: Maker[GroupedQuantizeCase]) -> Inputs:
    """x (M, K), and random bits, given scales and amaxes of its sections."""
    return grouped_inputs(make, amax=make.case.amax)


OPERATION = Operation(case=GroupedQuantizeCase, inputs=inputs, judge=judge_quantize_grouped, show=quantized_table)
