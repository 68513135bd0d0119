"""The case classes by operation, and cases made from the keys of a case file or from the labels of a record."""

from __future__ import annotations

import re
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


def case_from_id(name: str) -> Case | None:
    """The case with this id, of no file. None if the text is not the id of a case with an input family."""
    operation, *parts = name.split("/")
    place = next((n for n, part in enumerate(parts) if re.fullmatch(r"\d{1,18}(x\d{1,18})*", part, re.ASCII)), None)
    if operation not in OPERATIONS or place not in (0, 1):
        return None
    shape = tuple(map(int, parts[place].split("x")))
    recipe, rest = "".join(parts[:place]), parts[place + 1 :]
    for dtype, others in (("".join(rest[:1]), rest[1:]), ("", rest)):
        if not 1 <= len(others) <= 2:
            continue
        flags = others[1].split("+") if others[1:] else []
        try:
            case = case_from_labels(operation, recipe, shape, dtype, others[0], flags)
            if _is_valid(case) and case.id == name:
                return case
        except (ValueError, TypeError):  # an unknown word, or a flag that is missing
            continue
    return None


def _is_valid(case: Case) -> bool:
    """Whether the values of all keys of a case are allowed, separately and together."""
    for key in keys_of(type(case)):
        value = getattr(case, key.field)
        if value != key.default and key.check(list(value) if key.field == "shape" else value):
            return False
    return case.problem() is None
