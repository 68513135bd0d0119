"""Notes from the baseline in the records of cases that did not pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.gate.architecture import architecture
from narrowgauge.harness.gate.baseline import Baseline, BaselineError, read

FOLDER = Path("reports/baselines")


def add_baseline_notes(records: Iterable[dict[str, Any]], environment: dict[str, str], folder: Path = FOLDER) -> None:
    """Write into each record that did not pass the accepted figures of its case, from the baseline of its
    architecture, backend and seed.

    Records stay unchanged if `folder` has no such baseline. Unreadable files are skipped; the gate reports unreadable
    files.
    """

    @cache
    def baselines() -> dict[tuple[str, str, int], tuple[str, Baseline]]:
        by_kind = {}
        for path in sorted(folder.glob("*.json")):
            try:
                baseline = read(path)
            except BaselineError:
                continue
            by_kind[baseline.architecture, baseline.backend, baseline.seed] = path.name, baseline
        return by_kind

    @cache
    def accepted(device: str, backend: str, seed: int) -> tuple[str, dict[str, Any]] | None:
        baseline = baselines().get((architecture(device, environment), backend, seed))
        return baseline and (baseline[0], dict(baseline[1].cases()))

    for record in records:
        if record["verdict"] != "pass" and (entry := accepted(record["device"], record["backend"], record["seed"])):
            name, cases = entry
            figures = cases.get(record["case"])
            record["baseline"] = f"{name} has {figures} accepted" if figures else f"{name} has no such case"
