"""Contracts: a function of about ten lines states the formula of a kernel (docs/contracts.md).

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
    Heads,
    Index,
    Lengths,
    Matrix,
    Pages,
    Passed,
    Positions,
    QuantizedRanks,
    QueryLengths,
    Ranks,
    Recipe,
    RouterWeights,
    Row,
    Scalar,
    Scale,
    Scales,
    Sinks,
    Slots,
    contract,
)
from narrowgauge.contract.routed import accumulated, chosen, of_expert, rows_of_choices
from narrowgauge.contract.sequences import (
    of_tokens,
    places,
    rescaled,
    scores,
    segments,
    shared_heads,
    squeezed,
    unsqueezed,
    weighted_sum,
    weights,
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
    log,
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
    "Bits", "Cache", "Codes", "Column", "Contract", "ContractError", "Flag", "Heads", "Index", "Lengths", "Matrix",
    "Pages", "Passed", "Positions", "Program", "QuantizedRanks", "QueryLengths", "Ranks", "Recipe", "RouterWeights",
    "Row", "Scalar", "Scale", "Scales", "Sinks", "Slots", "accumulated", "amax", "any_of", "cast", "chosen",
    "contract", "decode", "dequantize", "divide", "erf", "exp", "exp2", "factor", "float32", "gelu", "gemm", "halves",
    "joined", "largest", "layer_norm", "log", "maximum", "mean", "minimum", "of_expert", "of_heads", "of_tokens",
    "once", "places", "quantize", "quantize_both", "read", "repeat_half", "rescaled", "rms_norm", "rotate_half",
    "roundings", "rows_of_choices", "rsqrt", "scores", "segments", "shared_heads", "sigmoid", "silu", "slots_of",
    "softmax", "sqrt", "square", "squeezed", "sum",
    "takes_scale", "tanh", "transposed", "unsqueezed", "weighted_sum", "weights", "where", "write",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module 'narrowgauge.contract' has no attribute {name!r}")
    raise AttributeError(f"narrowgauge.contract has no {name}; it has {', '.join(__all__)}, and abs(x)")
