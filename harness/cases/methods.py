"""Methods of backends, and their places in the built-in backends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A method that an operation calls. The built-in backends are modules: `narrowgauge.native.ops` has the functions
    that it exports; a place, "module:name", names any other function."""

    reference: str = ""
    """Place of the function of the reference; empty: `narrowgauge.reference.ops` exports it."""
    native: str = ""
    """Place of the function of the native kernels; empty: the function exported by `narrowgauge.native.ops`, if any."""
    converted: bool = False
    """Whether the attribute `conventions` of a backend says how the results are stored."""
    optional: tuple[str, ...] = ()
    """Keyword arguments that a function under `narrowgauge.check` may leave out: the operands have the same
    information."""
