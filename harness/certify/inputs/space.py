"""The inputs of a proof: every number of a dtype under every scale of a block, in blocks of a recipe.

A scale depends on the amax of a block and on the tensor scale. Block amaxes with equal scales and factors form a class.
Every number up to the largest amax of a class can lie under the scale of the class: these are the pairs of the proof.
Numbers are their bits: a magnitude m ≥ 0 is the number m, and m − 2^15 (of float32 m − 2^31) is its negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.hadamard import coefficient
from narrowgauge.reference.quantize.scaling import (
    block_scales,
    element_factors,
    scale_elements,
    tensor_scale,
)
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Hadamard, Recipe

COLUMNS = 2048
"""Columns of the matrices of a proof, and elements of a block if a scale spans K."""
_SLAB = 1 << 23
"""Elements of a matrix of a proof."""
_ROWS = 128
"""The rows of a matrix of a proof are a multiple of this number: some kernels require it."""
_SAMPLED = 256
"""Float32 numbers between the rounding boundaries, for every scale."""
_AMAXES = 4096
"""Float32 block amaxes between the rounding boundaries of the scales."""
_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_INFINITIES = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}


@dataclass(frozen=True)
class Numbers:
    """The numbers of a dtype as bits."""

    dtype: torch.dtype
    device: str = "cpu"

    @property
    def infinity(self) -> int:
        """Magnitude of infinity; smaller magnitudes are finite, larger ones NaN."""
        return _INFINITIES[self.dtype]

    @property
    def sign(self) -> int:
        """Distance from a number to its negative."""
        return 1 << (8 * self.dtype.itemsize - 1)

    @property
    def complete(self) -> bool:
        """Whether a proof lists all numbers, as for dtypes of 16 bits."""
        return self.dtype.itemsize == 2

    @property
    def nans(self) -> int:
        """Magnitudes of NaN in a proof: all of a dtype of 16 bits; of float32 the first and the last two."""
        return self.sign - 1 - self.infinity if self.complete else 4

    def nan(self, number: torch.Tensor) -> torch.Tensor:
        """The magnitudes of NaN with these numbers, from 0 to `nans` − 1."""
        if self.complete:
            return number + self.infinity + 1
        return torch.where(number < 2, number + self.infinity + 1, number + self.sign - self.nans)

    def tensor(self, bits: torch.Tensor) -> torch.Tensor:
        """Bits as numbers of the dtype."""
        return bits.to(_INTEGERS[self.dtype]).view(self.dtype)

    def bits(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of the dtype as bits, int32."""
        return numbers.contiguous().view(_INTEGERS[self.dtype]).int()

    def magnitude(self, bits: torch.Tensor) -> torch.Tensor:
        """Bits without their sign."""
        return torch.where(bits < 0, bits + self.sign, bits)

    def float(self, magnitude: torch.Tensor) -> torch.Tensor:
        """Magnitudes as float32 numbers."""
        return self.tensor(magnitude).float()

    def arange(self, stop: int) -> torch.Tensor:
        """Integers below `stop`, int32, on the device of the proof."""
        return torch.arange(stop, dtype=torch.int32, device=self.device)

    def draw(self, generator: torch.Generator, count: int, stop: int) -> torch.Tensor:
        """Random magnitudes below `stop`, int32 (count,)."""
        drawn = torch.randint(0, max(1, stop), (count,), generator=generator, dtype=torch.int64)
        return drawn.int().to(self.device)


ALL = 1 << 62
"""As many as there are."""


@dataclass(frozen=True)
class Effort:
    """Size of the samples of a proof."""

    tensor_scales: int
    """Tensor amaxes, or given scales."""
    places: int
    """Places of a number in a block."""
    everywhere: int
    """Tensor amaxes with all `places`; further tensor amaxes have one place."""

    @staticmethod
    def of(
        device: str, tensor_scales: int | None = None, places: int | None = None, *, contract: bool = False
    ) -> Effort:
        """The effort on a device: on a GPU all places and, but for a contract, all tensor amaxes."""
        gpu = torch.device(device).type == "cuda"
        if contract:
            return Effort(tensor_scales or (64 if gpu else 4), places or (ALL if gpu else 4), ALL)
        return Effort(tensor_scales or (ALL if gpu else 64), places or (ALL if gpu else 128), 64 if gpu else 12)


@dataclass(frozen=True)
class Outer:
    """The shared input of all blocks of a call: the amax of the tensor, or a given scale, or neither."""

    amax: int | None = None
    """Magnitude of the tensor amax."""
    scale: float | None = None
    """Encode scale, for recipes with `tensor_scale` given."""

    def given(self, device: str) -> torch.Tensor | None:
        """The argument `scale` of `quantize`."""
        return None if self.scale is None else torch.tensor([self.scale], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Grid:
    """Blocks as the tiles of a matrix."""

    height: int
    width: int

    @staticmethod
    def of(recipe: Recipe) -> Grid:
        """Blocks of a recipe; a scale that spans K has a row, or the tensor, in pieces of `COLUMNS` elements."""
        return Grid(1, COLUMNS) if recipe.spans_k else Grid(*recipe.block)

    @property
    def size(self) -> int:
        """Elements of a block."""
        return self.height * self.width

    @property
    def across(self) -> int:
        """Blocks in a row of blocks."""
        return max(1, COLUMNS // self.width)

    @property
    def most_rows(self) -> int:
        """Rows of blocks of a whole matrix."""
        return max(_ROWS // self.height, _SLAB // (self.size * self.across))

    def rows_for(self, blocks: int, across: int) -> int:
        """Rows for a number of blocks, `across` in a row: at most `most_rows`, and a multiple of 128 matrix rows."""
        step = max(1, _ROWS // self.height)
        return min(self.most_rows, -(-blocks // (across * step)) * step)

    def matrix(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks (rows·across, elements) as a matrix."""
        if self.height == 1:
            return blocks.view(-1, self.across * self.width)
        tiles = blocks.view(-1, self.across, self.height, self.width)
        return tiles.transpose(1, 2).reshape(-1, self.across * self.width)

    def blocks(self, matrix: torch.Tensor) -> torch.Tensor:
        """The inverse of `matrix`."""
        if self.height == 1:
            return matrix.reshape(-1, self.size)
        tiles = matrix.view(-1, self.height, self.across, self.width)
        return tiles.transpose(1, 2).reshape(-1, self.size)


class Space:
    """Classes of block amaxes under one tensor scale, and blocks that hold every pair of a number and a class."""

    def __init__(self, recipe: Recipe, numbers: Numbers, outer: Outer, seed: int = 0) -> None:
        self.recipe, self.numbers, self.outer, self.grid = recipe, numbers, outer, Grid.of(recipe)
        self.generator = torch.Generator().manual_seed(seed)
        self.amaxes = self._amaxes()
        scales, factors = self._scales(numbers.float(self.amaxes))
        keys = _bits(scales).long() << 32 | (_bits(factors).long() & 0xFFFFFFFF)
        _, owner = torch.unique(keys, return_inverse=True)
        place = self.numbers.arange(len(keys)).long()
        last = place.new_zeros(int(owner.max()) + 1).scatter_reduce(0, owner, place, "amax", include_self=False)
        self.tops = self.amaxes[last]
        """Largest amax of every class, int32 (C,)."""
        self.scales, self.factors = scales[last], factors[last]
        """Stored scale and factor of the elements of every class."""

    # ---- classes -----------------------------------------------------------------------------------------------------

    @cached_property
    def tensor(self) -> torch.Tensor | None:
        """The tensor scale, float32 (1,), or None."""
        recipe, outer = self.recipe, self.outer
        if outer.scale is not None:
            return outer.given(self.numbers.device)
        if outer.amax is None:
            return None
        amax = self.numbers.float(torch.tensor([outer.amax], dtype=torch.int32, device=self.numbers.device))
        return tensor_scale(amax, recipe, self.numbers.dtype)

    def _amaxes(self) -> torch.Tensor:
        """Every block amax up to the tensor amax, ascending, int32; of float32 the boundaries of the scales ± 2
        ulp and a sample."""
        numbers, outer = self.numbers, self.outer
        top = numbers.infinity if outer.amax is None else outer.amax
        if self.recipe.whole:
            return torch.tensor([top], dtype=torch.int32, device=numbers.device)
        propagated = [top] if top > numbers.infinity else []
        top = min(top, numbers.infinity)
        if self.recipe.nan == "propagate" and outer.amax is None:
            propagated = [numbers.infinity + 1]
        last = torch.tensor(propagated, dtype=torch.int32, device=numbers.device)
        if numbers.complete:
            return torch.cat([numbers.arange(top + 1), last])
        sample = numbers.draw(self.generator, _AMAXES, top)
        ends = torch.tensor(
            [0, 1, 0x007FFFFF, 0x00800000, numbers.infinity - 1, numbers.infinity], device=numbers.device
        )
        found = torch.cat([self._scale_boundaries(top), sample, ends.int()]).clamp(0, top)
        return torch.cat([torch.unique(found), last])

    def _scales(self, amaxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored scales and factors of blocks with these amaxes, float32 (n,)."""
        dtype, row = self.numbers.dtype, amaxes.view(1, -1)
        scales = block_scales(row, self.tensor, self.recipe, dtype)
        factors = element_factors(scales, self.tensor, self.recipe, dtype, row)
        return scales.expand(1, len(amaxes)).reshape(-1), factors.expand(1, len(amaxes)).reshape(-1)

    def _scale_boundaries(self, top: int) -> torch.Tensor:
        """Float32 amaxes ± 2 ulp of every boundary between two codes of the scale."""
        if self.recipe.scale is FP32:
            return (
                torch.arange(0, top + 1, 1 << 23, dtype=torch.int32, device=self.numbers.device)
                .view(-1, 1)
                .add(_ulps(self.numbers))
                .flatten()
            )
        codes = torch.arange(1, self.recipe.scale.max_code + 1, device=self.numbers.device)

        def reached(amaxes: torch.Tensor) -> torch.Tensor:
            return self._scales(self.numbers.float(amaxes))[0].int() >= codes

        return _first(reached, torch.full_like(codes, top).int()).view(-1, 1).add(_ulps(self.numbers)).flatten()

    # ---- numbers under a class ---------------------------------------------------------------------------------------

    def scaled(self, numbers: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Scaled elements, float32 (n, w), of numbers of the dtype (n, w) under the factors of classes (n,)."""
        blocks = 1 if self.recipe.spans_k else -(-numbers.shape[1] // self.recipe.block[1])
        factors = self.factors[classes.long()].view(-1, 1).expand(-1, blocks)
        return scale_elements(numbers, factors, self.tensor, self.recipe)

    @cached_property
    def _listed(self) -> torch.Tensor | None:
        """Magnitudes of float32 under every class (C, n): every boundary between two codes ± 2 ulp, and a sample. None:
        every magnitude of the dtype."""
        if self.numbers.complete:
            return None
        codes = torch.arange(1, self.recipe.element.max_code + 1, device=self.numbers.device).expand(len(self.tops), -1)
        classes, top = self.numbers.arange(len(self.tops)), self.tops.view(-1, 1)

        def reached(magnitudes: torch.Tensor) -> torch.Tensor:
            return encode(self.scaled(self.numbers.float(magnitudes), classes), self.recipe.element).int() >= codes

        bounds = _first(reached, top.clamp(max=self.numbers.infinity).expand(codes.shape).contiguous())
        near = (bounds.unsqueeze(2) + _ulps(self.numbers)).flatten(1)
        drawn = torch.rand(len(self.tops), _SAMPLED, generator=self.generator).to(self.numbers.device)
        sample = (drawn.double() * (top + 1)).int()
        ends = torch.tensor([0, 1, 0x007FFFFF, 0x00800000, self.numbers.infinity], device=self.numbers.device)
        return torch.cat([near, sample, ends.int().expand(len(self.tops), -1), top], 1).clamp(min=0).minimum(top)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Numbers of every class, both signs and NaN: int64 (C,)."""
        nan_allowed = (self.tops > self.numbers.infinity) | (self.recipe.nan == "ignore")
        return 2 * self._magnitudes + nan_allowed.long() * (2 * self.numbers.nans)

    @cached_property
    def _magnitudes(self) -> torch.Tensor:
        """Magnitudes of every class without NaN, int64 (C,)."""
        listed = self._listed
        if listed is not None:
            return torch.full_like(self.tops, listed.shape[1]).long()
        return self.tops.clamp(max=self.numbers.infinity).long() + 1

    def number(self, classes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The numbers `index` (n, w) of classes (n,) as bits: both signs of every magnitude, then NaN."""
        finite = self._magnitudes[classes.long()].view(-1, 1)
        place = index >> 1
        if self._listed is None:
            magnitude = place.int()
        else:
            magnitude = self._listed[classes.long().view(-1, 1), place.minimum(finite - 1)]
        nan = place >= finite
        magnitude = torch.where(nan, self.numbers.nan((place - finite).int()), magnitude)
        return torch.where((index & 1).bool(), magnitude - self.numbers.sign, magnitude)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    @property
    def in_blocks(self) -> torch.Tensor:
        """Numbers of every class that the blocks list: int64 (C,)."""
        return self.lengths

    @property
    def beside(self) -> int:
        """Numbers of a block beside its amax."""
        return self.grid.size - 1

    @property
    def across(self) -> int:
        """Blocks of the proof in a row of blocks."""
        return self.grid.across

    @cached_property
    def starts(self) -> torch.Tensor:
        """Number of the first block of every class, and of the block behind the last: int64 (C + 1,)."""
        counts = -(-self.in_blocks // self.beside)
        return torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    @property
    def pairs(self) -> int:
        """Number of pairs of a number and a class."""
        return int(self.lengths.sum())

    def pair_blocks(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks (count, 1 + beside) of the pairs, from the block `first`, and the class of every. Element 0 is the
        amax."""
        block = torch.arange(first, first + count, device=self.numbers.device)
        classes = torch.searchsorted(self.starts, block, right=True) - 1
        within = block - self.starts[classes]
        lane = torch.arange(self.beside, device=self.numbers.device)
        index = within.view(-1, 1) * self.beside + lane
        index %= self.in_blocks[classes].view(-1, 1)
        amax = self.tops[classes] - (within & 1).int() * self.numbers.sign
        return torch.cat([amax.view(-1, 1), self.number(classes, index)], 1), classes

    def listed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of all pairs as bits (n, w), some of them several times, and their classes (n,)."""
        blocks, classes = self.pair_blocks(0, int(self.starts[-1]))
        return blocks[:, 1:], classes

    def amax_blocks(self, first: int, count: int) -> torch.Tensor:
        """Blocks (count, 1 + beside) with every block amax as element 0, positive and then negative, beside
        smaller numbers."""
        block = torch.arange(first, first + count, device=self.numbers.device) % self.amax_count
        amax = self.amaxes[block % len(self.amaxes)]
        lane = torch.arange(1, 1 + self.beside, device=self.numbers.device)
        mixed = ((block.view(-1, 1) * self.grid.size + lane) * 0x9E3779B1) & 0x7FFFFFFF
        below = (mixed.double() / 2.0**31 * (amax.clamp(max=self.numbers.infinity) + 1).view(-1, 1)).int()
        beside = torch.where((mixed & 64).bool(), below - self.numbers.sign, below)
        sign = (block // len(self.amaxes)).int() * self.numbers.sign
        return torch.cat([(amax - sign).view(-1, 1), beside], 1)

    @property
    def amax_count(self) -> int:
        """Number of the blocks of `amax_blocks`."""
        return 2 * len(self.amaxes)

    def sheets(self) -> Iterator[torch.Tensor]:
        """Blocks of every matrix of the proof: all pairs, then all amaxes; with a block of the tensor amax in each
        row."""
        return self._sheets(int(self.starts[-1]), lambda first, count: self.pair_blocks(first, count)[0])

    def _sheets(self, pairs: int, made: Callable[[int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Matrices of a number of blocks that `made` makes from the first and the count, then of all amaxes."""
        shared = self.outer.amax is not None and not self.recipe.whole
        across = self.across - shared
        first = 0
        while first < pairs + self.amax_count:
            rows = self.grid.rows_for(pairs + self.amax_count - first, across)
            count = min(rows * across, max(0, pairs - first))
            parts = [made(first, count)] if count else []
            if count < rows * across:
                parts.append(self.amax_blocks(first + count - pairs, rows * across - count))
            first += rows * across
            blocks = torch.cat(parts)
            yield self._with_tensor_amax(blocks, rows) if shared else blocks

    def alone(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Blocks of these amaxes (n,), and no further number."""
        return torch.nn.functional.pad(amaxes.view(-1, 1), (0, self.beside))

    # ---- matrices ----------------------------------------------------------------------------------------------------

    def matrix(self, blocks: torch.Tensor, place: int) -> torch.Tensor:
        """The matrix of blocks whose elements are moved by `place`, around the end of the block."""
        return self.grid.matrix(self.numbers.tensor(blocks.roll(place, 1) if place else blocks))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers of a matrix that get scales and codes."""
        return x

    def amaxes_of(self, blocks: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        """The amax of each block of a matrix, int32, with its sign."""
        return blocks[:, 0]

    def saw(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Called with the quantized numbers of a matrix of the proof, as bits, and their right stored scales."""

    @property
    def unreached(self) -> int:
        """Pairs that no matrix holds."""
        return 0

    def _with_tensor_amax(self, blocks: torch.Tensor, rows: int) -> torch.Tensor:
        """A block with the tensor amax in every row of blocks; its column changes from row to row."""
        assert self.outer.amax is not None
        across, row = self.across, self.numbers.arange(rows)
        shared = self.alone(self.outer.amax - (row & 1) * self.numbers.sign).unsqueeze(1)
        every = torch.cat([blocks.view(rows, across - 1, -1), shared], 1)
        column, place = self.numbers.arange(across).view(1, -1), (row % across).view(-1, 1)
        order = torch.where(column == place, across - 1, column - (column > place).int())
        return every[row.view(-1, 1).long(), order.long()].view(rows * across, -1)


class CountedSpace(Space):
    """A space whose blocks reach pairs that only the reference tells: the pairs of its matrices are counted."""

    def __init__(self, recipe: Recipe, numbers: Numbers, outer: Outer, seed: int = 0) -> None:
        super().__init__(recipe, numbers, outer, seed)
        self.seen = torch.zeros(recipe.scale.codes, 2 * numbers.sign, dtype=torch.bool, device=numbers.device)
        """Whether a matrix held a stored scale and a number, as bits."""

    def saw(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Mark the pairs of a matrix."""
        self.seen[scales.flatten().long(), bits.flatten().long() & (2 * self.numbers.sign - 1)] = True

    @property
    def pairs(self) -> int:
        """Number of pairs of a number and a stored scale that the matrices held."""
        return int(self.seen.sum())


def outers(recipe: Recipe, numbers: Numbers, count: int, seed: int) -> tuple[list[Outer], int]:
    """The tensor amaxes, or given scales, of a proof, and the number of all: the ends, powers of two and a sample, or
    all if `count` is at least their number. A recipe without a tensor scale has a single `Outer`."""
    if recipe.tensor_scale == "none":
        return [Outer()], 1
    generator = torch.Generator().manual_seed(seed)
    if recipe.tensor_scale == "given":
        drawn = torch.randint(1, 0x7F800000, (max(0, count - len(_GIVEN)),), generator=generator, dtype=torch.int32)
        return [Outer(scale=scale) for scale in (*_GIVEN, *drawn.view(torch.float32).tolist())][:count], 0x7F800000
    top = numbers.infinity + (recipe.nan == "propagate")
    reached = range(top + 1) if recipe.transform is None else rotated_magnitudes(recipe.transform, numbers).tolist()
    if numbers.complete and count > top:
        return [Outer(amax=amax) for amax in reached], top + 1
    exact = torch.tensor([recipe.max_product, 1.0, 2.0**-14, recipe.element.max]).to(numbers.dtype)
    known = [bits + step for bits in numbers.bits(exact).tolist() for step in (0, -1, 1)]
    known += [numbers.infinity - 1, numbers.infinity, 0, 1, 2, top]
    sample = torch.randint(0, numbers.infinity, (count,), generator=generator).tolist()
    possible = reached if recipe.transform is None else set(reached)
    chosen = [amax for amax in dict.fromkeys([*known, *sample]) if amax in possible]
    return [Outer(amax=amax) for amax in chosen[:count]], top + 1


_GIVEN = (1.0, 2.0**-126, 2.0**127, 2.0**-149, 3.4028234663852886e38, 0.3333333432674408, 448.0, 2.0**-6)
"""Given scales of every proof: ends of float32, powers of two, and scales that round."""


def rotated_magnitudes(rotation: Hadamard, numbers: Numbers) -> torch.Tensor:
    """Magnitudes of a group whose numbers are 0 but for one, behind the rotation, ascending: int32 (n,)."""
    every = numbers.float(numbers.arange(numbers.infinity + 1)) * coefficient(rotation.group)
    found: torch.Tensor = torch.unique(numbers.bits(every.to(numbers.dtype)))
    return found


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.int32) if numbers.dtype == torch.float32 else numbers.int()


def _ulps(numbers: Numbers) -> torch.Tensor:
    return torch.arange(-2, 3, dtype=torch.int32, device=numbers.device)


def _first(reached: Callable[[torch.Tensor], torch.Tensor], top: torch.Tensor) -> torch.Tensor:
    """The least magnitude that meets `reached`, a monotone condition; `top` if no smaller one meets it."""
    low, high = torch.zeros_like(top), top.clone()
    for _ in range(32):
        middle = low + (high - low) // 2
        holds = reached(middle)
        high = torch.where(holds, middle, high)
        low = torch.where(holds, low, torch.minimum(middle + 1, high))
    return high
