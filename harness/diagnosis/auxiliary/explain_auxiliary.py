"""Operations that only move or rotate: swizzle, transform, padding, histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from narrowgauge.harness.checks import ordinal
from narrowgauge.harness.checks.interval import rotated_interval
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.auxiliary.histories import deviating_histories, deviating_scales
from narrowgauge.harness.diagnosis.auxiliary.rotations import Ends, deviating_ends, deviating_rotations
from narrowgauge.harness.diagnosis.explanation import Explanation
from narrowgauge.harness.diagnosis.quantize.swizzles import deviating_layouts, padding_not_zeroed
from narrowgauge.harness.operations.stages.outcome import Moved, Outcome
from narrowgauge.reference.quantize.sections import pad_sections
from narrowgauge.spec.recipes import Recipe

Cause = tuple[str, str]
_ALIGNMENTS = (1, 8, 16, 32, 64, 128, 256)


def moving_explanations(outcome: Outcome, wrong: StageResult) -> list[Explanation]:
    """The known deviations of an operation that moves, rotates or updates that give what the kernel gave."""
    moved = outcome.moved
    find = None if moved is None else _FINDERS.get((moved.operation, wrong.stage.removeprefix(moved.prefix)))
    if moved is None or find is None:
        return []
    found: dict[str, Explanation] = {}
    for cause, sentence in find(moved):
        found.setdefault(cause, Explanation(cause, sentence, wrong.stage, exact=True))
    return list(found.values())


def _tensor(moved: Moved, name: str) -> torch.Tensor:
    tensor = moved.found[name]
    assert tensor is not None
    return tensor


def _recipe(moved: Moved) -> Recipe:
    assert moved.recipe is not None
    return moved.recipe


def same_floats(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two floating tensors have the same bits, a NaN being any NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = [t.contiguous().view(ordinal.INTEGER[t.dtype]) for t in (one, other)]
    return torch.equal(*bits) or bool(((bits[0] == bits[1]) | (one.isnan() & other.isnan())).all())


def _giving(given: torch.Tensor, deviations: Iterable[tuple[str, str, Callable[[], torch.Tensor]]]) -> Iterator[Cause]:
    for cause, sentence, make in deviations:
        if same_floats(make(), given):
            yield cause, sentence


# ---- swizzle ---------------------------------------------------------------------------------------------------------


def _layout(moved: Moved) -> Iterator[Cause]:
    scales, swizzled = moved.given["scales"], _tensor(moved, "swizzled")
    if padding_not_zeroed(swizzled, scales):
        yield "padding-not-zeroed", "bytes of the padding are not 0"
    for cause, sentence, bytes_ in deviating_layouts(scales):
        if torch.equal(bytes_, swizzled):
            yield cause, sentence


def _unswizzled(moved: Moved) -> Iterator[Cause]:
    """Bytes read as if they lay in a wrong layout."""
    swizzled, linear = _tensor(moved, "swizzled").flatten(), _tensor(moved, "linear")
    numbers = torch.arange(1, linear.numel() + 1, device=linear.device).view(linear.shape)
    for cause, sentence, places in deviating_layouts(numbers):
        at = places.flatten().nonzero().flatten()
        read = torch.empty_like(linear).flatten()
        read[places.flatten()[at] - 1] = swizzled[at]
        if torch.equal(read.view(linear.shape), linear):
            yield cause, f"swizzled scales are read as such: {sentence}"
    columns = linear.shape[1]
    row, column = (torch.arange(extent, device=linear.device) for extent in linear.shape)
    row = row.unsqueeze(1)
    tile = row // 128 * (columns // 4) + column // 4  # what is right has ⌈columns / 4⌉
    if columns % 4 and torch.equal(swizzled[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4], linear):
        yield "swizzle-columns-not-padded", "tiles of swizzled scales are counted by columns that are not padded"


# ---- transform -------------------------------------------------------------------------------------------------------


def _rotation(moved: Moved) -> Iterator[Cause]:
    x, recipe, output = moved.given["x"], _recipe(moved), _tensor(moved, "output")
    if not moved.free:
        yield from _giving(output, deviating_rotations(x, recipe))
        return

    def rotate(matrix: torch.Tensor, of: Recipe) -> Ends:
        interval = rotated_interval(matrix, of)
        return interval.lower, interval.upper

    at = ordinal.signed_floats(output)
    for cause, sentence, ends in deviating_ends(x, recipe, rotate):
        low, high = ends()
        inside = (at >= ordinal.signed_floats(low)) & (at <= ordinal.signed_floats(high))
        if bool((inside | (output.isnan() & low.isnan())).all()):
            yield cause, sentence


# ---- padding ---------------------------------------------------------------------------------------------------------


def _padding(moved: Moved) -> Iterator[Cause]:
    x, sizes, recipe = moved.given["x"], moved.given["sizes"].tolist(), _recipe(moved)
    padded, aligned = _tensor(moved, "padded"), _tensor(moved, "padded sizes").tolist()
    right = [_up(size, recipe.row_alignment) for size in sizes]
    if aligned != right:
        for rows in _ALIGNMENTS:
            if aligned == [_up(size, rows) for size in sizes]:
                yield f"alignment:{rows}", f"sections are padded to multiples of {rows}, not of {recipe.row_alignment}"
        return
    sections, starts = torch.split(x, sizes), [sum(right[:number]) for number in range(len(right))]
    together, before = torch.zeros_like(padded), torch.zeros_like(padded)
    together[: len(x)] = x
    for section, start, rows in zip(sections, starts, right, strict=True):
        before[start + rows - len(section) : start + rows] = section
    if all(same_floats(padded[start : start + len(part)], part) for start, part in zip(starts, sections, strict=True)):
        yield "padding-not-zeroed", "rows of the padding are not 0"
    if same_floats(together, padded):
        yield "sections-not-padded", "sections lie one behind the other, and all the padding behind them"
    without = pad_sections(x, moved.given["sizes"], recipe)[0]
    without[[start for start in starts[1:] if start < len(without)]] = 0
    if same_floats(without, padded):
        yield "padding-wrong-section", "the first row of a section is taken for one of the section before: padding"
    if same_floats(before, padded):
        yield "padding-before-rows", "the padding of a section lies before its rows"


def _up(size: int, rows: int) -> int:
    return -(-size // rows) * rows


def _unpadding(moved: Moved) -> Iterator[Cause]:
    output = _tensor(moved, "output")
    if same_floats(output, _tensor(moved, "padded output")[: len(output)]):
        yield "unpadding-first-rows", "the first rows are kept, those of the padding among them"


# ---- delayed scaling -------------------------------------------------------------------------------------------------


def _history(moved: Moved) -> Iterator[Cause]:
    given = moved.given
    yield from _giving(_tensor(moved, "history"), deviating_histories(given["history"], given["scale"], _recipe(moved)))


def _scale(moved: Moved) -> Iterator[Cause]:
    given = moved.given
    yield from _giving(_tensor(moved, "scale"), deviating_scales(given["history"], given["scale"], _recipe(moved)))


# ---- sums of columns -------------------------------------------------------------------------------------------------


def _column_sums(moved: Moved) -> Iterator[Cause]:
    """Of rows (M, N), in order of the rows, each partial sum rounded to the rows' dtype."""
    rows, found = moved.given["dy"], _tensor(moved, "dbias")
    if rows.dtype == torch.float32:
        return
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    if same_floats(total, found):
        narrow = "accumulator-fp16" if rows.dtype == torch.float16 else "accumulator-bf16"
        yield narrow, "partial sums are rounded to the dtype of what they are sums of"


_FINDERS: dict[tuple[str, str], Callable[[Moved], Iterator[Cause]]] = {
    ("swizzle", "layout"): _layout,
    ("swizzle", "unswizzle"): _unswizzled,
    ("transform", "output"): _rotation,
    ("pad", "padding"): _padding,
    ("pad", "unpadding"): _unpadding,
    ("update-scale", "history"): _history,
    ("update-scale", "scale"): _scale,
    ("sum", "dbias"): _column_sums,
}
