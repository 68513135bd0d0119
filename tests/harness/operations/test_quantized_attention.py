"""FP8 attention of a transformer layer: right kernels pass, a mistake in a step fails there and has its cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native.modules import transformer
from narrowgauge.reference import modules
from narrowgauge.spec.modules.training import TrainingRecipe
from tests.harness.operations.quantized_attention_kernels import (
    RIGHT,
    Fused,
    InverseScale,
    Kernel,
    LeftOut,
    NoScale,
    OtherFormat,
    OtherScale,
    Swapped,
    Wrong,
    layer_of,
)
from tests.harness.sample_backends import backend

DPA = "Float8CurrentScaling-dpa"
PARTS = ("amax", "tensor scale", "scales", "codes")


def layer(inputs: str = "normal", shape: tuple[int, ...] = (2, 16, 32, 48)) -> Case:
    return case_from_labels("transformer-layer", DPA, shape, "bf16", inputs, ("heads:2",))


def run(kernel: Kernel, case: Case) -> Record:
    return run_case(case, backend(declares={}, TransformerLayer=layer_of(kernel)))


def test_a_fused_kernel_is_judged_by_its_operands() -> None:
    record = run(Fused(), layer(shape=(1, 8, 16, 16)))
    assert (record.verdict, record.message) == ("pass", "")
    compared = {entry["stage"].removeprefix("step 1 "): entry["compared"] for entry in record.stages}
    assert [name for name, count in compared.items() if not count] == [
        "softmax", "attention.s", "dscores", "attention.dp",
    ]  # fmt: skip
    assert all(compared[f"attention.{name}.{part}"] for name in ("qkv", "o", "do", "dqkv") for part in PARTS)
    assert all(compared[name] for name in ("attention", "dq", "dk", "dv"))


@pytest.mark.long
@pytest.mark.parametrize("inputs", ["normal", "outliers", "peaked"])
@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_pass(kernel: type[Kernel], inputs: str) -> None:
    record = run(kernel(), layer(inputs))
    assert (record.verdict, record.message) == ("pass", "")


def _late(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(2), -torch.inf)


_R = Kernel()
_FORWARD: dict[str, tuple[dict[str, Any], str]] = {
    "scores not scaled": ({"softmax": lambda q, k: _R.masked(q @ k.mT).softmax(-1)}, "attention-not-scaled"),
    "scores scaled twice": (
        {"softmax": lambda q, k: _R.masked(q @ k.mT / q.shape[-1]).softmax(-1)},
        "attention-scaled-twice",
    ),
    "mask one late": ({"masked": _late}, "attention-mask-one-late"),
    "no mask": ({"masked": lambda scores: scores}, "attention-not-causal"),
    "q and k exchanged": ({"softmax": lambda q, k: _R.softmax(k, q)}, "attention-q-and-k-exchanged"),
    "scores in bfloat16": (
        {"masked": lambda scores: _R.masked(scores.bfloat16().float())},
        "attention-scores-through:bf16",
    ),
}
_BACKWARD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no row term": ({"row": lambda s, ds, do, out: 0.0}, "dscores", "attention-gradient-without-row-term"),
    "row term of the output": (
        {"row": lambda s, ds, do, out: (do * out).sum(-1, keepdim=True)},
        "dscores",
        "attention-gradient-row-of-output",
    ),
    "backward through the quantized s": (
        {"dscores": lambda s, weights, *rest: _R.dscores(weights, weights, *rest)},
        "dscores",
        "operand-exchanged",
    ),
    "dv of s not quantized": (
        {"dv": lambda s, weights, do: s.bfloat16().float().mT @ do},
        "dv",
        "operand-not-quantized",
    ),
    "dk of dp not transposed": ({"dk": lambda dp, q: dp @ q / q.shape[-1] ** 0.5}, "dk", "matrices-transposed"),
    "dv of s not transposed": ({"dv": lambda s, weights, do: weights @ do}, "dv", "matrices-transposed"),
    "dq not scaled": ({"dq": lambda dp, k: dp @ k}, "dq", "attention-not-scaled"),
    "dk scaled twice": ({"dk": lambda dp, q: dp.mT @ q / q.shape[-1]}, "dk", "attention-scaled-twice"),
}
WRONG: dict[str, tuple[Kernel, str, str]] = {
    **{
        f"{name} not quantized": (LeftOut(name), stage, "operand-not-quantized")
        for name, stage in (("qkv", "softmax"), ("s", "attention"), ("do", "dscores"), ("dp", "dq"))
    },
    **{
        f"{name} in {other}": (OtherFormat(name), f"attention.{name}.tensor scale", f"element-format:{other}")
        for names, other in ((("qkv", "s", "o"), "E5M2"), (("do", "dp", "dqkv"), "E4M3"))
        for name in names
    },
    "s by the scale of v": (OtherScale("s"), "attention", "scale-exchanged"),
    "dp by the scale of do": (OtherScale("dp"), "dq", "scale-exchanged"),
    "do without scale": (NoScale("do"), "dscores", "scale-exchanged"),
    "s without scale": (NoScale("s"), "attention", "scale-exchanged"),
    "dp with an inverted scale": (InverseScale("dp"), "attention.dp.scales", "scale-inverse-stored"),
    "dk of k": (Swapped(), "dk", "operand-exchanged"),
    **{name: (Wrong(**steps), "softmax", cause) for name, (steps, cause) in _FORWARD.items()},
    **{name: (Wrong(**steps), stage, cause) for name, (steps, stage, cause) in _BACKWARD.items()},
}
"""By mistake, the kernel, the stage that fails and its cause. O and dqkv that are not quantized change no byte: the
next product quantizes by the same recipe, and quantized numbers stay."""


def of_mistake(name: str) -> Any:
    return pytest.param(name, marks=() if name == "dk of dp not transposed" else pytest.mark.long)


@pytest.mark.parametrize("mistake", [of_mistake(name) for name in WRONG])
def test_a_mistake_fails_at_its_step_with_its_cause(mistake: str) -> None:
    kernel, stage, cause = WRONG[mistake]
    record = run(kernel, layer())
    assert (record.verdict, record.stage) == ("fail", f"step 1 {stage}")
    assert [entry["cause"] for entry in record.explanations][:1] == [cause]


DELAYED = "DelayedScaling-history2-dpa"


class NotMoved(transformer.AttentionOperands):
    """Gradients of the attention with unchanged scales."""

    def end_backward(self, recipe: TrainingRecipe) -> None:
        self.report("history", self.amax_history)
        self.report("scale", self.scale)


class ScaleOfOther(transformer.AttentionOperands):
    """S has the scale of q, k and v."""

    def scale_of(self, role: int, scales: torch.Tensor | None) -> torch.Tensor | None:
        return super().scale_of(0 if role == 1 else role, scales)


def delayed(steps: int, *flags: str) -> Case:
    labels = "heads:2", f"steps:{steps}", *flags
    return case_from_labels("transformer-layer", DELAYED, (1, 8, 16, 16), "bf16", "normal", labels)


@pytest.mark.long
@pytest.mark.parametrize(
    ("operands", "stage"),
    [(NotMoved, "step 1 attention.history"), (ScaleOfOther, "step 2 attention.s.tensor scale")],
)
def test_a_history_of_attention_is_judged(operands: Any, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "AttentionOperands", operands)
    record = run_case(delayed(2), backend(declares={}, TransformerLayer=transformer.TransformerLayer))
    assert (record.verdict, record.stage) == ("fail", stage)


@pytest.mark.long
@pytest.mark.parametrize("door", [transformer.TransformerLayer, modules.TransformerLayer])
@pytest.mark.parametrize("flags", [("pending",), ("microbatches",), ("recompute", "reloaded"), ("no-grad",)])
def test_uses_of_a_history_of_attention(door: Any, flags: tuple[str, ...]) -> None:
    record = run_case(delayed(2, *flags), backend(declares={}, TransformerLayer=door))
    assert (record.verdict, record.message) == ("pass", "")
    assert all(entry["compared"] for entry in record.stages)


def test_a_layer_without_attention_is_refused() -> None:
    case = case_from_labels("linear", DPA, (1, 16, 32, 32), "bf16", "normal")
    assert case.problem() == (
        f"training is {DPA!r}, which quantizes attention, and linear has none: training can be 'Float8CurrentScaling'"
    )
