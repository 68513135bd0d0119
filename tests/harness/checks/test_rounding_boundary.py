"""Rule 3: a right order of summation is never refused, anything else is, and excuses are counted and bounded."""

import math
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.rotation_interval import rotated_interval
from narrowgauge.harness.checks.rounding_boundary import Sources, boundary_codes, boundary_floats, excuse_bound
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend, in_turn, rotating

RHT = find_recipe("nvfp4-rht")
TRANSFORM = case_from_labels("transform", "nvfp4-rht", (64, 128), "bf16", "normal")
ROTATED = case_from_labels("quantize", "nvfp4-rht", (64, 128), "bf16", "normal")


def of_any_order(values: torch.Tensor) -> torch.Tensor:
    """Added up in an order that differs between calls, and is the same in both runs of a case."""
    order = torch.randperm(values.shape[-1], generator=torch.Generator().manual_seed(of_any_order.seed))
    return in_turn(values[..., order])


def stage(record, name):
    return next(entry for entry in record.stages if entry["stage"] == name)


# Right kernels.


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """Elements 0 and 16 of every 32, 2^14 times larger, are the same: they cancel in a rotation's last 16 sums.

    So the order of summation decides the last bits of whole blocks, whose scales are not 0.
    """
    y = x.clone()
    y[:, 0::32] *= 2.0**14
    y[:, 16::32] = y[:, 0::32]
    return y


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["nvfp4-rht32", "nvfp4-2d-rht32", "nvfp4-rht32-sr", "nvfp4-2d-rht32-sr"])
def test_scales_and_codes_that_the_order_decides_are_excused(monkeypatch, name):
    monkeypatch.setattr(
        "narrowgauge.harness.operations.registry.make_inputs",
        lambda case, **_: replace(g := make_inputs(case), tensors=g.tensors | {"x": cancelling(g.x)}),
    )
    case = replace(ROTATED, recipe=name, shape=(256, 512))
    of_any_order.seed = 0
    record = run_case(case, backend(**rotating(of_any_order)))
    assert (record.verdict, record.message) == ("pass", "")
    assert stage(record, "codes")["excused"] > 20
    if "2d" not in name:  # a tile of 16 rows has a single amax
        assert stage(record, "scales")["excused"] > 0
    assert 1e-4 < record.excused_share < 0.1
    record = run_case(case, backend(**rotating(), declares={"transform": "butterfly"}))
    assert (record.verdict, record.excused_share) == ("fail", None)


def test_the_declared_order_is_held_to_its_bytes():
    case = replace(TRANSFORM, inputs="spread", shape=(256, 256))
    free = run_case(case, backend(**rotating()))
    declared = run_case(case, backend(**rotating(), declares={"transform": "butterfly"}))
    assert (free.verdict, declared.verdict, declared.stage) == ("pass", "fail", "output")
    assert free.excused_share > 0
    assert declared.excused_share is None
    assert stage(declared, "output")["rule"] == "exact"
    assert stage(declared, "output")["mismatches"] == stage(free, "output")["excused"]
    for door in (reference.quantize, reference.transform):
        right = backend(**{door.__name__: door}, declares={"transform": "butterfly"})
        labels = (door.__name__, "nvfp4-rht", (256, 256), "bf16", "spread")
        record = run_case(case_from_labels(*labels), right)
        assert (record.verdict, record.excused_share) == ("pass", None)


# Wrong kernels.


def rounding_twice(values: torch.Tensor) -> torch.Tensor:
    """Halves rounded to bfloat16 before their addition."""
    half = values.shape[-1] // 2
    return in_turn(values[..., :half]).bfloat16().float() + in_turn(values[..., half:]).bfloat16().float()


def in_bfloat16(values: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(values.shape[:-1]).bfloat16()
    for value in values.unbind(-1):
        total = total + value.bfloat16()
    return total


WRONG = {
    "no sign mask": rotating(signs=0),
    "another sign mask": rotating(signs=0xD7E9),
    "the mask from its other end": rotating(signs=int(f"{0xD7E8:016b}"[::-1], 2)),
    "no quarter": rotating(lambda values: in_turn(values * 4)),
    "an eighth": rotating(lambda values: in_turn(values / 2)),
    "two roundings": rotating(rounding_twice),
    "bfloat16 sums": rotating(in_bfloat16),
    "truncated at the end": rotating(lambda values: (in_turn(values).view(torch.int32) & -0x10000).view(torch.float32)),
    "Hadamard's rows reversed": rotating(lambda values: in_turn(values).flip(-1)),
    "groups of eight": rotating(lambda values: in_turn(values[..., :8])),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["normal", "tiles", "spread"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rotation_is_caught(wrong, family):
    record = run_case(replace(TRANSFORM, inputs=family), backend(**WRONG[wrong]))
    assert (record.verdict, record.stage) == ("fail", "output")
    assert record.message.endswith("; no order of summation gives them")
    assert record.findings[0]["rule"] == "boundary"
    element = record.findings[0]["elements"][0]
    assert {"lower", "upper", "expected", "actual", "input_bits", "column_in_group"} <= element.keys()


@pytest.mark.parametrize("family", ["normal", "spread", "outliers", "subnormal"])
def test_one_step_outside_is_refused_and_the_ends_are_not(family):
    x = make_inputs(replace(TRANSFORM, inputs=family)).x
    interval = rotated_interval(x, RHT)
    ends = (interval.lower, interval.upper)
    expected = reference.transform(x, RHT)

    def judged(actual):
        return boundary_floats(
            "output", actual, expected, ends, Sources(x, 1, 16), noun="elements", describe=lambda row, column: {}
        )  # fmt: skip

    def moved(end, steps):
        # Away from zero for the sign of the steps; in the order of the bits, so that every neighbour is a step off.
        order = torch.where(end.view(torch.int16) < 0, -0x8000 - end.view(torch.int16).int(), end.view(torch.int16))
        order = order.int() + steps
        return torch.where(order < 0, -0x8000 - order, order).to(torch.int16).view(torch.bfloat16)

    below, above = judged(moved(interval.lower, -1)), judged(moved(interval.upper, 1))
    nonzero = int((interval.lower != 0).sum()), int((interval.upper != 0).sum())
    assert (below.mismatches >= nonzero[0], above.mismatches >= nonzero[1]) == (True, True)
    for result in (below, above):
        assert result.max_ulp == 1
        assert "no order of summation gives them" in result.sentence
    assert (
        judged(interval.lower).mismatches == 0 or "that the order of summation can change" in judged(ends[0]).sentence
    )
    assert judged(expected).passed


def floats(actual, low, high, expected=None):
    values = [torch.tensor([[v]]) for v in (actual, low if expected is None else expected, low, high)]
    return boundary_floats(
        "output", values[0], values[1], (values[2], values[3]), Sources(torch.ones(1, 16), 1, 16), noun="elements",
        describe=lambda row, column: {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("actual", "low", "high", "right"),
    [
        (0.0, -0.0, 0.0, True), (-0.0, -0.0, 0.0, True), (-0.0, -0.0, 1.0, True), (0.0, -1.0, -0.0, False),
        (-0.0, 0.0, 1.0, False), (0.0, 0.0, 1.0, True), (torch.nan, torch.nan, torch.nan, True),
        (1.0, torch.nan, torch.nan, False), (torch.nan, 1.0, 2.0, False), (torch.inf, torch.inf, torch.inf, True),
        (torch.inf, 1.0, 2.0, False), (-torch.inf, torch.inf, torch.inf, False), (1.5, 1.0, 2.0, True),
    ],
)  # fmt: skip
def test_zeros_infinities_and_nan(actual, low, high, right):
    assert floats(actual, low, high).passed == right


@pytest.mark.parametrize(("low", "high"), [(a, b) for a in range(16) for b in range(16)])
def test_every_code_between_every_two_ends(low, high):
    """In the order -6 … -0.5, -0, +0, 0.5 … 6."""
    order = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
    actual = torch.arange(16, dtype=torch.uint8).view(1, 16)
    ends = (torch.full_like(actual, low), torch.full_like(actual, high))
    result = boundary_codes(
        "codes", actual, actual, ends, E2M1, Sources(torch.ones(1, 16), 1, 16), noun="codes",
        describe=lambda row, column: {"column": column},
    )  # fmt: skip
    inside = [order.index(low) <= order.index(code) <= order.index(high) for code in range(16)]
    assert result.mismatches == 16 - sum(inside)
    if not all(inside):
        assert result.finding["elements"][0]["column"] == inside.index(False)


def test_an_amax_that_is_no_bfloat16_number_is_refused():
    door = rotating()["quantize"]

    def finer(x, recipe):
        q = door(x, recipe)
        return replace(q, amax=q.amax * (1 + 2.0**-12), tensor_scale=None)

    record = run_case(replace(ROTATED, inputs="spread"), backend(quantize=finer))
    assert (record.verdict, record.stage) == ("fail", "amax")


# Excuses.


def test_the_bound_of_excuses_is_hoeffding_s():
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    straddles = torch.zeros(400, 16, dtype=torch.bool)
    straddles[:, 3] = True
    differ = straddles.clone()
    differ[300:] = False
    count, log_p, total = excuse_bound(differ, straddles, Sources(x, 1, 16))
    assert (count, total) == (300, 400)
    assert math.isclose(log_p, -2 * (300 - 200) ** 2 / 400)
    differ[:, 4] = straddles[:, 4] = True  # two of the same source: their errors may be equal
    differ[300:] = False
    assert math.isclose(excuse_bound(differ, straddles, Sources(x, 1, 16))[1], -2 * (600 - 400) ** 2 / 1600)
    differ[200:] = False
    assert excuse_bound(differ, straddles, Sources(x, 1, 16))[1] == 0


def test_sources_that_are_the_same_count_once():
    x = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    straddles = torch.zeros(400, 16, dtype=torch.bool)
    straddles[:, 3] = True
    same = x[:1] * 2.0 ** (torch.arange(400).unsqueeze(1) % 5)
    assert excuse_bound(straddles, straddles, Sources(same, 1, 16))[::2] == (1, 1)
    assert excuse_bound(straddles, straddles, Sources(x, 1, 16))[::2] == (400, 400)
    assert excuse_bound(straddles[:, :1] | True, straddles[:, :1] | True, Sources(x, 16, 16))[::2] == (25, 25)


@pytest.mark.parametrize("flipped", [0.5, 0.55, 1.0])
def test_a_kernel_that_needs_every_excuse_fails(flipped):
    """4096 sums, each beside a boundary: half on the far side is chance, all on the far side is a separate rounding."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4096, 16, generator=generator)
    low = torch.zeros(4096, 16, dtype=torch.uint8)
    low[:, 0] = 1
    high = low.clone()
    high[:, 0] = 2
    actual = low.clone()
    actual[:, 0] += (torch.rand(4096, generator=generator) < flipped).byte()
    result = boundary_codes(
        "codes", actual, low, (low, high), E4M3, Sources(x, 1, 16), noun="codes", describe=lambda row, column: {}
    )
    assert result.excused == int((actual != low).sum())
    assert result.passed  # until all tests of the case are known
    decide([result])
    assert result.passed == (result.excused <= 2048 + math.sqrt(4096 * math.log(1e9) / 2)) == (flipped == 0.5)
    assert math.isclose(result.figures["p_value"], math.exp(-2 * max(0, result.excused - 2048) ** 2 / 4096))
    if flipped == 1:
        assert result.sentence == (
            "excuses: 4 096 of 4 096 codes that the order of summation can change are not those of the reference; "
            "errors symmetric about the exact sum change half of them, p <= 1e-889"
        )
        assert result.finding["sentence"] == result.sentence
        assert (result.mismatches, result.max_ulp) == (4096, 1)
        assert int(result.wrong_elements.sum()) == 4096
