"""Modules whose buffers keep their dtype: scales and amaxes are float32 whatever the parameters are converted to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Float32Buffers(torch.nn.Module):
    """`to`, `bfloat16` and the like convert the parameters, and move the module's own buffers without rounding them.

    Those of a state dict replace all that there are, on the device of the module: which there are, and their shapes,
    depends on the recipe of a step.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in self._buffers.items():
            kept = before[name]
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                self._buffers[name] = kept.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # torch copies into buffers, and calls keys unexpected whose buffer is None.
        names = self._buffers.keys() - self._non_persistent_buffers_set
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        if given:  # else the state is of the parameters alone, and what the buffers have stays
            places = (*self.parameters(recurse=False), *self.buffers(recurse=False))
            device = next((tensor.device for tensor in places), None)
            for name in names:
                self._buffers[name] = torch.empty_like(given[name], device=device) if name in given else None
        super()._load_from_state_dict(state_dict, prefix, *rest)
