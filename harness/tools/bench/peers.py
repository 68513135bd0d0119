"""Libraries that are installed, and torch.compile of the reference, beside the kernels. None can end a bench."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.harness.tools.bench.judge import Verdict, judge_product
from narrowgauge.harness.tools.bench.operations import Inputs, Peer
from narrowgauge.harness.tools.bench.silence_stderr import without_stderr
from narrowgauge.harness.tools.bench.tasks import GIVEN, Task
from narrowgauge.native import ops as native
from narrowgauge.reference import ops as reference
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation

TORCHAO, COMPILED, SCALED_MM = "torchao", "torch.compile of the reference", "torch._scaled_mm"
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_COMPILED = ("quantize/nvfp4/rowwise", "quantize/mxfp8-e4m3/rowwise")

Notes = dict[str, str]
"""Why a peer is not measured, by its name."""


def peers(task: Task, inputs: Inputs, notes: Notes, *, compiling: bool) -> list[Peer]:
    """Those that do a task, and could be called. What became of the others is a note."""
    found = []
    for name, make in _MAKERS.items():
        if name == COMPILED and not compiling:
            notes[name] = "not measured; --compile does, and takes a minute or two"
            continue
        try:
            peer = make(task, inputs)
            if peer is not None:
                with without_stderr():  # torch.compile tells there what it could not trace
                    peer.calls[0]()  # what it compiles, and what it cannot do
                found.append(peer)
        except ImportError as error:
            notes[name] = f"not installed ({error})"
        except Exception as error:  # a library of another version, or a device that it does not know
            words = " ".join(str(error).split())[:200]
            notes[f"{name}, {task.recipe}"] = f"raises {type(error).__name__}: {words}"
    return found


def _torchao(task: Task, inputs: Inputs) -> Peer | None:
    """Its quantize to NVFP4, by an amax that is given, and to MXFP8; judged in its own dialect."""
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

    return Peer(TORCHAO, [partial(call, some) for (some,) in inputs.copies(x)], judge)


def _imported(name: str) -> Any:
    with without_stderr():  # torchao says there which of its extensions do not fit this torch
        return importlib.import_module(f"torchao.prototype.mx_formats.{name}")


def _compiled(task: Task, inputs: Inputs) -> Peer | None:
    """Of the first size alone: for each further one torch compiles again, four seconds beside an H200."""
    if not any(task.id.startswith(prefix) for prefix in _COMPILED) or task.shape != inputs.first:
        return None
    rows, columns = task.shape
    x = inputs.matrix((rows, columns))
    amax = native.amax(x) if task.variant.endswith(GIVEN) else None

    def plain(some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = reference.quantize(some, task.recipe, amax=amax)
        return q.codes, q.scales

    def judge(result: Any) -> Verdict:
        verdict = Verdict()
        for name, part, other in zip(("codes", "scales"), result, plain(x), strict=True):
            verdict.bytes(name, part, other)
        return verdict

    compiled = torch.compile(plain, dynamic=False)  # an integer of a recipe is no size that may change
    return Peer(COMPILED, [partial(compiled, some) for (some,) in inputs.copies(x)], judge)


def _scaled_mm(task: Task, inputs: Inputs) -> Peer | None:
    """torch's product of FP8 tensors, of codes alone: the scales, one a tensor, are 1."""
    if (task.operation, task.recipe) != ("gemm", "fp8-current"):
        return None
    m, k, n = task.shape
    one = torch.ones((), device=inputs.device)
    a, b = (
        replace(native.quantize(inputs.another(shape), find_recipe(task.recipe)), scales=one.view(1, 1))
        for shape in ((m, k), (n, k))
    )
    left, right = (q.codes.view(torch.float8_e4m3fn) for q in (a, b))

    def call(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False)

    hopper = inputs.device.type == "cuda" and torch.cuda.get_device_capability(inputs.device) == (9, 0)
    order = Summation("aligned-13-32-128") if hopper else Summation()
    return Peer(
        SCALED_MM,
        [partial(call, *some) for some in inputs.copies(left, right)],
        lambda y: judge_product(y, [(a, b)], order),
    )


_MAKERS: dict[str, Callable[[Task, Inputs], Peer | None]] = {
    TORCHAO: _torchao, COMPILED: _compiled, SCALED_MM: _scaled_mm,
}  # fmt: skip
