"""What kernels do in place of the layout of swizzled scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Deviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence
from narrowgauge.harness.diagnosis.quantize.swizzles import deviating_layouts, padding_not_zeroed
from narrowgauge.reference.quantize.layout import pad_scales, swizzle

_LAYOUT = frozenset({"layout"})


def arranging_deviations(found: Sequence[Evidence]) -> Iterator[Deviation]:
    """Deviations of the layout of `found`, whose scales are swizzled, the most plausible first."""
    if not found or "layout" not in found[0].shown:
        return
    for number, (cause, sentence, _) in enumerate(deviating_layouts(found[0].shown["scales"])):
        yield Deviation(cause, sentence, _LAYOUT, hooks={"layout": partial(_arranged, number)}, local=False)
    if all(padding_not_zeroed(each.shown["layout"], each.shown["scales"]) for each in found):
        fillings = torch.unique(torch.cat([_padding(each) for each in found]))
        if len(fillings) == 1:
            sentence = f"the padding of swizzled scales is {int(fillings)}, not 0"
        else:
            sentence = f"the padding of swizzled scales is not 0, but {len(fillings)} different bytes"
        # Several bytes are not explained by saying that they are no zeros.
        yield Deviation(
            "padding-not-zeroed", sentence, _LAYOUT, exact=len(fillings) == 1, local=False,
            hooks={"layout": lambda run: run.evidence.shown["layout"]},
        )  # fmt: skip


def _arranged(number: int, run: Run) -> torch.Tensor:
    return list(deviating_layouts(run.scales))[number][2].view(pad_scales(run.scales).shape)


def _padding(each: Evidence) -> torch.Tensor:
    inside = swizzle(torch.ones_like(each.shown["scales"])) == 1
    return each.shown["layout"][~inside]
