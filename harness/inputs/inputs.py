"""Inputs: the tensors of a case, made from its id and a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import FAMILIES
from narrowgauge.harness.cases.gemm import GemmCase, GroupedGemmCase, ProductCase, QuantizedGemmCase
from narrowgauge.harness.cases.modules import Layer, ModuleCase, TransformerLayerCase
from narrowgauge.harness.cases.quantize import (
    GroupedQuantizeCase,
    QuantizeCase,
    SwizzleCase,
    TransformCase,
    UpdateScaleCase,
)
from narrowgauge.harness.cases.sections import band_rows
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
_PEAK, _BEFORE_ATTENTION = 4, "qkv."
"""Factor of gamma in the layer that makes q and k, for `peaked`: scores are the square of it larger."""


@dataclass
class Inputs:
    """Contiguous tensors in the orientation that the operation quantizes: along rows.

    A columnwise quantize, and an operand that the layout of its gemm stores transposed, receive the transpose of the
    tensor here. The view of a case is made when the backend is called.
    """

    x: torch.Tensor
    """(M, K); of a columnwise quantize (K, M), unless its recipe makes columnwise halves in place; of swizzle the bytes
    (R, C); of update-scale the history (H, N); of a module the inputs of all its steps, (steps, B, S, K) or, of a
    grouped one, (steps, M, K)."""
    random: dict[str, Random] = field(default_factory=dict)
    """Random bits for recipes with stochastic rounding, by operand: `x`, `w`, of a module `dy`. Words for both halves
    have the names `x` and `xT`."""
    scale: dict[str, torch.Tensor] = field(default_factory=dict)
    """Given encode scales of recipes with delayed scaling, by operand: `x`, `w` and `output`, float32 (1,), or (G,) for
    sections; of update-scale `x` (N,), the scales before the update."""
    amax: dict[str, torch.Tensor] = field(default_factory=dict)
    """Given amaxes, float32 (1,), (M,) or (G,), by the orientation that they belong to: `x`, and `xT` of its transpose
    if both halves are quantized."""

    def philox(self, operand: str) -> tuple[int, int] | None:
        """Seed and offset of the random bits of an operand; None for words or without random bits."""
        bits = self.random.get(operand)
        return bits if isinstance(bits, tuple) else None

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors by their names in saved failures."""
        words = {f"random.{name}": bits for name, bits in self.random.items() if isinstance(bits, torch.Tensor)}
        numbers = {"scale": self.scale, "amax": self.amax}
        given = {f"{kind}.{name}": t for kind, tensors in numbers.items() for name, t in tensors.items()}
        return {"x": self.x, **self._own(), **words, **given}

    def _own(self) -> dict[str, torch.Tensor]:
        """Tensors of the operation besides `x`."""
        return {}

    def tensors(self) -> list[torch.Tensor]:
        """All tensors, in the order of `named`."""
        return list(self.named().values())

    def to(self, device: str) -> Self:
        """The same inputs on a device."""
        return replace(self, **{entry.name: _moved(getattr(self, entry.name), device) for entry in fields(self)})


@dataclass(kw_only=True)
class ProductInputs(Inputs):
    """Inputs of a product."""

    w: torch.Tensor
    """(N, K); of a grouped product the matrices one below the other, (G·N, K)."""
    c: torch.Tensor | None = None
    """(M, N) in the dtype of the output: the addend of `accumulate`."""
    bias: torch.Tensor | None = None
    """(N,), of a grouped product (G, N), in the dtype of the output."""

    def _own(self) -> dict[str, torch.Tensor]:
        own = {"w": self.w, "c": self.c, "bias": self.bias}
        return {name: tensor for name, tensor in own.items() if tensor is not None}


@dataclass(kw_only=True)
class ModuleInputs(Inputs):
    """Inputs of a module."""

    dy: torch.Tensor
    """Gradients of the outputs of all steps, (steps, B, S, N) or (steps, M, N)."""
    parameters: dict[str, torch.Tensor]
    main_grads: dict[str, torch.Tensor] = field(default_factory=dict)
    """Content of the main gradient of each weight before the first step, float32 (N, K), if gradients accumulate."""

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """`dy`, the parameters by their names, and the main gradients as `weight.main_grad`."""
        return {"dy": self.dy, **self.parameters, **{f"{name}.main_grad": t for name, t in self.main_grads.items()}}

    def named(self) -> dict[str, torch.Tensor]:
        return super().named() | {f"given.{name}": tensor for name, tensor in self.given.items()}


def _moved(value: Any, device: str) -> Any:
    """A tensor, or a dictionary with tensors, on a device; any other value unchanged."""
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def make_inputs(case: Case, *, seed: int = 0, captured: Captured | None = None) -> Inputs:
    """The inputs of `case`: the same bytes for the same case id and seed, on every machine.

    If `case.inputs` names a captured tensor, `captured` holds it: x of a quantize and w of a gemm. Raises ValueError if
    it does not, or if the tensor has another shape or dtype than the case.
    """
    match case:
        case QuantizeCase() | GroupedQuantizeCase() | TransformCase():
            return _quantize(case, seed, captured)
        case SwizzleCase():
            return _swizzle(case, seed)
        case UpdateScaleCase():
            return _update_scale(case, seed)
        case ProductCase():
            return _product(case, seed, captured)
        case ModuleCase():
            return _module(case, seed)
    raise TypeError(f"{type(case).__name__} has no inputs")


def _quantize(case: QuantizeCase | GroupedQuantizeCase | TransformCase, seed: int, captured: Captured | None) -> Inputs:
    *leading, columns = case.shape
    rows = math.prod(leading)
    dtype = TORCH_DTYPES[case.dtype]
    recipe = find_recipe(case.recipe)
    columnwise = not isinstance(case, TransformCase) and case.usage == "columnwise"
    grouped = isinstance(case, GroupedQuantizeCase)
    if case.inputs in FAMILIES:
        # Generated in the orientation that is quantized: the blocks of a family are the kernel's blocks in both usages.
        shape = (columns, rows) if columnwise else (rows, columns)
        bands = band_rows(*shape) if isinstance(case, QuantizeCase) and case.bands else []
        judged = (sum(band.stop - band.start for band in bands), columns) if bands else shape
        x = generate(case.inputs, _draw(case, seed, "x"), judged, dtype, "x", recipe)
        if bands:
            x = spread_bands(x, bands, rows)
    else:
        x = _captured(case, captured, (rows, columns), dtype)
        x = x.T.contiguous() if columnwise else x
    # Sections are rows of (M, K) in both usages, and a half that is made in place is a half of (M, K).
    physical = not columnwise or grouped or recipe.columnwise == "in-place"
    if columnwise and physical:
        x = x.T.contiguous()
    parts = torch.split(x, list(case.section_sizes)) if grouped else (x,)
    random, scale = _random_of_quantize(case, seed, x), _given_scales(case, seed, {"x": (recipe, parts)})
    amax = {} if isinstance(case, TransformCase) or not case.amax else _given_amaxes(case, seed, parts, recipe)
    return Inputs(x.view(case.shape) if physical else x, random=random, scale=scale, amax=amax)


def _swizzle(case: SwizzleCase, seed: int) -> Inputs:
    rows, columns = case.shape
    return Inputs(SCALE_BYTES[case.inputs](_draw(case, seed, "x"), rows, columns))


def _update_scale(case: UpdateScaleCase, seed: int) -> Inputs:
    rows, tensors = case.shape
    history = HISTORIES[case.inputs](_draw(case, seed, "x"), rows, tensors)
    # Scales that do not follow from the history: a scale that stays differs from a scale that is computed.
    scale = 1.5 + 0.5 * _draw(case, seed, "scale of x").uniform(tensors)
    return Inputs(history, scale={"x": scale})


def _product(case: ProductCase, seed: int, captured: Captured | None) -> ProductInputs:
    rows, depth, columns = case.shape
    grouped = isinstance(case, GroupedGemmCase)
    sizes = case.section_sizes if grouped else (rows,)
    x_dtype, w_dtype, out_dtype = (TORCH_DTYPES[name] for name in (case.x, case.w, case.out))
    w_shape = (len(sizes) * columns, depth)
    x_recipe, w_recipe = case.operand_recipes
    if case.inputs in FAMILIES:
        x = generate(case.inputs, _draw(case, seed, "x"), (rows, depth), x_dtype, "x", x_recipe)
        w = generate(case.inputs, _draw(case, seed, "w"), w_shape, w_dtype, "w", w_recipe)
    else:
        x = generate("normal", _draw(case, seed, "x"), (rows, depth), x_dtype, "x", x_recipe)
        w = _captured(case, captured, w_shape, w_dtype)
    if isinstance(case, GemmCase) and case.same:
        w = x
    c = bias = None

    @cache
    def of_w() -> torch.Tensor:
        """The part of w in the exponents of typical outputs: int32 (sections, N). It takes as long as to draw w."""
        return _exponents(w).view(len(sizes), columns) + _growth(depth)

    if case.accumulate:
        exponents = _exponents(x).unsqueeze(1) + of_w().repeat_interleave(torch.tensor(sizes), 0)
        c = _addend(_draw(case, seed, "c"), exponents, out_dtype)
    if case.bias:
        # The maximum over rows: an empty x has none.
        of_x = _exponents(x).amax(0, keepdim=True) if rows else torch.zeros(1, dtype=torch.int32)
        bias = _addend(_draw(case, seed, "bias"), of_x + (of_w() if grouped else of_w()[0]), out_dtype)
    random: dict[str, Random] = {
        role: _philox(case, seed, role)
        for role, recipe in zip("xw", case.operand_recipes, strict=True)
        if recipe.rounding == "stochastic"
    }
    matrices = torch.split(w, columns) if columns else (w,) * len(sizes)
    parts = {"x": (x_recipe, torch.split(x, list(sizes))), "w": (w_recipe, matrices)}
    scale = _given_scales(case, seed, parts)
    if isinstance(case, QuantizedGemmCase) and (out := find_recipe(case.out_recipe)).tensor_scale == "given":
        # Maps a product of typical rows into the format; the largest elements saturate.
        typical = (int(_exponents(x).amax()) if rows else 0) + (int(of_w().amax()) if columns else 0)
        power = torch.tensor([max(-100, min(100, -typical))])
        scale["output"] = out.element.max / 4 * power_of_two(power)
    return ProductInputs(x, random, scale, w=w, c=c, bias=bias)


def _module(case: ModuleCase, seed: int) -> ModuleInputs:
    """x and dy of every step from the family; of a module that is one product the weights too, else normal numbers."""
    dtype, training, layers = TORCH_DTYPES[case.dtype], case.training_recipe, case.layers
    inner = case.shape[-2]
    outer = inner if isinstance(case, TransformerLayerCase) else case.shape[-1]
    leading = case.shape[:-2]

    def steps(role: str, columns: int, recipe: Recipe) -> torch.Tensor:
        shape = (case.rows, columns)
        tensors = [
            generate(case.inputs, _draw(case, seed, f"{role} of step {n}"), shape, dtype, "x", recipe)
            for n in range(case.steps)
        ]
        return torch.stack(tensors).view(case.steps, *leading, columns)

    x, dy = steps("x", inner, training.input.rowwise), steps("dy", outer, training.grad.rowwise)
    parameters: dict[str, torch.Tensor] = {}
    for layer in layers:
        parameters |= _parameters(case, seed, layer, x.view(-1, inner))
    main_grads = {}
    if case.accumulate:
        for name in (name for layer in layers for name in layer.weights):
            draw, (height, width) = _draw(case, seed, f"{name}.main_grad"), parameters[name].shape
            # As large as a sum over the rows of typical products: the addition rounds.
            main_grads[name] = draw.normal(height, width) * 2.0 ** _growth(case.rows)
    random: dict[str, Random] = {"dy": _philox(case, seed, "dy")} if training.grad.rounding == "stochastic" else {}
    return ModuleInputs(x, random, dy=dy, parameters=parameters, main_grads=main_grads)


def _parameters(case: ModuleCase, seed: int, layer: Layer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parameters of a layer; `x` is the input of a layer that is a module by itself."""
    dtype, alone = TORCH_DTYPES[case.dtype], not layer.prefix
    parameters = {}
    for name, shape in layer.shapes(bias=case.bias).items():
        draw = _draw(case, seed, name)
        if name in layer.weights:
            size = (shape[0], shape[1])
            if alone:
                parameters[name] = generate(case.inputs, draw, size, dtype, "w", case.training_recipe.weight)
            else:  # a sum of as many products stays as large as one product
                parameters[name] = (draw.normal(*size) * 2.0 ** -_growth(size[1])).to(dtype)
        elif name in layer.biases and alone and not layer.norm:
            of_x = _exponents(x).amax(0, keepdim=True) if len(x) else torch.zeros(1, dtype=torch.int32)
            weight = parameters[layer.weights[layer.biases.index(name)]]
            parameters[name] = _addend(draw, of_x + _exponents(weight) + _growth(layer.inner), dtype)
        else:
            numbers = 0.25 * draw.normal(*shape) + (name == layer.gamma)
            peaked = case.inputs == "peaked" and layer.prefix == _BEFORE_ATTENTION and name == layer.gamma
            parameters[name] = (numbers * _PEAK if peaked else numbers).to(dtype)
    return parameters


def _given_scales(
    case: Case, seed: int, operands: Mapping[str, tuple[Recipe, Sequence[torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """Encode scales of the parts of each operand with delayed scaling, float32 (parts,)."""
    scales = {}
    for role, (recipe, parts) in operands.items():
        if recipe.tensor_scale == "given":
            draw = _draw(case, seed, f"scale of {role}")
            scales[role] = torch.stack([_earlier_scale(draw, part, recipe) for part in parts])
    return scales


def _given_amaxes(
    case: QuantizeCase | GroupedQuantizeCase, seed: int, parts: Sequence[torch.Tensor], recipe: Recipe
) -> dict[str, torch.Tensor]:
    """Amaxes of a tensor of which each part is a shard: 1 to 2 times the largest magnitude that the part can have.

    A rotation of n elements grows a magnitude by √n at most. A part of zeros has the amax of another shard.
    """
    growth = math.sqrt(recipe.transform.group) if recipe.transform else 1.0

    def amaxes(role: str, axis: int) -> torch.Tensor:
        draw = _draw(case, seed, f"amax of {role}")
        found = []
        for part in parts:
            magnitudes = part.float().abs().nan_to_num_(nan=0.0, posinf=0.0)
            if not magnitudes.numel():
                own = torch.zeros(part.shape[1 - axis] if recipe.granularity == "row" else 1)
            else:
                own = magnitudes.amax(axis) if recipe.granularity == "row" else magnitudes.amax().view(1)
            factor = 1.0 + draw.uniform(len(own))
            found.append(torch.where(own > 0, own * growth, 1.0) * factor)
        return torch.cat(found).clamp(max=torch.finfo(torch.float32).max)

    both = isinstance(case, QuantizeCase) and case.usage == "both"
    return {"x": amaxes("x", 1)} | ({"xT": amaxes("xT", 0)} if both else {})


def _earlier_scale(draw: Draw, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """A finite max/amax of an earlier step: the scale of `x` times a power of two, so that ties stay ties.

    One scale of four is twice as large, and the elements near the amax saturate.
    """
    factor = (2.0, 1.0, 0.5, 0.0625)[draw.index(4)]
    amax = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax() if x.numel() else torch.zeros(())
    scale = torch.full_like(amax, recipe.element.max) / amax * factor
    return torch.where(amax > 0, scale.clamp(max=torch.finfo(torch.float32).max), factor)


def _draw(case: Case, seed: int, role: str) -> Draw:
    return Draw(f"{case.id}|{seed}|{role}")


def _philox(case: Case, seed: int, role: str) -> tuple[int, int]:
    """Seed and offset, 63 and 62 bits, so that seed and offset + 1 fit signed 64-bit integers."""
    digest = hashlib.sha256(f"{case.id}|{seed}|random of {role}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:16], "little") >> 2


def _random_of_quantize(
    case: QuantizeCase | GroupedQuantizeCase | TransformCase, seed: int, x: torch.Tensor
) -> dict[str, Random]:
    """Random bits of `x`, (M, K); words also, or only, for its transpose if the transpose is quantized."""
    recipe = find_recipe(case.recipe)
    if isinstance(case, TransformCase) or recipe.rounding != "stochastic":
        return {}
    if isinstance(case, GroupedQuantizeCase) or case.random != "words":
        return {"x": _philox(case, seed, "x")}
    rows, columns = x.shape
    shapes = {"x": (rows, columns), "xT": (columns, rows)}
    in_place = case.usage == "columnwise" and recipe.columnwise == "in-place"
    names = ["x", "xT"] if case.usage == "both" else ["xT"] if in_place else ["x"]
    return {name: _draw(case, seed, f"random of {name}").words(*words_shape(shapes[name])) for name in names}


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
    """An exponent near the typical magnitude of each row of (M, K), a quarter of the largest: int32 (M,)."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.int32)
    largest = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=1)
    return torch.frexp(largest).exponent - 2


def _growth(depth: int) -> int:
    """log2 of √K, rounded down."""
    return depth.bit_length() // 2


def _addend(draw: Draw, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Finite normal numbers of the magnitude of a product, so that the addition to the product rounds."""
    limit = 10 if dtype == torch.float16 else 100
    addend = torch.empty(exponents.shape, dtype=dtype)
    # Temporaries of this size stay in cache. Pairs of rows take whole words of the stream.
    rows = max(2, _SLAB // max(1, exponents[:1].numel()) // 2 * 2)
    for part, some in zip(torch.split(addend, rows), torch.split(exponents, rows), strict=True):
        scale = (some.clamp(-limit, limit) + 127).bitwise_left_shift_(23).view(torch.float32)
        part.copy_(draw.normal(*some.shape).mul_(scale))
    return addend


def spread_bands(x: torch.Tensor, bands: Sequence[slice], rows: int) -> torch.Tensor:
    """A matrix (rows, K) with the rows of `x` (judged rows, K) in its bands, and NaN elsewhere."""
    spread = x.new_full((rows, x.shape[1]), torch.nan)
    for band, part in zip(bands, torch.split(x, [band.stop - band.start for band in bands]), strict=True):
        spread[band] = part
    return spread


PAD = 8
"""Elements behind each row of a strided view."""


def laid_out(x: torch.Tensor, view: str) -> torch.Tensor:
    """`x` (…, K), its values unchanged, as a view of other memory with one of the layouts of `View`.

    strided: every second element of rows that are 8 elements longer than twice K. transposed: the last dimension is
    the outermost in memory, as that of a (K, M) matrix seen as (M, K). pitched: rows that are 8 elements longer than K;
    a tensor of one dimension stays contiguous. offset-2, offset-4, offset-8: contiguous, so many bytes behind an
    aligned address.
    """
    if view == "pitched" and x.dim() > 1:
        return x.new_zeros(*x.shape[:-1], x.shape[-1] + PAD)[..., : x.shape[-1]].copy_(x)
    if view.startswith("offset-"):
        first = int(view.removeprefix("offset-")) // x.element_size()
        return x.new_zeros(first + x.numel())[first:].view(x.shape).copy_(x)
    if view == "strided":
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + PAD)
        return wide[..., : 2 * x.shape[-1] : 2].copy_(x)
    if view == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    return x
