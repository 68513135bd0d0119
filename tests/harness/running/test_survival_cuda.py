"""Faults of a kernel on a GPU: a fault, a hang, too much memory. Each costs its own case, and the run goes on.

To see that it always does: `for i in $(seq 20); do pytest -q -n 0 -k test_survival_cuda || break; done`.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.harness.backends.host import CaseEnd
from narrowgauge.harness.backends.local_host import LocalHost
from narrowgauge.harness.machine.gpu_lock import pop_gpu_error
from narrowgauge.harness.records.journal import read
from narrowgauge.harness.records.record import new_record
from narrowgauge.harness.running import pool
from narrowgauge.harness.running.pool import Settings, run_cases
from narrowgauge.harness.running.runner import _settle
from tests.harness.running.test_survival import case_of, check, move_to, rows_of, select
from tests.harness.sample_backends import QUANTIZE
from tests.paths import PLUGIN

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LIMIT = 20
"""Seconds that a case may take; a process that begins makes a context first."""

KERNELS = r'''
import os
import cupy
import torch
from narrowgauge.reference import ops

SOURCE = """
extern "C" __global__ void fault(int* p) { p[1ull << 40] = 1; }
extern "C" __global__ void trap() { __trap(); }
extern "C" __global__ void hang(volatile int* p) { while (!*p); }
extern "C" __global__ void write(unsigned char* p) { *p ^= 1; }
"""


class Backend:
    def __init__(self):
        self.kernels = cupy.RawModule(code=SOURCE)

    def launch(self, name, *arguments):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            self.kernels.get_function(name)((1,), (1,), arguments)

    def quantize(self, x, recipe):
        q = ops.quantize(x, recipe)
        rows = x.shape[0]
        word = torch.zeros(1, dtype=torch.int32, device=x.device)
        if rows == 17:
            self.launch("fault", word.data_ptr())
        if rows == 18:
            self.launch("hang", word.data_ptr())
        if rows == 19:
            self.launch("trap")
        if rows == 20:
            torch.empty(1 << 42, dtype=torch.uint8, device=x.device)
        if rows == 15:
            self.launch("write", x.data_ptr())
        if rows == 21:
            os._exit(6)
        if rows < 15:  # in smaller shapes too, which its search comes to
            q.codes[0, 0] ^= 1
        return q


class Where:
    """Correct on any GPU; writes the visible GPU into a file."""

    def quantize(self, x, recipe):
        with open(f"gpu-{os.getpid()}", "w") as file:
            file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {torch.cuda.get_device_properties(0).uuid}")
        return ops.quantize(x, recipe)
'''

CRASH = r"the GPU no longer answers this process: \w+: CUDA error: {}.*"
EXPECTED = {
    14: ("fail", r"codes: .*"),
    15: ("fail", r"memory: \d bytes of input x were changed .*"),
    16: ("pass", ""),
    17: ("crash", CRASH.format("an illegal memory access")),
    18: ("timeout", rf"no result after {LIMIT} s at torch/cuda/__init__\.py:\d+ in synchronize"),
    19: ("crash", CRASH.format(r"\w+")),
    20: ("error", r"quantize raised OutOfMemoryError: CUDA out of memory.*"),
    21: ("crash", r"the process died \(exit status 6\)"),
    22: ("pass", ""),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "faulty_cuda.py").write_text(KERNELS)
    move_to(tmp_path, monkeypatch)
    select(tmp_path, EXPECTED)
    return tmp_path


@gpu
@pytest.mark.parametrize("way", ["run", "pytest", "pytest -n"])
def test_faults_of_a_gpu_cost_their_own_cases(folder, way):
    words = {
        "run": ["narrowgauge", "run", "-n", "2"],
        "pytest": ["pytest", "--ng-cases", "cases", "-p", PLUGIN, "-p", "no:cacheprovider"],
        "pytest -n": ["pytest", "--ng-cases", "cases", "-p", PLUGIN, "-p", "no:cacheprovider", "-n", "2"],
    }[way]
    prefix = "--" if way == "run" else "--ng-"
    words += [f"{prefix}backend", "faulty_cuda:Backend", f"{prefix}device", "cuda", "--timeout", str(LIMIT)]
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    check(read(folder / "reports" / "latest").records, EXPECTED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_workers_take_two_gpus_in_turn(folder, monkeypatch):
    monkeypatch.setitem(pool.START, "cuda", 1e-9)  # even small cases are worth a second worker
    settings = Settings("faulty_cuda:Where", "cuda", workers=2)
    records = run_cases([case_of(rows) for rows in range(16, 32)], settings, lambda record: None)
    assert sorted(map(rows_of, records)) == list(range(16, 32))
    assert {record["verdict"] for record in records} == {"pass"}
    named = [path.read_text().split() for path in folder.glob("gpu-*")]
    assert len({name for name, _ in named}) == len({uuid for _, uuid in named}) == 2


# The end of a case, without a GPU.


@pytest.mark.parametrize(
    ("errors", "verdict", "message"),
    [
        ([], "pass", ""),
        (["CUDA error: invalid argument\nmore"], "error", "after the case the GPU reports {}: {}"),
        (["CUDA error: illegal"] * 9, "crash", "the GPU no longer answers this process: {}: {}"),
    ],
)
@pytest.mark.parametrize("before", ["", "quantize raised RuntimeError: no"])
def test_a_late_error_of_a_gpu_is_that_of_its_case(monkeypatch, errors, verdict, message, before):
    left = list(errors)

    def synchronize():
        if left:
            raise RuntimeError(left.pop(0))

    pop_gpu_error()  # an error of other tests
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    end = LocalHost("b", SimpleNamespace(), torch.device("cuda")).end_case()
    assert end.usable is (verdict != "crash")
    record = new_record(QUANTIZE, backend="b", device="cuda", seed=0)
    if before:
        record.verdict, record.message = "error", before
    _settle(record, end)
    assert record.verdict == ("error" if before and not errors else verdict)
    first = errors[0].splitlines()[0] if errors else ""
    tail = f"; before that, error: {before}" if before and errors else ""
    assert record.message == (message.format("RuntimeError", first) + tail if errors else before)


def test_memory_that_ran_out_is_given_back(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    record = new_record(QUANTIZE, backend="b", device="cuda", seed=0)
    _settle(record, CaseEnd())
    assert done == []
    record.verdict, record.message = "error", "quantize raised OutOfMemoryError: CUDA out of memory"
    _settle(record, CaseEnd())
    assert done == ["emptied"]
    assert record.message.startswith("quantize raised")
