"""GEMMs of every recipe and quantized outputs: the reference passes, a single defect fails by name."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.gemm.judge import judge_gemm
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.quantized import gemm_quantized
from tests.harness.product_cases import (
    BLOCKS,
    PAIRS,
    REFERENCE,
    blocks_of,
    fails,
    gemm_case,
    in_blocks,
    in_order,
    last_block_first,
    passes,
    quantized_case,
    run,
    stages,
    wrong,
)
from tests.harness.sample_backends import backend

# GEMM of every recipe.


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("recipe", "layout"), list(zip(PAIRS, cycle(["tn", "nn", "nt"]), strict=False)))
def test_products_of_every_recipe_pass(recipe, layout):
    for flags, dtype in (((), "fp32"), (("accumulate", "bias"), "bf16")):
        record = passes(gemm_case(recipe, layout, *flags, dtype=f"bf16xbf16-{dtype}"))
        assert stages(record)["output"]["compared"] == 48 * 32
        assert {"x.scales", "x.codes", "w.scales", "w.codes"} <= set(stages(record))


@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "mxfp6-e2m3", "mxfp8-e5m2-sr"])
def test_operands_made_in_place_reach_the_product_as_stored(recipe):
    seen = []

    def gemm(a, b, **options):
        seen.append((a.transposed, tuple(a.codes.shape), tuple(a.scales.shape), b.transposed, tuple(b.codes.shape)))
        return reference.gemm(a, b, **options)

    passes(gemm_case(recipe, "nn"), gemm=gemm)
    assert set(seen) == {(False, (48, 160), (48, 5), True, (160, 32))}
    seen.clear()
    passes(gemm_case(recipe, "nt"), gemm=gemm)
    assert set(seen) == {(True, (160, 48), (5, 48), True, (160, 32))}


def test_a_product_that_ignores_a_transpose():
    def gemm(a, b, **options):
        scales = a.scales.view(a.scales.shape[::-1])
        return reference.gemm(replace(a, scales=scales, transposed=False), b, **options)

    record = fails(gemm_case("mxfp8-e4m3", "nt", shape=(64, 64, 32)), "output", gemm=gemm)
    assert " of 2 048 outputs differ" in record.message


def test_fp8_blocks_that_accumulate_before_the_cast():
    """Blocks of FP8 are cast, then accumulated; every remaining recipe accumulates, then casts."""

    def gemm(a, b, *, out_dtype, c=None, bias=None):
        return (reference.gemm(a, b, out_dtype=torch.float32, bias=bias) + c.float()).to(out_dtype)

    block = "fp8-block-1x128-e4m3-pow2"
    # Sums without rounding in any order, and with more digits than bfloat16 has.
    options = {"shape": (48, 64, 32), "dtype": "bf16xbf16-bf16", "inputs": "lattice"}
    case = gemm_case(block, "tn", "accumulate", **options)
    record = fails(case, "output", gemm=gemm)
    assert " of them where no order of summation can round" in record.message
    passes(gemm_case("mxfp8-e4m3", "tn", "accumulate", **options), gemm=gemm)


def test_a_delayed_scale_is_given_to_the_quantizer_and_judged():
    given = []

    def quantize(x, recipe, *, scale):
        given.append(scale.clone())
        return reference.quantize(x, recipe, scale=scale)

    case = gemm_case("fp8-delayed-e4m3", "tn")
    passes(case, quantize=quantize)
    scales = make_inputs(case).under("scale.")
    assert [float(scale) for scale in given] == [float(scales["x"]), float(scales["w"])]
    ignoring = run(case, quantize=lambda x, recipe, *, scale: reference.quantize(x, recipe, scale=2 * scale))
    assert ignoring.verdict == "fail"
    assert ignoring.stage.startswith("x.")
    assert "output" not in wrong(ignoring)


# A declared order.


def cancelling_in_order():
    """Inputs whose large products cancel in turn: the declared order rounds nowhere."""
    x = torch.zeros(2, 64)
    x[:, 0:32:2], x[:, 1:32:2] = 448.0, -448.0
    x[:, :32] *= 2.0**20
    x[:, 32:] = torch.tensor([1.0, 0.5]).repeat(16) * 2.0**-4
    x[1, :32] = 0
    return Inputs({"x": x.to(torch.bfloat16), "w": torch.ones(3, 64, dtype=torch.bfloat16)})


def test_another_order_than_the_declared_one_is_found():
    case = gemm_case("mxfp8-e4m3", "tn", shape=(2, 64, 3))

    def judged(gemm, declares):
        outcome = judge_gemm(case, cancelling_in_order(), backend(**{**REFERENCE, "gemm": gemm}, declares=declares))
        return {stage.stage: stage for stage in outcome.stages}["output"]

    def halves(a, b, *, out_dtype):
        # Even columns, then odd columns: cancelling products are added far apart.
        products = torch.cat(blocks_of(a, b), 2)
        return (in_order(products[..., 0::2]) + in_order(products[..., 1::2])).to(out_dtype)

    assert judged(in_blocks, BLOCKS).passed
    assert judged(halves, {}).passed
    found = judged(halves, BLOCKS)
    assert found.mismatches == 3
    assert found.sentence.endswith(", all in row 0; 3 of them that the declared order cannot give")
    assert found.finding["elements"][0]["rule"] == "declared order"
    assert found.figures["ordered_share"] == 0.5


def judged_output(x, gemm, declares):
    """The stage `output` of x (M, K) times ones."""
    case = gemm_case("mxfp8-e4m3", "tn", shape=(*x.shape, 3))
    inputs = Inputs({"x": x.to(torch.bfloat16), "w": torch.ones(3, x.shape[1], dtype=torch.bfloat16)})
    outcome = judge_gemm(case, inputs, backend(**{**REFERENCE, "gemm": gemm}, declares=declares))
    return {stage.stage: stage for stage in outcome.stages}["output"]


@pytest.mark.parametrize("order", [{}, BLOCKS])
def test_an_accumulator_that_truncates_is_right_where_it_says_so(order):
    # 2^24 and 64 blocks of 1.75, less than the last bit of the sum.
    x = torch.zeros(2, 32 * 65)
    x[:, ::32], x[:, 0] = 1.75, 2.0**24

    def truncating(a, b, *, out_dtype):
        return torch.full((2, 3), 2.0**24)

    assert judged_output(x, truncating, {**order, "accumulator": "truncating"}).passed
    assert judged_output(x, truncating, order).mismatches == 6


def test_flushed_sums_are_right_if_the_backend_declares_them():
    x = torch.full((2, 64), 2.0**-132)

    def flushing(a, b, **options):
        out = reference.gemm(a, b, **options)
        return torch.where(out.abs() < 2.0**-126, 0.0, out)

    x[:, 1:] = 0
    assert judged_output(x, flushing, {"subnormals": "flushed"}).passed
    assert judged_output(x, reference.gemm, {"subnormals": "flushed"}).passed
    assert judged_output(x, flushing, {}).mismatches == 6


@pytest.mark.parametrize("order", ["sequential", "blocks", "tree", "split-2"])
def test_what_a_declared_order_does_not_lose_has_to_be_there(order):
    # 2^40 - 2^40 + 1 in separate blocks: only an undeclared order adds the 1 to 2^40, and loses it.
    x = torch.zeros(2, 128)
    x[:, 0], x[:, 32], x[:, 64] = 2.0**40, -(2.0**40), 1.0
    assert judged_output(x, reference.gemm, {"gemm": order}).passed
    assert judged_output(x, last_block_first, {}).passed
    assert judged_output(x, last_block_first, {"gemm": order}).mismatches == 6


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("order", "others"),
    [
        ("aligned-13-32", ["aligned-14-32", "split-2-aligned-13-32"]),
        ("split-2-aligned-13-32", ["aligned-13-32", "aligned-13-32-64", "split-4-aligned-13-32"]),
    ],
)
def test_bits_of_a_tensor_core_are_judged_if_it_is_declared(order, others):
    case = gemm_case("fp8-current-e4m3", "tn", shape=(16, 256, 8))

    def core(a, b, *, out_dtype):
        return bounds(a, b, out_dtype=out_dtype, order=order).expected

    assert passes(case, {"gemm": order}, gemm=core).ordered_share == 1
    assert run(case, gemm=core).verdict == "fail"
    assert run(case, {"gemm": order}).verdict == "fail"
    for other in others:
        assert run(case, {"gemm": other}, gemm=core).verdict == "fail"


def test_each_product_is_judged_in_the_order_that_is_said_of_it():
    """Small products by an order, large products by a second order, like kernels with several paths."""
    small, large = (gemm_case("fp8-current-e4m3", "tn", shape=(rows, 256, 8)) for rows in (16, 32))

    def gemm_order(a, b):
        return "aligned-13-32" if a.shape[0] > 16 else "blocks"

    def core(a, b, *, out_dtype):
        return bounds(a, b, out_dtype=out_dtype, order=gemm_order(a, b)).expected

    for case in (small, large):
        assert passes(case, gemm=core, gemm_order=gemm_order).verdict == "pass"
        assert run(case, gemm=core, gemm_order=lambda a, b: "aligned-14-32").verdict == "fail"
    assert run(large, {"gemm": "blocks"}, gemm=core).verdict == "fail"


def test_a_truncating_sum_of_one_product_is_in_its_record():
    """`gemm_order` declares a truncating accumulator for one of two products."""
    small, large = (gemm_case("fp8-current-e4m3", "tn", shape=(rows, 256, 8)) for rows in (16, 32))

    def gemm_order(a, b):
        return "truncating" if a.shape[0] > 16 else None

    kernels = {"gemm": reference.gemm, "gemm_order": gemm_order}
    assert run(large, **kernels).declares == "gemm_order: truncating"
    assert run(large, {"subnormals": "flushed"}, **kernels).declares == "subnormals: flushed, gemm_order: truncating"
    assert run(large, {"accumulator": "truncating"}, **kernels).declares == "accumulator: truncating"
    assert run(small, **kernels).declares == ""


def test_a_declaration_does_not_excuse_what_no_order_gives():
    case = gemm_case("mxfp8-e4m3", "tn", inputs="normal")

    def gemm(a, b, **options):
        out = reference.gemm(a, b, **options)
        out[3, 5] *= 1.5
        return out

    record = fails(case, "output", BLOCKS, gemm=gemm)
    assert "1 of 1 536 outputs differ" in record.message
    assert record.findings[0]["elements"][0]["rule"] in ("declared order", "exact")


# Quantized outputs.


def unrounded(a, b, recipe, *, out_dtype, scale=None, **options):
    """Quantizes the accumulated sums, and leaves out the rounding to the output's dtype."""
    return gemm_quantized(a, b, recipe, out_dtype=torch.float32, scale=scale, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("out_recipe", ["mxfp8-e4m3", "fp8-delayed-e4m3", "fp8-block-1x128-e4m3-pow2"])
def test_a_fused_kernel_that_does_not_round_to_the_output_dtype(out_recipe):
    case = quantized_case("mxfp8-e4m3", out_recipe, dtype="bf16xbf16-bf16", shape=(96, 64, 96))
    record = run(case, gemm_quantized=unrounded)
    assert record.verdict == "fail"
    assert set(wrong(record)) <= {"fused.amax", "fused.scales", "fused.codes"}
    assert "fused.codes" in wrong(record)
    assert " of 9 216 codes differ, each by 1 step" in stages(record)["fused.codes"]["sentence"]


def test_a_wrong_code_or_scale_of_a_fusion_is_one_finding():
    def code(*arguments, **options):
        q = gemm_quantized(*arguments, **options)
        q.codes[3, 5] ^= 1
        return q

    case = quantized_case("mxfp8-e4m3", "mxfp8-e4m3")
    record = fails(case, "fused.codes", gemm_quantized=code)
    assert record.message == "fused.codes: 1 of 1 536 codes differ, each by 1 step, at row 3, column 5"

    def larger(a, b, recipe, *, out_dtype, **options):
        """A scale twice as large, and the codes under this scale."""
        out = reference.gemm(a, b, out_dtype=out_dtype, **options)
        q, doubled = reference.quantize(out, recipe), reference.quantize(2 * out, recipe)
        q.scales[4, 0] = doubled.scales[4, 0]
        x = out[4:5, :32].float() / 2.0 ** (int(q.scales[4, 0]) - 127)
        q.codes[4, :32] = x.to(torch.float8_e4m3fn).view(torch.uint8)
        return q

    record = fails(case, "fused.scales", gemm_quantized=larger)
    assert record.message == "fused.scales: 1 of 48 block scales differ, each by 1 step, at row 4, column 0"


@pytest.mark.long
def test_what_is_wrong_without_fusion_is_not_blamed_on_it():
    def gemm(a, b, **options):
        out = reference.gemm(a, b, **options)
        out[3, 5] = 2 * out[3, 5] + 1
        return out

    def quantize(x, recipe, **options):
        q = reference.quantize(x, recipe, **options)
        if tuple(x.shape) == (48, 32):
            q.codes[3, 5] ^= 1
        return q

    case = quantized_case("mxfp8-e4m3", "mxfp8-e4m3")
    fails(case, "output", gemm=gemm, gemm_quantized=lambda *a, **o: fused_by(gemm, reference.quantize, *a, **o))
    fails(case, "output.codes", quantize=quantize,
          gemm_quantized=lambda *a, **o: fused_by(reference.gemm, quantize, *a, **o))  # fmt: skip


def fused_by(gemm, quantize, a, b, recipe, *, out_dtype, **options):
    return quantize(gemm(a, b, out_dtype=out_dtype, **options), recipe)
