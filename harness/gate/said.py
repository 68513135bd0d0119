"""What an accepted baseline says of the cases that did not pass."""

from __future__ import annotations

from pathlib import Path

from harness.gate.baseline import BaselineError, read
from harness.gate.device import device_class
from harness.journal import Run

FOLDER = Path("reports/baselines")


def say_baseline(run: Run, folder: Path = FOLDER) -> None:
    """Note in each record of `run` that is no pass what the baseline of its device, backend and seed says of the case.

    Nothing where `folder` has no such baseline, or a file that is none: what is wrong with that the gate says.
    """
    bad = [record for record in run.records if record["verdict"] != "pass"]
    if not bad:
        return
    for path in sorted(folder.glob("*.json")):
        try:
            baseline = read(path)
        except BaselineError:
            continue
        if (baseline.device, baseline.backend, baseline.seed) != (device_class(run), run.backend, run.seed):
            continue
        accepted = baseline.cases()
        for record in bad:
            known = accepted.get(record["case"])
            record["baseline"] = f"{path.name} accepted {known}" if known else f"{path.name} has no such case"
        return
