"""A backend and calls as users wrote them at commit 9475e59, with the keywords of that time."""

from dataclasses import replace

import torch

import narrowgauge
from narrowgauge.reference import ops

Quantized = narrowgauge.Quantized


class Backend:
    """The reference's results through the signatures of docs/backends.md at that commit."""

    def __init__(self):
        self.declares = {"transform": "butterfly"}
        self.asked = set()

    def quantize(self, x, recipe, *, amax=None, scale=None, random=None, swizzled=False):
        self.asked |= {("quantize", "swizzled")} if swizzled is True else set()
        q = ops.quantize(x, recipe, amax=amax, scale=scale, random=random)
        scales = ops.swizzle(q.scales) if swizzled else q.scales
        return Quantized(q.codes, scales, q.amax, q.recipe, q.shape, q.tensor_scale, swizzled, False)

    def quantize_both(
        self, x, recipe, *, rowwise=True, columnwise=True, amax=None, scale=None, random=None, swizzled=False
    ):
        self.asked |= {("quantize_both", "swizzled")} if swizzled is True else set()
        self.asked |= {("quantize_both", "rowwise")} if rowwise is False else set()
        self.asked |= {("quantize_both", "columnwise")} if columnwise is False else set()
        return ops.quantize_both(
            x, recipe, rowwise=rowwise, columnwise=columnwise, amax=amax, scale=scale, random=random, swizzled=swizzled
        )

    def quantize_grouped(self, x, sizes, recipe, *, columnwise=False, amax=None, scale=None, random=None):
        self.asked |= {("quantize_grouped", "columnwise")} if columnwise is True else set()
        return ops.quantize_grouped(x, sizes, recipe, columnwise=columnwise, amax=amax, scale=scale, random=random)

    def dequantize(self, q, dtype):
        return ops.dequantize(q, dtype)

    def gemm(self, a, b, *, out_dtype, c=None, bias=None):
        self.asked |= {("gemm", "a.swizzled")} if a.swizzled else set()
        self.asked |= {("gemm", "b.transposed")} if b.transposed else set()
        return ops.gemm(self.linear(a), self.linear(b), out_dtype=out_dtype, c=c, bias=bias)

    def linear(self, q):
        if not q.swizzled:
            return q
        shape = q.shape[0], -(-q.shape[1] // q.recipe.block[1])
        return replace(q, scales=ops.unswizzle(q.scales, shape), swizzled=False)

    def swizzle(self, scales):
        return ops.swizzle(scales)

    def unswizzle(self, scales, shape):
        return ops.unswizzle(scales, shape)

    def Linear(self, in_features, out_features, **options):
        return Layer(self, in_features, out_features, **options)


class Layer(ops.Linear):
    """A module that reports its operands as mappings with the key `swizzled`."""

    def __init__(self, backend, *sizes, **options):
        super().__init__(*sizes, **options)
        self.backend = backend

    def observe(self, name, value):
        if isinstance(value, Quantized) and not value.transposed:
            scales = ops.swizzle(value.scales)
            self.backend.asked.add(("Linear", "swizzled"))
            value = {
                "codes": value.codes, "scales": scales, "amax": value.amax, "tensor_scale": value.tensor_scale,
                "swizzled": True,
            }  # fmt: skip
        super().observe(name, value)


ASKED = {
    ("quantize", "swizzled"), ("quantize_both", "swizzled"), ("quantize_both", "rowwise"),
    ("quantize_both", "columnwise"), ("quantize_grouped", "columnwise"),
    ("gemm", "a.swizzled"), ("gemm", "b.transposed"), ("Linear", "swizzled"),
}  # fmt: skip
"""Requests of cases.toml to the backend of the time."""


def calls(quantize, quantize_both, quantize_grouped):
    """Public calls of that time, on the doors of the reference or of the kernels."""
    x = torch.arange(40 * 96, dtype=torch.float32).view(40, 96).remainder(7).bfloat16()
    linear, tiles = quantize(x, "nvfp4"), quantize(x, "nvfp4", swizzled=True)
    assert not linear.swizzled
    assert tiles.swizzled
    assert torch.equal(tiles.scales, narrowgauge.swizzle(linear.scales))
    row, column = quantize_both(x, "mxfp8-e4m3", swizzled=True)
    assert row.swizzled
    assert column.swizzled
    assert column.transposed
    assert quantize_both(x, "nvfp4", rowwise=False)[0] is None
    assert quantize_both(x, "nvfp4", columnwise=False, swizzled=True)[1] is None
    sections = quantize_grouped(x, torch.tensor([24, 16]), "nvfp4", columnwise=True)
    assert sections.columnwise
    assert [part.shape for part in sections.sections()] == [(96, 24), (96, 16)]
    parts = (linear.codes, tiles.scales, linear.amax, linear.recipe, linear.shape, linear.tensor_scale)
    for q in (Quantized(*parts, True), Quantized(*parts, swizzled=True), replace(tiles), replace(tiles, swizzled=True)):
        assert q.swizzled
        assert not q.transposed
        assert torch.equal(narrowgauge.dequantize(q), narrowgauge.dequantize(linear))
        back = replace(q, scales=linear.scales, swizzled=False)
        assert not back.swizzled
        assert torch.equal(narrowgauge.dequantize(back), narrowgauge.dequantize(linear))
    assert Quantized(*parts, False, True).transposed
    mapping = {"codes": linear.codes, "scales": tiles.scales, "amax": linear.amax, "recipe": "nvfp4",
               "shape": linear.shape, "swizzled": True}  # fmt: skip
    product = narrowgauge.gemm(linear, linear, out_dtype=torch.float32)
    narrowgauge.assert_gemm(mapping, tiles, product, out_dtype=torch.float32)
