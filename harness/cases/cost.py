"""Time of a case, estimated before the run. Small cases are judged on the CPU, also for a GPU."""

from __future__ import annotations

from narrowgauge.harness.cases.case import Case


def estimated_seconds(case: Case) -> float:
    """Seconds of a core to run and judge a case, if its kernels are compiled."""
    whole, element = case.seconds
    return whole + element * case.work


def home_of(case: Case, device: str) -> str:
    """Device of the inputs, the reference and the checks of a case that runs on `device`: `device` itself or the CPU.

    Judging a small case is a thousand small kernels, and only one of several processes at a time has the GPU.
    """
    return "cpu" if case.work < case.small else device
