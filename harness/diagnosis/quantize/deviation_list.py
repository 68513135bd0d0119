"""Ordered list of all deviations that matrices of a recipe can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements.changed_steps import changed_step_deviations
from narrowgauge.harness.diagnosis.quantize.elements.element_deviations import (
    CODES_ZERO,
    LEFT_OUT,
    ROUNDINGS,
    SCALINGS,
    SPECIAL_VALUES,
    moved_midpoint_deviations,
    nan_code_deviations,
)
from narrowgauge.harness.diagnosis.quantize.elements.stochastic_deviations import (
    STOCHASTIC,
    rounded_at_random,
)
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.recipe_fields import dialect_deviations, field_deviations
from narrowgauge.harness.diagnosis.quantize.rotation_deviations import rotation_deviations
from narrowgauge.harness.diagnosis.quantize.scale_layouts import layout_deviations
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import (
    BLOCK_AMAXES,
    dropped_tail_deviations,
    skipped_lane_deviations,
)
from narrowgauge.harness.diagnosis.quantize.scales.block_scales import scale_deviations
from narrowgauge.harness.diagnosis.quantize.scales.e8m0_exponents import single_code_deviations
from narrowgauge.harness.diagnosis.quantize.scales.observed_amaxes import (
    derived_amax_deviations,
    hidden_amax_deviations,
    observed_amax_deviations,
)
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import tensor_scale_deviations
from narrowgauge.harness.diagnosis.quantize.section_amaxes import (
    half_deviations,
    section_amax_deviations,
    section_result_deviations,
    share_amax,
    unused_amax_deviations,
)
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.operations.stages.deviation import rows_of

_STAGES_AFTER_AMAX = ("tensor scale", "scales", "codes")
"""Stages that depend on the tensor's amax."""


def list_deviations(
    matrices: Sequence[KernelMatrix],
    wrong_masks: Mapping[str, Sequence[torch.Tensor]],
    history: SearchHistory,
    *,
    dialects: bool = True,
) -> list[QuantizeDeviation]:
    """Deviations of matrices with the same recipe, the simplest first.

    This is the order of simplicity: mistakes in a single step, other choices in a field of the recipe, implausible
    mistakes in a step (a further rounding, another order of operations, one step of a factor), dialects. Pairs of
    deviations come after all single deviations (`explain_quantize`).

    `wrong_masks`: for each wrong stage the bool masks of wrong elements, a mask for each matrix. Deviations that cannot
    change a wrong stage are left out. Some deviations are derived from the masks, such as lanes that the amax skips.
    `history`: earlier cases of the backend. `dialects`: with the rules of other libraries, which are no mistakes there.
    """
    recipe = matrices[0].subject.recipe
    amax_shown = "amax" in matrices[0].kernel_stages
    step_deviations = list(_without_amax(_step_deviations(matrices, wrong_masks, history), amax_shown=amax_shown))
    return [
        *(deviation for deviation in step_deviations if not deviation.implausible), *field_deviations(recipe),
        *(deviation for deviation in step_deviations if deviation.implausible),
        *(dialect_deviations(recipe) if dialects else ()),
        *changed_step_deviations(matrices[0], _wrong_rows(wrong_masks)),
    ]  # fmt: skip


def _wrong_rows(wrong_masks: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor | None:
    """Numbers of the rows with wrong scales or codes of the first matrix, int64 (n,); None if there is none."""
    masks = [wrong_masks[stage][0] for stage in ("scales", "codes") if stage in wrong_masks]
    rows = {row for mask in masks if mask.dim() == 2 for row in mask.any(1).nonzero()[:, 0].tolist()}
    return torch.tensor(sorted(rows)) if rows else None


def _without_amax(step_deviations: Iterable[QuantizeDeviation], *, amax_shown: bool) -> Iterator[QuantizeDeviation]:
    """Adapt deviations to a kernel that reports no amax.

    Deviations of the amax, of the tensor or of blocks, then change the stages that depend on it.
    """
    for deviation in step_deviations:
        if not amax_shown and deviation.stages == {"amax"}:
            yield replace(deviation, stages=frozenset({"amax", *_STAGES_AFTER_AMAX}))
        else:
            yield deviation
        if not amax_shown and "amax" in deviation.optional_stages:
            yield replace(deviation, stages=frozenset({"amax", *_STAGES_AFTER_AMAX}), optional_stages=frozenset())


def _step_deviations(
    matrices: Sequence[KernelMatrix],
    wrong_masks: Mapping[str, Sequence[torch.Tensor]],
    history: SearchHistory,
) -> Iterator[QuantizeDeviation]:
    """Mistakes in a single step of the quantizer."""
    first = matrices[0]
    recipe = first.subject.recipe
    if "codes" in wrong_masks:
        yield CODES_ZERO
        yield from rows_of(LEFT_OUT, recipe)
    yield from half_deviations(matrices)
    yield from section_result_deviations(matrices)
    yield from section_amax_deviations(matrices)
    if "layout" in wrong_masks:
        yield from layout_deviations(matrices)
    if "amax" in wrong_masks or "tensor scale" in wrong_masks or "tensor scale" not in first.kernel_stages:
        yield from tensor_scale_deviations(recipe, amax_given=first.subject.amax_given)
    if "amax" in wrong_masks and not first.subject.amax_given and not share_amax(matrices):
        yield from observed_amax_deviations(matrices, history)
    if "amax" not in first.kernel_stages and recipe.tensor_scale not in ("none", "given"):
        yield from () if first.subject.amax_given else hidden_amax_deviations(matrices)
    hidden = "amax" not in first.kernel_stages and recipe.tensor_scale != "given" and not first.subject.amax_given
    if "scales" in wrong_masks and hidden and (recipe.whole or recipe.tensor_scale != "none"):
        yield from derived_amax_deviations(matrices, history) if recipe.granularity == "tensor" else ()
    yield from rotation_deviations(recipe, first.subject.matrix)
    yield from unused_amax_deviations(first)
    if "scales" in wrong_masks:
        yield from scale_deviations(recipe)
        yield from () if recipe.spans_k else rows_of(BLOCK_AMAXES, recipe)
        yield from () if recipe.whole else dropped_tail_deviations(first)
        yield from skipped_lane_deviations(matrices, wrong_masks["scales"])
        yield from single_code_deviations(matrices, [Replay(matrix).compute_stage("scales") for matrix in matrices])
    yield from rows_of((*ROUNDINGS, *SPECIAL_VALUES, *SCALINGS), recipe)
    if "codes" in wrong_masks:
        yield from nan_code_deviations(matrices)
        yield from rows_of(STOCHASTIC, recipe)
        yield from rounded_at_random(matrices, sum(int(mask.count_nonzero()) for mask in wrong_masks["codes"]))
        yield from moved_midpoint_deviations(matrices, wrong_masks["codes"])
