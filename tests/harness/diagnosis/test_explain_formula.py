"""Every wrong formula of a stage in high precision is named, without a second cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.cause_names import is_cause
from narrowgauge.harness.diagnosis.formulas.explain_formula import explain_formula, wrong_formulas
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.stages.outcome import Formula, Outcome
from narrowgauge.reference.high_precision.additions import residual_sum
from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.bounded import exactly
from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from narrowgauge.reference.high_precision.norm import norm_backward, norm_forward
from narrowgauge.reference.high_precision.quantized_attention import query_gradient, scores_gradient, softmax

STAGE = "step 1 norm"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, GAMMA, BETA = drawn(16, 32) * 2**-6, drawn(32, seed=1), drawn(32, seed=2)
DY = drawn(16, 32, seed=4)
HEADS = [drawn(2, 2, 8, 16, seed=seed) for seed in range(3)]
DO = drawn(2, 2, 8, 16, seed=3)


def rows_of(*heads: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.transpose(1, 2).reshape(16, 32) for one in heads], 1)


OUT = attention_forward(*HEADS).value.bfloat16()
Q, K, V = HEADS
SHARES = softmax(exactly(Q), exactly(K)).value.bfloat16()
RIGHT: dict[str, tuple[str, dict[str, Any], torch.Tensor]] = {
    "layer": (
        "norm", {"x": X, "gamma": GAMMA, "added": BETA, "kind": "layer", "eps": 1e-4},
        norm_forward(X, GAMMA, BETA, "layer", 1e-4).value,
    ),
    "rms": (
        "norm", {"x": X + 2**-6, "gamma": GAMMA, "added": None, "kind": "rms", "eps": 1e-4},
        norm_forward(X + 2**-6, GAMMA, None, "rms", 1e-4).value,
    ),
    "gelu": ("gelu", {"x": drawn(16, 32)}, gelu_forward(drawn(16, 32)).value),
    "attention": (
        "attention", dict(zip("qkv", HEADS, strict=True)),
        rows_of(attention_forward(*HEADS).value),
    ),
    "layer backward": (
        "norm-backward", {"dy": DY, "x": X, "gamma": GAMMA, "kind": "layer", "eps": 1e-4, "part": 0},
        norm_backward(DY, X, GAMMA, "layer", 1e-4)[0].value,
    ),
    "rms backward": (
        "norm-backward", {"dy": DY, "x": X + 2**-6, "gamma": GAMMA, "kind": "rms", "eps": 1e-4, "part": 0},
        norm_backward(DY, X + 2**-6, GAMMA, "rms", 1e-4)[0].value,
    ),
    "gamma backward": (
        "norm-backward", {"dy": DY, "x": X, "gamma": GAMMA, "kind": "layer", "eps": 1e-4, "part": 1},
        norm_backward(DY, X, GAMMA, "layer", 1e-4)[1].value,
    ),
    "gelu backward": ("gelu-backward", {"dy": DY, "x": drawn(16, 32)}, gelu_backward(DY, drawn(16, 32)).value),
    "attention backward": (
        "attention-backward", {"do": DO, **dict(zip("qkv", HEADS, strict=True)), "out": OUT},
        rows_of(*(one.value for one in attention_backward(DO, *HEADS, out=OUT))),
    ),
    "softmax": ("softmax", {"operands": {"q": Q, "k": K}, "expected": None}, softmax(exactly(Q), exactly(K)).value),
    "gradient of scores": (
        "scores-gradient", {"operands": {"do": DO, "v": V, "softmax": SHARES}, "expected": None, "out": V},
        scores_gradient(exactly(DO), exactly(V), exactly(SHARES), torch.bfloat16).value,
    ),
    "gradient of q": (
        "scaled-gradient", {"operands": {}, "expected": query_gradient(exactly(SHARES), exactly(K)), "root": 4.0},
        query_gradient(exactly(SHARES), exactly(K)).value,
    ),
    "residual": (
        "residual", {"a": X, "b": GAMMA.expand(16, 32), "others": {"x": drawn(16, 32)}},
        residual_sum(X, GAMMA.expand(16, 32)).value,
    ),
}  # fmt: skip


def explained(name: str, given: dict[str, Any], value: torch.Tensor, dtype: torch.dtype, stage: str) -> list[str]:
    outcome = Outcome(formula=Formula(name, STAGE, given, value.to(dtype)))
    found = explain_formula(outcome, StageResult(stage, "bound", 1), WorkLimit())
    assert all(one.exact and one.stage == STAGE for one in found)
    return [one.cause for one in found]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of", RIGHT)
def test_each_wrong_formula_is_named_alone(of: str, dtype: torch.dtype) -> None:
    name, given, right = RIGHT[of]
    assert explained(name, given, right, dtype, STAGE) == []
    for row, make in wrong_formulas(name, given):
        cause = row.cause
        assert is_cause(cause)
        wrong = make().value.reshape(right.shape)
        assert explained(name, given, wrong, dtype, STAGE) == [cause]
        assert explained(name, given, wrong, dtype, "step 2 norm") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_of_rows_of_attention_are_a_place(dtype: torch.dtype) -> None:
    name, given, right = RIGHT["attention"]
    factors = 1 + torch.rand(16, 2, generator=torch.Generator().manual_seed(1)).repeat_interleave(16, 1) / 8

    def found(value: torch.Tensor) -> list[tuple[str, bool]]:
        outcome = Outcome(formula=Formula(name, STAGE, given, value.to(dtype)))
        explanations = explain_formula(outcome, StageResult(STAGE, "bound", 1), WorkLimit())
        return [(one.cause, one.exact) for one in explanations]

    assert found(right * factors) == [("attention-row-sum", False)]
    other = right * factors
    other[3, 5] *= 1.1
    assert found(other) == []
    assert found(right * factors.flip(1).roll(7, 1)) == []
