"""What compute-sanitizer printed, as findings: kind, place, thread.

Its text, as documented for memcheck, racecheck, initcheck and synccheck: every line begins with `=========`; a finding
is a line with indented lines behind it, which say where, by which thread and at what address; the end is a summary.
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
    """One kind of mistake at one place."""

    kind: str
    """The tool's own words: "Invalid __global__ read of size 4 bytes"."""
    place: str
    """`quantize.cu:12`; nothing where the kernel was built without lines."""
    kernel: str
    thread: str
    """Of the first: `thread (5, 0, 0) of block (0, 0, 0)`; nothing where the tool names none."""
    details: tuple[str, ...]
    """What else the tool says of it, an address above all."""
    count: int = 1

    @property
    def sentence(self) -> str:
        """All of it: what, where, who, how often."""
        where = f" at {self.place}" if self.place else ""
        who = f", {self.thread}" if self.thread else ""
        kernel = f" of {self.kernel}" if self.thread and self.kernel else f", in {self.kernel}" if self.kernel else ""
        more = f", {self.count} times" if self.count > 1 else ""
        details = f" ({'; '.join(self.details)})" if self.details else ""
        return f"{self.kind}{where}{who}{kernel}{more}{details}"


@dataclass(frozen=True)
class ToolReport:
    """What one run of the tool found."""

    findings: tuple[ToolFinding, ...]
    errors: int | None
    """As its summary counts them; None where there is no summary, and the tool did not come to its end."""
    in_torch: int
    """Findings in kernels of torch itself, which are not among `findings`."""

    @property
    def clean(self) -> bool:
        """Whether it came to its end and found nothing. What it counted and is not understood is something."""
        return self.errors is not None and not self.findings and (self.errors == 0 or self.in_torch > 0)


def parse(text: str) -> ToolReport:
    """The report in the tool's text. Equal findings of several threads are one."""
    blocks: list[list[str]] = []
    errors: int | None = None
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        words = line.removeprefix(_PREFIX)
        body = words.strip()
        if summary := _SUMMARY.match(body):
            errors = (errors or 0) + int(summary.group(1) or summary.group(2))
        elif body and not words.startswith("  "):
            blocks.append([body])
        elif body and blocks:
            blocks[-1].append(body)
    found = [_finding(block) for block in blocks if len(block) > 1 and not block[0].startswith(_OTHERS)]
    own = [one for one, torch in found if not torch]
    counts = Counter((one.kind, one.place, one.kernel) for one in own)
    first = {(one.kind, one.place, one.kernel): one for one in reversed(own)}
    merged = tuple(
        ToolFinding(one.kind, one.place, one.kernel, one.thread, one.details, counts[key])
        for key, one in sorted(first.items(), key=lambda item: own.index(item[1]))
    )
    return ToolReport(merged, errors, len(found) - len(own))


def _finding(block: list[str]) -> tuple[ToolFinding, bool]:
    """The finding in the lines of one, and whether it is in a kernel of torch's own."""
    head = _SEVERITY.sub("", block[0])
    told = next((i for i, line in enumerate(block) if line.startswith(("Saved host backtrace", "Host Frame"))), None)
    lines = [head, *block[1:told]]
    text = "\n".join(lines)
    line, thread = _LINE.search(text), _THREAD.search(text)
    kernel = next((match.group(1) for pattern in _KERNEL if (match := pattern.search(text))), "")
    by = ""
    if thread:
        x, y, z, bx, by_, bz = thread.groups()
        by = f"thread ({x}, {y}, {z}) of block ({bx}, {by_}, {bz})"
    details = tuple(part for part in lines[1:] if not part.startswith(("at ", "by thread", "Device Frame")))
    where = next((part for part in lines if re.search(r"\bat \S", part)), "")
    kind = head.split(" at ", 1)[0] if line and head.startswith("Race") else head
    place = f"{line.group(1)}:{line.group(2)}" if line else ""
    return ToolFinding(kind, place, kernel, by, details), any(name in where for name in _TORCH)
