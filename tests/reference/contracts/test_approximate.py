"""Approximate reciprocals of NVFP4: each of them is right, and one that is farther off is wrong. Rows of INT8."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge.reference.contracts.accepted import Ends
from narrowgauge.reference.contracts.quantized import judge_quantized
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack_codes
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

SIXTH = np.float32(1 / 6)
DIALECTS = ("trtllm-cuda", "flashinfer-nvfp4")


def moved(x: torch.Tensor, ulps: int) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + np.float32(ulps) * np.spacing(x.numpy()))


def kernel(x: torch.Tensor, dialect: str, ulps: tuple[int, int, int]) -> Quantized:
    """The bytes of a kernel whose reciprocals of 6, of the tensor scale and of a block are off by `ulps`."""
    sixth, of_enc, of_block = ulps
    amax = x.abs().amax().view(1)
    enc = torch.full((1,), 2688.0) / amax
    blocks = x.view(x.shape[0], -1, 16)
    block_amax, six = blocks.abs().amax(-1), moved(torch.tensor([SIXTH]), sixth)
    if dialect == "trtllm-cuda":
        scale = encode(enc * (block_amax * six), E4M3)
        factor = moved(1 / (decode(scale, E4M3) * moved(1 / enc, of_enc)), of_block)
    else:
        scale = encode(enc * block_amax * six, E4M3)
        factor = moved(1 / decode(scale, E4M3), of_block) * enc
    factor = torch.where(scale == 0, 0.0, factor)
    recipe = find_recipe(f"nvfp4@{dialect}")
    codes = encode((blocks * factor.unsqueeze(-1)).flatten(1), E2M1)
    return Quantized(pack_codes(codes, recipe), scale, amax, recipe, tuple(x.shape))


def wrong(x: torch.Tensor, q: Quantized) -> dict[str, int]:
    return {name: int(part.wrong.sum()) for name, part in judge_quantized(Ends(x, x), q, None)}


def inputs() -> torch.Tensor:
    """Ties of codes, and numbers below them, under scales from 1 to 448 of a tensor scale 1; random blocks; zeros."""
    draw = torch.Generator().manual_seed(0)
    scales = decode(torch.arange(0x38, 0x7F, dtype=torch.uint8), E4M3)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    ties = torch.cat([ties, ties * (1 - 2.0**-20)])
    some = torch.randn(408, 16, generator=draw) * 2 ** torch.linspace(-9, 8, 408).view(-1, 1)
    return torch.cat([scales.view(-1, 1) * ties, some.clamp(-2688, 2688), torch.zeros(1, 16)]).reshape(30, 256)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_reciprocal_within_an_ulp_is_right(dialect: str) -> None:
    x = inputs()
    plain = kernel(x, dialect, (0, 0, 0))
    for ulps in ((0, 0, 0), (1, 0, 0), (-1, 1, -1), (0, -1, 1), (1, 1, 1)):
        q = kernel(x, dialect, ulps)
        assert wrong(x, q) == {"amax": 0, "scales": 0, "codes": 0}, ulps
        assert ulps[1:] == (0, 0) or not torch.equal(q.codes, plain.codes)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_reciprocal_that_is_farther_off_is_wrong(dialect: str) -> None:
    x = inputs()
    assert wrong(x, kernel(x, dialect, (1 << 14, 0, 0)))["scales"] > 0
    assert wrong(x, kernel(x, dialect, (0, 0, 64)))["codes"] > 0


def test_the_exact_dialect_refuses_an_approximate_reciprocal() -> None:
    x = inputs()
    q = kernel(x, "trtllm-cuda", (0, 1, 1))
    exact = Quantized(q.codes, q.scales, q.amax, find_recipe("nvfp4@trtllm"), q.shape)
    assert wrong(x, exact)["codes"] > 0


def test_rows_of_int8_accept_both_codes_of_an_uncertain_number() -> None:
    """Codes of two's complement have the order of their numbers."""
    recipe = find_recipe("int8-row@vllm-row")
    low = torch.tensor([[-15.75, -15.75, 15.25, -127.0]])
    high = torch.tensor([[-14.25, -14.25, 16.75, -127.0]])
    codes = torch.tensor([[-16, -14, 17, -127]], dtype=torch.int8).view(torch.uint8)
    q = Quantized(codes, torch.ones(1, 1), None, recipe, (1, 4))
    found = dict(judge_quantized(Ends(low, high), q, None))
    assert not bool(found["codes"].wrong.any())
    assert not bool(found["scales"].wrong.any())
    beside = codes.view(torch.int8) + torch.tensor([[-1, 1, 1, 0]], dtype=torch.int8)
    q = Quantized(beside.view(torch.uint8), q.scales, None, recipe, (1, 4))
    assert dict(judge_quantized(Ends(low, high), q, None))["codes"].wrong.tolist() == [[True, True, True, False]]


def test_a_row_of_zeros_of_int8_has_the_smallest_scale() -> None:
    x = torch.zeros(2, 32)
    x[1] = math.nan
    q = narrowgauge.quantize(x, "int8-row@vllm-row")
    assert q.scales.flatten().tolist() == [2.0**-23] * 2
    assert not bool(q.codes.any())
