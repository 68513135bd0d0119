"""Tensors in shards of several processes, and their expected quantized shards, joined."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.ops import Quantized
from narrowgauge.spec.quantized import words_shape
from narrowgauge.spec.recipes import Recipe, find_recipe, recipe_names
from tests.golden import bits

Halves = tuple[Quantized | None, Quantized | None]
_KINDS = (
    "nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-rht32", "nvfp4-rht-sr", "nvfp4-2d-sr", "nvfp4-4over6-448-mse",
    "nvfp4-2d-4over6-256-mae", "mxfp8-e4m3", "mxfp8-2d", "fp8-block-1x128-e4m3-pow2", "fp8-block-128x128-e4m3-fp32",
    "fp8-current-e4m3", "fp8-current-e5m2-pow2", "fp8-delayed-e4m3-bulk",
)  # fmt: skip
_COUNTS = {2: [(1, 1), (0, 3), (2, 0)], 4: [(1, 1, 1, 1), (0, 2, 0, 1), (3, 1, 2, 0)]}
"""Blocks of the shards of either process, by the number of processes."""
Words = tuple[torch.Tensor | None, torch.Tensor | None] | None


@dataclass(frozen=True)
class Sharded:
    """A matrix in shards of `extents` along `dim`, a shard per process, all `across` along the second dimension."""

    name: str
    dim: int
    extents: tuple[int, ...]
    across: int
    dtype: torch.dtype = torch.bfloat16
    columnwise: bool = True
    special: tuple[float, ...] = ()
    """First elements of the nonempty shards, in turn."""
    nan: str = "ignore"

    def __str__(self) -> str:
        extents, dtype = "+".join(map(str, self.extents)), str(self.dtype).removeprefix("torch.")
        of = f"{self.name} {dtype}, {('rows', 'columns')[self.dim]} {extents} across {self.across}"
        return f"{of}, {self.nan} {self.special}" if self.special else of

    @property
    def recipe(self) -> Recipe:
        found = find_recipe(self.name)
        return replace(found, nan="propagate") if self.nan == "propagate" else found

    @property
    def shape(self) -> tuple[int, int]:
        total = sum(self.extents)
        return (total, self.across) if self.dim == 0 else (self.across, total)

    def whole(self) -> torch.Tensor:
        """The matrix: numbers of a different magnitude in every shard, so that any shard may have the amax."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        x = torch.randn(self.shape, generator=generator)
        parts = x.split(self.extents, self.dim)
        for part, power in zip(parts, torch.randperm(len(parts), generator=generator).tolist(), strict=True):
            part.mul_(2.0 ** (2 * power - 3))
        for part, value in zip((part for part in parts if part.numel()), self.special, strict=False):
            part[0, 0] = value
        return x.to(self.dtype)

    def shard(self, rank: int) -> torch.Tensor:
        """The shard of process `rank`."""
        return self.whole().split(self.extents, self.dim)[rank]

    def words(self) -> Words:
        """Random words of the wanted halves of the matrix, if the recipe rounds stochastically."""
        if self.recipe.rounding != "stochastic":
            return None
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        low, high = -(1 << 31), 1 << 31
        row, column = (
            torch.randint(low, high, words_shape(shape), generator=generator).to(torch.int32)
            for shape in (self.shape, self.shape[::-1])
        )
        return row, column if self.columnwise else None

    def shard_words(self, rank: int) -> Words:
        """The words of the shard of process `rank`: a word is of four elements along a row."""
        if (words := self.words()) is None:
            return None
        fours = [-(-extent // 4) for extent in self.extents]
        row, column = (
            half if half is None else half.split(fours if along == 1 else self.extents, along)[rank].contiguous()
            for half, along in zip(words, (self.dim, 1 - self.dim), strict=True)
        )
        return row, column

    def scale(self) -> torch.Tensor | None:
        """The encode scale of delayed scaling."""
        return torch.tensor([3.5]) if self.recipe.tensor_scale == "given" else None


def _splits(recipe: Recipe) -> bool:
    """Whether shards along either dimension can be quantized alone, given the amax of the whole tensor."""
    return recipe.granularity == "tensor" and (recipe.whole or not recipe.spans_k)


def sharded_matrices(world: int) -> list[Sharded]:
    """Every recipe in shards, in turn even, uneven and with empty shards; of each kind a recipe along both dimensions.

    With more than two processes, these recipes alone.
    """
    names = [name for name in recipe_names() if "@" not in name and _splits(find_recipe(name))]
    names = [*names, "nvfp4@te-2.8", "nvfp4@torchao", "nvfp4@compressed-tensors"] if world == 2 else list(_KINDS)
    found = []
    for number, name in enumerate(names):
        r = find_recipe(name)
        for dim in (0, 1) if name in _KINDS else (number % 2,):
            # Whole blocks, but for the last shard; of a rotation whole groups there too.
            step = 1 if r.whole else max(*r.block, r.transform.group if r.transform and dim == 0 else 1)
            short = 0 if r.transform is not None and dim == 0 else step // 2
            across = max(16, r.transform.group) if r.transform and dim == 1 else 24
            several = _COUNTS[world][(number + dim) % len(_COUNTS[world])]
            extents = [count * step * (11 if r.whole else 1) for count in several]
            extents[max(rank for rank, count in enumerate(several) if count)] += short
            found.append(Sharded(name, dim, tuple(extents), across))
    nothing = (0,) * world
    # Blocks lie across the shards: any extents will do, of a rowwise half alone.
    found += [Sharded(name, 0, (*nothing[2:], 5, 8), 24, columnwise=False) for name in ("nvfp4", "nvfp4-sr", "mxfp4")]
    for name in ("nvfp4", "fp8-current-e4m3", "fp8-delayed-e5m2-bulk"):
        found += [Sharded(name, 1, (16,) * world, 24, dtype) for dtype in (torch.float32, torch.float16)]
        found.append(Sharded(name, 0, nothing, 24))
        for nan, special in (
            ("ignore", (torch.nan, -torch.inf)),
            ("ignore", (-torch.nan, 700.0)),
            ("propagate", (torch.nan, -torch.inf)),
            ("propagate", (5.0, torch.nan)),
        ):
            found.append(Sharded(name, 0, (*nothing[2:], 16, 32), 24, special=special, nan=nan))
    return found


def joined_differs(shards: Sequence[Quantized], whole: Quantized, dim: int) -> list[str]:
    """Parts of `shards`, joined along `dim` of their matrix, that differ from `whole`."""
    axis = 1 - dim if whole.transposed else dim
    found = []
    for name in ("codes", "scales", "amax", "tensor_scale"):
        parts, expected = [getattr(q, name) for q in shards], getattr(whole, name)
        if name == "codes" or (name == "scales" and not whole.recipe.whole):
            parts = [torch.cat(parts, axis)]
        if not all(same(part, expected) for part in parts):
            found.append(name)
    return found


def differences(shards: Sequence[Halves], whole: Halves, dim: int) -> list[str]:
    """Parts of the joined shards that differ from the whole matrix, bit for bit: "columnwise scales" and the like."""
    found = []
    for number, (side, expected) in enumerate(zip(("rowwise", "columnwise"), whole, strict=True)):
        parts = [half for halves in shards if (half := halves[number]) is not None]
        if expected is None or len(parts) != len(shards):
            found += [side] * (expected is not None or bool(parts))
        else:
            found += [f"{side} {name}" for name in joined_differs(parts, expected, dim if number == 0 else 1 - dim)]
    return found


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors have the same shape, dtype and bits, NaN being NaN; or neither is there."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((bits(one) == bits(other)) | (one.isnan() & other.isnan())).all())
