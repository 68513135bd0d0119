"""The native modules, the same as those of `reference.modules`: layers that quantize by role, under an autocast."""

from native.grouped_linear import GroupedLinear
from native.layer_norm_linear import LayerNormLinear
from native.linear import Linear
from native.transformer import TransformerLayer
from reference.autocast import autocast, checkpoint
from reference.training import training_recipe

__all__ = [
    "GroupedLinear", "LayerNormLinear", "Linear", "TransformerLayer", "autocast", "checkpoint", "training_recipe",
]  # fmt: skip
