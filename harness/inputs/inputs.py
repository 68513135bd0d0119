"""Inputs: the tensors of a case by name, made from its id and a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from narrowgauge.harness.cases.axes import size_of
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import GENERATORS, generate
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import Recipe, find_recipe

if TYPE_CHECKING:
    from narrowgauge.harness.inputs.capture import Captured

CaseT = TypeVar("CaseT", bound=Case)
CaseT_co = TypeVar("CaseT_co", bound=Case, covariant=True)
Generate = Callable[[str, Draw, tuple[int, int], torch.dtype, str, Recipe], torch.Tensor]
_SLAB = 1 << 18
_WORD, _LARGEST = 1 << 32, (1 << 63) - 1
COUNTERS = tuple(zip((_WORD - 1, _WORD, _LARGEST, _LARGEST), (*[_WORD - 1] * 3, _LARGEST - 1), strict=True))
"""Seeds and offsets at the edges of 32 and 64 bits. The columnwise half adds 1 to the offset: the low word carries."""


@dataclass
class Inputs:
    """Contiguous tensors by name, with the axes that `Case.tensors` names.

    Names with a prefix: `random.x` are random words, `scale.x` the given scales of x, `amax.x` its given amaxes. The
    digest of the inputs and a saved failure have the tensors in this order. The view of a case is made when the backend
    is called.
    """

    tensors: dict[str, torch.Tensor]
    counters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Seed and offset of random bits by operand, if the bits are no words."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor with this name, or None."""
        return self.tensors.get(name)

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors whose names begin with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    def random(self, operand: str) -> Random | None:
        """Random bits of an operand: words, or seed and offset. None: the operand has none."""
        return self.counters.get(operand, self.tensors.get(f"random.{operand}"))

    @property
    def x(self) -> torch.Tensor:
        """The tensor `x`, or the first one."""
        return self.tensors["x"] if "x" in self.tensors else next(iter(self.tensors.values()))

    def to(self, device: str) -> Inputs:
        """The same inputs on a device."""
        return Inputs({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.counters)


@dataclass(frozen=True)
class Maker(Generic[CaseT_co]):
    """What the inputs of a case are made from: the same bytes for the same case id and seed, on every machine."""

    case: CaseT_co
    seed: int = 0
    captured: Captured | None = None
    """File with the tensor that `case.inputs` names."""

    def draw(self, role: str) -> Draw:
        """A stream of random tensors for a role, such as the name of a tensor."""
        return Draw(f"{self.case.id}|{self.seed}|{role}")

    def counter(self, role: str) -> tuple[int, int]:
        """Seed and offset of random bits, 63 and 62 bits: seed and offset + 1 fit signed 64-bit integers; of a
        case with random bits at the edges one of `COUNTERS`."""
        digest = hashlib.sha256(f"{self.case.id}|{self.seed}|random of {role}".encode()).digest()
        if getattr(self.case, "random", None) == "edges":
            return COUNTERS[digest[0] % len(COUNTERS)]
        return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:16], "little") >> 2

    @property
    def is_captured(self) -> bool:
        """Whether the inputs of the case are a captured tensor, and of no family, also none of another operation."""
        return self.case.inputs not in self.case.families() and self.case.inputs not in GENERATORS

    def matrix(
        self,
        role: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        recipe: Recipe,
        *,
        drawn_as: str = "",
        family: str = "",
    ) -> torch.Tensor:
        """The matrix (rows, columns) of the case's family, or of `family`. `role`: x, or w for a second operand.
        `drawn_as`: role of the stream of random numbers, by default `role`."""
        draw = self.draw(drawn_as or role)
        return generate(family or self.case.inputs, draw, shape, dtype, role, recipe)

    def captured_matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """The captured tensor that the case names. Raises ValueError without its file, and for another shape or
        dtype."""
        case = self.case
        if self.captured is None:
            raise ValueError(f"{case.id}: {case.inputs!r} is no input family; load its file and give it as `captured`")
        tensor = self.captured.tensor(case.inputs)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{case.id}: the case is {shape} {dtype}, but {case.inputs!r} is {tuple(tensor.shape)} {tensor.dtype}"
            )
        return tensor

    def given_scales(self, operands: Mapping[str, tuple[Recipe, Sequence[torch.Tensor]]]) -> dict[str, torch.Tensor]:
        """Encode scales `scale.<operand>` of the parts of each operand with delayed scaling, float32 (parts,)."""
        scales = {}
        for role, (recipe, parts) in operands.items():
            if recipe.tensor_scale == "given":
                draw = self.draw(f"scale of {role}")
                scales[f"scale.{role}"] = torch.stack([earlier_scale(draw, part, recipe) for part in parts])
        return scales


def default_inputs(make: Maker[Case]) -> Inputs:
    """Every tensor that the case names, from the family of the case, in the dtype of the field `dtype`.

    A tensor is drawn as a matrix: the last axis in blocks of the case's recipe, or of NVFP4 without one.
    """
    case = make.case
    recipe = case.recipes[0] if case.recipes else find_recipe("nvfp4")
    dtype = TORCH_DTYPES[getattr(case, "dtype", "fp32")]
    if not case.tensors:
        raise ValueError(f'{type(case).__name__} names no tensors; give it tensors, such as {{"x": ("M", "K")}}')
    tensors = {}
    for name, axes in case.tensors.items():
        shape = [size_of(axis, case.sizes) for axis in axes]
        matrix = make.matrix("x", (math.prod(shape[:-1]), shape[-1]), dtype, recipe, drawn_as=name)
        tensors[name] = matrix.view(shape)
    return Inputs(tensors)


def earlier_scale(draw: Draw, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """A finite max/amax of an earlier step: the scale of `x` times a power of two: ties stay ties.

    One scale of four is twice as large, and the elements near the amax saturate. No scale is the scale of `x`: a kernel
    that ignores its given scale is wrong.
    """
    factor = (2.0, 0.25, 0.5, 0.0625)[draw.index(4)]
    amax = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax() if x.numel() else torch.zeros(())
    scale = torch.full_like(amax, recipe.element.max) / amax * factor
    return torch.where(amax > 0, scale.clamp(max=torch.finfo(torch.float32).max), factor)


def exponents(x: torch.Tensor) -> torch.Tensor:
    """An exponent near the typical magnitude of each row of (M, K), a quarter of the largest: int32 (M,)."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.int32)
    largest = x.float().abs().nan_to_num_(nan=0.0, posinf=0.0).amax(dim=1)
    return torch.frexp(largest).exponent - 2


def growth(depth: int) -> int:
    """log2 of √K, rounded down."""
    return depth.bit_length() // 2


def addend(draw: Draw, exponents: torch.Tensor, dtype: torch.dtype, special: Sequence[float] = ()) -> torch.Tensor:
    """Finite normal numbers of the magnitude of a product, so that the addition to the product rounds, and each
    `special` value at a place anywhere."""
    limit = 10 if dtype == torch.float16 else 100
    addend = torch.empty(exponents.shape, dtype=dtype)
    # Temporaries of this size stay in cache. Pairs of rows take whole words of the stream.
    rows = max(2, _SLAB // max(1, exponents[:1].numel()) // 2 * 2)
    for part, some in zip(torch.split(addend, rows), torch.split(exponents, rows), strict=True):
        scale = (some.clamp(-limit, limit) + 127).bitwise_left_shift_(23).view(torch.float32)
        part.copy_(draw.normal(*some.shape).mul_(scale))
    if special and addend.numel():
        first, apart = draw.index(addend.numel()), max(1, addend.numel() // len(special))
        for number, value in enumerate(special):
            addend.view(-1)[(first + number * apart) % addend.numel()] = value
    return addend


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
