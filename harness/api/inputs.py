"""Input families as tensors, and the shipped cases as parameters of a test."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import torch

from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import load_all
from narrowgauge.harness.cases.keys import TIERS, Key, keys_of, nearest, one_of
from narrowgauge.harness.cases.operations import OPERATIONS, case_of
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.spec.arguments import dtype_name
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe, find_recipe

_ARGUMENTS = {"inputs": "family"}
"""Names of arguments different from the keys of case files."""
_MADE = ("quantize", "transform", "gemm")
"""Operations of `inputs`."""


@overload
def inputs(
    recipe: str | Recipe,
    shape: Sequence[int],
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    operation: Literal["quantize", "transform"] = "quantize",
) -> torch.Tensor: ...


@overload
def inputs(
    recipe: str | Recipe,
    shape: Sequence[int],
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    operation: Literal["gemm"],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def inputs(
    recipe: str | Recipe,
    shape: Sequence[int],
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    operation: str = "quantize",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The tensors of an input family: the same bytes for the same arguments, on every machine.

    recipe: recipe of the operands, whose blocks and codes shape the inputs.
    shape: (M, K), or three or four sizes (…, K), of the input of `quantize`; (M, K) of the input of `transform`;
    (M, K, N) of a `gemm`.
    family: name of a family, such as "normal", "ties" or "position" (cases/README.md); an unknown name is answered with
    all families of the operation.
    dtype: float32, bfloat16 or float16.

    Returns a contiguous tensor on the CPU; for `gemm` x (M, K) and w (N, K), to be quantized. They are the inputs of
    the case OPERATION/RECIPE/SHAPE/DTYPE/FAMILY of the case files with this seed: `quantize/nvfp4/128x256/bf16/normal`,
    and `gemm/nvfp4/128x256x64/bf16xbf16-bf16/normal/tn`, with layout nt for a recipe that rotates.

    Raises ValueError for an unknown name, and for a shape, dtype or family that the recipe does not take; TypeError for
    another dtype.
    """
    if wrong := one_of(_MADE)(operation):
        raise ValueError(f"operation {wrong}")
    values: dict[str, Any] = {"shape": shape, "inputs": family}
    name = name_of(dtype)
    usual = OPERATIONS[operation].usual_keys(find_recipe(recipe), name)
    values |= usual | {key: name for key in ("x", "w") if key in usual}
    case = make_case(operation, recipe, values)
    with default_settings():
        made = make_inputs(case, seed=seed)
    return (made.x, made["w"]) if "w" in made.tensors else made.x


def name_of(dtype: torch.dtype) -> str:
    """`bf16` of torch.bfloat16. Raises TypeError for a dtype unknown to inputs."""
    for name, known in TORCH_DTYPES.items():
        if dtype == known:
            return name
    found = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
    raise TypeError(f"dtype is {', '.join(map(dtype_name, TORCH_DTYPES.values()))}, not {found}")


def named(recipe: str | Recipe) -> Recipe:
    """The recipe with this name, or a named Recipe. Raises ValueError."""
    chosen = find_recipe(recipe)
    with suppress(ValueError):
        if find_recipe(str(chosen)) == chosen:
            return chosen
    raise ValueError(
        f"recipe {chosen} has changed fields, which no name stands for; give it a dialect of its own and save it, "
        "narrowgauge.save_rule(recipe, 'own.toml'): 'own.toml' is then its name"
    )


def require_keys(operation: str, names: Iterable[str], without: Collection[str]) -> dict[str, Key]:
    """The keys of an operation by name, `without` some. Raises ValueError for a name that is none."""
    keys = {key.name: key for key in keys_of(OPERATIONS[operation]) if key.name not in without}
    for name in names:
        if name not in keys:
            raise ValueError(f"no key of {operation} is called {name!r}{nearest(name, keys)}; it has {', '.join(keys)}")
    return keys


def make_case(operation: str, recipe: str | Recipe, values: Mapping[str, Any]) -> Case:
    """The case with these keys of case files. Raises ValueError for a wrong value, with the name of the argument."""
    chosen = named(recipe)
    values = {**values, "recipe": str(chosen), "shape": list(values["shape"])}
    for key in keys_of(OPERATIONS[operation]):
        if key.required and key.name not in values:
            raise ValueError(f"a {operation} needs a value of {key.name}; give a case, or the id of a case")
        if key.name in values and (wrong := key.check(values[key.name])):
            raise ValueError(f"{_ARGUMENTS.get(key.name, key.name)} {wrong}")
    case = case_of(operation, values)
    if wrong := case.problem():
        raise ValueError(f"{case.id}: {wrong}")
    return case


def matrix(
    recipe: str | Recipe, tier: str = "quick", *, operation: str = "quantize", device: str = "cpu", **fields: Any
) -> list[Case]:
    """The shipped cases of a recipe, for `pytest.mark.parametrize`: pytest shows the id of the case.

    tier: "quick", or "full" for all cases.
    device: "cpu" or "cuda". The tier quick has more cases on a GPU.
    operation: an operation of the case files: "quantize", "transform", "gemm", "quantize-grouped" and others.
    fields: values of further keys of the operation (cases/README.md): dtype="bf16", usage="rowwise".

    `narrowgauge.check(function, case)` runs a case. Of a quantize or transform case, `inputs(case.recipe, case.shape,
    case.inputs, dtype=…)` are the inputs of usage rowwise. Raises ValueError for an unknown name or value, and if no
    case is left.
    """
    name = str(find_recipe(recipe))
    for argument, value, known in (
        ("operation", operation, OPERATIONS), ("tier", tier, TIERS), ("device", device, ("cpu", "cuda")),
    ):  # fmt: skip
        if wrong := one_of(known)(value):
            raise ValueError(f"{argument} {wrong}")
    keys = require_keys(operation, fields, ("recipe",))
    for field, value in fields.items():
        if wrong := keys[field].check(list(value) if field == "shape" else value):
            raise ValueError(f"{field} {wrong}")
    expected = {keys[field].field: tuple(value) if field == "shape" else value for field, value in fields.items()}
    cases = [
        case
        for case in _shipped_cases()
        if case.operation == operation and name in case.recipe_names and tier in ("full", case.tier_on(device))
        and all(getattr(case, field) == value for field, value in expected.items())
    ]  # fmt: skip
    if not cases:
        conditions = "".join(f", {field}={value!r}" for field, value in fields.items())
        raise ValueError(f"no case of the tier {tier} is {operation} of {name}{conditions}; `narrowgauge list` has all")
    return cases


@lru_cache(maxsize=1)
def _shipped_cases() -> tuple[Case, ...]:
    return tuple(load_all([os.path.realpath(Path(__file__).parents[2] / "cases")]))
