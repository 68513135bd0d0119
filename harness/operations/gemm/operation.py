"""The operation gemm."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.gemm.case import GemmCase
from narrowgauge.harness.operations.gemm.inputs import product_inputs
from narrowgauge.harness.operations.gemm.judge import judge_gemm
from narrowgauge.harness.operations.gemm.show import output_table
from narrowgauge.harness.operations.operation import Operation


def inputs(make: Maker[GemmCase]) -> Inputs:
    """Inputs of a product; w is x if x is multiplied by itself."""
    return product_inputs(make, same=make.case.same)


OPERATION = Operation(case=GemmCase, inputs=inputs, judge=judge_gemm, show=output_table, told_apart_by="order")
