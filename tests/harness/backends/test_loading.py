"""Backends by the path of their file: the same module from every place, and errors that name file and classes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.backends.loading import (
    backend_file,
    check_name,
    extra_folder,
    load_implementation,
    normal_name,
)
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.records.environment import source_hashes
from narrowgauge.harness.tools.dialect.versions import versions

TEXT = "from {} import number\n\n\nclass Backend:\n    value = number\n\n\nclass Other(Backend):\n    pass\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files of backends beside a helper: in a folder, in a package, and with the name of a module of Python."""
    for name in ("kernels", "kernels/pack"):
        (tmp_path / name).mkdir()
    texts = {
        "kernels/ng_own.py": TEXT.format("ng_helper"), "kernels/ng_helper.py": "number = 1\n",
        "kernels/json.py": TEXT.format("ng_helper"), "kernels/pack/__init__.py": "",
        "kernels/pack/ng_own.py": TEXT.format(".ng_helper"), "kernels/pack/ng_helper.py": "number = 2\n",
        "kernels/ng-own.v2.py": TEXT.format("ng_helper"), "kernels/broken.py": "import gone\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("ng_", "ng-", "pack", "narrowgauge_backend")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "value"),
    [("kernels/ng_own.py", 1), ("kernels/pack/ng_own.py", 2), ("kernels/json.py", 1), ("kernels/ng-own.v2.py", 1)],
)
def test_a_file_is_found_from_every_place(folder: Path, file: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = []
    for place, given in ((folder, file), (folder, f"./{file}"), (folder, f"{folder}/{file}"), (folder / "kernels", "")):
        monkeypatch.chdir(place)
        name = normal_name(f"{given or f'../{file}'}:Other")
        assert name == f"{file.removeprefix('kernels/') if place != folder else file}:Other"
        assert backend_file(name) == folder / file
        check_name(name)
        backend: Any = load_implementation(name)
        assert (type(backend).__name__, backend.value) == ("Other", value)
        hashes.append(source_hashes(name)["backend"])
        assert not extra_folder(name)
        assert "torch" in versions(name)
    assert len(set(hashes)) == 1
    assert hashes[0]


def test_names_keep_their_meaning(folder: Path) -> None:
    for name in ("native", "torchao:floor", "package.module:Name", "my_kernels"):
        assert normal_name(name) == name
        assert backend_file(name) is None
    assert normal_name("own.py:Backend", folder / "kernels") == "kernels/own.py:Backend"
    assert normal_name("/elsewhere/own.py") == "/elsewhere/own.py"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kernels/ng_own.py:Bakend", ["'Bakend'", "did you mean 'Backend'", "its classes are Backend, Other"]),
        ("kernels/ng_helper.py:Backend", ["'Backend'", "it has no class"]),
        ("kernels/ng_won.py:Backend", ["there is no file", "did you mean 'ng_own.py'", "from the current folder"]),
        ("kernels/broken.py:Backend", ["cannot be imported", "No module named 'gone'"]),
        ("kernel", ["folder/file.py:Name"]),
    ],
)
def test_a_wrong_name_is_one_error(name: str, words: list[str]) -> None:
    with pytest.raises(BackendError) as caught:
        load_implementation(name)
    for word in (name, *words):
        assert word in str(caught.value)
