"""Further inputs: an exact deviation must give the kernel's bytes on inputs of several families.

A single family can hide the difference between two mistakes: an amax cut to 20 bits is often the amax rounded to
float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import STAGES, kernel_matrix
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.outcome import Outcome

ORDINARY = ("normal", "near-ties", "e4m3-ties", "ties", "uniform", "outliers", "tiles")
"""Families of inputs that an exact deviation must explain."""
SPECIAL = ("low-rows", "amax-2m120-row-end", "huge", "subnormal", "nan")
"""Families that separate deviations and refute no single deviation: a kernel can have a second mistake with special
values."""
LARGEST = 1 << 18
"""Largest number of elements of matrices with further inputs."""
RUN = 1 << 21
"""Work of a run and a judgement of at most so many elements."""
PROOFS = 4
"""Number of recipes and dtypes in which further inputs confirm a deviation of a backend. The deviation then counts as
confirmed for every recipe."""
FurtherRun = Callable[[str], Outcome | None]
"""Function from a family to the outcome of the case on inputs of this family. None: the case has no outcome."""


def refutations(deviations: Sequence[QuantizeDeviation], prefix: str, run: FurtherRun, limit: WorkLimit) -> list[str]:
    """The first ordinary family whose outcome refutes a deviation, for each deviation; empty without refutation.

    `prefix`: prefix of the matrices. No family is tried after `limit`.
    """
    found = [""] * len(deviations)
    for family in ORDINARY:
        if all(found) or not limit.may_compare(RUN):
            break
        if (outcome := run(family)) is None:
            continue
        for number, deviation in enumerate(deviations):
            if not found[number] and not _explains(deviation, outcome, prefix):
                found[number] = family
    return found


def separated(
    deviations: Sequence[QuantizeDeviation], prefix: str, run: FurtherRun, limit: WorkLimit
) -> list[QuantizeDeviation]:
    """The deviations that remain after the special families have separated several deviations."""
    remaining = list(deviations)
    for family in SPECIAL:
        if len(remaining) == 1 or not limit.may_compare(RUN):
            break
        if (outcome := run(family)) is not None:
            remaining = [each for each in remaining if _explains(each, outcome, prefix)] or remaining
    return remaining


def _explains(deviation: QuantizeDeviation, outcome: Outcome, prefix: str) -> bool:
    """Whether the deviation gives the bytes of all stages that it changes, and all other stages are correct."""
    failed = {stage for stage in STAGES if any(s.stage == prefix + stage and not s.passed for s in outcome.stages)}
    if not failed <= deviation.stages | deviation.optional_stages:
        return False
    for judged in outcome.judged:
        if judged.prefix != prefix:
            continue
        matrix = kernel_matrix(judged, outcome.judged)
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
