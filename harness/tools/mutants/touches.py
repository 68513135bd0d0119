"""Which cases run what a file is of, so that a mutant runs the cases that can find it and no others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.tools.mutants.module_files import MODULE_FILES
from narrowgauge.native.runtime.sources import KERNELS, files_of
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe, recipe

_FUSED_GROUP = 16
"""Groups of other sizes are rotated by a launch of their own."""
_SINGLE = {"swizzle": "swizzle", "update-scale": "delayed", "transform": "hadamard"}
"""Operations that launch one source alone."""
_NAMES: dict[Format, str] = {E4M3: "nvfp4", E8M0: "mx", FP32: "fp8"}
"""What the sources of a recipe are called by, by the format of its scales."""


def _quantizes(r: Recipe, *, strided: bool = False, both: bool = False) -> set[str]:
    """What quantizing takes, of a `strided` tensor, one orientation or `both`."""
    found = {f"quantize_{_NAMES[r.scale]}"}
    if r.tensor_scale == "none":
        return found  # no amax
    if r.transform is not None:
        if r.transform.group == _FUSED_GROUP:
            return found | {"amax_blocks"}
        return found | {"hadamard", "amax"} | ({"amax_blocks"} if strided or both else set())
    if r.granularity == "row":
        return found | {"amax_blocks"}
    return found | ({"amax", "amax_blocks"} if strided else {"amax"})  # a transpose lies without gaps, too


@cache
def sources_of(case: Case) -> frozenset[str]:
    """The sources whose kernels are launched to judge `case` on the native backend; perhaps one amax more."""
    if case.is_module:  # each of its launches is that of an operation, whose own cases tell more for less
        return frozenset()
    if case.operation in _SINGLE:
        return frozenset({_SINGLE[case.operation]})
    rules = list(map(recipe, case.recipes))
    grouped = case.operation.endswith("grouped")
    both = case.usage == "both"
    found = _quantizes(rules[0], strided=grouped or case.view != "contiguous", both=both)
    if case.operation == "quantize" and not both:
        found |= {"dequantize"}
    if case.operation.startswith("gemm"):
        found |= {f"gemm_{_NAMES[rules[0].scale]}"}.union(*map(_quantizes, rules))
        found |= {"pad"} if case.padded else set()
    if case.operation == "gemm-quantized":
        found |= {f"gemm_quantized_{_NAMES[rules[0].scale]}"} | _quantizes(recipe(case.out_recipe))
    return frozenset(found)


def touched_by(file: str, cases: Iterable[Case]) -> list[Case]:
    """The cases that launch a kernel which is made of the kernel file `file`, or run a module which is made of it."""
    if file in MODULE_FILES:
        only = MODULE_FILES[file]
        return [case for case in cases if case.is_module and (not only or case.operation in only)]
    sources = {source for source in KERNELS if file in files_of(source)}
    return [case for case in cases if sources & sources_of(case)]
