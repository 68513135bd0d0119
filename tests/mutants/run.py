"""Mutants of the harness and the reference: single wrong changes; the tests must catch every change.

`make mutants-harness`, or `python -m tests.mutants.run -k gate`. `mutants.toml` holds the changes. Each is applied to a
copy of the checkout, in which the test files of the mutant run up to the first failure, without `cases/`. At the end
the successful tests run on an unchanged copy, and all must pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
IGNORED = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "latest", "build", "dist")
CONTEXT = multiprocessing.get_context("forkserver")
"""Processes of tests are forks of a process that has imported torch, which takes 3 s of a core."""
CONTEXT.set_forkserver_preload(["torch", "pandas", "pytest"])
SECONDS = 600
"""Time limit of a mutant: a change that makes tests hang is not caught. pytest-timeout ends a single test earlier."""


@dataclass(frozen=True)
class Mutant:
    """A wrong change: `before`, which occurs once in `file`, is replaced by `after`."""

    name: str
    file: str
    before: str
    after: str
    wrong: str
    """Why the change is wrong."""
    tests: tuple[str, ...]
    """Test files, or tests of a slow file, that must catch it, the likeliest first."""

    def changed(self, root: Path) -> str:
        """Text of the changed file. Raises ValueError unless `before` occurs once."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: the text to replace occurs {count} times in {self.file}")
        return text.replace(self.before, self.after)


@dataclass(frozen=True)
class Result:
    """Result of a mutant."""

    mutant: Mutant
    caught_by: str
    """Test that failed. Empty: the mutant survived, or its tests ended in another way than by a failed test."""
    seconds: float
    output: str


def load() -> list[Mutant]:
    """The mutants of the table, in order."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def run_tests(tree: Path, tests: list[str]) -> tuple[int | None, str, str]:
    """Run tests in a copy of the checkout up to the first failure: exit status, the test that failed, the output."""
    file = tree.with_suffix(".txt")
    process = CONTEXT.Process(target=_be_pytest, args=(tree, tests, file))
    process.start()
    process.join(SECONDS)
    process.kill()
    process.join()
    output = file.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    return process.exitcode, failed[-1] if failed and process.exitcode == 1 else "", output


def _be_pytest(tree: Path, tests: list[str], output: Path) -> None:
    """Run pytest in this process, which has imported no module of the checkout."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "narrowgauge")]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    # A core for each copy: threads of torch would take the cores of the others.
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    import pytest
    import torch

    torch.set_num_threads(1)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
    sys.exit(pytest.main([*options, *tests]))


def run(mutant: Mutant, trees: SimpleQueue[Path]) -> Result:
    """Apply a mutant to a free copy, run its tests, and put the file back."""
    tree, started = trees.get(), time.monotonic()
    file = tree / mutant.file
    try:
        file.write_text(mutant.changed(tree), encoding="utf-8")
        _, caught_by, output = run_tests(tree, list(mutant.tests))
    finally:
        shutil.copy2(ROOT / mutant.file, file)  # with its time: Python compares times of sources and compiled files
        trees.put(tree)
    return Result(mutant, caught_by, time.monotonic() - started, output)


def main() -> int:
    """Run the mutants and print a line for each. Exit status 0 if all were caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-k", default="", metavar="REGEX", help="run the mutants whose name or file matches")
    parser.add_argument("-n", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time (default: cores)")
    options = parser.parse_args()
    mutants = [mutant for mutant in load() if re.search(options.k, f"{mutant.name} {mutant.file}")]
    started, results = time.monotonic(), []
    with TemporaryDirectory(prefix="narrowgauge-mutants-") as folder, ThreadPoolExecutor(options.n) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.n):
            trees.put(Path(shutil.copytree(ROOT, Path(folder, str(number)), symlinks=True, ignore=IGNORED)))
        for future in as_completed([pool.submit(run, mutant, trees) for mutant in mutants]):
            results.append(result := future.result())
            how = f"caught by {result.caught_by}" if result.caught_by else f"SURVIVED: {result.mutant.wrong}"
            print(f"{result.mutant.name} ({result.mutant.file}): {how}, {result.seconds:.0f} s", flush=True)
        survivors = [result for result in results if not result.caught_by]
        for result in survivors:
            print(f"\n{result.mutant.name}:\n{result.output[-2000:]}")
        status, _, output = run_tests(trees.get(), sorted({result.caught_by for result in results} - {""}) or ["--co"])
    if status:
        print(f"{output[-4000:]}\na test that caught a mutant fails without it")
    minutes = (time.monotonic() - started) / 60
    print(f"{len(results) - len(survivors)} of {len(results)} mutants caught, {minutes:.1f} minutes")
    return int(bool(survivors or status))


if __name__ == "__main__":
    sys.exit(main())
