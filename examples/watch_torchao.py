"""A model whose weights and activations torchao quantizes to NVFP4; every fourth quantization is judged.

python examples/watch_torchao.py
"""

from __future__ import annotations

from typing import Any

import torch
from torchao.prototype.mx_formats import nvfp4_tensor

import narrowgauge


def adapter(
    result: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    block_size: int = 16,
    per_tensor_scale: torch.Tensor | None = None,
) -> dict[str, Any] | None:
    """The arguments of assert_quantized from a call of torchao's `nvfp4_quantize`."""
    if per_tensor_scale is None:
        return None  # scales of one level: another recipe
    scales, codes = result
    return {"x": x, "codes": codes, "scales": scales, "tensor_scale": per_tensor_scale.reshape(1)}


class Linear(torch.nn.Module):
    """A linear layer with weight and input quantized in every call."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=torch.bfloat16) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quantized(x) @ quantized(self.weight).T


def quantized(x: torch.Tensor) -> torch.Tensor:
    """`x` (M, K), bfloat16, through NVFP4 and back."""
    scale = nvfp4_tensor.per_tensor_amax_to_scale(x.detach().abs().amax())
    return nvfp4_tensor.NVFP4Tensor.to_nvfp4(x.detach(), per_tensor_scale=scale).dequantize(torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(128, 256), torch.nn.ReLU(), Linear(256, 64))
    watched = narrowgauge.watch(
        nvfp4_tensor.nvfp4_quantize, adapter, every=4,
        recipe="nvfp4@torchao", tensor_scale_is="decode", static=True,
    )  # fmt: skip
    with watched:
        for _ in range(2):
            model(torch.randn(32, 128, dtype=torch.bfloat16))
    print(watched.summary())


if __name__ == "__main__":
    main()
