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
        Family("tiles", _BOTH, "every block its own power of two, neighbours never the same: swapped scales show"),
        Family("e2m1-ties", ("quantize",), "half the elements exact midpoints of E2M1, the rest one ulp off: rounding"),
        Family("e4m3-ties", ("quantize",), "block scales on and beside the ties of E4M3: their order of operations"),
        Family("low-rows", _BOTH, "each row a power of two lower, down to 2^-20: subnormal scales and scales of 0"),
        Family("huge", ("quantize",), "small normal and one element the dtype's largest: scales that round to 0"),
        Family("subnormal", ("quantize",), "all elements subnormal in the dtype: flush-to-zero, encode factor's limit"),
        Family("zeros", _BOTH, "all zero: divisions by zero"),
        Family("negative-zeros", ("quantize",), "all -0.0: lost signs"),
        Family("nan", _BOTH, "normal with NaN of both signs: single elements, the first one, a whole block"),
        Family("inf", _BOTH, "normal with +Inf and -Inf elements"),
        Family(
            "position", _BOTH, "codes and scale tell where a block and an element lie: order of nibbles, lanes, rows"
        ),
        Family("lattice", ("gemm",), "small integers under equal scales: the sum is exact in any order at any K"),
        Family("rounding", ("gemm",), "normal, blocks scaled by 2^-6 to 2^6: nearly every sum rounds"),
        Family("positive", ("gemm",), "no negative element: the tightest bound, sums that round only from K = 1024 on"),
        Family("cancelling", ("gemm",), "the second half of K cancels most of the first: small sums of large products"),
    )
}


def families_of(operation: str) -> list[str]:
    """Names of the families that an operation has."""
    return [family.name for family in FAMILIES.values() if operation in family.operations]
