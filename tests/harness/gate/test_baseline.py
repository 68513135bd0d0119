"""Baselines: accepting and refusing runs, and reading files."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from narrowgauge.harness.gate.accept import accept
from narrowgauge.harness.gate.baseline import BaselineError, baseline_of, read, write
from narrowgauge.harness.gate.figures import figures
from narrowgauge.harness.records.journal import RecordedRun
from tests.harness.runs import GPU, product, record, run
from tests.paths import ROOT

CASES = [
    record(), record("zeros"), record("zeros", "both"), record("zeros", recipe="mxfp8-e4m3"), product(),
    product(flags="nt+bias"), product("lattice"), record("file.npz:a/b"),
    record("12x8", recipe="", operation="swizzle"),
]  # fmt: skip


def accepted(finished: RecordedRun, path: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    accept(finished, path, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def refused(finished: RecordedRun, path: Path) -> str:
    with pytest.raises(BaselineError) as error:
        accepted(finished, path)
    return str(error.value)


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "host.json"
    write(baseline_of(run(*CASES)), path)
    result = read(path)
    assert result.cases() == {one["case"]: figures(one) for one in CASES}
    assert (result.architecture, result.device, result.backend, result.seed) == ("host", "cpu", "native", 0)
    assert [one.name for one in path.parent.iterdir()] == ["host.json"]


@pytest.mark.parametrize("changed", range(len(CASES)))
def test_one_case_is_one_line_of_the_diff(changed: int, tmp_path: Path) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write(baseline_of(run(*CASES)), before)
    worse = CASES[changed] | {"mismatches": 3, "verdict": "fail"}
    write(baseline_of(run(*reversed([*CASES[:changed], worse, *CASES[changed + 1 :]]))), after)
    pairs = zip(before.read_text().splitlines(), after.read_text().splitlines(), strict=True)
    assert sum(a != b for a, b in pairs) == 1


def test_accepting_says_what_changes(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    assert accepted(run(*CASES), path) == f"{path}: accepted native on host, seed 0: 9 cases\n"
    assert accepted(run(*CASES), path) == f"{path}: accepted native on host, seed 0: 9 cases\n"
    changed = [record(verdict="fail", mismatches=3), *CASES[2:6], product("lattice", budget_max=0.3), record("ties")]
    assert accepted(run(*changed), path).splitlines() == [
        "worse: 1",
        "  quantize/nvfp4/64x128/bf16/normal: fail, was pass; 3 wrong elements, was 0",
        "better: 1",
        "  gemm/nvfp4/33x64x17/bf16xbf16-fp32/lattice/tn: largest fraction of the bound 2^-1, was 2^0",
        "gone: 3",
        "  quantize/nvfp4/64x128/bf16/file.npz:a/b",
        "  quantize/nvfp4/64x128/bf16/zeros",
        "  swizzle/64x128/bf16/12x8",
        "new: 1",
        "  quantize/nvfp4/64x128/bf16/ties: pass 90",
        f"{path}: accepted native on host, seed 0: 7 cases, 1 not pass, 1 worse, 1 better, 3 gone, 1 new",
    ]
    assert set(read(path).cases()) == {one["case"] for one in changed}


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (run(), ["nothing ran"]),
        (run(record(), cases=["a", record()["case"], "b"]), ["interrupted", "2 of 3 cases", "the first a", "--resume"]),
        (run(record(), shard="1/2"), ["shard 1/2", "narrowgauge merge"]),
        (run(record(budget_max=float("inf"))), ["quantize/nvfp4/64x128/bf16/normal", "budget_max is inf"]),
        (run(record(), record()), ["quantize/nvfp4/64x128/bf16/normal", "two records"]),
    ],
)
def test_a_run_that_cannot_be_accepted(finished: RecordedRun, words: list[str], tmp_path: Path) -> None:
    message = refused(finished, tmp_path / "host.json")
    assert [word for word in words if word not in message] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"device": "cuda", "environment": GPU}, "native on sm_90, seed 0"),
        ({"backend": "mine:Backend"}, "mine:Backend on host, seed 0"),
        ({"seed": 3}, "native on host, seed 3"),
    ],
)
def test_a_baseline_of_something_else_is_not_replaced(change: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    accepted(run(record()), path)
    before = path.read_bytes()
    message = refused(run(record(), **change), path)
    for word in (str(path), "native on host, seed 0", kind, "--baseline"):
        assert word in message
    assert path.read_bytes() == before


def test_a_baseline_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.mkdir()
    with pytest.raises(BaselineError) as error:
        write(baseline_of(run(record())), path)
    assert str(error.value) == f"{path}: cannot be written: Is a directory"
    assert [one.name for one in tmp_path.iterdir()] == ["host.json"]


GOOD = {
    "format": 2, "architecture": "host", "device": "cpu", "backend": "native", "seed": 0,
    "cases": {"a": {"pass 1": ["b"]}},
}  # fmt: skip


BAD: list[tuple[Any, str]] = [
    ([], "it holds list, not an object"),
    ({}, "its format is None; this narrowgauge reads 2: accept a run anew"),
    (GOOD | {"format": 3}, "its format is 3; this narrowgauge reads 2: accept a run anew"),
    (
        GOOD | {"format": 1, "device": "NVIDIA H200"},
        'its format is 1; this narrowgauge reads 2: accept a run anew, or write "format": 2 into it, and a line '
        '"architecture": "sm_90"',
    ),
    (GOOD | {"architecture": "H200"}, "architecture is 'H200'; it is host, or sm_90 and the like"),
    (
        GOOD | {"sed": 0},
        "unknown key 'sed' (did you mean 'seed'?); it can be format, architecture, device, backend, seed, cases",
    ),
    (GOOD | {"seed": True}, "seed is True, not int"),
    ({name: value for name, value in GOOD.items() if name != "device"}, "device is None, not str"),
    (GOOD | {"cases": []}, "cases is [], not dict"),
    (GOOD | {"cases": {}}, "it holds no case"),
    (GOOD | {"cases": {"a": ["pass 1"]}}, "'a' is ['pass 1'], not an object of figures"),
    (GOOD | {"cases": {"a": {"pass": ["b"]}}}, "a: 'pass' are no figures; they look like 'fail 561, wrong 12, ulp 1, "),
    (
        GOOD | {"cases": {"a": {"pass 9, exact 5+5/9": ["b"]}}},
        "a: exact 5+5 are more than the 9 outputs",
    ),
    (GOOD | {"cases": {"a": {"pass 1": "b"}}}, "a: 'pass 1' is of 'b', not of a list of how ids go on"),
    (GOOD | {"cases": {"a": {"pass 1": ["b/c"]}, "a/b": {"pass 2": ["c"]}}}, "a/b/c is there twice"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_file_that_is_no_baseline(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text(json.dumps(content))
    with pytest.raises(BaselineError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: is no baseline: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no baseline: Expecting property name"),
        (b"\xff", "is no baseline: "),
        (
            json.dumps(GOOD).replace('"seed": 0', '"seed": 0, "seed": 1').encode(),
            "is no baseline: the key 'seed' occurs twice",
        ),
    ],
)
def test_a_file_that_is_no_json(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_bytes(content)
    with pytest.raises(BaselineError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_the_committed_baselines_are_as_they_would_be_written(tmp_path: Path) -> None:
    """A merge by hand could leave a readable baseline that is not sorted."""
    paths = sorted((ROOT / "reports" / "baselines").glob("*.json"))
    assert "host.json" in [path.name for path in paths]
    for path in paths:
        assert path.stem == read(path).architecture
        write(read(path), tmp_path / path.name)
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
