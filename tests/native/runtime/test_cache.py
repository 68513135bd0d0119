"""The cache of compiled kernels: keys, bad entries, unsafe folders, several processes at once, failed builds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.native.runtime import cache as cache_module
from narrowgauge.native.runtime import host
from narrowgauge.native.runtime.cache import cache_folder, cache_key, cached
from narrowgauge.native.runtime.sources import ToolchainError
from tests.native.launching import Source

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache. Temporary folders lie in tmp_path / "tmp"."""
    folder = tmp_path / "cache"
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(cache_module, "_process_folder", cache_module._process_folder.__wrapped__)
    return folder


def content(entry: Path) -> str:
    """Content of an entry without its digest."""
    return entry.read_bytes()[: -cache_module._DIGEST_BYTES].decode()


def write(text: str) -> Callable[[Path], object]:
    """A build that makes a file with `text`."""
    return lambda path: path.write_text(text)


def never(_: Path) -> None:
    pytest.fail("built again")


def left(folder: Path) -> list[str]:
    """Names of what is in the cache, but for locks."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# Its folder.


def test_a_file_is_built_once_and_appears_in_one_step(cache: Path) -> None:
    def build(path: Path) -> None:
        assert left(cache) == []
        path.write_text("built")

    assert cached("it.so", build) == cache / "it.so"
    assert left(cache) == ["it.so"]
    assert content(cached("it.so", never)) == "built"
    assert os.listdir(cache.parent / "tmp") == [], "no folder of the build stays"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_others_can_write_neither_a_new_folder_nor_an_entry(cache: Path, umask: int) -> None:
    folder = cache / "above" / "cache"
    before = os.umask(umask)
    try:
        entry = cached("it.so", write("built"), folder=folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, folder.parent, folder)] == [0o700] * 3
    assert not stat.S_IMODE(entry.stat().st_mode) & 0o022
    assert not stat.S_IMODE(entry.with_name("it.so.lock").stat().st_mode) & 0o077


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
    monkeypatch.setattr(host, "_compile", lambda source, program, flags, path: path.write_text("compiled"))
    monkeypatch.setattr("ctypes.CDLL", lambda path: None)
    host._library.cache_clear()
    host.text.cache_clear()
    host.library(source, flags)
    return set(left(cache))


def test_a_library_has_a_text_its_headers_flags_and_a_compiler(
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


# Entries that are not loaded.

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = 65534


def flipped(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[2] ^= 1
    entry.write_bytes(data)


def linked(entry: Path) -> None:
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def replaced(entry: Path, make: Callable[[Path], object]) -> None:
    entry.unlink()
    make(entry)


BAD_ENTRIES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda entry: entry.write_bytes(entry.read_bytes()[:-1]),
    "flipped": flipped,
    "longer": lambda entry: entry.write_bytes(entry.read_bytes() + b"\0"),
    "empty": lambda entry: entry.write_bytes(b""),
    "without digest": lambda entry: entry.write_text("whole"),
    "of another kernel": lambda entry: shutil.copy(cached("another.so", write("another")), entry),
    "writable": lambda entry: entry.chmod(0o664),
    "link": linked,
    "dangling link": lambda entry: replaced(entry, lambda path: path.symlink_to("nowhere")),
    "pipe": lambda entry: replaced(entry, lambda path: os.mkfifo(path, 0o600)),  # a reader would wait for a writer
    "foreign": lambda entry: os.chown(entry, NOBODY, -1),
}


def parameters(table: dict[str, Any], *by_root: str) -> list[Any]:
    """The rows of a table; root alone can prepare the rows `by_root`."""
    return [pytest.param(row, id=name, marks=needs_root if name in by_root else ()) for name, row in table.items()]


@pytest.mark.parametrize("change", parameters(BAD_ENTRIES, "foreign"))
def test_a_damaged_or_foreign_entry_is_built_again(cache: Path, change: Callable[[Path], object]) -> None:
    entry = cached("it.so", write("whole"))
    change(entry)
    with entry.open("rb") if entry.is_file() else contextlib.nullcontext() as mapped:
        found = mapped.read() if mapped else b""
        assert content(cached("it.so", write("again"))) == "again"
        if mapped:
            mapped.seek(0)
            assert mapped.read() == found, "a process that has mapped the old file keeps its bytes"
    assert not entry.is_symlink()
    assert entry.stat().st_uid == os.geteuid()
    assert not entry.stat().st_mode & 0o022
    assert content(cached("it.so", never)) == "again"


# Folders that are not used.


def linked_by_another_user(folder: Path) -> None:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    os.chown(folder, NOBODY, -1, follow_symlinks=False)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


# A change, and words of the warning in their order.
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "group writable": (lambda folder: folder.chmod(0o770), "write {folder} (mode 0770) chmod go-w {folder}"),
    "world writable": (lambda folder: folder.chmod(0o707), "write {folder} (mode 0707) chmod go-w {folder}"),
    "sticky": (lambda folder: folder.chmod(0o1777), "write {folder} (mode 1777) make a folder in it"),
    "writable parent": (lambda folder: folder.parent.chmod(0o777), "write {above} (mode 0777) chmod go-w {above}"),
    "file": (a_file, "Not a directory"),
    "of another user": (lambda folder: os.chown(folder, NOBODY, -1), f"{{folder}} user {NOBODY}"),
    "parent of another user": (lambda folder: os.chown(folder.parent, NOBODY - 1, -1),
                               f"{{above}} user {NOBODY - 1} replace {{folder}}"),
    "link of another user": (linked_by_another_user, f"{{folder}} user {NOBODY}"),
}  # fmt: skip
BY_ROOT = ("of another user", "parent of another user", "link of another user")


@pytest.mark.parametrize("bad", parameters(BAD_FOLDERS, *BY_ROOT))
def test_an_unsafe_folder_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[Callable[[Path], object], str]
) -> None:
    """The warning names the folder and the remedy."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(folder))
    cached("it.so", write("planted"))
    change, words = bad
    change(folder)
    reason = ".*".join(map(re.escape, words.format(folder=folder, above=folder.parent).split(" ")))
    with pytest.warns(RuntimeWarning, match=rf"not kept in {re.escape(str(folder))}: .*{reason}.*NARROWGAUGE_CACHE"):
        entry = cached("it.so", write("built"))
    assert entry == tmp_path / "tmp" / f"narrowgauge-{os.geteuid()}" / "it.so"
    assert content(entry) == "built"
    with pytest.warns(RuntimeWarning, match="not kept"):
        assert content(cached("it.so", never)) == "built", "other processes of the user find it"


def test_a_folder_with_the_name_of_an_entry_stays(cache: Path) -> None:
    (cache / "it.so" / "kept").mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    with pytest.warns(RuntimeWarning, match=f"Is a directory: .*'{cache}/it.so'"):
        entry = cached("it.so", write("built"))
    assert content(entry) == "built"
    assert left(cache) == ["it.so"]
    assert (cache / "it.so" / "kept").is_dir()


@pytest.mark.parametrize("own", [True, False])
def test_an_unsafe_temporary_folder_is_replaced(cache: Path, tmp_path: Path, own: bool) -> None:
    """Also the folder of a mutant, which is an argument."""
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    shared = tmp_path / "tmp" / f"narrowgauge-{os.geteuid()}"
    shared.symlink_to("/nonexistent")
    with pytest.warns(RuntimeWarning) as warned:
        entry = cached("it.so", write("built"), folder=None if own else cache)
    assert len(warned) == 1 + own
    if own:
        assert str(shared) in str(warned[1].message)
        assert "or set TMPDIR to another folder" in str(warned[1].message)
    assert entry.parent.parent == tmp_path / "tmp"
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert content(entry) == "built"


def test_without_a_safe_folder_the_error_names_every_folder(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    for path in (cache, tmp_path / "tmp"):
        path.chmod(0o777)
    with pytest.warns(RuntimeWarning), pytest.raises(ToolchainError) as raised:
        cached("it.so", never)
    for words in (
        "it.so can be kept in no folder",
        f"{cache} (mode 0777)",
        f"{tmp_path}/tmp (mode 0777)",
        "set TMPDIR",
    ):
        assert words in str(raised.value)


# Several processes.


def build_slowly(path: Path) -> None:
    """Logs the call, then writes in two parts."""
    with (cache_folder() / "calls.log").open("a") as log:
        log.write("x")
    path.write_text("first ")
    time.sleep(0.3)
    path.write_text("first second")


def ask(together: Barrier, answers: Queue[str]) -> None:
    together.wait(timeout=60)
    answers.put(content(cached("shared.so", build_slowly)))


def test_several_processes_build_a_file_once(cache: Path) -> None:
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


def test_a_failed_build_leaves_no_file(cache: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise ToolchainError("no")

    with pytest.raises(ToolchainError, match="no"):
        cached("it.so", fail)
    assert left(cache) == []
    assert content(cached("it.so", write("whole"))) == "whole"


def build_and_die(path: Path) -> None:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def die() -> None:
    cached("it.so", build_and_die)


def test_a_killed_build_leaves_neither_file_nor_lock(cache: Path) -> None:
    killed = SPAWN.Process(target=die)
    killed.start()
    killed.join(timeout=60)
    assert killed.exitcode == -signal.SIGKILL
    assert not (cache / "it.so").exists()
    (cache / "it.so.new").write_text("half")  # as if killed while it writes
    assert content(cached("it.so", write("whole"))) == "whole"
    assert left(cache) == ["it.so"]


# Without a compiler.


@pytest.fixture
def no_compiler_known() -> Iterator[None]:
    """Clears the cached compiler before and after the test."""
    for known in (host.compiler, host._compiler_identity):
        known.cache_clear()
    yield
    for known in (host.compiler, host._compiler_identity):
        known.cache_clear()


TRIVIAL = 'extern "C" __global__ void trivial() {}\n'


@pytest.mark.usefixtures("no_compiler_known")
@pytest.mark.parametrize("cxx", ["/nonexistent", "no-such-compiler"])
def test_a_missing_compiler_is_an_error_with_the_remedy(
    cuda_source: Source, monkeypatch: pytest.MonkeyPatch, cxx: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(ToolchainError, match=rf"{cxx} is not on the PATH.*apt install g\+\+.*CXX"):
        host.library(cuda_source(TRIVIAL + f"// {cxx}"))


@pytest.mark.usefixtures("no_compiler_known")
def test_a_failing_compiler_is_an_error_with_the_command(
    cuda_source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    liar = tmp_path / "liar"
    liar.write_text("#!/bin/sh\necho I am no compiler >&2\nexit 3\n")
    liar.chmod(0o755)
    monkeypatch.setenv("CXX", str(liar))
    with pytest.raises(ToolchainError, match=rf"{liar} -march=native .* failed: I am no compiler"):
        host.library(cuda_source(TRIVIAL + "// liar"))
