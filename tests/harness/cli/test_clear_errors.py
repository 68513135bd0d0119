"""A mistake of a backend, a file or a folder is one sentence that names it, with exit status 2 of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.cli import app
from narrowgauge.harness.report import markdown
from tests.harness import small_toml
from tests.paths import ROOT


def raising(name: str) -> Any:
    """A backend with a property that raises."""

    def get(self: Any) -> Any:
        return 1 / 0

    return type("Raising", (Plain,), {name: property(get)})()


class Plain:
    def quantize(self, x: Any, recipe: Any) -> Any:
        """Never called."""


def saying(**attributes: Any) -> Any:
    return type("Saying", (Plain,), attributes)()


BACKENDS: dict[str, tuple[Any, list[str]]] = {
    "a number as dialect": (saying(dialects={"nvfp4": 5}), ["dialects has 'nvfp4': 5", "list of dialects"]),
    "numbers as dialects": (saying(dialects={"nvfp4": [5]}), ["dialects has 'nvfp4': [5]"]),
    "no dialect": (saying(dialects={"nvfp4": None}), ["dialects has 'nvfp4': None"]),
    "dialects that are a list": (saying(dialects=["te"]), ["dialects is ['te']"]),
    "constraints of a word": (saying(constraints={"K": "x"}), ["constraints has 'K': 'x'"]),
    "sources that are a word": (saying(declares={"sources": "a.cu"}), ["'sources'", "a list of names"]),
    "an empty name": (saying(declares={"environment": [""]}), ["'environment'", "a list of names"]),
    **{
        f"a raising {name}": (raising(name), [f"{name} raised ZeroDivisionError", "(at test_clear_errors.py:"])
        for name in ("declares", "dialects", "constraints", "variations", "conventions")
    },
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_wrong_attribute_is_named_with_its_value(name: str) -> None:
    backend, words = BACKENDS[name]
    with pytest.raises(BackendError) as raised:
        Backend.local("mine", backend)
    assert "backend mine: " in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_a_variation_without_a_context_is_named() -> None:
    host = Backend.local("mine", saying(variations=lambda self, device: {"a": 5})).host
    with pytest.raises(BackendError, match="variations gave 'a' without a function"):
        host.variations(None)  # type: ignore[arg-type]


def test_the_command_has_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising.py").write_text("class Backend:\n    @property\n    def declares(self):\n        1 / 0\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "cases.toml").write_text(small_toml.matrix())
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "cases.toml", "--backend", "raising.py:Backend", "-n", "1"])
    assert done.exit_code == 2
    assert "declares raised ZeroDivisionError: division by zero (at raising.py:4)" in done.stderr
    done = CliRunner().invoke(app, ["run", "cases.toml", "--backend", "reference", "-n", "1", "--no-history"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["gate", "--run", "reports/latest", "--baseline", "deep.json"])
    assert done.exit_code == 2, done.output
    assert "deep.json: is no baseline" in done.stderr


def test_a_deleted_folder_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); "
    code += "import sys; sys.argv[1:] = ['run']; from narrowgauge.harness.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr == "narrowgauge: the current folder was deleted; change to another folder\n"


@pytest.mark.parametrize("text", ["@octocat says", "see @org/team", "(@a)"])
def test_a_summary_mentions_nobody(text: str) -> None:
    assert "@\u200b" in markdown.escape(text)
    assert markdown.escape("nvfp4@te") == "nvfp4@te"
