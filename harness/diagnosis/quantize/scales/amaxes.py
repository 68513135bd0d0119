"""What kernels find in place of the largest magnitude of a block, and of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Hook, QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.reference.numbers.blocks import over_tiles, pad_columns, tensor_amax
from narrowgauge.reference.quantize.steps import block_amaxes
from narrowgauge.spec.formats import E4M3, FP32
from narrowgauge.spec.recipe import NanPolicy
from narrowgauge.spec.recipes import Recipe


def block_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's block amaxes, the most plausible first."""
    if recipe.whole:
        return
    height, width = recipe.block
    yield _of("block-amax-without-fabs", "of the elements, not of their magnitudes", _of_x(_positive))
    if recipe.scale is E4M3:
        yield _of("block-amax-without-fabs", "of the elements, negative where all are", _largest)
    yield _of("block-amax-half", f"of the first {width // 2} elements of {width}", _kept(slice(0, width // 2)))
    yield _of("block-amax-half", f"of the last {width // 2} elements of {width}", _kept(slice(width // 2, width)))
    yield _of("block-amax-half", "of the even elements", _kept(slice(0, None, 2)))
    yield _of("block-amax-half", "of the odd elements", _kept(slice(1, None, 2)))
    yield _of(
        "tail-dropped", f"of whole blocks, 0 of a last one of fewer than {width} elements",
        _of_x(partial(without_tail, width)),
    )  # fmt: skip
    yield _of("block-amax-spans-two", f"of two blocks together, {2 * width} elements", _pairs)
    if height > 1:
        if recipe.scale is not FP32:
            yield _of("tiles-ignored", f"of {width} elements of a row, not of a tile", _ignored)
        yield _of("block-amax-first-row", "of the first row of a tile", _kept_rows(slice(0, 1)))
        for words, rows in (("first", slice(0, height // 2)), ("last", slice(height // 2, height))):
            yield _of("block-amax-half", f"of the {words} {height // 2} rows of a tile", _kept_rows(rows))
    if recipe.nan == "ignore":
        yield _of("nan-spread", "NaN where an element is", lambda run: block_amaxes(run.x, _nan(run, "propagate")))
    else:
        yield _of("nan-dropped", "without elements that are NaN", lambda run: block_amaxes(run.x, _nan(run, "ignore")))
    yield _of("infinity-dropped", "without elements that are infinite", _of_x(_finite))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield _of(
            f"block-amax-through-{name}", f"rounded to {name}",
            partial(_through, dtype),
        )  # fmt: skip
    yield _of("block-amax-of-tensor", "of the whole tensor", _of_all, local=False)


def _of(cause: str, sentence: str, hook: Hook, *, local: bool = True) -> QuantizeDeviation:
    # FP8 may scale elements by the encode scale itself, which follows from the amax, or by the inverse that it stores.
    return QuantizeDeviation(
        cause, f"block amaxes: {sentence}", frozenset({"scales"}), hooks={"blocks": hook},
        lenient=frozenset({"amax", "codes"}), local=local,
    )  # fmt: skip


def _nan(run: Run, policy: NanPolicy) -> Recipe:
    return replace(run.recipe, nan=policy)


def _of_x(change: Callable[[torch.Tensor], torch.Tensor]) -> Hook:
    return lambda run: block_amaxes(change(run.x), run.recipe)


def without_tail(width: int, x: torch.Tensor) -> torch.Tensor:
    """`x` (M, K) with zeros for the columns behind the last whole block. Raises ValueError where there are none."""
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


def _largest(run: Run) -> torch.Tensor:
    width = run.recipe.block[1]
    values = pad_columns(run.x.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), width)
    blocks = values.view(values.shape[0], -1, width).amax(2)
    return over_tiles(blocks, run.recipe.block[0])[:: run.recipe.stored_rows]


def _through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return block_amaxes(run.x, run.recipe).to(dtype).float()


def _without(
    find: Callable[[torch.Tensor, Recipe, torch.Tensor], torch.Tensor], skipped: torch.Tensor, run: Run
) -> torch.Tensor:
    return find(run.x, run.recipe, skipped)


def without_lanes(x: torch.Tensor, recipe: Recipe, lanes: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) without some elements of every row of a block: `lanes`, bool (width,)."""
    count = -(-x.shape[1] // len(lanes))
    return block_amaxes(x.masked_fill(lanes.to(x.device).repeat(count)[: x.shape[1]], 0), recipe)


def _kept(lanes: slice) -> Hook:
    def blocks(run: Run) -> torch.Tensor:
        skipped = torch.ones(run.recipe.block[1], dtype=torch.bool)
        skipped[lanes] = False
        return without_lanes(run.x, run.recipe, skipped)

    return blocks


def without_rows(x: torch.Tensor, recipe: Recipe, rows: torch.Tensor) -> torch.Tensor:
    """Block amaxes of `x` (M, K) without some rows of every tile: `rows`, bool (height,)."""
    count = -(-x.shape[0] // len(rows))
    return block_amaxes(x.masked_fill(rows.to(x.device).repeat(count)[: x.shape[0]].unsqueeze(1), 0), recipe)


def _kept_rows(rows: slice) -> Hook:
    def blocks(run: Run) -> torch.Tensor:
        skipped = torch.ones(run.recipe.block[0], dtype=torch.bool)
        skipped[rows] = False
        return without_rows(run.x, run.recipe, skipped)

    return blocks


def _pairs(run: Run) -> torch.Tensor:
    blocks = block_amaxes(run.x, run.recipe)
    pairs = pad_columns(blocks, 2).view(len(blocks), -1, 2).amax(2)
    return pairs.repeat_interleave(2, 1)[:, : blocks.shape[1]]


def _ignored(run: Run) -> torch.Tensor:
    return block_amaxes(run.x, replace(run.recipe, block=(1, run.recipe.block[1])))


def _of_all(run: Run) -> torch.Tensor:
    blocks = block_amaxes(run.x, run.recipe)
    return tensor_amax(blocks).expand(blocks.shape).contiguous()


def skipped_lanes(found: Sequence[Evidence], wrong: Sequence[torch.Tensor]) -> Iterator[QuantizeDeviation]:
    """Lanes that no block amax knows of: those where the amax of every block with a wrong scale lies.

    `wrong`: bool, the wrong scales of each of `found`. A lane that is skipped changes the amax of a block only where
    the amax was in it, so lanes are read off; what is found is a guess until it gives the kernel's bytes.
    """
    recipe = found[0].subject.recipe if found else None
    if recipe is None or recipe.whole:
        return
    height, width = recipe.block
    lanes = torch.zeros(width, dtype=torch.bool)
    rows = torch.zeros(height, dtype=torch.bool)
    for each, mask in zip(found, wrong, strict=True):
        columns, down = _peaks(each, mask)
        lanes |= torch.bincount(columns, minlength=width)[:width].bool().cpu()
        rows |= torch.bincount(down, minlength=height)[:height].bool().cpu()
    for skipped in _guesses(lanes):
        name = ranges(skipped)
        yield _of(
            f"block-amax-skips:{name}", f"of all elements but {name} of {width}",
            partial(_without, without_lanes, skipped),
        )  # fmt: skip
    for skipped in _guesses(rows) if height > 1 else ():
        name = ranges(skipped)
        yield _of(
            f"block-amax-skips:row-{name}", f"of all rows of a tile but {name} of {height}",
            partial(_without, without_rows, skipped),
        )  # fmt: skip


def _peaks(each: Evidence, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and rows inside their blocks of the elements that are the amax of a block with a wrong scale."""
    recipe, x = each.subject.recipe, each.subject.x
    height, width = recipe.block
    repeated = recipe.stored_rows
    wide = mask.repeat_interleave(repeated, 0)[: x.shape[0]].repeat_interleave(width, 1)[:, : x.shape[1]]
    amax = each.subject.blocks.repeat_interleave(repeated, 0)[: x.shape[0]].repeat_interleave(width, 1)
    row, column = (wide & (x.float().abs() == amax[:, : x.shape[1]])).nonzero(as_tuple=True)
    return column % width, row % height


def _guesses(skipped: torch.Tensor) -> Iterator[torch.Tensor]:
    """Lanes that were seen to be skipped; all between the first and the last; and the aligned run that has them."""
    count = len(skipped)
    if not bool(skipped.any()) or bool(skipped.all()):
        return
    seen = [skipped]
    where = skipped.nonzero().flatten()
    first, last = int(where[0]), int(where[-1])
    spans = [(first, last + 1)]
    size = 1
    while size < count:
        start = first // size * size
        if last < start + size:
            spans.append((start, start + size))
        size *= 2
    spans.append((first, count))
    for start, stop in spans:
        guess = torch.zeros_like(skipped)
        guess[start:stop] = True
        if not bool(guess.all()) and not any(torch.equal(guess, other) for other in seen):
            seen.append(guess)
    yield from seen


def ranges(mask: torch.Tensor) -> str:
    """The numbers of the True ones of a mask (N,): `3`, `8-15`, `0,2,4-6`."""
    found: list[list[int]] = []
    for number in mask.nonzero().flatten().tolist():
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
