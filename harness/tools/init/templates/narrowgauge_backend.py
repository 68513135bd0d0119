"""Backend of narrowgauge: the kernels of this repository that narrowgauge tests.

`nvfp4` is an example in plain torch. Call your own kernel in its place. narrowgauge calls the methods of `Backend` with
tensors on the device under test. A method that is missing, that lacks an optional argument, or that raises
NotImplementedError makes a case unsupported. docs/backends.md of narrowgauge lists the methods.
"""

import torch

MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between 0, 0.5, 1, 1.5, 2, 3, 4 and 6
FLT_MAX = torch.finfo(torch.float32).max


class Backend:
    def quantize(self, x: torch.Tensor, recipe: object) -> object:
        if str(recipe) != "nvfp4":
            raise NotImplementedError(f"no kernel for {recipe}")
        # For another layout of scales or order of nibbles, make the result by narrowgauge.adapt.quantized.
        return nvfp4(x)


def nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize x (M, K), K a multiple of 16: packed E2M1 codes (M, K/2), E4M3 scales (M, K/16), amax (1,)."""
    x = x.float()
    magnitudes = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).view(len(x), -1, 16)
    amax = magnitudes.max().view(1)
    one = torch.ones_like(amax)
    encode = (2688 * one / amax).clamp(max=FLT_MAX) if 0 < amax < torch.inf else one
    scales = (magnitudes.amax(2) * (encode * (one / 6))).clamp(max=448).to(torch.float8_e4m3fn)
    scaled = x * (1 / (scales.float() * (1 / encode))).clamp(max=FLT_MAX).repeat_interleave(16, 1)
    size = scaled.abs().nan_to_num(nan=torch.inf).unsqueeze(2)
    midpoints = MIDPOINTS.to(x.device)
    codes = (size > midpoints[::2]).sum(2) + (size >= midpoints[1::2]).sum(2)  # a tie goes to the even code
    codes = (codes + 8 * (scaled.signbit() & ~scaled.isnan())).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, amax
