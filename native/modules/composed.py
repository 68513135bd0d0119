"""Modules made of other modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.native.modules.history import Observer


class Composed(torch.nn.Module):
    """A module whose observer also gets the results of its children."""

    _observer: Observer | None = None

    @property
    def observer(self) -> Observer | None:
        """Called with the name and the value of every result, including the results of the children."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        for name, child in self.named_children():
            child.observer = None if observer is None else partial(_report_below, observer, name)  # type: ignore[assignment]

    def report(self, name: str, value: torch.Tensor) -> None:
        """Passes a result to the observer."""
        if self._observer is not None:
            self._observer(name, value.detach())

    def watched(self, tensor: torch.Tensor, gradient: str) -> torch.Tensor:
        """An alias of the tensor. The observer gets the gradient of the alias."""
        if self._observer is None or not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        alias = tensor.view_as(tensor)  # the gradient of the tensor itself may have other contributions
        alias.register_hook(partial(self.report, gradient))  # type: ignore[no-untyped-call]
        return alias


def _report_below(observer: Observer, child: str, name: str, value: Any) -> None:
    observer(f"{child}.{name}", value)
