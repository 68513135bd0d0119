"""Takes the reference, and the files of a run, out of the reach of a kernel host (`--untrusted`).

A host enters user, mount and IPC namespaces of its own. In the namespace, empty folders lie over `hidden_folders`: no
code of the host, of its children or of a compiled extension can open their files, and the memory of processes outside
of the user namespace is closed to it. The host then enters a second user namespace. The mounts belong to the first
namespace: the system refuses to take the mounts away. Systems without unprivileged namespaces may have Landlock: the
host may then read files beside these folders only. With Landlock of Linux 6.12 a host cannot send signals to other
processes either.

None of these takes rights away from the judge: the kernel of the system holds them for the process and its children.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = "narrowgauge"
READABLE = ("adapt", "cases", "contract", "contracts", "examples", "native", "spec")
"""Folders of the package that a host may read."""
RUNTIME = ("backends", "cases", "hosts", "machine")
"""Folders of the harness that a host may read: a host runs their code."""
NAMESPACES, LANDLOCK, NOTHING = "namespaces", "Landlock", "nothing"
"""Mechanisms of a separation, the best first."""
NOT_SEPARATED = "kernels-not-separated"
"""Cause of a note: the system lacks a mechanism of `--untrusted`."""
SENTENCES = {
    LANDLOCK: "the system has no unprivileged namespaces: Landlock keeps the reference from the kernels, and they can "
    "write to the files of the run; see docs/untrusted.md",
    NOTHING: "the system has neither unprivileged namespaces nor Landlock: the kernels can read the reference; see "
    "docs/untrusted.md",
}

_NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000
"""CLONE_NEWNS, CLONE_NEWIPC and CLONE_NEWUSER of linux/sched.h."""
_REC, _PRIVATE = 1 << 14, 1 << 18
_EMPTY = 1 | 2 | 4 | 8
"""MS_RDONLY, MS_NOSUID, MS_NODEV and MS_NOEXEC of linux/mount.h."""
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System calls of Landlock, with the same numbers on all architectures."""
_EXECUTE, _READ_FILE, _REFER = 1 << 0, 1 << 2, 1 << 13
"""LANDLOCK_ACCESS_FS_… of linux/landlock.h. A system that does not handle REFER refuses renames between folders."""
_SCOPE_SIGNAL = 1 << 1
_BENEATH = 1


def hidden_folders() -> list[str]:
    """Real paths of the folders with the reference and the judging parts of the harness, and of the repository of a
    checkout, which holds their text too."""
    package = Path(__file__).parents[2]
    hidden = [path for path in package.iterdir() if path.name not in (*READABLE, "harness")]
    hidden += [path for path in (package / "harness").iterdir() if path.name not in RUNTIME]
    root = Path(os.path.realpath(package / "harness")).parent
    hidden += [root / ".git"] * (root != Path(os.path.realpath(package)))
    return sorted({os.path.realpath(path) for path in hidden if path.is_dir() and path.name != "__pycache__"})


def separate(own: Sequence[str]) -> str:
    """Take `hidden_folders`, and the folders `own` of the run, from this process and its children, for ever.

    Gives the mechanism: NAMESPACES, LANDLOCK or NOTHING. The process must have a single thread. The system forgets that
    it ends with its parent.
    """
    reference = hidden_folders()
    present = [folder for folder in map(os.path.realpath, own) if os.path.isdir(folder)]
    # Landlock would refuse new files beside the folders of the run, for example of a compiler.
    ways = ((NAMESPACES, _enter_namespaces, reference + present), (LANDLOCK, _restrict_reads, reference))
    found = NOTHING
    for name, function, folders in ways:
        with suppress(OSError):
            function(folders)
            found = name
            break
    # A change of rights closes /proc/self of a process to all processes of the user, for example its judge.
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)
    return found


def refuse_imports() -> None:
    """Let imports of unreadable modules raise an ImportError with the reason."""
    if not any(isinstance(finder, _RefusingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RefusingFinder())


class _RefusingFinder:
    """Finder that raises for modules out of reach: the finder only gives a message, without protection."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Leaves the module to the next finder. Raises ImportError for a hidden module."""
        root, folder, part = [*name.split("."), "", ""][:3]
        if root == PACKAGE and (folder == "reference" or (folder == "harness" and part not in (*RUNTIME, ""))):
            raise ImportError(f"--untrusted: the reference is not available to a backend: {name}", name=name)
        return None


# ---- namespaces ------------------------------------------------------------------------------------------------------


def _enter_namespaces(folders: Sequence[str]) -> None:
    """Hide folders by mounts. Raises OSError in a process that is not changed, or is of no harm: it sees all files."""
    _unshare()
    _call("mount", b"none", b"/", None, _REC | _PRIVATE, None)
    for folder in folders:
        _call("mount", b"none", os.fsencode(folder), b"tmpfs", _EMPTY, b"mode=555,size=4k")
    # Shared memory that a host leaves behind ends with its namespaces.
    _call("mount", b"none", b"/dev/shm", b"tmpfs", 2 | 4, b"mode=1777")
    _unshare()
    with suppress(OSError):  # before Linux 6.12
        _restrict({}, 0, _SCOPE_SIGNAL)
    with suppress(OSError):
        os.chdir(os.getcwd())  # the current folder may be one of them


def _unshare() -> None:
    """Enter new namespaces, with the same user and group."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        file = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


# ---- Landlock --------------------------------------------------------------------------------------------------------


def _restrict_reads(folders: Sequence[str]) -> None:
    """Allow reads of all files but those in these folders. Files that are made later beside a folder of their paths
    cannot be read: Landlock lists what is allowed. Raises OSError without Landlock."""
    read = _READ_FILE | _EXECUTE
    allowed = {"/": _REFER} | dict.fromkeys(_beside(folders), read)
    try:
        _restrict(allowed, read | _REFER, _SCOPE_SIGNAL)
    except OSError:
        _restrict(allowed, read | _REFER, 0)


def _beside(folders: Sequence[str]) -> list[str]:
    """Files and folders without these folders inside, together all further files of the system."""
    closed = set(folders)
    opened = {str(parent) for folder in folders for parent in Path(folder).parents}
    entries = [os.path.join(folder, name) for folder in sorted(opened) for name in os.listdir(folder)]
    return [entry for entry in entries if entry not in closed | opened and not os.path.islink(entry)]


def _restrict(allowed: dict[str, int], handled: int, scoped: int) -> None:
    """Restrict this process. `allowed`: rights of the set `handled` by file or folder. Raises OSError."""
    rules = _call("syscall", _CREATE_RULESET, struct.pack("=QQQ", handled, 0, scoped), 24 if scoped else 8, 0)
    try:
        for path, rights in allowed.items():
            with suppress(FileNotFoundError, PermissionError):
                file = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    _call("syscall", _ADD_RULE, rules, _BENEATH, struct.pack("=Qi", rights, file), 0)
                finally:
                    os.close(file)
        _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("syscall", _RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Call a function of the C library. Raises OSError."""
    given = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    try:
        result = int(ctypes.CDLL(None, use_errno=True)[name](*given))
    except AttributeError as error:  # another system
        raise OSError(f"there is no {name}") from error
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
