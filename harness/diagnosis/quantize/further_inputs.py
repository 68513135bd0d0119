"""Further inputs, on which an exact deviation must give the kernel's bytes too.

Inputs of one family can hide the difference between two mistakes: an amax that is cut to 19 bits is often the amax
rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import STAGES, kernel_matrix
from narrowgauge.harness.operations.stages.outcome import Outcome

ORDINARY = ("normal", "near-ties", "e4m3-ties", "ties", "uniform", "outliers", "tiles")
"""Families of inputs that an exact deviation must explain."""
SPECIAL = ("low-rows", "huge", "subnormal", "nan")
"""Families that only separate deviations: a kernel can have a second mistake with special values."""
LARGEST = 1 << 18
"""Elements of the largest matrices that run on further inputs."""
FurtherRun = Callable[[str], Outcome | None]
"""Function from a family to the outcome of the case on inputs of this family. None: there is no such outcome."""


def confirmed(
    deviations: Sequence[QuantizeDeviation], prefix: str, run: FurtherRun
) -> tuple[list[QuantizeDeviation], str]:
    """Deviations that explain the further outcomes of the matrices with this prefix; and, if there are none, the family
    that refuted the last of them."""
    remaining = list(deviations)
    for family in (*ORDINARY, *SPECIAL):
        if family in SPECIAL and len(remaining) == 1:
            break
        if (outcome := run(family)) is None:
            continue
        explaining = [each for each in remaining if _explains(each, outcome, prefix)]
        if not explaining and family in ORDINARY:
            return [], family
        remaining = explaining or remaining
    return remaining, ""


def _explains(deviation: QuantizeDeviation, outcome: Outcome, prefix: str) -> bool:
    """Whether the deviation gives the bytes of all stages that it changes, and all other stages are correct."""
    failed = {stage for stage in STAGES if any(s.stage == prefix + stage and not s.passed for s in outcome.stages)}
    if not failed <= deviation.stages | deviation.optional_stages:
        return False
    for judged in outcome.judged:
        if judged.prefix != prefix:
            continue
        matrix = kernel_matrix(judged)
        replay = Replay(matrix, deviation)
        for stage, found in matrix.kernel_stages.items():
            random = stage == "codes" and matrix.subject.own
            if not matrix.element_count or random or stage not in deviation.stages | failed:
                continue
            try:
                if not equal_bits(replay.compute_stage(stage), found):
                    return False
            except ValueError:  # the changed recipe refuses this input
                continue
    return True
