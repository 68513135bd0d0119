"""Mistakes in stochastic rounding: wrong random bits, or a wrong comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.philox import ROUNDS, philox
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.recipes import Recipe

_LEAST_VARIANCE = 16.0
"""Least variance of the number of elements rounded up: 64 elements in the middle of two codes."""
_LEAST_WRONG = 10
_DEVIATION = 5.0
"""Largest distance of a number of elements rounded up from its expectation, in standard deviations. Chance exceeds it
in less than 10⁻⁶ of the cases."""
_UNKNOWN = "nobody knows the random bits of a kernel that has its own"


def rounded_at_random(matrices: Sequence[KernelMatrix], wrong: int) -> Iterator[QuantizeDeviation]:
    """Stochastic rounding by unknown random bits, for a recipe that rounds to nearest. The deviation is not exact.
    None with fewer than `_LEAST_WRONG` codes that are `wrong`: another rounding of few elements looks alike.

    Every code must be one of the two neighbours of its element. The numbers of elements rounded up must be those of
    stochastic rounding, each element with the probability of its distance from the lower neighbour, in each quarter of
    the distance between two codes: within `_DEVIATION` standard deviations and the 1/256 of a random byte.
    """
    recipe = matrices[0].subject.recipe
    if wrong < _LEAST_WRONG or recipe.rounding == "stochastic" or recipe.element.bits >= 32:
        return
    element, variance = recipe.element, 0.0
    values = decode(torch.arange(1 << element.bits, dtype=torch.uint8), element).double().abs()
    for matrix in matrices:
        replay = Replay(matrix)
        scaled = replay.scaled_elements
        finite = scaled.isfinite()
        scaled = torch.where(finite, scaled, 0.0)
        table = values.to(scaled.device)
        low_codes = encode(stochastic(scaled, element, torch.zeros_like(scaled)), element)
        low = table[low_codes.long()]
        high = torch.where(low < element.max, table[(low_codes.long() + 1) % len(table)], low)
        share = ((scaled.double().abs() - low) / (high - low)).where(high > low, 0.0).clamp(0, 1)
        kernel = table[elements(matrix.kernel_stages["codes"], scaled.shape[1], recipe).long()]
        up = kernel == high
        if not bool(((kernel == low) | (up & (share > 0)) | ~finite).all()):
            return
        up &= share > 0
        for quarter in range(4):
            inside = finite & (share > 0) & (share > quarter / 4) & (share <= (quarter + 1) / 4)
            spread = float((share * (1 - share))[inside].sum())
            distance = abs(float((up.double() - share)[inside].sum()))
            if distance > _DEVIATION * spread**0.5 + int(inside.count_nonzero()) / 256 + 1:
                return
            variance += spread
    if variance >= _LEAST_VARIANCE:
        yield AT_RANDOM


AT_RANDOM: QuantizeDeviation = Deviation(
    "stochastic-not-nearest", "elements: rounded up and down as often as by stochastic rounding, not to the nearest",
    "codes", lambda r: r.kernel_matrix.kernel_stages["codes"], exact=False,
)  # fmt: skip


def _wrapped_bytes(bits: int, replay: Replay) -> torch.Tensor:
    """The bytes of subsequences that are counted with so many bits. Raises ValueError for words."""
    random = replay.subject.random
    if not isinstance(random, tuple):
        raise ValueError("words have no subsequences")
    rows, columns = replay.x.shape
    width = replay.recipe.block[1]
    per_row, first = -(-columns // width) * (width // 16), replay.subject.first * (width // 16)
    subsequence = torch.arange(first, first + rows * per_row, device=replay.x.device) & ((1 << bits) - 1)
    words = philox(*random, subsequence).to(torch.int32).view(rows, -1)
    return words.contiguous().view(torch.uint8)[:, :columns]


def _correct_bytes(replay: Replay) -> torch.Tensor:
    """The correct bytes. Raises ValueError if the kernel makes its own random bits."""
    if replay.rounding_bytes is None:
        raise ValueError(_UNKNOWN)
    return replay.rounding_bytes


def _random(r: Replay) -> Random:
    """Seed and offset, or words. Raises ValueError if the kernel makes its own random bits."""
    if r.subject.random is None:
        raise ValueError(_UNKNOWN)
    return r.subject.random


def _seed_and_offset(r: Replay) -> tuple[int, int]:
    if not isinstance(r.subject.random, tuple):
        raise ValueError("words have neither seed nor offset")
    return r.subject.random


def _bytes(
    r: Replay, random: Random, first: int | None = None, rounds: int = ROUNDS, shape: tuple[int, int] | None = None
) -> torch.Tensor:
    """Bytes of other random bits, from another first block, of another number of rounds or of another shape."""
    shape, first = shape or (r.x.shape[0], r.x.shape[1]), r.subject.first if first is None else first
    return random_bytes(random, shape, slice(0, shape[0]), r.x.device, r.recipe.block[1], first, rounds)


def _numbers(change: Callable[[torch.Tensor], torch.Tensor], r: Replay) -> torch.Tensor:
    """The correct bytes as float32 numbers, changed."""
    return change(_correct_bytes(r).float())


def _compared(rounds_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], r: Replay) -> torch.Tensor:
    """Codes by a wrong comparison of the random byte with 256·f, where f is the distance to the grid point below, in
    steps."""
    numbers = _correct_bytes(r).float()
    fmt, magnitude = r.recipe.element, r.scaled_elements.abs()
    code, point, middle = roundings.below(magnitude, fmt)
    share = (magnitude - point) / (middle - point) * 128
    rounded = code + rounds_up(numbers, torch.where(middle.isinf(), 0.0, share))
    return roundings.signed(rounded, r.scaled_elements, fmt)


def _of_elements(position_function: Callable[[torch.Tensor, int], torch.Tensor], r: Replay) -> torch.Tensor:
    """Random bytes of other elements of the row."""
    random, width, columns = _random(r), r.recipe.block[1], r.x.shape[1]
    unit = 4 if isinstance(random, torch.Tensor) else width
    full = -(-columns // unit) * unit
    positions = position_function(torch.arange(columns, device=r.x.device), width).clamp(max=full - 1)
    return _bytes(r, random, shape=(r.x.shape[0], full))[:, positions]


def _bytes_of_first(unit: str, r: Replay) -> torch.Tensor:
    """The correct bytes of the first row for every row, or of the first block for every block."""
    first_row = _correct_bytes(r)[:1]
    rows, columns = r.x.shape
    if unit == "block":
        width = r.recipe.block[1]
        first_row = first_row[:, :width].repeat(1, -(-columns // width))[:, :columns]
    return first_row.expand(rows, columns)


def _bytes_down_columns(r: Replay) -> torch.Tensor:
    """Bytes of blocks that are counted down columns."""
    (rows, columns), width = r.x.shape, r.recipe.block[1]
    across = -(-columns // width)
    block_bytes = _bytes(r, _seed_and_offset(r), shape=(across * rows, width))
    return block_bytes.view(across, rows, width).transpose(0, 1).reshape(rows, across * width)[:, :columns]


def _stochastic(recipe: Recipe) -> bool:
    return recipe.rounding == "stochastic"


_LOW_32_BITS = (1 << 32) - 1
STOCHASTIC: tuple[QuantizeDeviation, ...] = (
    Deviation("stochastic-not-nearest", "elements: rounded stochastically, by seed 0 and offset 0", "random bytes",
              lambda r: _bytes(r, (0, 0)),
              when=lambda recipe: not _stochastic(recipe) and recipe.element.bits < 32 and not recipe.whole
              and recipe.block[1] in (16, 32)),
    Deviation("nearest-not-stochastic", "elements: rounded to the nearest, not stochastically", "element codes",
              lambda r: element_codes(r.scaled_elements, r.recipe), when=_stochastic),
    Deviation("truncated", "elements: rounded toward zero, not stochastically", "element codes",
              lambda r: roundings.truncated(r.scaled_elements, r.recipe.element), when=_stochastic),
    Deviation("stochastic-biased", "elements: the random number is {}", "random bytes", _numbers, {
        "1/256 too large": lambda b: b + 1.0, "1/512 too large": lambda b: b + 0.5,
        "up to 1, not below it": lambda b: b * (256 / 255),
    }, _stochastic),
    Deviation("stochastic-seven-bits", "elements: {}", "random bytes", _numbers, {
        "the lowest random bit is ignored": lambda b: b - b % 2,
        "the highest random bit is ignored": lambda b: b % 128 * 2, "the highest random bit is 0": lambda b: b % 128,
    }, _stochastic),
    Deviation("stochastic-bits:{}", "elements: {} of 8 random bits are used", "random bytes",
              lambda unit, r: _numbers(lambda b: b - b % unit, r), {"4": 16, "5": 8, "6": 4}, _stochastic),
    Deviation("stochastic-complemented", "elements: rounded up where byte < 256f", "element codes",
              partial(_compared, torch.lt), when=_stochastic),
    Deviation("stochastic-inclusive", "elements: rounded up where {}", "element codes", _compared, {
        "byte + 256f > 256": lambda b, f: b + f > 256,
        "byte <= 256f": lambda b, f: (b <= f) & (f > 0),
        "byte <= 256f, and a number of the grid moves": lambda b, f: b <= f,
        "byte + 256f >= 255": lambda b, f: (b + f >= 255) & (f > 0),
    }, _stochastic),
    Deviation("stochastic-bits-shared", "elements: {}", "random bytes", _of_elements, {
        "two elements share the byte of the first": lambda i, width: i & ~1,
        "two elements share the byte of the second": lambda i, width: i | 1,
        "element i of a block uses byte i/2": lambda i, width: i // width * width + i % width // 2,
        "four elements share the lowest byte of their word": lambda i, width: i & ~3,
        "four elements share the highest byte of their word": lambda i, width: i | 3,
        "all words of a block are its first": lambda i, width: i // width * width + i % 4,
        "the upper half of a word uses the bytes of the lower half": lambda i, width: i & ~2,
        "the lower half of a word uses the bytes of the upper half": lambda i, width: i | 2,
    }, _stochastic),
    Deviation("stochastic-bytes-reversed", "elements: {}", "random bytes", _of_elements, {
        "the highest byte of a word is the first": lambda i, width: i ^ 3,
        "the halves of a word change places": lambda i, width: i ^ 2,
        "the bytes of each half of a word change places": lambda i, width: i ^ 1,
        "each byte of a word is the next one": lambda i, width: i & ~3 | (i + 1) & 3,
        "each byte of a word is the one before": lambda i, width: i & ~3 | (i - 1) & 3,
        "the bytes of a block are reversed": lambda i, width: i ^ (width - 1),
        "the words of a block are reversed": lambda i, width: i ^ (width - 4),
    }, _stochastic),
    Deviation("stochastic-offset-not-advanced", "elements: the columnwise half uses the offset of the rowwise one",
              "random bytes", lambda r: _bytes(r, (_seed_and_offset(r)[0], _seed_and_offset(r)[1] - 1)),
              when=_stochastic),
    Deviation("stochastic-offset:+1", "elements: the offset is 1 too large", "random bytes",
              lambda r: _bytes(r, (_seed_and_offset(r)[0], _seed_and_offset(r)[1] + 1)), when=_stochastic),
    Deviation("stochastic-offset:0", "elements: the offset is ignored", "random bytes",
              lambda r: _bytes(r, (_seed_and_offset(r)[0], 0)), when=_stochastic),
    Deviation("stochastic-offset:32-bits", "elements: the high 32 bits of the offset are ignored", "random bytes",
              lambda r: _bytes(r, (_seed_and_offset(r)[0], _seed_and_offset(r)[1] & _LOW_32_BITS)), when=_stochastic),
    Deviation("stochastic-seed:32-bits", "elements: the high 32 bits of the seed are ignored", "random bytes",
              lambda r: _bytes(r, (_seed_and_offset(r)[0] & _LOW_32_BITS, _seed_and_offset(r)[1])), when=_stochastic),
    Deviation("stochastic-seed:swapped", "elements: seed and offset are exchanged", "random bytes",
              lambda r: _bytes(r, (_seed_and_offset(r)[1], _seed_and_offset(r)[0])), when=_stochastic),
    # 7 is the smallest number of rounds that the authors of Philox found random; 9 is one round too few.
    Deviation("stochastic-philox-rounds", f"elements: Philox has {{}} rounds, not {ROUNDS}", "random bytes",
              lambda rounds, r: _bytes(r, _seed_and_offset(r), rounds=rounds), {"7": 7, "9": 9}, _stochastic),
    Deviation("stochastic-other-block:{}", "elements: words are those of the next block", "random bytes",
              lambda step, r: _bytes(r, _seed_and_offset(r), r.subject.first + step), {"+1": 1}, _stochastic),
    # Deviations that count blocks from the start of the matrix cannot be replayed on some of its rows.
    Deviation("stochastic-sections-restart", "elements: each section counts its blocks from 0", "random bytes",
              lambda r: _bytes(r, _seed_and_offset(r), 0), when=_stochastic, row_local=False),
    # After the restart: sections of 2^n blocks give the same bytes. From the bits of the blocks of a grid to those of
    # the lanes of a warp: most bits without effect come first, and the first wrong block refutes them.
    Deviation("stochastic-other-block:{}-bits", "elements: the number of a block has {} bits in Philox's subsequences",
              "random bytes", _wrapped_bytes, {str(bits): bits for bits in range(18, 4, -1)}, _stochastic),
    Deviation("stochastic-equal-seeds", "elements: every {0} has the random bits of the first {0}", "random bytes",
              _bytes_of_first, {"row": "row", "block": "block"}, _stochastic, row_local=False),
    Deviation("stochastic-blocks-by-column", "elements: blocks are counted down columns", "random bytes",
              _bytes_down_columns, when=_stochastic, row_local=False),
)  # fmt: skip
"""Wrong random bits and wrong comparisons of stochastic rounding; for other recipes stochastic rounding itself."""
