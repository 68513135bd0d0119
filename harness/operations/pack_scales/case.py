"""Cases of pack-scales: block scales in a layout of digits, there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.axes import Axis, Tensors
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import FAMILIES, Family
from narrowgauge.harness.cases.keys import Autograd, Flag, OptionalSectionsText, Shape, dims
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.sections import section_sizes
from narrowgauge.spec.scale_layouts import LAYOUTS, Packing, ScaleLayout


@dataclass(frozen=True, kw_only=True)
class ScaleLayoutCase(Case):
    """Scales (R, C) in a layout: the first method packs them, the second unpacks the result."""

    autograd_modes: ClassVar[tuple[Autograd, ...]] = ("plain", "no-grad", "inference-mode")
    own_families: ClassVar[tuple[Family, ...]] = (
        FAMILIES["position"],
        Family("bytes", "random bytes: what a layout does with any scale"),
    )
    bytes_per_element: ClassVar[int] = 26  # resident set on a CPU, 2^22 elements: 22

    shape: Annotated[Shape, dims("[R, C]", 2, 2)]
    """Rows and columns of the bytes."""

    @property
    def packing(self) -> Packing:
        """Layout, batches and sections of the scales. Raises ValueError if the layout does not have the shape."""
        raise NotImplementedError

    @property
    def packing_arguments(self) -> tuple[str, ...]:
        """Arguments of the methods behind the tensor, and behind the shape."""
        return ()


@dataclass(frozen=True, kw_only=True)
class PackScalesCase(ScaleLayoutCase):
    """pack_scales of bytes or of float32 powers of two, and unpack_scales of the result."""

    operation: ClassVar[str] = "pack-scales"
    own_families: ClassVar[tuple[Family, ...]] = (
        *ScaleLayoutCase.own_families,
        Family("position-high", "the second digit in base 251 of the place of a scale: with position the whole map"),
        Family("powers", "float32 powers of two, and 0: exponents in words"),
        Family("mantissas", "float32 scales that are no powers of two, which a layout of exponents refuses"),
    )
    methods: ClassVar[Mapping[str, Method]] = dict.fromkeys(("pack_scales", "unpack_scales"), Method())
    seconds: ClassVar[tuple[float, float]] = (3.5e-3, 160e-9)
    bytes_per_element: ClassVar[int] = 90

    layout: Annotated[ScaleLayout, Flag.ALWAYS]
    """Name of the layout."""
    batch: int = 0
    """Number of batches (B, R, C), each padded by itself; 0: scales (R, C)."""
    sections: OptionalSectionsText = None
    """Kind and count of sections of the rows, each padded by itself; None: no sections."""

    @property
    def packing(self) -> Packing:
        shape = (self.batch, *self.shape) if self.batch else self.shape
        return Packing(LAYOUTS[self.layout], shape, self.section_sizes if self.sections else None)

    @property
    def packing_arguments(self) -> tuple[str, ...]:
        return (self.layout,)

    @property
    def section_sizes(self) -> tuple[int, ...]:
        return section_sizes(self.sections, self.shape[0]) if self.sections else ()

    def problem(self) -> str | None:
        if self.inputs in ("powers", "mantissas") and LAYOUTS[self.layout].scale != "E8M0":
            return f"inputs is {self.inputs!r}, float32 scales; layout {self.layout} packs bytes: give inputs = 'bytes'"
        try:
            self.packing  # noqa: B018
        except ValueError as error:
            return str(error)
        return None

    @property
    def tensors(self) -> Tensors:
        return {"x": ("B*R", "C") if self.batch else ("R", "C")}

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "B": self.batch}

    @property
    def axes(self) -> Mapping[str, Axis]:
        row = LAYOUTS[self.layout]
        units = row.tile if row.padding == "none" else (1, 1)
        axes = {name: Axis(extent, unit) for (name, extent), unit in zip(self.extents.items(), units, strict=True)}
        return {"C": axes["C"]} if self.batch or self.sections else axes

    @property
    def elements(self) -> int:
        return super().elements * max(1, self.batch)

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"pack_scales"})

    def stages(self) -> tuple[str, ...]:
        if self.inputs == "mantissas":
            return self.stage_names()[:1]
        return self.stage_names() if self.packing.has_padding else self.stage_names()[:2]

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("packed", "unpacked", "padding")
