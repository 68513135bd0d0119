"""A recipe as data: one complete quantization rule.

It names every choice in which libraries differ, so that the reference can speak any of them and a report can say where
a kernel leaves one. Nothing here imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from narrowgauge.spec.formats import E2M1, E4M3, E5M2, E8M0, FP32, Format

Statistics = Literal["float32", "input", "input-blocks"]
Granularity = Literal["tensor", "row"]
TensorScale = Literal["max/amax", "(1/amax)*max", "amax/max", "given", "none"]
TensorLimit = Literal["finite", "none", "0-for-0", "1", "2^-23", "amax>=1e-12", "refuse", "1-for-nan"]
BlockScale = Literal[
    "amax*(enc*(1/6))", "(amax/6)*enc", "(amax*(1/6))*enc", "(2*amax/12)*enc", "(amax*enc)/6",
    "(amax/6)/dec", "amax/(6*dec)", "(amax*(1/dec))*(1/6)", "amax/6", "amax*(1/6)",
    "amax*(1/max)", "amax/max", "amax*2^-emax", "1/(max/amax)", "1/enc",
]  # fmt: skip
ZeroBlock = Literal["keep", "1", "1-below-sqrt(tiny)", "amax/6=2^-23", "stored-2^-3"]
SmallestScale = Literal["0", "2^-9", "2^-6"]
ScaleRounding = Literal[
    "nearest-even", "nearest-toward-zero", "up", "down", "as-element", "up-from-1.75", "nearest-log2", "none",
]  # fmt: skip
Candidates = Literal["6", "4-or-6-mae", "4-or-6-mse"]
ZeroScale = Literal["saturate", "infinity", "zeros", "1", "2^-9", "2^-23"]
Element = Literal[
    "x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))", "x*r(s*r(enc))", "x*((1/dec)/s)", "(x*enc)*(1/s)",
    "(x*(1/dec))*(1/s)", "x/(s*dec)", "x/(s/enc)", "(x*enc)/s", "x/s", "R(x/R(s*(1/enc)))",
    "x*(1/s)", "x*(max/amax)", "x*enc",
]  # fmt: skip
Rounding = Literal[
    "nearest-even", "stochastic", "nearest-toward-zero", "nearest-even-within-1e-6", "nearest-even-wrapping",
]  # fmt: skip
NegativeZero = Literal["keep", "rounded", "never"]
NanCode = Literal[7, 0, 8, 11, 12, 31, 127]
Packing = Literal["low-first", "high-first"]
NanPolicy = Literal["ignore", "propagate"]
Decode = Literal["(s*amax)*(1/max)", "s/enc", "s*dec", "s"]
Alpha = Literal["(a*b)/d", "(b*a)*(1/d)", "1/(a_enc*b_enc)", "a_dec*b_dec", "s_a*s_b", "1"]
LargestScale = Literal["float32", "input"]
Columnwise = Literal["transposed", "in-place"]

WHOLE = 1 << 62
"""Rows and columns of a block that is the whole tensor."""

RHT_SIGNS = 0xD7E8
"""Bit k is set where element k of 16 is negated: Transformer Engine's constant sign vector
(docs/numerics.md#hadamard-transform)."""
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
class Delayed:
    """How a scale follows from a history of amaxes: `update_scale`."""

    algorithm: Literal["max", "most-recent"] = "max"
    """The largest amax of the history, or its first."""
    margin: int = 0
    """Powers of two that are left above the amax."""
    update: Literal["single", "bulk"] = "single"
    """Transformer Engine's kernel: of one tensor, which rolls a history whose first amax is 0 too, or of many, which
    leaves that and its scale alone."""


@dataclass(frozen=True)
class Recipe:
    """A quantization rule. Two recipes that compare equal give the same bytes.

    In expressions, `amax` of a tensor scale is the tensor's and max the product 2688 (the element's largest value where
    there are no scales of E4M3), `amax` of a block scale is the block's and max the element's largest value, whose
    exponent is emax; enc = 2688/amax and dec = amax/2688 are the tensor's scale in whichever form `tensor_scale` has; s
    is the stored block scale; d the constant 36·448·448 of the NVFP4 GEMM. Every operation rounds to float32, R(…) then
    to the dtype of x. r(a) is 1/a, and 0 for 0. Which library has which choices: docs/dialects.md#nvfp4.
    """

    name: str
    dialect: str
    element: Format
    block: tuple[int, int]
    """Rows and columns that share a scale; (WHOLE, WHOLE) where the tensor has one. The scale of a block of several
    rows is stored once for each of them, unless it is a float32 number: see `stored_rows`."""
    scale: Format
    """Of the stored block scales, which are decode scales."""

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
    """Form of the tensor's scale: an encode factor enc, which may be given to `quantize`, a decode factor dec, or none
    (one level)."""
    tensor_limit: TensorLimit = "finite"
    """What an amax without a proper tensor scale gets. `finite`: the scale is at most FLT_MAX, and 1 where amax is 0 or
    infinite; `1-for-nan`: the same, and 1 where amax is NaN; `0-for-0`: 0 where amax is 0; `1`: 1 where the scale is
    not finite; `2^-23`: that where it is 0;
    `amax>=1e-12`: no amax is smaller; `refuse`: ValueError where the scale is 0 or not finite; `none`: what comes."""
    block_scale: BlockScale = "amax*(enc*(1/6))"
    """Order of operations of the block scale before it is rounded to `scale`, saturating. 1/(max/amax): the encode
    scale max/amax is rounded, 1 where amax is 0, infinite or NaN, then inverted."""
    smallest_amax: float = 0.0
    """What amaxes are raised to: Transformer Engine's epsilon."""
    largest_scale: LargestScale = "float32"
    """Dtype whose largest number an encode scale max/amax gets that would be infinite: float32, or that of x."""
    zero_block: ZeroBlock = "keep"
    """What a block scale of 0 becomes before it is rounded: 1; 1 below the root of the smallest normal number of the
    dtype of x; as if amax/6 were 2^-23; or, once it is rounded, 2^-3."""
    smallest_scale: SmallestScale = "0"
    """Lower clamp of the block scale before it is rounded, after `zero_block`."""
    scale_rounding: ScaleRounding = "nearest-even"
    """Rounding of the block scale to `scale`. To a power of two: `up`, `down` (of 1/(max/amax) that of max/amax),
    `as-element` (down, after rounding to the element's mantissa, ties away), `up-from-1.75` (up from mantissa 1.75 on,
    else down), `nearest-log2` (up above √2); it saturates, and only NaN gives NaN. `none`: it is a float32 number."""
    candidates: Candidates = "6"
    """Whether a block's amax maps to 6, or to 4 where that makes the sum of absolute or squared errors smaller."""
    zero_scale: ZeroScale = "saturate"
    """What a block whose scale rounds to 0 gets. `saturate`: the largest code for every element that is not 0 (it
    decodes to 0); `infinity`: what 1/0 gives, NaN for an element of 0; `zeros`: codes of 0; a number: the divisor is
    that where it is not above 0. Scales of E8M0 and float32 are never 0."""
    element_scale: Element = "x*min(1/(s*(1/enc)),FLT_MAX)"
    """Form of the multiplication or division before an element is rounded."""
    rounding: Rounding = "nearest-even"
    """Rounding of the elements. Stochastic takes random bits. `nearest-even-within-1e-6`: distances to the grid are
    float32, and 1e-6 smaller to even codes. `nearest-even-wrapping`: there is no largest code, and what has none below
    16 is cut to 4 bits: from 7 on −0, whatever the sign, from 11 on −0.5 and so on. The rest saturate."""
    negative_zero: NegativeZero = "keep"
    """Code 8, −0: for −0.0 and negative numbers that round to 0; `rounded`, for the latter alone; or `never`."""
    nan_code: NanCode = 7
    """Code of an element that is NaN before it is rounded, as 0·∞ is; of infinity too where rounding wraps. 127 is the
    NaN of E4M3 and E5M2."""
    packing: Packing = "low-first"
    """Nibble of the first of two elements."""
    nan: NanPolicy = "ignore"
    """Whether a NaN element is left out of the statistics or makes every scale of the tensor NaN, with one level of
    scales that of its block."""
    decode: Decode = "(s*amax)*(1/max)"
    """How `dequantize` forms the factor of a code. s/enc is 0 where enc is 0."""
    alpha: Alpha = "(a*b)/d"
    """How a GEMM forms the factor of the two tensor amaxes (a of the first operand, b of the second) or scales."""
    columnwise: Columnwise = "transposed"
    """How the columnwise half of `quantize_both` lies in memory: as the transpose that it is, or where x has the
    elements, codes (M, K) and scales (⌈M/32⌉, K)."""
    delayed: Delayed | None = None
    """How `update_scale` makes the scale that `quantize` is given."""

    def __post_init__(self) -> None:
        for name, choices in _choices().items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"recipe {self.name}: {name} is {value!r}; it can be {', '.join(map(str, choices))}")
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
                alone = has == "" or self.block_scale == "1/enc"
                fits = takes in ("", has) and (expression in ("s", "1", "s_a*s_b")) == alone
            else:
                fits = takes == has
            if not fits:
                raise ValueError(
                    f"recipe {self.name}: {name} {expression} does not fit tensor_scale {self.tensor_scale}, "
                    f"which gives {has or 'no factor'}"
                )
        for name, forms in _OF_SCALES[self.scale.name].items():
            if getattr(self, name) not in forms:
                raise ValueError(
                    f"recipe {self.name}: {name} {getattr(self, name)} does not go with scales of {self.scale.name}; "
                    f"they go with {', '.join(forms)}"
                )
        if not self.whole == (self.block_scale == "1/enc") == (self.alpha == "s_a*s_b"):
            raise ValueError(
                f"recipe {self.name}: one scale for the tensor, block_scale 1/enc and alpha s_a*s_b go together, or "
                "none of them"
            )
        if self.nan_code >= self.element.codes:
            raise ValueError(f"recipe {self.name}: nan_code {self.nan_code} is no code of {self.element.name}")
        if (self.tensor_scale == "given") != (self.delayed is not None):
            raise ValueError(f"recipe {self.name}: tensor_scale is given exactly where there is a rule in delayed")
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
        """What the tensor amax is mapped to: for NVFP4 the largest element times the largest scale, 2688; for one scale
        the largest element."""
        return self.element.max * (1.0 if self.whole else self.scale_max)

    @property
    def whole(self) -> bool:
        """Whether the tensor has one scale."""
        return self.block[0] == WHOLE

    @property
    def stored_rows(self) -> int:
        """Rows that share a stored scale: all of a block for float32 scales, else 1, repeated."""
        return self.block[0] if self.scale is FP32 else 1

    @property
    def row_alignment(self) -> int:
        """Rows of a section that a grouped GEMM takes are a multiple of this: docs/numerics.md#sections."""
        return 16 if self.scale is FP32 else 32 if self.scale is E8M0 else 128

    @property
    def rowwise(self) -> Recipe:
        """The recipe of the rowwise half of `quantize_both`: the same without the rotation."""
        if self.transform is None:
            return self
        return replace(self, name=re.sub(r"-rht\d*(-nosign)?", "", self.name), transform=None)

    def __str__(self) -> str:
        return self.name if self.dialect == DEFAULT_DIALECT else f"{self.name}@{self.dialect}"


@cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """What the fields that choose can be. Found once: a recipe is made at each call of a door."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hint) for field in fields(Recipe) if get_origin(hint := hints[field.name]) is Literal}


DEFAULT_DIALECT = "te"
_EXPONENT_SCALES: tuple[str, ...] = ("amax*(1/max)", "amax/max", "amax*2^-emax")
_FLOAT_SCALES: tuple[str, ...] = ("1/(max/amax)", "1/enc")
_FLOAT_ELEMENTS: tuple[str, ...] = ("x*(max/amax)", "x*enc")
# The choices that scales of a format have.
_OF_SCALES: dict[str, dict[str, tuple[str, ...]]] = {
    "E4M3": {
        "block_scale": tuple(e for e in get_args(BlockScale) if e not in (*_EXPONENT_SCALES, *_FLOAT_SCALES)),
        "scale_rounding": ("nearest-even", "nearest-toward-zero"),
        "element_scale": tuple(e for e in get_args(Element) if e not in ("x*(1/s)", *_FLOAT_ELEMENTS)),
    },
    "E8M0": {
        "block_scale": _EXPONENT_SCALES,
        "scale_rounding": ("up", "down", "as-element", "up-from-1.75", "nearest-log2"),
        "element_scale": ("x*(1/s)", "x/s"),
    },
    "FP32": {"block_scale": _FLOAT_SCALES, "scale_rounding": ("none", "down"), "element_scale": _FLOAT_ELEMENTS},
}


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
    "float32 scales": lambda r: r.scale is FP32,
    "another element than E2M1": lambda r: r.element is not E2M1,
    "E2M1": lambda r: r.element is E2M1,
    "scales of bytes": lambda r: r.scale is not FP32,
    "scales of another format than E4M3": lambda r: r.scale is not E4M3,
    "choices for scales of E4M3": lambda r: (r.statistics, r.zero_block, r.smallest_scale) != ("float32", "keep", "0"),
    "a smallest amax": lambda r: r.smallest_amax > 0,
    "a given scale": lambda r: r.tensor_scale == "given",
    "a largest scale of the dtype of x": lambda r: r.largest_scale == "input",
    "a block scale other than 1/(max/amax)": lambda r: r.block_scale != "1/(max/amax)",
    "the first element high": lambda r: r.packing == "high-first",
    "a columnwise half in place": lambda r: r.columnwise == "in-place",
    "a rounding of E2M1": lambda r: r.rounding not in ("nearest-even", "stochastic"),
    "4over6": lambda r: r.candidates != "6",
    "one level of scales": lambda r: r.tensor_scale == "none",
    "statistics of blocks in the dtype of x": lambda r: r.statistics == "input-blocks",
    "the smallest amax/6": lambda r: r.zero_block == "amax/6=2^-23",
    "a block scale that never forms amax/6": lambda r: r.block_scale not in _FORMS_SIXTH,
    "choices of another library": lambda r: any(getattr(r, name) != value for name, value in _TE_ELEMENT.items()),
}
# The factor that each form of the tensor scale gives.
_TENSOR_FACTOR = {"max/amax": "enc", "(1/amax)*max": "enc", "amax/max": "dec", "given": "enc", "none": ""}


def _zero_scales(element_scale: Element) -> tuple[ZeroScale, ...]:
    """The rules for a scale of 0 that a form of the element's scaling goes with."""
    if element_scale in ("x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/s)", "x*(max/amax)", "x*enc"):
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
    ("float32 scales", "stochastic rounding", "Transformer Engine rounds FP8 to nearest"),
    ("float32 scales", "a rotation", "Transformer Engine rotates no FP8"),
    ("a rounding of E2M1", "another element than E2M1", "it is made of that format's grid"),
    ("the first element high", "another element than E2M1", "no two elements share a byte"),
    ("a columnwise half in place", "E2M1", "two columns would share a byte"),
    ("a columnwise half in place", "float32 scales", "Transformer Engine transposes FP8"),
    ("choices for scales of E4M3", "scales of another format than E4M3", "nothing would be changed"),
    ("a smallest amax", "scales of bytes", "Transformer Engine's epsilon is one of FP8"),
    ("a smallest amax", "a given scale", "no amax is used"),
    ("a largest scale of the dtype of x", "a block scale other than 1/(max/amax)", "nothing would be changed"),
)


def mismatch(a: Recipe, b: Recipe) -> str:
    """Why operands of two recipes cannot be multiplied, or nothing where they can.

    Both have scales of one format, for as many elements of K, the same rotation and the same α. NVFP4 has one element
    format; MX elements mix (PTX: kind::mxf8f6f4); E5M2 by E5M2 and tiles by tiles are no GEMM of FP8 with float32
    scales (Transformer Engine, cuBLAS).
    """
    for what in ("scale", "transform", "alpha"):
        if (one := getattr(a, what)) != (other := getattr(b, what)):
            reason = "; rotations cancel only where both operands have the same" if what == "transform" else ""
            return f"{what} is {_named(one)} and {_named(other)}{reason}"
    if a.scale is E4M3 and a.element != b.element:
        return f"element is {a.element.name} and {b.element.name}"
    if a.block[1] != b.block[1]:
        return f"block is {_block(a)} and {_block(b)}"
    if a.scale is FP32 and a.element is b.element is E5M2:
        return "element is E5M2 of both; one of the two has to be E4M3"
    if a.scale is FP32 and not a.whole and a.block[0] > 1 and b.block[0] > 1:
        return f"block is {_block(a)} of both; one of the two has to be 1x{a.block[1]}"
    return ""


def _named(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice)


def _block(r: Recipe) -> str:
    return f"{r.block[0]}x{r.block[1]}"
