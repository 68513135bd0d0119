"""The reference with one known deviation, run stage by stage on what a kernel gave at the stage before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.harness.operations.stages.quantized import Subject, used_scale
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import pack, swap_nibbles, swizzle
from narrowgauge.reference.quantize.in_slabs import encode_elements
from narrowgauge.reference.quantize.steps import block_amaxes, random_bytes, row_amax, stored_scales
from narrowgauge.reference.quantize.scaling import element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Recipe

Hook = Callable[["Run"], torch.Tensor]
Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, Recipe], torch.Tensor]
"""x, its block amaxes, amax, the tensor's scale and the recipe to stored scales."""


@dataclass(frozen=True)
class QuantizeDeviation:
    """One thing that a kernel may do in place of what its recipe says."""

    cause: str
    sentence: str
    stages: frozenset[str]
    """Stages that it can change; those of the kernel have to be its own, byte for byte, right ones too."""
    recipe: Recipe | None = None
    """The recipe in place of the kernel's, where a recipe can say what the kernel does."""
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    """What takes the place of a stage, of `x` (the rotated matrix), or of `blocks` (the block amaxes)."""
    lenient: frozenset[str] = frozenset()
    """Further stages, which may be right or its own: a kernel may find the amax of a tensor by itself."""
    local: bool = True
    """Whether rows of `OF_ROWS` depend on the same rows of the matrix alone."""
    exact: bool = True
    """Whether it says what the bytes are, and not only how they came about."""
    odd: bool = False
    """Whether it is less plausible than a choice that some library makes."""


class Run:
    """A deviation on one matrix. Without one, the reference."""

    def __init__(self, evidence: Evidence, deviation: QuantizeDeviation | None = None) -> None:
        self.evidence = evidence
        self.hooks: Mapping[str, Hook] = deviation.hooks if deviation else {}
        own = evidence.subject.recipe
        self.recipe: Recipe = (deviation.recipe if deviation else None) or own
        same = self.recipe is own
        self.subject: Subject = evidence.subject if same else replace(evidence.subject, recipe=self.recipe)
        self._touches = deviation.stages if deviation else frozenset()

    @property
    def matrix(self) -> torch.Tensor:
        """(M, K), not yet rotated."""
        return self.subject.matrix

    @cached_property
    def x(self) -> torch.Tensor:
        """What is quantized, rotated where the recipe rotates."""
        if "x" in self.hooks:
            return self.hooks["x"](self)
        if self.recipe.transform == self.evidence.subject.recipe.transform:
            return self.evidence.subject.x
        return transform(self.matrix, self.recipe) if self.recipe.transform else self.matrix

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Block amaxes of `x`."""
        if "blocks" in self.hooks:
            return self.hooks["blocks"](self)
        if self.x is self.evidence.subject.x and self.recipe is self.evidence.subject.recipe:
            return self.evidence.subject.blocks
        return block_amaxes(self.x, self.recipe)

    @cached_property
    def amax(self) -> torch.Tensor | None:
        """The tensor's amax that scales are made of: the kernel's where it shows it."""
        if self.recipe.tensor_scale == "none":
            return None
        if "amax" in self.evidence.shown:
            return self.evidence.shown["amax"]
        if "amax" in self._touches or self.evidence.amax is None:
            return self.stage("amax")
        return self.evidence.amax

    @cached_property
    def encode(self) -> torch.Tensor | None:
        """The tensor's scale that block scales are made of: the kernel's where it shows one of this form."""
        if self.recipe.tensor_scale == "none":
            return None
        if self.recipe.tensor_scale == "given" and self.evidence.encode is not None:
            return self.evidence.encode
        decodes = [recipe.tensor_scale == "amax/max" for recipe in (self.recipe, self.evidence.subject.recipe)]
        if "tensor scale" in self.evidence.shown and decodes[0] == decodes[1]:
            return self.evidence.shown["tensor scale"]
        return self.stage("tensor scale")

    @cached_property
    def used(self) -> torch.Tensor | None:
        """The tensor's scale that elements are scaled by."""
        return used_scale(self.encode, self.scales, self.evidence.kernel)

    @property
    def scales(self) -> torch.Tensor:
        """The kernel's own block scales, linear."""
        return self.evidence.shown["scales"]

    @cached_property
    def factors(self) -> torch.Tensor:
        """What elements are multiplied or divided by, for every row: float32 (M, ⌈K/block⌉)."""
        blocks = self.blocks if self.recipe.element_scale == "x*(max/amax)" else None
        found = element_factors(self.scales, self.used, self.recipe, self.x.dtype, blocks)
        return per_row(found, self.recipe, self.x.shape[0])

    @cached_property
    def scaled(self) -> torch.Tensor:
        """What is rounded to codes, float32 (M, K)."""
        return self.scaled_by(self.factors)

    @cached_property
    def bytes(self) -> torch.Tensor | None:
        """The random byte of each element, uint8 (M, K), of recipes that round stochastically."""
        if self.subject.random is None:
            return None
        rows, columns = self.x.shape
        width = self.recipe.block[1]
        return random_bytes(
            self.subject.random, (rows, columns), slice(0, rows), self.x.device, width, self.subject.first
        )

    def scaled_by(self, factors: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """`scaled` with other factors, or of another `x`."""
        return scale_elements(self.x if x is None else x, factors, self.used, self.recipe)

    def coded(self, scaled: torch.Tensor) -> torch.Tensor:
        """The codes of scaled elements, rounded as the recipe says, one a byte: uint8 (M, K)."""
        return element_codes(scaled, self.recipe, self.bytes)

    def packed(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes one a byte, as they are stored."""
        if self.recipe.element.bits != 4:
            return codes
        found = pack(codes)
        return found if self.recipe.packing == "low-first" else swap_nibbles(found)

    def stored(self, store: Store) -> torch.Tensor:
        """The scales that `store` makes; of a transposed matrix, made along the rows of what it is the transpose of."""
        if not self.subject.transposed:
            return store(self.x, self.blocks, self.amax, self.encode, self.recipe)
        rows = self.x.T.contiguous()
        found = store(rows, block_amaxes(rows, self.recipe), self.amax, self.encode, self.recipe)
        height = self.recipe.block[0]
        return found[::height].T.repeat_interleave(height, 0)[: self.x.shape[0]].contiguous()

    def stage(self, name: str) -> torch.Tensor:
        """What the stage gives, as `Evidence.shown` holds it. Raises ValueError where the recipe refuses its input."""
        if name in self.hooks:
            return self.hooks[name](self)
        if name in ("amax", "tensor scale") and self.recipe.tensor_scale == "none":
            return Run(self.evidence).stage(name)  # nothing else is said of what is not used
        if name == "amax":
            return tensor_amax(self.blocks) if self.recipe.granularity == "tensor" else row_amax(self.blocks)
        if name == "tensor scale":
            if self.evidence.encode is not None:
                return self.evidence.encode
            assert self.amax is not None
            return tensor_scale(self.amax, self.recipe, self.x.dtype)
        if name == "layout":
            return swizzle(self.scales)
        if name == "scales":
            return self.stored(stored_scales)
        assert name == "codes"
        return encode_elements(
            self.x, self.scales, self.used, self.recipe, self.subject.random, self.subject.first,
            self.blocks if self.recipe.scale is FP32 and not self.recipe.whole else None,
        )  # fmt: skip


def by_rows(deviation: QuantizeDeviation, matrix: Evidence) -> bool:
    """Whether some rows of the matrix show what the deviation makes of them: they do not know an amax of the tensor."""
    return deviation.local and ("amax" in matrix.shown or "amax" not in deviation.stages)
