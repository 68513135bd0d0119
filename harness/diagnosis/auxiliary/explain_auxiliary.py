"""Diagnosis of operations that only move or rotate numbers: swizzle, transform, padding, delayed scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.rotation_interval import rotated_interval
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.auxiliary.delayed_scaling import deviating_histories, deviating_scales
from narrowgauge.harness.diagnosis.auxiliary.rotations import Ends, deviating_ends, deviating_rotations
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.quantize.scale_layouts import (
    SWIZZLE_READS,
    deviating_layouts,
    padding_not_zeroed,
    wrong_offsets,
)
from narrowgauge.harness.diagnosis.search.time_limit import TimeLimit
from narrowgauge.harness.operations.stages.outcome import Moved, Outcome
from narrowgauge.reference.quantize.delayed import update_scale
from narrowgauge.reference.quantize.sections import pad_sections
from narrowgauge.spec.arguments import check_rotation
from narrowgauge.spec.recipes import Recipe

Cause = tuple[str, str]
"""Name of a cause and its sentence."""
_ALIGNMENTS = (1, 8, 16, 32, 64, 128, 256)


def explain_auxiliary(outcome: Outcome, wrong_stage: StageResult, limit: TimeLimit) -> list[Explanation]:
    """Known deviations of an operation that moves, rotates or updates numbers, if they give the kernel's result."""
    moved = outcome.moved
    if moved is None:
        return []
    key = (moved.operation, wrong_stage.stage.removeprefix(moved.prefix))
    if key == ("transform", "output"):
        causes = _rotation(moved, wrong_stage.wrong_elements, limit)
    elif key in _CAUSE_FUNCTIONS:
        causes = _CAUSE_FUNCTIONS[key](moved)
    else:
        return []
    explanations: dict[str, Explanation] = {}
    for cause, sentence in causes:
        explanations.setdefault(cause, Explanation(cause, sentence, wrong_stage.stage, exact=True))
    return list(explanations.values())


def _kernel_tensor(moved: Moved, name: str) -> torch.Tensor:
    tensor = moved.found[name]
    assert tensor is not None
    return tensor


def _recipe(moved: Moved) -> Recipe:
    assert moved.recipe is not None
    return moved.recipe


def _matching_causes(
    kernel_tensor: torch.Tensor, deviations: Iterable[tuple[str, str, Callable[[], torch.Tensor]]]
) -> Iterator[Cause]:
    for cause, sentence, compute in deviations:
        if equal_bits(compute(), kernel_tensor):
            yield cause, sentence


# ---- swizzle ---------------------------------------------------------------------------------------------------------


def _layout(moved: Moved) -> Iterator[Cause]:
    scales, swizzled = moved.given["scales"], _kernel_tensor(moved, "swizzled")
    if padding_not_zeroed(swizzled, scales):
        yield "padding-not-zeroed", "bytes of the padding are not 0"
    for cause, sentence, bytes_ in deviating_layouts(scales):
        if torch.equal(bytes_, swizzled):
            yield cause, sentence


def _unswizzled(moved: Moved) -> Iterator[Cause]:
    """Linear scales that were read from a wrong layout."""
    swizzled, linear = _kernel_tensor(moved, "swizzled").flatten(), _kernel_tensor(moved, "linear")
    numbers = torch.arange(1, linear.numel() + 1, device=linear.device).view(linear.shape)
    for cause, sentence, places in deviating_layouts(numbers):
        positions = places.flatten().nonzero().flatten()
        read = torch.empty_like(linear).flatten()
        read[places.flatten()[positions] - 1] = swizzled[positions]
        if torch.equal(read.view(linear.shape), linear):
            yield cause, f"swizzled scales are read as such: {sentence}"
    for cause, sentence in SWIZZLE_READS.items():
        offsets = wrong_offsets(cause, linear.shape, linear.device)
        if offsets is not None and torch.equal(swizzled[offsets], linear):
            yield cause, sentence.format("the matrix")


# ---- transform -------------------------------------------------------------------------------------------------------


Fit = tuple[str, str, Callable[[], bool]]
"""Cause, sentence, and function to whether the deviation gives the result."""


def _rotation(moved: Moved, wrong: torch.Tensor | None, limit: TimeLimit) -> Iterator[Cause]:
    """Wrong rotations that give the result: tried first on the rows of the first wrong element."""
    x, output, recipe = moved.given["x"], _kernel_tensor(moved, "output"), _recipe(moved)
    rows = _tile_of_first_wrong(x, recipe, wrong)
    on_tile = _fitting_rotations(x[rows], output[rows], recipe, free=moved.free)
    on_all = _fitting_rotations(x, output, recipe, free=moved.free)
    for (cause, sentence, fits_tile), (_, _, fits_all) in zip(on_tile, on_all, strict=True):
        if limit.may_try() and fits_tile() and limit.may_verify(cause) and fits_all():
            yield cause, sentence


def _tile_of_first_wrong(x: torch.Tensor, recipe: Recipe, wrong: torch.Tensor | None) -> slice:
    """Rows with the first wrong element that a wrong rotation treats as it treats the whole matrix `x` (M, K).

    A rotation of columns rotates groups of rows. It applies only if M is a multiple of the group.
    """
    if wrong is None or not bool(wrong.any()):
        return slice(0, len(x))
    group = check_rotation(x, recipe).group
    height = 1 if len(x) % group else group
    start = int(wrong.any(1).nonzero()[0]) // height * height
    return slice(start, start + height)


def _fitting_rotations(x: torch.Tensor, output: torch.Tensor, recipe: Recipe, *, free: bool) -> Iterator[Fit]:
    """Wrong rotations of `x`. `free`: the output lies between the ends of all orders of summation."""
    if not free:
        for cause, sentence, compute in deviating_rotations(x, recipe):
            yield cause, sentence, partial(_gives, compute, output)
        return

    def rotate(matrix: torch.Tensor, rotation_recipe: Recipe) -> Ends:
        interval = rotated_interval(matrix, rotation_recipe)
        return interval.lower, interval.upper

    for cause, sentence, ends in deviating_ends(x, recipe, rotate):
        yield cause, sentence, partial(_contain, ends, output)


def _gives(compute: Callable[[], torch.Tensor], output: torch.Tensor) -> bool:
    return equal_bits(compute(), output)


def _contain(ends: Callable[[], Ends], output: torch.Tensor) -> bool:
    """Whether every output lies between its ends, or is NaN like the lower end."""
    low, high = ends()
    ordinals = ordinal.signed_float_ordinals(output)
    inside = (ordinals >= ordinal.signed_float_ordinals(low)) & (ordinals <= ordinal.signed_float_ordinals(high))
    return bool((inside | (output.isnan() & low.isnan())).all())


# ---- padding ---------------------------------------------------------------------------------------------------------


def _padding(moved: Moved) -> Iterator[Cause]:
    x, sizes, recipe = moved.given["x"], moved.given["sizes"].tolist(), _recipe(moved)
    padded, kernel_sizes = _kernel_tensor(moved, "padded"), _kernel_tensor(moved, "padded sizes").tolist()
    padded_sizes = [_round_up(size, recipe.row_alignment) for size in sizes]
    if kernel_sizes != padded_sizes:
        for rows in _ALIGNMENTS:
            if kernel_sizes == [_round_up(size, rows) for size in sizes]:
                yield f"alignment:{rows}", f"sections are padded to multiples of {rows}, not of {recipe.row_alignment}"
        return
    sections, starts = torch.split(x, sizes), [sum(padded_sizes[:number]) for number in range(len(padded_sizes))]
    rows_first, padding_first = torch.zeros_like(padded), torch.zeros_like(padded)
    rows_first[: len(x)] = x
    for section, start, rows in zip(sections, starts, padded_sizes, strict=True):
        padding_first[start + rows - len(section) : start + rows] = section
    if all(equal_bits(padded[start : start + len(part)], part) for start, part in zip(starts, sections, strict=True)):
        yield "padding-not-zeroed", "rows of the padding are not 0"
    if equal_bits(rows_first, padded):
        yield "sections-not-padded", "sections lie one behind the other, and all the padding behind them"
    padded_from_section_before = pad_sections(x, moved.given["sizes"], recipe)[0]
    padded_from_section_before[[start for start in starts[1:] if start < len(padded_from_section_before)]] = 0
    if equal_bits(padded_from_section_before, padded):
        yield "padding-wrong-section", "the first row of a section is taken for one of the section before: padding"
    if equal_bits(padding_first, padded):
        yield "padding-before-rows", "the padding of a section lies before its rows"


def _round_up(size: int, rows: int) -> int:
    return -(-size // rows) * rows


def _unpadding(moved: Moved) -> Iterator[Cause]:
    output = _kernel_tensor(moved, "output")
    if equal_bits(output, _kernel_tensor(moved, "padded output")[: len(output)]):
        yield "unpadding-first-rows", "the first rows are kept, those of the padding among them"


# ---- delayed scaling -------------------------------------------------------------------------------------------------


def _history(moved: Moved) -> Iterator[Cause]:
    inputs, kernel = moved.given, _kernel_tensor(moved, "history")
    of_sections = inputs.get("of sections", inputs["history"][:1])
    if len(of_sections) > 1:
        correct = update_scale(inputs["history"], inputs["scale"], _recipe(moved))[0]
        right = (correct == kernel).all(0)  # by tensor
        for number, cause, phrase in ((0, "amax-of-first-section", "first"), (-1, "amax-of-last-section", "last")):
            of_section = torch.cat([of_sections[number].unsqueeze(0), inputs["history"][1:]])
            updated = update_scale(of_section, inputs["scale"], _recipe(moved))[0]
            if not bool(right.all()) and equal_bits(torch.where(right, correct, updated), kernel):
                yield cause, f"the latest amax is that of the {phrase} section alone"
    yield from _matching_causes(kernel, deviating_histories(inputs["history"], inputs["scale"], _recipe(moved)))


def _scale(moved: Moved) -> Iterator[Cause]:
    inputs = moved.given
    yield from _matching_causes(
        _kernel_tensor(moved, "scale"), deviating_scales(inputs["history"], inputs["scale"], _recipe(moved))
    )


# ---- sums of columns -------------------------------------------------------------------------------------------------


def _column_sums(moved: Moved) -> Iterator[Cause]:
    """Sums of columns in the order of the rows (M, N), with each partial sum rounded to the dtype of the rows."""
    rows, dbias = moved.given["dy"], _kernel_tensor(moved, "dbias")
    if rows.dtype == torch.float32:
        return
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    if equal_bits(total, dbias):
        cause = "accumulator-fp16" if rows.dtype == torch.float16 else "accumulator-bf16"
        yield cause, "partial sums are rounded to the dtype of what they are sums of"


_CAUSE_FUNCTIONS: dict[tuple[str, str], Callable[[Moved], Iterator[Cause]]] = {
    ("swizzle", "layout"): _layout,
    ("swizzle", "unswizzle"): _unswizzled,
    ("pad", "padding"): _padding,
    ("pad", "unpadding"): _unpadding,
    ("update-scale", "history"): _history,
    ("update-scale", "scale"): _scale,
    ("sum", "dbias"): _column_sums,
}
