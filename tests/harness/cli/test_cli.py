"""The command line: output, refused arguments, exit status."""

import csv
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cli import app
from narrowgauge.harness.cli.selection import default_workers
from narrowgauge.harness.inputs.capture import Captured
from narrowgauge.harness.running.runner import run_case
from tests.harness import small_toml
from tests.paths import ROOT

CASES = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "nvfp4"
shape = [[16, 32], [32, 48]]
dtype = ["fp32", "bf16"]
inputs = "normal"

[[matrix]]
operation = "quantize"
tier = "full"
recipe = "nvfp4"
shape = [128, 128]
dtype = "bf16"
inputs = ["zeros", "inf"]

[[matrix]]
operation = "gemm"
tier = "quick"
recipe = "nvfp4"
shape = [16, 32, 24]
x = "bf16"
w = "bf16"
out = "fp32"
inputs = "lattice"
"""

KERNELS = """
import os

from narrowgauge.reference import ops


class Backend:
    def quantize(self, x, recipe, *, amax=None, random=None):
        if str(recipe) != "nvfp4":
            raise NotImplementedError(f"no kernel for {recipe}")
        q = ops.quantize(x, recipe)
        return q.codes, q.scales, q.amax


class Wrong(Backend):
    def quantize(self, x, recipe):
        codes, scales, amax = super().quantize(x, recipe)
        codes[2, 3] ^= 0x10
        return codes, scales, amax


class Raising:
    def quantize(self, x, recipe):
        raise RuntimeError("illegal memory access")


class Ending:
    def quantize(self, x, recipe):
        os.abort()


class Writing(Backend):
    def quantize(self, x, recipe):
        x[0, 0] = 0
        return super().quantize(x, recipe)
"""

QUICK = [
    "quantize/nvfp4/16x32/fp32/normal",
    "quantize/nvfp4/16x32/bf16/normal",
    "quantize/nvfp4/32x48/fp32/normal",
    "quantize/nvfp4/32x48/bf16/normal",
    "gemm/nvfp4/16x32x24/bf16xbf16-fp32/lattice/tn",
]
FULL = ["quantize/nvfp4/128x128/bf16/zeros", "quantize/nvfp4/128x128/bf16/inf"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder: a matrix in cases/, kernels in cli_kernels.py."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "small.toml").write_text(CASES)
    (tmp_path / "cli_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    yield tmp_path
    sys.modules.pop("cli_kernels", None)


@pytest.fixture
def one_process(monkeypatch):
    """Cases run in this process, one after the other."""

    def run_cases(cases, settings, on_record, on_loaded):
        backend = load_backend(settings.backend)
        captures = Captured.load(settings.input_path) if settings.input_path else None
        records = []
        for case in cases:
            record = run_case(case, backend, device=settings.device, seed=settings.seed, captures=captures).to_dict()
            records.append(record)
            on_record(record)
        return records

    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.run_cases", run_cases)


def narrowgauge(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def refused(*arguments):
    """The only line of a command with wrong arguments: on stderr, with exit status 2."""
    result = narrowgauge(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("narrowgauge: ").rstrip("\n")


def records(folder=Path("reports/latest")):
    with (folder / "records.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# What is imported.


def imported(*arguments):
    command = [sys.executable, "-X", "importtime", "-m", "narrowgauge", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "cases/nvfp4_gemm.toml", "-k", "1024"]])
def test_help_and_list_import_nothing_heavy(arguments):
    printed, modules = imported(*arguments)
    assert printed
    assert "narrowgauge.harness.cli" in modules
    assert not modules & {"torch", "numpy", "pandas", "pyarrow", "jinja2"}


# list


def test_list_has_more_cases_of_the_quick_tier_on_a_gpu(folder):
    (folder / "cases" / "models.toml").write_text(small_toml.matrix(tier="quick-cuda", shape=[16, 64], dtype="bf16"))
    more = ["quantize/nvfp4/16x64/bf16/normal"]
    assert narrowgauge("list").stdout.splitlines() == QUICK
    assert sorted(narrowgauge("list", "--device", "cuda").stdout.splitlines()) == sorted(QUICK + more)
    assert set(narrowgauge("list", "--tier", "full").stdout.splitlines()) == {*QUICK, *FULL, *more}


def test_a_foreign_toml_file_is_named_and_passed_over(folder):
    foreign = folder / "cases" / "settings.toml"
    foreign.write_text("[tool]\nname = 'other'\n")
    result = narrowgauge("list", "cases")
    assert result.stdout.splitlines() == QUICK
    assert "passed over 1 TOML file" in result.stderr
    assert "cases/settings.toml" in result.stderr
    assert "cases/settings.toml: is no case file: it has 'tool'" in refused("run", "cases/settings.toml")


@pytest.mark.long
def test_cases_without_a_case_file_and_the_word_shipped(folder):
    named = narrowgauge("list", "cases", "shipped", "-k", "position or 16x32x24").stdout.splitlines()
    assert named[0] == QUICK[4]
    assert "swizzle/300x20/position" in named
    (folder / "cases" / "small.toml").write_text("[tool]\nname = 'other'\n")
    plain = narrowgauge("list", "-k", "position or 16x32x24")
    assert plain.stdout.splitlines() == named[1:]
    assert "the shipped cases are taken; passed over 1 TOML file" in plain.stderr
    assert "cases: holds no case file; passed over 1 TOML file" in refused("soak", "cases")
    (folder / "shipped").mkdir()
    assert "shipped: holds no *.toml case file" in refused("list", "shipped")


# What is refused.


REFUSED = [
    ("list run", ["--tier", "quik"], "--tier is 'quik' (did you mean 'quick'?)"),
    ("list run", ["-k", "nothing"], "no case of 7 is selected by --tier quick -k 'nothing'"),
    ("list run", ["-k", "a and"], "'a and'"),
    ("list run", ["missing.toml"], "missing.toml: cannot be read"),
    ("list run", ["reports"], "reports: cannot be read"),
    ("list", ["empty"], "empty: holds no *.toml case file"),
    ("list run", ["--tensor", "weight"], "--tensor names tensors of an --input file"),
    ("list run", ["cases", "--input", "a.npy"], "not from both: cases and a.npy"),
    ("list run", ["--input", "a.npy"], "a.npy: there is no such file"),
    ("list", ["--input", "a.onnx"], "unknown suffix '.onnx'"),
    ("run", ["--input", "captured.npz", "--tensor", "wieght"], "no tensor 'wieght' (did you mean 'weight'?)"),
    ("run", ["wrong.toml"], "wrong.toml: [[matrix]] 1: unknown key 'dtyp' (did you mean 'dtype'?)"),
    ("list run bench", ["--device", "gpu"], "--device is 'gpu' (did you mean 'cuda'?)"),
    ("run", ["-n", "-1"], "'-n'"),
    ("show", [QUICK[0], "--device", "gpu"], "--device is 'gpu'"),
    *(("show", [QUICK[0], f"--at={at}"], f"--at is {at!r}") for at in ("3", "a,b", "1,2,3", "-1,2")),
    ("show", ["quantize/nvfp4/16x32/bf16/norml"], f"(did you mean '{QUICK[1]}'?)"),
]
if not torch.cuda.is_available():
    REFUSED += [("run bench", ["--device", "cuda"], "doctor"), ("show", [QUICK[0], "--device", "cuda"], "doctor")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [(command, *row) for commands, *row in REFUSED for command in commands.split()],
)
def test_wrong_arguments_are_refused(command, arguments, words, folder):
    (folder / "empty").mkdir()
    (folder / "wrong.toml").write_text(CASES.replace("dtype", "dtyp"))
    np.savez(folder / "captured.npz", weight=np.ones((16, 32), np.float32))
    assert words in refused(command, *arguments)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("arguments", [["run", "-n", "1"], ["show", QUICK[0]]])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("natve", "no backend is called 'natve' (did you mean 'native'?)"),
        ("cli_kernel:Backend", "backend cli_kernel:Backend: there is no module 'cli_kernel' in the current folder"),
        (":Backend", "there is no module ''"),
        ("cli_kernels:Back", "module cli_kernels has no"),
        ("kernels/gone.py:Back", "backend kernels/gone.py:Back: there is no file"),
    ],
)
def test_a_backend_that_cannot_be_loaded(one_process, arguments, name, message):
    result = narrowgauge(*arguments, "--backend", name)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "0/5" not in result.stdout  # the progress bar
    assert not Path("reports").exists()


# run


def test_a_run_that_passes(one_process):
    result = narrowgauge("run", "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert {row["case"] for row in records()} == set(QUICK)
    assert {path.name for path in Path("reports/latest").iterdir()} == {
        "index.html", "records.csv", "records.jsonl", "records.parquet", "summary.md",
    }  # fmt: skip
    assert re.search(r"5 cases in [0-9.]+ m?s; report: reports/latest/index.html\n", result.stdout)
    assert "reproduce:" not in result.stdout


def test_a_run_that_fails_shows_the_first_failure_of_each_kind(one_process):
    result = narrowgauge("run", "--backend", "cli_kernels:Wrong", "-k", "quantize")
    assert result.exit_code == 1
    assert result.stdout.count("reproduce: narrowgauge show quantize/") == result.stdout.count("reproduce:") == 1
    assert "4 cases, quantize" in result.stdout
    assert "fail: codes: 1 of 512 codes differ, each by 1 step, at row 2, column 7" in result.stdout
    assert [row["verdict"] for row in records()] == ["fail"] * 4
    assert "Traceback" not in result.output


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "status"), [([], 0), (["--strict"], 1), (["-k", "gemm"], 1), (["-k", "quantize", "--strict"], 0)]
)
def test_an_unsupported_case_fails_only_if_strict(one_process, options, status):
    """A run without a case that passed fails, too."""
    result = narrowgauge("run", "--backend", "cli_kernels:Backend", *options)
    assert result.exit_code == status, result.output
    unsupported = "quantize" not in options
    assert [row["case"] for row in records() if row["verdict"] == "unsupported"] == QUICK[4:] * unsupported
    assert ("1 unsupported" in "\n".join(result.stdout.splitlines()[-12:])) == unsupported
    assert "reproduce:" not in result.stdout


def test_a_busy_machine_is_said_beside_the_times(one_process, monkeypatch):
    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.load", lambda: 1e6)
    result = narrowgauge("run", "--backend", "cli_kernels:Wrong", "-k", "quantize")
    assert "busy machine: 1000000 other processes on " in result.stdout
    page = Path("reports/latest/index.html").read_text(encoding="utf-8")
    assert page.count("1000000 other processes on ") == 2
    assert "1000000 other processes" in Path("reports/latest/records.jsonl").read_text(encoding="utf-8").splitlines()[0]


def test_an_interrupted_run_is_no_success_and_has_its_report(monkeypatch):
    def interrupted(cases, settings, on_record, on_loaded):
        record = run_case(cases[0], load_backend("reference")).to_dict()
        on_record(record)
        return [record]

    monkeypatch.setattr("narrowgauge.harness.tools.run_cases.run_cases", interrupted)
    result = narrowgauge("run")
    assert result.exit_code == 1
    assert "interrupted: 4 of 5 cases did not run" in result.stdout
    assert len(records()) == 1


def test_captured_tensors_take_the_place_of_case_files(one_process, folder):
    generator = np.random.default_rng(0)
    up, down = (generator.standard_normal(shape, dtype=np.float32) for shape in ((48, 32), (16, 64)))
    np.savez(folder / "captured.npz", up=up, down=down, bias=np.ones(3, np.float32))
    result = narrowgauge("run", "--input", "captured.npz", "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert "captured.npz: left out 1 that are no matrix of fp32, bf16, fp16: bias" in result.stderr
    rows = records()
    assert {row["inputs"] for row in rows} == {"captured.npz:up", "captured.npz:down"}
    assert {row["operation"] for row in rows} == {"quantize", "gemm"}
    ids = narrowgauge("list", "--input", "captured.npz").stdout.splitlines()
    assert sorted(row["case"] for row in rows) == sorted(ids)
    only = narrowgauge("list", "--input", "captured.npz", "--tensor", "up").stdout.splitlines()
    assert only == [name for name in ids if "captured.npz:up" in name]


# show


def test_show_begins_at_the_first_wrong_element():
    result = narrowgauge("show", QUICK[1], "--backend", "cli_kernels:Wrong")
    assert result.exit_code == 1
    assert "1 of 512 codes differ, each by 1 step, at row 2, column 7" in result.stdout
    assert "row 2, block 0" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if re.match(r" +7 .* 0b", line)]
    expected, actual = re.findall(r"0b\d{4}", line)
    assert int(expected, 2) ^ int(actual, 2) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raising", "error: quantize raised RuntimeError: illegal memory access (at cli_kernels.py:24)"),
        ("Ending", "crash: the process died (signal SIGABRT) at cli_kernels.py:29 in quantize"),
        ("Writing", "error: writes to its input: x, at byte 0 of 2048"),
    ],
)
def test_show_of_a_case_that_ends_its_host_prints_the_verdict(name, message):
    result = narrowgauge("show", QUICK[0], "--backend", f"cli_kernels:{name}")
    assert result.exit_code == 1, result.output
    header, verdict, *stack = result.stdout.splitlines()
    assert header.startswith(QUICK[0])
    assert verdict == message
    place = message.rpartition(" at ")[2]
    assert stack == (["stack, innermost call first", f"  {place}"] if name == "Ending" else [])


OPERATIONS = """
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = ["nvfp4-rht", "nvfp4-rowscaled", "nvfp4-2d-4over6-448-mae"]
shape = [[32, 48], [0, 48]]
dtype = "bf16"
inputs = "normal"
usage = ["rowwise", "both"]
scales = ["linear", "swizzled"]

[[matrix]]
operation = "transform"
tier = "quick"
recipe = "nvfp4-rht"
shape = [[32, 48], [0, 48]]
dtype = "bf16"
inputs = "spread"

[[matrix]]
operation = "swizzle"
tier = "quick"
shape = [[130, 5], [0, 4]]
inputs = "position"

[[matrix]]
operation = "quantize-grouped"
tier = "quick"
recipe = "nvfp4"
shape = [[32, 48], [0, 48]]
dtype = "bf16"
inputs = "normal"
sections = ["even:4"]
usage = ["rowwise", "columnwise"]

[[matrix]]
operation = "quantize-grouped"
tier = "quick"
recipe = "nvfp4"
shape = [32, 48]
dtype = "bf16"
inputs = "normal"
sections = ["front:4"]

[[matrix]]
operation = "gemm-grouped"
tier = "quick"
recipe = "nvfp4"
w_recipe = "nvfp4-rowscaled"
shape = [[32, 48, 16], [0, 48, 16]]
x = "bf16"
w = "bf16"
out = "fp32"
inputs = "normal"
sections = "even:4"
"""

SPOILT = """
from dataclasses import replace
from narrowgauge.reference import ops


class Backend:
    def quantize_both(self, x, recipe, **options):
        row, column = ops.quantize_both(x, recipe, **options)
        if column is not None:
            column.codes[7, 3] ^= 0x10
        return row, column

    def quantize_grouped(self, x, sizes, recipe, **options):
        q = ops.quantize_grouped(x, sizes, recipe, **options)
        if not q.columnwise:
            q.codes[29, 20] ^= 1
        return q

    def swizzle(self, scales):
        out = ops.swizzle(scales)
        out[0, 5] ^= 1
        return out

    def transform(self, x, recipe):
        y = ops.transform(x, recipe)
        y[5, 20] *= 2
        return y
"""


@pytest.fixture
def operations(folder):
    (folder / "cases" / "small.toml").write_text(OPERATIONS)
    (folder / "cli_kernels.py").write_text(SPOILT)
    return narrowgauge("list").stdout.splitlines()


@pytest.mark.long
def test_show_works_for_every_operation(operations):
    """In a terminal with 80 columns. A name is longer only if it stands alone on its line."""
    assert len(operations) == 35
    kinds = {(name.partition("/")[0], "/0x" in name): name for name in operations}
    for name in kinds.values():
        terminal = {"COLUMNS": "80", "FORCE_COLOR": "1"}
        result = CliRunner().invoke(app, ["show", name, "--backend", "reference"], env=terminal)
        assert result.exit_code == 0, result.output
        lines = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()
        assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []
        assert ("the result is empty" in lines) == ("/0x" in name), name
        if "/0x" not in name:
            assert any(re.match(r"(section \d, |\w+ half, )?row 0", line) for line in lines), lines


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "output"),
    [
        (
            "quantize/nvfp4-rht/32x48/bf16/normal/both",
            "columnwise half, row 7, block 0, rotated in the reference's order",
        ),
        ("quantize/nvfp4-rowscaled/32x48/bf16/normal/both", "columnwise half, row 7, block 0"),
        ("quantize-grouped/nvfp4/32x48/bf16/normal/even:4", "section 3, row 5, block 2"),
        ("quantize-grouped/nvfp4/32x48/bf16/normal/front:4", "section 3, row 13, block 2"),
        ("transform/nvfp4-rht/32x48/bf16/spread", "row 5\n"),
        ("swizzle/130x5/position", "row 32\n"),
    ],
)
def test_show_goes_to_the_half_and_section_that_are_wrong(operations, name, output):
    assert name in operations
    result = narrowgauge("show", name, "--backend", "cli_kernels:Backend")
    assert result.exit_code == 1, result.output
    assert output in re.sub(r" +\n", "\n", result.stdout)


def test_show_counts_rows_through_sections(operations):
    for at, output in (
        ("9,17", "section 1, row 1, block 1"),
        ("31,0", "section 3, row 7"),
        ("99,99", "section 3, row 7"),
    ):
        name = "quantize-grouped/nvfp4/32x48/bf16/normal/even:4"
        result = narrowgauge("show", name, "--backend", "reference", "--at", at)
        assert output in result.stdout


def test_recipes_of_captured_tensors(one_process, folder):
    np.savez(folder / "captured.npz", up=np.linspace(-1, 1, 16 * 32, dtype=np.float32).reshape(16, 32))
    listed = narrowgauge("list", "--input", "captured.npz", "--recipe", "nvfp4-2d", "--recipe", "nvfp4-rht")
    assert [line.split("/")[1] for line in listed.stdout.splitlines()] == ["nvfp4-2d"] * 4
    reason = "recipe nvfp4-rht rotates bf16 alone, not fp32"
    assert f"captured.npz: up makes no quantize case: {reason}\n" in listed.stderr
    words = "--recipe names recipes for an --input file or for contracts, and none is given"
    assert refused("list", "--recipe", "nvfp4") == words
    assert refused("list", "--input", "captured.npz", "--recipe", "nvpf4").startswith("no recipe is called 'nvpf4'")
    (folder / "cli_kernels.py").write_text(KERNELS.replace('if str(recipe) != "nvfp4"', "if False"))
    arguments = ["--input", "captured.npz", "--recipe", "nvfp4-2d", "--backend", "cli_kernels:Wrong"]
    failed = narrowgauge("run", *arguments, "-k", "quantize and not columnwise")
    (line,) = re.findall(r"reproduce: narrowgauge (.*)", failed.stdout)
    shown = narrowgauge(*line.split())
    assert shown.exit_code == 1, shown.output
    assert "1 of 512 codes differ, each by 1 step, at row 2, column 7" in shown.stdout


# doctor


@pytest.mark.long
def test_doctor_has_a_line_for_every_fact_and_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = narrowgauge("doctor")
    assert result.exit_code == 0
    assert re.search(rf"✓ +torch +{re.escape(importlib.metadata.version('torch'))}", result.stdout)
    assert re.search(r"– +GPU +none: ", result.stdout)
    assert "only --device cuda needs one; cases run on the CPU without" in result.stdout


@pytest.mark.parametrize(
    ("device", "cores", "gpus", "workers"),
    [
        ("cpu", 6, 2, 6),
        ("cuda", 6, 1, 6),
        ("cuda", 16, 1, 6),
        ("cuda", 128, 2, 12),
        ("cuda", 2, 8, 8),
        ("cuda", 4, 0, 4),
    ],
)
def test_there_is_a_process_a_core_and_at_most_six_a_gpu(device, cores, gpus, workers, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(cores))
    numbers = [str(number) for number in range(gpus)]
    monkeypatch.setattr("narrowgauge.harness.machine.processors.visible_gpus", lambda: numbers)
    assert default_workers(device) == workers
