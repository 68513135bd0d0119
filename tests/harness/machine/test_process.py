"""Settings of processes that judge or run kernels."""

import pytest
import torch

from narrowgauge.harness.machine.process import prepare_process


@pytest.mark.parametrize(
    ("device", "workers", "limit", "threads"),
    [
        ("cpu", 4, "", 4), ("cpu", 32, "", 1), ("cuda", 4, "", 2), ("cuda", 8, "", 1), ("cuda", 32, "", 1),
        ("cpu", 4, "3", 3), ("cpu", 4, "9", 4), ("cuda", 4, "1", 1), ("cpu", 4, "4,2", 4),
    ],
)  # fmt: skip
def test_threads_of_a_process_are_its_share_of_the_cores(device, workers, limit, threads, monkeypatch):
    chosen = []
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    monkeypatch.setattr("narrowgauge.harness.machine.process.cores", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    prepare_process(workers, device)
    assert chosen == [threads]
