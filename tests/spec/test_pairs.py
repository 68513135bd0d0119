"""Operands that can be multiplied: every pair of named recipes, and the sentence for impossible pairs."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

from narrowgauge.spec.formats import E4M3, E4M3FNUZ, E8M0, FP32
from narrowgauge.spec.recipe import mismatch
from narrowgauge.spec.recipes import Recipe, find_recipe, recipe_names

NAMES = [name for name in recipe_names() if "@" not in name or name in ("mxfp8-e4m3@ocp", "nvfp4@trtllm")]


def kind(recipe: Recipe) -> str:
    return {E4M3: "nvfp4", E8M0: "mx", FP32: "whole" if recipe.spans_k else "blocks"}[recipe.scale]


def may(a: Recipe, b: Recipe) -> bool:
    """The rule in different words: a single family, and an operand of E4M3."""
    if kind(a) != kind(b):
        return False
    if kind(a) == "mx":  # any elements, rows or tiles, any rule for the exponent
        return True
    if kind(a) == "nvfp4":
        return a.alpha == b.alpha and a.transform == b.transform
    if a.element.negative_zero != b.element.negative_zero:
        return False
    e4m3 = (E4M3, E4M3FNUZ)
    return a.element in e4m3 or b.element in e4m3


def test_every_pair_of_recipes_of_a_family_is_multiplied_exactly() -> None:
    rules = [find_recipe(name) for name in NAMES]
    found = {(str(a), str(b)): mismatch(a, b) for a, b in product(rules, rules)}
    wrong = [(str(a), str(b)) for a, b in product(rules, rules) if (found[str(a), str(b)] == "") != may(a, b)]
    assert wrong == []
    assert all((found[a, b] == "") == (found[b, a] == "") for a, b in found)
    assert len({reason.split(" ")[0] for reason in found.values()}) >= 5


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("nvfp4", "mxfp4", "scale is E4M3 and E8M0"),
        ("mxfp8-e4m3", "fp8-current-e4m3", "scale is E8M0 and FP32"),
        ("nvfp4", "nvfp4@te-native", "alpha is (a*b)/d and (b*a)*(1/d)"),
        ("fp8-current-e4m3", "fp8-block-1x128-e4m3-pow2", "alpha is s_a*s_b and 1"),
        ("fp8-block-128x128-e4m3-pow2", "fp8-block-1x64-e4m3-pow2", "block is 128x128 and 1x64"),
        ("fp8-current-e5m2", "fp8-delayed-e5m2", "element is E5M2 of both; one of the two has to be E4M3"),
        ("fp8-block-1x128-e5m2-pow2", "fp8-block-1x128-e5m2-fp32", "element is E5M2 of both; one of the two has to be"),
        ("nvfp4-rht", "nvfp4", "rotations cancel only if both operands have the same"),
    ],
)  # fmt: skip
def test_the_reason_names_what_differs(a: str, b: str, reason: str) -> None:
    assert reason in mismatch(find_recipe(a), find_recipe(b))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("mxfp8-e4m3", "mxfp4"), ("mxfp8-e5m2", "mxfp6-e3m2"), ("mxfp8-2d", "mxfp8-e5m2-sr"),
        ("mxfp8-e5m2", "mxfp8-e4m3@ocp"),
        ("fp8-current-e4m3", "fp8-delayed-e5m2"), ("fp8-block-1x128", "fp8-block-128x128-e4m3-fp32"),
        ("fp8-block-1x128-e5m2", "fp8-block-1x128"), ("nvfp4", "nvfp4-2d"),
    ],
)  # fmt: skip
def test_what_belongs_together_has_no_reason_against_it(a: str, b: str) -> None:
    assert mismatch(find_recipe(a), find_recipe(b)) == mismatch(find_recipe(b), find_recipe(a)) == ""


def test_pairs_are_told_without_torch() -> None:
    code = "import sys, narrowgauge.spec.recipe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
