"""One launch for both toolchains: the device of the tensors picks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from narrowgauge.native.runtime import cuda, host

Argument = torch.Tensor | np.generic | None


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
) -> None:
    """Run `kernel` of `source`.cu over `grid` × `block` on `device`.

    Arguments are tensors on that device (their address is passed), None (a null pointer) and numpy scalars of the
    parameter's type, or np.bytes_ of a struct. A block has `shared_bytes` of dynamic shared memory, which there is on a
    GPU alone. Raises ValueError where a tensor lies elsewhere, kernels do not run on the device or it has no dynamic
    shared memory, and what the toolchains raise.
    """
    plain = [_plain(argument, kernel, device) for argument in arguments]
    grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
    if device.type == "cuda":
        cuda.launch(
            source, kernel, grid, block, plain, device=device, extra_flags=extra_flags, shared_bytes=shared_bytes
        )
    elif device.type == "cpu":
        if shared_bytes:
            raise ValueError(f"kernel {kernel} asks for {shared_bytes} bytes of dynamic shared memory; a CPU has none")
        workers = torch.get_num_threads()
        numbers = [np.uintp(one) if isinstance(one, int) else one for one in plain]
        host.launch(source, kernel, grid, block, numbers, workers=workers, extra_flags=extra_flags)
    else:
        raise ValueError(f"kernel {kernel} runs on cpu and cuda, not {device}")


def _plain(argument: Argument, kernel: str, device: torch.device) -> np.generic | int:
    if isinstance(argument, np.generic):  # first: of a number, isinstance takes four times as long to deny a tensor
        return argument
    if argument is None:
        return 0
    if argument.device != device:
        raise ValueError(f"kernel {kernel} runs on {device}, but a tensor lies on {argument.device}; move it first")
    return argument.data_ptr()
