"""MoELayer: right modules pass, and a module with one mistake fails at its stage, with its cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import CaseFileError
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
from narrowgauge.reference.modules.grouped_linear import GroupedLinear
from tests.harness.sample_backends import backend


def case(training: str = "MXFP8BlockScaling", *flags: str, tokens: int = 8, inputs: str = "normal") -> Case:
    flags = flags or ("rows:7,0,9",)
    return case_from_labels("moe-layer", training, (tokens, 32, 16), "bf16", inputs, flags)


def run(of: Case, module: Any) -> Record:
    return run_case(of, backend(declares={"transform": "butterfly"}, MoELayer=module))


class OtherOrder(reference.MoELayer):
    """The rows of an expert lie in the reversed order of tokens."""

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x.flip(0), expert_ids.flip(0), probabilities.flip(0))
        return y.flip(0)


def reversed_permute(x: torch.Tensor, ids: torch.Tensor, *, experts: int) -> tuple[torch.Tensor, ...]:
    rows, source_rows, sizes = right_permute(x, ids, experts=experts)
    parts = torch.split(source_rows[: int(sizes.sum())], sizes.tolist())
    return rows, torch.cat([part.flip(0) for part in parts]), sizes


right_permute = reference.permute


class Unobserved(reference.MoELayer):
    """Reports nothing."""

    observe = lambda *_: None  # noqa: E731


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


def gate_last(x: torch.Tensor) -> Bounded:
    return swiglu_forward(torch.cat(x.chunk(2, -1)[::-1], -1))


def plain_product(x: torch.Tensor) -> Bounded:
    gate, up = x.chunk(2, -1)
    return exactly(gate) * exactly(up)


def exchanged_gradients(dy: torch.Tensor, x: torch.Tensor) -> Bounded:
    found = swiglu_backward(dy, x)
    return exactly(torch.cat(found.value.float().chunk(2, -1)[::-1], -1))


def of_tokens(x: torch.Tensor, ids: torch.Tensor, *, experts: int) -> tuple[torch.Tensor, ...]:
    """The first row of each section is that of the section before."""
    rows, source_rows, sizes = right_permute(x, ids, experts=experts)
    return rows, source_rows.roll(1, 0), sizes


def overwritten(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None = None) -> Bounded:
    """The last choice of each token alone."""
    numbers = torch.arange(positions.shape[1])
    last = torch.where(positions >= 0, numbers, -1).amax(1, keepdim=True)
    return weighted_sum(y, torch.where(numbers == last, positions, -1), weights)


Wrong = Callable[..., Any]
WRONG: list[tuple[str, str, Wrong, str, str]] = [
    ("permute", "source_rows", of_tokens, "source_rows", ""),
    ("swiglu_forward", "gate and up", gate_last, "swiglu", "swiglu-halves-exchanged"),
    ("swiglu_forward", "no silu", plain_product, "swiglu", "activation-missing"),
    ("weighted_sum", "squared", lambda y, p, w=None: weighted_sum(y, p, None if w is None else w * w), "y",
     "probabilities-twice"),
    ("weighted_sum", "without", lambda y, p, w=None: weighted_sum(y, p), "y", "probabilities-missing"),
    ("weighted_sum", "dropped", lambda y, p, w=None: weighted_sum(y, p[:, :-1], None if w is None else w[:, :-1]), "y",
     "last-choice-left-out"),
    ("weighted_sum", "overwritten", overwritten, "y", "choices-overwritten"),
    ("weighted_sum", "other", lambda y, p, w=None: weighted_sum(y, p, None if w is None else w.roll(1, 1)), "y",
     "probabilities-of-other-choice"),
    ("weight_gradient", "other", lambda dy, y, p: weight_gradient(dy, y, p.roll(1, 1)), "dprobabilities",
     "gradient-of-other-choice"),
    ("weight_gradient", "twice", lambda dy, y, p: scaled(weight_gradient(dy, y, p), 2.0), "dprobabilities", "gain"),
    ("weighted_rows", "squared", lambda dy, rows, w: weighted_rows(dy, rows, w * w), "dfc2", "probabilities-twice"),
    ("weighted_rows", "without", lambda dy, rows, w: weighted_rows(dy, rows, torch.ones_like(w)), "dfc2",
     "probabilities-missing"),
    ("swiglu_backward", "exchanged", exchanged_gradients, "dswiglu", "swiglu-gradients-exchanged"),
    ("weighted_sum", "half of dx", lambda y, p, w=None: weighted_sum(y, p, w) if w is not None else
     weighted_sum(y, p[:, :-1]), "dx", "last-choice-left-out"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake", "wrong", "stage", "cause"),
    [pytest.param(*row, id=f"{row[0]}-{row[1]}", marks=[] if number == 6 else [pytest.mark.long])
     for number, row in enumerate(WRONG)],
)  # fmt: skip
def test_a_wrong_module_is_named(
    name: str, mistake: str, wrong: Wrong, stage: str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, name, wrong)
    record = run(case("MXFP8BlockScaling", "rows:9,3,12", tokens=12), reference.MoELayer)
    assert (record.verdict, record.stage) == ("fail", f"step 1 {stage}"), record.message
    if cause:
        assert record.explanations, mistake
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


class RowsDropped(GroupedLinear):
    """The last row of the last expert is a copy of the row before."""

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        return super().forward(torch.cat([x[:-1], x[-2:-1]]), m_splits)


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


def test_wrong_keys_have_an_error() -> None:
    with pytest.raises((CaseFileError, ValueError), match="dropped is 17; 8 tokens have 16 choices"):
        case("MXFP8BlockScaling", "even:2", "dropped:17")
    with pytest.raises((CaseFileError, ValueError), match="15 rows together; M is 16"):
        case("MXFP8BlockScaling", "rows:7,8")


def test_wrong_arguments_have_one_error() -> None:
    module = native.MoELayer(2, 32, 16)
    x, ids, weights = torch.ones(3, 32).bfloat16(), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"expert_ids has shape \(3, 2\); for x \(2, 32\) it is \(2, k\)"):
        module(x[:2], ids, weights)
    with pytest.raises(TypeError, match="probabilities"):
        module(x, ids, weights.bfloat16())
    with pytest.raises(ValueError, match="expert_ids holds 2; there are the experts 0 to 1"):
        module(x, ids + 2, weights)
