"""The replay of the reference quantizer with a deviation.

A replay computes each stage from the kernel's own result of the stage before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.operations.stages.deviation import Deviation
from narrowgauge.harness.operations.stages.quantized import Subject, used_scale
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.numbers.rounding import stochastic
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import pack, swap_nibbles, swizzle
from narrowgauge.reference.quantize.scaling import element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, encode_elements, random_bytes, row_amax, stored_scales
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipes import Recipe

ScaleFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, Recipe], torch.Tensor]
"""Function from x, its block amaxes, the amax, the tensor scale and the recipe to stored scales."""
QuantizeDeviation = Deviation[Recipe]
"""A deviation of a quantizer. `change` has the replay without the deviation and gives the changed result of the step: a
stage, a step of `Replay` (`_step`), the recipe, or the matrix that a section holds."""
T = TypeVar("T")


def _step(*names: str) -> Callable[[Callable[[Replay], T]], cached_property[T]]:
    """A step of the reference. Deviations of a step with one of these names replace its result."""

    def decorate(compute: Callable[[Replay], T]) -> cached_property[T]:
        return cached_property(lambda replay: replay.changed() if replay.step in names else compute(replay))

    return decorate


_STEPS_OF_CODES = ("factors", "elements", "scaled elements", "element codes", "random bytes")


class Replay:
    """The reference with a deviation, on a kernel's matrix. Without a deviation it is the plain reference."""

    def __init__(self, kernel_matrix: KernelMatrix, deviation: QuantizeDeviation | None = None) -> None:
        self.kernel_matrix, self._deviation = kernel_matrix, deviation
        self.step = deviation.step if deviation else ""
        if self.step == "matrix":
            self.kernel_matrix = self.changed()
        subject = self.kernel_matrix.subject
        self.recipe: Recipe = self.changed() if self.step == "recipe" else subject.recipe
        self.subject: Subject = subject if self.recipe is subject.recipe else replace(subject, recipe=self.recipe)
        self._changed_stages = deviation.stages if deviation else frozenset()

    def changed(self) -> Any:
        """The changed result of the step of the deviation."""
        assert self._deviation is not None
        return self._deviation.result(Replay(self.kernel_matrix))

    @property
    def matrix(self) -> torch.Tensor:
        """The matrix (M, K) before the rotation."""
        return self.subject.matrix

    @_step("x", "rotation")
    def x(self) -> torch.Tensor:
        """The quantized matrix (M, K), rotated if the recipe rotates."""
        if self.recipe.transform == self.kernel_matrix.subject.recipe.transform:
            return self.kernel_matrix.subject.x
        return transform(self.matrix, self.recipe) if self.recipe.transform else self.matrix

    @_step("blocks")
    def blocks(self) -> torch.Tensor:
        """Block amaxes of `x`."""
        if self.x is self.kernel_matrix.subject.x and self.recipe is self.kernel_matrix.subject.recipe:
            return self.kernel_matrix.subject.blocks
        return block_amaxes(self.x, self.recipe)

    @_step("used amax")
    def amax(self) -> torch.Tensor | None:
        """Amax of the tensor from which scales are computed: the kernel's amax, if the kernel reports it."""
        if self.recipe.tensor_scale == "none":
            return None
        if "amax" in self.kernel_matrix.kernel_stages:
            return self.kernel_matrix.kernel_stages["amax"]
        if "amax" in self._changed_stages or self.kernel_matrix.reference_amax is None:
            return self.compute_stage("amax")
        return self.kernel_matrix.reference_amax

    @_step("used tensor scale")
    def tensor_scale(self) -> torch.Tensor | None:
        """Tensor scale from which block scales are computed: the kernel's scale, if it reports a scale of this form."""
        if self.recipe.tensor_scale == "none":
            return None
        if self.step == "used amax":
            return self.correct_tensor_scale
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

    @property
    def correct_tensor_scale(self) -> torch.Tensor:
        """Tensor scale of `amax`."""
        assert self.amax is not None
        return tensor_scale(self.amax, self.recipe, self.x.dtype)

    @property
    def correct_amax(self) -> torch.Tensor:
        """Amax of the tensor or of each row, by the granularity of the recipe."""
        return self.amax_of(self.blocks)

    def amax_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Amax of the tensor or of each row, from block amaxes."""
        return tensor_amax(blocks) if self.recipe.granularity == "tensor" else row_amax(blocks)

    @property
    def decoded_scales(self) -> torch.Tensor:
        """Block scales of the kernel, float32."""
        return self.scales if self.recipe.scale is FP32 else decode(self.scales, self.recipe.scale)

    @property
    def tensor_scale_column(self) -> torch.Tensor:
        """The tensor scale of each row, or of all rows: (M, 1) or (1, 1)."""
        assert self.used_tensor_scale is not None
        return self.used_tensor_scale.unsqueeze(1)

    def of_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Numbers of the blocks of every row, from a number for each stored scale."""
        return per_row(blocks, self.recipe, self.x.shape[0])

    def of_elements(self, blocks: torch.Tensor) -> torch.Tensor:
        """A number for each element, (M, K), from a number for each stored scale."""
        rows, columns = self.of_rows(blocks), self.x.shape[1]
        if self.recipe.spans_k:
            return rows.expand(-1, columns)
        return rows.repeat_interleave(self.recipe.block[1], 1)[:, :columns]

    @_step("factors")
    def factors(self) -> torch.Tensor:
        """Factors or divisors of the elements, for every row: float32 (M, ⌈K/block⌉)."""
        blocks = self.blocks if self.recipe.element_scale == "x*(max/amax)" else None
        factors = element_factors(self.scales, self.used_tensor_scale, self.recipe, self.x.dtype, blocks)
        return self.of_rows(factors)

    @_step("elements")
    def elements(self) -> torch.Tensor:
        """The elements that are scaled, (M, K)."""
        return self.x

    @_step("scaled elements")
    def scaled_elements(self) -> torch.Tensor:
        """Elements before they are rounded to codes, float32 (M, K)."""
        return scale_elements(self.elements, self.factors, self.used_tensor_scale, self.recipe)

    @_step("element codes")
    def element_codes(self) -> torch.Tensor:
        """Codes by the rounding of the recipe, a byte for each element: uint8 (M, K)."""
        if self.step == "random bytes":  # or numbers from 0 to 256 in their place
            numbers = self.changed()
            numbers = numbers if numbers.dtype == torch.uint8 else numbers.clone()
            return encode(stochastic(self.scaled_elements, self.recipe.element, numbers), self.recipe.element)
        return element_codes(self.scaled_elements, self.recipe, self.rounding_bytes)

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
        if name == self.step:
            result: torch.Tensor = self.changed()
            return result
        if (name, self.step) == ("tensor scale", "used tensor scale"):
            assert self.tensor_scale is not None
            return self.tensor_scale
        if name in ("amax", "tensor scale") and self.recipe.tensor_scale == "none":
            # The changed recipe has no tensor scale, so it does not determine this stage.
            return Replay(self.kernel_matrix).compute_stage(name)
        if name == "amax" and self.subject.amax_given:
            assert self.kernel_matrix.reference_amax is not None
            return self.kernel_matrix.reference_amax
        if name == "amax":
            return self.correct_amax
        if name == "tensor scale":
            if self.kernel_matrix.given_tensor_scale is not None:
                return self.kernel_matrix.given_tensor_scale
            return self.correct_tensor_scale
        if name == "layout":
            return swizzle(self.scales)
        if name == "scales":
            return self.store_scales(stored_scales)
        assert name == "codes"
        if self.step in _STEPS_OF_CODES:
            return self.pack_codes(self.element_codes)
        return encode_elements(
            self.x, self.scales, self.used_tensor_scale, self.recipe, self.subject.random, self.subject.first,
            self.blocks if self.recipe.scale is FP32 and not self.recipe.whole else None,
        )  # fmt: skip


def can_replay_rows(deviation: QuantizeDeviation, kernel_matrix: KernelMatrix) -> bool:
    """Whether the deviation can be replayed on some rows of the matrix. The rows do not give the tensor's amax."""
    return deviation.row_local and ("amax" in kernel_matrix.kernel_stages or "amax" not in deviation.stages)
