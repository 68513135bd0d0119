"""INT4 and INT8 weights: in words of 32 bits of GPTQ, AWQ and `pack-quantized` of compressed-tensors, and in bytes of its
`int-quantized`.

| layout | tensors of a matrix (N, K) | number |
|---|---|---|
| GPTQ | `qweight` (K/p, N), `qzeros` (G, N/p), `scales` (G, N), `g_idx` (K) | (c − z − 1)·s, in version 2 (c − z)·s |
| AWQ | `qweight` (K, N/p), `qzeros` (G, N/p), `scales` (G, N); columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7 | (c − z)·s |
| pack-quantized | `weight_packed` (N, K/p), `weight_scale` (N, G), `weight_shape`, `weight_zero_point` (N/p, G), `weight_g_idx` | (c − 2^(bits−1))·s, with zero points (c − z)·s |
| int-quantized | `weight` (N, K), I8, `weight_scale` (N, 1), (N, G) or one number, `weight_zero_point` like it | (c − z)·s |

p = 32/bits codes lie in a word, the first in the lowest bits. Sources: AutoGPTQ, AutoAWQ, compressed-tensors 0.20.
"""  # noqa: E501

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from narrowgauge.adapt.words import WORDS, WordLayout, unpack_words
from narrowgauge.harness.tools.checkpoint.files import Checkpoint, StoredTensor
from narrowgauge.harness.tools.checkpoint.findings import Finding, LayerResult

_BYTES = "int-quantized"
_SLAB = 1 << 22
"""Codes that are decoded at once."""
_CLEAR = 6.0
"""Decibels by which another reading of the zero points must be nearer to the weights to be named."""


@dataclass(frozen=True)
class IntegerLayer:
    """A matrix (N, K) of integers in words."""

    name: str
    layout: str
    bits: int
    shape: tuple[int, int]
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None
    group_index: StoredTensor | None
    offset: int
    """Number that is added to stored zero points: 1 in version 1 of GPTQ."""

    @property
    def recipe(self) -> str:
        """`int4, groups of 128`."""
        return f"int{self.bits}, groups of {-(-self.shape[1] // max(1, self.groups))}"

    @property
    def words(self) -> WordLayout | None:
        """The layout of the words; None: codes are bytes."""
        return WORDS.get(self.layout.lower())

    @property
    def by_row(self) -> bool:
        """Whether codes and scales are stored in rows of N; else in rows of K."""
        return self.words is None or self.words.by_row

    @property
    def groups(self) -> int:
        """Groups of K, each with a scale."""
        return self.scales.columns if self.by_row else self.scales.rows

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All tensors of the matrix."""
        return tuple(filter(None, (self.codes, self.scales, self.zeros, self.group_index)))

    def problem(self) -> str:
        """Why shapes or dtypes of the tensors do not fit, or the empty string."""
        (rows, columns), per = self.shape, 32 // self.bits
        expected: tuple[tuple[int, ...], ...] = {
            "GPTQ": ((-(-columns // per), rows), (self.groups, rows), (self.groups, -(-rows // per))),
            "AWQ": ((columns, -(-rows // per)), (self.groups, rows), (self.groups, -(-rows // per))),
            "pack-quantized": ((rows, -(-columns // per)), (rows, self.groups), (-(-rows // per), self.groups)),
            _BYTES: ((rows, columns), (rows, self.groups), (rows, self.groups)),
        }[self.layout]
        if self.words is None and math.prod(self.scales.shape) == 1:
            expected = (rows, columns), self.scales.shape, self.scales.shape
        for tensor, shape in zip((self.codes, self.scales, self.zeros), expected, strict=True):
            if tensor is not None and tensor.shape != shape:
                found, wanted = ("x".join(map(str, each)) for each in (tensor.shape, shape))
                return f"{tensor.name} has shape {found}; the matrix of {rows}x{columns} has {wanted}"
        if not self.groups or columns % self.groups:
            return f"{self.scales.name} has {self.groups} groups, no divisor of K = {columns}"
        return "" if self.scales.is_float else f"{self.scales.name} has dtype {self.scales.dtype}; scales are numbers"

    def read_scales(self) -> torch.Tensor:
        """Scales, float64 (G, N)."""
        numbers = self.scales.numbers().double()
        return numbers.T.expand(-1, self.shape[0]) if self.by_row else numbers

    def read_zeros(self) -> torch.Tensor:
        """Zero points, float64 (G, N)."""
        rows = self.shape[0]
        if self.zeros is None:
            return torch.full((self.groups, rows), float(1 << self.bits - 1), dtype=torch.float64)
        if self.words is None:
            codes = (self.zeros.read().view(torch.int8) ^ -128).view(torch.uint8).view(-1, self.groups).T
            return codes.expand(-1, rows).double()
        if self.by_row:
            words = self.zeros.read().view(torch.int32).view(self.zeros.shape)
            codes = unpack_words(words, self.bits, 0).T
        else:
            codes = self._unpacked(self.zeros.read())
        return codes[:, :rows].double() + self.offset

    def read_groups(self) -> torch.Tensor:
        """Group of each column, int64 (K,)."""
        if self.group_index is None:
            return torch.arange(self.shape[1]) // (self.shape[1] // self.groups)
        return self.group_index.read().view(-1).view(torch.int32).long()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Codes of the columns `start` to `stop` of K, whole words: uint8 (stop − start, N)."""
        rows, per = self.shape[0], 32 // self.bits
        if self.words is None:
            return self.codes.read().view(rows, -1)[:, start:stop].T ^ 0x80
        if self.layout == "AWQ":
            return self._unpacked(self.codes.read(start, stop))[:, :rows]
        if self.layout == "GPTQ":
            words = self.codes.read(start // per, -(-stop // per)).view(torch.int32).view(-1, rows)
            return unpack_words(words, self.bits, 0)[: stop - start]
        return self._unpacked(self.codes.read().view(rows, -1)[:, start // per * 4 : -(-stop // per) * 4])[
            :, : stop - start
        ].T

    def _unpacked(self, stored: torch.Tensor) -> torch.Tensor:
        """Codes of rows of bytes, whose words lie along the last axis."""
        assert self.words is not None
        return unpack_words(stored.contiguous().view(torch.int32), self.bits, -1, self.words.order)


def in_bytes(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> bool:
    """Whether a `weight` has INT8 codes: bytes with a sign under scales that are numbers, without a tensor scale."""
    scales = checkpoint.tensors.get(f"{base}.weight_scale")
    signed = codes.dtype == "I8" and len(codes.shape) == 2 and codes.name == f"{base}.weight"
    return signed and scales is not None and scales.is_float and f"{base}.weight_scale_2" not in checkpoint.tensors


def integer_layer(checkpoint: Checkpoint, base: str, codes: StoredTensor) -> IntegerLayer | Finding | None:
    """The matrix whose codes are `qweight` or `weight_packed`; a finding if a tensor of the matrix is missing; None for
    a tensor of a different format."""
    tensors, config = checkpoint.tensors, checkpoint.config
    if in_bytes(checkpoint, base, codes):
        scales, zeros = (tensors.get(f"{base}.weight_{part}") for part in ("scale", "zero_point"))
        assert scales is not None
        return IntegerLayer(base, _BYTES, 8, (codes.rows, codes.columns), codes, scales, zeros, None, 0)
    if codes.dtype not in ("I32", "U32") or len(codes.shape) != 2 or codes.name.endswith(".weight"):
        return None
    bits = config.get("bits", config.get("w_bit", 4))
    bits = bits if bits in (4, 8) else 4
    per = 32 // bits
    if codes.name.endswith("weight_packed"):
        scales, shape = tensors.get(f"{base}.weight_scale"), tensors.get(f"{base}.weight_shape")
        if scales is None or shape is None:
            lost = "weight_scale" if scales is None else "weight_shape"
            return _lost(codes, f"{base}.{lost}")
        rows, columns = shape.read().view(-1).view(torch.int32 if shape.dtype == "I32" else torch.int64).tolist()[:2]
        bits = 8 if columns and codes.columns == -(-columns // 4) else 4
        return IntegerLayer(
            base, "pack-quantized", bits, (rows, columns), codes, scales, tensors.get(f"{base}.weight_zero_point"),
            tensors.get(f"{base}.weight_g_idx"), 0,
        )  # fmt: skip
    scales, zeros = tensors.get(f"{base}.scales"), tensors.get(f"{base}.qzeros")
    if scales is None or zeros is None:
        return _lost(codes, f"{base}.{'scales' if scales is None else 'qzeros'}")
    index = tensors.get(f"{base}.g_idx")
    if codes.columns == scales.columns:  # GPTQ: a word has codes of one column
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        columns = index.columns if index is not None else per * codes.rows
        return IntegerLayer(base, "GPTQ", bits, (scales.columns, columns), codes, scales, zeros, index, offset)
    return IntegerLayer(base, "AWQ", bits, (scales.columns, codes.rows), codes, scales, zeros, index, 0)


def _lost(codes: StoredTensor, name: str) -> Finding:
    return Finding("fail", "scales", codes.name, f"{codes.name} ({codes.dtype}) is incomplete: {name} is missing")


def judge_integers(layer: IntegerLayer, original: StoredTensor | None) -> LayerResult:
    """Judge scales, groups and codes; with weights, the decoded matrix too."""
    result = LayerResult(layer.name, layer.layout, layer.recipe, layer.shape)
    if problem := layer.problem():
        result.findings.append(Finding("fail", "shape", layer.codes.name, problem))
        return result
    scales, zeros, groups = layer.read_scales(), layer.read_zeros(), layer.read_groups()
    for kind, wrong, text in (
        ("nan-scale", ~scales.isfinite(), "scales are NaN or infinite"),
        ("negative-scale", scales < 0, "scales are negative"),
    ):
        if bool(wrong.any()):
            group, row = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            first = f"row {row}, group {group}: {float(scales[group, row])!r}"
            result.findings.append(
                Finding("fail", kind, layer.scales.name, text, int(wrong.sum()), scales.numel(), first)
            )
    if len(groups) != layer.shape[1] or bool(((groups < 0) | (groups >= layer.groups)).any()):
        name = layer.group_index.name if layer.group_index is not None else layer.codes.name
        text = f"has {len(groups)} groups of columns; K = {layer.shape[1]} columns have groups 0 to {layer.groups - 1}"
        result.findings.append(Finding("fail", "group-index", name, text))
    if any(finding.severity == "fail" for finding in result.findings):
        return result
    _read_codes(layer, original, (scales, zeros, groups), result)
    return result


def _read_codes(
    layer: IntegerLayer, original: StoredTensor | None, parts: tuple[torch.Tensor, ...], result: LayerResult
) -> None:
    scales, zeros, groups = parts
    rows, columns = layer.shape
    weights = None
    if original is not None:
        if (original.rows, original.columns) != layer.shape:
            text = f"is not compared: {original.name} has shape {'x'.join(map(str, original.shape))}"
            result.findings.append(Finding("warning", "not-compared", layer.codes.name, text))
        else:
            weights = original.numbers()
    per = 32 // layer.bits
    step = max(per, _SLAB // max(1, rows) // per * per)
    signal = away = lost = 0.0
    errors = {0: 0.0, 1: 0.0, -1: 0.0}
    same, first_code = True, None
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        codes = layer.read(start, stop)
        result.elements += codes.numel()
        if codes.numel():
            first_code = int(codes[0, 0]) if first_code is None else first_code
            same = same and bool((codes == first_code).all())
        scale, zero = scales[groups[start:stop]], zeros[groups[start:stop]]
        lost += float(((scale == 0) & (codes.double() != zero)).sum())
        if weights is not None:
            exact = weights[:, start:stop].T.double()
            signal += float(exact.square().sum())
            for moved in errors:
                errors[moved] += float(((codes.double() - zero - moved) * scale - exact).square().sum())
            nearest = (exact / scale + zero).clamp(0, (1 << layer.bits) - 1)
            away += float(((nearest - codes.double()).abs() > 0.5 + 2.0**-6).sum())
    if lost:
        text = "groups with scale 0 hold codes other than their zero point, and decode to zeros"
        result.findings.append(Finding("fail", "zero-scale", layer.scales.name, text, int(lost), result.elements))
    if same and result.elements > 1:
        text = f"every code is {first_code}: a matrix of equal numbers, or codes that were never written"
        result.findings.append(Finding("note", "zeros", layer.codes.name, text))
    if weights is not None:
        result.compared = result.elements
        _conclude(layer, result, signal, errors, int(away))


def _conclude(layer: IntegerLayer, result: LayerResult, signal: float, errors: dict[int, float], away: int) -> None:
    if not signal:
        return
    decibels = {moved: 10 * math.log10(signal / error) if error else math.inf for moved, error in errors.items()}
    result.sqnr_db = round(decibels[0], 2) if decibels[0] < math.inf else None
    result.scales = "given" if away else "absmax"
    best = max(decibels, key=lambda moved: decibels[moved])
    if decibels[best] >= decibels[0] + _CLEAR and layer.zeros is not None:
        text = (
            f"zero points read as z{layer.offset + best:+d} are {decibels[best] - decibels[0]:.1f} dB nearer to the "
            f"weights than z{layer.offset:+d}: version 1 of GPTQ stores z − 1, version 2 and AWQ store z"
        )
        result.findings.append(Finding("fail", "zero-point", layer.zeros.name, text))
    if decibels[0] <= 0:
        text = f"the decoded matrix is further from the weights than zeros are: SQNR {decibels[0]:.2f} dB"
        result.findings.append(Finding("fail", "worse-than-zeros", layer.codes.name, text, expected="above 0 dB"))
    elif away:
        text = "codes are not the nearest under their scales, as GPTQ chooses them, or the weights are others"
        result.findings.append(Finding("note", "calibrated", layer.codes.name, text, away, result.elements))
