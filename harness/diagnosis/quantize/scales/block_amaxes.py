"""Mistakes in the amax of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements.roundings import NARROW, POWERS, flush, narrowed, power_of_two
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.numbers.blocks import over_tiles, pad_columns, tensor_amax
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E4M3, E8M0, FP32
from narrowgauge.spec.recipes import Recipe


def without_tail(width: int, x: torch.Tensor) -> torch.Tensor:
    """`x` (M, K) with zeros behind the last whole block. Raises ValueError if all columns are in whole blocks."""
    tail = x.shape[1] % width
    if tail == 0:
        raise ValueError(f"{x.shape[1]} columns are whole blocks of {width}")
    cut = x.clone()
    cut[:, -tail:] = 0
    return cut


def _of(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Replay], torch.Tensor]:
    return lambda r: block_amaxes(change(r.x), r.recipe)


def _signed_maxima(r: Replay) -> torch.Tensor:
    width = r.recipe.block[1]
    values = pad_columns(r.x.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), width)
    blocks = values.view(values.shape[0], -1, width).amax(2)
    return over_tiles(blocks, r.recipe.block[0])[:: r.recipe.stored_rows]


def without_lanes(x: torch.Tensor, recipe: Recipe, lanes: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) that skip the columns of a block in the mask `lanes`, bool (width,)."""
    count = -(-x.shape[1] // len(lanes))
    return block_amaxes(x.masked_fill(lanes.to(x.device).repeat(count)[: x.shape[1]], 0), recipe)


def without_rows(x: torch.Tensor, recipe: Recipe, rows: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) that skip the rows of a tile in the mask `rows`, bool (height,)."""
    count = -(-x.shape[0] // len(rows))
    return block_amaxes(x.masked_fill(rows.to(x.device).repeat(count)[: x.shape[0]].unsqueeze(1), 0), recipe)


def _of_part(part: tuple[int, slice, int], r: Replay) -> torch.Tensor:
    """Block amaxes of a part of the columns (axis 1) or of the rows (axis 0) of each block."""
    axis, kept, _ = part
    skipped = torch.ones(r.recipe.block[axis], dtype=torch.bool)
    skipped[kept] = False
    return (without_lanes if axis else without_rows)(r.x, r.recipe, skipped)


def _half_columns(recipe: Recipe) -> dict[str, tuple[int, slice, int]]:
    width = recipe.block[1]
    half = width // 2
    return {
        f"first {half} elements of {width}": (1, slice(0, half), width),
        f"last {half} elements of {width}": (1, slice(half, width), width),
        "even elements": (1, slice(0, None, 2), width), "odd elements": (1, slice(1, None, 2), width),
    }  # fmt: skip


def _half_rows(recipe: Recipe) -> dict[str, tuple[int, slice, int]]:
    height = recipe.block[0]
    half = height // 2
    return {
        f"first {half} rows of a tile": (0, slice(0, half), height),
        f"last {half} rows of a tile": (0, slice(half, height), height),
    }


def _width(factor: int) -> Callable[[Recipe], dict[str, int]]:
    return lambda recipe: {str(factor * recipe.block[1]): recipe.block[1]}


def _of_block_pairs(_: int, r: Replay) -> torch.Tensor:
    pairs = pad_columns(r.blocks, 2).view(len(r.blocks), -1, 2).amax(2)
    return pairs.repeat_interleave(2, 1)[:, : r.blocks.shape[1]]


def _has_tiles(recipe: Recipe) -> bool:
    return recipe.block[0] > 1


BLOCK_AMAXES: tuple[QuantizeDeviation, ...] = (
    Deviation("block-amax-without-fabs", "block amaxes: of the elements, not of their magnitudes", "blocks",
              _of(lambda x: x.clamp(min=0))),
    Deviation("block-amax-without-fabs", "block amaxes: of the elements, negative where all are", "blocks",
              _signed_maxima, when=lambda recipe: recipe.scale is E4M3),
    Deviation("block-amax-half", "block amaxes: of the {}", "blocks", _of_part, _half_columns),
    Deviation("block-amax-spans-two", "block amaxes: of two blocks together, {} elements", "blocks", _of_block_pairs,
              _width(2)),
    Deviation("tiles-ignored", "block amaxes: of {} elements of a row, not of a tile", "blocks",
              lambda width, r: block_amaxes(r.x, replace(r.recipe, block=(1, width))), _width(1),
              lambda recipe: _has_tiles(recipe) and recipe.scale is not FP32),
    Deviation("block-amax-first-row", "block amaxes: of the first row of a tile", "blocks",
              lambda r: _of_part((0, slice(0, 1), 1), r), when=_has_tiles),
    Deviation("block-amax-half", "block amaxes: of the {}", "blocks", _of_part, _half_rows, _has_tiles),
    Deviation("nan-spread", "block amaxes: NaN where an element is", "blocks",
              lambda r: block_amaxes(r.x, replace(r.recipe, nan="propagate")),
              when=lambda recipe: recipe.nan == "ignore"),
    Deviation("nan-dropped", "block amaxes: without elements that are NaN", "blocks",
              lambda r: block_amaxes(r.x, replace(r.recipe, nan="ignore")),
              when=lambda recipe: recipe.nan != "ignore"),
    Deviation("infinity-dropped", "block amaxes: without elements that are infinite", "blocks",
              _of(lambda x: x.masked_fill(x.isinf(), 0))),
    Deviation("subnormal-amaxes-flushed", "block amaxes: 0 where they are subnormal", "blocks",
              lambda r: flush(r.blocks)),
    Deviation("block-amax-through-{}", "block amaxes: rounded to {}", "blocks", narrowed(lambda r: r.blocks), NARROW),
    Deviation("block-amax-exponent:{}", "block amaxes: rounded {} to a power of two", "blocks",
              lambda direction, r: power_of_two(direction, r.blocks), POWERS, lambda recipe: recipe.scale is not E8M0),
    Deviation("block-amax-of-tensor", "block amaxes: of the whole tensor", "blocks",
              lambda r: tensor_amax(r.blocks).expand(r.blocks.shape).contiguous(), row_local=False),
)  # fmt: skip
"""Wrong block amaxes of a recipe whose blocks do not span K."""
TAIL_DROPPED: QuantizeDeviation = Deviation(
    "tail-dropped", "block amaxes: of whole vectors of {} elements, without a shorter last one of a row", "blocks",
    lambda width, r: block_amaxes(without_tail(width, r.x), r.recipe),
)  # fmt: skip
SKIPPED_LANES: QuantizeDeviation = Deviation(
    "block-amax-skips:{}", "block amaxes: of all elements but {0} of {1[1]}", "blocks",
    lambda skipped, r: without_lanes(r.x, r.recipe, skipped[0]),
)  # fmt: skip
SKIPPED_ROWS: QuantizeDeviation = Deviation(
    "block-amax-skips:row-{}", "block amaxes: of all rows of a tile but {0} of {1[1]}", "blocks",
    lambda skipped, r: without_rows(r.x, r.recipe, skipped[0]),
)  # fmt: skip


def dropped_tail_deviations(matrix: KernelMatrix) -> Iterator[QuantizeDeviation]:
    """Block amaxes without the columns behind the last whole vector: a deviation for each number of columns."""
    recipe, columns = matrix.subject.recipe, matrix.subject.matrix.shape[1]
    largest = 256 if recipe.spans_k else recipe.block[1]
    widths = [largest >> shift for shift in range(largest.bit_length() - 1)]
    for tail in dict.fromkeys(columns % width for width in widths if columns % width):
        alike = [width for width in widths if columns % width == tail]
        yield TAIL_DROPPED.bound(" or ".join(map(str, alike)), alike[0])


def skipped_lane_deviations(
    matrices: Sequence[KernelMatrix], wrong: Sequence[torch.Tensor]
) -> Iterator[QuantizeDeviation]:
    """Block amaxes that skip lanes: candidates are the lanes that hold the amax of a block with a wrong scale.

    `wrong`: for each matrix the mask of wrong scales. A skipped lane changes the amax of a block only if the amax was
    in this lane, so the wrong scales show the skipped lanes. A replay confirms or refutes each candidate.
    """
    recipe = matrices[0].subject.recipe if matrices else None
    if recipe is None or recipe.spans_k:
        return
    height, width = recipe.block
    lanes = torch.zeros(width, dtype=torch.bool)
    rows = torch.zeros(height, dtype=torch.bool)
    for matrix, mask in zip(matrices, wrong, strict=True):
        columns, down = _amax_positions(matrix, mask)
        lanes |= torch.bincount(columns, minlength=width)[:width].bool().cpu()
        rows |= torch.bincount(down, minlength=height)[:height].bool().cpu()
    for skipped in _candidate_masks(lanes):
        yield SKIPPED_LANES.bound(format_ranges(skipped), (skipped, width))
    for skipped in _candidate_masks(rows) if height > 1 else ():
        yield SKIPPED_ROWS.bound(format_ranges(skipped), (skipped, height))


def _amax_positions(matrix: KernelMatrix, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and rows, inside their block, of the elements that are the amax of a block with a wrong scale."""
    recipe, x = matrix.subject.recipe, matrix.subject.x
    height, width = recipe.block
    stored_rows = recipe.stored_rows
    in_wrong_block = mask.repeat_interleave(stored_rows, 0)[: x.shape[0]].repeat_interleave(width, 1)[:, : x.shape[1]]
    amax = matrix.subject.blocks.repeat_interleave(stored_rows, 0)[: x.shape[0]].repeat_interleave(width, 1)
    row, column = (in_wrong_block & (x.float().abs() == amax[:, : x.shape[1]])).nonzero(as_tuple=True)
    return column % width, row % height


def _candidate_masks(skipped: torch.Tensor) -> Iterator[torch.Tensor]:
    """Masks of skipped lanes: observed lanes, all lanes between them, aligned runs around them, all from the first."""
    count = len(skipped)
    if not bool(skipped.any()) or bool(skipped.all()):
        return
    candidates = [skipped]
    positions = skipped.nonzero().flatten()
    first, last = int(positions[0]), int(positions[-1])
    spans = [(first, last + 1)]
    size = 1
    while size < count:
        start = first // size * size
        if last < start + size:
            spans.append((start, start + size))
        size *= 2
    spans.append((first, count))
    for start, stop in spans:
        candidate = torch.zeros_like(skipped)
        candidate[start:stop] = True
        if not bool(candidate.all()) and not any(torch.equal(candidate, previous) for previous in candidates):
            candidates.append(candidate)
    yield from candidates


def format_ranges(mask: torch.Tensor) -> str:
    """Indices of the True elements of a mask (N,): `3`, `8-15`, `0,2,4-6`."""
    ranges: list[list[int]] = []
    for number in mask.nonzero().flatten().tolist():
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
