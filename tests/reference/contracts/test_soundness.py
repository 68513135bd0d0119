"""No correct kernel leaves its interval: random kernels, whole sets of values, special values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from narrowgauge.contract import Contract, Program
from narrowgauge.contracts import CONTRACTS as SHIPPED
from narrowgauge.reference.contracts.evaluate import Evaluation, bits_of, judged
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.program import BITS
from narrowgauge.spec.recipes import find_recipe
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
BOTH = (("bfloat16", "nvfp4-rht"), ("float16", "mxfp8-e4m3"), ("bfloat16", "nvfp4-2d"), ("float32", "fp8-row-e4m3"))
DRAWN = (("bfloat16", "nvfp4-rht-sr"), ("float16", "nvfp4-sr"), ("float32", "mxfp8-e4m3-sr"))
TRAINING = {
    name: DRAWN if "stochastic" in name else BOTH if contract.recipes else ()
    for name, contract in SHIPPED.items()
    if contract.function.__module__ == "narrowgauge.contracts.training"
}
"""Dtypes and recipes of the contracts of training by name."""
EVERY = (*CONTRACTS, *COMPOSED, *(SHIPPED[name] for name in TRAINING))


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
    sizes = {"M": shape[0], "K": shape[1], "1": 1}
    draw = torch.Generator().manual_seed(seed)
    made: list[Iterator[torch.Tensor]] = []
    for number, argument in enumerate(program.arguments):
        parts = [axis.partition("/") for axis in argument.axes]
        size = [sizes[name] // int(divisor or 1) for name, _, divisor in parts]
        if argument.dtype == BITS:
            made.append(itertools.repeat(torch.randint(-(2**31), 2**31, size, generator=draw, dtype=torch.int32)))
        else:
            whole = (size[0], size[1]) if len(size) == 2 else (len(shape), size[0])
            rows = families(whole, DTYPES[argument.dtype], seed + number)
            made.append(rows if len(size) == 2 else (x[0] for x in rows))
    for tensors in zip(*made, strict=False):
        yield {argument.name: tensor for argument, tensor in zip(program.arguments, tensors, strict=True)}


def shown(program: Program, kernel: RandomKernel) -> dict[str, object]:
    """What the kernel returns."""
    found: dict[str, object] = {}
    for name, number in program.outputs.items():
        step = program.steps[number]
        if step.function == "quantize":
            y = kernel.values[step.operands[0]].float().to(DTYPES[step.dtype])
            recipe, random = find_recipe(step.options["recipe"]), bits_of(program, step, kernel.tensors)
            found[name] = replace(quantize(y, recipe.rowwise, random=random), recipe=recipe)
        else:
            found[name] = kernel.values[number].float().to(DTYPES[step.dtype])
    return found


def traced(contract: Contract, dtype: str, recipe: str) -> Program:
    dtypes = {n: dtype if dtype in kind.dtypes else kind.dtypes[0] for n, (kind, _) in contract.tensors.items()}
    return contract.trace(dtypes, dict.fromkeys(contract.recipes, recipe), {})


def check(contract: Contract, flavour: str, shape: tuple[int, int], seed: int, device: str) -> int:
    """Judge a random kernel for each dtype, recipe and family; the number of compared elements."""
    compared = 0
    choices = TRAINING.get(contract.name) or zip(["bfloat16", "float16", "float32"] * 3, RECIPES, strict=False)
    for number, (dtype, recipe) in enumerate(choices, seed):
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


@pytest.mark.sampled(30)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flavour", ["mixed", "float32", "float64"])
@pytest.mark.parametrize("contract", EVERY, ids=lambda contract: contract.name)
def test_random_kernels_are_right(contract: Contract, flavour: str, device: str) -> None:
    assert check(contract, flavour, (16, 96), 0, device)


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("contract", EVERY, ids=lambda contract: contract.name)
def test_many_random_kernels_are_right(contract: Contract, device: str) -> None:
    """On a GPU, 10^9 elements over all contracts."""
    rows, least = (1024, 130_000_000) if device == "cuda" else (64, 1_000_000)
    compared = seed = 0
    while compared < least:
        seed += 10
        width = 480 + (32 * seed if contract.name in TRAINING else seed)  # whole groups of a rotation
        compared += check(contract, ("mixed", "float32", "float64")[seed // 10 % 3], (rows, width), seed, device)


def test_a_further_rounding_may_end_on_a_tie() -> None:
    """A number of `roundings` whose float32 lies between two bfloat16 numbers: the one is accepted and the other."""
    contract = next(contract for contract in EVERY if contract.name == "silu-mul-backward")
    program = traced(contract, "bfloat16", "mxfp4")
    x = torch.tensor([[2.4028122425079346e-07, 2.6226043701171875e-06]]).bfloat16()
    dy = torch.tensor([[-216.0]]).bfloat16()
    ends = Evaluation(program, {"dy": dy, "x": x}).values[program.outputs["dx"]]
    assert (ends.low[0, 0].item(), ends.high[0, 0].item()) == (-0.0002841949462890625, -0.00028228759765625)
