"""Under `subnormals="flushed"` kernels may flush or keep subnormal numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract, Program
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.quantized import Quantized
from tests.reference.contracts.contracts import CONTRACTS
from tests.reference.contracts.random_kernel import DTYPES, FlushingKernel
from tests.reference.contracts.test_soundness import RECIPES, inputs, shown, traced

TINY = 2.0**-126


@c.contract
def divided(x: c.Matrix, w: c.Row):
    z = c.float32(x)
    y = c.divide(z * c.float32(w), c.amax(z), "reciprocal")
    return c.cast(c.sum([y, z, c.float32(w)]) + c.exp(z * -80.0), x.dtype)


@c.contract
def roots(x: c.Matrix, w: c.Row):
    z = c.float32(x)
    r = c.once(c.rsqrt(c.sum(c.square(z), depth=200)))
    return {"erf": c.cast(c.erf(z) - c.float32(w), "float32"), "scaled": c.cast(z * r, x.dtype)}


OWN = (divided, roots)


def tiny(program: Program, shape: tuple[int, int], seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """The families of all tests, and inputs about the smallest normal number and about its root."""
    yield from inputs(program, shape, seed)
    draw = torch.Generator().manual_seed(seed)
    for power in (-126, -63):
        found = {}
        for argument in program.arguments:
            size = shape if argument.kind == "Matrix" else shape[1:]
            powers = torch.randint(-4, 8, size, generator=draw) + (power if argument.kind == "Matrix" else 0)
            numbers = torch.randn(size, generator=draw).double() * torch.exp2(powers.double())
            numbers[..., ::7] *= 2.0**-power  # ordinary numbers beside them
            found[argument.name] = numbers.to(DTYPES[argument.dtype])
        yield found


def results(program: Program, kernel: FlushingKernel, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a flushing kernel shows; the kernel flushes elements before their quantization, and float32 scales."""
    found = shown(program, kernel)
    for name, number in program.outputs.items():
        step = program.steps[number]
        if step.recipe is not None:
            y = kernel.flushed(kernel.values[step.operands[0]]).float().to(DTYPES[step.dtype])
            q = quantize(y, step.recipe)
            scales = kernel.flushed(q.scales) if q.scales.is_floating_point() else q.scales
            found[name] = replace(q, scales=scales)
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("flavour", ["mixed", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("contract", [*CONTRACTS, *OWN], ids=lambda contract: contract.name)
def test_flushing_kernels_are_right(contract: Contract, flavour: str) -> None:
    for seed, (dtype, recipe) in enumerate(zip(("bfloat16", "float16", "float32") * 3, RECIPES, strict=False)):
        program = replace(traced(contract, dtype, recipe), subnormals="flushed")
        for family, tensors in enumerate(tiny(program, (16, 96), seed)):
            kernel = FlushingKernel(program, tensors, seed, flavour=flavour)
            for name, part in judged(program, tensors, results(program, kernel, tensors)):
                wrong = part.wrong.nonzero()
                assert not len(wrong), (dtype, recipe, family, name, wrong[0].tolist(), len(wrong))


SIGNATURE = Literal["kept", "flushed"]


@c.contract
def gated(x: c.Matrix, w: c.Row, *, subnormals: SIGNATURE = "kept"):
    """x·w·2^60, which is subnormal on the way; the option acts by its name."""
    return c.cast(c.float32(x) * c.float32(w) * 2.0**60, x.dtype)


def flush(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < TINY, x * 0, x)


def witness(rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary numbers with subnormal products in a column of 128."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows, 256, generator=draw), torch.rand(256, generator=draw) + 0.5
    x[:, ::128] = (torch.rand(rows, 2, generator=draw) + 0.5) * 2.0**-66
    w[::128] *= 2.0**-60
    return x.bfloat16(), w.bfloat16()


def kernel(x: torch.Tensor, w: torch.Tensor, *, flushes: bool) -> torch.Tensor:
    y = x.float() * w.float()
    return ((flush(y) if flushes else y) * 2.0**60).to(x.dtype)


def test_the_option_changes_the_output_of_a_witness() -> None:
    """A kernel that flushes passes under "flushed" alone, and the report of "kept" names the option."""
    x, w = witness()
    kept, flushed = (kernel(x, w, flushes=flushes) for flushes in (False, True))
    assert not torch.equal(kept, flushed)
    for result in (kept, flushed, kernel(x.double(), w.double(), flushes=False).bfloat16()):
        narrowgauge.assert_result(gated, result, x, w, subnormals="flushed")
    narrowgauge.assert_result(gated, kept, x, w)
    verdict = narrowgauge.explain(narrowgauge.assert_result, gated, flushed, x, w, diagnose="full")
    (cause,) = (str(each["sentence"]) for each in verdict.explanations if each["exact"])
    assert cause.startswith("subnormal numbers are flushed, which the option subnormals"), cause


def test_a_flushed_zero_has_the_sign_of_its_number() -> None:
    x, w = witness()
    wrong = -kernel(-x, w, flushes=True)  # -0 for 0
    wrong[:, ::128] = torch.where(wrong[:, ::128] == 0, torch.copysign(wrong[:, ::128], -x[:, ::128]), 0)
    assert not narrowgauge.explain(narrowgauge.assert_result, gated, wrong, x, w, subnormals="flushed").passed


def test_sums_are_wider_by_the_flushed_terms() -> None:
    @c.contract
    def summed(x: c.Matrix, *, subnormals: SIGNATURE = "kept"):
        return {"y": c.cast(c.sum(c.float32(x)), "float32")}

    x = torch.full((64, 96), 0.75 * TINY)
    x[:, 0] = TINY
    results = {"kept": x.sum(1), "flushed": x[:, 0], "wrong": x[:, 0] - 3 * 96 * TINY}
    for subnormals, right in (("kept", ["kept"]), ("flushed", ["kept", "flushed"])):
        verdicts = {
            name: narrowgauge.explain(
                narrowgauge.assert_result, summed, {"y": y.unsqueeze(1)}, x, subnormals=subnormals
            ).passed
            for name, y in results.items()
        }
        assert [name for name, passed in verdicts.items() if passed] == right


SOURCE = r"""
#include <cuda_bf16.h>
extern "C" __global__ void gated(const __nv_bfloat16* x, const __nv_bfloat16* w, __nv_bfloat16* y, int K) {
    size_t row = (size_t)blockIdx.x * K;
    for (int k = threadIdx.x; k < K; k += blockDim.x) {
        float product = __bfloat162float(x[row + k]) * __bfloat162float(w[k]);
        y[row + k] = __float2bfloat16(product * 1152921504606846976.0f);  // 2^60
    }
}
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_keeps_on_a_gpu() -> None:
    x, w = (tensor.cuda() for tensor in witness())
    narrowgauge.assert_result(gated, kernel(x, w, flushes=False), x, w)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("flags", [("-ftz=true",), ("--use_fast_math",)], ids=str)
def test_kernels_of_cuda_flush(flags: tuple[str, ...]) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    x, w = (tensor.cuda() for tensor in witness())
    y = torch.empty_like(x)
    pointers = [tensor.data_ptr() for tensor in (x, w, y)]
    gated_kernel = cupy.RawModule(code=SOURCE, options=flags).get_function("gated")
    gated_kernel((x.shape[0],), (256,), (*pointers, cupy.int32(x.shape[1])))
    torch.cuda.synchronize()
    assert torch.equal(y, kernel(x, w, flushes=True))
    narrowgauge.assert_result(gated, y, x, w, subnormals="flushed")
    assert not narrowgauge.explain(narrowgauge.assert_result, gated, y, x, w).passed


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_of_flushed_scales(recipe: str) -> None:
    @c.contract
    def values(x: c.Matrix, recipe: c.Recipe, *, subnormals: SIGNATURE = "kept"):
        q = c.quantize(x, recipe)
        return {"q": q, "y": c.dequantize(q) * 2.0**40}

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(16, 256, generator=draw) * torch.exp2(torch.randint(-130, -90, (16, 1), generator=draw).float())
    q: Quantized = narrowgauge.quantize(x, recipe)
    for y in (narrowgauge.dequantize(q, torch.float32), flush(narrowgauge.dequantize(q, torch.float32))):
        assert narrowgauge.explain(
            narrowgauge.assert_result, values, {"q": q, "y": y * 2.0**40}, x, recipe=recipe, subnormals="flushed"
        ).passed


def test_the_option_has_its_own_values() -> None:
    with pytest.raises(c.ContractError, match="'kept', 'flushed'"):

        @c.contract
        def other(x: c.Matrix, *, subnormals: bool = True):
            return x

    @c.contract
    def product(x: c.Matrix, w: c.Matrix, recipe: c.Recipe, *, subnormals: SIGNATURE = "kept"):
        return c.gemm(c.quantize(x, recipe), c.quantize(w, recipe))

    with pytest.raises(c.ContractError, match="leave subnormals out"):
        product.trace({"x": "bfloat16", "w": "bfloat16"}, {"recipe": "nvfp4"}, {})


def test_a_program_keeps_the_option() -> None:
    dtypes = {"x": "bfloat16", "w": "bfloat16"}
    kept, flushed = (gated.trace(dtypes, {}, {"subnormals": value}) for value in ("kept", "flushed"))
    assert kept.digest != flushed.digest
    assert Program.from_json(flushed.to_json()) == flushed
    assert not kept.flushes
