"""Judging the tensors of no quantized matrix: scales of inputs and of caches, codes that are stored as numbers, and
tensors that are not quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping

import torch

from narrowgauge.harness.tools.checkpoint.files import Checkpoint, StoredTensor, scalar
from narrowgauge.harness.tools.checkpoint.findings import Finding
from narrowgauge.reference.numbers.decode import decode
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.spec.formats import E4M3

_ACTIVATION = re.compile(
    r"(?:.+\.)?(?:(?:input|output|[kqv]|kv_cache|prob)_scale|scale_(?:input|output)|input_global_scale|[kqv]_proj\.[kv]_scale)"
)
_SLAB = 1 << 22
"""Elements that are read at once."""


def activation_scales(checkpoint: Checkpoint) -> list[Finding]:
    """Findings about scales of inputs, keys and values: numbers that no quantization gives, and a note."""
    found, named = [], []
    for name, tensor in checkpoint.tensors.items():
        if not _ACTIVATION.fullmatch(name) or not tensor.is_float:
            continue
        named.append(name)
        numbers = scalar(tensor)
        wrong = ~(numbers.isfinite() & (numbers > 0))
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            found.append(Finding(
                "fail", "activation-scale", name, "is a scale of inputs, keys or values, and no positive finite number",
                int(wrong.sum()), numbers.numel(), f"number {place}: {float(numbers[place])!r}",
                "amax of the calibration over the largest number, or its inverse",
            ))  # fmt: skip
    if named:
        text = "are scales of inputs, keys or values: only their signs and exponents are judged, not their sizes"
        others = f" and {len(named) - 1} more" if len(named) > 1 else ""
        found.append(Finding("note", "activation-scale", f"{named[0]}{others}", text))
    return found


def codes_as_numbers(name: str, weight: StoredTensor, scale: StoredTensor) -> Finding:
    """The finding about a weight of floating-point numbers with a scale tensor.

    If every number is a number of E4M3, and the largest one is more than half of 448, the numbers are codes that were
    never multiplied by their scale.
    """
    largest, codes = 0.0, weight.rows * weight.columns > 0
    for part in _slabs(weight):
        numbers = part.float()
        codes = codes and torch.equal(decode(encode(numbers, E4M3), E4M3), numbers)
        largest = max(largest, float(numbers.abs().nan_to_num(nan=0.0).amax()) if numbers.numel() else 0.0)
        if not codes:
            break
    if codes and largest > E4M3.max / 2:
        text = (
            f"is {weight.dtype}, and every number is a number of E4M3, up to {largest:g}: these are the codes, and "
            f"{scale.name} was not multiplied; store the codes as F8_E4M3, or the product without the scale"
        )
        return Finding("fail", "codes-as-numbers", weight.name, text)
    text = f"is {weight.dtype} and no codes, and {scale.name} lies beside it: a loader may multiply a second time"
    return Finding("note", "unused-scale", name, text)


def compare_plain(
    checkpoint: Checkpoint, originals: Mapping[str, StoredTensor], used: Collection[str]
) -> tuple[list[Finding], int]:
    """Findings about tensors that are not quantized and differ from the tensor of the same name in the weights, and
    the number of compared elements. `used`: names of the tensors of quantized matrices."""
    found, compared = [], 0
    for name, tensor in checkpoint.tensors.items():
        other = originals.get(name)
        if name in used or other is None or not tensor.is_float or not other.is_float:
            continue
        if tensor.shape != other.shape:
            text = f"has shape {tensor.shape}, and the weights {other.shape}"
            found.append(Finding("fail", "plain-tensor", name, text))
            continue
        wrong = total = 0
        first = ""
        for part, exact in zip(_slabs(tensor), _slabs(other), strict=True):
            right = exact.to(part.dtype)  # the checkpoint may have rounded the weights once
            different = (part != right) & ~(part.isnan() & right.isnan())
            if (count := int(different.sum())) and not first:
                row, column = (int(index[0]) for index in different.nonzero(as_tuple=True))
                row_of_slab = total // max(1, tensor.columns)
                first = f"row {row_of_slab + row}, column {column}: {float(part[row, column])!r}, and "
                first += f"{float(right[row, column])!r} in the weights"
            wrong, total = wrong + count, total + part.numel()
        compared += total
        if wrong:
            text = "is not quantized, and differs from the weights"
            # A norm that absorbs the factors of its inputs differs in a right checkpoint.
            smooth = tensor.columns == math.prod(tensor.shape)
            severity = "warning" if smooth else "fail"
            text += ": AWQ and SmoothQuant move factors into vectors such as this one" if smooth else ""
            found.append(Finding(severity, "plain-tensor", name, text, wrong, total, first))  # type: ignore[arg-type]
    return found, compared


def _slabs(tensor: StoredTensor) -> Iterator[torch.Tensor]:
    step = max(1, _SLAB // max(1, tensor.columns))
    for start in range(0, tensor.rows, step):
        yield tensor.numbers(start, min(start + step, tensor.rows))
