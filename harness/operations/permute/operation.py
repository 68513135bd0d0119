"""The operation permute."""

from __future__ import annotations

import torch

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.inputs import Inputs, Maker
from narrowgauge.harness.operations.operation import Operation
from narrowgauge.harness.operations.permute.case import PermuteCase
from narrowgauge.harness.operations.permute.judge import judge_permute
from narrowgauge.spec.dtypes import TORCH_DTYPES

EDGES = (0, 1, 127, 128, 129)


def expert_ids(family: str, draw: Draw, tokens: int, choices: int, experts: int) -> torch.Tensor:
    """The experts of the choices of tokens in a family, int64 (T, k); −1 for none."""
    ids = draw.below(experts, tokens, choices).long()
    if family == "dropped":
        return ids.masked_fill(draw.one_in(4, tokens, choices), -1)
    if family == "equal-ids":
        return ids[:, :1].repeat(1, choices)
    if family == "one-expert":
        return torch.full_like(ids, experts - 1)
    if family == "even-experts":
        return ids // 2 * 2
    if family == "edges":
        sizes = [EDGES[number % len(EDGES)] for number in range(experts)]
        listed = torch.repeat_interleave(torch.arange(experts), torch.tensor(sizes))[: ids.numel()]
        flat = torch.full((ids.numel(),), -1)
        flat[: len(listed)] = listed
        return flat[draw.words(ids.numel()).argsort(stable=True)].view(tokens, choices)
    return ids


def inputs(make: Maker[PermuteCase]) -> Inputs:
    """x (T, K), normal, and expert_ids (T, k)."""
    case, (tokens, columns) = make.case, make.case.shape
    x = make.draw("x").normal(tokens, columns)
    if case.inputs == "nan":
        row = torch.arange(tokens).unsqueeze(1)
        x = torch.where(row % 3 == 0, torch.nan, torch.where(row % 3 == 1, -torch.inf, x))
    ids = expert_ids(case.inputs, make.draw("expert_ids"), tokens, case.choices, case.experts)
    return Inputs({"x": x.to(TORCH_DTYPES[case.dtype]), "expert_ids": ids})


OPERATION = Operation(case=PermuteCase, inputs=inputs, judge=judge_permute)
