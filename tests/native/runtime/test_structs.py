"""Parameter structs: Python packs the layout of the compiler, and fields by name."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from narrowgauge import native
from narrowgauge.native.runtime import host, sources, structs
from narrowgauge.native.runtime.structs import KernelStruct, enumerators


def _declared() -> dict[tuple[str, str], KernelStruct]:
    """Every struct that a module of native declares."""
    declared = {}
    for module in pkgutil.walk_packages(native.__path__, f"{native.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelStruct):
                declared[value.file, value.name] = value
    return declared


DECLARED = _declared()


@pytest.mark.long
def test_the_compiler_has_the_same_sizes_and_offsets(tmp_path: Path) -> None:
    """All files in a single compilation, each in a separate namespace."""
    parts = [(sources.FOLDER / "cpu" / "simt.h").read_text().replace("#pragma once\n", "\n")]
    files = sorted({file for file, _ in DECLARED})
    for number, file in enumerate(files):
        text = sources.expanded(file).replace("narrowgauge", f"of_{number}")
        parts += [text, *(f"#undef {macro}" for macro in re.findall(r"^#define (\w+)", text, re.MULTILINE))]
    for (file, name), declared in DECLARED.items():
        struct = f"of_{files.index(file)}::{name}"
        parts.append(f'static_assert(sizeof({struct}) == {declared.layout.size}, "size of {name}");')
        parts += [
            f'static_assert(offsetof({struct}, {field}) == {offset}, "{name}.{field}");'
            for field, offset in declared.offsets().items()
        ]
    code = tmp_path / "layout.cpp"
    code.write_text("\n".join(parts))
    command = [host.compiler(), "-std=c++17", "-Wno-invalid-offsetof", "-fsyntax-only", str(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_structs_of_gemm_are_small_enough_for_the_optimizer() -> None:
    """gemm/parameters.cuh: the code of kernels with larger structs differs."""
    for (file, name), declared in DECLARED.items():
        if file.startswith("gemm/"):
            assert declared.layout.size <= 128, name


TEXT = """
enum class Mode : int { FIRST = 0, SECOND = 5 };
struct Inner {
    u8 flag;  // a comment; with (parentheses)
    double wide;
    const u8* const* table;

    int method() const { return 0; }
};
struct Outer {
    bool on;
    Inner inner;
    int a, b;
    Mode mode;
    u32 keys[3];
    u16 tail;
};
"""


Declare = Callable[[str], None]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Replaces the text of every kernel file."""

    def replaced(text: str) -> None:
        monkeypatch.setattr(structs, "expanded", lambda file: text)
        structs._declarations.cache_clear()
        enumerators.cache_clear()

    yield replaced
    structs._declarations.cache_clear()
    enumerators.cache_clear()


@pytest.fixture
def outer(declare: Declare) -> KernelStruct:
    declare(TEXT)
    return KernelStruct("a.cuh", "Outer")


FIELDS = {
    "on": True, "inner": {"flag": 7, "wide": 0.5, "table": None}, "a": 1, "b": -2, "mode": "SECOND", "keys": [3, 4, 5],
    "tail": 6,
}  # fmt: skip


def test_fields_are_packed_in_the_order_of_the_declaration(outer: KernelStruct) -> None:
    value = outer(**dict(reversed(FIELDS.items())))  # type: ignore[arg-type]
    assert value.fields == [True, 7, 0.5, None, 1, -2, 5, 3, 4, 5, 6]
    assert outer.layout.size == 64
    assert outer.offsets() == {
        "on": 0, "inner": 8, "inner.flag": 8, "inner.wide": 16, "inner.table": 24, "a": 32, "b": 36, "mode": 40,
        "keys": 44, "tail": 56,
    }  # fmt: skip


def test_an_initializer_has_the_fields_in_order(declare: Declare) -> None:
    declare(TEXT + "struct Variant {\n    Mode mode;\n    bool on;\n    int count;\n};\n")
    text = KernelStruct("b.cuh", "Variant").initializer(count=3, on=True, mode="SECOND")
    assert text in ("{SECOND, 1, 3}", "{Mode::SECOND, 1, 3}")


@pytest.mark.parametrize("change", [{"a": None}, {"c": 1}], ids=["missing", "unknown"])
def test_a_wrong_field_is_named(change: dict[str, object], outer: KernelStruct) -> None:
    fields = {name: value for name, value in (FIELDS | change).items() if value is not None}
    with pytest.raises(TypeError, match=r"Outer of a\.cuh has fields on, inner, a, b"):
        outer(**fields)  # type: ignore[arg-type]


def test_an_unknown_enumerator_is_an_error(outer: KernelStruct) -> None:
    with pytest.raises(KeyError, match="THIRD"):
        outer(**(FIELDS | {"mode": "THIRD"}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("struct Outer {\n    int a = 3;\n};", "int a = 3"),
        ("struct Outer {\n    Unknown a;\n};", "no struct Unknown"),
        ("struct Another {\n    int a;\n};", "no struct Outer"),
        ("enum E : int { ONE };\nstruct Outer {\n    E a;\n};", "write out the value of ONE"),
    ],
)
def test_declarations_that_python_cannot_read_are_errors(text: str, message: str, declare: Declare) -> None:
    declare(text)
    with pytest.raises(ValueError, match=message):
        KernelStruct("c.cuh", "Outer")
