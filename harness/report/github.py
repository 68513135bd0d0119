"""What GitHub shows of a run, where it is one of its jobs: annotations, and the job's summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from narrowgauge.harness.report import markdown, text
from narrowgauge.harness.report.groups import Group, group

MOST = 10
"""Annotations of one kind that GitHub takes of a step."""
_QUIET = ("known", "pass")


def run_link() -> str:
    """The address of the run that this is a job of; nothing elsewhere."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in names)
    return f"{server}/{repository}/actions/runs/{run}" if server and repository and run else ""


def publish(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    elapsed: float | None,
    *,
    link: str,
    say: Callable[[str], object],
) -> None:
    """Where this is a job of GitHub: `say` a line for each annotation, and append to the job's summary.

    The parameters are those of `harness.report.report.write`. If the summary cannot be written, the run goes on.
    """
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in commands(records):
            say(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            _append(records, environment, elapsed, link, Path(summary))
        except OSError as error:
            say(f"the summary of the job cannot be written: {error}")


def commands(records: Iterable[dict[str, Any]]) -> list[str]:
    """A workflow command for each group of failures, the worst first, `MOST` at most; the last counts what is left."""
    groups = [one for one in group(records) if one.verdict not in _QUIET]
    lines = [_annotation(one) for one in groups[:MOST]]
    if len(groups) > MOST:
        left = groups[MOST - 1 :]
        cases = text.plural(sum(len(one.records) for one in left), "case")
        words = f"{text.plural(len(left), 'more group')} with {cases}; the summary and the report have them"
        lines[-1] = _command("error", {"title": "narrowgauge"}, words)
    return lines


def _append(
    records: list[dict[str, Any]], environment: dict[str, str], elapsed: float | None, link: str, path: Path
) -> None:
    """Append the summary to what the step wrote before, which counts against GitHub's limit."""
    before = path.stat().st_size if path.exists() else 0
    content = markdown.render(records, environment, elapsed, link=link, budget=markdown.BUDGET - before - 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{content}" if before and content else content)


def _annotation(one: Group) -> str:
    worst = one.records[0]
    count = text.plural(len(one.records), "case")
    title = f"{one.title}: {one.verdict} in {count}"
    words = [f"{worst['case']}: {markdown.cut(text.sentence(worst))}"]
    if one.explanation is not None:
        words.append(markdown.cut(text.explanation(one.explanation)))
    path, line = _place(worst)
    level = "warning" if one.verdict == "unsupported" else "error"
    return _command(level, {"file": path, "line": str(line), "title": markdown.cut(title)}, "\n".join(words))


def _place(record: dict[str, Any]) -> tuple[str, int]:
    """The file of a case, as GitHub names it: relative to the repository; and the line of its table."""
    from narrowgauge.harness.cases.case import line_of

    path = Path(record["file"]).absolute()
    line = line_of(path, record["case"])
    for root in (os.environ.get("GITHUB_WORKSPACE"), Path.cwd()):
        if root and path.is_relative_to(root):
            return path.relative_to(root).as_posix(), line
    return path.as_posix(), line


def _command(level: str, properties: dict[str, str], message: str) -> str:
    """A workflow command. Ends of lines and what ends a property are escaped as its rules say."""
    named = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::{level} {named}::{_escape(message)}"


def _escape(value: str, more: str = "") -> str:
    # The percent sign first: it begins every escape.
    for sign in ("%", "\r", "\n", *more):
        value = value.replace(sign, f"%{ord(sign):02X}")
    return value
