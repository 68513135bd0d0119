"""Operations prepared for timing: calls of the kernels and of the reference, ceilings, and judging of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.backends.backend import load_backend
from narrowgauge.harness.operations.gemm.product import order_of
from narrowgauge.harness.tools.bench.bench_row import NATIVE
from narrowgauge.harness.tools.bench.interleave import Calls, cold_cache_bytes
from narrowgauge.harness.tools.bench.judge_outputs import (
    QuantizeArguments,
    Verdict,
    judge_bytes,
    judge_halves,
    judge_product,
    judge_quantized,
    judge_rotated,
    judge_values,
)
from narrowgauge.harness.tools.bench.tasks import GIVEN, BenchTask, sections_of
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.reference.gemm.operands import operand
from narrowgauge.spec.quantized import GroupedQuantized, Quantized
from narrowgauge.spec.recipes import find_recipe

COPY, SAME, MATMUL, DEQUANTIZED = "copy", "copy of as much", "matmul", "dequantize + matmul"
"""Names of ceilings."""
_LARGE_COPY = 1 << 28
"""bfloat16 elements of the copy that is a GPU's ceiling: half a GiB, ten times the L2 of an H200."""
_MOST = 4096
"""Largest number of input copies. Each is called once before the timing."""


@dataclass
class Peer:
    """Another implementation of the same operation."""

    name: str
    calls: Calls
    judge: Callable[[Any], Verdict]


@dataclass
class PreparedTask:
    """A task with its inputs."""

    calls: dict[str, Calls]
    """Calls by implementation: `native`, `reference`."""
    judge: Callable[[Any], Verdict]
    moved: Callable[[Any], int]
    """Bytes that the operation must move for a result: inputs (twice if the operation computes an amax) and outputs."""
    ceilings: dict[str, Calls]
    """Calls of the ceilings. The share is relative to the first. A second ceiling does the same work, or moves as many
    bytes."""
    elements: int = 0
    flop: int = 0
    """2·M·N·K for a product, else a nominal number: see `roofline`."""
    copied: int = 0
    """Bytes read and written by `copy`."""
    dtype: str = "bf16"
    peers: list[Peer] = field(default_factory=list)


class BenchInputs:
    """Matrices of a bench, made once for each size, and copies of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._matrices: dict[tuple[int, int], torch.Tensor] = {}
        self.first: tuple[int, int] | None = None
        """Size of the first matrix."""
        self._large: torch.Tensor | None = None

    def matrix(self, shape: tuple[int, int]) -> torch.Tensor:
        """bfloat16 (M, K), normally distributed. Only the matrix of the latest size is kept."""
        if shape not in self._matrices:
            self._matrices.clear()
            self.first = self.first or shape
            self._matrices[shape] = self.new_matrix(shape)
        return self._matrices[shape]

    def new_matrix(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A new matrix, not cached."""
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def copies(self, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """On a GPU enough copies of these tensors to fill the L2 several times, at most `_MOST`. On a CPU the tensors
        alone."""
        if self.device.type != "cuda":
            return [tensors]
        count = min(-(-cold_cache_bytes(self.device) // sum(tensor.nbytes for tensor in tensors)), _MOST)
        return [tensors, *(tuple(t.clone() for t in tensors) for _ in range(count - 1))]

    def copy(self, x: torch.Tensor) -> tuple[Calls, int]:
        """The copy that is the ceiling (of `x` on a CPU, of a large tensor on a GPU), and the bytes it reads and
        writes."""
        if self.device.type == "cuda":
            if self._large is None:
                self._large = torch.ones(_LARGE_COPY, device=self.device, dtype=torch.bfloat16)
            x = self._large
        target = torch.empty_like(x)
        return [lambda: target.copy_(x)], 2 * x.nbytes


def prepare(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    """Inputs and calls of a task. Raises the exceptions of the kernels."""
    return _OPERATIONS[task.operation](task, inputs)


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """Tensors in a result."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Quantized):
        yield from (t for t in (result.codes, result.scales, result.amax, result.tensor_scale) if t is not None)
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)


def nbytes(result: Any) -> int:
    """Bytes of a result: a tensor, the codes, scales and amaxes of an operand, or both halves."""
    return sum(tensor.nbytes for tensor in _tensors(result))


def _quantize(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    recipe = find_recipe(task.recipe)
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    both_halves, amax_given = task.variant.startswith("both"), task.variant.endswith(GIVEN)
    scale = torch.full((1,), 16.0, device=inputs.device) if recipe.tensor_scale == "given" else None
    random = (0, 0) if recipe.rounding == "stochastic" else None
    arguments = QuantizeArguments(scale=scale, random=random)
    if amax_given:
        row, column = native.quantize_both(x, recipe, scale=scale, random=random)
        assert row is not None
        assert column is not None
        quantized = row if both_halves else native.quantize(x, recipe, scale=scale, random=random)
        arguments = QuantizeArguments((quantized.amax, column.amax), scale, random)

    def call(ops: Any, x_copy: torch.Tensor) -> Any:
        options = {"scale": scale, "random": random}
        if both_halves:
            return ops.quantize_both(x_copy, recipe, amax=arguments.amax if amax_given else None, **options)
        return ops.quantize(x_copy, recipe, amax=arguments.amax[0] if amax_given else None, **options)

    def judge(result: Any) -> Verdict:
        return (
            judge_halves(x, recipe, arguments, result) if both_halves else judge_quantized(x, recipe, arguments, result)
        )

    copy, copied = inputs.copy(x)
    reads = 2 if recipe.tensor_scale not in ("none", "given") and not amax_given else 1
    calls: dict[str, Calls] = {
        NATIVE: [partial(call, native, x_copy) for (x_copy,) in inputs.copies(x)],
        "reference": [partial(call, reference, x)],
    }
    # A comparison and a product for each element, and four additions of a butterfly of 16, in each half.
    flop = x.numel() * (1 + both_halves) * 2 + x.numel() * 4 * (recipe.transform is not None)
    return PreparedTask(
        calls, judge, lambda result: reads * x.nbytes + nbytes(result), {COPY: copy}, x.numel(), flop, copied
    )


def _dequantize(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    rows, columns = task.shape
    q = native.quantize(inputs.matrix((rows, columns)), task.recipe)
    copies = [Quantized(codes, scales, q.amax, q.recipe, q.shape) for codes, scales in inputs.copies(q.codes, q.scales)]
    copy, copied = inputs.copy(inputs.matrix((rows, columns)))
    return PreparedTask(
        {
            NATIVE: [partial(native.dequantize, q_copy, torch.bfloat16) for q_copy in copies],
            "reference": [partial(reference.dequantize, q, torch.bfloat16)],
        },
        lambda values: judge_values(values, q),
        lambda values: nbytes((q.codes, q.scales)) + nbytes(values),
        {COPY: copy}, rows * columns, rows * columns, copied,
    )  # fmt: skip


def _transform(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    recipe = find_recipe(task.recipe)
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    copy, copied = inputs.copy(x)
    return PreparedTask(
        {
            NATIVE: [partial(native.transform, x_copy, recipe) for (x_copy,) in inputs.copies(x)],
            "reference": [partial(reference.transform, x, recipe)],
        },
        lambda rotated: judge_rotated(rotated, x, recipe),
        lambda rotated: x.nbytes + nbytes(rotated),
        {COPY: copy}, x.numel(), 4 * x.numel(), copied,
    )  # fmt: skip


def _swizzle(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    """Swizzle or unswizzle of NVFP4 scales, a byte for 16 elements. A GPU copies few bytes at a lower rate, so a copy
    of the same size is the second ceiling.
    """
    rows, columns = task.shape[0], task.shape[1] // 16
    scales = torch.arange(rows * columns, device=inputs.device).mul_(2654435761).bitwise_right_shift_(13)
    scales = scales.to(torch.uint8).view(rows, columns)
    unswizzles = task.operation == "unswizzle"
    source = reference.swizzle(scales) if unswizzles else scales
    expected = scales if unswizzles else reference.swizzle(scales)

    def call(ops: Any, source_copy: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = ops.unswizzle(source_copy, (rows, columns)) if unswizzles else ops.swizzle(source_copy)
        return result

    copy, copied = inputs.copy(source)
    copies = inputs.copies(source)
    ceilings: dict[str, Calls] = {COPY: copy}
    if inputs.device.type == "cuda":
        ceilings[SAME] = [source_copy.clone for (source_copy,) in copies]
    return PreparedTask(
        {
            NATIVE: [partial(call, native, source_copy) for (source_copy,) in copies],
            "reference": [partial(call, reference, source)],
        },
        lambda result: judge_bytes(task.operation, result, expected),
        lambda result: source.nbytes + nbytes(result),
        ceilings, scales.numel(), 0, copied, "",
    )  # fmt: skip


_Pairs = Sequence[tuple[Quantized, Quantized]]
_Matrices = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _products(pairs: Sequence[_Pairs], matrices: Sequence[_Matrices], *, cpu: bool) -> dict[str, Calls]:
    """torch's matmul of the same shapes: of bfloat16 matrices and of decoded operands; on a CPU of float64 and of
    float32.

    The arguments hold the copies of the operands of each call.
    """
    matmul_operands = [[(operand(a), operand(b)) for a, b in call_pairs] for call_pairs in pairs] if cpu else matrices
    decoded = torch.float32 if cpu else torch.bfloat16

    def multiply(products: _Matrices) -> list[torch.Tensor]:
        return [a @ b.T for a, b in products]

    def dequantize_and_multiply(products: _Pairs) -> list[torch.Tensor]:
        return [native.dequantize(a, decoded) @ native.dequantize(b, decoded).T for a, b in products]

    return {
        MATMUL: [partial(multiply, operands) for operands in matmul_operands],
        DEQUANTIZED: [partial(dequantize_and_multiply, operands) for operands in pairs],
    }


_WEIGHTS = {"fp8-block-1x128": "fp8-block-128x128"}
"""Recipe of the first operand to the recipe of the second, if the two differ."""


def _gemm(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    m, k, n = task.shape
    x, w = inputs.new_matrix((m, k)), inputs.new_matrix((n, k))
    a, b = native.quantize(x, task.recipe), native.quantize(w, _WEIGHTS.get(task.recipe, task.recipe))
    cpu = inputs.device.type != "cuda"
    out_dtype = torch.float32 if cpu else torch.bfloat16
    order = order_of(load_backend("native", inputs.device.type), a, b)
    pairs = [
        (replace(a, codes=a_codes, scales=a_scales), replace(b, codes=b_codes, scales=b_scales))
        for a_codes, a_scales, b_codes, b_scales in inputs.copies(a.codes, a.scales, b.codes, b.scales)
    ]
    return PreparedTask(
        {
            NATIVE: [partial(native.gemm, *pair, out_dtype=out_dtype) for pair in pairs],
            "reference": [partial(reference.gemm, a, b, out_dtype=out_dtype)],
        },
        lambda y: judge_product(y, [(a, b)], order),
        lambda y: nbytes((a, b)) + nbytes(y),
        _products([[pair] for pair in pairs], [[(left, right)] for left, right in inputs.copies(x, w)], cpu=cpu),
        m * n, 2 * m * n * k, 0, "fp32" if cpu else "bf16",
    )  # fmt: skip


def _gemm_grouped(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    m, k, n = task.shape
    rows = sections_of(task)
    x, weights = inputs.new_matrix((m, k)), [inputs.new_matrix((n, k)) for _ in rows]
    sizes = torch.tensor(rows, device=inputs.device)
    a: GroupedQuantized = native.quantize_grouped(x, sizes, task.recipe)
    b = [native.quantize(w, _WEIGHTS.get(task.recipe, task.recipe)) for w in weights]
    pairs = list(zip(a.sections(), b, strict=True))
    cpu = inputs.device.type != "cuda"
    out_dtype = torch.float32 if cpu else torch.bfloat16
    order = order_of(load_backend("native", inputs.device.type), [section for section, _ in pairs], b)
    return PreparedTask(
        {
            NATIVE: [partial(native.gemm_grouped, a, b, out_dtype=out_dtype)],
            "reference": [partial(reference.gemm_grouped, a, b, out_dtype=out_dtype)],
        },
        lambda y: judge_product(y, pairs, order),
        lambda y: nbytes(tuple(b)) + nbytes((a.codes, a.scales)) + nbytes(y),
        _products([pairs], [list(zip(torch.split(x, rows), weights, strict=True))], cpu=cpu), m * n, 2 * m * n * k, 0,
        "fp32" if cpu else "bf16",
    )  # fmt: skip


_OPERATIONS: dict[str, Callable[[BenchTask, BenchInputs], PreparedTask]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "transform": _transform,
    "swizzle": _swizzle,
    "unswizzle": _swizzle,
    "gemm": _gemm,
    "gemm-grouped": _gemm_grouped,
}
