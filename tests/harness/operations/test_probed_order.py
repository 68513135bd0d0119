"""Products of backends that declare {"gemm": "probe"}."""

import pytest
import torch

from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.gemm.gemm import alpha
from narrowgauge.reference.gemm.operands import operand
from tests.harness.product_cases import REFERENCE, case_of, gemm_case
from tests.harness.sample_backends import backend

CASE = gemm_case("fp8-current-e4m3", "tn", shape=(16, 96, 12))


class Kernel:
    """A gemm that adds in order of K, and counts its calls. `wrong`: moves an output by an ulp, except in a probe."""

    def __init__(self, *, wrong=False, bits=0):
        self.wrong, self.bits, self.calls = wrong, bits, 0

    def __call__(self, a, b, *, out_dtype, **addends):
        self.calls += 1
        if addends:
            return reference.gemm(a, b, out_dtype=out_dtype, **addends)
        if self.bits:
            y = bounds(a, b, out_dtype=out_dtype, order=f"aligned-{self.bits}-32").expected
            if self.wrong and float(alpha(a, b).max()) != 1:
                y[0, 0] = torch.nextafter(y[0, 0], torch.tensor(torch.inf))
            return y
        left, right = operand(a).float(), operand(b).float()
        total = torch.zeros(len(left), len(right))
        for k in range(left.shape[1]):
            total = torch.addcmul(total, left[:, k : k + 1], right[:, k])
        y = total * alpha(a, b).float()
        if self.wrong and float(alpha(a, b).max()) != 1:
            row, column = (~bounds(a, b, out_dtype=out_dtype).exact).nonzero()[0].tolist()
            y[row, column] = torch.nextafter(y[row, column], torch.tensor(torch.inf))
        return y.to(out_dtype)


def judged(kernel: Kernel, case=CASE, declares: str | None = "probe"):
    return run_case(case, backend(**REFERENCE | {"gemm": kernel}, declares={"gemm": declares} if declares else {}))


def test_a_confirmed_order_judges_the_product():
    record = judged(Kernel())
    assert record.verdict == "pass", record.message
    assert record.ordered_share > 0.5
    assert record.notes == [{"cause": "order-probed", "sentence": "judged in the probed order sequential"}]
    assert judged(Kernel(), declares=None).ordered_share == 0


@pytest.mark.long
def test_a_kernel_wrong_beyond_a_probe_fails_by_its_order():
    assert judged(Kernel(wrong=True), declares=None).verdict == "pass"
    record = judged(Kernel(wrong=True))
    assert record.verdict == "fail"
    assert "1 of them that the declared order cannot give" in record.message


def test_a_less_precise_order_is_named_and_does_not_pass():
    """13 fraction bits are confirmed, but the interval of any order still judges."""
    assert judged(Kernel(bits=13), declares="aligned-13-32").verdict == "pass"
    for declares in (None, "probe"):
        record = judged(Kernel(bits=13), declares=declares)
        assert record.verdict == "fail"
        assert record.ordered_share == 0
    (note,) = (note for note in record.notes if note["cause"] == "order-probed")  # a slow machine adds others
    assert 'declares {"gemm": "aligned-13-32"}' in note["sentence"]


@pytest.mark.long
def test_a_probe_of_fp8_tensor_cores_accepts_13_bits_alone():
    record = judged(Kernel(bits=13), declares="probe-13")
    assert record.verdict == "pass", record.message
    assert record.ordered_share > 0
    (note,) = (note for note in record.notes if note["cause"] == "order-probed")
    assert note["sentence"] == "judged in the probed order aligned-13-32"
    assert judged(Kernel(bits=12), declares="probe-13").verdict == "fail"
    wrong = judged(Kernel(bits=13, wrong=True), declares="probe-13")
    assert wrong.verdict == "fail"
    assert "that the declared order cannot give" in wrong.message


def test_products_without_an_order_of_the_backend_are_probed():
    def gemm_order(a, b):
        return "sequential" if a.shape[1] > 64 else None

    loaded = backend(**REFERENCE | {"gemm": Kernel(), "gemm_order": gemm_order}, declares={"gemm": "probe"})
    for columns, notes in ((96, []), (64, ["judged in the probed order sequential"])):
        record = run_case(gemm_case("fp8-current-e4m3", "tn", shape=(16, columns, 12)), loaded)
        assert record.verdict == "pass", record.message
        assert record.ordered_share > 0.1
        assert [note["sentence"] for note in record.notes if note["cause"] == "order-probed"] == notes


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (gemm_case("fp8-current-e4m3", "tn", "bias", shape=(16, 96, 12)), "the product has an addend"),
        (gemm_case("fp8-current-e5m2+fp8-current-e4m3", "tn", shape=(16, 96, 12)), "two recipes"),
        (gemm_case("mxfp6-e2m3", "tn", shape=(16, 96, 12)), "elements E2M3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_products_without_a_probe_say_why(case, reason):
    kernel = Kernel()
    record = judged(kernel, case)
    assert record.verdict == "pass"
    (note,) = record.notes
    assert note["sentence"].startswith("judged in any order")
    assert reason in note["sentence"]
    assert kernel.calls < 4


def test_a_grouped_product_is_not_probed_and_says_so():
    doors = REFERENCE | {"gemm_grouped": reference.gemm_grouped, "quantize_grouped": reference.quantize_grouped}
    case = case_of("gemm-grouped", "fp8-current-e4m3", "ragged:2", shape=(16, 96, 12))
    for declares in ({}, {"gemm": "probe"}):
        record = run_case(case, backend(**doors, declares=declares))
        assert record.verdict == "pass", record.message
        notes = [note["sentence"] for note in record.notes if note["cause"] == "order-probed"]
        assert notes == ["judged in any order: the products of a grouped GEMM are not probed"] * len(declares)
