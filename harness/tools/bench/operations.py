"""Each operation ready to be timed: its calls by the kernels and by the reference, its ceilings, its judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.operations.stages.product import order_of
from narrowgauge.harness.tools.bench.interleave import Calls, cold
from narrowgauge.harness.tools.bench.judge import (
    Given,
    Verdict,
    judge_bytes,
    judge_halves,
    judge_product,
    judge_quantized,
    judge_rotated,
    judge_values,
)
from narrowgauge.harness.tools.bench.row import OURS
from narrowgauge.harness.tools.bench.tasks import EXPERTS, GIVEN, Task
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.gemm import operand
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe

COPY, SAME, MATMUL, DEQUANTIZED = "copy", "copy of as much", "matmul", "dequantize + matmul"
"""Names of ceilings."""
_LARGE_COPY = 1 << 28
"""bfloat16 elements of the copy that is a GPU's ceiling: half a GiB, ten times an H200's L2."""
_MOST = 4096
"""Copies, each of which is called once before anything is timed."""


@dataclass
class Peer:
    """Somebody else who does the same."""

    name: str
    calls: Calls
    judge: Callable[[Any], Verdict]


@dataclass
class Prepared:
    """A task with its inputs."""

    calls: dict[str, Calls]
    """By whom: `native`, `reference`."""
    judge: Callable[[Any], Verdict]
    moved: Callable[[Any], int]
    """Bytes that the operation has to move, of a result: inputs once, twice where it has to find an amax, outputs."""
    ceilings: dict[str, Calls]
    """The first one is that of the share; a second does the same work, or moves as many bytes."""
    elements: int = 0
    flop: int = 0
    """Of a product 2·M·N·K; else a nominal number: see `roofline`."""
    copied: int = 0
    """Bytes that `copy` reads and writes."""
    dtype: str = "bf16"
    peers: list[Peer] = field(default_factory=list)


class Inputs:
    """The matrices of a bench, made once for each size, and copies of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}
        self.first: tuple[int, int] | None = None
        """The size of the first matrix."""
        self._large: torch.Tensor | None = None

    def matrix(self, shape: tuple[int, int]) -> torch.Tensor:
        """bfloat16 (M, K), normally distributed; one size lives at a time."""
        if shape not in self._matrices:
            self._matrices.clear()
            self.first = self.first or shape
            self._matrices[shape] = self.another(shape)
        return self._matrices[shape]

    def another(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A matrix of its own."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def copies(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Enough copies of these tensors to fill a GPU's L2 several times, unless they are tiny; themselves alone on a
        CPU."""
        if self.device.type != "cuda":
            return [tensors]
        count = min(-(-cold(self.device) // sum(tensor.nbytes for tensor in tensors)), _MOST)
        return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]

    def copy(self, x: torch.Tensor) -> tuple[Calls, int]:
        """The copy that is the ceiling, of `x` on a CPU, a large one on a GPU; the bytes that it reads and writes."""
        if self.device.type == "cuda":
            if self._large is None:
                self._large = torch.ones(_LARGE_COPY, device=self.device, dtype=torch.bfloat16)
            x = self._large
        target = torch.empty_like(x)
        return [lambda: target.copy_(x)], 2 * x.nbytes


def prepare(task: Task, inputs: Inputs) -> Prepared:
    """The inputs and calls of a task. Raises what the kernels raise."""
    return _OPERATIONS[task.operation](task, inputs)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """What a result is made of."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Quantized):
        yield from (t for t in (result.codes, result.scales, result.amax, result.tensor_scale) if t is not None)
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)


def nbytes(result: Any) -> int:
    """Bytes of a result: of a tensor, of an operand's codes, scales and amax, of both halves."""
    return sum(tensor.nbytes for tensor in _tensors(result))


def _quantize(task: Task, inputs: Inputs) -> Prepared:
    r = find_recipe(task.recipe)
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    both, amax_given = task.variant.startswith("both"), task.variant.endswith(GIVEN)
    scale = torch.full((1,), 16.0, device=inputs.device) if r.tensor_scale == "given" else None
    random = (0, 0) if r.rounding == "stochastic" else None
    given = Given(scale=scale, random=random)
    if amax_given:
        row, column = native.quantize_both(x, r, scale=scale, random=random)
        assert row is not None
        assert column is not None
        alone = row if both else native.quantize(x, r, scale=scale, random=random)
        given = Given((alone.amax, column.amax), scale, random)

    def call(doors: Any, some: torch.Tensor) -> Any:
        options = {"scale": scale, "random": random}
        if both:
            return doors.quantize_both(some, r, amax=given.amax if amax_given else None, **options)
        return doors.quantize(some, r, amax=given.amax[0] if amax_given else None, **options)

    def judge(result: Any) -> Verdict:
        return judge_halves(x, r, given, result) if both else judge_quantized(x, r, given, result)

    copy, copied = inputs.copy(x)
    reads = 2 if r.tensor_scale not in ("none", "given") and not amax_given else 1
    calls: dict[str, Calls] = {
        OURS: [partial(call, native, some) for (some,) in inputs.copies(x)],
        "reference": [partial(call, reference, x)],
    }
    # A comparison and a product an element, four more additions of a butterfly of 16, in each half.
    flop = x.numel() * (1 + both) * 2 + x.numel() * 4 * (r.transform is not None)
    return Prepared(
        calls, judge, lambda result: reads * x.nbytes + nbytes(result), {COPY: copy}, x.numel(), flop, copied
    )


def _dequantize(task: Task, inputs: Inputs) -> Prepared:
    rows, columns = task.shape
    q = native.quantize(inputs.matrix((rows, columns)), task.recipe)
    copies = [Quantized(codes, scales, q.amax, q.recipe, q.shape) for codes, scales in inputs.copies(q.codes, q.scales)]
    copy, copied = inputs.copy(inputs.matrix((rows, columns)))
    return Prepared(
        {
            OURS: [partial(native.dequantize, one, torch.bfloat16) for one in copies],
            "reference": [partial(reference.dequantize, q, torch.bfloat16)],
        },
        lambda values: judge_values(values, q),
        lambda values: nbytes((q.codes, q.scales)) + nbytes(values),
        {COPY: copy}, rows * columns, rows * columns, copied,
    )  # fmt: skip


def _transform(task: Task, inputs: Inputs) -> Prepared:
    r = find_recipe(task.recipe)
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    copy, copied = inputs.copy(x)
    return Prepared(
        {
            OURS: [partial(native.transform, some, r) for (some,) in inputs.copies(x)],
            "reference": [partial(reference.transform, x, r)],
        },
        lambda rotated: judge_rotated(rotated, x, r),
        lambda rotated: x.nbytes + nbytes(rotated),
        {COPY: copy}, x.numel(), 4 * x.numel(), copied,
    )  # fmt: skip


def _swizzle(task: Task, inputs: Inputs) -> Prepared:
    """Of the scales of NVFP4: a byte for 16 elements. The fewer bytes, the lower the rate at which a GPU copies them: a
    copy of as many is the second ceiling.
    """
    rows, columns = task.shape[0], task.shape[1] // 16
    scales = torch.arange(rows * columns, device=inputs.device).mul_(2654435761).bitwise_right_shift_(13)
    scales = scales.to(torch.uint8).view(rows, columns)
    back = task.operation == "unswizzle"
    source = reference.swizzle(scales) if back else scales
    expected = scales if back else reference.swizzle(scales)

    def call(doors: Any, some: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = doors.unswizzle(some, (rows, columns)) if back else doors.swizzle(some)
        return found

    copy, copied = inputs.copy(source)
    copies = inputs.copies(source)
    ceilings: dict[str, Calls] = {COPY: copy}
    if inputs.device.type == "cuda":
        ceilings[SAME] = [some.clone for (some,) in copies]
    return Prepared(
        {
            OURS: [partial(call, native, some) for (some,) in copies],
            "reference": [partial(call, reference, source)],
        },
        lambda moved: judge_bytes(task.operation, moved, expected),
        lambda moved: source.nbytes + nbytes(moved),
        ceilings, scales.numel(), 0, copied, "",
    )  # fmt: skip


_Pairs = Sequence[tuple[Quantized, Quantized]]
_Matrices = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _products(pairs: Sequence[_Pairs], matrices: Sequence[_Matrices], *, cpu: bool) -> dict[str, Calls]:
    """torch's matmul of the shapes: of bfloat16, and of operands decoded to it; on a CPU of float64, and of float32.

    Copies of what a call multiplies, of either.
    """
    wide = [[(operand(a), operand(b)) for a, b in some] for some in pairs] if cpu else matrices
    decoded = torch.float32 if cpu else torch.bfloat16

    def plain(some: _Matrices) -> list[torch.Tensor]:
        return [a @ b.T for a, b in some]

    def after(some: _Pairs) -> list[torch.Tensor]:
        return [native.dequantize(a, decoded) @ native.dequantize(b, decoded).T for a, b in some]

    return {MATMUL: [partial(plain, some) for some in wide], DEQUANTIZED: [partial(after, some) for some in pairs]}


def _gemm(task: Task, inputs: Inputs) -> Prepared:
    m, k, n = task.shape
    x, w = inputs.another((m, k)), inputs.another((n, k))
    a, b = (native.quantize(matrix, task.recipe) for matrix in (x, w))
    cpu = inputs.device.type != "cuda"
    out_dtype = torch.float32 if cpu else torch.bfloat16
    order = order_of(load_backend("native", inputs.device.type), a, b)
    pairs = [
        (replace(a, codes=a_codes, scales=a_scales), replace(b, codes=b_codes, scales=b_scales))
        for a_codes, a_scales, b_codes, b_scales in inputs.copies(a.codes, a.scales, b.codes, b.scales)
    ]
    return Prepared(
        {
            OURS: [partial(native.gemm, *pair, out_dtype=out_dtype) for pair in pairs],
            "reference": [partial(reference.gemm, a, b, out_dtype=out_dtype)],
        },
        lambda y: judge_product(y, [(a, b)], order),
        lambda y: nbytes((a, b)) + nbytes(y),
        _products([[pair] for pair in pairs], [[(left, right)] for left, right in inputs.copies(x, w)], cpu=cpu),
        m * n, 2 * m * n * k, 0, "fp32" if cpu else "bf16",
    )  # fmt: skip


def _gemm_grouped(task: Task, inputs: Inputs) -> Prepared:
    m, k, n = task.shape
    x, weights = inputs.another((m, k)), [inputs.another((n, k)) for _ in range(EXPERTS)]
    sizes = torch.full((EXPERTS,), m // EXPERTS, device=inputs.device, dtype=torch.int64)
    a: GroupedQuantized = native.quantize_grouped(x, sizes, task.recipe)
    b = [native.quantize(w, task.recipe) for w in weights]
    pairs = list(zip(a.sections(), b, strict=True))
    cpu = inputs.device.type != "cuda"
    out_dtype = torch.float32 if cpu else torch.bfloat16
    order = order_of(load_backend("native", inputs.device.type), [one for one, _ in pairs], b)
    return Prepared(
        {
            OURS: [partial(native.gemm_grouped, a, b, out_dtype=out_dtype)],
            "reference": [partial(reference.gemm_grouped, a, b, out_dtype=out_dtype)],
        },
        lambda y: judge_product(y, pairs, order),
        lambda y: nbytes(tuple(b)) + nbytes((a.codes, a.scales)) + nbytes(y),
        _products([pairs], [list(zip(x.chunk(EXPERTS), weights, strict=True))], cpu=cpu), m * n, 2 * m * n * k, 0,
        "fp32" if cpu else "bf16",
    )  # fmt: skip


_OPERATIONS: dict[str, Callable[[Task, Inputs], Prepared]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "transform": _transform,
    "swizzle": _swizzle,
    "unswizzle": _swizzle,
    "gemm": _gemm,
    "gemm-grouped": _gemm_grouped,
}
