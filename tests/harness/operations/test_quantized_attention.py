"""FP8 attention of a transformer layer: right kernels pass, a mistake in a step fails there and has its cause."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from tests.harness.operations.quantized_attention_kernels import RIGHT, WRONG, Fused, Kernel, layer_of
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


def of_mistake(name: str) -> Any:
    return pytest.param(name, marks=() if name == "dk of dp not transposed" else pytest.mark.long)


@pytest.mark.parametrize("mistake", [of_mistake(name) for name in WRONG])
def test_a_mistake_fails_at_its_step_with_its_cause(mistake: str) -> None:
    kernel, stage, cause = WRONG[mistake]
    record = run(kernel, layer())
    assert (record.verdict, record.stage) == ("fail", f"step 1 {stage}")
    assert [entry["cause"] for entry in record.explanations][:1] == [cause]


def test_a_layer_without_attention_is_refused() -> None:
    case = case_from_labels("linear", DPA, (1, 16, 32, 32), "bf16", "normal")
    assert case.problem() == (
        f"training is {DPA!r}, which quantizes attention, and linear has none: training can be 'Float8CurrentScaling'"
    )
