"""assert_rows_independent: functions with independent rows, and with dependent rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import narrowgauge

M, K = 150, 32
Function = Callable[..., Any]


@pytest.fixture
def x() -> torch.Tensor:
    """Rows (M, K) that all differ."""
    return torch.randn(M, K, generator=torch.Generator().manual_seed(1))


def _changed(x: torch.Tensor, rows: torch.Tensor | slice, y: torch.Tensor | None = None) -> torch.Tensor:
    """A result with a changed last bit in a few rows."""
    y = (x * 2 if y is None else y).clone()
    y.view(torch.int32)[rows] ^= 1
    return y


def _from(least: int) -> Function:
    """Another path from a number of rows on."""
    return lambda x: _changed(x, slice(None)) if len(x) >= least else x * 2


def _second_path(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if len(x) < 5 else 3 if len(x) < 65 else 4)


def _tails(width: int) -> Function:
    """Another path for the rows behind the last whole tile."""
    return lambda x: _changed(x, slice(len(x) // width * width, None))


def _neighbour(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return x + change(x).any(1, keepdim=True)


def _quantized(x: torch.Tensor, recipe: str) -> Any:
    q = narrowgauge.quantize(x, recipe)
    return q.codes, q.scales


INDEPENDENT: dict[str, tuple[Function, int]] = {
    "identity": (lambda x: x, 1),
    "a view": (lambda x: x[:, ::2], 1),
    "in place": (lambda x: x.mul_(2), 1),
    "softmax": (lambda x: torch.softmax(x, -1), 1),
    "layer norm": (lambda x: torch.nn.functional.layer_norm(x, (K,)), 1),
    "two results": (lambda x: (x * 2, x.abs().amax(1)), 1),
    "a mapping": (lambda x: {"y": x * 2, "amax": None}, 1),
    "a list": (lambda x: [x.abs()], 1),
    "no columns": (lambda x: (x, x[:, :0]), 1),
    "bfloat16": (lambda x: x.bfloat16(), 1),
    "float64 sums": (lambda x: x.double().cumsum(1), 1),
    "integers": (lambda x: x.argmax(1), 1),
    "bool": (lambda x: x > 0, 1),
    "E4M3 codes": (lambda x: x.to(torch.float8_e4m3fn), 1),
    "further axes": (lambda x: x.view(-1, 4, 8).flip(1), 1),
    "mxfp8": (partial(_quantized, recipe="mxfp8-e4m3"), 1),
    "a Quantized": (lambda x: narrowgauge.quantize(x, "mxfp4"), 1),
    "rows with scales": (partial(_quantized, recipe="fp8-row-e4m3"), 1),
    "blocks of two rows": (lambda x: x.view(-1, 2, K).amax((1, 2)), 2),
    "two rows of a block": (lambda x: x.view(-1, 2, K).flip(1).flatten(0, 1), 2),
    "refuses few rows": (lambda x: _refuses(x, 8), 1),
}


def _refuses(x: torch.Tensor, least: int) -> torch.Tensor:
    if len(x) < least:
        raise NotImplementedError("too few rows")
    return x * 2


DEPENDENT: dict[str, tuple[Function, str]] = {
    "an amax of all rows": (lambda x: x / x.abs().nan_to_num(0, 0).amax(), "beside rows of zeros"),
    "NaN of another row": (lambda x: _neighbour(x, lambda x: x.isnan().any(0, keepdim=True)), "beside rows of NaN"),
    "zeros of another row": (lambda x: _neighbour(x, lambda x: x.roll(1, 0) == 0), "beside rows of zeros"),
    "a mean of all rows": (lambda x: x - x.mean(0), "beside rows of zeros"),
    "the row before": (lambda x: x + x.roll(1, 0), "beside rows of zeros; the first is row 0"),
    "row 0": (lambda x: x + x[:1], "in reverse order|with M = 1; the first is row 74"),
    "from 2 rows on": (_from(2), "From M = 2 on: another path"),
    "from 3 rows on": (_from(3), "From M = 3 on: another path"),
    "from 9 rows on": (_from(9), "From M = 9 on: another path"),
    "from 17 rows on": (_from(17), "From M = 17 on: another path"),
    "from 65 rows on": (_from(65), "From M = 65 on: another path"),
    "from 128 rows on": (_from(128), "From M = 128 on: another path"),
    "all rows alone": (_from(150), "From M = 150 on: another path"),
    "three paths": (_second_path, "From M = 5 and from M = 65 on: another path"),
    "even numbers of rows": (lambda x: _changed(x, slice(len(x) % 2 * M, None)), "equal bytes: M = 1, M = 3"),
    "multiples of 4": (lambda x: x * (3 if len(x) % 4 else 2), "with equal bytes: M = 1, M = 2"),
    "tiles of 16": (_tails(16), "another path|with equal bytes|Its place decides"),
    "every fourth place": (lambda x: _changed(x, slice(None, None, 4)), "Its place decides: as the first of M = 150"),
    "the last place": (lambda x: _changed(x, slice(-1, None)), "with M = 1; .*with M|From M = 2 on|place"),
    "the sign of 0": (lambda x: torch.copysign(0 * x, x[:1]), "0x00000000|0x80000000"),
    "the second result": (lambda x: (x, x.cumsum(0)), "rows of result 1 have other bytes"),
    "a name": (lambda x: {"y": x, "amax": x.amax().expand(len(x))}, "rows of amax have other bytes"),
    "columns by rows": (lambda x: torch.cat([x[:, :1] + len(x), x[:, 1:]], 1), "element 0 is"),
    "NVFP4 codes": (lambda x: narrowgauge.quantize(x, "nvfp4").codes, "beside rows of (zeros|the largest)"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_pass(name: str, x: torch.Tensor) -> None:
    function, unit = INDEPENDENT[name]
    before = x.clone()
    narrowgauge.assert_rows_independent(function, x, unit=unit)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_found(name: str, x: torch.Tensor) -> None:
    function, words = DEPENDENT[name]
    with pytest.raises(AssertionError) as caught:
        narrowgauge.assert_rows_independent(function, x)
    assert re.search(words, str(caught.value)), caught.value
    assert "M = 150; alone: 1, 2, 7, 128" in str(caught.value)


def test_a_block_of_rows_is_one_unit(x: torch.Tensor) -> None:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2, K).amax((1, 2)) + (len(x) > 20)

    with pytest.raises(AssertionError, match=r"blocks of 2 rows .* with M = 2; .* From M = 22 on: another path"):
        narrowgauge.assert_rows_independent(blocks, x, unit=2)
    with pytest.raises(ValueError, match=r"shape \(75,\) for M = 150"):
        narrowgauge.assert_rows_independent(blocks, x)


def test_inputs_that_all_rows_share_are_bound(x: torch.Tensor) -> None:
    weight = torch.arange(K).float()
    narrowgauge.assert_rows_independent(lambda x, residual: (x + residual) * weight, x, x.flip(0))
    with pytest.raises(ValueError, match="input 1 has 32 rows, and input 0 has 150; bind"):
        narrowgauge.assert_rows_independent(lambda x, weight: x * weight, x, weight)


@pytest.mark.parametrize(
    ("error", "function", "rows", "words"),
    [
        (TypeError, None, 0, "no input is given"),
        (ValueError, lambda x: x, 1, "M is 1, and unit 1"),
        (TypeError, lambda x: "text", 4, "gave str"),
        (TypeError, lambda x: (x, 1), 4, "result 1 is int"),
        (TypeError, lambda x: (None,), 4, "gave no tensor"),
        (ValueError, lambda x: x.T, 4, r"shape \(32, 4\) for M = 4"),
        (ValueError, lambda x: x.sum(), 4, r"shape \(\) for M = 4"),
        (ValueError, lambda x: x[:, :0], 4, "gives no element"),
        (AssertionError, torch.rand_like, 4, "two calls on the same inputs give other bytes"),
        (ZeroDivisionError, lambda x: x * (1 // (len(x) - 2)), 4, "division"),
    ],
)
def test_what_has_no_rows_is_an_error(error: type[Exception], function: Function, rows: int, words: str) -> None:
    with pytest.raises(error, match=words):
        narrowgauge.assert_rows_independent(function, *[torch.ones(rows, K)][: bool(rows)])
