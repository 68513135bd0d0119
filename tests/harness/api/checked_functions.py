"""Functions for `narrowgauge.check`, in a module that a fresh process imports by name."""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge


def correct(x: torch.Tensor) -> Any:
    q = narrowgauge.quantize(x, "nvfp4")
    return q.codes, q.scales, q.amax


def first_column_wrong(x: torch.Tensor) -> Any:
    codes, scales, amax = correct(x)
    codes[:, :1] ^= 1
    return codes, scales, amax


def tail_wrong(x: torch.Tensor) -> Any:
    """Rows behind the last whole tile of 128 rows have the codes of zeros."""
    codes, scales, amax = correct(x)
    codes[len(codes) // 128 * 128 :] = 0
    return codes, scales, amax


def writes_its_input(x: torch.Tensor) -> Any:
    result = correct(x)
    x.view(-1)[:1] += 1
    return result


def refuses_tails_and_views(x: torch.Tensor) -> Any:
    assert x.is_contiguous(), "x is contiguous"
    if x.dim() != 2 or x.shape[1] % 16:
        raise RuntimeError(f"shape {tuple(x.shape)} is no multiple of 16 columns")
    return correct(x)


def raises_without_rows(x: torch.Tensor) -> Any:
    if not len(x):
        raise RuntimeError("CUDA error: invalid configuration argument")
    return correct(x)


def raises_at_129_rows(x: torch.Tensor) -> Any:
    if len(x) == 129:
        raise RuntimeError("too many rows")
    return correct(x)


def refuses_everything(*operands: Any) -> Any:
    raise NotImplementedError("no kernel for this")
