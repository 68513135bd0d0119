"""Launch of a kernel on the device of its tensors, a GPU or a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from narrowgauge.native.runtime import cuda, host
from narrowgauge.native.runtime.structs import StructValue

_NUMBERS = (int, float, np.generic)
Argument = torch.Tensor | np.generic | StructValue | bytes | None


def launch(
    source: str,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Argument],
    *,
    device: torch.device,
    extra_flags: tuple[str, ...] = (),
    shared_bytes: int = 0,
    early: bool = False,
) -> None:
    """Run `kernel` of `source`.cu over `grid` × `block` on `device`.

    Arguments are parameter structs (`native.runtime.structs`), also as their bytes, tensors on the device (the kernel
    gets their address), None (a null pointer) and numpy scalars of the parameter's type. A block has `shared_bytes` of
    dynamic shared memory, on a GPU only. `early`: on a GPU from sm_90 on the kernel may begin while the kernel before
    it runs, and waits for the writes of that kernel itself, by griddepcontrol.wait. Raises ValueError if a tensor is
    not on `device`, `device` is neither a CPU nor a GPU, or a CPU is asked for dynamic shared memory; and as the
    toolchains do.
    """
    values = [_value(argument, kernel, device) for argument in arguments]
    grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    if device.type == "cuda":
        cuda.launch(
            source, kernel, grid, block, values, device=device, extra_flags=extra_flags, shared_bytes=shared_bytes,
            early=early,
        )  # fmt: skip
    elif device.type == "cpu":
        if shared_bytes:
            raise ValueError(f"kernel {kernel} asks for {shared_bytes} bytes of dynamic shared memory; a CPU has none")
        workers = torch.get_num_threads()
        host.launch(source, kernel, grid, block, values, workers=workers, extra_flags=extra_flags)
    else:
        raise ValueError(f"kernel {kernel} runs on cpu and cuda, not {device}")


def _value(argument: Argument, kernel: str, device: torch.device) -> np.generic | int | bytes:
    """The argument as the toolchains take it: a numpy scalar, an address, or the bytes of a struct."""
    if isinstance(argument, StructValue):
        return argument.layout.pack(
            *[field if isinstance(field, _NUMBERS) else _address(field, kernel, device) for field in argument.fields]
        )
    if isinstance(argument, np.generic | bytes):
        return argument
    return _address(argument, kernel, device)


def _address(tensor: torch.Tensor | None, kernel: str, device: torch.device) -> int:
    if tensor is None:
        return 0
    if tensor.device != device:
        raise ValueError(f"kernel {kernel} runs on {device}, but a tensor lies on {tensor.device}; move it first")
    return tensor.data_ptr()
