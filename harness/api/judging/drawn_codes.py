"""Results of a kernel with random bits of its own: calls of a function, or recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowgauge.harness.api.default_settings import callers_settings
from narrowgauge.harness.checks.bit_equality import different_bits, equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.checks.statistics.correlations import PLAIN_SEED
from narrowgauge.harness.operations.stages.black_box import OTHER_SEEDS
from narrowgauge.harness.operations.stages.quantized import stored_along_rows
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.quantized import Quantized

SECOND_SEED = 1 << 30
"""Seed of the call compared with the first call."""
_PARTS = ("codes", "scales", "amax", "tensor_scale")


class Draws:
    """Results of successive calls. Scales and amax must be the same in all of them."""

    def __init__(self, source: Any, convert: Callable[[Mapping[str, Any]], Quantized]) -> None:
        """`source`: a function from a seed, or a sequence of results. `convert`: parts of a result to a Quantized."""
        if not callable(source) and not (isinstance(source, Sequence) and source):
            raise TypeError(
                f"draws is a function from a seed to (codes, scales), or the list of its results, not "
                f"{type(source).__name__}"
            )
        self.results: list[Any] = []
        """Parts of the results, in the order of the calls."""
        self.repeated = StageResult("repeat", "repeat", 0)
        """Comparison of the scales and amaxes of all calls with those of the first call."""
        self._source, self._convert = source, convert
        self.first = convert(self._call(0))
        """The result of the first call."""

    def codes(self, call: int) -> torch.Tensor | None:
        """Codes of a further call, by its number or a number of `OTHER_SEEDS`: uint8 (M, K), one for each element.

        None for a seed of more than 32 bits, which a function need not take, and for a seed with an offset.
        """
        if call < 0 and OTHER_SEEDS[call] != PLAIN_SEED:
            return None
        number = len(self.results)
        q = self._convert(self._call(SECOND_SEED if call < 0 else call))
        for name in ("scales", "amax", "tensor_scale"):
            one, other = getattr(self.first, name), getattr(q, name)
            if one is None or other is None:
                continue
            self.repeated.compared += one.numel()
            if not equal_bits(one, other):
                self.repeated.mismatches += int(different_bits(one, other).sum())
                text = f"{name} of call {number} differ from {name} of call 0; only codes depend on random bits"
                self.repeated.sentence = self.repeated.sentence or text
        return elements(stored_along_rows(q), q.shape[1], q.recipe)

    def _call(self, seed: int) -> dict[str, Any]:
        number = len(self.results)
        if callable(self._source):
            with callers_settings().in_force():
                result = self._source(seed)
        elif number < len(self._source):
            result = self._source[number]
        else:
            raise ValueError(
                f"draws has {number} results, and this matrix needs more for its statistical tests; give a function "
                "from a seed to a result"
            )
        parts = _parts(result)
        # A kernel may write every result into the same memory.
        copies = {name: part.clone() if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
        self.results.append(copies)
        return copies


def _parts(result: Any) -> dict[str, Any]:
    """Parts of a result by name. Raises TypeError if the result is no tuple and no mapping of parts."""
    if isinstance(result, Mapping):
        parts = dict(result)
    else:
        parts = dict(zip(_PARTS, result, strict=False)) if isinstance(result, (tuple, list)) else {}
    if not {"codes", "scales"} <= parts.keys() <= {*_PARTS} or not 2 <= len(result) <= len(_PARTS):
        raise TypeError(
            f"draws gave {type(result).__name__}; a result is (codes, scales), (codes, scales, amax), or a mapping "
            f"with keys among {', '.join(_PARTS)}"
        )
    return {name: part for name, part in parts.items() if part is not None}
