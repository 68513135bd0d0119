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
from narrowgauge.harness.hosts.codec import decode_result, encode_result
from narrowgauge.harness.operations.contracts.results import result_tensors
from tests.harness.operations.contracts.serving_kernels import Kernels


@pytest.fixture(autouse=True)
def own_contracts_forgotten():
    yield
    OPERATIONS.let_go()


OF_ROWS = [
    name for name, one in CONTRACTS.items()
    if not {c.Cache, c.Heads, c.Ranks, c.QuantizedRanks, c.RouterWeights} & {kind for kind, _ in one.tensors.values()}
]  # fmt: skip
"""Contracts of matrices; test_attention.py, the folder cache and test_collectives.py have the others."""


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", OF_ROWS)
def test_a_right_kernel_passes_by_the_name_of_the_operation(name: str) -> None:
    kernel = getattr(Kernels(), name.replace("-", "_"))
    default = next(iter(CONTRACTS[name].recipes.values()), None)
    usual = "fp8-static-e4m3" if name.endswith("static") else "fp8-row-e4m3"
    recipes = [] if default is None else [default.partition("@")[0] or usual]
    scaled = name.startswith("scaled-gemm")
    keys = {"b_recipe": usual} if scaled else {}
    shape = (9, 64, 33) if "gemm" in name else (16 if name.endswith("stochastic") else 9, 64)
    found = narrowgauge.check(kernel, name, recipe=recipes, shapes=[shape], keys=keys)
    # Sums of 13 fraction bits determine too little of unstructured inputs.
    assert found.passed >= (8 if scaled else 13)
    case = next(case.id for case, _ in OPERATIONS[name].usual(recipes, families=["lattice"]))
    assert narrowgauge.check(kernel, case).passed == 1
    assert case_from_id(case).id == case


def test_halves_may_be_stored_as_transposes() -> None:
    def kernel(x, recipe):
        row, column = narrowgauge.quantize_both(Kernels().silu_mul(x), recipe)
        assert column.transposed
        return {"rowwise": row, "columnwise": column}

    name, recipe = "silu-mul-quantize-both", "mxfp8-e4m3"
    assert narrowgauge.check(kernel, name, recipe=recipe, shapes=[(32, 64)], families=["position"]).passed == 3
    x, tensors = narrowgauge.inputs("mxfp8-e4m3", (32, 64), "normal"), []
    program = CONTRACTS[name].trace({"x": "bfloat16"}, {"recipe": recipe}, {})
    sent = encode_result(kernel(x, recipe), lambda tensor: tensors.append(tensor) or len(tensors) - 1)
    received = result_tensors(program, decode_result(sent, tensors.__getitem__))
    wanted = result_tensors(program, kernel(x, recipe))
    assert wanted["columnwise.codes"].shape == (32, 32)
    assert all(torch.equal(received[part], tensor) for part, tensor in wanted.items())


@pytest.mark.long
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
