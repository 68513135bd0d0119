"""Native modules, with the interface of `reference.modules`: layers with quantized operands under an autocast."""

from narrowgauge.native.modules.grouped_linear import GroupedLinear
from narrowgauge.native.modules.layer_norm_linear import LayerNormLinear
from narrowgauge.native.modules.linear import Linear
from narrowgauge.native.modules.moe_layer import MoELayer
from narrowgauge.native.modules.transformer import TransformerLayer
from narrowgauge.spec.modules.autocast import autocast, checkpoint
from narrowgauge.spec.modules.training import training_recipe

__all__ = [
    "GroupedLinear", "LayerNormLinear", "Linear", "MoELayer", "TransformerLayer", "autocast", "checkpoint",
    "training_recipe",
]  # fmt: skip
