"""Tasks of the bench: operations, recipes and sizes, smaller on a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from narrowgauge.harness.cases.case import matching
from narrowgauge.harness.cases.operations import OperationError, parts_of_operations
from narrowgauge.harness.operations.contracts.bench import (
    BENCH,
    CACHE_BENCH,
    PREFILL_BENCH,
    PRODUCT_BENCH,
)
from narrowgauge.harness.operations.timing.operation_bench import BenchTask, OperationBench

LAUNCH = "launch"
"""Operation of the rows for the cost of a call. These rows have no size."""
_SIZES = {
    "cuda": ("16384x16384", "8192x8192x8192", "16x8192x8192", "64x8192x8192", "128x8192x8192"),
    "cpu": ("1024x2048", "512x512x512", "16x1024x1024"),
}


def benches() -> list[OperationBench]:
    """The object BENCH of every operation with a `bench.py`, and those of the shipped contracts, in the order of the
    tables. Raises OperationError."""
    found = [BENCH, PRODUCT_BENCH, CACHE_BENCH, PREFILL_BENCH]
    for module in parts_of_operations("bench"):
        if not isinstance(bench := getattr(module, "BENCH", None), OperationBench):
            raise OperationError(f"{module.__file__}: BENCH is {type(bench).__name__}, not an OperationBench")
        found.append(bench)
    return sorted(found, key=lambda bench: bench.rank)


def bench_of(task: BenchTask) -> OperationBench:
    """The bench with the rows of a task."""
    row = (task.operation, task.recipe, task.variant)
    return next(bench for bench in benches() if row in bench.rows)


def parse(size: str) -> tuple[int, ...]:
    """Numbers of `4096x14336` or `8192x8192x8192`. Raises ValueError for any other text."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", size):
        raise ValueError(f"a size is MxK of a matrix or MxKxN of a product, not {size!r}")
    shape = tuple(map(int, size.split("x")))
    if any(extent % 16 for extent in shape) or (len(shape) == 2 and any(extent % 128 for extent in shape)):
        raise ValueError(f"extents are multiples of 128, those of a product of 16; {size} has others")
    return shape


def tasks(device: str, sizes: Sequence[str] = (), keyword: str = "", *, quick: bool = False) -> list[BenchTask]:
    """Tasks of a run with these options, in the order of the tables. `quick`: only the first size of each kind.

    Raises ValueError for an invalid size or keyword expression, OperationError for a bench that cannot be loaded.
    """
    shapes = [parse(size) for size in sizes or _SIZES[device]]
    matches, found = matching(keyword), benches()
    matrices, products = ([shape for shape in shapes if len(shape) == kind] for kind in (2, 3))
    if quick:
        matrices, products = matrices[:1], products[:1]
    extra = [parse(size) for bench in found for size in bench.further] if device == "cuda" else []
    further = [] if sizes or quick else [shape for shape in dict.fromkeys(extra) if shape not in shapes]
    return [
        task
        for shape in (*matrices, *further, *products)
        for bench in found
        for task in bench.tasks(shape)
        if shape in shapes or any(fnmatchcase(task.id, pattern) for pattern in bench.further.get(task.size, ()))
        if matches(task.id)
    ]
