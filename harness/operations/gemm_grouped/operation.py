"""The operation gemm-grouped."""

from __future__ import annotations

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.inputs import product_inputs
from narrowgauge.harness.operations.gemm.show import output_table
from narrowgauge.harness.operations.gemm_grouped.arranged import judge_arranged
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.gemm_grouped.judge import judge_gemm_grouped
from narrowgauge.harness.operations.gemm_grouped.padded import judge_padded
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.stages.outcome import Outcome


def judge(case: GroupedGemmCase, inputs: Inputs, backend: Backend) -> Outcome:
    """Run and judge the product of sections: padded or not, or in a buffer."""
    if case.grouping != "sections":
        return judge_arranged(case, inputs, backend)
    return (judge_padded if case.padded else judge_gemm_grouped)(case, inputs, backend)


OPERATION = Operation(case=GroupedGemmCase, inputs=product_inputs, judge=judge, show=output_table)
