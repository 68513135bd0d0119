"""A quantizer of the reference's steps, with wrong steps: kernels for the diagnosis to name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.blocks import block_amax, over_tiles, pad_columns, tensor_amax
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.quantize.elements import element_codes
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.reference.quantize.scaling import element_factors, per_row, scale_elements, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, random_bytes, row_amax, stored_scales
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.harness.sample_backends import backend


@dataclass
class Steps:
    """A run of a quantizer of the reference's steps: the values that a wrong step may read."""

    matrix: torch.Tensor
    recipe: Recipe
    random: Any = None
    scale: torch.Tensor | None = None
    wrong: dict[str, Callable[["Steps"], torch.Tensor]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name not in STEPS:
            raise AttributeError(name)
        value = self.wrong.get(name, STEPS[name])(self)
        setattr(self, name, value)
        return value


def _tensor(s):
    if s.recipe.tensor_scale == "none":
        return None
    return s.scale if s.recipe.tensor_scale == "given" else tensor_scale(s.amax, s.recipe, s.x.dtype)


def _amax(s):
    if s.recipe.tensor_scale == "none":
        return None
    return tensor_amax(s.blocks) if s.recipe.granularity == "tensor" else row_amax(s.blocks)


STEPS: dict[str, Callable[[Steps], Any]] = {
    "x": lambda s: reference.transform(s.matrix, s.recipe) if s.recipe.transform else s.matrix,
    "blocks": lambda s: block_amaxes(s.x, s.recipe),
    "amax": _amax,
    "tensor": _tensor,
    "scales": lambda s: stored_scales(s.x, s.blocks, s.amax, s.tensor, s.recipe),
    "bytes": lambda s: None if s.random is None else bytes_of(s),
    "factors": lambda s: per_row(
        element_factors(s.scales, s.tensor, s.recipe, s.x.dtype, s.blocks), s.recipe, len(s.matrix)
    ),
    "scaled": lambda s: scale_elements(s.x, s.factors, s.tensor, s.recipe),
    "codes": lambda s: element_codes(s.scaled, s.recipe, s.bytes),
    "stored": lambda s: packed(s) if s.recipe.element.bits == 4 else s.codes,
    "layout": lambda s: reference.swizzle(s.scales),
}


def bytes_of(s, random=None, first=0):
    rows, columns = s.matrix.shape
    given = s.random if random is None else random
    return random_bytes(given, (rows, columns), slice(0, rows), s.x.device, s.recipe.block[1], first)


def wrong(**steps):
    """The door of a kernel whose steps are the reference's but for these."""

    def quantize(x, recipe, *, random=None, scale=None, swizzled=False):
        recipe = find_recipe(recipe)
        s = Steps(x.flatten(0, -2).contiguous(), recipe, random, scale, steps)
        scales = s.layout if swizzled else s.scales
        return Quantized(s.stored, scales, s.amax, recipe, tuple(s.matrix.shape), s.tensor, swizzled)

    return quantize


def case(recipe, inputs="normal", *flags, shape=(64, 128), dtype="bf16"):
    return case_from_labels("quantize", recipe, shape, dtype, inputs, flags)


def record_of(case_, **doors):
    return run_case(case_, backend(**doors, declares={"transform": "butterfly"}))


def causes(record):
    assert record.verdict == "fail", record.message
    return [explanation["cause"] for explanation in record.explanations if explanation["exact"]]


def grid(fmt):
    return torch.tensor(fmt.values[: fmt.max_code + 1])


def nearest_by_distance(values, fmt, *, tie_up):
    """Codes by the distance to every point of the grid: ties up or down, never to even."""
    points = grid(fmt).double()
    distance = (values.abs().double().unsqueeze(-1) - points).abs()
    count = len(points)
    code = count - 1 - distance.flip(-1).argmin(-1) if tie_up else distance.argmin(-1)
    return code.to(torch.uint8) | values.signbit().byte() * fmt.sign_code


def ties_away(s):
    return nearest_by_distance(s.scaled, E2M1, tie_up=True)


def cut_down(values, fmt):
    points = grid(fmt).double()
    code = (values.abs().double().unsqueeze(-1) >= points).sum(-1) - 1
    return code.to(torch.uint8) | values.signbit().byte() * fmt.sign_code


def unclamped(s):
    return (decode(s.scales, E4M3) * s.tensor.reciprocal()).reciprocal()


def packed(s):
    return pack(s.codes) if s.recipe.packing == "low-first" else exchanged(s)


def truncated_to(bits):
    """Function to the upper `bits` bits of float32 numbers."""
    return lambda x: (x.view(torch.int32) >> (32 - bits) << (32 - bits)).view(torch.float32)


def exchanged(s):
    low_first = pack(s.codes)
    return low_first >> 4 | low_first << 4


def by_lane(keep):
    """Block amaxes of some lanes."""

    def blocks(s):
        width = s.recipe.block[1]
        magnitude = pad_columns(s.x.abs().float(), width).view(len(s.x), -1, width)
        kept = magnitude[:, :, torch.tensor([lane for lane in range(width) if keep(lane)])].amax(2)
        return over_tiles(kept, s.recipe.block[0])[:: s.recipe.stored_rows]

    return {"blocks": blocks, "amax": right_amax}


def right_amax(s):
    right = block_amaxes(s.x, s.recipe)
    return (
        None
        if s.recipe.tensor_scale == "none"
        else tensor_amax(right)
        if s.recipe.granularity == "tensor"
        else row_amax(right)
    )


def signed_blocks(s):
    return block_amax(s.x.clamp(min=0), s.recipe.block[1])


def rotated(s, *, first=True, factor=True, after=False):
    """x·diag(σ)·H·c by a matrix, exact enough in float64 for what is not spread."""
    rotation = s.recipe.transform
    k = torch.arange(rotation.group)
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in k.tolist()] for i in k.tolist()])
    sigma, c = signs(rotation).double(), coefficient(rotation.group)
    hadamard = (1.0 - 2.0 * parity).double() * (c if factor else 1.0)
    groups = s.matrix.double().view(-1, rotation.group)
    y = (groups * sigma if first else groups) @ hadamard.T
    return (y * sigma if after else y).view(s.matrix.shape)


def wrong_amax(of):
    """The tensor's amax of some of the elements; block amaxes are right."""
    return {"amax": lambda s: of(s).abs().float().amax().view(1)}


def given(value):
    return {"amax": lambda s: torch.tensor([value])}


def wrong_tensor(of):
    return {"tensor": lambda s: of(s, s.amax)}
