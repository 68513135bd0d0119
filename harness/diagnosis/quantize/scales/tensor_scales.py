"""Mistakes in the amax of a tensor and in the tensor scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Override, QuantizeDeviation, Replay
from narrowgauge.harness.diagnosis.quantize.elements import roundings
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.scaling import FLT_MAX, divide, tensor_scale
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.spec.recipes import Recipe

_AMAX = frozenset({"amax"})
_SCALED = frozenset({"tensor scale", "scales", "codes"})
AMAX_IS = "the amax of the tensor is"
SCALES_FOR_ZERO_AMAX = {"the largest number": FLT_MAX, "2^127": 2.0**127, "infinite": inf, "0": 0.0}
"""Wrong scales for an amax of 0, where the recipe prescribes 1."""


def tensor_scale_deviations(recipe: Recipe, *, amax_given: bool = False) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor's amax and scale, the most plausible first. None if the recipe has no tensor scale.

    `amax_given`: whether the amax is an argument. A kernel then computes none, and its only deviation is to ignore it.
    """
    if recipe.tensor_scale == "none":
        return
    if amax_given:
        yield QuantizeDeviation(
            "given-amax-ignored", "the amax is that of the matrix, not the given one", _AMAX,
            overrides={"amax": lambda replay: compute_amax(replay.x, replay.recipe)},
        )  # fmt: skip
    else:
        yield from _amax_deviations(recipe)
    if recipe.tensor_scale == "given":
        for form in (lambda amax, most: divide(most, amax), lambda amax, most: divide(1.0, amax) * most):
            yield QuantizeDeviation(
                "tensor-scale-ignored", "the scale is that of the amax of the tensor, not the given one", _SCALED,
                overrides={stage: partial(_stage_of_present_amax, form, stage) for stage in _SCALED}, row_local=False,
            )  # fmt: skip
    else:
        yield from _tensor_scale_deviations(recipe)


def _amax_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of an amax that the kernel computes."""
    if recipe.nan == "ignore":
        yield QuantizeDeviation(
            "nan-spread", "the amax of the tensor is NaN where an element is", _AMAX,
            overrides={"amax": lambda replay: compute_amax(replay.x, replace(replay.recipe, nan="propagate"))},
        )  # fmt: skip
    else:
        yield QuantizeDeviation(
            "nan-dropped", "the amax of the tensor is without elements that are NaN", _AMAX,
            overrides={"amax": lambda replay: compute_amax(replay.x, replace(replay.recipe, nan="ignore"))},
        )  # fmt: skip
    yield changed_input_deviation(
        "infinity-dropped", "without elements that are infinite", lambda x: x.masked_fill(x.isinf(), 0)
    )
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield QuantizeDeviation(
            f"amax-through-{name}", f"the amax of the tensor is rounded to {name}", _AMAX,
            overrides={"amax": partial(_rounded_amax, dtype)}, implausible=True,
        )  # fmt: skip
    for name, bits in roundings.UPPER_BITS.items():
        yield QuantizeDeviation(
            f"amax-truncated:{name}", f"{AMAX_IS} cut to the upper {bits} bits of float32", _AMAX,
            overrides={"amax": partial(_upper_bits_of_amax, bits)}, implausible=True,
        )  # fmt: skip
    if recipe.granularity == "row":
        yield QuantizeDeviation(
            "amax-of-tensor", "the amax of every row is that of the tensor", _AMAX,
            overrides={"amax": _tensor_amax_for_rows},
        )  # fmt: skip


def compute_amax(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Amax of the tensor or of each row, by the granularity of the recipe."""
    blocks = block_amaxes(x, recipe)
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _tensor_amax_for_rows(replay: Replay) -> torch.Tensor:
    row_amaxes = compute_amax(replay.x, replay.recipe)
    return row_amaxes.amax().expand(row_amaxes.shape).contiguous()


def changed_input_deviation(
    cause: str, sentence: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"{AMAX_IS} {sentence}", _AMAX,
        overrides={"amax": lambda replay: compute_amax(change(replay.x), replay.recipe)},
    )  # fmt: skip


def _tensor_scale_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of the tensor scale. Later stages show them if the kernel does not report the tensor scale."""
    yield QuantizeDeviation(
        "subnormal-amaxes-flushed", "the scale of the tensor is that of an amax of 0 where the amax is subnormal",
        _SCALED, overrides={"tensor scale": _scale_without_subnormal_amaxes},
    )  # fmt: skip
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
            cause, f"the scale of the tensor {phrase}", _SCALED, overrides={"tensor scale": override},
            implausible=True,
        )  # fmt: skip


def _stage_of_present_amax(
    form: Callable[[torch.Tensor, float], torch.Tensor], stage: str, replay: Replay
) -> torch.Tensor:
    """The stage with the scale `form` of the amax and of the largest element, in place of the given scale."""
    amax = compute_amax(replay.kernel_matrix.subject.x, replay.recipe)
    scaled = Replay(replay.kernel_matrix)
    scaled.tensor_scale = torch.where((amax > 0) & amax.isfinite(), form(amax, replay.recipe.element.max), 1.0)
    return scaled.tensor_scale if stage == "tensor scale" else scaled.compute_stage(stage)


def _scale_for_zero_amax(number: float, replay: Replay) -> torch.Tensor:
    return torch.where(_replay_amax(replay) == 0, number, _correct_scale(replay))


def _rounded_amax(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return compute_amax(replay.x, replay.recipe).to(dtype).float()


def _upper_bits_of_amax(bits: int, replay: Replay) -> torch.Tensor:
    return roundings.upper_bits(compute_amax(replay.x, replay.recipe), bits)


def _rounded_scale(dtype: torch.dtype, replay: Replay) -> torch.Tensor:
    return _correct_scale(replay).to(dtype).float()


def _flushed_scale(replay: Replay) -> torch.Tensor:
    scale = _correct_scale(replay)
    return torch.where(scale.abs() < torch.finfo(torch.float32).smallest_normal, 0.0, scale)


def _scale_without_subnormal_amaxes(replay: Replay) -> torch.Tensor:
    amax = _replay_amax(replay)
    flushed = amax.masked_fill(amax < torch.finfo(torch.float32).smallest_normal, 0)
    return tensor_scale(flushed, replay.recipe, replay.x.dtype)


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
