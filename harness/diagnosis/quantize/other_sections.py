"""What a section of a grouped quantization takes from another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.reference.quantize.scaling import tensor_scale


def section_deviations(matrices: Sequence[Evidence]) -> Iterator[QuantizeDeviation]:
    """Where there are several sections, each with an amax: those of the amax that they are quantized with."""
    recipe = matrices[0].subject.recipe
    if len(matrices) == 1 or recipe.granularity != "tensor" or recipe.tensor_scale in ("none", "given"):
        return
    first = Run(matrices[0]).amax
    assert first is not None
    for words, amax in (("", first), (", which is empty", torch.zeros_like(first))):
        yield QuantizeDeviation(
            "amax-of-first-section", f"every section is quantized with the amax of the first{words}",
            frozenset({"scales", "codes"}),
            hooks={stage: partial(_by_amax, amax, stage) for stage in ("scales", "codes")},
        )  # fmt: skip


def _by_amax(amax: torch.Tensor, stage: str, run: Run) -> torch.Tensor:
    """The stage by another amax than the one that the kernel shows."""
    other = Run(run.evidence)
    other.amax = amax
    other.encode = tensor_scale(amax, run.recipe, run.x.dtype)
    return other.stage(stage)
