"""Module with float32 buffers that stay float32 when the module is converted to another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Float32Buffers(torch.nn.Module):
    """`module.bfloat16()` and `module.to(dtype)` convert parameters; scales and amaxes only change the device.

    A scale rounded to bfloat16 has a different value, and no kernel accepts the dtype.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        applied = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return applied
