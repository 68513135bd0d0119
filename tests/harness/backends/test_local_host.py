"""The host of a backend in this process: variations, seeds, prepared runs, modules, and the end of a case."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from narrowgauge import adapt
from narrowgauge.harness.backends import local_host
from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.guard import POISON
from narrowgauge.harness.backends.host import CaseEnd
from narrowgauge.harness.backends.local_host import LocalHost
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.modules.modules import given_of, plan_of
from narrowgauge.harness.operations.quantize import call
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe

CPU = torch.device("cpu")


def test_variations_have_numbers_and_shuffles_are_requested() -> None:
    entered = []

    @contextmanager
    def way(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    def variations(device: torch.device, shuffles: int = 1) -> dict[str, Any]:
        ways = {f"shuffle {number}": lambda number=number: way(f"{device} {number}") for number in range(shuffles)}
        return {"plain": lambda: None, **ways}

    host = LocalHost("b", SimpleNamespace(transform=torch.neg, variations=variations), schedules=2)
    assert host.variations(CPU) == ["plain", "shuffle 0", "shuffle 1"]
    for number in (2, 0, 1):
        with host.prepare({"x": torch.ones(4)}, CPU, POISON[0]).running(number) as given:
            host.call("transform", given["x"])
    assert entered == ["cpu 1", "cpu 0"]


@pytest.mark.parametrize("swizzled", [False, True])
def test_declared_conventions_read_the_result(swizzled: bool) -> None:
    """A library with tiles of scales, swapped nibbles and decode scales."""
    x, seen = torch.randn(40, 96, generator=torch.Generator().manual_seed(3)), []

    def quantize(x: torch.Tensor, recipe: Any, **options: Any) -> dict[str, Any]:
        seen.append(options)
        q = reference.quantize(x, recipe)
        codes, scales = adapt.stored_as(q, nibbles="high-first", layout="128x4")
        return {"codes": codes, "scales": scales, "amax": q.amax, "tensor_scale": q.tensor_scale}

    recipe = find_recipe("nvfp4@modelopt")
    conventions = {"nibbles": "high-first", "layout": "128x4", "tensor_scale_is": "decode"}
    backend = Backend.local("b", SimpleNamespace(quantize=quantize, conventions=conventions))
    got, q = (
        call.quantize(backend, x, recipe, layout="128x4" if swizzled else "linear"),
        reference.quantize(x, recipe, swizzled=swizzled),
    )
    assert seen == [{}]  # the library always makes tiles
    assert got.swizzled is swizzled
    for name in ("codes", "scales", "amax", "tensor_scale"):
        assert torch.equal(getattr(got, name), getattr(q, name)), name
    wrong = Backend.local("b", SimpleNamespace(quantize=quantize, conventions=conventions | {"nibbles": "low-first"}))
    assert not torch.equal(call.quantize(wrong, x, recipe).codes, q.codes)


def test_linear_conventions_pass_on_the_request_for_tiles() -> None:
    def quantize(x: torch.Tensor, recipe: Any, swizzled: bool = False) -> Any:
        q = reference.quantize(x, recipe, swizzled=swizzled)
        return adapt.stored_as(q, nibbles="halves").codes, q.scales

    recipe, x = find_recipe("mxfp4"), torch.randn(8, 64)
    backend = Backend.local("b", SimpleNamespace(quantize=quantize, conventions={"nibbles": "halves"}))
    for swizzled in (False, True):
        got, q = (
            call.quantize(backend, x, recipe, layout="128x4" if swizzled else "linear"),
            reference.quantize(x, recipe, swizzled=swizzled),
        )
        assert torch.equal(got.codes, q.codes)
        assert torch.equal(got.scales, q.scales)
    without = SimpleNamespace(quantize=lambda x, recipe: quantize(x, recipe)[:2], conventions={"nibbles": "halves"})
    with pytest.raises(Unsupported, match="no argument 'swizzled'"):
        call.quantize(Backend.local("b", without), x, recipe, layout="128x4")


@pytest.mark.parametrize(
    ("conventions", "message"),
    [
        ({"nibble": "halves"}, "conventions is {'nibble': 'halves'}; it maps nibbles, layout, transposed"),
        ({"layout": "tiles"}, "conventions: layout is 'tiles'; it can be 'linear', '128x4'"),
        ("high-first", "conventions is 'high-first'; it maps"),
    ],
)
def test_wrong_conventions_are_named(conventions: Any, message: str) -> None:
    with pytest.raises(BackendError, match=f"backend b: {message}"):
        LocalHost("b", SimpleNamespace(quantize=print, conventions=conventions))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda q: q.codes, "Tensor; give .codes, scales."),
        (lambda q: {"codes": q.codes}, "dict; give .codes, scales."),
        (lambda q: (q.codes, q.scales[:-1]), r"have shape \(8, 2\); scales have \(7, 2\)"),
    ],
)
def test_a_result_that_does_not_fit_its_conventions_is_an_error(result: Any, message: str) -> None:
    def quantize(x: torch.Tensor, recipe: Any) -> Any:
        return result(reference.quantize(x, recipe))

    backend = Backend.local("b", SimpleNamespace(quantize=quantize, conventions={}))
    with pytest.raises(BackendError, match=f"does not fit the conventions {{}}: .*{message}"):
        call.quantize(backend, torch.ones(8, 64), find_recipe("mxfp4"))


@pytest.mark.parametrize(
    ("spoil", "zones", "changed"),
    [
        (lambda x: None, [], []),
        (lambda x: x.fill_(2.0), [], ["x"]),
        (lambda x: ctypes.memset(x.data_ptr() + x.nbytes, 2, 4), ["behind"], []),
        (lambda x: ctypes.memset(x.data_ptr() - 4, 2, 4), ["before"], []),
    ],
    ids=["nothing", "its input", "behind its input", "before its input"],
)
def test_a_prepared_run_tells_what_its_calls_wrote(spoil: Any, zones: list[str], changed: list[str]) -> None:
    host = LocalHost("b", SimpleNamespace(transform=spoil))
    host.variations(CPU)
    x = torch.ones(64)
    run = host.prepare({"x": x}, CPU, POISON[0])
    with run.running(0) as given:
        host.call("transform", given["x"])
        out = torch.empty(16, dtype=torch.uint8)
    kept = run.keep({"out": out})["out"]
    assert kept.tolist() == [POISON[0]] * 16  # unwritten memory
    kept.zero_()
    assert out[0] == POISON[0]
    assert run.seconds > 0
    for sentences, words in zip(run.violations(), (zones, changed), strict=True):
        assert len(sentences) == len(words)
        assert all(word in sentence for word, sentence in zip(words, sentences, strict=True))
    assert torch.equal(x, torch.ones(64))


class _Failing(torch.nn.Module):
    """A reference layer whose forward raises `error`."""

    def __init__(self, error: Exception, *sizes: Any, **options: Any) -> None:
        super().__init__()
        self.layer, self.error, self.observer = reference.Linear(*sizes, **options), error, None
        self.weight, self.bias = self.layer.weight, self.layer.bias
        del self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ({"Linear": lambda *a, **o: _Failing(OSError("no smem"), *a, **o)}, BackendError,
         r"^forward of Linear raised OSError: no smem \(at test_local_host\.py:\d+\)$"),
        ({"Linear": lambda *a, **o: _Failing(NotImplementedError("no fp8"), *a, **o)}, Unsupported, "^no fp8$"),
        ({"gemm": reference.gemm}, Unsupported, "^backend b has no Linear$"),
    ],
    ids=["raises", "is not implemented", "is missing"],
)  # fmt: skip
def test_a_module_that_gives_no_steps(methods: dict[str, Any], error: type[Exception], message: str) -> None:
    case = case_from_labels("linear", "MXFP8BlockScaling", (1, 16, 32, 32), "bf16", "normal", ("bias",))
    inputs = make_inputs(case)
    with pytest.raises(error, match=message):
        Backend.local("b", SimpleNamespace(**methods)).run_module(plan_of(case, inputs), given_of(inputs))


@pytest.mark.parametrize(
    ("device", "popped", "probes", "end"),
    [
        ("cpu", "unseen", [], CaseEnd()),
        ("cuda", "", [], CaseEnd()),  # a locked context ended without an error
        ("cuda", None, [""], CaseEnd()),
        ("cuda", "launch failed", [""], CaseEnd("launch failed", usable=True)),
        ("cuda", "illegal address", ["illegal address"], CaseEnd("illegal address", usable=False)),
        ("cuda", None, ["illegal address", "illegal address"], CaseEnd("illegal address", usable=False)),
    ],
)
def test_the_end_of_a_case_names_an_error_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, popped: str | None, probes: list[str], end: CaseEnd
) -> None:
    remaining, errors = list(probes), [popped]
    monkeypatch.setattr(local_host, "probe_gpu", lambda: remaining.pop(0))
    monkeypatch.setattr(local_host, "pop_gpu_error", lambda: errors.pop() if errors else None)
    monkeypatch.setattr(local_host, "lock_gpu", lambda device: contextmanager(lambda: (yield))())
    host = LocalHost("b", SimpleNamespace(gemm=print), torch.device(device))
    assert host.end_case() == end
    assert not remaining


# Accepted arguments, and places of errors.


class _Methods:
    def quantize(self, x: Any, recipe: Any, *, amax: Any = None) -> Any:
        return quantize_of(x, recipe)

    def quantize_both(self, x: Any, recipe: Any, **options: Any) -> Any:
        return quantize_of(x, recipe, **options)

    def gemm(self, a: Any, b: Any) -> Any:
        return a

    def transform(self, x: Any, recipe: Any) -> Any:
        return json.loads(x)

    swizzle = staticmethod(max)


def quantize_of(x: Any, recipe: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("quantize", {"swizzled": True}, Unsupported, "quantize of backend own has no argument 'swizzled'"),
        ("quantize", {"amax": 1, "random": (1, 2)}, Unsupported, "quantize of backend own has no argument 'random'"),
        ("quantize", {"amax": 1}, None, ""),
        ("quantize_both", {"swizzled": True}, BackendError, "unexpected keyword argument 'swizzled'"),
        ("gemm", {"bias": 1, "out_dtype": 2}, Unsupported, "gemm of backend own has no argument 'bias'"),
        ("gemm", {"out_dtype": 2}, BackendError, "unexpected keyword argument 'out_dtype'"),
        ("swizzle", {"fast": 1}, BackendError, "keyword argument"),
    ],
)
def test_an_optional_keyword_that_a_method_lacks(method: str, options: Any, error: Any, message: str) -> None:
    """The signature decides. A TypeError inside of the method is an error, and so is a method without the dtype that
    every call has."""
    host = LocalHost("own", _Methods())
    if error is None:
        assert host.call(method, "x", "nvfp4", **options) == "x"
        return
    with pytest.raises(error, match=re.escape(message)):
        host.call(method, *["x", "nvfp4"][: 1 if method == "swizzle" else 2], **options)


def test_an_error_names_the_line_of_the_backend() -> None:
    """The line of the backend, and no line of the standard library or of this project."""
    host = LocalHost("own", SimpleNamespace(transform=_Methods().transform, quantize=_asks_the_reference))
    with pytest.raises(BackendError, match=r"JSONDecodeError: .* \(at test_local_host\.py:\d+\)$"):
        host.call("transform", "x", "nvfp4")
    with pytest.raises(BackendError, match=r"raised \w+: .* \(at test_local_host\.py:\d+\)$"):
        host.call("quantize", torch.zeros(2, 16), "nvfp9")


def _asks_the_reference(x: Any, recipe: Any) -> Any:
    return reference.quantize(x, recipe)
