"""A plain checkout runs its case files, installed or not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from narrowgauge.harness.machine.processors import cores

if not entry_points(group="pytest11", name="narrowgauge"):
    # Not in an installed checkout: pytest refuses the name `pytest_plugins` in a conftest.py outside its root.
    pytest_plugins = ["narrowgauge.harness.pytest_plugin.plugin"]

# With CI set, pytest repeats whole messages in its summary, and tests count the lines of an inner pytest.
os.environ.pop("CI", None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests use torch in workers, and workers share the cores. With a thread per core in each worker, tests take twice
    # the time.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collection: a search among twenty thousand live items takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
