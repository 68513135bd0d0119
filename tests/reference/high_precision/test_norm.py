"""LayerNorm and RMSNorm: float32 kernels of every kind are inside the bound, and known wrong ones are not."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch.nn import functional

from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.reference.high_precision.norm import Kind, norm_backward, norm_forward
from tests.reference.inside import inside, width

f32 = np.float32
EPS = 1e-5
KINDS: tuple[Kind, ...] = ("layer", "rms")
FAMILIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "mean": lambda x: x + 100,
    "outlier": lambda x: torch.where(torch.arange(x.shape[1]) == 5, 1e4, x),
    "tiny": lambda x: x * 1e-4,
    "cancelling": lambda x: torch.cat([x[:, ::2], -x[:, 1::2] * (1 + 2.0**-9)], 1),
    "constant": lambda x: x[:, :1].expand(x.shape).contiguous(),
    "spread": lambda x: x * torch.exp2(torch.arange(x.shape[1]) % 21 - 10.0),
}


class Problem:
    """Inputs of a family in a dtype; γ and β near 1 and 0 and not."""

    def __init__(self, family: str, dtype: torch.dtype, kind: Kind, *, rows: int = 12, columns: int = 96) -> None:
        torch.manual_seed(len(family) + columns)
        self.kind, self.columns = kind, columns
        self.x = FAMILIES[family](torch.randn(rows, columns)).to(dtype)
        self.gamma = (1 + torch.randn(columns) / 4).to(dtype)
        self.beta = torch.randn(columns).to(dtype) if kind == "layer" else None
        self.dy = torch.randn(rows, columns).to(dtype)

    def forward(self) -> Bounded:
        return norm_forward(self.x, self.gamma, self.beta, self.kind, EPS)

    def backward(self) -> tuple[Bounded, ...]:
        found = norm_backward(self.dy, self.x, self.gamma, self.kind, EPS)
        return tuple(each for each in found if each is not None)

    def torchs(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y and the gradients of x, γ and β, as torch's own functions compute them in `dtype`."""
        given = [t.to(dtype).clone().requires_grad_() for t in (self.x, self.gamma, self.beta) if t is not None]
        if self.kind == "layer":
            y = functional.layer_norm(given[0], (self.columns,), given[1], given[2], EPS)
        else:
            y = functional.rms_norm(given[0], (self.columns,), given[1], EPS)
        return y.detach(), list(torch.autograd.grad(y, given, self.dy.to(dtype)))

    def written(self, statistics: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]) -> torch.Tensor:
        """y in float32, by the mean and the variance that `statistics` has of the rows."""
        x = self.x.float().numpy()
        mean, variance = statistics(x)
        r = f32(1) / np.sqrt(variance + f32(EPS))
        y = (x - mean[:, None]) * r[:, None] * self.gamma.float().numpy()
        return torch.from_numpy(y if self.beta is None else y + self.beta.float().numpy())


def last(x: np.ndarray) -> np.ndarray:
    """Sums of the rows in order."""
    return np.add.accumulate(x, 1, dtype=f32)[:, -1]


def sequential(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = last(x) * f32(1 / x.shape[1])
    deviations = x - mean[:, None]
    return mean, last(deviations * deviations) / f32(x.shape[1])


def shuffled(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sequential(x[:, np.random.default_rng(3).permutation(x.shape[1])])


def largest_first(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return sequential(np.take_along_axis(x, np.argsort(-np.abs(x), 1), 1))


def welford(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, squares = x[:, 0].copy(), np.zeros(len(x), f32)
    for count, column in enumerate(x.T[1:], 2):
        delta = column - mean
        mean = mean + delta * (f32(1) / f32(count))
        squares = squares + delta * (column - mean)
    return mean, squares / f32(x.shape[1])


def merged(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chan's merges of neighbours, with weights of either mean as torch's CUDA kernel has them."""
    means, squares, counts = x.copy(), np.zeros_like(x), np.ones(x.shape[1], f32)
    while means.shape[1] > 1:
        even = means.shape[1] // 2 * 2
        (a, b), (s, t), (n, m) = ((each[..., :even:2], each[..., 1:even:2]) for each in (means, squares, counts))
        inverse = f32(1) / (n + m)
        delta, left, right = b - a, n * inverse, m * inverse
        rest = means[:, even:], squares[:, even:], counts[even:]
        means = np.concatenate([left * a + right * b, rest[0]], 1)
        squares = np.concatenate([s + t + delta * delta * left * m, rest[1]], 1)
        counts = np.concatenate([n + m, rest[2]])
    return means[:, 0], squares[:, 0] / counts[0]


def mean_of_squares(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(x), f32), last(x * x) / f32(x.shape[1])


class TestSound:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_torchs_norms_and_their_gradients_are_inside(self, family: str, kind: Kind, dtype: torch.dtype) -> None:
        problem = Problem(family, dtype, kind)
        y, gradients = problem.torchs()
        for found, expected in zip([y, *gradients], [problem.forward(), *problem.backward()], strict=True):
            assert bool(inside(found, expected, dtype).all())

    @pytest.mark.parametrize("columns", [1, 3, 300])
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_widths_and_float16(self, kind: Kind, columns: int) -> None:
        problem = Problem("normal", torch.float16, kind, columns=columns)
        y, gradients = problem.torchs()
        for found, expected in zip([y, *gradients], [problem.forward(), *problem.backward()], strict=True):
            assert bool(inside(found, expected, torch.float16).all())

    @pytest.mark.parametrize("statistics", [sequential, shuffled, largest_first, welford, merged])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_way_to_the_variance_is_inside(
        self, family: str, statistics: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
    ) -> None:
        problem = Problem(family, torch.float32, "layer", columns=160)
        assert bool(inside(problem.written(statistics), problem.forward()).all())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_sums_of_squares_in_order_are_inside(self, family: str) -> None:
        problem = Problem(family, torch.float32, "rms", columns=160)
        assert bool(inside(problem.written(mean_of_squares), problem.forward()).all())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_values_are_the_gradients(self, family: str, kind: Kind) -> None:
        """float64 autograd of torch's function has the same formula's exact gradients, to within its own rounding."""
        problem = Problem(family, torch.float32, kind)
        y, gradients = problem.torchs(torch.float64)
        for found, expected in zip([y, *gradients], [problem.forward(), *problem.backward()], strict=True):
            scale = float(expected.max_magnitude.amax())
            assert float((found - expected.value).abs().amax()) <= 1e-9 * scale

    def test_fifty_digits_agree(self) -> None:
        x, gamma, beta = ([3.0, -1.25, 7.5, 0.375], [1.5, -2.0, 1.0, 0.25], [0.5, 1.0, -3.0, 0.0])
        expected = norm_forward(torch.tensor([x]), torch.tensor(gamma), torch.tensor(beta), "layer", EPS)
        with localcontext() as context:
            context.prec = 50
            mean = sum(map(Decimal, x)) / 4
            variance = sum((Decimal(value) - mean) ** 2 for value in x) / 4
            r = 1 / (variance + Decimal(EPS)).sqrt()
            for place, (value, g, b) in enumerate(zip(x, gamma, beta, strict=True)):
                exact = (Decimal(value) - mean) * r * Decimal(g) + Decimal(b)
                off = abs(exact - Decimal(float(expected.value[0, place])))
                assert off < Decimal(2) ** -49
                assert off < Decimal(float(expected.error[0, place]))


class TestSharp:
    def test_the_bound_in_steps_of_the_output(self) -> None:
        """Of 1024 columns: bfloat16 outputs are known to within a step; float32 ones to about 2^-10 of their size."""
        for kind, in_float32 in (("layer", 2.0**14), ("rms", 2.0**10)):
            problem = Problem("normal", torch.bfloat16, kind, columns=1024)  # type: ignore[arg-type]
            expected, (dx, dgamma, *_) = problem.forward(), problem.backward()
            for each, share in ((expected, 0.95), (dx, 0.9), (dgamma, 0.7)):
                assert float((width(each, torch.bfloat16) <= 1).double().mean()) > share
            assert float(width(expected, torch.float32).median()) < in_float32

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("kind", KINDS)
    def test_eps_outside_the_root(self, kind: Kind, dtype: torch.dtype) -> None:
        problem = Problem("tiny", dtype, kind)
        x = problem.x.float()
        mean = x.mean(1, keepdim=True) if kind == "layer" else torch.zeros(())
        wrong = (x - mean) / ((x - mean).square().mean(1, keepdim=True).sqrt() + EPS) * problem.gamma
        wrong = wrong if problem.beta is None else wrong + problem.beta
        assert float(inside(wrong, problem.forward(), dtype).double().mean()) < 0.05

    def test_unbiased_variance(self) -> None:
        problem = Problem("normal", torch.float32, "layer")
        x = problem.x
        assert problem.beta is not None
        unbiased = (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True) + EPS).rsqrt() * problem.gamma + problem.beta
        assert float(inside(unbiased, problem.forward()).double().mean()) < 0.05

    def test_mean_of_squares_less_the_square_of_the_mean(self) -> None:
        def textbook(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mean = last(x) / f32(x.shape[1])
            return mean, last(x * x) / f32(x.shape[1]) - mean * mean

        problem = Problem("mean", torch.float32, "layer")
        problem.x = problem.x + 900
        assert float(inside(problem.written(textbook), problem.forward()).double().mean()) < 0.5

    def test_one_norm_for_the_other(self) -> None:
        problem = Problem("normal", torch.bfloat16, "rms")
        x = problem.x.float()
        layer = functional.layer_norm(x, (problem.columns,), problem.gamma.float(), None, EPS)
        assert float(inside(layer, problem.forward(), torch.bfloat16).double().mean()) < 0.3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_that_leave_something_out(self, dtype: torch.dtype) -> None:
        problem = Problem("normal", dtype, "layer")
        x, dy = problem.x.float(), problem.dy.float()
        dx, dgamma, dbeta = problem.backward()
        r = (x.var(1, keepdim=True, unbiased=False) + EPS).rsqrt()
        hat, g = (x - x.mean(1, keepdim=True)) * r, dy * problem.gamma
        wrong = {
            "no mean of g": (r * (g - hat * (g * hat).mean(1, keepdim=True)), dx),
            "no mean of g·x̂": (r * (g - g.mean(1, keepdim=True)), dx),
            "no γ": (r * (dy - dy.mean(1, keepdim=True) - hat * (dy * hat).mean(1, keepdim=True)), dx),
            "dγ without the normalisation": ((dy * x).sum(0), dgamma),
            "dγ without the deviation": ((dy * (x - x.mean(1, keepdim=True))).sum(0), dgamma),
            "dβ of g": (g.sum(0), dbeta),
        }
        for name, (found, expected) in wrong.items():
            assert float(inside(found, expected, dtype).double().mean()) < 0.5, name

    def test_statistics_in_bfloat16(self) -> None:
        """Torch on a CPU with bfloat16 x and γ: mean and deviation are stored in bfloat16 for the backward."""
        problem = Problem("mean", torch.bfloat16, "layer")
        _, (dx, *_) = problem.torchs(torch.bfloat16)
        assert float(inside(dx.float(), problem.backward()[0], torch.bfloat16).double().mean()) < 0.9


class TestSpecialRows:
    @pytest.mark.parametrize("kind", KINDS)
    def test_zeros(self, kind: Kind) -> None:
        problem = Problem("normal", torch.bfloat16, kind)
        problem.x = torch.zeros_like(problem.x)
        y, gradients = problem.torchs()
        for found, expected in zip([y, *gradients], [problem.forward(), *problem.backward()], strict=True):
            assert bool(inside(found, expected, torch.bfloat16).all())
            assert not bool(expected.unbounded.any())

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_nan_stays_in_its_row(self, kind: Kind) -> None:
        problem = Problem("normal", torch.float32, kind)
        problem.x[2, 3] = torch.nan
        expected = problem.forward()
        assert bool(expected.value[2].isnan().all())
        assert bool(expected.value[3:].isfinite().all())
        assert bool(inside(problem.torchs()[0], expected).all())

    def test_no_rows(self) -> None:
        problem = Problem("normal", torch.float32, "layer", rows=0)
        assert problem.forward().error.shape == (0, problem.columns)
        dx, dgamma, dbeta = problem.backward()
        assert dx.error.shape == (0, problem.columns)
        assert not any(bool(each.value.any() | each.error.any()) for each in (dgamma, dbeta))
