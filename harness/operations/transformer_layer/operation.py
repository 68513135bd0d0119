"""The operation transformer-layer."""

from __future__ import annotations

from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.modules.accuracy import accuracy_table
from narrowgauge.harness.operations.modules.inputs import module_inputs
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.transformer_layer.case import PEAKS, TransformerLayerCase


def inputs(make: Maker[TransformerLayerCase]) -> Inputs:
    """Inputs of a module; gamma before the attention is larger for large scores."""
    return module_inputs(make, peak=PEAKS.get(make.case.families()[make.case.inputs], 1.0))


OPERATION = Operation(case=TransformerLayerCase, inputs=inputs, judge=judge_module, show=accuracy_table)
