"""Accepting a run: it becomes the baseline, and what that changes is printed."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from narrowgauge.harness.gate.baseline import Baseline, BaselineError, of_run, read, write
from narrowgauge.harness.gate.difference import difference, print_kinds, words
from narrowgauge.harness.records.journal import Run
from narrowgauge.harness.report.text import plural


def accept(run: Run, path: Path, console: Console) -> None:
    """Make a run the baseline in a file, whole: a case that it did not select is in it no longer.

    Raises BaselineError, and changes nothing, where the run cannot be a baseline, or `path` holds one of another
    device class, backend or seed, or none at all.
    """
    fresh = of_run(run)
    old = read(path) if path.exists() else None
    if old is not None and (kind := _kind(old)) != _kind(fresh):
        raise BaselineError(
            f"{path}: is of {kind}, the run of {_kind(fresh)}; name another --baseline file, or delete this one"
        )
    accepted = fresh.cases()
    write(fresh, path)
    differs = difference(old.cases() if old else {}, accepted)
    changed = {
        "worse": [f"{case}: {words(found)}" for case, found in differs.worse.items()],
        "better": [f"{case}: {words(found)}" for case, found in differs.better.items()],
        "gone": differs.gone,
        "new": [f"{case}: {accepted[case]}" for case in differs.new] if old else [],
    }
    print_kinds(changed, console, "bold")
    short = sum(one.verdict != "pass" for one in accepted.values())
    counts = [plural(len(accepted), "case"), *([f"{short} not pass"] if short else [])]
    counts += [f"{len(lines)} {kind}" for kind, lines in changed.items() if lines]
    console.print(
        f"{path}: accepted {_kind(fresh)}: {', '.join(counts)}", markup=False, highlight=False, soft_wrap=True
    )


def _kind(baseline: Baseline) -> str:
    return f"{baseline.backend} on {baseline.device}, seed {baseline.seed}"
