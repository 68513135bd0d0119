"""Arrays of numpy, ml_dtypes and DLPack producers as tensors."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge.adapt import tensor


class Producer:
    """An array of another library with DLPack alone."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.held.__dlpack_device__()


def test_a_tensor_keeps_strides_and_device_without_gradient() -> None:
    x = torch.arange(12.0).view(3, 4).T.requires_grad_()
    got = tensor(x)
    assert got.data_ptr() == x.data_ptr()
    assert got.stride() == x.stride()
    assert not got.requires_grad
    assert tensor(torch.nn.Parameter(torch.ones(2))).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.uint8, np.int8, np.int32, np.uint32])
def test_numpy_arrays_share_their_memory(dtype: type) -> None:
    array = np.arange(12).astype(dtype).reshape(3, 4)[:, ::2]
    got = tensor(array)
    assert got.data_ptr() == array.ctypes.data
    assert got.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
        ("float8_e8m0fnu", torch.float8_e8m0fnu),
    ],
)
def test_dtypes_of_ml_dtypes_become_the_dtype_of_the_same_name(name: str, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    raw = np.arange(256 * 256 if size == 2 else 256).astype(f"u{size}")
    got = tensor(raw.view(getattr(ml_dtypes, name)).reshape(16, -1).T)
    assert got.dtype == dtype
    assert got.data_ptr() == raw.ctypes.data
    bits = got.view(torch.uint8) if size == 1 else got.view(torch.uint16)
    assert bits.T.flatten().tolist() == raw.tolist()


@pytest.mark.parametrize("name", ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"])
def test_formats_below_a_byte_give_a_code_in_each_byte(name: str) -> None:
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(16 if name.startswith("float4") else 64, dtype=np.uint8)
    got = tensor(codes.view(dtype))
    assert got.dtype == torch.uint8
    assert got.tolist() == codes.tolist()
    assert dtype(1.5) == codes.view(dtype)[int(tensor(np.array([1.5], dtype=dtype))[0])]


def test_numpy_arrays_that_torch_refuses_are_copied() -> None:
    array = np.arange(6, dtype=np.float32)
    frozen = array.copy()
    frozen.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of read-only memory
        assert tensor(frozen).tolist() == array.tolist()
    assert tensor(array[::-1]).tolist() == array[::-1].tolist()
    assert tensor(array.astype(">f4")).tolist() == array.tolist()
    assert tensor(np.float32(3)).tolist() == 3
    assert tensor(np.zeros((0, 4), dtype=ml_dtypes.bfloat16)).shape == (0, 4)


def test_arrays_with_dlpack_share_their_memory() -> None:
    held = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    got = tensor(Producer(held))
    assert got.data_ptr() == held.data_ptr()
    assert torch.equal(got, held)


class Refuses(Producer):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no float8 in this version")


class OnlyNumpy(Refuses):
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.held.numpy().astype(ml_dtypes.float4_e2m1fn)


def test_a_dtype_without_dlpack_is_converted_by_numpy() -> None:
    """float4_e2m1fn of JAX: one code in a byte."""
    assert tensor(OnlyNumpy(torch.tensor([0.5, 6.0, -1.0]))).tolist() == [1, 7, 10]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1.0, 2.0], "list is no tensor"),
        (lambda: None, "NoneType is no tensor"),
        (lambda: torch.ones(2, device="meta"), "meta has no bytes"),
        (lambda: torch.ones(2, 2).to_sparse(), "sparse_coo"),
        (lambda: Refuses(torch.ones(2)), "no float8 in this version.*uint8"),
        (lambda: np.array([1], dtype=ml_dtypes.float8_e3m4), "float8_e3m4.*uint8"),
        (lambda: np.array(["a"]), "torch has no dtype for numpy's str"),
    ],
)
def test_other_values_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tensor(make())
