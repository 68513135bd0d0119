"""Native layers beside layers of the reference: the same parameters and steps, and the reports of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.native import modules as native
from narrowgauge.reference import modules as reference
from narrowgauge.spec.modules.autocast import autocast
from narrowgauge.spec.modules.training import training_names
from tests.native.devices import ops
from tests.native.samples import assert_equal, assert_same, matrix

RECIPES = tuple(training_names())
SOME = ("NVFP4BlockScaling", "MXFP8BlockScaling", "Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling")
"""A recipe of every kind."""

OPERANDS = ("x", "x columnwise", "w", "w columnwise", "dy", "dy columnwise")

Seen = dict[str, list[Any]]
"""All reported values by name, in the order of the first report."""


@dataclass
class Step:
    """Inputs of a forward and a backward pass: x, dy, and the rows of the sections of a grouped layer."""

    x: torch.Tensor
    dy: torch.Tensor
    splits: tuple[int, ...] = ()


def steps(count: int, rows: int, inner: int, outer: int, *, family: str = "lattice", **more: Any) -> list[Step]:
    """Steps with different numbers: small integers ("lattice"), or a family of `matrix`.

    more: dtype (default bfloat16); splits; shape of x and dy without the last dimension.
    """
    dtype, splits = more.get("dtype", torch.bfloat16), more.get("splits", ())
    found = []
    for number in range(count):
        x, dy = (
            lattice(rows, columns, dtype, seed=2 * number + side)
            if family == "lattice"
            else matrix(family, rows, columns, dtype, seed=2 * number + side)
            for side, columns in enumerate((inner, outer))
        )
        shape = more.get("shape", (rows,))
        found.append(Step(x.view(*shape, inner), dy.view(*shape, outer), splits))
    return found


def lattice(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Integers from −3 to 3, with a 3 in every block: all scales are equal, and no sum rounds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype)
    x[::16, ::16] = 3
    return x


def beside(kind: str, *sizes: int, **options: Any) -> tuple[Any, Any]:
    """A native layer on the device of the test and the reference's on the CPU, with the same parameters."""
    expected = getattr(reference, kind)(*sizes, **options)
    with torch.no_grad():
        for number, parameter in enumerate(expected.parameters()):
            rows = parameter.unsqueeze(0) if parameter.dim() == 1 else parameter
            parameter.copy_(lattice(*rows.shape, parameter.dtype, seed=100 + number).view(parameter.shape) / 4)
    layer = getattr(native, kind)(*sizes, device=ops.device, **options)
    layer.load_state_dict(expected.state_dict())
    return layer, expected


def run(
    layer: torch.nn.Module,
    given: Sequence[Step],
    recipe: str | None,
    *,
    forward: Callable[..., torch.Tensor] | None = None,
    x_grad: bool = True,
) -> Seen:
    """All reports of the layer in these steps, and of the last step also the gradients of x and of the parameters.

    `forward` replaces the call of the layer.
    """
    seen: Seen = {}
    device = ops.device if type(layer).__module__.startswith(native.__name__) else "cpu"
    layer.observer = observing(seen)  # type: ignore[assignment]
    for step in given:
        layer.zero_grad()
        x = step.x.to(device, copy=True).requires_grad_(x_grad)
        with autocast(recipe):
            y = (forward or layer)(x, *([list(step.splits)] if step.splits else []))
        y.backward(step.dy.to(device))
        seen.setdefault("y.shape", []).append(torch.tensor(y.shape))
        if x.grad is not None:
            seen["x.grad"] = [x.grad]
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            seen[f"{name}.grad"] = [parameter.grad]
    layer.observer = None  # type: ignore[assignment]
    return seen


def observing(seen: Seen) -> Callable[[str, Any], None]:
    """An observer that keeps all reports, with copies of tensors: autograd adds to a gradient in place."""

    def observe(name: str, value: Any) -> None:
        seen.setdefault(name, []).append(value.clone() if isinstance(value, torch.Tensor) else value)

    return observe


def assert_reports_same(got: Seen, expected: Seen, *, but: frozenset[str] = frozenset()) -> None:
    """The same names, and under each name, except `but`, the same values, bit for bit."""
    assert got.keys() == expected.keys()
    for name in got.keys() - but:
        assert len(got[name]) == len(expected[name]), name
        for one, other in zip(got[name], expected[name], strict=True):
            assert_value_same(one, other, name)


def assert_value_same(got: Any, expected: Any, name: str) -> None:
    """A tensor, a Quantized or a list of them, bit for bit."""
    if isinstance(got, torch.Tensor):
        assert_equal(got, expected, name)
    elif isinstance(got, list):
        assert len(got) == len(expected), name
        for one, other in zip(got, expected, strict=True):
            assert_value_same(one, other, name)
    else:
        assert_same(got, expected)
