"""Cases of update-scale: the update of delayed scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.axes import Axis, Tensors
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import Family
from narrowgauge.harness.cases.keys import Autograd, DelayedRecipeName, Shape, dims


@dataclass(frozen=True, kw_only=True)
class UpdateScaleCase(Case):
    """update_scale of delayed scaling."""

    operation: ClassVar[str] = "update-scale"
    autograd_modes: ClassVar[tuple[Autograd, ...]] = ("plain", "no-grad", "inference-mode")
    own_families: ClassVar[tuple[Family, ...]] = (
        Family("amaxes", "random amaxes, each tensor its own power of two: the largest, the order, the division"),
        Family("amaxes-zero-first", "the first amax of every other tensor is 0: single and bulk update differ"),
        Family("amaxes-zeros", "no amax but 0: the scale stays"),
        Family("amaxes-tiny", "amaxes from the least subnormal number on: scales that would be infinite"),
        Family("amaxes-inf", "infinity first, somewhere or everywhere in a history: which scales stay"),
        Family("amaxes-nan", "NaN first, somewhere or everywhere in a history: a NaN that a maximum loses"),
    )
    seconds: ClassVar[tuple[float, float]] = (2.3e-3, 40e-9)
    tensors: ClassVar[Tensors] = {"x": ("H", "N"), "scale.x": ("N",)}

    recipe: DelayedRecipeName
    shape: Annotated[Shape, dims("[H, N]", 2, 2)]
    """Histories of H amaxes for N tensors."""

    def problem(self) -> str | None:
        return None if self.shape[0] else "shape is [0, N]; a history [H, N] has at least one amax of each tensor"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {name: Axis(extent) for name, extent in self.extents.items()}

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"delayed"})

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("history", "scale")
