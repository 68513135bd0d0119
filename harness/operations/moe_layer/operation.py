"""The operation moe-layer."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.modules.accuracy import accuracy_table
from narrowgauge.harness.operations.modules.inputs import module_inputs
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.moe_layer.case import MoeLayerCase
from narrowgauge.harness.operations.operation import Operation


def inputs(make: Maker[MoeLayerCase]) -> Inputs:
    """Inputs of a module, with the experts of each choice, int64 (steps, T, k), and its probability, float32.

    Choices have a random order in every step: a token may choose an expert twice. Probabilities have 8 bits: a
    product with a number of bfloat16 is exact.
    """
    case, given = make.case, module_inputs(make)
    listed = torch.repeat_interleave(torch.arange(len(case.section_sizes)), torch.tensor(case.section_sizes))
    listed = torch.cat([listed, torch.full((case.dropped,), -1)])
    ids, probabilities = [], []
    for number in range(case.steps):
        order = make.draw(f"expert_ids of step {number}").words(len(listed)).argsort(stable=True)
        ids.append(listed[order].view(-1, case.choices))
        drawn = make.draw(f"probabilities of step {number}").below(256, case.rows, case.choices)
        probabilities.append((drawn.float() + 1) / 256)
    routing = {"given.expert_ids": torch.stack(ids), "given.probabilities": torch.stack(probabilities)}
    return replace(given, tensors={**given.tensors, **routing})


OPERATION = Operation(case=MoeLayerCase, inputs=inputs, judge=judge_module, show=accuracy_table)
