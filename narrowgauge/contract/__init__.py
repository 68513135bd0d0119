"""Contracts: a function of about ten lines says what a kernel computes (docs/contracts.md).

    from narrowgauge import contract as c

This package does not import torch.
"""

from typing import NoReturn

from narrowgauge.contract.declaration import (
    Bits,
    Cache,
    Codes,
    Column,
    Contract,
    Flag,
    Index,
    Lengths,
    Matrix,
    Pages,
    Passed,
    Recipe,
    Row,
    Scalar,
    Scale,
    Scales,
    Slots,
    contract,
)
from narrowgauge.contract.steps import (
    amax,
    any_of,
    cast,
    decode,
    dequantize,
    divide,
    erf,
    exp,
    exp2,
    factor,
    float32,
    gelu,
    gemm,
    halves,
    joined,
    largest,
    layer_norm,
    maximum,
    mean,
    minimum,
    of_heads,
    once,
    quantize,
    quantize_both,
    read,
    repeat_half,
    rms_norm,
    rotate_half,
    roundings,
    rsqrt,
    sigmoid,
    silu,
    slots_of,
    softmax,
    sqrt,
    square,
    sum,
    takes_scale,
    tanh,
    transposed,
    where,
    write,
)
from narrowgauge.spec.program import ContractError, Program

__all__ = [
    "Bits", "Cache", "Codes", "Column", "Contract", "ContractError", "Flag", "Index", "Lengths", "Matrix", "Pages",
    "Passed", "Program", "Recipe", "Row", "Scalar", "Scale", "Scales", "Slots",
    "amax", "any_of", "cast", "contract", "decode", "dequantize", "divide", "erf", "exp", "exp2", "factor", "float32",
    "gelu", "gemm", "halves", "joined", "largest", "layer_norm", "maximum", "mean", "minimum", "of_heads", "once",
    "quantize", "quantize_both", "read", "repeat_half", "rms_norm", "rotate_half", "roundings", "rsqrt", "sigmoid",
    "silu", "slots_of", "softmax", "sqrt", "square", "sum", "takes_scale", "tanh", "transposed", "where", "write",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module 'narrowgauge.contract' has no attribute {name!r}")
    raise AttributeError(f"narrowgauge.contract has no {name}; it has {', '.join(__all__)}, and abs(x)")
