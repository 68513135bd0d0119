"""Forms of results: the shape and dtype that a method has to give, and the check of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.results import BackendError, dtype_name, type_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorForm:
    """A tensor on the device of the arguments."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def checked(self, result: Any, method: str, device: torch.device, name: str = "") -> torch.Tensor:
        """`result`, checked. If uint8 is expected, other dtypes of one byte are viewed as uint8. `name`: of the result,
        if the method gives several. Raises BackendError for another type, shape, dtype or device."""
        import torch

        subject = f"{method} gave {name} as" if name else f"{method} gave"
        if not isinstance(result, torch.Tensor):
            raise BackendError(f"{subject} {type_name(result)}, not a tensor")
        if self.dtype == torch.uint8 and result.element_size() == 1:
            result = result.view(torch.uint8)
        if tuple(result.shape) != self.shape or result.dtype != self.dtype:
            expected = f"{dtype_name(self.dtype)} of shape {self.shape}"
            raise BackendError(f"{subject} {dtype_name(result.dtype)} of shape {tuple(result.shape)}, not {expected}")
        if result.device != device:
            raise BackendError(f"{method} gave {name or 'its result'} on {result.device}; its input is on {device}")
        tensor: torch.Tensor = result
        return tensor
