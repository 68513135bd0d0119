"""Recorded bytes of vLLM's activation of masked experts on an H200, whose steps behind SiLU are in bfloat16."""

from __future__ import annotations

from pathlib import Path

import torch

from narrowgauge import contract as c
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.reference.contracts.golden_serving import vectors

FILE = "vllm_persistent_masked_m_silu_mul_quant"
NEGATIVE_NAN = '["fp8-static-e4m3@masked"]\nbase = "vllm-static"\nnan_code = 254\n'
"""NaN is clamped to −448."""
BY_448, SMALLEST = (float(torch.tensor(number).bfloat16()) for number in (1 / 448, 1e-10))


@c.contract
def masked(x: c.Matrix, scale: c.Scale, recipe: c.Recipe, *, narrow: bool = True):
    """A scale of each row, and the codes of products with its reciprocal. scale: 1. narrow: the product of the halves,
    the scale, the reciprocal and the products are bfloat16."""
    gate, up = c.halves(x)
    steps = x.dtype if narrow else "float32"
    h = c.cast(c.silu(c.float32(gate)), x.dtype)
    y = c.cast(c.float32(h) * c.float32(up), steps)
    s = c.cast(c.maximum(c.amax(c.float32(y)), SMALLEST) * BY_448, x.dtype)
    r = c.cast(c.divide(1.0, c.float32(s), "quotient"), steps)
    return {"scales": s, "quantized": c.quantize(c.cast(c.float32(y) * c.float32(r), steps), recipe, scale)}


def wrong(recipe: str, **fields: bool) -> int:
    """Elements outside of the contract, in vectors with one group of 128 in a row and float32 scales."""
    found, rule = 0, find_recipe(recipe)
    for vector in vectors(FILE):
        if vector["scales"] != "float32":
            continue
        t, some = vector["tensors"], [slice(count) for count in vector["tensors"]["counts"].tolist()]
        x, codes = (
            torch.cat([rows[valid] for rows, valid in zip(t[name], some, strict=True)]) for name in ("x", "codes")
        )
        scales = torch.cat([rows[0, valid] for rows, valid in zip(t["scales"], some, strict=True)]).view(-1, 1)
        assert torch.equal(scales.bfloat16().float(), scales)
        program = masked.trace({"x": "bfloat16", "scale": "float32"}, {"recipe": str(rule)}, fields)
        quantized = Quantized(codes, torch.ones(1, 1), None, rule, tuple(codes.shape))
        shown = {"scales": scales.bfloat16(), "quantized": quantized}
        parts = dict(judged(program, {"x": x, "scale": torch.ones(1)}, shown))
        assert parts["codes"].determined > 0.85 * codes.numel()
        found += sum(int(part.wrong.sum()) for part in parts.values())
    return found


def test_recorded_bytes_lie_inside(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(NEGATIVE_NAN, encoding="utf-8")
    recipe = str(find_recipe(str(rules)))
    assert wrong(recipe) == 0
    assert wrong("fp8-static-e4m3@vllm-static") == 49  # the codes of NaN
    assert wrong(recipe, narrow=False) > 100
