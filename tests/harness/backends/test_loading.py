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
from narrowgauge.spec.recipes import find_recipe

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


# ---- functions -------------------------------------------------------------------------------------------------------

FUNCTIONS = """
def plain(x): return x, sorted(locals())
def with_recipe(x, recipe): return x, recipe
def with_random(x, random=None): return x, random
def with_scale(x, *, scale): return x, scale
def product(a, b, out_dtype): return a, b, out_dtype
def bare_product(a, b): return a, b
def refusing(x): raise NotImplementedError("no such sizes")
number = 3
"""
NVFP4 = find_recipe("nvfp4")
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Any]] = {
    # name: function@method, arguments and options of the method, result or the word of NotImplementedError
    "no recipe": ("plain@quantize", (1, NVFP4), {}, (1, ["x"])),
    "recipe by name": ("with_recipe@quantize", (1, NVFP4), {}, (1, NVFP4)),
    "random": ("with_random@quantize", (1, NVFP4), {"random": (0, 4)}, (1, (0, 4))),
    "no random": ("plain@quantize", (1, NVFP4), {"random": (0, 4)}, "random"),
    "scale": ("with_scale@quantize", (1, NVFP4), {"scale": 2}, (1, 2)),
    "no scale": ("plain@quantize", (1, NVFP4), {"scale": 2}, "scale"),
    "transform": ("with_recipe@transform", (1, NVFP4), {}, (1, NVFP4)),
    "out_dtype": ("product@gemm", (1, 2), {"out_dtype": "d"}, (1, 2, "d")),
    "no out_dtype": ("bare_product@gemm", (1, 2), {"out_dtype": "d"}, (1, 2)),
    "no bias": ("bare_product@gemm", (1, 2), {"out_dtype": "d", "bias": 3}, "bias"),
    "both halves": ("plain@quantize_both", (1, NVFP4), {"random": (0, 4)}, (1, ["x"])),
    "refusal": ("refusing@quantize", (1, NVFP4), {}, "no such sizes"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_a_backend_with_one_method(name: str, folder: Path) -> None:
    (folder / "ng_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    place, arguments, options, expected = CALLS[name]
    backend = load_implementation(f"ng_functions.py:{place}")
    method = place.partition("@")[2]
    assert [each for each in ("quantize", "gemm", "transform", "quantize_both") if hasattr(backend, each)] == [method]
    if isinstance(expected, str):
        with pytest.raises(NotImplementedError, match=expected):
            getattr(backend, method)(*arguments, **options)
    else:
        assert getattr(backend, method)(*arguments, **options) == expected


def test_a_function_without_random_draws_its_own(folder: Path) -> None:
    (folder / "ng_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    for name, own in {"plain@quantize": True, "with_random@quantize": False, "product@gemm": False}.items():
        assert load_implementation(f"ng_functions.py:{name}").declares == ({"random": "own"} if own else {})


@pytest.mark.parametrize(
    ("place", "words"),
    [("plain@quantise", ("quantise", "quantize")), ("number@quantize", ("number", "function@method")),
     ("plane@quantize", ("plane", "plain"))],
)  # fmt: skip
def test_a_wrong_name_of_a_function_is_named(place: str, words: tuple[str, ...], folder: Path) -> None:
    (folder / "ng_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    with pytest.raises(BackendError) as raised:
        load_implementation(f"ng_functions.py:{place}")
    assert all(word in str(raised.value) for word in words)
    assert normal_name(f"{folder}/ng_functions.py:{place}") == f"ng_functions.py:{place}"
