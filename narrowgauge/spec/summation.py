"""Declarations of a kernel about its sums: operands, order and rounding of additions, flushing of subnormal numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

UNIT = 2.0**-24
"""Unit roundoff of float32, rounding to nearest."""
ACCUMULATOR_BITS = 24
"""Bits of the significand of a float32 accumulator."""
FLT_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Largest float32 number."""
SMALLEST_SUBNORMAL = 2.0**-149
"""Smallest positive float32 number."""
SMALLEST_NORMAL = 2.0**-126
"""Smallest normal float32 number."""
LAST_BITS = (1 << 29) - 1
"""Mask of the last bits of a float64 number, which a float32 number lacks."""

ORDERS = (
    "sequential", "blocks", "tree", "split-<n>[-tree]", "aligned-<F>-<W>", "aligned-<F>-<W>-<P>",
    "decoded-aligned-<F>-<W>", "split-<n>-[decoded-]aligned-<F>-<W>[-<P>][-tree][-out]", "fraction-<F>-<L>",
    "split-at-<k>[-<k>…]…",
)  # fmt: skip
"""Names of the orders of summation, with a number for each <letter>; defined in `Summation.order`."""
OPERANDS = ("decoded-float32", "decoded-bfloat16")
"""Declarations of operands that are not multiplied as codes and scales; defined in `Summation.operands`."""
_SLICES = r"split-(?:(?P<count>[1-9]\d{0,3})|at(?P<cuts>(?:-[1-9]\d{0,6})+))"
_SPLIT = re.compile(rf"{_SLICES}(?P<tree>-tree)?")
_ALIGNED = re.compile(
    rf"(?P<split>{_SLICES}-)?(?P<decoded>decoded-)?aligned-(?P<fraction>[1-9]\d?)-(?P<width>[1-9]\d{{0,3}})"
    r"(?(decoded)|(?:-(?P<promoted>[1-9]\d{0,5}))?)(?(split)(?P<tree>-tree)?(?P<out>-out)?)"
)
_FRACTION = re.compile(r"fraction-(?P<fraction>[1-9]\d?)-(?P<width>[1-9]\d{0,3})")
# A sum of W products and an accumulator, in units of the last bit kept, fits float64: each term is below 2^(F + 2).
_FLOAT64_BITS = 53


@dataclass(frozen=True)
class Alignment:
    """Parameters of the sum of a tensor core, simulated by `reference.gemm.tensor_core`."""

    fraction: int
    """F: fraction bits of a term, behind the leading bit of the largest term."""
    width: int
    """W: products added at a time."""
    promoted: int | None
    """P: columns after which the accumulator is added to a float32 sum and restarts at 0; None: never."""
    decoded: bool = False
    """Whether operands are elements times block scales, decoded to a floating-point format before the product."""


@dataclass(frozen=True)
class Summation:
    """How a kernel adds the products of a GEMM. Raises ValueError for an unknown order.

    Source: docs/tolerance.md#declared-order.
    """

    order: str | None = None
    """None: any order, any tree. Float32 numbers are added to an accumulator that starts at 0.

    "sequential": the products of operands, element times block scale, in order of K.
    "blocks": the products of elements in a block are added in order of K from 0. The block sum times its two block
    scales is added to the accumulator, in order of K.
    "tree": the products of operands, padded with zeros to a power of two. Neighbours are added, 0 to 1 and 2 to 3, then
    the sums of neighbours, until a single sum is left.
    "split-<n>": n slices of ⌈blocks/n⌉ blocks, or columns if a single scale spans all of K; the last slices may be
    shorter or empty. Every slice is summed as "blocks", and the slice sums are added in order.
    "aligned-<F>-<W>", "aligned-<F>-<W>-<P>": a tensor core, simulated by `reference.gemm.tensor_core`.
    "decoded-aligned-<F>-<W>": the same with operands decoded to bfloat16, which are normalised.
    "split-<n>-" and an aligned order: n slices of ⌈steps/n⌉ steps of W columns, or of P columns; the last slices may be
    shorter or empty. A tensor core sums each slice from 0, and the float32 sums of the slices are added in order.
    "split-at-<k>[-<k>…]": in place of "split-<n>", slices that start at 0 and at the given ascending columns, each
    moved up to the next whole block or step; slices behind K are empty.
    "fraction-<F>-<L>": steps of a tensor core in any order: L products and the accumulator, truncated behind F fraction
    bits of the largest one. No sum is simulated.
    "-tree" at the end: neighbouring slice sums are added, then the sums of neighbours; a last one without a neighbour
    waits for the next round.
    "-out" at the end: the sums of the slices, and each of their additions, are rounded to the dtype of the output. A
    single nonempty slice is not rounded.

    FP8 with block scales promotes the block sums P by y = fma(fl(P·s_a), s_b, y) in order of K. An order names the
    summation of P, and "split-<n>" cuts the chain of y into slices whose results are added in order.
    """
    truncates: bool = False
    """Additions of products may return either neighbouring float32 number, as in a truncating accumulator. α, c, bias
    and promotion still round to nearest."""
    flushes: bool = False
    """Float32 numbers below 2^-126 may become 0: terms with their scales, partial sums, α and its factors, float32
    scales, α times a sum, c, bias and the output. Float16 outputs keep subnormals, which are normal float32 numbers."""

    operands: str | None = None
    """None: codes are multiplied, and scales and α are applied to products or to sums.

    "decoded-float32", "decoded-bfloat16": both operands are first decoded: element times block scale times tensor
    scale, in float32, and rounded to bfloat16. Float32 products of decoded numbers are summed in any order, without α.
    Source: docs/tolerance.md#decoded-operands.
    """

    def __post_init__(self) -> None:
        order = self.order
        if self.operands is not None:
            if self.operands not in OPERANDS:
                names = ", ".join(map(repr, OPERANDS))
                raise ValueError(f"operands are {names}, or None for codes; not {self.operands!r}")
            if order is not None:
                raise ValueError(
                    f"operands {self.operands!r} are summed in any order; declare the operands or the order {order!r}, "
                    "not both"
                )
        if order is not None and not is_order(order):
            names = ", ".join(map(repr, ORDERS))
            raise ValueError(f"the order of a sum is {names}, or None for any order; not {order!r}")
        if isinstance(cuts := self.slices, tuple) and list(cuts) != sorted(set(cuts)):
            raise ValueError(f"{order!r} starts slices at columns {', '.join(map(str, cuts))}, which do not ascend")
        if (model := self.aligned) is not None:
            bits = model.fraction + 2 + math.ceil(math.log2(model.width + 1))
            if bits > _FLOAT64_BITS:
                raise ValueError(f"{order!r} is simulated in float64: F + 2 + log2(W + 1) is {bits}, above 53")
            if model.promoted is not None and model.promoted % model.width:
                raise ValueError(f"{order!r} promotes sums of {model.promoted} columns, no multiple of {model.width}")
        if self.truncates and (self.aligned is not None or self.fraction is not None):
            raise ValueError(
                f"{order!r} defines the truncation of the accumulator; declare the order or truncation, not both"
            )

    @property
    def fraction(self) -> tuple[int, int] | None:
        """F and L of "fraction-<F>-<L>"."""
        match = _FRACTION.fullmatch(self.order or "")
        return (int(match["fraction"]), int(match["width"])) if match else None

    @property
    def accepts_reference(self) -> bool:
        """Whether the output of the reference is an output of this summation, for all operands."""
        return self.aligned is None and self.operands is None

    @property
    def roundoff(self) -> float:
        """The largest relative error of an addition."""
        return 2 * UNIT if self.truncates else UNIT

    @property
    def underflow_error(self) -> float:
        """Largest error of a term that is no multiple of 2^-149 as a float32 number: 2^-150, or 2^-149 by truncation.

        With flushing another 2^-126 per term. It also covers the sums of the term: a sum can be flushed only if one of
        its terms was not flushed.
        """
        rounding = SMALLEST_SUBNORMAL if self.truncates else SMALLEST_SUBNORMAL / 2
        return SMALLEST_NORMAL + rounding if self.flushes else rounding

    @property
    def smallest_term(self) -> float:
        """Multiples of this number are added without underflow."""
        return SMALLEST_NORMAL if self.flushes else SMALLEST_SUBNORMAL

    @property
    def slices(self) -> int | tuple[int, ...]:
        """Number of slices of K, or the columns at which slices behind the first one start; 1 without slices."""
        if self._splits is None or not (self._splits["count"] or self._splits["cuts"]):
            return 1
        if self._splits["count"]:
            return int(self._splits["count"])
        return tuple(map(int, self._splits["cuts"].split("-")[1:]))

    @property
    def joined_as_tree(self) -> bool:
        """Whether neighbouring sums of slices are added first; else they are added in order."""
        return self._splits is not None and self._splits["tree"] is not None

    @property
    def joined_in_output(self) -> bool:
        """Whether the sums of slices are rounded to the dtype of the output; else they are float32."""
        return self._splits is not None and "out" in self._splits.re.groupindex and self._splits["out"] is not None

    @property
    def _splits(self) -> re.Match[str] | None:
        return _SPLIT.fullmatch(self.order or "") or _ALIGNED.fullmatch(self.order or "")

    @property
    def aligned(self) -> Alignment | None:
        """The simulated tensor core of an "aligned" order, split or not, else None."""
        match = _ALIGNED.fullmatch(self.order or "")
        if not match:
            return None
        promoted = int(match["promoted"]) if match["promoted"] else None
        return Alignment(int(match["fraction"]), int(match["width"]), promoted, match["decoded"] is not None)


def is_order(name: object) -> bool:
    """Whether a name has the form of an order of summation; `Summation` may still reject the numbers in the name."""
    patterns = (_SPLIT, _ALIGNED, _FRACTION)
    return isinstance(name, str) and (name in ORDERS[:3] or any(pattern.fullmatch(name) for pattern in patterns))


def summation(order: Summation | str | None) -> Summation:
    """`order` as a Summation; a name means this order, rounding to nearest. Raises ValueError for an unknown name."""
    return order if isinstance(order, Summation) else Summation(order)
