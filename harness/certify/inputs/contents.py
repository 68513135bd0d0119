"""Trials of the assumption of a proof: blocks whose content, order, place or shape a wrong kernel could depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from narrowgauge.harness.certify.inputs.space import Grid, Numbers
from narrowgauge.spec.recipes import Recipe

_BINADES = 20
"""Powers of two between the largest and the smallest block amax of a trial, and most scales are not 0."""
_NEAR = 6
"""Powers of two between the amax of a block and most of its numbers."""
_ROWS = (
    1,
    2,
    3,
    7,
    8,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    127,
    129,
    255,
    257,
    512,
    1023,
    1025,
    2049,
    4095,
    4096,
    4097,
    8193,
    16385,
    65537,
)
"""Rows of the tried shapes: thresholds of kernels, powers of two and their neighbours."""
_BLOCKS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 257, 513, 1025)
"""Blocks in a row of the tried shapes."""
_LARGE = 1 << 21
"""Elements of the largest tried shape."""


@dataclass(frozen=True)
class Content:
    """Draws blocks of one recipe and dtype."""

    recipe: Recipe
    numbers: Numbers
    blocks: int
    generator: torch.Generator

    @property
    def size(self) -> int:
        """Elements of a block."""
        return Grid.of(self.recipe).size

    @property
    def binade(self) -> int:
        """Distance of the magnitudes x and 2x."""
        return 1 << (7 if self.numbers.dtype == torch.bfloat16 else 10 if self.numbers.dtype == torch.float16 else 23)

    def integers(self, stop: int, *shape: int) -> torch.Tensor:
        """Random integers below `stop`, int32."""
        drawn = torch.randint(0, stop, shape, generator=self.generator, dtype=torch.int64)
        return drawn.int().to(self.numbers.device)

    def signed(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Magnitudes with random signs."""
        return magnitudes - self.integers(2, *magnitudes.shape) * self.numbers.sign

    def amaxes(self) -> torch.Tensor:
        """An amax for every block, finite: int32 (blocks, 1)."""
        if self.recipe.tensor_scale == "none":
            return self.integers(self.numbers.infinity, self.blocks, 1)
        top = int(self.integers(self.numbers.infinity, 1))
        return (top - self.integers(_BINADES * self.binade, self.blocks, 1)).clamp(min=0)

    def below(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Magnitudes up to the amax of every block, most of them within `_NEAR` powers of two, the first the amax."""
        near = amaxes - self.integers(_NEAR * self.binade, self.blocks, self.size)
        near[:, 0] = amaxes[:, 0]
        return near.clamp(min=0)

    def random(self) -> torch.Tensor:
        """Numbers of both signs, the amax first."""
        return self.signed(self.below(self.amaxes()))


def _places(content: Content, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks with their elements in a random order."""
    order = torch.rand(blocks.shape, generator=content.generator).argsort(1).to(blocks.device)
    return blocks.gather(1, order)


def _random(content: Content) -> torch.Tensor:
    return _places(content, content.random())


def _equal(content: Content) -> torch.Tensor:
    return content.signed(content.amaxes()).expand(-1, content.size).contiguous()


def _equal_magnitudes(content: Content) -> torch.Tensor:
    return content.signed(content.amaxes().expand(-1, content.size))


def _equal_blocks(content: Content) -> torch.Tensor:
    grid = Grid.of(content.recipe)
    return content.random()[:: grid.across].repeat_interleave(grid.across, 0)[: content.blocks]


def _one_number(content: Content) -> torch.Tensor:
    blocks = content.random()
    place = content.integers(content.size, content.blocks, 1)
    return torch.where(content.numbers.arange(content.size) == place, blocks[:, :1], 0)


def _zeros_before(content: Content) -> torch.Tensor:
    blocks, count = _random(content), content.integers(content.size, content.blocks, 1)
    return torch.where(content.numbers.arange(content.size) < count, 0, blocks)


def _first_zero(content: Content) -> torch.Tensor:
    blocks = _random(content)
    blocks[:, 0] = -content.integers(2, content.blocks) * content.numbers.sign
    return blocks


def _zeros_behind(content: Content) -> torch.Tensor:
    return _zeros_before(content).flip(1)


def _ascending(content: Content) -> torch.Tensor:
    return content.below(content.amaxes()).sort(1).values


def _descending(content: Content) -> torch.Tensor:
    return _ascending(content).flip(1)


def _negative(content: Content) -> torch.Tensor:
    return _places(content, content.below(content.amaxes())) - content.numbers.sign


def _powers_of_two(content: Content) -> torch.Tensor:
    return _places(content, content.signed(content.below(content.amaxes()) // content.binade * content.binade))


def _amax_is_power(content: Content) -> torch.Tensor:
    blocks = content.below(content.amaxes() // content.binade * content.binade)
    return _places(content, content.signed(blocks))


def _opposite_pairs(content: Content) -> torch.Tensor:
    blocks = content.below(content.amaxes())
    width = content.size // 2 * 2
    blocks[:, 1:width:2] = blocks[:, 0:width:2] - content.numbers.sign
    return blocks


def _special(content: Content) -> torch.Tensor:
    """NaN, zeros of both signs and subnormal numbers beside normal numbers; NaN only if amaxes ignore NaN."""
    numbers, blocks = content.numbers, _random(content)
    kinds = [0, -numbers.sign, 1, 1 - numbers.sign, content.binade - 1]
    if content.recipe.nan == "ignore":
        kinds += [numbers.infinity + 1, numbers.sign - 1, numbers.infinity + 1 - numbers.sign, -1]
    values = torch.tensor(kinds, dtype=torch.int32, device=numbers.device)
    chosen = values[content.integers(len(kinds), content.blocks, content.size).long()]
    return torch.where(content.integers(4, content.blocks, content.size) == 0, chosen, blocks)


def _infinite(content: Content) -> torch.Tensor:
    """Infinity of both signs in a third of the blocks."""
    blocks = _random(content)
    some = content.integers(3 * content.size, content.blocks, content.size) == 0
    return torch.where(some, content.signed(torch.full_like(blocks, content.numbers.infinity)), blocks)


CONTENTS: dict[str, Callable[[Content], torch.Tensor]] = {
    "random numbers, the amax anywhere": _random,
    "equal numbers": _equal,
    "equal magnitudes": _equal_magnitudes,
    "rows of equal blocks": _equal_blocks,
    "one number beside zeros": _one_number,
    "zeros before numbers": _zeros_before,
    "zeros behind numbers": _zeros_behind,
    "a first element of 0": _first_zero,
    "ascending numbers": _ascending,
    "descending numbers": _descending,
    "negative numbers": _negative,
    "powers of two": _powers_of_two,
    "an amax that is a power of two": _amax_is_power,
    "pairs of a number and its negative": _opposite_pairs,
    "NaN, zeros and subnormal numbers beside others": _special,
    "infinities beside others": _infinite,
}
"""Content of the blocks of a trial by its name."""


def shapes(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """Shapes (M, K) of the trials: few and many rows, few and many blocks, and last blocks that are not full."""
    width = COLUMNS_OF_ROW if recipe.spans_k else recipe.block[1]
    for rows in _ROWS:
        yield rows, width
    for blocks in _BLOCKS:
        for rows in (1, 5, 130):
            if rows * blocks * width <= _LARGE:
                yield rows, blocks * width
    for tail in (1, 2, width // 2 - 1, width // 2, width // 2 + 1, width - 1):
        for blocks in (0, 1, 4, 63):
            if tail > 0:
                yield 3, blocks * width + tail
    yield _LARGE // 4096, 4096
    yield 4352, _LARGE // 4352 // width * width


COLUMNS_OF_ROW = 64
"""Step of the columns of a shape if a scale spans K."""
