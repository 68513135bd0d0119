"""Cases: reading the TOML files of the matrix, expanding them, selecting from them.

A file holds `[[matrix]]` tables. Each names an operation and a tier, and gives a value or a list of values for every
key of `KEYS[operation]`; the product of the lists is its cases. cases/README.md is the schema for people.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.harness.cases import schema, toml_file
from narrowgauge.harness.cases.sections import section_sizes
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.training import TrainingRecipe, training_recipe

LEDGER = "known.toml"
"""A file that lies among case files and is none: the ledger of known failures (`harness.gate.ledger`)."""


class CaseFileError(Exception):
    """A case file that says something it should not: the file, the key and what to write instead."""


@dataclass(frozen=True)
class Case:
    """One point of the matrix. `id` is stable: it names the case in reports and seeds its inputs."""

    operation: str
    recipe: str
    """Name of the recipe; of a gemm `recipe+w_recipe` where they differ; of a module that of the training recipe;
    nothing of a swizzle."""
    shape: tuple[int, ...]
    """(M, K), or (…, K) of a quantize; (M, K, N) of a gemm; (R, C) of a swizzle; (B, S, K, N) of a linear layer; (B, S,
    hidden, ffn) of a transformer layer."""
    dtype: str
    """Of the input; of a gemm `bf16xfp32-bf16`: x, w and output; nothing of a swizzle."""
    inputs: str
    """Input family, or `file:tensor` of captured tensors."""
    flags: tuple[str, ...] = ()
    tier: str = "quick"
    file: str = ""

    @property
    def id(self) -> str:
        """operation/recipe/shape/dtype/inputs, those that there are, then the flags joined by +."""
        parts = [self.operation, self.recipe, "x".join(map(str, self.shape)), self.dtype, self.inputs]
        return "/".join(part for part in [*parts, "+".join(self.flags)] if part)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Of a gemm: the dtypes of x, w and the output."""
        operands, _, out = self.dtype.partition("-")
        x, _, w = operands.partition("x")
        return x, w, out

    @property
    def recipes(self) -> tuple[str, str]:
        """Of a gemm: the recipes of x and w."""
        x, _, w = self.recipe.partition("+")
        return x, w or x

    @property
    def layout(self) -> str:
        """Of a gemm: `tn`, `nn` or `nt`."""
        return self.flags[0]

    @property
    def out_recipe(self) -> str:
        """Of a quantized gemm: the recipe of its output."""
        return self.flags[1]

    @property
    def padded(self) -> bool:
        """Of a grouped gemm: whether its sections are padded to the alignment of the recipe first."""
        return "padded" in self.flags

    @property
    def usage(self) -> str:
        """Of a quantize: `rowwise`, `columnwise` or `both`."""
        return self._flag(schema.USAGES)

    @property
    def view(self) -> str:
        """How the tensor lies in memory: `contiguous`, `strided` or `transposed`."""
        return self._flag(schema.VIEWS)

    @property
    def scales(self) -> str:
        """How the scales are asked for: `linear` or `swizzled`."""
        return self._flag(schema.SCALES)

    @property
    def words(self) -> bool:
        """Whether random bits are given as words, and not as seed and offset."""
        return "words" in self.flags

    @property
    def sections(self) -> tuple[int, ...]:
        """Of a grouped operation: the rows of each section."""
        if self.is_module:
            return section_sizes(self.flags[0], self.shape[0])
        rule = find_recipe(self.recipes[0])
        return section_sizes(self.flags[0], self.shape[0], whole=schema.whole_of(rule, self.usage))

    @property
    def is_module(self) -> bool:
        """Whether it runs a module, forward and backward, under a training recipe."""
        return self.operation in schema.MODULES

    @property
    def training(self) -> TrainingRecipe:
        """Of a module: the training recipe."""
        return training_recipe(self.recipe)

    @property
    def norm(self) -> str:
        """Of a module that normalizes: `layer` or `rms`."""
        return self._flag(schema.NORMS)

    @property
    def heads(self) -> int:
        """Of a transformer layer: the heads of its attention."""
        return self._number("heads", 1)

    @property
    def steps(self) -> int:
        """Of a module: the training steps."""
        return self._number("steps", 1)

    def _number(self, name: str, default: int) -> int:
        """The number of a flag like `steps:3`."""
        found = (flag.partition(":")[2] for flag in self.flags if flag.startswith(f"{name}:"))
        return int(next(found, default))

    def _flag(self, choices: tuple[str, ...]) -> str:
        """The choice among the flags; the first of them is the default, which no flag names."""
        return next((choice for choice in choices if choice in self.flags), choices[0])


def load(path: str | Path) -> list[Case]:
    """The cases of one file, in order; a case that is in both tiers is quick.

    Raises CaseFileError where the file cannot be read, is not TOML, or has an unknown key or value.
    """
    path = Path(path)
    return _merged(case for where, table in _tables(path) for case in _expand(table, where, str(path)))


def _tables(path: Path) -> list[tuple[str, Any]]:
    """The tables of a file, each with its place in words."""
    tables = toml_file.read(path, "matrix", what="a case file", error=CaseFileError)
    if not isinstance(tables, list) or not tables:
        raise CaseFileError(f"{path}: no [[matrix]] table, so no case; see cases/README.md")
    return [(f"{path}: [[matrix]] {number}", table) for number, table in enumerate(tables, 1)]


def line_of(path: Path, name: str) -> int:
    """The line of the first table of a file that holds the case of this id, counted from 1; 1 where that is unknown."""
    if path.suffix != ".toml":  # captured tensors: gigabytes, perhaps
        return 1
    try:
        tables = _tables(path)
        number = next(i for i, (where, table) in enumerate(tables) if _holds(table, where, name))
        lines = path.read_text(encoding="utf-8").splitlines()
    except (CaseFileError, StopIteration, OSError):
        return 1
    heads = [i for i, line in enumerate(lines, 1) if re.match(r"\s*\[\[\s*matrix\s*\]\]", line)]
    # A string of several lines may hold what looks like a table, and a table may be written otherwise.
    return heads[number] if len(heads) == len(tables) else 1


def _holds(table: Any, where: str, name: str) -> bool:
    return any(case.id == name for case in _expand(table, where, ""))


def _merged(cases: Iterable[Case]) -> list[Case]:
    """One case an id, in order of appearance, quick where any of them is."""
    merged: dict[str, Case] = {}
    for case in cases:
        known = merged.setdefault(case.id, case)
        if case.tier == "quick":
            merged[case.id] = replace(known, tier="quick")
    return list(merged.values())


def _expand(table: Any, where: str, file: str) -> Iterable[Case]:
    if not isinstance(table, dict):
        raise CaseFileError(f"{where}: is {table!r}; a matrix is a table of keys")
    operation = table.get("operation")
    if not isinstance(operation, str) or operation not in schema.KEYS:
        raise CaseFileError(f"{where}: operation {schema.one_of(schema.KEYS)(operation)}")
    keys = schema.KEYS[operation]
    known = ["operation", "tier", *keys]
    for key in table:
        if key not in known:
            raise CaseFileError(
                f"{where}: unknown key {key!r}{schema.nearest(key, known)}; a {operation} has {', '.join(known)}"
            )
    tier = table.get("tier")
    if tier not in schema.TIERS:
        raise CaseFileError(f"{where}: tier {schema.one_of(schema.TIERS)(tier)}")
    axes = []
    for key, check in keys.items():
        if key not in table and key not in schema.OPTIONAL:
            needed = ", ".join(k for k in keys if k not in schema.OPTIONAL)
            raise CaseFileError(f"{where}: {key} is missing; a {operation} needs {needed}")
        if key not in table:
            axes.append([schema.OPTIONAL[key]])
            continue
        values = _values(key, table[key])
        if not values:
            raise CaseFileError(f"{where}: {key} is an empty list, which selects nothing")
        for value in values:
            if wrong := check(value):
                raise CaseFileError(f"{where}: {key} {wrong}")
        axes.append(values)
    for chosen in itertools.product(*axes):
        point = {"operation": operation, **dict(zip(keys, chosen, strict=True))}
        if wrong := schema.problem(point):
            raise CaseFileError(f"{where}: {wrong}")
        yield case_of(point, tier, file)


def _values(key: str, given: Any) -> list[Any]:
    if key == "shape":  # a shape is itself a list
        return given if isinstance(given, list) and any(isinstance(v, list) for v in given) else [given]
    return given if isinstance(given, list) else [given]


def case_of(point: schema.Point, tier: str = "quick", file: str = "") -> Case:
    """The case of a point: flags are a layout, sections, an output's recipe, heads, and what is not its default."""
    names = dict.fromkeys(schema.recipes_of(point)) if "recipe" in point else dict.fromkeys(_training(point))
    dtype = f"{point['x']}x{point['w']}-{point['out']}" if "out" in point else point.get("dtype", "")
    flags = [point[key] for key in ("layout", "sections", "out_recipe") if key in point]
    flags += [f"heads:{point['heads']}"] if "heads" in point else []
    for key, choices in schema.FLAGS.items():
        if point.get(key) in choices[1:]:  # the first is the default
            flags.append(point[key])
    flags += [f"steps:{point['steps']}"] if point.get("steps", 1) > 1 else []
    flags += [key for key in schema.SWITCHES if point.get(key)]
    shape = tuple(point["shape"])
    return Case(point["operation"], "+".join(names), shape, dtype, point["inputs"], tuple(flags), tier, file)


def _training(point: schema.Point) -> list[str]:
    """The name of a module's training recipe, as it says itself; no other operation has one."""
    return [str(training_recipe(point["training"]))] if "training" in point else []


def load_all(paths: Sequence[str | Path]) -> list[Case]:
    """The cases of files, and of every *.toml of folders, each id once; the ledger among them is passed over.

    Raises CaseFileError, also without a file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        cases = [file for file in found if file.name != LEDGER]
        if path.is_dir() and not cases:
            raise CaseFileError(f"{path}: holds no *.toml case file")
        files += cases
    if paths and not files:
        raise CaseFileError(f"{', '.join(map(str, paths))}: holds known failures, and no case")
    return _merged(case for file in files for case in load(file))


class _Matcher:
    """What a keyword expression asks of one id: is this word in it?"""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, word: str, /, **_: object) -> bool:
        return word.lower() in self.text


def matching(keyword: str) -> Callable[[str], bool]:
    """Whether a pytest keyword expression matches a name; none matches all.

    Raises ValueError for an expression that cannot be read.
    """
    if not keyword:
        return lambda name: True
    from _pytest.mark.expression import Expression

    try:
        expression = Expression.compile(keyword)
    except Exception as error:  # pytest's own ParseError before release 9, SyntaxError since
        raise ValueError(f"cannot read the keyword expression {keyword!r}: {error}") from error
    return lambda name: expression.evaluate(_Matcher(name.lower()))


def select(cases: Iterable[Case], *, tier: str = "full", keyword: str = "") -> list[Case]:
    """The cases of a tier (`full` has them all) whose id a pytest keyword expression matches.

    Raises ValueError for an expression that cannot be read.
    """
    matches = matching(keyword)
    return [case for case in cases if tier in ("full", case.tier) and matches(case.id)]
