"""A stage that stays in high precision: a tensor compared with what any float32 computation of its formula can give.

`bounded_stage("norm", found, norm_forward(x, gamma, beta, "layer", eps), torch.bfloat16)` judges one tensor; what is
expected comes from the files of `reference.high_precision`, of the inputs that the kernel itself had.
"""

from __future__ import annotations

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.output import output_stage
from narrowgauge.reference.high_precision.bounded import Bounded


def bounded_stage(
    name: str, found: torch.Tensor, expected: Bounded, dtype: torch.dtype, *, figures: bool = True
) -> StageResult:
    """Compare `found`, a kernel's tensor, with `expected`, of the same shape and device, cast to `dtype`.

    An element is right inside of the interval of the bound, and bit for bit if no step can round. Places in a
    finding are rows and columns of (…, K) as (M, K); a vector is one row. A tensor of another shape or dtype is wrong
    as a whole, and the sentence says so. `figures` as of `bound`.
    """
    if found.shape != expected.shape or found.dtype != dtype:
        is_, should = f"{tuple(found.shape)} {found.dtype}", f"{tuple(expected.shape)} {dtype}"
        return StageResult(
            name, "bound", found.numel(), mismatches=found.numel(), sentence=f"{name} is {is_}, not {should}"
        )
    columns = found.shape[-1] if found.dim() else 1
    rows = found.numel() // max(1, columns)
    flat = Bounded(expected.value.reshape(rows, columns), expected.error.reshape(rows, columns))
    result = output_stage(name, found.reshape(rows, columns), flat.limits(dtype), figures=figures)
    result.assumes = expected.assumes
    if result.sentence and result.assumes:
        result.sentence += f"; the bound assumes {result.assumes}"
        if result.finding is not None:
            result.finding["sentence"] = result.sentence
    return result
