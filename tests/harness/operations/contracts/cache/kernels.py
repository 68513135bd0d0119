"""Kernels that store rows in a paged cache, a token and a head at a time. A subclass changes one method."""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.kv_cache import PAGE_LAYOUTS, Cache, part_name

Tensor = torch.Tensor
HALVES = ("keys", "values")


class Kernels:
    """Right kernels: each row is quantized by itself."""

    def quantized(self, x: Tensor, recipe: Any, scale: Tensor | None, half: str) -> dict[str, Tensor]:
        """The bytes of the rows, (tokens, heads, …), by the names of the parts."""
        tokens, heads, columns = x.shape
        if recipe.scale is E4M3:
            assert scale is not None
            x = x.float() / scale.expand(heads).view(1, heads, 1)
            scale = None
        if scale is not None and len(scale) > 1:  # of each head
            each = [narrowgauge.quantize(x[:, h], recipe, scale=scale[h : h + 1]).codes for h in range(heads)]
            return {half: torch.stack(each, 1)}
        q = narrowgauge.quantize(x.reshape(-1, columns), recipe, scale=scale)
        parts = {"codes": q.codes} | (
            {} if scale is not None and q.scales.dtype == torch.float32 else {"scales": q.scales}
        )
        return {part_name(half, name): part.view(tokens, heads, -1) for name, part in parts.items()}

    def scale_of(self, half: str, scales: dict[str, Tensor | None]) -> Tensor | None:
        return scales[half]

    def place(self, slot: int, cache: Cache, half: str) -> tuple[int, int] | None:
        """Page and offset of a slot; None: no place."""
        return None if slot < 0 else divmod(slot, cache.page)

    def head(self, head: int, heads: int, half: str) -> int:
        """The head in the cache of a head of the rows."""
        return head

    def token(self, token: int) -> int:
        """The row of the slots that a token takes."""
        return token

    def row(self, row: Tensor, name: str) -> Tensor:
        """The bytes of a row as they are stored."""
        return row

    def kv_write(
        self, k: Tensor, v: Tensor, cache: Cache, slots: Tensor, recipe: Any, *,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> Cache:  # fmt: skip
        layout, stored, scales = PAGE_LAYOUTS[cache.layout], cache.parts(), {"keys": k_scale, "values": v_scale}
        for half, x in zip(HALVES, (k, v), strict=True):
            for name, rows in self.quantized(x, recipe, self.scale_of(half, scales), half).items():
                logical = layout.logical(stored[name], name).clone()
                self.before(logical, name)
                for token in range(len(x)):
                    place = self.place(int(slots[self.token(token)]), cache, half)
                    for head in range(x.shape[1]) if place is not None else ():
                        logical[(*place, self.head(head, x.shape[1], half))] = self.row(rows[token, head], name)
                stored[name].copy_(layout.stored(logical, name))
        return cache

    def before(self, logical: Tensor, name: str) -> None:
        """What else the kernel does to the cache."""

    def kv_read(
        self, cache: Cache, pages: Tensor, lengths: Tensor, recipe: Any, *, dtype: str = "bfloat16",
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        layout, stored, scales = PAGE_LAYOUTS[cache.layout], cache.parts(), {"keys": k_scale, "values": v_scale}
        found = []
        for half in HALVES:
            parts = {}
            for name in (half, part_name(half, "scales")):
                if name not in stored:
                    continue
                logical, rows = layout.logical(stored[name], name), []
                for request, length in enumerate(lengths.tolist()):
                    for token in range(length):
                        page = int(pages[request, self.page_of(token, cache.page)])
                        heads = [self.head(head, logical.shape[2], half) for head in range(logical.shape[2])]
                        rows.append(logical[page, token % cache.page][heads])
                parts[name] = torch.stack(rows) if rows else logical[0, :0]
            found.append(self.decoded(parts, half, recipe, self.scale_of(half, scales), getattr(torch, dtype)))
        return tuple(found)

    def page_of(self, token: int, page: int) -> int:
        """The place in the list of pages of a token."""
        return token // page

    def decoded(
        self, parts: dict[str, Tensor], half: str, recipe: Any, scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The numbers of rows (tokens, heads, …)."""
        codes, scales = parts[half], parts.get(part_name(half, "scales"))
        columns = codes.shape[2] * (2 if recipe.element.bits == 4 else 1)
        flat = codes.flatten(0, 1)
        if recipe.scale is E4M3:
            assert scale is not None
            q = narrowgauge.Quantized(
                codes.flatten(0, 1), scales.flatten(0, 1), None, recipe, (codes[..., 0].numel(), columns)
            )
            numbers = narrowgauge.dequantize(q, torch.float32).view(*codes.shape[:2], columns)
            return (numbers * scale.expand(codes.shape[1]).view(1, -1, 1)).to(dtype)
        if scale is not None and len(scale) > 1:
            each = [self.decoded({half: codes[:, h : h + 1]}, half, recipe, scale[h : h + 1], dtype)
                    for h in range(codes.shape[1])]  # fmt: skip
            return torch.cat(each, 1)
        if scales is None:
            assert scale is not None
            stored = scale.view(1, 1) if recipe.block_scale == "given" else 1 / scale.view(1, 1)
        else:
            stored = scales.flatten(0, 1)
        q = narrowgauge.Quantized(flat, stored, None, recipe, (len(flat), columns))
        return narrowgauge.dequantize(q, dtype).view(*codes.shape[:2], columns)
