"""What an accepted baseline says of the cases that did not pass."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.gate.baseline import Baseline, BaselineError, read
from narrowgauge.harness.gate.figures import device_class

FOLDER = Path("reports/baselines")


def say_baseline(records: Iterable[dict[str, Any]], environment: dict[str, str], folder: Path = FOLDER) -> None:
    """Note in each record that is no pass what the baseline of its device, backend and seed says of the case.

    Nothing where `folder` has no such baseline, or only a file that is none: what is wrong with that the gate says.
    """

    @cache
    def baselines() -> dict[tuple[str, str, int], tuple[str, Baseline]]:
        found = {}
        for path in sorted(folder.glob("*.json")):
            try:
                one = read(path)
            except BaselineError:
                continue
            found[one.device, one.backend, one.seed] = path.name, one
        return found

    @cache
    def accepted(device: str, backend: str, seed: int) -> tuple[str, dict[str, Any]] | None:
        found = baselines().get((device_class(device, environment), backend, seed))
        return found and (found[0], dict(found[1].cases()))

    for record in records:
        if record["verdict"] != "pass" and (found := accepted(record["device"], record["backend"], record["seed"])):
            name, cases = found
            known = cases.get(record["case"])
            record["baseline"] = f"{name} has {known} accepted" if known else f"{name} has no such case"
