"""Packed words that kernels of vLLM and SGLang gave on an H200 have the layout ue8m0-int32, with unwritten cells.

tests/golden/serving/README.md says where the vectors come from. The scales are computed here, by the statement of the
kernel: the least power of two that is at least amax/448, with the minima of the library.
"""

from __future__ import annotations

import pytest
import torch

from narrowgauge.reference import ops as reference
from narrowgauge.spec.scale_layouts import LAYOUTS, Packing
from tests.reference.contracts.golden_serving import vectors

NOT_WRITTEN = 0x5A
LAYOUT = "ue8m0-int32"
FILES = {"vllm_per_token_group_fp8_quant": "packed UE8M0", "sglang_per_token_group_quant": "packed UE8M0 columns"}


def exponents(x: torch.Tensor, group: int, library: str) -> torch.Tensor:
    """Bytes of the scales of each group, uint8 (M, K/group)."""
    amax = x.float().abs().unflatten(1, (-1, group)).amax(2)
    scale = amax.clamp(min=1e-10) / 448
    scale = scale.clamp(min=1e-10) if library == "vllm" else scale
    bits = scale.view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).to(torch.uint8)


@pytest.mark.parametrize("file", FILES)
def test_recorded_words_are_the_packed_scales(file: str) -> None:
    compared = left = 0
    for vector in vectors(file):
        if vector["scales"] != FILES[file]:
            continue
        x, words = vector["tensors"]["x"], vector["tensors"]["scales"]
        scales = exponents(x, vector["group"], file.partition("_")[0])
        finite = x.isfinite().all(1)
        packed = words.contiguous().view(torch.uint8)
        packing = Packing(LAYOUTS[LAYOUT], tuple(scales.shape))
        assert packed.shape == packing.packed_shape
        linear = reference.unpack_scales(packed, tuple(scales.shape), LAYOUT)
        assert torch.equal(linear[finite], scales[finite])
        absent = packing.cells("absent")
        assert bool((packed[absent] == NOT_WRITTEN).all())
        assert not bool(packed[packing.cells("0")].any())
        compared, left = compared + int(finite.sum()), left + int(absent.sum())
    assert compared > 10
    assert left
