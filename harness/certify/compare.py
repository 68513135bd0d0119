"""A call of a kernel beside the reference on the same matrix: wrong scales of blocks and wrong codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.spec.quantized import Quantized, words_shape
from narrowgauge.spec.recipes import Recipe

_DRAWN = 1 << 20
"""Offsets of random bits for the calls of a part."""


@dataclass
class Parts:
    """A result in the form in which results are compared."""

    codes: torch.Tensor
    """uint8 (M, K), one code in a byte."""
    scales: torch.Tensor
    """Bits of the stored scales, linear: uint8 or int32."""
    amax: torch.Tensor | None
    """Bits of the returned amaxes, int32."""

    @staticmethod
    def of(q: Quantized) -> Parts:
        """The parts of a result."""
        scales = linear_scales(q)
        codes = elements(q.codes, q.shape[1], q.recipe)
        bits = scales.view(torch.int32) if scales.dtype == torch.float32 else scales
        return Parts(codes, bits, None if q.amax is None else q.amax.view(torch.int32))


class Tried(Protocol):
    """Calls of a kernel that trials of an assumption judge."""

    recipe: Recipe
    elements: int
    """Elements of the input of a trial, and a quarter of those of the largest shape."""
    count: int
    """Calls up to now."""

    def options(self, scale: torch.Tensor | None) -> dict[str, Any]:
        """The further arguments of a call with a given scale."""

    def input_of(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the kernel whose blocks have the numbers of a matrix (M, K)."""

    def judged(self, x: torch.Tensor, options: dict[str, Any]) -> tuple[int, int]:
        """Judge a call. Returns the number of blocks and of wrong bytes. Raises ValueError if the recipe refuses the
        amax, Unsupported, BackendError and HostLost."""


class Calls:
    """Calls of `quantize` of a backend for one recipe, counted."""

    elements = 1 << 19

    def __init__(self, backend: Backend, recipe: Recipe, seed: int = 0) -> None:
        self.backend, self.recipe, self.seed, self.count, self._drawn = backend, recipe, seed, 0, 0
        self._words: bool | None = None

    def takes_words(self, x: torch.Tensor, scale: torch.Tensor | None) -> bool:
        """Whether the kernel takes random words too, asked once with the matrix `x`; else seed and offset alone."""
        if self._words is None:
            words = torch.zeros(words_shape((x.shape[0], x.shape[1])), dtype=torch.int32, device=x.device)
            try:
                quantize(self.backend, x, self.recipe, scale=scale, random=words)
                self._words = True
            except (BackendError, Unsupported):
                self._words = False
        return self._words

    def begin(self, part: int) -> None:
        """Begin a part of the calls, whose random bits depend on its number and on no call of other parts."""
        self._drawn = part * _DRAWN

    def options(self, scale: torch.Tensor | None) -> dict[str, Any]:
        """The further arguments of a call: a given scale, and seed and offset of new random bits."""
        if self.recipe.rounding != "stochastic":
            return {"scale": scale}
        self._drawn += 1
        return {"scale": scale, "random": (self.seed, self._drawn)}

    def kernel(self, x: torch.Tensor, options: dict[str, Any]) -> Parts:
        """The result of the kernel. Raises Unsupported, BackendError and HostLost."""
        self.count += 1
        return Parts.of(quantize(self.backend, x, self.recipe, **options))

    def input_of(self, x: torch.Tensor) -> torch.Tensor:
        """The matrix itself."""
        return x

    def judged(self, x: torch.Tensor, options: dict[str, Any]) -> tuple[int, int]:
        """As of `Tried`."""
        expected = self.expected(x, options)
        kernel = self.kernel(x, options)
        scales = wrong_scales(kernel, expected)
        codes = wrong_codes(kernel, expected, scales, self.recipe)
        return expected.scales.numel(), sum(0 if wrong is None else int(wrong.sum()) for wrong in (scales, codes))

    def expected(self, x: torch.Tensor, options: dict[str, Any]) -> Parts:
        """The result of the reference. Raises ValueError if the recipe refuses the amax."""
        return Parts.of(self.quantized(x, options))

    def quantized(self, x: torch.Tensor, options: dict[str, Any]) -> Quantized:
        """As `expected`."""
        return reference.quantize(x, self.recipe, **options)


def wrong_scales(kernel: Parts, expected: Parts) -> torch.Tensor | None:
    """Mask of the different stored scales, bool of the shape of the scales; None for equal scales."""
    return None if torch.equal(kernel.scales, expected.scales) else kernel.scales != expected.scales


def over_elements(of_scales: torch.Tensor, shape: tuple[int, int], recipe: Recipe) -> torch.Tensor:
    """Values of stored scales for every element of a matrix (M, K): bool or integers."""
    rows = 1 if recipe.whole else recipe.stored_rows
    spread = of_scales.expand(shape[0], -1) if recipe.whole else of_scales.repeat_interleave(rows, 0)[: shape[0]]
    if recipe.spans_k:
        return spread.expand(shape)
    return spread.repeat_interleave(recipe.block[1], 1)[:, : shape[1]]


def wrong_codes(kernel: Parts, expected: Parts, scales: torch.Tensor | None, recipe: Recipe) -> torch.Tensor | None:
    """Mask of the different codes under right scales, bool (M, K), or None. `scales`: result of `wrong_scales`."""
    if torch.equal(kernel.codes, expected.codes):
        return None
    wrong = kernel.codes != expected.codes
    if scales is not None:
        shape = (wrong.shape[0], wrong.shape[1])
        wrong &= ~over_elements(scales, shape, recipe)
    return wrong if bool(wrong.any()) else None
