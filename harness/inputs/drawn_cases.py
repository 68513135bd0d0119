"""Cases that a backend cannot know in advance: shapes, input families and the seed of the inputs, drawn from a secret.

A kernel can recognise the published cases by their shapes and give stored results. It cannot recognise a drawn case
before the run prints the secret. The same secret gives the same cases again.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.sections import GIVEN

BITS = 48
"""Bits of a secret: too many to try all secrets, and few enough to type."""
LEAST, MOST = 0.5, 1.5
"""Work of a drawn case divided by the work of its original; the estimated memory is at most `MOST` times as large."""
STRETCH = 2.0
"""Largest factor between a size and its drawn size."""
COARSEST = 128
"""Largest power of two that a drawn size keeps as a divisor: rows of a tile of swizzled scales, columns of a block."""
LIKE_ORIGINAL = 0.75
"""Probability that a drawn size has the same largest power of two as its original. Else the size is any multiple of the
finest power of two."""
ATTEMPTS = 200
"""Draws of a case before its shape stays and only its family is drawn."""
ZEROS = ("zeros", "negative-zeros", "amaxes-zeros")
"""Families of weak tests: nearly every wrong kernel is right on these inputs: drawn only for a case of ZEROS."""

Axis = tuple[str, str, tuple[str, ...], int, int]
"""Operation, recipe, flags, number of sizes, and the index of a size in the shape."""


def new_secret() -> int:
    """A secret from the random numbers of the operating system, at least 0 and below 2**BITS."""
    return secrets.randbits(BITS)


def input_seed(secret: int) -> int:
    """The seed of the inputs of a run with this secret, at least 0 and below 2**31."""
    return int.from_bytes(hashlib.sha256(f"{secret}|seed".encode()).digest()[:4], "little") >> 1


def drawn_cases(cases: Sequence[Case], secret: int, *, matrix: Iterable[Case] = ()) -> list[Case]:
    """A drawn case for each of `cases`, in order: a new shape, a new input family, and the same remaining fields.

    A drawn size is half to twice its original. It is a multiple of the finest power of two (at most 128) that a size of
    the same operation, recipe and flags has on this axis, so that a drawn case asks no finer alignment of a kernel than
    the known cases do. Sizes of 0 stay 0. Work and memory stay within `LEAST` and `MOST` times those of the original.

    The ids are different, also from the ids of `cases` and of `matrix`, the further known cases. A case
    without a free shape and family, such as a product of 0x0x0 with each of its families in the matrix, stays itself.
    The result depends on `cases`, `matrix` and `secret` alone.
    """
    matrix = [*cases, *matrix]
    finest = _finest(matrix)
    taken = {case.id for case in matrix}
    drawn = []
    for case in cases:
        found = _drawn(case, random.Random(f"{secret}|{case.id}"), finest, taken)
        taken.add(found.id)
        drawn.append(found)
    return drawn


def _drawn(case: Case, draw: random.Random, finest: Mapping[Axis, int], taken: set[str]) -> Case:
    """A case with an id not in `taken`, or `case` itself if all are taken."""
    families = [family for family in case.families() if family not in ZEROS or case.inputs in ZEROS]
    for _ in range(ATTEMPTS):
        changed: dict[str, Any] = {"inputs": draw.choice(families)}
        changed["shape"] = tuple(_size(draw, size, finest[axis]) for axis, size in _axes(case))
        if sections := getattr(case, "sections", ""):
            changed |= _given_sections(draw, sections)
            if "sections" in changed:
                rows = sum(map(int, changed["sections"].partition(":")[2].split(",")))
                changed["shape"] = (rows, *changed["shape"][1:])
        found = replace(case, **changed)
        other = found.shape != case.shape and found.id not in taken
        if other and found.problem() is None and _as_large(found, case):
            return found
    draw.shuffle(families)
    same_shape = (replace(case, inputs=family) for family in families)
    return next((found for found in same_shape if found.problem() is None and found.id not in taken), case)


def _size(draw: random.Random, size: int, finest: int) -> int:
    """A size near `size`, a multiple of `finest`; mostly its largest power of two is that of `size`."""
    if size == 0:
        return 0
    alike = draw.random() < LIKE_ORIGINAL
    unit = _power_of_two(size) if alike else finest
    count = size * STRETCH ** draw.uniform(-1, 1) / unit
    odd = alike and unit < COARSEST
    return unit * (int(count / 2) * 2 + 1 if odd else max(1, round(count)))


def _given_sections(draw: random.Random, sections: str) -> dict[str, str]:
    """`sections` with drawn rows, if the rows of each section are given; else no change."""
    kind, _, rows = sections.partition(":")
    if kind != GIVEN:
        return {}
    drawn = [_size(draw, int(size), 1) for size in rows.split(",")]
    return {"sections": f"{GIVEN}:{','.join(map(str, drawn))}"}


def _as_large(found: Case, case: Case) -> bool:
    """Whether a drawn case takes about the time and at most about the memory of its original."""
    return LEAST * case.work <= found.work <= MOST * case.work and found.memory <= MOST * case.memory


def _axes(case: Case) -> list[tuple[Axis, int]]:
    """The axes of a shape and their sizes."""
    key = (case.operation, case.recipe_label, case.flags, len(case.shape))
    return [((*key, index), size) for index, size in enumerate(case.shape)]


def _finest(cases: Iterable[Case]) -> dict[Axis, int]:
    """The smallest of the powers of two that divide the sizes, by axis."""
    finest: defaultdict[Axis, int] = defaultdict(lambda: COARSEST)
    for case in cases:
        for axis, size in _axes(case):
            finest[axis] = min(finest[axis], _power_of_two(size))
    return finest


def _power_of_two(size: int) -> int:
    """The largest power of two, at most `COARSEST`, that divides `size`."""
    return min(size & -size, COARSEST) if size else COARSEST
