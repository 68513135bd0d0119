"""Timing of gemm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.operations.timing.judge_outputs import judge_product
from narrowgauge.harness.operations.timing.operation_bench import (
    DEQUANTIZED,
    MATMUL,
    BenchInputs,
    BenchTask,
    Calls,
    OperationBench,
    Peer,
    PreparedTask,
    nbytes,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation

RECIPES = ("nvfp4", "mxfp8-e4m3", "fp8-current", "fp8-block-1x128")
_WEIGHTS = {"fp8-block-1x128": "fp8-block-128x128"}
"""Recipe of the first operand to the recipe of the second, if the two differ."""
OUT_DTYPES = {"cpu": (torch.float32, "fp32"), "cuda": (torch.bfloat16, "bf16")}
"""Dtype of the output and its name, by device."""
Pairs = Sequence[tuple[Quantized, Quantized]]
Matrices = Sequence[tuple[torch.Tensor, torch.Tensor]]


def quantize_weight(w: torch.Tensor, recipe: str) -> Quantized:
    """The second operand (N, K) of a product whose first operand has this recipe."""
    return native.quantize(w, _WEIGHTS.get(recipe, recipe))


def product_ceilings(pairs: Sequence[Pairs], matrices: Sequence[Matrices], device: str) -> dict[str, Calls]:
    """torch's matmul of the same shapes: of bfloat16 matrices and of decoded operands; on a CPU of float64 and of
    float32.

    The arguments hold the copies of the operands of each call.
    """
    if device == "cpu":
        matrices = [[(operand(a), operand(b)) for a, b in call_pairs] for call_pairs in pairs]
    decoded, _ = OUT_DTYPES[device]

    def multiply(products: Matrices) -> list[torch.Tensor]:
        return [a @ b.T for a, b in products]

    def dequantize_and_multiply(products: Pairs) -> list[torch.Tensor]:
        return [native.dequantize(a, decoded) @ native.dequantize(b, decoded).T for a, b in products]

    return {
        MATMUL: [partial(multiply, operands) for operands in matrices],
        DEQUANTIZED: [partial(dequantize_and_multiply, operands) for operands in pairs],
    }


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    (m, k, n), device = task.shape, inputs.device.type
    x, w = inputs.new_matrix((m, k)), inputs.new_matrix((n, k))
    a, b = native.quantize(x, task.recipe), quantize_weight(w, task.recipe)
    out_dtype, dtype = OUT_DTYPES[device]
    order = order_of(load_backend("native", device), a, b)
    pairs = [
        (replace(a, codes=a_codes, scales=a_scales), replace(b, codes=b_codes, scales=b_scales))
        for a_codes, a_scales, b_codes, b_scales in inputs.copies(a.codes, a.scales, b.codes, b.scales)
    ]
    matrices = [[(x_copy, w_copy)] for x_copy, w_copy in inputs.copies(x, w)]
    return PreparedTask(
        native=[partial(native.gemm, *pair, out_dtype=out_dtype) for pair in pairs],
        reference=[partial(reference.gemm, a, b, out_dtype=out_dtype)],
        judge=lambda y: judge_product(y, [(a, b)], order),
        ceilings=product_ceilings([[pair] for pair in pairs], matrices, device),
        read=nbytes((a, b)), elements=m * n, flop=2 * m * n * k, dtype=dtype,
    )  # fmt: skip


def _scaled_mm(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torch's product of FP8 codes. The tensor scales are 1."""
    if task.recipe != "fp8-current":
        return None
    m, k, n = task.shape
    unit_scale = torch.ones((), device=inputs.device)
    a, b = (
        replace(native.quantize(inputs.new_matrix(shape), find_recipe(task.recipe)), scales=unit_scale.view(1, 1))
        for shape in ((m, k), (n, k))
    )
    left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))

    def call(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            left, right.T, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16, use_fast_accum=False
        )

    hopper = inputs.device.type == "cuda" and torch.cuda.get_device_capability(inputs.device) == (9, 0)
    order = Summation("aligned-13-32-128") if hopper else Summation()
    return Peer(
        [partial(call, *operands) for operands in inputs.copies(left, right)],
        lambda y: judge_product(y, [(a, b)], order),
    )


def _launches(x: torch.Tensor) -> Mapping[tuple[str, str], Callable[[], Any]]:
    q = native.quantize(x, "nvfp4")
    return {("nvfp4", "gemm"): lambda: native.gemm(q, q, out_dtype=torch.bfloat16)}


BENCH = OperationBench(
    rank=4,
    rows=[("gemm", name, "") for name in RECIPES],
    prepare=_prepare,
    product=True,
    peers={"torch._scaled_mm": _scaled_mm},
    launches=_launches,
)
