"""Attention over a cache in pages: right kernels of many schedules pass."""

from __future__ import annotations

from functools import cache as cached
from typing import Any

import pytest
import torch

from narrowgauge.contracts.attention import attention
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.program import Program
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.attention_kernels import RIGHT, Attention

RECIPE = "fp8-static-e4m3@vllm"
SIZES = {
    "queries": 5, "q_heads": 2, "dim": 64, "pages": 9, "page": 16, "heads": 1, "v_dim": 64, "requests": 2, "most": 4,
}  # fmt: skip
NAMES = ("pages", "lengths", "q_lengths", "k_scale", "v_scale")


@cached
def program(dtype: str = "bfloat16", **options: Any) -> Program:
    dtypes = {name: kind.dtypes[0] for name, (kind, _) in attention.tensors.items()}
    return attention.trace({**dtypes, "q": dtype}, {"recipe": RECIPE}, options)


@cached
def inputs(family: str, dtype: str = "bfloat16", seed: str = "", **options: Any) -> dict[str, torch.Tensor]:
    return contract_inputs(program(dtype, **options), SIZES, family, Draw(seed))


def run(kernel: Attention, given: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    held = Cache(given["cache.keys"], given["cache.values"], None, None, find_recipe(RECIPE), "nhd", 16)
    pages, lengths, q_lengths, k_scale, v_scale = (given[name] for name in NAMES)
    found = kernel.attention(
        given["q"], held, pages, lengths, q_lengths, find_recipe(RECIPE), k_scale=k_scale, v_scale=v_scale, **options
    )
    return dict(zip(("output", "lse"), found, strict=True))


@pytest.mark.parametrize("family", RULES)
def test_no_right_kernel_fails(family: str) -> None:
    given = inputs(family)
    for name, kernel in RIGHT.items():
        for part, judgement in judged(program(), given, run(kernel, given)):
            assert not judgement.wrong.any(), (name, part)


@pytest.mark.parametrize("family", [name for name, rule in RULES.items() if rule.logits is not None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_structured_results_are_determined(family: str, dtype: str) -> None:
    given = inputs(family, dtype)
    judgement = dict(judged(program(dtype), given, run(RIGHT["plain"], given)))["output"]
    assert judgement.determined >= 0.9 * judgement.actual.numel()


@pytest.mark.parametrize(("p", "widest"), [("float32", 4), ("bfloat16", 16), ("float16", 8)])
def test_a_declared_dtype_of_the_weights_judges_pinned_inputs(p: str, widest: int) -> None:
    given, declared = inputs("pinned"), {"p": p, "l": "exact", "exponential": "accurate"}
    kernel = Attention(p=getattr(torch, p), tile=1 << 20)
    judgement = dict(judged(program(**declared), given, run(kernel, given)))["output"]
    assert not judgement.wrong.any()
    assert not judgement.undetermined
    ulp = 2.0**-8 * judgement.actual.float().abs()
    width = ((judgement.upper.float() - judgement.lower.float()) / ulp).quantile(0.5)
    assert width <= widest
