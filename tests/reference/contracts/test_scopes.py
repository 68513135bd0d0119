"""One hidden number explains a row of a right kernel, and a row with two numbers is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.reference.contracts.evaluate import judged
from tests.reference.contracts.random_kernel import RandomKernel
from tests.reference.contracts.test_soundness import inputs, shown, traced

ROWS, COLUMNS = 32, 2048


@c.contract
def norm(x: c.Matrix, w: c.Row, *, rounded: bool = True):
    """RMSNorm; `rounded`: a cast before the weight."""
    z = c.float32(x)
    y = z * c.once(c.rsqrt(c.mean(c.square(z)) + 1e-6))
    if rounded:
        y = c.float32(c.cast(y, x.dtype))
    return c.cast(y * c.float32(w), x.dtype)


@c.contract
def norm_quantize(x: c.Matrix, w: c.Row, recipe: c.Recipe):
    z = c.float32(x)
    rs = c.once(c.rsqrt(c.mean(c.square(z)) + 1e-6))
    return c.quantize(c.cast(z * rs * c.float32(w), x.dtype), recipe)


@c.contract
def by_amax(x: c.Matrix, w: c.Row):
    z = c.float32(x)
    rms = c.once(c.sqrt(c.mean(c.square(z)) + 1e-6))
    return c.cast(c.maximum(-(z / rms), -2.0) - c.float32(w), x.dtype)


@c.contract
def norm_transposed(x: c.Matrix, w: c.Row):
    z = c.float32(x)
    y = z * c.once(c.rsqrt(c.mean(c.square(z)) + 1e-6))
    return c.transposed(c.cast(c.float32(c.cast(y, x.dtype)) * c.float32(w), x.dtype))


CONTRACTS = (norm, norm_quantize, by_amax, norm_transposed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("flavour", ["mixed", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_right_kernels_have_one_number(contract: Contract, dtype: str, flavour: str) -> None:
    for seed, recipe in enumerate(("fp8-row-e4m3", "mxfp8-e4m3", "nvfp4-rowscaled")):
        program = traced(contract, dtype, recipe)
        for tensors in inputs(program, (16, 96), seed):
            for name, part in judged(
                program, tensors, shown(program, RandomKernel(program, tensors, seed, flavour=flavour))
            ):  # type: ignore[arg-type]
                assert not bool(part.wrong.any()), (recipe, name, part.wrong.nonzero()[0])


def given(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, COLUMNS, generator=draw).to(dtype), torch.randn(COLUMNS, generator=draw).to(dtype)


def result(contract: Contract, x: torch.Tensor, w: torch.Tensor, rs: torch.Tensor) -> Any:
    z = x.double()
    if contract is by_amax:
        return ((-z * rs).clamp(min=-2) - w).to(x.dtype)
    if contract in (norm, norm_transposed):
        y = ((z * rs).to(x.dtype).double() * w).to(x.dtype)
        return y.T.contiguous() if contract is norm_transposed else y
    return narrowgauge.quantize((z * rs * w).to(x.dtype), "fp8-row-e4m3")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_two_numbers_in_a_row_are_found(contract: Contract, dtype: torch.dtype) -> None:
    """Both halves of a row lie inside of the interval of any order, with numbers that are 1e-4 apart.

    A row of 8-bit codes has one or two elements changed by these numbers: few rows show two numbers.
    """
    x, w = given(dtype)
    rs = (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt().expand(ROWS, COLUMNS).clone()
    options = {"recipe": "fp8-row-e4m3"} if contract is norm_quantize else {}
    narrowgauge.assert_result(contract, result(contract, x, w, rs), x, w, **options)
    wrong = slice(None) if contract is norm_quantize else slice(17, 18)
    rs[wrong, : COLUMNS // 2] *= 1 + 5e-5
    rs[wrong, COLUMNS // 2 :] *= 1 - 5e-5
    verdict = narrowgauge.explain(narrowgauge.assert_result, contract, result(contract, x, w, rs), x, w, **options)
    assert [stage["stage"] for stage in verdict.stages if stage["sentence"]] == ["scope"], str(verdict)
    assert contract is norm_quantize or "row 17" in str(verdict)
    assert f"({'sqrt' if contract is by_amax else 'rsqrt'})" in str(verdict)
    rs[:] = rs[:, :1]  # one number within the interval
    narrowgauge.assert_result(contract, result(contract, x, w, rs), x, w, **options)


def test_numbers_without_a_direction() -> None:
    @c.contract
    def twice(x: c.Matrix):
        z = c.float32(x)
        rs = c.once(c.rsqrt(c.mean(c.square(z)) + 1e-6))
        return c.cast(c.tanh(z * rs), x.dtype)

    x = torch.randn(4, 32).bfloat16()
    with pytest.raises(ValueError, match="reaches tanh"):
        narrowgauge.assert_result(twice, x, x)


def test_a_number_for_each_element_is_refused() -> None:
    @c.contract
    def single(x: c.Matrix):
        return c.cast(c.once(c.float32(x)), x.dtype)

    with pytest.raises(c.ContractError, match="number of each row"):
        single.trace({"x": "bfloat16"}, {}, {})
