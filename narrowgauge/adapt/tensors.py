"""Arrays of other libraries as torch tensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

_BYTES_OF_ONE_CODE = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
"""Dtypes of ml_dtypes without a torch dtype: a byte holds one code in its low bits."""


def tensor(value: Any) -> torch.Tensor:
    """`value` as a tensor of the same shape on the same device, without a gradient.

    value: a torch tensor; a numpy array, also of an ml_dtypes dtype; or an object with `__dlpack__`, such as an array
    of CuPy, JAX or MLX. An array with a dtype that DLPack does not bring to torch is converted by `__array__`, which
    makes a copy on the CPU. float4_e2m1fn and the float6 dtypes of ml_dtypes become uint8 with one code in a byte; the
    remaining dtypes become the torch dtype of the same name. The tensor shares the memory of `value`, except for numpy
    arrays that are read-only, byte-swapped or have negative strides.

    Raises TypeError for a value of another type, for a dtype that torch does not have, and for tensors without bytes
    (FakeTensor, meta) or without strides (sparse, wrapper subclasses such as DTensor).
    """
    if isinstance(value, torch.Tensor):
        return _plain(value)
    if isinstance(value, np.ndarray | np.generic):
        return _from_numpy(np.asarray(value))
    if hasattr(value, "__dlpack__"):
        try:
            return _plain(torch.utils.dlpack.from_dlpack(value))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if hasattr(value, "__array__"):  # float4_e2m1fn of JAX, which DLPack hands to torch only in packed form
                return _from_numpy(np.asarray(value))
            raise TypeError(
                f"torch cannot take over this {_type_name(value)} by DLPack ({error}); view it as uint8 first"
            ) from error
    raise TypeError(f"{_type_name(value)} is no tensor; give a torch tensor, a numpy array or an array with __dlpack__")


def _plain(value: torch.Tensor) -> torch.Tensor:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if value.is_meta or (fake is not None and isinstance(value, fake.FakeTensor)):
        raise TypeError(
            f"{_type_name(value)} on {value.device} has no bytes to read; give a real tensor, outside of FakeTensorMode"
        )
    if value.layout != torch.strided or hasattr(value, "__tensor_flatten__"):
        raise TypeError(
            f"{_type_name(value)} of layout {value.layout} is no plain tensor; give the dense tensors that it holds"
        )
    return value.detach()


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if array.dtype.isbuiltin == 1 and array.dtype.kind in "biufc":
        return torch.from_numpy(array)
    name = array.dtype.name
    if name in _BYTES_OF_ONE_CODE:
        return torch.from_numpy(array.view(np.uint8))
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != array.dtype.itemsize:
        raise TypeError(
            f"torch has no dtype for numpy's {name}; view the array as uint8 bytes, or convert it to float32"
        )
    return torch.from_numpy(array.view(np.dtype(f"u{dtype.itemsize}"))).view(dtype)


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
