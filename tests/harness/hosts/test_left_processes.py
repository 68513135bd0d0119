from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from narrowgauge.harness.hosts import starter
from narrowgauge.harness.hosts.remote.left_processes import LeftProcesses


def test_a_process_that_started_since_the_last_look_is_found():
    left = LeftProcesses(os.getpid(), "a marker that no process has")
    assert left.new() == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {process.pid: process for process in left.new()}
        child.kill()
    assert not found[child.pid].copy


def test_shared_memory_of_a_host_ends_with_it():
    """System V shared memory outlives its process; that of other processes stays."""
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
