"""Peers: installed libraries and torch.compile of the reference, timed beside the kernels. An error of a peer is a
note."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.tools.bench.judge_outputs import Verdict, judge_product
from narrowgauge.harness.tools.bench.operations import BenchInputs, Peer
from narrowgauge.harness.tools.bench.silence_stderr import silence_stderr
from narrowgauge.harness.tools.bench.tasks import GIVEN, BenchTask
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation

TORCHAO, COMPILED, SCALED_MM = "torchao", "torch.compile of the reference", "torch._scaled_mm"
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_COMPILED = ("quantize/nvfp4/rowwise", "quantize/mxfp8-e4m3/rowwise")

Notes = dict[str, str]
"""Why a peer is not measured, by its name."""


def callable_peers(task: BenchTask, inputs: BenchInputs, notes: Notes, *, compiling: bool) -> list[Peer]:
    """Peers that support the task and can be called. Other peers get a note."""
    available = []
    for name, make in _MAKERS.items():
        if name == COMPILED and not compiling:
            notes[name] = "not measured; --compile does, and takes a minute or two"
            continue
        try:
            peer = make(task, inputs)
            if peer is not None:
                with silence_stderr():  # torch.compile prints graph breaks
                    peer.calls[0]()  # compiles, or raises for an unsupported case
                available.append(peer)
        except ImportError as error:
            notes[name] = f"not installed ({error})"
        except Exception as error:  # another version of the library, or an unsupported device
            message = " ".join(str(error).split())[:200]
            notes[f"{name}, {task.recipe}"] = f"raises {type(error).__name__}: {message}"
    return available


def _torchao(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torchao's quantize to NVFP4 with a given amax, and to MXFP8, judged in the torchao dialect."""
    if task.operation != "quantize" or task.recipe not in ("nvfp4", "mxfp8-e4m3", "mxfp8-e5m2"):
        return None
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    call: Callable[[torch.Tensor], Any]
    if task.recipe == "nvfp4":
        if task.variant != f"rowwise{GIVEN}":
            return None
        module = _imported("nvfp4_tensor")
        amax = native.amax(x)
        call = partial(module.nvfp4_quantize, block_size=16, per_tensor_scale=module.per_tensor_amax_to_scale(amax))
        expected = partial(reference.quantize, x, "nvfp4@torchao", amax=amax)
    else:
        if task.variant != "rowwise":
            return None
        module = _imported("mx_tensor")
        mode, element = module.ScaleCalculationMode.RCEIL, _FP8[task.recipe.removeprefix("mxfp8-")]
        call = partial(module.to_mx, elem_dtype=element, block_size=32, scaling_mode=mode)
        expected = partial(reference.quantize, x, task.recipe)

    def judge(result: Any) -> Verdict:
        oracle, verdict = expected(), Verdict()
        scales, codes = (part.view(torch.uint8).view(rows, -1) for part in result)
        verdict.bytes("scales", scales, oracle.scales)
        verdict.bytes("codes", codes, oracle.codes)
        return verdict

    return Peer(TORCHAO, [partial(call, x_copy) for (x_copy,) in inputs.copies(x)], judge)


def _imported(name: str) -> Any:
    with silence_stderr():  # torchao prints which of its extensions do not fit this torch
        return importlib.import_module(f"torchao.prototype.mx_formats.{name}")


def _compiled(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torch.compile of the reference, for the first size only: every further size compiles again, 4 s beside an
    H200."""
    if not any(task.id.startswith(prefix) for prefix in _COMPILED) or task.shape != inputs.first:
        return None
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    amax = native.amax(x) if task.variant.endswith(GIVEN) else None

    def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = reference.quantize(tensor, task.recipe, amax=amax)
        return q.codes, q.scales

    def judge(result: Any) -> Verdict:
        verdict = Verdict()
        for name, actual, expected in zip(("codes", "scales"), result, quantize(x), strict=True):
            verdict.bytes(name, actual, expected)
        return verdict

    compiled = torch.compile(quantize, dynamic=False)  # integers of a recipe are constants, not dynamic sizes
    return Peer(COMPILED, [partial(compiled, x_copy) for (x_copy,) in inputs.copies(x)], judge)


def _scaled_mm(task: BenchTask, inputs: BenchInputs) -> Peer | None:
    """torch's product of FP8 codes. The tensor scales are 1."""
    if (task.operation, task.recipe) != ("gemm", "fp8-current"):
        return None
    m, k, n = task.shape
    unit_scale = torch.ones((), device=inputs.device)
    a, b = (
        replace(native.quantize(inputs.new_matrix(shape), find_recipe(task.recipe)), scales=unit_scale.view(1, 1))
        for shape in ((m, k), (n, k))
    )
    left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))

    def call(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            left, right.T, scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.bfloat16, use_fast_accum=False
        )

    hopper = inputs.device.type == "cuda" and torch.cuda.get_device_capability(inputs.device) == (9, 0)
    order = Summation("aligned-13-32-128") if hopper else Summation()
    return Peer(
        SCALED_MM,
        [partial(call, *operands) for operands in inputs.copies(left, right)],
        lambda y: judge_product(y, [(a, b)], order),
    )


_MAKERS: dict[str, Callable[[BenchTask, BenchInputs], Peer | None]] = {
    TORCHAO: _torchao, COMPILED: _compiled, SCALED_MM: _scaled_mm,
}  # fmt: skip
