"""Cases of swizzle: the layout of block scales for tensor cores, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from narrowgauge.harness.cases.axes import Tensors
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.operations.pack_scales.case import ScaleLayoutCase
from narrowgauge.spec.scale_layouts import LAYOUTS, TILES, Packing


@dataclass(frozen=True, kw_only=True)
class SwizzleCase(ScaleLayoutCase):
    """swizzle of bytes, and unswizzle of the result."""

    operation: ClassVar[str] = "swizzle"
    methods: ClassVar[Mapping[str, Method]] = dict.fromkeys(("swizzle", "unswizzle"), Method())
    seconds: ClassVar[tuple[float, float]] = (2.8e-3, 120e-9)
    tensors: ClassVar[Tensors] = {"x": ("R", "C")}

    @property
    def packing(self) -> Packing:
        return Packing(LAYOUTS[TILES], self.shape)

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"swizzle"})

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("layout", "unswizzle")
