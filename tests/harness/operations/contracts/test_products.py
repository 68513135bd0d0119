"""Products of quantized matrices: wrong kernels fail, most with their cause, and right kernels of other forms pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contract import ContractError
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.contracts.evaluate import parts_of
from narrowgauge.spec.quantized import Quantized
from tests.harness.operations.contracts.serving_kernels import Kernels

Tensor = torch.Tensor
FAMILIES = ("normal", "scales-distinct", "one-hot-k", "smallest-scale", "codes")
SHAPE = (32, 256, 40)


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    OPERATIONS.let_go()


class Kernel(Kernels):
    """A kernel with one method replaced."""

    def __init__(self, **methods: Any) -> None:
        for name, method in methods.items():
            setattr(self, name, method.__get__(self))


def reading(change: Callable[[Quantized], Quantized]) -> Kernel:
    """A kernel that reads b wrongly."""
    return Kernel(weight_only_gemm=lambda self, a, b: Kernels.weight_only_gemm(self, a, change(b)))


def exchanged(b: Quantized) -> Quantized:
    return replace(b, codes=b.codes >> 4 | b.codes << 4)


def scaled(change: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel with other scales of b."""
    return reading(lambda b: replace(b, scales=change(b.scales)))


def columns(change: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel with other columns of a."""
    return Kernel(weight_only_gemm=lambda self, a, b: Kernels.weight_only_gemm(self, change(a.clone()), b))


def without(some: slice) -> Callable[[Tensor], Tensor]:
    def change(a: Tensor) -> Tensor:
        a[:, some] = 0
        return a

    return change


def outer(change: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel with another factor behind the sum."""
    return Kernel(outer_scale=lambda self, b: change(Kernels.outer_scale(self, b)))


def summed(change: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel with another sum."""
    return Kernel(product=lambda self, a, w: change(Kernels.product(self, a, w)))


def halves_in(dtype: torch.dtype) -> Kernel:
    def product(self: Kernels, a: Tensor, w: Tensor) -> Tensor:
        half = a.shape[1] // 2
        parts = [Kernels.product(self, a[:, s], w[:, s]).to(dtype).float() for s in (slice(half), slice(half, None))]
        return parts[0] + parts[1]

    return Kernel(product=product)


def in_blocks(index: Callable[[Tensor], Tensor]) -> Kernel:
    return scaled(lambda s: s[:, index(torch.arange(s.shape[1]))])


NVFP4, MXFP4, ROW = "nvfp4", "mxfp4", "fp8-row-e4m3"
WRONG: dict[str, tuple[str, Kernel, str]] = {
    "nibbles": (NVFP4, reading(exchanged), "two codes of a byte"),
    "nibbles of MXFP4": (MXFP4, reading(exchanged), "two codes of a byte"),
    "signs lost": (NVFP4, reading(lambda b: replace(b, codes=b.codes & 0x77)), "signs of the codes are lost"),
    "group k/32": (NVFP4, in_blocks(lambda n: n // 2), "scale k/2"),
    "group of pairs": (MXFP4, in_blocks(lambda n: n // 2 * 2), "scale of the first"),
    "next group": (NVFP4, in_blocks(lambda n: (n + 1) % len(n)), "those of the next block"),
    "first group": (MXFP4, in_blocks(lambda n: 0 * n), "first block of a row"),
    "scales of the next column": (NVFP4, scaled(lambda s: s.roll(-1, 0)), "those of the next row"),
    "scales of the previous column": (MXFP4, scaled(lambda s: s.roll(1, 0)), "those of the previous row"),
    "row scales of the next column": (ROW, scaled(lambda s: s.roll(-1, 0)), "those of the next row"),
    "row scale of column 0": (ROW, scaled(lambda s: s[:1].expand_as(s)), "those of row 0"),
    "scales left out": (NVFP4, scaled(lambda s: torch.full_like(s, 7 << 3)), "scales of b are left out"),
    "row scales left out": (ROW, outer(torch.ones_like), "factor(b)"),
    "small scales lost": (NVFP4, scaled(lambda s: torch.where(s < 8, 0, s).to(torch.uint8)), "subnormal scales"),
    "codes of the next row": (NVFP4, reading(lambda b: replace(b, codes=b.codes.roll(-1, 0))), "codes of b are those"),
    "global scale inverted": (NVFP4, outer(lambda g: 1 / g), "factor(b)"),
    "global scale twice": (NVFP4, outer(lambda g: g * g), "factor(b) is a factor twice"),
    "global scale left out": (NVFP4, outer(torch.ones_like), "factor(b)"),
    "row scales twice": (ROW, outer(lambda s: s * s), "factor(b) is a factor twice"),
    "tail of 32 dropped": (NVFP4, columns(without(slice(-32, None))), "leaves out the last 32"),
    "tail of 16 dropped": (MXFP4, columns(without(slice(-16, None))), "leaves out the last 16"),
    "tail of 8 dropped": (ROW, columns(without(slice(-8, None))), "leaves out the last 8"),
    "first element dropped": (ROW, columns(without(slice(1))), "leaves out the first element"),
    "half of K": (NVFP4, columns(without(slice(128, None))), "first half"),
    "a of the next row": (NVFP4, columns(lambda a: a.roll(-1, 0)), "a is that of the next row"),
    "slices in float16": (NVFP4, halves_in(torch.float16), "halves of K"),
    "slices in bfloat16": (MXFP4, halves_in(torch.bfloat16), "reduce is 'output'"),
    "sum in bfloat16": (ROW, summed(lambda y: y.bfloat16().float()), "sum-first"),
    "row scales in bfloat16": (ROW, outer(lambda s: s.bfloat16().float()), "rounded to bfloat16"),
    "negative": (MXFP4, summed(torch.neg), "other sign"),
}  # fmt: skip


def told(kernel: Kernel, recipe: str) -> str:
    """The report of the check of a kernel; empty if it passes."""
    try:
        narrowgauge.check(kernel.weight_only_gemm, "weight-only-gemm", recipe=recipe, shapes=[SHAPE], families=FAMILIES)
    except AssertionError as failed:
        return str(failed)
    return ""


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_fails_with_its_cause(name: str) -> None:
    recipe, kernel, words = WRONG[name]
    assert words in told(kernel, recipe)


def split(self: Kernels, a: Tensor, w: Tensor) -> Tensor:
    parts = [Kernels.product(self, a[:, s : s + 64], w[:, s : s + 64]) for s in range(0, a.shape[1], 64)]
    return parts[3] + parts[1] + (parts[0] + parts[2])


def late_blocks(self: Kernels, a: Tensor, b: Quantized) -> Tensor:
    """Scales of blocks multiply the sums of blocks."""
    elements, scales, width = self.elements(b), self.block_scales(b), b.recipe.block[1]
    y = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], width):
        some = slice(start, start + width)
        y = y + self.product(a[:, some], elements[:, some]) * scales[:, start]
    return (y * self.outer_scale(b)).to(a.dtype)


RIGHT: dict[str, tuple[tuple[str, ...], Kernel]] = {
    "float64": ((NVFP4, MXFP4, ROW), Kernel(product=lambda self, a, w: a.double() @ w.double().T)),
    "split K": ((NVFP4, MXFP4, ROW), Kernel(product=split)),
    "reversed": ((NVFP4, ROW), Kernel(product=lambda self, a, w: (a.flip(1).float() @ w.flip(1).float().T))),
    "late scales": ((NVFP4, MXFP4), Kernel(weight_only_gemm=late_blocks)),
    "reciprocal": ((NVFP4,), Kernel(outer_scale=lambda self, b: b.amax * torch.tensor(1 / 2688))),
    "two reciprocals": ((NVFP4,), Kernel(outer_scale=lambda self, b: b.amax / 6 * torch.tensor(1 / 448))),
    "inverse of enc": ((NVFP4,), Kernel(outer_scale=lambda self, b: 1 / (2688 / b.amax))),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_pass(name: str) -> None:
    recipes, kernel = RIGHT[name]
    for recipe in recipes:
        assert told(kernel, recipe) == ""


@pytest.mark.parametrize("recipe", [NVFP4, MXFP4])
def test_declared_sums_of_slices_in_the_dtype_of_the_output_pass(recipe: str) -> None:
    a = narrowgauge.inputs("nvfp4", (16, 256), "normal")
    b = narrowgauge.quantize(narrowgauge.inputs("nvfp4", (24, 256), "normal", 1), recipe)
    w, scale = Kernels().decoded(b, a.dtype), Kernels().outer_scale(b)
    halves = [(Kernels().product(a[:, s], w[:, s]) * scale).bfloat16() for s in (slice(128), slice(128, None))]
    contract, found = CONTRACTS[WEIGHT_ONLY], halves[0] + halves[1]
    narrowgauge.assert_result(contract, found, a, b, reduce="output")
    with pytest.raises(narrowgauge.WrongResult, match="elements of output differ"):
        narrowgauge.assert_result(contract, found, a, b, accumulator="fraction-24-8")


@pytest.mark.parametrize("promotion", ["sum-first", "scales-first"])
def test_both_promotions_of_scales_of_blocks_pass(promotion: str) -> None:
    recipes = "fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e4m3-fp32"
    a, b = (narrowgauge.quantize(narrowgauge.inputs(r, (m, 512), "normal", m), r)
            for r, m in zip(recipes, (16, 24), strict=True))  # fmt: skip
    y = torch.zeros(16, 24)
    for start in range(0, 512, 128):
        part = slice(start, start + 128)
        left, right = (Kernels().elements(q)[:, part].double() for q in (a, b))
        s_a, s_b = (Kernels().block_scales(q)[:, start].float() for q in (a, b))
        scaled = (left @ right.T).float() * s_a[:, None], s_b
        if promotion == "scales-first":
            scaled = (left @ right.T).float(), s_a[:, None] * s_b
        y = (scaled[0].double() * scaled[1].double() + y.double()).float()
    for fields in ({}, {"promotion": promotion}):
        narrowgauge.assert_result(CONTRACTS[SCALED], y.bfloat16(), a, b, accumulator="fraction-24-8", **fields)


def test_a_result_is_judged_with_its_quantized_argument() -> None:
    a = narrowgauge.inputs("nvfp4", (8, 64), "normal")
    b = narrowgauge.quantize(narrowgauge.inputs("nvfp4", (16, 64), "normal", 1), NVFP4)
    right = Kernels().weight_only_gemm(a, b)
    contract = CONTRACTS["weight-only-gemm"]
    narrowgauge.assert_result(contract, right, a, b)
    program = contract.trace({"a": "bfloat16", "b": "codes"}, {"b_recipe": NVFP4}, {})
    narrowgauge.assert_result(program, right, a=a, b=b)
    narrowgauge.assert_result(program.to_json(), right, **{"a": a, **parts_of(program, {"b": b})})
    with pytest.raises(narrowgauge.WrongResult, match="output"):
        narrowgauge.assert_result(contract, -right, a, b)
    with pytest.raises(ValueError, match="b is quantized by mxfp4; weight-only-gemm takes nvfp4"):
        narrowgauge.assert_result(program, right, a, narrowgauge.quantize(a, "mxfp4"))


# ---- batches, operands in other memory, whole numbers and biases -----------------------------------------------------


def judged(method: Callable[..., Any], operation: str, recipe: str, keys: dict[str, Any], *families: str) -> str:
    """The report of the check of a function on cases of one shape; empty if it passes."""
    shape = (9, 1100, 10) if recipe == "int8-row" else (9, 96, 10)
    more = {"b_recipe": recipe} if operation.startswith("scaled") else {}
    try:
        narrowgauge.check(
            method, operation, recipe=recipe, shapes=[shape], families=families, keys={**keys, **more}, dtypes=DTYPES
        )
    except AssertionError as failed:
        return str(failed)
    return ""


DTYPES = (torch.bfloat16,)
EXACT = Kernel(product=lambda self, a, w: (a.double() @ w.double().T).float())
WEIGHT_ONLY, SCALED = "weight-only-gemm", "scaled-gemm"
STORED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (WEIGHT_ONLY, "nvfp4", {"batch": 3, "scales": "128x4"}),
    (WEIGHT_ONLY, "mxfp4", {"scales": "ue8m0-int32"}),
    (WEIGHT_ONLY, ROW, {"stored": "tn", "batch": 2}),
    (SCALED, ROW, {"stored": "tt"}),
    (WEIGHT_ONLY, "int4-g32", {}),
    (WEIGHT_ONLY, "int4-g32-zp", {"batch": 2}),
    (f"{WEIGHT_ONLY}-bias", "nvfp4", {"batch": 2}),
    (f"{SCALED}-bias", ROW, {"stored": "nn"}),
    (SCALED, "int8-row", {"out_dtype": "float32"}),
    (SCALED, "int8-row-zp", {"batch": 2}),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("operation", "recipe", "keys"), STORED)
def test_operands_in_any_memory(operation: str, recipe: str, keys: dict[str, Any]) -> None:
    method = getattr(EXACT, operation.replace("-", "_"))
    assert judged(method, operation, recipe, keys, "scales-distinct", "integer-edge", "codes") == ""


def shifted(a: Any, b: Any) -> Tensor:
    """The scales of b of each product begin behind unpadded rows of the products before it."""
    flat, padded = b.scales.flatten(), b.scales[0].numel()
    stride = b.shape[1] * padded // 128
    parts = [flat[n * stride : n * stride + padded].view(b.scales.shape[1:]) for n in range(len(b.scales))]
    return EXACT.weight_only_gemm(a, replace(b, scales=torch.stack(parts)))


def of_products(**parts: Sequence[int]) -> Callable[..., Tensor]:
    """Parts of b, or a, of other products of the batch."""

    def kernel(a: Tensor, b: Any) -> Tensor:
        taken = {part: getattr(b, part)[list(order)] for part, order in parts.items() if part != "a"}
        return EXACT.weight_only_gemm(a[list(parts.get("a", range(len(a))))], replace(b, **taken))

    return kernel


def before_scale(a: Any, b: Any, bias: Tensor) -> Tensor:
    return ((EXACT.product(a, EXACT.decoded(b, a.dtype)) + bias.float()) * EXACT.outer_scale(b)).to(a.dtype)


def with_zeros(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: EXACT.weight_only_gemm(a, replace(b, zeros=change(b.zeros.short())))


def without_zeros_of_a(a: Any, b: Any) -> Tensor:
    return EXACT.scaled_gemm(replace(a, zeros=0 * a.zeros), b)


WRONG_STORED: dict[str, tuple[str, str, dict[str, Any], Callable[..., Any], str]] = {
    "zero point left out": (WEIGHT_ONLY, "int4-g32-zp", {}, with_zeros(torch.zeros_like), "are left out"),
    "zero point less one": (WEIGHT_ONLY, "int4-g32-zp", {}, with_zeros(lambda z: z - 1), "less by 1"),
    "zero point of 8": (WEIGHT_ONLY, "int4-g32-zp", {}, with_zeros(lambda z: 0 * z + 8), "are 8"),
    "no sign": (WEIGHT_ONLY, "int4-g32", {}, lambda a, b: EXACT.weight_only_gemm(a, unsigned(b)), "without a sign"),
    "products exchanged": (
        WEIGHT_ONLY,
        "nvfp4",
        {"batch": 2},
        lambda a, b: EXACT.weight_only_gemm(a, b).flip(0),
        "the result of each product is that of the other product of the batch",
    ),
    "scales of the first product": (
        WEIGHT_ONLY,
        "nvfp4",
        {"batch": 3},
        of_products(scales=(0, 0, 0)),
        "the scales of b are those of the first product of the batch",
    ),
    "codes of the next product": (
        WEIGHT_ONLY,
        "mxfp4",
        {"batch": 3},
        of_products(codes=(1, 2, 0)),
        "the codes of b are those of the next product of the batch",
    ),
    "a in reverse order": (
        WEIGHT_ONLY,
        ROW,
        {"batch": 3},
        of_products(a=(2, 1, 0)),
        "a is that of the product at this place from the end of the batch",
    ),
    "batch stride": (
        WEIGHT_ONLY,
        "nvfp4",
        {"batch": 2, "scales": "128x4"},
        shifted,
        "begin 80 scales behind those of the product before, not 1024: its rows are not padded",
    ),
    "bias before the scale": (f"{WEIGHT_ONLY}-bias", ROW, {}, before_scale, "is a factor after the addition"),
    "zero points of a left out": (SCALED, "int8-row-zp", {}, without_zeros_of_a, "the zero points of a are left out"),
    "float32 sums": (SCALED, "int8-row", {"out_dtype": "float32"}, Kernels().scaled_gemm, "fraction-24-8"),
}


def unsigned(b: Quantized) -> Quantized:
    """INT4 codes as numbers from 0 to 15."""
    recipe = narrowgauge.recipe("int4-g32-zp")
    return replace(b, recipe=recipe, zeros=torch.zeros(b.scales.shape, dtype=torch.uint8))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", WRONG_STORED)
def test_a_wrong_kernel_of_stored_operands_fails(name: str) -> None:
    operation, recipe, keys, method, words = WRONG_STORED[name]
    found = judged(method, operation, recipe, keys, "integer-edge" if recipe == "int8-row" else "scales-distinct")
    assert found
    assert words in found
    assert not (recipe.startswith("int8") and "13-32" in found)  # no tensor core adds whole numbers so


def test_whole_numbers_have_no_order_of_tensor_cores_of_floats() -> None:
    contract, recipes = CONTRACTS[SCALED], {"a_recipe": "int8-row", "b_recipe": "int8-row"}
    for order in ("fraction-13-32", "aligned-13-32"):
        with pytest.raises(ContractError, match=f"are int32, or float32 with .* not '{order}'"):
            contract.trace({"a": "codes", "b": "codes"}, recipes, {"accumulator": order})


@pytest.mark.parametrize(
    ("recipe", "keys", "words"),
    [
        ("nvfp4", {"stored": "nn"}, "two elements of a row of nvfp4 share a byte"),
        (ROW, {"scales": "128x4"}, "scales is '128x4', a layout of bytes"),
        ("nvfp4", {"scales": "ue8m0-int32"}, "a layout of E8M0 scales; recipe nvfp4 has rows of E4M3 scales"),
        ("mxfp4", {"scales": "cdna4-mxfp4"}, "layout cdna4-mxfp4 has no padding"),
    ],
)
def test_memory_that_operands_cannot_have(recipe: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        judged(Kernels().weight_only_gemm, WEIGHT_ONLY, recipe, keys, "lattice")


# ---- sums of FP8 tensor cores ----------------------------------------------------------------------------------------


def test_undeclared_sums_of_fp8_are_held_to_13_fraction_bits() -> None:
    """Tensor cores of Hopper and Ada keep no more: their sums pass unless the backend declares float32."""
    x, w = (narrowgauge.inputs("fp8-current", (rows, 64), "uniform", rows).abs() for rows in (16, 24))
    a, b = (narrowgauge.quantize(m, ROW) for m in (x, w))
    factors = a.scales * b.scales.T
    ones = [replace(q, scales=torch.ones(1), recipe=narrowgauge.recipe("fp8-current-e4m3")) for q in (a, b)]
    kept = bounds(*ones, out_dtype=torch.float32, order="aligned-13-32").expected

    def judged_as(y: Tensor, **fields: str) -> Any:
        contract = CONTRACTS[SCALED]
        dtypes, recipes = {"a": "codes", "b": "codes"}, {"a_recipe": ROW, "b_recipe": ROW}
        program = contract.trace(dtypes, recipes, {"out_dtype": "float32", **fields})
        return judge_contract(program, parts_of(program, {"a": a, "b": b}), {"output": y}).stages[0]

    undeclared = judged_as(kept * factors)
    assert undeclared.passed
    assert "sums of 13 fraction bits, as FP8 tensor cores of Hopper and Ada keep" in undeclared.assumes
    assert not judged_as(kept * factors * 0.97).passed
    declared = judged_as(kept * factors, accumulator="fraction-24-8")
    assert not declared.passed
    assert "13 fraction bits" not in declared.assumes
    assert judged_as(EXACT.scaled_gemm(a, b, out_dtype="float32"), accumulator="fraction-24-8").passed
