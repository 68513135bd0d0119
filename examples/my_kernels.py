"""An NVFP4 quantizer in plain torch as a backend, and the same quantizer with a mistake that random inputs do not show.

narrowgauge run --backend narrowgauge.examples.my_kernels:TiesAway -k quantize/nvfp4/256x1024/bf16/outliers
"""

import torch

MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between E2M1's 0, 0.5, 1, 1.5, 2, 3, 4 and 6
FLT_MAX = torch.finfo(torch.float32).max


class Backend:
    def quantize(self, x, recipe, **options):
        if str(recipe) != "nvfp4" or options or x.shape[-1] % 16 or not x.numel():
            raise NotImplementedError(f"no kernel for {recipe}, shape {tuple(x.shape)}, options {list(options)}")
        x = x.reshape(-1, x.shape[-1]).float()
        magnitudes = x.abs().nan_to_num(nan=0.0, posinf=torch.inf).view(len(x), -1, 16)
        amax = magnitudes.max().view(1)
        encode = (torch.tensor(2688.0) / amax).clamp(max=FLT_MAX) if 0 < amax < torch.inf else torch.ones_like(amax)
        scales = (magnitudes.amax(2) * (encode * (1 / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn)
        factors = (1 / (scales.float() * (1 / encode))).clamp(max=FLT_MAX)
        scaled = x * factors.repeat_interleave(16, 1)
        codes = self.round(scaled.abs().nan_to_num(nan=torch.inf).unsqueeze(2))
        codes = (codes + 8 * (scaled.signbit() & ~scaled.isnan())).to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, scales, amax

    def round(self, magnitudes):  # to the nearest E2M1 code; a tie goes to the even code
        midpoints = MIDPOINTS.to(magnitudes.device)
        return (magnitudes > midpoints[::2]).sum(2) + (magnitudes >= midpoints[1::2]).sum(2)


class TiesAway(Backend):
    def round(self, magnitudes):
        return (magnitudes >= MIDPOINTS.to(magnitudes.device)).sum(2)
