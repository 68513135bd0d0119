"""Training a small transformer: every stage of every step judged, the same start for all, a process for each."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import BackendError, load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.tools.train import corpus, processes, report
from narrowgauge.harness.tools.train.model import Model, Size
from narrowgauge.harness.tools.train.processes import NOT_BEGUN, run_tasks
from narrowgauge.harness.tools.train.train import NAMED_STAGES, TrainingTask, train
from narrowgauge.reference.modules import TransformerLayer

TINY = Size(hidden=32, ffn=64, heads=2, sequence=16, batch=2)


def task(recipe: str | None, steps: int = 2, **changes: object) -> TrainingTask:
    return replace(TrainingTask(recipe, steps=steps, size=TINY), **changes)  # type: ignore[arg-type]


def model(backend: str, seed: int = 0) -> Model:
    return Model(load_backend(backend), TINY, 23, seed=seed, device=torch.device("cpu"))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["NVFP4BlockScaling", "DelayedScaling"])
def test_native_agrees_at_every_step(recipe: str) -> None:
    steps = list(train(task(recipe)))
    assert len(steps) == 2
    for step in steps:
        assert step.wrong == []
        assert step.mismatches == 0
        assert step.not_reported == []
        assert step.stages > 100
        assert step.reference_loss is not None
    assert steps[1].loss < steps[0].loss


@pytest.mark.long
def test_the_reference_agrees_with_itself_and_with_its_loss() -> None:
    (step,) = train(task("Float8CurrentScaling", 1, backend="reference"))
    assert step.wrong == []
    assert step.compared > 1000
    assert step.reference_loss == step.loss


class Drifting:
    """The reference's layers, whose output is wrong from the second step on."""

    class TransformerLayer(TransformerLayer):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            y: torch.Tensor = super().forward(x)
            return y if self.calls == 1 else y * 1.5


@pytest.mark.long
def test_a_layer_that_goes_wrong_is_named_with_its_step() -> None:
    first, second = train(task("MXFP8BlockScaling", backend="tests.harness.tools.test_train:Drifting"))
    assert first.wrong == []
    assert first.reference_loss == first.loss
    # The layer's result is judged, and not its report; the gradient goes through the same factor.
    assert second.wrong[0].startswith("layer 1, step 2 y: ")
    assert second.mismatches > len(second.wrong) == NAMED_STAGES
    assert second.reference_loss != second.loss


class Faulty:
    """The reference's layers, with a fault in the second forward."""

    @classmethod
    def TransformerLayer(cls, *sizes: int, **options: Any) -> torch.nn.Module:
        layer = Drifting.TransformerLayer(*sizes, **options)
        layer.register_forward_hook(lambda module, _, y: cls.spoil(y) if module.calls == 2 else y)
        return layer

    @staticmethod
    def spoil(y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Crashing(Faulty):
    @staticmethod
    def spoil(y: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGSEGV)
        return y


class Hanging(Faulty):
    @staticmethod
    def spoil(y: torch.Tensor) -> torch.Tensor:
        time.sleep(600)
        return y


class Cutting(Faulty):
    """Gives an output of a wrong shape."""

    @staticmethod
    def spoil(y: torch.Tensor) -> torch.Tensor:
        return y[:, :1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("Crashing", r"step 2: the process died \(signal SIGSEGV\)"),
        pytest.param("Hanging", r"step 2: no result after 8 s", marks=pytest.mark.long),
        ("Cutting", r"step 2: TransformerLayer gave y as torch.bfloat16 of shape \(2, 1, 32\), not .* \(2, 16, 32\)"),
    ],
)
def test_a_layer_that_fails_in_the_second_step_ends_its_training(fault: str, error: str) -> None:
    steps = train(task("MXFP8BlockScaling", 3, backend=f"tests.harness.tools.test_train:{fault}", timeout=8.0))
    assert next(steps).wrong == []
    with pytest.raises(BackendError, match=error):
        next(steps)


class Raising:
    """Backends whose layers do not end."""

    def TransformerLayer(self, *_: object, **options: object) -> torch.nn.Module:
        raise RuntimeError("no such size")


class Dying:
    def TransformerLayer(self, *_: object, **options: object) -> torch.nn.Module:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGSEGV)
        raise AssertionError


@pytest.mark.long
def test_a_process_that_dies_or_raises_costs_its_own_training() -> None:
    seen = []
    here = "tests.harness.tools.test_train"
    tasks = [
        task("MXFP8BlockScaling", 1, backend=f"{here}:Dying"),
        task("MXFP8BlockScaling", 1, backend=f"{here}:Raising"),
        task(None, 2, backend="reference", judged=False),
    ]
    dying, raising, fine = run_tasks(tasks, 2, seen.append)
    assert re.fullmatch(r"the process died \(signal SIGSEGV\) at .*test_train\.py:\d+ in TransformerLayer", dying.error)
    assert re.fullmatch(r"TransformerLayer raised RuntimeError: no such size \(at test_train\.py:\d+\)", raising.error)
    assert fine.complete
    assert [step.loss for step in fine.steps] == [step.loss for step in train(tasks[2])]
    assert seen == [fine, fine]
    assert fine.seconds > 0


@pytest.mark.long
def test_ended_trainings_are_kept_at_once_and_survive_a_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [task(None, steps, backend="reference", judged=False) for steps in (2, 1000, 1)]
    output, kept = io.StringIO(), []

    def write(result: list[processes.Training], *given: Any) -> Path:
        kept.append([(len(one.steps), one.error) for one in result])
        if len(kept) <= 2:  # the second time the last report is being written
            os.kill(os.getpid(), signal.SIGTERM)
        return report_write(result, *given)

    report_write = report.write
    monkeypatch.setattr(report, "write", write)
    assert not processes.run_session(tasks, tmp_path, workers=1, console=Console(file=output, width=200))
    assert kept == [[(2, ""), (0, NOT_BEGUN), (0, NOT_BEGUN)]] * 2
    first, *_ = lines = output.getvalue().splitlines()
    assert re.fullmatch(r"high precision, reference: final loss \d\.\d+, \d.*s", first)
    assert f"high precision, reference: ended after 0 of 1 step: {NOT_BEGUN}" in lines
    assert lines[-1].startswith("3 of 3 trainings did not pass, 2 of which did not take every step; ")
    with (tmp_path / "losses.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 2
    assert f"ended after 0 of 1 000 steps: {NOT_BEGUN}" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_model_looks_back_and_not_ahead() -> None:
    plain = model("reference")
    tokens = corpus.make(0).batches(1, 1, TINY.sequence, seed=0)[0][:, :-1]
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 23
    one, other = plain(tokens), plain(changed)
    assert torch.equal(one[0, :8], other[0, :8])
    assert not torch.equal(one[0, 9:], other[0, 9:])  # not by the residual alone


@pytest.mark.parametrize(
    ("message", "output"),
    [
        (["--recipe", "MXFP8Block"], "no training recipe is called 'MXFP8Block' (did you mean 'MXFP8BlockScaling'?)"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--backend", "nativ"], "no backend is called 'nativ'"),
    ],
)
def test_the_command_refuses(message: list[str], output: str) -> None:
    done = CliRunner().invoke(app, ["train", *message])
    assert done.exit_code == 2
    assert output in done.output


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("learns", "status"), [(False, 1), (True, 0)])
def test_the_command_writes_a_report(
    learns: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(
        tasks: list[TrainingTask],
        workers: int,
        on_step: Callable[[processes.Training], None],
        on_end: Callable[[processes.Training, list[processes.Training]], None],
    ) -> list[processes.Training]:
        from narrowgauge.harness.tools.train.train import TrainingStep

        result = []
        for one in tasks:
            right = (
                TrainingStep(0.5 if learns else 2.5, 0.5, 10, 100) if one.judged and one.recipe else TrainingStep(0.5)
            )
            result.append(processes.Training(one, [right] * one.steps))
            on_step(result[-1])
            on_end(result[-1], result)
        return result

    monkeypatch.setattr(processes, "run_tasks", trained)
    message = ["train", "--recipe", "MXFP8BlockScaling", "--steps", "3", "--report-dir", str(tmp_path)]
    done = CliRunner().invoke(app, message)
    assert done.exit_code == status, done.output
    assert ("4 trainings agree and learn: 30" in done.output) == learns
    assert (
        "\nMXFP8BlockScaling, native: final loss 0.5, 30 stages judged, 0 wrong, 0 s\n" in f"\n{done.output}"
        or not learns
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "losses.csv"]
