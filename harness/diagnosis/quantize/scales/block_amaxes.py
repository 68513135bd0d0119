"""Mistakes in the amax of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.reference.numbers.blocks import over_tiles, pad_columns, tensor_amax
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E4M3, FP32
from narrowgauge.spec.recipe import NanPolicy
from narrowgauge.spec.recipes import Recipe


def block_amax_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's block amaxes, the most plausible first."""
    if recipe.spans_k:
        return
    height, width = recipe.block
    yield _block_amax_deviation(
        "block-amax-without-fabs", "of the elements, not of their magnitudes", _amaxes_of_changed(_positive)
    )
    if recipe.scale is E4M3:
        yield _block_amax_deviation(
            "block-amax-without-fabs", "of the elements, negative where all are", _signed_maxima
        )
    yield _block_amax_deviation(
        "block-amax-half", f"of the first {width // 2} elements of {width}", _amaxes_of_columns(slice(0, width // 2))
    )
    yield _block_amax_deviation(
        "block-amax-half", f"of the last {width // 2} elements of {width}", _amaxes_of_columns(slice(width // 2, width))
    )
    yield _block_amax_deviation("block-amax-half", "of the even elements", _amaxes_of_columns(slice(0, None, 2)))
    yield _block_amax_deviation("block-amax-half", "of the odd elements", _amaxes_of_columns(slice(1, None, 2)))
    yield _block_amax_deviation(
        "tail-dropped", f"of whole blocks, 0 of a last one of fewer than {width} elements",
        _amaxes_of_changed(partial(without_tail, width)),
    )  # fmt: skip
    yield _block_amax_deviation(
        "block-amax-spans-two", f"of two blocks together, {2 * width} elements", _amaxes_of_block_pairs
    )
    if height > 1:
        if recipe.scale is not FP32:
            yield _block_amax_deviation(
                "tiles-ignored", f"of {width} elements of a row, not of a tile", _amaxes_without_tiles
            )
        yield _block_amax_deviation("block-amax-first-row", "of the first row of a tile", _amaxes_of_rows(slice(0, 1)))
        for phrase, rows in (("first", slice(0, height // 2)), ("last", slice(height // 2, height))):
            yield _block_amax_deviation(
                "block-amax-half", f"of the {phrase} {height // 2} rows of a tile", _amaxes_of_rows(rows)
            )
    if recipe.nan == "ignore":
        yield _block_amax_deviation(
            "nan-spread",
            "NaN where an element is",
            lambda replay: block_amaxes(replay.x, _with_nan_policy(replay, "propagate")),
        )
    else:
        yield _block_amax_deviation(
            "nan-dropped",
            "without elements that are NaN",
            lambda replay: block_amaxes(replay.x, _with_nan_policy(replay, "ignore")),
        )
    yield _block_amax_deviation("infinity-dropped", "without elements that are infinite", _amaxes_of_changed(_finite))
    yield _block_amax_deviation("subnormal-amaxes-flushed", "0 where they are subnormal", _without_subnormal_amaxes)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _block_amax_deviation(
            f"block-amax-through-{name}", f"rounded to {name}",
            partial(_rounded_amaxes, dtype),
        )  # fmt: skip
    yield _block_amax_deviation("block-amax-of-tensor", "of the whole tensor", _tensor_amax, row_local=False)


def _block_amax_deviation(
    cause: str, sentence: str, override: Override, *, row_local: bool = True
) -> QuantizeDeviation:
    # FP8 kernels scale elements by the encode scale, which follows from the amax, or by the stored inverse of it.
    return QuantizeDeviation(
        cause, f"block amaxes: {sentence}", frozenset({"scales"}), overrides={"blocks": override},
        optional_stages=frozenset({"amax", "codes"}), row_local=row_local,
    )  # fmt: skip


def _with_nan_policy(replay: Replay, policy: NanPolicy) -> Recipe:
    return replace(replay.recipe, nan=policy)


def _amaxes_of_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Override:
    return lambda replay: block_amaxes(change(replay.x), replay.recipe)


def without_tail(width: int, x: torch.Tensor) -> torch.Tensor:
    """`x` (M, K) with zeros behind the last whole block. Raises ValueError if all columns are in whole blocks."""
    tail = x.shape[1] % width
    if tail == 0:
        raise ValueError(f"{x.shape[1]} columns are whole blocks of {width}")
    cut = x.clone()
    cut[:, -tail:] = 0
    return cut


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x.isinf(), 0)


def _signed_maxima(replay: Replay) -> torch.Tensor:
    width = replay.recipe.block[1]
    values = pad_columns(replay.x.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), width)
    blocks = values.view(values.shape[0], -1, width).amax(2)
    return over_tiles(blocks, replay.recipe.block[0])[:: replay.recipe.stored_rows]


def _without_subnormal_amaxes(replay: Replay) -> torch.Tensor:
    amaxes = block_amaxes(replay.x, replay.recipe)
    return amaxes.masked_fill(amaxes < torch.finfo(torch.float32).smallest_normal, 0)


def _rounded_amaxes(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return block_amaxes(replay.x, replay.recipe).to(dtype).float()


def _amaxes_without(
    function: Callable[[torch.Tensor, Recipe, torch.Tensor], torch.Tensor], skipped: torch.Tensor, replay: Replay
) -> torch.Tensor:
    return function(replay.x, replay.recipe, skipped)


def without_lanes(x: torch.Tensor, recipe: Recipe, lanes: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) that skip the columns of a block in the mask `lanes`, bool (width,)."""
    count = -(-x.shape[1] // len(lanes))
    return block_amaxes(x.masked_fill(lanes.to(x.device).repeat(count)[: x.shape[1]], 0), recipe)


def _amaxes_of_columns(lanes: slice) -> Override:
    def blocks(replay: Replay) -> torch.Tensor:
        skipped = torch.ones(replay.recipe.block[1], dtype=torch.bool)
        skipped[lanes] = False
        return without_lanes(replay.x, replay.recipe, skipped)

    return blocks


def without_rows(x: torch.Tensor, recipe: Recipe, rows: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) that skip the rows of a tile in the mask `rows`, bool (height,)."""
    count = -(-x.shape[0] // len(rows))
    return block_amaxes(x.masked_fill(rows.to(x.device).repeat(count)[: x.shape[0]].unsqueeze(1), 0), recipe)


def _amaxes_of_rows(rows: slice) -> Override:
    def blocks(replay: Replay) -> torch.Tensor:
        skipped = torch.ones(replay.recipe.block[0], dtype=torch.bool)
        skipped[rows] = False
        return without_rows(replay.x, replay.recipe, skipped)

    return blocks


def _amaxes_of_block_pairs(replay: Replay) -> torch.Tensor:
    blocks = block_amaxes(replay.x, replay.recipe)
    pairs = pad_columns(blocks, 2).view(len(blocks), -1, 2).amax(2)
    return pairs.repeat_interleave(2, 1)[:, : blocks.shape[1]]


def _amaxes_without_tiles(replay: Replay) -> torch.Tensor:
    return block_amaxes(replay.x, replace(replay.recipe, block=(1, replay.recipe.block[1])))


def _tensor_amax(replay: Replay) -> torch.Tensor:
    blocks = block_amaxes(replay.x, replay.recipe)
    return tensor_amax(blocks).expand(blocks.shape).contiguous()


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
        name = format_ranges(skipped)
        yield _block_amax_deviation(
            f"block-amax-skips:{name}", f"of all elements but {name} of {width}",
            partial(_amaxes_without, without_lanes, skipped),
        )  # fmt: skip
    for skipped in _candidate_masks(rows) if height > 1 else ():
        name = format_ranges(skipped)
        yield _block_amax_deviation(
            f"block-amax-skips:row-{name}", f"of all rows of a tile but {name} of {height}",
            partial(_amaxes_without, without_rows, skipped),
        )  # fmt: skip


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
