"""Tensor scales of other libraries: amax, encode scale, decode scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge import adapt
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

F32 = np.float32
MAX = F32(2688)
DECODE: dict[str, Callable[[Any], Any]] = {
    "fl(amax/2688)": lambda amax: amax / MAX,
    "fl(amax·fl(1/2688))": lambda amax: amax * (F32(1) / MAX),
    "fl(1/fl(2688/amax))": lambda amax: F32(1) / (MAX / amax),
    "fl(1/fl(fl(1/amax)·2688))": lambda amax: F32(1) / ((F32(1) / amax) * MAX),
}
ENCODE: dict[str, Callable[[Any], Any]] = {
    "fl(2688/amax)": lambda amax: MAX / amax,
    "fl(fl(1/amax)·2688)": lambda amax: (F32(1) / amax) * MAX,
    "fl(1/fl(amax/2688))": lambda amax: F32(1) / (amax / MAX),
    "fl(1/fl(amax·fl(1/2688)))": lambda amax: F32(1) / (amax * (F32(1) / MAX)),
}


def adapted(recipe: str = "nvfp4", rows: int = 1, **arguments: Any) -> Quantized:
    q = narrowgauge.quantize(torch.zeros(rows, 16), recipe)
    return adapt.quantized(q.codes, q.scales, recipe, (rows, 16), **arguments)


@pytest.mark.parametrize("form", DECODE)
def test_a_documented_decode_scale_is_its_amax(form: str) -> None:
    amaxes = np.random.default_rng(0).uniform(0.5, 4, 100).astype(F32)
    for amax, shown in zip(amaxes, DECODE[form](amaxes), strict=True):
        got = adapted(tensor_scale=shown, tensor_scale_is="decode", true_amax=amax)
        assert (got.amax, got.tensor_scale) == (torch.tensor([amax]), None)


@pytest.mark.parametrize("form", ENCODE)
def test_a_documented_encode_scale_is_its_amax(form: str) -> None:
    amaxes = np.random.default_rng(0).uniform(0.5, 4, 100).astype(F32)
    for amax, shown in zip(amaxes, ENCODE[form](amaxes), strict=True):
        got = adapted("nvfp4@modelopt", tensor_scale=shown, tensor_scale_is="encode", true_amax=amax)
        assert (got.amax, got.tensor_scale) == (torch.tensor([amax]), None)


@pytest.mark.parametrize(("kind", "forms"), [("decode", DECODE), ("encode", ENCODE)])
def test_a_scale_beside_known_roundings_has_no_explanation(kind: Any, forms: dict[str, Any]) -> None:
    recipe = {"decode": "nvfp4", "encode": "nvfp4@modelopt"}[kind]
    amax = F32(3.1415927)
    known = [form(amax) for form in forms.values()]
    for shown in (np.nextafter(max(known), F32(np.inf)), np.nextafter(min(known), F32(0)), known[0] * 2, 1 / known[0]):
        got = adapted(recipe, tensor_scale=shown, tensor_scale_is=kind, true_amax=amax)
        assert got.amax is None
        assert got.tensor_scale == 1 / torch.tensor([shown], dtype=torch.float32)


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("nvfp4", "encode"), ("nvfp4@trtllm", "encode"), ("nvfp4@modelopt", "decode"), ("nvfp4@torchao", "decode"),
     ("nvfp4@compressed-tensors", "encode"), ("fp8-current", "encode"), ("fp8-delayed", "encode")],
)  # fmt: skip
def test_a_scale_of_the_recipes_own_kind_is_unchanged(recipe: str, kind: Any) -> None:
    codes, scales = torch.zeros(1, 16), torch.ones(1, 1)
    for shown in (1 / 3, 0.0, float("inf"), 1e-40):
        got = adapt.quantized(
            codes, scales, recipe, (1, 16), tensor_scale=shown, tensor_scale_is=kind, true_amax=torch.ones(1)
        )
        assert got.amax is None
        assert got.tensor_scale == torch.tensor([shown], dtype=torch.float32)


def test_the_own_kind_is_the_kind_of_the_reference() -> None:
    """`Quantized.tensor_scale` of every dialect, read in the kind that `adapt` takes for its own, comes back."""
    x = torch.full((1, 16), 3.3)
    for name in ("te", "te-2.8", "trtllm", "torchao", "modelopt", "fouroversix", "quark", "flashinfer-trace", "jax"):
        q = narrowgauge.quantize(x, f"nvfp4@{name}")
        kind: Any = "encode" if float(q.tensor_scale) > 1 else "decode"
        got = adapt.quantized(q.codes, q.scales, q.recipe, q.shape, tensor_scale=q.tensor_scale, tensor_scale_is=kind)
        assert got.tensor_scale == q.tensor_scale, name
        other: Any = "decode" if kind == "encode" else "encode"
        got = adapt.quantized(
            q.codes, q.scales, q.recipe, q.shape, tensor_scale=1 / q.tensor_scale, tensor_scale_is=other, amax=q.amax
        )
        assert (got.amax, got.tensor_scale) == (q.amax, None), name


def test_amax() -> None:
    for value in (3.5, torch.tensor(3.5), torch.tensor([[3.5]], dtype=torch.bfloat16), np.float64(3.5)):
        for got in (adapted(amax=value), adapted(tensor_scale=value), adapted("fp8-current", tensor_scale=value)):
            assert got.amax is not None
            assert got.amax.tolist() == [3.5]
            assert got.amax.dtype == torch.float32
            assert got.tensor_scale is None
    assert adapted().amax is None


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), 1e-37, 1e-40])
def test_amaxes_without_a_finite_scale(amax: float) -> None:
    """A kernel that reports 1/enc or amax/2688 is right, with any limits."""
    known = torch.tensor([amax])
    encode = torch.full((1,), 2688.0) / known
    for shown in (known / torch.full((1,), 2688.0), 1 / encode):
        got = adapted(tensor_scale=shown, tensor_scale_is="decode", true_amax=known)
        assert torch.equal(got.amax.nan_to_num(7), known.nan_to_num(7))
    if amax in (0.0, float("inf")):
        assert adapted(tensor_scale=1.0, tensor_scale_is="decode", true_amax=known).amax == known
    assert adapted(tensor_scale=0.5, tensor_scale_is="decode", true_amax=known).amax is None


def test_powers_of_two_of_fp8() -> None:
    recipe = "fp8-current-e4m3-pow2"
    q = narrowgauge.quantize(torch.full((1, 16), 3.3), recipe)
    own = 1 / q.tensor_scale
    assert adapted(recipe, tensor_scale=own, tensor_scale_is="decode", true_amax=q.amax).amax == q.amax
    plain = q.amax / torch.full((1,), 448.0)
    assert adapted(recipe, tensor_scale=plain, tensor_scale_is="decode", true_amax=q.amax).amax is None


def test_a_reported_amax_decides_before_the_true_amax() -> None:
    shown = torch.tensor([2.0]) / torch.full((1,), 2688.0)
    both: dict[str, Any] = {"tensor_scale": shown, "tensor_scale_is": "decode", "true_amax": 3.0}
    got = adapted(amax=2.0, **both)
    assert (got.amax, got.tensor_scale) == (torch.tensor([2.0]), None)
    got = adapted(amax=3.0, **both)
    assert (got.amax, got.tensor_scale) == (torch.tensor([3.0]), 1 / shown)


def test_rows() -> None:
    known = torch.tensor([1.1, 2.3, 0.7])
    shown = known / torch.full((3,), 2688.0)
    arguments: dict[str, Any] = {"tensor_scale_is": "decode", "true_amax": known}
    got = adapted("nvfp4-rowscaled", 3, tensor_scale=shown.view(3, 1), **arguments)
    assert torch.equal(got.amax, known)
    shown[1] *= 2
    got = adapted("nvfp4-rowscaled", 3, tensor_scale=shown, **arguments)
    assert got.amax[0] == known[0]
    assert got.amax[2] == known[2]
    assert got.amax[1] == shown[1] * 2688
    assert got.tensor_scale is None
    with pytest.raises(ValueError, match=r"tensor_scale has shape \(3,\).*not \(2,\)"):
        adapted("nvfp4-rowscaled", 3, tensor_scale=shown[:2])


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_the_amax_of_a_rotated_matrix_is_the_kernels_own(kind: Any) -> None:
    """The order of the additions decides the amax, a number of bfloat16; no order is wrong."""
    recipe = find_recipe("nvfp4-rht")
    for amax in torch.linspace(0.5, 4, 50).bfloat16().float():
        shown = torch.full((1,), 2688.0) / amax if kind == "encode" else amax / torch.full((1,), 2688.0)
        got = adapt.quantized(
            torch.zeros(1, 16), torch.zeros(1, 1), recipe, (1, 16), tensor_scale=shown, tensor_scale_is=kind,
            true_amax=amax * 1.0078125,
        )  # fmt: skip
        assert got.amax == amax
        assert (got.tensor_scale is None) == (kind == "decode")
    wrong = torch.tensor([1.2345678])
    got = adapt.quantized(
        torch.zeros(1, 16), torch.zeros(1, 1), recipe, (1, 16), tensor_scale=wrong, tensor_scale_is=kind, true_amax=1.0
    )
    assert got.amax is None


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("mxfp8-e4m3", {"tensor_scale": 1.0}, "has no tensor scale; omit tensor_scale"),
        ("nvfp4@qwix", {"amax": 1.0}, "has no tensor scale; omit amax"),
        ("nvfp4", {"amax": 1.0, "tensor_scale": 1.0}, "same number; give one of them"),
        ("nvfp4", {"tensor_scale": 1.0, "tensor_scale_is": "decode"}, r"give amax too, or .* nvfp4@modelopt"),
        ("nvfp4@modelopt", {"tensor_scale": 1.0, "tensor_scale_is": "encode"}, r"an encode scale .*nvfp4@trtllm"),
        ("fp8-delayed", {"tensor_scale": 1.0, "tensor_scale_is": "decode"}, "omit tensor_scale, or give the encode"),
        ("fp8-current", {"tensor_scale": 1.0, "tensor_scale_is": "decode"}, "omit tensor_scale, or give the encode"),
        ("nvfp4", {"amax": torch.ones(2)}, r"amax has shape \(1,\) for recipe nvfp4 of \(1, 16\), not \(2,\)"),
    ],
)
def test_scales_that_do_not_fit_are_named(recipe: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapt.quantized(torch.zeros(1, 16), torch.ones(1, 1), recipe, (1, 16), **arguments)


@pytest.mark.parametrize("value", [torch.ones(1, dtype=torch.int32), torch.ones(1).to(torch.float8_e4m3fn), True])
def test_other_dtypes_are_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"amax is float32, not|bool is no tensor"):
        adapted(amax=value)
