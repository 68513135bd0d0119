"""A recipe as data: a complete quantization rule.

A recipe names every choice in which libraries differ. The reference can therefore compute any dialect, and a report can
name the choice in which a kernel differs. This module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32, Format

Statistics = Literal["float32", "input", "input-blocks"]
Granularity = Literal["tensor", "row"]
TensorScale = Literal["max/amax", "(1/amax)*max", "amax/max", "given", "none"]
TensorLimit = Literal["finite", "none", "0-for-0", "1", "2^-23", "amax>=1e-12", "refuse", "1-for-nan"]
BlockScale = Literal[
    "amax*(enc*(1/6))", "(amax/6)*enc", "(amax*(1/6))*enc", "(2*amax/12)*enc", "(amax*enc)/6", "(amax*enc)*(1/6)",
    "(amax/6)/dec", "(amax*(1/6))/dec", "amax/(6*dec)", "(amax*(1/dec))*(1/6)", "amax/6", "amax*(1/6)",
    "amax*(1/max)", "amax/max", "amax*2^-emax", "1/(max/amax)", "1/enc", "given",
]  # fmt: skip
ZeroBlock = Literal["keep", "1", "1-below-sqrt(tiny)", "amax/6=2^-23", "stored-2^-3", "eps"]
SmallestScale = Literal["0", "2^-9", "2^-6"]
ScaleRounding = Literal[
    "nearest-even", "nearest-toward-zero", "up", "down", "as-element", "up-from-1.75", "nearest-log2", "up-log2",
    "down-log2", "none",
]  # fmt: skip
Candidates = Literal["6", "4-or-6-mae", "4-or-6-mse"]
ZeroScale = Literal["saturate", "infinity", "zeros", "1", "2^-9", "2^-23"]
Element = Literal[
    "x*min(1/(s*(1/enc)),FLT_MAX)", "x*(1/(s*(1/enc)))", "x*r(s*r(enc))", "x*(r(s)*enc)", "x*((1/dec)/s)",
    "(x*enc)*(1/s)",
    "(x*(1/dec))*(1/s)", "x/(s*dec)", "x/(s/enc)", "(x*enc)/s", "x/s", "R(x/R(s*(1/enc)))",
    "x*(1/s)", "R(x/s)", "R(x/s)*enc", "x*(max/amax)", "x*enc",
]  # fmt: skip
Rounding = Literal[
    "nearest-even", "stochastic", "nearest-toward-zero", "nearest-away", "nearest-even-within-1e-6",
    "nearest-even-wrapping",
]  # fmt: skip
NegativeZero = Literal["keep", "rounded", "never"]
NanCode = Literal[7, 0, 8, 11, 12, 31, 126, 127, 128, 254]
Packing = Literal["low-first", "high-first"]
NanPolicy = Literal["ignore", "propagate"]
Decode = Literal["(s*amax)*(1/max)", "s/enc", "s*dec", "s"]
Alpha = Literal["(a*b)/d", "(b*a)*(1/d)", "1/(a_enc*b_enc)", "a_dec*b_dec", "s_a*s_b", "1"]
LargestScale = Literal["float32", "input", "none"]
Columnwise = Literal["transposed", "in-place"]

WHOLE = 1 << 62
"""Rows and columns of a block that spans the whole tensor."""

RHT_SIGNS = 0xD7E8
"""Mask of Transformer Engine's constant sign vector: element k of 16 is negated if bit k is set
(docs/numerics.md#hadamard-transform)."""
RHT_GROUPS = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Hadamard:
    """A rotation of groups along K: y = x·diag(σ)·H·c; H: Sylvester's matrix of `group` rows, c = bf16(1/√group)."""

    group: int = 16
    """Elements of a group."""
    signs: int = RHT_SIGNS
    """σ as a mask of 16 bits: element k is negated if bit k mod 16 is set."""

    def __post_init__(self) -> None:
        if self.group not in RHT_GROUPS:
            raise ValueError(f"a Hadamard group has {', '.join(map(str, RHT_GROUPS))} elements, not {self.group}")
        if not 0 <= self.signs < 1 << 16:
            raise ValueError(f"signs of a Hadamard transform are a mask of 16 bits, not {self.signs:#x}")


@dataclass(frozen=True)
class Delayed:
    """Computation of a scale from a history of amaxes: `update_scale`."""

    algorithm: Literal["max", "most-recent"] = "max"
    """Amax for the scale: the largest or the first amax of the history."""
    margin: int = 0
    """Powers of two between the amax and the largest number of the format."""
    update: Literal["single", "bulk"] = "single"
    """Transformer Engine's kernel. For a history with a first amax of 0, the kernel for a single tensor rolls the
    history; the kernel for many tensors (bulk) leaves history and scale unchanged."""


@dataclass(frozen=True)
class Recipe:
    """A complete quantization rule. Equal recipes give equal bytes.

    Symbols in expressions:
    - of a tensor scale: `amax` of the tensor; max = 2688, or the largest element without E4M3 scales;
    - of a block scale: `amax` of the block; max is the largest element, with the exponent emax;
    - enc = 2688/amax and dec = amax/2688: the tensor scale, in the form of `tensor_scale`;
    - s: the stored block scale; d: the constant 36·448·448 of the NVFP4 GEMM; r(a): 1/a, and 0 for a = 0.
    Every operation rounds to float32; R(…) rounds further to the dtype of x. The choices of each library:
    docs/dialects.md#nvfp4.
    """

    name: str
    dialect: str
    element: Format
    block: tuple[int, int]
    """Rows and columns that share a scale; (WHOLE, WHOLE) for a single scale per tensor, (1, WHOLE) for a scale per
    row. A block of several rows stores its scale once per row, except for float32 scales: see `stored_rows`."""
    scale: Format
    """Format of the stored block scales, which are decode scales."""

    scale_max: float = 448.0
    """Block scale of the block with the tensor amax: 448, or 256, which leaves room for a scale 1.5 times larger."""
    statistics: Statistics = "float32"
    """Dtype of results of amaxes alone: the tensor scale, its reciprocal, amax/6 of a block. `input`: they round to the
    dtype of x; `input-blocks`: only the results of block amaxes do."""
    granularity: Granularity = "tensor"
    """Scope of an amax and its encode factor: the tensor, or a row."""
    transform: Hadamard | None = None
    """Rotation before all other steps, for bfloat16 only; in `quantize_both` of the columnwise operand only."""
    tensor_scale: TensorScale = "max/amax"
    """Form of the tensor scale: an encode factor enc, which a caller may pass to `quantize`, a decode factor dec, or
    none (a single level of scales)."""
    tensor_limit: TensorLimit = "finite"
    """Tensor scale of special amaxes. `finite`: at most FLT_MAX, and 1 for amax 0 or infinity; `1-for-nan`: the same,
    and 1 for amax NaN; `0-for-0`: 0 for amax 0; `1`: 1 for an infinite or NaN scale; `2^-23`: 2^-23 for a scale of 0;
    `amax>=1e-12`: amax is at least 1e-12; `refuse`: ValueError for a scale that is 0, infinite or NaN; `none`: the
    unchanged result."""
    block_scale: BlockScale = "amax*(enc*(1/6))"
    """Order of operations of the block scale before its saturating rounding to `scale`. 1/(max/amax): the encode scale
    max/amax, limited by `largest_scale`, is rounded and then inverted. 1/enc and given: the inverse of the encode
    scale of the tensor, and the decode scale that the caller gives."""
    smallest_amax: float = 0.0
    """Lower clamp of amaxes: Transformer Engine's epsilon."""
    largest_scale: LargestScale = "float32"
    """Dtype whose largest number replaces an infinite encode scale max/amax: float32, or the dtype of x; the scale is
    then 1 for amax 0, infinity or NaN. `none`: the quotient is not replaced."""
    zero_block: ZeroBlock = "keep"
    """Replacement of a block scale of 0 before rounding: 1; 1 below the square root of the smallest normal number of
    the dtype of x; the scale for amax/6 = 2^-23; or, after rounding, 2^-3. Scales of E8M0: 1. Float32 scales: eps, the
    distance from 1 to the next number of the dtype of x."""
    smallest_scale: SmallestScale = "0"
    """Lower clamp of the block scale before rounding, after `zero_block`."""
    scale_rounding: ScaleRounding = "nearest-even"
    """Rounding of the block scale to `scale`. To a power of two: `up`, `down` (for 1/(max/amax) of max/amax),
    `as-element` (down, after rounding to the mantissa of the element, ties away), `up-from-1.75` (up from mantissa 1.75
    on, else down), `nearest-log2` (up above √2), `up-log2` and `down-log2` (⌈l⌉ and ⌊l⌋ of the logarithm l rounded to
    float32, which is a whole number just above or below a power of two); the result saturates, and only NaN gives NaN.
    Float32 scales amax/max: `up` gives a power of two from 2^-126 to 2^127, 2^127 for NaN. `none`: the scale stays a
    float32 number."""
    candidates: Candidates = "6"
    """Whether the amax of a block always maps to 6, or to 4 if 4 gives a smaller sum of absolute or squared errors."""
    zero_scale: ZeroScale = "saturate"
    """Elements of a block with a scale that rounds to 0. `saturate`: the largest code for every nonzero element (it
    decodes to 0); `infinity`: the result of 1/0, NaN for an element 0; `zeros`: codes 0; a number: the divisor for a
    scale not above 0. Scales of E8M0 are never 0."""
    element_scale: Element = "x*min(1/(s*(1/enc)),FLT_MAX)"
    """Form of the multiplication or division before an element is rounded."""
    approximate: bool = False
    """Whether reciprocals may be off by 1 ulp, as rcp.approx.ftz.f32 of PTX: those of a factor x*(1/s), x*(max/amax),
    x*r(s*r(enc)) or x*(r(s)*enc), and 1/6 of a scale of E4M3. Contracts accept each of these factors and scales.
    `quantize` has the rounded reciprocals."""
    rounding: Rounding = "nearest-even"
    """Rounding of the elements. Stochastic rounding takes random bits. `nearest-toward-zero` and `nearest-away` round
    ties to the number nearer to zero and farther from zero. `nearest-even-within-1e-6`: distances to the
    grid are float32 numbers, and smaller by 1e-6 for even codes. `nearest-even-wrapping`: codes do not saturate but are
    cut to 4 bits: magnitudes from 7 on become −0, for either sign, from 11 on −0.5 and so on. All further roundings
    saturate."""
    negative_zero: NegativeZero = "keep"
    """Code 8 (−0) is given to −0.0 and to negative numbers that round to 0; `rounded`: only to the latter; `never`."""
    nan_code: NanCode = 7
    """Code of an element that is NaN before rounding, such as 0·∞; with wrapping rounding also of infinity. 127 is the
    NaN of E4M3 and E5M2, 128 of E4M3FNUZ and E5M2FNUZ."""
    packing: Packing = "low-first"
    """Nibble of the first of two elements."""
    nan: NanPolicy = "ignore"
    """`ignore`: amaxes ignore NaN elements. `propagate`: a NaN makes every scale of the tensor NaN; with a single level
    of scales, only the scale of its block."""
    decode: Decode = "(s*amax)*(1/max)"
    """Order of operations of the factor of a code in `dequantize`. s/enc is 0 for enc = 0."""
    alpha: Alpha = "(a*b)/d"
    """Order of operations of α in a GEMM, from the tensor amaxes or scales a and b of both operands."""
    columnwise: Columnwise = "transposed"
    """Storage of the columnwise half of `quantize_both`: `transposed`, or `in-place` in the layout of x, with codes
    (M, K) and scales (⌈M/32⌉, K)."""
    delayed: Delayed | None = None
    """Computation of the scale argument of `quantize` by `update_scale`."""

    def __post_init__(self) -> None:
        for name, choices in field_choices().items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"recipe {self.name}: {name} is {value!r}; it can be {', '.join(map(str, choices))}")
        for feature, excluded, reason in _EXCLUDED:
            if _FEATURES[feature](self) and _FEATURES[excluded](self):
                raise ValueError(f"recipe {self.name}: {feature} and {excluded} do not go together: {reason}")
        self._check_expressions()

    def _check_expressions(self) -> None:
        """Raises ValueError if an expression uses a factor that the recipe does not define, or omits a defined factor.

        The factor is enc or dec, as defined by `tensor_scale`.
        """
        defined = "" if self.block_scale == "given" else _TENSOR_FACTOR[self.tensor_scale]
        for name in ("block_scale", "element_scale", "decode", "alpha"):
            expression = getattr(self, name)
            used = next((factor for factor in ("enc", "dec") if factor in expression), "")
            if name in ("decode", "alpha"):
                without_factor = defined == "" or self.block_scale == "1/enc"
                fits = used in ("", defined) and (expression in ("s", "1", "s_a*s_b")) == without_factor
            else:
                fits = used == defined
            if not fits:
                raise ValueError(
                    f"recipe {self.name}: {name} {expression} does not fit tensor_scale {self.tensor_scale}, "
                    f"which gives {defined or 'no factor'}"
                )
        for name, forms in _OF_SCALES[self.scale.name].items():
            if getattr(self, name) not in forms:
                raise ValueError(
                    f"recipe {self.name}: {name} {getattr(self, name)} does not go with scales of {self.scale.name}; "
                    f"they go with {', '.join(forms)}"
                )
        if self.spans_k != (self.alpha == "s_a*s_b"):
            raise ValueError(
                f"recipe {self.name}: a scale that spans K and alpha s_a*s_b go together; give both or none"
            )
        of_tensor = self.whole and self.tensor_scale != "none"
        if of_tensor != (self.block_scale in ("1/enc", "given")):
            raise ValueError(
                f"recipe {self.name}: a scale of the tensor and block_scale 1/enc or given go together; block is "
                f"{_block(self)}, tensor_scale {self.tensor_scale} and block_scale {self.block_scale}"
            )
        if self.nan_code >= self.element.codes:
            raise ValueError(f"recipe {self.name}: nan_code {self.nan_code} is no code of {self.element.name}")
        if self.tensor_scale != "given" and (self.delayed is not None or self.block_scale == "given"):
            raise ValueError(
                f"recipe {self.name}: the field delayed and block_scale 'given' need tensor_scale 'given', not "
                f"{self.tensor_scale}"
            )
        allowed = _zero_scales(self.element_scale, self.scale)
        if self.zero_scale not in allowed:
            raise ValueError(
                f"recipe {self.name}: element_scale {self.element_scale} does not go with zero_scale "
                f"{self.zero_scale}; it goes with {', '.join(allowed)}"
            )

    @property
    def divides(self) -> bool:
        """Whether elements are divided by a factor of their block rather than multiplied."""
        return self.element_scale in _DIVIDING

    @property
    def max_product(self) -> float:
        """Image of the tensor amax: for NVFP4 the largest element times the largest scale, 2688; for a scale that spans
        K the largest element."""
        return self.element.max * (1.0 if self.spans_k else self.scale_max)

    @property
    def whole(self) -> bool:
        """Whether the tensor has a single scale."""
        return self.block[0] == WHOLE

    @property
    def spans_k(self) -> bool:
        """Whether a scale spans all of K: the tensor or a row has a single scale. A GEMM applies it after its sum."""
        return self.block[1] == WHOLE

    @property
    def integer(self) -> bool:
        """Whether the elements are whole numbers, whose products tensor cores add as int32."""
        return self.scale is FP32 and not self.element.exponent_bits

    @property
    def zero_points(self) -> bool:
        """Whether each scale has a zero point: an element is (c − z)·s, of codes c and z without a sign."""
        return not self.element.signed

    @property
    def stored_rows(self) -> int:
        """Rows that share a stored scale: the rows of a block for float32 scales; else 1, with repeated scales."""
        return self.block[0] if self.scale is FP32 else 1

    @property
    def row_alignment(self) -> int:
        """Alignment of the rows of a section in a grouped GEMM: docs/numerics.md#sections."""
        return 16 if self.scale is FP32 else 32 if self.scale is E8M0 else 128

    @property
    def rowwise(self) -> Recipe:
        """The recipe of the rowwise half of `quantize_both`: this recipe without its rotation."""
        if self.transform is None:
            return self
        return replace(self, name=re.sub(r"-rht\d*(-nosign)?", "", self.name), transform=None)

    def __str__(self) -> str:
        return self.name if self.dialect == DEFAULT_DIALECT else f"{self.name}@{self.dialect}"


@cache
def field_choices() -> dict[str, tuple[Any, ...]]:
    """Allowed values of the fields with a choice. Cached, because every operation makes a recipe."""
    hints = get_type_hints(Recipe)
    return {field.name: get_args(hint) for field in fields(Recipe) if get_origin(hint := hints[field.name]) is Literal}


DEFAULT_DIALECT = "te"
_EXPONENT_SCALES: tuple[str, ...] = ("amax*(1/max)", "amax/max", "amax*2^-emax")
_FLOAT_SCALES: tuple[str, ...] = ("1/(max/amax)", "amax/max", "amax*(1/max)", "1/enc", "given")
_FLOAT_ELEMENTS: tuple[str, ...] = ("x*(max/amax)", "x*(1/s)", "x/s", "R(x/s)", "x*enc")
# Choices for each format of the scales.
_OF_SCALES: dict[str, dict[str, tuple[str, ...]]] = {
    "E4M3": {
        "block_scale": tuple(e for e in get_args(BlockScale) if e not in (*_EXPONENT_SCALES, *_FLOAT_SCALES)),
        "scale_rounding": ("nearest-even", "nearest-toward-zero"),
        "element_scale": tuple(e for e in get_args(Element) if e not in ("x*(max/amax)", "R(x/s)", "x*enc")),
        "zero_block": tuple(e for e in get_args(ZeroBlock) if e != "eps"),
    },
    "E8M0": {
        "block_scale": _EXPONENT_SCALES,
        "scale_rounding": ("up", "down", "as-element", "up-from-1.75", "nearest-log2", "up-log2", "down-log2"),
        "element_scale": ("x*(1/s)", "x/s"),
        "zero_block": ("keep", "1"),
    },
    "FP32": {
        "block_scale": _FLOAT_SCALES,
        "scale_rounding": ("none", "down", "up"),
        "element_scale": _FLOAT_ELEMENTS,
        "zero_block": ("keep", "eps"),
    },
}


# Block scales with amax/6 as a rounded intermediate result.
_FORMS_SIXTH: tuple[str, ...] = (
    "(amax/6)*enc",
    "(amax*(1/6))*enc",
    "(2*amax/12)*enc",
    "(amax/6)/dec",
    "(amax*(1/6))/dec",
    "amax/6",
    "amax*(1/6)",
)
_DIVIDING: tuple[str, ...] = ("x/(s*dec)", "x/(s/enc)", "(x*enc)/s", "x/s", "R(x/s)", "R(x/s)*enc", "R(x/R(s*(1/enc)))")
# Choices that 4over6 assumes when it computes the errors of a candidate.
_TE_ELEMENT: dict[str, Any] = {
    "statistics": "float32", "tensor_scale": "max/amax", "zero_block": "keep", "smallest_scale": "0",
    "scale_rounding": "nearest-even", "zero_scale": "saturate", "rounding": "nearest-even",
    "element_scale": "x*min(1/(s*(1/enc)),FLT_MAX)", "negative_zero": "keep", "nan_code": 7, "packing": "low-first",
}  # fmt: skip
_FEATURES: dict[str, Any] = {
    "2-D blocks": lambda recipe: recipe.block[0] > 1,
    "a rotation": lambda recipe: recipe.transform is not None,
    "stochastic rounding": lambda recipe: recipe.rounding == "stochastic",
    "row scaling": lambda recipe: recipe.granularity == "row",
    "float32 scales": lambda recipe: recipe.scale is FP32,
    "another element than E2M1": lambda recipe: recipe.element is not E2M1,
    "E2M1": lambda recipe: recipe.element is E2M1,
    "scales of bytes": lambda recipe: recipe.scale is not FP32,
    "scales of another format than E4M3": lambda recipe: recipe.scale is not E4M3,
    "a smallest scale": lambda recipe: recipe.smallest_scale != "0",
    "a quotient amax/max in the dtype of x": lambda recipe: recipe.statistics != "float32" and recipe.scale is not E4M3,
    "scales of E4M3": lambda recipe: recipe.scale is E4M3,
    "a block scale other than amax/max": lambda recipe: recipe.block_scale != "amax/max",
    "a smallest amax": lambda recipe: recipe.smallest_amax > 0,
    "a given scale": lambda recipe: recipe.tensor_scale == "given",
    "a largest scale other than float32": lambda recipe: recipe.largest_scale != "float32",
    "a block scale other than 1/(max/amax)": lambda recipe: recipe.block_scale != "1/(max/amax)",
    "the first element high": lambda recipe: recipe.packing == "high-first",
    "a columnwise half in place": lambda recipe: recipe.columnwise == "in-place",
    "a rounding of E2M1": lambda recipe: recipe.rounding in ("nearest-even-within-1e-6", "nearest-even-wrapping"),
    "a scale that spans K": lambda recipe: recipe.spans_k,
    "float32 scales rounded up": lambda recipe: recipe.scale is FP32 and recipe.scale_rounding == "up",
    "float32 scales rounded down": lambda recipe: recipe.scale is FP32 and recipe.scale_rounding == "down",
    "an encode scale or a given scale": lambda recipe: recipe.block_scale in ("1/(max/amax)", "1/enc", "given"),
    "a decode scale": lambda recipe: recipe.block_scale in ("amax/max", "amax*(1/max)", "given"),
    "4over6": lambda recipe: recipe.candidates != "6",
    "one level of scales": lambda recipe: recipe.tensor_scale == "none",
    "statistics of blocks in the dtype of x": lambda recipe: recipe.statistics == "input-blocks",
    "a decode scale that is not 0": lambda recipe: recipe.zero_block == "eps",
    "the smallest amax/6": lambda recipe: recipe.zero_block == "amax/6=2^-23",
    "a block scale that never forms amax/6": lambda recipe: recipe.block_scale not in _FORMS_SIXTH,
    "choices of another library": lambda recipe: any(
        getattr(recipe, name) != value for name, value in _TE_ELEMENT.items()
    ),
}
# Factor of each form of the tensor scale.
_TENSOR_FACTOR = {"max/amax": "enc", "(1/amax)*max": "enc", "amax/max": "dec", "given": "enc", "none": ""}


def _zero_scales(element_scale: Element, scale: Format) -> tuple[ZeroScale, ...]:
    """Allowed values of `zero_scale` for a form of the element scaling."""
    if element_scale in ("x*min(1/(s*(1/enc)),FLT_MAX)", "x*(max/amax)", "x*enc"):
        return ("saturate",)
    if element_scale == "x*(1/s)":
        return ("saturate",) if scale is E8M0 else ("infinity",)
    if element_scale == "x*r(s*r(enc))":
        return ("zeros",)
    if element_scale in _DIVIDING:
        return ("saturate", "infinity", "zeros", "1", "2^-9", "2^-23")
    return ("infinity", "zeros")


_OF_SCALES["UE5M3"] = _OF_SCALES["E4M3"]

# Features that exclude each other, and the reason. Transformer Engine rejects the first five pairs.
_EXCLUDED = (
    ("row scaling", "2-D blocks", "a tile of 16 rows has a single scale, but every row has its own amax"),
    ("row scaling", "a rotation", "row scaling is for forward activations, which are not rotated"),
    ("row scaling", "stochastic rounding", "row scaling is for forward activations, which round to nearest"),
    ("4over6", "a rotation", "the choice between 4 and 6 is by the error of unrotated elements"),
    ("4over6", "stochastic rounding", "the choice between 4 and 6 is by the error of rounding to nearest"),
    ("one level of scales", "row scaling", "only block amaxes are used, no amax of a row"),
    ("4over6", "choices of another library", "the compared errors are those of Transformer Engine's candidates"),
    ("statistics of blocks in the dtype of x", "a block scale that never forms amax/6", "no result would be rounded"),
    ("the smallest amax/6", "a block scale that never forms amax/6", "no result would be replaced"),
    ("float32 scales", "stochastic rounding", "Transformer Engine rounds FP8 to nearest"),
    ("float32 scales", "a rotation", "Transformer Engine rotates no FP8"),
    ("a rounding of E2M1", "another element than E2M1", "the rounding is defined on the grid of E2M1"),
    ("the first element high", "another element than E2M1", "no two elements share a byte"),
    ("a columnwise half in place", "E2M1", "two columns would share a byte"),
    ("a columnwise half in place", "float32 scales", "Transformer Engine transposes FP8"),
    ("a smallest scale", "scales of another format than E4M3", "the choice would have no effect"),
    (
        "a quotient amax/max in the dtype of x",
        "a block scale other than amax/max",
        "only the quotient amax/max is rounded",
    ),
    ("a decode scale that is not 0", "an encode scale or a given scale", "the choice would have no effect"),
    ("float32 scales rounded up", "an encode scale or a given scale", "an encode scale rounds down"),
    ("float32 scales rounded down", "a decode scale", "a decode scale rounds up"),
    ("a smallest amax", "scales of E4M3", "no library has it; smallest_scale limits the scales"),
    ("a scale that spans K", "scales of bytes", "scales of bytes belong to blocks of 16 or 32"),
    ("a smallest amax", "a given scale", "no amax is used"),
    ("a largest scale other than float32", "a block scale other than 1/(max/amax)", "the choice would have no effect"),
)


def mismatch(a: Recipe, b: Recipe) -> str:
    """The reason why operands of two recipes cannot be multiplied; empty if they can.

    Both recipes need the same scale format, the same number of elements of K per scale, the same rotation and the same
    α. NVFP4 has a single element format; MX elements mix (PTX: kind::mxf8f6f4). FP8 with float32 scales has no GEMM of
    E5M2 by E5M2 (Transformer Engine, cuBLAS).
    """
    if a.scale != b.scale:
        return f"scale is {_named(a.scale)} and {_named(b.scale)}"
    if a.transform != b.transform:
        reason = "rotations cancel only if both operands have the same rotation"
        return f"transform is {_named(a.transform)} and {_named(b.transform)}; {reason}"
    if a.alpha != b.alpha:
        return f"alpha is {_named(a.alpha)} and {_named(b.alpha)}"
    if a.scale is E4M3 and a.element != b.element:
        return f"element is {a.element.name} and {b.element.name}"
    if a.block[1] != b.block[1]:
        return f"block is {_block(a)} and {_block(b)}"
    if a.integer or b.integer:
        return f"element is {a.element.name} and {b.element.name}; whole numbers have a contract, scaled-gemm, alone"
    if a.scale is FP32 and a.element.negative_zero != b.element.negative_zero:
        return f"element is {a.element.name} and {b.element.name}; both or none of them has to be fnuz"
    if a.scale is FP32 and a.element.exponent_bits == b.element.exponent_bits == 5:
        return f"element is {a.element.name} of both; one of the two has to be E4M3"
    return ""


def _named(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice)


def _block(recipe: Recipe) -> str:
    return "x".join("all" if extent == WHOLE else str(extent) for extent in recipe.block)
