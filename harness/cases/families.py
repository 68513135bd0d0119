"""The input families that several operations share. `harness.inputs.generators` makes their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache


class Kind(Enum):
    """Properties of an operation that decide its families."""

    QUANTIZED = auto()
    ROTATED = auto()
    MULTIPLIED = auto()
    LINEAR = auto()
    NORMALIZED = auto()
    CONTRACT = auto()


@dataclass(frozen=True)
class Family:
    """A kind of inputs. `purpose`: the bugs that these inputs show and random data hide."""

    name: str
    purpose: str
    kinds: tuple[Kind, ...] = ()
    """Kinds of operations that take the family. Empty: operations name it (`Case.own_families`)."""


_QUANTIZE = (Kind.QUANTIZED,)
_GEMM = (Kind.MULTIPLIED,)
_ROTATED = (*_QUANTIZE, Kind.ROTATED)
_NORMALIZED = (Kind.NORMALIZED,)
_CONTRACT = (Kind.CONTRACT,)
_LINEAR = (Kind.LINEAR,)
_ALL = (*_ROTATED, *_GEMM)
_MOST = (*_ALL, *_LINEAR)
_EVERY = (*_MOST, *_NORMALIZED, *_CONTRACT)
_SUMMED = (*_GEMM, *_LINEAR)

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("normal", "standard normal: what everybody tests with", _EVERY),
        Family("uniform", "uniform on [-1, 1): no block amax far from the tensor's", _ALL),
        Family("outliers", "normal, one element in 64 a hundred times larger: most of a block near zero", _EVERY),
        Family("tiles", "every block its own power of two, neighbours never the same: swapped scales show", _MOST),
        Family("e2m1-ties", "half the elements exact midpoints of E2M1, the rest one ulp off: rounding", _QUANTIZE),
        Family("e4m3-ties", "block scales on and beside the ties of E4M3: their order of operations", _QUANTIZE),
        Family(
            "ties",
            "half the elements exact midpoints of the recipe's element, the rest one ulp off: rounding",
            _QUANTIZE,
        ),
        Family(
            "near-ties", "midpoints over max/amax, an ulp more, an ulp less: the last bit of an encode scale", _QUANTIZE
        ),
        Family(
            "scale-edges",
            "block amaxes within an ulp of where rules for a power of two take a step: which one",
            _QUANTIZE,
        ),
        Family("every-exponent", "every exponent of the dtype, a block each: the range of block scales", _QUANTIZE),
        Family(
            "boundaries",
            "numbers and midpoints of the element, and an ulp beside them, under every scale of a block: all roundings",
            _QUANTIZE,
        ),
        Family("normal-1e-28", "normal times 1e-28: block scales far down", _QUANTIZE),
        Family(
            "normal-1e-3",
            "normal times 1e-3: magnitudes of gradients; variances below the eps of a norm",
            (*_QUANTIZE, *_NORMALIZED),
        ),
        Family("normal-1e3", "normal times 1e3: magnitudes beyond the element's", _QUANTIZE),
        Family("single", "one element of a block is not 0: where 4 and 6 of 4over6 are as near, 6 is right", _QUANTIZE),
        Family("low-rows", "each row a power of two lower, down to 2^-20: subnormal scales and scales of 0", _ALL),
        Family(
            "low-columns", "each column another power of two, down to 2^-12: blocks of the other orientation", _LINEAR
        ),
        Family(
            "exponents", "every power of two of the dtype, a row each: every amax where rows have their own", _QUANTIZE
        ),
        Family("huge", "small normal and one element the dtype's largest: scales that round to 0", _ROTATED),
        Family(
            "subnormal",
            "all elements subnormal in the dtype: flush-to-zero, encode factor's limit",
            (*_ROTATED, *_CONTRACT),
        ),
        Family("zeros", "all zero: divisions by zero", _EVERY),
        Family(
            "zero-rows", "normal, rows and blocks of zeros beside others: a scale of 0 beside ordinary ones", _QUANTIZE
        ),
        Family("negative-zeros", "all -0.0: lost signs", (*_ROTATED, *_CONTRACT)),
        Family(
            "nan", "normal with NaN of both signs: single elements, the first one, a whole block", (*_MOST, *_CONTRACT)
        ),
        Family("inf", "normal with +Inf and -Inf elements", (*_ALL, *_CONTRACT)),
        Family(
            "position",
            "codes and scale tell where a block and an element lie: order of nibbles, columns, rows",
            (*_ALL, *_CONTRACT),
        ),
        Family("rising", "magnitudes grow from the first element to the last one: amaxes of a part", _QUANTIZE),
        Family("spread", "exponents 2^-30 to 2^30 inside every group: the order of a rotation's sum shows", _ROTATED),
        Family(
            "lattice",
            "small integers under equal scales: the sum is exact in any order at any K",
            (*_SUMMED, *_CONTRACT),
        ),
        Family("rounding", "normal, blocks scaled by 2^-6 to 2^6: nearly every sum rounds", _SUMMED),
        Family(
            "positive",
            "no negative element: the tightest bound, sums that round only from K = 1024 on",
            (*_GEMM, *_CONTRACT),
        ),
        Family(
            "cancelling",
            "the second half of K cancels most of the first: small sums of large products",
            (*_SUMMED, *_CONTRACT),
        ),
        Family("amax-2m126-first", "magnitudes near 2^-126, the amax first: subnormal scales and products", _ALL),
        Family(
            "amax-2m120-row-end", "magnitudes near 2^-120, the amax at the end of a row: encode scale's limit", _ALL
        ),
        Family("amax-2m56-last", "magnitudes near 2^-56, the amax last: a subnormal alpha", _ALL),
        Family("amax-2p50-first", "magnitudes near 2^50, the amax first: large scales", _ALL),
        Family("amax-2p61-row-end", "magnitudes near 2^61, the amax at the end of a row: outputs that overflow", _ALL),
        Family(
            "amax-2p120-last", "magnitudes near 2^120, the amax last: subnormal encode scales, infinite alpha", _ALL
        ),
        Family(
            "amax-largest-first",
            "magnitudes near the dtype's largest number, which is first: overflow",
            (*_ALL, *_CONTRACT),
        ),
        Family("half-edges", "outputs of 65504, 65512, 65520 and above: overflow of float16", _GEMM),
        Family(
            "ladder", "each row another power of two, 2^-39 to 2^39: a small constant beside tiny numbers", _CONTRACT
        ),
        Family("negative", "no positive element: clamps, masks and the sign of an argument", _CONTRACT),
        Family(
            "offset", "rows with a mean 8 to 64 times the deviation: a mean that is left out, cancelling", _CONTRACT
        ),
        Family(
            "far-mean",
            "rows with a mean 4096 times the deviation, in bf16 256 times: a variance from mean(x²) − mean²",
            _NORMALIZED,
        ),
        Family(
            "special-addends",
            "normal, and NaN, infinities and the largest number in c and bias: addends that are left out or replaced",
            _GEMM,
        ),
    )
}


CODES = Family("codes", "random bits, and dequantize and gemm given codes and scale bytes that quantize never makes")
"""The family whose cases give codes and scales in place of numbers."""


PRODUCTS = (
    Family("scales-distinct", "neighbouring rows and blocks have scales of other powers of two: a neighbour's scale"),
    Family("one-hot-k", "one number in each row of the first operand is not 0: an output is an element of the second"),
    Family("smallest-scale", "the smallest scales of blocks, and a scale of the tensor of 1: scales that become 0"),
    CODES,
    Family("integer-edge", "INT8: sums beside 2^24 from K = 1042 on, which float32 rounds; other elements as lattice"),
)
"""Families of contracts of quantized matrices, beside the shared families."""


SEQUENCES = (
    Family("normal", "standard normal: what everybody tests with"),
    Family("one-hot", "one key has all the weight, and its values tell page, offset, head and dimension: what is read"),
    Family("one-hot-ends", "the same key is the first or the last one, or lies at an end of a page: lengths and masks"),
    Family("two-level", "up to 32 keys have equal weights, the other keys none: rescaling, splits, their merge"),
    Family(
        "geometric", "weights of 1, 1/2, 1/4, … 2^-10: scales of the softmax and of k, a lagging maximum, small weights"
    ),
    Family("equal", "all keys have equal weights: the length, the sum of the weights"),
    Family("pinned", "normal, and every 16 keys hold the largest logit, so that no maximum grows: the width of sums"),
    Family("nan-pages", "equal weights, lengths beside ends of pages, unused cells are NaN: what is read besides"),
)
"""Families of contracts with sequences in pages. Cells that no token has are NaN or the most negative number."""


RANK_FAMILIES = (
    Family("only-first", "all numbers of the ranks but the first are 0: the first rank is left out, or added twice"),
    Family("only-last", "all numbers of the ranks but the last are 0: the last rank is left out"),
    Family("powers", "rank r has numbers times 2^r: scales or sums of another rank"),
    Family("nan-rank", "the last rank has NaN in a row: which rows and ranks it reaches"),
    Family("padding-rows", "the last rows are zeros, NaN and the largest number: whether other rows read them"),
    Family(
        "exact-sums", "integers under scales that are powers of two: sums are exact, so every order gives one result"
    ),
)
"""Families of contracts of a group of processes, beside the shared ones."""


MIXTURES = (
    Family(
        "one-hot-k", "one number in each row of x, and in each row of w2: an output names its expert, row and column"
    ),
    Family(
        "exact-sums", "sums of small numbers, and one number in each row of up and of w2: rows that x is summed over"
    ),
    Family("one-expert", "one-hot-k, and every choice names the last expert: borders of sections, empty experts"),
)
"""Families of mixtures of experts with a single result of every hidden step: gates too large for an effect of SiLU,
weights that are powers of two, matrices of an expert times a power of two, tokens without an expert."""


EXACT_SUMS = ("lattice", "one-hot-k", "integer-edge")
"""Families of products whose sums are exact in any order at any K."""


@cache
def families_for(kinds: tuple[Kind, ...], own: tuple[Family, ...]) -> Mapping[str, Family]:
    """The shared families of an operation of these kinds, and then its own, by name."""
    shared = [family for family in FAMILIES.values() if set(kinds) & set(family.kinds)]
    return {family.name: family for family in (*shared, *own)}
