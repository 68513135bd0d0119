"""Cases of layernorm-linear: a norm and a linear layer, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Norm, Shape, dims
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.operations.modules.case import ModuleCase


@dataclass(frozen=True, kw_only=True)
class LayerNormLinearCase(ModuleCase):
    """A norm and a linear layer: x (B, S, K), weight (N, K)."""

    operation: ClassVar[str] = "layernorm-linear"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.NORMALIZED,)
    seconds: ClassVar[tuple[float, float]] = (80e-3, 200e-9)
    module: ClassVar[str] = "LayerNormLinear"

    shape: Annotated[Shape, dims("[B, S, K, N]", 4, 4)]
    norm: Norm = "layer"

    @property
    def layers(self) -> list[Layer]:
        return [replace(layer, norm=self.norm) for layer in super().layers]
