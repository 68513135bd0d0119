"""The input families by name, with purpose and operations. `harness.inputs` generates the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A kind of inputs. `purpose`: the bugs that these inputs show and random data hide."""

    name: str
    operations: tuple[str, ...]
    purpose: str


_QUANTIZE = ("quantize", "quantize-grouped")
_GEMM = ("gemm", "gemm-grouped", "gemm-quantized")
_UPDATE = ("update-scale",)
_ROTATED = (*_QUANTIZE, "transform")
_LINEAR = ("linear", "grouped-linear")
_NORMALIZED = ("layernorm-linear", "transformer-layer")
_MODULES = (*_LINEAR, *_NORMALIZED)
_ALL = (*_ROTATED, *_GEMM)
_MOST = (*_ALL, *_LINEAR)
_EVERY = (*_ALL, *_MODULES)
_SUMMED = (*_GEMM, *_LINEAR)

FAMILIES = {
    family.name: family
    for family in (
        Family("normal", _EVERY, "standard normal: what everybody tests with"),
        Family("uniform", _ALL, "uniform on [-1, 1): no block amax far from the tensor's"),
        Family("outliers", _EVERY, "normal, one element in 64 a hundred times larger: most of a block near zero"),
        Family("tiles", _MOST, "every block its own power of two, neighbours never the same: swapped scales show"),
        Family("e2m1-ties", _QUANTIZE, "half the elements exact midpoints of E2M1, the rest one ulp off: rounding"),
        Family("e4m3-ties", _QUANTIZE, "block scales on and beside the ties of E4M3: their order of operations"),
        Family(
            "ties",
            _QUANTIZE,
            "half the elements exact midpoints of the recipe's element, the rest one ulp off: rounding",
        ),
        Family(
            "near-ties", _QUANTIZE, "midpoints over max/amax, an ulp more, an ulp less: the last bit of an encode scale"
        ),
        Family(
            "scale-edges",
            _QUANTIZE,
            "block amaxes within an ulp of where rules for a power of two take a step: which one",
        ),
        Family("every-exponent", _QUANTIZE, "every exponent of the dtype, a block each: the range of block scales"),
        Family("normal-1e-28", _QUANTIZE, "normal times 1e-28: block scales far down"),
        Family(
            "normal-1e-3",
            (*_QUANTIZE, *_NORMALIZED),
            "normal times 1e-3: magnitudes of gradients; variances below the eps of a norm",
        ),
        Family("normal-1e3", _QUANTIZE, "normal times 1e3: magnitudes beyond the element's"),
        Family("single", _QUANTIZE, "one element of a block is not 0: where 4 and 6 of 4over6 are as near, 6 is right"),
        Family("low-rows", _ALL, "each row a power of two lower, down to 2^-20: subnormal scales and scales of 0"),
        Family(
            "exponents", _QUANTIZE, "every power of two of the dtype, a row each: every amax where rows have their own"
        ),
        Family("huge", _ROTATED, "small normal and one element the dtype's largest: scales that round to 0"),
        Family("subnormal", _ROTATED, "all elements subnormal in the dtype: flush-to-zero, encode factor's limit"),
        Family("zeros", _EVERY, "all zero: divisions by zero"),
        Family("negative-zeros", _ROTATED, "all -0.0: lost signs"),
        Family("nan", _MOST, "normal with NaN of both signs: single elements, the first one, a whole block"),
        Family("inf", _ALL, "normal with +Inf and -Inf elements"),
        Family(
            "position",
            (*_ALL, "swizzle"),
            "codes and scale tell where a block and an element lie: order of nibbles, lanes, rows",
        ),
        Family("spread", _ROTATED, "exponents 2^-30 to 2^30 inside every group: the order of a rotation's sum shows"),
        Family("bytes", ("swizzle",), "random bytes: what a layout does with any scale"),
        Family(
            "amaxes", _UPDATE, "random amaxes, each tensor its own power of two: the largest, the order, the division"
        ),
        Family(
            "amaxes-zero-first", _UPDATE, "the first amax of every other tensor is 0: single and bulk update differ"
        ),
        Family("amaxes-zeros", _UPDATE, "no amax but 0: the scale stays"),
        Family("amaxes-tiny", _UPDATE, "amaxes from the least subnormal number on: scales that would be infinite"),
        Family("amaxes-inf", _UPDATE, "infinity first, somewhere or everywhere in a history: which scales stay"),
        Family("amaxes-nan", _UPDATE, "NaN first, somewhere or everywhere in a history: a NaN that a maximum loses"),
        Family("lattice", _SUMMED, "small integers under equal scales: the sum is exact in any order at any K"),
        Family("rounding", _SUMMED, "normal, blocks scaled by 2^-6 to 2^6: nearly every sum rounds"),
        Family("positive", _GEMM, "no negative element: the tightest bound, sums that round only from K = 1024 on"),
        Family("cancelling", _SUMMED, "the second half of K cancels most of the first: small sums of large products"),
        Family("amax-2m126-first", _ALL, "magnitudes near 2^-126, the amax first: subnormal scales and products"),
        Family(
            "amax-2m120-row-end", _ALL, "magnitudes near 2^-120, the amax at the end of a row: encode scale's limit"
        ),
        Family("amax-2m56-last", _ALL, "magnitudes near 2^-56, the amax last: a subnormal alpha"),
        Family("amax-2p50-first", _ALL, "magnitudes near 2^50, the amax first: large scales"),
        Family("amax-2p61-row-end", _ALL, "magnitudes near 2^61, the amax at the end of a row: outputs that overflow"),
        Family(
            "amax-2p120-last", _ALL, "magnitudes near 2^120, the amax last: subnormal encode scales, infinite alpha"
        ),
        Family("amax-largest-first", _ALL, "magnitudes near the dtype's largest number, which is first: overflow"),
        Family("half-edges", _GEMM, "outputs of 65504, 65512, 65520 and above: overflow of float16"),
        Family(
            "peaked",
            ("transformer-layer",),
            "normal, and scores of attention 16 times larger: a softmax of almost one key, which hides no rounding",
        ),
        Family(
            "codes",
            ("quantize", "gemm"),
            "random bits, and dequantize and gemm given codes and scale bytes that quantize never makes",
        ),
    )
}


def families_of(operation: str) -> list[str]:
    """Names of the families of an operation."""
    return [family.name for family in FAMILIES.values() if operation in family.operations]
