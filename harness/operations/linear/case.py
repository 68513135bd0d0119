"""Cases of linear: a linear layer, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Shape, dims
from narrowgauge.harness.operations.modules.case import ModuleCase


@dataclass(frozen=True, kw_only=True)
class LinearCase(ModuleCase):
    """A linear layer: x (B, S, K), weight (N, K)."""

    operation: ClassVar[str] = "linear"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.LINEAR,)
    seconds: ClassVar[tuple[float, float]] = (60e-3, 200e-9)
    module: ClassVar[str] = "Linear"

    shape: Annotated[Shape, dims("[B, S, K, N]", 4, 4)]
