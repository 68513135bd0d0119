"""The reference as judges ask it: the same functions, their seconds counted (`harness.machine.timing`)."""

from __future__ import annotations

from narrowgauge.harness.machine.timing import timed_function
from narrowgauge.reference import ops
from narrowgauge.reference.bounds import bounds as products
from narrowgauge.reference.high_precision import additions, attention, experts, gelu, norm, quantized_attention
from narrowgauge.reference.numbers import blocks
from narrowgauge.reference.quantize import quantize as halves
from narrowgauge.reference.quantize import scaling, steps

_PART = "reference"

quantize = timed_function(_PART, ops.quantize)
quantize_both = timed_function(_PART, ops.quantize_both)
quantize_half = timed_function(_PART, halves.quantize_half)
quantize_grouped = timed_function(_PART, ops.quantize_grouped)
dequantize = timed_function(_PART, ops.dequantize)
transform = timed_function(_PART, ops.transform)
swizzle = timed_function(_PART, ops.swizzle)
unswizzle = timed_function(_PART, ops.unswizzle)
update_scale = timed_function(_PART, ops.update_scale)
pad_sections = timed_function(_PART, ops.pad_sections)
permute = timed_function(_PART, ops.permute)
bounds = timed_function(_PART, products.bounds)
block_amaxes = timed_function(_PART, steps.block_amaxes)
stored_scales = timed_function(_PART, steps.stored_scales)
encode_elements = timed_function(_PART, steps.encode_elements)
tensor_amax = timed_function(_PART, blocks.tensor_amax)
tensor_scale = timed_function(_PART, scaling.tensor_scale)
column_sum = timed_function(_PART, additions.column_sum)
residual_sum = timed_function(_PART, additions.residual_sum)
attention_forward = timed_function(_PART, attention.attention_forward)
attention_backward = timed_function(_PART, attention.attention_backward)
softmax = timed_function(_PART, quantized_attention.softmax)
weighted_values = timed_function(_PART, quantized_attention.weighted_values)
scores_gradient = timed_function(_PART, quantized_attention.scores_gradient)
query_gradient = timed_function(_PART, quantized_attention.query_gradient)
key_gradient = timed_function(_PART, quantized_attention.key_gradient)
value_gradient = timed_function(_PART, quantized_attention.value_gradient)
gelu_forward = timed_function(_PART, gelu.gelu_forward)
gelu_backward = timed_function(_PART, gelu.gelu_backward)
norm_forward = timed_function(_PART, norm.norm_forward)
norm_backward = timed_function(_PART, norm.norm_backward)
swiglu_forward = timed_function(_PART, experts.swiglu_forward)
swiglu_backward = timed_function(_PART, experts.swiglu_backward)
weighted_sum = timed_function(_PART, experts.weighted_sum)
weighted_rows = timed_function(_PART, experts.weighted_rows)
weight_gradient = timed_function(_PART, experts.weight_gradient)
