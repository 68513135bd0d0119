"""Dtypes of the operands of a GEMM that is probed: ranges of the probes, and tensors of the dtype."""

from __future__ import annotations

import torch

from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.spec.formats import E2M1

OperandDtype = torch.dtype | tuple[torch.dtype, torch.dtype]
"""The dtype of both operands, or of a and of b."""
FP4 = torch.float4_e2m1fn_x2
"""E2M1, two numbers in an element: an operand (M, K) is a tensor (M, K/2), the first number in the low nibble."""
RANGES = {
    torch.float32: (60, 0), torch.bfloat16: (60, 0), torch.float16: (15, -7),
    torch.float8_e4m3fn: (8, -9), torch.float8_e5m2: (15, -7),
}  # fmt: skip
"""For each dtype: exponents of a factor of a mask and of a factor of a small product."""
SPREAD = {
    torch.float32: 8, torch.bfloat16: 8, torch.float16: 3, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4, FP4: 1
}  # fmt: skip
"""Binades around 1 of random operands."""


def dtypes_of(dtype: OperandDtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of a and b. Raises ValueError for a dtype that cannot be probed."""
    pair = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    for one in pair:
        if one not in RANGES and pair != (FP4, FP4):
            names = ", ".join(str(name) for name in RANGES)
            raise ValueError(f"operands of {one} cannot be probed; give one of {names}, or {FP4} for both")
    return pair


def dtype_name(dtype: OperandDtype) -> str:
    """The name of the dtype of both operands, or both names."""
    return " by ".join(str(one).removeprefix("torch.") for one in dict.fromkeys(dtypes_of(dtype)))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest numbers of the dtype, float32."""
    return decode(encode(x.float(), E2M1), E2M1) if dtype is FP4 else x.to(dtype).float()


def operand(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the dtype as a tensor of the dtype."""
    return pack(encode(x.float(), E2M1)).view(FP4) if dtype is FP4 else x.to(dtype)
