"""Mistakes in the amax of a tensor and in the tensor scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch

from narrowgauge.harness.checks.bit_equality import different_bits
from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import KernelMatrix
from narrowgauge.harness.diagnosis.quantize.scales.block_amaxes import format_ranges
from narrowgauge.harness.diagnosis.search.history import SearchHistory
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.scaling import FLT_MAX, divide, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.spec.recipes import Recipe

_AMAX = frozenset({"amax"})
SCALES_FOR_ZERO_AMAX = {"the largest number": FLT_MAX, "2^127": 2.0**127, "infinite": inf, "0": 0.0}
"""Wrong scales for an amax of 0, where the recipe prescribes 1."""
PART_CHANCE = 1e-3
"""Significance level of a part of a tensor that an amax leaves out."""
_SAMPLE = 128
"""Elements of a tensor that count."""
_MODULI = (8, 16, 32, 64, 128, 256)


def tensor_scale_deviations(recipe: Recipe, *, amax_given: bool = False) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor's amax and scale, the most plausible first. None if the recipe has no tensor scale.

    `amax_given`: whether the amax is an argument. A kernel then computes none, and its only deviation is to ignore it.
    """
    if recipe.tensor_scale == "none":
        return
    if amax_given:
        yield QuantizeDeviation(
            "given-amax-ignored", "the amax is that of the matrix, not the given one", _AMAX,
            overrides={"amax": lambda replay: _compute_amax(replay.x, replay.recipe)},
        )  # fmt: skip
    else:
        yield from _amax_deviations(recipe)
    if recipe.tensor_scale != "given":
        yield from _tensor_scale_deviations(recipe)


def _amax_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of an amax that the kernel computes."""
    yield _changed_input_deviation(
        "amax-without-fabs", "of the elements, not of their magnitudes", lambda x: x.clamp(min=0)
    )
    if recipe.nan == "ignore":
        yield QuantizeDeviation(
            "nan-spread", "the amax of the tensor is NaN where an element is", _AMAX,
            overrides={"amax": lambda replay: _compute_amax(replay.x, replace(replay.recipe, nan="propagate"))},
        )  # fmt: skip
    else:
        yield QuantizeDeviation(
            "nan-dropped", "the amax of the tensor is without elements that are NaN", _AMAX,
            overrides={"amax": lambda replay: _compute_amax(replay.x, replace(replay.recipe, nan="ignore"))},
        )  # fmt: skip
    yield _changed_input_deviation(
        "infinity-dropped", "without elements that are infinite", lambda x: x.masked_fill(x.isinf(), 0)
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield QuantizeDeviation(
            f"amax-through-{name}", f"the amax of the tensor is rounded to {name}", _AMAX,
            overrides={"amax": partial(_rounded_amax, dtype)}, implausible=True,
        )  # fmt: skip
    if recipe.granularity == "row":
        yield QuantizeDeviation(
            "amax-of-tensor", "the amax of every row is that of the tensor", _AMAX,
            overrides={"amax": _tensor_amax_for_rows},
        )  # fmt: skip


def _compute_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Amax of the tensor or of each row, by the granularity of the recipe."""
    blocks = block_amaxes(x, recipe)
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _tensor_amax_for_rows(replay: Replay) -> torch.Tensor:
    row_amaxes = _compute_amax(replay.x, replay.recipe)
    return row_amaxes.amax().expand(row_amaxes.shape).contiguous()


def _changed_input_deviation(
    cause: str, sentence: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"the amax of the tensor is {sentence}", _AMAX,
        overrides={"amax": lambda replay: _compute_amax(change(replay.x), replay.recipe)},
    )  # fmt: skip


def _tensor_scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor scale. Later stages show them if the kernel does not report the tensor scale."""
    changed_stages = frozenset({"tensor scale", "scales", "codes"})
    forms: list[tuple[str, str, Override]] = []
    if recipe.tensor_scale != "amax/max":
        max_product = recipe.max_product
        forms += [
            (f"tensor-scale-order:{expression}", f"is {expression}", _inside_limits(form))
            for expression, form in (
                ("1/(amax/max)", lambda amax: divide(1.0, amax / torch.full_like(amax, max_product))),
                ("1/(amax*(1/max))", lambda amax: divide(1.0, amax * (1.0 / max_product))),
                ("(max/6)/amax*6", lambda amax: divide(max_product / recipe.element.max, amax) * recipe.element.max),
            )
        ]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        forms.append((
            f"tensor-scale-through-{name}", f"is rounded to {name}",
            partial(_rounded_scale, dtype),
        ))  # fmt: skip
    if recipe.tensor_limit in ("1-for-nan", "finite"):
        forms += [
            ("zero-block-not-one", f"is {phrase} for an amax of 0, not 1", partial(_scale_for_zero_amax, number))
            for phrase, number in SCALES_FOR_ZERO_AMAX.items()
        ]
    forms.append(("tensor-scale-flushed", "is flushed to 0 where it is subnormal", _flushed_scale))
    forms.append(("tensor-scale-inverted", "is its inverse", lambda replay: divide(1.0, _correct_scale(replay))))
    for cause, phrase, override in forms:
        yield QuantizeDeviation(
            cause, f"the scale of the tensor {phrase}", changed_stages, overrides={"tensor scale": override},
            implausible=True,
        )  # fmt: skip


def _scale_for_zero_amax(number: float, replay: Replay) -> torch.Tensor:
    return torch.where(_replay_amax(replay) == 0, number, _correct_scale(replay))


def _rounded_amax(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return _compute_amax(replay.x, replay.recipe).to(dtype).float()


def _rounded_scale(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return _correct_scale(replay).to(dtype).float()


def _flushed_scale(replay: Replay) -> torch.Tensor:
    scale = _correct_scale(replay)
    return torch.where(scale.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, scale)


def _replay_amax(replay: Replay) -> torch.Tensor:
    assert replay.amax is not None
    return replay.amax


def _correct_scale(replay: Replay) -> torch.Tensor:
    return tensor_scale(_replay_amax(replay), replay.recipe, replay.x.dtype)


def _inside_limits(form: Callable[[torch.Tensor], torch.Tensor]) -> Override:
    """Tensor scale by `form` of the amax. If the correct scale is at a limit, the correct scale."""

    def override(replay: Replay) -> torch.Tensor:
        amax, correct = _replay_amax(replay), _correct_scale(replay)
        scale = form(amax)
        return torch.where((amax > 0) & scale.isfinite() & (correct < torch.finfo(torch.float32).max), scale, correct)

    return override


def observed_amax_deviations(matrices: Sequence[KernelMatrix], history: SearchHistory) -> Iterator[QuantizeDeviation]:
    """Explanations of the kernel's amaxes: kept from an earlier call, or that of a part of the tensor.

    `history`: correct amaxes of earlier calls, and elements above the amaxes of earlier cases. A kept amax can be
    smaller than the correct amax and equal to the magnitude of some element. An amax is therefore that of a part only
    if chance does not explain that all elements above it lie in the part that it leaves out (`left_out_part`).
    Otherwise the deviations only say that the amax is too small or too large, and are not exact.
    """
    above, sizes = [], []
    smaller = larger = has_magnitude = True
    wrong_numbers: set[float] = set()
    for matrix in matrices:
        wrong = wrong_amaxes(matrix)
        if not bool(wrong.any()):
            continue
        magnitude = matrix.subject.x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
        kernel_amax, correct = matrix.kernel_stages["amax"].view(-1, 1), _correct_amax(matrix).view(-1, 1)
        elements = magnitude if len(kernel_amax) > 1 else magnitude.view(1, -1)
        has_magnitude &= bool((elements == kernel_amax).any(1)[wrong].all())
        smaller &= bool((kernel_amax < correct).flatten()[wrong].all())
        larger &= bool((kernel_amax > correct).flatten()[wrong].all())
        above.append(magnitude > kernel_amax)
        wrong_numbers.update(kernel_amax.flatten()[wrong].tolist())
        sizes.append(kernel_amax.numel())
    if not above:
        return
    others = {float(_correct_amax(matrix)) for matrix in matrices if _correct_amax(matrix).numel() == 1}
    if set(sizes) == {1} and wrong_numbers <= {*history.earlier_amaxes, *others} - {0.0}:
        numbers = ", ".join(f"{number:g}" for number in sorted(wrong_numbers))
        yield _kernel_amax("amax-stale", f"{numbers}, the amax of an earlier call or of another tensor")
    elif smaller and has_magnitude and (part := left_out_part(above, history)):
        yield _kernel_amax("amax-partial", f"that of some of its elements; those above it are in {part}")
    elif smaller:
        count = sum(int(mask.count_nonzero()) for mask in above)
        place = f"{count} of its elements: {describe_place(above)}"
        yield _kernel_amax("amax-too-small", f"smaller than {place}", exact=False)
    elif larger:
        yield _kernel_amax("amax-too-large", "larger than every magnitude of its elements", exact=False)


def _kernel_amax(cause: str, phrase: str, *, exact: bool = True) -> QuantizeDeviation:
    """The deviation with the kernel's own amax."""
    return QuantizeDeviation(
        cause, f"the amax of the tensor is {phrase}", _AMAX, exact=exact,
        overrides={"amax": lambda replay: replay.kernel_matrix.kernel_stages["amax"]},
    )  # fmt: skip


def left_out_part(masks: Sequence[torch.Tensor], history: SearchHistory) -> str:
    """The part of tensors, bool masks (M, K), that contains their True elements. Empty if chance explains the part.

    Parts are the last elements in memory, the last columns, aligned runs of elements modulo a power of two (lanes of a
    warp, warps of a block, a stride of a grid), and everything but such a run. n random elements all lie in a part with
    the share f with probability f^n. The part is named if this probability, multiplied by the number of parts that are
    tried, is below `PART_CHANCE`. A single tensor rarely shows a part: if the amax of a part is the amax of the rest,
    one or two elements are above it. The elements of earlier cases in `history` therefore count too, and those of this
    case are added to it.
    """
    history.left_out += [
        (positions[:: -(-len(positions) // _SAMPLE)], (mask.shape[0], mask.shape[1]))
        for mask in masks
        if len(positions := mask.flatten().nonzero()[:, 0].cpu())
    ]
    elements = [(positions, rows * columns) for positions, (rows, columns) in history.left_out]
    columns = [(positions % shape[1], shape[1]) for positions, shape in history.left_out]
    parts = [
        (_chance_of_ends(elements), "the end of the memory"), (_chance_of_ends(columns), "the last columns"),
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
    return _compute_amax(matrix.subject.x, matrix.subject.recipe)


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
