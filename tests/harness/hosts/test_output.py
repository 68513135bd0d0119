"""Stacks of a host, as its judge reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from narrowgauge.harness.backends import local_host
from narrowgauge.harness.hosts.output import _FRAMES, Stack, StackFile

HOST = f'  File "{local_host.__file__}", line 177 in _called\n  File "<string>", line 1 in <module>\n'
LIBRARY = f'  File "{os.__file__}", line 9 in wait\n'


def frame(name: str, line: int = 1, folder: str = "/home/me/kernels") -> str:
    return f'  File "{folder}/{name}.py", line {line} in {name}\n'


def test_the_place_is_the_innermost_line_of_the_user() -> None:
    """Not the first thread in the text, no frame of a library or of the host."""
    text = (
        "Fatal Python error: Segmentation fault\n\n"
        f"Thread 0x1 (most recent call first):\n{frame('prefetch')}\n"
        f"Thread 0x2 (most recent call first):\n{LIBRARY}\n"
        f"Current thread 0x3 (most recent call first):\n{LIBRARY}{frame('inner', 7)}{frame('outer')}{HOST}\n"
        "Extension modules: numpy (total: 1)\n"
    )
    stack = Stack.parse(text)
    assert stack.place == "/home/me/kernels/inner.py:7 in inner"
    assert stack.frames.splitlines() == [
        "os.py:9 in wait", "/home/me/kernels/inner.py:7 in inner", "/home/me/kernels/outer.py:1 in outer",
        "another thread:", "/home/me/kernels/prefetch.py:1 in prefetch",
    ]  # fmt: skip


def test_the_last_fatal_error_counts() -> None:
    """A process that the backend forked can have died before."""
    first, last = (
        f"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n{frame(name)}{HOST}\n"
        for name in ("child", "host")
    )
    assert Stack.parse(first + last).place == "/home/me/kernels/host.py:1 in host"


def test_a_stack_without_a_line_of_the_user_names_a_package() -> None:
    text = f"Current thread 0x1 (most recent call first):\n{LIBRARY}{frame('flash', 3, '/x/site-packages')}{HOST}"
    assert Stack.parse(text).place == "/x/site-packages/flash.py:3 in flash"


def test_a_long_stack_is_cut_and_its_paths_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frames = frame("f", folder=str(tmp_path)) * (_FRAMES + 5)
    lines = Stack.parse(f"Current thread 0x1 (most recent call first):\n{frames}{HOST}").frames.splitlines()
    assert lines == ["f.py:1 in f"] * _FRAMES + ["and 5 more"]


@pytest.mark.parametrize("text", ["", "nonsense", "Current thread 0x1 (most recent call first):\n", "\0" * 9])
def test_without_a_stack_there_is_no_place(text: str) -> None:
    assert Stack.parse(text) == Stack()


def test_a_host_cannot_fill_memory_with_stacks() -> None:
    file = StackFile()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(file.descriptor, 1 << 30)
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(file.descriptor, b"x", 1 << 20)
    os.write(file.descriptor, f"Thread 0x1 (most recent call first):\n{frame('f')}".encode())
    assert file.read().place.endswith("f.py:1 in f")
