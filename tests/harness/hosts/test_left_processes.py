from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowgauge.harness.hosts import starter
from narrowgauge.harness.hosts.remote.left_processes import LeftProcesses
from narrowgauge.harness.hosts.remote_host import hosted_backend
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops
from tests.harness.sample_backends import QUANTIZE
from tests.paths import ROOT

SHARED = "NARROWGAUGE_TEST_SHARED"
"""Environment variable with the begin of the paths of files in /dev/shm."""


def shared(name):
    """The path of a file in /dev/shm, for this test alone."""
    return Path(f"{os.environ[SHARED]}-{name}")


class Files:
    """The reference, with a new file in /dev/shm, and an opened file of a second process. Both stay open."""

    def quantize(self, x, recipe):
        opened = [shared("opened").open()] if shared("opened").exists() else []
        self.files = [shared("made").open("wb"), *opened]
        return ops.quantize(x, recipe)


class Daemon:
    """The reference, which leaves a program behind, and kills the parents that would end it."""

    def quantize(self, x, recipe):
        if not (child := os.fork()):
            os.setsid()
            sleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            Path(os.environ["DAEMON"]).write_text(str(sleep.pid))
            os._exit(0)
        os.waitpid(child, 0)
        parent = os.getppid()
        for pid in (starter.parent_of(parent), parent):
            os.kill(pid, signal.SIGKILL)
        time.sleep(5)


@pytest.mark.long
def test_a_process_ends_with_a_run_that_adopts_nothing(tmp_path):
    """As pytest, which is no parent of orphans: the kernel has killed all processes above its own but the run."""
    file = tmp_path / "pid"
    script = f"""if True:
        from narrowgauge.harness.hosts.remote_host import hosted_backend
        from narrowgauge.harness.running.runner import run_case
        from tests.harness.sample_backends import QUANTIZE
        with hosted_backend("{__name__}:Daemon") as backend:
            print(run_case(QUANTIZE, backend).verdict)
    """
    environment = os.environ | {"DAEMON": str(file), "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == "crash\n"
    left = int(file.read_text())
    until = time.monotonic() + 20
    while starter.state_of(left) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.1)
    assert starter.state_of(left) in ("", "Z")


def test_a_process_that_started_since_the_last_look_is_found():
    left = LeftProcesses(os.getpid(), "a marker that no process has")
    assert left.new() == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {process.pid: process for process in left.new()}
        child.kill()
    assert not found[child.pid].copy


def test_shared_memory_of_a_host_ends_with_it():
    """System V shared memory outlives its process; memory of further processes stays."""
    libc = ctypes.CDLL(None)
    mine = libc.shmget(0, 4096, 0o1600)
    told, tell = os.pipe()
    if not (child := os.fork()):
        os.write(tell, str(libc.shmget(0, 4096, 0o1600)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    left = int(os.read(told, 20))
    segments = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    assert {str(mine), str(left)} <= set(segments)
    starter.remove_shared_memory({child})
    segments = [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    libc.shmctl(mine, 0, None)
    assert str(mine) in segments
    assert str(left) not in segments


@pytest.mark.parametrize("ending", ["end", "crash"])
def test_files_in_shared_memory_end_with_their_host(ending, monkeypatch):
    """Files open in a second process stay, and files not opened by the host stay."""
    monkeypatch.setenv(SHARED, f"/dev/shm/narrowgauge-test-{os.getpid()}")
    made, opened, others = map(shared, ("made", "opened", "others"))
    with hosted_backend(f"{__name__}:Files") as backend, opened.open("wb"):
        others.touch()
        assert run_case(QUANTIZE, backend).verdict == "pass"
        assert made.exists()
        if ending == "crash":
            os.kill(backend.host.process, 9)
        backend.host.close()
        found = [path.exists() for path in (made, opened, others)]
    opened.unlink()
    others.unlink()
    assert found == [False, True, True]
