"""The named recipes: `nvfp4`, `mxfp8-e4m3@ocp`, `fp8-block-128x128-e4m3-pow2` and all compositions of their parts.

This module does not import torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from narrowgauge.spec.dialects import DIALECTS, FP8_DIALECTS, MX_DIALECTS, MX_DIALECTS_OF
from narrowgauge.spec.formats import E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP32, Format
from narrowgauge.spec.recipe import DEFAULT_DIALECT, RHT_GROUPS, RHT_SIGNS, WHOLE, Delayed, Hadamard, Recipe

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


def _nvfp4(parts: re.Match[str]) -> tuple[Recipe, dict[str, Any]]:
    chosen: dict[str, Any] = {}
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
    width, tile = parts[1][0], parts["tile"] or ""
    kind = parts["fp8"] or parts["fp6"] or {"8": "e4m3", "4": "e2m1"}[width]
    element = _ELEMENTS[kind]
    chosen: dict[str, Any] = {"rounding": "stochastic"} if parts["sr"] else {}
    # Transformer Engine has tiles for E4M3 only and names them mxfp8-2d.
    short = element is E2M1 or (element is E4M3 and tile)
    name = f"mxfp{width}" + ("" if short else f"-{kind}") + tile + (parts["sr"] or "")
    recipe = Recipe(
        name, DEFAULT_DIALECT, element=element, block=(32, 32) if tile else (1, 32), scale=E8M0,
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
    recipe = Recipe(
        f"fp8-block-{parts['block']}-{element.name.lower()}-{kind}{_eps_part(parts)}", DEFAULT_DIALECT, element=element,
        block=(1, 128) if parts["block"] == "1x128" else (128, 128), scale=FP32, tensor_scale="none",
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
            r"nvfp4(?P<tile>-2d)?(?P<rht>-rht(?P<group>2|4|8|32|64|128)?(?P<nosign>-nosign)?)?(?P<sr>-sr)?"
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
            r"mxfp(8(?:-(?P<fp8>e4m3|e5m2))?|6-(?P<fp6>e3m2|e2m3)|4)(?P<tile>-2d)?(?P<sr>-sr)?"
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
        re.compile(rf"fp8-block-(?P<block>1x128|128x128){_FP8}(?:-(?P<kind>pow2|fp32))?{_EPS}"),
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
    """The recipe with the name `name` or `name@dialect`; a Recipe is returned unchanged.

    Names, with optional parts in this order:

    - nvfp4, then -2d, -rht (or -rht32 for groups of 32) with or without -nosign, -sr, -rowscaled, -4over6-E-MODE;
    - mxfp8-e4m3, mxfp8-e5m2, mxfp6-e3m2, mxfp6-e2m3 or mxfp4, then -2d (mxfp8-2d is of E4M3), -sr;
    - fp8-block-1x128 or fp8-block-128x128, then -e4m3 or -e5m2, -pow2 or -fp32 (scales), -eps1e-06 and the like;
    - fp8-row or fp8-current, then -e4m3 or -e5m2, -pow2, -eps…;
    - fp8-static, then -e4m3 or -e5m2;
    - fp8-delayed, then -e4m3 or -e5m2, -recent, -margin2 and the like, -bulk.

    FP8 elements may also be -e4m3fnuz or -e5m2fnuz.

    Defaults in names of FP8 recipes are e4m3 and, for block scales, pow2; `Recipe.name` contains all parts. Raises
    ValueError with the three nearest names for an unknown name, and with the reason if two parts, or a part and the
    dialect, exclude each other.
    """
    if isinstance(name, Recipe):
        return name
    base, _, dialect = name.partition("@")
    return _find(base, dialect or DEFAULT_DIALECT)


@lru_cache(maxsize=1024)
def _find(base: str, dialect: str) -> Recipe:
    match = next(((f, parts) for f in _FAMILIES if (parts := f.parts.fullmatch(base))), None)
    if match is None:
        name = base if dialect == DEFAULT_DIALECT else f"{base}@{dialect}"
        raise ValueError(f"no recipe is called {name!r}{_nearest(base, _NAMES, 3)}; narrowgauge.recipes() lists all")
    family, parts = match
    if dialect not in family.dialects:
        raise ValueError(
            f"recipe {base} has no dialect {dialect!r}{_nearest(dialect, family.dialects, 1)}; "
            f"it has {', '.join(family.dialects)}"
        )
    recipe, chosen = family.make(parts)
    of_dialect = family.dialects[dialect]
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


def _nearest(name: str, known: Iterable[str], most: int) -> str:
    """` (did you mean 'a', 'b' or 'c'?)` with the known names nearest to `name`, or the empty string."""
    close = [repr(word) for word in difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)]
    words = " or ".join(filter(None, [", ".join(close[:-1]), *close[-1:]]))
    return f" (did you mean {words}?)" if words else ""
