"""Products of a plain matrix and a quantized one, on inputs whose results are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from narrowgauge.native.gemm import weight_only
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import Quantized
from tests.native.devices import ON_EVERY_DEVICE, ops
from tests.native.samples import assert_equal

DTYPES = (torch.bfloat16, torch.float16)
RECIPES = ("nvfp4", "nvfp4-2d", "nvfp4-rowscaled", "mxfp4", "mxfp8-e4m3", "fp8-row-e4m3", "fp8-current-e4m3")
SHAPES = ((1, 1, 256), (17, 70, 768), (3, 9, 40), (2, 130, 1024), (2, 3, 0), (0, 4, 256))
"""M, N and K: of tensor cores with tails, one chunk, and chunks of some teams alone; and of the portable kernel."""


def takes(recipe: str, dtype: torch.dtype) -> bool:
    return not recipe.startswith("mx") or dtype == torch.bfloat16


def lattice(recipe: str, dtype: torch.dtype, m: int, n: int, k: int) -> tuple[torch.Tensor, Quantized]:
    """Small integers, and blocks with scales of their own: every sum is a float32 number in any order."""
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    w = torch.randint(-3, 4, (n, k), generator=generator).float()
    w *= torch.exp2(torch.randint(0, 3, (n, -(-k // 16)), generator=generator)).repeat_interleave(16, 1)[:, :k]
    amax = torch.full((n if recipe.endswith("rowscaled") else 1,), 2688.0) if recipe.startswith("nvfp4") else None
    return a, reference.quantize(w, recipe, amax=amax)


def expected(a: torch.Tensor, b: Quantized) -> torch.Tensor:
    """The exact sums, times the scale of a row or of the tensor, rounded to float32 and to the dtype of a."""
    sums = a.double() @ operand(b).T
    assert torch.equal(sums, sums.float().double())
    scales = 1.0 if b.recipe.scale.name != "FP32" else b.scales.view(1, -1)
    return (sums.float() * scales).to(a.dtype)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_the_rounded_exact_sums(recipe: str) -> None:
    for dtype in DTYPES:
        for shape in SHAPES if takes(recipe, dtype) else ():
            a, b = lattice(recipe, dtype, *shape)
            assert_equal(ops.weight_only_gemm(a, b), expected(a, b))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-row-e4m3"])
def test_tensor_cores_on_a_cpu_by_their_model(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_only, "_portable", weight_only._skinny)
    for dtype in DTYPES:
        for shape in ((17, 70, 768), (1, 3, 1280)) if takes(recipe, dtype) else ():
            a, b = lattice(recipe, dtype, *shape)
            assert_equal(weight_only.weight_only_gemm(a, b), expected(a, b))


def every_number(recipe: str) -> Iterator[Quantized]:
    """Every code under every scale code, in the first column of a row each; the other columns are 0."""
    b = reference.quantize(torch.zeros(1, 256), recipe)
    bits, with_scales = b.recipe.element.bits, b.scales.dtype == torch.uint8
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    for scale in range(256) if with_scales else (0,):
        rows, scales = torch.zeros(len(codes), b.codes.shape[1], dtype=torch.uint8), b.scales.repeat(len(codes), 1)
        rows[:, 0] = codes
        if with_scales:
            scales.fill_(scale)
        amax = None if b.amax is None else torch.full((1,), 2688.0)
        yield Quantized(rows, scales, amax, b.recipe, (len(codes), 256))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("recipe", "model"),
    [(recipe, False) for recipe in ("nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-row-e4m3")]
    + [("nvfp4", True), ("mxfp4", True), ("fp8-row-e4m3", True)]
    + [pytest.param("mxfp8-e4m3", True, marks=pytest.mark.long)],
    ids=lambda value: value if isinstance(value, str) else ["portable", "tensor-cores"][value],
)
def test_every_code_under_every_scale(recipe: str, model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond the range of the dtype of a become infinite, and small ones are rounded."""
    if model:
        monkeypatch.setattr(weight_only, "_portable", weight_only._skinny)
    for dtype in DTYPES:
        if not takes(recipe, dtype):
            continue
        a = torch.zeros(1, 256, dtype=dtype)
        a[0, 0] = 1.0
        several = list(every_number(recipe))
        # one call: rows of all scales below each other
        first = several[0]
        codes, scales = torch.cat([q.codes for q in several]), torch.cat([q.scales for q in several])
        b = Quantized(codes, scales, first.amax, first.recipe, (len(codes), 256))
        values = reference.dequantize(b, torch.float32)[:, 0]
        found = weight_only.weight_only_gemm(a, b)[0]
        # The other 255 products of an infinite or NaN scale are NaN.
        special = values.isnan() | reference.dequantize(b, torch.float32)[:, 1].isnan()
        assert found[special].isnan().all()
        assert_equal(found[~special], values[~special].to(dtype) + 0.0)  # a sum of zeros is +0


@ON_EVERY_DEVICE
def test_special_numbers_of_a_reach_every_output_of_their_row() -> None:
    _, b = lattice("nvfp4", torch.bfloat16, 1, 70, 256)
    a = torch.ones(3, 256, dtype=torch.bfloat16)
    a[0, 255], a[1, 7] = torch.nan, torch.inf
    found = ops.weight_only_gemm(a, b)
    assert found[0].isnan().all()
    assert not found[1].isfinite().any()
    assert found[2].isfinite().all()


def test_operands_that_the_kernels_do_not_have() -> None:
    a = torch.zeros(2, 64, dtype=torch.float16)
    for recipe in ("mxfp4", "mxfp8-e5m2", "fp8-block-1x128", "mxfp4-1x16"):
        with pytest.raises(NotImplementedError, match=f"b is Quantized.*{recipe}"):
            weight_only.weight_only_gemm(
                a.bfloat16() if "1x16" in recipe else a, reference.quantize(torch.ones(4, 64), recipe)
            )
    with pytest.raises(ValueError, match=r"a has shape \(2, 32\), not \(2, 64\)"):
        weight_only.weight_only_gemm(a, reference.quantize(torch.ones(4, 32), "nvfp4"))
    with pytest.raises(TypeError, match="a is bfloat16, float16, not float32"):
        weight_only.weight_only_gemm(a.float(), reference.quantize(torch.ones(4, 64), "nvfp4"))
