"""`python -m tests.golden.verify`: compares every golden file with its digest in SHA256SUMS."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def problems(folder: Path = FOLDER) -> list[str]:
    """A sentence per golden file that is changed, missing or not listed."""
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    expected = {name: digest for digest, name in (line.split() for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.npz")}
    changed = [name for name in sorted(found.keys() & expected.keys()) if found[name] != expected[name]]
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{name} is not listed in SHA256SUMS" for name in sorted(found.keys() - expected.keys())),
        *(f"{name} has changed: its digest is {found[name]}" for name in changed),
    ]


def main() -> int:
    """Print every problem; exit status 1 if there is one."""
    wrong = problems()
    print("\n".join(wrong) or "every golden file has its digest")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
