"""Adapters of libraries: names, remedies, and bytes where the library is installed."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch

import narrowgauge
from narrowgauge.harness.backends.adapters import common
from narrowgauge.harness.backends.adapters.common import plain_library
from narrowgauge.harness.backends.backend import Backend, Unsupported
from narrowgauge.harness.backends.loading import LIBRARIES, check_name, load_implementation
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe

MODULES = {
    "comfy-kitchen": "comfy_kitchen", "compressed-tensors": "compressed_tensors", "conch": "conch",
    "deepgemm": "deep_gemm", "flashinfer": "flashinfer", "gguf": "gguf", "humming": "humming", "jax": "jax",
    "liger": "liger_kernel", "microxcaling": "mx", "mlx": "mlx.core", "modelopt": "modelopt", "torchao": "torchao",
    "transformer-engine": "transformer_engine", "vllm": "vllm",
}  # fmt: skip
"""Module of each library."""


def installed(name):
    package = MODULES[name].partition(".")[0]
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_adapter_loads_without_its_library(name):
    check_name(name)
    backend = Backend.local(name, load_implementation(name))
    assert backend.offer.dialects is not None
    for recipe, dialects in backend.offer.dialects.items():
        assert dialects, recipe


@pytest.mark.long
def test_loading_imports_no_library():
    code = (
        "import sys; from narrowgauge.harness.backends.loading import LIBRARIES, load_implementation\n"
        "for name in LIBRARIES: load_implementation(name)\n"
        f"print([m for m in {sorted(MODULES.values())!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_missing_library_is_one_error_with_its_remedy(name):
    if installed(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(BackendError, match=rf"backend {name} cannot run on cpu: .*(pip install|on PYTHONPATH)"):
        load_implementation(name, "cpu")


@pytest.fixture
def broken_library(tmp_path, monkeypatch):
    """A library with a missing extension in its `__init__`, and with a class of a second module in its inner module."""
    files = {
        "broken_library/__init__.py": "import missing_extension",
        "broken_library/quantizers/__init__.py": "raise RuntimeError('no driver')",
        "broken_library/quantizers/plain.py": "from broken_library.base import Base\nclass Quantizer(Base): pass",
        "broken_library/base.py": "import missing_extension",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(common, "_LOADED", {})
    importlib.invalidate_caches()
    return tmp_path / "broken_library"


def test_a_plain_module_loads_without_the_compiled_parts(broken_library):
    class Base:
        pass

    before = set(sys.modules)
    name = "broken_library.quantizers.plain"
    module = plain_library(name, "pip install it", {"broken_library.base": {"Base": Base}})
    assert module.Quantizer.__mro__[1] is Base
    assert plain_library(name, "pip install it") is module
    assert not {name for name in set(sys.modules) - before if name.startswith("broken_library")}
    with pytest.raises(ModuleNotFoundError, match="missing_extension"):  # the next import starts anew
        importlib.import_module("broken_library")


def test_a_library_without_a_driver_has_plain_modules(broken_library):
    (broken_library / "__init__.py").write_text("raise OSError('libcudart.so: cannot open shared object file')")
    (broken_library / "base.py").write_text("class Base: pass")
    assert plain_library("broken_library.quantizers.plain", "pip install it").Quantizer.__name__ == "Quantizer"


def test_a_plain_module_without_its_library_names_the_remedy(broken_library):
    with pytest.raises(ModuleNotFoundError, match="no_such_library is not installed; pip install it"):
        plain_library("no_such_library.part", "pip install it")
    with pytest.raises(ModuleNotFoundError, match=r"quantizers.plain cannot be imported .*; pip install it"):
        plain_library("broken_library.quantizers.plain", "pip install it")


@pytest.mark.parametrize("name", ["deepgemm", "microxcaling", "mlx", "torchao"])
def test_an_unknown_variant_names_the_variants(name):
    with pytest.raises(BackendError, match=rf"no variant 'other'; {name} has "):
        load_implementation(f"{name}:other")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted({*MODULES}))
def test_bytes_of_an_installed_library_are_those_of_its_dialects(name):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    backend = Backend.local(name, load_implementation(name, "cpu"))
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1))
    x = x if backend.offer.constraints.get("dtype") == ["fp32"] else x.bfloat16()
    for base, dialects in backend.offer.dialects.items():
        for dialect in dialects:
            recipe = find_recipe(base if dialect == "te" else f"{base}@{dialect}")
            q, expected = quantize(backend, x, recipe), reference.quantize(x, recipe)
            assert torch.equal(q.scales, expected.scales), recipe
            assert torch.equal(q.codes, expected.codes), recipe


def test_packed_scales_of_deepgemm_are_its_scales():
    """Four UE8M0 scales in a word, by the library's own packing."""
    if not installed("deepgemm"):
        pytest.skip("deepgemm is not installed")
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, packed = (Backend.local(name, load_implementation(name, "cpu")) for name in ("deepgemm", "deepgemm:packed"))
    for name in ("fp8-block-1x128-e4m3-pow2@deepgemm", "mxfp8-e4m3@deepgemm", "mxfp4@deepgemm"):
        assert torch.equal(*(quantize(one, x, find_recipe(name)).scales for one in (plain, packed)))
    with pytest.raises(Unsupported, match="no packed scales for fp8-block-128x128"):
        quantize(packed, x, find_recipe("fp8-block-128x128-e4m3-pow2@deepgemm"))


def test_the_product_of_transformer_engine_is_right():
    if not installed("transformer-engine"):
        pytest.skip("transformer-engine is not installed")
    backend = Backend.local("transformer-engine", load_implementation("transformer-engine", "cpu"))
    a, b = (reference.quantize(torch.randn(rows, 256), "nvfp4@te-reference") for rows in (32, 48))
    narrowgauge.assert_gemm(a, b, backend.call("gemm", a, b, out_dtype=torch.float32), out_dtype=torch.float32)
    with pytest.raises(Unsupported, match="qgemm takes K % 32 = 0 and N % 8 = 0"):
        backend.call("gemm", a, reference.quantize(torch.randn(9, 256), "nvfp4@te-reference"), out_dtype=torch.float32)


def test_microxcaling_takes_float32():
    if not installed("microxcaling"):
        pytest.skip("microxcaling is not installed")
    backend = Backend.local("microxcaling", load_implementation("microxcaling", "cpu"))
    with pytest.raises(Unsupported, match="float32 only"):
        quantize(backend, torch.ones(32, 32).bfloat16(), find_recipe("mxfp4@microxcaling"))
