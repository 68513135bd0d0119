"""Cases of permute: rows of tokens copied to the sections of their experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from narrowgauge.harness.cases.axes import Axis, Tensors
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import Family
from narrowgauge.harness.cases.keys import Dtype, Flag, Shape, count, dims
from narrowgauge.harness.cases.methods import Method
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class PermuteCase(Case):
    """permute of the rows of tokens by the experts of their choices."""

    operation: ClassVar[str] = "permute"
    own_families: ClassVar[tuple[Family, ...]] = (
        Family("routed", "random experts: the order of the sections, tokens for choices"),
        Family("dropped", "one choice in 4 has the id −1: a choice that is counted, expert 0 or the last one for none"),
        Family("equal-ids", "all choices of a token name one expert: a choice that is lost"),
        Family("one-expert", "every choice names the last expert: empty experts before it, one expert with all rows"),
        Family("even-experts", "experts with an odd number have no rows: empty sections that are skipped"),
        Family("edges", "sections of 0, 1, 127, 128 and 129 rows, as far as there are choices: borders of tiles"),
        Family("nan", "random experts, and rows of NaN and infinity: rows that are computed and not copied"),
    )
    declarations: ClassVar[Mapping[str, tuple[str, ...]]] = {"permute": ("stable",)}
    methods: ClassVar[Mapping[str, Method]] = {"permute": Method()}
    seconds: ClassVar[tuple[float, float]] = (4e-3, 60e-9)
    bytes_per_element: ClassVar[int] = 60
    tensors: ClassVar[Tensors] = {"x": ("T", "K"), "expert_ids": ("T", "choices")}

    shape: Annotated[Shape, dims("[T, K]", 2, 2)]
    dtype: Dtype
    experts: Annotated[int, count("experts", 1 << 16), Flag.NAMED] = 4
    choices: Annotated[int, count("choices of a token", 1 << 10), Flag.NAMED] = 2
    alignment: Annotated[int, count("rows", 1 << 20), Flag.NAMED] = 1
    """Rows of which the first row of a section is a multiple."""
    capacity: Annotated[int, count("rows", 1 << 30), Flag.NAMED] = 0
    """Rows of each section in the buffer; 0: sections are in sequence."""

    def problem(self) -> str | None:
        if self.experts and self.choices and self.alignment:
            return "alignment and capacity exclude one another" if self.alignment > 1 and self.capacity else None
        return "experts, choices and alignment are at least 1"

    @property
    def sizes(self) -> Mapping[str, int]:
        return {**super().sizes, "choices": self.choices}

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"K": Axis(self.extents["K"])}

    @property
    def elements(self) -> int:
        return super().elements * (1 + self.choices)

    @property
    def native_sources(self) -> frozenset[str]:
        return frozenset({"permute"})

    @classmethod
    def usual_shapes(cls, recipe: Recipe) -> list[tuple[int, ...]]:
        return [(200, 64), (1, 8), (33, 40)]

    @classmethod
    def usual_keys(cls, recipe: Recipe, dtype: str) -> dict[str, Any]:
        return {"dtype": dtype}

    @classmethod
    def stage_names(cls) -> tuple[str, ...]:
        return ("sizes", "source_rows", "x")
