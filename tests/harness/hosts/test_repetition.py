"""Further calls of a case: a method that goes wrong after many calls, threads that share memory, streams, graphs."""

import ctypes
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.cause_names import is_cause
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.operations.stages.repeated import REPEAT_CAUSES, _add_repeats
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference

QUANTIZE = case_from_labels("quantize", "mxfp8-e4m3", (4, 32), "bf16", "normal", ("repeats:300",))
SWIZZLE = case_from_labels("swizzle", "", (4, 4), "", "position", ("repeats:20",))
FORMS = ("local", "host")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


class Counting:
    """A backend with a wrong code in call number 100, 200, …"""

    def __init__(self):
        self.calls = 0

    def quantize(self, x, recipe):
        self.calls += 1
        q = reference.quantize(x, recipe)
        if self.calls % 100 == 0:
            q.codes[1, 2] ^= 1
        return q


class Failing(Counting):
    """A backend that raises in call number 100."""

    def quantize(self, x, recipe):
        q = super().quantize(x, recipe)
        if self.calls == 100:
            raise RuntimeError("no more workspace")
        return q


class OtherShape(Counting):
    """A backend whose result loses a row in call number 50: the form of the result differs."""

    def quantize(self, x, recipe):
        q = super().quantize(x, recipe)
        return replace(q, codes=q.codes[:2], shape=(2, 32), scales=q.scales[:2]) if self.calls == 50 else q


class SharedScratch:
    """A backend with a scratch buffer for all threads."""

    def __init__(self):
        self.scratch = None

    def quantize(self, x, recipe):
        self.scratch = x.clone()
        time.sleep(0.002)
        return reference.quantize(self.scratch, recipe)


class OwnScratch(SharedScratch):
    """A backend with a scratch buffer for each thread."""

    def __init__(self):
        self.local = threading.local()

    def quantize(self, x, recipe):
        self.local.scratch = x.clone()
        time.sleep(0.002)
        return reference.quantize(self.local.scratch, recipe)


class ReadsFar:
    """A backend that reads behind the guard zone of its input, as a kernel does that reads whole tiles."""

    def quantize(self, x, recipe):
        q = reference.quantize(x, recipe)
        q.codes[0, 0] = ctypes.c_uint8.from_address(x.data_ptr() + 60_000).value & 0x77
        return q


class Layouts:
    """A backend with methods called on each other's results."""

    swizzle, unswizzle = staticmethod(reference.swizzle), staticmethod(reference.unswizzle)


class StaleCopy(Layouts):
    """A backend whose captured calls read a copy of the input before."""

    def swizzle(self, scales):
        if not torch.cuda.is_current_stream_capturing():
            self.copy = scales.clone()
        return reference.swizzle(self.copy)


def judged(case, kind, form, device="cpu"):
    """The record of a case for a backend class of this module, in this process or in a kernel host."""
    if form == "local":
        return run_case(case, Backend.local("sample", kind(), device=torch.device(device)), device=device)
    with hosted_backend(f"{__name__}:{kind.__name__}", device=device) as backend:
        return run_case(case, backend, device=device)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_each_hundredth_call_is_found_with_its_period(form):
    record = judged(QUANTIZE, Counting, form)
    assert (record.verdict, record.stage) == ("fail", "repeat")
    # Two runs come before the further calls.
    assert "3 of 300 further calls on the same inputs give other bytes: call 98 first, one in 100" in record.message
    assert record.explanations[0]["cause"] == "wrong-after-many-calls"
    assert record.explanations[0]["exact"]


def test_a_later_call_that_fails_is_named():
    record = judged(QUANTIZE, Failing, "host")
    assert record.verdict == "error"
    assert "repeated on the same inputs, it fails: call 98 of 300: " in record.message
    assert "no more workspace" in record.message


def test_a_later_result_of_another_form_is_wrong():
    record = judged(replace(QUANTIZE, repeats=60), OtherShape, "host")
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert "1 of 60 further calls" in record.message
    assert "call 48 first" in record.message


@pytest.mark.parametrize("form", FORMS)
def test_threads_that_share_a_buffer_are_found(form):
    case = replace(QUANTIZE, repeats=8, concurrency="threads")
    record = judged(case, SharedScratch, form)
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert "further calls from two threads at once give other bytes than one after the other" in record.message
    assert record.explanations[0]["cause"] == "concurrent-threads"


@pytest.mark.parametrize(("kind", "cause"), REPEAT_CAUSES.items())
def test_each_kind_of_further_calls_has_its_cause(kind, cause):
    """Streams and graphs need a GPU; a host that reports wrong calls of these kinds does not."""
    host = SimpleNamespace(repeat=lambda *_: [[2]])
    stage = StageResult("repeat", "repeat", 0)
    _add_repeats(stage, SimpleNamespace(repeats=3, concurrency=kind, host=host), [], None)
    assert (stage.causes, stage.mismatches, is_cause(cause)) == ([cause], 1, True)


def test_bytes_far_behind_an_input_differ_between_runs():
    record = judged(replace(QUANTIZE, repeats=0), ReadsFar, "host")
    assert [explanation["cause"] for explanation in record.explanations] == ["reads-outside"]


def test_threads_with_buffers_of_their_own_pass():
    assert judged(replace(QUANTIZE, repeats=8, concurrency="threads"), OwnScratch, "local").verdict == "pass"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("concurrency", ["streams", "graph"])
def test_streams_and_graphs_need_a_gpu(form, concurrency):
    record = judged(replace(SWIZZLE, concurrency=concurrency), Layouts, form)
    message = f"concurrency '{concurrency}' needs a GPU; the device is cpu"
    assert (record.verdict, record.message) == ("unsupported", message)


@needs_gpu
@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_replayed_on_changed_inputs(form):
    record = judged(replace(SWIZZLE, concurrency="graph"), Layouts, form, "cuda")
    assert (record.verdict, record.message) == ("pass", "")


@needs_gpu
@pytest.mark.parametrize("form", FORMS)
def test_captured_calls_that_read_another_input_are_found(form):
    record = judged(replace(SWIZZLE, concurrency="graph"), StaleCopy, form, "cuda")
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert "20 of 60 further calls replayed from a CUDA graph" in record.message
    assert record.explanations[0]["cause"] == "captured-inputs"
