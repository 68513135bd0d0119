"""Inputs: from a case to the tensors that its operation consumes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from harness.case import Case
from harness.draw import Draw
from harness.families import FAMILIES
from harness.generators import SCALE_BYTES, generate
from reference.quantized import words_shape
from reference.recipes import recipe

if TYPE_CHECKING:
    from harness.capture import Captured

TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Random = torch.Tensor | tuple[int, int]
"""Words, or seed and offset of Philox, as `reference.quantize.Random`."""


@dataclass
class Inputs:
    """Tensors on the CPU, contiguous, in the orientation that the operation consumes: quantized along rows.

    The physical tensor of a columnwise quantize, or of an operand that its gemm's layout stores the other way round,
    is the transpose of what is here; a case's view is made of it when it is given.
    """

    x: torch.Tensor
    """(M, K); of a columnwise quantize (K, M); of a swizzle the bytes (R, C)."""
    w: torch.Tensor | None = None
    """(N, K) of a gemm; of a grouped one the matrices one below the other, (G·N, K)."""
    c: torch.Tensor | None = None
    """(M, N), in the dtype of the output: what `accumulate` adds to."""
    bias: torch.Tensor | None = None
    """(N,), of a grouped gemm (G, N), in the dtype of the output."""
    random: dict[str, Random] = field(default_factory=dict)
    """Random bits, of recipes that round stochastically: of `x` and `w`; words of two halves are of `x` and `xT`."""

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in order."""
        given = [self.x, self.w, self.c, self.bias, *self.random.values()]
        return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]

    def to(self, device: str) -> Inputs:
        """The same on a device."""
        x, w, c, bias = (None if t is None else t.to(device) for t in (self.x, self.w, self.c, self.bias))
        assert x is not None
        random = {name: r.to(device) if isinstance(r, torch.Tensor) else r for name, r in self.random.items()}
        return Inputs(x, w, c, bias, random)


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
    columnwise = case.usage == "columnwise"
    if case.inputs in FAMILIES:
        # Made in the orientation that is quantized, so that a family's blocks are the kernel's blocks in both usages.
        shape = (columns, rows) if columnwise else (rows, columns)
        x = generate(case.inputs, _draw(case, seed, "x"), shape, dtype, "x")
    else:
        x = _captured(case, captured, (rows, columns), dtype)
        x = x.T.contiguous() if columnwise else x
    if columnwise and case.operation == "quantize-grouped":  # sections are rows of (M, K) in either usage
        x = x.T.contiguous()
    return Inputs(x if columnwise else x.view(case.shape), random=_random_of_quantize(case, seed, x))


def _swizzle(case: Case, seed: int, captured: Captured | None) -> Inputs:
    rows, columns = case.shape
    return Inputs(SCALE_BYTES[case.inputs](_draw(case, seed, "x"), rows, columns))


def _gemm(case: Case, seed: int, captured: Captured | None) -> Inputs:
    rows, depth, columns = case.shape
    grouped = case.operation == "gemm-grouped"
    sizes = case.sections if grouped else (rows,)
    x_dtype, w_dtype, out_dtype = (TORCH_DTYPES[name] for name in case.dtypes)
    w_shape = (len(sizes) * columns, depth)
    if case.inputs in FAMILIES:
        x = generate(case.inputs, _draw(case, seed, "x"), (rows, depth), x_dtype, "x")
        w = generate(case.inputs, _draw(case, seed, "w"), w_shape, w_dtype, "w")
    else:
        x = generate("normal", _draw(case, seed, "x"), (rows, depth), x_dtype, "x")
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
        if recipe(name).rounding == "stochastic"
    }
    return Inputs(x, w, c, bias, random)


_MAKERS: dict[str, Callable[[Case, int, Captured | None], Inputs]] = {
    "quantize": _quantize,
    "transform": _quantize,
    "quantize-grouped": _quantize,
    "swizzle": _swizzle,
    "gemm": _gemm,
    "gemm-grouped": _gemm,
}


def _draw(case: Case, seed: int, role: str) -> Draw:
    return Draw(f"{case.id}|{seed}|{role}")


def _philox(case: Case, seed: int, role: str) -> tuple[int, int]:
    """Seed and offset, 63 bits each, so that they fit a signed 64-bit integer, offset + 1 too."""
    digest = hashlib.sha256(f"{case.id}|{seed}|random of {role}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:16], "little") >> 2


def _random_of_quantize(case: Case, seed: int, x: torch.Tensor) -> dict[str, Random]:
    """Random bits of `x`, (M, K); words also of its transpose, where that is quantized too."""
    if case.operation == "transform" or recipe(case.recipe).rounding != "stochastic":
        return {}
    if not case.words:
        return {"x": _philox(case, seed, "x")}
    rows, columns = x.shape
    shapes = {"x": (rows, columns)} | ({"xT": (columns, rows)} if case.usage == "both" else {})
    return {name: _draw(case, seed, f"random of {name}").words(*words_shape(shape)) for name, shape in shapes.items()}


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
    scale = (exponents.clamp(-limit, limit) + 127).bitwise_left_shift_(23).view(torch.float32)
    return draw.normal(*exponents.shape).mul_(scale).to(dtype)
