"""Settings of processes that judge or run kernels."""

import pytest
import torch

from narrowgauge.harness.machine.process import prepare_process


@pytest.mark.parametrize(
    ("device", "workers", "threads"), [("cpu", 4, 4), ("cpu", 32, 1), ("cuda", 4, 2), ("cuda", 8, 1), ("cuda", 32, 1)]
)
def test_threads_of_a_process_are_fewer_beside_a_gpu(device, workers, threads, monkeypatch):
    chosen = []
    monkeypatch.setattr("narrowgauge.harness.machine.process.cores", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    prepare_process(workers, device)
    assert chosen == [threads]
