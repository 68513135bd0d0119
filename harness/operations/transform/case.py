"""Cases of transform: the rotation alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from narrowgauge.harness.cases.case import rotation_problem, view_problem
from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import RotatingRecipeName, Shape, View, dims
from narrowgauge.harness.operations.quantize.case import MatrixCase
from narrowgauge.spec.recipes import find_recipe


@dataclass(frozen=True, kw_only=True)
class TransformCase(MatrixCase):
    """The rotation alone."""

    operation: ClassVar[str] = "transform"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.ROTATED,)
    declarations: ClassVar[Mapping[str, tuple[str, ...]]] = {"transform": ("butterfly",)}
    seconds: ClassVar[tuple[float, float]] = (3.5e-3, 130e-9)
    bytes_per_element: ClassVar[int] = 60  # resident set on a CPU, 2^22 elements: 54

    recipe: RotatingRecipeName
    shape: Annotated[Shape, dims("[M, K]", 2, 2)]
    view: View = "contiguous"

    def problem(self) -> str | None:
        wrong = view_problem(self.view, self.dtype)
        return wrong or rotation_problem(find_recipe(self.recipe), [self.dtype], self.shape[-1], "K")

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"hadamard"})

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("output",)
