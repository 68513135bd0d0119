"""Timing of the native kernels of shipped contracts of products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.contracts.gemm import weight_only_gemm
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.harness.operations.timing.judge_outputs import CONTRACT, Verdict
from narrowgauge.harness.operations.timing.operation_bench import (
    DEQUANTIZED,
    MATMUL,
    BenchInputs,
    BenchTask,
    OperationBench,
    PreparedTask,
    nbytes,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.contracts.evaluate import parts_of
from narrowgauge.spec.program import CODES
from narrowgauge.spec.quantized import Quantized

_RECIPES = ("nvfp4", "mxfp4", "mxfp8-e4m3", "fp8-current")
_JUDGED = 64
"""Rows of a and of b that are judged, at equal distances."""


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    m, k, n = task.shape
    a, w = inputs.new_matrix((m, k)), inputs.new_matrix((n, k))
    b = native.quantize(w, task.recipe)
    weights = [replace(b, codes=codes, scales=scales) for codes, scales in inputs.copies(b.codes, b.scales)]
    return PreparedTask(
        native=[partial(native.weight_only_gemm, a, copied) for copied in weights],
        reference=[lambda: a @ reference.dequantize(b, a.dtype).T],
        judge=partial(_judge, a, b),
        ceilings={
            MATMUL: [partial(_matmul, x, y) for x, y in inputs.copies(a, w)],
            DEQUANTIZED: [partial(_dequantize_and_multiply, a, copied) for copied in weights],
        },
        read=nbytes((a, b)), elements=m * n, flop=2 * m * n * k,
    )  # fmt: skip


def _matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a @ w.T


def _dequantize_and_multiply(a: torch.Tensor, b: Quantized) -> torch.Tensor:
    return a @ native.dequantize(b, a.dtype).T


def _judge(a: torch.Tensor, b: Quantized, y: Any) -> Verdict:
    rows, columns = (
        torch.arange(0, size, max(1, size // _JUDGED), device=a.device) for size in (a.shape[0], b.shape[0])
    )
    scales = b.scales if b.recipe.whole else b.scales[columns]
    part = replace(b, codes=b.codes[columns], scales=scales, shape=(len(columns), b.shape[1]))
    dtype = str(a.dtype).removeprefix("torch.")
    program = weight_only_gemm.trace({"a": dtype, "b": CODES}, {"b_recipe": b.recipe.name}, {})
    tensors = {"a": a[rows], **parts_of(program, {"b": part})}
    verdict = Verdict(rule=CONTRACT)
    for stage in judge_contract(program, tensors, {"output": y[rows][:, columns]}).stages:
        verdict.add(stage)
    return verdict


PRODUCT_BENCH = OperationBench(
    rank=4.5,
    rows=[(weight_only_gemm.name, recipe, "") for recipe in _RECIPES],
    prepare=_prepare,
    product=True,
)
