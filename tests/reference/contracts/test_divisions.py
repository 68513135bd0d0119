"""One form of a division by a number of a row explains a whole call, and a call with two forms is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.contracts.scopes import Scope
from tests.reference.contracts.random_kernel import RandomKernel
from tests.reference.contracts.test_soundness import inputs, shown, traced


@c.contract
def softmax(x: c.Matrix):
    e = c.exp(c.float32(x))
    return c.cast(e / c.sum(e), x.dtype)


@c.contract
def by_amax(x: c.Matrix, w: c.Row, recipe: c.Recipe):
    z = c.float32(x) * c.float32(w)
    return c.quantize(c.cast(z / c.maximum(c.amax(z), 1e-10), x.dtype), recipe)


@c.contract
def by_numbers(x: c.Matrix, s: c.Scale):
    y = c.cast(-(c.float32(x) / s), "float32")
    return {"y": y, "output": c.cast(c.minimum(y / 448.0, 1.0) - c.float32(x), x.dtype)}


@c.contract
def scaled(x: c.Matrix):
    z = c.float32(x)
    return c.cast(z / c.amax(z), x.dtype)


@c.contract
def by_elements(x: c.Matrix, w: c.Row):
    """Every element may have a reciprocal of its own, so no form is tried."""
    z = c.float32(x)
    return {"a": c.cast(z / (c.square(z) + 1.0), x.dtype), "b": c.cast(z / c.float32(w), x.dtype), "c": c.silu(z)}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("flavour", ["mixed", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long), "float32"])
@pytest.mark.parametrize("contract", [softmax, by_amax, by_numbers, scaled], ids=lambda contract: contract.name)
def test_right_kernels_have_one_form(contract: Contract, dtype: str, flavour: str) -> None:
    found = set()
    for seed, recipe in enumerate(("fp8-row-e4m3", "mxfp8-e4m3", "nvfp4-rowscaled") * 2):
        program = traced(contract, "float32" if contract is by_numbers else dtype, recipe)
        for tensors in inputs(program, (16, 96), seed):
            if "s" in tensors:
                tensors["s"] = tensors["s"][:1].contiguous()
            kernel: Any = RandomKernel(program, tensors, seed, flavour=flavour)
            for name, part in judged(program, tensors, shown(program, kernel)):  # type: ignore[arg-type]
                assert not bool(part.wrong.any()), (recipe, seed, name, part.wrong.nonzero()[0])
                found |= {part.form} if isinstance(part, Scope) else set()
    assert "quotient" in found
    assert len(found) > 1 or dtype != "float32" or contract in (softmax, by_amax), found


def forms(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x divided by the amax of its row, in each form."""
    z = x.float()
    amax = z.abs().amax(1, keepdim=True)
    away = 1 + 2.0**-23 * torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0).unsqueeze(1)
    quotients = {"quotient": z / amax, "reciprocal": z * (1 / amax), "approximate": z * ((1 / amax) * away)}
    return {form: y.to(x.dtype) for form, y in quotients.items()}


def test_the_form_of_a_kernel_is_named() -> None:
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    program = scaled.trace({"x": "float32"}, {}, {})
    for form, y in forms(x).items():
        stage = judge_contract(program, {"x": x}, {"output": y}).stages[-1]
        assert (stage.stage, stage.rule, stage.passed) == ("scope", "scope", True)
        words = {"quotient": "a quotient", "reciprocal": "the rounded", "approximate": "an approximate"}[form]
        assert words in stage.assumes, stage.assumes


def test_two_forms_in_a_call_are_found() -> None:
    """A vectorised body and a tail in two forms: each element lies within the bound."""
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    found = forms(x)
    mixed = torch.cat([found["quotient"][:, :2000], found["approximate"][:, 2000:]], 1)
    verdict = narrowgauge.explain(narrowgauge.assert_result, scaled, mixed, x)
    assert [stage["stage"] for stage in verdict.stages if stage["sentence"]] == ["scope"], str(verdict)
    assert "no single form of the division of line" in str(verdict)
    program = replace(scaled.trace({"x": "float32"}, {}, {}), hidden="per-element")
    stages = judge_contract(program, {"x": x}, {"output": mixed}).stages
    assert [(stage.stage, stage.passed) for stage in stages] == [("output", True)]


def test_divisions_of_elements_have_no_scope() -> None:
    x, w = torch.randn(8, 64).bfloat16(), torch.ones(64).bfloat16()
    program = traced(by_elements, "bfloat16", "")
    kernel: Any = RandomKernel(program, {"x": x, "w": w}, 0)
    assert [name for name, _ in judged(program, {"x": x, "w": w}, shown(program, kernel))] == ["a", "b", "c"]  # type: ignore[arg-type]


def test_a_declared_form_has_no_scope() -> None:
    @c.contract
    def declared(x: c.Matrix):
        z = c.float32(x)
        return c.cast(c.divide(z, c.amax(z), "approximate"), x.dtype)

    x = torch.randn(8, 64).bfloat16()
    verdict = narrowgauge.explain(narrowgauge.assert_result, declared, forms(x)["approximate"], x)
    assert verdict.passed
    assert [stage["stage"] for stage in verdict.stages] == ["output"]
