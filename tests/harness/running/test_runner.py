"""One case on one backend: verdicts, blame, figures. Wrong kernels here are the reference with one thing changed."""

import json
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.records.record import VERDICTS
from narrowgauge.harness.running.runner import digest, informative, run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.blocks import block_amax
from narrowgauge.reference.quantize.scaling import block_scales, tensor_scale
from narrowgauge.reference.quantize.steps import encode_elements
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, gemm, without_amax

pytestmark = pytest.mark.usefixtures("one_thread")


def run(case=QUANTIZE, **doors):
    return run_case(case, backend(**doors))


def judged(record):
    """Stage to whether it is right."""
    return {stage["stage"]: not stage["sentence"] for stage in record.stages}


def wrong_stages(record):
    return [stage for stage, right in judged(record).items() if not right]


# Right kernels: no false alarm.


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize(
    "case",
    [replace(QUANTIZE, shape=(0, 256)), replace(QUANTIZE, shape=(3, 0)), replace(GEMM, shape=(0, 128, 64)),
     replace(GEMM, shape=(4, 0, 8))],
    ids=lambda case: case.id,
)  # fmt: skip
def test_nothing_at_all_passes(name, case):
    assert run_case(case, load_backend(name)).verdict == "pass"


def test_what_a_right_kernel_shows():
    record = run_case(QUANTIZE, load_backend("native"), seed=5)
    assert judged(record) == dict.fromkeys(
        ["memory", "repeat", "amax", "tensor scale", "scales", "codes", "values"], True
    )
    shown = (record.case, record.backend, record.device, record.seed, record.shape, record.tier)
    assert shown == (QUANTIZE.id, "native", "cpu", 5, "32x48", "quick")
    assert (record.allclose, record.sqnr_db, record.sweep) == (True, float("inf"), [1.0] * 6)
    assert record.compared == sum(stage["compared"] for stage in record.stages)
    assert record.seconds > 0
    assert record.seconds_reference > 0


def test_a_gemm_shows_its_operands_and_its_output():
    record = run_case(GEMM, load_backend("native"))
    operands = [f"{name}.{stage}" for name in "xw" for stage in ("amax", "tensor scale", "scales", "codes")]
    assert list(judged(record)) == [*operands, "memory", "repeat", "output"]
    assert 0 <= record.exact_share <= 1
    assert 0 <= record.budget_max <= 1


# Blame: a wrong stage is wrong alone, and what follows is right on the kernel's own numbers.


def kernel(*, amax=None, encode=None, scales=None, codes=None):
    """A consistent kernel, with an intermediate result changed by the given function."""

    def door(x, recipe):
        q = reference.quantize(x, recipe)
        if amax:
            q.amax = amax(q.amax)
        q.tensor_scale = tensor_scale(q.amax, recipe)
        if encode:
            q.tensor_scale = encode(q.tensor_scale)
        q.scales = block_scales(block_amax(x, 16), q.tensor_scale, recipe)
        if scales:
            q.scales = scales(q.scales)
        q.codes = encode_elements(x, q.scales, q.tensor_scale, recipe)
        if codes:
            q.codes = codes(q.codes)
        return q

    return door


def flip(mask, *place):
    """Changes bits of one code, by default of the last."""

    def change(codes):
        codes = codes.clone()
        codes[place or (-1, -1)] ^= mask
        return codes

    return change


BLAME = {
    "amax": ({"amax": lambda amax: amax * 1.5}, "amax: 1 of 1 amaxes differ, each by 50 % of the expected value"),
    "amax by one ulp": (
        {"amax": lambda amax: torch.nextafter(amax, 2 * amax)}, "amax: 1 of 1 amaxes differ, each by 1 step",
    ),
    "tensor scale": (
        {"encode": lambda scale: torch.nextafter(scale, 2 * scale)},
        "tensor scale: 1 of 1 tensor scales differ, each by 1 step",
    ),
    "scales": ({"scales": flip(1)}, "scales: 1 of 96 block scales differ, each by 1 step, at row 31, column 2"),
    "scales of one column": (
        {"scales": lambda scales: scales + torch.tensor([0, 1, 0], dtype=torch.uint8)},
        "scales: 32 of 96 block scales differ, each by 1 step, all in column 1",
    ),
    "codes": ({"codes": flip(0x10)}, "codes: 1 of 1 536 codes differ, each by 1 step, at row 31, column 47"),
    "codes in the low nibble": (
        {"codes": flip(1, 7, 3)}, "codes: 1 of 1 536 codes differ, each by 1 step, at row 7, column 6",
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("blamed", BLAME)
def test_one_wrong_stage_is_one_finding(blamed):
    change, message = BLAME[blamed]
    record = run(quantize=kernel(**change))
    stage = message.partition(":")[0]
    assert wrong_stages(record) == [stage]
    assert (record.verdict, record.stage) == ("fail", stage)
    assert record.message.startswith(message)
    assert [finding["stage"] for finding in record.findings] == [stage]
    assert record.mismatches == (32 if "column" in blamed else 1)
    assert record.max_ulp >= 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", [c for c, _ in BLAME.values()], ids=BLAME)
def test_a_hidden_scale_is_that_of_the_reference(change):
    door = kernel(**change)
    record = run(quantize=lambda x, recipe: without_amax(door(x, recipe)))
    assert not {"amax", "tensor scale"} & judged(record).keys()
    if {"scales", "codes"} & change.keys():
        assert wrong_stages(record) == list(change)


def test_a_wrong_tensor_has_its_first_and_worst_element():
    record = run(quantize=kernel(codes=lambda codes: codes ^ 0x71))
    first, worst = record.findings[0]["elements"]
    assert (first["which"], first["row"], first["column"]) == ("first", 0, 0)
    assert worst["which"] == "worst"
    assert worst["distance"] == f"{record.max_ulp} steps" == "7 steps"
    table = record.findings[0]["table"]
    assert table["title"].startswith("row 0, block 0")
    assert (table["rows"][0][0], [row[0] for row in table["rows"][1:]]) == ("column", [str(n) for n in range(16)])
    assert 1 in table["different"]
    assert {
        "input",
        "input_bits",
        "scale_bits",
        "expected_bits",
        "actual_bits",
        "block",
        "column_in_block",
    } <= first.keys()


@pytest.mark.parametrize("place", [(0, 0), (15, 23)])
def test_one_wrong_output_is_found_wherever_it_is(place):
    def change(out):
        out[place] = torch.nextafter(out[place], torch.tensor(torch.inf))

    case = replace(GEMM, inputs="lattice")
    record = run(case, gemm=gemm(change))
    assert wrong_stages(record) == ["output"]
    assert record.message == (
        f"output: 1 of 384 outputs differ, each by 1 step, at row {place[0]}, column {place[1]}; "
        "1 of them where no order of summation can round"
    )
    element = record.findings[0]["elements"][0]
    assert (element["rule"], element["tile"], element["distance"]) == ("no order rounds", "(0, 0)", "1 step")


def test_a_wrong_tile_is_one_finding_with_a_place():
    case = replace(GEMM, shape=(128, 64, 256))
    tile = torch.zeros(128, 256)
    tile[64:, 192:] = 1
    record = run(case, gemm=gemm(lambda out: out * (1 - tile)))
    assert record.stage == "output"
    heat = record.findings[0]["heat"]["counts"]
    inside = [[row >= 16 and column >= 24 for column in range(32)] for row in range(32)]
    assert [[count > 25 for count in row] for row in heat] == inside
    assert [[count > 0 for count in row] for row in heat] == inside


def test_a_gemm_of_wrong_operands_is_right_on_them():
    record = run(GEMM, quantize=kernel(codes=flip(0x10)), gemm=reference.gemm)
    assert wrong_stages(record) == ["x.codes", "w.codes"]
    assert record.stage == "x.codes"


def raising(error):
    def door(*_, **__):
        raise error

    return door


# No result.


def endless(x, recipe):
    return endless(x, recipe)


class Odd:
    """A result whose parts raise."""

    @property
    def codes(self):
        raise OSError("the device is gone")


def exact(**doors):
    return {"quantize": reference.quantize} | doors


NO_RESULT = {
    "raises": (QUANTIZE, {"quantize": raising(ValueError("K is odd"))}, "error", "ValueError: K is odd (at test_"),
    "raises nothing to read": (QUANTIZE, {"quantize": raising(StopIteration())}, "error", "StopIteration"),
    "recursion": (QUANTIZE, {"quantize": endless}, "error", "RecursionError"),
    "parts that raise": (QUANTIZE, {"quantize": lambda x, r: Odd()}, "error", "the device is gone"),
    "a resized input": (QUANTIZE, {"quantize": lambda x, r: reference.quantize(x.resize_(16, 96), r)}, "error", ""),
    "unsupported": (QUANTIZE, {"quantize": raising(NotImplementedError("bf16 only"))}, "unsupported", "bf16 only"),
    "no quantize": (QUANTIZE, {"gemm": reference.gemm}, "unsupported", "has no quantize"),
    "values of another shape": (QUANTIZE, exact(dequantize=lambda q, dtype: torch.zeros(3)), "error", "(32, 48)"),
    "values that raise": (QUANTIZE, exact(dequantize=raising(KeyError("x"))), "error", "dequantize raised KeyError"),
    "no variations": (QUANTIZE, exact(variations=lambda device: {}), "error", "variations"),
    "variations that raise": (QUANTIZE, exact(variations=lambda device: {"a": raising(OSError("no"))}), "error", "no"),
    "no gemm": (GEMM, exact(), "unsupported", "has no gemm"),
    "a gemm that raises": (GEMM, {"gemm": raising(RuntimeError("misaligned"))}, "error", "misaligned"),
    "another dtype": (GEMM, {"gemm": gemm(lambda out: out.half())}, "error", "float16"),
    "another shape": (GEMM, {"gemm": gemm(lambda out: out.T)}, "error", "(24, 16)"),
    "no tensor": (GEMM, {"gemm": gemm(lambda out: out.numpy())}, "error", "ndarray"),
    "another device": (GEMM, {"gemm": gemm(lambda out: out.to("meta"))}, "error", "meta"),
    "sparse": (GEMM, {"gemm": gemm(lambda out: out.to_sparse())}, "error", "cannot be judged"),
}


@pytest.mark.parametrize("name", NO_RESULT)
def test_no_result_is_a_verdict_with_a_message(name):
    case, doors, verdict, words = NO_RESULT[name]
    record = run(case, **doors)
    assert record.verdict == verdict
    assert words in record.message
    assert len(record.message) > 8
    if "gemm" not in doors:
        assert (record.compared, record.mismatches, record.output_digest) == (0, 0, "") or case is GEMM
        assert record.input_digest


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_does(error):
    with pytest.raises(error):
        run(quantize=raising(error()))


def test_results_that_are_unusual_but_right():
    class Mine(torch.Tensor):
        pass

    for change in (
        lambda out: out.requires_grad_(), torch.nn.Parameter, lambda out: out.as_subclass(Mine),
        lambda out: out.T.contiguous().T,
    ):  # fmt: skip
        assert run(GEMM, gemm=gemm(change)).verdict == "pass"
    assert run(quantize=torch.inference_mode()(reference.quantize)).verdict == "pass"


def test_a_case_that_compared_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr("narrowgauge.harness.running.runner.judge", lambda *_, **__: Outcome())
    record = run(quantize=reference.quantize)
    assert (record.verdict, record.message) == ("error", "nothing was compared")


# What is recorded.


@pytest.mark.parametrize(
    ("case", "doors"),
    [
        (QUANTIZE, {"quantize": reference.quantize}),
        (QUANTIZE, {"quantize": kernel(codes=flip(1))}),
        (QUANTIZE, {"quantize": print}),
        (replace(GEMM, inputs="inf"), {"gemm": reference.gemm}),
        (replace(GEMM, inputs="inf"), {"gemm": gemm(torch.zeros_like)}),
    ],
    ids=["quantize", "wrong quantize", "error", "gemm", "wrong gemm"],
)
def test_a_record_is_plain_data(case, doors):
    plain = run(case, **doors).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["verdict"] in VERDICTS


def test_the_same_bytes_have_the_same_digest_whoever_made_them():
    for case in (QUANTIZE, replace(GEMM, inputs="lattice")):
        native, again, other = (run_case(case, load_backend(name)) for name in ("native", "native", "reference"))
        assert native.input_digest == again.input_digest == other.input_digest
        assert native.output_digest == again.output_digest == other.output_digest
        assert len(native.output_digest) == 16


def test_other_bytes_have_another_digest():
    right, wrong = run(quantize=reference.quantize), run(quantize=kernel(codes=flip(1)))
    assert right.input_digest == wrong.input_digest
    assert right.output_digest != wrong.output_digest
    seeded = run_case(QUANTIZE, backend(quantize=reference.quantize), seed=1)
    assert seeded.input_digest != right.input_digest


def test_a_digest_knows_one_nan_and_two_zeros():
    quiet, other = torch.tensor([0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    assert digest([quiet.view(1)]) == digest([other.view(1)])
    assert digest([torch.tensor([0.0])]) != digest([torch.tensor([-0.0])])
    assert digest([torch.tensor([1.0]), None]) == digest([torch.tensor([1.0])])
    assert digest([torch.empty(0)]) == digest([])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        infinities = torch.tensor([torch.inf, -torch.inf, 1.0], dtype=dtype)
        assert digest([infinities]) == digest([infinities.view(torch.uint8)])
    codes = torch.tensor([125, 254], dtype=torch.uint8)
    assert digest([codes.view(torch.float8_e5m2)]) == digest([codes])


# What others would have said.


def test_allclose_accepts_a_gemm_that_is_wrong_everywhere():
    case = replace(GEMM, inputs="lattice")
    record = run(case, gemm=gemm(lambda out: torch.nextafter(out, 2 * out)))
    assert (record.verdict, record.stage) == ("fail", "output")
    assert record.mismatches > 300
    assert record.allclose
    assert record.sqnr_db > 120
    assert record.sweep == [1.0] * 6


def test_allclose_and_the_sweep_count_what_is_far():
    said = informative(torch.tensor([1.0, 1.005, 1.05, 2.0]), torch.ones(4))
    assert said["allclose"] is False
    assert said["sweep"] == [0.75, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert informative(torch.tensor([1.0, 1.005]), torch.ones(2))["allclose"] is True


@pytest.mark.parametrize(
    ("actual", "expected"),
    [(torch.inf, 1.0), (1.0, torch.inf), (-torch.inf, torch.inf), (torch.nan, 1.0), (1.0, torch.nan),
     (torch.inf, torch.nan)],
)  # fmt: skip
def test_an_infinity_or_nan_on_one_side_is_close_to_nothing(actual, expected):
    said = informative(torch.tensor([actual, 1.0]), torch.tensor([expected, 1.0]))
    assert said == {"allclose": False, "sqnr_db": -torch.inf, "sweep": [0.5] * 6}


def test_an_infinity_or_nan_on_both_sides_is_equal():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 1.0])
    assert informative(x, x.clone()) == {"allclose": True, "sqnr_db": torch.inf, "sweep": [1.0] * 6}
    wrong = x.clone()
    wrong[4] = 1.5
    said = informative(wrong, x)
    assert (said["allclose"], said["sweep"]) == (False, [0.8] * 6)
    assert round(said["sqnr_db"], 2) == 6.02


def test_a_record_has_the_declarations_of_its_backend():
    declares = {"subnormals": "flushed", "accumulator": "truncating"}
    truncating = backend(gemm=reference.gemm, quantize=reference.quantize, declares=declares)
    assert run_case(GEMM, truncating).declares == "accumulator: truncating, subnormals: flushed"
    assert run_case(QUANTIZE, backend(quantize=reference.quantize)).declares == ""
