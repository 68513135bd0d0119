"""Which tests `make test` leaves to `make test-long`, by measured core-seconds.

`long_tests.txt` names them: a test function with all its items, or one item. `tests/conftest.py` marks these as `long`,
beside the tests that have the mark in their source. To choose anew, with kernels compiled and the machine quiet:

    python -m pytest tests -p tests.long_tests --core-seconds FOLDER -m ""
    python -m tests.long_tests FOLDER
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
ITEM = 0.04
"""Core-seconds above which an item is long, if its test has a shorter one."""
ONLY = 1.0
"""Core-seconds that the shortest item of a test may take."""
TEST = 0.2
"""Core-seconds that the items of a test may take together, if more than three are left."""


def long_tests() -> frozenset[str]:
    """The names in `long_tests.txt`: of test functions, and of items."""
    return frozenset(FILE.read_text().splitlines())


def chosen(seconds: Mapping[str, float]) -> list[str]:
    """The lines of `long_tests.txt`, sorted, from the core-seconds of each item."""
    tests: dict[str, list[str]] = defaultdict(list)
    for item in sorted(seconds, key=lambda item: (seconds[item], item)):
        tests[item.partition("[")[0]].append(item)
    lines: list[str] = []
    for test, items in tests.items():
        kept = [item for item in items if seconds[item] <= ITEM] or [i for i in items[:1] if seconds[i] <= ONLY]
        while len(kept) > 3 and sum(seconds[item] for item in kept) > TEST:
            kept.pop()
        lines += items[len(kept) :] if kept else [test]
    return sorted(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of this plugin."""
    parser.addoption("--core-seconds", type=Path, help="Folder that gets the core-seconds of each item.")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Write the core-seconds of an item, of its subprocesses too, to a file of this process."""
    before = sum(os.times()[:4])
    result = yield
    folder: Path = item.config.getoption("--core-seconds")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / str(os.getpid())).open("a") as file:
        file.write(f"{sum(os.times()[:4]) - before:.3f} {item.nodeid}\n")
    return result


def measured(files: Iterable[Path]) -> dict[str, float]:
    """The core-seconds of each item, from the files of a run."""
    lines = (line.partition(" ") for file in files for line in file.read_text().splitlines())
    return {item: float(seconds) for seconds, _, item in lines}


if __name__ == "__main__":
    FILE.write_text("\n".join(chosen(measured(Path(sys.argv[1]).iterdir()))) + "\n")
