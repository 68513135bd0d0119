"""The steps of quantization in the order of docs/numerics.md: `quantize_matrix` is the definition of every recipe.

NVFP4 has all steps. MX and FP8 recipes leave out steps and have their own rule for a step; the modules of the step
functions cite the rules. `by_slabs` serves speed alone: the size of a slab changes no byte
(tests/reference/quantize/test_steps.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from narrowgauge.reference.numbers.blocks import block_amax, of_rows, over_tiles, tensor_amax
from narrowgauge.reference.numbers.philox import ROUNDS, philox
from narrowgauge.reference.numbers.slabs import by_slabs
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.four_over_six import choose_scales
from narrowgauge.reference.quantize.hadamard import transform
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.reference.quantize.scaling import block_scales, element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.formats import Format
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

_RUN = 128
"""Width of the blocks whose maxima are computed on the way to the amax of a tensor with one scale."""


def quantize_matrix(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    amax: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    random: Random | None = None,
    first: int = 0,
) -> Quantized:
    """Quantize `x` (M, K), contiguous, by the steps of docs/numerics.md.

    `amax`, `scale` and `random` are those of `quantize` in `quantize.py`, already checked. `first`: number of the first
    block of `x` in the count of Philox. Source: docs/numerics.md#nvfp4. Raises as `transform` and `tensor_scale` do.
    """
    shape = (x.shape[0], x.shape[1])

    # Before step 1: the Hadamard transform.
    if recipe.transform is not None:
        x = transform(x, recipe)

    # Step 1: the largest magnitude of each block, and of the tensor or of each row.
    blocks = block_amaxes(x, recipe)
    if amax is None and recipe.tensor_scale != "none":
        amax = tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)

    # Step 2: the scale of the tensor or of each row.
    tensor = scale
    if scale is None and amax is not None:
        tensor = tensor_scale(amax, recipe, x.dtype)

    # Steps 3 to 5: the block scales, rounded as they are stored.
    scales = stored_scales(x, blocks, amax, tensor, recipe)

    # Step 6: the factor of the elements of each block.
    factors = row_factors(scales, tensor, recipe, x, blocks)

    def codes_of(rows: slice) -> torch.Tensor:
        # Step 7: the scaled elements, rounded to codes.
        scaled = scale_elements(x[rows], factors[rows], of_rows(tensor, rows), recipe)
        drawn_bytes = None if random is None else random_bytes(random, shape, rows, x.device, recipe.block[1], first)
        codes = element_codes(scaled, recipe, drawn_bytes)

        # Step 8: two 4-bit codes in a byte.
        return pack_codes(codes, recipe)

    return Quantized(by_slabs(x, codes_of), scales, amax, recipe, shape, tensor)


def block_amaxes(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Step 1: the amax of every block of `x` (M, K), after a transform: float32, the shape of linear scales.

    The amax of a tile is repeated for each row of the tile, unless scales are float32. Shape (1, 1) if the tensor has
    one scale, (M, 1) if a row has one. Source: docs/numerics.md#nvfp4, step 1; docs/numerics.md#two-dimensional-blocks.
    """
    propagate = recipe.nan == "propagate"
    if recipe.whole:
        return tensor_amax(block_amax(x, _RUN, propagate_nan=propagate)).unsqueeze(1)
    if recipe.spans_k:
        return row_amax(block_amax(x, _RUN, propagate_nan=propagate)).unsqueeze(1)
    return over_tiles(block_amax(x, recipe.block[1], propagate_nan=propagate), recipe.block[0])[:: recipe.stored_rows]


def row_amax(blocks: torch.Tensor) -> torch.Tensor:
    """Step 1 of row scales: the largest block amax of each row, float32 (M,). Source: docs/numerics.md#row-scales."""
    return blocks.amax(1) if blocks.shape[1] else torch.zeros(blocks.shape[0], device=blocks.device)


def stored_scales(
    x: torch.Tensor, blocks: torch.Tensor, amax: torch.Tensor | None, tensor: torch.Tensor | None, recipe: Recipe
) -> torch.Tensor:
    """Steps 3 to 5: block scales of `x` (M, K), after a transform, as they are stored, linear.

    `blocks`: the `block_amaxes` of `x`. `amax`, `tensor`: amax and scale of the tensor, (1,) or (M,); None if the
    recipe has none. Source: docs/numerics.md#nvfp4, steps 3 to 5; docs/numerics.md#4over6.
    """
    if recipe.candidates == "6":
        return by_slabs(blocks, lambda rows: block_scales(blocks[rows], of_rows(tensor, rows), recipe, x.dtype))
    assert amax is not None
    assert tensor is not None
    return choose_scales(x, blocks, amax, tensor, recipe)


def row_factors(
    scales: torch.Tensor, tensor: torch.Tensor | None, recipe: Recipe, x: torch.Tensor, blocks: torch.Tensor | None
) -> torch.Tensor:
    """Step 6: the `element_factors` of the blocks of `x` (M, K) for each row: float32 (M, ⌈K/block⌉).

    `scales`: stored scales, linear. `blocks`: the `block_amaxes` of `x`; only FP8 block recipes use them. Shape (M, 1)
    if the tensor has one scale. Source: docs/numerics.md#nvfp4, step 6.
    """
    factors = by_slabs(
        scales,
        lambda rows: element_factors(
            scales[rows], of_rows(tensor, rows), recipe, x.dtype, None if blocks is None else blocks[rows]
        ),
    )
    return per_row(factors, recipe, x.shape[0])


def random_bytes(
    random: Random,
    shape: tuple[int, int],
    rows: slice,
    device: torch.device,
    block: int = 16,
    first: int = 0,
    rounds: int = ROUNDS,
) -> torch.Tensor:
    """The random byte of each element in `rows` of a matrix of `shape` (M, K): uint8 (rows, K).

    `random`: words, int32 (M, ⌈K/4⌉), or (seed, offset) of Philox with `rounds` rounds. `first`: number of the first
    block of the matrix, blocks having `block` elements. Source: docs/numerics.md#stochastic-rounding.
    """
    height, width = rows.stop - rows.start, shape[1]
    if height * width == 0:
        return torch.empty(height, width, dtype=torch.uint8, device=device)
    if isinstance(random, torch.Tensor):
        words = random[rows]
    else:
        subsequences = -(-width // block) * (block // 16)
        subsequence = torch.arange(rows.start * subsequences, rows.stop * subsequences, device=device)
        words = philox(*random, subsequence + first * (block // 16), rounds).to(torch.int32).view(height, -1)
    return words.contiguous().view(torch.uint8)[:, :width]


def encode_elements(
    x: torch.Tensor,
    scales: torch.Tensor,
    tensor: torch.Tensor | None,
    recipe: Recipe,
    random: Random | None = None,
    first: int = 0,
    blocks: torch.Tensor | None = None,
    rounding: Callable[[torch.Tensor, Format], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Steps 6 to 8 under given block scales, such as those of a kernel: the stored codes of `x` (M, K).

    `x` is transformed already. `scales`: linear stored scales. `tensor`: the scale of the tensor or of the rows, None
    if the recipe has none. `random`, `first`: see `random_bytes`. `blocks`: `block_amaxes` of `x` if they are known;
    only FP8 block recipes use them, see `element_factors`. `rounding`: a function of the scaled elements before step 7,
    such as that of a wrong kernel. Source: docs/numerics.md#nvfp4, steps 6 to 8.
    """
    shape = (x.shape[0], x.shape[1])
    if blocks is None and recipe.element_scale == "x*(max/amax)":
        blocks = block_amaxes(x, recipe)
    factors = row_factors(scales, tensor, recipe, x, blocks)

    def codes_of(rows: slice) -> torch.Tensor:
        scaled = scale_elements(x[rows], factors[rows], of_rows(tensor, rows), recipe)
        scaled = scaled if rounding is None else rounding(scaled, recipe.element)
        drawn_bytes = None if random is None else random_bytes(random, shape, rows, x.device, recipe.block[1], first)
        return pack_codes(element_codes(scaled, recipe, drawn_bytes), recipe)

    return by_slabs(x, codes_of)
