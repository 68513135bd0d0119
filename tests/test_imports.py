"""The dependency rule of docs/design.md, read from every import of the project, and the size of its folders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

FOLDERS = {
    "narrowgauge.spec": ROOT / "narrowgauge" / "spec",
    "narrowgauge.contract": ROOT / "narrowgauge" / "contract",
    "narrowgauge.contracts": ROOT / "narrowgauge" / "contracts",
    "narrowgauge.adapt": ROOT / "narrowgauge" / "adapt",
    "narrowgauge.reference": ROOT / "reference",
    "narrowgauge.native": ROOT / "native",
    "narrowgauge.harness": ROOT / "harness",
}
ORDER = (
    "machine", "cases", "inputs", "backends", "hosts", "checks", "operations", "diagnosis", "records", "running",
    "report", "api", "watch", "power", "gate", "certify", "tools", "cli", "pytest_plugin",
)  # fmt: skip
"""Folders of the harness: each imports only from itself and from earlier folders."""
BUILDERS = {
    "narrowgauge.harness.cli.build",  # compiles the kernels of a CPU in advance
    "narrowgauge.harness.hosts.changed_source",  # compiles kernels with a changed file
    "narrowgauge.harness.records.environment",  # names the compilers and their flags
    "narrowgauge.harness.running.sanitizer",  # builds kernels with sanitizers
    "narrowgauge.harness.tools.doctor.facts",  # tries the sanitizers of the compiler
}
"""Modules of the harness that build kernels and import `native`, beside the tools in `bench` and `mutants`, and the
`bench.py` of each operation."""
MOST = 12
"""Entries of a folder."""
LARGER = {"harness", "harness/operations", "harness/cli", "harness/backends/adapters", "harness/report/page/assets"}
"""The folders of `ORDER`, a file for each command and for each library, and assets of the page."""


def module_files() -> dict[str, Path]:
    """Every module of the project and its file."""
    found = {
        "narrowgauge": ROOT / "narrowgauge" / "__init__.py",
        "narrowgauge.__main__": ROOT / "narrowgauge/__main__.py",
    }
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = module_files()


def imports(text: str, module: str, *, package: bool) -> Iterator[str]:
    """The modules that a file imports, also inside functions, under TYPE_CHECKING, and relatively.

    `from a import b` is an import of `a.b` if that is a module, else of `a`.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".") if package else module.split(".")[:-1]
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            for name in node.names:
                inner = f"{base}.{name.name}"
                yield inner if inner in MODULES else base


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """The imports of every module."""
    return {
        name: {
            other
            for other in imports(path.read_text(encoding="utf-8"), name, package=path.name == "__init__.py")
            if other != name
        }
        for name, path in MODULES.items()
    }


def is_bench(module: str) -> bool:
    """Whether only the bench imports a module: `bench.py` of an operation, and what these files share."""
    return re.match(r"narrowgauge\.harness\.operations\.(\w+\.bench$|timing\b)", module) is not None


def side(module: str) -> str:
    """spec, reference, native or harness."""
    return module.split(".")[1] if "." in module else ""


def of_project(module: str) -> bool:
    return module == "narrowgauge" or module.startswith("narrowgauge.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import narrowgauge.spec.recipe", {"narrowgauge.spec.recipe"}),
        ("from narrowgauge.spec import recipe", {"narrowgauge.spec.recipe"}),
        ("from narrowgauge.spec.recipe import Recipe", {"narrowgauge.spec.recipe"}),
        ("from . import recipe", {"narrowgauge.spec.recipe"}),
        ("from .recipe import Recipe", {"narrowgauge.spec.recipe"}),
        ("from ..reference import ops", {"narrowgauge.reference.ops"}),
        ("def f():\n    from narrowgauge.native import ops", {"narrowgauge.native.ops"}),
        ("if TYPE_CHECKING:\n    import narrowgauge.native.ops", {"narrowgauge.native.ops"}),
    ],
)
def test_every_form_of_an_import_is_seen(text: str, expected: set[str]) -> None:
    assert set(imports(text, "narrowgauge.spec.recipes", package=False)) == expected


def test_every_import_of_the_project_names_a_module(graph: dict[str, set[str]]) -> None:
    unknown = {f"{name} -> {other}" for name, found in graph.items() for other in found if of_project(other)} - {
        f"{name} -> {other}" for name, found in graph.items() for other in found if other in MODULES
    }
    assert not unknown


def test_sides_import_spec_and_never_each_other(graph: dict[str, set[str]]) -> None:
    allowed = {
        "spec": {"spec"},
        "contract": {"spec", "contract"},
        "contracts": {"spec", "contract", "contracts"},
        "adapt": {"spec", "adapt"},
        "reference": {"spec", "reference"},
        "native": {"spec", "native"},
    }
    wrong = [
        f"{name} -> {other}"
        for name, found in graph.items()
        for other in found
        if side(name) in allowed and of_project(other) and side(other) not in allowed[side(name)]
    ]
    assert not wrong


def test_scalar_and_vectorised_reference_share_spec_alone(graph: dict[str, set[str]]) -> None:
    """Each of the two checks the second, so a shared function would hide its own error."""

    def scalar(module: str) -> bool:
        return f"{module}.".startswith("narrowgauge.reference.scalar.")

    wrong = [
        f"{name} -> {other}"
        for name, found in graph.items()
        for other in found
        if (scalar(name) and of_project(other) and not scalar(other) and side(other) != "spec")
        or (scalar(other) and not scalar(name))
    ]
    assert not wrong
    assert sum(scalar(name) for name in graph) > 1


def test_nobody_inside_imports_the_public_package(graph: dict[str, set[str]]) -> None:
    assert not [name for name, found in graph.items() if "narrowgauge" in found]


def test_the_harness_imports_downwards(graph: dict[str, set[str]]) -> None:
    def folder(module: str) -> int:
        return ORDER.index(module.split(".")[2])

    wrong = [
        f"{name} -> {other}"
        for name, found in graph.items()
        for other in found
        if side(name) == side(other) == "harness" and name.count(".") > 1 and folder(other) > folder(name)
    ]
    assert not wrong
    assert {path.name for path in (ROOT / "harness").iterdir() if path.is_dir()} - {"__pycache__"} == set(ORDER)


def test_only_what_builds_kernels_imports_native(graph: dict[str, set[str]]) -> None:
    prefixes = tuple(f"narrowgauge.harness.tools.{tool}." for tool in ("bench", "mutants"))
    importers = {
        name
        for name, found in graph.items()
        if side(name) == "harness" and any(side(other) == "native" for other in found)
    }
    assert {name for name in importers if not name.startswith(prefixes) and not is_bench(name)} == BUILDERS


def test_only_the_bench_imports_the_benches_of_operations(graph: dict[str, set[str]]) -> None:
    """Judges and kernel hosts import the operations, and never `native` with them."""
    importers = {name for name, found in graph.items() if any(map(is_bench, found)) and not is_bench(name)}
    assert importers
    assert all(name.startswith("narrowgauge.harness.tools.bench.") for name in importers), importers


def test_there_are_no_circles(graph: dict[str, set[str]]) -> None:
    remaining = {name: found & MODULES.keys() for name, found in graph.items()}
    while free := [name for name, found in remaining.items() if not found & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining


def test_folders_are_small() -> None:
    folders = [folder for top in FOLDERS.values() for folder in (top, *top.rglob("*")) if folder.is_dir()]
    no_entries = {"__init__.py", "__pycache__"}
    sizes = {
        str(folder.relative_to(ROOT)): len({entry.name for entry in folder.iterdir()} - no_entries)
        for folder in folders
        if folder.name != "__pycache__"
    }
    assert not {name: size for name, size in sizes.items() if size > MOST and name not in LARGER}


def test_the_checkout_is_imported_by_one_name() -> None:
    """In a checkout `import reference` would succeed too, and load every module a second time."""
    files = [
        *(ROOT / "tests").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        ROOT / "conftest.py",
        *MODULES.values(),
    ]
    names = {folder.name for folder in FOLDERS.values()}
    # Parsing every file takes three seconds. Text behind `from` or in a line with `import` tells which files to parse.
    likely = re.compile(rf"\bfrom\s+(?:{'|'.join(names)})\b|\bimport\b.*\b(?<!\.)(?:{'|'.join(names)})\b")
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        if likely.search(text)
        for name in imports(text, "tests", package=False)
        if name.split(".")[0] in names
    ]
    assert not wrong
