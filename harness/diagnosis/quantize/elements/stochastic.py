"""What kernels do in place of the stochastic rounding of their recipe: other bits, or another comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.elements import grids
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.philox import ROUNDS
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.recipes import Recipe

Draw = Callable[[Run], torch.Tensor]
"""The random byte of each element, or a number from 0 to 256 in its place: (M, K)."""


_OTHER_ROUNDS = (7, 9)
"""Of Philox: 7 are the fewest that its authors found random, 9 are one too few."""
_UNKNOWN = "nobody knows the random bits of a kernel that has its own"


def drawing_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe that rounds stochastically, the most plausible first; of others that it does so at all."""
    if recipe.rounding != "stochastic":
        if recipe.element.bits < 32 and not recipe.whole and recipe.block[1] in (16, 32):
            yield _of(
                "stochastic-not-nearest", "rounded stochastically, by seed 0 and offset 0",
                lambda run: run.packed(_stochastic(run, _bytes(run, (0, 0), run.subject.first))),
            )  # fmt: skip
        return
    yield _of("nearest-not-stochastic", "rounded to the nearest, not stochastically", lambda run: run.packed(
        element_codes(run.scaled, run.recipe)
    ))  # fmt: skip
    yield _of("truncated", "rounded toward zero, not stochastically", lambda run: run.packed(
        grids.truncated(run.scaled, run.recipe.element)
    ))  # fmt: skip
    for words, biased in (("1/256", 1.0), ("1/512", 0.5)):
        yield _drawn(
            "stochastic-biased", f"the random number is {words} too large", _changed(partial(torch.add, other=biased))
        )
    yield _drawn("stochastic-biased", "the random number is up to 1, not below it", _changed(lambda b: b * (256 / 255)))
    yield _drawn("stochastic-seven-bits", "the lowest random bit is ignored", _changed(lambda b: b - b % 2))
    yield _drawn("stochastic-seven-bits", "the highest random bit is ignored", _changed(lambda b: b % 128 * 2))
    for count in (4, 5, 6):
        unit = 2 ** (8 - count)
        yield _drawn(f"stochastic-bits:{count}", f"{count} of 8 random bits are used", _changed(partial(_cut, unit)))
    yield from _compared()
    yield from _placed(recipe.block[1])
    yield from _seeded()


def _of(cause: str, sentence: str, codes: Callable[[Run], torch.Tensor], *, local: bool = True) -> QuantizeDeviation:
    return QuantizeDeviation(cause, f"elements: {sentence}", frozenset({"codes"}), hooks={"codes": codes}, local=local)


def _drawn(cause: str, sentence: str, draw: Draw, *, local: bool = True) -> QuantizeDeviation:
    return _of(cause, sentence, lambda run: run.packed(_stochastic(run, draw(run))), local=local)


def _stochastic(run: Run, numbers: torch.Tensor) -> torch.Tensor:
    """Codes of stochastic rounding by numbers from 0 to 256, float32 or bytes."""
    drawn = numbers if numbers.dtype == torch.uint8 else numbers.clone()
    return encode(stochastic(run.scaled, run.recipe.element, drawn), run.recipe.element)


def _changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Draw:
    """Of the right bytes as float32 numbers."""

    def draw(run: Run) -> torch.Tensor:
        return change(_own(run).float())

    return draw


def _own(run: Run) -> torch.Tensor:
    """The right bytes. Raises ValueError for a kernel that has random bits of its own."""
    if run.bytes is None:
        raise ValueError(_UNKNOWN)
    return run.bytes


def _cut(unit: int, numbers: torch.Tensor) -> torch.Tensor:
    return numbers - numbers % unit


def _compared() -> Iterator[QuantizeDeviation]:
    """Rounded up where another comparison of the byte with 256 times the distance f to the point below says so."""

    def by(up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Run], torch.Tensor]:
        def codes(run: Run) -> torch.Tensor:
            numbers = _own(run).float()
            fmt, magnitude = run.recipe.element, run.scaled.abs()
            code, point, middle = grids.below(magnitude, fmt)
            share = (magnitude - point) / (middle - point) * 128
            moved = code + up(numbers, torch.where(middle.isinf(), 0.0, share))
            return run.packed(grids.signed(moved, run.scaled, fmt))

        return codes

    yield _of("stochastic-complemented", "rounded up where byte < 256f", by(lambda b, f: b < f))
    for words, up in (
        ("byte + 256f > 256", lambda b, f: b + f > 256),
        ("byte <= 256f", lambda b, f: (b <= f) & (f > 0)),
        ("byte <= 256f, and a number of the grid moves", lambda b, f: b <= f),
        ("byte + 256f >= 255", lambda b, f: (b + f >= 255) & (f > 0)),
    ):
        yield _of("stochastic-inclusive", f"rounded up where {words}", by(up))


def _placed(width: int) -> Iterator[QuantizeDeviation]:
    """Another element's byte."""

    def by(place: Callable[[torch.Tensor], torch.Tensor]) -> Draw:
        def draw(run: Run) -> torch.Tensor:
            random = run.subject.random
            if random is None:
                raise ValueError(_UNKNOWN)
            columns = run.x.shape[1]
            unit = 4 if isinstance(random, torch.Tensor) else width
            full = -(-columns // unit) * unit
            every = random_bytes(random, (run.x.shape[0], full), _all(run), run.x.device, width, run.subject.first)
            chosen = place(torch.arange(columns, device=run.x.device)).clamp(max=full - 1)
            return every[:, chosen]

        return draw

    for words, place in (
        ("two elements share the byte of the first", lambda i: i & ~1),
        ("two elements share the byte of the second", lambda i: i | 1),
        ("element i of a block uses byte i/2", lambda i: i // width * width + i % width // 2),
        ("four elements share the lowest byte of their word", lambda i: i & ~3),
        ("four elements share the highest byte of their word", lambda i: i | 3),
        ("all words of a block are its first", lambda i: i // width * width + i % 4),
    ):
        yield _drawn("stochastic-bits-shared", f"{words}", by(place))
    yield _drawn("stochastic-bytes-reversed", "the highest byte of a word is the first", by(lambda i: i ^ 3))
    yield _drawn("stochastic-bytes-reversed", "the bytes of a block are reversed", by(lambda i: i ^ (width - 1)))
    yield _drawn("stochastic-bytes-reversed", "the words of a block are reversed", by(lambda i: i ^ (width - 4)))


def _all(run: Run) -> slice:
    return slice(0, run.x.shape[0])


def _bytes(run: Run, random: Random, first: int, rounds: int = ROUNDS) -> torch.Tensor:
    rows, columns = run.x.shape
    width = run.recipe.block[1]
    return random_bytes(random, (rows, columns), _all(run), run.x.device, width, first, rounds)


def _seeded() -> Iterator[QuantizeDeviation]:
    """Other words of Philox, where there are a seed and an offset."""

    def by(
        change: Callable[[int, int], tuple[int, int]], first: Callable[[Run], int] | None = None, rounds: int = ROUNDS
    ) -> Draw:
        def draw(run: Run) -> torch.Tensor:
            random = run.subject.random
            if not isinstance(random, tuple):
                raise ValueError("words have neither seed nor offset")
            return _bytes(run, change(*random), run.subject.first if first is None else first(run), rounds)

        return draw

    def same(seed: int, offset: int) -> tuple[int, int]:
        return seed, offset

    low = (1 << 32) - 1
    yield _drawn(
        "stochastic-offset-not-advanced", "the columnwise half uses the offset of the rowwise one",
        by(lambda seed, offset: (seed, offset - 1)),
    )  # fmt: skip
    for cause, words, change in (
        ("stochastic-offset:+1", "the offset is 1 too large", lambda seed, offset: (seed, offset + 1)),
        ("stochastic-offset:0", "the offset is ignored", lambda seed, offset: (seed, 0)),
        (
            "stochastic-offset:32-bits",
            "the high 32 bits of the offset are ignored",
            lambda s, offset: (s, offset & low),
        ),
        ("stochastic-seed:32-bits", "the high 32 bits of the seed are ignored", lambda seed, o: (seed & low, o)),
        ("stochastic-seed:swapped", "seed and offset are exchanged", lambda seed, offset: (offset, seed)),
    ):
        yield _drawn(cause, words, by(change))
    for rounds in _OTHER_ROUNDS:
        yield _drawn("stochastic-philox-rounds", f"Philox has {rounds} rounds, not {ROUNDS}", by(same, rounds=rounds))
    yield _drawn(
        "stochastic-other-block:+1", "words are those of the next block", by(same, lambda run: run.subject.first + 1)
    )

    # These count from where the matrix begins, which some rows of it do not know.
    restarted = by(same, lambda _: 0)
    yield _drawn("stochastic-sections-restart", "each section counts its blocks from 0", restarted, local=False)

    def down(run: Run) -> torch.Tensor:
        random, (rows, columns) = run.subject.random, run.x.shape
        if not isinstance(random, tuple):
            raise ValueError("words have neither seed nor offset")
        width = run.recipe.block[1]
        across = -(-columns // width)
        found = random_bytes(
            random, (across * rows, width), slice(0, across * rows), run.x.device, width, run.subject.first
        )
        return found.view(across, rows, width).transpose(0, 1).reshape(rows, across * width)[:, :columns]

    yield _drawn("stochastic-blocks-by-column", "blocks are counted down columns", down, local=False)
