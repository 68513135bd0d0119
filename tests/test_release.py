"""A release: the addresses and notes that docs/release.py writes, and the stable names and versions of the pages."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.api.check_document import document
from narrowgauge.harness.certify import certificate
from narrowgauge.harness.gate import baseline
from narrowgauge.harness.records import history, journal, record
from narrowgauge.harness.tools.bench import bench_row
from narrowgauge.spec import VERSION
from tests.paths import ROOT

HOST = "https://host.example/owner/name"


@pytest.fixture
def release() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "release.py"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "narrowgauge/spec/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_description_of_an_index_has_no_relative_link(release: dict[str, Any], checkout: Path) -> None:
    tag = f"v{VERSION}"
    notes = release["prepare"](checkout, HOST, tag)
    text = (checkout / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"\]\((.+?)\)", text + notes))
    assert f"{HOST}/blob/{tag}/docs/verdicts.md" in targets
    assert release["absolute"]("![page](a.png)", HOST, tag) == f"![page]({HOST}/raw/{tag}/a.png)"
    assert not {target for target in targets if not target.startswith(("https://", "#"))}
    assert f'Changelog = "{HOST}/blob/{tag}/CHANGELOG.md"' in (checkout / "pyproject.toml").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"has \[project.urls\].*clean checkout"):
        release["prepare"](checkout, HOST, tag)


@pytest.mark.parametrize(
    ("tag", "heading", "words"),
    [
        ("v0.0.9", VERSION, [f"v{VERSION}", "v0.0.9", "VERSION"]),
        (f"v{VERSION}", "Unreleased", ["CHANGELOG.md", VERSION]),
    ],
)
def test_an_unfinished_release_is_refused(
    release: dict[str, Any], checkout: Path, tag: str, heading: str, words: list[str]
) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text(encoding="utf-8").replace(f"## {VERSION}\n", f"## {heading}\n"))
    before = (checkout / "README.md").read_bytes()
    with pytest.raises(ValueError, match=r"tag|section") as raised:
        release["prepare"](checkout, HOST, tag)
    assert not [word for word in words if word not in str(raised.value)]
    assert (checkout / "README.md").read_bytes() == before


def test_the_page_of_stability_has_the_versions_of_files() -> None:
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    versions = [
        int(number) for number in re.findall(r"(?m)^\| [^|]+ \| (\d+) \|", page.partition("## Versions of files")[2])
    ]
    assert versions == [
        record.SCHEMA, journal.JOURNAL_VERSION, baseline.FORMAT, certificate.FORMAT, document.SCHEMA, bench_row.SCHEMA,
        history.VERSION,
    ]  # fmt: skip
