"""Timing of gemm-grouped."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.operations.gemm.bench import OUT_DTYPES, RECIPES, product_ceilings, quantize_weight
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.operations.timing.judge_outputs import judge_product
from narrowgauge.harness.operations.timing.operation_bench import (
    BenchInputs,
    BenchTask,
    OperationBench,
    PreparedTask,
    nbytes,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference

_SHARES = {"": (1,) * 8, "ragged": (17, 3000, 129, 700, 40, 2506, 300, 1500), "64 sections": (1,) * 64}
"""Shares of the sections in the rows by variant. The ragged shares are the rows of the sections of 8192 rows."""


def sections_of(task: BenchTask) -> list[int]:
    """Rows of the sections of a grouped product."""
    rows, shares = task.shape[0], _SHARES[task.variant]
    ends = [rows * end // sum(shares) for end in accumulate(shares, initial=0)]
    return [end - start for start, end in pairwise(ends)]


def _prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    (m, k, n), device = task.shape, inputs.device.type
    rows = sections_of(task)
    x, weights = inputs.new_matrix((m, k)), [inputs.new_matrix((n, k)) for _ in rows]
    a = native.quantize_grouped(x, torch.tensor(rows, device=inputs.device), task.recipe)
    b = [quantize_weight(w, task.recipe) for w in weights]
    pairs = list(zip(a.sections(), b, strict=True))
    out_dtype, dtype = OUT_DTYPES[device]
    order = order_of(load_backend("native", device), [section for section, _ in pairs], b)
    return PreparedTask(
        native=[partial(native.gemm_grouped, a, b, out_dtype=out_dtype)],
        reference=[partial(reference.gemm_grouped, a, b, out_dtype=out_dtype)],
        judge=lambda y: judge_product(y, pairs, order),
        ceilings=product_ceilings([pairs], [list(zip(torch.split(x, rows), weights, strict=True))], device),
        read=nbytes((*b, a.codes, a.scales)), elements=m * n, flop=2 * m * n * k, dtype=dtype,
    )  # fmt: skip


BENCH = OperationBench(
    rank=5,
    rows=[("gemm-grouped", name, variant) for variant in _SHARES for name in RECIPES],
    prepare=_prepare,
    product=True,
    fewest_rows=512,  # 8 of each of 64 sections
)
