"""Triton kernels on a CPU: the interpreter of Triton with the casts of a GPU, and a table of its own wrong casts.

In this folder, with TRITON_INTERPRET=1 in the environment and ml_dtypes for the table:
narrowgauge run --backend triton_kernels:Backend -k "1x128-e4m3-fp32/128x128/bf16" # with the interpreter's own casts
narrowgauge run --backend triton_interpreter:Backend -k "1x128-e4m3-fp32/128x128/bf16" # with the casts of a GPU
python triton_interpreter.py # the wrong casts of this version of Triton
"""

import os

import numpy as np
import torch

from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.spec.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("set TRITON_INTERPRET=1 before Python starts: Triton chooses its interpreter at import")

import triton
import triton.language as tl
from triton.runtime import interpreter
from triton_kernels import Backend as Kernels

FLOATS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"fp8e4nv": E4M3, "fp8e5": E5M2, "fp8e4b8": E4M3FNUZ, "fp8e5b16": E5M2FNUZ}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
own_cast = interpreter._convert_float


def cast(data, source, target, rounding):
    """`interpreter._convert_float` with the results of `cvt.rn` and `cvt.rn.satfinite`. `data`: array with the bits of
    type `source`. Returns the bits of type `target`. Other types, and rounding toward zero, are left to Triton."""
    known = FLOATS | FORMATS
    if source.name not in known or target.name not in known or rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        return own_cast(data, source, target, rounding)
    bits = torch.from_numpy(np.frombuffer(data.tobytes(), np.uint8).copy())
    values = decode(bits, FORMATS[source.name]) if source.name in FORMATS else bits.view(FLOATS[source.name]).float()
    if target.name in FORMATS:
        stored = encode(values, FORMATS[target.name])
    else:
        stored = values.to(FLOATS[target.name]).view(INTEGERS[FLOATS[target.name].itemsize])
    return stored.numpy().view(f"u{stored.itemsize}").reshape(data.shape)


class Backend(Kernels):
    """The kernels with right casts: what fails here is a mistake of the kernels."""

    def __init__(self):
        interpreter._convert_float = cast


@triton.jit
def cast_kernel(x, y, size, TYPE: tl.constexpr):
    at = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(y + at, tl.load(x + at, mask=at < size).to(TYPE), mask=at < size)


def cast_values(x, source, target):
    """`x` (numpy array of type `source`) cast by the interpreter to the numpy type `target`."""
    bits = torch.from_numpy(x.view(np.uint8).copy())
    y = torch.empty(x.size, dtype=TORCH[target])
    cast_kernel[(triton.cdiv(x.size, 4096),)](bits.view(TORCH[source]), y, x.size, getattr(tl, TRITON[target]))
    return y.view(torch.uint8).numpy().view(numpy_type(target))


TRITON = {"fp8e4nv": "float8e4nv", "fp8e5": "float8e5", "fp8e4b8": "float8e4b8", "fp8e5b16": "float8e5b16"}
TRITON |= {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TORCH = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp8e4b8": torch.float8_e4m3fnuz}
TORCH |= {"fp8e5b16": torch.float8_e5m2fnuz, **FLOATS}


def numpy_type(name):
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, str(TORCH[name])[6:], None) or str(TORCH[name])[6:])


def every_value(name):
    """Every value of a type; of fp32 those of bf16 and fp16, and numbers beside and halfway between them."""
    dtype = numpy_type(name)
    if name != "fp32":
        return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x1000, 0x3000, 0x7FFF, 0x8000, 0x8001], np.uint32)
    return np.concatenate([(high[:, None] | low).ravel().view(np.float32), every_value("fp16").astype(np.float32)])


def right(x, target):
    """By ml_dtypes: to nearest, ties to even. Numbers too large for a float8 become its largest, as on a GPU."""
    import ml_dtypes

    x, dtype = x.astype(np.float32), numpy_type(target)
    limit = float(ml_dtypes.finfo(dtype).max) if target in FORMATS else np.inf
    return np.clip(x, -limit, limit).astype(dtype)


def differ(a, b):
    """Where two arrays of a type have other bits, NaN apart."""
    bits = f"u{a.dtype.itemsize}"
    return (a.view(bits) != b.view(bits)) & ~(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))


EXAMPLES = [
    ("fp32", "fp8e4nv", 127.6, "the carry into the exponent is lost"),
    ("fp32", "fp8e4nv", 0.0166015625, "a tie goes up, not to even"),
    ("fp32", "fp8e4nv", 500.0, "too large: no saturation"),
    ("fp32", "fp8e4nv", np.nan, "NaN becomes a number"),
    ("fp16", "fp8e4nv", 1.78814e-07, "too small: not 0"),
    ("fp8e4nv", "fp32", np.nan, "NaN becomes a number"),
    ("fp8e5", "fp32", np.inf, "infinity becomes a number"),
    ("fp32", "bf16", 1.999, "cut off, not rounded"),
    ("bf16", "fp32", 1e-40, "subnormal numbers become 0"),
]


def table():
    """The table of docs/triton.md: wrong casts of all casts, by type, and examples."""
    names = list(TORCH)
    rows = [["from \\ to", *names], ["---"] * (len(names) + 1)]
    for source in names:
        x = every_value(source)
        rows.append([f"{source}, {x.size} values"])
        for target in names:
            try:
                wrong = differ(cast_values(x, source, target), right(x, target)) if source != target else np.zeros(1)
                rows[-1].append(f"{np.count_nonzero(wrong)}" if source != target else "")
            except triton.runtime.errors.InterpreterError:
                rows[-1].append("error")
    rows += [[], ["cast", "value", "interpreter", "right", "mistake"], ["---"] * 5]
    for source, target, value, mistake in EXAMPLES:
        x = np.array([value], np.float32).astype(numpy_type(source))
        both = (float(y[0]) for y in (x, cast_values(x, source, target), right(x, target)))
        rows.append([f"{source} to {target}", *(f"{y:.6g}" for y in both), mistake])
    return "\n".join(f"| {' | '.join(row)} |" if row else "" for row in rows)


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        print(f"Triton {triton.__version__}\n\n{table()}")
