"""Modules: the reference passes every kind of case, and a module with a single defect fails at its stage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.case_file import CaseFileError, load
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.modules.modules import judge_module
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.records.record import Record, elements_compared
from narrowgauge.harness.records.saved_failure import SavedFailure, save
from narrowgauge.harness.records.saved_failure import load as load_saved
from narrowgauge.harness.report.text import not_compared
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.shrink import shrink
from narrowgauge.reference import modules
from narrowgauge.reference.high_precision.bounded import Bounded, exactly
from narrowgauge.reference.high_precision.norm import norm_backward
from narrowgauge.reference.modules import layer_norm_linear
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.spec.quantized import Half, Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe
from tests.harness.sample_backends import backend

SHAPE = (1, 16, 32, 32)
BUTTERFLY = {"transform": "butterfly"}
DOORS: dict[str, Any] = {
    name: getattr(modules, name) for name in ("Linear", "LayerNormLinear", "GroupedLinear", "TransformerLayer")
}


def linear(training: str = "MXFP8BlockScaling", *flags: str, shape=SHAPE, dtype="bf16", inputs="normal") -> Case:
    return case_from_labels("linear", training, shape, dtype, inputs, flags)


def grouped(training: str, *flags: str) -> Case:
    return case_from_labels("grouped-linear", training, (24, 32, 16), "bf16", "normal", flags)


def layer(training: str, *flags: str) -> Case:
    return case_from_labels("transformer-layer", training, (1, 16, 32, 48), "bf16", "normal", ("heads:2", *flags))


def run(case: Case, declares: dict[str, str] | None = None, **doors: Any) -> Record:
    return run_case(case, backend(declares=BUTTERFLY if declares is None else declares, **(doors or DOORS)))


def passes(case: Case, **options: Any) -> Record:
    record = run(case, **options)
    assert (record.verdict, record.message) == ("pass", ""), case.id
    return record


def fails(case: Case, stage: str, **doors: Any) -> Record:
    record = run(case, **doors)
    assert (record.verdict, record.stage) == ("fail", stage), (case.id, record.message)
    return record


# The reference passes, and every stage is seen.

OPERAND = ("scales", "codes")
STAGES = [
    "memory", "repeat", *(f"x.{part}" for part in OPERAND), *(f"w.{part}" for part in OPERAND), "y",
    *(f"dy.{part}" for part in OPERAND), *(f"w columnwise.{part}" for part in OPERAND), "dx",
    *(f"dy columnwise.{part}" for part in OPERAND), *(f"x columnwise.{part}" for part in OPERAND), "dw", "dbias",
]  # fmt: skip


@pytest.mark.long
def test_every_stage_of_every_step_is_judged() -> None:
    record = passes(linear("MXFP8BlockScaling", "steps:2", "bias"))
    found = [entry["stage"] for entry in record.stages]
    assert found == STAGES[:2] + [f"step {n} {stage}" for n in (1, 2) for stage in STAGES[2:]]
    assert all(entry["compared"] for entry in record.stages)
    assert not_compared([record.to_dict()]) == "Every stage of every case was compared."
    assert record.sqnr_db is None  # the figures of an error, and there is none


KINDS = [
    linear("NVFP4BlockScaling", "steps:3", "accumulate", "bias", "quantized-parameters", "delayed-wgrad"),
    linear("NVFP4BlockScaling-norht-nosr-no2d", "bias", dtype="fp16"),
    linear("Float8BlockScaling", "steps:3", "accumulate", inputs="cancelling"),
    linear("DelayedScaling-recent-history2", "steps:3", "recompute", dtype="fp32"),
    linear("Float8CurrentScaling", inputs="nan"),
    case_from_labels(
        "layernorm-linear", "NVFP4BlockScaling", SHAPE, "bf16", "outliers", ("bias", "recompute", "delayed-wgrad")
    ),
    case_from_labels("layernorm-linear", "DelayedScaling", SHAPE, "fp32", "zeros", ("rms", "steps:3")),
    grouped("NVFP4BlockScaling", "rows:7,0,17", "bias"),
    grouped("DelayedScaling-history2", "front:3", "steps:2", "accumulate", "quantized-parameters", "recompute"),
    case_from_labels("grouped-linear", "MXFP8BlockScaling", (0, 32, 16), "bf16", "normal", ("empty:3", "bias")),
    layer("NVFP4BlockScaling", "rms", "bias"),
]
SLOW = layer("DelayedScaling-history2", "steps:3", "accumulate", "delayed-wgrad", "recompute")


@pytest.mark.long
@pytest.mark.parametrize("case", [*KINDS, pytest.param(SLOW, marks=pytest.mark.long)], ids=lambda case: case.id)
def test_the_reference_passes(case: Case) -> None:
    record = passes(case)
    assert all(entry["compared"] for entry in record.stages if case.shape[0])
    assert [entry["tensor"] for entry in record.accuracy] == ["y", "dx", "dw"]


def test_a_module_runs_in_the_first_and_the_last_variation() -> None:
    entered: list[str] = []

    @contextmanager
    def entering(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    variations = {name: partial(entering, name) for name in ("forward", "reverse", "shuffled")}
    passes(linear(), **DOORS, variations=lambda device: variations)
    assert entered == ["forward", "shuffled"]


def test_accuracy_is_of_the_last_step_without_earlier_gradients() -> None:
    """8 bits cost 30 dB, 4 bits 20; of accumulated gradients only the gradient of this step is compared."""
    for training, least, most in (("MXFP8BlockScaling", 24, 40), ("NVFP4BlockScaling-norht-nosr", 12, 24)):
        record = passes(linear(training, "accumulate"))
        y, dx, _ = record.accuracy
        assert least < y["sqnr_db"] < most
        assert 0.9 < dx["cosine"] < 1
        assert y["relative_error"] == pytest.approx(10 ** (-y["sqnr_db"] / 20))
    zeros = passes(linear(inputs="zeros")).accuracy
    assert zeros[0] == {"tensor": "y", "sqnr_db": None, "relative_error": None, "cosine": None}


# A single defect each.


class Relabelled(modules.Linear):
    """A layer with operands of some kind by a recipe that differs from the reported recipe."""

    changed = "x columnwise"

    def operand(self, x: torch.Tensor, recipe: Recipe, scale: Any, **options: Any) -> Quantized:
        rule, (columnwise, random) = recipe, (options.get("half") is Half.COLUMN, options.get("random"))
        if self.changed == "x columnwise" and columnwise and recipe == find("nvfp4-rht"):
            rule = recipe.rowwise
        if self.changed == "dy" and random is not None:
            rule, options["random"] = find("nvfp4-rht"), None
        return replace(super().operand(x, rule, scale, **options), recipe=recipe if columnwise else recipe.rowwise)


find = find_recipe


class Nearest(Relabelled):
    changed = "dy"


class Dgrad(modules.Linear):
    """The product for the input's gradient takes the rowwise half of the square weight."""

    def weight_operand(self, *given: Any, half: Half = Half.ROW) -> Quantized:
        return super().weight_operand(*given)


class BiasTwice(modules.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.bias


class Stale(modules.Linear):
    """A weight that is quantized in the first step only."""

    def weight_operand(self, *given: Any, half: Half = Half.ROW) -> Quantized:
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(half, super().weight_operand(*given, half=half))


class NotRolled(modules.Linear):
    """The history is not moved, and scales are computed from it."""

    def _update(self, columns: slice, recipe: Any) -> None:
        assert self.amax_history is not None
        before, observer, self.observer = self.amax_history.clone(), self.observer, None
        super()._update(columns, recipe)
        self.observer = observer
        self.amax_history.copy_(before)
        self.observe("history", self.amax_history.clone())
        assert self.scale is not None
        self.observe("scale", self.scale.clone())


class DoubledScale(modules.Linear):
    """Updated scales are twice as large."""

    def _update(self, columns: slice, recipe: Any) -> None:
        observer, self.observer = self.observer, None
        super()._update(columns, recipe)
        self.observer = observer
        assert self.amax_history is not None
        assert self.scale is not None
        self.scale[columns] *= 2
        self.observe("history", self.amax_history.clone())
        self.observe("scale", self.scale.clone())


class NarrowMain(modules.Linear):
    """Gradients accumulate in bfloat16."""

    def _gradients(self, products: Any) -> Any:
        found = super()._gradients(products)
        for main in self.main_grads():
            main.copy_(main.bfloat16())
        return found


class Dropped(modules.Linear):
    def backward_dw(self) -> None:
        self._waiting.clear()


class Eager(modules.Linear):
    """Gradients of weights do not wait."""

    def weight_gradients(self, products: Any) -> Any:
        return self._gradients(products)

    def backward_dw(self) -> None:
        pass


class SameDraw(modules.Linear):
    """Every backward draws the bits of the first."""

    def next_random(self) -> tuple[int, int]:
        return self.seed, 0


class Forgetful(modules.Linear):
    """A second forward that quantizes by the scales updated meanwhile."""

    def present_scales(self, recipe: Any, device: Any) -> Any:
        super().present_scales(recipe, device)
        return self.scale


class ChangesInput(modules.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.detach().view(-1)[0] = 7
        return super().forward(x)


class NoisyBackward(modules.Linear):
    """Gradients that differ every time."""

    count = 0

    def weight_gradients(self, products: Any) -> Any:
        NoisyBackward.count += 1
        return [found + NoisyBackward.count for found in super().weight_gradients(products)]


class SkipsEmpty(modules.GroupedLinear):
    """Groups without a token are passed over when sections are counted, and weights are not."""

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        self.observer = None
        tokens = [rows for rows in m_splits if rows]
        return super().forward(x, tokens + [0] * (len(m_splits) - len(tokens)))


class NoGradientOfEmpty(modules.GroupedLinear):
    def weight_gradients(self, products: Any) -> Any:
        found = super().weight_gradients(products)
        return [None, *found[1:]]


WRONG = [
    ("step 1 w columnwise.scales", linear("NVFP4BlockScaling-norht-nosr-no2d"), {"Linear": Dgrad}),
    ("step 1 x columnwise.amax", linear("NVFP4BlockScaling"), {"Linear": Relabelled}),
    ("step 1 dy.codes", linear("NVFP4BlockScaling"), {"Linear": Nearest}),
    ("step 1 y", linear("MXFP8BlockScaling", "bias"), {"Linear": BiasTwice}),
    ("step 2 w.codes", linear("MXFP8BlockScaling", "steps:2"), {"Linear": Stale}),
    ("step 1 history", linear("DelayedScaling-history2"), {"Linear": NotRolled}),
    ("step 1 scale", linear("DelayedScaling-history2"), {"Linear": DoubledScale}),
    ("step 1 dw", linear("MXFP8BlockScaling", "accumulate"), {"Linear": NarrowMain}),
    ("step 1 dw", linear("MXFP8BlockScaling", "delayed-wgrad"), {"Linear": Dropped}),
    ("step 1 dw", linear("MXFP8BlockScaling", "accumulate", "delayed-wgrad"), {"Linear": Dropped}),
    ("step 1 dw", linear("MXFP8BlockScaling", "delayed-wgrad"), {"Linear": Eager}),
    ("step 2 dy.codes", linear("NVFP4BlockScaling-norht", "steps:2"), {"Linear": SameDraw}),
    ("step 1 recomputed", linear("DelayedScaling", "recompute"), {"Linear": Forgetful}),
    ("memory", linear(), {"Linear": ChangesInput}),
    ("repeat", linear(), {"Linear": NoisyBackward}),
    ("step 1 y", grouped("MXFP8BlockScaling", "front:3"), {"GroupedLinear": SkipsEmpty}),
    ("step 1 dw", grouped("MXFP8BlockScaling", "front:3"), {"GroupedLinear": NoGradientOfEmpty}),
]


SAID = {
    Dropped: "weight has no gradient",
    Eager: "weight has its gradient before backward_dw is called",
    NoGradientOfEmpty: "section 0 of 3: weight0 has no gradient",
    Forgetful: "x is not what it was in the first forward",
}


NAMED = {
    Relabelled: "rotation-missing",
    Nearest: "nearest-not-stochastic",
    BiasTwice: "bias-twice",
    Stale: "operand-of-the-step-before",
    NotRolled: "history-not-rolled",
    NarrowMain: "output-through-bf16",
    Dropped: ("gradient-missing", "outputs-zero"),
    Eager: "gradient-too-early",
    Forgetful: "recomputed-otherwise",
    ChangesInput: "changes-its-input",
    NoisyBackward: "not-repeatable",
    NoGradientOfEmpty: "gradient-missing",
}
"""The first of the explaining causes; any of several, if the options decide."""


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("stage", "case", "doors"), WRONG, ids=[next(iter(d.values())).__name__ for *_, d in WRONG])
def test_a_wrong_module_fails_at_its_stage(stage: str, case: Case, doors: dict[str, Any]) -> None:
    record = fails(case, stage, **doors)
    (wrong,) = doors.values()
    if wrong in SAID and "accumulate" not in case.flags:
        assert record.message == f"{stage}: {SAID[wrong]}"
    if wrong in NAMED:
        first = record.explanations[0]
        assert first["exact"]
        assert first["cause"] in NAMED[wrong]


def test_a_norm_with_eps_outside_the_root_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def outside(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, kind: str, eps: float) -> Bounded:
        given = x.double()
        centred = given - given.mean(1, keepdim=True)
        y = centred / (centred.square().mean(1, keepdim=True).sqrt() + eps) * gamma.double() + beta.double()
        return Bounded(y, torch.zeros_like(y))

    monkeypatch.setattr("narrowgauge.reference.modules.layer_norm_linear.norm_forward", outside)
    fails(
        case_from_labels("layernorm-linear", "MXFP8BlockScaling", SHAPE, "bf16", "normal-1e-3"), "step 1 norm", **DOORS
    )


@pytest.mark.long
def test_attention_without_its_mask_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Bounded:
        value = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        return Bounded(value, torch.zeros_like(value))

    monkeypatch.setattr("narrowgauge.reference.modules.transformer.attention_forward", unmasked)
    fails(layer("MXFP8BlockScaling"), "step 1 attention", **DOORS)


# Results that a module does not report.


class Silent(modules.Linear):
    """Reports nothing."""

    @property
    def observer(self) -> None:
        return None

    @observer.setter
    def observer(self, _: Any) -> None:
        pass


class SilentWrong(Silent, Dgrad):
    pass


class SilentNorm(modules.LayerNormLinear):
    observer = Silent.observer


def test_a_module_without_reports_is_judged_by_its_results() -> None:
    record = passes(linear("NVFP4BlockScaling", "steps:2", "bias"), Linear=Silent)
    compared = [entry["stage"] for entry in record.stages if entry["compared"]]
    ends = ("y", "dx", "dw", "dbias")
    assert compared == ["memory", "repeat", *(f"step {n} {name}" for n in (1, 2) for name in ends)]
    halves = [f"{operand}{half}" for half in ("", " columnwise") for operand in ("x", "w", "dy")]
    assert {entry["stage"] for entry in record.stages if not entry["compared"]} == set(halves)
    assert "stages not observed: linear x" in not_compared([record.to_dict()])
    fails(linear("MXFP8BlockScaling", "bias"), "step 1 dx", Linear=SilentWrong)


def test_a_half_made_of_the_other_half_is_named_without_reports() -> None:
    class Twice(Silent):
        def operand(self, x: torch.Tensor, recipe: Recipe, scale: Any, **options: Any) -> Quantized:
            if options.get("half") is Half.COLUMN:
                x = dequantize(super().operand(x, recipe, scale))
            return super().operand(x, recipe, scale, **options)

    record = fails(linear("NVFP4BlockScaling-norht-nosr-no2d"), "step 1 dx", Linear=Twice)
    assert 0 < record.sqnr_db < float("inf")  # end to end, against the reference
    assert [each["cause"] for each in record.explanations if each["exact"]] == ["quantized-twice"]


def test_free_choices_of_modules_are_not_judged_without_reports() -> None:
    """Random bits of a module's own, and of a norm in float32 the scale of the tensor: the operands are unknown."""
    drawn = passes(linear("NVFP4BlockScaling"), declares={"random": "own"}, Linear=Silent)
    behind = passes(normed("Float8CurrentScaling", "fp32"), LayerNormLinear=SilentNorm)
    assert compared(drawn) == {"y"}
    assert compared(behind) == {"dx", "dgamma", "dbeta", "dbias"}


def compared(record: Record) -> set[str]:
    return {entry["stage"].rpartition(" ")[2] for entry in record.stages if entry["compared"]} - {"memory", "repeat"}


def normed(training: str, dtype: str = "bf16") -> Case:
    return case_from_labels("layernorm-linear", training, SHAPE, dtype, "normal", ("bias",))


def test_operands_between_two_ends_are_judged_without_reports() -> None:
    """A rotation in a free order, and a norm: most operands are the same for all right modules."""
    rotated = passes(linear("NVFP4BlockScaling"), declares={}, Linear=Silent)
    behind = passes(normed("MXFP8BlockScaling"), LayerNormLinear=SilentNorm)
    assert compared(rotated) == {"y", "dx", "dw"}
    assert compared(behind) == {"y", "dx", "dw", "dgamma", "dbeta", "dbias"}


@pytest.mark.parametrize("stage", ["y", "dx", "dgamma"])
def test_a_wrong_norm_is_caught_without_reports(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherEps(SilentNorm):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **{**options, "eps": 0.5})

    def wrong(dy: torch.Tensor, x: torch.Tensor, *given: Any) -> tuple[Bounded | None, ...]:
        dx, dgamma, dbeta = norm_backward(dy, x, *given)
        of_input = (exactly(dy) * exactly(x)).sum(0)
        return (exactly(dy), dgamma, dbeta) if stage == "dx" else (dx, of_input, dbeta)

    if stage != "y":
        monkeypatch.setattr(layer_norm_linear, "norm_backward", wrong)
    record = fails(
        normed("MXFP8BlockScaling"), f"step 1 {stage}", LayerNormLinear=OtherEps if stage == "y" else SilentNorm
    )
    causes = {entry["cause"] for entry in record.explanations if entry["exact"]}
    assert ("norm-gradient-of-input" in causes) == (stage == "dgamma")


class OfFirstBackward(Silent):
    def next_random(self) -> tuple[int, int]:
        return super().next_random()[0], 0


class OffsetByOne(Silent):
    def next_random(self) -> tuple[int, int]:
        seed, offset = super().next_random()
        return seed, offset // 2


class OfOtherRecipe(Silent):
    def operand(self, x: torch.Tensor, recipe: Recipe, scale: Any, **options: Any) -> Quantized:
        return super().operand(x, find_recipe("fp8-current-e4m3"), scale, **options)


class Unrotated(Silent):
    def operand(self, x: torch.Tensor, recipe: Recipe, scale: Any, **options: Any) -> Quantized:
        if recipe.transform is None or options.get("half") is not Half.COLUMN:
            return super().operand(x, recipe, scale, **options)
        return replace(super().operand(x, replace(recipe, transform=None), scale, **options), recipe=recipe)


@pytest.mark.long
@pytest.mark.parametrize(
    ("training", "wrong", "cause"),
    [
        ("NVFP4BlockScaling-norht", OfFirstBackward, "random-bits-of-another-backward"),
        ("NVFP4BlockScaling-norht", OffsetByOne, "random-offset-grows-by-one"),
        ("NVFP4BlockScaling-nosr", Unrotated, "operand-not-rotated"),
        ("Float8CurrentScaling", OfOtherRecipe, "recipe-of-another-operand"),
    ],
)
def test_another_operand_is_named_without_reports(training: str, wrong: type, cause: str) -> None:
    record = run(linear(training, "steps:3"), Linear=wrong)
    assert record.verdict == "fail"
    assert cause in [entry["cause"] for entry in record.explanations if entry["exact"]], record.explanations


def test_nothing_to_compare_is_no_pass() -> None:
    class SilentLayer(modules.TransformerLayer):
        observer = Silent.observer

    record = run(layer("NVFP4BlockScaling"), declares={"random": "own"}, TransformerLayer=SilentLayer)
    assert record.verdict == "unsupported"
    assert record.message.startswith("the module reports no ")
    assert not elements_compared(record.to_dict())


def test_random_bits_of_its_own_are_judged_by_their_distribution() -> None:
    class Own(modules.Linear):
        def next_random(self) -> tuple[int, int]:
            return int(torch.randint(1 << 40, ())), 0

    case = linear("NVFP4BlockScaling-norht", "steps:2")
    record = passes(case, declares={**BUTTERFLY, "random": "own"}, Linear=Own)
    assert {entry["rule"] for entry in record.stages if entry["stage"].startswith("step 2 dy")} >= {"statistics"}
    assert record.draws
    fails(case, "repeat", Linear=Own)


# Invalid results, and missing results.


def test_results_that_are_none_are_errors() -> None:
    class Wide(modules.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()

    class Both(modules.Linear):
        def weight_gradients(self, products: Any) -> Any:
            super().weight_gradients(products)
            return [product(self.dtype, None) for product in products]

    class Renamed(modules.Linear):
        def named_parameters(self, *given: Any, **options: Any) -> Any:
            return ((f"my_{name}", value) for name, value in super().named_parameters(*given, **options))

    class Refuses(modules.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("no kernel for this")

    class Raises(modules.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("this is odd")

    class Reports(modules.Linear):
        def observe(self, name: str, value: Any) -> None:
            super().observe(name, 7 if name == "x" else value)

    shape = "of shape (1, 16, 32)"
    for wrong, verdict, words in (
        (Wide, "error", f"Linear gave y as float32 {shape}, not bfloat16 {shape}"),
        (Both, "error", "Linear gave weight.grad, though it accumulates into main_grad"),
        (Renamed, "error", "Linear has no parameter weight; it has my_weight, my_bias"),
        (Refuses, "unsupported", "no kernel for this"),
        (Raises, "error", "forward of Linear raised ValueError: this is odd (at test_modules.py:"),
        (Reports, "error", "the reported x gave int; it gives codes, scales and amax"),
    ):
        record = run(linear("MXFP8BlockScaling", "accumulate", "bias"), Linear=wrong)
        assert (record.verdict, record.message[: len(words)]) == (verdict, words)


def test_a_failure_is_saved_whole_and_not_shrunk(tmp_path: Any) -> None:
    case = linear("MXFP8BlockScaling", "bias")
    given, wrong = make_inputs(case), backend(Linear=BiasTwice)
    outcome = judge_module(case, given, wrong)
    assert shrink(case, given, outcome, wrong) is None
    path = tmp_path / "failure.safetensors"
    save(path, SavedFailure(case.id, case, given, 0, "wrong", "step 1 y"), outcome)
    found = load_saved(path)
    assert found.case == case
    assert torch.equal(found.inputs.x, given.x)
    assert found.inputs.under("given.").keys() == given.under("given.").keys()
    assert all(torch.equal(found.inputs[f"given.{name}"], tensor) for name, tensor in given.under("given.").items())


# Inputs, saving and case files.


TABLE = {
    "operation": "'linear'", "tier": "'quick'", "training": "'NVFP4BlockScaling'", "shape": "[1, 16, 32, 48]",
    "dtype": "'bf16'", "inputs": "'normal'",
}  # fmt: skip


GROUPED = TABLE | {"operation": "'grouped-linear'", "shape": "[16, 32, 48]", "sections": "'front:2'"}


LAYER = TABLE | {"operation": "'transformer-layer'", "heads": "4"}


MISTAKES = [
    (TABLE | {"training": "'NVFP4BlockScalign'"}, "training is 'NVFP4BlockScalign': no training recipe"),
    (TABLE | {"training": "4"}, "training is 4, not a training recipe's name"),
    (TABLE | {"recipe": "'nvfp4'"}, "unknown key 'recipe' (did you mean 'recompute'?)"),
    (TABLE | {"norm": "'rms'"}, "unknown key 'norm'"),
    (TABLE | {"shape": "[16, 32, 48]"}, "shape is [16, 32, 48]; a shape is [B, S, K, N], 4 sizes that are not "),
    (TABLE | {"shape": "[1, 0, 32, 48]"}, "shape is [1, 0, 32, 48]; but for the rows of a grouped-linear, which may be "
     "0, a module has no empty side"),
    (TABLE | {"dtype": "'fp32'"}, "recipe nvfp4-rht rotates bf16 alone, not fp32"),
    (TABLE | {"shape": "[1, 17, 32, 48]"}, "recipe nvfp4-rht rotates whole groups of 16; B·S = 17 is no multiple of "),
    (TABLE | {"steps": "0"}, "steps is 0; there can be 1 to 16 steps"),
    (TABLE | {"steps": "true"}, "steps is True; there can be 1 to 16 steps"),
    (TABLE | {"inputs": "'spread'"}, "inputs is 'spread'"),
    (TABLE | {"quantized-parameters": "true"}, "quantized-parameters have no high-precision weight that could hold a "
     "gradient: accumulate can be true"),
    (TABLE | {"use": "'frozen'"}, "use is 'frozen' (did you mean "),
    (TABLE | {"use": "'pending'"}, "use is 'pending', which needs a second step: steps can be 2"),
    (TABLE | {"use": "'frozen-weight'", "accumulate": "true", "quantized-parameters": "true"}, "quantized-parameters "
     "have no weight whose requires_grad could be false: use can be 'frozen-input'"),
    (TABLE | {"use": "'no-grad'", "accumulate": "true", "quantized-parameters": "true", "training": "'DelayedScaling'"},
     "use is 'no-grad', in which a quantized weight takes part in two forwards, and nothing says if its amax counts "
     "twice under delayed scaling: quantized-parameters can be false"),
    (LAYER | {"heads": "3"}, "hidden = 32 is no multiple of heads = 3"),
    ({k: v for k, v in LAYER.items() if k != "heads"}, "heads is missing; a transformer-layer needs training, shape, "),
    (LAYER | {"norm": "'RMS'"}, "norm is 'RMS'"),
    (GROUPED | {"sections": "'even:3'"}, "sections is 'even:3'; M = 16 is no multiple of 3"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_mistakes_in_case_files(tmp_path: Any, table: dict[str, str], message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[[matrix]]\n" + "\n".join(f"{key} = {value}" for key, value in table.items()), encoding="utf-8")
    with pytest.raises(CaseFileError, match=re.escape(f"{path}: [[matrix]] 1: {message}")):
        load(path)
