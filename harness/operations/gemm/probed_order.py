"""The order of a product that a probe finds, for backends with the declaration {"gemm": "probe"} or "probe-13".

Source: docs/accumulators.md#declare-the-probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.checks.order.probe import accumulation_order
from narrowgauge.harness.operations.gemm.case import PROBE_13
from narrowgauge.harness.operations.gemm.probed_gemm import declaration_for, operand_dtype, product_of
from narrowgauge.harness.operations.stages.oracle import bounds
from narrowgauge.reference.bounds.bounds import Bounds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR
from narrowgauge.spec.summation import Summation

_Key = tuple[tuple[int, int], tuple[int, int], str, torch.dtype, str]
_found: WeakKeyDictionary[Backend, dict[_Key, ProbedOrder]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Narrowed:
    """Bounds of a product after a probe."""

    limits: Bounds
    order: Summation
    sentence: str


@dataclass(frozen=True)
class ProbedOrder:
    """Result of a probe."""

    name: str | None
    """A confirmed order; None without an order."""
    reason: str = ""
    """Why there is no order."""
    decides: bool = False
    """Whether the order judges, also with outputs outside of the interval of any order."""

    @classmethod
    def of(cls, backend: Backend, a: Quantized, b: Quantized, out_dtype: torch.dtype, *, addend: bool) -> ProbedOrder:
        """The order of a product of a backend, kept for products of the same shapes, recipe, dtype and device.

        `addend`: whether the product has c or a bias. A library may choose a different kernel for this product: the
        order is not probed.
        """
        if addend:
            return cls(None, "the product has an addend")
        if a.recipe != b.recipe:
            return cls(None, f"the operands have two recipes, {a.recipe} and {b.recipe}")
        if any(q.transposed or q.scale_layout != LINEAR for q in (a, b)):
            return cls(None, "an operand is stored transposed, or with swizzled scales")
        orders = _found.setdefault(backend, {})
        key = (a.shape, b.shape, str(a.recipe), out_dtype, str(a.codes.device))
        if key not in orders:
            orders[key] = cls._probed(backend, a, b, out_dtype)
        return orders[key]

    @classmethod
    def _probed(cls, backend: Backend, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> ProbedOrder:
        (rows, columns), (others, _) = a.shape, b.shape
        function, device = product_of(backend, a.recipe, out_dtype), a.codes.device
        try:
            dtype = operand_dtype(a.recipe)
            with backend.host.lock():
                order = accumulation_order(function, rows, columns, others, dtype=dtype, device=device)
        except (BackendError, Unsupported, ValueError) as error:
            return cls(None, str(error))
        if not order.confirmed:
            return cls(None, order.reason)
        name = declaration_for(order, a.recipe)
        decides = backend.declares["gemm"] == PROBE_13 and "aligned-13-" in (name or "")
        return cls(name, "" if name else f"no declaration has exactly this order: {order}", decides)

    def narrowed(
        self, operands: tuple[Quantized, Quantized], limits: Bounds, declared: Summation, out_dtype: torch.dtype
    ) -> Narrowed:
        """The bounds of the probed order, if they lie within `limits`, the bounds of any order, or if the order
        decides; else `limits`."""
        if self.name is None:
            return Narrowed(limits, declared, f"judged in any order: {self.reason}")
        try:
            order = replace(declared, order=self.name, truncates=False, operands=None)
            found = bounds(*operands, out_dtype=out_dtype, order=order)
        except ValueError as error:
            return Narrowed(limits, declared, f"judged in any order: {error}")
        outside = 0 if self.decides else int((~_within(found, limits)).sum())
        if outside:
            text = (
                f"judged in any order: the probed order {self.name} gives {outside} outputs outside of its interval; a "
                f'kernel that adds so on purpose declares {{"gemm": "{self.name}"}}'
            )
            return Narrowed(limits, declared, text)
        return Narrowed(found, order, f"judged in the probed order {self.name}")


def _within(found: Bounds, limits: Bounds) -> torch.Tensor:
    """bool (M, N): every output that `found` accepts is accepted by `limits`."""

    def accepted(y: torch.Tensor) -> torch.Tensor:
        # An exact output has the bits of `expected` or `fused`; the sign of a zero is compared by them too.
        known = (y == limits.expected) & (y.signbit() == limits.expected.signbit())
        known |= (y == limits.fused) & (y.signbit() == limits.fused.signbit())
        inside = known | ~limits.exact & (y >= limits.lower) & (y <= limits.upper)
        return inside | y.isnan() & limits.expected.isnan()

    single = accepted(found.expected) & accepted(found.fused)
    whole = accepted(found.lower) & accepted(found.upper) & (~limits.exact | (found.lower == found.upper))
    free = (found.undetermined & ~limits.undetermined) | (found.zero_sum & ~limits.zero_sum)
    return torch.where(found.exact, single, whole) & ~free
