"""Loading backends by name, calling their doors, and what a backend declares."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.backend import METHODS, Backend, BackendError, Unsupported, load_backend
from narrowgauge.harness.backends.loading import LIBRARIES
from narrowgauge.harness.operations.stages.product import order_of
from narrowgauge.harness.running.runner import run_case
from narrowgauge.native.runtime import host
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import ORDERS, Summation
from tests.harness.sample_backends import QUANTIZE, backend

NVFP4 = find_recipe("nvfp4")
BUILT_IN = ", ".join(("native", "reference", *LIBRARIES)) + ", and your own as package.module:Name"
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
    assert all(loaded.has(door) for door in METHODS)
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


def test_a_module_of_a_package(module, tmp_path):
    (tmp_path / "my_package").mkdir()
    module(CLASS, "my_package/kernels")
    assert load_backend("my_package.kernels").call("gemm", 1, 2) == "multiplied"
    assert load_backend("my_package.kernels:Backend").call("quantize", 1, 2) == "quantized"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("natve", f"no backend is called 'natve' (did you mean 'native'?); there are {BUILT_IN}"),
        ("", f"no backend is called ''; there are {BUILT_IN}"),
        (
            "my_kernels:Bakend",
            "backend my_kernels:Bakend: module my_kernels has no 'Bakend' (did you mean 'Backend'?)",
        ),
        ("my_kernels:Broken", "backend my_kernels:Broken: Broken() raised OSError: libkernels.so is missing"),
        (
            "my_kernels:Empty",
            f"backend my_kernels:Empty has none of the methods {', '.join(METHODS)}; see docs/backends.md",
        ),
        (
            "my_kernels:number",
            f"backend my_kernels:number has none of the methods {', '.join(METHODS)}; see docs/backends.md",
        ),
        (
            "my_kernel:Backend",
            "backend my_kernel:Backend: module my_kernel cannot be imported: "
            "ModuleNotFoundError: No module named 'my_kernel'",
        ),
        (
            "my_package.missing",
            "backend my_package.missing: module my_package.missing cannot be imported: "
            "ModuleNotFoundError: No module named 'my_package'",
        ),
        (":Backend", "backend :Backend: module  cannot be imported: ValueError: Empty module name"),
    ],
)
def test_what_cannot_be_loaded_says_why(module, spec, message):
    module(CLASS)
    with pytest.raises(BackendError) as raised:
        load_backend(spec)
    assert str(raised.value) == message


def test_a_class_that_wants_arguments(module):
    module(CLASS)
    with pytest.raises(BackendError, match=r"Needy\(\) raised TypeError: .*missing 1 required .*'library'"):
        load_backend("my_kernels:Needy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torc", "ModuleNotFoundError: No module named 'torc'"),
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def broken(:", "SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(module, text, message):
    module(text, "my_broken")
    with pytest.raises(BackendError) as raised:
        load_backend("my_broken:Backend")
    assert str(raised.value).startswith(f"backend my_broken:Backend: module my_broken cannot be imported: {message}")
    assert raised.value.__cause__ is not None


# Doors.


def test_missing_and_unimplemented_methods_are_unsupported():
    def gemm(a, b, **options):
        raise NotImplementedError("no kernel for K below 64")

    def silent(q, dtype):
        raise NotImplementedError

    partial = backend(gemm=gemm, dequantize=silent)
    with pytest.raises(Unsupported, match="backend wrong has no quantize"):
        partial.quantize(X, NVFP4)
    with pytest.raises(Unsupported, match="no kernel for K below 64"):
        partial.call("gemm", None, None)
    with pytest.raises(Unsupported, match=r"wrong\.dequantize is not implemented for this case"):
        partial.call("dequantize", None, None)


def test_an_exception_comes_with_its_type_words_and_place():
    def quantize(x, recipe):
        raise ValueError("K must be a multiple of 32")

    place = f"test_backend.py:{quantize.__code__.co_firstlineno + 1}"
    with pytest.raises(BackendError) as raised:
        backend(quantize=quantize).quantize(X, NVFP4)
    assert str(raised.value) == f"quantize raised ValueError: K must be a multiple of 32 (at {place})"
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_method_with_an_unexpected_signature_is_refused():
    with pytest.raises(BackendError) as raised:
        backend(quantize=lambda x: x).quantize(X, NVFP4)
    assert str(raised.value).startswith("quantize raised TypeError: ")
    assert "backend.py" not in str(raised.value)


def test_an_interrupt_is_none_of_its_business():
    def quantize(x, recipe):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend(quantize=quantize).quantize(X, NVFP4)


def test_a_recipe_is_given_as_data():
    given = []
    backend(quantize=lambda x, r: given.append(r) or reference.quantize(x, r)).quantize(X, NVFP4)
    assert given == [NVFP4]


# Variations.


def test_without_variations_an_operation_runs_twice():
    assert backend(quantize=reference.quantize).variations(CPU) == ["first run", "second run"]


def test_variations_are_named_by_the_backend():
    ways = {"wide": nullcontext, "narrow": nullcontext}
    named = backend(quantize=reference.quantize, variations=lambda device: ways)
    assert named.variations(CPU) == ["wide", "narrow"]


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


def test_native_kernels_run_in_every_order_of_threads():
    assert load_backend("native").variations(CPU) == ["forward threads", "reverse threads", "shuffled threads"]


@pytest.mark.parametrize(
    ("variations", "message"),
    [
        (lambda device: {}, "variations gave none; it names at least one way of running, or is left out"),
        (lambda device: None, "variations raised TypeError: 'NoneType' object is not iterable"),
        (lambda device: {}["threads"], "variations raised KeyError: 'threads'"),
    ],
)
def test_variations_that_are_none(variations, message):
    with pytest.raises(BackendError) as raised:
        backend(quantize=reference.quantize, variations=variations).variations(CPU)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "implementation",
    [
        SimpleNamespace(quantise=print, quantize="a string"),
        SimpleNamespace(gemm_order=lambda a, b: "tree"),  # computes no result
    ],
)
def test_a_backend_needs_a_method(implementation):
    with pytest.raises(BackendError, match="backend empty has none of the methods quantize, quantize_both, "):
        Backend.local("empty", implementation)


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

DECLARED = (
    "{'transform': 'butterfly'}, {'gemm': " + " | ".join(f"'{order}'" for order in ORDERS) + " | 'probe'}, "
    "{'accumulator': 'truncating'}, {'subnormals': 'flushed'}, "
    "{'operands': 'decoded-float32' | 'decoded-bfloat16'}, {'random': 'own'}"
)


def test_a_declaration_is_kept_and_none_is_none():
    assert backend(quantize=reference.quantize).declares == {}
    declared = {"transform": "butterfly", "gemm": "split-4", "accumulator": "truncating", "subnormals": "flushed"}
    assert backend(quantize=reference.quantize, declares=declared).declares == declared


@pytest.mark.parametrize(
    ("declares", "message"),
    [
        ("butterfly", f"declares is 'butterfly'; it is a mapping, {DECLARED}"),
        (None, f"declares is None; it is a mapping, {DECLARED}"),
        (
            {"transfrom": "butterfly"},
            f"declares has 'transfrom' (did you mean 'transform'?); it can say {DECLARED}",
        ),
        (
            {"transform": "tree"},
            f"declares 'transform' to be 'tree'; it can say {DECLARED}",
        ),
        (
            {"transform": None},
            f"declares 'transform' to be None; it can say {DECLARED}",
        ),
        (
            {"gemm": "block"},
            f"declares 'gemm' to be 'block' (did you mean 'blocks'?); it can say {DECLARED}",
        ),
        (
            {"gemm": "split-0"},
            f"declares 'gemm' to be 'split-0' (did you mean 'split-<n>[-tree]'?); it can say {DECLARED}",
        ),
        (
            {"accumulator": "truncated"},
            f"declares 'accumulator' to be 'truncated' (did you mean 'truncating'?); it can say {DECLARED}",
        ),
        (
            {"subnormal": "flushed"},
            f"declares has 'subnormal' (did you mean 'subnormals'?); it can say {DECLARED}",
        ),
        (
            {"operands": "decoded-fp32"},
            f"declares 'operands' to be 'decoded-fp32' (did you mean 'decoded-float32'?); it can say {DECLARED}",
        ),
        (
            {"gemm": "tree", "operands": "decoded-float32"},
            "declares 'gemm' to be 'tree': operands 'decoded-float32' are summed in any order; declare the operands or "
            "the order 'tree', not both",
        ),
        (
            {"gemm": "aligned-13-32", "accumulator": "truncating"},
            "declares 'gemm' to be 'aligned-13-32': 'aligned-13-32' defines the truncation of the accumulator; "
            "declare the order or truncation, not both",
        ),
    ],
)
def test_a_declaration_that_says_nothing_known(declares, message):
    with pytest.raises(BackendError) as raised:
        backend(quantize=reference.quantize, declares=declares)
    assert str(raised.value) == f"backend wrong: {message}"


def test_an_order_of_a_product_replaces_the_declaration():
    asked = []

    def gemm_order(a, b):
        asked.append((a, b))
        return next(orders)

    orders = iter(["tree", None, "truncating", "trees"])
    result = backend(gemm=reference.gemm, gemm_order=gemm_order, declares={"gemm": "blocks"})
    one, other = object(), object()
    assert [result.gemm_order(one, other), result.gemm_order([one], [other])] == ["tree", None]
    assert asked == [(one, other), ([one], [other])]
    assert order_of(result, one, other) == Summation(None, truncates=True)
    with pytest.raises(BackendError) as raised:
        result.gemm_order(one, other)
    assert str(raised.value) == (
        f"gemm_order gave 'trees'; the order of a sum is {', '.join(map(repr, ORDERS))}, 'truncating', or None for any"
    )
    with pytest.raises(BackendError, match="gemm_order raised StopIteration"):
        result.gemm_order(one, other)
    assert backend(gemm=reference.gemm, declares={"gemm": "blocks"}).gemm_order(one, other) == "blocks"
    assert backend(gemm=reference.gemm).gemm_order(one, other) is None
