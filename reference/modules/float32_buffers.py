"""Modules with float32 buffers: scales and amaxes stay float32 when the parameters are converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Float32Buffers(torch.nn.Module):
    """`to`, `bfloat16` and the like convert the parameters. Buffers move to the device without a change of dtype.

    The buffers of a state dict replace all buffers of the module, on the device of the module: the recipe of a step
    decides the presence and the shapes of buffers.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in self._buffers.items():
            original = before[name]
            if original is not None and moved is not None and moved.dtype != original.dtype:
                self._buffers[name] = original.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # torch copies into existing buffers, and reports a key as unexpected if its buffer is None.
        names = self._buffers.keys() - self._non_persistent_buffers_set
        loaded = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if loaded:  # a state dict of parameters alone leaves the buffers unchanged
            tensors = (*self.parameters(recurse=False), *self.buffers(recurse=False))
            device = next((tensor.device for tensor in tensors), None)
            for name in names:
                self._buffers[name] = torch.empty_like(loaded[name], device=device) if name in loaded else None
        super()._load_from_state_dict(state_dict, prefix, *rest)
