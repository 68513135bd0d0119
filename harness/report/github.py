"""Output for a GitHub job: annotations, and the job's summary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from narrowgauge.harness.report import markdown, text
from narrowgauge.harness.report.groups import Group, group

MOST = 10
"""Largest number of annotations of a kind that GitHub accepts from a step."""
_QUIET = ("known", "pass")


def run_link() -> str:
    """Address of the GitHub run of this job. Empty outside of GitHub."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in names)
    return f"{server}/{repository}/actions/runs/{run}" if server and repository and run else ""


def publish(
    records: list[dict[str, Any]],
    environment: dict[str, str],
    elapsed: float | None,
    *,
    link: str,
    print_line: Callable[[str], object],
) -> None:
    """In a GitHub job: call `print_line` with a line for each annotation, and append to the job's summary.

    The first parameters are as in `harness.report.report.write`. The run continues if the summary cannot be written.
    """
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for line in commands(records):
            print_line(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            _append(records, environment, elapsed, link, Path(summary))
        except OSError as error:
            print_line(f"the summary of the job cannot be written: {error}")


def annotate(title: str, message: str, *, print_line: Callable[[str], object]) -> None:
    """In a GitHub job: call `print_line` with an annotation of the job, an error."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print_line(_command("error", {"title": title}, message))


def commands(records: Iterable[dict[str, Any]]) -> list[str]:
    """A workflow command for each group of failures, worst first, at most `MOST`. The last command counts the omitted
    groups."""
    groups = [failure_group for failure_group in group(records) if failure_group.verdict not in _QUIET]
    lines = [_annotation(failure_group) for failure_group in groups[:MOST]]
    if len(groups) > MOST:
        omitted = groups[MOST - 1 :]
        cases = text.plural(sum(len(failure_group.records) for failure_group in omitted), "case")
        message = f"{text.plural(len(omitted), 'more group')} with {cases}; the summary and the report have them"
        lines[-1] = _command("error", {"title": "narrowgauge"}, message)
    return lines


def _append(
    records: list[dict[str, Any]], environment: dict[str, str], elapsed: float | None, link: str, path: Path
) -> None:
    """Append the summary to the earlier output of the step. The earlier output counts against GitHub's limit."""
    before = path.stat().st_size if path.exists() else 0
    content = markdown.render(records, environment, elapsed, link=link, budget=markdown.BUDGET - before - 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{content}" if before and content else content)


def _annotation(failure_group: Group) -> str:
    worst = failure_group.records[0]
    lines = [f"{worst['case']}: {markdown.cut(text.sentence(worst))}"]
    if failure_group.explanation is not None:
        lines.append(markdown.cut(text.explanation(failure_group.explanation)))
    path, line = _place(worst)
    level = "warning" if failure_group.verdict == "unsupported" else "error"
    return _command(
        level, {"file": path, "line": str(line), "title": markdown.cut(failure_group.title)}, "\n".join(lines)
    )


def _place(record: dict[str, Any]) -> tuple[str, int]:
    """The file of a case relative to the repository, and the line of its table."""
    from narrowgauge.harness.cases.case_file import line_of

    path = Path(record["file"]).absolute()
    line = line_of(path, record["case"])
    for root in (os.environ.get("GITHUB_WORKSPACE"), Path.cwd()):
        if root and path.is_relative_to(root):
            return path.relative_to(root).as_posix(), line
    return path.as_posix(), line


def _command(level: str, properties: dict[str, str], message: str) -> str:
    """A workflow command, with escaped line ends and separators."""
    property_list = ",".join(f"{name}={_escape(value, ':,')}" for name, value in properties.items())
    return f"::{level} {property_list}::{_escape(message)}"


def _escape(value: str, extra: str = "") -> str:
    # The percent sign first: escapes begin with a percent sign.
    for sign in ("%", "\r", "\n", *extra):
        value = value.replace(sign, f"%{ord(sign):02X}")
    return value
