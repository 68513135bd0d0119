"""Every claim of docs/conformance.md that a library is wrong: the byte of the library, and a third opinion.

The third opinion is ml_dtypes, or exact rational numbers. It shares no code with the reference.
"""

import math
import tomllib
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.loading import load_implementation
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.spec.recipes import find_recipe
from tests.harness.backends.test_adapters import installed
from tests.paths import ROOT

DATA = tomllib.loads((ROOT / "docs" / "conformance.toml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
ABOVE = float(np.nextafter(np.float32(448 * 256), np.float32(np.inf)))
"""The float32 number above 448·2^8."""
BELOW = float(np.nextafter(np.float32(0.25), np.float32(0)))
"""The float32 number below a tie of E2M1."""
HALF_STEP = 1.5 * 2.0**-8
"""Three quarters of the step of bfloat16 above 1, a bfloat16 number."""


def code(value, element=ml_dtypes.float4_e2m1fn):
    """The code of a value, by ml_dtypes."""
    return int(np.array([value], np.float64).astype(element).view(np.uint8)[0])


def round_up(amax, most):
    """The E8M0 code of the smallest 2^k with amax ≤ most·2^k, at least 0, in exact rational numbers."""
    quotient, k = Fraction(amax) / Fraction(most), -127
    while Fraction(2) ** k < quotient:
        k += 1
    return k + 127


def round_down(amax, emax):
    """The E8M0 code of the largest 2^k with 2^(k + emax) ≤ amax, at least 0, in exact rational numbers."""
    k = 127
    while k > -127 and Fraction(2) ** (k + emax) > Fraction(amax):
        k -= 1
    return k + 127


NAN_SCALE = int(np.array([math.nan], np.float32).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)[0])
ACCUSATIONS = {
    # library, recipe, dtype, elements of a block, stage, place: the byte of the library, and the third opinion
    "logarithm": ("torchao", "mxfp8-e4m3", "float32", [ABOVE], "scales", 0, 135, round_up(ABOVE, 448)),
    "logarithm of modelopt": ("modelopt", "mxfp8-e4m3", "float32", [ABOVE], "scales", 0, 135, round_up(ABOVE, 448)),
    "logarithm of vLLM": ("vllm", "mxfp8-e4m3", "float32", [ABOVE], "scales", 0, 135, round_up(ABOVE, 448)),
    "logarithm of comfy-kitchen": (
        "comfy-kitchen", "mxfp8-e4m3", "float32", [ABOVE], "scales", 0, 135, round_up(ABOVE, 448),
    ),
    "rounding of vLLM": (
        "vllm", "add-rmsnorm", "bfloat16", [1.0], "residual", 0, 0x3F80,
        int(np.array([1 + HALF_STEP], np.float64).astype(ml_dtypes.bfloat16).view(np.uint16)[0]),
    ),
    "zero of modelopt": ("modelopt", "mxfp4", "float32", [4.0, 0.0], "codes", 1, 8, code(0.0)),
    "tie of modelopt": ("modelopt", "mxfp4", "float32", [4.0, 0.75], "codes", 1, 1, code(0.75)),
    "NaN of modelopt": ("modelopt", "mxfp4", "float32", [4.0, math.nan], "scales", 0, 0, NAN_SCALE),
    "NaN of gguf": ("gguf", "mxfp4", "float32", [4.0, math.nan], "scales", 0, 0, NAN_SCALE),
    "small block of gguf": ("gguf", "mxfp4", "float32", [2.0**-130], "scales", 0, 251, round_down(2.0**-130, 2)),
    "small block of mlx": ("mlx", "mxfp8-e4m3", "float32", [2.0**-130], "scales", 0, 245, round_up(2.0**-130, 448)),
    "small block of jax": (
        "jax", "mxfp8-e4m3", "float16", [0.003, 2.0**-10], "codes", 1, 126, code(2.0**7, ml_dtypes.float8_e4m3fn),
    ),
    "sum of microxcaling": ("microxcaling", "mxfp4", "float32", [4.0, BELOW], "codes", 1, 1, code(BELOW)),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCUSATIONS)
def test_the_third_opinion_is_against_the_library(name):
    library, recipe, dtype, values, stage, place, byte, opinion = ACCUSATIONS[name]
    assert byte != opinion
    if not installed(library):
        pytest.skip(f"{library} is not installed")
    backend = Backend.local(library, load_implementation(library, "cpu"))
    x = torch.zeros(32, 32, dtype=getattr(torch, dtype))
    x[0, : len(values)] = torch.tensor(values)
    if stage == "residual":
        if torch.backends.cpu.get_cpu_capability() != "AVX2":
            pytest.skip("the kernel for AVX2 is wrong")
        stored = backend.call("add_rmsnorm", x, torch.full_like(x, HALF_STEP), torch.ones_like(x[0]))["residual"]
        assert int(stored.view(torch.int16)[0, place]) == byte
        return
    q = quantize(backend, x, find_recipe(recipe))
    stored = linear_scales(q) if stage == "scales" else elements(q.codes, 32, q.recipe)
    assert int(stored[0, place]) == byte


def test_the_table_of_the_page_has_these_bytes():
    listed = {
        one["name"]: tuple(one[field] for field in ("library", "recipe", "byte", "opinion")) for one in DATA["wrong"]
    }
    assert listed == {name: (a[0], a[1], a[-2], a[-1]) for name, a in ACCUSATIONS.items()}
    for one in DATA["wrong"]:
        assert f"| `{one['library']}` {one['recipe']} | {one['byte']} | {one['opinion']} |" in PAGE


@pytest.mark.parametrize("one", DATA["product"], ids=lambda one: f"{one['call']} of {one['operands']}")
def test_products_of_the_page_have_a_confirmed_order(one):
    start = f"| `{one['call']}` | {one['operands']} | "
    on_cpu = one.get("device", "cpu") == "cpu"
    lines = [line for line in PAGE.splitlines() if line.startswith(start)]
    (line,) = (line for line in lines if line.startswith(f"{start}CPU |") == on_cpu)
    confirmed, listed = map(int, line.rpartition(" | ")[2].removesuffix(" |").split(" of "))
    assert listed == len(one["shapes"])
    assert (confirmed == listed) != ("not confirmed: " in line)
    assert all(shape.replace("x", "×") in line for shape in one["shapes"])
    if on_cpu and one["library"] == "torch":
        function = eval(one["function"], {"torch": torch})
        m, k, n = map(int, one["shapes"][0].split("x"))
        order = narrowgauge.accumulation_order(function, m, k, n, dtype=getattr(torch, one["dtype"]))
        assert order.confirmed
