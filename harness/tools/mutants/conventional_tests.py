"""Conventional tests: whether common tests of other projects would detect a wrong kernel, on normal inputs.

There are three: values of the product of two quantized operands, end to end, by allclose(8e-3); all bytes of operands
and product against a reference; signal-to-noise ratio of the product, against the product of unquantized operands,
above a limit. A method without a product is tested by its own result, a module by its output and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowgauge.harness.cases.operations import parts_of_operations
from narrowgauge.harness.operations.stages.sample import Door, make_sample
from narrowgauge.harness.running.runner import ALLCLOSE
from narrowgauge.reference import ops as reference

SQNR_DB = 15.8
"""Smallest accepted signal-to-noise ratio of a product."""


@cache
def doors() -> dict[str, Door]:
    """Calls by name: the table DOORS in `conventional.py` of each operation."""
    return {name: door for module in parts_of_operations("conventional") for name, door in module.DOORS.items()}


@dataclass(frozen=True)
class Detections:
    """Whether each conventional test detects the mutant."""

    allclose: bool
    compare_bytes: bool
    sqnr: bool


class ConventionalTests:
    """The conventional tests of a call under a recipe. Created with the real kernels, then applied to changed
    kernels."""

    def __init__(self, door: str, names: str, kernels: Any) -> None:
        self._door = doors()[door]
        self._call, self._given = self._door.call, make_sample(names, module=self._door.of_module)
        self._expected = self._call(reference, self._given)
        self._right = self._call(kernels, self._given)

    def notice(self, kernels: Any) -> Detections:
        """Tests that fail with the changed kernels and pass with the real kernels."""
        value, parts = self._call(kernels, self._given)
        expected = self._expected[1]
        comparable = [name for name, part in self._right[1].items() if _equal(part, expected[name])]
        return Detections(
            allclose=self._close(self._right[0]) and not self._close(value),
            compare_bytes=any(not _equal(parts[name], expected[name]) for name in comparable),
            sqnr=self._sqnr(value) <= SQNR_DB < self._sqnr(self._right[0]),
        )

    def _close(self, value: torch.Tensor) -> bool:
        expected = self._expected[0].float()
        return torch.allclose(value.float(), expected, rtol=ALLCLOSE, atol=ALLCLOSE, equal_nan=True)

    def _sqnr(self, value: torch.Tensor) -> float:
        """Signal over noise in dB, against the product of unquantized operands, or the expected result of the call."""
        signal = self._given.exact if value.shape == self._given.c.shape else self._expected[0].double()
        if value.shape == self._given.x.shape:
            signal = self._given.x.double() if self._door.gives_x else signal
        noise = float(((value.double() - signal) ** 2).sum().nan_to_num(nan=torch.inf))
        return float(10 * torch.log10((signal**2).sum() / noise)) if noise else float("inf")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
