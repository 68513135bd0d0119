"""Methods of backends, and where the built-in backends have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A method that an operation calls. The built-in backends are modules: `narrowgauge.native.ops` has the functions
    that it exports; a place, "module:name", names any other function."""

    reference: str = ""
    """Place of the function of the reference; empty: `narrowgauge.reference.ops` exports it."""
    native: str = ""
    """Place of the function of the native kernels; empty: the function that `narrowgauge.native.ops`
    exports, if it does."""
    converted: bool = False
    """Whether the attribute `conventions` of a backend says how the results are stored."""
    optional: tuple[str, ...] = ()
    """Keyword arguments that a function under `narrowgauge.check` may leave out: they say what its operands say."""
