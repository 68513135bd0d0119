"""The model of a tensor core against the tensor core: torch._scaled_mm of FP8 on a Hopper GPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference.bounds.bounds import bounds
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

FORMATS = {"fp8-current-e4m3": torch.float8_e4m3fn, "fp8-current-e5m2": torch.float8_e5m2}


def missing() -> str | None:
    """Why there is nothing to compare with; None where there is."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; the model of Hopper's FP8 sums is not compared with one"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is no Hopper GPU; the model of its FP8 sums is not compared with one"
    return None


MISSING = missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "there is a Hopper GPU")


def operand(name: str, family: str, rows: int, columns: int, generator: torch.Generator) -> Quantized:
    """`codes`: all of them; `subnormal`: those below the smallest normal number; `sparse`: small ones, mostly 0."""
    recipe = find_recipe(name)
    fmt = recipe.element
    below = {"codes": fmt.max_code + 1, "subnormal": 1 << fmt.mantissa_bits, "sparse": 40}[family]
    codes = torch.randint(0, below, (rows, columns), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    if family == "sparse":
        codes *= torch.rand(rows, columns, generator=generator) < 0.2
    return Quantized(codes.cuda(), torch.ones(1).cuda(), None, recipe, (rows, columns))


def scaled_mm(a: Quantized, b: Quantized, *, fast: bool) -> torch.Tensor:
    left, right = (q.codes.view(FORMATS[str(q.recipe)]) for q in (a, b))
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=fast)


@pytest.mark.parametrize("shape", [(64, 128, 64), (128, 2048, 64), (16, 4096, 256)])
@pytest.mark.parametrize("families", [("codes", "codes"), ("codes", "subnormal"), ("sparse", "codes")])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "slow"])
def test_every_bit_is_the_models(name: str, families: tuple[str, str], shape: tuple[int, int, int], fast: bool) -> None:
    m, k, n = shape
    generator = torch.Generator().manual_seed(k)
    a = operand(name, families[0], m, k, generator)
    b = operand("fp8-current-e4m3", families[1], n, k, generator)
    out = scaled_mm(a, b, fast=fast)
    order = "aligned-13-32" if fast else "aligned-13-32-128"
    assert torch.equal(out, bounds(a, b, out_dtype=torch.float32, order=order).expected)
    for other in ("aligned-12-32", "aligned-14-32", "aligned-13-16"):
        assert not torch.equal(out, bounds(a, b, out_dtype=torch.float32, order=other).expected)
