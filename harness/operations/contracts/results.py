"""The results of a kernel under the names of a contract's outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from narrowgauge import adapt
from narrowgauge.harness.backends.results import BackendError, type_name
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import Shown
from narrowgauge.reference.contracts.layout.pages import Stored, parts_before
from narrowgauge.reference.quantize.layout import linear_scales
from narrowgauge.reference.quantize.scaling import block_scales
from narrowgauge.spec.kv_cache import DATA, SCALES, Cache, part_name
from narrowgauge.spec.program import WRITTEN, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

_STORED = ("codes", "scales", "amax", "transposed")


def named_results(
    program: Program, tensors: Mapping[str, torch.Tensor], result: Any
) -> dict[str, torch.Tensor | Quantized | Stored]:
    """The shown outputs of a kernel, by name.

    `result`: a tensor; a tuple of all outputs in the order of the contract; or a mapping by name, also without some
    outputs. A quantization is a `Quantized`, or codes and scales, and the amax if the recipe has one. Raises TypeError
    and ValueError for results that the contract does not have, with the name of the result.
    """
    given = _given(program, result)
    found: dict[str, torch.Tensor | Quantized | Stored] = {}
    device = next(iter(tensors.values())).device
    for output, number in program.outputs.items():
        step = program.steps[number]
        if step.function == WRITTEN:
            before = parts_before(program, tensors, program.steps[step.operands[1]])
            stored = _parts(program, output)
            found[output] = Stored({
                part: _tensor(name, given.pop(name), of.dtype, tuple(of.shape), device)
                for name, (part, of) in zip(stored, before.items(), strict=True)
            })  # fmt: skip
            continue
        shape = _shape(program, tensors, step)
        whole = given.pop(output, None)
        names = [name for name in _parts(program, output) if name != output]
        if step.recipe is not None and isinstance(whole, tuple | list) and len(whole) <= len(names):
            given |= dict(zip(names, whole, strict=False))
            whole = None
        parts = {name: given.pop(name, None) for name in names}
        if names and names[-1].endswith("amax"):  # its factor, which a Quantized has, is not judged
            given.pop(f"{names[-1].removesuffix('amax')}tensor_scale", None)
        if whole is None and not any(part is not None for part in parts.values()):
            continue
        if step.recipe is not None:
            scale = program.scale_of(step, tensors)
            found[output] = _quantized(output, whole, parts, step, shape, scale)
        else:
            own = _tensor(output, whole, DTYPES[step.dtype], _apart(program, tensors, step, shape), device)
            found[output] = own.reshape(shape)
    if given:
        raise ValueError(f"{program.name} has no result {', '.join(given)}; its results are {_named(program)}")
    if not found:
        raise ValueError(f"the result is empty; {program.name} returns {_named(program)}")
    return found


@contextmanager
def fitting(method: str) -> Iterator[None]:
    """Raise BackendError for a result of a method that does not fit."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BackendError(f"{method} gave a result that does not fit: {error}") from error


def result_tensors(program: Program, result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result of `named_results` by name, as the kernel stored them.

    Raises TypeError for anything but a tensor, and ValueError for a wrong number of results.
    """
    found: dict[str, torch.Tensor] = {}
    if isinstance(result, Cache):
        result = result.parts()
    for name, value in _given(program, result).items():
        parts = {name: value}
        if isinstance(value, Quantized | Mapping) or hasattr(value, "codes"):  # a kernel host gives a mapping
            prefix = "" if name == "quantized" else f"{name}."
            stored: dict[str, Any] = (
                dict(value) if isinstance(value, Mapping) else {part: getattr(value, part, None) for part in _STORED}
            )
            if stored.pop("transposed", False):
                stored |= {part: stored[part].T for part in ("codes", "scales")}
            parts = {part if part.startswith(prefix) else prefix + part: stored[part] for part in stored}
        elif isinstance(value, tuple | list):
            parts = dict(zip(_parts(program, name), value, strict=False))
        for part, tensor in parts.items():
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{part} is {type_name(tensor)}, not a tensor; it gives {_named(program)}")
            found[part] = tensor
    return found


def _given(program: Program, result: Any) -> dict[str, Any]:
    """A result by the names of its parts."""
    names = [name for output in program.outputs for name in _parts(program, output)]
    if isinstance(result, Mapping):  # None: a result that the recipe does not have, such as an amax
        return {name: value for name, value in result.items() if value is not None}
    if not isinstance(result, tuple | list):
        return {names[0] if len(names) == 1 else next(iter(program.outputs)): result}
    if len(result) == len(names) + 1 and result[-1] is None:  # no amax
        result = result[:-1]
    if len(result) == len(program.outputs) != len(names):
        names = list(program.outputs)
    elif len(result) == len(names) - 1 and names[-1].endswith("amax"):  # a kernel may keep the amax to itself
        names = names[:-1]
    if len(result) != len(names):
        raise ValueError(f"{program.name} returns {_named(program)}; the result has {len(result)} parts")
    return dict(zip(names, result, strict=True))


def _named(program: Program) -> str:
    return ", ".join(name for output in program.outputs for name in _parts(program, output))


def stored_results(program: Program, shown: Shown) -> dict[str, torch.Tensor]:
    """Tensors by name from which `named_results` makes these outputs again."""
    found: dict[str, torch.Tensor] = {}
    for output, result in shown.items():
        if isinstance(result, Quantized):
            codes = result.codes.T if result.transposed else result.codes
            values = {"codes": codes, "scales": linear_scales(result), "amax": result.amax}
            names = {name.rpartition(".")[2]: name for name in _parts(program, output)}
            found |= {name: tensor for part, name in names.items() if (tensor := values[part]) is not None}
        elif isinstance(result, Stored):
            found |= dict(zip(_parts(program, output), result.parts.values(), strict=True))
        else:
            found[output] = result
    return found


def has_rows(program: Program) -> bool:
    """Whether a row of the first argument alone determines a row of every result."""
    axis = program.arguments[0].axes[:1]
    for number in program.outputs.values():
        step = program.steps[number]
        recipe = None if step.recipe is None else find_recipe(step.recipe)
        if step.axes[:1] != axis or (recipe is not None and _shared_by_rows(recipe)):
            return False
    return not any(axis[0] in step.axes[1:] or step.across_rows for step in program.steps)


def _shared_by_rows(recipe: Recipe) -> bool:
    """Whether a scale is made from the elements of several rows."""
    of_tensor = recipe.granularity == "tensor" and recipe.tensor_scale not in ("none", "given")
    return of_tensor or (not recipe.whole and recipe.block[0] > 1)


def _parts(program: Program, output: str) -> Iterator[str]:
    """Names of the tensors of an output."""
    step = program.steps[program.outputs[output]]
    if step.function == WRITTEN:
        half = program.steps[step.operands[1]].options
        parts = [argument.name for argument in program.arguments if argument.of_cache == half["name"]]
        yield from (name for part in (DATA, SCALES)
                    if f"{half['name']}.{(name := part_name(half['half'], part))}" in parts)  # fmt: skip
        return
    if step.recipe is None:
        yield output
        return
    recipe = find_recipe(step.recipe)
    prefix = "" if output == "quantized" else f"{output}."
    yield f"{prefix}codes"
    if recipe.tensor_scale != "given":
        yield f"{prefix}scales"
        if recipe.tensor_scale != "none":
            yield f"{prefix}amax"


def _shape(program: Program, tensors: Mapping[str, torch.Tensor], step: Step) -> tuple[int, ...]:
    """Shape of the result of a step."""
    sizes = program.sizes(tensors)

    def size(axis: str) -> int:
        if "*" in axis and axis not in sizes:
            return math.prod(map(size, axis.split("*")))
        name, _, divisor = axis.rpartition("/")
        return sizes[axis] if not name else size(name) // int(divisor)

    return tuple(size(axis) for axis in step.axes)


def _apart(
    program: Program, tensors: Mapping[str, torch.Tensor], step: Step, shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape with a product of axes as its axes."""
    sizes = program.sizes(tensors)
    each = [[sizes[part] for part in axis.split("*")] if "*" in axis else [size]
            for axis, size in zip(step.axes, shape, strict=True)]  # fmt: skip
    return tuple(size for sizes in each for size in sizes)


def _tensor(name: str, value: Any, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    found = adapt.tensor(value).detach()
    if found.dtype != dtype or tuple(found.shape) != shape or found.device != device:
        wanted = f"{dtype} {shape} on {device}"
        raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)} on {found.device}; the contract says {wanted}")
    return found


def _quantized(
    name: str, whole: Any, parts: Mapping[str, Any], step: Step, shape: tuple[int, ...], scale: torch.Tensor | None
) -> Quantized:
    recipe: Recipe = find_recipe(step.recipe or "")
    if isinstance(whole, Quantized):
        if whole.recipe != recipe:
            raise ValueError(f"{name} is quantized by {whole.recipe}; the contract says {recipe}")
        return whole
    codes, scales, amax = (next((v for key, v in parts.items() if key.endswith(end)), None)
                           for end in ("codes", "scales", "amax"))  # fmt: skip
    if whole is not None and codes is None and recipe.tensor_scale == "given":
        codes = whole
    if scale is not None:
        scales = block_scales(scale.view(1, 1), scale, recipe, DTYPES[step.dtype])
    for part, value in (("codes", codes), ("scales", scales)):
        if value is None:
            raise ValueError(f"{name} lacks its {part}; return {', '.join(parts)}")
    return adapt.quantized(codes, scales, recipe, (shape[0], shape[1]), amax=amax)
