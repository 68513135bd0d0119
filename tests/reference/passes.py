"""Passes through a module: reports and results, with the same input, gradient and recipe in all tests."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge.reference.modules import autocast, checkpoint
from narrowgauge.spec.quantized import Quantized
from tests.golden import bits

ROWS, INNER, OUTER = 32, 64, 48


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers, the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(kind: type[torch.nn.Module], *sizes: int, **options: Any) -> Any:
    """A module with random normal parameters that do not depend on its options."""
    module = kind(*sizes, **options)
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(module.named_parameters())):
            parameter.copy_(normal(*parameter.shape, seed=100 + number))
    return module


class Pass:
    """A forward under `recipe` and its backward: `seen` has the last report of each name."""

    def __init__(
        self,
        module: Any,
        recipe: Any,
        x: torch.Tensor | None = None,
        dy: torch.Tensor | None = None,
        *rest: Any,
        again: bool = False,
    ) -> None:
        leaf = (normal(ROWS, INNER, seed=1) if x is None else x).detach().requires_grad_()
        self.names: list[str] = []
        self.seen: dict[str, Any] = {}
        module.observer = self._report
        with autocast(recipe):
            y = checkpoint(lambda given: module(given, *rest), leaf) if again else module(leaf, *rest)
        y.backward(normal(*y.shape, seed=2, dtype=y.dtype) if dy is None else dy)
        module.observer = None
        self.y, self.dx = y.detach(), leaf.grad
        self.gradients = {name: parameter.grad for name, parameter in module.named_parameters()}

    def _report(self, name: str, value: Any) -> None:
        self.names.append(name)
        self.seen[name] = value


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same, bit for bit: tensors, Quantized, or lists or mappings of them."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(one, other) if one.dtype == torch.uint8 else torch.equal(bits(one), bits(other))
    if isinstance(one, Quantized):
        parts = ("codes", "scales", "amax", "tensor_scale")
        fits = isinstance(other, Quantized) and (one.recipe, one.shape, one.transposed) == (
            other.recipe, other.shape, other.transposed,
        )  # fmt: skip
        return fits and all(same(getattr(one, part), getattr(other, part)) for part in parts)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def assert_same_pass(one: Pass, other: Pass) -> None:
    """Everything that was reported or given is the same."""
    for name in one.seen | other.seen:
        assert same(one.seen.get(name), other.seen.get(name)), name
    assert same([one.y, one.dx, one.gradients], [other.y, other.dx, other.gradients])
