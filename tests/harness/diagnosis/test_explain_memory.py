"""Memory and order: a kernel's mistakes are named, by runs that change a single condition at a time."""

import ctypes
import re
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import count

import torch

from narrowgauge.harness.diagnosis.explain_memory import MEMORY_CAUSES
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import QUANTIZE, backend

ORDER = ContextVar("order", default="forward")


def with_codes(change):
    """A quantize with codes in its own memory; `change(codes, x)` spoils the codes."""

    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        codes = torch.empty(q.codes.shape, dtype=torch.uint8).copy_(q.codes)
        change(codes, x)
        return codes, q.scales, q.amax

    return quantize


def found(change, **doors):
    record = run_case(QUANTIZE, backend(quantize=with_codes(change), **doors))
    assert record.verdict == "fail"
    for explanation in record.explanations:
        assert explanation["sentence"] == MEMORY_CAUSES[explanation["cause"]].sentence
        assert explanation["exact"]
        assert explanation["stage"] == record.stage
    return [e["cause"] for e in record.explanations], record.message


def byte(tensor, offset):
    return ctypes.c_uint8.from_address(tensor.data_ptr() + offset)


def in_orders(device):
    @contextmanager
    def order(name):
        token = ORDER.set(name)
        yield
        ORDER.reset(token)

    return {f"{name} threads": lambda name=name: order(name) for name in ("forward", "reverse", "shuffled")}


def test_writing_outside():
    def change(codes, x):
        byte(codes, codes.numel()).value = 7

    assert found(change)[0] == ["writes-outside"]


def test_changing_an_input():
    assert found(lambda codes, x: x.zero_())[0] == ["changes-its-input"]


def test_leaving_elements_unwritten():
    def quantize(x, recipe):
        q = reference.quantize(x, recipe)
        codes = torch.empty_like(q.codes)
        codes[:-1] = q.codes[:-1]
        return codes, q.scales, q.amax

    record = run_case(QUANTIZE, backend(quantize=quantize))
    assert [e["cause"] for e in record.explanations] == ["never-written"]


def test_reading_outside():
    def change(codes, x):
        codes[3, 5] = byte(x, x.numel() * x.element_size()).value & 0x77

    causes, message = found(change)
    assert causes == ["reads-outside"]
    assert message.endswith(
        "1 of 768 elements of codes differ between first run and second run: they depend on bytes outside the inputs, "
        "or on memory that nobody wrote"
    )


def test_reading_outside_is_told_from_the_order_of_threads():
    def change(codes, x):
        codes[3, 5] = byte(x, -1).value & 0x77

    assert found(change, variations=in_orders)[0] == ["reads-outside"]


def test_a_missing_barrier():
    def change(codes, x):
        if ORDER.get() == "shuffled":
            codes[0] ^= 1

    causes, message = found(change, variations=in_orders)
    assert causes == ["order-of-threads"]
    assert re.search(
        "24 of 768 elements of codes differ between forward threads and shuffled threads, all else the same: a race, "
        r"seen first in row 0, column 0: 0x\w\w and 0x\w\w$",
        message,
    )


def test_a_wrong_step_stands_before_results_that_vary():
    """Ties round away from zero, and every later run on the same inputs changes a code."""
    away = replace(find_recipe("nvfp4"), rounding="nearest-away")
    earlier = []

    def quantize(x, recipe):
        q = reference.quantize(x, away)
        codes = torch.empty_like(q.codes).copy_(q.codes)
        if earlier and torch.equal(earlier[-1], x):
            codes[0, 0] ^= 1
        earlier.append(x.clone())
        return codes, q.scales, q.amax

    record = run_case(replace(QUANTIZE, inputs="e2m1-ties"), backend(quantize=quantize))
    assert record.stage == "repeat"
    assert [e["cause"] for e in record.explanations if e["exact"]] == ["ties-away", "not-repeatable"]


def test_a_run_that_fails_the_third_time():
    calls = count()

    def change(codes, x):
        number = next(calls)
        if number == 2:
            raise RuntimeError("no more")
        codes.add_(number)

    causes, message = found(change)
    assert causes == ["not-repeatable"]
    assert "run again, it fails: quantize raised RuntimeError: no more" in message
