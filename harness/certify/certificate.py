"""A certificate: proved and sampled inputs of a kernel, the assumption of the proof, and the wrong inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowgauge.harness.certify.inputs.space import Numbers, Outer
from narrowgauge.harness.certify.proof import Proof, WrongSet
from narrowgauge.harness.records.journal import RecordedRun
from narrowgauge.harness.report.text import number, plural
from narrowgauge.spec.recipes import Recipe

FORMAT = 1
"""Version of the JSON file."""
_INPUTS = {
    "scales": "block amaxes", "codes": "pairs of a number and a scale", "values": "pairs of a code and a scale",
    "products": "products of two codes under two scales", "gates.codes": "gates and factors",
    "gates.scales": "largest gates of a block, and factors",
}  # fmt: skip
"""Inputs of every stage."""
_SHOWN = 12
"""Runs of wrong numbers on the page, for every set; the JSON file has all runs."""

_OF_KERNEL = ("kernels", "backend")
"""Sources of a run, beside the files loaded by the backend, on which the bytes of a kernel depend."""


class CertificateError(ValueError):
    """A certificate cannot be made or read."""


@dataclass
class Trial:
    """A trial of the assumption."""

    name: str
    blocks: int = 0
    calls: int = 0
    wrong: int = 0
    """Wrong scales and wrong codes under right scales."""
    refused: int = 0
    """Calls refused by the kernel."""
    note: str = ""
    """Rule of the wrong calls, or the first message of a refusal."""


@dataclass
class Certificate:
    """Result of `narrowgauge.certify`."""

    subject: str
    recipe: str
    dtype: str
    device: str
    assumption: str
    trials: list[Trial]
    proved: list[str]
    sampled: list[str]
    outside: list[str]
    """Inputs not covered by the certificate."""
    wrong: list[WrongSet]
    kernel: dict[str, str]
    """Digests of the sources of the kernel."""
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    seed: int = 0

    @property
    def passed(self) -> bool:
        """Whether the kernel is certified: no byte was wrong, in the proof and in the trials."""
        return not self.wrong and not any(trial.wrong for trial in self.trials)

    @property
    def verdict(self) -> str:
        """certified or refused."""
        return "certified" if self.passed else "refused"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The page, in Markdown."""
        yield f"# {self.subject}, {self.recipe} of {self.dtype}: {self.verdict}"
        yield ""
        yield self.assumption
        yield from (f"**{line}**" for line in self._refutations())
        for title, entries in (
            ("Wrong inputs", [line for wrong in self.wrong for line in wrong_lines(wrong, self.dtype)]),
            ("Proved", self.proved),
            ("Sampled", self.sampled),
            ("Trials of the assumption", [f"{trial.name}: {_of_trial(trial)}" for trial in self.trials]),
            ("Outside of this certificate", self.outside),
            ("Kernel", [f"{name}: {value}" for name, value in self.kernel.items()]),
            ("Environment", [f"{name}: {value}" for name, value in self.environment.items()]),
        ):
            if entries:
                yield from ("", f"## {title}", "", *(f"- {entry}" for entry in entries))

    def summary(self) -> Iterator[str]:
        """The verdict, the assumption, proved and sampled inputs, and wrong inputs."""
        yield f"{self.subject}, {self.recipe} of {self.dtype}: {self.verdict}"
        yield self.assumption
        yield from self._refutations()
        yield from (line for wrong in self.wrong for line in wrong_lines(wrong, self.dtype))
        yield from (f"proved: {line}" for line in self.proved)
        yield from (f"sampled: {line}" for line in self.sampled)

    def _refutations(self) -> Iterator[str]:
        """Trials with wrong bytes, which refute the assumption. Empty if the proof has wrong pairs."""
        if not self.wrong:
            yield from (f"refuted by {trial.name}: {_of_trial(trial)}" for trial in self.trials if trial.wrong)

    def as_json(self) -> dict[str, Any]:
        """The content of the JSON file."""
        content = asdict(self)
        content["wrong"] = [
            asdict(wrong) | {"rule": None if wrong.rule is None else str(wrong.rule)} for wrong in self.wrong
        ]
        return {"format": FORMAT, "verdict": self.verdict, **content}

    def write(self, folder: str | Path) -> tuple[Path, Path]:
        """Write `certificate.md` and `certificate.json` into a new or existing folder. Returns the two paths.

        Raises CertificateError if a file cannot be written.
        """
        page, data = Path(folder) / "certificate.md", Path(folder) / "certificate.json"
        try:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(str(self) + "\n", encoding="utf-8")
            data.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise CertificateError(f"{folder}: the certificate cannot be written: {error.strerror}") from error
        return page, data


def read(path: str | Path) -> Mapping[str, Any]:
    """The JSON file of a certificate. Raises CertificateError for a file of another format."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CertificateError(f"{path}: cannot be read: {error.strerror}; `narrowgauge certify` writes it") from error
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"{path}: is no JSON file of `narrowgauge certify`: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "verdict" not in content:
        raise CertificateError(f"{path}: is no certificate of format {FORMAT}; make it again by `narrowgauge certify`")
    return content


def proved_and_sampled(proof: Proof, recipe: Recipe, size: int, numbers_complete: bool) -> tuple[list[str], list[str]]:
    """Sentences on the proved and on the sampled inputs of a proof. `size`: elements of a block."""
    kind = (
        "every number" if numbers_complete else "every rounding boundary of the codes ± 2 ulp and 256 numbers between"
    )
    amaxes = (
        "every block amax"
        if numbers_complete
        else "every rounding boundary of the scales ± 2 ulp and block amaxes between"
    )
    under = "" if proof.outers_of == 1 else f" under {'each' if proof.outers == proof.outers_of else 'a'} tensor scale"
    proved = [
        f"scales: {amaxes}, of both signs{under}: {number(proof.amaxes)} pairs of amaxes",
        f"codes: {kind}, NaN included, under every scale of a block{under}: {number(proof.pairs)} pairs",
    ]
    sampled = []
    if recipe.rounding == "stochastic":
        if proof.words:
            proved[1] += ", with the random bytes below, at and above the first one with another code"
            sampled.append("random bytes of a seed and an offset: those of the trials and of the further places")
        else:
            bytes_tried = f"with {min(proof.places)} to {max(proof.places)} random bytes of 256" if proof.places else ""
            sampled.append(f"{proved.pop()}, {bytes_tried}")
    if recipe.candidates != "6":
        sampled.append("choices of a candidate: those of the blocks of the proof and of the trials")
    if recipe.transform is not None:
        sampled.append("sums of the rotation: those of the blocks of the proof and of the trials")
    if proof.unreached:
        why = ", which no number of a group gives alone" if recipe.transform is not None else ""
        sampled.append(f"pairs of a number and a scale that no block reached{why}: {number(proof.unreached)}")
    if proof.outers_of > 1:
        every = proved if proof.outers + proof.refused == proof.outers_of else sampled
        every.append(f"tensor scales: {number(proof.outers)} of {number(proof.outers_of)}")
    most = max(proof.places, default=0)
    everywhere = sum(count == most for count in proof.places)
    places = f"places of each number in a block: {number(most)} of {number(size)}"
    if everywhere < len(proof.places):
        places += f" for {plural(everywhere, 'tensor scale')}, one for the others"
    (sampled if most < size or everywhere < len(proof.places) else proved).append(places)
    if proof.stopped:
        sampled.append("the proof stopped behind the third tensor scale with wrong bytes")
    if proof.refused:
        proved.append(f"tensor scales that the recipe refuses, not judged: {proof.refused}")
    return proved, sampled


def wrong_lines(wrong: WrongSet, dtype: str) -> Iterator[str]:
    """Lines on a set of wrong inputs of a dtype."""
    inputs = _INPUTS.get(wrong.stage, "")
    where = _under(wrong.outer, dtype)
    if wrong.stage == "amax":
        yield f"amax{where}: {_first(wrong.first)}"
        return
    rule = f"exactly: {wrong.rule}" if wrong.rule is not None else "no rule is known"
    steady = "" if wrong.steady else "; **the same inputs are right at other places or beside other numbers**"
    yield f"{wrong.stage}{where}: {number(wrong.count)} of {number(wrong.of)} {inputs}, {rule}{steady}"
    yield f"first: {_first(wrong.first)}"
    shown = [(entry["scale"], first, last) for entry in wrong.runs for first, last in entry["numbers"]]
    listed = ", ".join(_run(wrong.stage, *run) for run in shown[:_SHOWN])
    more = f", and {number(len(shown) - _SHOWN)} more in the JSON file" if len(shown) > _SHOWN else ""
    if listed:
        yield f"as bits: {listed}{more}"


def _run(stage: str, scale: int, first: int, last: int) -> str:
    numbers = f"0x{first:X}" + (f" to 0x{last:X}" if last > first else "")
    return f"{numbers} under scale 0x{scale:X}" if stage in ("codes", "values") else numbers


def _under(outer: Outer, dtype: str) -> str:
    """The tensor scale of a call for messages; empty for a recipe without a tensor scale."""
    if outer.scale is not None:
        return f" under the given scale {outer.scale!r}"
    if outer.amax is None:
        return ""
    value = float(Numbers(getattr(torch, dtype)).tensor(torch.tensor(outer.amax)))
    return f" under the tensor amax {value!r} (0x{outer.amax:X})"


def _first(first: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value['decimal']} ({value['bits']})" if isinstance(value, dict) else f"{name} {value}"
        for name, value in first.items()
    )


def _of_trial(trial: Trial) -> str:
    text = f"{number(trial.blocks)} blocks in {plural(trial.calls, 'call')}"
    text += f", {number(trial.wrong)} wrong bytes" if trial.wrong else ", all right"
    if trial.refused:
        text += f"; {plural(trial.refused, 'call')} refused"
    return text + (f": {trial.note}" if trial.note else "")


def problems(path: Path, run: RecordedRun) -> Iterator[str]:
    """Reasons why the certificate in a file does not hold for the kernel of a run.

    Raises CertificateError for a file of another format.
    """
    content = read(path)
    kernel = content.get("kernel")
    if not isinstance(kernel, dict):
        raise CertificateError(f"{path}: has no digests of a kernel; make it again by `narrowgauge certify`")
    if content["verdict"] != "certified":
        yield f"{path}: the kernel is {content['verdict']}"
    if content.get("device") != run.device:
        yield f"{path}: is of device {content.get('device')}, and the run of {run.device}"
    sources = {part: value for part, value in run.sources.items() if part in _OF_KERNEL and value} | run.loaded
    own = {part: value for part, value in kernel.items() if part in _OF_KERNEL or " " in part}
    for part in sorted(sources.keys() | own.keys()):
        if sources.get(part) != own.get(part):
            yield (
                f"{path}: {part} is {own.get(part, 'not there')} in the certificate, and "
                f"{sources.get(part, 'not there')} in the run; make it again by `narrowgauge certify`"
            )
