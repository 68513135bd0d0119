"""Rows of an argument that an index names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.harness.cases.operations import OPERATIONS


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    OPERATIONS.let_go()


@c.contract(rows="independent")
def add_position_quantize(
    x: c.Matrix, position: c.Index, table: Annotated[c.Matrix, ("N", "K")], recipe: c.Recipe = "fp8-row-e4m3"
):
    """x plus the row of the table for its position, quantized."""
    return c.quantize(c.cast(c.float32(x) + c.float32(table[position]), x.dtype), recipe)


def kernel(x, position, table, recipe="fp8-row-e4m3"):
    return narrowgauge.quantize((x.float() + table[position].float()).to(x.dtype), recipe)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, table = (torch.randn(rows, 256, generator=draw).bfloat16() for rows in (64, 40))
    return x, torch.randint(40, (64,), generator=draw), table


def test_a_right_kernel_passes() -> None:
    assert narrowgauge.check(kernel, add_position_quantize, families=["normal", "nan"]).passed


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda x, p, t: kernel(x, (p + 1) % len(t), t), "table is that of the next row"),
        (lambda x, p, t: kernel(x, p.roll(-1), t), "position is that of the next row"),
    ],
)
def test_a_wrong_row_is_named(wrong, cause: str) -> None:
    given = inputs()
    verdict = narrowgauge.explain(
        narrowgauge.assert_result, add_position_quantize, wrong(*given), *given, diagnose="full"
    )
    found = [str(each["sentence"]) for each in verdict.explanations if each["exact"]]
    assert len(found) == 1, verdict
    assert found[0].startswith(cause)


def test_an_index_names_a_row() -> None:
    x, position, table = inputs()
    with pytest.raises(ValueError, match="position holds 40; it names rows from 0 to 39, those of N"):
        narrowgauge.assert_result(add_position_quantize, kernel(x, position, table), x, position.clamp(min=40), table)


def arithmetic(x: c.Matrix, position: c.Index):
    return c.float32(x) + c.float32(position)


def own_rows(x: c.Matrix, position: c.Index):
    return x[position]


def indexed_by_a_number(x: c.Matrix):
    return x[0]


@pytest.mark.parametrize(
    ("function", "words"),
    [(arithmetic, "an index has no arithmetic"), (own_rows, "declare table"), (indexed_by_a_number, "type Index")],
)
def test_what_is_no_index_is_one_error(function, words: str) -> None:
    contract = c.contract(function)
    dtypes = {name: kind.dtypes[0] for name, (kind, _) in contract.tensors.items()}
    with pytest.raises(c.ContractError, match=words) as raised:
        contract.trace(dtypes, {}, {})
    assert f"{__file__}:" in str(raised.value)
