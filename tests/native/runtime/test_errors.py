"""Errors that the native kernels alone raise: memory, devices, parts of operands, and recipes without a kernel.

Errors of both sides: tests/spec/test_arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from narrowgauge.native import ops
from narrowgauge.native.ops import Quantized
from narrowgauge.native.runtime import arguments
from narrowgauge.native.runtime.launch import launch
from narrowgauge.spec.formats import E2M3, E4M3, E8M0
from narrowgauge.spec.recipes import WHOLE, Hadamard, Recipe, recipe_names
from tests.native.samples import FP8_NAMES, NAMES, RECIPES

X = torch.ones(3, 32)
FP32 = torch.float32


def q(**changes: object) -> Quantized:
    """A valid (3, 32) operand with some parts replaced."""
    return replace(ops.quantize(X, "nvfp4"), **changes)


def quantize(x: torch.Tensor = X, recipe: object = "nvfp4", **options: object) -> Quantized:
    return ops.quantize(x, recipe, **options)  # type: ignore[arg-type]


def gemm(a: Quantized | None = None, b: Quantized | None = None, **options: object) -> torch.Tensor:
    return ops.gemm(a or q(), b or q(), **{"out_dtype": FP32, **options})  # type: ignore[arg-type]


def grouped() -> ops.GroupedQuantized:
    """Two sections of X."""
    return ops.quantize_grouped(X, torch.tensor([1, 2]), "nvfp4")


META = torch.device("meta")
ONE = torch.ones(1)

REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    # dtypes
    ("amax of float64", lambda: ops.amax(X.double()), TypeError, "x is float32, bfloat16, float16, not float64"),
    ("codes of int8", lambda: ops.dequantize(q(codes=q().codes.to(torch.int8))), TypeError,
     "q.codes is uint8, not int8"),
    ("scales of float32", lambda: ops.dequantize(q(scales=q().scales.float())), TypeError,
     "q.scales is uint8, not float32"),
    # shapes
    ("codes of another K", lambda: ops.dequantize(q(shape=(3, 48))), ValueError,
     "q.codes has shape (3, 24), not (3, 16)"),
    ("scales of another K", lambda: ops.dequantize(q(scales=q().scales[:, :1].contiguous())), ValueError,
     "q.scales has shape (3, 2), not (3, 1)"),
    ("b of wrong codes", lambda: gemm(b=q(codes=q().codes[:2])), ValueError, "b.codes has shape (3, 16), not (2, 16)"),
    # memory
    ("strided words", lambda: quantize(recipe="nvfp4-sr", random=torch.zeros(3, 16, dtype=torch.int32)[:, ::2]),
     ValueError,
     "random of shape (3, 8) has strides (16, 2); the kernels read contiguous memory: pass random.contiguous()"),
    ("amax of every second", lambda: ops.amax(torch.ones(8)[::2]), ValueError,
     "x of shape (4,) has strides (2,); the kernels read contiguous memory: pass x.contiguous()"),
    ("strided codes", lambda: ops.dequantize(q(codes=torch.zeros(3, 32, dtype=torch.uint8)[:, ::2])), ValueError,
     "q.codes of shape (3, 16) has strides (32, 2); the kernels read contiguous memory: pass q.codes.contiguous()"),
    # recipes
    ("no such recipe", lambda: quantize(recipe="nvpf4"), ValueError,
     "no recipe is called 'nvpf4' (did you mean 'nvfp4'"),
    ("no such dialect", lambda: quantize(recipe="nvfp4@te-2.9"), ValueError,
     "recipe nvfp4 has no dialect 'te-2.9' (did you mean 'te-2.8'?)"),
    ("elements of another format", lambda: quantize(recipe=replace(RECIPES["te"], element=E2M3)), NotImplementedError,
     "the native kernels do not have recipe nvfp4: its element is E2M3, and theirs E2M1"),
    ("another block", lambda: quantize(recipe=replace(RECIPES["te"], block=(1, 32))), NotImplementedError,
     "the native kernels do not have recipe nvfp4: its block is (1, 32), and theirs (1, 16), (16, 16)"),
    ("operands of two orders of alpha", lambda: gemm(b=quantize(recipe="nvfp4@te-native")), ValueError,
     "gemm cannot multiply nvfp4 by nvfp4@te-native: alpha is (a*b)/d and (b*a)*(1/d)"),
    ("operands of two rotations", lambda: gemm(*(quantize(X.bfloat16(), r) for r in ("nvfp4-rht", "nvfp4-rht32"))),
     ValueError, "transform is Hadamard(group=16, signs=55272) and Hadamard(group=32, signs=55272)"),
    # operands stored transposed
    ("packed elements stored transposed", lambda: ops.dequantize(Quantized(torch.zeros(32, 2, dtype=torch.uint8),
     torch.zeros(1, 3, dtype=torch.uint8), None, ops.find_recipe("mxfp4"), (3, 32), transposed=True)), ValueError,
     "q of recipe mxfp4 is stored transposed, two rows in a byte; the kernels read E2M1 along K"),
    ("codes of a transpose", lambda: ops.dequantize(replace(quantize(recipe="mxfp8-e4m3"), transposed=True)),
     ValueError, "q.codes has shape (32, 3), not (3, 32)"),
    # amaxes and swizzled scales of operands
    ("an operand of one amax for all rows", lambda: ops.dequantize(q(recipe=ops.find_recipe("nvfp4-rowscaled"))),
     ValueError, "q.amax has shape (3,), not (1,)"),
    ("linear scales said to be swizzled", lambda: ops.dequantize(q(swizzled=True)), ValueError,
     "q.scales has shape (128, 4), not (3, 2)"),
    # sections
    ("a matrix of another recipe", lambda: ops.gemm_grouped(grouped(), [q(), quantize(recipe="nvfp4-2d")],
     out_dtype=FP32), ValueError, "b[1] is (3, 32), nvfp4-2d"),
    ("a matrix of row scales", lambda: ops.gemm_grouped(grouped(), [quantize(recipe="nvfp4-rowscaled")] * 2,
     out_dtype=FP32), ValueError, "b[0] is (3, 32), nvfp4-rowscaled"),
    ("a matrix elsewhere", lambda: ops.gemm_grouped(grouped(), [q(), q(scales=q().scales.to(META))], out_dtype=FP32),
     ValueError, "gemm_grouped runs on cpu, but a part of b lies on meta; move it first"),
    # operands
    ("an operand without amax", lambda: ops.dequantize(q(amax=None)), ValueError,
     "q.amax is None; nvfp4 has a tensor scale"),
    ("b without amax", lambda: gemm(b=q(amax=None)), ValueError, "b.amax is None; nvfp4 has a tensor scale"),
    # devices
    ("amax elsewhere", lambda: quantize(amax=ONE.to(META)), ValueError,
     "kernel quantize_nvfp4_plain_fp32 runs on cpu, but a tensor lies on meta; move it first"),
    ("scales elsewhere", lambda: ops.dequantize(q(scales=q().scales.to(META))), ValueError,
     "kernel dequantize_lines_fp32 runs on cpu, but a tensor lies on meta; move it first"),
    ("c elsewhere", lambda: gemm(c=torch.ones(3, 3, device=META)), ValueError,
     "kernel gemm_nvfp4 runs on cpu, but a tensor lies on meta; move it first"),
    ("x on no device", lambda: quantize(X.to(META)), ValueError, "kernel amax_fp32 runs on cpu and cuda, not meta"),
    ("x and amax on no device", lambda: quantize(X.to(META), amax=ONE.to(META)), ValueError,
     "kernel quantize_nvfp4_plain_fp32 runs on cpu and cuda, not meta"),
    ("dynamic shared memory on a CPU",
     lambda: launch("amax", "amax_fp32", (1,), (32,), (), device=X.device, shared_bytes=8), ValueError,
     "kernel amax_fp32 asks for 8 bytes of dynamic shared memory; a CPU has none"),
    ("sizes elsewhere", lambda: ops.quantize_grouped(X, torch.tensor([3]).to(META), "nvfp4"), ValueError,
     "kernel amax_blocks_fp32 runs on cpu, but a tensor lies on meta; move it first"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_it_is_refused_with_a_sentence(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


# Recipes that the kernels do not have.

ONE_OF_EACH = (
    "nvfp4",
    "mxfp8-e4m3",
    "mxfp8-e5m2",
    "mxfp6-e3m2",
    "mxfp6-e2m3",
    "mxfp4",
    "fp8-block-1x128",
    "fp8-current",
)
EVERY_CHOICE = [
    (name, field)
    for name in ONE_OF_EACH
    for field, known in arguments.choices(ops.find_recipe(name)).items()
    if known is not None and field != "scale"
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_field_of_a_recipe_has_choices(name: str) -> None:
    """A field that somebody adds is a choice that the kernels have not heard of."""
    assert {field.name for field in fields(Recipe)} == set(arguments.choices(ops.find_recipe(name)))


@pytest.mark.parametrize(("name", "field"), [*EVERY_CHOICE, ("nvfp4", "scale"), ("mxfp4", "scale")])
def test_an_unknown_choice_is_refused_by_its_field(name: str, field: str) -> None:
    r, valid = replace(ops.find_recipe(name)), ops.quantize(X, name)
    object.__setattr__(r, field, "something else")
    table = arguments.FAMILIES if field == "scale" else arguments.choices(ops.find_recipe(name))[field]
    known = ", ".join(getattr(choice, "name", str(choice)) for choice in table or ()).replace(str(WHOLE), "all")
    message = f"the native kernels do not have recipe {r}: its {field} is something else, and theirs {known}"
    other = replace(valid, recipe=r)
    doors: list[Callable[[], object]] = [
        lambda: ops.quantize(X, r),
        lambda: ops.quantize_both(X, r),
        lambda: ops.quantize_grouped(X, torch.tensor([3]), r),
        lambda: ops.transform(X, r),
        lambda: ops.dequantize(other),
        lambda: ops.gemm(other, valid, out_dtype=FP32),
        lambda: ops.gemm(valid, other, out_dtype=FP32),
    ]
    for door in doors:
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            door()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mxfp8-e4m3", {"nan_code": 31}, "its nan_code is 31, and theirs 127"),
        ("mxfp6-e3m2", {"nan_code": 7}, "its nan_code is 7, and theirs 31"),
        ("mxfp4", {"nan_code": 0}, "its nan_code is 0, and theirs 7"),
        ("mxfp8-e5m2", {"block": (1, 16)}, "its block is (1, 16), and theirs (1, 32), (32, 32)"),
        ("mxfp8-e5m2", {"transform": Hadamard()}, "its transform is Hadamard(group=16, signs=55272), and theirs None"),
    ],
)
def test_a_choice_of_another_element_or_family_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        ops.quantize(X.bfloat16(), replace(ops.find_recipe(name), **changes))


def test_recipes_of_other_libraries_are_refused_by_a_field() -> None:
    others = [name for name in recipe_names() if name not in (*NAMES, *FP8_NAMES)]
    assert others, "other dialects are recipes by now"
    for name in others:
        r = ops.find_recipe(name)
        with pytest.raises(
            NotImplementedError, match=rf"^the native kernels do not have recipe {name}: its \w+ is "
        ) as e:
            ops.quantize(X, r, scale=torch.ones(1) if r.tensor_scale == "given" else None)
        field = str(e.value).split(": its ")[1].split(" ")[0]
        base = {E4M3: "nvfp4", E8M0: "mxfp8-e4m3"}.get(r.scale, "fp8-block-1x128")
        assert getattr(r, field) != getattr(ops.find_recipe(base), field)
    for name in set(recipe_names()) - set(others):
        assert arguments.supported(name) == ops.find_recipe(name)
