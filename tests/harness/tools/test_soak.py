"""Soak: selection, runs, messages; and the native kernels and the reference over a few seeds."""

import re
import sys

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.cli import app
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.tools.soak import case_features, case_work, depends_on_seed, soak_selection
from tests.harness import runs, small_toml
from tests.harness.sample_backends import QUANTIZE
from tests.matrix import quick_cases

CASES = small_toml.matrix(shape=[16, 32], inputs=["normal", "zeros"]) + small_toml.matrix(
    recipe="mxfp8-e4m3", shape=[0, 32], dtype="fp16"
)

KERNELS = """
from narrowgauge.reference import ops


class Right:
    def quantize(self, x, recipe):
        q = ops.quantize(x, recipe)
        return q.codes, q.scales, q.amax


class Now(Right):
    # Wrong if the first element is above 1: for a sixth of the seeds.
    def quantize(self, x, recipe):
        codes, scales, amax = super().quantize(x, recipe)
        if x.numel() and float(x[0, 0]) > 1:
            codes[2, 3] ^= 0x10
        return codes, scales, amax
"""


pytestmark = pytest.mark.usefixtures("one_thread")


# Selection.


@pytest.fixture(scope="module")
def matrix():
    """The small cases of the quick tier: inputs of the large ones take 20 s."""
    return [case for case in quick_cases() if case_work(case) < 1 << 15]


@pytest.fixture(scope="module")
def tenth(matrix):
    return soak_selection(matrix, 0.1)


def held(cases):
    return {part for case in cases for part in case_features(case)}


@pytest.mark.long
def test_the_chosen_part_of_the_quick_tier_has_every_feature(matrix, tenth):
    """More than the share that was asked, if fewer cases do not have every feature."""
    assert len(matrix) / 10 <= len(tenth) < len(matrix) / 2
    assert len({case.id for case in tenth}) == len(tenth)
    for of in (
        lambda case: case.operation, lambda case: case.recipe_label, lambda case: case.inputs,
        lambda case: case.dtype_label,
        lambda case: case.flags and case.flags[0], lambda case: (case.operation, case.recipe_label),
        lambda case: (case.operation, case.inputs),
    ):  # fmt: skip
        assert set(map(of, tenth)) == set(map(of, matrix))
    assert {flag for case in tenth for flag in case.flags} == {flag for case in matrix for flag in case.flags}
    assert held(tenth) == held(matrix)


@pytest.mark.long
def test_the_choice_is_cheap_and_depends_on_the_seed(matrix, tenth):
    assert sum(map(case_work, tenth)) < sum(map(case_work, matrix)) / 2
    fixed = [case for case in tenth if not depends_on_seed(case)]
    assert len(fixed) < len(tenth) / 10
    for case in fixed:  # each holds a feature of no case with inputs that depend on the seed
        only = held([case]) - held(set(tenth) - set(fixed))
        assert only
        assert not any(depends_on_seed(other) for other in matrix if only & set(case_features(other)))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (QUANTIZE, True),
        (case_from_labels("quantize", "nvfp4", (16, 32), "bf16", "zeros"), False),
        (case_from_labels("quantize", "nvfp4-sr", (16, 32), "bf16", "zeros"), True),
        (case_from_labels("quantize", "nvfp4-sr", (16, 32), "bf16", "zeros", ("words",)), True),
        (case_from_labels("quantize", "mxfp8-e4m3", (32, 64), "bf16", "position"), False),
        (case_from_labels("quantize", "nvfp4", (16, 32), "bf16", "position"), True),
        (case_from_labels("quantize", "nvfp4-sr", (0, 32), "bf16", "normal"), False),
        (case_from_labels("gemm", "nvfp4", (16, 32, 8), "bf16xbf16-fp32", "zeros", ("tn",)), False),
        (case_from_labels("gemm", "nvfp4", (16, 32, 8), "bf16xbf16-fp32", "zeros", ("tn", "bias")), True),
        (case_from_labels("update-scale", "fp8-delayed-e4m3", (4, 5), "", "amaxes-zeros"), True),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else str(value),
)
def test_which_inputs_depend_on_the_seed(case, expected):
    assert depends_on_seed(case) is expected


# Runs.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: a matrix in cases/, kernels in soak_kernels.py; tasks run in this process."""

    def run_tasks(tasks, settings, on_record):
        backend = load_backend(settings.backend)
        for task in tasks:
            on_record(run_case(task.case, backend, seed=task.seed).to_dict())

    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "small.toml").write_text(CASES)
    (tmp_path / "soak_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("narrowgauge.harness.tools.soak.run_tasks", run_tasks)
    yield tmp_path
    sys.modules.pop("soak_kernels", None)


def narrowgauge(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def said(result):
    """The last line, without the time."""
    return re.sub(r" in [0-9.]+ m?s,", ",", result.stdout.splitlines()[-1])


def test_every_case_runs_on_every_seed(folder, monkeypatch):
    seen = []

    def run_tasks(tasks, settings, on_record):
        seen.extend((task.case.id, task.seed) for task in tasks)

    monkeypatch.setattr("narrowgauge.harness.tools.soak.run_tasks", run_tasks)
    result = narrowgauge("soak", "--seeds", 3, "--seed", 5, "--share", 1, "-k", "bf16")
    assert result.exit_code == 1  # no element was compared
    ids = [f"quantize/nvfp4/16x32/bf16/{family}" for family in ("normal", "zeros")]
    assert seen == [(name, seed) for seed in (5, 6, 7) for name in ids]
    assert said(result) == (
        "3 seeds from 5, 2 cases, 0 runs, nothing was compared, 0 failures, interrupted: 6 runs did not happen"
    )
    one_run = lambda tasks, settings, on_record: on_record(runs.record())  # noqa: E731
    monkeypatch.setattr("narrowgauge.harness.tools.soak.run_tasks", one_run)
    result = narrowgauge("soak", "--seeds", 3, "--seed", 5, "--share", 1, "-k", "bf16")
    assert result.exit_code == 1
    assert said(result).endswith("1 run, 90 elements compared, 0 failures, interrupted: 5 runs did not happen")


def test_a_kernel_that_is_sometimes_wrong_is_found(folder):
    arguments = ["soak", "--seeds", 12, "--seed", 1, "-k", "normal and fp32", "--backend", "soak_kernels:Now"]
    result = narrowgauge(*arguments)
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    (wrong,) = [line for line in lines if "seeds:" in line]
    count, message = re.fullmatch(r"fail in (\d+) of 12 seeds: (.*)", wrong).groups()
    assert 0 < int(count) < 12
    assert message == "codes: 1 of 512 codes differ, each by 1 step, at row 2, column 7"
    assert lines[-1].endswith(f", {count} failure{'s' if int(count) > 1 else ''}")
    (line,) = [line for line in lines if line.startswith("reproduce: narrowgauge ")]
    seed = int(re.search(r" --seed (\d+)$", line)[1])
    shown = narrowgauge(*line.removeprefix("reproduce: narrowgauge ").split())
    assert shown.exit_code == 1
    assert message.removeprefix("codes: ") in shown.stdout
    assert narrowgauge("show", line.split()[3], "--backend", "soak_kernels:Now", "--seed", seed - 1).exit_code == 0


def ledger(**keys):
    """A ledger with the case that is wrong on a few seeds."""
    return small_toml.known(case="quantize/nvfp4/16x32/fp32/normal", backend="soak_kernels:Now", **keys)


@pytest.mark.long
def test_a_known_failure_is_counted_and_may_pass_on_some_seeds(folder):
    arguments = ["soak", "--seeds", 12, "--seed", 1, "-k", "normal and fp32", "--backend", "soak_kernels:Now"]
    (failures,) = re.findall(r", (\d+) failures?$", said(narrowgauge(*arguments)))
    (folder / "cases" / "known.toml").write_text(ledger())
    result = narrowgauge(*arguments)
    assert result.exit_code == 0, result.output
    assert said(result).endswith(f", 0 failures, {failures} known failure{'s' if failures != '1' else ''}")
    assert 0 < int(failures) < 12
    assert "reproduce" not in result.stdout
    (folder / "cases" / "known.toml").write_text(ledger(stage="scales"))
    assert narrowgauge(*arguments).exit_code == 1, "it fails at another stage than the ledger says"


@pytest.mark.parametrize("verdict", ["crash", "timeout"])
def test_what_is_known_to_crash_is_not_run(folder, monkeypatch, verdict):
    seen = []
    monkeypatch.setattr(
        "narrowgauge.harness.tools.soak.run_tasks", lambda tasks, *_: seen.extend(task.case.id for task in tasks)
    )
    (folder / "cases" / "known.toml").write_text(ledger(verdict=verdict))
    arguments = ["soak", "--seeds", 1, "--seed", 1, "--share", 1, "-k", "normal and (fp32 or bf16)"]
    result = narrowgauge(*arguments, "--backend", "soak_kernels:Now")
    assert seen == ["quantize/nvfp4/16x32/bf16/normal"]
    assert result.stderr == "1 of 2 cases are known to crash or hang, and are not run\n"
    seen.clear()
    narrowgauge(*arguments, "--backend", "soak_kernels:Right")
    assert len(seen) == 2, "the entry is of another backend"


def test_nothing_compared_is_no_success(folder):
    result = narrowgauge("soak", "--seeds", 2, "--seed", 0, "-k", "fp16", "--backend", "reference")
    assert result.exit_code == 1
    assert said(result) == "2 seeds from 0, 1 case, 2 runs, nothing was compared, 0 failures"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", 0], "'--seeds'"),
        (["--share", 2], "'--share'"),
        (["--seed", -1], "'--seed'"),
        (["-k", "nothing"], "no case of 5 is selected by --tier quick -k 'nothing'"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--backend", "natve"], "no backend is called 'natve' (did you mean 'native'?)"),
    ],
)
def test_what_is_refused(folder, arguments, message):
    result = narrowgauge("soak", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
