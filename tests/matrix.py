"""The shipped cases, loaded once for all tests of a process: 40,000 cases take a second."""

from functools import cache

from narrowgauge.harness.cases.case import Case, select
from narrowgauge.harness.cases.case_file import load_all
from tests.paths import CASES


@cache
def all_cases() -> tuple[Case, ...]:
    """All cases of the folder `cases`."""
    return tuple(load_all([CASES]))


@cache
def quick_cases() -> tuple[Case, ...]:
    """The cases of the quick tier on a CPU."""
    return tuple(select(all_cases(), tier="quick"))
