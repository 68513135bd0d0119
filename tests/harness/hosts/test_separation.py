"""No way from a kernel host of `--untrusted` to the reference, the checks and the files of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.hosts import separation
from narrowgauge.harness.hosts.separation import LANDLOCK, NAMESPACES, NOT_SEPARATED, NOTHING
from narrowgauge.harness.records.journal import read
from tests.harness.running.test_survival import CASES as CASES_OF
from tests.paths import ROOT

OPS = ROOT / "reference" / "numbers" / "philox.py"
"""A file of the reference without imports from the reference."""
CHILD = f"import subprocess; print(subprocess.run(['cat', {str(OPS)!r}], capture_output=True, check=True).stdout)"
LOADER = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("mine", {str(OPS)!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
EXTENSION = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
assert libc.open({os.fsencode(OPS)!r}, 0) >= 0, ctypes.get_errno()
"""
OTHER_NAMESPACE = f"""
import subprocess
script = 'mount --bind {ROOT} /mnt; cat /mnt/reference/numbers/philox.py || cat {OPS}'
subprocess.run(["unshare", "-Urm", "sh", "-c", script], check=True, capture_output=True)
"""
BLOCK = (
    "from narrowgauge.harness.hosts import separation as s;"
    "s._RefusingFinder.find_spec = lambda *_: None; s.hidden_folders = lambda: []; s.NOTHING = s.NAMESPACES;"
)
UNMOUNT = f"""
import ctypes
ctypes.CDLL(None).umount2({os.fsencode(ROOT / "reference")!r}, 2)
open({str(OPS)!r})
"""
SHARED = f"/dev/shm/narrowgauge-test-{os.getpid()}"
PARENT = "/proc/{parent}/root" + str(OPS)
WAYS = {
    "import": "import narrowgauge.reference.ops",
    "public function": "import narrowgauge; narrowgauge.quantize",
    "checks": "from narrowgauge.harness.checks.exact import exact_codes",
    "import_module": "import importlib; importlib.import_module('narrowgauge.reference.ops')",
    "folder of the checkout": f"import sys; sys.path.insert(0, {str(ROOT)!r}); import reference.ops",
    "loader": LOADER,
    "runpy": f"import runpy; runpy.run_path({str(OPS)!r})",
    "text": f"exec(open({str(OPS)!r}).read())",
    "file descriptor": f"import os; os.open({str(OPS)!r}, os.O_RDONLY)",
    "descriptor of a folder": f"import os; os.open('philox.py', 0, dir_fd=os.open({str(OPS.parent)!r}, 0))",
    "hard link": f"import os; os.link({str(OPS)!r}, 'linked.py'); open('linked.py')",
    "symbolic link": f"import os; os.symlink({str(OPS)!r}, 'symbolic.py'); open('symbolic.py')",
    "renamed folder": f"import os; os.rename({str(OPS.parent)!r}, 'moved'); open('moved/philox.py')",
    "patched functions": f"{BLOCK} import narrowgauge.reference.ops",
    "patched realpath": "import os; os.path.realpath = lambda p: '/'; import narrowgauge.reference.ops",
    "without finders": "import sys; del sys.meta_path[0]; import narrowgauge.reference.ops",
    "another program": CHILD,
    "compiled code": EXTENSION,
    "another namespace": OTHER_NAMESPACE,
    "unmount": UNMOUNT,
    "root of the parent": f"open({PARENT!r})",
    "memory of the parent": "open('/proc/{parent}/mem', 'rb').read(1)",
    "descriptor of the parent": "import os; os.open('/proc/{parent}/fd/1', os.O_RDONLY)",
    "signals": "import os; os.kill({parent}, 0)",
}
"""Code of a backend that reaches the reference, the checks or the judge."""
ALLOWED = {
    "native kernels": f"open({str(ROOT / 'native' / 'ops.py')!r})",
    "formats": "import narrowgauge.spec.formats",
    "a new file": "open('new', 'w').write('1'); assert open('new').read() == '1'",
    "a program": "import subprocess; subprocess.run(['true'], check=True)",
    "shared memory": f"open({SHARED!r}, 'w')",
    "moved file": "import os; os.mkdir('a'); open('b', 'w').write('1'); os.rename('b', 'a/b'); open('a/b')",
}
SCRIPT = """
import contextlib, io, json, os, sys
from narrowgauge.harness.hosts import separation
first, own, ways = json.loads(sys.argv[1])
def refuse(folders):
    raise OSError(1)
if first != separation.NAMESPACES:
    separation._enter_namespaces = refuse
if first == separation.NOTHING:
    separation._restrict_reads = refuse
print(json.dumps(found := separation.separate([own])), flush=True)
if found != first:
    sys.exit()  # the code would change files
separation.refuse_imports()
for name, code in ways.items():
    if not (child := os.fork()):
        text = ""
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(code.replace("{parent}", "PARENT"), {})
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
        print(json.dumps([name, text]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def results(first: str, ways: dict[str, str], folder: Path, own: Path) -> dict[str, str]:
    """The error of each piece of code in a process that is separated, by its name, empty without one, and the
    mechanism. `first`: the best mechanism that the process may take."""
    script = SCRIPT.replace("PARENT", str(os.getpid()))
    command = [sys.executable, "-c", script, json.dumps([first, str(own), ways])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    mechanism, *lines = map(json.loads, done.stdout.splitlines())
    if mechanism != first:
        pytest.skip(f"this system has no {first}: {mechanism}")
    return dict(lines)


@pytest.mark.parametrize("mechanism", [NAMESPACES, LANDLOCK])
def test_no_way_leads_to_the_reference(mechanism: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    found = results(mechanism, WAYS | ALLOWED, tmp_path, own)
    assert [name for name in WAYS if not found[name]] == []
    assert {name: found[name] for name in ALLOWED} == dict.fromkeys(ALLOWED, "")
    assert "not available to a backend: narrowgauge.reference" in found["import"]
    assert Path(SHARED).exists() == (mechanism == LANDLOCK)
    Path(SHARED).unlink(missing_ok=True)


@pytest.mark.long
def test_the_same_ways_are_open_without_a_mechanism(tmp_path: Path) -> None:
    """Otherwise the test above would pass for code that never reaches the reference."""
    names = ("text", "loader", "file descriptor", "descriptor of a folder", "another program", "compiled code")
    found = results(NOTHING, {name: WAYS[name] for name in names}, tmp_path, tmp_path)
    assert found == dict.fromkeys(names, "")


def test_the_files_of_a_run_are_out_of_reach(tmp_path: Path) -> None:
    report, outside = tmp_path / "report", tmp_path / "outside"
    for folder in (report, outside):
        folder.mkdir()
    (report / "records.jsonl").write_text("{}")
    ways = {"read": "open('records.jsonl')", "write": "open('records.jsonl', 'w')", "here": "open('../outside/x', 'w')"}
    found = results(NAMESPACES, ways, report, report)
    assert "FileNotFoundError" in found["read"]
    assert "Read-only" in found["write"]
    assert not found["here"]
    assert (report / "records.jsonl").read_text() == "{}"


def test_the_repository_of_a_checkout_is_hidden() -> None:
    hidden = separation.hidden_folders()
    assert {str(ROOT / "reference"), str(ROOT / "harness" / "operations")} <= set(hidden)
    assert not any(str(ROOT / "native").startswith(folder) for folder in hidden)
    assert (str(ROOT / ".git") in hidden) == (ROOT / ".git").is_dir()


KERNELS = """
import gc, os, sys
from dataclasses import replace

ATTACKS = {
    32: "from narrowgauge.harness.hosts import separation as s; s._RefusingFinder.find_spec = lambda *_: None",
    48: "import os; os.path.realpath = lambda path, **_: path",
    64: "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Refusing' not in type(f).__name__]",
    80: "import sys; sys.path.insert(0, os.environ['CHECKOUT'])",
    96: "[o.__dict__.clear() for o in gc.get_objects() if type(o).__name__ == '_RefusingFinder']",
}


class Backend:
    # Each case reaches the reference by another way.
    def quantize(self, x, recipe):
        exec(ATTACKS[min(ATTACKS, key=lambda k: abs(k - x.shape[1]))], globals())
        try:
            from narrowgauge.reference import ops
        except ImportError:
            from reference import ops
        return ops.quantize(x, recipe)


class Writes:
    # The native kernels, which write wrong results into the record of the run.
    def quantize(self, x, recipe):
        from narrowgauge.native import ops
        with open("reports/latest/records.jsonl", "w") as file:
            file.write("{}")
        return ops.quantize(x, recipe)
"""
CASES = CASES_OF.format(shapes=[[16, columns] for columns in range(32, 97, 16)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cheating.py").write_text(KERNELS)
    (tmp_path / "cases.toml").write_text(CASES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CHECKOUT", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*words: str) -> tuple[Any, list[Any]]:
    """The result of the command, and its records."""
    command = ["run", "cases.toml", "--untrusted", "--secret", "7", "--timeout", "30", "--no-history", *words]
    done = CliRunner().invoke(app, command)
    return done, read(Path("reports/latest")).records


@pytest.mark.parametrize("words", [("-n", "2"), ("-n", "1", "--fresh-host")], ids=" ".join)
def test_a_kernel_that_is_the_reference_gets_no_pass(words: tuple[str, ...], folder: Path) -> None:
    results(NAMESPACES, {}, folder, folder)  # skips on a system without namespaces
    done, records = run("--backend", "cheating:Backend", *words)
    assert done.exit_code == 1, done.output
    assert [record["verdict"] for record in records] == ["error"] * 5
    assert {note["cause"] for record in records for note in record["notes"]}.isdisjoint({NOT_SEPARATED})


def test_a_kernel_cannot_write_into_the_report(folder: Path) -> None:
    results(NAMESPACES, {}, folder, folder)
    _, records = run("--backend", "cheating:Writes", "-n", "1")
    assert [record["verdict"] for record in records] == ["error"] * 5
    assert all("Read-only file system" in record["message"] for record in records)
