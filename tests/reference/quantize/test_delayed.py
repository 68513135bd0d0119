"""Delayed scaling: histories and scales against a scalar twin, on every kind of amax, in every variant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.reference.ops import quantize, update_scale
from narrowgauge.reference.scalar import fp8
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.golden import bits

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, database=None)
NAMES = [
    *(name for name in recipe_names() if name.startswith("fp8-delayed")),
    "fp8-delayed-e4m3-margin2", "fp8-delayed-e5m2-recent-margin1-bulk", "fp8-delayed-e4m3-margin140",
]  # fmt: skip
FLT_MAX = 3.4028234663852886e38
AMAXES = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 0.1, 1.0, 447.0, 448.0, 57344.0, 1e30, FLT_MAX, math.inf, math.nan]


def check(name: str, histories: list[list[float]], scales: list[float]) -> None:
    """`histories`: a history of each tensor, of equal length."""
    recipe = find_recipe(name)
    assert recipe.delayed is not None
    history, scale = torch.tensor(histories).T.contiguous(), torch.tensor(scales)
    before = history.clone(), scale.clone()
    rolled, found = update_scale(history, scale, name)
    twins = [
        fp8.update_scale(amaxes, scale_of_tensor, recipe)
        for amaxes, scale_of_tensor in zip(before[0].T.tolist(), before[1].tolist(), strict=True)
    ]
    assert torch.equal(bits(rolled), bits(torch.tensor([one for one, _ in twins]).T))
    assert torch.equal(bits(found), bits(torch.tensor([each for _, each in twins])))
    assert torch.equal(bits(history), bits(before[0]))  # new tensors
    assert torch.equal(bits(scale), bits(before[1]))
    assert (rolled.dtype, found.dtype) == (torch.float32, torch.float32)


@SETTINGS
@given(
    name=st.sampled_from(NAMES), length=st.integers(1, 5), tensors=st.integers(1, 4), data=st.data(),
)  # fmt: skip
def test_an_update_is_its_twin(name: str, length: int, tensors: int, data: st.DataObject) -> None:
    numbers = st.one_of(st.sampled_from(AMAXES), st.floats(0, width=32, allow_infinity=False))
    histories = [[data.draw(numbers) for _ in range(length)] for _ in range(tensors)]
    check(name, histories, [data.draw(st.sampled_from([1.0, 0.5, FLT_MAX, 2.0**-140])) for _ in range(tensors)])


@pytest.mark.parametrize("name", NAMES)
def test_every_amax_in_every_place_of_the_history(name: str) -> None:
    pairs = [[one, other] for one in AMAXES for other in AMAXES]
    check(name, pairs, [3.0] * len(pairs))
    check(name, [[one] for one in AMAXES], [3.0] * len(AMAXES))


def updated(name: str, history: list[float], scale: float = 3.0) -> tuple[list[float], float]:
    rolled, found = update_scale(torch.tensor(history).unsqueeze(1), torch.tensor([scale]), name)
    return rolled.flatten().tolist(), found.item()


def test_the_first_amax_goes_to_the_end_and_the_rest_move_up() -> None:
    """Transformer Engine: torch.roll by −1, then history[0] = 0, into which the next amax is collected."""
    assert updated("fp8-delayed-e4m3", [1.0, 2.0, 7.0, 4.0]) == ([0.0, 7.0, 4.0, 1.0], 64.0)
    assert updated("fp8-delayed-e4m3-recent", [1.0, 2.0, 7.0, 4.0]) == ([0.0, 7.0, 4.0, 1.0], 448.0)
    assert updated("fp8-delayed-e5m2-margin3", [7.0]) == ([0.0], 1024.0)


def test_bulk_leaves_what_saw_nothing_and_single_rolls_a_zero_in() -> None:
    assert updated("fp8-delayed-e4m3-bulk", [0.0, 7.0, 1.0]) == ([0.0, 7.0, 1.0], 3.0)
    assert updated("fp8-delayed-e4m3", [0.0, 7.0, 1.0]) == ([0.0, 1.0, 0.0], 64.0)
    assert updated("fp8-delayed-e4m3-bulk", [-0.0, 7.0, 1.0]) == ([0.0, 7.0, 1.0], 3.0)


@pytest.mark.parametrize("update", ["", "-bulk"])
@pytest.mark.parametrize("last", [0.0, math.inf])
def test_a_scale_that_is_kept_is_finite_too(last: float, update: str) -> None:
    """Transformer Engine's delayed_scaling.cu looks for infinity behind both branches."""
    recipe = f"fp8-delayed-e4m3-recent{update}"
    for scale in (math.inf, -math.inf):
        found = update_scale(torch.tensor([[last], [1.0]]), torch.tensor([scale]), recipe)[1]
        assert found.tolist() == [FLT_MAX]


def test_three_steps_use_the_scale_of_the_step_before() -> None:
    """The scale of a step comes from the amaxes of earlier steps."""
    history, scale = torch.zeros(4, 1), torch.ones(1)
    used = []
    for amax in (7.0, 448.0, 3.5):
        q = quantize(torch.tensor([[amax, -amax / 2]]), "fp8-delayed-e4m3", scale=scale)
        used.append(scale.item())
        assert q.amax is not None
        history[0] = q.amax
        history, scale = update_scale(history, scale, "fp8-delayed-e4m3")
    assert used == [1.0, 64.0, 1.0]
    assert scale.item() == 1.0
    assert history.flatten().tolist() == [0.0, 7.0, 448.0, 3.5]
