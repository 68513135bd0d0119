"""Inputs: from a case to the tensors that its operation consumes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import FAMILIES
from narrowgauge.harness.cases.parameters import Layer, layers_of
from narrowgauge.harness.cases.schema import MODULES
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import SCALE_BYTES, generate, power_of_two
from narrowgauge.harness.inputs.histories import HISTORIES
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.quantized import words_shape
from narrowgauge.spec.recipes import Recipe, find_recipe

if TYPE_CHECKING:
    from narrowgauge.harness.inputs.capture import Captured

_SLAB = 1 << 18


@dataclass
class Inputs:
    """Tensors on the CPU, contiguous, in the orientation that the operation consumes: quantized along rows.

    The physical tensor of a columnwise quantize, or of an operand that its gemm's layout stores the other way round,
    is the transpose of what is here; a case's view is made of it when it is given.
    """

    x: torch.Tensor
    """(M, K); of a columnwise quantize (K, M), unless its recipe makes columnwise halves in place; of a swizzle the
    bytes (R, C); of an update-scale the history (H, N); of a module those of all its steps, (steps, B, S, K) or, of a
    grouped one, (steps, M, K)."""
    w: torch.Tensor | None = None
    """(N, K) of a gemm; of a grouped one the matrices one below the other, (G·N, K)."""
    c: torch.Tensor | None = None
    """(M, N), in the dtype of the output: what `accumulate` adds to."""
    bias: torch.Tensor | None = None
    """(N,), of a grouped gemm (G, N), in the dtype of the output."""
    random: dict[str, Random] = field(default_factory=dict)
    """Random bits, of recipes that round stochastically: of `x` and `w`; words of two halves are of `x` and `xT`."""
    scale: dict[str, torch.Tensor] = field(default_factory=dict)
    """Encode scales that are given, of recipes with delayed scaling: of `x`, `w` and `output`, float32 (1,), or (G,) of
    sections; of an update-scale (N,), those of `x` before it."""
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of a module: `dy`, the gradients of its outputs in all steps, like `x`; its parameters by their names; and of
    every weight that gradients accumulate into, `weight.main_grad`, what is there before, float32 (N, K)."""

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in order."""
        given = [self.x, self.w, self.c, self.bias, *self.random.values(), *self.scale.values(), *self.given.values()]
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]

    def to(self, device: str) -> Inputs:
        """The same on a device."""
        x, w, c, bias = (None if t is None else t.to(device) for t in (self.x, self.w, self.c, self.bias))
        assert x is not None
        random = {name: r.to(device) if isinstance(r, torch.Tensor) else r for name, r in self.random.items()}
        scale = {name: number.to(device) for name, number in self.scale.items()}
        given = {name: tensor.to(device) for name, tensor in self.given.items()}
        return Inputs(x, w, c, bias, random, scale, given)


def make_inputs(case: Case, *, seed: int = 0, captured: Captured | None = None) -> Inputs:
    """The inputs of `case`: the same bytes for the same case id and seed, on every machine.

    Where `case.inputs` names a captured tensor, `captured` holds it: it is x of a quantize and w of a gemm. Raises
    ValueError where it does not, or where the tensor has not the case's shape and dtype.
    """
    return _MAKERS[case.operation](case, seed, captured)


def _quantize(case: Case, seed: int, captured: Captured | None) -> Inputs:
    *leading, columns = case.shape
    rows = math.prod(leading)
    dtype = TORCH_DTYPES[case.dtype]
    rule = find_recipe(case.recipe)
    columnwise = case.usage == "columnwise"
    if case.inputs in FAMILIES:
        # Made in the orientation that is quantized, so that a family's blocks are the kernel's blocks in both usages.
        shape = (columns, rows) if columnwise else (rows, columns)
        x = generate(case.inputs, _draw(case, seed, "x"), shape, dtype, "x", rule)
    else:
        x = _captured(case, captured, (rows, columns), dtype)
        x = x.T.contiguous() if columnwise else x
    # Sections are rows of (M, K) in either usage, and a half that is made in place is one of (M, K).
    physical = not columnwise or case.operation == "quantize-grouped" or rule.columnwise == "in-place"
    if columnwise and physical:
        x = x.T.contiguous()
    parts = torch.split(x, list(case.sections)) if case.operation == "quantize-grouped" else (x,)
    random, scale = _random_of_quantize(case, seed, x), _given_scales(case, seed, {"x": (rule, parts)})
    return Inputs(x.view(case.shape) if physical else x, random=random, scale=scale)


def _swizzle(case: Case, seed: int, captured: Captured | None) -> Inputs:
    rows, columns = case.shape
    return Inputs(SCALE_BYTES[case.inputs](_draw(case, seed, "x"), rows, columns))


def _update_scale(case: Case, seed: int, captured: Captured | None) -> Inputs:
    rows, tensors = case.shape
    history = HISTORIES[case.inputs](_draw(case, seed, "x"), rows, tensors)
    # Any scales, none of which follows from the history: one that stays is told from one that is made.
    scale = 1.5 + 0.5 * _draw(case, seed, "scale of x").uniform(tensors)
    return Inputs(history, scale={"x": scale})


def _gemm(case: Case, seed: int, captured: Captured | None) -> Inputs:
    rows, depth, columns = case.shape
    grouped = case.operation == "gemm-grouped"
    sizes = case.sections if grouped else (rows,)
    x_dtype, w_dtype, out_dtype = (TORCH_DTYPES[name] for name in case.dtypes)
    w_shape = (len(sizes) * columns, depth)
    rules = [find_recipe(name) for name in case.recipes]
    if case.inputs in FAMILIES:
        x = generate(case.inputs, _draw(case, seed, "x"), (rows, depth), x_dtype, "x", rules[0])
        w = generate(case.inputs, _draw(case, seed, "w"), w_shape, w_dtype, "w", rules[1])
    else:
        x = generate("normal", _draw(case, seed, "x"), (rows, depth), x_dtype, "x", rules[0])
        w = _captured(case, captured, w_shape, w_dtype)
    c = bias = None
    of_w = _exponents(w).view(len(sizes), columns) + _growth(depth)
    if "accumulate" in case.flags:
        exponents = _exponents(x).unsqueeze(1) + of_w.repeat_interleave(torch.tensor(sizes), 0)
        c = _addend(_draw(case, seed, "c"), exponents, out_dtype)
    if "bias" in case.flags:
        # max over rows: an empty x has none.
        of_x = _exponents(x).amax(0, keepdim=True) if rows else torch.zeros(1, dtype=torch.int32)
        bias = _addend(_draw(case, seed, "bias"), of_x + (of_w if grouped else of_w[0]), out_dtype)
    random: dict[str, Random] = {
        role: _philox(case, seed, role)
        for role, name in zip("xw", case.recipes, strict=True)
        if find_recipe(name).rounding == "stochastic"
    }
    matrices = torch.split(w, columns) if columns else (w,) * len(sizes)
    parts = {"x": (rules[0], torch.split(x, list(sizes))), "w": (rules[1], matrices)}
    scale = _given_scales(case, seed, parts)
    if case.operation == "gemm-quantized" and (out := find_recipe(case.out_recipe)).tensor_scale == "given":
        # What maps a product of typical rows into the format; the largest saturate.
        typical = (int(_exponents(x).amax()) if rows else 0) + (int(of_w.amax()) if columns else 0)
        power = torch.tensor([max(-100, min(100, -typical))])
        scale["output"] = out.element.max / 4 * power_of_two(power)
    return Inputs(x, w, c, bias, random, scale)


def _module(case: Case, seed: int, captured: Captured | None) -> Inputs:
    """x and dy of every step, by the family; parameters too where the module is one product, else normal numbers."""
    dtype, rule, layers = TORCH_DTYPES[case.dtype], case.training, layers_of(case)
    rows, inner = math.prod(case.shape[:-2]), case.shape[-2]
    outer = inner if case.operation == "transformer-layer" else case.shape[-1]
    leading = case.shape[:-2]

    def steps(role: str, columns: int, recipe_of_role: Recipe) -> torch.Tensor:
        made = [
            generate(case.inputs, _draw(case, seed, f"{role} of step {n}"), (rows, columns), dtype, "x", recipe_of_role)
            for n in range(case.steps)
        ]
        return torch.stack(made).view(case.steps, *leading, columns)

    x, dy = steps("x", inner, rule.input.rowwise), steps("dy", outer, rule.grad.rowwise)
    given = {"dy": dy}
    for layer in layers:
        given |= _parameters(case, seed, layer, x.view(-1, inner))
    if "accumulate" in case.flags:
        for name in (name for layer in layers for name in layer.weights):
            shape = (given[name].shape[0], given[name].shape[1])
            # As large as a sum over the rows of typical products, so that adding to it rounds.
            given[f"{name}.main_grad"] = _draw(case, seed, f"{name}.main_grad").normal(*shape) * 2.0 ** _growth(rows)
    random: dict[str, Random] = {"dy": _philox(case, seed, "dy")} if rule.grad.rounding == "stochastic" else {}
    return Inputs(x, random=random, given=given)


def _parameters(case: Case, seed: int, layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters of a layer whose input, where nothing comes before it, is `x`."""
    dtype, alone = TORCH_DTYPES[case.dtype], not layer.prefix
    found = {}
    for name, shape in layer.shapes(bias="bias" in case.flags).items():
        draw = _draw(case, seed, name)
        if name in layer.weights:
            size = (shape[0], shape[1])
            if alone:
                found[name] = generate(case.inputs, draw, size, dtype, "w", case.training.weight)
            else:  # what keeps a sum of as many products as large as one of them
                found[name] = (draw.normal(*size) * 2.0 ** -_growth(size[1])).to(dtype)
        elif name in layer.biases and alone and not layer.norm:
            of_x = _exponents(x).amax(0, keepdim=True) if len(x) else torch.zeros(1, dtype=torch.int32)
            weight = found[layer.weights[layer.biases.index(name)]]
            found[name] = _addend(draw, of_x + _exponents(weight) + _growth(layer.inner), dtype)
        else:
            found[name] = (0.25 * draw.normal(*shape) + (name == layer.gamma)).to(dtype)
    return found


def _given_scales(
    case: Case, seed: int, operands: Mapping[str, tuple[Recipe, Sequence[torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """For each operand with delayed scaling the encode scale of every one of its parts, float32 (parts,)."""
    found = {}
    for role, (rule, parts) in operands.items():
        if rule.tensor_scale == "given":
            draw = _draw(case, seed, f"scale of {role}")
            found[role] = torch.stack([_earlier_scale(draw, part, rule) for part in parts])
    return found


def _earlier_scale(draw: Draw, x: torch.Tensor, rule: Recipe) -> torch.Tensor:
    """What max/amax may have been a step ago, finite: that of `x` times a power of two, so that ties stay ties.

    One of four is twice as large, and the elements near the amax saturate.
    """
    factor = (2.0, 1.0, 0.5, 0.0625)[draw.index(4)]
    amax = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax() if x.numel() else torch.zeros(())
    scale = torch.full_like(amax, rule.element.max) / amax * factor
    return torch.where(amax > 0, scale.clamp(max=torch.finfo(torch.float32).max), factor)


_MAKERS: dict[str, Callable[[Case, int, Captured | None], Inputs]] = {
    "quantize": _quantize,
    "transform": _quantize,
    "quantize-grouped": _quantize,
    "swizzle": _swizzle,
    "update-scale": _update_scale,
    "gemm": _gemm,
    "gemm-grouped": _gemm,
    "gemm-quantized": _gemm,
    **dict.fromkeys(MODULES, _module),
}


def _draw(case: Case, seed: int, role: str) -> Draw:
    return Draw(f"{case.id}|{seed}|{role}")


def _philox(case: Case, seed: int, role: str) -> tuple[int, int]:
    """Seed and offset, 63 bits each, so that they fit a signed 64-bit integer, offset + 1 too."""
    digest = hashlib.sha256(f"{case.id}|{seed}|random of {role}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:16], "little") >> 2


def _random_of_quantize(case: Case, seed: int, x: torch.Tensor) -> dict[str, Random]:
    """Random bits of `x`, (M, K); words also, or alone, of its transpose where that is quantized."""
    if case.operation == "transform" or find_recipe(case.recipe).rounding != "stochastic":
        return {}
    if not case.words:
        return {"x": _philox(case, seed, "x")}
    rows, columns = x.shape
    shapes = {"x": (rows, columns), "xT": (columns, rows)}
    in_place = case.usage == "columnwise" and find_recipe(case.recipe).columnwise == "in-place"
    made = ["x", "xT"] if case.usage == "both" else ["xT"] if in_place else ["x"]
    return {name: _draw(case, seed, f"random of {name}").words(*words_shape(shapes[name])) for name in made}


def _captured(case: Case, captured: Captured | None, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    if captured is None:
        raise ValueError(f"{case.id}: {case.inputs!r} is no input family; load its file and give it as `captured`")
    tensor = captured.tensor(case.inputs)
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{case.id}: the case is {shape} {dtype}, but {case.inputs!r} is {tuple(tensor.shape)} {tensor.dtype}"
        )
    return tensor


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """For each row of (M, K) an exponent near its typical magnitude, int32 (M,): a quarter of its largest."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.int32)
    largest = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=1)
    return torch.frexp(largest).exponent - 2


def _growth(depth: int) -> int:
    """log2 of √K, rounded down."""
    return depth.bit_length() // 2


def _addend(draw: Draw, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers as large as the product they are added to, so that the addition rounds, finite in `dtype`."""
    limit = 10 if dtype == torch.float16 else 100
    made = torch.empty(exponents.shape, dtype=dtype)
    # The temporaries of so many elements stay in cache. Whole pairs of rows take whole words of the stream.
    rows = max(2, _SLAB // max(1, exponents.shape[-1]) // 2 * 2)
    for part, some in zip(torch.split(made, rows), torch.split(exponents, rows), strict=True):
        scale = (some.clamp(-limit, limit) + 127).bitwise_left_shift_(23).view(torch.float32)
        part.copy_(draw.normal(*some.shape).mul_(scale))
    return made


PAD = 8
"""Elements behind each row of a strided view."""


def laid_out(x: torch.Tensor, view: str) -> torch.Tensor:
    """`x` (…, K), its values unchanged, as a `contiguous`, `strided` or `transposed` view of other memory.

    strided: every second element of rows that are 8 elements longer than twice K. transposed: the last dimension is
    the outermost in memory, as that of a (K, M) matrix seen as (M, K).
    """
    if view == "strided":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + PAD)
        return wide[..., : 2 * x.shape[-1] : 2].copy_(x)
    if view == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    return x
