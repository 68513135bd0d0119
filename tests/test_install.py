"""Wheel and sdist, each installed by pip into a new environment, outside of the checkout.

The environments share the other packages of this one by links, so the tests need no network. `.github/workflows/ci.yml`
runs the same commands after an installation from the network.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.test_blocks import FAILS, FILE, blocks, commands

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
SOME = (
    "swizzle/ and bytes and not (65540 or 16400) or "
    "nvfp4/128x128/bf16 and (outliers or uniform or huge) and not (both or columnwise)"
)
"""Keyword expression of twenty shipped cases of native kernels."""
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


def run(*command: object, cwd: Path) -> str:
    """Output of a command. Fails if the exit status is not 0."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and sdist of the files of the checkout, built offline by the setuptools of this environment."""
    pytest.importorskip("setuptools", "77", reason="setuptools 77 or later is not installed: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("archives")
    # Files that git has or would add. Links stay links; a build in the checkout would leave its files there.
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    for kind in ("wheel", "sdist"):
        run(sys.executable, "-c", build, f"build_{kind}", folder, cwd=folder / "source")
    (wheel,), (sdist,) = folder.glob("narrowgauge-*.whl"), folder.glob("narrowgauge-*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def environments(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The python of two new environments, with narrowgauge from the wheel and from the sdist."""
    pytest.importorskip("pip", "22.3", reason="pip 22.3 or later is not installed; it installs into the environments")
    pythons = {}
    for kind, archive in archives.items():
        folder = tmp_path_factory.mktemp(kind)
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
        pythons[kind] = folder / "bin" / "python"
        own = _packages(pythons[kind], cwd=folder)
        for path in _packages(Path(sys.executable), cwd=folder).iterdir():
            if "narrowgauge" not in path.name and not (own / path.name).exists():
                (own / path.name).symlink_to(path)
        install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
        run(sys.executable, "-m", "pip", "--python", pythons[kind], *install, archive, cwd=folder)
    return pythons


def _packages(python: Path, cwd: Path) -> Path:
    """The folder of packages of an environment."""
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=cwd).strip())


def installed(python: Path, cwd: Path) -> dict[str, bytes]:
    """The installed files of narrowgauge, without those that Python compiles."""
    folder = _packages(python, cwd) / "narrowgauge"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Somebody's project."""
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_wheel_holds_one_package_with_its_data(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as archive:
        names = archive.namelist()
        modes = {info.external_attr >> 28 for info in archive.infolist()}
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"narrowgauge"}
    assert 0o12 not in modes, "a link in the wheel leads nowhere"
    kinds = (".py", ".cu", ".cuh", ".h", ".html", ".css", ".js", ".toml", ".ini", ".yml", ".json", ".sh")
    expected = [
        *(f"narrowgauge/cases/{path.name}" for path in (ROOT / "cases").glob("*.toml")),
        *(
            f"narrowgauge/{path.relative_to(ROOT)}"
            for folder in ("native/kernels", "harness", "reference", "examples")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in kinds
        ),
        "narrowgauge/py.typed",
        "narrowgauge/harness/diagnosis/causes.md",
    ]
    assert not set(expected) - set(names)
    assert not [name for name in names if "/tests/" in name or "__pycache__" in name]


@pytest.mark.parametrize(("index", "reached"), [("http://there", True), ("http://away", False), ("", False)])
def test_make_takes_torch_from_its_index_or_says_what_pip_takes(index: str, reached: bool, tmp_path: Path) -> None:
    """`make` in a folder where the interpreter notes what it is asked, and where an index cannot be reached."""
    for name in ("Makefile", "constraints-cpu.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >> asked\n'
        'case "$*" in "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;; *away*) exit 1;; esac\n'
    )
    python.chmod(0o755)
    command = ["make", ".venv/ready-cpu", "PYTHON=./python", f"TORCH_INDEX={index}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = [line for line in (tmp_path / "asked").read_text().splitlines() if " pip " in line]
    assert len(asked) == 1 + bool(index)
    assert asked[-1].endswith("-c constraints-cpu.txt -e .[test]")
    if index:
        assert "--no-deps" in asked[0]
        assert asked[0].endswith(f"--index-url {index} -c constraints-cpu.txt torch")
    said = "http://away" in done.stderr and "CUDA and takes 5 GB" in done.stderr
    assert said == (bool(index) and not reached)


@pytest.mark.long
def test_a_project_with_the_same_names_keeps_them(environments: dict[str, Path], project: Path) -> None:
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    assert "1 passed" in run(environments["wheel"], *command, cwd=project)


@pytest.mark.long
def test_some_cases_run_in_a_new_environment(environments: dict[str, Path], tmp_path: Path) -> None:
    """The command of the environment, from an empty folder, with the kernels and the cases of the package. The sdist
    installs the same files (`test_sdist_and_wheel_install_the_same`)."""
    command = environments["wheel"].with_name("narrowgauge")
    assert run(command, "--version", cwd=tmp_path).startswith("narrowgauge ")
    listed = run(command, "list", "-k", SOME, cwd=tmp_path).splitlines()
    assert len(listed) > 20
    printed = run(command, "run", "-k", SOME, "-n", "1", cwd=tmp_path)
    assert f"{len(listed)} cases passed" in printed
    assert (tmp_path / "reports" / "latest" / "index.html").is_file()
    assert "layout equal bytes 512" in " ".join(run(command, "show", listed[0], cwd=tmp_path).split())


@pytest.mark.long
def test_commands_work_on_a_package_that_cannot_be_written(environments: dict[str, Path], tmp_path: Path) -> None:
    """Doctor, the mistakes of an operation, and a new repository. Root can write everywhere, so the files count."""
    python = environments["wheel"]
    command, before = python.with_name("narrowgauge"), installed(python, tmp_path)
    folders = [path for path in (_packages(python, tmp_path) / "narrowgauge").rglob("*") if path.is_dir()]
    modes = {path: path.stat().st_mode for path in folders}
    try:
        for path in folders:
            path.chmod(0o555)
        assert "C++ compiler" in run(command, "doctor", cwd=tmp_path)
        own = _packages(python, tmp_path) / "narrowgauge" / "examples" / "my_operations"
        given = [own / "scale_columns.toml", "--operations", own / "scale_columns.py"]
        assert "caught by narrowgauge 2 of 2" in run(command, "mutants", *given, "-n", "1", cwd=tmp_path)
        assert (tmp_path / "reports" / "latest" / "mutants.json").is_file()
        assert "written    narrowgauge_backend.py" in run(command, "init", "new", cwd=tmp_path)
        words = ["kernel_cases", "--backend", "narrowgauge_backend:Backend", "-k", "33x80 and zeros", "-n", "1"]
        assert "2 cases passed" in run(command, "run", *words, cwd=tmp_path / "new")
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert installed(python, tmp_path) == before


@pytest.mark.long
def test_the_wheel_says_where_the_wrong_kernels_are(environments: dict[str, Path], tmp_path: Path) -> None:
    command = [environments["wheel"].with_name("narrowgauge"), "mutants"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert not [word for word in ("in its repository", "a checkout", "--operations FILE") if word not in said], said


@pytest.mark.long
def test_the_oracle_needs_torch_and_numpy_alone(environments: dict[str, Path], tmp_path: Path) -> None:
    """As after `pip install --no-deps narrowgauge`: every other package is refused."""
    assert run(environments["wheel"], "-c", ORACLE, cwd=tmp_path).strip()


@pytest.mark.long
def test_sdist_and_wheel_install_the_same(environments: dict[str, Path], tmp_path: Path) -> None:
    wheel, sdist = (installed(environments[kind], tmp_path) for kind in ("wheel", "sdist"))
    assert wheel.keys() == sdist.keys()
    assert wheel == sdist


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readme_runs_in_a_new_environment(environments: dict[str, Path], tmp_path: Path) -> None:
    """Its Python blocks and its commands of narrowgauge, from an empty folder."""
    python = environments["wheel"]
    for language, text in blocks(ROOT / "README.md"):
        if language == "python":
            named = FILE.match(text)
            (tmp_path / (named[1] if named else "block.py")).write_text(text, encoding="utf-8")
            run(python, tmp_path / (named[1] if named else "block.py"), cwd=tmp_path)
        for line in commands(text) if language == "sh" else ():
            program, *words = shlex.split(line)
            if program == "narrowgauge":
                done = subprocess.run([python.with_name(program), *words], cwd=tmp_path, check=False, timeout=600)
                assert done.returncode == (FAILS in line), line
