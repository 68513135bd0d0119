from __future__ import annotations

import os
import subprocess
import sys

from narrowgauge.harness.hosts.remote.left_processes import LeftProcesses


def test_a_process_that_started_since_the_last_look_is_found():
    left = LeftProcesses(os.getpid(), "a marker that no process has")
    assert left.new() == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {process.pid: process for process in left.new()}
        child.kill()
    assert not found[child.pid].copy
