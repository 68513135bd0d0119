"""No way of Python from a kernel host to the reference or to the checks, and no obstacle for anything else."""

import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge.harness.hosts.blocked_imports import BLOCKED
from tests.paths import ROOT

BLOCK = "from narrowgauge.harness.hosts.blocked_imports import block_reference; block_reference()"
PHILOX = ROOT / "reference" / "numbers" / "philox.py"
"""A file of the reference that imports no other file of it."""
LOADER = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("mine", {str(PHILOX)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""
FORKED = """
import os, sys
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
import narrowgauge.reference
"""
WAYS = {
    "import": ("import narrowgauge.reference", "narrowgauge.reference"),
    "import of a module": ("import narrowgauge.reference.gemm.gemm", "narrowgauge.reference"),
    "from the package": ("from narrowgauge import reference", "narrowgauge.reference"),
    "from the checks": ("from narrowgauge.harness.checks.exact import exact_codes", "narrowgauge.harness.checks"),
    "__import__": ("__import__('narrowgauge.harness.operations.registry')", "narrowgauge.harness.operations"),
    "import_module": ("import importlib; importlib.import_module('narrowgauge.reference')", "narrowgauge.reference"),
    "relative": ("import importlib; importlib.import_module('.reference', 'narrowgauge')", "narrowgauge.reference"),
    "find_spec": ("import importlib.util as u; u.find_spec('narrowgauge.reference.ops')", "narrowgauge.reference"),
    "pkgutil": ("import pkgutil; pkgutil.resolve_name('narrowgauge.reference.ops:gemm')", "narrowgauge.reference"),
    "public function": ("import narrowgauge; narrowgauge.quantize", "narrowgauge.reference"),
    "public functions": ("from narrowgauge import gemm", "narrowgauge.reference"),
    "folder of the checkout": (f"import sys; sys.path.insert(0, {str(ROOT)!r}); import reference.ops", "reference"),
    "current folder": ("import sys; sys.path.insert(0, ''); import harness.checks.exact", "harness.checks"),
    "folder of a module": (f"import sys; sys.path.insert(0, {str(PHILOX.parent)!r}); import philox", "philox"),
    "loader": (LOADER, "reference/numbers/philox.py"),
    "runpy": (f"import runpy; runpy.run_path({str(PHILOX)!r})", "reference/numbers/philox.py"),
    "text": (f"exec(open({str(PHILOX)!r}).read())", "reference/numbers/philox.py"),
    "file descriptor": (f"import os; os.open({str(PHILOX)!r}, os.O_RDONLY)", "reference/numbers/philox.py"),
    "hard link": (f"import os; os.link({str(PHILOX)!r}, 'mine.py')", "reference/numbers/philox.py"),
    "without the finder": ("import sys; del sys.meta_path[0]; import narrowgauge.reference", "reference/__init__.py"),
    "fork": (FORKED, "narrowgauge.reference"),
}
"""Code of a backend, and the module or file that the message names."""


def run(code: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_the_reference_is_closed(way: str) -> None:
    code, named = WAYS[way]
    done = run(f"{BLOCK}\n{code}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert last.startswith(("ImportError: --untrusted", "PermissionError: --untrusted")), done.stderr
    assert "not available to a backend" in last
    assert named in last


@pytest.mark.long
def test_the_same_ways_are_open_without_the_block(tmp_path: Path) -> None:
    """Otherwise the test above would pass for code that never reaches the reference."""
    open_ways = [code for way, (code, _) in WAYS.items() if way not in ("hard link", "fork", "without the finder")]
    done = run("\n".join(f"exec({code!r}, {{}})" for code in open_ways))
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_loaded_modules_are_removed() -> None:
    code = f"""
import narrowgauge, sys
import narrowgauge.harness.checks.exact
assert callable(narrowgauge.quantize)
{BLOCK}
blocked = {BLOCKED!r}
assert not [name for name in sys.modules if name.startswith(blocked)]
assert not {{"reference", "quantize"}} & vars(narrowgauge).keys()
assert "checks" not in vars(narrowgauge.harness)
block_reference()  # again
narrowgauge.quantize
"""
    done = run(code)
    assert "ImportError: --untrusted" in done.stderr
    assert done.stderr.strip().endswith("narrowgauge.reference")
