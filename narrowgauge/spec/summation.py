"""What a kernel declares of its sums: their order, how additions round, whether subnormal numbers become zero."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

UNIT = 2.0**-24
"""The unit roundoff of a float32 that rounds to nearest."""
ACCUMULATOR_BITS = 24
FLT_MAX = (2.0 - 2.0**-23) * 2.0**127
SMALLEST = 2.0**-149
TINY = 2.0**-126
"""The smallest float32 that is normal."""
LAST_BITS = (1 << 29) - 1
"""Those of a float64 number that float32 has not."""

ORDERS = (
    "sequential", "blocks", "tree", "split-<n>", "aligned-<F>-<W>", "aligned-<F>-<W>-<P>", "decoded-aligned-<F>-<W>",
)  # fmt: skip
"""Orders of summation by name, a number in place of each <letter>: `Summation.order` says what they mean."""
_SPLIT = re.compile(r"split-([1-9]\d{0,3})")
_ALIGNED = re.compile(r"(?:(decoded)-)?aligned-([1-9]\d?)-([1-9]\d{0,3})(?(1)|(?:-([1-9]\d{0,5}))?)")
# A sum of W products and an accumulator, in units of the last bit kept, is a float64 number: each is below 2^(F + 2).
_FLOAT64_BITS = 53


@dataclass(frozen=True)
class Alignment:
    """A tensor core's sum, as `reference.gemm.aligned` simulates it."""

    fraction: int
    """Bits behind the point that a term keeps, the point behind the first bit of the largest."""
    width: int
    """Products that are added at a time."""
    promoted: int | None
    """Columns whose sum is moved to a float32 accumulator of its own; None where none is."""
    decoded: bool = False
    """Whether factors are decoded, with the scales of their blocks, to floating-point numbers before."""


@dataclass(frozen=True)
class Summation:
    """How the products of a GEMM are added. Raises ValueError for an order that there is not."""

    order: str | None = None
    """None: any, any tree. Additions are of float32 numbers, to an accumulator that begins with 0.

    "sequential": each product of codes and scales, in order of K. "blocks": products of codes of a block of scales in
    order of K from 0, then that times its scales, in order of K. "tree": products of codes and scales, padded with
    zeros to a power of two; neighbours are added, 0 to 1, 2 to 3, then their sums, until one is left. "split-<n>": the
    blocks are cut into n slices of ⌈blocks/n⌉, columns where one scale holds for all of K, the last ones shorter or
    empty; each is summed as "blocks", and their sums are added in order. "aligned-<F>-<W>" and "aligned-<F>-<W>-<P>":
    a tensor core, simulated bit for bit: `reference.gemm.aligned`. "decoded-aligned-<F>-<W>": its operands are elements
    times the scales of their blocks as bfloat16 numbers, which are normalised.

    FP8 with scales of blocks has its sums of blocks P promoted by y = fma(fl(P·s_a), s_b, y), in order of K, in each of
    these orders: they say how P is summed, and "split-<n>" cuts the chain of y, whose parts are added in order.
    """
    truncates: bool = False
    """Additions of products may round to either neighbour, as those that truncate do. α, c, bias and what promotes a
    sum round to nearest all the same."""
    flushes: bool = False
    """Float32 numbers below 2^-126 may become 0: terms with their scales, partial sums, α and what it is made of,
    float32 scales, α times a sum, c, bias and the output. Float16 outputs keep theirs, which float32 has as normal
    numbers."""

    def __post_init__(self) -> None:
        order = self.order
        if order is not None and not is_order(order):
            names = ", ".join(map(repr, ORDERS))
            raise ValueError(f"the order of a sum is {names}, or None for any; not {order!r}")
        if (found := self.aligned) is not None:
            bits = found.fraction + 2 + math.ceil(math.log2(found.width + 1))
            if bits > _FLOAT64_BITS:
                raise ValueError(f"{order!r} is simulated in float64: F + 2 + log2(W + 1) is {bits}, above 53")
            if found.promoted is not None and found.promoted % found.width:
                raise ValueError(f"{order!r} promotes sums of {found.promoted} columns, no multiple of {found.width}")
            if self.truncates:
                raise ValueError(f"{order!r} says itself how the accumulator truncates; declare one of the two")

    @property
    def unit(self) -> float:
        """The largest relative error of an addition."""
        return 2 * UNIT if self.truncates else UNIT

    @property
    def underflow(self) -> float:
        """What a term below 2^-149 can be off by once it is a float32 number: half of that where it rounds to nearest.

        With flushing 2^-126, that of the sums it takes part in included, for each term: a sum can only vanish where one
        of its terms has not.
        """
        rounded = SMALLEST if self.truncates else SMALLEST / 2
        return TINY + rounded if self.flushes else rounded

    @property
    def normal(self) -> float:
        """What every term has to be a multiple of for no underflow to change a sum."""
        return TINY if self.flushes else SMALLEST

    @property
    def slices(self) -> int:
        """Into how many parts K is cut."""
        found = _SPLIT.fullmatch(self.order or "")
        return int(found[1]) if found else 1

    @property
    def aligned(self) -> Alignment | None:
        """The model of a tensor core that the order names."""
        found = _ALIGNED.fullmatch(self.order or "")
        if not found:
            return None
        decoded, fraction, width, promoted = found.groups()
        return Alignment(int(fraction), int(width), int(promoted) if promoted else None, decoded is not None)


def is_order(name: object) -> bool:
    """Whether there is such an order of summation; its numbers may be refused all the same."""
    return isinstance(name, str) and (name in ORDERS[:3] or bool(_SPLIT.fullmatch(name) or _ALIGNED.fullmatch(name)))


def summation(order: Summation | str | None) -> Summation:
    """`order` as a Summation; a name is that order in round to nearest. Raises ValueError for an unknown one."""
    return order if isinstance(order, Summation) else Summation(order)
