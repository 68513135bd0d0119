"""README.md: short, and true. tests/test_blocks.py runs its commands and its code."""

from __future__ import annotations

import re
import shlex
import subprocess

from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES = 150


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES


def test_the_page_of_backends_has_the_example_file() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "backends.md").read_text(encoding="utf-8"), re.DOTALL)
    file = (ROOT / "examples" / "my_kernels.py").read_text(encoding="utf-8")
    assert file.partition('"""\n\n')[2] in blocks


def test_every_page_is_linked() -> None:
    """From the README or, pages for the site alone, from nowhere else."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\(docs/([\w-]+\.md)", README)) == {"index.md", "api.md"}


def test_make_knows_every_target_that_pages_and_workflow_name() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    texts = [line for line in workflow.splitlines() if "run:" in line]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    texts += [path.read_text(encoding="utf-8") for path in pages]
    targets = set(re.findall(r"make [a-z-]+(?: [A-Z]+=\w+)*", "\n".join(texts))) - {"make up"}
    assert {"make report", "make test", "make docs", "make report DEVICE=cuda PY=python3"} <= targets
    assert "make test PYTHON=python" in targets
    for target in sorted(targets):
        done = subprocess.run([*shlex.split(target), "-n"], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_ci_runs_the_command_of_the_readme() -> None:
    command = (ROOT / ".ci" / "run").read_text(encoding="utf-8").partition("exec ")[2].strip()
    assert f"\n{command} " in README
