"""The golden vectors: inputs, and their bytes by Transformer Engine's own references.

README.md beside this file says how they were made and names every array.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def golden(pattern: str) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one a file: its path, with its stem for an id.

    A pattern that matches no file is a mistake, and raises.
    """
    paths = sorted(FOLDER.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"no golden file in {FOLDER} is called {pattern}")
    return [pytest.param(path, id=path.stem) for path in paths]


def load(path: Path) -> dict[str, np.ndarray]:
    """Every array of a golden file."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def floats(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of `dtype` whose bits are `bits` (uint16 or uint32)."""
    return torch.from_numpy(bits.view(f"int{8 * bits.itemsize}").copy()).view(dtype)


def quantize_input(path: Path, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    """`x` of a `quantize_*.npz`, in the dtype that its name ends with."""
    return floats(arrays["x"], _DTYPES[path.stem.rsplit("_", 1)[1]])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a float tensor as integers, so that equality sees signed zeros and NaN."""
    return tensor.contiguous().view(_BITS[tensor.dtype])


def assert_golden(path: Path, quantize_both: Callable[[torch.Tensor, str], tuple[Any, Any]]) -> None:
    """Both halves of every recipe of a `quantize_*.npz` have Transformer Engine's bytes."""
    arrays = load(path)
    x = quantize_input(path, arrays)
    names = {key.removesuffix(".codes") for key in arrays if key.endswith(".codes")}
    assert len(names) >= 19
    for name in sorted(names):
        row, column = quantize_both(x, name)
        for key in (key for key in arrays if key.rpartition(".")[0] == name):
            part, _, turned = key.rpartition(".")[2].partition("_")
            found = getattr(column if turned else row, {"scale": "scales"}.get(part, part))
            shape = found.shape if part in ("codes", "scales") else (found.numel(),)
            assert shape == arrays[key].shape, key
            np.testing.assert_array_equal(found.numpy().view("u1").ravel(), arrays[key].view("u1").ravel(), key)
        if column.transposed:  # the same codes in memory
            np.testing.assert_array_equal(column.codes, arrays[f"{name}.codes"], name)
