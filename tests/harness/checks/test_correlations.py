"""Generators with shared or repeated random bits fail by the test of their distance; a right generator passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics import correlations
from narrowgauge.harness.checks.statistics.correlations import HIGH_SEED, PLAIN_SEED, SEED_AS_OFFSET, Correlations
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.checks.statistics.rounding_choices import rounding_choices
from narrowgauge.harness.checks.statistics.rounding_tests import RoundingCounts
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.steps import random_bytes
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend

RECIPE = find_recipe("nvfp4-sr")
CALLS = 8
SEEDS = {PLAIN_SEED: (4, 0), HIGH_SEED: (5 + (1 << 32), 0), SEED_AS_OFFSET: (7, 0)}


def philox(shape, seed, offset):
    return random_bytes((seed, offset), shape, slice(0, shape[0]), torch.device("cpu"), 16)


def judged(shape, generate):
    """The stage of a generator: (shape, seed, offset) to bytes (M, K)."""
    scaled = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 12 - 6
    choices = rounding_choices(scaled, scaled, RECIPE)
    counts = RoundingCounts(choices, RECIPE, scaled.signbit())
    counts.add(torch.stack([generate(shape, 5, 2 * call) < choices.up_bytes for call in range(CALLS)]))
    for kind, random in SEEDS.items():
        counts.add_seed(kind, generate(shape, *random) < choices.up_bytes)
    result = StageResult("codes", "statistics", scaled.numel(), tests=counts.tests())
    decide([result], sharing=1000)
    return result


def placed(change):
    """A generator with the bytes of Philox in memory order."""
    return lambda shape, seed, offset: change(philox(shape, seed, offset).flatten()).view(shape)


def stream(step):
    """A generator with a single stream, `step` elements further on in each call."""

    def generate(shape, seed, offset):
        size = shape[0] * shape[1]
        return philox((1, size + 50 * step), seed, 0).flatten()[offset * step :][:size].view(shape)

    return generate


def xorshift(shape, seed, offset):
    """A generator for each thread of 16 elements, seeded by seed plus offset plus thread."""
    state = (torch.arange(shape[0] * shape[1] // 16) + seed + offset + 1) % (1 << 32)
    found = []
    for _ in range(16):
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        found.append(state >> 16 & 0xFF)
    return torch.stack(found, 1).view(shape).to(torch.uint8)


def lcg_low_byte(shape, seed, offset):
    """The low byte of a linear congruential generator has a period of 256."""
    state, found = (seed * 2654435761 + offset * 40503) % (1 << 32), []
    for _ in range(shape[0] * shape[1]):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        found.append(state & 0xFF)
    return torch.tensor(found, dtype=torch.uint8).view(shape)


def complement(flat):
    half = len(flat) // 2
    return torch.cat([flat[:half], ~flat[:half]])


def rolled_half(by):
    """A generator with lower rows equal to its upper rows, rolled by a few columns."""

    def generate(shape, seed, offset):
        upper = philox((shape[0] // 2, shape[1]), seed, offset)
        return torch.cat([upper, upper.roll(by, 1)])

    return generate


WRONG = {
    "a word for 2": ((16, 256), placed(lambda flat: flat[::2].repeat_interleave(2)), "columns 1 apart"),
    "a word for 4": ((16, 256), placed(lambda flat: flat[::4].repeat_interleave(4)), "columns 1 apart"),
    "a word for 8": ((16, 256), placed(lambda flat: flat[::8].repeat_interleave(8)), "columns 1 apart"),
    "lanes repeat": ((16, 256), placed(lambda flat: flat[:32].repeat(len(flat) // 32)), "blocks 2 apart"),
    "1024": ((2, 2048), placed(lambda flat: flat[:1024].repeat(4)), "blocks 64 apart"),
    "4096 columns": ((2, 8192), placed(lambda flat: flat[:4096].repeat(4)), "blocks 256 apart"),
    "4096 rows": ((8192, 16), placed(lambda flat: flat[: 4096 * 16].repeat(2)), "rows 4096 apart"),
    "period 96": ((16, 240), placed(lambda flat: flat[:96].repeat(40)), "apart, searched"),
    "halves": ((96, 48), placed(lambda flat: flat[: 48 * 48].repeat(2)), "rows 48 apart"),
    "rolled half": ((16, 256), rolled_half(5), "elements 2053 apart, searched"),
    "half rolled back": ((16, 256), rolled_half(-5), "elements 2043 apart, searched"),
    "x and -x": ((96, 48), placed(complement), "rows 48 apart"),
    "seed ignored": ((16, 256), lambda shape, seed, offset: philox(shape, 0, offset), "seeds"),
    "32 bits": (
        (16, 256),
        lambda shape, seed, offset: philox(shape, seed % 2**32, offset),
        "seeds with another high word",
    ),
    "sum": ((16, 256), lambda shape, seed, offset: philox(shape, seed + offset, 0), "seed plus offset"),
    "overlap": ((16, 256), stream(8), "calls, 16 elements before"),
    "odd overlap": ((16, 256), stream(23), "calls, 46 elements on, searched"),
    "xorshift": ((16, 256), xorshift, "calls, 32 elements before"),
    "lcg": ((16, 256), lcg_low_byte, "elements 256 apart"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_generator_fails_a_test_of_its_distance(name):
    shape, generate, test = WRONG[name]
    result = judged(shape, generate)
    assert not result.passed
    # Other tests may be as sure: a period of 256 elements is a period of 512 elements too.
    found = [entry.log_p for entry in result.tests if test in entry.name]
    assert min(found, default=0.0) < -50, result.sentence


@pytest.mark.parametrize("shape", [(16, 256), (2, 8192), (8192, 16), (33, 77), (1, 16), (0, 16), (16, 0)])
def test_philox_passes(shape):
    result = judged(shape, philox)
    assert result.passed, result.sentence
    assert result.figures.get("p_value", 1.0) > 1e-4
    if min(shape) > 1 and shape[0] * shape[1] >= 4096:
        assert {"calls", "seeds", "seed plus offset", "calls, 4 elements before"} <= {
            test.name for test in result.tests
        }


@pytest.mark.parametrize("limit", [1 << 12, 3000, 1 << 11, 700, 60])
def test_a_large_matrix_counts_the_variance_of_its_pairs(monkeypatch, limit):
    monkeypatch.setattr(correlations, "RESIDUALS", limit)
    kept = Correlations(torch.full((33, 77), 0.25), width=16)
    kept.add(torch.rand((kept.calls, 33, 77), generator=torch.Generator().manual_seed(1)) - 0.5)
    sums = [one for some in kept.sums.values() for one in some if one.pairs]
    assert {name.split()[0] for name, some in kept.sums.items() if any(one.pairs for one in some)} >= {
        "columns", "elements", "calls", "calls,",
    }  # fmt: skip
    assert all(one.variance == one.pairs / 16 for one in sums)


def test_halves_of_one_call_do_not_share_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half alone is right. Together they must be independent, by element and by place in memory."""
    monkeypatch.setattr("narrowgauge.harness.operations.stages.black_box.required_calls", lambda choices: 2)

    def door(same: str) -> Callable[..., Any]:
        def quantize_both(
            x: Any, recipe: Any, *, rowwise: Any = True, columnwise: Any = True, random: Any = None
        ) -> Any:
            rows, columns = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in (x.shape, x.T.shape))
            if same == "element":
                columns = rows.T.contiguous()
            elif same == "place":
                columns = rows.view(x.T.shape)
            words = rows.view(torch.int32), columns.view(torch.int32)
            return ops.quantize_both(x, recipe, rowwise=rowwise, columnwise=columnwise, random=words)

        return quantize_both

    case = case_from_labels("quantize", "mxfp8-e4m3-sr", (32, 64), "bf16", "normal", ("both",))
    for same, named in (("", ""), ("element", "halves, same element"), ("place", "halves, same place in memory")):
        record = run_case(case, backend(quantize_both=door(same), declares={"random": "own"}))
        assert record.verdict == ("fail" if same else "pass"), record.message
        assert named in record.message
