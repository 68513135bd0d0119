"""Accepting a run as the baseline, and printing what changes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from narrowgauge.harness.gate.baseline import Baseline, BaselineError, baseline_of, read, write
from narrowgauge.harness.gate.difference import changes_text, difference, print_kinds
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.report.text import plural


def accept(run: RecordedRun, path: Path, console: Console) -> None:
    """Write a run as the baseline in `path`. The file is replaced: cases outside of the run are removed from it.

    Raises BaselineError, and changes nothing, if the run cannot be a baseline, or if `path` holds a baseline of another
    architecture, backend or seed, or no baseline.
    """
    fresh = baseline_of(run)
    old = read(path) if path.exists() else None
    if old is not None and (kind := _kind(old)) != _kind(fresh):
        raise BaselineError(
            f"{path}: is of {kind}, the run of {_kind(fresh)}; name another --baseline file, or delete this one"
        )
    accepted = fresh.cases()
    write(fresh, path)
    differs = difference(old.cases() if old else {}, accepted)
    changed = {
        "worse": [f"{case}: {changes_text(changes)}" for case, changes in differs.worse.items()],
        "better": [f"{case}: {changes_text(changes)}" for case, changes in differs.better.items()],
        "gone": differs.removed,
        "new": [f"{case}: {accepted[case]}" for case in differs.new] if old else [],
    }
    known = old.rules if old else {}
    changed["another rule"] = [
        f"{name}: {known[name]} → {digest}" for name, digest in fresh.rules.items() if known.get(name, digest) != digest
    ]
    print_kinds(changed, console, "bold")
    not_passed = sum(figures.verdict != "pass" for figures in accepted.values())
    counts = [plural(len(accepted), "case"), *([f"{not_passed} not pass"] if not_passed else [])]
    counts += [f"{len(lines)} {kind}" for kind, lines in changed.items() if lines]
    console.print(
        f"{path}: accepted {_kind(fresh)}: {', '.join(counts)}", markup=False, highlight=False, soft_wrap=True
    )


def _kind(baseline: Baseline) -> str:
    return f"{baseline.backend} on {baseline.architecture}, seed {baseline.seed}"
