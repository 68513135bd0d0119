"""Recipes as data: one complete quantization rule each, and the dialects that libraries speak.

A recipe names every choice in which libraries differ, so that the reference can speak any of them and a report can say
where a kernel leaves one. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from reference.formats import E2M1, E4M3, Format

Statistics = Literal["float32"]
Granularity = Literal["tensor", "row"]
TensorScale = Literal["max/amax"]
BlockScale = Literal["amax*(enc*(1/6))", "(amax/6)*enc"]
Candidates = Literal["6", "4-or-6-mae", "4-or-6-mse"]
ZeroScale = Literal["saturate"]
Element = Literal["x*min(1/(s*(1/enc)),FLT_MAX)"]
Rounding = Literal["nearest-even", "stochastic"]
NanPolicy = Literal["ignore", "propagate"]
Alpha = Literal["(a*b)/d", "(b*a)*(1/d)"]

RHT_SIGNS = 0xD7E8
"""Bit k is set where element k of 16 is negated: Transformer Engine's constant sign vector (numerics.md)."""
RHT_GROUPS = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Hadamard:
    """A rotation of groups along K: y = x·diag(σ)·H·c, H Sylvester's matrix of `group` rows, c = bf16(1/√group)."""

    group: int = 16
    signs: int = RHT_SIGNS
    """σ as a mask of 16 bits, element k negated where bit k mod 16 is set."""

    def __post_init__(self) -> None:
        if self.group not in RHT_GROUPS:
            raise ValueError(f"a Hadamard group has {', '.join(map(str, RHT_GROUPS))} elements, not {self.group}")
        if not 0 <= self.signs < 1 << 16:
            raise ValueError(f"signs of a Hadamard transform are a mask of 16 bits, not {self.signs:#x}")


@dataclass(frozen=True)
class Recipe:
    """A quantization rule. Two recipes that compare equal give the same bytes.

    enc is the tensor's encode factor, 2688/amax for NVFP4; amax in `block_scale` is the block's, s the stored block
    scale, d the constant 36·448·448 of the NVFP4 GEMM. Every operation in an expression rounds to float32.
    """

    name: str
    dialect: str
    element: Format
    block: tuple[int, int]
    """Rows and columns that share a scale. The scale of a block of several rows is stored once for each of them."""
    scale: Format

    scale_max: float = 448.0
    """Block scale that the tensor's largest block gets: 448, or 256, which leaves room for a scale 1.5 times larger."""
    statistics: Statistics = "float32"
    """Dtype in which the amax is taken and used."""
    granularity: Granularity = "tensor"
    """What has one amax and one encode factor: the tensor, or each row of it."""
    transform: Hadamard | None = None
    """Rotation before everything else, of bfloat16 only; of the columnwise operand in `quantize_both`."""
    tensor_scale: TensorScale = "max/amax"
    """Form of the tensor's encode factor, limited to FLT_MAX; 1 where amax is 0 or infinite."""
    block_scale: BlockScale = "amax*(enc*(1/6))"
    """Order of operations of the block scale before it is rounded to `scale`, limited to FLT_MAX."""
    candidates: Candidates = "6"
    """Whether a block's amax maps to 6, or to 4 where that makes the sum of absolute or squared errors smaller."""
    zero_scale: ZeroScale = "saturate"
    """What a block whose scale rounds to 0 gets: `saturate`, codes of the largest magnitude (they decode to 0)."""
    element_scale: Element = "x*min(1/(s*(1/enc)),FLT_MAX)"
    """Form of the multiply before an element is rounded."""
    rounding: Rounding = "nearest-even"
    """Rounding of the elements; stochastic takes random bits."""
    nan: NanPolicy = "ignore"
    """Whether a NaN element is left out of the statistics or makes every scale of the tensor NaN."""
    alpha: Alpha = "(a*b)/d"
    """How a GEMM forms the factor of the two tensor amaxes (a of the first operand, b of the second)."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            choices = get_args(hints[field.name])
            value = getattr(self, field.name)
            if choices and isinstance(choices[0], str) and value not in choices:
                raise ValueError(f"recipe {self.name}: {field.name} is {value!r}; it can be {', '.join(choices)}")
        for one, other, reason in _EXCLUDED:
            if _FEATURES[one](self) and _FEATURES[other](self):
                raise ValueError(f"recipe {self.name}: {one} and {other} do not go together: {reason}")

    @property
    def max_product(self) -> float:
        """Largest element times largest scale: 2688 for NVFP4, the number that the tensor amax is mapped to."""
        return self.element.max * self.scale_max

    @property
    def rowwise(self) -> Recipe:
        """The recipe of the rowwise half of `quantize_both`: the same without the rotation."""
        if self.transform is None:
            return self
        return replace(self, name=re.sub(r"-rht\d*(-nosign)?", "", self.name), transform=None)

    def __str__(self) -> str:
        return self.name if self.dialect == DEFAULT_DIALECT else f"{self.name}@{self.dialect}"


_FEATURES: dict[str, Any] = {
    "2-D blocks": lambda r: r.block[0] > 1,
    "a rotation": lambda r: r.transform is not None,
    "stochastic rounding": lambda r: r.rounding == "stochastic",
    "row scaling": lambda r: r.granularity == "row",
    "4over6": lambda r: r.candidates != "6",
}
# What Transformer Engine refuses, and why.
_EXCLUDED = (
    ("row scaling", "2-D blocks", "a tile of 16 rows has one scale, but each row an amax of its own"),
    ("row scaling", "a rotation", "row scaling is for forward activations, which are not rotated"),
    ("row scaling", "stochastic rounding", "row scaling is for forward activations, which round to nearest"),
    ("4over6", "a rotation", "the choice between 4 and 6 is by the error of unrotated elements"),
    ("4over6", "stochastic rounding", "the choice between 4 and 6 is by the error of rounding to nearest"),
)

DEFAULT_DIALECT = "te"
_NVFP4 = Recipe("nvfp4", DEFAULT_DIALECT, element=E2M1, block=(1, 16), scale=E4M3)

# Parts of a recipe's name after nvfp4, in their order.
_PARTS = re.compile(
    r"nvfp4(?P<tile>-2d)?(?P<rht>-rht(?P<group>2|4|8|32|64|128)?(?P<nosign>-nosign)?)?(?P<sr>-sr)?(?P<row>-rowscaled)?"
    r"(?P<choice>-4over6-(?P<most>448|256)-(?P<error>mae|mse))?"
)
_NAMES = (
    "nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-rht-nosign", *(f"nvfp4-rht{g}" for g in RHT_GROUPS if g != 16),
    "nvfp4-2d-rht", "nvfp4-sr", "nvfp4-2d-sr", "nvfp4-rht-sr", "nvfp4-2d-rht-sr", "nvfp4-rowscaled",
    *(f"nvfp4{part}-4over6-{most}-{error}" for part in ("", "-2d", "-rowscaled") for most in (448, 256)
      for error in ("mae", "mse")),
)  # fmt: skip

# Transformer Engine >= 2.14; 2.8 to 2.13; and 2.14's native GEMM path, whose α multiplies by a reciprocal.
_DIALECTS: dict[str, dict[str, Any]] = {
    "te": {},
    "te-2.8": {"block_scale": "(amax/6)*enc"},
    "te-native": {"alpha": "(b*a)*(1/d)"},
}


def recipe_names() -> list[str]:
    """The names of the recipes in the default dialect, then those of plain `nvfp4` in every other dialect."""
    return [*_NAMES, *(f"nvfp4@{dialect}" for dialect in _DIALECTS if dialect != DEFAULT_DIALECT)]


def recipe(name: str | Recipe) -> Recipe:
    """The recipe called `name`, or `name@dialect`; a Recipe is returned as it is.

    Names are nvfp4, then in this order and as far as they go together -2d, -rht (or -rht32 for groups of 32) with or
    without -nosign, -sr, -rowscaled, -4over6-E-MODE. Raises ValueError with the nearest names where there is none, and
    with the reason where two parts exclude each other.
    """
    if isinstance(name, Recipe):
        return name
    base, _, dialect = name.partition("@")
    dialect = dialect or DEFAULT_DIALECT
    parts = _PARTS.fullmatch(base)
    if parts is None:
        raise ValueError(f"no recipe is called {name!r}{_nearest(base, _NAMES)}; there are {', '.join(recipe_names())}")
    if dialect not in _DIALECTS:
        raise ValueError(
            f"recipe {base} has no dialect {dialect!r}{_nearest(dialect, _DIALECTS)}; it has {', '.join(_DIALECTS)}"
        )
    return replace(_NVFP4, name=base, dialect=dialect, **_choices(parts), **_DIALECTS[dialect])


def _choices(parts: re.Match[str]) -> dict[str, Any]:
    """The fields that the parts of a name set."""
    found: dict[str, Any] = {}
    if parts["tile"]:
        found["block"] = (16, 16)
    if parts["rht"]:
        found["transform"] = Hadamard(int(parts["group"] or 16), 0 if parts["nosign"] else RHT_SIGNS)
    if parts["sr"]:
        found["rounding"] = "stochastic"
    if parts["row"]:
        found["granularity"] = "row"
    if parts["choice"]:
        found |= {"candidates": f"4-or-6-{parts['error']}", "scale_max": float(parts["most"])}
        found["block_scale"] = "(amax/6)*enc"
    return found


def _nearest(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
