"""Mistakes in the amax of a tensor and in the tensor scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch

from narrowgauge.harness.checks.bit_equality import different_bits
from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import format_ranges
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.scaling import FLT_MAX, divide, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.spec.recipes import Recipe

_AMAX = frozenset({"amax"})
SCALES_FOR_ZERO_AMAX = {"the largest number": FLT_MAX, "2^127": 2.0**127, "infinite": inf, "0": 0.0}
"""Wrong scales for an amax of 0, where the recipe prescribes 1."""
_MODULI = (8, 16, 32, 64, 128, 256)


def tensor_scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor's amax and scale, the most plausible first. None if the recipe has no tensor scale."""
    if recipe.tensor_scale == "none":
        return
    yield _changed_input_deviation(
        "amax-without-fabs", "of the elements, not of their magnitudes", lambda x: x.clamp(min=0)
    )
    if recipe.nan == "ignore":
        yield QuantizeDeviation(
            "nan-spread", "the amax of the tensor is NaN where an element is", _AMAX,
            overrides={"amax": lambda replay: _compute_amax(replay.x, replace(replay.recipe, nan="propagate"))},
        )  # fmt: skip
    else:
        yield QuantizeDeviation(
            "nan-dropped", "the amax of the tensor is without elements that are NaN", _AMAX,
            overrides={"amax": lambda replay: _compute_amax(replay.x, replace(replay.recipe, nan="ignore"))},
        )  # fmt: skip
    yield _changed_input_deviation(
        "infinity-dropped", "without elements that are infinite", lambda x: x.masked_fill(x.isinf(), 0)
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield QuantizeDeviation(
            f"amax-through-{name}", f"the amax of the tensor is rounded to {name}", _AMAX,
            overrides={"amax": partial(_rounded_amax, dtype)}, implausible=True,
        )  # fmt: skip
    if recipe.granularity == "row":
        yield QuantizeDeviation(
            "amax-of-tensor", "the amax of every row is that of the tensor", _AMAX,
            overrides={"amax": _tensor_amax_for_rows},
        )  # fmt: skip
    if recipe.tensor_scale != "given":
        yield from _tensor_scale_deviations(recipe)


def _compute_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Amax of the tensor or of each row, by the granularity of the recipe."""
    blocks = block_amaxes(x, recipe)
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _tensor_amax_for_rows(replay: Replay) -> torch.Tensor:
    row_amaxes = _compute_amax(replay.x, replay.recipe)
    return row_amaxes.amax().expand(row_amaxes.shape).contiguous()


def _changed_input_deviation(
    cause: str, sentence: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"the amax of the tensor is {sentence}", _AMAX,
        overrides={"amax": lambda replay: _compute_amax(change(replay.x), replay.recipe)},
    )  # fmt: skip


def _tensor_scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor scale. Later stages show them if the kernel does not report the tensor scale."""
    changed_stages = frozenset({"tensor scale", "scales", "codes"})
    forms: list[tuple[str, str, Override]] = []
    if recipe.tensor_scale != "amax/max":
        max_product = recipe.max_product
        forms += [
            (f"tensor-scale-order:{expression}", f"is {expression}", _inside_limits(form))
            for expression, form in (
                ("1/(amax/max)", lambda amax: divide(1.0, amax / torch.full_like(amax, max_product))),
                ("1/(amax*(1/max))", lambda amax: divide(1.0, amax * (1.0 / max_product))),
                ("(max/6)/amax*6", lambda amax: divide(max_product / recipe.element.max, amax) * recipe.element.max),
            )
        ]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        forms.append((
            f"tensor-scale-through-{name}", f"is rounded to {name}",
            partial(_rounded_scale, dtype),
        ))  # fmt: skip
    if recipe.tensor_limit in ("1-for-nan", "finite"):
        forms += [
            ("zero-block-not-one", f"is {phrase} for an amax of 0, not 1", partial(_scale_for_zero_amax, number))
            for phrase, number in SCALES_FOR_ZERO_AMAX.items()
        ]
    forms.append(("tensor-scale-inverted", "is its inverse", lambda replay: divide(1.0, _correct_scale(replay))))
    for cause, phrase, override in forms:
        yield QuantizeDeviation(
            cause, f"the scale of the tensor {phrase}", changed_stages, overrides={"tensor scale": override},
            implausible=True,
        )  # fmt: skip


def _scale_for_zero_amax(number: float, replay: Replay) -> torch.Tensor:
    return torch.where(_replay_amax(replay) == 0, number, _correct_scale(replay))


def _rounded_amax(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return _compute_amax(replay.x, replay.recipe).to(dtype).float()


def _rounded_scale(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return _correct_scale(replay).to(dtype).float()


def _replay_amax(replay: Replay) -> torch.Tensor:
    assert replay.amax is not None
    return replay.amax


def _correct_scale(replay: Replay) -> torch.Tensor:
    return tensor_scale(_replay_amax(replay), replay.recipe, replay.x.dtype)


def _inside_limits(form: Callable[[torch.Tensor], torch.Tensor]) -> Override:
    """Tensor scale by `form` of the amax. If the correct scale is at a limit, the correct scale."""

    def override(replay: Replay) -> torch.Tensor:
        amax, correct = _replay_amax(replay), _correct_scale(replay)
        scale = form(amax)
        return torch.where((amax > 0) & scale.isfinite() & (correct < torch.finfo(torch.float32).max), scale, correct)

    return override


def observed_amax_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Explanations of the kernel's amaxes. Too small: the amax of some elements only. Too large: a stale amax."""
    above_amax = []
    smaller = larger = True
    for matrix in matrices:
        wrong = wrong_amaxes(matrix)
        if not bool(wrong.any()):
            continue
        magnitude = matrix.subject.x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
        kernel_amax, correct = matrix.kernel_stages["amax"].view(-1, 1), _correct_amax(matrix).view(-1, 1)
        elements = magnitude if len(kernel_amax) > 1 else magnitude.view(1, -1)
        smaller &= bool(((elements == kernel_amax).any(1) & (kernel_amax < correct).flatten())[wrong].all())
        larger &= bool((kernel_amax > correct).flatten()[wrong].all())
        above_amax.append(magnitude > kernel_amax)
    if not above_amax:
        return
    if smaller:
        sentence = "the amax of the tensor is that of some of its elements; those above it are"
        yield QuantizeDeviation(
            "amax-partial", f"{sentence} {describe_place(above_amax)}", _AMAX,
            overrides={"amax": lambda replay: replay.kernel_matrix.kernel_stages["amax"]},
        )  # fmt: skip
    if larger:
        yield QuantizeDeviation(
            "amax-stale", "the amax of the tensor is larger than every magnitude: another tensor's, or one from before",
            _AMAX, overrides={"amax": lambda replay: replay.kernel_matrix.kernel_stages["amax"]}, exact=False,
        )  # fmt: skip


def _correct_amax(matrix: KernelMatrix) -> torch.Tensor:
    return _compute_amax(matrix.subject.x, matrix.subject.recipe)


def wrong_amaxes(matrix: KernelMatrix) -> torch.Tensor:
    """bool mask (1,) or (M,) of the kernel's wrong amaxes."""
    return different_bits(matrix.kernel_stages["amax"], _correct_amax(matrix))


def describe_place(masks: Sequence[torch.Tensor]) -> str:
    """Number and place of the True elements of several masks: `3, all at column 8-15 modulo 16`."""
    rows = torch.cat([mask.nonzero()[:, 0] for mask in masks])
    columns = torch.cat([mask.nonzero()[:, 1] for mask in masks])
    extents = tuple(max(mask.shape[axis] for mask in masks) for axis in (0, 1))
    count = f"{len(rows)}"
    if len(rows) == 1:
        return f"{count}, at row {int(rows[0])}, column {int(columns[0])}"
    for name, index, extent in (("column", columns, extents[1]), ("row", rows, extents[0])):
        for modulus in _MODULI:
            if modulus >= extent:
                break
            phases = torch.bincount(index % modulus, minlength=modulus).bool()
            if int(phases.sum()) <= modulus // 2:
                return f"{count}, all at {name} {format_ranges(phases)} modulo {modulus}"
        first, last = int(index.amin()), int(index.amax())
        if last - first < extent // 2:
            return f"{count}, all in {name}s {first} to {last} of {extent}"
    return f"{count} anywhere"
