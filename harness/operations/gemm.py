"""GEMM, judged on the kernel's own codes: quantize both operands, then multiply."""

from __future__ import annotations

from typing import Any

import torch

from harness.backend import Backend, Unsupported
from harness.checks.bound import bound
from harness.finding import float_view
from harness.operations.outcome import Outcome
from harness.operations.quantize import quantize_stages
from harness.operations.repeated import Tensors, repeated, timed
from reference import ops as reference
from reference.bounds import bounds
from reference.quantized import Quantized
from reference.recipes import Recipe


def _operand(name: str, matrix: torch.Tensor, recipe: Recipe, backend: Backend, outcome: Outcome) -> Quantized:
    oracle = reference.quantize(matrix, recipe)
    try:
        kernel = backend.quantize(matrix, recipe)
    except Unsupported:
        return oracle
    outcome.stages += quantize_stages(matrix, kernel, oracle, prefix=f"{name}.")
    if kernel.amax is None:
        kernel.amax = oracle.amax
    return kernel


def judge_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    recipe: Recipe,
    backend: Backend,
    *,
    out_dtype: torch.dtype,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Outcome:
    """Run and judge x @ w.T (+ c) (+ bias), x (M, K) and w (N, K).

    The operands are quantized by the backend where it quantizes, and judged so; the product is judged on those very
    codes, so that a wrong code is found once. Where it does not quantize this, it is given the reference's operands.
    """
    outcome = Outcome()
    a, b = (_operand(name, matrix, recipe, backend, outcome) for name, matrix in (("x", x), ("w", w)))
    shape = (x.shape[0], w.shape[0])

    def call(given: Tensors) -> Tensors:
        left = Quantized(given["a.codes"], given["a.scales"], given["a.amax"], recipe, a.shape)  # type: ignore[arg-type]
        right = Quantized(given["b.codes"], given["b.scales"], given["b.amax"], recipe, b.shape)  # type: ignore[arg-type]
        options = {key: given[key] for key in ("c", "bias") if given[key] is not None}
        out = backend.tensor("gemm", shape, out_dtype, left, right, out_dtype=out_dtype, **options)
        return {"output": out}

    inputs: Tensors = {
        "a.codes": a.codes, "a.scales": a.scales, "a.amax": a.amax,
        "b.codes": b.codes, "b.scales": b.scales, "b.amax": b.amax, "c": c, "bias": bias,
    }  # fmt: skip
    outputs, protection, outcome.seconds = repeated(backend, x.device, inputs, call)
    outcome.stages += protection
    limits, outcome.seconds_reference = timed(x.device, lambda: bounds(a, b, out_dtype=out_dtype, c=c, bias=bias))
    output = outputs["output"]
    assert output is not None

    def describe(row: int, column: int) -> dict[str, Any]:
        here = (row, column)
        parts = {
            "expected": limits.expected[here], "lower": limits.lower[here], "upper": limits.upper[here],
            "actual": output[here],
        }  # fmt: skip
        found: dict[str, Any] = {"row": row, "column": column, "tile": f"({row // 128}, {column // 128})"}
        for name, value in parts.items():
            found[name], found[f"{name}_bits"] = float_view(value)
        found["rule"] = "exact" if bool(limits.exact[here]) else "bound"
        return found

    outcome.stages.append(bound("output", output, limits, describe=describe))
    outcome.outputs = {"a.codes": a.codes, "a.scales": a.scales, "b.codes": b.codes, "b.scales": b.scales, **outputs}
    outcome.actual, outcome.expected, outcome.limits = output, limits.expected, limits
    return outcome
