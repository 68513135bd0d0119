"""The golden vectors are the bytes that Transformer Engine's references gave."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.golden.verify import FOLDER, problems


def test_every_golden_file_has_its_digest() -> None:
    assert not problems()


def test_a_changed_missing_or_new_file_is_named(tmp_path: Path) -> None:
    for name in ("SHA256SUMS", "swizzle_128x4.npz", "swizzle_100x9.npz"):
        shutil.copy(FOLDER / name, tmp_path)
    listed = (tmp_path / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    kept = [
        line for line in listed if line.split()[1] in ("swizzle_128x4.npz", "swizzle_100x9.npz", "swizzle_256x8.npz")
    ]
    (tmp_path / "SHA256SUMS").write_text("\n".join(kept), encoding="utf-8")
    (tmp_path / "swizzle_128x4.npz").write_bytes(b"changed")
    (tmp_path / "new.npz").write_bytes(b"new")
    found = problems(tmp_path)
    assert [line.split()[0] for line in found] == ["swizzle_256x8.npz", "new.npz", "swizzle_128x4.npz"]
