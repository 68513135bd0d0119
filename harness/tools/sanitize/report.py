"""Findings in the output of compute-sanitizer: kind, place, thread.

The format, as documented for memcheck, racecheck, initcheck and synccheck: every line begins with `=========`. A
finding is a line followed by indented lines with place, thread and address. The last line is a summary.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_PREFIX = "========="
_SEVERITY = re.compile(r"^(Error|Warning): ")
_LINE = re.compile(r"([^\s/]+\.cuh?):(\d+)")
_THREAD = re.compile(r"by thread \((\d+),(\d+),(\d+)\) in block \((\d+),(\d+),(\d+)\)")
_KERNEL = (re.compile(r"\bat (?:void )?(\w+)(?:<.*>)?(?:\(.*\))?\+0x"), re.compile(r"\.cuh?:\d+:(\w+)"))
_SUMMARY = re.compile(r"^(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_OTHERS = ("Program hit", "Saved host backtrace", "COMPUTE-SANITIZER", "Target application")
_TORCH = ("at::", "c10::", "cub::")
"""Namespaces of kernels that torch launches to make and compare tensors."""


@dataclass(frozen=True)
class ToolFinding:
    """A kind of error at a place in a kernel."""

    kind: str
    """The tool's text: "Invalid __global__ read of size 4 bytes"."""
    place: str
    """`quantize.cu:12`; empty if the kernel has no line information."""
    kernel: str
    thread: str
    """First thread: `thread (5, 0, 0) of block (0, 0, 0)`; empty if the tool names no thread."""
    details: tuple[str, ...]
    """Further text of the tool, such as an address."""
    count: int = 1

    @property
    def sentence(self) -> str:
        """Kind, place, thread, kernel and count."""
        location = f" at {self.place}" if self.place else ""
        thread = f", {self.thread}" if self.thread else ""
        kernel = f" of {self.kernel}" if self.thread and self.kernel else f", in {self.kernel}" if self.kernel else ""
        times = f", {self.count} times" if self.count > 1 else ""
        details = f" ({'; '.join(self.details)})" if self.details else ""
        return f"{self.kind}{location}{thread}{kernel}{times}{details}"


@dataclass(frozen=True)
class ToolReport:
    """Findings of a run of the tool."""

    findings: tuple[ToolFinding, ...]
    errors: int | None
    """Number of errors in the summary. None without a summary: the tool did not finish."""
    in_torch: int
    """Findings in torch's own kernels. Not part of `findings`."""

    @property
    def clean(self) -> bool:
        """Whether the tool finished without findings. Errors in its summary without a parsed finding count as
        findings."""
        return self.errors is not None and not self.findings and (self.errors == 0 or self.in_torch > 0)


def parse(text: str) -> ToolReport:
    """Parse the tool's output. Equal findings of several threads are merged."""
    blocks: list[list[str]] = []
    errors: int | None = None
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        indented = line.removeprefix(_PREFIX)
        body = indented.strip()
        if summary := _SUMMARY.match(body):
            errors = (errors or 0) + int(summary.group(1) or summary.group(2))
        elif body and not indented.startswith("  "):
            blocks.append([body])
        elif body and blocks:
            blocks[-1].append(body)
    parsed = [_finding(block) for block in blocks if len(block) > 1 and not block[0].startswith(_OTHERS)]
    findings = [finding for finding, torch in parsed if not torch]
    counts = Counter((finding.kind, finding.place, finding.kernel) for finding in findings)
    first_findings = {(finding.kind, finding.place, finding.kernel): finding for finding in reversed(findings)}
    merged = tuple(
        ToolFinding(finding.kind, finding.place, finding.kernel, finding.thread, finding.details, counts[key])
        for key, finding in sorted(first_findings.items(), key=lambda item: findings.index(item[1]))
    )
    return ToolReport(merged, errors, len(parsed) - len(findings))


def _finding(block: list[str]) -> tuple[ToolFinding, bool]:
    """The finding in a block of lines, and whether it is in a kernel of torch."""
    head = _SEVERITY.sub("", block[0])
    backtrace_start = next(
        (i for i, line in enumerate(block) if line.startswith(("Saved host backtrace", "Host Frame"))), None
    )
    lines = [head, *block[1:backtrace_start]]
    text = "\n".join(lines)
    line, thread = _LINE.search(text), _THREAD.search(text)
    kernel = next((match.group(1) for pattern in _KERNEL if (match := pattern.search(text))), "")
    thread_text = ""
    if thread:
        x, y, z, bx, by_, bz = thread.groups()
        thread_text = f"thread ({x}, {y}, {z}) of block ({bx}, {by_}, {bz})"
    details = tuple(part for part in lines[1:] if not part.startswith(("at ", "by thread", "Device Frame")))
    kernel_line = next((part for part in lines if re.search(r"\bat \S", part)), "")
    kind = head.split(" at ", 1)[0] if line and head.startswith("Race") else head
    place = f"{line.group(1)}:{line.group(2)}" if line else ""
    return ToolFinding(kind, place, kernel, thread_text, details), any(name in kernel_line for name in _TORCH)
