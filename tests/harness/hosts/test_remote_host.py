"""A case has the same record in process and in a kernel host, also if the repeated run differs from the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from narrowgauge.harness.backends.backend import Backend, load_backend
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.hosts.remote_host import HostSettings, RemoteHost
from narrowgauge.harness.hosts.starter import Channel, starter
from narrowgauge.harness.running.runner import run_case
from tests.matrix import quick_cases

COMPARED = ("verdict", "stage", "input_digest", "output_digest", "stages", "compared", "mismatches", "findings")
LARGEST = 1 << 22
"""Work of the largest case."""


def sample() -> list[Case]:
    """Of each operation, recipe and flag of the quick tier a case, the operations first."""
    quick = (case for case in quick_cases() if not case.repeats)  # as test_repetition.py
    cases = sorted((case for case in quick if case.work < LARGEST), key=lambda case: case.work)
    chosen: dict[Any, Case] = {}
    for key in (lambda case: [case.operation], lambda case: [case.recipe_label], lambda case: case.flags):
        for case in cases:
            for value in key(case):
                chosen.setdefault(value, case)
    return list({case.id: case for case in chosen.values()}.values())


@pytest.fixture(scope="module")
def hosted() -> Iterator[Callable[[str], Backend]]:
    """The backend of a name in a kernel host. A channel has one host at a time."""
    hosts: dict[str, tuple[RemoteHost, Channel]] = {}

    def backend(name: str) -> Backend:
        if name not in hosts:
            channel = Channel(starter().connect())
            hosts[name] = RemoteHost(HostSettings(name), channel), channel
        return Backend(hosts[name][0])

    yield backend
    for host, channel in hosts.values():
        host.close()
        channel.close()


def parts(case: Case, backend: Backend) -> dict[str, Any]:
    record = run_case(case, backend, seed=3).to_dict()
    return {name: record[name] for name in COMPARED}


@pytest.mark.sampled(432)
@pytest.mark.parametrize("case", sample(), ids=lambda case: case.id)
def test_a_case_has_the_same_record_in_a_host(case: Case, hosted: Callable[[str], Backend]) -> None:
    here, there = parts(case, load_backend("reference")), parts(case, hosted("reference"))
    assert there == here
    assert here["verdict"] in ("pass", "unsupported")


KERNELS = """
import itertools

from narrowgauge.reference import ops


class Right:
    def __init__(self):
        self.calls = itertools.count()

    def quantize(self, x, recipe, **options):
        q = ops.quantize(x, recipe, **options)
        return self.changed(q) if next(self.calls) % 2 else q

    def dequantize(self, q, dtype):
        return ops.dequantize(q, dtype)

    def changed(self, q):
        return q


class Wrong(Right):
    def changed(self, q):
        q.codes[0, 0] ^= 1
        return q


class Raising(Right):
    def changed(self, q):
        raise ValueError("not again")


class Unsupported(Right):
    def changed(self, q):
        raise NotImplementedError("not again")


class Short(Right):
    def changed(self, q):
        q.codes = q.codes[:1]
        return q


class Unlike(Right):
    def changed(self, q):
        return (q.codes, q.scales)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The module `repeated_kernels` can be imported, in hosts too."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "repeated_kernels.py").write_text(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("Right", "pass"), ("Wrong", "fail"), ("Raising", "error"), ("Unsupported", "unsupported"),
        ("Short", "error"), ("Unlike", "fail"),
    ],
)  # fmt: skip
def test_a_second_run_that_differs_has_the_same_record(
    name: str, verdict: str, kernels: None, hosted: Callable[[str], Backend]
) -> None:
    case = case_from_labels("quantize", "nvfp4", (32, 48), "bf16", "normal")
    backend = f"repeated_kernels:{name}"
    here, there = parts(case, load_backend(backend)), parts(case, hosted(backend))
    assert there == here
    assert there["verdict"] == verdict
