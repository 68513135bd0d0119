"""Makes a plain checkout run its case files, also where narrowgauge is not installed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest

from narrowgauge.harness.machine.processors import cores

if not entry_points(group="pytest11", name="narrowgauge"):
    # pytest refuses this name in a conftest.py outside its root, so an installed checkout has no such name.
    pytest_plugins = ["narrowgauge.harness.pytest_plugin.plugin"]

# Where CI is set pytest repeats whole messages in its summary. Tests that read an inner pytest's output count lines.
os.environ.pop("CI", None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests of this project use torch in the workers, which share the cores. With a thread per core in each worker they
    # take twice the time.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Twenty thousand items, none of which is garbage: looking for some takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
