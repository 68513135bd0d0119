"""The pytest plugin, in sessions of its own: in this process."""

import csv
import os
import shlex

import pytest

from narrowgauge.harness.cases.case_file import shipped_cases
from narrowgauge.harness.pytest_plugin.options import asked_for
from narrowgauge.harness.records import history
from narrowgauge.harness.records.journal import read
from narrowgauge.harness.report import report
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from tests.harness import small_toml
from tests.harness.pages import island
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, gemm
from tests.paths import PLUGIN, ROOT

pytest_plugins = ["pytester"]


SMALL = small_toml.matrix() + small_toml.matrix(tier="full", shape=[32, 32], dtype="bf16", inputs=["zeros", "inf"])

PRODUCT = small_toml.matrix(
    operation="gemm", shape=[16, 32, 24], dtype=None, x="bf16", w="bf16", out="fp32", inputs="lattice"
)

KERNELS = """
import time

from narrowgauge.reference import ops


class Wrong:
    def quantize(self, x, recipe):
        q = ops.quantize(x, recipe)
        if x.shape[1] == 48:
            q.codes[2, 3] ^= 0x10
            q.codes[4, 5] ^= 0x70
        return q


class Hanging:
    def quantize(self, x, recipe):
        while x.shape[1] == 48:
            time.sleep(0.01)
        return ops.quantize(x, recipe)
"""

QUICK = [f"quantize/nvfp4/{shape}/{dtype}/normal" for shape in ("16x32", "16x48") for dtype in ("fp32", "bf16")]
FULL = ["quantize/nvfp4/32x32/bf16/zeros", "quantize/nvfp4/32x32/bf16/inf"]


@pytest.fixture(autouse=True, scope="module")
def everything_is_imported(tmp_path_factory):
    """Sessions in this process forget what they import, and torch, pandas and pyarrow cannot be imported twice.

    Nor can safetensors, which `harness.records.saved_failure` has imported here.
    """
    record = run_case(GEMM, backend(quantize=reference.quantize, gemm=gemm(lambda out: out * 2))).to_dict()
    run_case(QUANTIZE, backend(quantize=reference.quantize, dequantize=reference.dequantize))
    report.write([record], {}, tmp_path_factory.mktemp("report"), elapsed=1.0)


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with cases/small.toml and plugin_kernels.py, in which the plugin is on."""
    (pytester.path / "cases").mkdir()
    (pytester.path / "cases" / "small.toml").write_text(SMALL)
    pytester.makepyfile(plugin_kernels=KERNELS)
    pytester.makeini(
        f"[pytest]\naddopts = -p {PLUGIN} -p no:unraisableexception -p no:hypothesispytest\n"
        "narrowgauge_cases = cases\nnarrowgauge_tier = full\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    return pytester


def ids(result):
    """Names of the collected cases, of `--collect-only -q`."""
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def records(project, folder="reports/latest"):
    with (project.path / folder / "records.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Collection.


def test_case_files_of_a_folder_of_the_ini_file_are_collected(project):
    (project.path / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    (project.path / "other").mkdir()
    (project.path / "other" / "settings.toml").write_text(SMALL)
    (project.path / "cases" / "README.md").write_text("no case file")
    result = project.runpytest_inprocess("--collect-only", "-q")
    assert result.ret == 0
    assert ids(result) == [*QUICK, *FULL]
    assert all(line.startswith("cases/small.toml::") for line in result.outlines if "::" in line)


def test_a_foreign_toml_file_of_a_folder_and_by_its_name(project):
    (project.path / "cases" / "settings.toml").write_text("[tool]\nname = 'other'\n")
    result = project.runpytest_inprocess("--collect-only", "-q")
    assert (result.ret, ids(result)) == (0, [*QUICK, *FULL])
    result.stdout.fnmatch_lines(["passed over 1 TOML file *: cases/settings.toml"])
    named = project.runpytest_inprocess("--collect-only", "-q", "cases/settings.toml")
    assert named.ret == pytest.ExitCode.INTERRUPTED
    named.stdout.fnmatch_lines(["*settings.toml: is no case file: it has 'tool', *shipped*"])


@pytest.mark.long
def test_an_xdist_worker_tells_which_files_it_passed_over(project):
    (project.path / "cases" / "settings.toml").write_text("[tool]\nname = 'other'\n")
    result = project.runpytest_inprocess("-n", "2", "-q", "--ng-backend", "reference", "-k", "16x32 and fp32")
    assert result.ret == 0
    assert result.stdout.str().count("passed over 1 TOML file") == 1


@pytest.mark.parametrize("named", ["cases", "cases/small.toml"])
def test_a_file_outside_the_root_is_known_to_xdist_by_its_path(project, named):
    """The controller has ids alone: of the run's cases, and of the case of a dead worker."""
    root = project.mkdir("root")
    arguments = ("--rootdir", root, project.path / named)
    result = project.runpytest_inprocess("-p", "no:xdist", "--collect-only", "-q", *arguments)
    assert ids(result) == [*QUICK, *FULL]
    found = [line for line in result.outlines if "::" in line]
    session = project.parseconfigure(*arguments).pluginmanager.get_plugin("narrowgauge-session")
    session.pytest_xdist_node_collection_finished(found)
    assert session.cases == [*QUICK, *FULL]
    session.pytest_runtest_logreport(pytest.TestReport(found[1], ("", 0, ""), {}, "failed", "", "???"))
    (record,) = session.records
    assert (record["case"], record["verdict"]) == (QUICK[1], "crash")
    session.pytest_unconfigure()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["-m", "quick"], QUICK),
        (["-m", "full"], FULL),
        (["-m", "not full"], QUICK),
        (["-k", "16x48 and bf16"], [QUICK[3]]),
        (["-k", "INF or zeros"], FULL),
        (["-k", "32 and bf16", "-m", "quick"], [QUICK[1]]),
        ([f"cases/small.toml::{QUICK[2]}"], [QUICK[2]]),
    ],
)
def test_cases_are_selected_as_any_test_is(project, arguments, chosen):
    assert ids(project.runpytest_inprocess("--collect-only", "-q", *arguments)) == chosen


def test_ways_to_ask_for_cases(project):
    (project.mkdir("kernels") / "small.toml").write_text(small_toml.matrix())
    (project.mkdir("tests") / "test_mine.py").write_text("def test_plain():\n    pass\n")
    (project.path / "tox.ini").write_text("[pytest]\ntestpaths = tests\nnarrowgauge_cases = kernels\n")
    plain = ("-c", os.devnull, "--rootdir", ".")

    def collected(*words):
        on = ("-p", PLUGIN, "-p", "no:hypothesispytest", "-p", "no:unraisableexception")
        result = project.runpytest_inprocess(*on, "--collect-only", "-q", *words)
        assert result.ret == 0
        return result.stdout.str().count(".toml::"), result.stdout.str().count("test_mine.py::")

    assert collected() == (4, 1)
    assert collected("tests") == (0, 1)
    assert collected("kernels") == (4, 0)
    assert collected("tests", "kernels/small.toml") == (4, 1)
    assert collected(*plain, "tests") == (0, 1)
    assert collected(*plain, "tests", "--ng-cases", "kernels/small.toml") == (4, 1)
    shipped = collected("tests", "--ng-cases", "shipped", "-k", "mine or swizzle")
    assert shipped[0] > 20
    assert shipped[1] == 1
    (project.path / "tox.ini").write_text("[pytest]\nnarrowgauge_cases = shipped kernels\n")
    asked = asked_for(project.parseconfig("-p", PLUGIN, "-c", "tox.ini"))
    assert asked.paths == (shipped_cases(), project.path / "kernels")
    result = project.runpytest_inprocess("-p", PLUGIN, "-p", "no:unraisableexception", "--ng-cases", "kernel")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "there is no case file or folder" in result.stdout.str() + result.stderr.str()


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SMALL.replace("dtype", "dtyp"),
            "*small2.toml: [[][[]matrix[]][]] 1: unknown key 'dtyp' (did you mean 'dtype'?); a quantize has *",
        ),
        ("[[matrix]\n", "*small2.toml: not TOML: *(at line 1*"),
        ("[[matrix]]\n", "*small2.toml: [[][[]matrix[]][]] 1: operation is None; it can be *"),
    ],
)
def test_a_wrong_case_file_is_a_single_error_and_the_rest_runs(project, text, message):
    (project.path / "cases" / "small2.toml").write_text(text)
    words = ("--ng-backend", "reference", "-k", "16x32 and fp32")
    result = project.runpytest_inprocess(*words, "--continue-on-collection-errors")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR collecting cases/small2.toml*"])
    result.stdout.fnmatch_lines([message])
    assert "Traceback" not in result.stdout.str()
    assert "harness/" not in result.stdout.str()


# Running.


def test_right_cases_pass_and_are_reported(project):
    result = project.runpytest_inprocess("--ng-backend", "reference", "--ng-seed", "3", "--ng-report-dir", "out")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines([f"6 cases; report: {project.path}/out/index.html"])
    rows = records(project, "out")
    assert sorted(row["case"] for row in rows) == sorted([*QUICK, *FULL])
    assert {(row["verdict"], row["backend"], row["device"], row["seed"]) for row in rows} == {
        ("pass", "reference", "cpu", "3")
    }
    assert not (project.path / "reports").exists()


def test_a_failing_case_shows_its_first_failure_and_no_traceback(project):
    result = project.runpytest_inprocess("--ng-backend", "plugin_kernels:Wrong", "-k", "16x48 and bf16")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*{QUICK[3]}*",
            "fail: codes: 2 of 768 codes differ, by up to 7 steps, the first at row 2, column 7",
            f"reproduce: narrowgauge show {QUICK[3]} --backend plugin_kernels:Wrong --device cpu",
            "codes (equal bytes): 2 of 768 codes differ*",
            "  element * first * worst",
            "  row * 2 * 4",
            "  column * 7 * 11",
            "stages: memory ✓, repeat ✓, amax ✓, tensor scale ✓, scales ✓, codes ✗",
            "FAILED cases/small.toml::*",
        ],
    )
    printed = result.stdout.str()
    assert "Traceback" not in printed
    assert "runner.py" not in printed
    assert "plugin.py" not in printed
    (row,) = records(project)
    assert (row["verdict"], row["stage"], row["mismatches"]) == ("fail", "codes", "2")
    run = read(project.path / "reports" / "latest")
    assert list(run.loaded) == ["file plugin_kernels.py"]
    assert shlex.split(run.command)[-4:] == ["--ng-backend", "plugin_kernels:Wrong", "-k", "16x48 and bf16"]


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
def test_a_case_that_pytest_timeout_ends_is_recorded(project, monkeypatch):
    """Where cases run in the process of pytest; otherwise their worker is ended, and tests of survival say how."""
    monkeypatch.setattr("narrowgauge.harness.pytest_plugin.session.in_process", lambda config: True)
    arguments = ["--ng-backend", "plugin_kernels:Hanging", "-k", "fp32", "--timeout", "1"]
    result = project.runpytest_inprocess(*arguments)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["timeout: Timeout *1*"])
    assert {row["case"]: row["verdict"] for row in records(project)} == {QUICK[0]: "pass", QUICK[2]: "timeout"}


@pytest.mark.long
def test_complete_sessions_are_in_the_history(project):
    path = project.path / "reports" / history.NAME
    arguments = ["-p", "no:xdist", "--ng-backend", "plugin_kernels:Wrong"]
    arguments += ["cases/small.toml::" + QUICK[n] for n in (2, 0)]  # the failing case first
    quick = ["-p", "no:xdist", "--ng-backend", "reference", "--ng-no-history", "-k", "16x32 and fp32"]
    project.runpytest_inprocess(*quick).assert_outcomes(passed=1)
    assert not path.exists()
    project.runpytest_inprocess(*arguments, "-x").assert_outcomes(failed=1)
    project.runpytest_inprocess(*arguments, "--ng-resume").assert_outcomes(passed=1, deselected=1)
    assert len(history.history_rows(path)) == 1
    project.runpytest_inprocess(*arguments).assert_outcomes(passed=1, failed=1)
    rows = [(row["backend"], row["cases"], row["pass"], row["fail"]) for row in history.history_rows(path)]
    assert rows == [("plugin_kernels:Wrong", 2, 1, 1)] * 2
    assert len(island((project.path / "reports/latest/index.html").read_text(encoding="utf-8"))["history"]["runs"]) == 2


# Refused arguments.


def test_a_backend_that_cannot_be_loaded_is_one_error(project):
    result = project.runpytest_inprocess("--ng-backend", "plugin_kernels:Wrog")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    message = "ERROR: backend plugin_kernels:Wrog: module plugin_kernels has no 'Wrog' (did you mean 'Wrong'?)"
    assert [line for line in result.errlines if line.startswith(message)] == [
        f"{message}; its classes are Wrong, Hanging"
    ]
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


# Messages at the end.


def test_a_run_of_skipped_cases_alone_fails(project):
    (project.path / "cases" / "small.toml").write_text(PRODUCT)
    result = project.runpytest_inprocess("--ng-backend", "plugin_kernels:Wrong")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "nothing was compared",
            "Not compared: 1 case (1 unsupported); not supported: backend plugin_kernels:Wrong has no gemm (1).",
            "1 cases; report: *",
        ]
    )


def test_every_hook_is_one_that_pytest_or_a_plugin_calls():
    """`optionalhook` accepts a mistyped name without a word."""
    import pytest_timeout
    import xdist.newhooks
    from _pytest import hookspec

    from narrowgauge.harness.pytest_plugin import plugin, session, sharding

    known = {name for module in (hookspec, xdist.newhooks, pytest_timeout) for name in vars(module)}
    known |= set(vars(pytest_timeout.TimeoutHooks))
    ours = {name for place in (plugin, session.Session, sharding.Sharding) for name in vars(place)}
    hooks = {name for name in ours if name.startswith("pytest_")}
    assert "pytest_configure_node" in hooks
    assert hooks <= known
