"""docs/triton.md without a GPU: the commands and tables of the page, by Triton's interpreter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'narrowgauge[triton]'")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed: pip install 'narrowgauge[test]'")

PAGE = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
VERSION = re.search(r"Of Triton (\S+),", PAGE)
COMMANDS = re.findall(r"^\$ TRITON_INTERPRET=1 narrowgauge (.*)\n(.*)$", PAGE, re.MULTILINE)
of_the_page = pytest.mark.skipif(
    VERSION is None or triton.__version__ != VERSION[1],
    reason=f"docs/triton.md shows mistakes of Triton {VERSION and VERSION[1]}, installed is {triton.__version__}",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the examples, as a user copies them."""
    for path in (ROOT / "examples").glob("triton_*.py"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    return tmp_path


def interpreted(folder: Path, *words: str) -> str:
    """Output of Python with `words`, with the interpreter of Triton."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environ |= {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{folder}", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@of_the_page
@pytest.mark.parametrize(("command", "last"), COMMANDS, ids=["own-casts", "replaced-casts"])
def test_the_commands_of_the_page(command: str, last: str, folder: Path) -> None:
    printed = interpreted(folder, "-m", "narrowgauge", *shlex.split(command))
    assert last in printed.splitlines(), printed


@of_the_page
def test_the_page_has_the_wrong_casts(folder: Path) -> None:
    printed = interpreted(folder, "triton_interpreter.py")
    title, counts, examples = printed.strip().split("\n\n")
    assert title == f"Triton {triton.__version__}"
    assert counts in PAGE, printed
    assert examples in PAGE, printed


@pytest.mark.long
def test_replaced_casts_are_right_for_every_value(folder: Path) -> None:
    program = "import triton_interpreter as one; one.Backend(); print(one.table())"
    counts, examples = interpreted(folder, "-c", program).strip().split("\n\n")
    rows = [row.strip("| ").split("|") for row in counts.splitlines()[2:]]
    found = {cell.strip() for row in rows for cell in row[1:]}
    # `error`: Triton before 3.8 has no FNUZ formats in its interpreter.
    assert {"0"} <= found <= {"0", "", "error"}, counts
    assert all(row.split(" | ")[2] == row.split(" | ")[3] for row in examples.splitlines()[2:]), examples


@pytest.mark.long
def test_a_mistake_of_the_kernel_fails_with_replaced_casts(folder: Path) -> None:
    """Multiplying by a rounded reciprocal, in place of a division."""
    file = folder / "triton_kernels.py"
    text = file.read_text(encoding="utf-8")
    wrong = text.replace("tl.math.div_rn(448.0, amax)", "448.0 * tl.math.div_rn(1.0, amax)")
    assert wrong != text
    file.write_text(wrong, encoding="utf-8")
    (command,) = (words for words, _ in COMMANDS if "triton_interpreter" in words)
    assert "scales wrong" in interpreted(folder, "-m", "narrowgauge", *shlex.split(command))
