"""A user's repository from `narrowgauge init` to the steps of action.yml, which run here in bash.

GitHub is not here: the steps of foreign actions (Python, upload) and the installation by pip are checked as text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.harness.tools.init.repository import TEMPLATES, initialize
from tests.paths import ROOT

ACTION = (ROOT / "action.yml").read_text(encoding="utf-8")
WORKFLOW = (TEMPLATES / "workflow.yml").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "own_repository.md").read_text(encoding="utf-8")
STEPS = {
    text.partition("\n")[0]: text
    for text in re.split(r"^    - name: ", ACTION.partition("\n  steps:\n")[2], flags=re.M)[1:]
}
"""Text of each step by its name."""
DEFAULTS = {
    name: default.strip('"')
    for name, default in re.findall(
        r"^  ([\w-]+):\n    description: .*\n    (?:default: (.*)|required: true)$", ACTION, re.M
    )
}
"""Default of each input; empty for an input that is required."""
GIVEN = dict(re.findall(r"^          ([\w-]+): \"?(.*?)\"?$", WORKFLOW.partition("<owner>")[2], re.M))
"""Inputs of the workflow that init writes."""


def variables(step: str, inputs: dict[str, str]) -> dict[str, str]:
    """`env` of a step with the values of the inputs."""
    found = re.findall(r"^        (\w+): \$\{\{ inputs\.([\w-]+) \}\}$", STEPS[step], re.M)
    return {name: inputs[value] for name, value in found}


def script(step: str) -> str:
    """`run` of a step."""
    text = STEPS[step].partition("\n      run: ")[2]
    return re.sub(r"^        ", "", text.partition("\n")[2], flags=re.M) if text.startswith("|") else text


def run_step(step: str, folder: Path, **changes: str) -> tuple[int, str]:
    """Run a step as GitHub does, with the inputs of the workflow. Exit status and output."""
    inputs = {**DEFAULTS, **GIVEN, **changes}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB"))}
    environ = kept | variables(step, inputs) | {
        "GITHUB_ACTIONS": "true", "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_WORKSPACE": str(folder),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "PYTHONPATH": str(ROOT), "COLUMNS": "200",
        "PATH": f"{folder / '.bin'}:{kept['PATH']}",
    }  # fmt: skip
    (folder / ".bin").mkdir(exist_ok=True)
    (folder / ".bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / ".bin" / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script(step)],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout


RUN, GATE = "Run the cases", "Hold the run against the baseline"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder after `narrowgauge init`."""
    folder = tmp_path_factory.mktemp("repository")
    initialize(folder, "me/narrowgauge@v1")
    return folder


def test_the_action_has_the_inputs_of_its_steps_and_workflow() -> None:
    used = set(re.findall(r"inputs\.([\w-]+)", ACTION))
    assert used == set(DEFAULTS)
    assert GIVEN.keys() <= DEFAULTS.keys()
    assert list(STEPS) == ["Set up Python", "Install narrowgauge", RUN, GATE, "Keep the report"]
    assert "  using: composite\n" in ACTION
    assert all(name in WORKFLOW or default for name, default in DEFAULTS.items() if name == "backend")


def test_no_input_is_text_of_a_script() -> None:
    """An input in a script could be a command: GitHub puts the text in before bash reads the script."""
    scripts = [script(step) for step, text in STEPS.items() if "run:" in text]
    assert len(scripts) == 3
    assert not [text for text in scripts if "${{" in text]
    for step, text in STEPS.items():
        if "run:" in text:
            names = set(re.findall(r"\$\{?([A-Z]+)\b", script(step))) - {"GITHUB_ACTION_PATH"}
            assert names == set(variables(step, DEFAULTS)), step
            assert "\n      shell: bash\n" in text


def test_other_actions_are_pinned_by_commit() -> None:
    used = re.findall(r"uses: (\S+)", ACTION + WORKFLOW)
    others = [name for name in used if not name.startswith("<owner>/")]
    assert len(others) == 4
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name) for name in others)
    assert "      if: always()\n      uses: actions/upload-artifact@" in ACTION


def test_the_files_are_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed; it comes with the docs extra")
    action, workflow = yaml.safe_load(ACTION), yaml.safe_load(WORKFLOW)
    assert [step["name"] for step in action["runs"]["steps"]] == list(STEPS)
    assert {name: entry.get("default", "") for name, entry in action["inputs"].items()} == DEFAULTS
    steps = workflow["jobs"]["kernels"]["steps"]
    assert steps[-1]["with"] == GIVEN
    assert steps[1]["uses"] in STEPS["Set up Python"]
    assert steps[2]["run"] == "pip install --index-url https://download.pytorch.org/whl/cpu torch"
    assert {step["name"]: step["run"].strip() for step in action["runs"]["steps"] if "run" in step} == {
        name: script(name).strip() for name, text in STEPS.items() if "run:" in text
    }


def scripted(step: str, folder: Path, python: str, **values: str) -> tuple[int, str]:
    """Run a step with a shell script as `python`. Exit status and output."""
    (folder / "python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / "python").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "GITHUB_ACTION_PATH": str(ROOT), **values}
    command = ["bash", "-eo", "pipefail", "-c", script(step)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


PINNED = f"-m pip install -c {ROOT}/constraints-cpu.txt {ROOT}"


@pytest.mark.parametrize(
    ("device", "torch", "index", "extras", "expected"),
    [
        ("cpu", False, "there", "", [f"--index-url there -c {ROOT}/constraints-cpu.txt torch", PINNED]),
        ("cpu", False, "away", "", ["--index-url away", "::warning::No CPU build of torch from away", PINNED]),
        ("cpu", False, "", "", [PINNED]),
        ("cpu", True, "there", "", [f"-m pip install {ROOT}"]),
        ("cuda", True, "there", "cuda13", [f"-m pip install {ROOT}[cuda13]"]),
    ],
)
def test_what_the_action_installs(
    device: str, torch: bool, index: str, extras: str, expected: list[str], tmp_path: Path
) -> None:
    """torch is installed, or not; its index is there, cannot be reached, or is not given."""
    python = f'case "$*" in -c*) exit {0 if torch else 1};; *away*) echo "$@"; exit 1;; *) echo "$@";; esac'
    status, output = scripted("Install narrowgauge", tmp_path, python, DEVICE=device, INDEX=index, EXTRAS=extras)
    lines = output.splitlines()
    assert (status, len(lines)) == (0, len(expected)), output
    assert all(text in line for text, line in zip(expected, lines, strict=True)), output
    assert all(("--no-deps" in line) == ("--index-url" in line) for line in lines), "torch alone is of its index"
    assert (ROOT / "constraints-cpu.txt").is_file()


@pytest.mark.parametrize(
    ("status", "baseline", "expected"),
    [(0, "", 0), (0, "b.json", 0), (1, "", 1), (1, "b.json", 0), (2, "", 2), (2, "b.json", 2)],
)
def test_the_exit_status_of_the_run(status: int, baseline: str, expected: int, tmp_path: Path) -> None:
    """1, a failing case, is for the gate to judge. 2, nothing could run, ends the job."""
    inputs = {**variables(RUN, DEFAULTS | GIVEN), "BASELINE": baseline, "CASES": "a b/c.toml", "SELECT": "x and not y"}
    python = f'printf "%s|" "$@"; exit {status}'
    assert scripted(RUN, tmp_path, python, **inputs) == (
        expected,
        "-m|narrowgauge|run|a|b/c.toml|--backend|narrowgauge_backend:Backend|-k|x and not y|--tier|quick|--device|cpu|"
        "--report-dir|reports/latest|",
    )


@pytest.mark.long
def test_a_new_repository_passes(repository: Path) -> None:
    """The run, the gate and pytest, with the files as init writes them. The baseline is of the run, to the byte."""
    status, output = run_step(RUN, repository)
    assert status == 0, output
    assert "28 cases passed" in output
    assert (repository / "reports/latest/index.html").is_file()
    assert "28 cases passed" in (repository / "summary.md").read_text(encoding="utf-8")
    status, output = run_step(GATE, repository)
    assert (status, output.splitlines()) == (
        0,
        [
            "gate holds against reports/baselines/host.json: 28 cases as accepted",
            "next: nothing to do: every case is as accepted",
        ],
    )
    accept = ["-m", "narrowgauge", "baseline", "accept", "--baseline", "fresh.json"]
    assert narrowgauge(repository, accept).returncode == 0
    assert (repository / "fresh.json").read_bytes() == (TEMPLATES / "host.json").read_bytes()


@pytest.mark.long
def test_pytest_runs_the_cases_of_a_new_repository(repository: Path) -> None:
    (repository / "test_own.py").write_text("def test_own():\n    pass\n")
    done = narrowgauge(repository, ["-m", "pytest", "-p", "no:cacheprovider", "--strict-config", "-q"])
    assert "29 passed" in done.stdout, done.stdout + done.stderr


def narrowgauge(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB"))}
    environ = kept | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.mark.long
def test_a_wrong_kernel_fails_the_job(repository: Path, tmp_path: Path) -> None:
    """The run names the table in the case file, and the gate fails the job."""
    folder = tmp_path / "wrong"
    shutil.copytree(repository, folder, ignore=shutil.ignore_patterns("latest", "summary.md"))
    backend = folder / "narrowgauge_backend.py"
    text = backend.read_text()
    assert text.count("size >= midpoints") == 1
    backend.write_text(text.replace("size >= midpoints", "size > midpoints"))
    status, output = run_step(RUN, folder, select="33x80 and e2m1-ties")
    assert status == 0, output
    assert "::error file=kernel_cases/nvfp4.toml,line=4,title=codes wrong" in output
    assert "ties round toward zero" in (folder / "summary.md").read_text(encoding="utf-8")
    status, output = run_step(GATE, folder)
    assert status == 1
    assert "worse: 2\n" in output
    assert "::error title=narrowgauge gate::gate fails against reports/baselines/host.json" in output


def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """The page's files and sentences; test_blocks.py runs its commands."""
    (tmp_path / "new").mkdir()
    shown = narrowgauge(tmp_path / "new", ["-m", "narrowgauge", "init", "--action", "my-org/narrowgauge@v1"])
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert shown.stdout == blocks[0]
    assert "gate holds against reports/baselines/host.json: 28 cases as accepted\n" in blocks[1]
    workflow = WORKFLOW.replace("<owner>/narrowgauge@<ref>", "my-org/narrowgauge@v1")
    assert workflow.partition("\njobs:\n")[2] in PAGE
    for name in DEFAULTS:
        assert f"| `{name}` |" in PAGE
