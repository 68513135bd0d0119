"""Backends for scale-columns: a right one, and one with a mistake in the last column of odd matrices."""

from __future__ import annotations

import torch


class Backend:
    """Scales in float32."""

    def scale_columns(self, x: torch.Tensor, gamma: torch.Tensor, *, plus_one: bool = False) -> torch.Tensor:
        """The scaled matrix (M, K), in the dtype of x."""
        return (x.float() * (gamma.float() + plus_one)).to(x.dtype)


class PlusOne(Backend):
    """Takes 1 + gamma for gamma."""

    def scale_columns(self, x: torch.Tensor, gamma: torch.Tensor, *, plus_one: bool = False) -> torch.Tensor:
        """The scaled matrix with a wrong factor."""
        return super().scale_columns(x, gamma, plus_one=not plus_one)


class LastColumn(Backend):
    """Forgets the last column if K is odd."""

    def scale_columns(self, x: torch.Tensor, gamma: torch.Tensor, *, plus_one: bool = False) -> torch.Tensor:
        """The scaled matrix, with the last column of x unchanged if K is odd."""
        y = super().scale_columns(x, gamma, plus_one=plus_one)
        if x.shape[1] % 2:
            y[:, -1] = x[:, -1]
        return y
