"""Deviations of a quantizer, and the replay of the reference with a deviation.

A replay computes each stage from the kernel's own result of the stage before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.quantized import Subject, used_scale
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import pack, swap_nibbles, swizzle
from narrowgauge.reference.quantize.scaling import element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, encode_elements, random_bytes, row_amax, stored_scales
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Recipe

Override = Callable[["Replay"], torch.Tensor]
"""Replacement of a stage of the reference."""
ScaleFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, Recipe], torch.Tensor]
"""Function from x, its block amaxes, the amax, the tensor scale and the recipe to stored scales."""


@dataclass(frozen=True)
class QuantizeDeviation:
    """A single known mistake of a quantizer."""

    cause: str
    sentence: str
    stages: frozenset[str]
    """Stages that the deviation can change. To be an explanation, it must give the kernel's bytes in all of them."""
    recipe: Recipe | None = None
    """Changed recipe, if the mistake is a different choice in the recipe."""
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """Replacements of stages, of `x` (the rotated matrix) or of `blocks` (the block amaxes)."""
    optional_stages: frozenset[str] = frozenset()
    """Further stages that the deviation may change or not: a kernel can compute the tensor's amax separately."""
    row_local: bool = True
    """Whether rows of the stages in `ROW_STAGES` depend only on the same rows of the matrix."""
    exact: bool = True
    """Whether the deviation predicts the bytes. If not, it only describes how the bytes can arise."""
    of_case: bool = False
    """Whether the deviation holds numbers of the case, such as the amax of an earlier call. It says nothing about other
    inputs."""
    implausible: bool = False
    """Whether the mistake is less plausible than a choice of an existing library."""


class Replay:
    """The reference with a deviation, on a kernel's matrix. Without a deviation it is the plain reference."""

    def __init__(self, kernel_matrix: KernelMatrix, deviation: QuantizeDeviation | None = None) -> None:
        self.kernel_matrix = kernel_matrix
        self.overrides: Mapping[str, Override] = deviation.overrides if deviation else {}
        subject = kernel_matrix.subject
        self.recipe: Recipe = (deviation.recipe if deviation else None) or subject.recipe
        self.subject: Subject = subject if self.recipe is subject.recipe else replace(subject, recipe=self.recipe)
        self._changed_stages = deviation.stages if deviation else frozenset()

    @property
    def matrix(self) -> torch.Tensor:
        """The matrix (M, K) before the rotation."""
        return self.subject.matrix

    @cached_property
    def x(self) -> torch.Tensor:
        """The quantized matrix (M, K), rotated if the recipe rotates."""
        if "x" in self.overrides:
            return self.overrides["x"](self)
        if self.recipe.transform == self.kernel_matrix.subject.recipe.transform:
            return self.kernel_matrix.subject.x
        return transform(self.matrix, self.recipe) if self.recipe.transform else self.matrix

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Block amaxes of `x`."""
        if "blocks" in self.overrides:
            return self.overrides["blocks"](self)
        if self.x is self.kernel_matrix.subject.x and self.recipe is self.kernel_matrix.subject.recipe:
            return self.kernel_matrix.subject.blocks
        return block_amaxes(self.x, self.recipe)

    @cached_property
    def amax(self) -> torch.Tensor | None:
        """Amax of the tensor from which scales are computed: the kernel's amax, if the kernel reports it."""
        if self.recipe.tensor_scale == "none":
            return None
        if "amax" in self.kernel_matrix.kernel_stages:
            return self.kernel_matrix.kernel_stages["amax"]
        if "amax" in self._changed_stages or self.kernel_matrix.reference_amax is None:
            return self.compute_stage("amax")
        return self.kernel_matrix.reference_amax

    @cached_property
    def tensor_scale(self) -> torch.Tensor | None:
        """Tensor scale from which block scales are computed: the kernel's scale, if it reports a scale of this form."""
        if self.recipe.tensor_scale == "none":
            return None
        if self.recipe.tensor_scale == "given" and self.kernel_matrix.given_tensor_scale is not None:
            return self.kernel_matrix.given_tensor_scale
        recipes = (self.recipe, self.kernel_matrix.subject.recipe)
        is_decode_scale, kernel_is_decode_scale = (recipe.tensor_scale == "amax/max" for recipe in recipes)
        if "tensor scale" in self.kernel_matrix.kernel_stages and is_decode_scale == kernel_is_decode_scale:
            return self.kernel_matrix.kernel_stages["tensor scale"]
        return self.compute_stage("tensor scale")

    @cached_property
    def used_tensor_scale(self) -> torch.Tensor | None:
        """Tensor scale by which elements are scaled."""
        return used_scale(self.tensor_scale, self.scales, self.kernel_matrix.result)

    @property
    def scales(self) -> torch.Tensor:
        """Linear block scales of the kernel."""
        return self.kernel_matrix.kernel_stages["scales"]

    @cached_property
    def factors(self) -> torch.Tensor:
        """Factors or divisors of the elements, for every row: float32 (M, ⌈K/block⌉)."""
        blocks = self.blocks if self.recipe.element_scale == "x*(max/amax)" else None
        factors = element_factors(self.scales, self.used_tensor_scale, self.recipe, self.x.dtype, blocks)
        return per_row(factors, self.recipe, self.x.shape[0])

    @cached_property
    def scaled_elements(self) -> torch.Tensor:
        """Elements before they are rounded to codes, float32 (M, K)."""
        return self.scale_with(self.factors)

    @cached_property
    def rounding_bytes(self) -> torch.Tensor | None:
        """Random byte of each element, uint8 (M, K). None if the recipe does not round stochastically."""
        if self.subject.random is None:
            return None
        rows, columns = self.x.shape
        width = self.recipe.block[1]
        return random_bytes(
            self.subject.random, (rows, columns), slice(0, rows), self.x.device, width, self.subject.first
        )

    def scale_with(self, factors: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        """`scaled_elements` with these factors, and with a changed `x` if it is given."""
        return scale_elements(self.x if x is None else x, factors, self.used_tensor_scale, self.recipe)

    def encode_scaled(self, scaled_elements: torch.Tensor) -> torch.Tensor:
        """Codes of scaled elements by the rounding of the recipe, a byte for each element: uint8 (M, K)."""
        return element_codes(scaled_elements, self.recipe, self.rounding_bytes)

    def pack_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes in their stored form, from a byte for each element."""
        if self.recipe.element.bits != 4:
            return codes
        packed = pack(codes)
        return packed if self.recipe.packing == "low-first" else swap_nibbles(packed)

    def store_scales(self, scale_function: ScaleFunction) -> torch.Tensor:
        """Stored scales by `scale_function`. For a transposed matrix it runs on the rows of the untransposed matrix."""
        if not self.subject.transposed:
            return scale_function(self.x, self.blocks, self.amax, self.tensor_scale, self.recipe)
        rows = self.x.T.contiguous()
        scales = scale_function(rows, block_amaxes(rows, self.recipe), self.amax, self.tensor_scale, self.recipe)
        height = self.recipe.block[0]
        return scales[::height].T.repeat_interleave(height, 0)[: self.x.shape[0]].contiguous()

    def compute_stage(self, name: str) -> torch.Tensor:
        """Result of the stage, in the form of `KernelMatrix.kernel_stages`.

        Raises ValueError if the recipe refuses its input.
        """
        if name in self.overrides:
            return self.overrides[name](self)
        if name in ("amax", "tensor scale") and self.recipe.tensor_scale == "none":
            # The changed recipe has no tensor scale, so it does not determine this stage.
            return Replay(self.kernel_matrix).compute_stage(name)
        if name == "amax" and self.subject.amax_given:
            assert self.kernel_matrix.reference_amax is not None
            return self.kernel_matrix.reference_amax
        if name == "amax":
            return tensor_amax(self.blocks) if self.recipe.granularity == "tensor" else row_amax(self.blocks)
        if name == "tensor scale":
            if self.kernel_matrix.given_tensor_scale is not None:
                return self.kernel_matrix.given_tensor_scale
            assert self.amax is not None
            return tensor_scale(self.amax, self.recipe, self.x.dtype)
        if name == "layout":
            return swizzle(self.scales)
        if name == "scales":
            return self.store_scales(stored_scales)
        assert name == "codes"
        return encode_elements(
            self.x, self.scales, self.used_tensor_scale, self.recipe, self.subject.random, self.subject.first,
            self.blocks if self.recipe.scale is FP32 and not self.recipe.whole else None,
        )  # fmt: skip


def can_replay_rows(deviation: QuantizeDeviation, kernel_matrix: KernelMatrix) -> bool:
    """Whether the deviation can be replayed on some rows of the matrix. The rows do not give the tensor's amax."""
    return deviation.row_local and ("amax" in kernel_matrix.kernel_stages or "amax" not in deviation.stages)
