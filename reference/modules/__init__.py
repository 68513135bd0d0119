"""Modules of the reference: layers that quantize by role in an autocast, equal to the modules of `native.modules`."""

from narrowgauge.reference.modules.grouped_linear import GroupedLinear
from narrowgauge.reference.modules.layer_norm_linear import LayerNormLinear
from narrowgauge.reference.modules.linear import Linear
from narrowgauge.reference.modules.moe_layer import MoELayer
from narrowgauge.reference.modules.transformer import TransformerLayer
from narrowgauge.spec.modules.autocast import at_exit, autocast, checkpoint, current, recomputing

__all__ = [
    "GroupedLinear", "LayerNormLinear", "Linear", "MoELayer", "TransformerLayer", "at_exit", "autocast", "checkpoint",
    "current", "recomputing",
]  # fmt: skip
