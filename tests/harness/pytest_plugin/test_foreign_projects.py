"""Foreign projects: the plugin changes nothing in a project until the project asks for cases.

Every session runs in a separate process, with the plugin and without the plugin, and the output must be the same.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import small_toml
from tests.paths import PLUGIN, ROOT

INSTALLED = PLUGIN == "narrowgauge"
MODULES = (
    "narrowgauge", "narrowgauge.harness", "narrowgauge.harness.pytest_plugin",
    "narrowgauge.harness.pytest_plugin.options", "narrowgauge.harness.pytest_plugin.plugin", "narrowgauge.spec",
)  # fmt: skip
"""Modules of narrowgauge in a session without cases."""

OPTION = "    parser.addoption({!r}, action='store', default={!r})\n"


def conftest(**options: str) -> str:
    """A conftest.py with options, and a fixture for each: `--device` and `device`."""
    text = "import pytest\n\n\ndef pytest_addoption(parser):\n"
    text += "".join(OPTION.format(f"--{name.replace('_', '-')}", default) for name, default in options.items())
    for name in options:
        text += f"\n\n@pytest.fixture\ndef {name}(request):\n    return request.config.getoption({name!r})\n"
    return text


PROJECTS: dict[str, tuple[dict[str, str], list[str], int]] = {
    # With the marker of Triton's python/test/conftest.py, under strict settings.
    "options": (
        {
            "conftest.py": conftest(backend="eager", device="cuda", seed="7", report_dir="out", shard="", resume="")
            + "\n\ndef pytest_configure(config):\n"
            "    config.addinivalue_line('markers', 'interpreter: whether the interpreter supports the test')\n",
            "pytest.ini": "[pytest]\naddopts = --strict-config --strict-markers\nfilterwarnings = error\n"
            "markers =\n    quick: mine\n    full: mine\n",
            "test_mine.py": "import pytest\n\n\n@pytest.mark.interpreter\n@pytest.mark.quick\n"
            "def test_mine(device, backend):\n    assert (device, backend) == ('xpu', 'mine')\n\n\n"
            "@pytest.mark.full\ndef test_full():\n    pass\n",
        },
        ["--device", "xpu", "--backend", "mine", "-m", "interpreter and quick"],
        0,
    ),
    # Modules and case files with our names; pytest-timeout itself, and the options of pytest-benchmark.
    "outcomes": (
        {
            "reference.py": "MINE = 1\n",
            "harness/__init__.py": "",
            "harness/cases.py": "MINE = 2\n",
            "cases/login.toml": "[user]\nname = 'me'\n",
            "cases/known.toml": "[known]\n",
            "conftest.py": conftest(benchmark_min_rounds="5", benchmark_timer="perf_counter", benchmark_json=""),
            "pytest.ini": "[pytest]\ntestpaths = . cases\ntimeout = 1\ntimeout_func_only = true\n",
            "test_mine.py": "import time\n\nimport pytest\nimport reference\nfrom harness.cases import MINE\n\n\n"
            "def test_passed(benchmark_min_rounds):\n"
            "    assert (reference.MINE, MINE, benchmark_min_rounds) == (1, 2, '9')\n\n\n"
            "def test_slow():\n    time.sleep(60)\n\n\n"
            "def test_failed():\n    assert 1 == 2\n\n\n@pytest.mark.xfail\ndef test_xfail():\n    assert 0\n\n\n"
            "@pytest.mark.skip\ndef test_skip():\n    pass\n",
        },
        ["--benchmark-min-rounds", "9", "--tb=line", "-ra"],
        1,
    ),
    "no tests": ({"README.md": "nothing\n"}, [], 5),
}
"""Files of a project, the arguments of its session, and the exit status."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def session(folder: Path, *words: object, plugin: bool = True) -> tuple[int, str]:
    """Exit status and output of pytest in a process of its own, with or without the plugin. Times are left out."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "GITHUB")) and name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    if INSTALLED:
        choice = [] if plugin else ["-p", "no:narrowgauge"]
    else:
        environ["PYTHONPATH"] = str(ROOT)
        choice = ["-p", PLUGIN] if plugin else []
    # The plugin of hypothesis takes long to import, and imports numpy in some versions.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += [*choice, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=200)
    return done.returncode, re.sub(r" in \d+\.\d+s.*", "", done.stdout + done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_without_cases_stays_as_it_is(name: str, tmp_path: Path) -> None:
    files, words, expected = PROJECTS[name]
    write(tmp_path, files)
    with_plugin, without = (session(tmp_path, *words, plugin=plugin) for plugin in (True, False))
    assert with_plugin == without
    assert with_plugin[0] == expected, with_plugin[1]
    if name == "outcomes":
        assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in with_plugin[1]
    assert not (tmp_path / "reports").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_session_without_cases_imports_the_options_alone(tmp_path: Path, workers: list[str]) -> None:
    """Numpy, torch, and the rest of narrowgauge cost time; an environment variable could change the tests."""
    text = f"""
import os, sys


def test_modules(request):
    assert sorted(name for name in sys.modules if name.partition(".")[0] == "narrowgauge") == sorted({MODULES})
    assert not {{"numpy", "torch", "pandas"}} & sys.modules.keys()
    assert "OMP_NUM_THREADS" not in os.environ
    registered = [name for name, _ in request.config.pluginmanager.list_name_plugin() if "narrowgauge" in name]
    assert registered == [{PLUGIN!r}]
    assert not any(line.startswith(("quick", "full")) for line in request.config.getini("markers"))
"""
    write(tmp_path, {"test_modules.py": text})
    status, printed = session(tmp_path, *workers)
    assert status == 0, printed


@pytest.mark.long
def test_cases_beside_the_tests_of_a_project(tmp_path: Path) -> None:
    """A session of cases and plain tests: a single report, and further TOML files are left alone."""
    write(tmp_path, {
        "kernels/small.toml": small_toml.matrix(),
        "other/login.toml": "[user]\n",
        "tests/test_mine.py": "def test_plain():\n    pass\n",
        "pytest.ini": "[pytest]\ntestpaths = tests\naddopts = --strict-config --strict-markers\n"
        "filterwarnings = error\nnarrowgauge_cases = kernels\nnarrowgauge_backend = reference\n"
        "narrowgauge_report_dir = out\n",
    })  # fmt: skip
    status, printed = session(tmp_path)
    assert status == 0, printed
    assert "5 passed" in printed
    assert printed.count("report: ") == 1
    assert f"4 cases; report: {tmp_path}/out/index.html" in printed
    assert len((tmp_path / "out" / "records.csv").read_text(encoding="utf-8").splitlines()) == 5
