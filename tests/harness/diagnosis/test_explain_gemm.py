"""Wrong GEMMs, each by a single defect: the diagnosis names the defect, and no cause for unknown defects."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.cause_names import is_cause
from narrowgauge.harness.diagnosis.gemm.accumulators import NARROW
from narrowgauge.harness.diagnosis.gemm.epilogues import ORDERS
from narrowgauge.harness.diagnosis.gemm.explain_gemm import explain_gemm
from narrowgauge.harness.diagnosis.gemm.gemm_parts import changed_parts, split_products
from narrowgauge.harness.diagnosis.gemm.operands import operand_deviations
from narrowgauge.harness.diagnosis.search.history import SEARCHES, SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.gemm.product import add_output
from narrowgauge.harness.operations.pack_scales.deviations import SWIZZLE_READS
from narrowgauge.harness.operations.stages.deviation import rows_of
from narrowgauge.harness.operations.stages.outcome import Outcome, Product
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.gemm import alpha, exact_product
from narrowgauge.reference.gemm.operands import element_values, operand, scale_values
from narrowgauge.reference.gemm.promotion import BlockScaledOperands
from narrowgauge.reference.quantize.layout import swap_nibbles, swizzle, unswizzle
from narrowgauge.spec.quantized import GroupedQuantized
from narrowgauge.spec.scale_layouts import TILED
from tests.harness.sample_backends import backend

F32, BF16 = torch.float32, torch.bfloat16
RECIPES = [
    "nvfp4",
    "nvfp4-rowscaled",
    "mxfp8-e4m3",
    "mxfp4+mxfp6-e2m3",
    "fp8-block-1x128+fp8-block-128x128",
    "fp8-current",
]


def explained(gemm, recipe="nvfp4", *flags, shape=(24, 272, 40), dtype="bf16", inputs="spread", declares=None):
    """The record of a case with this `gemm` and the reference's remaining methods."""
    case = case_from_labels("gemm", recipe, shape, f"bf16xbf16-{dtype}", inputs, ("tn", *flags))
    doors = {"quantize": reference.quantize, "gemm": gemm, "declares": declares or {}}
    record = run_case(case, backend(**doors))
    assert record.verdict == "fail", record.message
    return record


def causes(record):
    assert all(e["exact"] and e["stage"] == "output" for e in record.explanations if not _place(e))
    return [e["cause"] for e in record.explanations if not _place(e)]


def _place(explanation):
    return explanation["cause"].startswith(("place:", "only:", "when:"))


def on_operands(change, which="ab"):
    """The reference's gemm with changed operands: `which` names the changed operands."""

    def gemm(a, b, **options):
        a, b = (change(q) if name in which else q for name, q in zip("ab", (a, b), strict=True))
        return reference.gemm(a, b, **options)

    return gemm


def wrong_offsets(cause, q):
    (row,) = [row for row in rows_of(SWIZZLE_READS, q.scales) if row.cause == cause]
    return row.result(q.scales)


def read_from(cause):
    """Scales read from wrong offsets of the swizzled layout."""

    def change(q):
        offsets = wrong_offsets(cause, q)
        return q if offsets is None else replace(q, scales=swizzle(q.scales).flatten()[offsets])

    return change


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cause", ["swizzle-columns-not-padded", "swizzle-rows-modulo:128"])
def test_swizzled_scales_read_from_wrong_offsets(cause):
    record = explained(on_operands(read_from(cause), "a"), shape=(144, 176, 24))
    assert causes(record) == [cause]
    assert " of a " in record.explanations[0]["sentence"]


def test_swizzled_scales_read_from_unknown_offsets_have_no_cause():
    def change(q):
        offsets = wrong_offsets("swizzle-rows-modulo:128", q)
        return q if offsets is None else replace(q, scales=swizzle(q.scales).flatten()[offsets + 16])

    assert not any("swizzle" in cause for cause in causes(explained(on_operands(change, "a"), shape=(144, 176, 24))))


@pytest.mark.parametrize(("largest", "known"), [(65504.0, True), (65000.0, False)])
def test_outputs_that_overflow_too_early(largest, known):
    def gemm(a, b, **options):
        y = reference.gemm(a, b, **{**options, "out_dtype": F32})
        return torch.where(y.abs() > largest, y * torch.inf, y).half()

    record = explained(gemm, "mxfp4", shape=(21, 128, 28), dtype="fp16", inputs="half-edges")
    assert ("overflow-to-infinity" in [e["cause"] for e in record.explanations if e["exact"]]) == known


def rolled(q):
    return replace(q, scales=q.scales.roll(-1, 1))


def ignored(q):
    one = {"FP32": 1.0, "E4M3": 0x38, "E8M0": 127}[q.recipe.scale.name]
    return replace(q, scales=torch.full_like(q.scales, one))


def last_block(q):
    """Without the last block of K."""
    codes, block = q.codes.clone(), q.recipe.block[1]
    first = (q.shape[1] - 1) // block * block
    codes[:, first // 2 if q.recipe.element.bits == 4 else first :] = 0
    return replace(q, codes=codes)


def swapped(q):
    return replace(q, codes=swap_nibbles(q.codes))


def as_swizzled(q):
    scales = swizzle(q.scales).flatten()[: q.scales.numel()].view(q.scales.shape)
    return replace(q, scales=scales)


def as_linear(q):
    return replace(q, scales=unswizzle(TILED["128x4"].pad(q.scales), tuple(q.scales.shape)))


BLOCKS = [rule for rule in RECIPES if "current" not in rule]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("recipe", BLOCKS)
@pytest.mark.parametrize("which", ["a", "b", "ab"])
def test_scales_of_another_block(recipe, which):
    record = explained(on_operands(rolled, which), recipe)
    assert causes(record) == ["scale-of-next-block"]
    words = {"a": "blocks of a take", "b": "blocks of b take", "ab": "blocks of both operands take"}[which]
    assert record.explanations[0]["sentence"].startswith(words)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("recipe", BLOCKS)
def test_scales_ignored_and_a_block_dropped(recipe):
    assert "scales-ignored" in causes(explained(on_operands(ignored), recipe))
    assert "last-block-dropped" in causes(explained(on_operands(last_block), recipe))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("recipe", "count"), [("nvfp4", 4), ("mxfp8-e4m3", 2), ("fp8-block-1x128", 2)])
def test_scales_of_the_first_step(recipe, count):
    def first(q):
        return replace(q, scales=q.scales[:, torch.arange(q.scales.shape[1]) % count])

    record = explained(on_operands(first), recipe, shape=(24, 400, 40))
    assert causes(record) == ["scale-of-first-step"]
    assert f"every {count} blocks of both operands" in record.explanations[0]["sentence"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("inputs", ["lattice", "spread"])
def test_scales_of_a_block_that_multiply_the_sum(inputs):
    def gemm(a, b, *, out_dtype, c=None, bias=None):
        blocks = BlockScaledOperands(a, b)
        y = torch.zeros(a.shape[0], b.shape[0])
        for columns, number in blocks:
            s_a, s_b = blocks.scales(number)
            y = (y + blocks.block_sum(columns).to_float32()) * (s_a * s_b)
        return y.to(out_dtype)

    record = explained(gemm, "fp8-block-1x128-e4m3-fp32", shape=(24, 400, 40), dtype="fp32", inputs=inputs)
    assert causes(record) == ["scales-of-sum"]


def test_scales_read_in_another_layout():
    assert causes(explained(on_operands(as_swizzled, "b"), shape=(24, 512, 256))) == ["scales-read-linear"]
    assert causes(explained(on_operands(as_linear, "b"), shape=(24, 512, 256))) == ["scales-read-swizzled"]


def test_nibbles():
    record = explained(on_operands(swapped, "b"))
    assert causes(record) == ["nibbles-swapped"]
    assert record.explanations[0]["sentence"] == "the two elements of a byte of one operand change places"


def test_scales_of_one_operand():
    def gemm(a, b, **options):
        return reference.gemm(a, replace(b, scales=a.scales[torch.arange(len(b.scales)) % len(a.scales)]), **options)

    record = explained(gemm)
    assert causes(record) == ["scales-of-one-operand"]
    assert record.explanations[0]["sentence"] == "scales of a are used for b too"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("recipe", "first", "end", "others"),
    [
        ("nvfp4", 0, 16, "columns 16 to 271"),
        ("mxfp8-e4m3", 128, 272, "columns 0 to 127"),
        ("fp8-block-1x128+fp8-block-128x128", 32, 48, "columns 0 to 31 and 48 to 271"),
        ("fp8-current", 200, 272, "columns 0 to 199"),
    ],
)
def test_a_part_of_k_that_is_left_out(recipe, first, end, others):
    def part(q):
        per_byte = 2 if q.recipe.element.bits == 4 else 1
        codes = q.codes.clone()
        codes[:, first // per_byte : end // per_byte] = 0
        return replace(q, codes=codes)

    record = explained(on_operands(part), recipe, "accumulate", "bias", inputs="normal")
    assert causes(record) == [f"columns-of-k-dropped:{first} to {end - 1}"]
    assert record.explanations[0]["sentence"].endswith(f"equal the product over {others}")


def test_a_part_of_k_of_one_row_is_not_named():
    def row(q):
        codes = q.codes.clone()
        codes[3, 8:40] = 0
        return replace(q, codes=codes)

    record = explained(on_operands(row, "a"), "mxfp8-e4m3", inputs="normal")
    assert not [e for e in record.explanations if e["cause"].startswith("columns-of-k")]


def test_columns_behind_the_last_tile():
    def gemm(a, b, **options):
        codes = b.codes.clone()
        codes[:, 128:] = 0  # 272 = 2·128 + 16
        return reference.gemm(a, replace(b, codes=codes), **options)

    found = causes(explained(gemm))
    assert set(found) == {"last-block-dropped", "tail-of-k-dropped:32", "tail-of-k-dropped:64", "tail-of-k-dropped:128"}


# ---- epilogues -------------------------------------------------------------------------------------------------------


def plain_gemm(factor=None, finish=None):
    """A gemm with a changed α or epilogue: `finish(acc, α, c, bias, out_dtype)`."""

    def gemm(a, b, *, out_dtype, c=None, bias=None):
        scale = alpha(a, b) if factor is None else factor(a, b)
        acc = exact_product(a, b).to_float32()
        if finish is not None:
            return finish(acc, scale, c, bias, out_dtype)
        y = scale * acc
        for addend in (c, bias):
            y = y if addend is None else y + addend.float()
        return y.to(out_dtype)

    return gemm


def constant(a, b):
    return torch.tensor(a.recipe.max_product * b.recipe.max_product)


def test_alpha_of_narrow_amaxes():
    case = case_from_labels("gemm", "nvfp4", (24, 272, 40), "fp32xfp32-fp32", "normal", ("tn",))
    narrow = on_operands(lambda q: replace(q, amax=q.amax.bfloat16().float()))
    record = run_case(case, backend(quantize=reference.quantize, gemm=narrow))
    assert "alpha-amax-through-bf16" in causes(record)


def test_forms_of_alpha():
    d = {"a": lambda a, b: a.amax * b.amax, "c": constant}
    wrong = {
        "(b*a)*(1/d)": lambda a, b: d["a"](a, b) * (1 / constant(a, b)),
        "(a/d)*b": lambda a, b: a.amax / constant(a, b) * b.amax,
        "(b/d)*a": lambda a, b: b.amax / constant(a, b) * a.amax,
        "(a*(1/d))*b": lambda a, b: a.amax * (1 / constant(a, b)) * b.amax,
        "(b*(1/d))*a": lambda a, b: b.amax * (1 / constant(a, b)) * a.amax,
        "a_dec*b_dec": lambda a, b: (a.amax / 2688) * (b.amax / 2688),
        "1/(a_enc*b_enc)": lambda a, b: 1 / (a.tensor_scale * b.tensor_scale),
        "float64": lambda a, b: (a.amax.double() * b.amax.double() / constant(a, b).double()).float(),
    }
    assert set(wrong) | {"(a*b)/d"} == set(ORDERS)
    a, b = operands(columns=64)
    generator = torch.Generator().manual_seed(2)
    for name, factor in wrong.items():
        while torch.equal(factor(a, b).view(1, 1), alpha(a, b)):
            a, b = (
                replace(q, amax=amax, tensor_scale=2688 / amax)
                for q, amax in zip((a, b), torch.rand(2, 1, generator=generator) + 1, strict=True)
            )
        output = factor(a, b) * exact_product(a, b).to_float32()
        assert f"alpha-order:{name}" in [
            e.cause for e in explain_gemm(*judged(a, b, output), SearchHistory(), WorkLimit())
        ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("cause", "factor"),
    [
        ("alpha-missing", lambda a, b: torch.ones(1, 1)),
        ("alpha-amax-twice", lambda a, b: alpha(a, a)),
        ("alpha-amax-twice", lambda a, b: alpha(b, b)),
        ("alpha-twice", lambda a, b: alpha(a, b) ** 2),
        ("alpha-inverted", lambda a, b: 1 / alpha(a, b)),
    ],
)
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-current"])
def test_a_wrong_factor(recipe, cause, factor):
    assert causes(explained(plain_gemm(factor), recipe, dtype="fp32", inputs="normal")) == [cause]


def narrowed(y, dtype):
    """Truncated."""
    if dtype == F32:
        return y
    return (y.view(torch.int32) & ~0xFFFF).view(F32).to(dtype)


def total(acc, scale, c, bias):
    y = scale * acc
    for addend in (c, bias):
        y = y if addend is None else y + addend.float()
    return y


ENDS = {
    "alpha-after-cast": lambda acc, s, c, bias, dtype: total(acc.to(dtype).float(), s, c, bias).to(dtype),
    "alpha-times-c": lambda acc, s, c, bias, dtype: (s * (acc + c.float() + bias.float())).to(dtype),
    "alpha-times-c ": lambda acc, s, c, bias, dtype: (s * (acc + c.float()) + bias.float()).to(dtype),
    "alpha-times-bias": lambda acc, s, c, bias, dtype: (s * (acc + bias.float()) + c.float()).to(dtype),
    "alpha-times-bias ": lambda acc, s, c, bias, dtype: (s * acc + s * bias.float() + c.float()).to(dtype),
    "output-truncated": lambda acc, s, c, bias, dtype: narrowed(total(acc, s, c, bias), dtype),
    "output-through-fp16": lambda acc, s, c, bias, dtype: total(acc, s, c, bias).half().to(dtype),
    "c-ignored": lambda acc, s, c, bias, dtype: total(acc, s, None, bias).to(dtype),
    "bias-ignored": lambda acc, s, c, bias, dtype: total(acc, s, c, None).to(dtype),
    "c-and-bias-ignored": lambda acc, s, c, bias, dtype: total(acc, s, None, None).to(dtype),
    "cast-before-c": lambda acc, s, c, bias, dtype: ((s * acc).to(dtype).float() + c.float() + bias.float()).to(dtype),
    "bias-after-cast": lambda acc, s, c, bias, dtype: (total(acc, s, c, None).to(dtype) + bias.float()).to(dtype),
    "c-twice": lambda acc, s, c, bias, dtype: (total(acc, s, c, bias) + c.float()).to(dtype),
    "bias-by-rows": lambda acc, s, c, bias, dtype: (s * acc + c.float() + bias[: len(acc)].float()[:, None]).to(dtype),
    "bias-tail-dropped": lambda acc, s, c, bias, dtype: total(
        acc, s, c, bias.masked_fill(torch.arange(len(bias)) >= 32, 0)
    ).to(dtype),
    "c-transposed": lambda acc, s, c, bias, dtype: total(acc, s, c.T.reshape(c.shape), bias).to(dtype),
}  # fmt: skip


@pytest.mark.sampled(18)
@pytest.mark.parametrize("cause", ENDS)
def test_a_wrong_epilogue(cause):
    # If α is small, an addend times α is as good as left out.
    inputs = "amax-2p50-first" if "alpha-times" in cause else "normal"
    record = explained(plain_gemm(finish=ENDS[cause]), "nvfp4", "accumulate", "bias", inputs=inputs)
    found = [e["cause"] for e in record.explanations if e["exact"]]
    assert cause.strip() in found
    assert len(found) <= 2  # a c that is added twice may be cast in between


def test_steps_of_float32():
    def bias_first(acc, s, c, bias, dtype):
        return (s * acc + bias) + c

    found = causes(explained(plain_gemm(finish=bias_first), "nvfp4", "accumulate", "bias", dtype="fp32"))
    assert found == ["bias-before-c"]

    def addends_first(acc, s, c, bias, dtype):
        return s * acc + (c + bias)

    record = explained(plain_gemm(finish=addends_first), "nvfp4", "accumulate", "bias", dtype="fp32")
    assert causes(record) == ["addends-first"]

    def rounded(acc, s, c, bias, dtype):
        return s * acc + c.bfloat16().float()

    found = causes(explained(plain_gemm(finish=rounded), "nvfp4", "accumulate", dtype="fp32"))
    assert found == ["c-rounded-first"]

    def through(acc, s, c, bias, dtype):
        return (s * acc).bfloat16().float()

    assert causes(explained(plain_gemm(finish=through), "mxfp8-e4m3", dtype="fp32")) == ["output-through-bf16"]


def test_an_overflow_that_saturates():
    def saturated(acc, s, c, bias, dtype):
        return (s * acc).clamp(-65504.0, 65504.0).half()

    record = explained(plain_gemm(finish=saturated), "mxfp8-e4m3", dtype="fp16", inputs="normal-1e3")
    assert "output-saturated" in causes(record)  # truncation saturates too, and all of these overflow


def test_casts_of_promoted_sums():
    recipe = "fp8-block-1x128+fp8-block-128x128"

    def gemm(a, b, *, out_dtype, c=None, bias=None):
        return (reference.gemm(a, b, out_dtype=F32, bias=bias) + c.float()).to(out_dtype)

    assert causes(explained(gemm, recipe, "accumulate", "bias", inputs="normal")) == ["c-before-cast"]


def test_a_transposed_output():
    def gemm(a, b, **options):
        return reference.gemm(a, b, **options).T.contiguous()

    assert causes(explained(gemm, shape=(32, 64, 32))) == ["output-transposed"]


# ---- accumulators ----------------------------------------------------------------------------------------------------

ROUND = {
    "accumulator-bf16": lambda y: y.bfloat16().float(),
    "accumulator-fp16": lambda y: y.half().float(),
    "accumulator-14-bits": lambda y: (y.view(torch.int32) & ~1023).view(F32),
}


def narrow(rounded, step):
    """A gemm with a rounded accumulator, `step` columns at a time."""

    def gemm(a, b, *, out_dtype, c=None, bias=None):
        left, right = (operand(q) for q in (a, b))
        y = torch.zeros(a.shape[0], b.shape[0])
        for start in range(0, a.shape[1], step):
            part = slice(start, start + step)
            y = rounded(y + (left[:, part] @ right[:, part].T).float())
        return (alpha(a, b) * y).to(out_dtype)

    return gemm


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cause", ROUND)
@pytest.mark.parametrize(("recipe", "step"), [("nvfp4", 16), ("nvfp4", 1), ("mxfp8-e4m3", 32), ("nvfp4", 64)])
def test_narrow_accumulators(cause, recipe, step):
    assert list(ROUND) == [row.cause for row in NARROW]
    record = explained(narrow(ROUND[cause], step), recipe, shape=(12, 256, 20), dtype="fp32", inputs="normal-1e-3")
    assert causes(record) == [cause]
    after = "each product" if step == 1 else f"every {step} columns of K"
    assert record.explanations[0]["sentence"].endswith(f"after {after}")


@pytest.mark.parametrize("inside", [True, False])
def test_narrow_accumulators_of_promoted_sums(inside):
    def gemm(a, b, *, out_dtype, c=None, bias=None):
        blocks, rounded = BlockScaledOperands(a, b), ROUND["accumulator-14-bits"]
        y = torch.zeros(a.shape[0], b.shape[0])
        for columns, number in blocks:
            s_a, s_b = blocks.scales(number)
            left, right = blocks.left[:, columns].float(), blocks.right[:, columns].float()
            p = torch.zeros_like(y)
            for k in range(0, left.shape[1], 32):
                p = p + left[:, k : k + 32] @ right[:, k : k + 32].T
                p = rounded(p) if inside else p
            y = y + p * s_a * s_b
            y = y if inside else rounded(y)
        return y.to(out_dtype)

    recipe = "fp8-block-1x128"
    assert causes(explained(gemm, recipe, shape=(12, 256, 20), dtype="fp32", inputs="normal")) == [
        "accumulator-14-bits"
    ]


# ---- sections --------------------------------------------------------------------------------------------------------


def grouped(pick):
    """gemm_grouped of the matrices of `pick(b, number)`, and biases."""

    def gemm_grouped(a: GroupedQuantized, b, *, out_dtype, c=None, bias=None):
        out, start = [], 0
        for number, section in enumerate(a.sections()):
            rows = slice(start, start + section.shape[0])
            start = rows.stop
            matrix, its_bias = pick(b, bias, number)
            out.append(
                reference.gemm(section, matrix, out_dtype=out_dtype, bias=its_bias, c=None if c is None else c[rows])
            )
        return torch.cat(out)

    return gemm_grouped


PICKS = {
    "takes the matrix of the first one": lambda b, bias, g: (b[0], bias[g]),
    "takes the matrix and the bias of the next one": lambda b, bias, g: (b[min(g + 1, 2)], bias[min(g + 1, 2)]),
    "takes the scales of b of the previous one": lambda b, bias, g: (
        replace(b[g], scales=b[max(g - 1, 0)].scales),
        bias[g],
    ),
    "takes the factor of b of the first one": lambda b, bias, g: (replace(b[g], amax=b[0].amax), bias[g]),
    "takes the bias of the previous one": lambda b, bias, g: (b[g], bias[max(g - 1, 0)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", PICKS)
def test_what_is_of_another_section(words):
    case = case_from_labels("gemm-grouped", "nvfp4", (72, 96, 24), "bf16xbf16-bf16", "normal", ("even:3", "bias"))
    doors = {name: getattr(reference, name) for name in ("quantize", "quantize_grouped")}
    record = run_case(case, backend(**doors, gemm_grouped=grouped(PICKS[words])))
    assert causes(record) == ["section-of-neighbour"]
    assert record.explanations[0]["sentence"] == f"every section {words}"


def test_a_table_of_sections_that_is_too_short():
    case = case_from_labels("gemm-grouped", "nvfp4", (90, 32, 8), "bf16xbf16-bf16", "normal", ("even:9",))
    doors = {name: getattr(reference, name) for name in ("quantize", "quantize_grouped")}
    record = run_case(case, backend(**doors, gemm_grouped=grouped(lambda b, bias, g: (b[g % 8], None))))
    assert causes(record)[0] == "section-of-neighbour"
    assert record.explanations[0]["sentence"] == "section n takes the matrix of section n modulo 8"


# ---- the search itself -----------------------------------------------------------------------------------------------


def judged(a, b, output, order=None):
    outcome, limits = Outcome(), bounds(a, b, out_dtype=output.dtype, order=order)
    add_output(outcome, output, limits)
    outcome.products.append(Product(a, b, None, None, output, limits, order))
    return outcome, outcome.stages[0]


def operands(recipe="nvfp4", rows=24, columns=256):
    generator = torch.Generator().manual_seed(3)
    one, other = (recipe.split("+") * 2)[:2]
    x = torch.randn(rows, columns, generator=generator) * torch.randint(1, 9, (rows, 1), generator=generator)
    w = torch.randn(rows + 8, columns, generator=generator)
    return reference.quantize(x.bfloat16(), one), reference.quantize(w.bfloat16(), other)


def spread(generator, rows, columns):
    """Random numbers with a separate magnitude for each block of 16."""
    exponents = torch.randint(-9, 9, (rows, columns // 16), generator=generator).repeat_interleave(16, 1)
    return torch.randn(rows, columns, generator=generator) * 2.0**exponents


@pytest.mark.sampled(8)
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_nothing_explains_has_no_explanation(recipe):
    a, b = operands(recipe)
    output = reference.gemm(a, b, out_dtype=BF16)
    output[3, 5] = 3 * output[3, 5] + 1
    assert explain_gemm(*judged(a, b, output), SearchHistory(), WorkLimit()) == []


def test_searches_that_find_nothing_come_to_an_end():
    history = SearchHistory()
    a, b = operands()
    right = reference.gemm(a, b, out_dtype=BF16)
    odd = right.clone()
    odd[3, 5] = 3 * odd[3, 5] + 1
    for _ in range(SEARCHES):
        assert explain_gemm(*judged(a, b, odd), history, WorkLimit()) == []
    missing = exact_product(a, b).to_float32().bfloat16()
    dropped = reference.gemm(a, last_block(b), out_dtype=BF16)
    assert explain_gemm(*judged(a, b, missing), history, WorkLimit()) == []  # no more searches
    history.remember(["last-block-dropped"])
    assert [e.cause for e in explain_gemm(*judged(a, b, dropped), history, WorkLimit())] == ["last-block-dropped"]
    assert explain_gemm(*judged(a, b, missing), history, WorkLimit()) == []


def test_sums_in_another_order_than_the_declared_one():
    generator = torch.Generator().manual_seed(5)
    a = b = reference.quantize(spread(generator, 8, 2048).bfloat16(), "nvfp4")
    limits = bounds(a, b, out_dtype=F32)
    output = torch.where(limits.exact, limits.expected, (limits.centre - limits.budget / 2).float())
    outcome, wrong = judged(a, b, output, "blocks")
    assert not wrong.passed
    found = explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())
    # Any order of decoded operands gives these sums too: a possible cause behind the other.
    assert [(e.cause, e.exact) for e in found] == [("order-not-declared", False), ("operands-decoded-first", False)]


def test_every_deviation_changes_the_output_of_some_product():
    """Every deviation with a `change` of operands, on operands with the elements that the deviation changes."""
    generator = torch.Generator().manual_seed(7)
    made = {}
    for recipe in ("nvfp4", "mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32"):
        a, b = (reference.quantize(spread(generator, 24, 336).bfloat16(), recipe) for _ in range(2))
        made[recipe] = (a, b, reference.gemm(a, b, out_dtype=F32))
    tall = reference.quantize(spread(generator, 136, 176).bfloat16(), "nvfp4")
    made["tall"] = (tall, tall, reference.gemm(tall, tall, out_dtype=F32))
    for recipe, codes, scales in (
        ("fp8-current-e4m3", 0x7F, None),
        ("mxfp8-e4m3", 0x38, 0xFF),
        ("mxfp8-e4m3", 0x38, 0),
    ):
        q = reference.quantize(torch.ones(2, 64).bfloat16(), recipe)
        q = replace(
            q,
            codes=torch.full_like(q.codes, codes),
            scales=q.scales if scales is None else torch.full_like(q.scales, scales),
        )
        one = replace(q, codes=torch.full_like(q.codes, 0x38), scales=torch.ones_like(q.scales))
        for number, pair in enumerate(((q, q), (q, one), (one, q))):
            made[f"{recipe} {scales} {number}"] = (*pair, reference.gemm(*pair, out_dtype=F32))
    parts = [split_products([Product(*each[:2], None, None, each[2], None, None)], None)[0] for each in made.values()]
    sums = [each.sums().lower.nan_to_num(0.5) for each in parts]

    def changes(deviation, each, before):
        changed = changed_parts(deviation, each)
        return changed is not None and not torch.equal(changed.sums().lower.nan_to_num(0.5), before)

    for deviation in operand_deviations(parts[0]):
        _, _, rows = deviation.cause.partition("modulo:")
        if not rows or int(rows) <= 128:
            found = (changes(deviation, each, before) for each, before in zip(parts, sums, strict=True))
            assert any(found), deviation.sentence


# ---- operands decoded first, gains, partial sums ---------------------------------------------------------------------


def decoded_first(dtype, last=None):
    """gemm of operands decoded to `dtype`, without the columns from `last` on."""

    def gemm(a, b, *, out_dtype, c=None, bias=None):
        x, w = (reference.dequantize(q, dtype).float() for q in (a, b))
        y = x[:, :last] @ w[:, :last].T
        for addend in (c, bias):
            y = y if addend is None else y + addend.float()
        return y.to(out_dtype)

    return gemm


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [("nvfp4", BF16), ("nvfp4", F32), ("nvfp4", torch.float16), ("nvfp4-rowscaled", BF16), ("fp8-current", BF16)],
)
def test_operands_decoded_first(recipe, dtype):
    """The undeclared kernel is named with the line to declare, and the declared kernel passes."""
    record = explained(decoded_first(dtype), recipe, "bias", dtype="fp32", inputs="normal")
    (first,) = [e for e in record.explanations if not _place(e)]
    # Operands in float32 change a product by less than its interval.
    assert (first["cause"], first["exact"]) == ("operands-decoded-first", dtype != F32)
    name = {BF16: "decoded-bfloat16", F32: "decoded-float32"}.get(dtype)
    sentence = record.explanations[0]["sentence"]
    if name is None:
        assert "decoded to float16" in sentence
        assert "declares" not in sentence
        return
    assert f'declares {{"operands": "{name}"}}' in sentence
    case = case_from_labels("gemm", recipe, (24, 272, 40), "bf16xbf16-fp32", "normal", ("tn", "bias"))
    doors = {"quantize": reference.quantize, "declares": {"operands": name}}
    assert run_case(case, backend(gemm=decoded_first(dtype), **doors)).verdict == "pass"
    wrong = explained(
        decoded_first(dtype, 256), recipe, "bias", dtype="fp32", inputs="normal", declares=doors["declares"]
    )
    assert set(causes(wrong)) & {"last-block-dropped", "tail-of-k-dropped:64"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("steps", "dtype"), [(1, "bf16"), (1, "fp32"), (8, "fp32")])
def test_a_small_mistake_in_wider_intervals_has_no_exact_cause(steps, dtype):
    """A single output, some steps from the interval of the declared order."""

    def gemm(a, b, *, out_dtype, **options):
        limits = bounds(a, b, out_dtype=out_dtype)
        y = limits.expected.clone()
        integer = {F32: torch.int32, BF16: torch.int16}[out_dtype]
        y[3, 5] = (limits.upper[3, 5].view(integer) + steps * (1 if y[3, 5] > 0 else -1)).view(out_dtype)
        return y

    for recipe in ("nvfp4", "mxfp8-e4m3", "mxfp6-e2m3"):
        assert not any(e["exact"] for e in explained(gemm, recipe, dtype=dtype, inputs="normal").explanations)


def test_declared_operands_that_are_not_decoded():
    record = explained(reference.gemm, dtype="fp32", inputs="normal", declares={"operands": "decoded-bfloat16"})
    assert causes(record)[0] == "operands-not-decoded"


GAINS = [*product(((1.004, "1.004"), (0.5, "0.5"), (1 - 2.0**-9, "0.998")), ("nvfp4", "mxfp8-e4m3"), ("fp32", "bf16"))]


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("gain", "recipe", "dtype"), GAINS)
def test_gains(gain, recipe, dtype):
    factor, words = gain

    def outputs(a, b, *, out_dtype, **options):
        return (reference.gemm(a, b, out_dtype=F32, **options) * factor).to(out_dtype)

    def products(a, b, *, out_dtype, bias):
        return (reference.gemm(a, b, out_dtype=F32) * factor + bias.float()).to(out_dtype)

    for gemm, noun in ((outputs, "outputs"), (products, "products")):
        record = explained(gemm, recipe, "bias", dtype=dtype, inputs="normal")
        assert causes(record) == ["gain"]
        assert record.explanations[0]["sentence"].startswith(f"{noun} are {words}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("first", "second"), [(1.004, 1.002), (1.5, 1.25)])
def test_two_gains_are_no_gain(first, second):
    def gemm(a, b, *, out_dtype, **options):
        y = reference.gemm(a, b, out_dtype=F32, **options)
        y[: len(y) // 2] *= first
        y[len(y) // 2 :] *= second
        return y.to(out_dtype)

    assert causes(explained(gemm, dtype="fp32", inputs="normal")) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dtype", "name"), [(BF16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("width", [96, 64])
@pytest.mark.parametrize("scaled", [True, False])
def test_partial_sums(dtype, name, width, scaled):
    def gemm(a, b, *, out_dtype, c=None, bias=None):
        left, right = (operand(q).float() for q in (a, b))
        factor = alpha(a, b)
        y = torch.zeros(len(left), len(right))
        for start in range(0, left.shape[1], width):
            part = left[:, start : start + width] @ right[:, start : start + width].T
            y = y + (factor * part if scaled else part).to(dtype).float()
        return (y if scaled else factor * y).to(out_dtype)

    record = explained(gemm, dtype="fp32", inputs="normal-1e-3")
    assert causes(record) == [f"partial-sums-{name}"]
    sentence = record.explanations[0]["sentence"]
    assert f"sums of {width} columns of K" in sentence
    assert ("times α" in sentence) == scaled


def test_a_deviation_that_gives_most_of_the_wrong_outputs():
    """c is left out in 9 of 10 rows and added twice in the tenth: no exact cause, and the share is stated."""

    def gemm(a, b, *, out_dtype, c):
        y = reference.gemm(a, b, out_dtype=out_dtype)
        y[::10] = reference.gemm(a, b, out_dtype=out_dtype, c=-c)[::10]
        return y

    record = explained(gemm, "nvfp4", "accumulate", shape=(40, 272, 40), inputs="normal")
    (found,) = [e for e in record.explanations if not _place(e)]
    assert found["cause"] == "c-ignored"
    assert not found["exact"]
    assert "explains 89 % of the wrong outputs" in found["sentence"]


@pytest.mark.parametrize(("recipe", "codes", "scales"), [("fp8-current", 0x7F, None), ("mxfp8-e4m3", None, 0xFF)])
def test_nan_read_as_number(recipe, codes, scales):
    """Code 0x7F of E4M3 as 480, and scale 0xFF of E8M0 as 2^128."""
    ones = torch.ones(4, 64).bfloat16() * (1 + torch.arange(4).view(4, 1) % 2)
    a, b = (reference.quantize(ones, recipe) for _ in "ab")
    if codes is not None:
        a.codes[1, 3], a.codes[2, 60] = codes, codes | 0x80
    else:
        a.scales[1, 0] = scales
        b.scales.sub_(100)
    values = element_values(a)
    values = torch.where(values.isnan(), torch.where(a.codes > 0x7F, -480.0, 480.0), values)
    if scales is not None:
        values *= scale_values(a).nan_to_num(2.0**128).repeat_interleave(32, 1)
    output = (alpha(a, b).double() * (values @ operand(b).T)).float()
    outcome, wrong = judged(a, b, output)
    assert not wrong.passed
    found = explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())
    assert "nan-read-as-number" in [e.cause for e in found]


@pytest.mark.parametrize("flushed", [False, True])
def test_scales_that_are_multiplied_first(flushed):
    """The product of two scales is 0 below 2^-149. Flushing below 2^-126 is a different cause."""

    def gemm(a, b, *, out_dtype, **_):
        y = torch.zeros(a.shape[0], b.shape[0])
        for block, columns in enumerate(torch.arange(a.shape[1]).split(32)):
            scale = (scale_values(a)[:, block, None] * scale_values(b)[None, :, block]).float()
            scale = scale.masked_fill(scale < 2.0**-126, 0) if flushed else scale
            y += (element_values(a)[:, columns] @ element_values(b)[:, columns].T).float() * scale
        return y.to(out_dtype)

    record = explained(gemm, "mxfp4", shape=(72, 144, 40), dtype="fp32", inputs="codes")
    assert ("scales-multiplied-first" in [e["cause"] for e in record.explanations]) != flushed


def test_flushed_subnormal_outputs():
    """bfloat16 outputs below 2^-126 are 0, and float32 numbers below 2^-126."""

    def gemm(a, b, *, out_dtype, **options):
        y = reference.gemm(a, b, out_dtype=out_dtype, **options)
        return torch.where(y.float().abs() < torch.finfo(out_dtype).smallest_normal, 0.0, y.float()).to(out_dtype)

    generator = torch.Generator().manual_seed(7)
    a, b = (
        reference.quantize((torch.randn(24, 64, generator=generator) * 2.0**-63).bfloat16(), "mxfp8-e4m3") for _ in "ab"
    )
    for dtype, cause in ((BF16, "subnormals-flushed"), (torch.float16, "output-subnormals-flushed")):
        if dtype == torch.float16:
            a = replace(a, scales=a.scales + 110)
        outcome, wrong = judged(a, b, gemm(a, b, out_dtype=dtype))
        assert not wrong.passed
        assert cause in [e.cause for e in explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())]


def test_zeros_of_the_wrong_sign_have_no_cause():
    """No deviation that leaves zeros gives these signs; decoded operands could, and nothing proves them."""
    a, b = operands()
    tiny = replace(a, amax=a.amax * 2.0**-60)
    output = -reference.gemm(tiny, b, out_dtype=torch.float16)
    assert not bool(output.any())
    outcome, wrong = judged(tiny, b, output)
    assert not wrong.passed
    (found,) = explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())
    assert (found.cause, found.exact, "declares" in found.sentence) == ("operands-decoded-first", False, False)


def test_a_subnormal_alpha_that_is_flushed():
    a, b = (replace(q, amax=q.amax * 2.0**-61) for q in operands())
    right = reference.gemm(a, b, out_dtype=F32)
    for output, cause in ((right * 0, "alpha-flushed"), (torch.zeros_like(right), "outputs-zero")):
        outcome, wrong = judged(a, b, output)
        assert not wrong.passed
        found = [each.cause for each in explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())]
        assert found[0] == cause
        assert ("alpha-flushed" in found) == (cause == "alpha-flushed"), "α leaves the sign of a sum"


@pytest.mark.parametrize(("recipe", "flags"), [("nvfp4", ()), ("mxfp8-e4m3", ("bias",)), ("mxfp8-e4m3", ())])
def test_outputs_of_zero_are_named_first(recipe, flags):
    """Nothing is said of addends that the product does not have, or of an α that MX does not have."""
    record = explained(
        lambda a, b, *, out_dtype, **_: torch.zeros(len(a.codes), len(b.codes), dtype=out_dtype), recipe, *flags
    )
    assert causes(record) == ["outputs-zero"]
    assert record.explanations[0]["sentence"] == "all outputs are 0"


def test_a_cast_before_c_of_mx_has_no_alpha():
    def gemm(a, b, *, out_dtype, c):
        return (reference.gemm(a, b, out_dtype=out_dtype).float() + c.float()).to(out_dtype)

    record = explained(gemm, "mxfp8-e4m3", "accumulate", dtype="bf16", inputs="normal")
    assert causes(record)[0] == "cast-before-c"
    assert not any(entry["cause"].startswith("alpha") for entry in record.explanations)


def test_a_few_wrong_outputs_do_not_ask_for_a_weaker_rule():
    """Operands that are decoded first: eight outputs are no evidence, and more outputs are."""
    few, more = (explained(decoded_first(F32), "nvfp4", "bias", shape=shape, dtype="fp32", inputs="normal")
                 for shape in ((2, 272, 4), (8, 272, 8)))  # fmt: skip
    assert not any("declares" in entry["sentence"] for entry in few.explanations)
    assert any("declares" in entry["sentence"] for entry in more.explanations)


def aligned_case(recipe, true, declared, shape=(8, 768, 16), dtype=F32):
    """The explanations of a GEMM with the order `true` and the declaration of a second order."""
    generator = torch.Generator().manual_seed(11)
    rows, columns, others = shape
    a, b = (reference.quantize(torch.randn(n, columns, generator=generator), recipe) for n in (rows, others))
    output = bounds(a, b, out_dtype=dtype, order=true).expected
    outcome, wrong = judged(a, b, output, declared)
    assert not wrong.passed
    return explain_gemm(outcome, wrong, SearchHistory(), WorkLimit())


@pytest.mark.parametrize(
    ("recipe", "true", "declared"),
    [
        ("fp8-current-e4m3", "split-2-aligned-13-32", "aligned-13-32-128"),
        ("fp8-current-e4m3", "aligned-13-32", "split-3-aligned-13-32-128"),
        ("fp8-current-e4m3", "aligned-13-32-128", "aligned-13-32"),
        ("fp8-current-e4m3", "split-5-aligned-13-32", "aligned-13-32"),
        ("mxfp8-e4m3", "split-2-decoded-aligned-13-16", "decoded-aligned-13-16"),
        ("fp8-block-1x128-e4m3-fp32", "split-2-aligned-13-32", "aligned-13-32"),
    ],
)
def test_the_true_order_of_a_tensor_core_is_named(recipe, true, declared):
    found = aligned_case(recipe, true, declared)
    named = {e.cause: e.sentence for e in found}
    assert f'{{"gemm": "{true}"}}' in named[f"order:{true}"]
    assert all(is_cause(e.cause) and e.exact for e in found)
    assert len(found) == 1 or all(name.endswith("-128") or "-6-" in name for name in named)
