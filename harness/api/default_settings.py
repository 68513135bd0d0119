"""Default settings of torch and of the floating-point unit while a result is judged.

A test may run under autocast, with TF32 products, another default dtype or flushed subnormal numbers. The reference
would then compute different numbers, and accuse a correct kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from narrowgauge.harness.machine.float_environment import KEPT, NEAREST, Environment, read_environment, restore

_DEFAULTS: Environment = {
    "mxcsr": 0x1F80, "x87-control-word": 0x033F, "fpcr": 0, "rounding-mode": NEAREST, "subnormal-numbers": KEPT,
    "torch-default-dtype": "float32", "torch-deterministic-algorithms": "not required",
    "torch-matmul-precision": "ieee (GPU), ieee (CPU)", "torch-fp16-accumulation": "forbidden",
}  # fmt: skip
"""Settings with an influence on the reference, by the names of `read_environment`."""
_DEVICE = "torch-default-device"
_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class Settings:
    """Settings of the calling thread."""

    environment: Environment
    device: str
    """torch's default device."""
    grad: bool
    autocast: tuple[bool, ...]
    """Whether autocast is enabled, per device type of `_AUTOCAST`."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """These settings in the context, and the settings of before after it."""
        before = current_settings()
        with ExitStack() as stack:
            stack.callback(before._write)
            self._write()
            if self.device != before.device:
                stack.enter_context(torch.device(self.device))
            yield

    def _write(self) -> None:
        now = current_settings()
        if self.environment != now.environment:
            restore(self.environment)
        if self.grad != now.grad:
            torch.set_grad_enabled(self.grad)
        for name, enabled, current in zip(_AUTOCAST, self.autocast, now.autocast, strict=True):
            if enabled != current:
                torch.set_autocast_enabled(name, enabled)


def current_settings() -> Settings:
    """The settings of the calling thread."""
    environment = read_environment()
    device = str(environment.pop(_DEVICE))
    autocast = tuple(torch.is_autocast_enabled(name) for name in _AUTOCAST)
    return Settings(environment, device, torch.is_grad_enabled(), autocast)


_callers: ContextVar[Settings] = ContextVar("callers")


@contextmanager
def default_settings() -> Iterator[None]:
    """Default settings in the context, for the reference.

    Raises RuntimeError on a machine with unknown control registers if the rounding mode or the handling of subnormal
    numbers is not the default.
    """
    callers = current_settings()
    defaults = {name: value for name, value in _DEFAULTS.items() if name in callers.environment}
    token = _callers.set(callers)
    try:
        with Settings(callers.environment | defaults, "cpu", grad=False, autocast=(False, False)).in_force():
            yield
    finally:
        _callers.reset(token)


def callers_settings() -> Settings:
    """The settings of before `default_settings`, for a call of the caller's own function."""
    return _callers.get()
