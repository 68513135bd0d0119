"""Choice of the items that `make test` leaves to `make test-long`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.long_tests import long_tests


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks items as `long`: the tests of `long_tests.txt`, and parameters of a test with the mark `sampled(each)`, but
    for the first of every `each`; 0: all of them.

    Items on a GPU, where a test takes less time, and items that are long already are not counted.
    """
    counts: Counter[str] = Counter()
    listed = long_tests()
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker("long")
        sampled = item.get_closest_marker("sampled")
        if sampled is None or item.get_closest_marker("long") or _on_a_gpu(item):
            continue
        (each,) = sampled.args
        test = item.nodeid.partition("[")[0]
        if not each or counts[test] % each:
            item.add_marker("long")
        counts[test] += 1


def _on_a_gpu(item: pytest.Item) -> bool:
    """Whether an item has the parameter `device` with a GPU."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and str(callspec.params.get("device", "")).startswith("cuda")
