"""Native layers beside layers of the reference: the same parameters and steps, and the reports of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowgauge.native import modules as native
from narrowgauge.reference import modules as reference
from narrowgauge.reference.high_precision.attention import attention_backward, attention_forward
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from narrowgauge.reference.high_precision.norm import norm_backward, norm_forward
from narrowgauge.spec.autocast import autocast
from narrowgauge.spec.training import training_names
from tests.native import declared
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


def assert_products_right(seen: Seen, layer: Any, number: int = 0, dx: str = "dx") -> None:
    """y, dx and dw of a step are the products of its operands in the declared order."""
    q = {name: seen[name][number] for name in OPERANDS}
    dtype = layer.dtype
    assert_equal(seen["y"][number], declared.gemm(q["x"], q["w"], out_dtype=dtype, bias=layer.bias.detach()), "y")
    assert_equal(seen[dx][number], declared.gemm(q["dy"], q["w columnwise"], out_dtype=dtype), dx)
    assert_equal(seen["dw"][number], declared.gemm(q["dy columnwise"], q["x columnwise"], out_dtype=dtype), "dw")


def assert_inside(found: torch.Tensor, limits: Bounded, what: str) -> None:
    """Every number lies in its interval."""
    low, high = limits.interval(found.dtype)
    found = found.cpu()
    assert found.shape == low.shape, what
    assert ((low <= found) & (found <= high)).all(), f"{what} lies outside its bounds"


def assert_norm_right(seen: Seen, layer: Any, x: torch.Tensor) -> None:
    """The norm of `x` (…, K) and its gradients lie inside their bounds."""
    x, gamma = x.reshape(-1, layer.in_features), layer.layer_norm_weight.detach().cpu()
    beta = None if layer.layer_norm_bias is None else layer.layer_norm_bias.detach().cpu()
    assert_inside(seen["norm"][0], norm_forward(x, gamma, beta, layer.norm, layer.eps), "norm")
    gradients = norm_backward(seen["dnorm"][0].cpu(), x, gamma, layer.norm, layer.eps)
    for name, limits in zip(("dx", "dgamma", "dbeta"), gradients, strict=True):
        if limits is not None:
            assert_inside(seen[name][0], limits, name)


def assert_transformer_right(seen: Seen, layer: Any, step: Step) -> None:
    """Every stage of a TransformerLayer, of the stages before: products, norms, attention, GELU and the additions."""
    found = {name: values[0].cpu() for name, values in seen.items() if isinstance(values[0], torch.Tensor)}
    shape = step.x.shape
    for name, child in layer.named_children():
        own = {key.removeprefix(f"{name}."): value for key, value in seen.items() if key.startswith(f"{name}.")}
        assert_products_right(own, child, dx="dnorm" if "norm" in own else "dx")
        if "norm" in own:
            assert_norm_right(own, child, step.x if name == "qkv" else found["h"])

    def heads(tensor: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        return tensor.reshape(*shape[:2], parts, layer.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    q, k, v = heads(found["qkv.y"], 3)
    assert_inside(heads(found["attention"], 1)[0], attention_forward(q, k, v), "attention")
    backward = attention_backward(*heads(found["proj.dx"], 1), q, k, v)
    for part, limits in zip(heads(found["dqkv"], 3), backward, strict=True):
        assert_inside(part, limits, "dqkv")
    gelu = found["fc1.y"].view(*shape[:2], -1)
    assert_inside(found["gelu"], gelu_forward(gelu), "gelu")
    assert_inside(found["dgelu"], gelu_backward(found["fc2.dx"].view(gelu.shape), gelu), "dgelu")
    sums = {
        "h": (step.x, "proj.y"),
        "y": (found["h"], "fc2.y"),
        "dh": (step.dy, "fc1.dx"),
        "dx": (found["dh"], "qkv.dx"),
    }
    for name, (one, other) in sums.items():
        assert_equal(found[name], (one.float() + found[other].view(shape).float()).to(one.dtype), name)
    assert_equal(seen["x.grad"][0], found["dx"], "x.grad")
