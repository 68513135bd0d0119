"""Mistakes in stochastic rounding: wrong random bits, or a wrong comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.philox import ROUNDS, philox
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.recipes import Recipe

ByteFunction = Callable[[Replay], torch.Tensor]
"""Function to the random byte of each element, or to a number from 0 to 256 in its place: (M, K)."""


_WRONG_ROUNDS = (7, 9)
"""Wrong numbers of Philox rounds. 7 is the smallest number that its authors found random; 9 is one round too few."""
_SUBSEQUENCE_BITS = range(18, 4, -1)
"""Bits of the number of a block: from the blocks of a grid to the lanes of a warp. Most bits without effect come first,
and the first wrong block refutes them."""
_LEAST_VARIANCE = 16.0
"""Least variance of the number of elements rounded up: 64 elements in the middle of two codes."""
_DEVIATION = 5.0
"""Largest distance of a number of elements rounded up from its expectation, in standard deviations. Chance exceeds it
in less than 10⁻⁶ of the cases."""
_UNKNOWN = "nobody knows the random bits of a kernel that has its own"


def stochastic_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of stochastic rounding, the most plausible first. For other recipes: stochastic rounding itself."""
    if recipe.rounding != "stochastic":
        if recipe.element.bits < 32 and not recipe.whole and recipe.block[1] in (16, 32):
            yield _code_deviation(
                "stochastic-not-nearest", "rounded stochastically, by seed 0 and offset 0",
                lambda replay: replay.pack_codes(
                    _round_stochastically(replay, _philox_bytes(replay, (0, 0), replay.subject.first))
                ),
            )  # fmt: skip
        return
    yield _code_deviation(
        "nearest-not-stochastic", "rounded to the nearest, not stochastically",
        lambda replay: replay.pack_codes(element_codes(replay.scaled_elements, replay.recipe)),
    )  # fmt: skip
    yield _code_deviation(
        "truncated", "rounded toward zero, not stochastically",
        lambda replay: replay.pack_codes(roundings.truncated(replay.scaled_elements, replay.recipe.element)),
    )  # fmt: skip
    for phrase, excess in (("1/256", 1.0), ("1/512", 0.5)):
        yield _byte_deviation(
            "stochastic-biased",
            f"the random number is {phrase} too large",
            _changed_bytes(partial(torch.add, other=excess)),
        )
    yield _byte_deviation(
        "stochastic-biased", "the random number is up to 1, not below it", _changed_bytes(lambda b: b * (256 / 255))
    )
    yield _byte_deviation(
        "stochastic-seven-bits", "the lowest random bit is ignored", _changed_bytes(lambda b: b - b % 2)
    )
    yield _byte_deviation(
        "stochastic-seven-bits", "the highest random bit is ignored", _changed_bytes(lambda b: b % 128 * 2)
    )
    yield _byte_deviation("stochastic-seven-bits", "the highest random bit is 0", _changed_bytes(lambda b: b % 128))
    for count in (4, 5, 6):
        unit = 2 ** (8 - count)
        yield _byte_deviation(
            f"stochastic-bits:{count}", f"{count} of 8 random bits are used", _changed_bytes(partial(_drop_bits, unit))
        )
    yield from _comparison_deviations()
    yield from _byte_place_deviations(recipe.block[1])
    yield from _seed_deviations()


def rounded_at_random(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """Stochastic rounding by unknown random bits, for a recipe that rounds to nearest. The deviation is not exact.

    Every code must be one of the two neighbours of its element. The numbers of elements rounded up must be those of
    stochastic rounding, each element with the probability of its distance from the lower neighbour, in each quarter of
    the distance between two codes: within `_DEVIATION` standard deviations and the 1/256 of a random byte.
    """
    recipe = matrices[0].subject.recipe
    if recipe.rounding == "stochastic" or recipe.element.bits >= 32:
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
        yield QuantizeDeviation(
            "stochastic-not-nearest",
            "elements: rounded up and down as often as by stochastic rounding, not to the nearest",
            frozenset({"codes"}), exact=False,
            overrides={"codes": lambda replay: replay.kernel_matrix.kernel_stages["codes"]},
        )  # fmt: skip


def _code_deviation(
    cause: str, sentence: str, codes: Callable[[Replay], torch.Tensor], *, row_local: bool = True
) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"elements: {sentence}", frozenset({"codes"}), overrides={"codes": codes}, row_local=row_local
    )


def _byte_deviation(
    cause: str, sentence: str, byte_function: ByteFunction, *, row_local: bool = True
) -> QuantizeDeviation:
    def codes(replay: Replay) -> torch.Tensor:
        return replay.pack_codes(_round_stochastically(replay, byte_function(replay)))

    return _code_deviation(cause, sentence, codes, row_local=row_local)


def _round_stochastically(replay: Replay, numbers: torch.Tensor) -> torch.Tensor:
    """Codes of stochastic rounding by numbers from 0 to 256, float32 or bytes (M, K)."""
    own_numbers = numbers if numbers.dtype == torch.uint8 else numbers.clone()
    return encode(stochastic(replay.scaled_elements, replay.recipe.element, own_numbers), replay.recipe.element)


def _changed_bytes(change: Callable[[torch.Tensor], torch.Tensor]) -> ByteFunction:
    """Change the correct bytes, as float32 numbers."""

    def byte_function(replay: Replay) -> torch.Tensor:
        return change(_correct_bytes(replay).float())

    return byte_function


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


def _drop_bits(unit: int, numbers: torch.Tensor) -> torch.Tensor:
    return numbers - numbers % unit


def _comparison_deviations() -> Iterator[QuantizeDeviation]:
    """Wrong comparisons of the random byte with 256·f, where f is the distance to the grid point below, in steps."""

    def comparing(rounds_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Replay], torch.Tensor]:
        def codes(replay: Replay) -> torch.Tensor:
            numbers = _correct_bytes(replay).float()
            fmt, magnitude = replay.recipe.element, replay.scaled_elements.abs()
            code, point, middle = roundings.below(magnitude, fmt)
            share = (magnitude - point) / (middle - point) * 128
            rounded = code + rounds_up(numbers, torch.where(middle.isinf(), 0.0, share))
            return replay.pack_codes(roundings.signed(rounded, replay.scaled_elements, fmt))

        return codes

    yield _code_deviation("stochastic-complemented", "rounded up where byte < 256f", comparing(lambda b, f: b < f))
    for phrase, rounds_up in (
        ("byte + 256f > 256", lambda b, f: b + f > 256),
        ("byte <= 256f", lambda b, f: (b <= f) & (f > 0)),
        ("byte <= 256f, and a number of the grid moves", lambda b, f: b <= f),
        ("byte + 256f >= 255", lambda b, f: (b + f >= 255) & (f > 0)),
    ):
        yield _code_deviation("stochastic-inclusive", f"rounded up where {phrase}", comparing(rounds_up))


def _byte_place_deviations(width: int) -> Iterator[QuantizeDeviation]:
    """Random bytes of the wrong element."""

    def placing(position_function: Callable[[torch.Tensor], torch.Tensor]) -> ByteFunction:
        def byte_function(replay: Replay) -> torch.Tensor:
            random = replay.subject.random
            if random is None:
                raise ValueError(_UNKNOWN)
            columns = replay.x.shape[1]
            unit = 4 if isinstance(random, torch.Tensor) else width
            full = -(-columns // unit) * unit
            shape, device = (replay.x.shape[0], full), replay.x.device
            row_bytes = random_bytes(random, shape, _all_rows(replay), device, width, replay.subject.first)
            positions = position_function(torch.arange(columns, device=replay.x.device)).clamp(max=full - 1)
            return row_bytes[:, positions]

        return byte_function

    for phrase, position_function in (
        ("two elements share the byte of the first", lambda i: i & ~1),
        ("two elements share the byte of the second", lambda i: i | 1),
        ("element i of a block uses byte i/2", lambda i: i // width * width + i % width // 2),
        ("four elements share the lowest byte of their word", lambda i: i & ~3),
        ("four elements share the highest byte of their word", lambda i: i | 3),
        ("all words of a block are its first", lambda i: i // width * width + i % 4),
    ):
        yield _byte_deviation("stochastic-bits-shared", phrase, placing(position_function))
    yield _byte_deviation(
        "stochastic-bytes-reversed", "the highest byte of a word is the first", placing(lambda i: i ^ 3)
    )
    yield _byte_deviation(
        "stochastic-bytes-reversed", "the bytes of a block are reversed", placing(lambda i: i ^ (width - 1))
    )
    yield _byte_deviation(
        "stochastic-bytes-reversed", "the words of a block are reversed", placing(lambda i: i ^ (width - 4))
    )


def _bytes_of_first(unit: str, replay: Replay) -> torch.Tensor:
    """The correct bytes of the first row for every row, or of the first block for every block."""
    first_row = _correct_bytes(replay)[:1]
    rows, columns = replay.x.shape
    if unit == "block":
        width = replay.recipe.block[1]
        first_row = first_row[:, :width].repeat(1, -(-columns // width))[:, :columns]
    return first_row.expand(rows, columns)


def _all_rows(replay: Replay) -> slice:
    return slice(0, replay.x.shape[0])


def _philox_bytes(replay: Replay, random: Random, first: int, rounds: int = ROUNDS) -> torch.Tensor:
    rows, columns = replay.x.shape
    width = replay.recipe.block[1]
    return random_bytes(random, (rows, columns), _all_rows(replay), replay.x.device, width, first, rounds)


def _seed_deviations() -> Iterator[QuantizeDeviation]:
    """Wrong random words of Philox. They need a case with seed and offset."""

    def seeding(
        change: Callable[[int, int], tuple[int, int]],
        first: Callable[[Replay], int] | None = None,
        rounds: int = ROUNDS,
    ) -> ByteFunction:
        def byte_function(replay: Replay) -> torch.Tensor:
            random = replay.subject.random
            if not isinstance(random, tuple):
                raise ValueError("words have neither seed nor offset")
            first_block = replay.subject.first if first is None else first(replay)
            return _philox_bytes(replay, change(*random), first_block, rounds)

        return byte_function

    def unchanged(seed: int, offset: int) -> tuple[int, int]:
        return seed, offset

    low_32_bits = (1 << 32) - 1
    yield _byte_deviation(
        "stochastic-offset-not-advanced", "the columnwise half uses the offset of the rowwise one",
        seeding(lambda seed, offset: (seed, offset - 1)),
    )  # fmt: skip
    for cause, phrase, change in (
        ("stochastic-offset:+1", "the offset is 1 too large", lambda seed, offset: (seed, offset + 1)),
        ("stochastic-offset:0", "the offset is ignored", lambda seed, offset: (seed, 0)),
        (
            "stochastic-offset:32-bits",
            "the high 32 bits of the offset are ignored",
            lambda s, offset: (s, offset & low_32_bits),
        ),
        (
            "stochastic-seed:32-bits",
            "the high 32 bits of the seed are ignored",
            lambda seed, o: (seed & low_32_bits, o),
        ),
        ("stochastic-seed:swapped", "seed and offset are exchanged", lambda seed, offset: (offset, seed)),
    ):
        yield _byte_deviation(cause, phrase, seeding(change))
    for rounds in _WRONG_ROUNDS:
        yield _byte_deviation(
            "stochastic-philox-rounds", f"Philox has {rounds} rounds, not {ROUNDS}", seeding(unchanged, rounds=rounds)
        )
    yield _byte_deviation(
        "stochastic-other-block:+1",
        "words are those of the next block",
        seeding(unchanged, lambda replay: replay.subject.first + 1),
    )

    # Deviations that count blocks from the start of the matrix cannot be replayed on some of its rows.
    first_block_0 = seeding(unchanged, lambda _: 0)
    yield _byte_deviation(
        "stochastic-sections-restart", "each section counts its blocks from 0", first_block_0, row_local=False
    )
    # After the restart: sections of 2^n blocks give the same bytes.
    for bits in _SUBSEQUENCE_BITS:
        yield _byte_deviation(
            f"stochastic-other-block:{bits}-bits", f"the number of a block has {bits} bits in Philox's subsequences",
            partial(_wrapped_bytes, bits),
        )  # fmt: skip

    for phrase in ("row", "block"):
        yield _byte_deviation(
            "stochastic-equal-seeds", f"every {phrase} has the random bits of the first {phrase}",
            partial(_bytes_of_first, phrase), row_local=False,
        )  # fmt: skip

    def bytes_down_columns(replay: Replay) -> torch.Tensor:
        random, (rows, columns) = replay.subject.random, replay.x.shape
        if not isinstance(random, tuple):
            raise ValueError("words have neither seed nor offset")
        width = replay.recipe.block[1]
        across = -(-columns // width)
        block_bytes = random_bytes(
            random, (across * rows, width), slice(0, across * rows), replay.x.device, width, replay.subject.first
        )
        return block_bytes.view(across, rows, width).transpose(0, 1).reshape(rows, across * width)[:, :columns]

    yield _byte_deviation(
        "stochastic-blocks-by-column", "blocks are counted down columns", bytes_down_columns, row_local=False
    )
