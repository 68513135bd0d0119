"""The operation grouped-linear."""

from __future__ import annotations

from narrowgauge.harness.operations.grouped_linear.case import GroupedLinearCase
from narrowgauge.harness.operations.modules.accuracy import accuracy_table
from narrowgauge.harness.operations.modules.inputs import module_inputs
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.operation import Operation

OPERATION = Operation(case=GroupedLinearCase, inputs=module_inputs, judge=judge_module, show=accuracy_table)
