"""A function of a user as a backend: its arguments by name, its result by convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from narrowgauge.harness.api.default_settings import callers_settings
from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.loading import parameters_of, passed
from narrowgauge.harness.backends.local_host import LocalHost
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, read_conventions
from narrowgauge.harness.cases.case import Case
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.spec.arguments import Random
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR, TILES

OPERATIONS = ("quantize", "dequantize", "transform", "gemm")
"""Operations, and a step of an operation, with conventions of their own for functions. Functions of all further
operations are called like the method of a backend."""
PLAIN = MappingProxyType({"tensor_scale_is": "amax", "layout": "linear", "nibbles": "low-first", "transposed": False})
"""Conventions of this package for results of quantize."""


def name_of_function(function: Callable[..., Any]) -> str:
    """Name of a Python function inside its module or function, `torch.ops.lib.name` of a custom op, or `function`."""
    op = getattr(function, "_opoverload", function)
    if isinstance(op, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return f"torch.ops.{op}"
    name = str(getattr(function, "__qualname__", "")).rpartition("<locals>.")[2]
    return name if name and "<" not in name else "function"


class FunctionBackend(Backend):
    """A backend with a single method, a function of this process."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        case: Case,
        operation: str,
        *,
        declares: Mapping[str, str] = MappingProxyType({}),
        conventions: Mapping[str, Any] = PLAIN,
        constraints: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """The function is the method called by `case` and similar cases; `dequantize` is an operation of its own.
        `conventions`: keyword arguments of `narrowgauge.adapt.quantized` for the results of a quantize. `constraints`:
        constraints of a backend (`harness.backends.offer`)."""
        self.raised: Exception | None = None
        """The last exception of the function."""
        self._function, self._conventions = function, conventions
        self._parameters = parameters_of(function)
        self._optional = case.all_methods()[case.called].optional
        # A quantize case judges dequantize on the result of the backend's quantize.
        own: dict[str, Any] = {"quantize": ops.quantize, "dequantize": self._dequantize}
        if operation != "dequantize":
            own = {case.called: self._quantize if case.called == "quantize" else self._method}
        super().__init__(LocalHost(name, SimpleNamespace(**own, declares=dict(declares), constraints=constraints)))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method; the result of `quantize` is read by the conventions of the function."""
        if method != "quantize" or self.has("dequantize"):
            return super().call(method, *arguments, **options)
        asked = options.pop("swizzled", False)
        x, recipe = arguments
        result = super().call(method, x, recipe, **options)
        try:
            q = self._read(result, x, recipe)
        except (TypeError, ValueError) as error:
            raise BackendError(f"quantize gave a result that does not fit: {error}") from error
        if asked and q.scale_layout != TILES:
            raise Unsupported("quantize gives linear scales; this case is of scales in the 128x4 layout")
        stored = q if asked else with_layout(q, LINEAR)
        return {name: getattr(stored, name) for name in QUANTIZED_PARTS}

    def _read(self, result: Any, x: torch.Tensor, recipe: Recipe) -> Quantized:
        """A result in the conventions. Raises TypeError and ValueError."""
        true_amax = None
        if self._conventions["tensor_scale_is"] != "amax" and recipe.tensor_scale not in ("none", "given"):
            true_amax = ops.quantize(x, recipe, random=(0, 0) if recipe.rounding == "stochastic" else None).amax
        return read_conventions(result, x.shape, recipe, self._conventions, true_amax=true_amax)

    # ---- methods of the host -----------------------------------------------------------------------------------------

    def _quantize(
        self,
        x: torch.Tensor,
        recipe: Recipe,
        *,
        amax: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        random: Random | None = None,
    ) -> Any:
        if scale is not None and "scale" not in self._parameters:
            raise NotImplementedError(f"the function has no parameter 'scale', which recipe {recipe} needs")
        if amax is not None and "amax" not in self._parameters:
            raise NotImplementedError("the function has no parameter 'amax', which this case gives")
        return self._run((x,), recipe=recipe, amax=amax, scale=scale, random=random)

    def _dequantize(self, q: Quantized, dtype: torch.dtype) -> Any:
        return self._run((q,), dtype=dtype, recipe=q.recipe)

    def _method(self, *arguments: Any, **options: Any) -> Any:
        """Any other method: its recipe, or that of its first operand, is passed by keyword, and so are all options. The
        function has a parameter for every required option."""
        operands, named = passed(self._parameters, self._optional, arguments, options)
        return self._run(operands, **named)

    def _run(self, operands: tuple[Any, ...], **options: Any) -> Any:
        """Call the function with the settings of the caller."""
        known = {name: value for name, value in options.items() if name in self._parameters}
        try:
            with callers_settings().in_force():
                return self._function(*operands, **known)
        except Exception as error:
            self.raised = error
            raise
