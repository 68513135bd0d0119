"""Adapters of libraries: names, remedies, and bytes where the library is installed."""

import importlib
import importlib.util
import subprocess
import sys

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.loading import LIBRARIES, check_name, load_implementation
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe

MODULES = {
    "comfy-kitchen": "comfy_kitchen", "compressed-tensors": "compressed_tensors", "deepgemm": "deep_gemm",
    "gguf": "gguf", "jax": "jax", "mlx": "mlx.core", "modelopt": "modelopt", "torchao": "torchao",
}  # fmt: skip
"""Module of each library."""


def installed(name):
    package = MODULES[name].partition(".")[0]
    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_adapter_loads_without_its_library(name):
    check_name(name)
    backend = Backend.local(name, load_implementation(name))
    assert backend.offer.dialects
    for recipe, dialects in backend.offer.dialects.items():
        assert dialects, recipe


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
    with pytest.raises(BackendError, match=rf"backend {name} cannot run on cpu: .*pip install"):
        load_implementation(name, "cpu")


def test_a_variant_is_handed_to_the_adapter():
    assert load_implementation("torchao:floor")._variant == "floor"
    with pytest.raises(BackendError, match=r"no variant 'flor'; torchao has rceil, floor"):
        load_implementation("torchao:flor")


def test_an_unknown_name_lists_the_libraries():
    with pytest.raises(BackendError, match=r"'torcha' \(did you mean 'torchao'\?\); .*compressed-tensors"):
        check_name("torcha")


@pytest.mark.parametrize("name", sorted({*MODULES} - {"deepgemm"}))
def test_bytes_of_an_installed_library_are_those_of_its_dialects(name):
    if not installed(name):
        pytest.skip(f"{name} is not installed")
    backend = Backend.local(name, load_implementation(name, "cpu"))
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for base, dialects in backend.offer.dialects.items():
        for dialect in dialects:
            recipe = find_recipe(base if dialect == "te" else f"{base}@{dialect}")
            q, expected = backend.quantize(x, recipe), reference.quantize(x, recipe)
            assert torch.equal(q.scales, expected.scales), recipe
            assert torch.equal(q.codes, expected.codes), recipe
