"""Numerics tests for narrow-precision kernels: a bit-exact reference, kernels, and a harness that compares the two.

The names below load on first use: `import narrowgauge` imports neither torch nor the reference. They need torch and
numpy only.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from narrowgauge.spec import VERSION as __version__

if TYPE_CHECKING:
    from pathlib import Path

    from narrowgauge import adapt
    from narrowgauge.harness.api.assert_result import assert_result
    from narrowgauge.harness.api.assertions import (
        assert_dequantized,
        assert_gemm,
        assert_quantized,
        assert_stochastic,
        assert_transformed,
        explain,
    )
    from narrowgauge.harness.api.check import check
    from narrowgauge.harness.api.error_figures.bounds import bounds
    from narrowgauge.harness.api.error_figures.metrics import metrics
    from narrowgauge.harness.api.error_figures.tolerance import tolerance
    from narrowgauge.harness.api.inputs import inputs, matrix
    from narrowgauge.harness.api.judging.rows import assert_rows_independent
    from narrowgauge.harness.api.verdict import Verdict, WrongResult
    from narrowgauge.harness.certify.certify import certify
    from narrowgauge.harness.checks.order.order import Order
    from narrowgauge.harness.checks.order.probe import accumulation_order
    from narrowgauge.harness.power.power import power
    from narrowgauge.harness.tools.checkpoint.assertion import assert_checkpoint
    from narrowgauge.harness.tools.dialect.parity.parity import parity
    from narrowgauge.harness.watch.watch import watch
    from narrowgauge.reference.ops import (
        dequantize,
        gemm,
        gemm_grouped,
        gemm_quantized,
        pack_scales,
        quantize,
        quantize_both,
        quantize_grouped,
        swizzle,
        transform,
        unpack_scales,
        unswizzle,
        update_scale,
    )
    from narrowgauge.spec.quantized import BatchedQuantized, GroupedQuantized, Quantized
    from narrowgauge.spec.recipes import Recipe, recipes, save_rule, use_rules
    from narrowgauge.spec.recipes import find_recipe as recipe

    cases: Path
    """Folder of the case files of this package."""

__all__ = [
    "BatchedQuantized", "GroupedQuantized", "Order", "Quantized", "Recipe", "Verdict", "WrongResult", "__version__",
    "accumulation_order", "adapt", "assert_checkpoint", "assert_dequantized", "assert_gemm", "assert_quantized",
    "assert_result", "assert_rows_independent", "assert_stochastic", "assert_transformed", "bounds", "cases", "certify",
    "check", "dequantize", "explain", "gemm", "gemm_grouped", "gemm_quantized", "inputs", "matrix", "metrics",
    "pack_scales", "parity", "power", "quantize", "quantize_both", "quantize_grouped", "recipe", "recipes", "save_rule",
    "swizzle", "tolerance", "transform", "unpack_scales", "unswizzle", "update_scale", "use_rules", "watch",
]  # fmt: skip

_MODULES = {
    "BatchedQuantized": "spec.quantized", "GroupedQuantized": "spec.quantized", "Quantized": "spec.quantized",
    "Recipe": "spec.recipes", "recipe": "spec.recipes", "recipes": "spec.recipes",
    "save_rule": "spec.recipes", "use_rules": "spec.recipes",
    "assert_dequantized": "harness.api.assertions", "assert_gemm": "harness.api.assertions",
    "Order": "harness.checks.order.order", "accumulation_order": "harness.checks.order.probe",
    "assert_checkpoint": "harness.tools.checkpoint.assertion",
    "assert_quantized": "harness.api.assertions", "assert_result": "harness.api.assert_result",
    "assert_rows_independent": "harness.api.judging.rows",
    "assert_stochastic": "harness.api.assertions",
    "assert_transformed": "harness.api.assertions", "explain": "harness.api.assertions",
    "bounds": "harness.api.error_figures.bounds", "certify": "harness.certify.certify",
    "check": "harness.api.check", "inputs": "harness.api.inputs",
    "Verdict": "harness.api.verdict", "WrongResult": "harness.api.verdict",
    "matrix": "harness.api.inputs", "metrics": "harness.api.error_figures.metrics",
    "parity": "harness.tools.dialect.parity.parity", "power": "harness.power.power",
    "tolerance": "harness.api.error_figures.tolerance", "watch": "harness.watch.watch",
}  # fmt: skip
"""Module of each name. Every other name is a function of the reference."""
_NAME_IN_MODULE = {"recipe": "find_recipe"}
"""Public names that differ from the names in their modules."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'narrowgauge' has no attribute {name!r}")
    value: Any
    if name == "adapt":
        value = import_module("narrowgauge.adapt")
    elif name == "cases":
        from pathlib import Path

        value = Path(__file__).parent / "cases"
    else:
        module = import_module(f"narrowgauge.{_MODULES.get(name, 'reference.ops')}")
        value = getattr(module, _NAME_IN_MODULE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("NARROWGAUGE_WATCH"):  # docs/watch.md
    import_module("narrowgauge.harness.watch.variable").start_named()
