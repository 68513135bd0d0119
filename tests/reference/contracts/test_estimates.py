"""Estimates change the time of a verdict, and never the verdict: against the intervals of every element."""

from __future__ import annotations

import pytest
import torch

from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.reference.contracts.accepted import Part, different
from narrowgauge.reference.contracts.estimates import Estimator, Unknown
from narrowgauge.reference.contracts.evaluate import Evaluation, judged
from tests.reference.contracts.contracts import CONTRACTS
from tests.reference.contracts.random_kernel import RandomKernel
from tests.reference.contracts.test_soundness import inputs, shown, traced


@c.contract
def limits(x: c.Matrix, y: c.Matrix):
    """Every rule of estimates outside of the contracts of the package."""
    a, b = c.float32(x), c.float32(y)
    larger = c.maximum(abs(a) - b, c.minimum(a * 0.25, -b))
    return c.cast(larger + c.erf(a) * c.exp2(c.minimum(b, 8.0)) / (c.exp(-abs(a)) + 0.5), x.dtype)


@c.contract
def exact(x: c.Matrix, y: c.Matrix):
    """Steps without an error, if the inputs have few bits."""
    z = c.float32(x)
    return c.cast(c.where(z > 0, z, 0.0) * c.float32(y) + z, x.dtype)


def parts(program: c.Program, tensors: dict[str, torch.Tensor], results: dict[str, object]) -> dict[str, Part]:
    return dict(judged(program, tensors, results))  # type: ignore[arg-type]


def compare(program: c.Program, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    results = shown(program, RandomKernel(program, tensors, 0))
    fast = parts(program, tensors, results)
    with monkeypatch.context() as patch:
        patch.setattr(Estimator, "cast", refused)
        slow = parts(program, tensors, results)
    for name, part in slow.items():
        for end, other in ((part.lower, fast[name].lower), (part.upper, fast[name].upper)):
            assert not bool(different(end, other, part.fmt).any()), (program.name, name)
        assert torch.equal(part.wrong, fast[name].wrong)
        assert (part.determined, part.undetermined) == (fast[name].determined, fast[name].undetermined)


def refused(*_: object) -> None:
    raise Unknown


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("contract", [*CONTRACTS, limits, exact], ids=lambda contract: contract.name)
def test_the_ends_of_every_family(contract: Contract, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = traced(contract, dtype, "fp8-row-e4m3")
    for tensors in inputs(program, (24, 96), 3):
        compare(program, tensors, monkeypatch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("contract", [*CONTRACTS, limits, exact], ids=lambda contract: contract.name)
def test_every_number_of_a_dtype(contract: Contract, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number stands beside numbers of any magnitude, infinity and NaN: no row has a usual bound."""
    program = traced(contract, dtype, "fp8-row-e4m3")
    draw = torch.Generator().manual_seed(0)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    for order in (torch.arange(1 << 16), torch.randperm(1 << 16, generator=draw)):
        tensors = {}
        for argument, numbers in zip(program.arguments, (order, order.flip(0), order), strict=False):
            x = every[numbers].view(256, 256)
            tensors[argument.name] = x if argument.kind == "Matrix" else x[100]
        compare(program, tensors, monkeypatch)


ESTIMATED = [contract for contract in (*CONTRACTS, exact) if contract.name != "layernorm"]


@pytest.mark.parametrize("contract", ESTIMATED, ids=lambda contract: contract.name)
def test_few_elements_are_in_doubt(contract: Contract) -> None:
    """Ordinary inputs have an estimate: without one a verdict takes ten times as long."""
    program = traced(contract, "bfloat16", "fp8-row-e4m3")
    tensors = next(iter(inputs(program, (64, 512), 0)))
    number = next(reversed(program.outputs.values()))
    step = program.steps[number]
    for slab in Evaluation(program, tensors).slabs():
        cast = step.operands[0] if step.recipe is not None else number
        result, places = Estimator(program, slab.leaf).cast(cast)
        assert places.numel() < (0.15 if contract.name == "gelu-mul" else 0.05) * result.numel()
