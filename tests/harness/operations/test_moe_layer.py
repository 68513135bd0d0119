"""MoELayer: right modules pass, and a module with one mistake fails at its stage, with its cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import CaseFileError, load
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native import ops as native
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.reference.high_precision.experts import (
    swiglu_backward,
    swiglu_forward,
    weight_gradient,
    weighted_rows,
    weighted_sum,
)
from narrowgauge.reference.modules import moe_layer as reference
from tests.harness.sample_backends import backend


def case(training: str = "MXFP8BlockScaling", *flags: str, tokens: int = 8, inputs: str = "normal") -> Case:
    flags = flags or ("rows:7,0,9",)
    return case_from_labels("moe-layer", training, (tokens, 32, 16), "bf16", inputs, flags)


def run(of: Case, module: Any) -> Record:
    return run_case(of, backend(declares={"transform": "butterfly"}, MoELayer=module))


def reversed_permute(x: torch.Tensor, ids: torch.Tensor, *, experts: int) -> tuple[torch.Tensor, ...]:
    rows, source_rows, sizes = right_permute(x, ids, experts=experts)
    parts = torch.split(source_rows[: int(sizes.sum())], sizes.tolist())
    return rows, torch.cat([part.flip(0) for part in parts]), sizes


right_permute = reference.permute


RIGHT = [
    ("MXFP8BlockScaling", native.MoELayer, ("rows:7,0,9", "bias")),
    ("NVFP4BlockScaling", native.MoELayer, ("rows:7,0,7", "dropped:2")),
    ("NVFP4BlockScaling-norht", reference.MoELayer, ("even:4", "steps:2", "accumulate", "quantized-parameters")),
    ("DelayedScaling-history2", native.MoELayer, ("front:3", "choices:3", "steps:3", "accumulate", "recompute")),
    ("Float8BlockScaling", native.MoELayer, ("even:2", "frozen-input")),
    ("Float8BlockScaling", reference.MoELayer, ("even:2", "frozen-weight")),
    ("Float8CurrentScaling", native.MoELayer, ("even:2", "steps:2", "pending-reversed", "delayed-wgrad")),
    ("MXFP8BlockScaling-2d", native.MoELayer, ("rows:16", "choices:2", "steps:2", "rewritten")),
    ("MXFP8BlockScaling", native.MoELayer, ("empty:3", "dropped:16")),
    ("MXFP8BlockScaling", native.MoELayer, ("even:2", "steps:2", "unobserved")),
]


@pytest.mark.parametrize(
    ("training", "module", "flags"),
    [pytest.param(*right, marks=[pytest.mark.long] if number else []) for number, right in enumerate(RIGHT)],
)
def test_right_modules_pass(training: str, module: Any, flags: tuple[str, ...]) -> None:
    record = run(case(training, *flags), module)
    assert (record.verdict, record.message) == ("pass", "")
    if "dropped:16" not in flags:
        assert all(entry["compared"] for entry in record.stages), record.stages


@pytest.mark.long
@pytest.mark.parametrize("inputs", ["lattice", "outliers", "zeros", "nan"])
def test_families_of_inputs(inputs: str) -> None:
    assert run(case(inputs=inputs), native.MoELayer).verdict == "pass"


@pytest.mark.long
def test_rows_of_an_expert_may_have_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "permute", reversed_permute)
    record = run(case(), reference.MoELayer)
    assert (record.verdict, record.message) == ("pass", "")


def scaled(found: Bounded, factor: float) -> Bounded:
    return Bounded(found.value * factor, found.error * factor)


def of_columns(gate: slice, up: slice) -> Callable[[torch.Tensor], Bounded]:
    """SwiGLU of other columns."""
    return lambda x: swiglu_forward(torch.cat([x[:, gate], x[:, up]], -1))


def with_gate(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Bounded]:
    """Another activation of the gate, times up."""
    return lambda x: exactly((activation(x.chunk(2, -1)[0].double()) * x.chunk(2, -1)[1].double()).float())


def exchanged_gradients(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    found = swiglu_backward(dy, x)
    return exactly(torch.cat(found.value.float().chunk(2, -1)[::-1], -1))


def of_exchanged_halves(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    return exchanged_gradients(dy, torch.cat(x.chunk(2, -1)[::-1], -1))


def without_slope(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    gate, up = x.double().chunk(2, -1)
    of_up = swiglu_backward(dy, x).value.chunk(2, -1)[1]
    return exactly(torch.cat([dy.double() * up * gate.sigmoid(), of_up], -1).float())


def of_next_choice(x: torch.Tensor, ids: torch.Tensor, *, experts: int) -> tuple[torch.Tensor, ...]:
    """Every row belongs to the choice of the row before."""
    rows, source_rows, sizes = right_permute(x, ids, experts=experts)
    return rows, source_rows.roll(1, 0), sizes


Sum = Callable[..., Bounded]


def chosen(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Sum:
    """The weighted sum with changed positions and weights; the sum of the gradients is right."""
    return lambda y, p, w=None: weighted_sum(y, *(change(p, w) if w is not None else (p, None)))


def overwritten(positions: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(positions.shape[1])
    last = torch.where(positions >= 0, numbers, -1).amax(1, keepdim=True)
    return torch.where(numbers == last, positions, -1), weights


def narrow(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None) -> Bounded:
    """Products and partial sums rounded to the dtype of y."""
    if weights is None:
        return weighted_sum(y, positions)
    total = torch.zeros(len(positions), y.shape[1], dtype=y.dtype)
    for choice in range(positions.shape[1]):
        part = slice(choice, choice + 1)
        term = weighted_sum(y, positions[:, part], weights[:, part]).value.to(y.dtype)
        total = term if choice == 0 else (total.float() + term.float()).to(y.dtype)
    return exactly(total)


def narrow_products(dy: torch.Tensor, y: torch.Tensor, positions: torch.Tensor) -> Bounded:
    return exactly((dy.unsqueeze(1) * y[positions.clamp(min=0)]).masked_fill((positions < 0).unsqueeze(-1), 0)).sum(-1)


Wrong = Callable[..., Any]
WRONG: list[tuple[str, Wrong, str, str]] = [
    ("permute", of_next_choice, "source_rows", ""),
    ("swiglu_forward", of_columns(slice(16, 32), slice(16)), "swiglu", "swiglu-halves-exchanged"),
    ("swiglu_forward", of_columns(slice(0, 32, 2), slice(1, 32, 2)), "swiglu", "swiglu-halves-interleaved"),
    ("swiglu_forward", with_gate(lambda g: (g * g.sigmoid()).bfloat16().double()), "swiglu", "swiglu-rounded-early"),
    ("swiglu_forward", with_gate(lambda g: gelu(g, approximate="tanh")), "swiglu", "activation-gelu"),
    ("swiglu_forward", with_gate(lambda g: g), "swiglu", "activation-missing"),
    ("weighted_sum", chosen(lambda p, w: (p, w * w)), "y", "probabilities-twice"),
    ("weighted_sum", chosen(lambda p, w: (p, torch.ones_like(w))), "y", "probabilities-missing"),
    ("weighted_sum", chosen(lambda p, w: (p, w / w.sum(1, keepdim=True))), "y", "probabilities-normalised"),
    ("weighted_sum", chosen(lambda p, w: (p, w.roll(1, 1))), "y", "probabilities-of-other-choice"),
    ("weighted_sum", chosen(lambda p, w: (p[:, :-1], w[:, :-1])), "y", "last-choice-left-out"),
    ("weighted_sum", chosen(lambda p, w: (p[:, 1:], w[:, 1:])), "y", "first-choice-left-out"),
    ("weighted_sum", chosen(lambda p, w: (p[:, :1], w[:, :1])), "y", "first-choice-alone"),
    ("weighted_sum", chosen(overwritten), "y", "choices-overwritten"),
    ("weighted_sum", narrow, "y", "choices-through-output"),
    ("weight_gradient", lambda dy, y, p: weight_gradient(dy, y, p.roll(1, 1)), "dprobabilities",
     "gradient-of-other-choice"),
    ("weight_gradient", narrow_products, "dprobabilities", "products-through-output"),
    ("weight_gradient", lambda dy, y, p: scaled(weight_gradient(dy, y, p), 2.0), "dprobabilities", "gain"),
    ("weighted_rows", lambda dy, rows, w: weighted_rows(dy, rows, w * w), "dfc2", "probabilities-twice"),
    ("weighted_rows", lambda dy, rows, w: weighted_rows(dy, rows, torch.ones_like(w)), "dfc2",
     "probabilities-missing"),
    ("weighted_rows", lambda dy, rows, w: weighted_rows(dy, rows, w.roll(1, 1)), "dfc2",
     "probabilities-of-other-choice"),
    ("swiglu_backward", exchanged_gradients, "dswiglu", "swiglu-gradients-exchanged"),
    ("swiglu_backward", of_exchanged_halves, "dswiglu", "swiglu-halves-exchanged"),
    ("swiglu_backward", without_slope, "dswiglu", "swiglu-gradient-without-slope"),
    ("weighted_sum", lambda y, p, w=None: weighted_sum(y, p if w is not None else p[:, :-1], w), "dx",
     "last-choice-left-out"),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "wrong", "stage", "cause"), [pytest.param(*row, id=f"{row[2]}-{row[3]}") for row in WRONG]
)
def test_a_wrong_module_is_named(
    name: str, wrong: Wrong, stage: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, name, wrong)
    record = run(case("MXFP8BlockScaling", "rows:11,0,10,9", "choices:3", tokens=10), reference.MoELayer)
    assert (record.verdict, record.stage) == ("fail", f"step 1 {stage}"), record.message
    if cause:
        assert record.explanations[0]["cause"].startswith(cause)
        assert record.explanations[0]["exact"]


class ProbabilityOnInput(reference.MoELayer):
    """The probability of the first choice multiplies the input too."""

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        return super().forward((x * probabilities[:, :1]).to(x.dtype), expert_ids, probabilities)


class OtherExpert(reference.MoELayer):
    """The second expert has the weights of the first."""

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        self.fc2.register_parameter("weight1", self.fc2.weight0)
        return super().forward(*given)


class SeedOfFirst(reference.MoELayer):
    """Both layers round by the same random bits."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.fc2.seed = self.fc1.seed


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "training", "stage"),
    [
        (ProbabilityOnInput, "MXFP8BlockScaling", "step 1 permuted"),
        (OtherExpert, "MXFP8BlockScaling", "step 1 fc2.w.scales"),
        (SeedOfFirst, "NVFP4BlockScaling", "step 1 fc2.dy.codes"),
    ],
)
def test_wrong_modules_fail_at_their_stage(module: Any, training: str, stage: str) -> None:
    record = run(case(training), module)
    assert (record.verdict, record.stage) == ("fail", stage), record.message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ('sections = "even:2"\ndropped = 17', "dropped is 17; 8 tokens have 16 choices"),
        ('sections = "rows:7,8"', "15 rows together; M is 16"),
        ('sections = "even:2"\nchoices = 0', "choices is 0"),
    ],
)
def test_wrong_keys_have_an_error(keys: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cases.toml"
    file.write_text(f'[[matrix]]\noperation = "moe-layer"\ntier = "quick"\ntraining = "MXFP8BlockScaling"\n'
                    f'shape = [8, 32, 16]\ndtype = "bf16"\ninputs = "normal"\n{keys}\n')  # fmt: skip
    with pytest.raises(CaseFileError, match=re.escape(message)):
        load(file)


def test_wrong_arguments_have_one_error() -> None:
    module = native.MoELayer(2, 32, 16)
    x, ids, weights = torch.ones(3, 32).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"expert_ids has shape \(3, 2\); for x \(2, 32\) it is \(2, k\)"):
        module(x[:2], ids, weights)
    with pytest.raises(TypeError, match="probabilities"):
        module(x, ids, weights.bfloat16())
    with pytest.raises(ValueError, match="expert_ids holds 2; there are the experts 0 to 1"):
        module(x, ids + 2, weights)
