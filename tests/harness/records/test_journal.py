"""The journal against its surroundings: a second run, a lost file, a hostile file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.records.folder_lock import LOCK_NAME, FolderInUseError, locked_folder
from narrowgauge.harness.records.journal import (
    FOREIGN_NAME,
    JOURNAL_NAME,
    NOT_IN_HEADER,
    Journal,
    JournalError,
    read,
)
from narrowgauge.harness.report.replace_files import replace_files
from narrowgauge.harness.report.report import ReportError, write_journaled
from tests.harness.runs import record, run, saved, wrong

NASTY = "\x1b[2J\n::error::\u202e"
HOLD = """
import sys
from pathlib import Path
from narrowgauge.harness.records.journal import Journal
from tests.harness.runs import run, record
journal = Journal(Path(sys.argv[1]), run)
journal.add(record("held"))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a running journal in `tmp_path / "run"`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def shapes(folder: Path) -> list[str]:
    return [one["inputs"] for one in read(folder).records]


def test_the_latest_record_of_a_case_counts(tmp_path: Path) -> None:
    first, other, later = record("one"), record("two"), record("one", output_digest="33" * 8)
    found = read(saved(tmp_path / "run", run(first, other, later)))
    assert [(one["case"], one["output_digest"]) for one in found.records] == [
        (first["case"], "33" * 8), (other["case"], "22" * 8)
    ]  # fmt: skip


def test_a_second_process_is_refused_and_changes_nothing(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = (folder / JOURNAL_NAME).read_bytes()

    def report() -> None:
        with replace_files(folder, last="index.html"):
            pytest.fail("the folder is not locked")

    writers: list[tuple[type[Exception], Callable[[], object]]] = [
        (JournalError, lambda: Journal(folder, run)),
        (JournalError, lambda: Journal(tmp_path / "run" / ".." / "run", run)),
        (JournalError, lambda: Journal.resumed(folder, run())),
        (ReportError, lambda: write_journaled([record()], {}, folder, elapsed=1.0)),
        (FolderInUseError, report),
    ]
    for error, writer in writers:
        with pytest.raises(error) as raised:
            writer()
        for words in (str(folder.name), f"process {holder.pid} on ", "in use by", "--report-dir"):
            assert words in str(raised.value)
    assert (folder / JOURNAL_NAME).read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == [LOCK_NAME, JOURNAL_NAME]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_ends_with_its_process(holder: subprocess.Popen[str], tmp_path: Path, sign: signal.Signals) -> None:
    folder = tmp_path / "run"
    holder.send_signal(sign)
    holder.wait()
    resumed = Journal.resumed(folder, run())
    resumed.add(record("more"))
    resumed.close()
    assert shapes(folder) == ["held", "more"]
    assert [path.name for path in folder.iterdir()] == [JOURNAL_NAME]


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A process that a kernel left behind must not refuse the next run."""
    read_end, write_end = os.pipe()
    with locked_folder(tmp_path):
        if not (child := os.fork()):
            os.read(read_end, 1)
            os._exit(0)
    try:
        held = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True, check=False
        )
        assert held.stdout == "held\n", held.stderr
    finally:
        os.write(write_end, b"x")
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def test_a_process_shares_its_own_lock(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    journal = Journal(folder, run)
    with locked_folder(folder), replace_files(folder, last="a") as files:
        (files / "a").write_text("a")
    assert (folder / LOCK_NAME).exists()
    journal.close()
    journal.close()
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(RuntimeWarning, match=r"has no locks \(No locks available\); start no second run"):
        journal = Journal(tmp_path, run)
    journal.add(record("a"))
    journal.close()
    assert shapes(tmp_path) == ["a"]


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK_NAME).symlink_to(tmp_path / "file")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / "link"):
        with pytest.raises(JournalError, match=r"(cannot be written: .*|is no folder); give another --report-dir"):
            Journal(folder, run)
    assert (tmp_path / "file").read_text() == ""


def test_the_text_of_a_lock_file_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    for content, shown in ((NASTY, r"in use by \x1b[2J \::error::\u202e, which"), ("", "in use by another process,")):
        (tmp_path / LOCK_NAME).write_text(content)
        with pytest.raises(JournalError) as raised:
            Journal(tmp_path, run)
        assert shown in str(raised.value)


# A lost file.


def removed(path: Path) -> str:
    path.unlink()
    return "deleted"


def folder_removed(path: Path) -> str:
    shutil.rmtree(path.parent)
    return "deleted"


def replaced(path: Path) -> str:
    (path.parent / "other").write_text("other\n")
    (path.parent / "other").replace(path)
    return "replaced"


def truncated(path: Path) -> str:
    os.truncate(path, 10)
    return "changed"


def lengthened(path: Path) -> str:
    with path.open("a") as file:
        file.write('{"case": "x"}\n')
    return "changed"


def overwritten(path: Path) -> str:
    """Other bytes of the same length, with the time of the bytes before."""
    before = path.stat()
    time.sleep(0.02)  # two ticks of the clock of a file system
    path.write_bytes(path.read_bytes().replace(b'"pass"', b'"fail"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return "changed"


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("change", [removed, folder_removed, replaced, truncated, lengthened, overwritten])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_lost_journal_is_written_again(
    tmp_path: Path, change: Callable[[Path], str], resumed: bool, at_end: bool
) -> None:
    folder = tmp_path / "run"
    path = folder / JOURNAL_NAME
    journal = Journal(folder, run)
    journal.add(record("a"))
    if resumed:
        journal.close()
        journal = Journal.resumed(folder, run())
    journal.add(record("b"))
    verb = change(path)
    left = path.read_bytes() if path.exists() else None
    words = rf"{re.escape(str(path))}: another program has {verb} this journal .* with all earlier records \(2\)"
    with pytest.warns(RuntimeWarning, match=words):
        (journal.close if at_end else lambda: journal.add(record("c")))()
    journal.close()
    assert shapes(folder) == ["a", "b", "c"][: 3 - at_end]
    foreign = folder / FOREIGN_NAME
    assert (foreign.read_bytes() if foreign.exists() else None) == left
    assert b"\0" not in path.read_bytes()


def test_the_loaded_sources_go_on_with_the_journal(tmp_path: Path) -> None:
    """Written when they change, the last line counts; a resumed run has the sources, and a journal written again
    too."""
    journal = Journal(tmp_path, run)
    journal.sources.unverified["k.cu"] = "why"
    journal.add(record("a"))
    journal.add(record("b"))
    journal.sources.entries["variable NV_TILE"] = ""
    journal.close()
    lines = (tmp_path / JOURNAL_NAME).read_text().splitlines()
    assert [json.loads(line)["loaded"] for line in lines if '"loaded"' in line] == [{}, {"variable NV_TILE": ""}]
    resumed = Journal.resumed(tmp_path, run())
    (tmp_path / JOURNAL_NAME).unlink()
    with pytest.warns(RuntimeWarning, match="written again"):
        resumed.add(record("c"))
    resumed.close()
    found = read(tmp_path)
    assert (found.loaded, found.unverified) == ({"variable NV_TILE": ""}, {"k.cu": "why"})


def test_a_folder_that_another_run_took_is_left_to_it(tmp_path: Path) -> None:
    """The folder was deleted with the lock, and a second run began in a new folder of this name."""
    folder = tmp_path / "run"
    journal = Journal(folder, run)
    journal.add(record("a"))
    shutil.rmtree(folder)
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        for name in "bc":
            with pytest.raises(JournalError, match=f"in use by process {other.pid} on "):
                journal.add(record(name))
        other.kill()
    with pytest.raises(JournalError, match="in use by process"):
        journal.add(record("d"))
    journal.close()
    assert shapes(folder) == ["held"]


# A hostile file.

HEADER = json.dumps({key: value for key, value in asdict(run()).items() if key not in NOT_IN_HEADER})
LINE = json.dumps(record("a"))


def header(**changes: Any) -> str:
    return json.dumps(json.loads(HEADER) | changes)


def line(**changes: Any) -> str:
    return json.dumps(record("a") | changes)


def error(**changes: Any) -> str:
    return line(verdict="error", **changes)


HOSTILE: dict[str, tuple[bytes | str, str]] = {
    "empty": (b"", "holds no whole line"),
    "no-line-end": (HEADER, "holds no whole line"),
    "nul": (b"\0" * 41_947 + b"\n", "line 1 is not JSON"),
    "nul-lines": (b"\0\n" * 100, "line 1 is not JSON"),
    "nul-after-header": (f"{HEADER}\n".encode() + b"\0" * 100 + b"\n", "line 2 is not JSON"),
    "nul-in-line": (f"{HEADER}\n{LINE}".replace('"a', '"a\0') + "\n", "line 1 is not JSON|line 2 is not JSON"),
    "blank-line": (f"{HEADER}\n\n{LINE}\n", "line 2 is not JSON"),
    "word": (f"{HEADER}\nnonsense\n", "line 2 is not JSON"),
    "html": ("<!doctype html>\n", "line 1 is not JSON"),
    "list": (f"{HEADER}\n[]\n", "line 2 is list, and not an object"),
    "null": (f"{HEADER}\nnull\n", "line 2 is NoneType, and not an object"),
    "number": (f"{HEADER}\n1e999999\n", "line 2 is float, and not an object"),
    "string": (f'{HEADER}\n"x"\n', "line 2 is str, and not an object"),
    "half-object": (f'{HEADER}\n{{"case": "x",\n', "line 2 is not JSON"),
    "two-objects": (f"{HEADER}\n{LINE}{LINE}\n", "line 2 is not JSON"),
    "single-quotes": (f"{HEADER}\n{{'case': 'a'}}\n", "line 2 is not JSON"),
    "comment": (f"{HEADER}\n// {LINE}\n", "line 2 is not JSON"),
    "latin-1": (HEADER.encode() + b'\n{"case": "\xe9"}\n', "line 2 is not JSON"),
    "overlong-utf-8": (HEADER.encode() + b'\n{"case": "\xc0\xaf"}\n', "line 2 is not JSON"),
    "surrogate-utf-8": (HEADER.encode() + b'\n{"case": "\xed\xa0\x80"}\n', "line 2 is not JSON"),
    "utf-16": (f"{HEADER}\n".encode("utf-16"), "line 1 is not JSON"),
    "utf-32": (f"{HEADER}\n".encode("utf-32-le"), "line 1 is not JSON"),
    "bom": (f"{HEADER}\n".encode("utf-8-sig"), "line 1 is not JSON"),
    "deep-lists": (f"{HEADER}\n{'[' * 200_000}\n", "line 2 is nested too deep"),
    "deep-header": ("[" * 200_000 + "]" * 200_000 + "\n", "line 1 is nested too deep"),
    "deep-objects": (HEADER + "\n" + '{"a":' * 100_000 + "1" + "}" * 100_000 + "\n", "line 2 is nested too deep"),
    "deep-in-record": (f"{HEADER}\n" + LINE.replace('"notes": []', f'"notes": {"[" * 900}{"]" * 900}') + "\n",
                       r"line 2 is nested too deep|notes\[0\] is"),
    "long-integer": (f'{HEADER}\n{{"case": {"9" * 1_000_000}}}\n', "line 2 is not JSON: Exceeds the limit"),
    "long-negative": (f'{HEADER}\n{{"case": -{"9" * 1_000_000}}}\n', "line 2 is not JSON: Exceeds the limit"),
    "long-version": (f'{{"journal": {"1" * 4300}}}\n', "is a journal of version 1111"),
    "long-float": (f'{HEADER}\n{{"elapsed": {"9" * 1_000_000}.5}}\n', ""),
    "double-key": (f'{HEADER}\n{{"case": "x", "case": "y"}}\n', "the key 'case' occurs twice"),
    "double-key-inside": (HEADER + "\n" + LINE.replace('"stages": [{', '"stages": [{"stage": "x", ') + "\n",
                          "the key 'stage' occurs twice"),
    "double-key-header": (HEADER.replace('"seed": 0', '"seed": 0, "seed": 1') + "\n", "the key 'seed' occurs twice"),
    "double-key-nasty": (f'{HEADER}\n{{"\\u001b\\n::x": 1, "\\u001b\\n::x": 2}}\n', r"the key '\\x1b\\n::x' occurs"),
    "no-case": (f"{HEADER}\n{{}}\n", "line 2 is no record: column 'case' is missing"),
    "case-list": (f"{HEADER}\n{line(case=[])}\n", r"line 2 is no record: case is \[\], not str"),
    "case-object": (f"{HEADER}\n{line(case={'a': 1})}\n", "line 2 is no record: case is {'a': 1}, not str"),
    "verdict-number": (f"{HEADER}\n{line(verdict=1)}\n", "line 2 is no record: verdict is 1, not str"),
    "message-number": (f"{HEADER}\n{line(message=1)}\n", "line 2 is no record: message is 1, not str"),
    "seconds-text": (f"{HEADER}\n{line(seconds_total='1')}\n", "seconds_total is '1', not float or None"),
    "compared-bool": (f"{HEADER}\n{line(compared=True)}\n", "compared is True, not int"),
    "compared-float": (f"{HEADER}\n{line(compared=1.5)}\n", "compared is 1.5, not int"),
    "compared-null": (f"{HEADER}\n{line(compared=None)}\n", "compared is None, not int"),
    "stages-object": (f"{HEADER}\n{line(stages={})}\n", "stages is {}, not list"),
    "stages-texts": (f"{HEADER}\n{line(stages=['x'])}\n", r"stages\[0\] is 'x', not object"),
    "notes-text": (f"{HEADER}\n{line(notes='x')}\n", "notes is 'x', not list"),
    "histogram-text": (f"{HEADER}\n{line(budget_histogram=['1'])}\n", r"budget_histogram\[0\] is '1', not int"),
    "loaded-number": (f'{HEADER}\n{{"loaded": {{"file a": 1}}, "unverified": {{}}}}\n', "line 2 is no record"),
    "loaded-alone": (f'{HEADER}\n{{"loaded": {{"file a": "1"}}}}\n', "line 2 is no record"),
    "elapsed-text": (f'{HEADER}\n{{"elapsed": "1"}}\n', "line 2 is no record"),
    "header-lists": (header(backend=["x"]) + "\n", r"line 1 is no header of a run: backend is \['x'\], not str"),
    "header-seed": (header(seed="0") + "\n", "line 1 is no header of a run: seed is '0', not int"),
    "header-cases": (header(cases="x") + "\n", "line 1 is no header of a run: cases is 'x', not list"),
    "header-case": (header(cases=[["x"]]) + "\n", r"line 1 is no header of a run: cases\[0\] is \['x'\], not str"),
    "header-environment": (header(environment={"a": 1}) + "\n", "environment is .*, with a value that is not str"),
    "header-sources": (header(sources=[]) + "\n", "sources is \\[\\], not object"),
    "header-shard": (header(shard=1) + "\n", "shard is 1, not str or None"),
    "header-more": (header(**{"extra\x1b": 1}) + "\n", r"key 'extra\\+x1b' is unknown"),
    "header-version": (header(journal="\x1b[2J\n::error::x") + "\n", r"of version \\x1b\[2J\n\\::error::x with"),
    "header-infinite": (header(schema=float("inf")) + "\n", "with records of schema inf"),
    "nasty-texts": (f"{header(backend=NASTY, cases=[NASTY])}\n{error(message=NASTY, backend=NASTY)}\n", ""),
    "nasty-case": (f"{HEADER}\n{error(message=NASTY, case=NASTY)}\n", "and its columns are those of"),
    "surrogates": (f"{HEADER}\n{error(message=chr(0xD800), backend=chr(0xDFFF))}\n", ""),
    "huge-text": (f"{HEADER}\n{error(message='x' * (1 << 20))}\n", ""),
    "forged-pass": (f"{HEADER}\n{json.dumps(wrong('a', verdict='pass'))}\n", "and the stage 'codes' is wrong"),
    "huge-integers": (f"{HEADER}\n{line(compared=10**4000, seed=-(10**30))}\n", "seed is -10+, not int >= -9223"),
    "not-numbers": (f"{HEADER}\n{line(budget_max=float('nan'), sqnr_db=float('-inf'))}\n", "budget_max is nan"),
    "carriage-returns": (f"{HEADER}\r\n{LINE}\r\n", ""),
    "truncated": (f"{HEADER}\n{LINE}\n{LINE[:50]}", ""),
    "binary-tail": (f"{HEADER}\n{LINE}\n".encode() + bytes(range(128, 256)), ""),
}  # fmt: skip
"""Content of a journal, and the message of its refusal. Empty: it is read, with escaped text."""


@pytest.mark.parametrize(("content", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_journal_is_refused_or_read_as_plain_text(tmp_path: Path, content: bytes | str, words: str) -> None:
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if words:
        with pytest.raises(JournalError, match=words) as raised:
            read(tmp_path)
        message = str(raised.value)
        assert message.startswith((str(path), f"{tmp_path}: "))
        assert not set(message) & set("\x1b\u202e\0")
        assert "\n::" not in message
        assert len(message) < 5000 + len(str(path))
    else:
        found = read(tmp_path)
        texts = [found.backend, *found.cases, *(one[name] for one in found.records for name in ("case", "message"))]
        assert not any(set(text) & set("\x1b\u202e\ud800\udfff") or "\n::" in text for text in texts)
        assert max((len(text) for text in texts), default=0) <= 1 << 16
        assert len(found.records) == (0 if "elapsed" in str(content)[-2_000_000:] and not found.records else 1)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_a_journal_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / JOURNAL_NAME
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    with pytest.raises(JournalError, match=f"{JOURNAL_NAME}: (is no regular file|cannot be read)"):
        read(tmp_path)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    """A sparse file of 1 GiB."""
    path = tmp_path / JOURNAL_NAME
    path.write_text(f"{HEADER}\n")
    os.truncate(path, 1 << 30)
    with pytest.raises(JournalError, match="line 2 is longer than 67108864 bytes"):
        read(tmp_path)


def test_only_a_complete_record_is_resumed(tmp_path: Path) -> None:
    entry = record("a")
    del entry["notes"]
    (tmp_path / JOURNAL_NAME).write_text(f"{HEADER}\n{json.dumps(entry)}\n")
    with pytest.raises(JournalError, match=f"record '{entry['case']}': column 'notes' is missing"):
        Journal.resumed(tmp_path, run())
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]
