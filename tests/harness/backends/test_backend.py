"""Loading backends by name, calling their doors, and what a backend declares."""

import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.backend import BackendError, Unsupported, load_backend
from narrowgauge.harness.backends.loading import LIBRARIES
from narrowgauge.harness.cases.operations import all_methods
from narrowgauge.harness.operations.gemm import product
from narrowgauge.harness.operations.quantize import call
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native.runtime import host
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import ORDERS, Summation
from tests.harness.sample_backends import QUANTIZE, backend

NVFP4 = find_recipe("nvfp4")
X = torch.linspace(-3, 3, 32 * 48).view(32, 48).bfloat16()
CPU = torch.device("cpu")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the current folder; every module is gone after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(text, name="my_kernels"):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


CLASS = """
class Backend:
    def quantize(self, x, recipe):
        return "quantized"

class Broken:
    def __init__(self):
        raise OSError("libkernels.so is missing")

class Needy(Backend):
    def __init__(self, library):
        pass

class Empty:
    pass

instance = Backend()
number = 3

def gemm(a, b, **options):
    return "multiplied"
"""


# Loading.


@pytest.mark.parametrize("name", ["native", "reference"])
def test_the_built_in_ones_have_every_door(name):
    loaded = load_backend(name)
    assert loaded.name == name
    of_contracts = {contract.replace("-", "_") for contract in CONTRACTS}
    assert all(loaded.has(door) for door in set(all_methods()) - of_contracts)
    assert not loaded.has("explain")


@pytest.mark.parametrize(
    ("spec", "door", "answer"),
    [
        ("my_kernels:Backend", "quantize", "quantized"),
        ("my_kernels:instance", "quantize", "quantized"),
        ("my_kernels:", "gemm", "multiplied"),
    ],
)
def test_a_class_an_object_and_a_module_of_the_current_folder(module, spec, door, answer):
    module(CLASS)
    loaded = load_backend(spec)
    assert loaded.name == spec
    assert loaded.call(door, None, None) == answer


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("natve", ["'natve'", "did you mean 'native'", "package.module:Name", *LIBRARIES]),
        ("", ["no backend is called ''"]),
        ("my_kernels:Bakend", ["'Bakend'", "did you mean 'Backend'"]),
        ("my_kernels:Broken", ["Broken() raised OSError: libkernels.so is missing"]),
        ("my_kernels:Needy", ["Needy() raised TypeError", "'library'"]),
        ("my_kernels:Empty", ["none of the methods", *all_methods(), "docs/backends.md"]),
        ("my_kernels:number", ["none of the methods"]),
        ("my_kernel:Backend", ["my_kernel cannot be imported", "ModuleNotFoundError"]),
        ("my_package.missing", ["my_package.missing cannot be imported"]),
        (":Backend", ["cannot be imported"]),
        ("my_broken:Backend", ["my_broken cannot be imported", "SyntaxError"]),
        ("my_raising:Backend", ["my_raising cannot be imported", "RuntimeError: no GPU"]),
    ],
)
def test_what_cannot_be_loaded_says_why(module, spec, words):
    module(CLASS)
    module("def broken(:", "my_broken")
    module("raise RuntimeError('no GPU')", "my_raising")
    with pytest.raises(BackendError) as raised:
        load_backend(spec)
    assert [word for word in words if word not in str(raised.value)] == []


# Doors.


def test_missing_and_unimplemented_methods_are_unsupported():
    def gemm(a, b, **options):
        raise NotImplementedError("no kernel for K below 64")

    def silent(q, dtype):
        raise NotImplementedError

    partial = backend(gemm=gemm, dequantize=silent)
    with pytest.raises(Unsupported, match="backend wrong has no quantize"):
        call.quantize(partial, X, NVFP4)
    with pytest.raises(Unsupported, match="no kernel for K below 64"):
        partial.call("gemm", None, None)
    with pytest.raises(Unsupported, match=r"wrong\.dequantize is not implemented for this case"):
        partial.call("dequantize", None, None)


def test_an_exception_comes_with_its_type_words_and_place():
    def quantize(x, recipe):
        raise ValueError("K must be a multiple of 32")

    place = f"test_backend.py:{quantize.__code__.co_firstlineno + 1}"
    with pytest.raises(BackendError) as raised:
        call.quantize(backend(quantize=quantize), X, NVFP4)
    assert str(raised.value) == f"quantize raised ValueError: K must be a multiple of 32 (at {place})"
    assert isinstance(raised.value.__cause__, ValueError)


# Variations.


def test_a_single_variation_runs_twice():
    calls = []

    def unsteady(x, recipe, **options):
        calls.append(recipe)
        q = reference.quantize(x, recipe)
        return q if len(calls) == 1 else replace(q, codes=q.codes ^ 1)

    single = backend(quantize=unsteady, variations=lambda device: {"wide": nullcontext})
    assert single.variations(CPU) == ["wide", "wide, second run"]
    record = run_case(QUANTIZE, single)
    assert (record.verdict, record.stage) == ("fail", "repeat")
    assert "differ between wide and wide, second run" in record.message


def test_a_backend_that_cannot_run_says_so_before_any_case(tmp_path, monkeypatch):
    (tmp_path / "my_check.py").write_text(
        "class Backend:\n    def quantize(self, x, recipe): ...\n\n    def check(self, device):\n"
        "        raise OSError(f'no kernels for {device}')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_backend("my_check:Backend").name == "my_check:Backend"
    with pytest.raises(BackendError, match=r"^backend my_check:Backend cannot run on cpu: no kernels for cpu$"):
        load_backend("my_check:Backend", "cpu")


def test_native_without_a_compiler_says_what_to_install(monkeypatch):
    for cached in (host.compiler, host._compiler_identity):
        cached.cache_clear()
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    try:
        with pytest.raises(BackendError, match=r"cannot run on cpu: native kernels on a CPU need .*; install g\+\+ "):
            load_backend("native", "cpu")
    finally:
        for cached in (host.compiler, host._compiler_identity):
            cached.cache_clear()


# Declarations of a backend.


@pytest.mark.parametrize(
    ("declares", "words"),
    [
        ("butterfly", ["declares is 'butterfly'", "mapping", *ORDERS]),
        (None, ["declares is None"]),
        ({"transfrom": "butterfly"}, ["'transfrom'", "did you mean 'transform'"]),
        ({"transform": "tree"}, ["'transform'", "'tree'", "'butterfly'"]),
        ({"transform": None}, ["'transform'", "None"]),
        ({"gemm": "block"}, ["'gemm'", "'block'", "did you mean 'blocks'"]),
        ({"gemm": "split-0"}, ["'split-0'", "'split-<n>[-tree]'"]),
        ({"accumulator": "truncated"}, ["did you mean 'truncating'"]),
        ({"subnormal": "flushed"}, ["did you mean 'subnormals'"]),
        ({"operands": "decoded-fp32"}, ["did you mean 'decoded-float32'"]),
        ({"gemm": "tree", "operands": "decoded-float32"}, ["'gemm'", "'tree'", "operands", "not both"]),
        ({"gemm": "aligned-13-32", "accumulator": "truncating"}, ["'aligned-13-32'", "truncation", "not both"]),
    ],
)
def test_a_declaration_that_says_nothing_known(declares, words):
    with pytest.raises(BackendError) as raised:
        backend(quantize=reference.quantize, declares=declares)
    assert [word for word in words if word not in str(raised.value)] == []


def test_an_order_of_a_product_replaces_the_declaration():
    asked = []

    def gemm_order(a, b):
        asked.append((a, b))
        return next(orders)

    orders = iter(["tree", None, "truncating", "trees"])
    result = backend(gemm=reference.gemm, gemm_order=gemm_order, declares={"gemm": "blocks"})
    one, other = object(), object()
    assert [product.gemm_order(result, one, other), product.gemm_order(result, [one], [other])] == ["tree", None]
    assert asked == [(one, other), ([one], [other])]
    assert product.order_of(result, one, other) == Summation(None, truncates=True)
    with pytest.raises(BackendError) as raised:
        product.gemm_order(result, one, other)
    assert str(raised.value) == (
        f"gemm_order gave 'trees'; the order of a sum is {', '.join(map(repr, ORDERS))}, 'truncating', or None for any"
    )
    with pytest.raises(BackendError, match="gemm_order raised StopIteration"):
        product.gemm_order(result, one, other)
    declaring = backend(gemm=reference.gemm, declares={"gemm": "blocks"})
    assert product.gemm_order(declaring, one, other) == "blocks"
    assert product.gemm_order(backend(gemm=reference.gemm), one, other) is None
