"""The cases that a mutant runs: cases of the kernel or module that the mutant changes, cheap cases first."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.operations.gemm.case import GemmCase, ProductCase
from narrowgauge.harness.operations.gemm_grouped.case import GroupedGemmCase
from narrowgauge.harness.operations.gemm_quantized.case import QuantizedGemmCase
from narrowgauge.harness.operations.modules.case import ModuleCase
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.tools.mutants.mutant import MODULE_FILES, Mutant
from narrowgauge.native.runtime.sources import KERNELS, files_of
from narrowgauge.spec.formats import E4M3, E8M0, FP32, Format
from narrowgauge.spec.recipes import Recipe, find_recipe

_FUSED_GROUP = 16
"""Rotation group fused into the quantize kernel. Other groups are rotated by a separate launch."""
_SINGLE = {"swizzle": "swizzle", "update-scale": "delayed", "transform": "hadamard"}
"""Operations that launch a single source."""
_NAMES: dict[Format, str] = {E4M3: "nvfp4", E8M0: "mx", FP32: "fp8"}
"""Name of a recipe's sources, by the format of its scales."""


def _quantizes(recipe: Recipe, *, strided: bool = False, both_halves: bool = False) -> set[str]:
    """Sources for quantizing a tensor, `strided` or not, in one orientation or `both_halves`."""
    sources = {f"quantize_{_NAMES[recipe.scale]}"}
    if recipe.tensor_scale == "none":
        return sources  # no amax
    if recipe.transform is not None:
        if recipe.transform.group == _FUSED_GROUP:
            return sources | {"amax_blocks"}
        return sources | {"hadamard", "amax"} | ({"amax_blocks"} if strided or both_halves else set())
    if recipe.granularity == "row":
        return sources | {"amax_blocks"}
    return sources | ({"amax", "amax_blocks"} if strided else {"amax"})  # a transpose is dense too


@cache
def sources_of(case: Case) -> frozenset[str]:
    """Sources of the kernels launched to judge `case` with the native backend; possibly one amax source too many."""
    if isinstance(case, ModuleCase):  # its launches belong to operations with cases of their own, which cost less
        return frozenset()
    if case.operation in _SINGLE:
        return frozenset({_SINGLE[case.operation]})
    recipe, *others = map(find_recipe, case.recipe_names)
    if isinstance(case, QuantizeCase):
        both_halves = case.usage == "both"
        sources = _quantizes(recipe, strided=case.view != "contiguous", both_halves=both_halves)
        return frozenset(sources if both_halves else sources | {"dequantize"})
    strided = bool(case.section_sizes) or getattr(case, "view", "contiguous") != "contiguous"
    sources = _quantizes(recipe, strided=strided)
    if isinstance(case, ProductCase):
        sources = sources.union({f"gemm_{_NAMES[recipe.scale]}"}, _quantizes(recipe), *map(_quantizes, others))
    if isinstance(case, GroupedGemmCase) and case.padded:
        sources |= {"pad"}
    if isinstance(case, GemmCase) and case.scales == "swizzled":
        sources |= {"swizzle"}
    if isinstance(case, QuantizedGemmCase):
        sources |= {f"gemm_quantized_{_NAMES[recipe.scale]}"} | _quantizes(find_recipe(case.out_recipe))
    return frozenset(sources)


def touched_by(file: str, cases: Iterable[Case]) -> list[Case]:
    """Cases that launch a kernel made of the kernel file `file`, or run a module made of it."""
    if file in MODULE_FILES:
        only = MODULE_FILES[file]
        return [case for case in cases if isinstance(case, ModuleCase) and (not only or case.operation in only)]
    sources = {source for source in KERNELS if file in files_of(source)}
    return [case for case in cases if sources & sources_of(case)]


_TYPICAL = 13
"""Binary logarithm of a typical number of elements: a cheap case with all kinds of blocks."""


def selected(mutant: Mutant, cases: Iterable[Case]) -> list[Case]:
    """Cases affected by the mutant, ordered so that the first few differ in every respect.

    Round robin over operation, recipe and input family, in an order drawn from a hash of their names. Within a group
    sizes near a typical size come first, and empty cases last.
    """
    touched = select(touched_by(mutant.file, cases), keyword=mutant.cases)
    groups: defaultdict[tuple[str, str, str], list[Case]] = defaultdict(list)
    for case in touched:
        groups[case.operation, case.recipe_label, case.inputs].append(case)
    drawn = sorted(groups, key=lambda group: hashlib.blake2b(repr(group).encode(), digest_size=8).digest())
    rounds = itertools.zip_longest(*(sorted(groups[group], key=_distance) for group in drawn))
    return [case for round_ in rounds for case in round_ if case is not None]


def _distance(case: Case) -> float:
    if isinstance(case, ProductCase):
        m, k, n = case.shape
        size = m * k + n * k
    else:
        size = math.prod(case.shape)
    return abs(math.log2(size) - _TYPICAL) if size else math.inf
