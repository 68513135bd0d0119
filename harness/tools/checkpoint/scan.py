"""Judging codes and scales without the weights: values that the format or the rule of every dialect excludes.

The rule behind the blocks: a scale is made from the largest magnitude of its block, so the block holds a code near the
largest one. `least_top` has the bound, over all dialects of narrowgauge.spec.dialects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from narrowgauge.harness.checks.statistics.tail_bounds import binomial
from narrowgauge.harness.tools.checkpoint.files import scalar
from narrowgauge.harness.tools.checkpoint.findings import Finding, LayerResult, Severity
from narrowgauge.harness.tools.checkpoint.layouts import Layer
from narrowgauge.harness.tools.checkpoint.pairing import Pairing, tiled_scales
from narrowgauge.spec.formats import E2M1, E4M3, E8M0, FP32

SLAB = 1 << 23
"""Bytes of codes that are read at once."""
SAMPLE = 1 << 19
"""Bytes of a slab with codes counted for the statistics."""
_LARGEST_WEIGHT = 2688.0
"""Magnitude that a scale of 1 for the tensor allows in NVFP4. Larger weights are named in a warning."""
_LARGEST_HALF = 65504.0
FALSE_ALARM = 1e-9
"""Probability that the statistics of a checkpoint warn of a right one, under their stated assumption, all together."""


def slab_rows(layer: Layer) -> int:
    """Rows that are read at once: whole blocks, about `SLAB` bytes."""
    width = max(1, layer.shape[1] // (2 if layer.element is E2M1 else 1))
    height = max(1, layer.block[0]) if layer.scale is FP32 else 128  # whole tiles of 128x4 scales
    return max(height, SLAB // width // height * height)


def least_top(layer: Layer) -> int:
    """Smallest code of the largest magnitude of a block, in every dialect, if the scale is a normal number.

    E4M3 scales are within 1/16 of amax/6, so the block has an element of at least 5.64, code 7; 4over6 maps to 4, code
    6. Exponents of all rules give at least 2^emax/2 of the largest power of two, less a rounding. A float32 scale is
    amax over the largest number, or the power of two above: more than half of the largest number.
    """
    if layer.scale is E4M3:
        return 6
    top = layer.element.max_code >> layer.element.mantissa_bits << layer.element.mantissa_bits
    return top - (1 << layer.element.mantissa_bits)


@dataclass
class _Count:
    """Blocks or elements with a mistake, and the first place."""

    count: int = 0
    first: str = ""

    def add(self, wrong: torch.Tensor, row: int, stored: torch.Tensor, layer: Layer, noun: str) -> None:
        """Count `wrong` (rows, columns), whose first row is `row`; `stored` has the bytes or numbers of its shape."""
        found = int(wrong.count_nonzero())
        if found and not self.first:
            i, j = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            value = stored[i, j].item()
            shown = f"byte 0x{value:02X}" if stored.dtype == torch.uint8 else f"number {value!r}"
            place = f"column {j}"
            if noun == "block" and layer.block[1]:
                width = layer.block[1]
                place = f"block {j} (columns {j * width} to {min(layer.shape[1], (j + 1) * width) - 1})"
            elif noun == "block":
                place = "its scale"
            height = max(1, layer.block[0]) if noun == "block" else 1
            self.first = f"row {row * height + i * height}, {place}: {shown}"
        self.count += found


@dataclass
class Scan:
    """Counts of a layer, slab by slab."""

    layer: Layer
    nan_scales: _Count = field(default_factory=_Count)
    negative_scales: _Count = field(default_factory=_Count)
    lost: _Count = field(default_factory=_Count)
    """Blocks with scale 0, of E8M0 scale byte 0, and a code that is not 0."""
    nan_codes: _Count = field(default_factory=_Count)
    low_top: _Count = field(default_factory=_Count)
    """Blocks without a code of the largest magnitude, although their scale is a normal number."""
    blocks: int = 0
    full: int = 0
    """Blocks with the largest scale of the format."""
    full_tops: int = 0
    """Codes of the largest magnitude in these blocks, in the samples of NVFP4; with `sampled_full` such blocks."""
    sampled: int = 0
    sampled_full: int = 0
    tops: int = 0
    """Blocks with a code that is not 0."""
    equal: bool = True
    """Whether all scales are the same."""
    first_scale: float | int | None = None
    largest: float = 0.0
    """Largest block scale."""
    empty_rows: _Count = field(default_factory=_Count)
    """Rows without a code other than 0 and -0."""
    empty_scales: tuple[float, float] = (math.inf, -math.inf)
    """Smallest and largest ordinary scale of these rows, as stored: equal if the same rule for zeros gives both."""
    pairing: Pairing = field(default_factory=Pairing)
    written: bool = False
    """Whether a code is neither 0 nor -0."""
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(256, dtype=torch.int64))
    """Number of each byte in the samples of the codes, the first `SAMPLE` bytes of each slab."""
    differences: torch.Tensor | None = None
    """Of packed codes: for each byte of a row, the sum over the samples of |low| - |high|, in codes."""

    def add(self, codes: torch.Tensor, scales: torch.Tensor, start: int) -> None:
        """Count the rows from `start` on: codes and scales as of `Layer.read`."""
        layer = self.layer
        magnitudes = codes & (0x77 if layer.element is E2M1 else 0x7F)
        empty = magnitudes.amax(1) == 0 if codes.shape[1] else torch.ones(len(codes), dtype=torch.bool)
        self.written = self.written or not bool(empty.all())
        self.empty_rows.add(empty.unsqueeze(1), start, codes, layer, "element")
        sample = codes[: _sampled(codes)]
        self.histogram += torch.bincount(sample.reshape(-1), minlength=256)
        if layer.element is E2M1:
            table = _difference_table()
            sample = _as_stored(sample, layer)
            sums = table.index_select(0, sample.reshape(-1).int()).view(sample.shape).sum(0, dtype=torch.int64)
            self.differences = sums if self.differences is None else self.differences + sums
        else:
            element = layer.element
            wrong = (codes & 0x7F) > element.max_code
            wrong = wrong if element.negative_zero else codes.eq(element.sign_code)
            self.nan_codes.add(wrong, start, codes, layer, "element")
        self.blocks += scales.numel()
        if scales.numel():
            self._add_blocks(codes, scales, start // max(1, layer.block[0]))
            self._add_empty(empty, scales)
            if layer.block[0] == 1 and layer.block[1]:
                self.pairing.add(codes[: _sampled(codes)], scales, layer)

    def _add_blocks(self, codes: torch.Tensor, scales: torch.Tensor, row: int) -> None:
        layer = self.layer
        if self.first_scale is None:
            self.first_scale = scales.view(-1)[0].item()
        self.equal = self.equal and bool((scales == self.first_scale).all())
        if layer.scale is FP32:
            nan, negative, zero, clamped = ~scales.isfinite(), scales < 0, scales == 0, scales.abs() < 1e-30
            magnitude, full = scales.masked_fill(nan, 0).clamp(min=0), torch.zeros_like(nan)
        elif layer.scale is E8M0:
            nan, full, clamped = scales == 0xFF, scales == 0xFE, (scales < 3) | (scales > 252)
            negative, zero = torch.zeros_like(nan), scales == 0  # 2^-127
            magnitude = scales.masked_fill(nan, 0)
        else:  # of a tiny or a saturated E4M3 scale, dialects say nothing about the largest code
            magnitude = scales & 0x7F
            nan, zero, full = magnitude == 0x7F, magnitude == 0, scales == 0x7E
            negative, clamped = (scales > 0x80) & ~nan, (magnitude <= 0x08) | full
            magnitude = magnitude.masked_fill(nan, 0)
        self.nan_scales.add(nan, row, scales, layer, "block")
        self.negative_scales.add(negative & ~nan, row, scales, layer, "block")
        top = magnitude.amax().item()
        self.largest = max(self.largest, layer.scale.value(int(top)) if scales.dtype == torch.uint8 else float(top))
        self.full += int(full.count_nonzero())
        if (found := self._tops(codes)) is not None:
            used, reached = found
            self.tops += int(used.count_nonzero())
            self.lost.add(zero & used, row, scales, layer, "block")
            self.low_top.add(used & ~reached & ~nan & ~zero & ~clamped, row, scales, layer, "block")
        if layer.scale is E4M3:
            full = full[: _sampled(codes)]
            self.sampled += full.numel()
            self.sampled_full += int(full.count_nonzero())
            nibbles = self._blocks_of(codes[: _sampled(codes)])[full]
            self.full_tops += int(((nibbles & 0x07) == 0x07).sum() + ((nibbles & 0x70) == 0x70).sum())

    def _add_empty(self, empty: torch.Tensor, scales: torch.Tensor) -> None:
        """Note the smallest and the largest ordinary scale of rows of blocks without a code other than 0."""
        height = self.layer.block[0]
        if not height:
            return
        rows = torch.nn.functional.pad(empty, (0, -len(empty) % height), value=True).view(-1, height).all(1)
        of_rows = scales[rows]
        if self.layer.scale is FP32:
            ordinary = of_rows[of_rows.isfinite() & (of_rows >= 1e-30)]
        else:
            least = 0x08 if self.layer.scale is E4M3 else 3
            ordinary = of_rows[(of_rows > least) & (of_rows < self.layer.scale.max_code)]
        if ordinary.numel():
            self.empty_scales = (
                min(self.empty_scales[0], float(ordinary.min())), max(self.empty_scales[1], float(ordinary.max()))
            )  # fmt: skip

    def _tops(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """bool, of the shape of the scales: blocks with a code that is not 0, and with a code of `least_top` or more.

        None for a single scale of the tensor, whose rows arrive in slabs.
        """
        layer = self.layer
        height, width = layer.block
        if layer.element is E2M1:
            words = self._blocks_of(codes).contiguous().view(torch.int64)  # 16 codes each
            used = (words & 0x7777777777777777) != 0
            high = words >> 2
            if least_top(layer) == 6:
                high &= words >> 1
            return used.any(2), ((high & 0x1111111111111111) != 0).any(2)
        if not (height or width):
            return None
        magnitudes = codes & 0x7F
        if not width:
            tops = magnitudes.amax(1, keepdim=True)
        else:
            rows, columns = magnitudes.shape
            padded = torch.nn.functional.pad(magnitudes, (0, -columns % width, 0, -rows % height))
            tops = padded.view(padded.shape[0] // height, height, -1, width).amax((1, 3))
        return tops > 0, tops >= least_top(layer)

    def _blocks_of(self, codes: torch.Tensor) -> torch.Tensor:
        """Packed codes as blocks: (rows, blocks, bytes)."""
        width = self.layer.block[1] // 2
        return torch.nn.functional.pad(codes, (0, -codes.shape[1] % width)).view(codes.shape[0], -1, width)


def _sampled(codes: torch.Tensor) -> int:
    """Rows of the sample of a slab."""
    return max(1, SAMPLE // max(1, codes.shape[1]))


def _as_stored(codes: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Packed codes as the file has them: in GGML blocks, element i is low and i + half high."""
    if layer.layout != "GGUF":
        return codes
    width = layer.block[1]
    halves = torch.stack([codes & 0xF, codes >> 4], 2).view(len(codes), -1, 2, width // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).view(codes.shape)


def _difference_table() -> torch.Tensor:
    byte = torch.arange(256)
    return ((byte & 0x7) - (byte >> 4 & 0x7)).to(torch.int8)


def findings_of(scan: Scan, tests: int) -> list[Finding]:
    """The findings of a scanned layer. `tests`: statistical tests of the checkpoint, which share `FALSE_ALARM`."""
    layer = scan.layer
    scales = layer.codes.name if layer.scales is None else layer.scales.name
    found: list[Finding] = []

    def add(severity: str, kind: str, tensor: str, sentence: str, count: _Count | None = None, expected: str = "",
            total: int = 0) -> None:  # fmt: skip
        counted = (count.count, total or scan.blocks, count.first) if count else (0, 0, "")
        found.append(Finding(severity, kind, tensor, sentence, *counted, expected))  # type: ignore[arg-type]

    if scan.nan_scales.count:
        add("fail", "nan-scale", scales, "scales are NaN or infinite, so their blocks decode to NaN", scan.nan_scales,
            f"a number of at most {layer.scale.max:g}" if layer.scale is not FP32 else "a finite number")  # fmt: skip
    if scan.negative_scales.count:
        add(
            "fail",
            "negative-scale",
            scales,
            "scales are negative",
            scan.negative_scales,
            "an amax over a number, not below 0",
        )
    if scan.nan_codes.count:
        add("fail", "nan-code", layer.codes.name, "codes are NaN or infinity", scan.nan_codes, "finite weights",
            math.prod(layer.shape))  # fmt: skip
    values = scan.written
    if scan.blocks and scan.largest == 0 and not scan.nan_scales.count and values:
        add("fail", "never-written", scales, "every scale is 0 and the codes are not: the matrix decodes to "
            "zeros; the scales were never written", scan.lost,
            "a scale above 0 in the block of the largest weight")  # fmt: skip
    elif scan.lost.count and layer.scale is E8M0 and not scan.equal:
        add("warning", "never-written", scales, "blocks with scale 0x00 = 2^-127 hold codes other than 0, and decode "
            "to numbers below 2^-124: their scales were never written. Assumption of the warning: no block of the "
            "weights has so small numbers alone", scan.lost)  # fmt: skip
    elif scan.lost.count and layer.scale is not E8M0:
        add("fail" if layer.scale is FP32 else "note", "zero-scale", scales,
            "blocks with scale 0 hold codes other than 0, and decode to zeros", scan.lost,
            "scale 0 only for tiny weights" if layer.scale is E4M3 else "a scale above 0")  # fmt: skip
    if not values and scan.blocks:
        add(
            "note",
            "zeros",
            layer.codes.name,
            "every code is 0: a matrix of zeros, or codes that were never written",
        )
    elif scan.empty_rows.count:
        _add_empty_rows(scan, add)
    constant = scan.equal and scan.blocks > 1 and scan.largest > 0
    if constant and layer.scale is E8M0 and scan.first_scale == 0 and values:
        add("fail", "never-written", scales, "every scale is 0x00 = 2^-127 and the codes are not 0: the matrix "
            "decodes to numbers below 2^-124; the scales were never written")  # fmt: skip
    elif constant and scan.low_top.count:
        add("fail", "never-written", scales, f"every scale is {_shown(scan)}, although the largest codes of the blocks "
            "differ: the scales were never written, or one scale was used for all blocks", scan.low_top,
            f"a block with this scale has a code of magnitude {_top(layer)} or more")  # fmt: skip
    elif constant and layer.scale is not E4M3 and values and scan.first_scale == (1.0 if layer.scale is FP32 else 127):
        add("warning", "never-written", scales, f"every one of {scan.blocks} block scales is {_shown(scan)}, as memory "
            "filled with ones has it: the scales were never written. Assumption of the warning: not every block of "
            f"the weights has an amax of {layer.element.max / 2:g} to {2 * layer.element.max:g}")  # fmt: skip
    elif constant and layer.scale is not FP32 and scan.tops > 1:
        log_p = (1 - scan.tops) * math.log(2)
        chance = layer.scale is E8M0 or log_p >= math.log(FALSE_ALARM / max(1, tests))
        text = f"every one of {scan.blocks} block scales is {_shown(scan)}"
        if scan.full == scan.blocks:
            text += ", the largest: the tensor scale is too small or inverted"
        elif not chance:
            text += ": the scales were never written, or one scale was used for all blocks"
        text += "" if chance else f"; {_p(log_p)} if no scale has more than half of the blocks"
        kind = "saturated" if scan.full == scan.blocks else "never-written"
        add("note" if chance else "warning", kind, scales, text)
    elif scan.low_top.count:
        add("note", "calibrated", scales, f"blocks have no code of magnitude {_top(layer)} or more, as rounding "
            "by the amax of the block gives: calibrated scales (MSE, GPTQ), or scales of other data",
            scan.low_top)  # fmt: skip
    found += _tensor_scale(layer, scan)
    found += _statistics(layer, scan, tests)
    return found + tiled_scales(scan.pairing, scales, math.log(FALSE_ALARM / max(1, tests)))


def _add_empty_rows(scan: Scan, add: Callable[..., None]) -> None:
    """A finding about rows with only codes of 0, in a matrix with nonzero codes."""
    rows, name, total = scan.empty_rows, scan.layer.codes.name, scan.layer.shape[0]
    if scan.empty_scales[0] < scan.empty_scales[1]:
        text = "rows hold code 0 alone, under scales that differ: the codes were never written"
        if scan.low_top.count:
            text += ". Assumption of the warning: the weights were not pruned after their scales were made"
        expected = f"a block with an ordinary scale has a code of magnitude {_top(scan.layer)} or more"
        add("warning" if scan.low_top.count else "fail", "never-written", name, text, rows, expected, total)
    elif 2 * rows.count >= total:
        add(
            "warning",
            "never-written",
            name,
            "rows hold code 0 alone: they were never written. Assumption of the "
            "warning: no rows were pruned; padding to a power of two is less than half of the rows",
            rows,
            "",
            total,
        )
    else:
        add("note", "zeros", name, "rows hold code 0 alone: padding, pruned rows, or rows that were never written",
            rows, "", total)  # fmt: skip


def _top(layer: Layer) -> str:
    return f"{layer.element.value(least_top(layer)):g}"


def _shown(scan: Scan) -> str:
    stored = scan.first_scale
    return f"0x{stored:02X} = {scan.layer.scale.value(stored):g}" if isinstance(stored, int) else f"{stored!r}"


def _tensor_scale(layer: Layer, scan: Scan) -> list[Finding]:
    """Findings about the tensor scale of NVFP4, and about the size of the decoded numbers."""
    if not layer.tensor_scale_is:
        scales = layer.codes.name if layer.scales is None else layer.scales.name
        largest = scan.largest * layer.element.max
        text = (
            f"block scales are up to {scan.largest:.4g}, so the largest weight would be {largest:.4g}: the scales are "
            "inverted, or their exponents have another bias. Assumption: weights are below 2688"
        )
        return [Finding(_inverted(largest), "inverted", scales, text)] if largest > _LARGEST_WEIGHT else []
    names = {"encode": "weight_global_scale", "decode": "weight_scale_2"}
    if layer.tensor_scale is None:
        name = f"{layer.name}.{names[layer.tensor_scale_is]}"
        return [Finding("fail", "tensor-scale", name, "is missing; the block scales of NVFP4 have a tensor scale")]
    tensor = layer.tensor_scale
    formula = {"encode": "2688/amax", "decode": "amax/2688"}[layer.tensor_scale_is]
    if not tensor.is_float:
        return [Finding("fail", "tensor-scale", tensor.name, f"has dtype {tensor.dtype}; the tensor scale is float32")]
    numbers = scalar(tensor)
    if not numbers.numel():
        return [Finding("fail", "tensor-scale", tensor.name, "holds no number", expected=formula)]
    wrong = ~(numbers.isfinite() & (numbers > 0))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        first = (
            f"number {index}: {numbers[index].item()!r}, bytes 0x{tensor.read().view(-1).numpy().tobytes()[:4].hex()}"
        )
        return [
            Finding("fail", "tensor-scale", tensor.name, "is no positive finite number", int(wrong.sum()),
                    numbers.numel(), first, formula)
        ]  # fmt: skip
    decode_scales = 1 / numbers.double() if layer.tensor_scale_is == "encode" else numbers.double()
    amax = float(decode_scales.amax()) * scan.largest * layer.element.max
    if float(decode_scales.amin()) > 1:
        other = scan.largest * layer.element.max / float(decode_scales.amin())
        return [
            Finding(
                _inverted(amax), "inverted", tensor.name,
                f"is {numbers[0].item():g}, read as {formula}: the largest weight would be {amax:.4g}; inverted it "
                f"would be {other:.4g}. Assumption: weights are below 2688", expected=formula,
            )
        ]  # fmt: skip
    return []


def _inverted(largest: float) -> Severity:
    """Severity of scales with such a largest weight: no weights of a model are beyond the numbers of float16."""
    return "fail" if largest > _LARGEST_HALF else "warning"


def _statistics(layer: Layer, scan: Scan, tests: int) -> list[Finding]:
    """Codes that never occur, although their mirror does; halves of bytes that are never written."""
    counts = _code_counts(scan)
    half = 1 << (layer.element.bits - 1)
    level = math.log(FALSE_ALARM / max(1, tests))
    found = []
    negative, positive = int(counts[half + 1 :].sum()), int(counts[1:half].sum())
    if min(negative, positive) == 0 and max(negative, positive) > 0:
        total = negative + positive
        log_p = (1 - total) * math.log(2)
        if log_p < level:
            sign = "negative" if negative == 0 else "positive"
            found.append(
                Finding("warning", "unused-codes", layer.codes.name,
                        f"no code is {sign}, and {total} codes are not 0; {_p(log_p)} if signs are fair")
            )  # fmt: skip
    elif layer.element is E2M1:
        for code in range(1, half):
            pair = int(counts[code]), int(counts[code + half])
            log_p = (1 - max(pair)) * math.log(2)
            if min(pair) == 0 and log_p < level:
                unused, other = (code, code + half) if pair[0] == 0 else (code + half, code)
                found.append(
                    Finding("warning", "unused-codes", layer.codes.name,
                            f"code {unused} ({E2M1.value(unused):g}) never occurs, and code {other} occurs {max(pair)} "
                            f"times; {_p(log_p)} if signs are fair and independent")
                )  # fmt: skip
    if layer.scale is FP32 and layer.element is not E2M1:
        # The largest weight of a block has the largest code. Of further weights, half of the neighbouring code's range
        # has the largest code if no weight saturates.
        top = layer.element.max_code
        more = int(counts[top] + counts[top + half]) - scan.blocks
        trials = more + int(counts[top - 1] + counts[top - 1 + half])
        if 2 * more > trials:
            log_p = float(binomial(*torch.tensor([more, trials, 0.5], dtype=torch.float64)))
            if log_p < level:
                text = (
                    f"{more + scan.blocks} codes in {scan.blocks} blocks are the largest, {layer.element.max:g}, and "
                    f"{trials - more} the next: the scales are too small, and weights saturate; {_p(log_p)} if large "
                    "weights are not more frequent than small ones"
                )
                found.append(Finding("warning", "saturated", layer.codes.name, text))
    if layer.scale is E4M3 and 0 < scan.sampled_full < scan.sampled:
        # Codes of magnitude 6 beyond the one of every block, in blocks with the largest scale and in the rest.
        others, rest = layer.block[1] - 1, scan.sampled - scan.sampled_full
        rate = (int(counts[7] + counts[15]) - scan.full_tops - rest) / (others * rest)
        rate = min(max(rate, 1 / (others * rest)), 1 - 1e-9)
        more, trials = max(0, scan.full_tops - scan.sampled_full), others * scan.sampled_full
        log_p = float(binomial(*torch.tensor([more, trials, rate], dtype=torch.float64)))
        if more > rate * trials and log_p < level:
            text = (
                f"{scan.sampled_full} blocks with the scale 448 hold {1 + more / scan.sampled_full:.3g} codes of "
                f"magnitude 6 each, and the other {rest} hold {1 + rate * others:.3g}: the tensor scale is too small; "
                f"{_p(log_p)} if large weights are independent"
            )
            found.append(Finding("warning", "saturated", layer.codes.name, text, scan.sampled_full, scan.sampled))
    if layer.element is E2M1:
        table = scan.histogram.view(16, 16)
        nibbles = {"high": int(table[1:].sum()), "low": int(table[:, 1:].sum())}
        log_p = (1 - max(nibbles.values())) * math.log(2)
        if min(nibbles.values()) == 0 and log_p < level:
            empty = min(nibbles, key=lambda name: nibbles[name])
            found.append(
                Finding("warning", "unused-codes", layer.codes.name,
                        f"the {empty} nibble of every byte is 0: unpacked codes, or half of the elements was never "
                        f"written; {_p(log_p)} if even and odd columns are alike")
            )  # fmt: skip
    return found


def _code_counts(scan: Scan) -> torch.Tensor:
    """Number of each code of the element format."""
    if scan.layer.element is not E2M1:
        return scan.histogram
    table = scan.histogram.view(16, 16)
    return table.sum(0) + table.sum(1)


def _p(log_p: float) -> str:
    return f"p <= 1e{math.ceil(log_p / math.log(10))}"


TESTS = 13
"""Statistical tests of a layer, at most."""


def nibble_orders(scans: list[Scan], tests: int) -> list[tuple[Scan, Finding]]:
    """Layers with a different order of nibbles than a sibling with the same inputs.

    Matrices that multiply the same vector, such as the projections q, k and v, have large weights in the same columns.
    Each byte votes by the sign of |low| - |high|, summed over the rows. If both matrices have one order, votes agree
    with a probability of at least 1/2; the warning needs far more disagreement than chance. Warns of no pair if bytes
    are not independent of one another, or if the columns are alike.
    """
    found = []
    groups: dict[tuple[str, int], list[Scan]] = {}
    for scan in scans:
        if scan.differences is not None and "." in scan.layer.name:
            groups.setdefault((scan.layer.name.rpartition(".")[0], scan.layer.shape[1]), []).append(scan)
    for group in groups.values():
        signs = [scan.differences.sign() for scan in group if scan.differences is not None]
        for index, scan in enumerate(group):
            odd = []
            for other, other_signs in enumerate(signs):
                both = signs[index] * other_signs
                voted, agree = int((both != 0).sum()), int((both > 0).sum())
                if other == index or not voted or 2 * agree >= voted:
                    continue
                numbers = torch.tensor([agree, voted, 0.5], dtype=torch.float64)
                log_p = float(binomial(numbers[0], numbers[1], numbers[2]))
                if log_p < math.log(FALSE_ALARM / max(1, tests)):
                    odd.append((log_p, group[other].layer.name, voted - agree, voted))
            # The larger part of a group has the right order; of two, both are named.
            if odd and 2 * len(odd) >= len(group) - 1:
                log_p, name, apart, voted = min(odd)
                text = (
                    f"the order of its nibbles is not that of {name}: in {apart} of {voted} bytes the larger column is "
                    f"the other one; {_p(log_p)} if both have one order"
                )
                found.append((scan, Finding("warning", "nibbles", scan.layer.codes.name, text)))
    return found


def scan_layer(layer: Layer, result: LayerResult) -> Scan:
    """Read a layer slab by slab; `result` counts its elements."""
    scan = Scan(layer)
    step = slab_rows(layer)
    for start in range(0, layer.shape[0], step):
        stop = min(start + step, layer.shape[0])
        codes, scales = layer.read(start, stop)
        if not layer.block[0] and start:  # the only scale was counted with the first slab
            scales = scales[:0]
        scan.add(codes, scales, start)
        result.elements += (stop - start) * layer.shape[1]
    return scan
