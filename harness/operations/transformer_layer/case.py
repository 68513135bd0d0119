"""Cases of transformer-layer: attention and a feed-forward network, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.families import Family, Kind
from narrowgauge.harness.cases.keys import Flag, Norm, Shape, count, dims
from narrowgauge.harness.cases.layers import Layer, transformer
from narrowgauge.harness.operations.modules.case import ModuleCase

PEAKS = {
    Family(
        "peaked",
        "normal, and scores of attention 16 times larger: a softmax of almost one key, which hides no rounding",
    ): 4.0,
    Family("beyond-exp", "normal, and scores of attention 256 times larger: a softmax that subtracts no maximum"): 16.0,
}
"""Families of the attention, with the factor of q and of k."""


@dataclass(frozen=True, kw_only=True)
class TransformerLayerCase(ModuleCase):
    """A transformer layer: x (B, S, hidden), fc1 (ffn, hidden)."""

    operation: ClassVar[str] = "transformer-layer"
    own_families: ClassVar[tuple[Family, ...]] = tuple(PEAKS)
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.NORMALIZED,)
    seconds: ClassVar[tuple[float, float]] = (300e-3, 200e-9)
    module: ClassVar[str] = "TransformerLayer"
    attends: ClassVar[bool] = True

    shape: Annotated[Shape, dims("[B, S, hidden, ffn]", 4, 4)]
    heads: Annotated[int, count("heads", 1024), Flag.ALWAYS]
    norm: Norm = "layer"

    @property
    def attention_heads(self) -> int:
        return self.heads

    @property
    def outer(self) -> int:
        return self.shape[2]

    @property
    def layers(self) -> list[Layer]:
        return transformer(self.shape[2], self.shape[3], self.norm)

    @property
    def _shape_problem(self) -> str | None:
        if wrong := super()._shape_problem:
            return wrong
        hidden = self.shape[2]
        return f"hidden = {hidden} is no multiple of heads = {self.heads}" if hidden % self.heads else None
