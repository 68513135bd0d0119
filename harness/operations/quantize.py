"""Quantize, judged stage by stage: each stage is given the kernel's own result of the stage before."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch

from harness.backend import Backend, Unsupported, as_quantized
from harness.checks.exact import exact_codes, exact_floats
from harness.checks.stage import StageResult
from harness.finding import bits, float_view
from harness.operations.outcome import Outcome
from harness.operations.repeated import Tensors, repeated, timed
from reference import ops as reference
from reference.blocks import block_amax
from reference.layout import unpack
from reference.quantize import encode_elements
from reference.quantized import Quantized
from reference.recipes import Recipe
from reference.scaling import block_scales, element_factors, tensor_scale


def judge_quantize(x: torch.Tensor, recipe: Recipe, backend: Backend) -> Outcome:
    """Run and judge quantize of `x` (M, K), and dequantize of its result where the backend has it."""

    def call(given: Tensors) -> Tensors:
        q = backend.quantize(given["x"], recipe)  # type: ignore[arg-type]
        return {"codes": q.codes, "scales": q.scales, "amax": q.amax, "tensor_scale": q.tensor_scale}

    outputs, protection, seconds = repeated(backend, x.device, {"x": x}, call)
    kernel = as_quantized(outputs, x, recipe)
    oracle, seconds_reference = timed(x.device, lambda: reference.quantize(x, recipe))
    outcome = Outcome(protection, outputs, seconds=seconds, seconds_reference=seconds_reference)
    outcome.stages += quantize_stages(x, kernel, oracle)
    if kernel.amax is None:
        kernel.amax = oracle.amax
    outcome.expected = reference.dequantize(oracle)
    same = all(torch.equal(*pair) for pair in ((kernel.codes, oracle.codes), (kernel.scales, oracle.scales)))
    outcome.actual = outcome.expected if same else reference.dequantize(kernel)
    if backend.has("dequantize"):
        with suppress(Unsupported):  # what quantize gave is judged all the same
            _judge_dequantize(kernel, x.dtype, backend, outcome)
    return outcome


def _judge_dequantize(kernel: Quantized, dtype: torch.dtype, backend: Backend, outcome: Outcome) -> None:
    """Run dequantize on the kernel's own result, guarded as quantize was, and add to its stages."""

    def call(given: Tensors) -> Tensors:
        q = Quantized(**given, recipe=kernel.recipe, shape=kernel.shape)  # type: ignore[arg-type]
        return {"values": backend.tensor("dequantize", kernel.shape, dtype, q, dtype)}

    inputs: Tensors = {
        "codes": kernel.codes, "scales": kernel.scales, "amax": kernel.amax, "tensor_scale": kernel.tensor_scale,
    }  # fmt: skip
    outputs, protection, _ = repeated(backend, kernel.codes.device, inputs, call)
    for before, now in zip(outcome.stages, protection, strict=False):  # memory and repeat come first in both
        before.add(now)
    values = outputs["values"]
    assert values is not None
    outcome.stages.append(_values(kernel, values))
    outcome.outputs["values"] = values


def quantize_stages(x: torch.Tensor, kernel: Quantized, oracle: Quantized, prefix: str = "") -> list[StageResult]:
    """amax, tensor scale, block scales and codes of `kernel`, a quantization of `x`; `oracle` is the reference's.

    A stage that the kernel does not show (no amax, no tensor scale) is not judged and does not appear.
    """
    recipe = oracle.recipe
    assert oracle.amax is not None
    assert oracle.tensor_scale is not None
    stages = []
    amax, encode = oracle.amax, oracle.tensor_scale
    if kernel.amax is not None:
        stages.append(_scalar(prefix + "amax", kernel.amax, amax, "amaxes"))
        amax = kernel.amax
        encode = tensor_scale(amax, recipe)
    if kernel.tensor_scale is not None:
        stages.append(_scalar(prefix + "tensor scale", kernel.tensor_scale, encode, "tensor scales"))
        encode = kernel.tensor_scale
    as_oracle = torch.equal(encode, oracle.tensor_scale)

    @cache
    def blocks() -> torch.Tensor:  # a pass over x that a right kernel does not need
        return block_amax(x, recipe.block[1], propagate_nan=recipe.nan == "propagate")

    scales = oracle.scales if as_oracle else block_scales(blocks(), encode, recipe)

    def describe_scale(row: int, column: int) -> dict[str, Any]:
        expected, actual = int(scales[row, column]), int(kernel.scales[row, column])
        value, raw = float_view(blocks()[row, column])
        return {
            "row": row, "block": column, "input": value, "input_bits": raw, "tensor_scale": float(encode),
            **_codes(expected, actual, recipe.scale),
        }  # fmt: skip

    stages.append(
        exact_codes(
            prefix + "scales", kernel.scales, scales, recipe.scale, noun="block scales", describe=describe_scale
        )
    )

    if as_oracle and torch.equal(kernel.scales, oracle.scales):
        packed = oracle.codes
    else:
        packed = encode_elements(x, kernel.scales, encode, recipe)
    columns = x.shape[1]

    def describe_code(row: int, column: int) -> dict[str, Any]:
        at = slice(column // 2, column // 2 + 1)
        shift = column % 2 * 4
        expected, actual = (int(p[row, at]) >> shift & 0xF for p in (packed, kernel.codes))
        value, raw = float_view(x[row, column])
        block = column // recipe.block[1]
        here = kernel.scales[row : row + 1, block : block + 1]
        scale = int(here)
        scaled = float(x[row, column].float() * element_factors(here, encode, recipe))
        return {
            "row": row, "column": column, "block": block, "lane": column % recipe.block[1], "input": value,
            "input_bits": raw, "scaled": scaled, "scale": recipe.scale.value(scale),
            "scale_bits": bits(scale, recipe.scale.bits), **_codes(expected, actual, recipe.element),
        }  # fmt: skip

    if torch.equal(kernel.codes, packed):  # the padding nibble of an odd K is compared too
        stages.append(StageResult(prefix + "codes", "exact", x.numel()))
        return stages
    expected, actual = unpack(packed, columns), unpack(kernel.codes, columns)
    result = exact_codes(prefix + "codes", actual, expected, recipe.element, noun="codes", describe=describe_code)
    if result.right:
        wrong = int((kernel.codes != packed).sum())
        result.mismatches = wrong
        result.sentence = f"{wrong} padding nibbles behind K = {columns} are not 0"
    stages.append(result)
    return stages


def _codes(expected: int, actual: int, fmt: Any) -> dict[str, Any]:
    return {
        "expected": fmt.value(expected), "expected_bits": bits(expected, fmt.bits),
        "actual": fmt.value(actual), "actual_bits": bits(actual, fmt.bits),
    }  # fmt: skip


def _floats(expected: torch.Tensor, actual: torch.Tensor) -> dict[str, Any]:
    (e, e_bits), (a, a_bits) = float_view(expected), float_view(actual)
    return {"expected": e, "expected_bits": e_bits, "actual": a, "actual_bits": a_bits}


def _scalar(stage: str, actual: torch.Tensor, expected: torch.Tensor, noun: str) -> StageResult:
    return exact_floats(stage, actual, expected, noun=noun, describe=lambda _, i: _floats(expected[i], actual[i]))


def _values(kernel: Quantized, values: torch.Tensor) -> StageResult:
    expected = reference.dequantize(kernel, values.dtype)
    recipe = kernel.recipe

    def describe(row: int, column: int) -> dict[str, Any]:
        block = column // recipe.block[1]
        code = int(kernel.codes[row, column // 2]) >> (column % 2 * 4) & 0xF
        scale = int(kernel.scales[row, block])
        return {
            "row": row, "column": column, "block": block, "code_bits": bits(code, recipe.element.bits),
            "scale_bits": bits(scale, recipe.scale.bits), **_floats(expected[row, column], values[row, column]),
        }  # fmt: skip

    return exact_floats("values", values, expected, noun="dequantized values", describe=describe)
