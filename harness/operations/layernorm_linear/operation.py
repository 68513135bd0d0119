"""The operation layernorm-linear."""

from __future__ import annotations

from narrowgauge.harness.operations.layernorm_linear.case import LayerNormLinearCase
from narrowgauge.harness.operations.modules.accuracy import accuracy_table
from narrowgauge.harness.operations.modules.inputs import module_inputs
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.operation import Operation

OPERATION = Operation(case=LayerNormLinearCase, inputs=module_inputs, judge=judge_module, show=accuracy_table)
