"""Arguments and results of a backend's methods as JSON values. Tensors are places in shared memory.

Lists, tuples, mappings and known classes are objects with a single key, the name of the class. All further values of a
backend become the names of their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from narrowgauge.harness.backends.module_driver import Plan, Step
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, Foreign, dtype_name
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.machine.process_group import GROUP, joined
from narrowgauge.spec.formats import FORMATS, FP32
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.modules.training import TrainingRecipe, training_recipe
from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
from narrowgauge.spec.recipe import Delayed, Hadamard, Recipe
from narrowgauge.spec.recipes import find_recipe, own_rules

TEXT = 1 << 16
"""Largest length of a text of a backend in characters."""
_DEPTH = 32
_ARGUMENTS = {
    cls.__name__: cls for cls in (Quantized, BatchedQuantized, GroupedQuantized, Cache, Plan, Layer, Hadamard, Delayed)
}
_RESULTS = {Step.__name__: Step}
_FIELDS = {name: tuple(field.name for field in fields(cls)) for name, cls in {**_ARGUMENTS, **_RESULTS}.items()}
DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Encoder = Callable[[torch.Tensor], Any]
Decoder = Callable[[Any], torch.Tensor]
Classes = Mapping[str, type]


def encode_argument(value: Any, tensor: Encoder) -> Any:
    """An argument of a method as JSON. `tensor` gives the JSON value of a tensor."""
    return _encode(value, tensor, _ARGUMENTS)


def encode_result(value: Any, tensor: Encoder) -> Any:
    """A result of a method as JSON. A cache, and an object with codes, becomes a mapping of its parts.

    Raises ValueError for a result with too many levels.
    """
    return _encode(value, tensor, _RESULTS)


def _encode(value: Any, tensor: Encoder, classes: Classes, depth: int = _DEPTH) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value[:TEXT]
    if not depth:
        raise ValueError(f"a result is nested more than {_DEPTH} times")
    depth -= 1
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(value)}
    if isinstance(value, (list, tuple)):
        parts = [_encode(part, tensor, classes, depth) for part in value]
        return {"list" if isinstance(value, list) else "tuple": parts}
    name = type(value).__name__
    if classes.get(name) is type(value):
        return {name: {field: _encode(getattr(value, field), tensor, classes, depth) for field in _FIELDS[name]}}
    if isinstance(value, dict | Mapping):
        return {"mapping": [[str(key)[:TEXT], _encode(part, tensor, classes, depth)] for key, part in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, Recipe):
        return {"recipe": _recipe(value)}
    if value is GROUP:
        return {"group": None}
    if isinstance(value, TrainingRecipe):
        return {"training": str(value)}
    if isinstance(value, Cache):
        return _encode(value.parts(), tensor, classes, depth)
    if hasattr(value, "codes"):
        found = {part: getattr(value, part, None) for part in QUANTIZED_PARTS}
        if getattr(value, "transposed", False):
            found["transposed"] = True
        return _encode(found, tensor, classes, depth)
    return {"foreign": name}


def decode_argument(value: Any, tensor: Decoder) -> Any:
    """An argument of a method, in a host."""
    return _decode(value, tensor, _ARGUMENTS)


def decode_result(value: Any, tensor: Decoder) -> Any:
    """A result of a method, in a judge. Raises ValueError, TypeError or KeyError if the value is no result."""
    return _decode(value, tensor, _RESULTS)


def _decode(value: Any, tensor: Decoder, classes: Classes, depth: int = 2 * _DEPTH) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its name")
        return value
    if not depth:
        raise ValueError(f"a value is nested more than {2 * _DEPTH} times")
    depth -= 1
    ((name, content),) = value.items()
    if name in classes:
        return classes[name](**{field: _decode(part, tensor, classes, depth) for field, part in content.items()})
    match name:
        case "tensor":
            return tensor(content)
        case "list":
            return [_decode(part, tensor, classes, depth) for part in content]
        case "tuple":
            return tuple([_decode(part, tensor, classes, depth) for part in content])
        case "mapping":
            return {str(key): _decode(part, tensor, classes, depth) for key, part in content}
        case "dtype":
            return DTYPES[content]
        case "recipe":
            return find_recipe(content) if isinstance(content, str) else _recipe_of(content)
        case "group":
            return joined()
        case "training":
            return training_recipe(content)
        case "foreign":
            return Foreign(str(content))
    raise ValueError(f"unknown kind of value {name!r}")


@cache
def _recipe(recipe: Recipe) -> Any:
    """A recipe as JSON: its name; or its fields, if it has no name, or the name belongs to a file of rules, which may
    change."""
    try:
        if str(recipe) not in own_rules() and find_recipe(str(recipe)) == recipe:
            return str(recipe)
    except ValueError:
        pass
    found: dict[str, Any] = {}
    for field in fields(recipe):
        part = getattr(recipe, field.name)
        found[field.name] = part.name if field.name in ("element", "scale") else encode_argument(part, no_tensor)
    return found


def _recipe_of(content: Mapping[str, Any]) -> Recipe:
    formats: dict[str, Any] = {name: (FORMATS | {FP32.name: FP32})[content[name]] for name in ("element", "scale")}
    parts = {name: _decode(part, no_tensor, _ARGUMENTS) for name, part in content.items() if name not in formats}
    return Recipe(**formats, **parts)


def no_tensor(value: Any) -> Any:
    """Encoder and decoder of values without tensors. Raises ValueError."""
    raise ValueError(f"a recipe holds no tensor, but {value}")
