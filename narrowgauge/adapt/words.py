"""Integer weights in words of 32 bits: the layouts of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from narrowgauge.adapt.tensors import tensor
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

_IN_ORDER = tuple(range(8))


@dataclass(frozen=True)
class WordLayout:
    """How the codes of a matrix (N, K), its scales (N, G) and its zero points (N, G) are stored. 32/bits codes lie in a
    word, the first in the lowest bits."""

    name: str
    by_row: bool
    """Tensors are stored as (N, K), else as (K, N)."""
    packed: str
    """Axis of the codes that a word holds, K or N. Words of zero points are along N."""
    order: tuple[int, ...] = _IN_ORDER
    """Place of each code of a word among eight neighbours, of codes and zero points of 4 bits."""
    offset: int = 0
    """Number that is added to stored zero points."""
    users: str = ""


WORDS: Mapping[str, WordLayout] = {
    layout.name: layout
    for layout in (
        WordLayout("gptq", False, "K", offset=1, users="GPTQ, version 1"),
        WordLayout("gptq-v2", False, "K", users="GPTQ, version 2"),
        WordLayout("awq", False, "N", order=(0, 2, 4, 6, 1, 3, 5, 7), users="AutoAWQ"),
        WordLayout("pack-quantized", True, "K", users="compressed-tensors"),
    )
}  # fmt: skip
"""AutoGPTQ 0.7, AutoAWQ 0.2, compressed-tensors 0.20."""


def unpack_words(words: torch.Tensor, bits: int, dim: int = -1, order: Sequence[int] = _IN_ORDER) -> torch.Tensor:
    """Codes of int32 words, uint8 from 0 to 2^bits − 1: `dim` is 32/bits times as long.

    order: place of each code of a word among its neighbours, for words of eight codes. Raises ValueError for bits but 4
    and 8.
    """
    per = _codes_of_a_word(bits)
    shifts = torch.arange(0, 32, bits, device=words.device)
    codes = (words.movedim(dim, -1).unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)
    if per == len(order):
        codes = codes[..., torch.tensor(order, device=words.device).argsort()]
    return codes.flatten(-2).movedim(-1, dim)


def pack_words(codes: torch.Tensor, bits: int, dim: int = -1, order: Sequence[int] = _IN_ORDER) -> torch.Tensor:
    """The inverse of `unpack_words`: int32, contiguous. Raises ValueError if `dim` is no multiple of 32/bits."""
    per, size = _codes_of_a_word(bits), codes.shape[dim]
    if size % per:
        raise ValueError(f"axis {dim} has {size} codes; a word has {per} codes of {bits} bits: pad the axis with zeros")
    groups = torch.unflatten(codes.movedim(dim, -1), -1, (-1, per)).long()
    if per == len(order):
        groups = groups[..., torch.tensor(order, device=codes.device)]
    words = (groups << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim).contiguous()


def integers(
    layout: str | WordLayout, codes: object, scales: object, zeros: object | None = None, *, bits: int = 4,
    shape: tuple[int, int] | None = None,
) -> Quantized:  # fmt: skip
    """A matrix (N, K) of INT4 or INT8 weights in words, as a `Quantized` for `weight_only_gemm` and `dequantize`.

    codes, scales, zeros: int32 words, numbers and int32 words, in the shapes of the layout, an entry of `WORDS`. Scales
    become float32. Without zeros the zero point is 2^(bits − 1). shape: (N, K) if the last words have spare codes;
    None: that of the scales and of the words.

    Raises ValueError for an unknown layout, shapes that do not fit one another, groups without a recipe, and 8 bits
    with zero points.
    """
    rule = _layout(layout)
    words, numbers = tensor(codes).view(torch.int32), tensor(scales).float()
    unpacked = unpack_words(words, bits, -1 if (rule.packed == "K") == rule.by_row else 0, rule.order)
    matrix, scale = (unpacked, numbers) if rule.by_row else (unpacked.T, numbers.T)
    rows, columns = shape or (scale.shape[0], matrix.shape[1])
    matrix, groups = matrix[:rows, :columns], scale.shape[1]
    if matrix.shape != (rows, columns) or scale.shape[0] != rows or columns % groups:
        found = f"codes of {tuple(words.shape)} words and scales {tuple(numbers.shape)}"
        raise ValueError(f"{found} do not fit a matrix of {rows}x{columns} in the layout {rule.name}; give its shape")
    points = None if zeros is None else _zero_points(tensor(zeros).view(torch.int32), rule, bits, rows)
    if bits == 8 and points is not None:
        raise ValueError("no recipe has INT8 elements with zero points; leave zeros out if all are 128")
    name = f"int{bits}-g{columns // groups}{'' if points is None else '-zp'}"
    signed = matrix if points is not None else matrix ^ 1 << bits - 1
    stored = signed if bits == 8 else signed[:, ::2] | torch.nn.functional.pad(signed, (0, columns % 2))[:, 1::2] << 4
    return Quantized(
        stored.contiguous(), scale.contiguous(), None, find_recipe(name), (rows, columns), zeros=points
    )  # fmt: skip


def _zero_points(words: torch.Tensor, rule: WordLayout, bits: int, rows: int) -> torch.Tensor:
    """Zero points, uint8 (N, G)."""
    points = unpack_words(words, bits, 0 if rule.by_row else -1, rule.order)
    return ((points if rule.by_row else points.T)[:rows] + rule.offset).contiguous()


def _layout(layout: str | WordLayout) -> WordLayout:
    if isinstance(layout, WordLayout):
        return layout
    if layout not in WORDS:
        raise ValueError(f"layout is {layout!r}; words have the layout {', '.join(WORDS)}, or a WordLayout")
    return WORDS[layout]


def _codes_of_a_word(bits: int) -> int:
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; words hold codes of 4 or 8 bits")
    return 32 // bits
