"""The object BENCH of an operation: its tasks, prepared for timing beside ceilings and peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowgauge.harness.operations.timing.judge_outputs import Verdict
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.quantized import Quantized

COPY, SAME, MATMUL, DEQUANTIZED = "copy", "copy of as much", "matmul", "dequantize + matmul"
"""Names of ceilings."""
COMPILED = "torch.compile of the reference"
"""Name of the peer that is measured with `--compile` only."""
_LARGE_COPY = 1 << 28
"""bfloat16 elements of the copy that is a GPU's ceiling: half a GiB, ten times the L2 of an H200."""
_MOST = 4096
"""Largest number of input copies. Each is called once before the timing."""
_L2S, _COLD_ON_CPU = 4, 1 << 27
"""Total size of the copies of an input, too large for a cache: number of L2 sizes on a GPU; bytes on a CPU."""

Calls = Sequence[Callable[[], Any]]
"""A call for every copy of its inputs. The calls are used in turn: no input is in a cache."""


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


@dataclass(frozen=True)
class Peer:
    """Another implementation of the same operation."""

    calls: Calls
    judge: Callable[[Any], Verdict]


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """A task with its inputs."""

    native: Calls
    reference: Calls
    judge: Callable[[Any], Verdict]
    read: int
    """Bytes of the inputs, all read by the operation (twice if it computes an amax)."""
    ceilings: Mapping[str, Calls]
    """Calls of the ceilings. The share is relative to the first. A second ceiling does the same work, or moves as many
    bytes."""
    elements: int
    flop: int = 0
    """2·M·N·K for a product, else a nominal number: see `roofline`."""
    copied: int = 0
    """Bytes read and written by `copy`."""
    dtype: str = "bf16"


class BenchInputs:
    """Matrices of a bench, made once per size, and their copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._matrices: dict[tuple[int, ...], torch.Tensor] = {}
        self.first: tuple[int, ...] | None = None
        """Size of the first matrix."""
        self._large: torch.Tensor | None = None

    def matrix(self, shape: tuple[int, ...]) -> torch.Tensor:
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


@dataclass(frozen=True)
class Growth:
    """An operation on a matrix of any size, for `--growth`."""

    call: Callable[[Any, torch.Tensor], Any]
    """Calls the operation of `native.ops` or of `reference.ops`."""
    judge: Callable[[torch.Tensor, Any], Verdict]


@dataclass(frozen=True, kw_only=True)
class OperationBench:
    """What the bench times of an operation."""

    rank: float = float("inf")
    """Place among the operations in the tables. Operations without a rank come last."""
    rows: Sequence[tuple[str, str, str]]
    """The tasks at every size: (name, recipe, variant). A name belongs to one operation."""
    prepare: Callable[[BenchTask, BenchInputs], PreparedTask]
    """Inputs and calls of a task. Raises the exceptions of the kernels."""
    product: bool = False
    """Sizes are M×K×N, and rates count 2·M·N·K FLOP. Otherwise sizes are M×K, and rates count bytes."""
    fewest_rows: int = 0
    """Smallest M that is timed."""
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Extra sizes on a GPU, unless sizes are given, and patterns of the tasks that are timed at them."""
    peers: Mapping[str, Callable[[BenchTask, BenchInputs], Peer | None]] = field(default_factory=dict)
    """Other implementations by name. None: the peer does not support the task."""
    launches: Callable[[torch.Tensor], Mapping[tuple[str, str], Callable[[], Any]]] = lambda x: {}
    """Calls with next to no work by (recipe, variant), for the cost of a call. The argument is a small matrix."""
    growth: Growth | None = None

    def tasks(self, shape: tuple[int, ...]) -> list[BenchTask]:
        """The tasks at a size. Empty for a size of the other kind, and for too few rows."""
        fits = (len(shape) == 3) == self.product and shape[0] >= self.fewest_rows
        return [BenchTask(*row, shape) for row in self.rows] if fits else []


def cold_cache_bytes(device: torch.device) -> int:
    """Several times the size of the device's cache in bytes."""
    return _L2S * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _COLD_ON_CPU


def nbytes(result: Any) -> int:
    """Bytes of a result: a tensor, an operand's codes, scales and amaxes, both halves, results by name, or a cache."""
    if isinstance(result, Cache):
        result = result.parts()
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, Quantized):
        result = (result.codes, result.scales, result.amax, result.tensor_scale)
    return sum(map(nbytes, result)) if isinstance(result, tuple) else getattr(result, "nbytes", 0)
