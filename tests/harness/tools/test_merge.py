"""Merging: shards become their run, and incomplete or foreign shards are refused by name."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.records.journal import Journal, RecordedRun, read
from narrowgauge.harness.records.loaded_sources import LoadedSources
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.shard import Shard, digest
from narrowgauge.harness.tools.merge import MergeError, collect_failures, merge
from tests.harness import small_toml
from tests.harness.runs import record, wrong
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
FILE = small_toml.matrix(recipe=["nvfp4", "nvfp4-sr", "nvfp4-rht"], dtype="bf16")
KERNELS = """
from narrowgauge.reference import ops


class Backend:
    def quantize(self, x, recipe, *, random=None):
        q = ops.quantize(x, recipe, random=random)
        q.codes[2, 3] ^= 0x10 * (x.shape[1] == 48)
        return q
"""
TIMES = [field.name for field in fields(Record) if field.name.startswith("seconds")]


@pytest.fixture
def shared():
    """How many cases every run was told that share its false alarms."""
    return []


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, shared):
    """The current folder: a matrix, a backend that is wrong for K = 48; cases run in this process."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "small.toml").write_text(FILE)
    (tmp_path / "merge_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run_cases(cases, settings, on_record, on_loaded):
        shared.append(settings.sharing)
        backend = load_backend(settings.backend)
        for case in cases:
            on_record(run_case(case, backend, seed=settings.seed, sharing=settings.sharing).to_dict())

    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.run_cases", run_cases)
    return tmp_path


def narrowgauge(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def run(directory, *arguments, backend="reference"):
    return narrowgauge("run", "--backend", backend, "--report-dir", directory, *arguments)


def without_times(records):
    records = [{key: value for key, value in record.items() if key not in TIMES} for record in records]
    return sorted(records, key=lambda record: record["case"])


@pytest.mark.long
def _without_load(environment: Mapping[str, Any]) -> dict[str, Any]:
    """An environment without the other processes of the machine, whose number changes between runs."""
    return {key: value for key, value in environment.items() if key != "busy machine"}


@pytest.mark.parametrize(
    ("backend", "status"), [pytest.param("reference", 0, marks=pytest.mark.long), ("merge_kernels:Backend", 1)]
)
def test_a_merged_run_is_the_undivided_one(folder, shared, backend, status):
    """Records, exit status, tables, and how many cases share the false alarms."""
    assert run("whole", backend=backend).exit_code == status
    for number in (1, 2, 3):
        run(f"shard-{number}", "--shard", f"{number}/3", backend=backend)
    assert shared == [4, 4, 4, 4]
    result = narrowgauge("merge", "shard-3", "shard-1", "shard-2", "--report-dir", "merged")
    assert result.exit_code == status, result.output
    assert re.search(r"6 cases of 3 shards in .* m?s, that of the longest shard; all cases .* report: ", result.output)
    whole, merged = read(Path("whole")), read(Path("merged"))
    assert without_times(merged.records) == without_times(whole.records)
    assert (merged.shard, merged.selection, merged.missing) == (None, "", [])
    assert sorted(merged.cases) == sorted(whole.cases)
    assert _without_load(merged.environment) == _without_load(whole.environment)
    tables = [pd.read_parquet(f"{name}/records.parquet").drop(columns=list(TIMES)) for name in ("whole", "merged")]
    pd.testing.assert_frame_equal(*tables)
    assert (folder / "merged" / "summary.md").exists()


CASES = [record(f"case {n}")["case"] for n in range(6)]


def shard(directory, number, count=2, *, cases=None, missing=0, **changes):
    """The journal of a shard of `CASES`, without its last records."""
    cases = CASES[number - 1 :: count] if cases is None else cases
    header = RecordedRun(
        "native", "cpu", 0, cases, {"platform": f"node{number}", "commit": "abc1234", "kernel sources": "0011"},
        {"kernels": "0011"}, f"{number}/{count}", digest(CASES),
    )  # fmt: skip
    run = replace(header, **changes)
    journal = Journal(Path(directory), lambda: run, clock=lambda: run.elapsed)
    journal.sources = LoadedSources(run.loaded, run.unverified)
    for case in [*cases[: len(cases) - missing]]:
        journal.add(record(case.rpartition("/")[2]))
    journal.close()
    return Path(directory)


def test_a_merged_run_took_as_long_as_its_longest_shard(folder):
    """Shards run at the same time; the journal has the time of the longest."""
    folders = [shard("a", 1, elapsed=4.0), shard("b", 2, elapsed=30.0)]
    assert [read(path).elapsed for path in folders] == [4.0, 30.0]
    result = merge(folders)
    assert result.elapsed == 30.0
    assert read(collect_failures(result, folders, Path("out")) and Path("out")).elapsed == 30.0


def environment(**changes):
    return {"platform": "node2", "commit": "abc1234", "kernel sources": "0011"} | changes


def two(**changes):
    """Two shards of a run, the second with these changes."""
    return lambda: [shard("a", 1), shard("b", 2, **changes)]


SANITIZED = {"sanitize": True, "environment": environment(**{"kernel flags": "-fsanitize=address"})}
REFUSED = {
    "missing": (lambda: [shard("a", 1, 4), shard("b", 3, 4)], ["missing: 2/4, 4/4"]),
    "many missing": (lambda: [shard("a", 1, 9)], ["8 of 9", "6/9 and 3 more"]),
    "twice": (lambda: [shard("a", 1), shard("b", 2), shard("c", 2)], ["2/2 is given twice: b and c"]),
    "counts": (lambda: [shard("a", 1), shard("b", 2, 3)], ["a is one of 2", "b is one of 3"]),
    "whole": (lambda: [shard("a", 1, shard=None)], ["a: is a whole run"]),
    "backend": (two(backend="mine:B"), ["backend is native in a, mine:B in b"]),
    "device": (two(device="cuda"), ["device is cpu in a, cuda in b"]),
    "seed": (two(seed=7), ["seed is 0 in a, 7 in b"]),
    "schedules": (two(schedules=8), ["--schedules is 1 in a, 8 in b"]),
    "sanitize": (two(**SANITIZED), ["--sanitize is False in a, True in b"]),
    "commit": (two(environment=environment(commit="def")), ["commit is abc1234 in a, def in b"]),
    "kernels": (two(environment=environment(**{"kernel sources": "0012"})), ["kernel sources is 0011 in a, 0012"]),
    "GPU": (two(environment=environment(GPU="B200")), ["GPU is None in a, B200 in b"]),
    "sources": (two(sources={"kernels": "0012"}), ["source of kernels", "a and b"]),
    "loaded": (
        lambda: [shard("a", 1, loaded={"file k.py": "0011"}), shard("b", 2, loaded={"file k.py": "0012"})],
        ["file k.py is not the same in a and b"],
    ),
    "selection": (two(selection="00"), ["a and b select different cases", "same case files, tier and keywords"]),
    "overlap": (two(cases=[*CASES[1::2], CASES[4]]), ["case 4 is in a and in b", "same --durations"]),
    "gap": (two(cases=CASES[3::2]), ["in none of the 2 shards", "same --durations"]),
    "interrupted": (two(missing=2), ["b: shard 2/2", "2 of 3 cases", "case 3, quantize", "--resume"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shards_of_different_runs_are_refused(folder, name):
    shards, words = REFUSED[name]
    with pytest.raises(MergeError) as error:
        merge(shards())
    assert [word for word in words if word not in str(error.value)] == []


SHARD = "narrowgauge run --backend k:B --shard 1/2 -k 'a b' --report-dir=a --durations old -n 2"


def test_a_merged_run_has_the_loaded_sources_of_all_shards(folder):
    first = shard("a", 1, loaded={"file k.py": "0011"}, unverified={"k.cu": "why"}, command=SHARD)
    second = shard("b", 2, loaded={"file k.py": "0011", "file lazy.py": "0022"})
    merged = read(collect_failures(merge([first, second]), [first, second], Path("out")) and Path("out"))
    assert merged.loaded == {"file k.py": "0011", "file lazy.py": "0022"}
    assert merged.unverified == {"k.cu": "why"}
    assert merged.command == "narrowgauge run --backend k:B -k 'a b' -n 2"


def test_a_refusal_writes_nothing_and_has_status_2(folder):
    shard("a", 1)
    result = narrowgauge("merge", "a", "--report-dir", "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "narrowgauge: 1 of 2 shards are missing: 2/2\n"
    assert not Path("out").exists()
    assert narrowgauge("merge", "none").stderr.startswith("narrowgauge: none: there is no none")


def test_saved_failures_come_along(folder):
    """From the present place of the shards; missing files are reported."""
    folders = [shard("a", 1), shard("b", 2)]
    (folder / "b" / "failures").mkdir()
    (folder / "b" / "failures" / "one.safetensors").write_bytes(b"inputs")
    run = merge(folders)
    there, lost, *_ = records = run.records
    there |= wrong("case 0") | {"saved": "/elsewhere/reports/shard-2/failures/one.safetensors", "save_note": ""}
    lost |= wrong("case 1") | {"saved": "reports/shard-1/failures/two.safetensors", "save_note": "not shrunk: a reason"}
    merged = read(collect_failures(replace(run, records=records), folders, Path("out")) and Path("out"))
    first, second, third, *_ = merged.records
    assert (first["saved"], first["save_note"]) == ("out/failures/one.safetensors", "")
    assert (folder / "out/failures/one.safetensors").read_bytes() == b"inputs"
    arguments = "not shrunk: a reason; not with its shard: reports/shard-1/failures/two.safetensors"
    assert (second["saved"], second["save_note"]) == ("", arguments)
    assert third["saved"] == ""


def test_a_shard_is_not_replaced_by_the_report(folder):
    folders = [shard("a", 1), shard("b", 2)]
    before = (folder / "b" / "records.jsonl").read_bytes()
    for given in (folders, [path / "records.jsonl" for path in folders]):
        with pytest.raises(MergeError, match=r"--report-dir is a/\.\./b, which is a shard's: it would be replaced"):
            collect_failures(merge(given), given, Path("a/../b"))
    assert (folder / "b" / "records.jsonl").read_bytes() == before


def commands(text):
    """The lines of narrowgauge in a file, with a word in place of variables of a shell or a workflow."""
    text = re.sub(r"\$\{\{.*?\}\}", "1", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    result = [match[1] for line in lines if (match := re.search(r"(?:^|run: |\s)(narrowgauge .*)", line))]
    for old, new in (("${RESUME:-}", ""), ("$count", "4"), ("$shard", "1")):
        result = [line.partition("||")[0].replace(old, new) for line in result]
    return [shlex.split(line)[1:] for line in result]


@pytest.mark.parametrize(("name", "count"), [("ci-matrix.yml", 3), ("slurm-array.sh", 3)])
def test_the_commands_of_the_documentation_are_known(name, count):
    """Every command and option exists, and its value is valid."""
    result = commands((EXAMPLES / name).read_text(encoding="utf-8"))
    assert [arguments[0] for arguments in result].count("run") == 1
    assert len(result) == count
    for arguments in result:
        command = get_command(app).commands[arguments[0]]
        command.make_context(arguments[0], arguments[1:])
        if arguments[0] == "run":
            Shard.parse(arguments[arguments.index("--shard") + 1])
