"""The operation scale-columns: each column of x (M, K) times a factor of gamma (K,), rounded once to the dtype of x."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import Kind
from narrowgauge.harness.cases.keys import Dtype, Shape, dims
from narrowgauge.harness.operations.operation import Deviation, Operation, Result

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ScaleColumnsCase(Case):
    """A matrix and the factors of its columns."""

    operation: ClassVar[str] = "scale-columns"
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.ROTATED,)
    tensors: ClassVar[Mapping[str, tuple[str, ...]]] = {"x": ("M", "K"), "gamma": ("K",)}

    shape: Annotated[Shape, dims("[M, K]", 2, 2)]
    dtype: Dtype
    plus_one: bool = False
    """Whether the factor is 1 + gamma."""


def scale_columns(case: ScaleColumnsCase, given: Tensors, *, plus_one: bool | None = None) -> Tensors:
    """float32(x)·float32(gamma), or ·(1 + gamma), rounded once."""
    plus_one = case.plus_one if plus_one is None else plus_one
    factor = given["gamma"].float() + (1.0 if plus_one else 0.0)
    return {"y": (given["x"].float() * factor).to(given["x"].dtype)}


def first_factor(case: ScaleColumnsCase, given: Tensors) -> Tensors:
    """The factor of the first column for all columns."""
    return scale_columns(case, given | {"gamma": given["gamma"][:1].expand_as(given["gamma"])})


OPERATION = Operation(
    case=ScaleColumnsCase,
    reference=scale_columns,
    results={"y": Result(("M", "K"))},
    deviations={
        "gamma-plus-one": Deviation(
            "the factor is 1 + gamma in place of gamma, or gamma in place of 1 + gamma",
            lambda case, given: scale_columns(case, given, plus_one=not case.plus_one),
        ),
        "gamma-of-first-column": Deviation("every column has the factor of the first column", first_factor),
    },
)
