"""The cache of compiled kernels: its keys, several processes at once, builds that fail, and where it lies."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from narrowgauge.native.runtime import host
from narrowgauge.native.runtime.cache import cache_folder, cache_key, cached
from narrowgauge.native.runtime.sources import ToolchainError
from tests.native.launching import Source

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(folder))
    return folder


def left(folder: Path) -> list[str]:
    """Names of what is in the cache, but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# Where it lies.


def test_the_folder_is_the_one_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("NARROWGAUGE_CACHE", "")
    assert cache_folder() == tmp_path / "xdg" / "narrowgauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "narrowgauge"


def test_what_is_built_appears_there_in_one_step_and_is_built_once(cache: Path) -> None:
    files = []

    def build(path: Path) -> None:
        assert not (cache / "it.so").exists()
        path.write_text("built")
        files.append(path.stat().st_ino)

    assert cached("it.so", build) == cache / "it.so"
    assert [(cache / "it.so").stat().st_ino] == files, "the file that was built, not a copy"
    assert left(cache) == ["it.so"]
    assert cached("it.so", lambda _: pytest.fail("built again")).read_text() == "built"


# Keys.


def test_a_key_depends_on_every_part_and_on_where_parts_end() -> None:
    parts = [(), ("",), ("a",), ("b",), ("ab",), ("a", "b"), ("b", "a"), ("a", "", "b"), ("a", "b", "")]
    keys = {cache_key(*p) for p in parts}
    assert len(keys) == len(parts) - 1, "no part and one empty part are the same"
    assert all(re.fullmatch("[0-9a-f]{24}", key) for key in keys)
    assert cache_key("a", "b") == cache_key("a", "b")


KERNEL = '#include "one.cuh"\nextern "C" __global__ void kernel(int* out) { *out = VALUE; }\n'


@pytest.fixture
def kernel(folder: Path) -> str:
    (folder / "one.cuh").write_text("#define VALUE 1\n")
    return KERNEL


def names(cuda_source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch, text: str, *flags: str) -> set[str]:
    """Libraries in the cache after `text` has been compiled into it with `flags`."""
    source = cuda_source(text)
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(cache))
    host._library.cache_clear()
    host.text.cache_clear()
    host.library(source, flags)
    return set(left(cache))


def test_a_library_is_compiled_again_for_another_text_header_flag_or_compiler_and_only_then(
    cuda_source: Source, cache: Path, folder: Path, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = names(cuda_source, cache, monkeypatch, kernel)
    assert len(seen) == 1
    assert names(cuda_source, cache, monkeypatch, kernel) == seen

    assert len(names(cuda_source, cache, monkeypatch, kernel + "\n")) == 2
    assert len(names(cuda_source, cache, monkeypatch, kernel, "-DUNUSED")) == 3
    assert len(names(cuda_source, cache, monkeypatch, kernel, "-DUNUSED=2")) == 4
    (folder / "one.cuh").write_text("#define VALUE 2\n")
    assert len(names(cuda_source, cache, monkeypatch, kernel)) == 5
    monkeypatch.setattr(host, "_compiler_identity", lambda: "another compiler")
    assert len(names(cuda_source, cache, monkeypatch, kernel)) == 6


# Several processes.


def build_slowly(path: Path) -> None:
    """Says that it was called, then writes in two halves."""
    with (path.parents[1] / "calls.log").open("a") as log:
        log.write("x")
    path.write_text("first ")
    time.sleep(0.3)
    path.write_text("first second")


def ask(together: Barrier, answers: Queue[str]) -> None:
    together.wait(timeout=60)
    answers.put(cached("shared.so", build_slowly).read_text())


def test_processes_that_want_the_same_file_build_it_once_and_all_get_the_whole_of_it(cache: Path) -> None:
    answers = SPAWN.Queue()
    together = SPAWN.Barrier(4)
    workers = [SPAWN.Process(target=ask, args=(together, answers)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=60) for _ in workers] == ["first second"] * 4
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert (cache / "calls.log").read_text() == "x"
    assert left(cache) == ["calls.log", "shared.so"]


# Builds that do not end.


def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(cache: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ToolchainError("no")

    with pytest.raises(ToolchainError, match="no"):
        cached("it.so", fail)
    assert left(cache) == []
    assert cached("it.so", lambda path: path.write_text("whole")).read_text() == "whole"


def test_a_build_that_makes_nothing_is_an_error_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cached("it.so", lambda _: None)
    assert left(cache) == []


def build_and_die(path: Path) -> None:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def die() -> None:
    cached("it.so", build_and_die)


def test_a_process_killed_while_it_builds_leaves_neither_the_file_nor_its_lock(cache: Path) -> None:
    killed = SPAWN.Process(target=die)
    killed.start()
    killed.join(timeout=60)
    assert killed.exitcode == -signal.SIGKILL
    assert not (cache / "it.so").exists()
    assert cached("it.so", lambda path: path.write_text("whole")).read_text() == "whole"


# Without a compiler.


@pytest.fixture
def no_compiler_known() -> Iterator[None]:
    """Forgets the compiler before the test and what the test made of it after."""
    for known in (host.compiler, host._compiler_identity):
        known.cache_clear()
    yield
    for known in (host.compiler, host._compiler_identity):
        known.cache_clear()


TRIVIAL = 'extern "C" __global__ void trivial() {}\n'


@pytest.mark.usefixtures("no_compiler_known")
@pytest.mark.parametrize("cxx", ["/nonexistent", "no-such-compiler"])
def test_a_compiler_that_is_not_there_is_an_error_that_names_it_and_the_remedy(
    cuda_source: Source, monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    message = (
        f"native kernels on a CPU need a C++ compiler, and {cxx} is not on the PATH; "
        "install g++ (Debian: apt install g++) or set CXX"
    )
    with pytest.raises(ToolchainError, match=re.escape(message)):
        host.library(cuda_source(TRIVIAL + f"// {cxx}"))


@pytest.mark.usefixtures("no_compiler_known")
def test_without_any_compiler_the_error_names_all_that_were_looked_for(
    cuda_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ToolchainError, match=r"and g\+\+ or clang\+\+ or c\+\+ is not on the PATH; install g\+\+"):
        host.library(cuda_source(TRIVIAL + "// none"))


@pytest.mark.usefixtures("no_compiler_known")
def test_a_compiler_that_does_not_compile_is_an_error_with_the_command(
    cuda_source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    liar = tmp_path / "liar"
    liar.write_text("#!/bin/sh\necho I am no compiler >&2\nexit 3\n")
    liar.chmod(0o755)
    monkeypatch.setenv("CXX", str(liar))
    with pytest.raises(ToolchainError, match=rf"{liar} -march=native .* failed: I am no compiler"):
        host.library(cuda_source(TRIVIAL + "// liar"))
