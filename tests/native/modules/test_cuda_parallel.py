"""Tensors in shards on two GPUs, over NCCL: what `tests/test_parallel.py` asks of processes on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.native.gpu import MISSING, needs_gpu
from tests.processes import run
from tests.test_parallel import assert_sharded

GPUS = 0 if MISSING is not None else torch.cuda.device_count()

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"a group over NCCL needs two GPUs; torch sees {GPUS}"),
]


def test_shards_are_quantized_as_parts_of_the_whole(tmp_path: Path) -> None:
    (found,) = run(tmp_path, [2], "nccl")
    assert not found[0]["missing"]
    assert_sharded(found)
