"""Rule 4: rounding by the kernel's own bits. A right sampler passes, a wrong sampler fails by the test's name."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend, BackendError
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.statistics import rounding_tests
from narrowgauge.harness.checks.statistics.holm import FALSE_ALARM
from narrowgauge.harness.checks.statistics.rounding_choices import UNKNOWN, rounding_choices
from narrowgauge.harness.checks.statistics.rounding_tests import DRAWS
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.stages.quantized import Subject, scaled_elements
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, pack
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.quantized import words_shape
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import rotating

NVFP4 = case_from_labels("quantize", "nvfp4-sr", (96, 128), "fp32", "normal")
MX = case_from_labels("quantize", "mxfp8-e4m3-sr", (64, 96), "fp32", "normal")
FEW = 400_000


def black_box(**doors):
    return Backend.local("black_box", SimpleNamespace(declares={"random": "own"}, **doors))


def stage(record, name="codes"):
    return next(s for s in record.stages if s["stage"] == name)


def drawing(change):
    """A quantize that rounds by `change` of Philox's bytes, uint8 (M, K), and of seed and offset."""

    def quantize(x, recipe, *, random, **options):
        shape = tuple(x.shape)
        width = words_shape(shape)[1] * 4
        own = random_bytes(random, (shape[0], width), slice(0, shape[0]), x.device, find_recipe(recipe).block[1])
        words = change(own.clone(), *random).contiguous().view(torch.int32)
        return reference.quantize(x, recipe, random=words, **options)

    return quantize


def spoiling(change):
    """A quantize with changed codes of the reference, uint8 (M, K), a byte for each element: a new tensor."""

    def quantize(x, recipe, *, random, **options):
        q = reference.quantize(x, recipe, random=random, **options)
        codes = change(elements(q.codes, q.shape[1], q.recipe).clone(), q, x, random)
        return replace(q, codes=pack(codes) if q.recipe.element.bits == 4 else codes)

    return quantize


def odds_of_case(x, q):
    """The odds of x (M, K) under the scales of `q`."""
    scaled = scaled_elements(x, q.scales, q.tensor_scale, q.recipe)
    return rounding_choices(scaled, scaled, q.recipe)


def fresh(own, seed, offset):
    """Bytes of torch's generator, seeded by the caller."""
    return torch.randint(0, 256, own.shape, dtype=torch.uint8)


# Right samplers.


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        NVFP4,
        replace(NVFP4, dtype="bf16", inputs="spread", shape=(96, 130)),
        replace(NVFP4, inputs="e2m1-ties", dtype="bf16"),
        replace(NVFP4, recipe="nvfp4-2d-sr", usage="both", scales="swizzled"),
        replace(NVFP4, recipe="nvfp4-rht-sr", dtype="bf16", usage="columnwise"),
        replace(NVFP4, recipe="nvfp4-2d-rht-sr", dtype="bf16", inputs="spread", usage="both"),
        replace(NVFP4, inputs="nan", dtype="fp16"),
        replace(MX, usage="columnwise"),
        replace(MX, recipe="mxfp6-e3m2-sr", inputs="subnormal", usage="both"),
        replace(MX, recipe="mxfp8-e5m2-sr", inputs="ties", dtype="bf16"),
        replace(MX, recipe="mxfp4-2d-sr", inputs="outliers", dtype="bf16"),
    ],
    ids=lambda case: case.id,
)
def test_a_right_sampler_passes(case, monkeypatch):
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW)
    module = reference if case.inputs == "spread" else native
    doors = {name: getattr(module, name) for name in ("quantize", "quantize_both", "dequantize")}
    record = run_case(case, black_box(**doors))
    assert (record.verdict, record.message) == ("pass", "")
    halves = ("rowwise.", "columnwise.") if "both" in case.flags else ("",)
    for half in halves:
        assert stage(record, f"{half}codes")["rule"] == "statistics"
    assert record.draws > 0
    assert FALSE_ALARM < record.p_value <= 1


def test_a_backend_that_draws_from_torch_repeats(monkeypatch):
    """The generator is seeded before each call, by the arguments of the call."""
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW // 10)
    case = replace(NVFP4, shape=(32, 32))
    found = [run_case(case, black_box(quantize=drawing(fresh))) for _ in range(2)]
    assert [record.verdict for record in found] == ["pass", "pass"]
    assert found[0].output_digest == found[1].output_digest
    assert found[0].p_value == found[1].p_value
    assert run_case(case, black_box(quantize=drawing(fresh)), seed=1).p_value != found[0].p_value


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        case_from_labels("quantize-grouped", "mxfp8-e4m3-sr", (99, 96), "bf16", "normal", ("ragged:3", "columnwise")),
        case_from_labels("quantize-grouped", "nvfp4-sr", (99, 96), "fp32", "normal", ("ragged:3",)),
        case_from_labels("gemm", "nvfp4-sr", (48, 96, 80), "bf16xbf16-bf16", "normal", ("nt",)),
        case_from_labels("gemm-grouped", "nvfp4-sr", (99, 96, 80), "bf16xbf16-bf16", "normal", ("ragged:3",)),
    ],
    ids=lambda case: case.id,
)  # fmt: skip
def test_where_codes_are_made_once_they_are_judged_as_one_draw(case):
    names = ("quantize", "quantize_both", "quantize_grouped", "gemm", "gemm_grouped")
    right = black_box(**{name: getattr(native, name) for name in names})
    record = run_case(case, right)
    assert (record.verdict, record.message) == ("pass", "")
    codes = [s for s in record.stages if s["stage"].endswith("codes")]
    assert {s["rule"] for s in codes} == {"statistics"}
    assert 0 < record.draws < sum(s["compared"] for s in codes)


# Wrong samplers.


def inclusive(codes, q, x, random):
    """Up for byte ≤ ⌊256·f⌋ in place of <: a number of the grid goes up once in 256."""
    odds = odds_of_case(x, q)
    own = random_bytes(random, q.shape, slice(0, q.shape[0]), x.device, q.recipe.block[1])
    bits = odds.up_bytes.clamp(min=0)
    bits[(odds.least != odds.greatest) & (odds.up_bytes == UNKNOWN)] = 255
    sign = codes & q.recipe.element.sign_code
    return (odds.below + (own <= bits)).clamp(max=q.recipe.element.max_code).to(torch.uint8) | sign


def nearest(codes, q, x, random):
    plain = reference.quantize(x, replace(q.recipe, rounding="nearest-even"))
    return elements(plain.codes, q.shape[1], q.recipe)


def one_moves(codes, q, x, random):
    odds = odds_of_case(x, q)
    row, column = (odds.least == odds.greatest).logical_and(odds.below < 7).nonzero()[0]
    codes[row, column] += 1
    return codes


def two_steps(codes, q, x, random):
    codes[1, 2] = (codes[1, 2] & 8) | (int(odds_of_case(x, q).below[1, 2]) + 2) % 8
    return codes


def repeat_lanes(own, seed, offset):
    return own.view(-1, 2)[:, :1].expand(-1, 2).reshape(own.shape)


def repeat_words(own, seed, offset):
    """Four threads later the same word."""
    return own.view(-1, 2, 4)[:, :1].expand(-1, 2, 4).reshape(own.shape)


def repeat_blocks(own, seed, offset):
    return own.view(len(own), -1, 2, 16)[:, :, :1].expand(-1, -1, 2, 16).reshape(own.shape)


def repeat_rows(own, seed, offset):
    return own[::2].repeat_interleave(2, 0)


def philox_of(own, *random):
    return random_bytes(random, tuple(own.shape), slice(0, len(own)), own.device)


def regular(own, seed, offset):
    """Elements take the bytes in turn: a low-discrepancy sequence."""
    start = philox_of(own, seed, 0).int()
    return ((start + offset // 2 * 159 % 256) % 256).to(torch.uint8)


WRONG = {
    "<= for <": (spoiling(inclusive), "class 0/256"),
    "down where the sign is minus": (
        spoiling(lambda codes, q, x, _: torch.where(x < 0, odds_of_case(x, q).below | 8, codes)),
        "bias of negative values",
    ),
    "lanes share": (drawing(repeat_lanes), "columns 1 apart"),
    "threads share": (drawing(repeat_words), "columns 4 apart"),
    "blocks share": (drawing(repeat_blocks), "blocks 1 apart"),
    "rows share": (drawing(repeat_rows), "rows 1 apart"),
    "offset not advanced": (drawing(lambda own, seed, _: philox_of(own, seed, 0)), "calls"),
    "offset by halves alone": (drawing(lambda own, seed, n: philox_of(own, seed, n % 2)), "calls"),
    "seed ignored": (drawing(lambda own, _, offset: philox_of(own, 0, offset)), "seeds"),
    "nearest": (spoiling(nearest), "calls"),
    "regular": (drawing(regular), "dispersion"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_sampler_fails_by_the_test_that_it_fails(wrong, monkeypatch):
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW)
    door, test = WRONG[wrong]
    record = run_case(NVFP4, black_box(quantize=door))
    assert (record.verdict, record.stage) == ("fail", "codes")
    sentence = stage(record)["sentence"]
    assert test in sentence, sentence
    assert "p <= 1e-" in sentence or "p = 0" in sentence
    assert record.p_value < FALSE_ALARM
    if "share" in wrong or "seed" in wrong:
        assert sentence.startswith(f"{test}: roundings correlate by +")
        assert f"{test}: " in record.message
    assert record.mismatches == 0  # no single code is wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "test"),
    [
        (lambda own, *_: own & 0xFE, "bias where 8 of the bits count"),
        (lambda own, _, offset: (own.int() + offset // 2 % 2).clamp(max=255).byte(), "bias"),
    ],
    ids=["seven bits", "up once in 512 too often"],
)
def test_the_draws_of_a_case_see_a_bias_of_1_in_512(change, test):
    assert DRAWS == math.ceil(8.7**2 * 0.25 * 512**2) == 4_960_420
    record = run_case(NVFP4, black_box(quantize=drawing(change)))
    assert record.verdict == "fail"
    assert record.message.startswith(f"codes: {test}: ")
    assert record.draws >= DRAWS


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "inputs", "why"),
    [
        (inclusive, "lattice", "the first at row 2, column 43; each has a single right code"),
        (
            one_moves,
            "lattice",
            "1 of 12 288 codes differ, each by 1 step, at row 0, column 1; each has a single right code",
        ),
        (two_steps, "normal", "1 of 12 288 codes differ, each by 1 step, at row 1, column 2; no random bits give them"),
    ],
)
def test_a_code_that_no_bits_give_is_one_too_many(change, inputs, why):
    record = run_case(replace(NVFP4, dtype="bf16", inputs=inputs), black_box(quantize=spoiling(change)))
    assert (record.verdict, record.stage, record.p_value) == ("fail", "codes", None)
    assert why in record.message
    assert record.findings[0]["sentence"] in record.message
    assert record.mismatches == stage(record)["mismatches"] >= 1


# Further judged properties.


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_only_codes_may_differ_between_two_calls(part, monkeypatch):
    """A generator with a state of its own draws anew in the second run of a case."""
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW // 10)
    calls = []

    def quantize(x, recipe, *, random, **options):
        calls.append(random)
        q = reference.quantize(x, recipe, random=(random[0] + len(calls), random[1]), **options)
        if part == "scales" and len(calls) == 2:
            q.scales[0, 0] += 1
        return q

    record = run_case(replace(NVFP4, shape=(32, 32)), black_box(quantize=quantize))
    assert (record.verdict, record.stage) == (("pass", "") if part == "codes" else ("fail", "repeat"))


def test_codes_that_are_never_written_are_found():
    """No check compares the codes with the second run: poison is no neighbour of every value."""

    def quantize(x, recipe, *, random, **options):
        q = reference.quantize(x, recipe, random=random, **options)
        codes = torch.empty_like(q.codes)
        codes[:-1] = q.codes[:-1]
        return replace(q, codes=codes)

    record = run_case(replace(NVFP4, shape=(16, 32)), black_box(quantize=quantize))
    assert (record.verdict, record.stage) == ("fail", "codes")
    assert ", all in row 15; no random bits give them" in record.message


def test_a_backend_that_makes_its_own_bits_takes_no_words():
    doors = {"quantize": reference.quantize, "quantize_both": reference.quantize_both}
    for usage in ("rowwise", "both"):
        record = run_case(replace(NVFP4, usage=usage, random="words"), black_box(**doors))
        words = "backend black_box makes its own random bits; it takes no words"
        assert (record.verdict, record.message) == ("unsupported", words)
    plain = SimpleNamespace(quantize=reference.quantize)
    assert run_case(replace(NVFP4, random="words"), Backend.local("plain", plain)).verdict == "pass"


def test_the_declaration_is_what_makes_other_bits_right(monkeypatch):
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW // 10)
    door = drawing(lambda own, seed, offset: philox_of(own, seed + 1, offset))
    case = replace(NVFP4, shape=(32, 32))
    assert run_case(case, black_box(quantize=door)).verdict == "pass"
    record = run_case(case, Backend.local("plain", SimpleNamespace(quantize=door)))
    assert (record.verdict, record.stage, record.draws, record.p_value) == ("fail", "codes", None, None)
    with pytest.raises(BackendError, match=r"'random' to be 'mine'.*\{'random': 'own'\}"):
        Backend.local("plain", SimpleNamespace(quantize=door, declares={"random": "mine"}))


def test_a_rotation_of_free_order_omits_unknown_elements(monkeypatch):
    """If the rotated value has an interval, so have its codes, and only known values are counted."""
    monkeypatch.setattr(rounding_tests, "DRAWS", FEW)
    case = replace(NVFP4, recipe="nvfp4-rht-sr", dtype="bf16", inputs="spread", shape=(128, 128))
    kernel = rotating()["quantize"]  # adds in an order that differs from the reference
    a_call = {}
    for declared, door in (("random", kernel), ("transform", reference.quantize)):
        calls = []

        def counted(x, recipe, *, door=door, calls=calls, **options):
            calls.append(options["random"])
            return door(x, recipe, **options)

        declares = {"random": "own", "transform": "butterfly"} if declared == "transform" else {"random": "own"}
        record = run_case(case, Backend.local(declared, SimpleNamespace(quantize=counted, declares=declares)))
        assert (record.verdict, record.message) == ("pass", "")
        assert stage(record, "scales")["rule"] == ("exact" if declared == "transform" else "boundary")
        a_call[declared] = record.draws / (len(calls) - 2)  # two runs are compared, and a call has a second seed
    x = make_inputs(case).x
    subject = Subject(x, find_recipe(case.recipe), free=True)
    straddling = int((subject.interval.lower != subject.interval.upper).sum())
    assert 0 < a_call["transform"] - a_call["random"] <= straddling

    wrong = run_case(case, black_box(quantize=lambda x, recipe, **options: drop_bits(kernel(x, recipe, **options))))
    assert (wrong.verdict, wrong.stage) == ("fail", "codes")


def drop_bits(q):
    """Every magnitude that is not even goes down: half of the grid is never given."""
    return replace(q, codes=q.codes & 0xEE)
