"""Names of all causes, for the check of the ledger of known failures. This module does not import torch."""

from __future__ import annotations

CAUSES = (
    "accumulator-14-bits", "accumulator-bf16", "accumulator-fp16", "activation-missing", "activation-relu",
    "activation-silu", "addends-first", "alpha-after-cast", "alpha-amax-twice", "alpha-flushed", "alpha-inverted",
    "alpha-missing", "alpha-of-one-operand", "alpha-times-bias", "alpha-times-c", "alpha-twice",
    "amax-before-transform", "amax-of-all-tensors", "amax-of-first-section", "amax-of-last-section", "amax-of-tensor",
    "amax-partial", "amax-stale", "amax-too-large", "amax-too-small", "amax-without-fabs", "amax-without-latest",
    "amax-without-oldest", "attention-gradient-through:bf16", "attention-gradient-without-row-term",
    "attention-heads-interleaved", "attention-heads-last", "attention-k-and-v-exchanged", "attention-mask-one-early",
    "attention-mask-one-late", "attention-not-causal", "attention-not-scaled", "attention-output-not-transposed",
    "attention-q-and-k-exchanged", "attention-row-sum", "attention-scaled-twice", "attention-scores-through:bf16",
    "attention-softmax-through:bf16", "bias-after-cast", "bias-before-c", "bias-by-rows", "bias-ignored",
    "bias-tail-dropped", "bias-twice", "block-amax-before-transform", "block-amax-first-row", "block-amax-half",
    "block-amax-of-tensor", "block-amax-spans-two", "block-amax-without-fabs", "c-and-bias-ignored", "c-before-cast",
    "c-ignored", "c-of-first-row", "c-rounded-first", "c-transposed", "c-twice", "captured-inputs", "cast-before-c",
    "changes-its-input", "computed-in-wider-format", "concurrent-streams", "concurrent-threads",
    "decoded-as-other-format", "element-factor-ulp", "epsilon-ignored", "epsilon-unwanted", "exponent-power-of-two",
    "factor-not-clamped", "four-over-six-always-4", "four-over-six-each-row", "four-over-six-fma",
    "four-over-six-larger-error", "four-over-six-never-4", "four-over-six-other-measure", "four-over-six-reciprocal",
    "four-over-six-ties", "fused-output-not-cast", "gain", "gelu-by-erf", "gelu-by-sigmoid", "gelu-cube-not-derived",
    "gelu-gradient-without-slope", "gelu-without-cube", "given-amax-ignored", "gradient-missing", "gradient-not-wanted",
    "gradient-overwritten", "gradient-too-early", "history-cleared", "history-first-not-zeroed", "history-latest-lost",
    "history-not-rolled", "history-partial", "history-rolled-back", "infinite-amax-updates", "infinity-dropped",
    "input-transposed", "inputs-flushed", "last-block-dropped", "last-element-dropped", "margin-ignored",
    "margin-inverted", "max-of-other-format", "nan-dropped", "nan-keeps-sign", "nan-read-as-number", "nan-spread",
    "nearest-not-stochastic", "negative-zero-kept", "negative-zero-lost", "never-written", "nibbles-swapped",
    "no-diagnosis", "norm-eps-outside-root", "norm-gamma-plus-one", "norm-gradient-of-input",
    "norm-gradient-without-mean", "norm-gradient-without-statistics", "norm-gradient-without-variance",
    "norm-of-other-kind", "norm-rounded-early", "norm-unbiased", "norm-without-beta", "norm-without-eps",
    "norm-without-gamma", "not-repeatable", "not-swizzled", "operand-of-another-pass", "operand-of-the-forward-before",
    "operand-of-the-step-before", "operands-decoded-first", "operands-not-decoded", "order-not-declared",
    "order-of-threads", "output-saturated", "output-subnormals-flushed", "output-transposed", "output-truncated",
    "overflow-to-infinity", "overflow-to-nan", "padding-before-rows", "padding-not-zeroed", "padding-wrong-section",
    "partial-sums-bf16", "partial-sums-fp16", "power-of-two-scales", "product-missing", "quantized-twice",
    "reads-outside", "recomputed-otherwise", "residual-alone", "residual-missing", "residual-of-other",
    "returns-earlier-result", "returns-its-input", "rotation-last-group-skipped", "rotation-missing",
    "rotation-not-rounded", "rotation-not-wanted", "rotation-of-columns", "rotation-signs-after",
    "rotation-signs-along-row", "rotation-stage-missing", "rotation-through-bf16", "rotation-truncated",
    "rotation-without-factor", "rotation-without-signs", "rounded-toward-infinity", "rounded-toward-minus-infinity",
    "rounded-up", "rows-dependent", "rows-rolled", "same-result-for-other-inputs", "scale-inverted",
    "scale-not-clamped",
    "scale-not-updated", "scale-rounded-up", "scale-ties-away", "scale-ties-even", "scale-ties-toward-zero",
    "scale-truncated", "scales-flushed", "scales-ignored", "scales-multiplied-first", "scales-of-next-block",
    "scales-of-one-operand", "scales-of-previous-block", "scales-of-sum", "scales-read-linear", "scales-read-swizzled",
    "scales-transposed", "section-of-neighbour", "sections-not-padded", "signs-lost", "stochastic-biased",
    "stochastic-bits-shared", "stochastic-blocks-by-column", "stochastic-bytes-reversed", "stochastic-complemented",
    "stochastic-equal-seeds", "stochastic-inclusive", "stochastic-not-nearest", "stochastic-offset-not-advanced",
    "stochastic-philox-rounds", "stochastic-sections-restart", "stochastic-seven-bits", "subnormal-amaxes-flushed",
    "subnormal-codes-flushed", "subnormal-factors-flushed", "subnormal-scales-flushed", "subnormal-scales-raised",
    "subnormals-flushed", "swizzle-32-4", "swizzle-columns-before-rows", "swizzle-columns-not-padded",
    "swizzle-linear-tiles", "swizzle-tiles-by-column", "tail-dropped", "tensor-scale-flushed", "tensor-scale-ignored",
    "tensor-scale-inverted", "tensor-scale-not-clamped", "ties-away", "ties-toward-zero", "tiles-ignored",
    "tiles-transposed", "top-binade-saturated", "truncated", "unpadding-first-rows", "values-flushed",
    "values-truncated", "writes-outside", "wrong-after-many-calls", "zero-amax-updates", "zero-block-nan",
    "zero-block-not-one", "zero-scale-raised",
)  # fmt: skip
FAMILIES = (
    "algorithm:", "alignment:", "alpha-amax-through-", "alpha-order:", "amax-through-", "amax-truncated:",
    "block-amax-skips:", "block-amax-through-", "both:", "candidates:", "decode-order:", "decode-through-",
    "decoded-through-", "dialect:", "element-format:", "element-order:", "element-through-", "exponent-code-",
    "exponent:", "factor-through-", "four-over-six-order:", "input-through-", "input-truncated:", "largest-scale:",
    "nan-code:", "only:", "order:", "output-through-", "place:", "product-through-", "rotation-group:",
    "rotation-signs:", "rounding:", "scale-code:", "scale-max-", "scale-of-", "scale-order:", "scale-through-",
    "scales-through-", "smallest-scale:", "statistics:", "stochastic-bits:", "stochastic-offset:",
    "stochastic-other-block:", "stochastic-seed:", "swizzle-rows-modulo:", "tail-of-k-dropped:", "tensor-limit:",
    "tensor-scale-order:", "tensor-scale-through-", "update:", "use:", "values-through-", "zero-block:", "zero-scale:",
)  # fmt: skip
"""Prefixes of names with a variable part: a number, a formula or a place."""
_PATTERNS = ("place:", "only:")


def is_cause(name: str) -> bool:
    """Whether `name` is the cause of some explanation."""
    return name in CAUSES or any(name.startswith(family) and name != family for family in FAMILIES)


def is_pattern(name: str) -> bool:
    """Whether the cause is a place or a class of the wrong elements, and no deviation."""
    return name.startswith(_PATTERNS)
