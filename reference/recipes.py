"""Recipes as data: one complete quantization rule each, and the dialects that libraries speak.

A recipe names every choice in which libraries differ, so that the reference can speak any of them and a report can say
where a kernel leaves one. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from reference.dialects import DIALECTS
from reference.formats import E2M1, E4M3, Format

Statistics = Literal["float32", "input", "input-blocks"]
Granularity = Literal["tensor", "row"]
TensorScale = Literal["max/amax", "(1/amax)*max", "amax/max", "none"]
TensorLimit = Literal["finite", "none", "0-for-0", "1", "2^-23", "amax>=1e-12", "refuse"]
BlockScale = Literal[
    "amax*(enc*(1/6))", "(amax/6)*enc", "(amax*(1/6))*enc", "(2*amax/12)*enc", "(amax*enc)/6",
    "(amax/6)/dec", "amax/(6*dec)", "(amax*(1/dec))*(1/6)", "amax/6", "amax*(1/6)",
]  # fmt: skip
ZeroBlock = Literal["keep", "1", "1-below-sqrt(tiny)", "amax/6=2^-23", "stored-2^-3"]
SmallestScale = Literal["0", "2^-9", "2^-6"]
ScaleRounding = Literal["nearest-even", "nearest-toward-zero"]
Candidates = Literal["6", "4-or-6-mae", "4-or-6-mse"]
ZeroScale = Literal["saturate", "infinity", "zeros", "1", "2^-9", "2^-23"]
Element = Literal[
    "x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))", "x*r(s*r(enc))", "x*((1/dec)/s)", "(x*enc)*(1/s)",
    "(x*(1/dec))*(1/s)", "x/(s*dec)", "x/(s/enc)", "(x*enc)/s", "x/s", "R(x/R(s*(1/enc)))",
]  # fmt: skip
Rounding = Literal[
    "nearest-even", "stochastic", "nearest-toward-zero", "nearest-even-within-1e-6", "nearest-even-wrapping",
]  # fmt: skip
NegativeZero = Literal["keep", "rounded", "never"]
NanCode = Literal[7, 0, 8, 11, 12]
Packing = Literal["low-first", "high-first"]
NanPolicy = Literal["ignore", "propagate"]
Decode = Literal["(s*amax)*(1/max)", "s/enc", "s*dec", "s"]
Alpha = Literal["(a*b)/d", "(b*a)*(1/d)", "1/(a_enc*b_enc)", "a_dec*b_dec", "1"]

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

    In expressions, `amax` of a tensor scale is the tensor's and max the product 2688, `amax` of a block scale is the
    block's; enc = 2688/amax and dec = amax/2688 are the tensor's scale in whichever form `tensor_scale` has; s is the
    stored block scale; d the constant 36·448·448 of the NVFP4 GEMM. Every operation rounds to float32, R(…) then to the
    dtype of x. r(a) is 1/a, and 0 for 0. Which library has which choices: dialects.md.
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
    """Dtype in which amaxes are used: `input`, every result of amaxes alone (the tensor scale and its reciprocal, a
    block's amax/6) rounds to the dtype of x; `input-blocks`, that of blocks alone."""
    granularity: Granularity = "tensor"
    """What has one amax and one encode factor: the tensor, or each row of it."""
    transform: Hadamard | None = None
    """Rotation before everything else, of bfloat16 only; of the columnwise operand in `quantize_both`."""
    tensor_scale: TensorScale = "max/amax"
    """Form of the tensor's scale: an encode factor enc, a decode factor dec, or none (one level)."""
    tensor_limit: TensorLimit = "finite"
    """What an amax without a proper tensor scale gets. `finite`: the scale is at most FLT_MAX, and 1 where amax is 0 or
    infinite; `0-for-0`: 0 where amax is 0; `1`: 1 where the scale is not finite; `2^-23`: that where it is 0;
    `amax>=1e-12`: no amax is smaller; `refuse`: ValueError where the scale is 0 or not finite; `none`: what comes."""
    block_scale: BlockScale = "amax*(enc*(1/6))"
    """Order of operations of the block scale before it is rounded to `scale`, saturating."""
    zero_block: ZeroBlock = "keep"
    """What a block scale of 0 becomes before it is rounded: 1; 1 below the root of the smallest normal number of the
    dtype of x; as if amax/6 were 2^-23; or, once it is rounded, 2^-3."""
    smallest_scale: SmallestScale = "0"
    """Lower clamp of the block scale before it is rounded, after `zero_block`."""
    scale_rounding: ScaleRounding = "nearest-even"
    """Rounding of the block scale to `scale`."""
    candidates: Candidates = "6"
    """Whether a block's amax maps to 6, or to 4 where that makes the sum of absolute or squared errors smaller."""
    zero_scale: ZeroScale = "saturate"
    """What a block whose scale rounds to 0 gets. `saturate`: the largest code for every element that is not 0 (it
    decodes to 0); `infinity`: what 1/0 gives, NaN for an element of 0; `zeros`: codes of 0; a number: the divisor is
    that where it is not above 0."""
    element_scale: Element = "x*min(1/(s*(1/enc)),FLT_MAX)"
    """Form of the multiplication or division before an element is rounded."""
    rounding: Rounding = "nearest-even"
    """Rounding of the elements. Stochastic takes random bits. `nearest-even-within-1e-6`: distances to the grid are
    float32, and 1e-6 smaller to even codes. `nearest-even-wrapping`: there is no largest code, and what has none below
    16 is cut to 4 bits: from 7 on −0, whatever the sign, from 11 on −0.5 and so on. The rest saturate."""
    negative_zero: NegativeZero = "keep"
    """Code 8, −0: for −0.0 and negative numbers that round to 0; `rounded`, for the latter alone; or `never`."""
    nan_code: NanCode = 7
    """Code of an element that is NaN before it is rounded, as 0·∞ is; of infinity too where rounding wraps."""
    packing: Packing = "low-first"
    """Nibble of the first of two elements."""
    nan: NanPolicy = "ignore"
    """Whether a NaN element is left out of the statistics or makes every scale of the tensor NaN."""
    decode: Decode = "(s*amax)*(1/max)"
    """How `dequantize` forms the factor of a code. s/enc is 0 where enc is 0."""
    alpha: Alpha = "(a*b)/d"
    """How a GEMM forms the factor of the two tensor amaxes (a of the first operand, b of the second) or scales."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if get_origin(hints[field.name]) is Literal and value not in get_args(hints[field.name]):
                choices = ", ".join(map(str, get_args(hints[field.name])))
                raise ValueError(f"recipe {self.name}: {field.name} is {value!r}; it can be {choices}")
        for one, other, reason in _EXCLUDED:
            if _FEATURES[one](self) and _FEATURES[other](self):
                raise ValueError(f"recipe {self.name}: {one} and {other} do not go together: {reason}")
        self._check_expressions()

    def _check_expressions(self) -> None:
        """Raises ValueError where an expression takes a number that the recipe does not have, or none that it has."""
        has = _TENSOR_FACTOR[self.tensor_scale]
        for name in ("block_scale", "element_scale", "decode", "alpha"):
            expression = getattr(self, name)
            takes = next((word for word in ("enc", "dec") if word in expression), "")
            if name in ("decode", "alpha"):
                fits = takes in ("", has) and (expression in ("s", "1")) == (has == "")
            else:
                fits = takes == has
            if not fits:
                raise ValueError(
                    f"recipe {self.name}: {name} {expression} does not fit tensor_scale {self.tensor_scale}, "
                    f"which gives {has or 'no factor'}"
                )
        allowed = _zero_scales(self.element_scale)
        if self.zero_scale not in allowed:
            raise ValueError(
                f"recipe {self.name}: element_scale {self.element_scale} does not go with zero_scale "
                f"{self.zero_scale}; it goes with {', '.join(allowed)}"
            )

    @property
    def divides(self) -> bool:
        """Whether elements are divided by a number of their block rather than multiplied."""
        return self.element_scale in _DIVIDING

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


# Block scales that round amax/6 by itself.
_FORMS_SIXTH: tuple[str, ...] = (
    "(amax/6)*enc",
    "(amax*(1/6))*enc",
    "(2*amax/12)*enc",
    "(amax/6)/dec",
    "amax/6",
    "amax*(1/6)",
)
_DIVIDING: tuple[str, ...] = ("x/(s*dec)", "x/(s/enc)", "(x*enc)/s", "x/s", "R(x/R(s*(1/enc)))")
# What 4over6 takes for granted when it weighs a candidate.
_TE_ELEMENT: dict[str, Any] = {
    "statistics": "float32", "tensor_scale": "max/amax", "zero_block": "keep", "smallest_scale": "0",
    "scale_rounding": "nearest-even", "zero_scale": "saturate", "rounding": "nearest-even",
    "element_scale": "x*min(1/(s*(1/enc)),FLT_MAX)", "negative_zero": "keep", "nan_code": 7, "packing": "low-first",
}  # fmt: skip
_FEATURES: dict[str, Any] = {
    "2-D blocks": lambda r: r.block[0] > 1,
    "a rotation": lambda r: r.transform is not None,
    "stochastic rounding": lambda r: r.rounding == "stochastic",
    "row scaling": lambda r: r.granularity == "row",
    "4over6": lambda r: r.candidates != "6",
    "one level of scales": lambda r: r.tensor_scale == "none",
    "statistics of blocks in the dtype of x": lambda r: r.statistics == "input-blocks",
    "the smallest amax/6": lambda r: r.zero_block == "amax/6=2^-23",
    "a block scale that never forms amax/6": lambda r: r.block_scale not in _FORMS_SIXTH,
    "choices of another library": lambda r: any(getattr(r, name) != value for name, value in _TE_ELEMENT.items()),
}
# The factor that each form of the tensor scale gives.
_TENSOR_FACTOR = {"max/amax": "enc", "(1/amax)*max": "enc", "amax/max": "dec", "none": ""}


def _zero_scales(element_scale: Element) -> tuple[ZeroScale, ...]:
    """The rules for a scale of 0 that a form of the element's scaling goes with."""
    if element_scale == "x*min(1/(s*(1/enc)),FLT_MAX)":
        return ("saturate",)
    if element_scale == "x*r(s*r(enc))":
        return ("zeros",)
    if element_scale in _DIVIDING:
        return ("saturate", "infinity", "1", "2^-9", "2^-23")
    return ("infinity", "zeros")


# What does not go together, and why; the first five are what Transformer Engine refuses.
_EXCLUDED = (
    ("row scaling", "2-D blocks", "a tile of 16 rows has one scale, but each row an amax of its own"),
    ("row scaling", "a rotation", "row scaling is for forward activations, which are not rotated"),
    ("row scaling", "stochastic rounding", "row scaling is for forward activations, which round to nearest"),
    ("4over6", "a rotation", "the choice between 4 and 6 is by the error of unrotated elements"),
    ("4over6", "stochastic rounding", "the choice between 4 and 6 is by the error of rounding to nearest"),
    ("one level of scales", "row scaling", "no amax is used but those of blocks, so a row has none of its own"),
    ("4over6", "choices of another library", "the errors that choose are those of Transformer Engine's candidates"),
    ("statistics of blocks in the dtype of x", "a block scale that never forms amax/6", "nothing would be rounded"),
    ("the smallest amax/6", "a block scale that never forms amax/6", "nothing would be replaced"),
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


def recipe_names() -> list[str]:
    """The names of the recipes in the default dialect, then those of plain `nvfp4` in every other dialect."""
    return [*_NAMES, *(f"nvfp4@{dialect}" for dialect in DIALECTS if dialect != DEFAULT_DIALECT)]


def recipe(name: str | Recipe) -> Recipe:
    """The recipe called `name`, or `name@dialect`; a Recipe is returned as it is.

    Names are nvfp4, then in this order and as far as they go together -2d, -rht (or -rht32 for groups of 32) with or
    without -nosign, -sr, -rowscaled, -4over6-E-MODE. Raises ValueError with the nearest names where there is none, and
    with the reason where two parts, or a part and the dialect, exclude each other.
    """
    if isinstance(name, Recipe):
        return name
    base, _, dialect = name.partition("@")
    dialect = dialect or DEFAULT_DIALECT
    parts = _PARTS.fullmatch(base)
    if parts is None:
        raise ValueError(f"no recipe is called {name!r}{_nearest(base, _NAMES)}; there are {', '.join(recipe_names())}")
    if dialect not in DIALECTS:
        raise ValueError(
            f"recipe {base} has no dialect {dialect!r}{_nearest(dialect, DIALECTS)}; it has {', '.join(DIALECTS)}"
        )
    choices, own = _choices(parts), DIALECTS[dialect]
    for field in choices.keys() & own.keys():
        if choices[field] != own[field]:
            raise ValueError(
                f"recipe {base} has no dialect {dialect!r}: {field} would be {choices[field]} and {own[field]} at once"
            )
    return replace(_NVFP4, name=base, dialect=dialect, **(choices | own))


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
