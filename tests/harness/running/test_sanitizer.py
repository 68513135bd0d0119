"""--sanitize: a finding is the verdict of its own case, and the run goes on."""

import re
from pathlib import Path

import pytest

from narrowgauge.harness.backends.backend import BackendError
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.pool import Settings, run_cases
from narrowgauge.harness.running.sanitizer import check_sanitizer
from narrowgauge.native.runtime import sanitizer
from narrowgauge.native.runtime.sources import ToolchainError

# The native swizzle, but of 32 rows a scale is read behind the input and thrown away: no byte of a result is wrong.
BACKEND = """
import contextlib
from pathlib import Path

from narrowgauge.native import ops

from narrowgauge.native.runtime import sources

START = "    if (rows == 0 || columns == 0) return;\\n"
READ = "    if (rows == 32 && *const_cast<const volatile u8*>(linear + rows * columns + 9) == 77) return;\\n"
KEPT = contextlib.ExitStack()


class Backend:
    variations = staticmethod(ops.variations)
    swizzle = staticmethod(ops.swizzle)

    def __init__(self):
        before, after = sources.file_text("layout/swizzle.cu").split(START, 1)
        KEPT.enter_context(sources.replaced("layout/swizzle.cu", before + READ + START + after, Path("scratch")))
"""


@pytest.mark.long
def test_a_read_outside_costs_its_own_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reading.py").write_text(BACKEND)
    cases = [case_from_labels("swizzle", "", (rows, 16), "", "bytes") for rows in (31, 32, 33)]
    records = run_cases(cases, Settings("reading:Backend", sanitize=True, timeout=120), lambda record: None)
    assert [record["verdict"] for record in records] == ["pass", "crash", "pass"], records
    assert re.fullmatch(
        r"sanitizer: use-after-poison: reads 1 byte in a guard zone, outside a tensor at swizzle\.cu:\d+, "
        r"thread \(0, 0, 0\) of block \(0, 0, 0\) of swizzle",
        records[1]["message"],
    )


def test_a_gpu_is_sent_to_the_tool_for_it() -> None:
    with pytest.raises(
        BackendError, match="--sanitize is for kernels on a CPU, not on cuda; `narrowgauge sanitize` runs"
    ):
        check_sanitizer("cuda")


def test_a_machine_without_sanitizers_gets_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(findings: Path) -> None:
        raise ToolchainError("--sanitize needs libasan.so of g++")

    monkeypatch.setattr(sanitizer, "environment", environment)
    with pytest.raises(BackendError, match=r"^--sanitize needs libasan\.so of g\+\+$"):
        check_sanitizer("cpu")
