"""Evidence of a kernel host may fail a kernel and never pass one: the judge reads the guard zones of results itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.guard import Guard
from narrowgauge.harness.backends.guarded_memory import GuardedMemory
from narrowgauge.harness.hosts import serve
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import QUANTIZE

Patch = Callable[[], object]


def set_(owner: Any, name: str, value: Any) -> Patch:
    return lambda: setattr(owner, name, value)


PATCHES: dict[str, Patch] = {
    "honest": lambda: None,
    "violations": set_(Guard, "violations", lambda self: ([], [])),
    "zones": set_(GuardedMemory, "overwritten_zones", lambda self, intact=None: []),
    "end_of_run": set_(serve._Run, "end", lambda self: {"seconds": 0.1, "outside": [], "changed": []}),
    "torch": set_(torch, "count_nonzero", lambda *a, **k: torch.tensor(0)),
    "equal": set_(torch.Tensor, "__ne__", lambda a, b: torch.zeros(1, dtype=torch.bool)),
}
"""Changes of the code that looks for writes outside of tensors."""


class Outside:
    """The reference, which writes a byte beside a result."""

    def __init__(self, patch: Patch, byte: int) -> None:
        self.patch, self.byte = patch, byte

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference."""
        q = ops.quantize(x, recipe)
        codes = torch.empty_like(q.codes).copy_(q.codes)
        self.patch()
        ctypes.memset(codes.data_ptr() + (self.byte if self.byte < 0 else codes.nbytes + self.byte), 1, 1)
        return replace(q, codes=codes)


class Unwritten:
    """A backend that is right in its first calls, and whose host writes no result of a later call."""

    def __init__(self, right: int) -> None:
        self.right = right

    def quantize(self, x: torch.Tensor, recipe: Any) -> Any:
        """As the reference; other codes in later calls."""
        q = ops.quantize(x, recipe)
        self.right -= 1
        if self.right >= 0:
            return q
        set_(serve._Writer, "copy", lambda self: None)()
        return replace(q, codes=q.codes ^ 1)


def __getattr__(name: str) -> Any:
    kind, _, rest = name.partition("_")
    if kind == "unwritten":
        return Unwritten(int(rest))
    if kind in ("before", "behind"):
        return Outside(PATCHES[rest], {"before": -1, "behind": 5}[kind])
    raise AttributeError(name)


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_write_beside_a_result_fails_without_the_host(patch: str, side: str) -> None:
    with hosted_backend(f"{__name__}:{side}_{patch}") as backend:
        record = run_case(QUANTIZE, backend)
    assert (record.verdict, record.stage) == ("fail", "memory"), record.message
    assert f"1 bytes {side} a" in record.message
    assert record.explanations[0]["cause"] == "writes-outside"


@pytest.mark.parametrize(("right", "repeats"), [(1, 0), (2, 1), (2, 5)])
def test_result_that_a_host_does_not_write_is_no_earlier_one(right: int, repeats: int) -> None:
    """The second run is a request of its own, and further calls are one; the bytes of earlier results are gone."""
    with hosted_backend(f"{__name__}:unwritten_{right}") as backend:
        record = run_case(replace(QUANTIZE, repeats=repeats), backend)
    assert (record.verdict, record.stage) == ("fail", "repeat"), record.message


@pytest.mark.parametrize("repeats", [0, 3])
def test_record_says_what_the_host_alone_has_seen(repeats: int) -> None:
    """Of a pass too, but only if the kernels are not trusted."""
    case = replace(QUANTIZE, repeats=repeats)
    for untrusted in (True, False):
        record = run_case(case, Backend.local("right", ops), untrusted=untrusted)
        seen = [note["sentence"] for note in record.notes if note["cause"] == "seen-by-host"]
        assert (record.verdict, len(seen)) == ("pass", untrusted)
        assert all(("the 3 further calls" in sentence) == bool(repeats) for sentence in seen)
