"""Composed orders, all recovered: aligned products, promotion, slices of K in float32 or bfloat16, sums as a tree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.checks.order.masks import GemmFunction, MaskedGemm
from narrowgauge.harness.checks.order.order import Slices, Split, in_slices, in_split_slices
from narrowgauge.harness.checks.order.probe import accumulation_order
from narrowgauge.harness.checks.order.reveal import reveal
from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.accumulators.trees import Chain, NodeArithmetic, tree_sum
from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.reference.numbers.blocks import split_columns
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe


def joined(one: Chain, other: Chain) -> Chain:
    return Chain(one.first, (*one.steps, (other if other.steps else other.first,)))


def composed(columns: int, width: int, promoted: int | None, slices: int, *, as_tree: bool) -> Chain:
    """Slices of K, promoted every `promoted` columns, whose sums are added in order or neighbours first."""
    step = promoted or width
    terms = [
        in_slices(range(columns)[part], promoted or columns, width) for part in split_columns(columns, step, slices)
    ]
    while len(terms) > 1:
        pairs = len(terms) // 2 if as_tree else 1
        terms = [*(joined(terms[2 * k], terms[2 * k + 1]) for k in range(pairs)), *terms[2 * pairs :]]
    return terms[0]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", range(40))
def test_composed_orders_are_recovered(seed: int) -> None:
    draws = random.Random(seed)
    width = draws.choice([1, 4, 8, 16, 32])
    columns = draws.choice([48, 72, 96, 128, 160])
    promoted = draws.choice([None, None, width * draws.choice([1, 2, 3])])
    as_tree = draws.random() < 0.3
    tree = composed(columns, width, promoted, draws.choice([1, 2, 3, 4]), as_tree=as_tree)
    dtype = draws.choice([torch.bfloat16, torch.float8_e4m3fn])
    arithmetic = NodeArithmetic()
    if width > 1:
        fraction = draws.choice([13, 14, 21, 24, 25])
        operand = "bf16" if dtype is torch.bfloat16 else "e4m3"
        model = HardwareModel(
            "model", (operand,), width, fraction, kept=min(fraction, 23), nearest=draws.random() < 0.2
        )
        arithmetic = NodeArithmetic(model)
    out = torch.float32
    if dtype is torch.bfloat16 and Slices.of(tree).chains > 1 and draws.random() < 0.5:
        arithmetic, out = replace(arithmetic, reduced_in=torch.bfloat16), torch.bfloat16
    order = accumulation_order(lambda a, b: tree_sum(tree, a, b, arithmetic).to(out), 16, columns, 12, dtype=dtype)
    assert order.confirmed, order
    assert order.tree == tree
    if arithmetic.model is not None:
        assert (order.width, order.fraction) == (width, arithmetic.model.fraction)
        if not arithmetic.model.nearest and (promoted is None or out is torch.float32):
            assert order.declares is not None, order
    assert order.arithmetic is not None
    assert order.arithmetic.reduced_in is arithmetic.reduced_in
    if order.declares is not None and arithmetic.model is not None:
        predicts_a_declared_product(order.declares, columns, out, lambda a, b: tree_sum(tree, a, b, arithmetic))


def predicts_a_declared_product(name: str, columns: int, out: torch.dtype, gemm: GemmFunction) -> None:
    """The bounds of a declared order have the bits of the GEMM, with the mask of an E4M3 operand and α = 1."""
    recipe = find_recipe("fp8-current-e4m3")
    values = torch.randn(24, columns, generator=torch.Generator().manual_seed(7)).to(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    a, b = (Quantized(x.view(torch.uint8), one, None, recipe, tuple(x.shape)) for x in (values[:16], values[16:]))
    limits = bounds(a, b, out_dtype=out, order=name)
    assert torch.equal(limits.expected, gemm(values[:16], values[16:]).to(out))
    assert limits.exact.all()


def test_many_columns_in_order_take_few_calls() -> None:
    tree = in_split_slices(1024, Split(2, 128), 32)
    model = NodeArithmetic(HardwareModel("model", ("e4m3",), 32, 13, kept=13))
    gemm = MaskedGemm(lambda a, b: tree_sum(tree, a, b, model), (32, 1024, 32), torch.float8_e4m3fn, "cpu")
    gemm.calibrate()
    assert reveal(gemm) == tree
    assert gemm.calls < 120
