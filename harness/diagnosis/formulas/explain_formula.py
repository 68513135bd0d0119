"""Diagnosis of high-precision stages: known wrong formulas of norms, activations, attention, residuals and choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explanation import SEPARATE, Explanation
from narrowgauge.harness.diagnosis.formulas.matrix_changes import MATRIX_CHANGES, OPERAND_CHANGES, changed_matrices
from narrowgauge.harness.diagnosis.formulas.wrong_backwards import (
    ATTENTION_GRADIENTS,
    COLUMN_SUMS,
    GELU_GRADIENTS,
    NORM_GRADIENTS,
    SCALED_GRADIENTS,
    SCORES_GRADIENTS,
    AttentionGradient,
    ColumnSum,
    GeluGradient,
    NormGradient,
    ScaledGradient,
    ScoresGradient,
)
from narrowgauge.harness.diagnosis.formulas.wrong_experts import (
    CHOICE_ROWS,
    CHOICES,
    SWIGLU_GRADIENTS,
    SWIGLUS,
    WEIGHT_GRADIENTS,
    ChoiceRows,
    Choices,
    Swiglu,
    SwigluGradient,
    WeightGradient,
)
from narrowgauge.harness.diagnosis.formulas.wrong_forwards import (
    ATTENTIONS,
    GELUS,
    NORMS,
    RESIDUALS,
    ROW_SUM,
    SOFTMAXES,
    Attention,
    Gelu,
    Norm,
    Residual,
    SoftmaxStep,
)
from narrowgauge.harness.diagnosis.gemm.gain import GAIN
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.deviation import Deviation, rows_of
from narrowgauge.harness.operations.stages.outcome import Formula, Outcome
from narrowgauge.reference.high_precision.attention import Softmax, causal, scores, weighted_mean
from narrowgauge.reference.high_precision.bounded import Bounded, half_ulp

FORMULAS: dict[str, tuple[Callable[..., Any], tuple[Deviation[Any], ...]]] = {
    "norm": (Norm, NORMS), "gelu": (Gelu, GELUS), "attention": (Attention, ATTENTIONS),
    "residual": (Residual, RESIDUALS), "norm-backward": (NormGradient, NORM_GRADIENTS),
    "gelu-backward": (GeluGradient, GELU_GRADIENTS), "attention-backward": (AttentionGradient, ATTENTION_GRADIENTS),
    "column-sum": (ColumnSum, COLUMN_SUMS), "softmax": (SoftmaxStep.of, SOFTMAXES),
    "scores-gradient": (ScoresGradient, SCORES_GRADIENTS), "scaled-gradient": (ScaledGradient, SCALED_GRADIENTS),
    "swiglu": (Swiglu, SWIGLUS), "swiglu-backward": (SwigluGradient, SWIGLU_GRADIENTS),
    "choices": (Choices, CHOICES), "choice-rows": (ChoiceRows, CHOICE_ROWS),
    "weight-gradient": (WeightGradient, WEIGHT_GRADIENTS),
}  # fmt: skip
"""Arguments and wrong formulas by the name of the correct formula."""


LEAST_SEPARATED = 10
"""Right elements outside of the bounds of an exact change. With fewer, other small mistakes fit the bounds too."""
_STEPS = 64
"""Work of an element of a formula: about as many operations in float64, on values and on their errors."""
_STEPS_OF_RESULT = 8
"""Work of an element of a changed result: both ends are moved or scaled, cast and compared."""


def wrong_formulas(name: str, given: dict[str, Any]) -> Iterator[tuple[Deviation[Any], Callable[[], Bounded]]]:
    """Wrong formulas of the formula `name` with the arguments `given`, and functions to their results."""
    arguments, table = FORMULAS[name]
    of = arguments(**given)
    for row in rows_of(table, of):
        yield row, partial(row.result, of)


def explain_formula(outcome: Outcome, wrong_stage: StageResult, limit: WorkLimit) -> list[Explanation]:
    """Changed formulas with bounds that contain every element of the output. The right formula's bound does not.

    The known wrong formulas of the stage come first. If none fits, the changes that every formula has are tried: of an
    operand, of the result (`MATRIX_CHANGES`), another tensor in place of an operand or of the result, a factor. A
    change is exact if at least `LEAST_SEPARATED` right elements lie outside its bounds.
    """
    formula = outcome.formula
    if formula is None or formula.stage != wrong_stage.stage:
        return []
    work = _STEPS * formula.found.numel()
    explanations: dict[str, Explanation] = {}
    known = wrong_formulas(formula.name, formula.given) if formula.name in FORMULAS else ()
    for row, compute in known:
        if limit.may_try(work) and (ends := _ends(formula, compute)) and _fits(formula.found, ends):
            explanations.setdefault(row.cause, _explanation(row, formula, ends))
    if (
        formula.name == "attention"
        and not explanations
        and limit.may_try(work)
        and _rows_scaled(formula.found, formula.given)
    ):
        return [Explanation.of(ROW_SUM, wrong_stage.stage)]
    if not explanations:
        for steps, row, ends in _changes(formula):
            if not limit.may_try(steps * formula.found.numel()):
                break
            if _fits(formula.found, ends):
                explanations.setdefault(row.cause, _explanation(row, formula, ends))
    return list(explanations.values())


def _explanation(row: Deviation[Any], formula: Formula, ends: Ends) -> Explanation:
    if formula.expected is None:
        return Explanation.of(row, formula.stage)
    right = formula.expected.value.reshape(formula.found.shape).to(formula.found.dtype)
    outside = ~_inside(right, ends) & right.isfinite()
    if int(outside.sum()) >= LEAST_SEPARATED:
        return Explanation.of(row, formula.stage)
    words = f"{row.sentence}; fewer than {LEAST_SEPARATED} elements{SEPARATE}kernel"
    return Explanation(row.cause, words, formula.stage, exact=False)


def _changes(formula: Formula) -> Iterator[tuple[int, Deviation[Any], Ends]]:
    """Changes that every formula has, with the steps for each element and the ends of their results."""
    if formula.compute is None or formula.expected is None:
        return
    if not bool(formula.found.any()):
        yield _STEPS_OF_RESULT, ZEROS, (formula.found, formula.found)
        return
    yield from _quantized_changes(formula)
    for name, operand in formula.operands.items():
        for row, changed in changed_matrices(OPERAND_CHANGES, operand, name, formula.batches):
            yield from _of_operands(row, formula, {name: changed})
    for name, operand in formula.operands.items():
        before = formula.quantized[name].before if name in formula.quantized else None
        for other, tensor in formula.others.items():
            tried = equal_bits(tensor, operand) or (before is not None and equal_bits(tensor, before))
            if tensor.dtype == operand.dtype and tensor.shape == operand.shape and not tried:
                yield from _of_operands(OTHER_OPERAND.bound(other, name), formula, {name: tensor})
    shape = formula.found.shape
    for other, tensor in formula.others.items():
        if tensor.numel() == formula.found.numel() and tensor.dtype == formula.found.dtype:
            yield _STEPS_OF_RESULT, OTHER_RESULT.bound(other), (tensor.reshape(shape), tensor.reshape(shape))
    low, high = (end.reshape(shape) for end in formula.expected.interval(torch.float32))
    rows = changed_matrices(MATRIX_CHANGES, low, "the result", formula.batches)
    for row, changed in rows:
        moved = row.result(high.reshape(-1, high.shape[-1])).reshape(shape)
        yield _STEPS_OF_RESULT, row, _cast((changed, moved), formula)
    for phrase, factor in _factors(formula).items():
        yield _STEPS_OF_RESULT, GAIN.bound("elements", phrase), _cast((low * factor, high * factor), formula)


ZEROS: Deviation[Any] = Deviation("outputs-zero", "all outputs are 0", "matrix")
OTHER_OPERAND: Deviation[Any] = Deviation("operand-exchanged", "{1} is replaced by {0}", "matrix")
OTHER_RESULT: Deviation[Any] = Deviation("result-of-other", "the result is {0}", "matrix")

NOT_QUANTIZED: Deviation[Any] = Deviation("operand-not-quantized", "{} not quantized", "matrix")
OTHER_SCALE: Deviation[Any] = Deviation("scale-exchanged", "{1} is decoded by {0}, not by its own scale", "matrix")


def _quantized_changes(formula: Formula) -> Iterator[tuple[int, Deviation[Any], Ends]]:
    """Quantized operands that the kernel takes before their quantization, one or all, or decodes by another scale."""
    before = {
        name: of.before for name, of in formula.quantized.items() if name in formula.operands and of.before is not None
    }
    for name, matrix in before.items():
        yield from _of_operands(NOT_QUANTIZED.bound(f"{name} is"), formula, {name: matrix})
    if len(before) > 1:
        yield from _of_operands(NOT_QUANTIZED.bound(f"{' and '.join(before)} are"), formula, before)
    for name, operand in formula.operands.items():
        own = formula.quantized.get(name)
        if own is None or own.scale == 0:
            continue
        factors = {"no scale": 1 / own.scale, "the inverse of its scale": 1 / own.scale**2} | {
            f"the scale of {other}": of.scale / own.scale for other, of in formula.quantized.items()
        }
        for phrase, factor in factors.items():
            if factor != 1:
                row = OTHER_SCALE.bound(phrase, name)
                yield from _of_operands(row, formula, {name: (operand * factor).to(operand.dtype)})


def _of_operands(
    row: Deviation[Any], formula: Formula, operands: dict[str, torch.Tensor]
) -> Iterator[tuple[int, Deviation[Any], Ends]]:
    assert formula.compute is not None
    if ends := _ends(formula, partial(formula.compute, **{**formula.operands, **operands})):
        yield _STEPS, row, ends


def _factors(formula: Formula) -> dict[str, torch.Tensor | float]:
    """Factors of the result, by phrases: small numbers, extents of the operands, the operands themselves."""
    found: dict[str, torch.Tensor | float] = {"2": 2.0, "0.5": 0.5}
    for extent in {extent for operand in formula.operands.values() for extent in operand.shape if extent > 2}:
        found |= {f"1/{extent}": 1.0 / extent, str(extent): float(extent), f"1/√{extent}": extent**-0.5}
    width = formula.found.shape[-1] if formula.found.dim() else 1
    for name, tensor in (formula.operands | formula.others).items():
        if tensor.shape == (width,) and tensor.is_floating_point():
            found[name] = tensor.float()
    return found


Ends = tuple[torch.Tensor, torch.Tensor]
"""Least and greatest element of each place, in the dtype of the result."""


def _ends(formula: Formula, compute: Callable[[], Bounded]) -> Ends | None:
    """Ends of the result. None if an element may overflow: it has no interval, and is no evidence."""
    expected = compute()
    if bool(expected.unbounded.any()):
        return None
    limits = Bounded(expected.value.reshape(formula.found.shape), expected.error.reshape(formula.found.shape)).limits(
        formula.found.dtype
    )
    exact = limits.exact
    return torch.where(exact, limits.expected, limits.lower), torch.where(exact, limits.expected, limits.upper)


def _cast(ends: Ends, formula: Formula) -> Ends:
    """Float32 ends, in any order, as ends of the dtype of the result."""
    low, high = (end.to(formula.found.dtype) for end in ends)
    return torch.minimum(low, high), torch.maximum(low, high)


def _inside(output: torch.Tensor, ends: Ends) -> torch.Tensor:
    low, high = ends
    return ((output >= low) & (output <= high)) | (output.isnan() & (low.isnan() | high.isnan()))


def _fits(output: torch.Tensor, ends: Ends) -> bool:
    """Whether every element lies in its interval. The sign of zero is free."""
    return bool(_inside(output, ends).all())


def _rows_scaled(output: torch.Tensor, given: dict[str, torch.Tensor]) -> bool:
    """Whether the outputs of every query and head lie in the intervals of float32 attention times a positive number,
    which is not 1 for some of them.

    One number per row is unknown, so a row with fewer than 8 outputs of a certain sign is no evidence.
    """
    q, k, v = (given[name] for name in "qkv")
    expected = weighted_mean(Softmax(scores(q, k), causal(q)), v, torch.float32)
    value, error = (part.transpose(1, 2).flatten(0, 2) for part in (expected.value, expected.error))
    found = output.double().reshape(value.shape) * value.sign()
    relative, absolute = half_ulp(output.dtype)
    rounding = found.abs() * 2 * relative + absolute
    certain = value.abs() > 2 * error
    least = ((found - rounding) / (value.abs() + error)).masked_fill(~certain, -torch.inf).amax(-1)
    most = ((found + rounding) / (value.abs() - error)).masked_fill(~certain, torch.inf).amin(-1)
    uncertain = (found.abs() - rounding <= most.unsqueeze(-1) * (value.abs() + error)) | certain
    if bool(((least <= 1) & (most >= 1)).all()):
        return False
    return bool(((least <= most) & (least > 0) & (certain.sum(-1) >= 8)).all() & uncertain.all())
