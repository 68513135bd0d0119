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
from narrowgauge.spec.formats import E2M3
from narrowgauge.spec.recipes import WHOLE, Hadamard, Recipe
from tests.native.samples import RECIPES

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
ELSEWHERE = "runs on cpu, but a tensor lies on meta; move it first"
# Each row: a call, its exception, and words of the message in their order.
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    # dtypes
    (lambda: ops.amax(X.double()), TypeError, "x is float32, bfloat16, float16, not float64"),
    (lambda: ops.dequantize(q(codes=q().codes.to(torch.int8))), TypeError, "q.codes is uint8, not int8"),
    (lambda: ops.dequantize(q(scales=q().scales.float())), TypeError, "q.scales is uint8, not float32"),
    # shapes
    (lambda: ops.dequantize(q(shape=(3, 48))), ValueError, "q.codes has shape (3, 24), not (3, 16)"),
    (lambda: ops.dequantize(q(scales=q().scales[:, :1].contiguous())), ValueError, "q.scales (3, 2), not (3, 1)"),
    (lambda: gemm(b=q(codes=q().codes[:2])), ValueError, "b.codes (3, 16), not (2, 16)"),
    # memory
    (lambda: quantize(recipe="nvfp4-sr", random=torch.zeros(3, 16, dtype=torch.int32)[:, ::2]), ValueError,
     "random (3, 8) strides (16, 2) random.contiguous()"),
    (lambda: ops.amax(torch.ones(8)[::2]), ValueError, "x (4,) strides (2,) x.contiguous()"),
    (lambda: gemm(b=q(codes=torch.zeros(3, 32, dtype=torch.uint8)[:, ::2])), ValueError,
     "b.codes (3, 16) strides (32, 2) b.codes.contiguous()"),
    # recipes
    (lambda: quantize(recipe="nvpf4"), ValueError, "no recipe 'nvpf4' (did you mean 'nvfp4'"),
    (lambda: quantize(recipe="nvfp4@te-2.9"), ValueError, "nvfp4 no dialect 'te-2.9' (did you mean 'te-2.8'?)"),
    (lambda: ops.update_scale(torch.ones(4, 3), torch.ones(3), "fp8-delayed-e4m4"), ValueError, "'fp8-delayed-e4m4'"),
    (lambda: ops.pad_sections(X, torch.tensor([3]), "mxfp5"), ValueError, "no recipe 'mxfp5'"),
    (lambda: quantize(recipe=replace(RECIPES["te"], element=E2M3)), NotImplementedError,
     "recipe nvfp4: its element is E2M3, and theirs E2M1"),
    (lambda: quantize(recipe=replace(RECIPES["te"], block=(1, 32))), NotImplementedError,
     "recipe nvfp4: its block is (1, 32), and theirs (1, 16), (16, 16)"),
    (lambda: gemm(b=quantize(recipe="nvfp4@te-native")), ValueError,
     "nvfp4 by nvfp4@te-native: alpha is (a*b)/d and (b*a)*(1/d)"),
    (lambda: gemm(*(quantize(X.bfloat16(), r) for r in ("nvfp4-rht", "nvfp4-rht32"))), ValueError,
     "transform is Hadamard(group=16 Hadamard(group=32"),
    # operands
    (lambda: ops.dequantize(Quantized(torch.zeros(32, 2, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.uint8), None,
     ops.find_recipe("mxfp4"), (3, 32), transposed=True)), ValueError, "mxfp4 stored transposed two rows in a byte"),
    (lambda: ops.dequantize(replace(quantize(recipe="mxfp8-e4m3"), transposed=True)), ValueError,
     "q.codes (32, 3), not (3, 32)"),
    (lambda: ops.dequantize(q(recipe=ops.find_recipe("nvfp4-rowscaled"))), ValueError, "q.amax (3,), not (1,)"),
    (lambda: ops.dequantize(q(swizzled=True)), ValueError, "q.scales (128, 4), not (3, 2)"),
    (lambda: ops.dequantize(q(amax=None)), ValueError, "q.amax is None; nvfp4 tensor scale"),
    (lambda: gemm(b=q(amax=None)), ValueError, "b.amax is None; nvfp4 tensor scale"),
    # sections
    (lambda: ops.gemm_grouped(grouped(), [q(), quantize(recipe="nvfp4-2d")], out_dtype=FP32), ValueError,
     "b[1] is (3, 32), nvfp4-2d"),
    (lambda: ops.gemm_grouped(grouped(), [quantize(recipe="nvfp4-rowscaled")] * 2, out_dtype=FP32), ValueError,
     "b[0] is (3, 32), nvfp4-rowscaled"),
    (lambda: ops.gemm_grouped(grouped(), [q(), q(scales=q().scales.to(META))], out_dtype=FP32), ValueError,
     "gemm_grouped runs on cpu, a part of b lies on meta"),
    # devices
    (lambda: quantize(amax=ONE.to(META)), ValueError, f"kernel quantize_nvfp4_plain_fp32 {ELSEWHERE}"),
    (lambda: quantize(recipe="fp8-delayed-e4m3", scale=ONE.to(META)), ValueError,
     f"kernel quantize_fp8_fp32 {ELSEWHERE}"),
    (lambda: ops.update_scale(torch.ones(4, 3), torch.ones(3).to(META), "fp8-delayed-e4m3"), ValueError,
     f"kernel update_scale {ELSEWHERE}"),
    (lambda: ops.dequantize(q(scales=q().scales.to(META))), ValueError, f"kernel dequantize_lines_fp32 {ELSEWHERE}"),
    (lambda: gemm(c=torch.ones(3, 3, device=META)), ValueError, f"kernel gemm_nvfp4 {ELSEWHERE}"),
    (lambda: ops.quantize_grouped(X, torch.tensor([3]).to(META), "nvfp4"), ValueError,
     f"kernel amax_blocks_fp32 {ELSEWHERE}"),
    (lambda: quantize(X.to(META)), ValueError, "kernel amax_fp32 runs on cpu and cuda, not meta"),
    (lambda: quantize(X.to(META), "fp8-block-1x128"), ValueError,
     "kernel quantize_fp8_fp32 runs on cpu and cuda, not meta"),
    (lambda: ops.pad_sections(X.to(META), torch.tensor([3]), "mxfp4"), ValueError,
     "kernel pad_16 runs on cpu and cuda, not meta"),
    (lambda: launch("amax", "amax_fp32", (1,), (32,), (), device=X.device, shared_bytes=8), ValueError,
     "kernel amax_fp32 8 bytes of dynamic shared memory"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_an_error_names_the_argument(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, words.split(" ")))):
        call()


# Recipes that the kernels do not have.

ONE_OF_EACH = (
    "nvfp4", "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4", "fp8-block-1x128", "fp8-current",
)  # fmt: skip
EVERY_CHOICE = [
    (name, field)
    for name in ONE_OF_EACH
    for field, known in arguments.choices(ops.find_recipe(name)).items()
    if known is not None and field != "scale"
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_field_of_a_recipe_has_choices(name: str) -> None:
    """A new field of Recipe needs choices of the kernels."""
    assert {field.name for field in fields(Recipe)} == set(arguments.choices(ops.find_recipe(name)))


@pytest.mark.parametrize(("name", "field"), [*EVERY_CHOICE, ("nvfp4", "scale"), ("mxfp4", "scale")])
def test_an_unknown_choice_is_refused_by_its_field(name: str, field: str) -> None:
    r, valid = replace(ops.find_recipe(name)), ops.quantize(X, name)
    object.__setattr__(r, field, "something else")
    table = arguments.FAMILIES if field == "scale" else arguments.choices(ops.find_recipe(name))[field]
    known = ", ".join(getattr(choice, "name", str(choice)) for choice in table or ()).replace(str(WHOLE), "all")
    message = f"the native kernels do not have recipe {r}: its {field} is something else, and theirs {known}"
    other = replace(valid, recipe=r)
    operations: list[Callable[[], object]] = [
        lambda: ops.quantize(X, r),
        lambda: ops.quantize_both(X, r),
        lambda: ops.quantize_grouped(X, torch.tensor([3]), r),
        lambda: ops.transform(X, r),
        lambda: ops.dequantize(other),
        lambda: ops.gemm(other, valid, out_dtype=FP32),
        lambda: ops.gemm(valid, other, out_dtype=FP32),
    ]
    for operation in operations:
        with pytest.raises(NotImplementedError, match=re.escape(message)):
            operation()


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
