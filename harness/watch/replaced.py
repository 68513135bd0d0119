"""Putting a watcher before the kernels of a custom op, or in the place of a Python function, and taking it away."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch

Call = Callable[..., Any]
DEVICES = ("CPU", "CUDA")
"""Dispatch keys of the watched kernels."""
COMPOSITE = "CompositeImplicitAutograd"


class Observer(Protocol):
    """Receiver of the calls of a replaced function."""

    def counted(self) -> int:
        """Count a call; its number if it is to be judged, else 0."""

    def observed(self, number: int, call: Call, names: Names, args: Any, kwargs: Any) -> Any:
        """The result of `call(*args, **kwargs)`, which is judged. `names`: see `Names`."""


Names = Callable[[Any, Any], Mapping[str, Any]]
"""Function from positional and keyword arguments to a mapping from parameter names to arguments."""


def overloads_of(function: Any) -> list[Any]:
    """The overloads of a custom op: of `torch.ops.lib.name`, an overload of it, or `torch.library.custom_op`. Empty
    for any other object."""
    op: Any = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    packet: Any = op if isinstance(op, torch._ops.OpOverloadPacket) else None
    if packet is not None:
        return [getattr(packet, name) for name in packet.overloads()]
    return [op] if isinstance(op, torch._ops.OpOverload) else []


def replace(function: Any, observer: Observer) -> ExitStack:
    """Let `observer` see the calls of a custom op or Python function until the result is closed.

    Raises ValueError if no kernel or no name of a module or class leads to the function, TypeError for other objects.
    """
    overloads = overloads_of(function)
    with ExitStack() as stack:
        if overloads:
            replaced = [_replace_kernels(overload, observer, stack) for overload in overloads]
            if not any(replaced):
                raise ValueError(f"{function} has no kernel for a CPU or for CUDA; load the library that registers it")
        else:
            _replace_function(function, observer, stack)
        return stack.pop_all()


# ---- custom ops ------------------------------------------------------------------------------------------------------


def _replace_kernels(op: Any, observer: Observer, stack: ExitStack) -> bool:
    """Override the kernels of an overload; whether it has one.

    A kernel of a device or of CompositeExplicitAutograd is overridden for the device. The kernel of
    CompositeImplicitAutograd is overridden in its place: a kernel of a device would end its automatic gradient.
    """
    if not hasattr(torch.library, "get_kernel"):
        raise RuntimeError(f"torch {torch.__version__} has no torch.library.get_kernel; install torch 2.9 or later")
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, op.name())
    keys = {}
    for device in DEVICES:
        if has(device) or has("CompositeExplicitAutograd"):
            keys[device] = torch.library.get_kernel(op, device)
        elif has(COMPOSITE):
            keys[COMPOSITE] = torch.library.get_kernel(op, device)
    if keys:
        torch_library: Any = torch.library
        library = torch_library.Library(op.namespace, "IMPL")  # not scoped: _destroy puts the kernels back
        stack.callback(_restore_kernels, library, torch.library._impls & _names(op, keys))
        names = [argument.name for argument in op._schema.arguments]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for key, kernel in keys.items():
                library.impl(
                    op.name(), _watched_kernel(kernel, names, observer), key, with_keyset=True, allow_override=True
                )
    return bool(keys)


def _watched_kernel(kernel: Any, parameters: list[str], observer: Observer) -> Call:
    def names(args: Any, kwargs: Any) -> Mapping[str, Any]:
        return {**dict(zip(parameters, args, strict=False)), **kwargs}

    def watched(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not (number := observer.counted()):
            return kernel.call_boxed(keys, *args, **kwargs)
        return observer.observed(number, functools.partial(kernel.call_boxed, keys), names, args, kwargs)

    return watched


def _names(op: Any, keys: Mapping[str, Any]) -> set[str]:
    """Names of kernels in torch's list of the kernels that Python code has registered."""
    return {f"{op.namespace}/{op.name().split('::')[-1]}/{key}" for key in keys}


def _restore_kernels(library: Any, listed: set[str]) -> None:
    library._op_impls.difference_update(listed)  # the end of a library removes these names from torch's list
    library._destroy()


# ---- Python functions ------------------------------------------------------------------------------------------------


def _replace_function(function: Any, observer: Observer, stack: ExitStack) -> None:
    """Replace a function in its class, or in all loaded modules, under any name."""
    if not inspect.isroutine(function):
        raise TypeError(
            f"watch takes a custom op, such as torch.ops.lib.name, or a Python function; not {type(function).__name__}"
        )
    function = getattr(function, "__func__", function)  # of a class method
    places = _places(function)
    if not places:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"no module or class has {name} under its name; give the function as its module has it now, or a method "
            "as an attribute of its class"
        )
    watched = _watched_function(function, observer)
    for holder, name, found in places:
        wrapped = type(found)(watched) if isinstance(found, (classmethod, staticmethod)) else watched
        setattr(holder, name, wrapped)
        stack.callback(_restore_name, holder, name, wrapped, found)


def _places(function: Any) -> list[tuple[Any, str, Any]]:
    """Modules and classes with the function: the holder, the name and the attribute, which may be a class method."""
    found: list[tuple[Any, str, Any]] = [
        (module, name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
    *outer, name = getattr(function, "__qualname__", "").split(".")
    holder = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in outer:
        holder = getattr(holder, "__dict__", {}).get(part)
    value = getattr(holder, "__dict__", {}).get(name) if outer else None
    if value is not None and getattr(value, "__func__", value) is function:
        found.append((holder, name, value))
    return found


def _restore_name(holder: Any, name: str, ours: Any, found: Any) -> None:
    """Put the function back, unless the program has put another in its place since."""
    if vars(holder).get(name) is ours:
        setattr(holder, name, found)


def _watched_function(function: Any, observer: Observer) -> Call:
    def names(args: Any, kwargs: Any) -> Mapping[str, Any]:
        return inspect.signature(function).bind(*args, **kwargs).arguments

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (number := observer.counted()):
            return function(*args, **kwargs)
        return observer.observed(number, function, names, args, kwargs)

    return watched
