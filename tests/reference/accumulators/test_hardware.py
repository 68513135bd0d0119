"""Hardware models against the results of a published simulator and against fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from narrowgauge.reference.accumulators import product as accumulators_product
from narrowgauge.reference.accumulators.hardware import HARDWARE, HardwareModel, find_hardware
from narrowgauge.reference.accumulators.product import DTYPES, Composition, product
from narrowgauge.reference.numbers.decode import decode_packed
from narrowgauge.spec.formats import E2M1
from tests.golden import FOLDER, load
from tests.golden.verify import problems

AMD_NAMES = {"fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}
VECTORS = FOLDER / "accumulators"
RANDOM = {"tf32": 8, "bf16": 8, "fp16": 4, "e4m3": 3, "e5m2": 6, "e2m1": 1, "e4m3fnuz": 3, "e5m2fnuz": 6}
"""Binades around 1 of the random operands of each format."""


def operands_of(model: HardwareModel, instruction: str) -> tuple[str, str]:
    """Formats of a and b, from the qualifier of an instruction."""
    parts = [AMD_NAMES.get(part, part) for part in instruction.replace("_", ".").split(".")]
    found = [part for part in parts if part in model.operands] or [model.operands[0]]
    return found[0], (found * 2)[1]


def numbers(words: np.ndarray, operand: str) -> torch.Tensor:
    bits = torch.from_numpy(words)
    return decode_packed(bits, E2M1, bits.shape[1] * 2) if operand == "e2m1" else bits.view(DTYPES[operand]).float()


def test_every_model_agrees_with_the_published_simulator() -> None:
    assert not problems(VECTORS)
    arrays = load(VECTORS / "mma_sim.npz")
    cases = sorted({name.rpartition("|")[0] for name in arrays})
    assert {case.split("|")[0] for case in cases} == set(HARDWARE)
    for case in cases:
        name, instruction, _ = case.split("|")
        model = find_hardware(name)
        left, right = operands_of(model, instruction)
        dtype = torch.float16 if model.half else torch.float32
        scales = None
        if model.block is not None:
            fmt = torch.float8_e8m0fnu if model.scale == "e8m0" else torch.float8_e4m3fn
            codes = [torch.from_numpy(arrays[f"{case}|{part}"]) for part in ("sa", "sb")]
            scales = codes[0].view(fmt).float(), codes[1].view(fmt).float()
        a, b = numbers(arrays[f"{case}|a"], left), numbers(arrays[f"{case}|b"], right)
        c, expected = (torch.from_numpy(arrays[f"{case}|{part}"]) for part in "cd")
        result = product(a, b, model, operands=(left, right), c=c.view(dtype), scales=scales).view(expected.dtype)
        same = result == expected
        if name.startswith("cdna"):  # no published bits of NaN
            same |= result.view(dtype).isnan() & expected.view(dtype).isnan()
        assert same.all(), f"{case}: {result[~same]} and not {expected[~same]}"


def test_fp8_models_agree_with_another_simulator() -> None:
    """FP8 of Ada and Hopper, with promotion and with the slices of K of the library on Hopper."""
    arrays = load(VECTORS / "mmaemu.npz")
    for case in sorted({name.rpartition("|")[0] for name in arrays}):
        name, formats, how, _ = case.split("|")
        model, operands = find_hardware(name), operands_of(find_hardware(name), formats)
        a, b = (numbers(arrays[f"{case}|{part}"], operand) for part, operand in zip("ab", operands, strict=True))
        c = torch.from_numpy(arrays[f"{case}|c"]).view(torch.float32) if f"{case}|c" in arrays else None
        composition = Composition(
            promoted=128 if "promoted-128" in how else None, splits=(384,) if "split-at-384" in how else 1
        )
        result = product(a, b, model, operands=operands, c=c, composition=composition).view(torch.int32)
        assert torch.equal(result, torch.from_numpy(arrays[f"{case}|d"])), case


def exponent(value: float | Fraction, smallest: int) -> int:
    """Floor of log2 of |value|, or `smallest` for a smaller number."""
    numerator, denominator = abs(Fraction(value)).as_integer_ratio()
    guess = numerator.bit_length() - denominator.bit_length()
    exact = guess if Fraction(numerator, denominator) >= Fraction(2) ** guess else guess - 1
    return max(exact, smallest)


def converted(total: Fraction, model: HardwareModel) -> Fraction:
    """The sum as a number of the accumulator, in fractions."""
    if total == 0:
        return total
    unit = Fraction(2) ** (exponent(total, -14 if model.half else -126) - model.kept)
    return (round(total / unit) if model.nearest else math.trunc(total / unit)) * unit


def fraction_sum(a: list[float], b: list[float], model: HardwareModel, smallest: tuple[int, int]) -> float:
    """The products of two rows as an aligned model adds them, in fractions."""
    accumulator = Fraction(0)
    for start in range(0, len(a), model.width):
        terms, exponents = [accumulator], []
        exponents.append(exponent(accumulator, -126) if accumulator else model.zero_exponent)
        for x, y in zip(a[start : start + model.width], b[start : start + model.width], strict=True):
            terms.append(Fraction(x) * Fraction(y))
            exponents.append(exponent(x, smallest[0]) + exponent(y, smallest[1]) if x * y else model.zero_exponent)
        if len(terms) <= model.width:
            exponents.append(model.zero_exponent)
        unit = Fraction(2) ** (max(exponents) - model.fraction)
        accumulator = converted(sum((math.trunc(term / unit) * unit for term in terms), Fraction(0)), model)
    return float(accumulator)


def random_numbers(rows: int, columns: int, operand: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = RANDOM[operand]
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-2 * wide, wide, x.shape, generator=generator)
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0
    return x.to(DTYPES[operand]).float() if operand != "tf32" else (x.view(torch.int32) & -8192).view(torch.float32)


@pytest.mark.parametrize(
    "name", [model.name for model in HARDWARE.values() if model.kind == "aligned" and not model.block]
)
def test_aligned_models_agree_with_fractions(name: str) -> None:
    model = find_hardware(name)
    left, right = model.operands[0], model.operands[min(1, len(model.operands) - 1)]
    a, b = random_numbers(3, 75, left, 1), random_numbers(3, 75, right, 2)
    smallest = model.smallest_exponent(left), model.smallest_exponent(right)
    result = product(a, b, model, operands=(left, right))
    for i, j in np.ndindex(3, 3):
        assert result[i, j] == fraction_sum(a[i].tolist(), b[j].tolist(), model, smallest), (i, j)


def test_the_format_of_an_operand_is_that_of_its_dtype() -> None:
    """Subnormal numbers of E5M2 and E4M3 have different exponents."""
    model = find_hardware("hopper-fp8")
    a = torch.arange(1, 4, dtype=torch.uint8).repeat(2, 32).view(torch.float8_e5m2)
    b = torch.arange(64, 128, 2, dtype=torch.uint8).repeat(2, 3).view(torch.float8_e4m3fn)
    result = product(a, b, model)
    assert torch.equal(result, product(a.float(), b.float(), model, operands=("e5m2", "e4m3")))
    assert not torch.equal(result, product(a.float(), b.float(), model))


def test_the_groups_of_nvfp4_agree_with_fractions() -> None:
    model = find_hardware("blackwell-nvfp4")
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor(E2M1.values)
    a, b = (values[torch.randint(0, 16, (3, 192), generator=generator)] for _ in range(2))
    scales = [
        torch.randint(0, 127, (3, 12), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn).float()
        for _ in range(2)
    ]
    result = product(a, b, model, scales=(scales[0], scales[1]))
    for i, j in np.ndindex(3, 3):
        accumulator = Fraction(0)
        for start in range(0, 12, 4):
            terms, exponents = [accumulator], [exponent(accumulator, -126) if accumulator else -139]
            for group in range(start, start + 4):
                here = slice(16 * group, 16 * group + 16)
                s, t = (Fraction(scales[k][row, group].item()) for k, row in ((0, i), (1, j)))
                products = zip(a[i, here].tolist(), b[j, here].tolist(), strict=True)
                terms.append(sum((Fraction(x) * Fraction(y) for x, y in products), Fraction(0)) * s * t)
                if s * t:
                    exponents.append(exponent(s, -6) + exponent(t, -6))
            unit = Fraction(2) ** (max(exponents) - 35)
            accumulator = converted(sum((math.trunc(term / unit) * unit for term in terms), Fraction(0)), model)
        assert result[i, j] == float(accumulator)


def test_compositions_join_the_same_accumulators() -> None:
    model = find_hardware("hopper-bf16")
    a, b = random_numbers(4, 640, "bf16", 5), random_numbers(3, 640, "bf16", 6)

    def part(first: int, last: int) -> torch.Tensor:
        return product(a[:, first:last], b[:, first:last], model)

    chunks = [part(first, first + 128) for first in range(0, 640, 128)]
    promoted = product(a, b, model, composition=Composition(promoted=128))
    assert torch.equal(promoted, (((chunks[0] + chunks[1]) + chunks[2]) + chunks[3]) + chunks[4])
    # 40 steps in 4 slices of 10 steps; 5 promoted chunks in 2 slices of 3 and 2 chunks.
    slices = [part(first, first + 160) for first in range(0, 640, 160)]
    in_order = product(a, b, model, composition=Composition(splits=4))
    assert torch.equal(in_order, ((slices[0] + slices[1]) + slices[2]) + slices[3])
    tree = product(a, b, model, composition=Composition(splits=4, reduction="tree"))
    assert torch.equal(tree, (slices[0] + slices[1]) + (slices[2] + slices[3]))
    both = product(a, b, model, composition=Composition(promoted=128, splits=2))
    assert torch.equal(both, ((chunks[0] + chunks[1]) + chunks[2]) + (chunks[3] + chunks[4]))
    narrow = product(a, b, model, composition=Composition(splits=2, reduced_in=torch.bfloat16))
    assert torch.equal(narrow, (part(0, 320).bfloat16() + part(320, 640).bfloat16()).float())
    cut = product(a, b, model, composition=Composition(splits=(100, 640)))  # at 112, a whole step
    assert torch.equal(cut, part(0, 112) + part(112, 640))
    assert len({tuple(x.flatten().tolist()) for x in (promoted, in_order, tree, both, narrow, cut)}) == 6


def test_special_numbers_have_the_bits_of_nvidia() -> None:
    model = find_hardware("hopper-bf16")
    a, b = torch.ones(4, 16), torch.ones(1, 16)
    a[0, 0], a[1, 0], a[2, 0], a[2, 1] = torch.inf, -torch.nan, torch.inf, -torch.inf
    a[3] *= -0.0
    bits = product(a, b, model).view(torch.int32).squeeze(1).tolist()
    assert bits == [0x7F800000, 0x7FFFFFFF, 0x7FFFFFFF, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: find_hardware("hopper-fp4"), "'hopper-fp4' is no hardware model; the models are volta-fp16"),
        (lambda a: product(a, a, find_hardware("blackwell-nvfp4")), "a scale for every 16 columns"),
        (lambda a: product(a, a, find_hardware("hopper-bf16"), scales=(a, a)), "takes no scales"),
        (lambda a: product(a, a, find_hardware("hopper-bf16"), operands=("fp16", "bf16")), "multiplies bf16; not"),
        (lambda a: product(a, a, find_hardware("hopper-bf16"), composition=Composition(promoted=24)), "of the 16 of"),
        (lambda a: product(a, a, find_hardware("hopper-fp8-fp16"), composition=Composition(splits=2)), "float16 acc"),
        (lambda a: Composition(splits=0), "splits is 0"),
        (lambda a: Composition(reduction="any"), "reduction is 'any'"),  # type: ignore[arg-type]
    ],
)
def test_errors_name_the_value_and_the_remedy(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 64))


@pytest.mark.parametrize("name", ["hopper-fp8", "hopper-bf16", "ampere-tf32", "blackwell-fp8"])
def test_a_product_by_the_fast_sum_equals_the_product_by_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For numbers within the range of the fast sum; subnormal, infinite and NaN numbers are added by steps."""
    model = find_hardware(name)
    operand = model.operands[0]
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(rows, 200, generator=generator).to(DTYPES[operand]).float() for rows in (9, 7))
    fast = accumulators_product.fast_tensor_core_sum
    used: list[bool] = []
    monkeypatch.setattr(
        accumulators_product, "fast_tensor_core_sum", lambda *x, **y: used.append(True) or fast(*x, **y)
    )
    special = a.clone()
    special[0, 0], special[1, 1], special[2] = torch.inf, torch.nan, 2.0**-100 * special[2]
    for left, how in (
        (a, Composition()), (a, Composition(promoted=64)), (a, Composition(promoted=32, splits=3)),
        (special, Composition()),
        (a, Composition(splits=2, reduction="tree")), (a, Composition(splits=2, reduced_in=torch.bfloat16)),
    ):  # fmt: skip
        found = product(left, b, model, composition=how)
        with monkeypatch.context() as patched:
            patched.setattr(accumulators_product, "_by_tensor_core", lambda *_: None)
            assert torch.equal(found.view(torch.int32), product(left, b, model, composition=how).view(torch.int32))
    assert len(used) == 5
