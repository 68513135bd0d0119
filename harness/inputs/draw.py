"""Random numbers that are the same bytes on every machine and NumPy release.

NumPy keeps the stream of a bit generator for ever, but not those of its distributions, whose tails call the machine's
libm besides. So everything here comes from Philox bits by integer operations and single float32 roundings.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch

_SLAB = 1 << 16  # the temporaries of so many elements, and the bins, stay in cache
_BINS = 1 << 16
_OUTERMOST = 2.0**-24  # the normal ends at this quantile, 5.3 standard deviations


@lru_cache(maxsize=1)
def _normal_bins() -> tuple[torch.Tensor, torch.Tensor]:
    """Lower edges and widths of bins of equal probability, float32 (65536,).

    float64 quantiles rounded to float32, which hides the last bit in which two machines' logarithms may differ.
    """
    normal = NormalDist()
    inner = [normal.inv_cdf(i / _BINS) for i in range(1, _BINS)]
    outer = normal.inv_cdf(_OUTERMOST)
    edges = torch.tensor([outer, *inner, -outer], dtype=torch.float64)
    return edges[:-1].float(), edges.diff().float()


class Draw:
    """A stream of random tensors on the CPU. Equal keys give equal bytes."""

    def __init__(self, key: str) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def words(self, *shape: int) -> torch.Tensor:
        """int32, all 32 bits random."""
        count = math.prod(shape)
        return torch.from_numpy(self._philox.random_raw(-(-count // 2)).view(np.int32)[:count]).view(shape)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        """int32 in [0, limit), limit at most 2^15, each as likely to within limit/2^16."""
        count = math.prod(shape)
        halves = self._philox.random_raw(-(-count // 4)).view(np.uint16)[:count]
        return torch.from_numpy(halves.astype(np.int32)).view(shape).mul_(limit).bitwise_right_shift_(16)

    def index(self, limit: int) -> int:
        """A number in [0, limit)."""
        return int(self._philox.random_raw()) % limit

    def one_in(self, often: int, *shape: int) -> torch.Tensor:
        """bool, True once in `often` on average."""
        return self.below(often, *shape) == 0

    def signs(self, *shape: int) -> torch.Tensor:
        """float32, -1 or 1."""
        return self.below(2, *shape).mul_(2).sub_(1).float()

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 on [-1, 1), multiples of 2^-23."""
        return self.words(*shape).bitwise_right_shift_(8).float().mul_(2.0**-23)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal, float32 or cast from float32: a bin by its probability, then linear inside the bin."""
        lower, width = _normal_bins()
        out = torch.empty(math.prod(shape), dtype=dtype)
        for start in range(0, len(out), _SLAB):
            part = out[start : start + _SLAB]
            words = self.words(len(part))
            bins = (words >> 16).add_(_BINS // 2)
            inside = words.bitwise_and_(0xFFFF).float().mul_(2.0**-16)
            # Two roundings, never one: a fused multiply-add would give different bits on different machines.
            torch.mul(width.index_select(0, bins), inside, out=inside)
            part.copy_(inside.add_(lower.index_select(0, bins)))
        return out.view(shape)
