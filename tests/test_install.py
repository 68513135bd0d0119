"""The wheel, installed outside the checkout beside a project whose own names are `reference`, `harness`, `native`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT

OWN = {
    "reference.py": "WHOSE = 'theirs'\n",
    "native.py": "WHOSE = 'theirs'\n",
    "harness/__init__.py": "WHOSE = 'theirs'\n",
    "cases/__init__.py": "WHOSE = 'theirs'\n",
    "test_theirs.py": """
import cases, harness, native, reference
import narrowgauge
from narrowgauge import reference as oracle


def test_each_project_has_its_own_modules():
    assert {module.WHOSE for module in (cases, harness, native, reference)} == {"theirs"}
    assert oracle.__name__ == "narrowgauge.reference"
    assert narrowgauge.recipe("nvfp4").block == (1, 16)
""",
}
HEAVY = ("pandas", "pyarrow", "jinja2", "rich", "typer", "pytest", "safetensors")
ORACLE = f"""
import importlib.abc, sys


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is not installed")


sys.meta_path.insert(0, Refuse())
import narrowgauge

assert "torch" not in sys.modules and "narrowgauge.reference" not in sys.modules, sorted(sys.modules)
import torch

x = torch.linspace(-3, 3, 4 * 64).view(4, 64).bfloat16()
q = narrowgauge.quantize(x, "nvfp4")
row, column = narrowgauge.quantize_both(x, "mxfp8-e4m3")
assert q.codes.shape == (4, 32) and column is not None
assert narrowgauge.gemm(q, q, out_dtype=torch.float32).shape == (4, 4)
assert narrowgauge.dequantize(q).shape == (4, 64)
from narrowgauge.reference.modules import Linear, autocast

with autocast("NVFP4BlockScaling-norht"):
    assert Linear(64, 32)(x).shape == (4, 32)
print(narrowgauge.__version__)
"""


def run(*command: object, cwd: Path, site: Path | None = None) -> str:
    """What a command prints; `site` is a folder of installed packages, found before the environment's own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    if site is not None:
        environ["PYTHONPATH"] = str(site)
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the files that git has, built offline by the setuptools of this environment."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77 or later is not installed: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("wheel")
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):  # links stay links; a build in the checkout would leave its files there
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=folder / "source")
    (found,) = folder.glob("narrowgauge-*.whl")
    return found


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The wheel unpacked, as an installer does, into a folder of its own."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project."""
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_wheel_holds_one_package_with_its_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modes = {info.external_attr >> 28 for info in archive.infolist()}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"narrowgauge"}
    assert 0o12 not in modes, "a link in the wheel leads nowhere"
    expected = [
        *(f"narrowgauge/cases/{path.name}" for path in (ROOT / "cases").glob("*.toml")),
        *(
            f"narrowgauge/{path.relative_to(ROOT)}"
            for folder in ("native/kernels", "harness", "reference")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".html", ".css", ".js", ".toml")
        ),
        "narrowgauge/py.typed",
    ]
    assert not set(expected) - set(names)
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]


def test_a_project_with_the_same_names_keeps_them(site: Path, project: Path) -> None:
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project, site=site)


def test_the_command_runs_outside_a_checkout(site: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "narrowgauge"]
    assert run(*command, "--version", cwd=tmp_path, site=site).startswith("narrowgauge ")
    words = ["run", "-k", "quantize/nvfp4/256x1024/bf16/normal", "--backend", "reference", "-n", "1"]
    printed = run(*command, *words, cwd=tmp_path, site=site)
    assert "passed" in printed
    assert (tmp_path / "reports" / "latest" / "index.html").is_file()


def test_the_oracle_needs_torch_and_numpy_alone(site: Path, tmp_path: Path) -> None:
    """As after `pip install --no-deps narrowgauge`: every other package is refused."""
    assert run(sys.executable, "-c", ORACLE, cwd=tmp_path, site=site).strip()


def test_wheels_of_the_sdist_and_of_the_checkout_hold_the_same(wheel: Path) -> None:
    source, folder = wheel.parent / "source", wheel.parent / "sdist"
    folder.mkdir()
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    run("tar", "-xzf", archive, cwd=folder)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    again = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    run(sys.executable, "-c", again, folder, cwd=unpacked)
    (second,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(second) as other:
        contents = [{name: archive.read(name) for name in archive.namelist()} for archive in (one, other)]
    code = [{name: data for name, data in content.items() if name.startswith("narrowgauge/")} for content in contents]
    assert code[0] == code[1]
