"""Values of a call as JSON: every class, dtype and recipe round-trips; a value that is no result is a named error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.module_driver import Step
from narrowgauge.harness.backends.results import Foreign
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.codec import decode_argument, decode_result, encode_argument, encode_result
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipe import Hadamard
from narrowgauge.spec.recipes import find_recipe, recipe_names

CODES, SCALES, AMAX = torch.zeros(2, 8), torch.ones(2, 1), torch.ones(1)
NVFP4 = find_recipe("nvfp4")


class Tensors:
    """Tensors by number, in place of shared memory."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def place(self, tensor: torch.Tensor) -> int:
        self.held.append(tensor)
        return len(self.held) - 1

    def tensor(self, place: Any) -> torch.Tensor:
        return self.held[place]


def round_trip(value: Any, encode: Callable[..., Any], decode: Callable[..., Any]) -> Any:
    tensors = Tensors()
    return decode(json.loads(json.dumps(encode(value, tensors.place))), tensors.tensor)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_round_trips(name: str) -> None:
    recipe = find_recipe(name)
    changed = replace(recipe, transform=Hadamard(32, 7)) if recipe.transform else recipe
    for given in (recipe, recipe.rowwise, changed):
        found = round_trip(given, encode_argument, decode_argument)
        assert found == given
        assert (found.element, found.scale) == (given.element, given.scale)


STEP = Step(1, CODES, AMAX, {"weight0": SCALES}, seen={"y": [CODES, None]}, early={"weight0": None})


@dataclass
class Kernel:
    """A result of another class, with the names of a Quantized."""

    codes: Any
    scales: Any = None
    secret: str = "no part"


PARTS = {"codes": CODES, "scales": SCALES, "amax": None, "tensor_scale": None}
RESULTS = {
    "step": ([STEP], [STEP]),
    "object with codes": (Kernel(CODES, SCALES), PARTS),
    "namespace": (SimpleNamespace(codes=CODES, scales=SCALES), PARTS),
    "quantized": (Quantized(CODES, SCALES, None, NVFP4, (2, 16)), PARTS),
    "class of the same name": (type("Step", (), {})(), Foreign("Step")),
    "foreign": ((1, object()), (1, Foreign("object"))),
    "function": ([print], [Foreign("builtin_function_or_method")]),
    "long text": ("x" * (codec.TEXT + 5), "x" * codec.TEXT),
    "keys": ({1: 2, None: {(): 3}}, {"1": 2, "None": {"()": 3}}),
    "subclass of int": (True, True),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_arrives_as_its_parts(name: str) -> None:
    given, expected = RESULTS[name]
    assert repr(round_trip(given, encode_result, decode_result)) == repr(expected)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append({"again": (value,)})
    return value


def test_a_result_has_a_limited_depth() -> None:
    assert round_trip(nested(32), encode_result, decode_result) == nested(32)
    for given in (nested(33), cycle(), {"a": nested(32)}):
        with pytest.raises(ValueError, match="a result is nested more than 32 times"):
            encode_result(given, Tensors().place)


HOSTILE: list[Any] = [
    [], {}, {"a": 1, "b": 2}, {"unknown": 1}, {"Quantized": {}}, {"Recipe": {}}, {"recipe": "no such"}, {"recipe": {}},
    {"recipe": 7}, {"dtype": "Tensor"}, {"dtype": []}, {"tensor": 5}, {"tensor": None}, {"list": 5}, {"tuple": None},
    {"mapping": {"a": 1}}, {"mapping": [[1]]}, {"mapping": [[1, 2, 3]]}, {"mapping": 1}, {"Step": {"number": 1}},
    {"Step": []}, {"Step": {"__class__": 1}}, {"training": "no such"}, {"training": []}, {"list": [[]]},
    {"__class__": "os.system"}, {"list": [{"tensor": -7}]},
]  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE, ids=json.dumps)
def test_a_value_that_is_no_result_is_an_error(value: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, IndexError)):
        decode_result(value, Tensors().tensor)


def test_a_value_nested_too_deep_is_an_error() -> None:
    value: Any = 1
    for _ in range(500):
        value = {"list": [value]}
    with pytest.raises(ValueError, match="nested"):
        decode_result(value, Tensors().tensor)
