"""The reference's modules, the same as those of `native.modules`: layers that quantize by role, under an autocast."""

from reference.autocast import at_exit, autocast, checkpoint, current, recomputing
from reference.grouped_linear import GroupedLinear
from reference.layer_norm_linear import LayerNormLinear
from reference.linear import Linear
from reference.transformer import TransformerLayer

__all__ = [
    "GroupedLinear", "LayerNormLinear", "Linear", "TransformerLayer", "at_exit", "autocast", "checkpoint", "current",
    "recomputing",
]  # fmt: skip
