"""Prepare a checkout for the build of a release: `python docs/release.py REPOSITORY TAG`.

An index shows README.md without the files beside it, and a checkout does not know its own address. This script writes
the address into links and images of README.md and into pyproject.toml, and prints the section of the version in
CHANGELOG.md, the notes of the release. `.github/workflows/release.yml` runs it on a clean checkout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\((?!\w+:|#)([^)\s]+)\)")
"""A Markdown link or image whose target is a file of the checkout."""
URLS = """
[project.urls]
Repository = "{0}"
Documentation = "{0}/blob/{1}/docs/index.md"
Changelog = "{0}/blob/{1}/CHANGELOG.md"
Issues = "{0}/issues"
"""


def absolute(text: str, repository: str, tag: str) -> str:
    """Markdown text with the address of the tagged file in place of each link to a file."""
    return LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({repository}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})", text
    )


def section(changelog: str, version: str) -> str:
    """The section of a version in the changelog. Raises ValueError if there is none."""
    found = re.search(rf"(?ms)^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section '## {version}': rename '## Unreleased' before the tag")
    return found[1].strip() + "\n"


def prepare(root: Path, repository: str, tag: str) -> str:
    """Write the addresses into README.md and pyproject.toml of `root`; the notes of the release.

    Raises ValueError, and changes no file, for a tag other than `v` and the version of the package, an unfinished
    changelog, or a pyproject.toml that has addresses already.
    """
    version = re.search(r'(?m)^VERSION = "(.+)"$', (root / "narrowgauge/spec/__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    if tag != f"v{version[1]}":
        raise ValueError(f"the tag is {tag} and the version {version[1]}: tag v{version[1]}, or change VERSION in spec")
    notes = section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version[1])
    project, readme = root / "pyproject.toml", root / "README.md"
    settings = project.read_text(encoding="utf-8")
    if "[project.urls]" in settings:
        raise ValueError("pyproject.toml has [project.urls]: run this script on a clean checkout")
    project.write_text(settings + URLS.format(repository, tag), encoding="utf-8")
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")
    return absolute(notes, repository, tag)


if __name__ == "__main__":
    try:
        print(prepare(ROOT, *sys.argv[1:]), end="")
    except (TypeError, ValueError) as error:
        sys.exit(f"{error}\nusage: python docs/release.py https://HOST/OWNER/NAME vVERSION")
