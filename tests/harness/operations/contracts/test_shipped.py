"""The contracts of the package are operations, and a contract of a user takes the place of one of the same name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id, outside_contracts
from tests.harness.operations.contracts.serving_kernels import Kernels


@pytest.fixture(autouse=True)
def own_contracts_forgotten():
    yield
    OPERATIONS.let_go()


OF_ROWS = [
    name for name, one in CONTRACTS.items() if not {c.Cache, c.Heads} & {kind for kind, _ in one.tensors.values()}
]
"""Contracts of matrices; test_attention.py and the folder cache have those of caches."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_right_kernel_passes_by_the_name_of_the_operation(name: str) -> None:
    kernel = getattr(Kernels(), name.replace("-", "_"))
    default = next(iter(CONTRACTS[name].recipes.values()), None)
    usual = "fp8-static-e4m3" if name.endswith("static") else "fp8-row-e4m3"
    recipes = [] if default is None else [default.partition("@")[0] or usual]
    keys = {"b_recipe": usual} if name == "scaled-gemm" else {}
    shape = (9, 64, 33) if name.endswith("gemm") else (16 if name.endswith("stochastic") else 9, 64)
    found = narrowgauge.check(kernel, name, recipe=recipes, shapes=[shape], keys=keys)
    # Sums of 13 fraction bits determine too little of unstructured inputs.
    assert found.passed >= (8 if name == "scaled-gemm" else 13)
    case = next(case.id for case, _ in OPERATIONS[name].usual(recipes, families=["lattice"]))
    assert narrowgauge.check(kernel, case).passed == 1
    assert case_from_id(case).id == case


def test_a_wrong_kernel_fails_with_its_step_and_a_command() -> None:
    class Wrong(Kernels):
        def total(self, squares: torch.Tensor) -> torch.Tensor:
            return squares[:, :-8].sum(-1, keepdim=True)

    with pytest.raises(AssertionError) as failed:
        narrowgauge.check(Wrong().rmsnorm_quantize, "rmsnorm-quantize", recipe="fp8-row-e4m3", shapes=[(32, 64)])
    text = str(failed.value)
    assert "leaves out the last 8 elements of a row" in text
    assert "'rmsnorm-quantize/fp8-row-e4m3/32x64/" in text


def test_a_contract_of_a_user_replaces_one_of_the_package() -> None:
    @c.contract
    def rope_quantize(x: c.Matrix, recipe: c.Recipe):
        """Another formula."""
        return c.quantize(x, recipe)

    def kernel(x, recipe):
        return narrowgauge.quantize(x, recipe)

    assert narrowgauge.check(kernel, rope_quantize, recipe="mxfp8-e4m3", shapes=[(8, 64)]).passed
    right = Kernels().rope_quantize
    assert narrowgauge.check(right, "rope-quantize", recipe="mxfp8-e4m3", shapes=[(8, 64)]).passed


def test_they_need_no_process() -> None:
    assert not outside_contracts().keys() & CONTRACTS.keys()
    code = (
        "import subprocess, sys; subprocess.Popen = subprocess.run = None\n"
        "from narrowgauge.harness.cases.operations import OPERATIONS\n"
        "cls = OPERATIONS['rope-quantize']\n"
        "print(cls.usual(['nvfp4'])[0][0].program.outputs, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["{'quantized':", "13}", "False"]
