"""The space of a recipe that rotates: the numbers behind the rotation.

A rotated number is a signed sum of the numbers of its group times c, rounded to bfloat16. A group with a single number
u has ±u·c everywhere. A group with four numbers ±v and a number u has ±u·c in three quarters of its places and
±4·v·c ± u·c in the others. So u gives the rotated number, and v the amax beside it.
"""

from __future__ import annotations

from functools import cached_property

import torch

from narrowgauge.harness.certify.inputs.space import CountedSpace, rotated_magnitudes
from narrowgauge.reference.quantize.hadamard import coefficient, signs, transform
from narrowgauge.spec.recipes import Hadamard


class RotatedSpace(CountedSpace):
    """Classes of the amaxes of rotated blocks, and blocks of which each group has one rotated number.

    The first group of a block has the amax. A group as long as a block has the amax and a number.
    """

    @property
    def _rotation(self) -> Hadamard:
        assert self.recipe.transform is not None
        return self.recipe.transform

    @property
    def _width(self) -> int:
        """Columns of a block, or of a group that is longer."""
        return max(self._rotation.group, self.grid.width)

    @property
    def _groups(self) -> int:
        return self.grid.height * self._width // self._rotation.group

    @property
    def beside(self) -> int:
        """Numbers of a block beside its amax."""
        return max(1, self._groups - 1)

    @property
    def across(self) -> int:
        """Blocks of the proof in a row: a group that is longer than a block has several blocks."""
        return self.grid.across * self.grid.width // self._width

    def _amaxes(self) -> torch.Tensor:
        found = rotated_magnitudes(self._rotation, self.numbers)
        return found[found <= (self.numbers.infinity if self.outer.amax is None else self.outer.amax)]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Numbers of every class, both signs: int64 (C,). A NaN makes its whole group NaN."""
        return 2 * self._magnitudes

    @property
    def in_blocks(self) -> torch.Tensor:
        """Magnitudes of every class: a rotated number has both signs in its group."""
        return self._magnitudes

    def number(self, classes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The magnitudes `index` (n, w) of classes (n,)."""
        return super().number(classes, 2 * index)

    def listed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of all pairs as bits (n, w), some of them several times, and their classes (n,)."""
        bits, classes = super().listed()
        return torch.cat([bits, bits - self.numbers.sign]), classes.repeat(2)

    @property
    def unreached(self) -> int:
        """Pairs of a number and a scale that no matrix held."""
        return int(self.lengths.sum()) - self.pairs

    def amax_blocks(self, first: int, count: int) -> torch.Tensor:
        """Blocks with every amax, positive and then negative, beside smaller numbers if blocks have several groups."""
        blocks = super().amax_blocks(first, count)
        return blocks if self._groups > 1 else self.alone(blocks[:, 0])

    def alone(self, amaxes: torch.Tensor) -> torch.Tensor:
        """Blocks of these amaxes (n,), and no further number."""
        return super().alone(amaxes) if self._groups > 1 else amaxes.view(-1, 1).expand(-1, 2)

    # ---- matrices ----------------------------------------------------------------------------------------------------

    @cached_property
    def _sources(self) -> torch.Tensor:
        """For every magnitude the least u whose rotated magnitude |u·c| is not smaller, finite for a finite one."""
        every, infinity = self.numbers.arange(self.numbers.infinity + 1), self.numbers.infinity
        rotated = self.numbers.bits((self.numbers.float(every) * coefficient(self._rotation.group)).to(torch.bfloat16))
        found = torch.searchsorted(rotated, every).int()
        return torch.where(every < infinity, found.clamp(max=infinity - 1), infinity)

    def _source(self, rotated: torch.Tensor) -> torch.Tensor:
        """Numbers u of a single number in a group, from rotated numbers, both as bits."""
        found = self._sources[self.numbers.magnitude(rotated).long()]
        return torch.where(rotated < 0, found - self.numbers.sign, found)

    def matrix(self, blocks: torch.Tensor, place: int) -> torch.Tensor:
        """The matrix before the rotation. `place` chooses the places of the numbers in a group."""
        group = self._rotation.group
        x = torch.zeros(len(blocks), self._groups, group, dtype=torch.bfloat16, device=self.numbers.device)
        if self._groups > 1:
            x[:, :, (place + 1) % group] = self.numbers.tensor(self._source(blocks).roll(place, 1))
        else:
            u = self.numbers.tensor(self._source(blocks[:, 1]))
            base, pattern = place // 4 * 4 % group, place % 4
            of_copies = [1.0 - 2.0 * ((at & pattern).bit_count() % 2) for at in range(4)]
            sign = signs(self._rotation)[base : base + 4] * torch.tensor(of_copies)
            x[:, 0, base : base + 4] = self._copies(blocks[:, 0], u).unsqueeze(1) * sign.to(x)
            x[:, 0, base ^ 4] = u
        tiles = x.view(-1, self.across, self.grid.height, self._width)
        return tiles.transpose(1, 2).reshape(-1, self.across * self._width)

    def _copies(self, amaxes: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Numbers v, bfloat16, with 4·v·c + |u|·c at most the amax, and nearest to it; 0 beside an infinite u."""
        largest = self.numbers.float(self.numbers.magnitude(amaxes)).double() / coefficient(self._rotation.group)
        exact = ((largest - u.double().abs()) / 4).nan_to_num(0.0, posinf=0.0, neginf=0.0).clamp(min=0).float()
        return (exact.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The rotated numbers."""
        return transform(x, self.recipe)

    def amaxes_of(self, blocks: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        """The amax of each block of a matrix, int32, with its sign."""
        bits = self.grid.blocks(self.numbers.bits(quantized))
        return bits.gather(1, self.numbers.magnitude(bits).argmax(1, keepdim=True)).flatten()

    def saw(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Mark the pairs of a matrix, but for NaN."""
        number = self.numbers.magnitude(bits) <= self.numbers.infinity
        super().saw(bits[number], scales[number])
