"""Time of judging a 2048×2048 result beside the time of its kernel in torch, on one thread.

    python -m tests.reference.contracts.time_judging

Both run in turn in one process, and the medians of CPU time are compared. The kernel holds `narrowgauge.quantize`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.reference.contracts.evaluate import judged
from tests.reference.contracts.contracts import rmsnorm_quantize, silu_mul_quantize

SIZE, RECIPE, TURNS = 2048, "fp8-row-e4m3", 15


@c.contract
def relu_squared_quantize(x: c.Matrix, recipe: c.Recipe):
    z = c.float32(x)
    return c.quantize(c.cast(c.square(c.where(z > 0, z, 0.0)), x.dtype), recipe)


@c.contract
def multiply_add_quantize(x: c.Matrix, w: c.Row, recipe: c.Recipe):
    z = c.float32(x)
    return c.quantize(c.cast(z * c.float32(w) + z, x.dtype), recipe)


def silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, 1)
    return gate / (1 + torch.exp(-gate)) * up


def rmsnorm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = x.float()
    return (z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)).to(x.dtype).float() * w.float()


def cpu_time(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 2 * SIZE, generator=draw).bfloat16()
    w = torch.randint(-8, 9, (SIZE,), generator=draw).bfloat16()
    lattice = torch.randint(-8, 9, (SIZE, SIZE), generator=draw).bfloat16()
    half, zero = x[:, :SIZE].contiguous(), torch.zeros_like(x)
    cases: list[tuple[str, Contract, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
        ("SiLU·mul, normal", silu_mul_quantize, silu, (x,)),
        ("RMSNorm, normal", rmsnorm_quantize, rmsnorm, (half, half[0])),
        ("SiLU·mul, zero", silu_mul_quantize, silu, (zero,)),
        ("RMSNorm, zero", rmsnorm_quantize, rmsnorm, (zero[:, :SIZE].contiguous(), w)),
        ("RMSNorm, lattice", rmsnorm_quantize, rmsnorm, (lattice, w)),
        ("ReLU², lattice", relu_squared_quantize, lambda x: x.float().clamp(min=0).square(), (lattice,)),
        ("x·w + x, lattice", multiply_add_quantize, lambda x, w: x.float() * w.float() + x.float(), (lattice, w)),
    ]
    for name, contract, formula, tensors in cases:
        dtypes, given = dict.fromkeys(contract.tensors, "bfloat16"), dict(zip(contract.tensors, tensors, strict=True))
        program = contract.trace(dtypes, {"recipe": RECIPE}, {})

        def kernel(formula: Any = formula, tensors: Any = tensors) -> Any:
            return narrowgauge.quantize(formula(*tensors).bfloat16(), RECIPE)

        result = kernel()
        turns = []
        for _ in range(TURNS):
            own = cpu_time(kernel)
            turns.append((own, cpu_time(lambda: dict(judged(program, given, {"quantized": result})))))  # noqa: B023
        own, judging = (statistics.median(times) for times in zip(*turns, strict=True))
        print(f"{name:18} kernel {own * 1e3:6.1f} ms  judged {judging * 1e3:6.1f} ms  ratio {judging / own:5.2f}")


if __name__ == "__main__":
    main()
