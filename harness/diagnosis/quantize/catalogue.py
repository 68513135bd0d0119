"""Every deviation that quantized matrices of one recipe may show, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.elements.elements import constant_nan, element_deviations
from narrowgauge.harness.diagnosis.quantize.elements.stochastic import drawing_deviations
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.harness.diagnosis.quantize.other_sections import section_deviations
from narrowgauge.harness.diagnosis.quantize.recipe_fields import chosen_deviations, dialect_deviations
from narrowgauge.harness.diagnosis.quantize.rotated_inputs import rotating_deviations
from narrowgauge.harness.diagnosis.quantize.scales.amaxes import block_deviations, skipped_lanes
from narrowgauge.harness.diagnosis.quantize.scales.block_scales import scale_deviations
from narrowgauge.harness.diagnosis.quantize.scales.exponents import single_codes
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import found_amaxes, tensor_deviations
from narrowgauge.harness.diagnosis.quantize.swizzles import arranging_deviations

_LATER = ("tensor scale", "scales", "codes")
"""Stages that follow from an amax."""


def catalogue(matrices: Sequence[Evidence], wrong: Mapping[str, Sequence[torch.Tensor]]) -> list[QuantizeDeviation]:
    """The deviations of matrices of one recipe, the most plausible first: one step, one choice, odd steps, dialects.

    `wrong`: by stage that is wrong, where it is, bool, for each matrix. What changes none of them is left out; what is
    read off the data, as a lane that an amax does not know of, is there where they speak of it.
    """
    recipe = matrices[0].subject.recipe
    steps = list(_unseen(_steps(matrices, wrong), shown="amax" in matrices[0].shown))
    return [
        *(step for step in steps if not step.odd), *chosen_deviations(recipe),
        *(step for step in steps if step.odd), *dialect_deviations(recipe),
    ]  # fmt: skip


def _unseen(steps: Iterable[QuantizeDeviation], *, shown: bool) -> Iterator[QuantizeDeviation]:
    """The same for a kernel that shows no amax: later stages tell of it, and of one of those of its blocks."""
    for step in steps:
        if not shown and step.stages == {"amax"}:
            yield replace(step, stages=frozenset({"amax", *_LATER}))
        else:
            yield step
        if not shown and "amax" in step.lenient:
            yield replace(step, stages=frozenset({"amax", *_LATER}), lenient=frozenset())


def _steps(matrices: Sequence[Evidence], wrong: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[QuantizeDeviation]:
    """Those of one step."""
    first = matrices[0]
    recipe = first.subject.recipe
    if "layout" in wrong:
        yield from arranging_deviations(matrices)
    if "amax" in wrong or "tensor scale" in wrong or "tensor scale" not in first.shown:
        yield from tensor_deviations(recipe)
    if "amax" in wrong:
        yield from found_amaxes(matrices)
    yield from rotating_deviations(recipe, first.subject.matrix)
    yield from section_deviations(matrices)
    if "scales" in wrong:
        yield from scale_deviations(recipe)
        yield from block_deviations(recipe)
        yield from skipped_lanes(matrices, wrong["scales"])
        yield from single_codes(matrices, [Run(matrix).stage("scales") for matrix in matrices])
    yield from element_deviations(recipe)
    if "codes" in wrong:
        yield from constant_nan(matrices)
        yield from drawing_deviations(recipe)
