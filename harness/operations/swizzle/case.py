"""Cases of swizzle: the layout of block scales that tensor cores read, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.axes import Tensors
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import FAMILIES, Family
from narrowgauge.harness.cases.keys import Autograd, Shape, dims
from narrowgauge.harness.cases.methods import Method


@dataclass(frozen=True, kw_only=True)
class SwizzleCase(Case):
    """swizzle of bytes, and unswizzle of the result."""

    operation: ClassVar[str] = "swizzle"
    autograd_modes: ClassVar[tuple[Autograd, ...]] = ("plain", "no-grad", "inference-mode")
    own_families: ClassVar[tuple[Family, ...]] = (
        FAMILIES["position"],
        Family("bytes", "random bytes: what a layout does with any scale"),
    )
    methods: ClassVar[Mapping[str, Method]] = dict.fromkeys(("swizzle", "unswizzle"), Method())
    seconds: ClassVar[tuple[float, float]] = (2.8e-3, 120e-9)
    bytes_per_element: ClassVar[int] = 26  # resident set on a CPU, 2^22 elements: 22
    tensors: ClassVar[Tensors] = {"x": ("R", "C")}

    shape: Annotated[Shape, dims("[R, C]", 2, 2)]
    """Rows and columns of the bytes."""

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"swizzle"})

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("layout", "unswizzle")
