"""`assert_stochastic`: kernels with random bits of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.harness.api.verdict import Verdict, WrongResult

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
X = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_FAILURES", str(tmp_path))


class Kernel:
    """A correct kernel that rounds stochastically."""

    def __init__(self, x: torch.Tensor, recipe: str = "nvfp4-sr") -> None:
        self.x, self.recipe = x, recipe
        self.seeds: list[int] = []

    def __call__(self, seed: int) -> tuple[Any, ...]:
        self.seeds.append(seed)
        q = ng.quantize(self.x, self.recipe, random=(seed, 5))
        return q.codes, q.scales, q.amax


def wrong(*args: Any, **kwargs: Any) -> Verdict:
    with pytest.raises(WrongResult) as caught:
        ng.assert_stochastic(*args, **kwargs)
    return caught.value.verdict


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["nvfp4-sr", "mxfp4-sr", "nvfp4-rht-sr"])
def test_a_correct_kernel_passes(recipe: str, device: str) -> None:
    kernel = Kernel(X.to(device), recipe)
    if recipe == "mxfp4-sr":
        ng.assert_stochastic(X.to(device), lambda seed: kernel(seed)[:2], recipe)
    else:
        ng.assert_stochastic(X.to(device), kernel, recipe)
    assert kernel.seeds[:2] == [0, 1]
    assert kernel.seeds[-1] == 1 << 30
    assert len(set(kernel.seeds)) == len(kernel.seeds) >= 5


def test_a_kernel_that_ignores_its_seed_is_found() -> None:
    kernel = Kernel(X)
    verdict = wrong(X, lambda seed: kernel(0))
    assert verdict.message.startswith("codes: ")
    assert "calls" in verdict.message
    assert verdict.subject == "nvfp4-sr 128x256 bfloat16 on cpu"


def test_a_code_that_is_no_neighbour_is_found() -> None:
    kernel = Kernel(X)

    def far(seed: int) -> dict[str, Any]:
        codes, scales, amax = kernel(seed)
        codes[7, 0] ^= 0x07
        return {"codes": codes, "scales": scales, "amax": amax}

    assert "no random bits give them" in wrong(X, far).message


def test_rounding_to_nearest_is_found() -> None:
    q = ng.quantize(X, "nvfp4")
    assert wrong(X, lambda seed: (q.codes, q.scales, q.amax)).message.startswith("codes: ")


def test_scales_that_differ_between_calls_are_found() -> None:
    kernel = Kernel(X)

    def drifting(seed: int) -> tuple[Any, ...]:
        codes, scales, amax = kernel(seed)
        scales[3, 3] += seed == 2
        return codes, scales, amax

    assert wrong(X, drifting).message.startswith("repeat: scales of call 2 differ")


@pytest.mark.long
def test_given_bits_are_judged_exactly() -> None:
    words = torch.randint(-(2**31), 2**31, (128, 64), dtype=torch.int32)
    for random in ((11, 4), words):
        q = ng.quantize(X, "nvfp4-sr", random=random)
        ng.assert_quantized(X, q.codes, q.scales, "nvfp4-sr", amax=q.amax, random=random)
        with pytest.raises(WrongResult):
            ng.assert_quantized(X, q.codes, q.scales, "nvfp4-sr", amax=q.amax, random=(12, 4))


def test_the_function_runs_under_the_settings_of_its_caller() -> None:
    seen = []
    kernel = Kernel(X)

    def draw(seed: int) -> tuple[Any, ...]:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()))
        return kernel(seed)

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            ng.assert_stochastic(X, draw)
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {(True, True, torch.float64)}


@pytest.mark.parametrize(
    ("draws", "kind", "text"),
    [
        (lambda seed: X, TypeError, "draws gave Tensor"),
        (lambda seed: (X,), TypeError, "draws gave tuple"),
        (lambda seed: {"codes": X, "scale": X}, TypeError, "draws gave dict"),
        (3, TypeError, "draws is a function"),
        ([], TypeError, "draws is a function"),
        ([Kernel(X)(0)], ValueError, "draws has 1 results"),
    ],
)
def test_a_mistake_in_the_draws_is_named(draws: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ng.assert_stochastic(X, draws)
    with pytest.raises(ValueError, match="assert_quantized"):
        ng.assert_stochastic(X, draws, "nvfp4")
