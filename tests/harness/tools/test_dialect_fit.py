"""The fit recovers rules that no library has: random combinations of the fields of a recipe."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.tools.dialect import fit as fitting
from narrowgauge.harness.tools.dialect.differences import SAME_VALUES
from narrowgauge.harness.tools.dialect.fit import fit
from narrowgauge.harness.tools.dialect.inputs import observe
from narrowgauge.harness.tools.dialect.rules import CHOICES, Rules, Score, with_fields
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import swap_nibbles
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

BASES = (
    *["nvfp4"] * 3, "nvfp4-2d", "mxfp8-e4m3", "mxfp4", "fp8-block-1x128-e4m3-pow2", "fp8-current-e4m3",
)  # fmt: skip


LATER = ("(amax*(1/6))/dec", 448e-30, 1e-6)
"""Values of dialects and surveys that no random rule has: a further value would change the rules of all seeds."""


def composed(draw, base):
    """A random rule of the format of a recipe: up to 300 times, up to six fields with other values."""
    rule = with_fields(find_recipe(base))
    for _ in range(300):
        names = draw.sample(list(CHOICES), draw.randint(1, 6))
        values = {
            name: draw.choice([v for v in CHOICES[name] if v not in ("stochastic", "given", *LATER)]) for name in names
        }
        rule = with_fields(rule, **values) or rule
    return rule


def disguised(draw, rule):
    """A quantizer by this rule, perhaps with the nibbles exchanged, negative NaN scales, or +0 stored as -0."""
    four = rule.element.bits == 4
    high_first, negative_nan, negative_zero = (draw.random() < share for share in (0.5, 0.3, 0.3))

    def quantize(x, recipe):
        q = reference.quantize(x, rule)
        codes, scales = q.codes, q.scales
        if negative_nan and rule.scale.name == "E4M3":
            scales = scales.masked_fill(scales == 0x7F, 0xFF)
        if negative_zero and four:
            low, high = codes & 0xF, codes >> 4
            codes = low.masked_fill(low == 0, 8) | (high.masked_fill(high == 0, 8) << 4)
        return (swap_nibbles(codes) if high_first and four else codes), scales

    return backend(quantize=quantize), high_first and four, negative_zero and four


def check(seed):
    """The fitted rule gives the bytes of the composed rule on further inputs, or names the open fields.

    A quantizer that stores +0 as -0 hides the choices for signs of 0 and for codes of blocks with a scale of 0. Of it
    the fit has to give all values, with a class for every other byte.
    """
    draw = random.Random(seed)
    base = draw.choice(BASES)
    rule = composed(draw, base)
    door, high_first, negative_zero = disguised(draw, rule)
    result = fit(door, base)
    assert result.observed.packing == ("high-first" if high_first else "low-first")
    assert result.explained
    fresh = Rules(observe(door, find_recipe(base), seed=seed + 1000))
    assert fresh.score(rule).major == 0
    if negative_zero and fresh.score(result.rule).major == 0:
        assert {difference.kind for difference in result.differences} <= set(SAME_VALUES)
    elif fresh.score(result.rule) > fresh.score(rule):
        unequal = {name for name in CHOICES if getattr(rule, name) != getattr(result.rule, name)}
        assert unequal <= set(result.alternatives), (rule, result.changes, fresh.score(result.rule))
        assert result.rules.score(result.rule) <= result.rules.score(rule)
    return result


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices on more threads than idle cores take a hundred times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_better_rule_is_compared_with_its_own_alternatives(monkeypatch):
    """A kernel with two choices that no family shows: further inputs show the second beside the first alone."""
    first = find_recipe("nvfp4")
    second = replace(first, zero_block="1")
    third = replace(second, negative_zero="never")
    wrong = {first: 3, second: 2, third: 0}
    alternatives = {first: [("zero_block", "1", second)], second: [("negative_zero", "never", third)], third: []}
    fakes = {
        "probes": lambda *_: [], "_given": lambda *_: True, "_separating": lambda *_: ["an input"],
        "observe": lambda *_, **__: None, "classified": lambda *_: [],
        "_alternatives": lambda _, rule: alternatives[rule],
        "Rules": lambda _: SimpleNamespace(score=lambda rule: Score(wrong[rule], 0)),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(fitting, name, fake)
    door = backend(quantize=reference.quantize)
    rules = SimpleNamespace(observed=SimpleNamespace(recipe=first))
    nearest = fitting.Agreement("te", first, Score(0, 0), Score(0, 0), 0, 0)
    start = fitting.Fit("nvfp4", rules, [nearest], first, nearest, {}, {})
    found = fitting._separated(door, start, "cpu", 0)
    assert found.rule == third
    assert found.changes == {"zero_block": ("keep", "1"), "negative_zero": ("keep", "never")}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", [5, 9, 17, 34, 93, 124])
def test_composed_rules_are_recovered(seed):
    result = check(seed)
    assert result.changes
    assert result.nearest.score > Score(0, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_200_composed_rules_are_recovered(seed):
    check(seed)
