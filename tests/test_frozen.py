"""Case files, backends and calls of commit 9475e59 still mean the same: tests/frozen."""

from __future__ import annotations

import pytest

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.case_file import load
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from tests.frozen import backend
from tests.paths import ROOT

FROZEN = ROOT / "tests" / "frozen"


def test_old_case_files_give_the_ids_of_their_time() -> None:
    assert [case.id for case in load(FROZEN / "cases.toml")] == (FROZEN / "ids.txt").read_text().splitlines()


@pytest.mark.long
def test_an_old_backend_passes_and_is_asked_as_before() -> None:
    old = backend.Backend()
    loaded = Backend.local("old", old)
    verdicts = {case.id: run_case(case, loaded).verdict for case in load(FROZEN / "cases.toml")}
    assert set(verdicts.values()) == {"pass"}, verdicts
    assert old.asked == backend.ASKED


@pytest.mark.parametrize("side", [reference, native])
def test_old_calls_give_the_same_results(side: object) -> None:
    backend.calls(*(getattr(side, name) for name in ("quantize", "quantize_both", "quantize_grouped")))
