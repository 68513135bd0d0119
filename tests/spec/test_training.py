"""Training recipes: the roles of docs/numerics.md#modules, names both ways, and the environment's switches."""

from __future__ import annotations

import itertools
import re

import pytest

from narrowgauge.spec.modules.training import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    TrainingRecipe,
    training_names,
    training_recipe,
)

SWITCHES = {
    "NVTE_NVFP4_DISABLE_RHT": "-norht",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "-nosr",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "-no2d",
}

# Input, weight and gradient, as in the table of modules.
ROLES = {
    "NVFP4BlockScaling": ("nvfp4-rht", "nvfp4-2d", "nvfp4-rht-sr"),
    "NVFP4BlockScaling-norht": ("nvfp4", "nvfp4-2d", "nvfp4-sr"),
    "NVFP4BlockScaling-nosr": ("nvfp4-rht", "nvfp4-2d", "nvfp4-rht"),
    "NVFP4BlockScaling-no2d": ("nvfp4-rht", "nvfp4", "nvfp4-rht-sr"),
    "NVFP4BlockScaling-norht-nosr-no2d": ("nvfp4", "nvfp4", "nvfp4"),
    "MXFP8BlockScaling": ("mxfp8-e4m3", "mxfp8-e4m3", "mxfp8-e4m3"),
    "MXFP8BlockScaling-2d": ("mxfp8-e4m3", "mxfp8-2d", "mxfp8-e4m3"),
    "Float8BlockScaling": ("fp8-block-1x128-e4m3-pow2", "fp8-block-128x128-e4m3-pow2", "fp8-block-1x128-e4m3-pow2"),
    "Float8CurrentScaling": ("fp8-current-e4m3", "fp8-current-e4m3", "fp8-current-e5m2"),
    "DelayedScaling": ("fp8-delayed-e4m3-bulk", "fp8-delayed-e4m3-bulk", "fp8-delayed-e5m2-bulk"),
    "DelayedScaling-recent-margin2-history16": (
        "fp8-delayed-e4m3-recent-margin2-bulk", "fp8-delayed-e4m3-recent-margin2-bulk",
        "fp8-delayed-e5m2-recent-margin2-bulk",
    ),
}  # fmt: skip
RECIPES: list[TrainingRecipe] = [
    *(NVFP4BlockScaling(*off) for off in itertools.product((False, True), repeat=3)),
    MXFP8BlockScaling(), MXFP8BlockScaling(weights_2d=True), Float8BlockScaling(), Float8CurrentScaling(),
    *(
        DelayedScaling(margin, rows, algorithm)
        for margin in (0, 3) for rows in (1024, 1) for algorithm in ("max", "most_recent")
    ),
    Float8CurrentScaling(fp8_dpa=True), DelayedScaling(3, 1, "most_recent", fp8_dpa=True),
]  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_each_role_has_its_recipe(name: str) -> None:
    made = training_recipe(name)
    assert (made.input.name, made.weight.name, made.grad.name) == ROLES[name]


def test_a_name_and_the_recipe_of_it_are_each_other() -> None:
    assert [training_recipe(str(made)) for made in RECIPES] == RECIPES
    names = [*training_names(), *ROLES]
    assert [str(training_recipe(name)) for name in names] == names
    assert len({str(made) for made in RECIPES}) == len(RECIPES)
    assert all(" " not in str(made) for made in RECIPES)


def test_histories_are_those_of_delayed_scaling() -> None:
    lengths = [made.history for made in RECIPES if not isinstance(made, DelayedScaling)]
    assert lengths == [0] * len(lengths)
    assert (DelayedScaling().history, DelayedScaling(amax_history_len=3).history) == (1024, 3)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_of_the_environment_is_read_with_the_recipe(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    before = NVFP4BlockScaling()
    monkeypatch.setenv(switch, "1")
    after = NVFP4BlockScaling()
    monkeypatch.delenv(switch)
    assert (str(before), str(after)) == ("NVFP4BlockScaling", f"NVFP4BlockScaling{SWITCHES[switch]}")
    assert before.grad.name == "nvfp4-rht-sr"


def test_given_and_named_choices_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "1")
    assert str(NVFP4BlockScaling()) == "NVFP4BlockScaling-norht-nosr-no2d"
    assert str(NVFP4BlockScaling(disable_rht=False)) == "NVFP4BlockScaling-nosr-no2d"
    assert str(training_recipe("NVFP4BlockScaling")) == "NVFP4BlockScaling"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("NVFP4Blockscaling", "NVFP4BlockScaling"),
        ("NVFP4BlockScaling-nosr-norht", "NVFP4BlockScaling-nosr"),
        ("Float8CurentScaling", "Float8CurrentScaling"),
        ("DelayedScaling-most-recent", "DelayedScaling-recent"),
    ],
)
def test_an_unknown_name_is_told_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"no training recipe is called {name!r} (did you mean '{nearest}")):
        training_recipe(name)


def test_delayed_scaling_refuses_what_makes_no_history() -> None:
    with pytest.raises(ValueError, match="the margin of DelayedScaling is 0 or more powers of two, not -1"):
        DelayedScaling(margin=-1)
    with pytest.raises(ValueError, match="the amax history of DelayedScaling has at least one row, not 0"):
        training_recipe("DelayedScaling-history0")
    with pytest.raises(ValueError, match="amax_compute_algo is 'max' or 'most_recent', not 'recent'"):
        DelayedScaling(amax_compute_algo="recent")  # type: ignore[arg-type]
