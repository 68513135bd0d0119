"""Timing of quantize and dequantize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from narrowgauge.harness.operations.timing.judge_outputs import (
    QuantizeArguments,
    Verdict,
    judge_halves,
    judge_quantized,
    judge_values,
)
from narrowgauge.harness.operations.timing.operation_bench import (
    COMPILED,
    COPY,
    BenchInputs,
    BenchTask,
    Growth,
    OperationBench,
    Peer,
    PreparedTask,
    nbytes,
)
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

_NVFP4 = (
    "nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-sr", "nvfp4-rht-sr", "nvfp4-rowscaled", "nvfp4-4over6-448-mae",
)  # fmt: skip
_OWN_AMAX = ("nvfp4", "nvfp4-rht", "nvfp4-rht-sr")
"""Recipes that are also timed with their own amax pass."""
_OTHERS = (
    "mxfp8-e4m3", "mxfp8-e5m2", "mxfp8-2d", "fp8-block-1x128", "fp8-block-128x128", "fp8-current", "fp8-delayed",
)  # fmt: skip
_DECODED = ("nvfp4", "mxfp8-e4m3", "fp8-block-1x128")
_GIVEN = ", amax given"
_TYPICAL = (
    "quantize/nvfp4/rowwise*", "quantize/nvfp4-rht/both, amax given/*", "quantize/nvfp4*-sr/both, amax given/*",
    "quantize/nvfp4-2d/both, amax given/*", "quantize/mxfp8-*/both/*", "quantize/fp8-block-*", "dequantize/*",
)  # fmt: skip
TORCHAO, _FORMATS = "torchao", "torchao.prototype.mx_formats"
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_COMPILED = ("quantize/nvfp4/rowwise", "quantize/mxfp8-e4m3/rowwise")
_GROWING = "nvfp4"
"""Recipe whose cost growth is measured."""


def _quantize(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    recipe, x = find_recipe(task.recipe), inputs.matrix(task.shape)
    both_halves, amax_given = task.variant.startswith("both"), task.variant.endswith(_GIVEN)
    method = "quantize_both" if both_halves else "quantize"
    scale = torch.full((1,), 16.0, device=inputs.device) if recipe.tensor_scale == "given" else None
    random = (0, 0) if recipe.rounding == "stochastic" else None
    options: dict[str, Any] = {"scale": scale, "random": random}
    arguments = QuantizeArguments(**options)
    if amax_given:
        row, column = native.quantize_both(x, recipe, **options)
        quantized = row if both_halves else native.quantize(x, recipe, **options)
        assert quantized is not None
        assert column is not None
        arguments = QuantizeArguments((quantized.amax, column.amax), **options)
        options["amax"] = arguments.amax if both_halves else quantized.amax
    copy, copied = inputs.copy(x)
    reads = 2 if recipe.tensor_scale not in ("none", "given") and not amax_given else 1
    return PreparedTask(
        native=[partial(getattr(native, method), x_copy, recipe, **options) for (x_copy,) in inputs.copies(x)],
        reference=[partial(getattr(reference, method), x, recipe, **options)],
        judge=partial(judge_halves if both_halves else judge_quantized, x, recipe, arguments),
        # A comparison and a product for each element, and four additions of a butterfly of 16, in each half.
        flop=x.numel() * (1 + both_halves) * 2 + x.numel() * 4 * (recipe.transform is not None),
        read=reads * x.nbytes, ceilings={COPY: copy}, elements=x.numel(), copied=copied,
    )  # fmt: skip


def _dequantize(task: BenchTask, inputs: BenchInputs) -> PreparedTask:
    x = inputs.matrix(task.shape)
    q = native.quantize(x, task.recipe)
    copies = [Quantized(codes, scales, q.amax, q.recipe, q.shape) for codes, scales in inputs.copies(q.codes, q.scales)]
    copy, copied = inputs.copy(x)
    return PreparedTask(
        native=[partial(native.dequantize, q_copy, torch.bfloat16) for q_copy in copies],
        reference=[partial(reference.dequantize, q, torch.bfloat16)],
        judge=lambda values: judge_values(values, q),
        read=nbytes((q.codes, q.scales)), ceilings={COPY: copy}, elements=x.numel(), flop=x.numel(), copied=copied,
    )  # fmt: skip


def _torchao(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torchao's quantize to NVFP4 with a given amax, and to MXFP8, judged in the torchao dialect."""
    given = f"rowwise{_GIVEN}"
    variants = {"nvfp4": given, "mxfp8-e4m3": "rowwise", "mxfp8-e5m2": "rowwise"}
    if task.operation != "quantize" or task.variant != variants.get(task.recipe):
        return None
    x, recipe, amax = inputs.matrix(task.shape), task.recipe, None
    if task.variant == given:
        module, recipe, amax = import_module(f"{_FORMATS}.nvfp4_tensor"), "nvfp4@torchao", native.amax(x)
        call = partial(module.nvfp4_quantize, block_size=16, per_tensor_scale=module.per_tensor_amax_to_scale(amax))
    else:
        module = import_module(f"{_FORMATS}.mx_tensor")
        mode, element = module.ScaleCalculationMode.RCEIL, _FP8[task.recipe.removeprefix("mxfp8-")]
        call = partial(module.to_mx, elem_dtype=element, block_size=32, scaling_mode=mode)

    def judge(result: Any) -> Verdict:
        oracle, verdict = reference.quantize(x, recipe, amax=amax), Verdict()
        scales, codes = (part.view(torch.uint8).view(len(x), -1) for part in result)
        verdict.bytes("scales", scales, oracle.scales)
        verdict.bytes("codes", codes, oracle.codes)
        return verdict

    return Peer([partial(call, x_copy) for (x_copy,) in inputs.copies(x)], judge)


def _compiled(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torch.compile of the reference, for the first size only: every further size compiles again, 4 s beside an
    H200."""
    if not task.id.startswith(_COMPILED) or task.shape != inputs.first:
        return None
    x = inputs.matrix(task.shape)
    amax = native.amax(x) if task.variant.endswith(_GIVEN) else None

    def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = reference.quantize(tensor, task.recipe, amax=amax)
        return q.codes, q.scales

    def judge(result: Any) -> Verdict:
        verdict = Verdict()
        for name, actual, expected in zip(("codes", "scales"), result, quantize(x), strict=True):
            verdict.bytes(name, actual, expected)
        return verdict

    compiled = torch.compile(quantize, dynamic=False)  # integers of a recipe are constants, not dynamic sizes
    return Peer([partial(compiled, x_copy) for (x_copy,) in inputs.copies(x)], judge)


def _launches(x: torch.Tensor) -> Mapping[tuple[str, str], Callable[[], Any]]:
    amax, q = native.amax(x), native.quantize(x, "nvfp4")
    return {
        ("nvfp4", f"quantize{_GIVEN}"): lambda: native.quantize(x, "nvfp4", amax=amax),
        ("nvfp4", "quantize"): lambda: native.quantize(x, "nvfp4"),
        ("nvfp4", "dequantize"): lambda: native.dequantize(q, torch.bfloat16),
    }


BENCH = OperationBench(
    rank=1,
    rows=(
        *(("quantize", name, f"{way}{_GIVEN}") for name in _NVFP4 for way in ("rowwise", "both")),
        *(("quantize", name, way) for name in (*_OWN_AMAX, *_OTHERS) for way in ("rowwise", "both")),
        *(("dequantize", name, "") for name in _DECODED),
    ),
    prepare=lambda task, inputs: (_dequantize if task.operation == "dequantize" else _quantize)(task, inputs),
    further={"8192x8192": _TYPICAL, "4096x14336": _TYPICAL},
    peers={TORCHAO: _torchao, COMPILED: _compiled},
    launches=_launches,
    growth=Growth(
        lambda ops, x: ops.quantize(x, _GROWING),
        lambda x, result: judge_quantized(x, find_recipe(_GROWING), QuantizeArguments(), result),
    ),
)
