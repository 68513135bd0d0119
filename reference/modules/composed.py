"""Modules made of other modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from narrowgauge.reference.modules.amax_history import Observer


class Composed(torch.nn.Module):
    """A module whose observer also gets the results of its children."""

    _observer: Observer | None = None

    @property
    def observer(self) -> Observer | None:
        """Called with every result. The results of a child are prefixed by the name of the child: `fc1.y`."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        for name, child in self.named_children():
            child.observer = None if observer is None else partial(_prefixed, observer, f"{name}.")  # type: ignore[assignment]

    def observe(self, name: str, value: torch.Tensor) -> None:
        """Calls the observer, if set, with a copy of a computed `value`."""
        if self._observer is not None:
            self._observer(name, value.detach().clone())


def _prefixed(observer: Observer, prefix: str, name: str, value: Any) -> None:
    observer(prefix + name, value)
