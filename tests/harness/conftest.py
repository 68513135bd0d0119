"""What all tests of the harness share."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_job_of_github() -> Iterator[None]:
    """Runs that tests make are none of the job's: its page would show their failures."""
    names = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")
    given = {name: os.environ.pop(name) for name in names if name in os.environ}
    yield
    os.environ.update(given)
