"""A model whose attention reads an FP8 cache of keys and values, in place of
`torch.nn.functional.scaled_dot_product_attention`; every second call is judged.

python examples/cached_attention.py
"""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge
from narrowgauge.contracts.attention import attention

RECIPE = "fp8-static-e4m3@vllm"
PAGE = 16


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, lengths: torch.Tensor,
    q_lengths: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """The kernel: attention of the last tokens of each request, q (tokens, heads, dim), to all its tokens."""
    rows = []
    for request, queries in enumerate(q.split(q_lengths.tolist())):
        length = int(lengths[request])
        k, v = (
            (half.view(torch.float8_e4m3fn)[pages[request]].flatten(0, 1)[:length].float() * factor).to(q.dtype)
            for half, factor in ((keys, k_scale), (values, v_scale))
        )
        seen = torch.ones(len(queries), length, dtype=torch.bool).tril(length - len(queries))
        group = q.shape[1] // k.shape[1]
        s = torch.einsum("qhd,khd->hqk", queries.float(), k.repeat_interleave(group, 1).float()) * scale
        p = torch.softmax(s.masked_fill(~seen, -torch.inf), -1)
        rows.append(torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1).float()).to(q.dtype))
    return torch.cat(rows)


class CachedAttention(torch.nn.Module):
    """Attention of one request, whose keys and values are stored in E4M3."""

    def __init__(self, heads: int, kv_heads: int, dim: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        width = heads * dim
        self.qkv = torch.nn.Linear(width, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(width, width, dtype=torch.bfloat16)
        count = -(-tokens // PAGE)
        self.keys, self.values = (torch.zeros(count, PAGE, kv_heads, dim, dtype=torch.uint8) for _ in range(2))
        self.pages = torch.randperm(count).view(1, count)
        self.length = 0
        self.scales = torch.full((1,), 2.0**-5), torch.full((1,), 2.0**-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (tokens, heads·dim): the next tokens."""
        heads = self.qkv(x).view(len(x), -1, self.dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        place = torch.arange(self.length, self.length + len(x))
        for half, rows, scale in ((self.keys, k, self.scales[0]), (self.values, v, self.scales[1])):
            codes = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            half[self.pages[0, place // PAGE], place % PAGE] = codes
        self.length += len(x)
        lengths, q_lengths = torch.tensor([self.length]), torch.tensor([len(x)])
        cache = self.keys, self.values, self.pages
        y = paged_attention(q, *cache, lengths, q_lengths, *self.scales, self.dim**-0.5)
        return self.out(y.flatten(1))


def adapter(
    result: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor,
    lengths: torch.Tensor, q_lengths: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor, scale: float,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of assert_result from a call of the kernel."""
    dtypes = {name: kind.dtypes[0] for name, (kind, _) in attention.tensors.items()}
    # Any inputs are judged if the dtype of the weights of the softmax is declared: here float32.
    declared = {"scale": scale, "p": "float32", "exponential": "accurate", "decode": "rounded"}
    program = attention.trace(dtypes, {"recipe": RECIPE}, declared)
    return {
        "contract": program.to_json(), "result": {"output": result}, "q": q, "cache.keys": keys, "cache.values": values,
        "pages": pages, "lengths": lengths, "q_lengths": q_lengths, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    layer = CachedAttention(heads=8, kv_heads=2, dim=64, tokens=64)
    watched = narrowgauge.watch(paged_attention, adapter, every=2, assertion=narrowgauge.assert_result)
    with watched, torch.no_grad():
        layer(torch.randn(21, 512, dtype=torch.bfloat16))
        for _ in range(3):
            layer(torch.randn(1, 512, dtype=torch.bfloat16))
    print(watched.summary())


if __name__ == "__main__":
    main()
