"""Tests of intervals need verdicts: a search for causes takes seconds for each wrong result."""

from __future__ import annotations

import pytest

from narrowgauge.harness.api.judging import judge_call


@pytest.fixture(autouse=True)
def verdicts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`diagnose="full"` still searches."""
    monkeypatch.setattr(judge_call, "ASSERTION", 0)
    monkeypatch.setattr(judge_call, "PER_ELEMENT", 0)
