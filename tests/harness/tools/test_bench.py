"""A bench: timed operations, red rows for wrong outputs, and ceilings. No test asserts a time."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.operations import VARIABLE, OperationError
from narrowgauge.harness.operations.gemm_grouped.bench import sections_of
from narrowgauge.harness.operations.quantize.bench import BENCH, TORCHAO
from narrowgauge.harness.operations.timing import judge_outputs
from narrowgauge.harness.operations.timing.judge_outputs import QuantizeArguments
from narrowgauge.harness.operations.timing.operation_bench import COMPILED, BenchInputs, BenchTask
from narrowgauge.harness.tools.bench import interleave
from narrowgauge.harness.tools.bench.bench import Bench, Notes, callable_peers, measure
from narrowgauge.harness.tools.bench.report import cells
from narrowgauge.harness.tools.bench.tasks import tasks
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation
from tests.native.gpu import needs_compiler

CPU = torch.device("cpu")
X = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def ids(*arguments: Any, **options: Any) -> list[str]:
    return [task.id for task in tasks(*arguments, **options)]


# Timed operations.


def test_two_numbers_are_a_matrix_and_three_a_product() -> None:
    result = ids("cpu", ["256x128", "512x32x48", "64x32x48"])
    products = ("gemm", "weight-only")
    assert {name.rpartition("/")[2] for name in result if not name.startswith(products)} == {"256x128"}
    recipes = ["nvfp4", "mxfp8-e4m3", "fp8-current", "fp8-block-1x128"]
    assert [name for name in result if name.startswith("gemm")] == [
        *(f"gemm/{recipe}/512x32x48" for recipe in recipes),
        *(f"gemm-grouped/{recipe}{of}/512x32x48" for of in ("", "/ragged", "/64 sections") for recipe in recipes),
        *(f"gemm/{recipe}/64x32x48" for recipe in recipes),
    ]
    assert ids("cuda", ["256x128"]) == ids("cpu", ["256x128"])


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("128", "a size is MxK of a matrix or MxKxN of a product, not '128'"),
        ("0x128", "a size is MxK"),
        ("1x2x3x4", "a size is MxK"),
        ("130x128", "extents are multiples of 128, those of a product of 16; 130x128 has others"),
        ("16x24x32", "extents are multiples of 128, those of a product of 16; 16x24x32 has others"),
    ],
)
def test_a_size_that_is_none(size: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks("cpu", [size])


@pytest.mark.parametrize(
    ("variant", "rows", "sections"),
    [
        ("", 512, [64] * 8),
        ("64 sections", 512, [8] * 64),
        ("ragged", 8192, [17, 3000, 129, 700, 40, 2506, 300, 1500]),
        ("ragged", 512, [1, 187, 8, 44, 2, 157, 19, 94]),
    ],
)
def test_sections_of_a_grouped_product_have_all_rows(variant: str, rows: int, sections: list[int]) -> None:
    assert sections_of(BenchTask("gemm-grouped", "nvfp4", variant, (rows, 32, 48))) == sections
    assert sum(sections) == rows


OWN_BENCH = """
import torch
from narrowgauge.harness.operations.timing.judge_outputs import judge_bytes
from narrowgauge.harness.operations.timing.operation_bench import OperationBench, PreparedTask

def prepare(task, inputs):
    x = inputs.matrix(task.shape)
    return PreparedTask(native=[x.neg], reference=[x.neg], judge=lambda y: judge_bytes("y", y, -x), read=x.nbytes,
                        ceilings={"copy": [x.clone]}, elements=x.numel(), copied=2 * x.nbytes)

BENCH = OperationBench(rows=[("negate", "", "")], prepare=prepare, further={"1024x1024": ["*"]})
"""


def test_an_operation_of_a_user_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("timed", OWN_BENCH), ("untimed", "BENCH = 1")):
        folder = tmp_path / name / f"own_{name}"
        folder.mkdir(parents=True)
        (folder / "operation.py").touch()
        (folder / "bench.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "untimed"))
    with pytest.raises(OperationError, match=r"own_untimed/bench.py: BENCH is int, not an OperationBench"):
        tasks("cpu")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "timed"))
    assert ids("cuda", keyword="swizzle or negate") == [
        *(f"{name}/16384x16384" for name in ("swizzle", "unswizzle", "negate")),
        *(f"{name}/32768x32768" for name in ("swizzle", "unswizzle")),
        "negate/1024x1024",
    ]
    bench = measure(tasks("cpu", ["128x128"], "negate"), "cpu", quick=True, launches=False)
    assert [(row.id, row.verdict) for row in bench.rows if row.is_native] == [("negate/128x128/native", "pass")]


# The judge.


def flipped(t: torch.Tensor) -> torch.Tensor:
    """The tensor with a changed bit in its last element."""
    bytes_of = t.clone().contiguous()
    bytes_of.view(torch.uint8).flatten()[-1] ^= 1
    return bytes_of


def halves(name: str) -> list[Quantized]:
    random = (5, 9) if name.endswith("-sr") else None
    result = reference.quantize_both(X, name, random=random, scale=SCALE if name == "fp8-delayed" else None)
    return [half for half in result if half is not None]


SCALE = torch.tensor([16.0])
RECIPES = sorted({name for operation, name, _ in BENCH.rows if operation == "quantize"})


def parts_of(name: str) -> Iterator[tuple[int, str]]:
    for number, half in enumerate(halves(name)):
        for part in ("codes", "scales"):
            yield number, part
        if half.amax is not None:
            yield number, "amax"


QUICK_RECIPES = ("nvfp4-rht-sr", "nvfp4-rowscaled", "mxfp8-e4m3", "fp8-block-128x128", "fp8-delayed")
"""A shape for each way of cutting halves into parts."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_RECIPES else pytest.mark.long) for name in RECIPES]
)
def test_any_byte_of_a_quantized_matrix_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Judged in two parts: the reference's result is right, and a changed last bit of any of its tensors is wrong."""
    monkeypatch.setattr(judge_outputs, "SLICE_ELEMENTS", 128 * 256)
    assert len(list(judge_outputs.row_slices(256, 256))) == 2
    r = find_recipe(name)
    right = halves(name)
    given = QuantizeArguments(
        scale=SCALE if name == "fp8-delayed" else None, random=(5, 9) if name.endswith("-sr") else None
    )
    verdict = judge_outputs.judge_halves(X, r, given, (right[0], right[1]))
    assert (verdict.mismatches, verdict.sentence) == (0, "")
    assert verdict.compared >= 2 * X.numel()
    for number, part in parts_of(name):
        wrong = list(right)
        wrong[number] = replace(right[number], **{part: flipped(getattr(right[number], part))})
        verdict = judge_outputs.judge_halves(X, r, given, (wrong[0], wrong[1]))
        assert verdict.mismatches > 0, part
        assert verdict.sentence.startswith(f"{('rowwise', 'columnwise')[number]} {part}: "), verdict.sentence


def test_values_rotations_bytes_and_products_are_judged() -> None:
    q = reference.quantize(X, "nvfp4")
    values, rotated = reference.dequantize(q, torch.bfloat16), reference.transform(X, "nvfp4-rht")
    pairs = [(q, reference.quantize(X[:64], "nvfp4")), (reference.quantize(X[:32], "nvfp4"),) * 2]
    products = [reference.gemm(a, b, out_dtype=torch.float32) for a, b in pairs[:1]]
    judges: list[tuple[Callable[[torch.Tensor], judge_outputs.Verdict], torch.Tensor]] = [
        (lambda t: judge_outputs.judge_values(t, q), values),
        (lambda t: judge_outputs.judge_rotated(t, X, find_recipe("nvfp4-rht")), rotated),
        (lambda t: judge_outputs.judge_bytes("swizzle", t, q.scales), q.scales),
        (lambda t: judge_outputs.judge_product(t, pairs[:1], Summation()), products[0]),
    ]
    for check, right in judges:
        assert (check(right).mismatches, check(right).compared) == (0, right.numel())
        far = right.clone()
        far.flatten()[-1] += 1
        assert check(far).mismatches == 1
        assert check(far).sentence
    assert judge_outputs.judge_bytes("swizzle", q.scales[1:], q.scales).sentence.startswith(
        "swizzle: uint8 (255, 16) where"
    )
    assert judge_outputs.judge_values(values.float()[:, :3], q).sentence.startswith("values: ")


def test_a_product_is_judged_in_parts_and_by_section(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(reference.quantize(X[at : at + 64], "nvfp4"), reference.quantize(X[:48], "nvfp4")) for at in (0, 64)]
    right = torch.cat([reference.gemm(a, b, out_dtype=torch.bfloat16) for a, b in pairs])
    monkeypatch.setattr(judge_outputs, "_OUTPUTS", 16 * 48)
    assert judge_outputs.judge_product(right, pairs, Summation()).compared == right.numel()
    for row in (0, 63, 64, 127):
        wrong = right.clone()
        wrong[row, 47] *= 2
        assert judge_outputs.judge_product(wrong, pairs, Summation()).mismatches == 1


def test_a_large_product_is_judged_in_a_row_of_each_strip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Most products are right in any order; a tensor core only by its own model, for the whole product if cheap."""
    monkeypatch.setattr(judge_outputs, "_WHOLE", 0)
    a, b = reference.quantize(X[:64], "nvfp4"), reference.quantize(X[:48], "nvfp4")
    right = reference.gemm(a, b, out_dtype=torch.float32)
    verdict = judge_outputs.judge_product(right, [(a, b)], Summation("blocks"))
    assert (verdict.compared, verdict.sentence) == ((64 + 4) * 48, "")
    heard: list[tuple[list[float], Summation]] = []
    monkeypatch.setattr(
        judge_outputs, "_judge_product", lambda v, result, a, b, order: heard.append((result[:, 0].tolist(), order))
    )
    rows = torch.arange(64.0).unsqueeze(1).expand(64, 48)
    sample, whole = [0.0, 17.0, 34.0, 51.0], rows[:, 0].tolist()
    for order, by, expected in (
        (Summation("blocks", truncates=True), "bound, order 1/16", [(sample, "blocks"), (whole, None)]),
        (Summation("aligned-13-32"), "order 1/16", [(sample, "aligned-13-32")]),
        (Summation("decoded-aligned-25-16"), "order", [(whole, "decoded-aligned-25-16")]),
        (Summation(truncates=True), "bound", [(whole, None)]),
    ):
        heard.clear()
        assert judge_outputs.judge_product(rows, [(a, b)], order).rule == by
        assert [(result, declared.order) for result, declared in heard] == expected
        assert all(declared.truncates == order.truncates for _, declared in heard)
    monkeypatch.setattr(judge_outputs, "_WHOLE", 64 * 48 * 256)
    assert judge_outputs.judge_product(rows, [(a, b)], Summation("aligned-13-32")).rule == "order"


# A bench.

SIZES = ["128x256", "64x32x48"]


@pytest.mark.sampled(0)
@needs_compiler
@pytest.mark.parametrize(
    "keyword",
    [
        "quantize/nvfp4/rowwise or (rht-sr and both and amax) or (mxfp8-e4m3 and not rowwise) or dequantize or swizzle",
        pytest.param("", marks=pytest.mark.long),
    ],
)
def test_every_operation_is_timed_beside_its_ceiling_and_right(keyword: str) -> None:
    heard: list[str] = []
    chosen = tasks("cpu", SIZES, keyword)
    assert {task.operation for task in chosen} >= {"quantize", "dequantize", "swizzle", "gemm"}
    bench = measure(chosen, "cpu", quick=True, on_task=heard.append)
    assert heard == [*(task.id for task in chosen), "launch"]
    assert bench.right
    judged = {row.id: row for row in bench.rows if row.verdict == "pass"}
    assert {f"{task.id}/native" for task in chosen} <= judged.keys()
    for task in chosen:
        row = judged[f"{task.id}/native"]
        assert row.rounds == interleave.QUICK_ROUNDS
        assert row.compared >= (1 if task.operation in CONTRACTS else row.elements) > 0
        assert row.ceiling == ("matmul" if len(task.shape) == 3 else "copy")
        assert row.share is not None
        assert row.speedup is not None
        assert (row.second_share is None) == (not row.second_ceiling)
        if task.operation not in CONTRACTS:
            assert row.second_ceiling == ("dequantize + matmul" if row.ceiling == "matmul" else "")
        assert row.moved > 0
    one, two = (judged[f"quantize/nvfp4/rowwise{given}/128x256/native"].moved for given in (", amax given", ""))
    elements = 128 * 256
    outputs = elements // 2 + elements // 16 + 8  # amax and tensor scale
    assert (one, two) == (2 * elements + outputs, 4 * elements + outputs)
    launches = [row for row in bench.rows if row.operation == "launch"]
    names = {"quantize", "quantize, amax given", "dequantize", "gemm", "add", "rmsnorm-quantize"}
    assert {row.variant for row in launches} == names
    assert all(row.share is not None for row in launches if row.who == "native")


def test_an_output_that_is_wrong_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    right = native.swizzle
    monkeypatch.setattr(native, "swizzle", lambda scales: flipped(right(scales)))
    chosen = tasks("cpu", SIZES[:1], "swizzle")
    bench = measure(chosen, "cpu", quick=True, launches=False)
    assert not bench.right
    verdicts = {row.operation: (row.verdict, row.mismatches, row.message) for row in bench.rows if row.who == "native"}
    assert verdicts["swizzle"] == ("fail", 1, "swizzle: 1 of 2 048 bytes differ")
    assert verdicts["unswizzle"][0] == "pass"


def test_an_operation_that_raises_is_red_and_the_bench_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(scales: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\nmemory")

    monkeypatch.setattr(native, "swizzle", raises)
    bench = measure(tasks("cpu", SIZES[:1], "swizzle"), "cpu", quick=True, launches=False)
    row = next(row for row in bench.rows if row.operation == "swizzle")
    assert (row.verdict, row.seconds) == ("error", None)
    assert row.message.startswith("RuntimeError: no memory")
    assert any(row.verdict == "pass" for row in bench.rows)
    assert not bench.right
    assert not Bench().right, "nothing was judged"


# Timing.


def test_what_is_timed_is_called_in_turns_and_its_copies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    durations = {"a0": 1.0, "a1": 3.0, "b0": 100.0}

    def seconds_of(call: Callable[[], str], device: torch.device) -> float:
        return durations[call()]

    def call(name: str) -> Callable[[], str]:
        return lambda: called.append(name) or name  # type: ignore[func-returns-value]

    monkeypatch.setattr(interleave, "seconds_of", seconds_of)
    calls = {"a": [call("a0"), call("a1")], "b": [call("b0")]}
    times, results = interleave.time_interleaved(calls, CPU, rounds=5, seconds=11.0)
    assert results == {"a": "a0", "b": "b0"}
    assert called == ["a0", "b0", "a0", "b0", "a1", "b0", "a0", "b0", "a1", "a0"]  # b takes too long after three
    assert times["a"].rounds == (1.0, 3.0, 1.0, 3.0, 1.0)
    assert times["b"].rounds == (100.0,) * 3
    assert times["a"].median == 1.0
    assert times["a"].quartiles == (1.0, 3.0)
    assert interleave.Times((2.0,)).quartiles == (2.0, 2.0)


class Gpu:
    """A GPU whose clock is told: a call keeps it busy for `busy` seconds, and takes `launch` seconds to queue.

    An operation behind an event begins `edge` seconds later, and a call behind a different operation takes `left`
    seconds more, to write back a cache.
    """

    left = 20e-6

    def __init__(self, busy: float, launch: float, edge: float) -> None:
        self.busy, self.launch, self.edge = busy, launch, edge
        self.host = self.device = 0.0
        self.slept: list[float] = []
        self.queue: list[str] = []

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0)
        event.record = lambda: self._pass(event)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event

    def _pass(self, event: SimpleNamespace) -> None:
        event.at = max(self.device, self.host)
        self.device = event.at + self.edge

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles / interleave._CLOCK)
        self.device = max(self.device, self.host) + cycles / interleave._CLOCK

    def call(self, name: str) -> Any:
        def work() -> str:
            self.host += self.launch
            others = self.queue and self.queue[-1][0] != name[0]
            self.device = max(self.device, self.host) + self.busy + (self.left if others else 0.0)
            self.queue.append(name)
            return name

        return work

    def synchronize(self, device: torch.device) -> None:
        self.host = self.device = max(self.host, self.device)


@pytest.mark.parametrize(
    ("busy", "launch", "count"),
    [(50e-6, 90e-6, 36), (5e-3, 90e-6, 1), (1e-6, 30e-6, 100), (17e-6, 390e-6, 25), (17e-6, 50e-6, 90)],
)
def test_times_of_a_gpu_leave_out_python_and_little_else(
    monkeypatch: pytest.MonkeyPatch, busy: float, launch: float, count: int
) -> None:
    gpu = Gpu(busy, launch, edge=5e-6)
    monkeypatch.setattr(torch, "cuda", gpu)
    monkeypatch.setattr(interleave, "synchronize", gpu.synchronize)
    monkeypatch.setattr(interleave.time, "perf_counter", lambda: gpu.host)
    calls = {"a": [gpu.call("a0"), gpu.call("a1"), gpu.call("a2")], "b": [gpu.call("b0")]}
    times, _ = interleave.time_interleaved(calls, torch.device("cuda"), rounds=4, seconds=1.0)
    left = gpu.left if count == 1 else 0.0  # a long call has no extra call ahead
    assert times["a"].rounds[1:] == pytest.approx([busy + gpu.edge / count + left] * 3)
    assert times["a"].calls == count
    queued = [name for name in gpu.queue if name != "b0"][1:]
    assert queued == list(itertools.islice(itertools.cycle(("a0", "a1", "a2")), len(queued)))


# Peers.

MX_TASK = BenchTask("quantize", "mxfp8-e4m3", "rowwise", (128, 128))


def fake_torchao(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    for name in ("torchao", "torchao.prototype", "torchao.prototype.mx_formats"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name in ("nvfp4_tensor", "mx_tensor"):
        module = ModuleType(f"torchao.prototype.mx_formats.{name}")
        for function, value in functions.items():
            setattr(module, function, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def nvfp4_quantize(x: torch.Tensor, block_size: int, per_tensor_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert block_size == 16
    q = reference.quantize(x, "nvfp4@torchao", amax=per_tensor_scale * 2688)
    return q.scales.view(torch.float8_e4m3fn), q.codes


def to_mx(x: torch.Tensor, elem_dtype: torch.dtype, block_size: int, scaling_mode: str) -> tuple[torch.Tensor, ...]:
    assert (elem_dtype, block_size, scaling_mode) == (torch.float8_e4m3fn, 32, "rounds up")
    q = reference.quantize(x, "mxfp8-e4m3")
    return q.scales.view(torch.float8_e8m0fnu), q.codes.view(torch.float8_e4m3fn)


FORMATS = {
    "nvfp4_quantize": nvfp4_quantize, "per_tensor_amax_to_scale": lambda amax: amax / 2688, "to_mx": to_mx,
    "ScaleCalculationMode": SimpleNamespace(RCEIL="rounds up"),
}  # fmt: skip


def test_a_peer_that_is_wrong_is_red_and_does_not_fail_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        scales, codes = to_mx(*arguments, **options)
        return scales, flipped(codes)

    fake_torchao(monkeypatch, **{**FORMATS, "to_mx": wrong})
    bench = measure([MX_TASK], "cpu", quick=True, launches=False)
    theirs = next(row for row in bench.rows if row.who == "torchao")
    assert (theirs.verdict, theirs.message) == ("fail", "codes: 1 of 16 384 bytes differ")
    assert bench.right
    assert cells.sentence(bench.rows).endswith("; 1 of 1 output of peers wrong")


def test_a_peer_that_is_not_there_or_has_changed_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        monkeypatch.delitem(sys.modules, name)
    notes: Notes = {}
    assert callable_peers(MX_TASK, BenchInputs(CPU), notes, compiling=False) == {}
    assert notes[TORCHAO].startswith("not installed (")
    fake_torchao(monkeypatch)
    bench = measure([MX_TASK], "cpu", quick=True, launches=False)
    assert bench.notes[f"{TORCHAO}, mxfp8-e4m3"].startswith("raises AttributeError: ")
    assert bench.right


def test_the_reference_is_compiled_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled: list[Any] = []
    warnings = [b"graph break"]  # on stderr, at the first call

    def compile_(function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        assert not dynamic
        compiled.append(function)

        def call(*given: Any) -> Any:
            if warnings:
                os.write(2, warnings.pop())
            return function(*given)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    fake_torchao(monkeypatch, **FORMATS)
    larger = replace(MX_TASK, shape=(128, 256))
    bench = measure([MX_TASK, larger], "cpu", quick=True, launches=False, compiling=True)
    assert len(compiled) == 1, "of the first size"
    assert not warnings
    assert "graph break" not in capfd.readouterr().err
    assert next(row for row in bench.rows if row.who == COMPILED).verdict == "pass"
    assert not bench.notes
