"""Loading the object that implements a backend: `native`, `reference`, or `package.module[:Name]`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.cases.keys import nearest

BUILT_IN = {"native": "narrowgauge.native.ops", "reference": "narrowgauge.reference.ops"}


def load_implementation(name: str, device: str = "") -> Any:
    """The module or object called `native`, `reference`, or `package.module[:Name]`. A class is instantiated.

    Modules are found as by `python -m`, also in the current folder. Raises BackendError if the backend cannot be
    loaded, or if its `check` rejects `device` (if given).
    """
    if name not in BUILT_IN and ":" not in name and "." not in name:
        raise BackendError(
            f"no backend is called {name!r}{nearest(name, BUILT_IN)}; "
            f"there are {', '.join(BUILT_IN)}, and your own as package.module:Name"
        )
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        implementation: Any = importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise BackendError(f"backend {name}: module {module_name} cannot be imported: {reason}") from error
    if attribute:
        if not hasattr(implementation, attribute):
            names = [n for n in vars(implementation) if not n.startswith("_")]
            raise BackendError(f"backend {name}: module {module_name} has no {attribute!r}{nearest(attribute, names)}")
        implementation = getattr(implementation, attribute)
    if inspect.isclass(implementation):
        try:
            implementation = implementation()
        except Exception as error:
            raise BackendError(f"backend {name}: {attribute}() raised {type(error).__name__}: {error}") from error
    if device and callable(check := getattr(implementation, "check", None)):
        import torch

        try:
            check(torch.device(device))
        except Exception as error:
            raise BackendError(f"backend {name} cannot run on {device}: {error}") from error
    return implementation


def error_location(error: BaseException) -> str:
    """` (at file:line)`: innermost frame outside of installed packages. Empty without such a frame."""
    location = ""
    trace = error.__traceback__ and error.__traceback__.tb_next
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_file() and "site-packages" not in path.parts:
            location = f" (at {path.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return location
