"""Key-value caches: the bytes of keys and values in pages, and the layouts of a page.

A row is the key or the value of a token for one head. The slot of a token is page · (tokens of a page) + offset; its
rows lie in this slot, one for each head. A negative slot is no place: the token is not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from narrowgauge.spec.formats import E2M1, E4M3, E8M0
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LAYOUTS, LINEAR, ScaleLayout

if TYPE_CHECKING:
    import torch

PageLayoutName = Literal["nhd", "hnd", "x-packed", "nvfp4-page"]
HALVES = ("keys", "values")
DATA, SCALES = "codes", "scales"
"""Parts of a half: the bytes of the codes, and the stored scales."""


@dataclass(frozen=True)
class PageLayout:
    """The order in memory of the elements of a half: digits, the slowest first.

    n: page, t: offset in the page, h: head, d: byte of the row, or column of its scales. `d x:16` are two digits of it.
    """

    name: PageLayoutName
    keys: str
    values: str
    users: str
    value_scales: ScaleLayout = LINEAR
    """Layout of the scales of the values of a page and a head, (tokens of the page, columns). If not linear, they lie
    in the order page, head, token."""

    def _digits(self, part: str) -> tuple[list[str], int]:
        """The digits of a tensor of a cache, by its name, and the size of x, or 1."""
        digits = [digit.partition(":") for digit in (self.keys if part.startswith("key") else self.values).split()]
        return [name for name, _, _ in digits], next((int(size) for name, _, size in digits if name == "x"), 1)

    def stored(self, logical: torch.Tensor, part: str) -> torch.Tensor:
        """A tensor of a cache as it lies in memory, contiguous. `logical`: (pages, tokens of a page, heads, …)."""
        if part == "value_scales" and self.value_scales != LINEAR:
            pages, page, heads, columns = logical.shape
            rows = logical.transpose(1, 2).reshape(-1, columns)
            return LAYOUTS[self.value_scales].pack(rows).view(pages, heads, page, columns)
        digits, x = self._digits(part)
        names = [digit for digit in _LOGICAL if digit in digits]
        apart = logical.reshape(*logical.shape[:3], -1, x) if x > 1 else logical
        return apart.permute([names.index(digit) for digit in digits]).contiguous()

    def logical(self, stored: torch.Tensor, part: str) -> torch.Tensor:
        """The inverse of `stored`: (pages, tokens of a page, heads, columns). Raises ValueError for another shape."""
        if part == "value_scales" and self.value_scales != LINEAR:
            pages, heads, page, columns = stored.shape
            rows = LAYOUTS[self.value_scales].unpack(stored, (pages * heads * page, columns))
            return rows.view(pages, heads, page, columns).transpose(1, 2).contiguous()
        digits, x = self._digits(part)
        if stored.dim() != len(digits) or (x > 1 and stored.shape[-1] != x):
            raise ValueError(f"{part} in the page layout {self.name} has the axes {' '.join(digits)}, not the shape "
                             f"{tuple(stored.shape)}")  # fmt: skip
        return stored.permute([digits.index(digit) for digit in _LOGICAL if digit in digits]).flatten(3)

    def problem(self, columns: Mapping[str, int], page: int) -> str | None:
        """Why a cache whose tensors have so many columns, and pages of so many tokens, does not have this layout, or
        None."""
        if self.value_scales != LINEAR:
            count = columns.get("value_scales", 0)
            if not count:
                return f"page layout {self.name} is for recipes with scales of blocks"
            if count % 4 or page % 4:
                return (
                    f"page layout {self.name} swizzles 4 tokens by 4 scales of the values: a row has {count} scales, "
                    f"and a page {page} tokens. For others the formula of vLLM 0.33 puts two scales into one byte, "
                    "leaves the page, or divides by zero; take the layout nhd or hnd"
                )
        for part, count in columns.items():
            x = self._digits(part)[1]
            if count % x or (x > 1 and part.endswith(SCALES)):
                return f"page layout {self.name} has groups of {x} bytes of {part}; a row has {count} columns"
        return None


_LOGICAL = "nthdx"
"""Digits in the order of a cache that is not laid out."""
PAGE_LAYOUTS: Mapping[str, PageLayout] = {
    layout.name: layout
    for layout in (
        PageLayout("nhd", "n t h d", "n t h d", "vLLM, FlashInfer"),
        PageLayout("hnd", "n h t d", "n h t d", "vLLM, FlashInfer, TensorRT-LLM"),
        # vLLM csrc/cache_kernels.cu, reshape_and_cache: x is 16 bytes.
        PageLayout("x-packed", "n h d t x:16", "n h d t", "vLLM (paged attention v1 and v2)"),
        # vLLM 0.33.0 csrc/nvfp4_kv_cache_kernels.cu
        PageLayout("nvfp4-page", "n t h d", "n t h d", "vLLM", value_scales="kv-v-swizzled"),
    )
}


@dataclass
class Cache:
    """A paged cache of keys and values.

    `keys`, `values`: uint8, the bytes of the codes in the order of `layout`; for "nhd" (pages, page, heads, bytes).
    `key_scales`, `value_scales`: stored scales of the recipe in the same order, float32 or uint8, or None if the recipe
    stores none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    recipe: Recipe
    layout: PageLayoutName
    page: int
    """Tokens of a page."""

    def parts(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        names = ("keys", "values", "key_scales", "value_scales")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def copy(self) -> Self:
        """The same cache in other memory."""
        import torch

        copies: dict[str, Any] = {name: torch.empty_like(part).copy_(part) for name, part in self.parts().items()}
        return replace(self, **copies)


def has_attention(recipe: Recipe) -> bool:
    """Whether the contracts of attention read a cache of this recipe: E4M3 with a given scale of the tensor, with a
    float32 scale of each token and head or with E8M0 scales of blocks, or E2M1 with E4M3 scales."""
    if recipe.tensor_scale == "given" or recipe.spans_k:
        return recipe.element is E4M3 and (recipe.whole == (recipe.tensor_scale == "given"))
    return (recipe.element, recipe.scale) in ((E4M3, E8M0), (E2M1, E4M3)) and recipe.tensor_scale == "none"


def part_name(half: str, part: str) -> str:
    """Name of a tensor of a cache: keys, values, key_scales, value_scales."""
    return half if part == DATA else f"{half.removesuffix('s')}_{part}"


def logical_parts(cache: Cache) -> dict[str, torch.Tensor]:
    """The tensors of a cache by name in the logical order, (pages, tokens of a page, heads, …)."""
    layout = PAGE_LAYOUTS[cache.layout]
    return {name: layout.logical(part, name) for name, part in cache.parts().items()}


def slots_of(pages: torch.Tensor, lengths: torch.Tensor, page: int) -> torch.Tensor:
    """Slots of the tokens of all requests, one request behind another: int64 (Σ lengths,).

    `pages`: (requests, most pages of a request), numbers of pages; `lengths`: (requests,), tokens of each request.
    """
    import torch

    request = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(len(request), device=lengths.device) - first[request]
    return pages[request, position // page].long() * page + position % page


def single_slots(slots: torch.Tensor) -> torch.Tensor:
    """Tokens whose slot is theirs alone: places in `slots`, int64. Two tokens of a slot race, so neither counts."""
    order = slots.argsort(stable=True)
    alike = (slots[order][1:] == slots[order][:-1]).nonzero()[:, 0]
    single = slots >= 0
    single[order[alike]] = single[order[alike + 1]] = False
    return single.nonzero()[:, 0]
