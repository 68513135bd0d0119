"""Combination of the choices of tokens: right kernels in any order pass, wrong ones fail and are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts.experts import combine as contract
from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.reference.contracts.evaluate import judged

SHAPE = (120, 48, 24, 4)
SIZES = dict(zip(("rows", "N", "tokens", "choices"), SHAPE, strict=True))
DTYPES = {"y": "bfloat16", "positions": "int64", "weights": "float32"}


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    OPERATIONS.let_go()


def combine(
    y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, *, dtype: torch.dtype = torch.float32,
    order: Any = None, rounded_terms: bool = True,
) -> torch.Tensor:  # fmt: skip
    total = torch.zeros(len(positions), y.shape[1])
    for number in order or range(positions.shape[1]):
        here = positions[:, number]
        term = y[here.clamp(min=0)].float() * weights[:, number : number + 1]
        more = (total + (term.to(dtype).float() if rounded_terms else term)).to(dtype).float()
        total = torch.where((here >= 0).unsqueeze(1), more, total)
    return total.to(y.dtype)


def float64(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = y[positions.clamp(min=0)].double() * weights.double().unsqueeze(-1)
    return rows.where((positions >= 0).unsqueeze(-1), 0.0).sum(1).to(y.dtype)


def overwritten(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    last = torch.where(positions >= 0, torch.arange(positions.shape[1]), -1).amax(1, keepdim=True)
    kept = torch.arange(positions.shape[1]) == last
    return combine(y, torch.where(kept, positions, -1), weights)


def not_last(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return combine(y, positions[:, :-1], weights)


@pytest.mark.parametrize("kernel", [combine, float64, lambda *given: combine(*given, order=(2, 0, 3, 1))])
def test_right_kernels_pass(kernel: Any) -> None:
    assert narrowgauge.check(kernel, "combine", shapes=[SHAPE]).passed


WRONG = [
    (lambda y, p, w: combine(y, torch.where(p < 0, p, torch.arange(p.numel()).view_as(p)), w), "choice j of token t"),
    (lambda y, p, w: combine(y, p[:, :1].expand_as(p), w), "every choice takes the row of the first one"),
    (lambda y, p, w: combine(y, p[:, :1], w), "the first choice alone is taken"),
    (not_last, "the last choice is left out"),
    (overwritten, "choices overwrite one another"),
    (lambda y, p, w: combine(y, p, w.square()), "weights is a factor twice"),
    (lambda y, p, w: combine(y, p, torch.ones_like(w)), "y[positions] is not multiplied by weights"),
    (lambda y, p, w: combine(y, p, w.roll(-1, 1)), "weights is that of the next column"),
    (lambda y, p, w: combine(y, p, w.roll(-1, 0)), "weights is that of the next row"),
    (lambda y, p, w: combine(y, p.roll(-1, 1), w), "weights is that of the previous column"),
    (lambda y, p, w: combine(y, p.roll(-1, 0), w), "positions is that of the next row"),
    (lambda y, p, w: combine(y, torch.where(p < 0, p, (p + 1) % len(y)), w), "y is that of the next row"),
    (lambda y, p, w: combine(y, p, w / w.sum(1, keepdim=True)), "divided by its sum over all choices"),
    (lambda y, p, w: combine(y, p, w / (w * (p >= 0)).sum(1, keepdim=True)), "over the choices that name a row"),
    (lambda y, p, w: combine(y, p.clamp(min=0), w), "a choice of no row takes row 0"),
    (lambda y, p, w: combine(y, torch.where(p < 0, len(y) - 1, p), w), "a choice of no row takes the last row"),
    (lambda y, p, w: combine(y, p, w, dtype=torch.bfloat16, rounded_terms=False),
     "each partial sum of the choices is rounded to bfloat16"),
    (lambda y, p, w: combine(y, p, w.bfloat16().float()), "weights is rounded to bfloat16"),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("wrong", "cause"), WRONG, ids=[cause[:40] for _, cause in WRONG])
def test_a_wrong_kernel_is_named(wrong: Any, cause: str) -> None:
    given = contract_inputs(contract.trace(DTYPES, {}, {}), SIZES, "normal", Draw("wrong"))
    assert not wrong_elements(combine(**given), given)
    verdict = narrowgauge.explain(
        narrowgauge.assert_result, contract, wrong(*given.values()), *given.values(), diagnose="full"
    )
    assert cause in str(verdict).split("\n")[0], verdict


def wrong_elements(output: torch.Tensor, given: dict[str, torch.Tensor], **options: str) -> int:
    program = contract.trace({**DTYPES, "y": str(output.dtype).removeprefix("torch.")}, {}, options)
    return sum(int(part.wrong.sum()) for _, part in judged(program, given, {"output": output}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_atomic_sums_lie_in_their_bound(dtype: torch.dtype) -> None:
    program = contract.trace({**DTYPES, "y": str(dtype).removeprefix("torch.")}, {}, {})
    given = contract_inputs(program, SIZES, "normal", Draw("atomic"))
    results = [combine(**given, dtype=dtype, order=order) for order in ((0, 1, 2, 3), (3, 1, 0, 2))]
    assert not any(wrong_elements(result, given, accumulate="output") for result in results)
    assert not wrong_elements(results[0], given, accumulate="output", order="choices")
    assert wrong_elements(results[1], given, accumulate="output", order="choices")
    assert wrong_elements(results[0], given)


def test_rows_that_no_position_names_do_not_matter() -> None:
    given = contract_inputs(contract.trace(DTYPES, {}, {}), SIZES, "lattice", Draw("unnamed"))
    assert given["y"].isnan().any()
    assert not combine(**given).isnan().any()
    assert not wrong_elements(combine(**given), given)


def test_a_position_beyond_the_rows_is_refused() -> None:
    given = contract_inputs(contract.trace(DTYPES, {}, {}), SIZES, "normal", Draw("refused"))
    given["positions"][0, 0] = 120
    with pytest.raises(ValueError, match="positions holds 120; it names rows from 0 to 119, those of rows"):
        wrong_elements(given["y"][:24], given)
