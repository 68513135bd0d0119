"""Shared fixtures of the tests of the harness."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import narrowgauge.harness.running.supervisor  # noqa: F401  # runs of `pytester` in this process share its starter

if TYPE_CHECKING:
    from narrowgauge.harness.diagnosis.search.history import SearchHistory


@pytest.fixture(autouse=True, scope="session")
def no_job_of_github() -> Iterator[None]:
    """Runs of tests are no part of the job: its page would show their failures."""
    names = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")
    given = {name: os.environ.pop(name) for name in names if name in os.environ}
    yield
    os.environ.update(given)


@pytest.fixture(scope="session")
def compiler() -> None:
    """torch's compiler, imported for good: a `pytester` with cases in its process would import it and drop it again,
    and a second import fails.
    """
    pytest.importorskip("torch._dynamo")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices on more threads than idle cores take a hundred times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> "SearchHistory":
    """Search history of the diagnosis, shared by all backends of a test."""
    from narrowgauge.harness.diagnosis.search import history

    fresh = history.SearchHistory()
    monkeypatch.setattr(history, "history_of", lambda backend: fresh)
    return fresh


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """The compiler is looked for again, before and after the test."""
    from narrowgauge.native.runtime import host

    host.compiler.cache_clear()
    yield
    host.compiler.cache_clear()
