"""Judging a checkpoint: every layer alone, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.harness.machine.plain_text import plain_text
from narrowgauge.harness.report.text import number, plural
from narrowgauge.harness.tools.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    StoredTensor,
    open_checkpoint,
    summary,
)
from narrowgauge.harness.tools.checkpoint.findings import Finding, LayerResult, alike, by_cause
from narrowgauge.harness.tools.checkpoint.integers import IntegerLayer, integer_layer, judge_integers
from narrowgauge.harness.tools.checkpoint.layouts import (
    LAYOUTS,
    Layer,
    Missing,
    recognise,
    shape_problem,
    stray_scales,
    used_names,
)
from narrowgauge.harness.tools.checkpoint.pairing import scales_of_siblings
from narrowgauge.harness.tools.checkpoint.plain import activation_scales, codes_as_numbers, compare_plain
from narrowgauge.harness.tools.checkpoint.scan import FALSE_ALARM, TESTS, Scan, findings_of, nibble_orders, scan_layer
from narrowgauge.harness.tools.checkpoint.weights import judge_weights


@dataclass
class Result:
    """Judgement of a checkpoint."""

    path: str
    weights: str
    """File or folder of the weights, or the empty string."""
    files: int
    tensors: int
    size: int
    """Bytes of all tensors."""
    layers: list[LayerResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Findings about tensors of no layer."""
    plain: int = 0
    """Elements of tensors that are not quantized, compared with the weights."""

    @property
    def all_findings(self) -> list[Finding]:
        """Findings of the checkpoint and of its layers: failures first, then warnings, then notes."""
        found = [*self.findings, *(finding for layer in self.layers for finding in layer.findings)]
        return sorted(found, key=lambda finding: ("fail", "warning", "note").index(finding.severity))

    def passed(self, *, strict: bool = False) -> bool:
        """Whether no finding is a failure (`strict`: no warning), a layer was read, and given weights compared."""
        bad = ("fail", "warning") if strict else ("fail",)
        read = any(layer.elements for layer in self.layers)
        compared = not self.weights or any(layer.compared for layer in self.layers)
        return read and compared and not any(finding.severity in bad for finding in self.all_findings)

    @property
    def sentence(self) -> str:
        """The judgement in one line."""
        groups = alike(self.all_findings)
        counts = {s: sum(group[0].severity == s for group in groups) for s in ("fail", "warning", "note")}
        names = (("fail", "failure"), ("warning", "warning"), ("note", "note"))
        found = ", ".join(plural(counts[key], noun) for key, noun in names if counts[key]) or "no finding"
        read = sum(layer.elements for layer in self.layers)
        text = f"{plural(len(self.layers), 'quantized matrix').replace('matrixs', 'matrices')}: {found}; "
        text += f"{number(read)} elements read"
        if self.weights:
            compared = sum(layer.compared for layer in self.layers) + self.plain
            text += f", {number(compared)} compared with weights"
        return text

    def to_dict(self) -> dict[str, Any]:
        """The judgement as plain data."""
        return {
            "path": plain_text(self.path), "weights": plain_text(self.weights), "files": self.files,
            "tensors": self.tensors, "bytes": self.size, "passed": self.passed(), "sentence": self.sentence,
            "findings": [finding.to_dict() for finding in self.findings],
            "layers": [layer.to_dict() for layer in self.layers],
        }  # fmt: skip


def judge_checkpoint(
    path: str | Path,
    *more: str | Path,
    weights: str | Path | None = None,
    scales: str = "",
    on_layer: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> Result:
    """Judge all quantized matrices of a checkpoint: a file, several shards, or a folder.

    `weights`: file or folder with the weights that were quantized, under the same names. `scales`: pattern of the names
    of scales, such as `{weight}.scale`, with the name of a matrix without `.weight`. `on_layer` is called with
    bytes done, bytes in all and the name before every layer. Reads a few MiB at a time.

    Raises CheckpointError for files that cannot be read, for a checkpoint without a quantized matrix of a known layout,
    and for weights that have none of its names.
    """
    checkpoint = open_checkpoint(path, *more, scales=scales)
    layers, missing = recognise(checkpoint)
    integers, incomplete = _integers(checkpoint)
    stray = next(stray_scales(checkpoint), None)
    if not (layers or missing or integers or incomplete or stray):
        raise CheckpointError(
            f"{path}: holds no quantized matrix of the layouts {', '.join(LAYOUTS)}; its tensors are "
            f"{summary(checkpoint.tensors) or 'none'}"
        )
    originals_of = {} if weights is None else open_checkpoint(weights).tensors
    originals = _originals(layers, originals_of)
    judged_names = layers or integers or stray
    if weights is not None and judged_names and not originals_of.keys() & _weight_names(layers, integers, checkpoint):
        name = f"{layers[0].name}.weight" if layers else "the quantized matrices"
        raise CheckpointError(
            f"{weights}: has no weights of the quantized matrices, such as {name}; it holds "
            f"{', '.join(list(originals_of)[:5]) or 'nothing'}"
        )
    result = Result(str(path), str(weights or ""), checkpoint.files, len(checkpoint.tensors), checkpoint.size)
    result.findings += [_missing(entry, checkpoint) for entry in missing] + incomplete
    if checkpoint.lost:
        name, shard = next(iter(checkpoint.lost.items()))
        text = f"is missing: the index says that it is in {shard}, which lacks it; download it again"
        result.findings.append(Finding("fail", "lost", name, text, len(checkpoint.lost), result.tensors))
    siblings: dict[str, int] = {}
    for layer in layers:
        siblings[layer.name.rpartition(".")[0]] = siblings.get(layer.name.rpartition(".")[0], 0) + 1
    tests = TESTS * len(layers) + 2 * sum(count * count for count in siblings.values())
    total, done = sum(layer.codes.size for layer in layers), 0
    amaxes: dict[str, float] = {}
    group: list[tuple[Scan, LayerResult]] = []
    for layer in layers:
        on_layer(done, total, layer.name)
        done += layer.codes.size
        judged, scan = _judge(layer, originals.get(layer.name), tests, amaxes, checkpoint)
        if judged.verdict != "fail" or not originals:
            judged.findings += _not_compared(layer, judged, originals)
        result.layers.append(judged)
        parent = layer.name.rpartition(".")[0]
        if group and group[0][1].name.rpartition(".")[0] != parent:  # the siblings of a matrix are adjacent
            _compare_siblings(group, tests)
            group = []
        if scan is not None:
            group.append((scan, judged))
    _compare_siblings(group, tests)
    used = used_names(layers)
    for integer in integers:
        original = _original(originals_of, (f"{integer.name}.weight", integer.name))
        result.layers.append(judge_integers(integer, original))
        used |= {tensor.name for tensor in integer.tensors}
    result.findings += activation_scales(checkpoint)
    numbers = [codes_as_numbers(weight.name, weight, scale) for weight, scale in stray_scales(checkpoint)]
    result.findings += numbers
    plain, result.plain = compare_plain(
        checkpoint, originals_of, used | {finding.tensor for finding in numbers if finding.severity == "fail"}
    )
    result.findings += plain
    for judged in result.layers:
        judged.findings = by_cause(judged.findings)
    on_layer(total, total, "")
    return result


def _judge(
    layer: Layer, original: StoredTensor | None, tests: int, amaxes: dict[str, float], checkpoint: Checkpoint
) -> tuple[LayerResult, Scan | None]:
    judged = LayerResult(layer.name, layer.layout, layer.recipe, layer.shape)
    problem, kind = shape_problem(layer)
    if problem:
        scales = layer.codes.name if layer.scales is None else layer.scales.name
        judged.findings.append(Finding("fail", kind, scales, problem))
        return judged, None
    scan = scan_layer(layer, judged)
    found = findings_of(scan, tests)
    if checkpoint.partial:
        found = [_softened(finding) if finding.sentence.startswith("is missing") else finding for finding in found]
    judged.findings += found
    usable = not layer.tensor_scale_is or (
        layer.tensor_scale is not None and not any(f.severity == "fail" and f.kind == "tensor-scale" for f in found)
    )
    if original is not None and usable:
        try:
            judge_weights(layer, original, judged, amaxes)
            # The weights decide what statistics only suggest. Beside failures, a suggestion may be the cause.
            failed = {f.kind for f in judged.findings if f.severity == "fail" and f not in found}
            suggested = [
                f for f in found
                if (f.severity == "warning" or f.kind == "inverted") and (not failed or f.kind in failed)
            ]  # fmt: skip
            judged.findings = [f for f in judged.findings if f not in suggested]
        except CheckpointError as error:
            judged.findings.append(Finding("warning", "not-compared", layer.codes.name, f"is not compared: {error}"))
    return judged, scan


def _not_compared(layer: Layer, judged: LayerResult, originals: Mapping[str, StoredTensor]) -> list[Finding]:
    if not originals or judged.compared or layer.name in originals:
        return []
    return [
        Finding("note", "not-compared", layer.codes.name, "is not compared: the weights have no tensor of its name")
    ]


def _compare_siblings(group: list[tuple[Scan, LayerResult]], tests: int) -> None:
    results = {id(scan): judged for scan, judged in group}
    for scan, finding in nibble_orders([scan for scan, _ in group], tests):
        if not results[id(scan)].compared:  # with weights the order is known
            results[id(scan)].findings.append(finding)
    level = math.log(FALSE_ALARM / max(1, tests))
    for index, finding in scales_of_siblings([(scan.layer, scan.pairing) for scan, _ in group], level):
        if not group[index][1].compared:
            group[index][1].findings.append(finding)


def _missing(entry: Missing, checkpoint: Checkpoint) -> Finding:
    finding = Finding("fail", entry.kind, entry.tensor, entry.sentence)
    return _softened(finding) if checkpoint.partial else finding


def _softened(finding: Finding) -> Finding:
    text = f"{finding.sentence}; it may lie in a shard that was not given"
    return Finding("note", finding.kind, finding.tensor, text)


def _integers(checkpoint: Checkpoint) -> tuple[list[IntegerLayer], list[Finding]]:
    """The matrices of integers, and findings about incomplete ones."""
    layers, missing = [], []
    for name, tensor in checkpoint.tensors.items():
        base, _, end = name.rpartition(".")
        if end in ("qweight", "weight_packed", "weight") and base:
            found = integer_layer(checkpoint, base, tensor)
            if isinstance(found, IntegerLayer):
                layers.append(found)
            elif found is not None:
                missing.append(found)
    return layers, missing


def _names(layer: Layer) -> tuple[str, ...]:
    """Names under which the weights of a layer may lie."""
    base = layer.name.partition("[")[0]
    return f"{base}.weight", base, layer.codes.name.partition("[")[0]


def _weight_names(layers: list[Layer], integers: list[IntegerLayer], checkpoint: Checkpoint) -> set[str]:
    """Names of weights that can be compared with the checkpoint."""
    names = {name for layer in layers for name in _names(layer)} | {f"{layer.name}.weight" for layer in integers}
    return names | {weight.name for weight, _ in stray_scales(checkpoint)}


def _original(tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> StoredTensor | None:
    """The first of these tensors that holds numbers."""
    return next((tensors[name] for name in names if name in tensors and tensors[name].is_float), None)


def _originals(layers: list[Layer], tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The weights of each layer, by the name of the layer."""
    found = {layer.name: _original(tensors, _names(layer)) for layer in layers}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
