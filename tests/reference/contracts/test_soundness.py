"""No correct kernel leaves its interval: random kernels, whole sets of values, special values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from narrowgauge.contract import Contract, Program
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.quantize.quantize import quantize
from tests.reference.contracts.contracts import COMPOSED, CONTRACTS
from tests.reference.contracts.random_kernel import DTYPES, RandomKernel

RECIPES = (
    "fp8-row-e4m3",
    "fp8-block-1x128-e4m3-fp32",
    "mxfp8-e4m3",
    "mxfp4",
    "nvfp4",
    "nvfp4-rowscaled",
    "fp8-current-e4m3",
)


def families(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Iterator[torch.Tensor]:
    """Inputs of every kind: ordinary, wide, special, and with exact results."""
    draw = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=draw)
    powers = torch.randint(-20, 20, (shape[0], 1), generator=draw)
    yield normal.to(dtype)
    yield (normal * torch.exp2(powers.float())).to(dtype)
    yield torch.randint(-8, 9, shape, generator=draw).to(dtype)
    special = normal.clone()
    for row, value in enumerate(
        (0.0, -0.0, torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, 1e-38, 2.0**-133)
    ):
        special[row % shape[0], row::5] = value
    special[-1] = 0.0
    special[-2] = -0.0
    yield special.to(dtype)
    yield (torch.randint(-40, 41, shape, generator=draw).float().exp2() * normal.sign()).to(dtype)


def inputs(program: Program, shape: tuple[int, int], seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of a contract for each family."""
    matrices = [families(shape, DTYPES[a.dtype], seed + n) for n, a in enumerate(program.arguments)]
    for tensors in zip(*matrices, strict=True):
        yield {
            argument.name: tensor if argument.kind == "Matrix" else tensor[0]
            for argument, tensor in zip(program.arguments, tensors, strict=True)
        }


def shown(program: Program, kernel: RandomKernel) -> dict[str, object]:
    """What the kernel returns."""
    found: dict[str, object] = {}
    for name, number in program.outputs.items():
        step = program.steps[number]
        if step.function == "quantize":
            y = kernel.values[step.operands[0]].float().to(DTYPES[step.dtype])
            found[name] = quantize(y, step.options["recipe"])
        else:
            found[name] = kernel.values[number].float().to(DTYPES[step.dtype])
    return found


def traced(contract: Contract, dtype: str, recipe: str) -> Program:
    return contract.trace(dict.fromkeys(contract.tensors, dtype), dict.fromkeys(contract.recipes, recipe), {})


def check(contract: Contract, flavour: str, shape: tuple[int, int], seed: int, device: str) -> int:
    """Judge a random kernel for each dtype, recipe and family; the number of compared elements."""
    compared = 0
    for number, (dtype, recipe) in enumerate(zip(["bfloat16", "float16", "float32"] * 3, RECIPES, strict=False), seed):
        program = traced(contract, dtype, recipe)
        for family, tensors in enumerate(inputs(program, shape, number)):
            given = {name: tensor.to(device) for name, tensor in tensors.items()}
            # A residual that is shown is the sum of the kernel itself.
            results = shown(program, RandomKernel(program, given, number, flavour=flavour))
            for name, part in judged(program, given, results):
                wrong = part.wrong.nonzero()
                assert not len(wrong), (dtype, recipe, number, family, name, wrong[0].tolist(), len(wrong))
                compared += part.actual.numel()
    return compared


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flavour", ["mixed", "float32", "float64"])
@pytest.mark.parametrize("contract", [*CONTRACTS, *COMPOSED], ids=lambda contract: contract.name)
def test_random_kernels_are_right(contract: Contract, flavour: str, device: str) -> None:
    assert check(contract, flavour, (16, 96), 0, device)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("contract", [*CONTRACTS, *COMPOSED], ids=lambda contract: contract.name)
def test_many_random_kernels_are_right(contract: Contract, device: str) -> None:
    """On a GPU, 10^9 elements over all contracts."""
    rows, least = (1024, 130_000_000) if device == "cuda" else (64, 1_000_000)
    compared = seed = 0
    while compared < least:
        seed += 10
        compared += check(contract, ("mixed", "float32", "float64")[seed // 10 % 3], (rows, 480 + seed), seed, device)
