"""The base class of all cases: fields and labels of every operation, the id, selection by tier and keyword."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from narrowgauge.harness.cases.keys import Concurrency, Repeats, Shape, Tier, flags_of
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Case:
    """A point of the matrix. The classes of the operations declare the other fields."""

    operation: ClassVar[str]
    """Name of the operation in case files and ids."""

    shape: Shape
    """The sizes that the class of the operation names."""
    inputs: str
    """Input family, or `file:tensor` for a captured tensor."""
    repeats: Repeats = 0
    """Further calls on the same inputs, whose bytes must be those of the first call."""
    concurrency: Concurrency = "sequential"
    """How further calls run: one after the other, from two threads or on two CUDA streams at once, in a CUDA graph."""
    tier: Tier = "quick"
    """Tier of its table. `tier_on` is the tier of a run."""
    file: str = ""
    """Path of the case file."""

    @cached_property
    def id(self) -> str:
        """operation/recipe/shape/dtype/inputs/flags without empty parts; the flags are joined by `+`.

        The id is stable: reports and baselines name the case by its id, and the id seeds the inputs.
        """
        parts = [self.operation, self.recipe_label, self.shape_label, self.dtype_label, self.inputs]
        return "/".join(part for part in [*parts, "+".join(self.flags)] if part)

    @property
    def __name__(self) -> str:
        """The id, which pytest takes as the id of a parameter (`narrowgauge.matrix`)."""
        return self.id

    @property
    def recipe_label(self) -> str:
        """The recipe in ids and records: `x+w` if two operands have different recipes; empty without a recipe."""
        return "+".join(dict.fromkeys(self.recipe_names))

    @property
    def dtype_label(self) -> str:
        """The dtypes in ids and records: `bf16`, `bf16xfp32-bf16` of a GEMM; empty without a dtype."""
        return ""

    @property
    def shape_label(self) -> str:
        """The shape in ids and records: `128x256`."""
        return "x".join(map(str, self.shape))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the id: layout, sections and the like, and options that differ from their defaults."""
        return flags_of(type(self), vars(self))

    def labels(self) -> dict[str, Any]:
        """The case in a saved failure; `harness.cases.operations.case_from_labels` is the inverse."""
        return {
            "operation": self.operation, "recipe": self.recipe_label, "shape": self.shape, "dtype": self.dtype_label,
            "inputs": self.inputs, "flags": self.flags, "tier": self.tier, "file": self.file,
        }  # fmt: skip

    @property
    def recipe_names(self) -> tuple[str, ...]:
        """Recipes of the operands by name, or the training recipe of a module; empty without a recipe."""
        return ()

    @property
    def section_sizes(self) -> tuple[int, ...]:
        """Rows of the sections of a grouped operation; empty for operations without sections."""
        return ()

    def tier_on(self, device: str) -> str:
        """`quick` or `full`: the tier of the case in a run on a device. `quick-cuda` is quick on a GPU alone."""
        quick = ("quick", "quick-cuda") if device == "cuda" else ("quick",)
        return "quick" if self.tier in quick else "full"

    def problem(self) -> str | None:
        """Why allowed values of different keys exclude one another; None for a valid case."""
        return None


def rotation_problem(recipe: Recipe, dtypes: Iterable[str], extent: int, axis: str) -> str | None:
    """Why a recipe cannot rotate operands of these dtypes along an axis of `extent` elements, or None."""
    if recipe.transform is None:
        return None
    if wrong := [dtype for dtype in dtypes if dtype != "bf16"]:
        return f"recipe {recipe} rotates bf16 alone, not {wrong[0]}"
    group = recipe.transform.group
    if extent % group:
        return f"recipe {recipe} rotates whole groups of {group}; {axis} = {extent} is no multiple of it"
    return None


def view_problem(view: str, *dtypes: str) -> str | None:
    """Why a tensor of these dtypes cannot begin as many bytes past an aligned address as a view says, or None."""
    kind, _, offset = view.partition("-")
    if kind == "offset" and int(offset) % 4 and "fp32" in dtypes:
        return f"view is {view!r}, but the elements of fp32 have 4 bytes; it can be offset-4 or offset-8"
    return None


_IN_WORDS = str.maketrans({"@": "\u16a0", ",": "\u16a2"})
"""Characters of ids that end a word of a keyword expression, and the letters that stand for them while an expression
is read: `nvfp4@modelopt` and `rows:64,32` are words."""


_WORD = re.compile(r"[\w/:+.@,-]+")
"""An expression of one word, such as an id."""


class _Matcher:
    """Tells the evaluator of a keyword expression whether an id contains a word."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, word: str, /, **_: object) -> bool:
        return word.lower() in self.text


def matching(keyword: str) -> Callable[[str], bool]:
    """A function from a name to whether a pytest keyword expression matches. The empty expression matches all names.
    `@` and `,` are characters of words, so that an id is a word.

    Raises ValueError if the expression cannot be read.
    """
    if not keyword:
        return lambda name: True
    if _WORD.fullmatch(keyword) and keyword not in ("and", "or", "not"):  # without the import of pytest
        return lambda name: keyword.lower() in name.lower()
    from _pytest.mark.expression import Expression

    try:
        expression = Expression.compile(keyword.translate(_IN_WORDS))
    except Exception as error:  # pytest's own ParseError before release 9, SyntaxError since
        raise ValueError(f"cannot read the keyword expression {keyword!r}: {error}") from error
    return lambda name: expression.evaluate(_Matcher(name.lower().translate(_IN_WORDS)))


def select(cases: Iterable[Case], *, tier: str = "full", keyword: str = "", device: str = "cpu") -> list[Case]:
    """The cases of a tier on a device (`full` contains all cases) whose ids a pytest keyword expression matches.

    Raises ValueError if the expression cannot be read.
    """
    matches = matching(keyword)
    return [case for case in cases if tier in ("full", case.tier_on(device)) and matches(case.id)]
