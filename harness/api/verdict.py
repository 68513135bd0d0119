"""The verdict on one result: an object with the report as text, as HTML and as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from html import escape as escape_html
from typing import Any

from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.report.failure_view import explanation_lines, finding_lines
from narrowgauge.harness.report.text import number


@dataclass(frozen=True)
class Verdict:
    """Judgement of a result. All fields are plain data; `str(verdict)` is the report.

    The keys of `explanations`, `findings` and `stages` are those of the columns of the same names in docs/schema.md.
    """

    assertion: str
    """Name of the assertion: `assert_quantized`."""
    subject: str
    """Recipe, shape, dtype and device of the judged result."""
    message: str = ""
    """The first wrong stage, and one sentence: how many elements, how far, and their place. Empty for a pass."""
    explanations: list[dict[str, Any]] = field(default_factory=list)
    """Causes of the first wrong stage. `exact`: the cause gives the bytes of the result; else a pattern."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Details of each wrong stage: first and worst element in bits, counts by place, distributions."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """All judged stages in order."""
    diagnosis_note: str = ""
    """The reason if the diagnosis did not try every known deviation, and the remedy."""
    reproduction: str = ""
    """A shell command that repeats the failure in a fresh process, or the reason for no command. Empty for a pass,
    and if the verdict is from `explain`."""

    @property
    def passed(self) -> bool:
        """Whether every stage is correct."""
        return not self.message

    def to_dict(self) -> dict[str, Any]:
        """All fields, and `passed`, as plain data for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        """The report: cause, sentence, pattern, wrong elements, stages, reproduction."""
        stages = ", ".join(f"{s['stage']} {'✗' if s['sentence'] else '✓'}" for s in self.stages)
        if self.passed:
            compared = sum(stage["compared"] for stage in self.stages)
            lines = [f"pass: {self.subject}: {number(compared)} elements compared", f"stages: {stages}"]
        else:
            exact = [explanation for explanation in self.explanations if explanation["exact"]]
            patterns = [explanation for explanation in self.explanations if not explanation["exact"]]
            lines = [*explanation_lines(exact), self.message, *explanation_lines(patterns)]
            lines += [self.diagnosis_note] if self.diagnosis_note else []
            lines += [f"{self.assertion}: {self.subject}", *finding_lines(self.findings), "", f"stages: {stages}"]
            lines += [self.reproduction] if self.reproduction else []
        return escape("\n".join(lines))

    def _repr_html_(self) -> str:
        """The report for a notebook."""
        title = "pass" if self.passed else "fail"
        return f"<p><b>{title}</b></p><pre>{escape_html(str(self))}</pre>"


class WrongResult(AssertionError):
    """A result is not correct. The text is the report."""

    __module__ = "narrowgauge"  # pytest's last line of a failure then has place for the cause

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict

    def __reduce__(self) -> tuple[type[WrongResult], tuple[Verdict]]:
        return type(self), (self.verdict,)
