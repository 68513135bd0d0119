"""`narrowgauge.assert_rows_independent`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowgauge.harness.api.function_backend import name_of_function
from narrowgauge.harness.backends.guarded_memory import element_bytes
from narrowgauge.harness.backends.results import QUANTIZED_PARTS, type_name
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.stages.repeated import Tensors
from narrowgauge.harness.operations.stages.rows import COUNTS, Independent, rows_stage


def assert_rows_independent(function: Callable[..., Any], *inputs: torch.Tensor, unit: int = 1) -> None:
    """Assert that each row of the results has the same bytes in another place, beside other rows, and alone.

    function: any function of tensors; no contract is needed. The function is called with these inputs, and with a part
    of their rows. Bind shared arguments of all rows by functools.partial or a lambda.
    inputs: tensors (M, …) of one M, at least two units. The rows of row m of a result are those with number m.
    unit: rows that belong together, such as 128 for scales of 128x128 blocks; M is a multiple.

    The results are a tensor, or a tuple, a list or a mapping of tensors (M, …) or (M/unit, …); None is left out. Tried
    are M = 1, 2, 7 and 128 units, all rows in reverse order, and every second unit of floating-point inputs replaced by
    zeros, NaN and the largest number. An M for which the function raises NotImplementedError is left out.

    Raises AssertionError with the M and the row at which bytes change, and if two calls on the same inputs give other
    bytes; TypeError and ValueError for inputs and results without such rows.
    """
    __tracebackhide__ = True
    rows = _rows_of(inputs, unit)
    name = name_of_function(function)
    call = Independent(
        rows // unit, {str(number): x.detach() for number, x in enumerate(inputs)},
        lambda given: _named(function(*given.values()), len(given["0"]), unit), height=unit,
    )  # fmt: skip
    every = torch.arange(call.count)
    first, second = (call.run(call.given(every)) for _ in range(2))
    for key, tensor in first.items():
        if not torch.equal(element_bytes(tensor), element_bytes(second[key])):
            raise AssertionError(f"{name}: two calls on the same inputs give other bytes of {key}, so rows say nothing")
    stage = rows_stage(call, lambda given, run: run(given), refusals=(NotImplementedError,))
    if not stage.compared:
        raise ValueError(f"{name} gives no element for M = {rows}, or raises NotImplementedError for every other M")
    if stage.sentence:
        tried = ", ".join(str(count * unit) for count in COUNTS if count < call.count)
        raise AssertionError(escape(f"{name}: {stage.sentence}\nM = {rows}; alone: {tried}"))


def _rows_of(inputs: tuple[torch.Tensor, ...], unit: int) -> int:
    """M of the inputs. Raises TypeError and ValueError."""
    if not inputs:
        raise TypeError("no input is given; it is assert_rows_independent(function, x), x (M, …)")
    for number, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor) or not x.dim():
            raise TypeError(f"input {number} is {type_name(x)}; inputs are tensors (M, …): bind others by a lambda")
        if x.shape[0] != inputs[0].shape[0]:
            raise ValueError(
                f"input {number} has {x.shape[0]} rows, and input 0 has {inputs[0].shape[0]}; bind an input that all "
                "rows share by functools.partial or a lambda"
            )
    rows = inputs[0].shape[0]
    if unit < 1 or rows % unit or rows < 2 * unit:
        raise ValueError(f"M is {rows}, and unit {unit}; M is a multiple of unit, at least 2 units")
    return rows


def _named(result: Any, rows: int, unit: int) -> Tensors:
    """The tensors of a result by name. Raises TypeError and ValueError for tensors without these rows."""
    if hasattr(result, "codes"):
        result = {part: getattr(result, part, None) for part in QUANTIZED_PARTS}
    if isinstance(result, torch.Tensor):
        parts: Mapping[Any, Any] = {"the result": result}
    elif isinstance(result, Mapping):
        parts = result
    elif isinstance(result, tuple | list):
        parts = {f"result {number}": part for number, part in enumerate(result)}
    else:
        raise TypeError(f"the function gave {type_name(result)}; it gives tensors, or a tuple or mapping of tensors")
    found = {}
    for name, tensor in parts.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type_name(tensor)}, not a tensor; leave it out: lambda x: function(x)[0]")
        if tensor.dim() == 0 or tensor.shape[0] not in (rows, rows // unit):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} for M = {rows}: it has no row of each unit of {unit}; leave "
                "it out, as by lambda x: function(x)[0], or give unit"
            )
        found[str(name)] = tensor.detach().clone()  # a function may give the same memory again
    if not found:
        raise TypeError("the function gave no tensor")
    return found
