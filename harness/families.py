"""The input families by name: what each is for and which operations use it. `harness.inputs` makes the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Inputs of one kind. `purpose` says which bug they show that random data hide."""

    name: str
    operations: tuple[str, ...]
    purpose: str


_BOTH = ("quantize", "gemm")

FAMILIES = {
    family.name: family
    for family in (
        Family("normal", _BOTH, "standard normal: what everybody tests with"),
        Family("uniform", _BOTH, "uniform on [-1, 1): no block amax far from the tensor's"),
        Family("outliers", _BOTH, "normal, one element in 64 a hundred times larger: most of a block near zero"),
        Family("tiles", _BOTH, "every block of 16 its own power of two: distinct scales, swapped or shifted ones show"),
        Family("e2m1-ties", ("quantize",), "elements on the midpoints of E2M1 and one ulp beside them: rounding mode"),
        Family(
            "e4m3-ties", ("quantize",), "block amaxes whose scale is a tie of E4M3: order of the scale's operations"
        ),
        Family(
            "low-rows", _BOTH, "each row's amplitude a power of two down to 2^-20: scales of 0 and subnormal scales"
        ),
        Family("huge", ("quantize",), "normal and one element near the dtype's largest: scales that round to 0"),
        Family(
            "subnormal", ("quantize",), "subnormal elements of the dtype: flush-to-zero, limits of the encode factor"
        ),
        Family("zeros", _BOTH, "all zero: divisions by zero"),
        Family("negative-zeros", ("quantize",), "all -0.0: lost signs"),
        Family("nan", _BOTH, "normal with NaN in single elements, whole blocks and a first element"),
        Family("inf", _BOTH, "normal with +Inf and -Inf elements"),
        Family("position", _BOTH, "each position of a tile its own value: order of nibbles, lanes, rows"),
        Family("lattice", ("gemm",), "small integers under equal scales: the sum is exact at any K"),
        Family("rounding", ("gemm",), "normal, single blocks scaled by 2^-6 to 2^6: nearly every sum rounds"),
        Family("positive", ("gemm",), "all positive: the tightest bound"),
        Family("cancelling", ("gemm",), "the second half of K cancels most of the first: small sums of large products"),
    )
}


def families_of(operation: str) -> list[str]:
    """Names of the families that an operation has."""
    return [family.name for family in FAMILIES.values() if operation in family.operations]
