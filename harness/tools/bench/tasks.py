"""Tasks of the bench: operations, recipes and sizes, smaller on a CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from narrowgauge.harness.cases.case import matching

_NVFP4 = (
    "nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-sr", "nvfp4-rht-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae",
)  # fmt: skip
_OWN_AMAX = ("nvfp4", "nvfp4-rht", "nvfp4-rht-sr")
"""Recipes that are also timed with their own amax pass."""
_OTHERS = (
    "mxfp8-e4m3", "mxfp8-e5m2", "mxfp8-2d", "fp8-block-1x128", "fp8-block-128x128", "fp8-current", "fp8-delayed",
)  # fmt: skip
_DECODED = ("nvfp4", "mxfp8-e4m3", "fp8-block-1x128")
_MULTIPLIED = ("nvfp4", "mxfp8-e4m3", "fp8-current", "fp8-block-1x128")
GIVEN = ", amax given"
RAGGED, MANY = "ragged", "64 sections"
"""Variants of a grouped product. Without a variant it has 8 sections of equal size."""
LAUNCH = "launch"
"""Operation of the rows for the cost of a call. These rows have no size."""

MEMORY = (
    *(("quantize", name, f"{way}{GIVEN}") for name in _NVFP4 for way in ("rowwise", "both")),
    *(("quantize", name, way) for name in _OWN_AMAX for way in ("rowwise", "both")),
    *(("quantize", name, way) for name in _OTHERS for way in ("rowwise", "both")),
    *(("dequantize", name, "") for name in _DECODED),
    ("transform", "nvfp4-rht", ""),
    ("swizzle", "", ""),
    ("unswizzle", "", ""),
)  # fmt: skip
"""Memory-bound operations: (operation, recipe, variant)."""
PRODUCTS = (
    *(("gemm", name, "") for name in _MULTIPLIED),
    *(("gemm-grouped", name, sections) for sections in ("", RAGGED, MANY) for name in _MULTIPLIED),
)  # fmt: skip

_SIZES = {
    "cuda": ("16384x16384", "8192x8192x8192", "16x8192x8192", "64x8192x8192", "128x8192x8192"),
    "cpu": ("1024x2048", "512x512x512", "16x1024x1024"),
}
_TYPICAL = (
    "quantize/nvfp4/rowwise*", "quantize/nvfp4-rht/both, amax given/*", "quantize/nvfp4*-sr/both, amax given/*",
    "quantize/nvfp4-2d/both, amax given/*", "quantize/mxfp8-*/both/*", "quantize/fp8-block-*", "dequantize/*",
)  # fmt: skip
_FURTHER = {
    "cuda": {"8192x8192": _TYPICAL, "4096x14336": _TYPICAL, "32768x32768": ("swizzle/*", "unswizzle/*")}, "cpu": {},
}  # fmt: skip
"""Extra sizes, unless sizes are given, and patterns of the tasks that are timed at them. 32768x32768 has 64 MB of
scales; 16384x16384 has 16 MB, and a copy of 16 MB reaches only 75 % of the rate of a large copy."""
_GROUPED_FROM = 512
"""Rows from which a product is also timed as a grouped product: 8 of each of 64 sections."""
_RAGGED = (17, 3000, 129, 700, 40, 2506, 300, 1500)
"""Rows of the ragged sections of 8192 rows."""


@dataclass(frozen=True)
class BenchTask:
    """An operation with a recipe at a size: (M, K) of a matrix, (M, K, N) of a product."""

    operation: str
    recipe: str
    variant: str
    shape: tuple[int, ...]

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def id(self) -> str:
        """Text matched by `-k`."""
        return "/".join(filter(None, (self.operation, self.recipe, self.variant, self.size)))


def sections_of(task: BenchTask) -> list[int]:
    """Rows of the sections of a grouped product."""
    rows = task.shape[0]
    shares = {"": (1,) * 8, MANY: (1,) * 64, RAGGED: _RAGGED}[task.variant]
    ends = [rows * end // sum(shares) for end in accumulate(shares, initial=0)]
    return [end - start for start, end in pairwise(ends)]


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

    Raises ValueError for an invalid size or keyword expression.
    """
    shapes = [parse(size) for size in sizes or _SIZES[device]]
    further = {} if sizes or quick else _FURTHER[device]
    matrices, products = ([shape for shape in shapes if len(shape) == kind] for kind in (2, 3))
    if quick:
        matrices, products = matrices[:1], products[:1]
    candidates = [BenchTask(*operation, shape) for shape in matrices for operation in MEMORY]
    candidates += [
        task
        for size, patterns in further.items()
        for operation in MEMORY
        if any(fnmatchcase((task := BenchTask(*operation, parse(size))).id, pattern) for pattern in patterns)
    ]
    candidates += [
        BenchTask(*operation, shape)
        for shape in products
        for operation in PRODUCTS
        if operation[0] == "gemm" or shape[0] >= _GROUPED_FROM
    ]
    matches = matching(keyword)
    return [task for task in candidates if matches(task.id)]
