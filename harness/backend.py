"""Backends: the protocol, the built-in ones by name, and `package.module:Name` for everybody else's.

A backend is any object or module that has some of the doors of design.md:

    quantize(x, recipe, *, amax=None, random=None) -> Quantized, or (codes, scales, amax), or a dict of those
    dequantize(q, dtype) -> Tensor
    gemm(a, b, *, out_dtype, c=None, bias=None) -> Tensor

It raises NotImplementedError for what it does not do. It may have `variations(device)`, a dict of names to context
managers under which its results must be the same bytes; without one, an operation runs twice. It may have
`check(device)`, which raises where it cannot run at all, before any case does: a missing compiler, say.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.case import nearest
from reference.quantized import Quantized, codes_shape, scales_shape
from reference.recipes import Recipe

if TYPE_CHECKING:
    import torch

BUILT_IN = {"native": "native.ops", "reference": "reference.ops"}
DOORS = ("quantize", "dequantize", "gemm")


class BackendError(Exception):
    """A backend cannot be loaded, raised, or gave something that is no result. The sentence says which."""


class Unsupported(Exception):
    """The backend says that it does not do this."""


class Backend:
    """One loaded backend: calls its doors and checks what comes back."""

    def __init__(self, name: str, doors: Any) -> None:
        self.name = name
        self.doors = doors
        if not any(self.has(door) for door in DOORS):
            raise BackendError(
                f"backend {name} has none of the doors {', '.join(DOORS)}; see README, 'Your own kernel'"
            )

    def has(self, door: str) -> bool:
        """Whether the backend has this door."""
        return callable(getattr(self.doors, door, None))

    def variations(self, device: torch.device) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        """Ways of running an operation that must all give the same bytes."""
        if callable(given := getattr(self.doors, "variations", None)):
            try:
                found = dict(given(device))
            except Exception as error:
                raise BackendError(f"variations raised {type(error).__name__}: {error}{place(error)}") from error
            if not found:
                raise BackendError("variations gave none; it names at least one way of running, or is left out")
            return found
        return {"first run": contextlib.nullcontext, "second run": contextlib.nullcontext}

    def call(self, door: str, *arguments: Any, **options: Any) -> Any:
        """What the door gives. Raises Unsupported, or BackendError with the exception's own words and place."""
        if not self.has(door):
            raise Unsupported(f"backend {self.name} has no {door}")
        try:
            return getattr(self.doors, door)(*arguments, **options)
        except NotImplementedError as error:
            raise Unsupported(str(error) or f"{self.name}.{door} is not implemented for this case") from error
        except Exception as error:
            raise BackendError(f"{door} raised {type(error).__name__}: {error}{place(error)}") from error

    def quantize(self, x: torch.Tensor, recipe: Recipe) -> Quantized:
        """The door, with its result brought into a Quantized whose shapes and dtypes are right."""
        return as_quantized(self.call("quantize", x, recipe), x, recipe)

    def tensor(
        self, door: str, shape: tuple[int, ...], dtype: torch.dtype, q: Quantized, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        """A door of `q` that gives a tensor. Raises BackendError where it has another shape, dtype or device."""
        import torch

        out = self.call(door, q, *arguments, **options)
        if not isinstance(out, torch.Tensor):
            raise BackendError(f"{door} gave {type(out).__name__}, not a tensor")
        if tuple(out.shape) != shape or out.dtype != dtype:
            wanted = f"{_dtype(dtype)} of shape {shape}"
            raise BackendError(f"{door} gave {_dtype(out.dtype)} of shape {tuple(out.shape)}, not {wanted}")
        if out.device != q.codes.device:
            raise BackendError(f"{door} gave its result on {out.device}; its input is on {q.codes.device}")
        return out


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def place(error: BaseException) -> str:
    """` (at file:line)`: the innermost place outside installed packages; nothing where there is none."""
    found = ""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_file() and "site-packages" not in path.parts:
            found = f" (at {path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def load_backend(spec: str, device: str = "") -> Backend:
    """The backend called `native`, `reference`, or `package.module[:Name]`; a class is made into an object.

    Modules are found as `python -m` finds them, from the current folder too. Raises BackendError where there is none,
    or where its own `check` says that it cannot run on `device`, where one is named.
    """
    if spec not in BUILT_IN and ":" not in spec and "." not in spec:
        raise BackendError(
            f"no backend is called {spec!r}{nearest(spec, BUILT_IN)}; "
            f"there are {', '.join(BUILT_IN)}, and your own as package.module:Name"
        )
    module_name, _, attribute = BUILT_IN.get(spec, spec).partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {spec}: module {module_name} cannot be imported: {words}") from error
    if attribute:
        if not hasattr(found, attribute):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise BackendError(f"backend {spec}: module {module_name} has no {attribute!r}{nearest(attribute, names)}")
        found = getattr(found, attribute)
    if inspect.isclass(found):
        try:
            found = found()
        except Exception as error:
            raise BackendError(f"backend {spec}: {attribute}() raised {type(error).__name__}: {error}") from error
    backend = Backend(spec, found)
    if device and callable(check := getattr(found, "check", None)):
        import torch

        try:
            check(torch.device(device))
        except Exception as error:
            raise BackendError(f"backend {spec} cannot run on {device}: {error}") from error
    return backend


def check_device(device: str) -> None:
    """Raises BackendError where `device` is "cuda" and there is no GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BackendError("--device cuda needs a GPU, and torch sees none; `narrowgauge doctor` says more")


def as_quantized(result: Any, x: torch.Tensor, recipe: Recipe) -> Quantized:
    """A backend's result as a Quantized of `x`.

    Takes an object with codes, scales and amax, a mapping of them, or a tuple in that order; amax may be None where a
    kernel does not show it. float4 and float8 dtypes of torch are seen as their bytes. Raises BackendError where a part
    is missing or has another shape, dtype or device.
    """
    import torch

    if isinstance(result, Mapping):
        parts = dict(result)
    elif isinstance(result, tuple | list):
        if len(result) > 3:
            raise BackendError(f"quantize gave {len(result)} things; it gives codes, scales and amax")
        parts = dict(zip(("codes", "scales", "amax"), result, strict=False))
    elif not hasattr(result, "codes"):
        raise BackendError(f"quantize gave {type(result).__name__}; it gives codes, scales and amax")
    else:
        parts = {name: getattr(result, name, None) for name in ("codes", "scales", "amax", "tensor_scale")}
    shape = (x.shape[0], x.shape[1])
    wanted = {
        "codes": (torch.uint8, codes_shape(shape, recipe), True),
        "scales": (torch.uint8, scales_shape(shape, recipe), True),
        "amax": (torch.float32, (1,), False),
        "tensor_scale": (torch.float32, (1,), False),
    }
    checked: dict[str, Any] = {}
    for name, (dtype, expected, required) in wanted.items():
        part = parts.get(name)
        if part is None and not required:
            checked[name] = None
            continue
        if not isinstance(part, torch.Tensor):
            raise BackendError(
                f"quantize gave {name} as {type(part).__name__}, not a tensor; it gives codes, scales and amax"
            )
        if dtype == torch.uint8 and part.dtype != dtype and part.element_size() == 1:
            part = part.view(torch.uint8)
        if part.dtype != dtype or tuple(part.shape) != tuple(expected):
            raise BackendError(
                f"quantize gave {name} as {_dtype(part.dtype)} of shape {tuple(part.shape)}; "
                f"{recipe} of {shape} has {_dtype(dtype)} of shape {tuple(expected)}"
            )
        if part.device != x.device:
            raise BackendError(f"quantize gave {name} on {part.device}; its input is on {x.device}")
        checked[name] = part.detach().contiguous()
    return Quantized(checked["codes"], checked["scales"], checked["amax"], recipe, shape, checked["tensor_scale"])
