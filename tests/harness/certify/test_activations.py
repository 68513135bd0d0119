"""Certificates of contracts that quantize an activation: every gate through the interval of the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.harness.certify import activations as activations_module
from narrowgauge.harness.certify import trials as trials_module
from narrowgauge.harness.certify.activations import ContractCalls
from narrowgauge.harness.certify.certificate import Certificate, CertificateError
from narrowgauge.harness.cli import app
from narrowgauge.reference import ops
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe

Activation = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_module, "_LARGER", 2)
    monkeypatch.setattr(ContractCalls, "elements", 1 << 12)
    monkeypatch.setattr(trials_module, "_ROUNDS", 1)
    monkeypatch.setattr(trials_module, "shapes", lambda _: iter([(3, 64), (130, 128)]))


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isnan(), x, x.clamp(min=0).square())


def of_row(activation: Activation) -> Callable[[torch.Tensor, Recipe], Quantized]:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        return ops.quantize(activation(x.float()).to(x.dtype), recipe)

    return kernel


def gated(activation: Activation) -> Callable[[torch.Tensor, Recipe], Quantized]:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        gate, up = x.float().chunk(2, 1)
        return ops.quantize((activation(gate) * up).to(x.dtype), recipe)

    return kernel


def proved(kernel: Callable[..., Quantized], contract: str, recipe: str = "mxfp8-e4m3") -> Certificate:
    return narrowgauge.certify(kernel, contract, recipe=recipe, places=1, tensor_scales=1)


def test_a_right_activation_is_certified() -> None:
    found = proved(of_row(relu_squared), "relu-squared-quantize", "nvfp4")
    assert found.verdict == "certified"
    assert any("every gate with a result up to the tensor amax" in line for line in found.proved)
    assert any("1 of 32 641" in line for line in found.sampled)


def test_a_wrong_gate_is_named() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 1.5, 2.0, relu_squared(x))

    found = proved(of_row(wrong), "relu-squared-quantize")
    codes = next(one for one in found.wrong if one.stage == "gates.codes")
    assert (codes.count, codes.of) == (1, 65536)
    assert codes.first["gate"]["decimal"] == "1.5"
    assert codes.rule is not None
    assert codes.rule.conditions["magnitude of the gate"] == [1.5, 1.5]
    assert "gates.codes: 1 of 65 536 gates and factors" in str(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("activation", "contract"),
    [
        (functional.silu, "silu-mul-quantize"),
        (lambda x: functional.gelu(x, approximate="tanh"), "gelu-mul-quantize"),
        # NaN, and gates of a size at which approximations end
        (lambda x: torch.where(x < -20, 0.0, functional.silu(x)), "silu-mul-quantize"),
        (lambda x: functional.silu(x.nan_to_num()), "silu-mul-quantize"),
        (lambda x: x * torch.sigmoid(1.702 * x), "gelu-mul-quantize"),
    ],
    ids=["silu", "gelu", "silu-cut", "silu-without-nan", "gelu-by-sigmoid"],
)
def test_gated_activations(activation: Activation, contract: str, request: pytest.FixtureRequest) -> None:
    found = proved(gated(activation), contract)
    right = request.node.callspec.id in ("silu", "gelu")
    assert found.passed == right
    assert right or found.wrong


def test_a_gate_that_is_wrong_beside_others_is_refused() -> None:
    def kernel(x: torch.Tensor, recipe: Recipe) -> Quantized:
        y = relu_squared(x.float())
        y[:, 1:] = torch.where(x[:, :-1] == x[:, 1:], 0.0, y[:, 1:])
        return ops.quantize(y.to(x.dtype), recipe)

    found = proved(kernel, "relu-squared-quantize")
    assert found.verdict == "refused"
    assert any(trial.wrong for trial in found.trials)


@c.contract
def shifted(x: c.Matrix, row: c.Row, recipe: c.Recipe):
    return c.quantize(c.cast(c.float32(x) + c.float32(row), x.dtype), recipe)


@pytest.mark.parametrize(
    ("contract", "recipe", "dtype", "words"),
    [
        ("rmsnorm-quantize", "mxfp8-e4m3", torch.bfloat16, "takes x, weight; a certificate needs a matrix"),
        ("layernorm-quantize", "mxfp8-e4m3", torch.bfloat16, "a certificate needs"),
        ("silu-mul", None, torch.bfloat16, "a certificate needs one quantize"),
        ("relu-squared-quantize", "mxfp8-e4m3", torch.float32, "every number of bfloat16 or float16"),
        (shifted, "mxfp8-e4m3", torch.bfloat16, "takes x, row"),
    ],
)
def test_contracts_without_a_certificate(contract: str, recipe: str, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        narrowgauge.certify(of_row(relu_squared), contract, recipe=recipe, dtype=dtype)


def test_a_recipe_and_a_contract_are_two_arguments() -> None:
    with pytest.raises(TypeError, match="certify takes a recipe"):
        narrowgauge.certify(of_row(relu_squared), recipe="nvfp4")


@pytest.mark.long
def test_the_command_certifies_a_contract(tmp_path: Path) -> None:
    arguments = ["certify", "native", "--contract", "relu-squared-quantize", "--recipe", "mxfp8-e4m3", "--places", "1"]
    result = CliRunner().invoke(app, [*arguments, "--report-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "proved: codes: every gate, NaN and infinity included," in result.output
    assert (tmp_path / "certificate.json").exists()


def test_the_command_refuses_options_of_other_proofs() -> None:
    for more, words in ((["-n", "2"], "leave them out"), (["--operation", "gemm"], "leave --operation gemm out")):
        result = CliRunner().invoke(app, ["certify", "native", "--contract", "silu-mul-quantize", *more])
        assert result.exit_code == 2
        assert words in result.output
