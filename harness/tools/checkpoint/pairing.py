"""Whether block scales belong to the codes of their blocks.

A scale is made from the largest magnitude of its block. So of two blocks with alike weights, the block with the larger
scale has the smaller codes beside its largest code. Scales in a wrong order, or of a wrong matrix, do not show this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.checks.statistics.tail_bounds import binomial
from narrowgauge.harness.tools.checkpoint.findings import Finding
from narrowgauge.harness.tools.checkpoint.layouts import Layer
from narrowgauge.spec.formats import E2M1, FP32

RUN = 64
"""Number of consecutive blocks of a correlation."""
_BLOCKS = 1 << 14
"""Blocks of a layer, at most, in which siblings are compared."""


@dataclass
class Pairing:
    """The first blocks of a layer."""

    sizes: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Logarithm of the sum of the magnitudes of a block, in steps of the code, float16."""
    scales: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Scale codes of these blocks: logarithms, nearly."""
    tiles: tuple[int, int] = (0, 0)
    """Runs in which the scales fit better if their bytes are tiles of 128x4, and runs compared."""

    def add(self, codes: torch.Tensor, scales: torch.Tensor, layer: Layer) -> None:
        """Count the first rows: codes and scales as of `Layer.read`, `scales` also of the rows of whole tiles."""
        width = layer.block[1]
        if layer.scale is FP32 or layer.layout == "GGUF" or codes.shape[1] * len(codes) == 0 or self.sizes.numel():
            return
        sizes = _sizes(codes, layer, width)
        stored = scales[: len(sizes)]
        self.sizes = sizes.reshape(-1)[:_BLOCKS].half()
        self.scales = stored.reshape(-1)[:_BLOCKS].clone()
        whole, columns = len(scales) // 128 * 128, scales.shape[1]
        if whole and columns % 4 == 0:
            tiles = scales[:whole].reshape(-1, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(whole, columns)
            rows = min(whole, len(sizes))
            self.tiles = votes(sizes[:rows], stored[:rows], tiles[:rows])


def _sizes(codes: torch.Tensor, layer: Layer, width: int) -> torch.Tensor:
    """Logarithm of the sum of the magnitudes of each block."""
    byte = torch.arange(256)
    if layer.element is E2M1:
        magnitudes = torch.tensor(E2M1.values[:8])
        table, width = magnitudes[byte & 7] + magnitudes[byte >> 4 & 7], width // 2
    else:
        table = torch.tensor([abs(layer.element.value(code & 0x7F)) for code in range(256)]).nan_to_num(0, 0, 0)
    values = table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    values = torch.nn.functional.pad(values, (0, -codes.shape[1] % width))
    return values.view(len(codes), -1, width).sum(2).clamp_(min=layer.element.value(1)).log_()


def votes(sizes: torch.Tensor, own: torch.Tensor, other: torch.Tensor) -> tuple[int, int]:
    """Runs with scales `other` that fit the sizes, and better than `own`, and runs with different fits.

    Scales fit if blocks with larger scales have smaller sizes. In a Fourier basis no scales fit: its window makes some
    blocks small and steep at once.
    """
    a, b = (_correlations(sizes, scales) for scales in (own, other))
    return int(((b < a) & (b < 0)).sum()), int(((b < a) | (a < b)).sum())


def _correlations(sizes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Correlation of each run; NaN if all sizes, or all scales, of the run are equal."""
    count = sizes.numel() // RUN * RUN
    a, b = (one.reshape(-1)[:count].view(-1, RUN).float() for one in (sizes, scales))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return (a * b).sum(1) / (a.square().sum(1) * b.square().sum(1)).sqrt()


def tiled_scales(pairing: Pairing, scales: str, level: float) -> list[Finding]:
    """A warning if the scales fit the codes better as 128x4 tiles. `level`: logarithm of the largest probability."""
    text = f"the scales are tiles of 128x4, where the layout has rows: in {{}} of {{}} runs of {RUN} blocks"
    return _warning("swizzled", scales, f"{text} the tiles fit the codes better", pairing.tiles, level)


def scales_of_siblings(layers: list[tuple[Layer, Pairing]], level: float) -> Iterator[tuple[int, Finding]]:
    """For a layer, by number, a warning if the scales of a sibling of its shape fit its codes better than its own."""
    for number, (layer, own) in enumerate(layers):
        for other_layer, other in layers:
            if other is own or (other_layer.shape, other_layer.scale) != (layer.shape, layer.scale):
                continue
            if not own.sizes.numel() or own.scales.shape != other.scales.shape:
                continue
            text = f"the scales are perhaps those of {other_layer.name}: in {{}} of {{}} runs of {RUN} blocks"
            name = layer.codes.name if layer.scales is None else layer.scales.name
            found = votes(own.sizes, own.scales, other.scales)
            for finding in _warning("sibling", name, f"{text} its scales fit the codes better", found, level):
                yield number, finding


def _warning(kind: str, tensor: str, text: str, found: tuple[int, int], level: float) -> list[Finding]:
    better, voted = found
    if 2 * better <= voted:
        return []
    log_p = float(binomial(*torch.tensor([better, voted, 0.5], dtype=torch.float64)))
    if log_p >= level:
        return []
    assumed = "in half of the runs the right scales fit at least as well"
    text = f"{text.format(better, voted)}; p <= 1e{math.ceil(log_p / math.log(10))} if {assumed}"
    return [Finding("warning", kind, tensor, text)]
