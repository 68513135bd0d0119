"""What a process keeps of a GPU between cases."""

from __future__ import annotations

import torch

from harness import runner
from harness.backend import load_backend
from harness.case import Case
from tests.native.gpu import DEVICE, needs_gpu

CASE = Case("quantize", "nvfp4", (4, 16), "bf16", "normal")


@needs_gpu
def test_what_a_large_case_left_is_free_before_the_next() -> None:
    backend = load_backend("reference", DEVICE)
    large = torch.empty(2 * runner.KEPT, dtype=torch.uint8, device=DEVICE)
    del large
    assert torch.cuda.memory_reserved() > runner.KEPT
    assert runner.run_case(CASE, backend, device=DEVICE).verdict == "pass"
    assert torch.cuda.memory_reserved() < runner.KEPT
