"""The offer of a backend: dialects of recipes, and constraints on shapes and dtypes. Runs select their cases by the
offer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.spec.recipes import find_recipe

EXTENTS = ("M", "K", "N")
"""Extents of a case: blocks run along K; a GEMM has the output (M, N)."""
FIELDS = ("dtype", "out", "usage", "view", "scales", "layout", "inputs")
"""Keys of cases for constraints. `dtype` of a product: that of both operands."""
_LIKE = {
    "fp8-current-": "fp8-row-", "fp8-delayed-": "fp8-static-", "-e4m3": "-e4m3fnuz", "-e5m2": "-e5m2fnuz",
}  # fmt: skip
"""Parts of recipe names with cases that also serve a second recipe: the native kernels have none of these."""
_DEFAULT = "te"
"""Dialect of a recipe name without @."""


@dataclass(frozen=True)
class Offer:
    """Dialects and constraints of a backend. The default offers everything."""

    dialects: Mapping[str, tuple[str, ...]] | None = None
    """For each recipe name without @ the dialects that the backend computes; None: any recipe."""
    constraints: Mapping[str, Any] = field(default_factory=dict)
    """For an extent a divisor of it, or a list of values; for a key of cases a list of values."""
    methods: Collection[str] | None = None
    """Methods of the backend; None: all."""

    @classmethod
    def checked(cls, name: str, offers: tuple[Any, Any], methods: Collection[str]) -> Offer:
        """The offer of the backend `name`, from its attributes `dialects` and `constraints`.

        Raises BackendError for an unknown recipe, dialect or key, and for a value of another type.
        """
        dialects, constraints = offers
        return cls(_dialects(name, dialects), _constraints(name, constraints), methods)

    def reason(self, case: Case) -> str:
        """Why the backend does not run a case, or the empty string."""
        if self.dialects is not None:
            if self.methods is not None and case.called not in self.methods:
                return f"has no {case.called}"
            for recipe in case.recipe_names:
                base, _, dialect = recipe.partition("@")
                if base not in self.dialects:
                    return f"offers no recipe {base}"
                if (dialect or _DEFAULT) not in self.dialects[base]:
                    return f"offers {base} in {' and '.join(self.dialects[base])}, not in {dialect or _DEFAULT}"
        for key, allowed in self.constraints.items():
            for value in _values(case, key):
                if isinstance(allowed, int) and value % allowed:
                    return f"takes multiples of {allowed} as {key}"
                if not isinstance(allowed, int) and value not in allowed:
                    return f"takes {key} {' or '.join(map(str, allowed))}"
        return ""

    def select(self, cases: Iterable[Case]) -> tuple[list[Case], Counter[str]]:
        """The cases run by the backend, and the number of cases left out by reason.

        A case of a recipe in its default dialect stands for the recipe in every dialect of the backend, and for a
        recipe of `_LIKE`.
        """
        chosen: dict[str, Case] = {}
        others: Counter[str] = Counter()
        for case in cases:
            for version in [version for like in self._likes(case) for version in self._versions(like)]:
                if reason := self.reason(version):
                    others[reason] += 1
                elif not version.problem():
                    chosen.setdefault(version.id, version)
        return list(chosen.values()), others

    def _likes(self, case: Case) -> list[Case]:
        """The case, and the same case of an offered recipe without cases of its own."""
        recipe = getattr(case, "recipe", "")
        others: list[str] = []
        for known, other in _LIKE.items():
            others += [name.replace(known, other) for name in (recipe, *others) if known in name and other not in name]
        offered = [other for other in others if other in (self.dialects or {}) and set(case.recipe_names) == {recipe}]
        return [case, *(replace(case, recipe=other) for other in offered)]  # type: ignore[call-arg]

    def _versions(self, case: Case) -> list[Case]:
        """The case in every dialect that the backend has for the recipes of all operands."""
        fields = [name for name in ("recipe", "w_recipe") if getattr(case, name, None)]
        recipes = [getattr(case, name) for name in fields]
        offered = [(self.dialects or {}).get(recipe) for recipe in recipes]
        if not recipes or None in offered:
            return [case]
        shared = [dialect for dialect in offered[0] or () if all(dialect in (others or ()) for others in offered)]
        found: list[Case] = []
        for dialect in shared:
            names: Any = [name if dialect == _DEFAULT else f"{name}@{dialect}" for name in recipes]
            found.append(replace(case, **dict(zip(fields, names, strict=True))))
        return found or [case]


def _values(case: Case, key: str) -> Sequence[Any]:
    """Values of an extent or a key in a case; empty if the case has no such key."""
    if key in EXTENTS:
        return case.constrained.get(key, ())
    if key == "dtype":
        return [getattr(case, name) for name in ("dtype", "x", "w") if hasattr(case, name)]
    return [getattr(case, key)] if hasattr(case, key) else []


def _dialects(name: str, given: Any) -> dict[str, tuple[str, ...]] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BackendError(f"backend {name}: dialects is {given!r}; it maps names of recipes to dialects")
    dialects = {}
    for recipe, value in given.items():
        named = (value,) if isinstance(value, str) else value
        if not isinstance(named, list | tuple) or not all(isinstance(dialect, str) for dialect in named):
            raise BackendError(
                f"backend {name}: dialects has {recipe!r}: {value!r}; it is a dialect, or a list of dialects"
            )
        dialects[recipe] = tuple(named)
        for dialect in dialects[recipe]:
            try:
                find_recipe(f"{recipe}@{dialect}" if dialect != _DEFAULT else recipe)
            except ValueError as error:
                raise BackendError(f"backend {name}: dialects has {recipe!r}: {value!r}: {error}") from None
    return dialects


def _constraints(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise BackendError(
            f"backend {name}: constraints is {given!r}; it maps {', '.join((*EXTENTS, *FIELDS))} to values"
        )
    for key, value in given.items():
        if key not in (*EXTENTS, *FIELDS):
            known = ", ".join((*EXTENTS, *FIELDS))
            raise BackendError(
                f"backend {name}: constraints has {key!r}{nearest(key, (*EXTENTS, *FIELDS))}; it can have {known}"
            )
        multiple = key in EXTENTS and isinstance(value, int) and value > 0
        if not multiple and not (isinstance(value, list | tuple) and value):
            form = "a number that divides it, or a list of sizes" if key in EXTENTS else "a list of values"
            raise BackendError(f"backend {name}: constraints has {key!r}: {value!r}; it is {form}")
    return dict(given)
