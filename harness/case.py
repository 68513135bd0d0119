"""Cases: reading the TOML files of the matrix, expanding them, selecting from them.

A file holds `[[matrix]]` tables. Each names an operation and a tier, and gives a value or a list of values for every
key of `KEYS[operation]`; the product of the lists is its cases. cases/README.md is the schema for people.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.families import families_of
from reference.recipes import recipe

TIERS = ("quick", "full")
DTYPES = ("fp32", "bf16", "fp16")
USAGES = ("rowwise", "columnwise")
LAYOUTS = ("tn", "nn", "nt")


class CaseFileError(Exception):
    """A case file that says something it should not: the file, the key and what to write instead."""


@dataclass(frozen=True)
class Case:
    """One point of the matrix. `id` is stable: it names the case in reports and seeds its inputs."""

    operation: str
    recipe: str
    shape: tuple[int, ...]
    """(M, K) of a quantize, (M, K, N) of a gemm."""
    dtype: str
    """Of the input; of a gemm `bf16xfp32-bf16`: x, w and output."""
    inputs: str
    """Input family, or `file:tensor` of captured tensors."""
    flags: tuple[str, ...] = ()
    tier: str = "quick"
    file: str = ""

    @property
    def id(self) -> str:
        """operation/recipe/shape/dtype/inputs, then the flags joined by +."""
        parts = [self.operation, self.recipe, "x".join(map(str, self.shape)), self.dtype, self.inputs]
        return "/".join([*parts, "+".join(self.flags)] if self.flags else parts)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Of a gemm: the dtypes of x, w and the output."""
        operands, _, out = self.dtype.partition("-")
        x, _, w = operands.partition("x")
        return x, w, out

    @property
    def layout(self) -> str:
        """Of a gemm: `tn`, `nn` or `nt`."""
        return self.flags[0]


def _dims(count: int, names: str) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        sizes = isinstance(value, list) and len(value) == count and all(type(n) is int and n >= 0 for n in value)
        return None if sizes else f"is {value!r}; a shape is {names}, {count} sizes that are not negative"

    return check


def _one_of(choices: Iterable[str]) -> Callable[[Any], str | None]:
    known = list(choices)

    def check(value: Any) -> str | None:
        return None if value in known else f"is {value!r}{nearest(value, known)}; it can be {', '.join(known)}"

    return check


def _recipe(value: Any) -> str | None:
    try:
        recipe(value)
    except (ValueError, AttributeError) as error:
        return f"is {value!r}: {error}" if isinstance(error, ValueError) else f"is {value!r}, not a recipe's name"
    return None


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"is {value!r}; it can be true or false"


KEYS: dict[str, dict[str, Callable[[Any], str | None]]] = {
    "quantize": {
        "recipe": _recipe,
        "shape": _dims(2, "[M, K]"),
        "dtype": _one_of(DTYPES),
        "inputs": _one_of(families_of("quantize")),
        "usage": _one_of(USAGES),
    },
    "gemm": {
        "recipe": _recipe,
        "shape": _dims(3, "[M, K, N]"),
        "x": _one_of(DTYPES),
        "w": _one_of(DTYPES),
        "out": _one_of(DTYPES),
        "inputs": _one_of(families_of("gemm")),
        "layout": _one_of(LAYOUTS),
        "accumulate": _boolean,
        "bias": _boolean,
    },
}
OPTIONAL: dict[str, list[Any]] = {"usage": ["rowwise"], "layout": ["tn"], "accumulate": [False], "bias": [False]}


def nearest(word: Any, known: Iterable[str]) -> str:
    """` (did you mean …?)` with the known word nearest to `word`, or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def load(path: str | Path) -> list[Case]:
    """The cases of one file, in order; a case that is in both tiers is quick.

    Raises CaseFileError where the file cannot be read, is not TOML, or has an unknown key or value.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CaseFileError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise CaseFileError(f"{path}: not TOML: {error}") from error
    for key in content:
        if key != "matrix":
            raise CaseFileError(
                f"{path}: unknown key {key!r}{nearest(key, ['matrix'])}; a case file holds [[matrix]] tables"
            )
    tables = content.get("matrix")
    if not isinstance(tables, list) or not tables:
        raise CaseFileError(f"{path}: no [[matrix]] table, so no case; see cases/README.md")
    places = ((f"{path}: [[matrix]] {number}", table) for number, table in enumerate(tables, 1))
    return _merged(case for where, table in places for case in _expand(table, where, str(path)))


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
    if not isinstance(operation, str) or operation not in KEYS:
        raise CaseFileError(f"{where}: operation {_one_of(KEYS)(operation)}")
    keys = KEYS[operation]
    known = ["operation", "tier", *keys]
    for key in table:
        if key not in known:
            raise CaseFileError(
                f"{where}: unknown key {key!r}{nearest(key, known)}; a {operation} has {', '.join(known)}"
            )
    tier = table.get("tier")
    if tier not in TIERS:
        raise CaseFileError(f"{where}: tier {_one_of(TIERS)(tier)}")
    axes = []
    for key, check in keys.items():
        if key not in table and key not in OPTIONAL:
            raise CaseFileError(
                f"{where}: {key} is missing; a {operation} needs {', '.join(k for k in keys if k not in OPTIONAL)}"
            )
        values = _values(key, table[key]) if key in table else OPTIONAL[key]
        if not values:
            raise CaseFileError(f"{where}: {key} is an empty list, which selects nothing")
        for value in values:
            if problem := check(value):
                raise CaseFileError(f"{where}: {key} {problem}")
        axes.append(values)
    for point in itertools.product(*axes):
        yield _case(operation, dict(zip(keys, point, strict=True)), tier, file)


def _values(key: str, given: Any) -> list[Any]:
    if key == "shape":  # a shape is itself a list
        return given if isinstance(given, list) and any(isinstance(v, list) for v in given) else [given]
    return given if isinstance(given, list) else [given]


def _case(operation: str, point: dict[str, Any], tier: str, file: str) -> Case:
    if operation == "quantize":
        dtype = point["dtype"]
        flags = tuple(f for f in (point["usage"],) if f != "rowwise")
    else:
        dtype = f"{point['x']}x{point['w']}-{point['out']}"
        flags = (point["layout"], *(name for name in ("accumulate", "bias") if point[name]))
    return Case(operation, point["recipe"], tuple(point["shape"]), dtype, point["inputs"], flags, tier, file)


def load_all(paths: Sequence[str | Path]) -> list[Case]:
    """The cases of files, and of every *.toml of folders, each id once. Raises CaseFileError, also without a file."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not found:
            raise CaseFileError(f"{path}: holds no *.toml case file")
        files += found
    return _merged(case for file in files for case in load(file))


class _Matcher:
    """What a keyword expression asks of one id: is this word in it?"""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, word: str, /, **_: object) -> bool:
        return word.lower() in self.text


def select(cases: Iterable[Case], *, tier: str = "full", keyword: str = "") -> list[Case]:
    """The cases of a tier (`full` has them all) whose id a pytest keyword expression matches.

    Raises ValueError for an expression that cannot be read.
    """
    chosen = [case for case in cases if tier in ("full", case.tier)]
    if keyword:
        from _pytest.mark.expression import Expression

        try:
            expression = Expression.compile(keyword)
        except Exception as error:  # pytest's own ParseError before release 9, SyntaxError since
            raise ValueError(f"cannot read the keyword expression {keyword!r}: {error}") from error
        chosen = [case for case in chosen if expression.evaluate(_Matcher(case.id.lower()))]
    return chosen
