"""Sources that a backend loads: found in a real run, and compared later without the user's code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.cli import app
from narrowgauge.harness.records import loaded_sources
from narrowgauge.harness.records.journal import read
from narrowgauge.harness.records.loaded_sources import CHANGED, LoadedSources, differences
from tests.harness import small_toml

FILES = {
    "backend.py": """
import ctypes

from kernels.nv import Backend as Base


class Backend(Base):
    declares = {"sources": ["csrc/*.cu", "csrc/*.cuh"], "environment": ["NV_TILE", "NV_ABSENT"]}

    def quantize(self, x, recipe, **options):
        import flashlib.nv
        import kernels.lazy

        ctypes.CDLL("kernels/libtile.so")
        return super().quantize(x, recipe, **options)


class Undeclared(Base):
    pass
""",
    "kernels/__init__.py": "",
    "kernels/nv.py": """
from narrowgauge.reference import ops


class Backend:
    quantize = staticmethod(ops.quantize)
""",
    "kernels/lazy.py": "TILE = 16\n",
    "kernels/unused.py": "",
    "kernels/tile.c": "int tile(void) { return 16; }\n",
    "csrc/nv.cu": "// a kernel\n",
    "site-packages/flashlib/__init__.py": "",
    "site-packages/flashlib/nv.py": "",
    "site-packages/flash_lib-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-lib\nVersion: 1.2\n",
    "site-packages/flash_lib-1.2.dist-info/RECORD": (
        "flashlib/__init__.py,sha256=11,0\nflashlib/nv.py,sha256=22,0\nflash_lib-1.2.dist-info/METADATA,sha256=33,9\n"
    ),
    "site-packages/flash_lib-1.2.dist-info/top_level.txt": "flashlib\n",
    "cases/small.toml": small_toml.matrix(shape=[16, 32], dtype="bf16"),
}
METADATA = "site-packages/flash_lib-1.2.dist-info/METADATA"
RECORD = "site-packages/flash_lib-1.2.dist-info/RECORD"


def narrowgauge(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run of `backend:Backend` in `run`, and its baseline."""
    folder = tmp_path_factory.mktemp("sources")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("c++")
    assert compiler
    library = [folder / "kernels" / name for name in ("libtile.so", "tile.c")]
    subprocess.run([compiler, "-shared", "-fPIC", "-o", *library], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path, str(folder / "site-packages")])
        patch.setattr(sys, "argv", ["narrowgauge", "run", "--backend", "backend:Backend", "--resume"])
        patch.setenv("NV_TILE", "16")
        patch.delenv("NV_ABSENT", raising=False)
        loaded_sources._distributions.cache_clear()
        result = narrowgauge("run", "--backend", "backend:Backend", "-n", 1, "--report-dir", "run")
        assert result.exit_code == 0, result.output
        assert "not verified: declared sources csrc/*.cuh: no file" in " ".join(result.output.split())
        assert narrowgauge("baseline", "accept", "--run", "run", "--baseline", "host.json").exit_code == 0
        yield folder
    loaded_sources._distributions.cache_clear()
    loaded_sources._package.cache_clear()


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder as the current folder."""
    shutil.copytree(made, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "copy" / "site-packages")])
    sys.path.remove(str(made / "site-packages"))
    loaded_sources._package.cache_clear()
    monkeypatch.setenv("NV_TILE", "16")
    return tmp_path / "copy"


def gate() -> Any:
    loaded_sources._package.cache_clear()
    return narrowgauge("gate", "--run", "run", "--baseline", "host.json")


def test_a_run_lists_the_sources_of_its_backend(made: Path) -> None:
    """Modules, also of a method; a shared library; declared files and variables; packages. Only used files."""
    run = read(made / "run")
    assert sorted(run.loaded) == [
        "file backend.py", "file csrc/nv.cu", "file kernels/__init__.py", "file kernels/lazy.py",
        "file kernels/libtile.so", "file kernels/nv.py", "package flash-lib", "variable NV_ABSENT", "variable NV_TILE",
    ]  # fmt: skip
    assert run.loaded["variable NV_TILE"] == "16"
    assert run.loaded["package flash-lib"].startswith("1.2 ")
    assert list(run.unverified) == ["declared sources csrc/*.cuh"]
    assert run.command == "narrowgauge run --backend backend:Backend"


def edit(name: str, text: str = "# changed\n") -> Callable[[], object]:
    def write() -> None:
        path = Path(name)
        path.write_bytes(path.read_bytes() + text.encode())

    return write


STALE: dict[str, tuple[Callable[[], object], str]] = {
    "a module of the backend": (edit("kernels/nv.py"), "kernels/nv.py has changed since the run"),
    "the module of the backend": (edit("backend.py"), "backend.py has changed since the run"),
    "a module of a method": (edit("kernels/lazy.py"), "kernels/lazy.py has changed"),
    "a shared library": (edit("kernels/libtile.so"), "kernels/libtile.so has changed"),
    "a declared source": (edit("csrc/nv.cu"), "csrc/nv.cu has changed"),
    "a deleted module": (lambda: Path("kernels/lazy.py").unlink(), "kernels/lazy.py is not there: it was moved"),
    "a variable": (lambda: os.environ.update(NV_TILE="32"), "variable NV_TILE was '16' in the run, and is '32' now"),
    "a variable that is gone": (lambda: os.environ.pop("NV_TILE"), "was '16' in the run, and is not set now"),
    "another version": (
        lambda: Path(METADATA).write_text(FILES[METADATA].replace("1.2", "1.3")),
        "package flash-lib was 1.2 in the run, and is 1.3 now",
    ),
    "a package of the same version": (
        lambda: Path(RECORD).write_text(FILES[RECORD].replace("=22", "=23")),
        "package flash-lib 1.2 was installed again since the run, with other files",
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", STALE)
def test_a_stale_run_is_refused_by_gate_and_resume(name: str, folder: Path) -> None:
    """With the name of the source and the command of the run."""
    change, words = STALE[name]
    assert gate().exit_code == 0
    change()
    result = gate()
    assert result.exit_code == 2
    assert result.stderr.count("\n  ") == 1
    assert words in result.stderr
    assert result.stderr.endswith("next: narrowgauge run --backend backend:Backend\n")
    resumed = narrowgauge("run", "--backend", "backend:Backend", "-n", 1, "--report-dir", "run", "--resume")
    assert resumed.exit_code == 2
    assert words in resumed.stderr


HARMLESS: dict[str, tuple[Callable[[], object], list[str]]] = {
    "a module that was not loaded": (edit("kernels/unused.py"), []),
    "a new time of a file": (lambda: os.utime("kernels/nv.py", (1, 1)), []),
    "an installer's own files": (lambda: Path(RECORD).write_text(FILES[RECORD].replace("=33", "=34")), []),
    "no package here": (lambda: shutil.rmtree(Path(RECORD).parent), ["flash-lib 1.2: the package is not installed"]),
    "no file here": (
        lambda: [path.unlink() for name in ("*.py", "*/*.py", "*/*.so", "*/*.cu") for path in Path().glob(name)],
        ["6 files of the backend, the first backend.py, are not in "],
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_cannot_be_compared_is_named(name: str, folder: Path) -> None:
    change, notes = HARMLESS[name]
    change()
    result = gate()
    assert result.exit_code == 0, result.stderr
    assert f"not verified: {1 + len(notes)}\n" in result.stdout
    for note in ["declared sources csrc/*.cuh: no file of this name in ", *notes]:
        assert note in result.stdout


def test_undeclared_compiled_sources_are_not_verified(folder: Path) -> None:
    sources = LoadedSources()
    news = {"files": [str(folder / "backend.py"), str(folder / "kernels" / "nv.py")], "packages": []}
    sources.add({**news, "folder": str(folder), "declared": {}})
    assert sources.unverified["compiled sources"].startswith("csrc/nv.cu, kernels/tile.c: name those of the kernel")
    assert '{"sources": ["csrc/nv.cu"]}' in sources.unverified["compiled sources"]
    sources = LoadedSources()
    sources.add({**news, "folder": str(folder), "declared": {"sources": []}})
    assert sources.unverified == {}


def test_a_source_that_changes_during_a_run_makes_it_stale(folder: Path) -> None:
    sources = LoadedSources()
    news = {"files": [str(folder / "backend.py")], "packages": [], "folder": str(folder), "declared": {}}
    sources.add(news)
    edit("backend.py")()
    sources.add(news)
    assert sources.entries == {"file backend.py": CHANGED}
    assert differences(sources.entries)[0] == ["file backend.py changed while the cases ran"]


def test_files_of_others_and_special_files_are_no_sources(folder: Path) -> None:
    """A backend can name any path."""
    os.mkfifo(folder / "pipe.py")
    sources = LoadedSources()
    files = [str(folder / "pipe.py"), loaded_sources.__file__, os.__file__, pytest.__file__]
    sources.add({"files": files, "packages": [], "folder": str(folder), "declared": {"sources": []}})
    assert sources.entries == {}
    assert list(sources.unverified) == ["pipe.py"]
    assert differences({"nonsense a": "1"})[0] == ["'nonsense a' is no file, package, variable"]


@pytest.mark.parametrize("value", ["csrc/nv.cu", [1], [""], None])
def test_a_declaration_that_names_no_list_is_refused(value: Any) -> None:
    wrong = SimpleNamespace(gemm=lambda a, b: None, declares={"sources": value})
    with pytest.raises(BackendError, match=r"declares 'sources' to be .*; it is a list of names: \['csrc"):
        Backend.local("wrong", wrong)
