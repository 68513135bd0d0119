"""Rows of tokens in the sections of experts: right kernels pass in any order of a section, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge.harness.operations.permute.case import PermuteCase
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference.experts.permute import permute
from tests.harness.sample_backends import backend

Placed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(inputs: str = "routed", **keys: Any) -> PermuteCase:
    given: dict[str, Any] = {
        "shape": (40, 16),
        "dtype": "bf16",
        "experts": 5,
        "choices": 3,
        "alignment": 8,
        "tier": "quick",
    }
    return PermuteCase(inputs=inputs, **given | keys)


def record_of(one: PermuteCase, kernel: Callable[..., Any], **attributes: Any) -> Any:
    return run_case(one, backend(permute=kernel, **attributes))


def with_ids(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Placed]:
    return lambda x, ids, *, experts, **options: permute(x, change(ids, experts), experts=experts, **options)


def reversed_sections(x: torch.Tensor, ids: torch.Tensor, *, experts: int, **options: int) -> Placed:
    _, sources, sizes = permute(x, ids, experts=experts, **options)
    start = 0
    for number, size in enumerate(sizes.tolist()):
        start = number * options["capacity"] if options.get("capacity") else start
        sources[start : start + size] = sources[start : start + size].flip(0)
        start += -(-size // options.get("alignment", 1)) * options.get("alignment", 1)
    return rows_of(x, sources, sources // ids.shape[1]), sources, sizes


def rows_of(x: torch.Tensor, sources: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of tokens, with NaN in rows of no choice."""
    return x[tokens.clamp(min=0) % len(x)].masked_fill((sources < 0).unsqueeze(1), torch.nan)


def moved(token: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[..., Placed]:
    def kernel(x: torch.Tensor, ids: torch.Tensor, **options: int) -> Placed:
        _, sources, sizes = permute(x, ids, **options)
        return rows_of(x, sources, token(sources, ids.shape[1])), sources, sizes

    return kernel


def numbered(source: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Placed]:
    def kernel(x: torch.Tensor, ids: torch.Tensor, **options: int) -> Placed:
        rows, sources, sizes = permute(x, ids, **options)
        return rows, torch.where(sources < 0, sources, source(sources, ids)), sizes

    return kernel


def late(x: torch.Tensor, ids: torch.Tensor, **options: int) -> Placed:
    """Sections that begin at their ends."""
    _, sources, sizes = permute(x, ids, **options)
    aligned = -(-sizes // options["alignment"]) * options["alignment"]
    found = torch.full_like(sources, -1)
    for start, first, size in zip(
        (aligned.cumsum(0) - aligned).tolist(), aligned.cumsum(0).tolist(), sizes.tolist(), strict=True
    ):
        room = found[first : first + size]
        room[:] = sources[start : start + size][: len(room)]
    return rows_of(x, found, found // ids.shape[1]), found, sizes


def once(ids: torch.Tensor, _: int) -> torch.Tensor:
    """Without choices whose expert an earlier choice of the token names."""
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(2)
    return ids.masked_fill(same, -1)


def unaligned(x: torch.Tensor, ids: torch.Tensor, *, experts: int, alignment: int) -> Placed:
    rows = permute(x, ids, experts=experts, alignment=alignment)[0]
    moved_rows, sources, sizes = permute(x, ids, experts=experts)
    more = len(rows) - len(sources)
    return (torch.nn.functional.pad(moved_rows, (0, 0, 0, more)), torch.nn.functional.pad(sources, (0, more), value=-1),
            sizes)  # fmt: skip


def named_gaps(x: torch.Tensor, ids: torch.Tensor, **options: int) -> Placed:
    rows, sources, sizes = permute(x, ids, **options)
    return rows, sources.clamp(min=0), sizes


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "none-is-first-expert": (with_ids(lambda ids, experts: ids.clamp(min=0)), "dropped"),
    "none-is-last-expert": (with_ids(lambda ids, experts: torch.where(ids < 0, experts - 1, ids)), "dropped"),
    "equal-experts-once": (with_ids(once), "routed"),
    "last-choice-left-out": (with_ids(lambda ids, _: torch.cat([ids[:, :-1], ids[:, -1:] * 0 - 1], 1)), "routed"),
    "first-choice-alone": (with_ids(lambda ids, _: torch.cat([ids[:, :1], ids[:, 1:] * 0 - 1], 1)), "routed"),
    "next-expert": (with_ids(lambda ids, experts: torch.where(ids < 0, ids, (ids + 1) % experts)), "dropped"),
    "alignment-ignored": (unaligned, "routed"),
    "section-begins-at-its-end": (late, "even-experts"),
    "choices-in-columns": (numbered(lambda s, ids: s % ids.shape[1] * len(ids) + s // ids.shape[1]), "routed"),
    "tokens-for-choices": (numbered(lambda s, ids: s // ids.shape[1]), "one-expert"),
    "gap-named-first": (named_gaps, "routed"),
    "row-of-choice": (moved(lambda s, k: s), "routed"),
    "row-modulo-choices": (moved(lambda s, k: s % k), "routed"),
    "row-of-next-token": (moved(lambda s, k: s // k + 1), "routed"),
}


@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_kernel_is_named(cause: str) -> None:
    kernel, family = WRONG[cause]
    record = record_of(case(family), kernel)
    assert record.verdict == "fail", record.message
    assert [each["cause"] for each in record.explanations if each["exact"]] == [cause]


def test_rows_that_are_rounded_are_named() -> None:
    def kernel(x: torch.Tensor, ids: torch.Tensor, **options: int) -> Placed:
        rows, sources, sizes = permute(x, ids, **options)
        return rows.bfloat16().float(), sources, sizes

    record = record_of(case(dtype="fp32"), kernel)
    assert [each["cause"] for each in record.explanations] == ["row-rounded-to-bfloat16"]


@pytest.mark.parametrize("keys", [{}, {"alignment": 1, "capacity": 20}, {"alignment": 1}])
@pytest.mark.parametrize("family", ["dropped", "edges", "nan"])
def test_rows_of_a_section_have_any_order(family: str, keys: dict[str, int]) -> None:
    one = case(family, **keys)
    assert record_of(one, reversed_sections).verdict == "pass"
    declared = record_of(one, reversed_sections, declares={"permute": "stable"})
    assert (declared.verdict, declared.stage) == ("fail", "source_rows")
    assert record_of(one, permute, declares={"permute": "stable"}).verdict == "pass"


def test_a_full_section_has_any_choices_of_its_expert() -> None:
    def last_choices(x: torch.Tensor, ids: torch.Tensor, *, experts: int, capacity: int) -> Placed:
        _, sources, sizes = permute(x.flip(0), ids.flip(0).flip(1), experts=experts, capacity=capacity)
        sources = torch.where(sources < 0, sources, ids.numel() - 1 - sources)
        return rows_of(x, sources, sources // ids.shape[1]), sources, sizes

    one = case(alignment=1, capacity=8)
    assert record_of(one, last_choices).verdict == "pass"
    assert record_of(one, last_choices, declares={"permute": "stable"}).stage == "source_rows"


def test_capacity_leaves_out_the_last_choices() -> None:
    x = torch.arange(6.0).view(6, 1)
    rows, sources, sizes = permute(x, torch.tensor([[0, 1]] * 6), experts=2, capacity=4)
    assert sizes.tolist() == [4, 4]
    assert sources.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert rows[:, 0].tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (torch.zeros(4, 2), {}, "expert_ids is torch.float32; it can be int32 or int64"),
        (torch.zeros(3, 2).int(), {}, r"expert_ids has shape \(3, 2\); for x \(4, 8\) it is \(4, k\)"),
        (torch.full((4, 2), 7), {}, "expert_ids holds 7; there are the experts 0 to 2"),
        (torch.zeros(4, 2).int(), {"alignment": 0}, "alignment is 0; it is at least 1"),
    ],
)
def test_wrong_arguments_are_named(ids: torch.Tensor, options: dict[str, int], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        permute(torch.zeros(4, 8), ids, experts=3, **options)
