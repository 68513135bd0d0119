"""Inputs: from a case to the tensors that its operation consumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from harness.case import Case
from harness.draw import Draw
from harness.families import FAMILIES
from harness.generators import generate

if TYPE_CHECKING:
    from harness.capture import Captured

TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Inputs:
    """Tensors on the CPU, contiguous, in the orientation that the operation consumes: quantized along rows.

    The physical tensor of a columnwise quantize, or of an operand that its gemm's layout stores the other way round,
    is the transpose of what is here.
    """

    x: torch.Tensor
    """(M, K); of a columnwise quantize (K, M)."""
    w: torch.Tensor | None = None
    """(N, K) of a gemm."""
    c: torch.Tensor | None = None
    """(M, N), in the dtype of the output: what `accumulate` adds to."""
    bias: torch.Tensor | None = None
    """(N,), in the dtype of the output."""


def make_inputs(case: Case, *, seed: int = 0, captured: Captured | None = None) -> Inputs:
    """The inputs of `case`: the same bytes for the same case id and seed, on every machine.

    Where `case.inputs` names a captured tensor, `captured` holds it: it is x of a quantize and w of a gemm. Raises
    ValueError where it does not, or where the tensor has not the case's shape and dtype.
    """
    if case.operation == "quantize":
        return Inputs(_quantize_input(case, seed, captured))
    rows, depth, columns = case.shape
    x_dtype, w_dtype, out_dtype = (TORCH_DTYPES[name] for name in case.dtypes)
    if case.inputs in FAMILIES:
        x = generate(case.inputs, _draw(case, seed, "x"), (rows, depth), x_dtype, "x")
        w = generate(case.inputs, _draw(case, seed, "w"), (columns, depth), w_dtype, "w")
    else:
        x = generate("normal", _draw(case, seed, "x"), (rows, depth), x_dtype, "x")
        w = _captured(case, captured, (columns, depth), w_dtype)
    c = bias = None
    if "accumulate" in case.flags:
        exponents = _exponents(x).unsqueeze(1) + _exponents(w) + _growth(depth)
        c = _addend(_draw(case, seed, "c"), exponents, out_dtype)
    if "bias" in case.flags:
        # max over rows: an empty x has none.
        exponents = _exponents(x).amax(0, keepdim=True) if rows else torch.zeros(1, dtype=torch.int32)
        bias = _addend(_draw(case, seed, "bias"), exponents + _exponents(w) + _growth(depth), out_dtype)
    return Inputs(x, w, c, bias)


def _draw(case: Case, seed: int, role: str) -> Draw:
    return Draw(f"{case.id}|{seed}|{role}")


def _quantize_input(case: Case, seed: int, captured: Captured | None) -> torch.Tensor:
    rows, columns = case.shape
    columnwise = "columnwise" in case.flags
    dtype = TORCH_DTYPES[case.dtype]
    if case.inputs not in FAMILIES:
        x = _captured(case, captured, (rows, columns), dtype)
        return x.T.contiguous() if columnwise else x
    # Made in the orientation that is quantized, so that a family's blocks are the kernel's blocks in both usages.
    shape = (columns, rows) if columnwise else (rows, columns)
    return generate(case.inputs, _draw(case, seed, "x"), shape, dtype, "x")


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
