"""The cases that a mutant runs: cases of the kernel or module that the mutant changes, cheap cases first."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.tools.mutants.module_files import MODULE_FILES
from narrowgauge.harness.tools.mutants.mutant import Mutant
from narrowgauge.native.runtime.sources import KERNELS, files_of
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe, find_recipe

_FUSED_GROUP = 16
"""Groups of other sizes are rotated by a launch of their own."""
_SINGLE = {"swizzle": "swizzle", "update-scale": "delayed", "transform": "hadamard"}
"""Operations that launch one source alone."""
_NAMES: dict[Format, str] = {E4M3: "nvfp4", E8M0: "mx", FP32: "fp8"}
"""What the sources of a recipe are called by, by the format of its scales."""


def _quantizes(recipe: Recipe, *, strided: bool = False, both: bool = False) -> set[str]:
    """What quantizing takes, of a `strided` tensor, one orientation or `both`."""
    found = {f"quantize_{_NAMES[recipe.scale]}"}
    if recipe.tensor_scale == "none":
        return found  # no amax
    if recipe.transform is not None:
        if recipe.transform.group == _FUSED_GROUP:
            return found | {"amax_blocks"}
        return found | {"hadamard", "amax"} | ({"amax_blocks"} if strided or both else set())
    if recipe.granularity == "row":
        return found | {"amax_blocks"}
    return found | ({"amax", "amax_blocks"} if strided else {"amax"})  # a transpose lies without gaps, too


@cache
def sources_of(case: Case) -> frozenset[str]:
    """The sources whose kernels are launched to judge `case` on the native backend; perhaps one amax more."""
    if case.is_module:  # each of its launches is that of an operation, whose own cases tell more for less
        return frozenset()
    if case.operation in _SINGLE:
        return frozenset({_SINGLE[case.operation]})
    rules = list(map(find_recipe, case.recipes))
    grouped = case.operation.endswith("grouped")
    both = case.usage == "both"
    found = _quantizes(rules[0], strided=grouped or case.view != "contiguous", both=both)
    if case.operation == "quantize" and not both:
        found |= {"dequantize"}
    if case.operation.startswith("gemm"):
        found |= {f"gemm_{_NAMES[rules[0].scale]}"}.union(*map(_quantizes, rules))
        found |= {"pad"} if case.padded else set()
    if case.operation == "gemm-quantized":
        found |= {f"gemm_quantized_{_NAMES[rules[0].scale]}"} | _quantizes(find_recipe(case.out_recipe))
    return frozenset(found)


def touched_by(file: str, cases: Iterable[Case]) -> list[Case]:
    """The cases that launch a kernel which is made of the kernel file `file`, or run a module which is made of it."""
    if file in MODULE_FILES:
        only = MODULE_FILES[file]
        return [case for case in cases if case.is_module and (not only or case.operation in only)]
    sources = {source for source in KERNELS if file in files_of(source)}
    return [case for case in cases if sources & sources_of(case)]


_TYPICAL = 13
"""Binary logarithm of how many elements a case has that costs little and still has all kinds of blocks."""


def selected(mutant: Mutant, cases: Iterable[Case]) -> list[Case]:
    """The cases that the change touches, such that a few of any part show much.

    Round robin over operation, recipe and input family, in an order that is drawn by their names: what comes early
    differs in all of them. Of each, the sizes nearest to a typical one come first, empty ones last.
    """
    touched = select(touched_by(mutant.file, cases), keyword=mutant.cases)
    groups: defaultdict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in touched:
        groups[case.operation, case.recipe, case.inputs].append(case)
    drawn = sorted(groups, key=lambda group: hashlib.blake2b(repr(group).encode(), digest_size=8).digest())
    rounds = itertools.zip_longest(*(sorted(groups[group], key=_distance) for group in drawn))
    return [case for one in rounds for case in one if case is not None]


def _distance(case: Case) -> float:
    if case.operation.startswith("gemm"):
        m, k, n = case.shape
        size = m * k + n * k
    else:
        size = math.prod(case.shape)
    return abs(math.log2(size) - _TYPICAL) if size else math.inf
