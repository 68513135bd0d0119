"""Products on the path of tensor cores, and their expected bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from narrowgauge.native.gemm import paths
from narrowgauge.native.ops import Quantized
from narrowgauge.reference.bounds.bounds import bounds
from tests.native.samples import assert_equal

ORDER = paths.ORDERS[paths.TENSOR]
PAIRS = (
    ("nvfp4", "nvfp4-2d"), ("nvfp4-4over6-256-mse", "nvfp4"), ("nvfp4-rowscaled", "nvfp4-rowscaled"),
    ("nvfp4", "nvfp4-rowscaled"), ("mxfp8-e4m3", "mxfp8-e4m3"), ("mxfp8-e5m2", "mxfp6-e3m2"),
    ("mxfp6-e2m3", "mxfp4"), ("mxfp8-2d", "mxfp8-e5m2"), ("fp8-current-e4m3", "fp8-delayed-e5m2"),
)  # fmt: skip
"""Pairs with every family, element format and kind of amax of this path."""
SHAPES = [(1, 1, 1), (3, 300, 17), (130, 70, 150), (129, 257, 64), (257, 5, 200), (5, 0, 32), (0, 5, 32), (4, 5, 0)]


@contextmanager
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the context, GEMMs of all families with tensor core kernels take the tensor core path."""

    def path_of(m: int, n: int, k: int, family: str, device: torch.device, **_: bool) -> str:
        return paths.PORTABLE if family == "fp8_block" else paths.TENSOR

    with monkeypatch.context() as patch:
        patch.setattr("narrowgauge.native.gemm.gemm.path_of", path_of)
        yield


def model(order: str) -> Callable[..., torch.Tensor]:
    """The GEMM of the reference's model that adds in an order."""
    return lambda a, b, **epilogue: bounds(a, b, order=order, **epilogue).expected


def assert_bits(multiply: Callable[..., torch.Tensor], a: Quantized, b: Quantized, **epilogue: object) -> None:
    """A product has the bits of the reference's model."""
    expected = bounds(a, b, **epilogue, order=ORDER)  # type: ignore[arg-type]
    assert_equal(multiply(a, b, **epilogue), expected.expected)
