"""A run that is ended by signals at random times goes on with --resume: every case has one record in the end."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowgauge.harness.hosts.starter import children
from narrowgauge.harness.machine.process import adopt_orphans
from narrowgauge.harness.records.journal import JOURNAL_NAME, read
from tests.harness import small_toml
from tests.harness.hosts.test_attacks import descendants
from tests.paths import ROOT

KERNELS = """
import time

from narrowgauge.reference import ops


class Slow:
    def quantize(self, x, recipe):
        time.sleep(0.1)
        return ops.quantize(x, recipe)
"""
SHAPES = [(16, 16 * (n + 1)) for n in range(150)]
SIGNALS = 30


def wait(process: subprocess.Popen[str], journal: Path, chance: random.Random) -> None:
    """Wait for a random time from the start of a run or, in two of three runs, from its next record."""
    written, until = journal.stat().st_size if journal.exists() else 0, time.monotonic() + 60
    if chance.random() < 0.33:
        time.sleep(chance.uniform(0.1, 8))
        return
    while process.poll() is None and time.monotonic() < until:
        if journal.exists() and journal.stat().st_size > written:
            break
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 1.5))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_case_has_one_record_after_many_signals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    (tmp_path / "slow_kernels.py").write_text(KERNELS)
    (tmp_path / "small.toml").write_text(small_toml.matrix(shape=SHAPES, dtype="bf16"))
    adopt_orphans()
    before = descendants()
    chance = random.Random(23)
    done: list[str] = []
    journal = tmp_path / "reports" / "latest" / JOURNAL_NAME
    words = [sys.executable, "-m", "narrowgauge", "run", "small.toml", "--backend", "slow_kernels:Slow", "-n", "2"]
    for number in range(SIGNALS):
        resumed = ["--resume"] if journal.exists() else []
        process = subprocess.Popen(
            [*words, *resumed], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        wait(process, journal, chance)
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
        output = process.communicate(timeout=60)[0]
        assert process.returncode != 2, output
        until = time.monotonic() + 20
        while descendants() - before and time.monotonic() < until:
            time.sleep(0.05)
        assert descendants() - before == set(), f"after signal {number}: {output}"
        if resumed:
            cases = [record["case"] for record in read(tmp_path / "reports" / "latest").records]
            assert cases[: len(done)] == done
            done = cases
    last = subprocess.run([*words, "--resume"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stdout + last.stderr
    run = read(tmp_path / "reports" / "latest")
    assert run.missing == []
    assert len({record["case"] for record in run.records}) == len(run.records) == len(SHAPES)
    assert {record["verdict"] for record in run.records} == {"pass"}
    assert not [pid for pid in children(1) if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text()]
