"""The named recipes: `nvfp4`, `mxfp8-e4m3@ocp`, `fp8-block-128x128-e4m3-pow2` and all compositions of their parts; and
rules of a user, which are dialects in a TOML file (docs/dialects.md#a-rule-of-your-own).

This module does not import torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from narrowgauge.spec.dialects import (
    ALIASES,
    DIALECTS,
    FP8_DIALECTS,
    INT8_ROW_DIALECTS,
    MX_DIALECTS,
    MX_DIALECTS_OF,
)
from narrowgauge.spec.formats import (
    E0M3,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FP32,
    INT4,
    INT8,
    UE5M3,
    UINT4,
    UINT8,
    Format,
)
from narrowgauge.spec.recipe import (
    DEFAULT_DIALECT,
    RHT_GROUPS,
    RHT_SIGNS,
    WHOLE,
    Delayed,
    Hadamard,
    Recipe,
    field_choices,
)

__all__ = [
    "DEFAULT_DIALECT",
    "RHT_GROUPS",
    "RHT_SIGNS",
    "WHOLE",
    "Delayed",
    "Hadamard",
    "Recipe",
    "find_recipe",
    "recipe_names",
    "recipes",
]

_ELEMENTS = {
    "e2m1": E2M1, "e2m3": E2M3, "e3m2": E3M2, "e4m3": E4M3, "e5m2": E5M2, "e4m3fnuz": E4M3FNUZ, "e5m2fnuz": E5M2FNUZ,
}  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """Recipes with names of the same parts."""

    parts: re.Pattern[str]
    make: Callable[[re.Match[str]], tuple[Recipe, dict[str, Any]]]
    """Makes the recipe of the parts in the default dialect, under its full name, and the fields set by the parts."""
    dialects: Mapping[str, dict[str, Any]]
    names: tuple[str, ...]


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------

_NVFP4 = Recipe("nvfp4", DEFAULT_DIALECT, element=E2M1, block=(1, 16), scale=E4M3)
_NVFP4_ELEMENTS = {"e0m3": E0M3, "int4": INT4}


def _nvfp4(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    chosen: dict[str, Any] = {"element": _NVFP4_ELEMENTS[parts["element"]]} if parts["element"] else {}
    if parts["ue5m3"]:  # the range of the scales needs no tensor scale
        chosen |= {
            "scale": UE5M3, "tensor_scale": "none", "tensor_limit": "none", "block_scale": "amax/6",
            "element_scale": "x/s", "zero_scale": "zeros", "decode": "s", "alpha": "1",
        }  # fmt: skip
    if parts["tile"]:
        chosen["block"] = (16, 16)
    if parts["rht"]:
        chosen.update(transform=Hadamard(int(parts["group"] or 16), 0 if parts["nosign"] else RHT_SIGNS))
    if parts["sr"]:
        chosen["rounding"] = "stochastic"
    if parts["row"]:
        chosen["granularity"] = "row"
    if parts["choice"]:
        chosen |= {"candidates": f"4-or-6-{parts['error']}", "scale_max": float(parts["most"])}
        chosen["block_scale"] = "(amax/6)*enc"
    return replace(_NVFP4, name=parts[0], **chosen), chosen


# ---- MX --------------------------------------------------------------------------------------------------------------


def _mx(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    width, tile, half = parts[1][0], parts["tile"] or "", parts["half"] or ""
    kind = parts["fp8"] or parts["fp6"] or {"8": "e4m3", "4": "e2m1"}[width]
    element = _ELEMENTS[kind]
    chosen: dict[str, Any] = {"rounding": "stochastic"} if parts["sr"] else {}
    # Transformer Engine has tiles for E4M3 only and names them mxfp8-2d.
    short = element is E2M1 or (element is E4M3 and tile)
    name = f"mxfp{width}" + ("" if short else f"-{kind}") + tile + half + (parts["sr"] or "")
    recipe = Recipe(
        name, DEFAULT_DIALECT, element=element, block=(32, 32) if tile else (1, 16 if half else 32), scale=E8M0,
        tensor_scale="none", tensor_limit="none", block_scale="amax*(1/max)", scale_rounding="up",
        element_scale="x*(1/s)", nan_code=_nan_code(element), decode="s", alpha="1",
        columnwise="transposed" if element is E2M1 else "in-place", **chosen,
    )  # fmt: skip
    return recipe, chosen


def _nan_code(element: Format) -> Any:
    return element.max_code if element.nan_code is None else element.nan_code


# ---- FP8 with float32 scales -----------------------------------------------------------------------------------------


def _fp8_block(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    element, kind = _ELEMENTS[parts["element"] or "e4m3"], parts["kind"] or "pow2"
    width = int(parts["block"].partition("x")[2])
    recipe = Recipe(
        f"fp8-block-{parts['block']}-{element.name.lower()}-{kind}{_eps_part(parts)}", DEFAULT_DIALECT, element=element,
        block=(1 if parts["block"].startswith("1x") else width, width), scale=FP32, tensor_scale="none",
        tensor_limit="none", block_scale="1/(max/amax)", smallest_amax=float(parts["eps"] or 0), largest_scale="input",
        scale_rounding="down" if kind == "pow2" else "none", element_scale="x*(max/amax)", nan_code=_nan_code(element),
        decode="s", alpha="1",
    )  # fmt: skip
    return recipe, _eps_field(parts)


def _fp8_row(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    element = _ELEMENTS[parts["element"] or "e4m3"]
    recipe = Recipe(
        f"fp8-row-{element.name.lower()}{parts['pow2'] or ''}{_eps_part(parts)}", DEFAULT_DIALECT, element=element,
        block=(1, WHOLE), scale=FP32, tensor_scale="none", tensor_limit="none", block_scale="1/(max/amax)",
        smallest_amax=float(parts["eps"] or 0), scale_rounding="down" if parts["pow2"] else "none",
        element_scale="x*(max/amax)", nan_code=_nan_code(element), decode="s", alpha="s_a*s_b",
    )  # fmt: skip
    return recipe, _eps_field(parts)


def _fp8_current(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    element = _ELEMENTS[parts["element"] or "e4m3"]
    name = f"fp8-current-{element.name.lower()}{parts['pow2'] or ''}{_eps_part(parts)}"
    recipe = Recipe(
        name, DEFAULT_DIALECT, element=element, block=(WHOLE, WHOLE), scale=FP32, tensor_limit="1-for-nan",
        block_scale="1/enc", smallest_amax=float(parts["eps"] or 0), scale_rounding="down" if parts["pow2"] else "none",
        element_scale="x*enc", nan_code=_nan_code(element), decode="s", alpha="s_a*s_b",
    )  # fmt: skip
    return recipe, _eps_field(parts)


def _fp8_static(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    delayed, _ = _fp8_delayed(parts)
    return replace(delayed, name=f"fp8-static-{delayed.element.name.lower()}", delayed=None), {}


def _fp8_delayed(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    given = {"margin": None, "recent": None, "bulk": None} | parts.groupdict()
    element, margin = _ELEMENTS[parts["element"] or "e4m3"], int(given["margin"] or 0)
    name = f"fp8-delayed-{element.name.lower()}{given['recent'] or ''}" + (f"-margin{margin}" if margin else "")
    delayed = Delayed("most-recent" if given["recent"] else "max", margin, "bulk" if given["bulk"] else "single")
    recipe = Recipe(
        name + (given["bulk"] or ""), DEFAULT_DIALECT, element=element, block=(WHOLE, WHOLE), scale=FP32,
        tensor_scale="given", tensor_limit="none", block_scale="1/enc", scale_rounding="none", element_scale="x*enc",
        nan_code=_nan_code(element), decode="s", alpha="s_a*s_b", delayed=delayed,
    )  # fmt: skip
    return recipe, {}


# ---- whole numbers with float32 scales -------------------------------------------------------------------------------


def _integers(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    group = parts["group"]
    element = {"4": (INT4, UINT4), "8": (INT8, UINT8)}[parts["bits"]][bool(parts["zeros"])]
    recipe = Recipe(
        parts[0], DEFAULT_DIALECT, element=element, block=(1, int(group or WHOLE)), scale=FP32,
        tensor_scale="none", tensor_limit="none", block_scale="amax/max", element_scale="x/s", scale_rounding="none",
        zero_scale="zeros", nan_code=0, decode="s", alpha="1" if group else "s_a*s_b",
        statistics="input" if group else "float32",  # libraries store the scales of groups in the dtype of the model
    )  # fmt: skip
    return recipe, {}


def _eps_part(parts: re.Match[str]) -> str:
    eps = float(parts["eps"] or 0)
    return f"-eps{eps!r}" if eps else ""


def _eps_field(parts: re.Match[str]) -> dict[str, Any]:
    """The field that -eps sets, in which a dialect may not differ."""
    return {"smallest_amax": float(parts["eps"])} if parts["eps"] else {}


# ---- all families ----------------------------------------------------------------------------------------------------

_EPS = r"(?:-eps(?P<eps>[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e-?[0-9]{1,3})?))?"
_FP8 = r"(?:-(?P<element>e4m3fnuz|e5m2fnuz|e4m3|e5m2))?"
_FP8_NAMES = ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz")
_FAMILIES = (
    _Family(
        re.compile(
            r"nvfp4(?:-(?P<element>e0m3|int4))?(?P<ue5m3>-ue5m3)?(?P<tile>-2d)?(?P<rht>-rht(?P<group>2|4|8|32|64|128)?(?P<nosign>-nosign)?)?(?P<sr>-sr)?"
            r"(?P<row>-rowscaled)?(?P<choice>-4over6-(?P<most>448|256)-(?P<error>mae|mse))?"
        ),
        _nvfp4,
        DIALECTS,
        (
            "nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-rht-nosign", *(f"nvfp4-rht{g}" for g in RHT_GROUPS if g != 16),
            "nvfp4-2d-rht", "nvfp4-sr", "nvfp4-2d-sr", "nvfp4-rht-sr", "nvfp4-2d-rht-sr", "nvfp4-rowscaled",
            *(f"nvfp4{part}-4over6-{most}-{error}" for part in ("", "-2d", "-rowscaled") for most in (448, 256)
              for error in ("mae", "mse")),
        ),
    ),
    _Family(
        re.compile(
            r"mxfp(8(?:-(?P<fp8>e4m3|e5m2))?|6-(?P<fp6>e3m2|e2m3)|4)(?:(?P<tile>-2d)|(?P<half>-1x16))?(?P<sr>-sr)?"
        ),
        _mx,
        MX_DIALECTS,
        tuple(
            f"{name}{tile}{sr}".replace("-e4m3-2d", "-2d")
            for name in ("mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4")
            for tile in ("", "-2d") for sr in ("", "-sr")
        ),
    ),
    _Family(
        re.compile(rf"fp8-block-(?P<block>1x(?:16|32|64|128|256|512)|128x128){_FP8}(?:-(?P<kind>pow2|fp32))?{_EPS}"),
        _fp8_block,
        FP8_DIALECTS["block"],
        tuple(
            f"fp8-block-{block}-{element}-{kind}"
            for block in ("1x128", "128x128") for element in _FP8_NAMES for kind in ("pow2", "fp32")
        ),
    ),
    _Family(
        re.compile(rf"fp8-row{_FP8}(?P<pow2>-pow2)?{_EPS}"),
        _fp8_row,
        FP8_DIALECTS["row"],
        tuple(f"fp8-row-{element}{kind}" for element in _FP8_NAMES for kind in ("", "-pow2")),
    ),
    _Family(
        re.compile(rf"fp8-current{_FP8}(?P<pow2>-pow2)?{_EPS}"),
        _fp8_current,
        FP8_DIALECTS["current"],
        tuple(f"fp8-current-{element}{kind}" for element in _FP8_NAMES for kind in ("", "-pow2")),
    ),
    _Family(
        re.compile(rf"fp8-static{_FP8}"),
        _fp8_static,
        FP8_DIALECTS["static"],
        tuple(f"fp8-static-{element}" for element in _FP8_NAMES),
    ),
    _Family(
        re.compile(rf"fp8-delayed{_FP8}(?P<recent>-recent)?(?:-margin(?P<margin>[0-9]{{1,4}}))?(?P<bulk>-bulk)?"),
        _fp8_delayed,
        {DEFAULT_DIALECT: {}},
        tuple(
            f"fp8-delayed-{element}{recent}{bulk}"
            for element in _FP8_NAMES for recent in ("", "-recent") for bulk in ("", "-bulk")
        ),
    ),
)  # fmt: skip
_INTEGERS = (
    _Family(
        re.compile(r"int(?P<bits>4|8)-(?:row|g(?P<group>16|32|64|128|256))(?P<zeros>-zp)?(?<!int8-row)"),
        _integers,
        {DEFAULT_DIALECT: {}},
        ("int4-g32", "int4-g128", "int4-g128-zp", "int4-row", "int8-g128", "int8-row-zp"),
    ),
    _Family(re.compile(r"int(?P<bits>8)-row(?P<group>)(?P<zeros>)"), _integers, INT8_ROW_DIALECTS, ("int8-row",)),
)
"""Operands of products. `recipe_names` leaves them out: no kernel of this package makes them."""
_NAMES = tuple(name for family in _FAMILIES for name in family.names)


def recipe_names() -> list[str]:
    """Names of all recipes in the default dialect, then the first recipe of each family in all further dialects."""
    return [
        *_NAMES,
        *(f"{family.names[0]}@{name}" for family in _FAMILIES for name in family.dialects if name != DEFAULT_DIALECT),
    ]


def recipes() -> list[Recipe]:
    """The recipes of `recipe_names`. Further names have parameters, such as eps and margin: see `find_recipe`."""
    return list(map(find_recipe, recipe_names()))


def find_recipe(name: str | Recipe) -> Recipe:
    """The recipe with the name `name` or `name@dialect`, or the rule in a file of rules: `own.toml`, of several rules
    `own.toml:nvfp4@own`. A Recipe is returned unchanged.

    The rules of such a file are known from then on by their names, as by `use_rules`.

    Names, with optional parts in this order:

    - nvfp4, then -e0m3 or -int4 (elements), -ue5m3 (scales, without a tensor scale), -2d,
      -rht (or -rht32 for groups of 32) with or without -nosign, -sr, -rowscaled, -4over6-E-MODE;
    - mxfp8-e4m3, mxfp8-e5m2, mxfp6-e3m2, mxfp6-e2m3 or mxfp4, then -2d (mxfp8-2d is of E4M3) or -1x16, -sr;
    - fp8-block-1x128 (or 1x16, 1x32, 1x64, 1x256, 1x512) or fp8-block-128x128, then -e4m3 or -e5m2, -pow2 or -fp32
      (scales), -eps1e-06 and the like;
    - fp8-row or fp8-current, then -e4m3 or -e5m2, -pow2, -eps…;
    - fp8-static, then -e4m3 or -e5m2;
    - fp8-delayed, then -e4m3 or -e5m2, -recent, -margin2 and the like, -bulk;
    - int8-row, int4-row, and int8-g128, int4-g128 with float32 scales of groups of 16, 32, 64, 128 or 256;
      int4-g128-zp has a zero point for each scale.

    FP8 elements may also be -e4m3fnuz or -e5m2fnuz.

    Defaults in names of FP8 recipes are e4m3 and, for block scales, pow2; `Recipe.name` contains all parts. Raises
    ValueError with the three nearest names for an unknown name, and with the reason if two parts, or a part and the
    dialect, exclude each other; RuleError, a ValueError, for a wrong file of rules.
    """
    if isinstance(name, Recipe):
        return name
    if parts := RULE_FILE.fullmatch(name):
        return _rule_in_file(*parts.groups())
    base, _, dialect = name.partition("@")
    if dialect and os.environ.get(VARIABLE) and (own := own_rules().get(_full_name(base, dialect))):
        return own.recipe
    return _find(base, dialect or DEFAULT_DIALECT)


@lru_cache(maxsize=1024)
def _find(base: str, dialect: str) -> Recipe:
    family, parts = _family(base, dialect)
    rule = dialect if dialect in family.dialects else ALIASES.get(dialect, dialect)
    if rule not in family.dialects:
        raise ValueError(
            f"recipe {base} has no dialect {dialect!r}{_nearest(dialect, family.dialects, 1)}; "
            f"it has {', '.join(family.dialects)}; --rules FILE adds yours"
        )
    recipe, chosen = family.make(parts)
    of_dialect = family.dialects[rule]
    if recipe.scale is E8M0:
        of_dialect = of_dialect | MX_DIALECTS_OF.get((dialect, recipe.element.name), {})
    if recipe.scale is FP32 and recipe.scale_rounding == "down" and "/max" in of_dialect.get("block_scale", ""):
        of_dialect = of_dialect | {"scale_rounding": "up"}  # -pow2 of a decode scale
    for field in chosen.keys() & of_dialect.keys():
        if chosen[field] != of_dialect[field]:
            raise ValueError(
                f"recipe {base} has no dialect {dialect!r}: {field} would be {chosen[field]} and {of_dialect[field]} "
                "at once"
            )
    return replace(recipe, dialect=dialect, **of_dialect)


def _family(base: str, dialect: str) -> tuple[_Family, re.Match[str]]:
    """The family of a name, and the parts of the name. Raises ValueError for an unknown name."""
    match = next(((f, parts) for f in (*_FAMILIES, *_INTEGERS) if (parts := f.parts.fullmatch(base))), None)
    if match is None:
        name = base if dialect == DEFAULT_DIALECT else f"{base}@{dialect}"
        close = _nearest(base, (*_NAMES, *(name for family in _INTEGERS for name in family.names)), 3)
        raise ValueError(f"no recipe is called {name!r}{close}; narrowgauge.recipes() lists those of quantize")
    return match


def _nearest(name: str, known: Iterable[str], most: int) -> str:
    """` (did you mean 'a', 'b' or 'c'?)` with the known names nearest to `name`, or the empty string."""
    close = [repr(word) for word in difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)]
    words = " or ".join(filter(None, [", ".join(close[:-1]), *close[-1:]]))
    return f" (did you mean {words}?)" if words else ""


# ---- rules of a user -------------------------------------------------------------------------------------------------

VARIABLE = "NARROWGAUGE_RULES"
"""Environment variable with the files of rules, which processes of a run inherit."""
RULE_FILE = re.compile(r"(.*\.toml)(?::(.+))?", re.DOTALL)
"""A text that names a file of rules, and a rule in it."""
RULE_FIELDS = {
    name: choices
    for name, choices in field_choices().items()
    if name not in ("granularity", "candidates", "columnwise")
} | {"smallest_amax": (), "approximate": (False, True)}
"""Choices of each key of a rule, none of a number. All further fields of a recipe are parts of its name."""
_DIALECT = re.compile(r"[A-Za-z0-9][\w.-]*(?<!\.toml)", re.ASCII)
_LARGEST = 1 << 18
"""Bytes of a file of rules."""


class RuleError(ValueError):
    """A wrong file of rules. The message names the file, the rule, the key, the value and the remedy."""


@dataclass(frozen=True)
class OwnRule:
    """A rule of a user."""

    recipe: Recipe
    file: Path

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with any choice of the rule."""
        return hashlib.sha256(repr(self.recipe).encode()).hexdigest()[:8]

    @property
    def shown_file(self) -> str:
        """The file, relative to the current folder if it lies below it."""
        return _shown(self.file)


def use_rules(files: Sequence[str | os.PathLike[str]]) -> None:
    """Make the rules of files known by their names, in this process and in all that it starts.

    Raises RuleError for a wrong file, and if two files give different rules the same name.
    """
    value = os.pathsep.join(dict.fromkeys([*rule_files(), *map(os.path.abspath, files)]))
    _own_rules.cache_clear()  # a file may have changed
    _own_rules(value)
    if files:
        os.environ[VARIABLE] = value


def rule_files() -> list[str]:
    """Files of a user's rules."""
    return [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]


def own_rules() -> Mapping[str, OwnRule]:
    """The rules of a user by their names. Raises RuleError."""
    return _own_rules(os.environ.get(VARIABLE, ""))


def read_rules(path: str | os.PathLike[str]) -> dict[str, Recipe]:
    """The rules in a file by their names. Raises RuleError."""
    shown = _shown(Path(path))
    try:
        with open(path, "rb") as file:
            stored = file.read(_LARGEST + 1)
    except FileNotFoundError as error:
        remedy = f"`narrowgauge dialect BACKEND --save {shown}` writes it"
        raise RuleError(f"{shown}: there is no such file of rules; {remedy}") from error
    except OSError as error:
        raise RuleError(f"{shown}: cannot be read: {error.strerror}; a file of rules is a TOML file") from error
    if len(stored) > _LARGEST:
        raise RuleError(f"{shown}: has more than {_LARGEST} bytes, the limit of a file of rules; divide it")
    try:
        content = tomllib.loads(stored.decode())
    except (ValueError, RecursionError) as error:
        form = 'a rule is a table such as ["nvfp4@own"], its name in quotes'
        raise RuleError(f"{shown}: not TOML: {error}; {form}") from error
    found: dict[str, Recipe] = {}
    for name, table in content.items():
        rule = _rule(name, table, f'{shown}: ["{name}"]')
        if (full := f"{rule.name}@{rule.dialect}") in found:
            raise RuleError(f'{shown}: ["{name}"] names the rule {full} a second time; remove one of the two tables')
        found[full] = rule
    if not found:
        raise RuleError(f'{shown}: holds no rule; a rule is a table such as ["nvfp4@own"]')
    return found


def rule_text(recipe: Recipe, base: str = DEFAULT_DIALECT) -> str:
    """A recipe as the table of a file of rules: its choices that differ from those of the dialect `base`.

    Raises RuleError if the recipe differs from its name in a field that is a part of the name.
    """
    start = _find(recipe.name, base)
    differs = {f.name: value for f in fields(Recipe) if (value := getattr(recipe, f.name)) != getattr(start, f.name)}
    lines = [
        f"[{json.dumps(f'{recipe.name}@{recipe.dialect}')}]",
        *([f'base = "{base}"'] if base != DEFAULT_DIALECT else []),
    ]
    for name, value in differs.items():
        if name in RULE_FIELDS:
            lines.append(f"{name} = {json.dumps(value)}")
        elif name != "dialect":
            raise RuleError(f"recipe {recipe}: {name} is {value}, which no rule of the name {recipe.name} has")
    return "\n".join([*lines, ""])


def save_rule(
    recipe: Recipe, path: str | os.PathLike[str], *, base: str = DEFAULT_DIALECT, comments: Sequence[str] = ()
) -> None:
    """Write a recipe into a file of rules, behind the rules that are in the file.

    Its name is `recipe.name`, @ and `recipe.dialect`: `replace(narrowgauge.recipe("nvfp4@modelopt"), dialect="own",
    nan_code=0)` is `nvfp4@own`. base: dialect whose choices the file does not repeat. comments: lines before the rule.

    Raises RuleError if the file is no file of rules or cannot be written, if it has another rule of this name, and if
    the recipe differs from its name in a field that is a part of the name.
    """
    name, shown = f"{recipe.name}@{recipe.dialect}", _shown(Path(path))
    text = rule_text(recipe, base)
    _rule(name, tomllib.loads(text)[name], f"recipe {name}")
    before = read_rules(path) if os.path.exists(path) else {}
    if name in before:
        if before[name] != recipe:
            raise RuleError(f"{shown}: has another rule {name}; remove it there, or save under another name")
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n" * bool(before) + "".join(f"# {line}\n" for line in comments) + text)
    except OSError as error:
        raise RuleError(f"{shown}: cannot be written: {error.strerror}") from error


@lru_cache(maxsize=8)
def _own_rules(value: str) -> Mapping[str, OwnRule]:
    """The rules of the files in a value of the variable."""
    found: dict[str, OwnRule] = {}
    for path in filter(None, value.split(os.pathsep)):
        for name, recipe in read_rules(path).items():
            rule = found.setdefault(name, OwnRule(recipe, Path(path)))
            if rule.recipe != recipe:
                raise RuleError(
                    f'{_shown(Path(path))}: ["{name}"] is another rule in {rule.shown_file}; give one of the two '
                    "another name behind the @"
                )
    return found


def _rule_in_file(path: str, name: str | None) -> Recipe:
    """A rule of a file, whose rules all become known; the only one if there is no name."""
    use_rules([path])
    found = read_rules(path)
    if name is None and len(found) > 1:
        raise RuleError(f"{path}: has several rules, {', '.join(found)}; name one of them: {path}:{next(iter(found))}")
    base, _, dialect = (name or next(iter(found))).partition("@")
    if (full := _full_name(base, dialect)) not in found:
        raise RuleError(f"{path}: has no rule {name!r}{_nearest(full, found, 1)}; it has {', '.join(found)}")
    return found[full]


def _full_name(base: str, dialect: str) -> str:
    """The name with all its parts: `fp8-row-e4m3@own` of `fp8-row@own`. Raises ValueError for an unknown name."""
    _family(base, dialect)  # the error has the dialect too
    return f"{_find(base, DEFAULT_DIALECT).name}@{dialect}"


def _rule(name: str, table: Any, where: str) -> Recipe:
    """The rule of a table. Raises RuleError."""
    if not isinstance(table, dict):
        raise RuleError(f'{where}: is {table!r}; a rule is a table such as ["nvfp4@own"]')
    base, _, dialect = name.partition("@")
    if not _DIALECT.fullmatch(dialect):
        raise RuleError(
            f"{where}: is no name of a rule; that is a recipe, @, and a word of letters, digits, -, _ and .: nvfp4@own"
        )
    start_dialect = table.get("base", DEFAULT_DIALECT)
    chosen = {key: _choice(key, value, where) for key, value in table.items() if key != "base"}
    try:
        family, parts = _family(base, dialect)
        if start_dialect not in list(family.dialects):
            known = ", ".join(family.dialects)
            raise RuleError(f"{where}: base is {start_dialect!r}, no dialect of {base}; it can be {known}")
        start, by_name = _find(base, start_dialect), family.make(parts)[1]
        if chosen.get("rounding") == "stochastic":
            by_name = {"rounding": start.rounding} | by_name
        if wrong := [key for key in chosen.keys() & by_name.keys() if chosen[key] != by_name[key]]:
            raise RuleError(
                f"{where}: {wrong[0]} is {chosen[wrong[0]]!r}, and {by_name[wrong[0]]!r} by the name {base}; remove "
                "the key, or rename the rule"
            )
        made = replace(start, dialect=dialect, **chosen)
    except RuleError:
        raise
    except ValueError as error:
        raise RuleError(f"{where}: {error}") from error
    if dialect in family.dialects and made != _find(base, dialect):
        raise RuleError(f"{where}: {dialect} is a dialect of narrowgauge with other choices; rename the rule")
    return made


def _choice(key: str, value: Any, where: str) -> Any:
    """The value of a key of a rule. Raises RuleError for an unknown key, and for a value that the key cannot have."""
    if key not in RULE_FIELDS:
        keys = ("base", *RULE_FIELDS)
        raise RuleError(f"{where}: unknown key {key!r}{_nearest(key, keys, 1)}; a rule has {', '.join(keys)}")
    choices = RULE_FIELDS[key]
    if not choices:
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise RuleError(f"{where}: {key} is {value!r}; it is a finite number, at least 0")
        return float(value)
    if value not in choices or type(value) is not type(choices[0]):
        raise RuleError(
            f"{where}: {key} is {value!r}{_nearest(str(value), map(str, choices), 1)}; it can be "
            f"{', '.join(map(str, choices))}"
        )
    return value


def _shown(path: Path) -> str:
    """A path for messages: relative to the current folder if it lies below it."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
