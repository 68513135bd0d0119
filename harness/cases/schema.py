"""The schema of case files: the keys of each operation, what they can be, and what does not go together.

cases/README.md is the same for people.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from narrowgauge.harness.cases.families import families_of
from narrowgauge.harness.cases.sections import parse, section_sizes
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.recipes import Recipe, find_recipe
from narrowgauge.spec.training import TrainingRecipe, training_recipe

TIERS = ("quick", "full")
DTYPES = ("fp32", "bf16", "fp16")
USAGES = ("rowwise", "columnwise", "both")
VIEWS = ("contiguous", "strided", "transposed")
SCALES = ("linear", "swizzled")
RANDOMS = ("philox", "words")
LAYOUTS = ("tn", "nn", "nt")
NORMS = ("layer", "rms")
FLAGS = {"usage": USAGES, "view": VIEWS, "scales": SCALES, "random": RANDOMS, "norm": NORMS}
"""Keys whose values are flags of an id, but for the first."""
SWITCHES = ("padded", "accumulate", "bias", "quantized-parameters", "delayed-wgrad", "recompute")
"""Keys that are true or false, and flags of an id where they are true."""
MODULES = ("linear", "layernorm-linear", "grouped-linear", "transformer-layer")
"""Operations that run a module forward and backward, under a training recipe."""
MOST_STEPS = 16

Check = Callable[[Any], str | None]
"""What is wrong with a value, or None."""
Point = dict[str, Any]
"""One value for every key of an operation."""


def nearest(word: Any, known: Iterable[str]) -> str:
    """` (did you mean …?)` with the known word nearest to `word`, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def one_of(choices: Iterable[str]) -> Check:
    """A check that a value is one of `choices`."""
    known = list(choices)

    def check(value: Any) -> str | None:
        return None if value in known else f"is {value!r}{nearest(value, known)}; it can be {', '.join(known)}"

    return check


def _dims(names: str, least: int, most: int) -> Check:
    count = f"{least} sizes" if least == most else f"{least} to {most} sizes"

    def check(value: Any) -> str | None:
        sizes = (
            isinstance(value, list) and least <= len(value) <= most and all(type(n) is int and n >= 0 for n in value)
        )
        return None if sizes else f"is {value!r}; a shape is {names}, {count} that are not negative"

    return check


def _recipe(value: Any) -> str | None:
    try:
        find_recipe(value)
    except (ValueError, AttributeError) as error:
        return f"is {value!r}: {error}" if isinstance(error, ValueError) else f"is {value!r}, not a recipe's name"
    return None


def _rotating(value: Any) -> str | None:
    if problem := _recipe(value):
        return problem
    return (
        None if find_recipe(value).transform else f"is {value!r}, which has no transform; nvfp4-rht and the like have"
    )


def _delayed(value: Any) -> str | None:
    if problem := _recipe(value):
        return problem
    takes = find_recipe(value).delayed
    return None if takes else f"is {value!r}, which takes no history; fp8-delayed-e4m3 and the like do"


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"is {value!r}; it can be true or false"


def _training(value: Any) -> str | None:
    try:
        training_recipe(value)
    except (ValueError, TypeError) as error:
        return f"is {value!r}: {error}" if isinstance(value, str) else f"is {value!r}, not a training recipe's name"
    return None


def _count(noun: str, most: int) -> Check:
    def check(value: Any) -> str | None:
        return None if type(value) is int and 1 <= value <= most else f"is {value!r}; there can be 1 to {most} {noun}"

    return check


def _sections(value: Any) -> str | None:
    try:
        parse(value)
    except ValueError as error:
        return str(error)
    return None


_MATRIX = _dims("[M, K]", 2, 2)
_GEMM = _dims("[M, K, N]", 3, 3)
_EPILOGUE: dict[str, Check] = {"accumulate": _boolean, "bias": _boolean}
_OPERANDS: dict[str, Check] = {"x": one_of(DTYPES), "w": one_of(DTYPES), "out": one_of(DTYPES)}
_MODULE_OPTIONS: dict[str, Check] = {
    "steps": _count("steps", MOST_STEPS),
    **_EPILOGUE,
    "quantized-parameters": _boolean,
    "delayed-wgrad": _boolean,
    "recompute": _boolean,
}


def _module(operation: str, shape: Check, **keys: Check) -> dict[str, Check]:
    """The keys of an operation that runs a module: what all have, and its own."""
    return {
        "training": _training, "shape": shape, "dtype": one_of(DTYPES), "inputs": one_of(families_of(operation)),
        **keys, **_MODULE_OPTIONS,
    }  # fmt: skip


KEYS: dict[str, dict[str, Check]] = {
    "quantize": {
        "recipe": _recipe,
        "shape": _dims("[M, K] or (…, K)", 2, 4),
        "dtype": one_of(DTYPES),
        "inputs": one_of(families_of("quantize")),
        "usage": one_of(USAGES),
        "view": one_of(VIEWS),
        "scales": one_of(SCALES),
        "random": one_of(RANDOMS),
    },
    "transform": {
        "recipe": _rotating,
        "shape": _MATRIX,
        "dtype": one_of(DTYPES),
        "inputs": one_of(families_of("transform")),
        "view": one_of(VIEWS),
    },
    "swizzle": {"shape": _dims("[R, C]", 2, 2), "inputs": one_of(families_of("swizzle"))},
    "update-scale": {
        "recipe": _delayed,
        "shape": _dims("[H, N]", 2, 2),
        "inputs": one_of(families_of("update-scale")),
    },
    "quantize-grouped": {
        "recipe": _recipe,
        "shape": _MATRIX,
        "dtype": one_of(DTYPES),
        "inputs": one_of(families_of("quantize-grouped")),
        "sections": _sections,
        "usage": one_of(USAGES[:2]),
    },
    "gemm": {
        "recipe": _recipe,
        "w_recipe": _recipe,
        "shape": _GEMM,
        **_OPERANDS,
        "inputs": one_of(families_of("gemm")),
        "layout": one_of(LAYOUTS),
        **_EPILOGUE,
    },
    "gemm-grouped": {
        "recipe": _recipe,
        "w_recipe": _recipe,
        "shape": _GEMM,
        **_OPERANDS,
        "inputs": one_of(families_of("gemm-grouped")),
        "sections": _sections,
        "padded": _boolean,
        **_EPILOGUE,
    },
    "gemm-quantized": {
        "recipe": _recipe,
        "w_recipe": _recipe,
        "out_recipe": _recipe,
        "shape": _GEMM,
        **_OPERANDS,
        "inputs": one_of(families_of("gemm-quantized")),
        "layout": one_of(LAYOUTS),
        **_EPILOGUE,
    },
    "linear": _module("linear", _dims("[B, S, K, N]", 4, 4)),
    "layernorm-linear": _module("layernorm-linear", _dims("[B, S, K, N]", 4, 4), norm=one_of(NORMS)),
    "grouped-linear": _module("grouped-linear", _GEMM, sections=_sections),
    "transformer-layer": _module(
        "transformer-layer", _dims("[B, S, hidden, ffn]", 4, 4), heads=_count("heads", 1024), norm=one_of(NORMS)
    ),
}
OPTIONAL: dict[str, Any] = {
    "usage": "rowwise", "view": "contiguous", "scales": "linear", "random": None, "w_recipe": None, "layout": "tn",
    "norm": "layer", "steps": 1, **dict.fromkeys(SWITCHES, False),
}  # fmt: skip
"""Defaults. None: `random` is philox where the recipe rounds stochastically, `w_recipe` is the recipe."""


_rule = cache(find_recipe)
"""A recipe by its name; a matrix asks for the same few for every point."""


def _not_rotated(rule: Recipe, dtypes: Iterable[str], extent: int, axis: str) -> str | None:
    """Why the recipe cannot rotate operands of these dtypes along an axis of so many elements, or None."""
    if rule.transform is None:
        return None
    if wrong := [dtype for dtype in dtypes if dtype != "bf16"]:
        return f"recipe {rule} rotates bf16 alone, not {wrong[0]}"
    if extent % rule.transform.group:
        return f"recipe {rule} rotates whole groups of {rule.transform.group}; {axis} = {extent} is no multiple of it"
    return None


def _quantize(point: Point) -> str | None:
    rule = _rule(point["recipe"])
    if point.get("random") is not None and rule.rounding != "stochastic":
        return f"random is {point['random']!r}, but recipe {rule} does not round stochastically; leave it out"
    if point.get("scales") == "swizzled" and rule.scale is FP32:
        return f"scales is 'swizzled', but recipe {rule} has float32 scales; the 128×4 layout is of bytes"
    rows, columns = math.prod(point["shape"][:-1]), point["shape"][-1]
    # A columnwise half runs along M; `columnwise` is quantize of the physical transpose.
    extent, axis = (columns, "K") if point["usage"] == "rowwise" else (rows, "M")
    return _lost(point) or _not_rotated(rule, [point["dtype"]], extent, axis)


def _lost(point: Point) -> str | None:
    """Why the family has nothing but zeros in this dtype, or None."""
    if point["inputs"] == "normal-1e-28" and point["dtype"] == "fp16":
        return "inputs is 'normal-1e-28', which is 0 in fp16; dtype can be fp32 or bf16"
    return None


def _update_scale(point: Point) -> str | None:
    return None if point["shape"][0] else "shape is [0, N]; a history [H, N] has at least one amax of each tensor"


def _transform(point: Point) -> str | None:
    return _not_rotated(_rule(point["recipe"]), [point["dtype"]], point["shape"][-1], "K")


def _divided(point: Point, whole: int) -> str | None:
    rule = _rule(point["recipe"])
    if rule.granularity == "row":
        return f"recipe {rule} has an amax for every row; sections of one amax each do not apply"
    try:
        section_sizes(point["sections"], point["shape"][0], whole=whole)
    except ValueError as error:
        return f"sections {error}"
    return None


def _quantize_grouped(point: Point) -> str | None:
    rule, (rows, columns) = _rule(point["recipe"]), point["shape"]
    extent, axis = (columns, "K") if point["usage"] == "rowwise" else (rows, "M")
    problem = _lost(point) or _not_rotated(rule, [point["dtype"]], extent, axis)
    return problem or _divided(point, whole_of(rule, point["usage"]))


def whole_of(rule: Recipe, usage: str) -> int:
    """What the rows of a section have to be a multiple of."""
    return rule.transform.group if rule.transform and usage == "columnwise" else 1


def _multiplied(point: Point) -> str | None:
    left, right = (_rule(name) for name in recipes_of(point))
    reason = mismatch(left, right)
    return f"recipe {left} and w_recipe {right} cannot be multiplied: {reason}" if reason else None


def _gemm(point: Point) -> str | None:
    for rule in map(_rule, recipes_of(point)):
        if rule.transform and point["layout"] != "nt":
            return (
                f"layout is {point['layout']!r}, but recipe {rule} rotates columnwise operands, and rotations cancel "
                "where both operands are: layout can be nt"
            )
        if problem := _not_rotated(rule, [point["x"], point["w"]], point["shape"][1], "K"):
            return problem
    return _multiplied(point)


def _gemm_grouped(point: Point) -> str | None:
    for rule in map(_rule, recipes_of(point)):
        if rule.transform:
            return f"recipe {rule} rotates columnwise operands; those of a {point['operation']} are rowwise"
    return _multiplied(point) or _divided(point, 1)


def _gemm_quantized(point: Point) -> str | None:
    rule = _rule(point["out_recipe"])
    if rule.rounding == "stochastic":
        return f"out_recipe {rule} rounds stochastically; gemm_quantized takes no random bits"
    if rule.transform:
        return f"out_recipe {rule} rotates; gemm_quantized rotates no output"
    return _gemm(point)


def _runs_module(point: Point) -> str | None:
    operation, shape = point["operation"], point["shape"]
    grouped = operation == "grouped-linear"
    if 0 in (shape[1:] if grouped else shape):
        return f"shape is {shape}; but for the rows of a grouped-linear, which may be 0, a module has no empty side"
    if point["quantized-parameters"] and not point["accumulate"]:
        return "quantized-parameters have no high-precision weight that could hold a gradient: accumulate can be true"
    if operation == "transformer-layer" and shape[2] % point["heads"]:
        return f"hidden = {shape[2]} is no multiple of heads = {point['heads']}"
    rows = shape[0] if grouped else shape[0] * shape[1]
    rule = _training_rule(point["training"])
    for role in (rule.input, rule.grad):
        # Sections are padded to whole groups.
        if problem := _not_rotated(role, [point["dtype"]], 0 if grouped else rows, "B·S"):
            return problem
    if not grouped:
        return None
    try:
        section_sizes(point["sections"], rows)
    except ValueError as error:
        return f"sections {error}"
    return None


_training_rule: Callable[[str], TrainingRecipe] = cache(training_recipe)


def recipes_of(point: Point) -> list[str]:
    """The recipes of x and w."""
    return [point["recipe"], point.get("w_recipe") or point["recipe"]]


_PROBLEMS: dict[str, Callable[[Point], str | None]] = {
    "quantize": _quantize,
    "transform": _transform,
    "swizzle": lambda point: None,
    "update-scale": _update_scale,
    "quantize-grouped": _quantize_grouped,
    "gemm": _gemm,
    "gemm-grouped": _gemm_grouped,
    "gemm-quantized": _gemm_quantized,
    **dict.fromkeys(MODULES, _runs_module),
}


def problem(point: Point) -> str | None:
    """Why the values of a point, each right by itself, do not go together; None where they do."""
    return _PROBLEMS[point["operation"]](point)
