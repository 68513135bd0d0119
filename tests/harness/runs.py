"""Finished runs for the tests of the harness: records, their journal, and their folder."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.harness.records.environment import source_hashes
from narrowgauge.harness.records.journal import Journal, RecordedRun
from narrowgauge.harness.records.loaded_sources import LoadedSources
from narrowgauge.harness.records.record import Record

GPU = {"GPU": "NVIDIA H200, compute capability 9.0"}


def record(inputs: str = "normal", flags: str = "", **changes: Any) -> dict[str, Any]:
    """The record of a passed quantize; `changes` are columns of it."""
    names = {"operation": "quantize", "recipe": "nvfp4", "shape": "64x128", "dtype": "bf16", **changes}
    parts = [*(names.pop(key) for key in ("operation", "recipe", "shape", "dtype")), inputs]
    case = "/".join(part for part in [*parts, flags] if part)
    given: dict[str, Any] = {
        "file": "cases/a.toml", "tier": "quick", "backend": "native", "device": "cpu", "seed": 0, "compared": 100,
        "stages": [stage("codes", "exact", 90), stage("memory", "guard", 10)], "seconds": 0.5, "input_digest": "11" * 8,
        "output_digest": "22" * 8, "sqnr_db": float("inf"), **names,
    }  # fmt: skip
    return Record(case, given.pop("file"), *parts[:4], inputs=inputs, flags=flags, **given).to_dict()


def product(inputs: str = "normal", flags: str = "tn", **changes: Any) -> dict[str, Any]:
    """The record of a passed gemm with 561 outputs."""
    given = {
        "operation": "gemm", "shape": "33x64x17", "dtype": "bf16xbf16-fp32", "compared": 561,
        "stages": [stage("output", "bound", 561)], "exact_share": 400 / 561, "ordered_share": 0.0, "budget_max": 0.75,
        "budget_p99": 0.5, "budget_histogram": [500, *[0] * 6, 61, *[0] * 3], "interval_ulps_max": 9,
        "interval_ulps_mean": 2.5,
    }  # fmt: skip
    return record(inputs, flags, **{**given, **changes})


def wrong(inputs: str = "normal", count: int = 1, **changes: Any) -> dict[str, Any]:
    """The record of a quantize with `count` wrong codes."""
    sentence = f"{count} of 90 codes wrong"
    stages = [stage("codes", "exact", 90, mismatches=count, sentence=sentence), stage("memory", "guard", 10)]
    failed = {"verdict": "fail", "stage": "codes", "message": f"codes: {sentence}", "mismatches": count}
    return record(inputs, **{**failed, "stages": stages, **changes})


def stage(name: str, recipe: str, compared: int, **changes: Any) -> dict[str, Any]:
    """The entry of a stage in a record."""
    right = {"mismatches": 0, "max_ulp": None, "excused": 0, "unbounded": None, "sentence": ""}
    return {"stage": name, "rule": recipe, "compared": compared, **right, **changes}


def run(*records: dict[str, Any], **changes: Any) -> RecordedRun:
    """A complete run of these records on the host; `changes` are fields of it."""
    given: dict[str, Any] = {
        "backend": "native", "device": "cpu", "seed": 0, "cases": [one["case"] for one in records],
        "environment": {"commit": "abc"}, "sources": _sources(), "records": list(records),
    }  # fmt: skip
    return RecordedRun(**{**given, **changes})


@cache
def _sources() -> dict[str, str]:
    return source_hashes("native")


def saved(folder: Path, finished: RecordedRun) -> Path:
    """The folder of a run's report, with its journal."""
    journal = Journal(folder, lambda: finished)
    journal.sources = LoadedSources(dict(finished.loaded), dict(finished.unverified))
    for one in finished.records:
        journal.add(one)
    journal.close()
    return folder
