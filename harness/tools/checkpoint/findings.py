"""Findings of a checkpoint, and where users met mistakes of the same kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from narrowgauge.harness.machine.plain_text import plain_value
from narrowgauge.harness.report.text import number

Severity = Literal["fail", "warning", "note"]
SEEN = {
    "nan-scale": "https://github.com/NVIDIA/Model-Optimizer/issues/1633",
    "packed": "https://github.com/NVIDIA/Model-Optimizer/pull/2038",
    "tensor-scale": "https://github.com/vllm-project/vllm/pull/54444",
    "scales": "https://github.com/vllm-project/vllm/pull/52501",
    "codes": "https://github.com/deepseek-ai/DeepSeek-V3/pull/2",
    "inverted": "https://github.com/modular/modular/issues/6600",
    "never-written": "https://github.com/sgl-project/sglang/pull/33541",
}
"""An issue or pull request about a mistake of the same kind, by the kind of the finding."""
SHOWN = 3
"""Further tensors that a finding names."""
CAUSES = {
    "inverted": ("saturated", "worse-than-zeros", "codes-given-scales", "calibrated", "zero-scale"),
    "tensor-scale": ("saturated", "worse-than-zeros", "codes-given-scales", "inverted"),
    "nibbles": ("worse-than-zeros",),
    "codes-as-numbers": ("plain-tensor",),
    "zero-point": ("worse-than-zeros", "calibrated"),
}
"""Kinds of findings that a failure of a kind explains, in the same matrix."""


def by_cause(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of a matrix, the consequences of a failure below it."""
    found = list(findings)
    for cause in [finding for finding in found if finding.severity == "fail" and finding.kind in CAUSES]:
        below = [other for other in found if other is not cause and other.kind in CAUSES[cause.kind]]
        if cause in found and below:
            texts = tuple(f"{other.tensor}: {other.sentence}" for other in below)
            found = [replace(f, consequences=texts) if f is cause else f for f in found if f not in below]
    return found


def alike(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of equal severity and kind together, in the order of their first finding."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    return list(groups.values())


@dataclass(frozen=True)
class Finding:
    """A finding about a tensor.

    `fail`: the bytes are impossible by the format and the rule, or are not the quantization of the weights. `warning`:
    a statistic with the stated probability of a false alarm, or bytes that need the stated assumption to be right.
    `note`: a fact without a verdict.
    """

    severity: Severity
    kind: str
    tensor: str
    sentence: str
    count: int = 0
    """Wrong elements, blocks or tensors; 0 if the finding is about the tensor as a whole."""
    total: int = 0
    first: str = ""
    """First place, with the stored bytes."""
    expected: str = ""
    consequences: tuple[str, ...] = ()
    """Sentences of findings explained by this finding."""

    @property
    def seen(self) -> str:
        """Address of an issue about the same kind of mistake, or the empty string."""
        return SEEN.get(self.kind, "")

    def lines(self, others: Sequence[Finding] = ()) -> list[str]:
        """The finding for a person. `others`: further tensors with the same finding."""
        count = f" ({number(self.count)} of {number(self.total)})" if self.total else ""
        lines = [f"{self.severity}: {self.tensor}: {self.sentence}{count}"]
        if others:
            names = ", ".join(other.tensor for other in others[:SHOWN])
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            lines.append(f"    the same in {len(others)} further tensors: {names}{more}")
        lines += [f"    consequence: {sentence}" for sentence in self.consequences]
        lines += [f"    first: {self.first}"] if self.first else []
        lines += [f"    expected: {self.expected}"] if self.expected else []
        return lines + ([f"    the same kind of mistake: {self.seen}"] if self.seen else [])

    def to_dict(self) -> dict[str, Any]:
        """All fields, and `seen`, as plain data."""
        found: dict[str, Any] = plain_value({**asdict(self), "seen": self.seen})
        return found


@dataclass
class LayerResult:
    """Judgement of a quantized matrix."""

    name: str
    layout: str
    recipe: str
    shape: tuple[int, int]
    findings: list[Finding] = field(default_factory=list)
    elements: int = 0
    """Elements whose bytes were read."""
    compared: int = 0
    """Elements whose codes were compared with weights."""
    dialect: str = ""
    """Dialects that give the scales, and the codes under these scales; empty without weights."""
    scales: str = ""
    """Origin of the block scales: `absmax`, `given` (calibrated), or empty without weights."""
    sqnr_db: float | None = None
    """Signal over error of the decoded matrix, in dB; None without weights."""

    @property
    def verdict(self) -> str:
        """`fail`, `warning` or `pass`."""
        found = {finding.severity for finding in self.findings}
        return "fail" if "fail" in found else "warning" if "warning" in found else "pass"

    def to_dict(self) -> dict[str, Any]:
        """All fields and the verdict as plain data."""
        return {
            **plain_value({key: value for key, value in vars(self).items() if key != "findings"}),
            "verdict": self.verdict, "findings": [finding.to_dict() for finding in self.findings],
        }  # fmt: skip
