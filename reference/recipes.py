"""Recipes as data: one complete quantization rule each, and the dialects that libraries speak.

A recipe names every choice in which libraries differ, so that the reference can speak any of them and a report can say
where a kernel leaves one. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints

from reference.formats import E2M1, E4M3, Format

Statistics = Literal["float32"]
TensorScale = Literal["max/amax"]
BlockScale = Literal["amax*(enc*(1/6))", "(amax/6)*enc"]
ZeroScale = Literal["saturate"]
Element = Literal["x*min(1/(s*(1/enc)),FLT_MAX)"]
Rounding = Literal["nearest-even"]
NanPolicy = Literal["ignore", "propagate"]
Alpha = Literal["(a*b)/d", "(b*a)*(1/d)"]


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
    """Rows and columns that share a scale."""
    scale: Format

    statistics: Statistics = "float32"
    """Dtype in which the amax is taken and used."""
    tensor_scale: TensorScale = "max/amax"
    """Form of the tensor's encode factor, limited to FLT_MAX; 1 where amax is 0 or infinite."""
    block_scale: BlockScale = "amax*(enc*(1/6))"
    """Order of operations of the block scale before it is rounded to `scale`, limited to FLT_MAX."""
    zero_scale: ZeroScale = "saturate"
    """What a block whose scale rounds to 0 gets: `saturate`, codes of the largest magnitude (they decode to 0)."""
    element_scale: Element = "x*min(1/(s*(1/enc)),FLT_MAX)"
    """Form of the multiply before an element is rounded."""
    rounding: Rounding = "nearest-even"
    """Rounding of the elements."""
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

    @property
    def max_product(self) -> float:
        """Largest element times largest scale: 2688 for NVFP4, the number that the tensor amax is mapped to."""
        return self.element.max * self.scale.max

    def __str__(self) -> str:
        return self.name if self.dialect == DEFAULT_DIALECT else f"{self.name}@{self.dialect}"


DEFAULT_DIALECT = "te"

_NVFP4 = Recipe("nvfp4", DEFAULT_DIALECT, element=E2M1, block=(1, 16), scale=E4M3)

# Transformer Engine >= 2.14; 2.8 to 2.13; and 2.14's native GEMM path, whose α multiplies by a reciprocal.
_DIALECTS = {
    "nvfp4": {
        "te": {},
        "te-2.8": {"block_scale": "(amax/6)*enc"},
        "te-native": {"alpha": "(b*a)*(1/d)"},
    }
}
_BASES = {"nvfp4": _NVFP4}


def recipe_names() -> list[str]:
    """Every name that `recipe` accepts, the default dialect's without its suffix."""
    return [str(recipe(f"{base}@{dialect}")) for base in _BASES for dialect in _DIALECTS[base]]


def recipe(name: str | Recipe) -> Recipe:
    """The recipe called `name`, or `name@dialect`; a Recipe is returned as it is.

    Raises ValueError with the nearest names where there is none.
    """
    if isinstance(name, Recipe):
        return name
    base, _, dialect = name.partition("@")
    dialect = dialect or DEFAULT_DIALECT
    if base not in _BASES:
        raise ValueError(f"no recipe is called {name!r}{_nearest(base, _BASES)}; there are {', '.join(recipe_names())}")
    if dialect not in _DIALECTS[base]:
        known = _DIALECTS[base]
        raise ValueError(
            f"recipe {base} has no dialect {dialect!r}{_nearest(dialect, known)}; it has {', '.join(known)}"
        )
    return replace(_BASES[base], dialect=dialect, **_DIALECTS[base][dialect])  # type: ignore[arg-type]


def _nearest(word: str, known: object) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)  # type: ignore[call-overload]
    return f" (did you mean {close[0]!r}?)" if close else ""
