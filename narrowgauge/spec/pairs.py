"""Which operands can be multiplied with each other. Nothing here imports torch."""

from __future__ import annotations

from narrowgauge.spec.formats import E4M3, E5M2, FP32, Format
from narrowgauge.spec.rule import Recipe


def mismatch(a: Recipe, b: Recipe) -> str:
    """Why operands of two recipes cannot be multiplied, or nothing where they can.

    Both have scales of one format, for as many elements of K, the same rotation and the same α. NVFP4 has one element
    format; MX elements mix (PTX: kind::mxf8f6f4); E5M2 by E5M2 and tiles by tiles are no GEMM of FP8 with float32
    scales (Transformer Engine, cuBLAS).
    """
    for what in ("scale", "transform", "alpha"):
        if (one := getattr(a, what)) != (other := getattr(b, what)):
            reason = "; rotations cancel only where both operands have the same" if what == "transform" else ""
            return f"{what} is {_named(one)} and {_named(other)}{reason}"
    if a.scale is E4M3 and a.element != b.element:
        return f"element is {a.element.name} and {b.element.name}"
    if a.block[1] != b.block[1]:
        return f"block is {_block(a)} and {_block(b)}"
    if a.scale is FP32 and a.element is b.element is E5M2:
        return "element is E5M2 of both; one of the two has to be E4M3"
    if a.scale is FP32 and not a.whole and a.block[0] > 1 and b.block[0] > 1:
        return f"block is {_block(a)} of both; one of the two has to be 1x{a.block[1]}"
    return ""


def _named(choice: object) -> str:
    return choice.name if isinstance(choice, Format) else str(choice)


def _block(r: Recipe) -> str:
    return f"{r.block[0]}x{r.block[1]}"
