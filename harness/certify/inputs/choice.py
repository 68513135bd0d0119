"""The space of a recipe that chooses the scale of a block from two candidates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch

from narrowgauge.harness.certify.inputs.space import CountedSpace, Numbers, Outer
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.scaling import element_factors, unrounded_scales
from narrowgauge.spec.recipes import Recipe


class ChoiceSpace(CountedSpace):
    """The space of a recipe that chooses the scale of a block from two candidates by the error of the block.

    A class is a candidate and a stored scale. A block holds the amax, numbers of the class, and copies of the number
    that speaks most for the candidate. The pairs whose block took the other candidate come again beside more copies.
    """

    def __init__(self, recipe: Recipe, numbers: Numbers, outer: Outer, seed: int = 0) -> None:
        super().__init__(recipe, numbers, outer, seed)
        row = numbers.float(self.amaxes).view(1, -1)
        base = unrounded_scales(row, self.tensor, recipe, numbers.dtype)
        tops, scales = [], []
        for factor in (1.0, 1.5):
            stored = encode(base * factor, recipe.scale).flatten()
            found, owner = torch.unique(stored, return_inverse=True)
            tops.append(torch.zeros_like(found, dtype=torch.int32).scatter_reduce(0, owner, self.amaxes, "amax"))
            scales.append(found)
        self._of_four = torch.repeat_interleave(
            torch.tensor([False, True], device=numbers.device),
            torch.tensor([len(each) for each in scales]).to(numbers.device),
        )
        self.tops, self.scales = torch.cat(tops), torch.cat(scales)
        self.factors = element_factors(self.scales.view(1, -1), self.tensor, recipe, numbers.dtype).flatten()

    @cached_property
    def _fillers(self) -> torch.Tensor:
        """For every class the number whose error speaks most for its candidate: int32 (C,)."""
        share = torch.arange(1, 1025, device=self.numbers.device) / 1024
        tops = self.tops.clamp(max=self.numbers.infinity - 1)
        values = (self.numbers.float(tops).view(-1, 1) * share).to(self.numbers.dtype)
        base = unrounded_scales(self.numbers.float(tops).view(1, -1), self.tensor, self.recipe, self.numbers.dtype)
        errors = []
        for factor in (1.0, 1.5):
            stored = encode(base * factor, self.recipe.scale)
            each = element_factors(stored, self.tensor, self.recipe, self.numbers.dtype).view(-1, 1)
            scaled = values.float() * each
            rounded = decode(encode(scaled, self.recipe.element), self.recipe.element)
            errors.append((rounded - scaled).abs() / each)
        gain = torch.where(self._of_four.view(-1, 1), errors[0] - errors[1], errors[1] - errors[0])
        return self.numbers.bits(values.gather(1, gain.nan_to_num(nan=-torch.inf).argmax(1, keepdim=True))).flatten()

    def sheets(self) -> Iterator[torch.Tensor]:
        """Blocks of every matrix of the proof. `saw` is called between two matrices."""
        size = self.grid.size
        for tested in dict.fromkeys((size - 4, size // 2, size // 4, 1)):
            classes, numbers = self._missing()
            starts = torch.nn.functional.pad(torch.bincount(classes, minlength=len(self.tops)).cumsum(0), (1, 0))
            groups = -(-starts.diff() // tested)
            of_block = torch.repeat_interleave(groups)
            within = torch.arange(len(of_block), device=of_block.device) - (groups.cumsum(0) - groups)[of_block]
            yield from self._sheets(
                len(of_block), partial(self._tested_blocks, classes, numbers, starts, of_block, within, tested)
            )

    def _missing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Classes and numbers of the pairs that no matrix held, by class. NaN always takes the first candidate."""
        count = torch.where(self._of_four, 2 * self._magnitudes, self.lengths)
        classes = torch.repeat_interleave(count)
        index = torch.arange(len(classes), device=classes.device) - (count.cumsum(0) - count)[classes]
        numbers = self.number(classes, index.view(-1, 1)).flatten()
        missing = ~self.seen[self.scales[classes].long(), numbers.long() & (2 * self.numbers.sign - 1)]
        return classes[missing], numbers[missing]

    def _tested_blocks(
        self,
        classes: torch.Tensor,
        numbers: torch.Tensor,
        starts: torch.Tensor,
        of_block: torch.Tensor,
        within: torch.Tensor,
        tested: int,
        first: int,
        count: int,
    ) -> torch.Tensor:
        """Blocks of the amax, of `tested` numbers of a class, and of its filler."""
        owner, place = of_block[first : first + count], within[first : first + count]
        lane = torch.arange(tested, device=owner.device)
        some = (starts[owner] + place * tested).view(-1, 1) + lane
        numbers_of = numbers[some.minimum(starts[owner + 1].view(-1, 1) - 1)]
        amax = (self.tops[owner] - (place & 1).int() * self.numbers.sign).view(-1, 1)
        fillers = self._fillers[owner].view(-1, 1).expand(-1, self.grid.size - 1 - tested)
        return torch.cat([amax, numbers_of, fillers], 1)

    @property
    def unreached(self) -> int:
        """Pairs of a number and a scale of a candidate that no matrix held."""
        return len(self._missing()[0])
