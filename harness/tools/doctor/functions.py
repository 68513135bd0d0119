"""Largest errors of the approximate functions of a GPU, on all 2^32 float32 arguments.

A function is judged for normal arguments and zeros with a normal result. Exact results are float64 numbers of torch,
off by at most 4 ulp of 2^-52. Results that round to subnormal numbers are counted apart: a few functions flush
subnormal numbers to 0. A result that rounds to 0 is neither subnormal nor flushed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_CHUNK = 1 << 26
"""Arguments of a launch."""
_SMALLEST = 2.0**-126
_EXPONENT = 0x7FF << 52
"""Bits of the exponent of a float64 number."""
_TABLE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], int]] = {
    "ex2.approx.ftz.f32": ("ptx", torch.exp2, 1),
    "ex2.approx.f32": ("ptx", torch.exp2, 1),
    "rcp.approx.ftz.f32": ("ptx", torch.reciprocal, -1),
    "rcp.approx.f32": ("ptx", torch.reciprocal, -1),
    "rsqrt.approx.ftz.f32": ("ptx", torch.rsqrt, -1),
    "rsqrt.approx.f32": ("ptx", torch.rsqrt, -1),
    "sqrt.approx.f32": ("ptx", torch.sqrt, 1),
    "lg2.approx.f32": ("ptx", torch.log2, 1),
    "tanh.approx.f32": ("ptx", torch.tanh, 1),
    "__expf": ("call", torch.exp, 1),
    "expf": ("call", torch.exp, 1),
    "exp2f": ("call", torch.exp2, 1),
    "rsqrtf": ("call", torch.rsqrt, -1),
    "tanhf": ("call", torch.tanh, 1),
    "erff": ("call", torch.erf, 1),
    "__frcp_rn": ("call", torch.reciprocal, -1),
    "logf": ("call", torch.log, 1),
    "log2f": ("call", torch.log2, 1),
}
"""By name: a PTX instruction or a function of CUDA, the exact function, and 1 if it increases, −1 if it decreases."""
_DIVISIONS = ("div.full.f32", "div.approx.f32", "div.approx.ftz.f32")
FLAGS = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Flags of NVRTC. Fused multiply-add is allowed, as in a build without flags."""


class FunctionsError(RuntimeError):
    """The functions cannot be measured."""


@dataclass
class Errors:
    """Largest errors of a function."""

    function: str
    is_logarithm: bool = False
    """Whether relative errors leave out arguments between 0.5 and 2: a logarithm has an absolute error there (PTX ISA
    9.0, lg2.approx)."""
    ulp_from_correctly_rounded: int = 0
    ulp_of_exact: float = 0.0
    """Largest distance from the exact result, in ulps of the exact result."""
    relative: float = 0.0
    absolute_near_1: float = 0.0
    """Largest absolute error for arguments between 0.5 and 2."""
    not_monotone: int = 0
    """Pairs of neighbouring arguments whose results are in the wrong order."""
    correctly_rounded: int = 0
    of: int = 0
    """Normal arguments and zeros with a normal result."""
    subnormal_results: int = 0
    flushed: int = 0
    """Subnormal results replaced by 0."""

    def add(self, x: torch.Tensor, result: torch.Tensor, exact: torch.Tensor, rising: int) -> None:
        """Count results, float32 (n,), of arguments in the order of their bits; `exact`: float64 (n,). The last
        argument is counted only as a neighbour: it is the first of the next call.

        `rising`: 1 for an increasing function, −1 for a decreasing one.
        """
        rounded = exact.float()
        normal = ((x.abs() >= _SMALLEST) | (x == 0)) & x.isfinite()
        small = rounded.abs() < _SMALLEST
        judged = normal & ~small & rounded.isfinite()
        order = -rising if bool(x[0].signbit()) else rising
        pairs = judged[1:] & judged[:-1]
        self.not_monotone += int((pairs & ((result[1:] - result[:-1]) * order < 0)).sum())
        x, result, exact, rounded, judged = (part[:-1] for part in (x, result, exact, rounded, judged))
        below = normal[:-1] & small[:-1] & (rounded != 0)
        self.subnormal_results += int(below.sum())
        self.flushed += int((below & (result == 0)).sum())
        self.of += int(judged.sum())
        steps = torch.where(judged, (_ordinal(result) - _ordinal(rounded)).abs_(), 0)
        self.correctly_rounded += int((judged & (steps == 0)).sum())
        near = (x > 0.5) & (x < 2)
        if self.is_logarithm:
            steps = torch.where(near, 0, steps)
        self.ulp_from_correctly_rounded = max(self.ulp_from_correctly_rounded, int(steps.max()))
        error = torch.where(judged, (result.double() - exact).abs_(), 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
        power = (exact.view(torch.int64) & _EXPONENT).view(torch.float64)
        self.absolute_near_1 = max(self.absolute_near_1, float(torch.where(near, error, 0.0).max()))
        if self.is_logarithm:
            error = torch.where(near, 0.0, error)
        self.ulp_of_exact = max(self.ulp_of_exact, _largest(error / power) * 2.0**23)
        self.relative = max(self.relative, _largest(error / exact.abs()))

    def as_json(self) -> dict[str, Any]:
        """The figures; relative and absolute errors as binary logarithms."""
        figures = dict(vars(self))
        del figures["is_logarithm"]
        for name in ("relative", "absolute_near_1"):
            value = figures.pop(name)
            figures[f"{name}_log2"] = round(math.log2(value), 4) if value else None
        figures["ulp_of_exact"] = round(self.ulp_of_exact, 6)
        return figures


@dataclass
class Divisions:
    """Divisions of 2^32 random pairs of normal numbers."""

    largest_ulp: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DIVISIONS, 0))
    not_rounded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DIVISIONS, 0))
    products: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_DIVISIONS, 0))
    """Quotients a/b with the bits of a·rcp.approx.ftz(b)."""
    of: int = 0

    def add(self, name: str, quotient: torch.Tensor, exact: torch.Tensor, product: torch.Tensor) -> None:
        """Count quotients, float32 (n,); `exact`: the correctly rounded quotients."""
        steps = (_ordinal(quotient) - _ordinal(exact)).abs()
        self.largest_ulp[name] = max(self.largest_ulp[name], int(steps.max()))
        self.not_rounded[name] += int((steps != 0).sum())
        self.products[name] += int((quotient == product).sum())


def _largest(quotients: torch.Tensor) -> float:
    """The largest quotient: 0/0 and 0/∞ belong to arguments without a judgement."""
    return float(quotients.nan_to_num_(nan=0.0, posinf=math.inf).max())


def _ordinal(numbers: torch.Tensor) -> torch.Tensor:
    """Position of float32 numbers in their order, int64; both zeros have 0."""
    bits = numbers.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def bounds(chunk: int) -> Iterator[tuple[int, int]]:
    """First and last bits of every chunk of all float32 numbers: a chunk, and the first number of the next."""
    for sign in (0, 1 << 31):
        for first in range(sign, sign + (1 << 31), chunk):
            yield first, min(first + chunk, sign + (1 << 31))


def arguments(first: int, last: int, device: str) -> torch.Tensor:
    """Float32 numbers with the bits `first` to `last`; behind all bits of a sign, the last one is repeated."""
    bits = torch.arange(first, last + 1, dtype=torch.int64, device=device)
    if last % (1 << 31) == 0:
        bits[-1] = last - 1
    return torch.where(bits < 1 << 31, bits, bits - (1 << 32)).int().view(torch.float32)


def source() -> str:
    """CUDA C++ with a kernel for every function and division."""
    text = []
    for number, (name, (kind, _, _)) in enumerate(_TABLE.items()):
        body = f'asm("{name} %0, %1;" : "=f"(y) : "f"(x));' if kind == "ptx" else f"y = {name}(x);"
        text.append(_KERNEL.format(name=f"function_{number}", body=body))
    for number, name in enumerate(_DIVISIONS):
        body = f'asm("{name} %0, %1, %2;" : "=f"(y) : "f"(x), "f"(divisor));'
        text.append(_KERNEL.format(name=f"division_{number}", body=body))
    return "\n".join(text)


_KERNEL = """
extern "C" __global__ void {name}(const float* in, const float* by, float* out, long long count) {{
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count;
         i += (long long)gridDim.x * blockDim.x) {{
        float x = in[i], divisor = by[i], y;
        {body}
        out[i] = y;
    }}
}}
"""


def measure(report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The errors of all functions on the current GPU, as JSON content: `about`, `functions`, `divisions`.

    `report`: called with the errors of every function. Raises FunctionsError without a GPU or CuPy.
    """
    module, about = _module()

    def evaluate(kernel: str, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        module.get_function(kernel)((4096,), (256,), (x.data_ptr(), by.data_ptr(), out.data_ptr(), x.numel()))
        return out

    found = []
    for number, (name, (_, exact, rising)) in enumerate(_TABLE.items()):
        errors = Errors(name, is_logarithm=exact in (torch.log, torch.log2))
        for first, last in bounds(_CHUNK):
            x = arguments(first, last, "cuda")
            errors.add(x, evaluate(f"function_{number}", x, x), exact(x.double()), rising)
        found.append(errors.as_json())
        report(found[-1])
    divisions, generator = Divisions(), torch.Generator("cuda").manual_seed(0)
    reciprocal = f"function_{list(_TABLE).index('rcp.approx.ftz.f32')}"
    for _ in range((1 << 32) // _CHUNK):
        a, b = (_random(generator, _CHUNK) for _ in range(2))
        exact_quotient, product = a / b, a * evaluate(reciprocal, b, b)
        for number, name in enumerate(_DIVISIONS):
            divisions.add(name, evaluate(f"division_{number}", a, b), exact_quotient, product)
        divisions.of += _CHUNK
    return {"about": about, "functions": found, "divisions": vars(divisions)}


def _random(generator: torch.Generator, count: int) -> torch.Tensor:
    """Random float32 numbers with magnitudes from 2^-31 to 2^32, for normal quotients."""
    bits = torch.randint(0, 1 << 29, (count,), generator=generator, device="cuda", dtype=torch.int64)
    signs = torch.randint(0, 2, (count,), generator=generator, device="cuda", dtype=torch.int64)
    return (bits + (96 << 23) - (signs << 31)).int().view(torch.float32)


def _module() -> tuple[Any, dict[str, str]]:
    """The compiled kernels, and GPU, driver and compiler. Raises FunctionsError."""
    if not torch.cuda.is_available():
        raise FunctionsError("doctor --functions measures a GPU, and torch sees none; `narrowgauge doctor` says more")
    try:
        import cupy
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise FunctionsError(f"doctor --functions needs CuPy ({error}); pip install 'narrowgauge[cuda13]'") from error
    torch.empty(0, device="cuda")
    target = f"--gpu-architecture=sm_{cupy.cuda.Device().compute_capability}"
    program = nvrtc.createProgram(source(), "functions.cu", (), ())
    try:
        nvrtc.compileProgram(program, (target, *FLAGS))
        module = cupy.cuda.function.Module()
        module.load(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise FunctionsError(f"the functions do not compile: {nvrtc.getProgramLog(program)[:2000]}") from error
    finally:
        nvrtc.destroyProgram(program)
    return module, {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "compiler": "NVRTC {}.{}".format(*nvrtc.getVersion()),
        "method": "all 2^32 float32 arguments against float64; divisions: 2^32 random pairs",
    }


def _driver() -> str:
    """Version of the driver from /proc; empty without this file."""
    try:
        found = re.search(
            r"\b([0-9]{3,}(?:\.[0-9]+)+)\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        )
    except OSError:
        return ""
    return found[1] if found else ""
