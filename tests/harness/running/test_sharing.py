"""The false alarms of a run are shared: every way to run cases tells each case how many cases share."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.statistics import rounding_tests
from narrowgauge.harness.checks.statistics.holm import FALSE_ALARM
from narrowgauge.harness.hosts.frames import Connection, pair
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running import pool, runner
from narrowgauge.harness.running.pool import Settings, Task, run_tasks
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import Worker, serve
from narrowgauge.reference import ops as reference

pytest_plugins = ["pytester"]

NVFP4 = case_from_labels("quantize", "nvfp4-sr", (96, 128), "fp32", "normal")


def test_a_case_of_many_needs_a_smaller_p_value(monkeypatch):
    """Bytes 1 too high, over few draws: the p-value fails a single case, and not a case among a million."""
    monkeypatch.setattr(rounding_tests, "DRAWS", 600_000)

    def quantize(x, recipe, *, random, **options):
        own = torch.randint(0, 256, tuple(x.shape), dtype=torch.int32)
        words = (own + 1).clamp(max=255).to(torch.uint8).view(torch.int32)
        return reference.quantize(x, recipe, random=words, **options)

    biased = Backend.local("biased", SimpleNamespace(quantize=quantize, declares={"random": "own"}))
    alone, shared = (run_case(NVFP4, biased, sharing=sharing) for sharing in (1, 10**6))
    assert alone.p_value == shared.p_value
    assert FALSE_ALARM / 10**6 < alone.p_value < FALSE_ALARM
    assert (alone.verdict, shared.verdict) == ("fail", "pass")


def test_a_run_counts_its_tasks(monkeypatch):
    """Of three cases and two seeds, the cases with stochastic rounding or a rotation: four times."""
    found = []

    class Refusing(Exception):
        pass

    def worker(settings, gpu, on_loaded):
        found.append(settings.sharing)
        raise Refusing

    monkeypatch.setattr(pool, "Worker", worker)
    cases = [NVFP4, replace(NVFP4, recipe="nvfp4"), replace(NVFP4, recipe="nvfp4-2d-rht")]
    with pytest.raises(Refusing):
        run_tasks((Task(case, seed) for seed in (0, 1) for case in cases), Settings(), print)
    assert found == [4]


@pytest.mark.parametrize(("shared", "expected"), [(0, 17), (9, 9)])
def test_a_judge_tells_its_cases(monkeypatch, shared, expected):
    """The number of the message counts, and without it the number of the settings."""
    ours, theirs = map(Connection, pair())
    given = []

    def judged(case, backend, *, sharing, **options):
        given.append((case, sharing))
        return new_record(case, backend="reference", device="cpu", seed=options["seed"])

    settings = Settings("reference", sharing=17)
    worker = Worker.__new__(Worker)
    worker.settings, worker.connection = settings, ours
    worker.give(Task(NVFP4, 3), sharing=shared)
    ours.send({"end": True})
    host = SimpleNamespace(process=1, room=lambda: 1, close=lambda: None, orphaned=False, loaded=[], loading=0.0)
    monkeypatch.setattr("narrowgauge.harness.running.worker.kernel_host", lambda settings, hosts: host)
    monkeypatch.setattr("narrowgauge.harness.backends.backend.Backend", lambda host: host)
    monkeypatch.setattr(runner, "run_case", judged)
    serve(theirs, None, None, settings)
    assert given == [(NVFP4, expected)]
    assert ours.receive()[0] == {"room": 1, "loaded": [], "pid": os.getpid()}
    assert ours.receive()[0]["record"]["seed"] == 3
    for end in (ours, theirs):
        end.close()
