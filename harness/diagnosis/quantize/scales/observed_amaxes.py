"""Wrong amaxes of a tensor, recognized by their values: of another call, of a part, without magnitudes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from narrowgauge.harness.checks.bit_equality import different_bits, equal_bits
from narrowgauge.harness.diagnosis.quantize.deviation import QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import format_ranges
from narrowgauge.harness.diagnosis.quantize.scales.tensor_scales import LARGEST_ELEMENT
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.harness.operations.stages.deviation import Deviation

PART_CHANCE = 1e-3
"""Significance level of a part of a tensor that an amax leaves out."""
LEAST_NEGATIVE = 10
"""Least number of elements above the amaxes that are all negative. Elements of random signs have this property in one
of 1024 failures."""
_SAMPLE = 128
"""Elements of a tensor that count."""
_NEAR_RATIO = 2.0**-10
"""Relative distance of a magnitude from an amax that the ratio of two scales gives, both rounded to float32."""
_LARGEST = 24
"""Largest magnitudes of a tensor that are tried as its amax."""
_MODULI = (8, 16, 32, 64, 128, 256)


def observed_amax_deviations(matrices: Sequence[KernelMatrix], history: SearchHistory) -> Iterator[QuantizeDeviation]:
    """Explanations of the kernel's amaxes: kept from an earlier call, or that of a part of the tensor.

    `history`: correct amaxes of earlier calls, and elements above the amaxes of earlier cases. A kept amax can be
    smaller than the correct amax and equal to the magnitude of some element. An amax is therefore that of a part only
    if chance does not explain that all elements above it lie in the part that it leaves out (`left_out_part`). NaN is
    above no amax, so a tensor with NaN shows no part.
    Otherwise the deviations only say that the amax is too small or too large, and are not exact. An amax is that of the
    elements without their magnitudes only on the evidence of all failing cases so far (`lacks_magnitudes`).
    """
    above, sizes = [], []
    smaller = larger = has_magnitude = True
    has_nan = False
    wrong_numbers: set[float] = set()
    for matrix in matrices:
        wrong = wrong_amaxes(matrix)
        if not bool(wrong.any()):
            continue
        magnitude = matrix.subject.x.float().abs()
        kernel_amax, correct = matrix.kernel_stages["amax"].view(-1, 1), _correct_amax(matrix).view(-1, 1)
        elements = magnitude if len(kernel_amax) > 1 else magnitude.view(1, -1)
        has_magnitude &= bool((elements == kernel_amax).any(1)[wrong].all())
        has_nan |= bool(magnitude.isnan().any())
        smaller &= bool((kernel_amax < correct).flatten()[wrong].all())
        larger &= bool((kernel_amax > correct).flatten()[wrong].all())
        above.append(magnitude > kernel_amax)
        wrong_numbers.update(kernel_amax.flatten()[wrong].tolist())
        sizes.append(kernel_amax.numel())
    if not above:
        return
    others = {float(_correct_amax(matrix)) for matrix in matrices if _correct_amax(matrix).numel() == 1}
    if not has_magnitude:  # no amax of a part of the tensor: another operand, or the rotated half
        others |= history.amaxes_of_case
    if set(sizes) == {1} and wrong_numbers <= {*history.earlier_amaxes, *others} - {0.0}:
        numbers = ", ".join(f"{number:g}" for number in sorted(wrong_numbers))
        yield STALE.bound(numbers)
    elif smaller and lacks_magnitudes(matrices, history):
        yield LARGEST_ELEMENT
    elif smaller and has_magnitude and not has_nan and (part := left_out_part(above, history)):
        yield PARTIAL.bound(part)
    elif smaller:
        count = sum(int(mask.count_nonzero()) for mask in above)
        negative = "; all of them negative" if count > 1 and _are_negative(matrices) else ""
        place = f"{count} of its elements: {describe_place(above)}{negative}"
        yield TOO_SMALL.bound(place)
    elif larger:
        yield TOO_LARGE


def _kernel_amax(r: Replay) -> torch.Tensor:
    return r.kernel_matrix.kernel_stages["amax"]


STALE: QuantizeDeviation = Deviation(
    "amax-stale", "the amax of the tensor is {}, the amax of an earlier call or of another tensor", "amax",
    _kernel_amax, of_case=True,
)  # fmt: skip
PARTIAL: QuantizeDeviation = Deviation(
    "amax-partial", "the amax of the tensor is that of some of its elements; those above it are in {}", "amax",
    _kernel_amax, of_case=True,
)  # fmt: skip
TOO_SMALL: QuantizeDeviation = Deviation(
    "amax-too-small", "the amax of the tensor is smaller than {}", "amax", _kernel_amax, exact=False, of_case=True
)
TOO_LARGE: QuantizeDeviation = Deviation(
    "amax-too-large", "the amax of the tensor is larger than every magnitude of its elements", "amax", _kernel_amax,
    exact=False, of_case=True,
)  # fmt: skip


def hidden_amax_deviations(matrices: Sequence[KernelMatrix]) -> Iterator[QuantizeDeviation]:
    """The amax that is the largest element, for a kernel that does not report its amax. The deviation is exact if at
    least `LEAST_NEGATIVE` elements of the matrices have a larger magnitude."""
    count = 0
    for matrix in matrices:
        x = matrix.subject.x.float()
        rows = x if matrix.subject.recipe.granularity == "row" else x.reshape(1, -1)
        count += int((rows < -rows.clamp(min=0).amax(1, keepdim=True)).count_nonzero())
    if count >= LEAST_NEGATIVE:
        yield LARGEST_ELEMENT
    else:
        small = TOO_SMALL.bound(f"{count} of its elements, all of them negative")
        yield replace(small, change=LARGEST_ELEMENT.change, of_case=False)


def derived_amax_deviations(matrices: Sequence[KernelMatrix], history: SearchHistory) -> Iterator[QuantizeDeviation]:
    """The amax of a part of the tensor, for a kernel that reports none: the magnitude with the scales of the kernel.

    Every tensor with wrong scales must have such a magnitude among its largest, or the one that the ratio of a single
    scale to the right one gives. `left_out_part` decides if the elements above it lie in a part.
    """
    above, amaxes = [], {}
    for matrix in matrices:
        scales = Replay(matrix).compute_stage("scales")
        if equal_bits(matrix.kernel_stages["scales"], scales):
            continue
        magnitude = matrix.subject.x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
        for candidate in _candidate_amaxes(matrix, magnitude, scales):
            replay = Replay(matrix, _with_amaxes_of(matrices, {id(matrix): candidate}))
            if equal_bits(matrix.kernel_stages["scales"], replay.compute_stage("scales")):
                amaxes[id(matrix)] = candidate
                above.append(magnitude > candidate)
                break
        else:
            return
    if not above:
        return
    has_nan = any(bool(matrix.subject.x.isnan().any()) for matrix in matrices)
    place = "" if has_nan else left_out_part(above, history)
    count = sum(int(mask.count_nonzero()) for mask in above)
    row = PARTIAL.bound(place) if place else TOO_SMALL.bound(f"{count} of its elements: {describe_place(above)}")
    found = _with_amaxes_of(matrices, amaxes)
    yield replace(found, cause=row.cause, sentence=row.sentence, exact=row.exact)


def _candidate_amaxes(matrix: KernelMatrix, magnitude: torch.Tensor, scales: torch.Tensor) -> list[float]:
    """Magnitudes below the amax, the largest first."""
    different = torch.unique(magnitude).flip(0)[1:]
    if matrix.subject.recipe.whole and scales.numel() == 1 and scales.is_floating_point():
        ratio = float(matrix.kernel_stages["scales"].flatten()[0] / scales.flatten()[0])
        near = torch.tensor([ratio, 1 / ratio if ratio else 0.0]).to(different) * magnitude.amax()
        different = different[((different.unsqueeze(1) / near - 1).abs() < _NEAR_RATIO).any(1)]
    return [float(one) for one in different[:_LARGEST]]


def _with_amaxes_of(matrices: Sequence[KernelMatrix], amaxes: dict[int, float]) -> QuantizeDeviation:
    """Scales of these amaxes, by the identity of their matrices."""
    recipe = matrices[0].subject.recipe
    step = "blocks" if recipe.tensor_scale == "none" else "used amax"

    def amax(r: Replay) -> torch.Tensor:
        right = r.blocks if step == "blocks" else r.correct_amax
        return torch.full_like(right, amaxes.get(id(r.kernel_matrix), float(right.amax())))

    return Deviation("", "", step, amax, of_case=True, row_local=False)


def lacks_magnitudes(matrices: Sequence[KernelMatrix], history: SearchHistory) -> bool:
    """Whether all wrong amaxes of the backend so far are the largest elements of their tensors or rows, and at least
    `LEAST_NEGATIVE` elements have a larger magnitude. All these elements are negative then.

    An amax of a part of a tensor has this property by chance if few elements are above it. The wrong amaxes of
    `matrices` are added to `history`; equal amaxes count once, because they can be those of the same tensor.
    """
    for matrix in matrices:
        wrong, x, amax = wrong_amaxes(matrix), *_with_amaxes(matrix)
        if not bool(wrong.any()):
            continue
        is_largest = bool((x.clamp(min=0).amax(1) == amax)[wrong].all())
        above = (x.abs() > amax.unsqueeze(1)) & wrong.unsqueeze(1)
        counts = int(above.count_nonzero()), int((above & (x < 0)).count_nonzero())
        history.signs[amax[wrong].cpu().numpy().tobytes()] = (is_largest, *counts)
    largest, above_counts, negative = zip(*history.signs.values(), strict=True)
    return all(largest) and above_counts == negative and sum(negative) >= LEAST_NEGATIVE


def _with_amaxes(matrix: KernelMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements without NaN, float32, a row for each amax; and the kernel's amaxes."""
    x, amax = matrix.subject.x.float().nan_to_num(0.0, torch.inf, -torch.inf), matrix.kernel_stages["amax"]
    return x if len(amax) > 1 else x.reshape(1, -1), amax


def _are_negative(matrices: Sequence[KernelMatrix]) -> bool:
    """Whether all elements with a magnitude above the wrong amaxes are negative."""
    for matrix in matrices:
        x, amax = _with_amaxes(matrix)
        if bool(((x > amax.unsqueeze(1)) & wrong_amaxes(matrix).unsqueeze(1)).any()):
            return False
    return True


def left_out_part(masks: Sequence[torch.Tensor], history: SearchHistory) -> str:
    """The part of tensors, bool masks (M, K), that contains their True elements. Empty if chance explains the part.

    Parts are the last rows, the last columns, the last elements in memory, aligned runs of elements modulo a power of
    two (lanes of a warp, warps of a block, a stride of a grid), and everything but such a run. n random elements all
    lie in a part with the share f with probability f^n. The part is named if this probability, multiplied by the number
    of parts that are tried, is below `PART_CHANCE`. A single tensor rarely shows a part: if the amax of a part is the
    amax of the rest, one or two elements are above it. The elements of earlier cases in `history` therefore count too,
    and those of this case are added to it.
    """
    for mask in masks:
        positions, shape = mask.flatten().nonzero()[:, 0].cpu(), (mask.shape[0], mask.shape[1])
        positions = positions[:: -(-len(positions) // _SAMPLE) or 1]
        # Cases with the same inputs are no further evidence.
        known = any(shape == other and torch.equal(positions, found) for found, other in history.left_out)
        if len(positions) and not known:
            history.left_out.append((positions, shape))
    elements = [(positions, rows * columns) for positions, (rows, columns) in history.left_out]
    rows = [(positions // shape[1], shape[0]) for positions, shape in history.left_out]
    columns = [(positions % shape[1], shape[1]) for positions, shape in history.left_out]
    parts = [
        (_chance_of_ends(rows), "the last rows"), (_chance_of_ends(columns), "the last columns"),
        (_chance_of_ends(elements), "the end of the memory"),
        *_parts_of_runs(elements),
    ]  # fmt: skip
    chance, part = min(parts, key=lambda part: part[0])
    return part if chance * len(parts) < PART_CHANCE else ""


def _chance_of_ends(tensors: Sequence[tuple[torch.Tensor, int]]) -> float:
    """Probability that random positions all lie as close to the ends of their tensors as these: f^n for the share f."""
    share = max(1 - int(positions.amin()) / size for positions, size in tensors)
    return share ** sum(len(positions) for positions, _ in tensors)


def _parts_of_runs(tensors: Sequence[tuple[torch.Tensor, int]]) -> Iterator[tuple[float, str]]:
    """Aligned runs of elements modulo a power of two, and all elements but such a run: probability and phrase."""
    size = max(size for _, size in tensors)
    for modulus in (1 << bits for bits in range(1, 21)):
        if modulus >= size:
            return
        phases = torch.cat([positions % modulus for positions, extent in tensors if extent > modulus])
        first, last, count = int(phases.amin()), int(phases.amax()), len(phases)
        run = 1 << (first ^ last).bit_length()
        start = first // run * run
        if run < modulus:
            yield (run / modulus) ** (count - 1), f"elements {start} to {start + run - 1} of every {modulus} in memory"
        used = torch.bincount(phases, minlength=modulus).bool()
        length = 1
        while length < modulus and not bool(used.view(-1, length).any(1).all()):
            start = length * int((~used.view(-1, length).any(1)).nonzero()[0])
            phrase = f"all elements but {start} to {start + length - 1} of every {modulus} in memory"
            yield min(1.0, modulus / length * (1 - length / modulus) ** count), phrase
            length *= 2


def _correct_amax(matrix: KernelMatrix) -> torch.Tensor:
    return Replay(matrix).amax_of(matrix.subject.blocks)


def wrong_amaxes(matrix: KernelMatrix) -> torch.Tensor:
    """bool mask (1,) or (M,) of the kernel's wrong amaxes."""
    return different_bits(matrix.kernel_stages["amax"], _correct_amax(matrix))


def describe_place(masks: Sequence[torch.Tensor]) -> str:
    """Number and place of the True elements of several masks: `3, all at column 8-15 modulo 16`."""
    rows = torch.cat([mask.nonzero()[:, 0] for mask in masks])
    columns = torch.cat([mask.nonzero()[:, 1] for mask in masks])
    extents = tuple(max(mask.shape[axis] for mask in masks) for axis in (0, 1))
    count = f"{len(rows)}"
    if len(rows) == 1:
        return f"{count}, at row {int(rows[0])}, column {int(columns[0])}"
    for name, index, extent in (("column", columns, extents[1]), ("row", rows, extents[0])):
        for modulus in _MODULI:
            if modulus >= extent:
                break
            phases = torch.bincount(index % modulus, minlength=modulus).bool()
            if int(phases.sum()) <= modulus // 2:
                return f"{count}, all at {name} {format_ranges(phases)} modulo {modulus}"
        first, last = int(index.amin()), int(index.amax())
        if last - first < extent // 2:
            return f"{count}, all in {name}s {first} to {last} of {extent}"
    return f"{count} anywhere"
