"""The case classes by operation, and cases made from the keys of a case file or from the labels of a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.gemm import GemmCase, GroupedGemmCase, QuantizedGemmCase
from narrowgauge.harness.cases.keys import keys_of
from narrowgauge.harness.cases.modules import (
    GroupedLinearCase,
    LayerNormLinearCase,
    LinearCase,
    TransformerLayerCase,
)
from narrowgauge.harness.cases.quantize import (
    GroupedQuantizeCase,
    QuantizeCase,
    SwizzleCase,
    TransformCase,
    UpdateScaleCase,
)

_CLASSES: tuple[type[Case], ...] = (
    QuantizeCase,
    TransformCase,
    SwizzleCase,
    UpdateScaleCase,
    GroupedQuantizeCase,
    GemmCase,
    GroupedGemmCase,
    QuantizedGemmCase,
    LinearCase,
    LayerNormLinearCase,
    GroupedLinearCase,
    TransformerLayerCase,
)
OPERATIONS: dict[str, type[Case]] = {cls.operation: cls for cls in _CLASSES}
"""Case classes by the names of the operations."""


def case_of(operation: str, values: Mapping[str, Any], *, tier: str = "quick", file: str = "") -> Case:
    """The case of an operation with these values of keys, by the names of `keys_of`; optional keys may be absent."""
    cls = OPERATIONS[operation]
    fields = {key.field: values[key.name] for key in keys_of(cls) if key.name in values}
    arguments: dict[str, Any] = {**fields, "shape": tuple(values["shape"]), "tier": tier, "file": file}
    return cls(**arguments)


def case_from_labels(
    operation: str,
    recipe: str,
    shape: tuple[int, ...],
    dtype: str,
    inputs: str,
    flags: Iterable[str] = (),
    tier: str = "quick",
    file: str = "",
) -> Case:
    """The case with these labels, the inverse of `Case.labels`. Records have columns of the same names.

    Raises ValueError for an unknown flag.
    """
    keys = keys_of(OPERATIONS[operation])
    x_recipe, _, w_recipe = recipe.partition("+")
    operands, _, out = dtype.partition("-")
    x, _, w = operands.partition("x")
    labels = {
        "recipe": x_recipe, "w_recipe": w_recipe or None, "training": recipe, "dtype": dtype, "x": x, "w": w,
        "out": out, "shape": shape, "inputs": inputs,
    }  # fmt: skip
    values = {key.name: labels[key.field] for key in keys if key.field in labels}
    for flag in flags:
        read = ((key.name, value) for key in keys if (value := key.read(flag)) is not None)
        name, value = next(read, ("", None))
        if not name:
            raise ValueError(f"a {operation} has no flag {flag!r}")
        values[name] = value
    return case_of(operation, values, tier=tier, file=file)
