"""GELU in its tanh form: float32 kernels are inside the bound, and the other forms of GELU are not."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch.nn import functional

from narrowgauge.reference.high_precision.gelu import gelu_backward, gelu_forward
from tests.reference.inside import inside, width

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOT = math.sqrt(2 / math.pi)
LOG2E = math.log2(math.e)


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every binade from 2^-20 to 2^6 of both signs, zeros, and what is far out."""
    torch.manual_seed(1)
    spread = torch.randn(4000) * torch.exp2(torch.randint(-20, 5, (4000,)).float())
    return torch.cat([spread, torch.linspace(-12, 12, 2001), torch.tensor([0.0, -0.0, 300.0, -300.0])]).to(dtype)


def gradient(x: torch.Tensor, dy: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(functional.gelu(x, approximate=approximate), x, dy)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_gelu_and_its_gradient_are_inside(dtype: torch.dtype) -> None:
    x = numbers(dtype)
    dy = torch.randn(x.shape).to(dtype)
    assert bool(inside(functional.gelu(x, approximate="tanh").float(), gelu_forward(x), dtype).all())
    assert bool(inside(gradient(x, dy).float(), gelu_backward(dy, x), dtype).all())


def test_other_steps_to_the_same_number_are_inside() -> None:
    x = numbers(torch.float32)
    root, cubic = torch.tensor(ROOT), torch.tensor(0.044715)
    ways = {
        "a factored cubic": 0.5 * x * (1 + torch.tanh(x * (root + root * cubic * x * x))),
        "two halves": (0.5 * x) + (0.5 * x) * torch.tanh(root * (x + cubic * (x * x * x))),
        "tanh by a sigmoid": 0.5 * x * (1 + (2 / (1 + torch.exp(-2 * root * (x + cubic * x * x * x))) - 1)),
        "a product with a sigmoid": x / (1 + torch.exp2((-2 * LOG2E) * root * (x + cubic * x * x * x))),
        "1 less a quotient": 0.5 * x * (1 + (1 - 2 / (1 + torch.exp(2 * root * (x + cubic * x * x * x))))),
        "a cube of squares": x * (0.5 * (1 + torch.tanh(root * (x + cubic * x * (x * x))))),
    }
    for name, found in ways.items():
        assert bool(inside(found, gelu_forward(x)).all()), name


@pytest.mark.parametrize("ulps", [-2, 2])
def test_a_tanh_two_ulps_from_the_exact_result_is_inside(ulps: int) -> None:
    x = numbers(torch.float32)
    x = x[x.abs() < 12]
    u = (ROOT * (x.double() + 0.044715 * x.double() ** 3)).float()
    t = torch.tanh(u.double()).float()
    for _ in range(abs(ulps)):
        t = torch.nextafter(t, torch.tensor(math.copysign(math.inf, ulps)))
    assert bool(inside(0.5 * x * (1 + t), gelu_forward(x)).all())


def test_the_values_are_torchs_in_float64() -> None:
    x = numbers(torch.float32)
    x = x[x.abs() < 100].double()
    dy = torch.randn(x.shape).double()
    assert float((functional.gelu(x, approximate="tanh") - gelu_forward(x).value).abs().amax()) < 1e-14
    assert float((gradient(x, dy) - gelu_backward(dy, x).value).abs().amax()) < 1e-13


def test_fifty_digits_agree() -> None:
    with localcontext() as context:
        context.prec = 50
        pi = Decimal("3.14159265358979323846264338327950288419716939937511")
        for value in (0.5, -1.75, 3.0, -4.5, 2.0**-10):
            x = Decimal(value)
            u = (2 / pi).sqrt() * (x + Decimal("0.044715") * x**3)
            exact = x / 2 * (1 + ((2 * u).exp() - 1) / ((2 * u).exp() + 1))
            found = gelu_forward(torch.tensor([value]))
            assert abs(exact - Decimal(float(found.value))) < min(Decimal(2) ** -50, Decimal(float(found.error)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_in_steps_of_the_output(dtype: torch.dtype) -> None:
    """From −1 on a few steps of float32, at most one of bfloat16; far below 0 the sum 1 + tanh(u) cancels."""
    x = torch.linspace(-1, 10, 5000).to(dtype)
    assert float(width(gelu_forward(x), dtype).amax()) <= (80 if dtype == torch.float32 else 1)
    far = gelu_forward(torch.linspace(-10, -4, 100))
    assert bool((far.error < 10 * 2.0**-22).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_forms_are_outside(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 2000).to(dtype)
    dy = torch.randn(x.shape).to(dtype)
    wide = x.float()
    forward, backward = gelu_forward(x), gelu_backward(dy, x)
    at_two = wide.abs() > 1.8  # where the two forms are far apart, by 3e-4
    by_sigmoid = wide * torch.sigmoid(1.702 * wide)
    no_cube = 0.5 * wide * (1 + torch.tanh(ROOT * wide))
    assert float(inside(by_sigmoid, forward, dtype).double().mean()) < 0.2
    assert float(inside(no_cube, forward, dtype).double().mean()) < 0.5
    for found, expected in (
        (functional.gelu(wide), forward), (gradient(wide, dy.float(), "none"), backward),
    ):  # fmt: skip
        share = float(inside(found, expected, dtype)[at_two].double().mean())
        assert share < (0.1 if dtype == torch.float32 else 0.85)
    t = torch.tanh(ROOT * (wide + 0.044715 * wide**3))
    assert float(inside(dy * 0.5 * (1 + t), backward, dtype).double().mean()) < 0.1


def test_special_values() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])
    forward = gelu_forward(x)
    assert bool(inside(torch.tensor([torch.nan, torch.inf, torch.nan, 3e38]), forward).all())
    assert forward.unbounded.tolist() == [False, False, False, True]


def test_the_gradient_has_the_shape_of_x() -> None:
    with pytest.raises(ValueError, match=r"dy has the shape of x: \(3,\) and \(2, 3\)"):
        gelu_backward(torch.ones(3), torch.ones(2, 3))
