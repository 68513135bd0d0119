"""Uses of modules in a training: right modules of several designs pass, and wrong modules fail with their cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.module_driver import Plan
from narrowgauge.harness.cases.layers import Layer
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import modules, ops
from narrowgauge.spec.modules.autocast import current
from narrowgauge.spec.modules.training import training_recipe
from narrowgauge.spec.quantized import Half
from tests.harness.sample_backends import backend

SHAPE = (1, 16, 32, 32)
USES = (
    "unobserved",
    "no-grad",
    "frozen-weight",
    "frozen-input",
    "reloaded",
    "pending",
    "pending-reversed",
    "rewritten",
    "microbatches",
)


def record_of(linear: Any, use: str, *flags: str, training: str = "MXFP8BlockScaling") -> Record:
    flags = ("steps:2", "bias", *flags, use)
    case = case_from_labels("linear", training, SHAPE, "bf16", "normal", flags)
    return run_case(case, backend(declares={"transform": "butterfly"}, Linear=linear))


# Two forwards in one autocast.


class KeepsLastAmax(modules.Linear):
    """A history that keeps the last amax of an autocast, not the largest."""

    def record(self, column: int, amax: Any) -> None:
        history, _ = self.delayed_state()
        history[0, column] = amax.max()


class UpdatesEveryForward(modules.Linear):
    """Scales that move after every forward, not at the end of the autocast."""

    def record_forward(self, recipe: Any, amaxes: Any) -> None:
        super().record_forward(recipe, amaxes)
        super()._end_forward()

    def _end_forward(self) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("wrong", "stage"), [(KeepsLastAmax, "step 1 history"), (UpdatesEveryForward, "step 2 x.tensor scale")]
)
def test_two_forwards_in_one_autocast(wrong: Any, stage: str) -> None:
    training = "DelayedScaling-history2"
    for use in ("pending", "frozen-weight"):
        assert record_of(wrong, use, training=training).verdict == "pass"
    record = record_of(wrong, "microbatches", training=training)
    assert (record.verdict, record.stage) == ("fail", stage)
    assert "use:microbatches" in [entry["cause"] for entry in record.explanations]
    assert record_of(modules.Linear, "microbatches", training=training).verdict == "pass"


# Right modules.


class CachesByVersion(modules.Linear):
    """Quantizes the weight again if its version counter has changed."""

    def weight_operand(self, weight: torch.Tensor, *given: Any, half: Half = Half.ROW) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        version, q = kept.get(half, (None, None))
        if version != weight._version:
            q = super().weight_operand(weight, *given, half=half)
            kept[half] = weight._version, q
        return q


class SavesCodes(torch.nn.Module):
    """Quantizes x once, in the forward, and saves the codes of its columnwise half. Reports every operand."""

    def __init__(
        self, inner: int, outer: int, bias: bool = True, *, accumulate: bool = False, delay_wgrad: bool = False
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outer, inner, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.zeros(outer, dtype=torch.bfloat16))
        self.accumulate, self.late, self.observer, self.delayed = accumulate, delay_wgrad, None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Saved.apply(self, current(), x, self.weight, self.bias)

    def report(self, **values: Any) -> None:
        for name, value in values.items():
            if self.observer is not None and value is not None:
                self.observer(name.replace("_", " "), value)

    def weight_gradient(self, dy: Any, x: Any) -> torch.Tensor | None:
        main = self.weight.main_grad if self.accumulate else None
        dw = ops.gemm(dy, x, out_dtype=torch.float32 if self.accumulate else torch.bfloat16, c=main)
        if main is not None:
            main.copy_(dw)
        self.report(dw=dw)
        return None if self.accumulate else dw

    def backward_dw(self) -> None:
        for operands in self.delayed:
            dw = self.weight_gradient(*operands)
            if dw is not None:
                self.weight.grad = dw if self.weight.grad is None else self.weight.grad + dw
        self.delayed.clear()


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, recipe: Any, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        rows, columns = ops.quantize_both(x.flatten(0, -2), recipe.input)
        w_rows, w_columns = ops.quantize_both(weight, recipe.weight)
        y = ops.gemm(rows, w_rows, out_dtype=torch.bfloat16, bias=bias)
        layer.report(x=rows, x_columnwise=columns, w=w_rows, w_columnwise=w_columns, y=y)
        ctx.layer, ctx.recipe, ctx.shape, ctx.operands = layer, recipe, x.shape, (columns, w_columns)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        layer, (x, w) = ctx.layer, ctx.operands
        dy = dy.flatten(0, -2)
        rows, columns = ops.quantize_both(dy, ctx.recipe.grad)
        dx, dw = ops.gemm(rows, w, out_dtype=torch.bfloat16), None
        layer.report(dy=rows, dy_columnwise=columns, dx=dx)
        if ctx.needs_input_grad[3]:
            if layer.late:
                layer.delayed.append((columns, x))
            else:
                dw = layer.weight_gradient(columns, x)
        return None, None, dx.view(ctx.shape), dw, dy.float().sum(0).bfloat16()


class NewestFirst(SavesCodes):
    """`backward_dw` computes the gradient of the newest backward first."""

    def backward_dw(self) -> None:
        self.delayed.reverse()
        super().backward_dw()


class SumsInFloat32(SavesCodes):
    """`backward_dw` adds all gradients in float32, rounds the sum once, and reports no gradient of its own."""

    def backward_dw(self) -> None:
        total = sum(ops.gemm(*operands, out_dtype=torch.float32) for operands in self.delayed)
        self.weight.grad = None if isinstance(total, int) else total.bfloat16()
        self.delayed.clear()


class Hooks(torch.nn.Module):
    """Gradients by hooks on tensors, which add to `grad` themselves. Knows no observer."""

    def __init__(self, inner: int, outer: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(outer, inner, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.zeros(outer, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recipe, rows = current(), x.detach().flatten(0, -2)
        (a, across), (b, down) = ops.quantize_both(rows, recipe.input), ops.quantize_both(self.weight, recipe.weight)
        y = ops.gemm(a, b, out_dtype=torch.bfloat16, bias=self.bias.detach()).detach().view(*x.shape[:-1], -1)
        if not torch.is_grad_enabled():
            return y
        y.requires_grad_()

        def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            if parameter.requires_grad:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        def backward(dy: torch.Tensor) -> None:
            given = dy.flatten(0, -2)
            c, d = ops.quantize_both(given, recipe.grad)
            add(self.weight, ops.gemm(d, across, out_dtype=torch.bfloat16))
            add(self.bias, given.float().sum(0).bfloat16())
            if x.requires_grad:
                add(x, ops.gemm(c, down, out_dtype=torch.bfloat16).view(x.shape))

        y.register_hook(backward)
        return y


class EvaluationsCountNot(modules.Linear):
    """A forward under no_grad leaves the history unchanged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts = torch.is_grad_enabled()
        return super().forward(x)

    def record_forward(self, *given: Any) -> None:
        if self.counts:
            super().record_forward(*given)


LATE = ("delayed-wgrad",)
RIGHT = [
    *((modules.Linear, use, ()) for use in USES),
    *((CachesByVersion, use, ()) for use in ("unobserved", "no-grad", "reloaded", "rewritten")),
    *((SavesCodes, use, ()) for use in ("unobserved", "frozen-input", "reloaded", "pending", "rewritten")),
    *((SavesCodes, use, ("accumulate",)) for use in ("frozen-weight", "pending", "pending-reversed")),
    *((NewestFirst, use, (*LATE, *more)) for use in ("pending", "pending-reversed") for more in ((), ("accumulate",))),
    *((SumsInFloat32, use, LATE) for use in ("pending", "pending-reversed", "frozen-weight")),
    *((Hooks, use, ()) for use in ("unobserved", "no-grad", "frozen-weight", "pending", "pending-reversed")),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("module", "use", "flags"), RIGHT, ids=[f"{m.__name__}-{'-'.join((u, *f))}" for m, u, f in RIGHT]
)
def test_a_right_module_passes(module: Any, use: str, flags: tuple[str, ...]) -> None:
    record = record_of(module, use, *flags)
    assert (record.verdict, record.message) == ("pass", "")
    compared = {entry["stage"] for entry in record.stages if entry["compared"]}
    assert compared >= {"step 1 y", "step 2 y", "step 2 dbias"}


def test_a_forward_without_gradients_may_move_the_history_or_not() -> None:
    for module in (modules.Linear, EvaluationsCountNot):
        record = record_of(module, "no-grad", training="DelayedScaling-history2")
        assert (record.verdict, record.message) == ("pass", "")
        compared = {entry["stage"] for entry in record.stages if entry["compared"]}
        assert compared >= {"step 1 probe y", "step 1 y", "step 2 probe y", "step 2 y", "step 2 dw"}
        assert ("step 2 history" in compared) == (module is modules.Linear)  # else the history before is unknown


# Wrong modules.


class CountsAgain(modules.Linear):
    """Begins again with the first random bits after loading."""

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._backwards = 0


class QuantizesOncePerBackward(modules.Linear):
    def weight_operand(self, weight: torch.Tensor, *given: Any, half: Half = Half.ROW) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        key = self._backwards, half
        return kept.setdefault(key, super().weight_operand(weight, *given, half=half))


class HiddenCache(QuantizesOncePerBackward):
    """Reports the fresh weight, and multiplies by the cached weight."""

    def observe(self, name: str, value: Any) -> None:
        if name == "w":
            value = ops.quantize(self.weight.detach(), value.recipe)
        super().observe(name, value)


class OneBuffer(SavesCodes):
    """The saved input of every pass is the input of the newest pass."""

    def weight_gradient(self, dy: Any, x: Any) -> Any:
        return super().weight_gradient(dy, self.newest)

    def report(self, **values: Any) -> None:
        self.newest = values.get("x_columnwise", getattr(self, "newest", None))
        super().report(**values)


class Replaces(SavesCodes):
    """`backward_dw` writes the gradient, and adds no earlier gradient."""

    def backward_dw(self) -> None:
        for operands in self.delayed:
            self.weight.grad = self.weight_gradient(*operands)
        self.delayed.clear()


class KeepsOne(SumsInFloat32):
    """The module holds a single pending gradient."""

    def backward_dw(self) -> None:
        del self.delayed[:-1]
        super().backward_dw()


class IgnoresFrozen(modules.Linear):
    """Every backward adds to the main gradient."""

    def next_random(self) -> tuple[int, int]:
        self.main_grads()[0].add_(1)
        return super().next_random()


class NeedsObserver(modules.Linear):
    def multiply(self, *given: Any) -> torch.Tensor:
        y = super().multiply(*given)
        return y if self.observer is not None else y * 1.5


WRONG = [
    (CountsAgain, "reloaded", (), "NVFP4BlockScaling-norht", "step 2 dy.codes", "use:reloaded"),
    (QuantizesOncePerBackward, "rewritten", (), "", "step 1 w.codes", "operand-of-the-forward-before"),
    (HiddenCache, "rewritten", (), "", "step 1 y", "operand-of-the-forward-before"),
    (OneBuffer, "pending", (), "", "step 1 dw", "operand-of-another-pass"),
    (Replaces, "pending", LATE, "", "step 2 sum of dw", "gradient-overwritten"),
    (KeepsOne, "pending-reversed", LATE, "", "step 1 sum of dw", "gradient-overwritten"),
    (IgnoresFrozen, "frozen-weight", ("accumulate",), "", "step 1 dw", "gradient-not-wanted"),
    (NeedsObserver, "unobserved", (), "", "step 1 y", "use:unobserved"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("module", "use", "flags", "training", "stage", "cause"), WRONG, ids=[w[0].__name__ for w in WRONG]
)
def test_a_wrong_module_fails_with_its_cause(
    module: Any, use: str, flags: tuple[str, ...], training: str, stage: str, cause: str
) -> None:
    record = record_of(module, use, *flags, training=training or "MXFP8BlockScaling")
    assert (record.verdict, record.stage) == ("fail", stage), record.message
    assert {"cause": cause, "exact": True}.items() <= record.explanations[0].items()


@pytest.mark.long
def test_a_fault_of_every_use_is_not_said_to_be_of_one() -> None:
    class Doubles(modules.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    record = record_of(Doubles, "pending")
    assert record.verdict == "fail"
    assert not any(found["cause"].startswith("use:") for found in record.explanations)


# The driver.


def test_the_driver_runs_steps_in_the_order_of_the_use() -> None:
    events: list[str] = []

    class Spying(modules.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            events.append("F" if torch.is_grad_enabled() else "f")
            return super().forward(x)

        def next_random(self) -> tuple[int, int]:
            events.append("B")
            return super().next_random()

        def load_state_dict(self, *given: Any, **options: Any) -> Any:
            events.append("L")
            return super().load_state_dict(*given, **options)

    layer = Layer("", 32, 32)
    given = {"x": torch.ones(3, 1, 16, 32).bfloat16(), "dy": torch.ones(3, 1, 16, 32).bfloat16()}
    given["weight"] = torch.eye(32).bfloat16()
    orders = {
        "plain": "FBFBFB", "no-grad": "fFBfFBfFB", "rewritten": "FFBFFBFFB", "reloaded": "FBLFBLFB",
        "pending": "FFBBFB", "pending-reversed": "FFBBFB",
    }  # fmt: skip
    for use, order in orders.items():
        events.clear()
        plan = Plan("Linear", training_recipe("MXFP8BlockScaling"), [layer], torch.bfloat16, False, steps=3, use=use)
        steps = backend(Linear=Spying).run_module(plan, given)
        assert "".join(events) == order
        assert [step.number for step in steps if not step.probe] == [0, 1, 2]
