"""What kernels have in place of the amax of a tensor, and of its scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import torch

from narrowgauge.harness.diagnosis.quantize.deviation import Hook, QuantizeDeviation, Run
from narrowgauge.harness.diagnosis.quantize.evidence import Evidence, different
from narrowgauge.harness.diagnosis.quantize.scales.amaxes import ranges
from narrowgauge.reference.numbers.blocks import tensor_amax
from narrowgauge.reference.quantize.steps import block_amaxes, row_amax
from narrowgauge.reference.quantize.scaling import FLT_MAX, divide, tensor_scale
from narrowgauge.spec.recipes import Recipe

_AMAX = frozenset({"amax"})
OF_ZERO = {"the largest number": FLT_MAX, "2^127": 2.0**127, "infinite": inf, "0": 0.0}
"""What kernels make of max/0 where a scale is to be 1."""
_MODULI = (8, 16, 32, 64, 128, 256)


def tensor_deviations(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Deviations of a recipe's amax and scale of the tensor, the most plausible first; none of one level of scales."""
    if recipe.tensor_scale == "none":
        return
    yield _amax("amax-without-fabs", "of the elements, not of their magnitudes", lambda x: x.clamp(min=0))
    if recipe.nan == "ignore":
        yield QuantizeDeviation(
            "nan-spread", "the amax of the tensor is NaN where an element is", _AMAX,
            hooks={"amax": lambda run: _of(run, run.x, replace(run.recipe, nan="propagate"))},
        )  # fmt: skip
    else:
        yield QuantizeDeviation(
            "nan-dropped", "the amax of the tensor is without elements that are NaN", _AMAX,
            hooks={"amax": lambda run: _of(run, run.x, replace(run.recipe, nan="ignore"))},
        )  # fmt: skip
    yield _amax("infinity-dropped", "without elements that are infinite", lambda x: x.masked_fill(x.isinf(), 0))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield QuantizeDeviation(
            f"amax-through-{name}", f"the amax of the tensor is rounded to {name}", _AMAX,
            hooks={"amax": partial(_through, dtype)}, odd=True,
        )  # fmt: skip
    if recipe.granularity == "row":
        yield QuantizeDeviation(
            "amax-of-tensor", "the amax of every row is that of the tensor", _AMAX,
            hooks={"amax": lambda run: (row := _of(run, run.x, run.recipe)).amax().expand(row.shape).contiguous()},
        )  # fmt: skip
    if recipe.tensor_scale != "given":
        yield from _scales(recipe)


def _of(run: Run, x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    blocks = block_amaxes(x, recipe)
    return tensor_amax(blocks) if recipe.granularity == "tensor" else row_amax(blocks)


def _amax(cause: str, sentence: str, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizeDeviation:
    return QuantizeDeviation(
        cause, f"the amax of the tensor is {sentence}", _AMAX,
        hooks={"amax": lambda run: _of(run, change(run.x), run.recipe)},
    )  # fmt: skip


def _scales(recipe: Recipe) -> Iterator[QuantizeDeviation]:
    """Of the tensor's scale, which later stages have where the kernel does not show it."""
    later = frozenset({"tensor scale", "scales", "codes"})
    forms: list[tuple[str, str, Hook]] = []
    if recipe.tensor_scale != "amax/max":
        most = recipe.max_product
        forms += [
            (f"tensor-scale-order:{expression}", f"is {expression}", _limited(form))
            for expression, form in (
                ("1/(amax/max)", lambda amax: divide(1.0, amax / torch.full_like(amax, most))),
                ("1/(amax*(1/max))", lambda amax: divide(1.0, amax * (1.0 / most))),
                ("(max/6)/amax*6", lambda amax: divide(most / recipe.element.max, amax) * recipe.element.max),
            )
        ]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        forms.append((
            f"tensor-scale-through-{name}", f"is rounded to {name}",
            partial(_scale_through, dtype),
        ))  # fmt: skip
    if recipe.tensor_limit in ("1-for-nan", "finite"):
        forms += [
            ("zero-block-not-one", f"is {words} for an amax of 0, not 1", partial(_of_zero, number))
            for words, number in OF_ZERO.items()
        ]
    forms.append(("tensor-scale-inverted", "is its inverse", lambda run: divide(1.0, _right(run))))
    for cause, sentence, hook in forms:
        yield QuantizeDeviation(
            cause, f"the scale of the tensor {sentence}", later, hooks={"tensor scale": hook}, odd=True
        )


def _of_zero(number: float, run: Run) -> torch.Tensor:
    return torch.where(_given(run) == 0, number, _right(run))


def _through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return _of(run, run.x, run.recipe).to(dtype).float()


def _scale_through(dtype: torch.dtype, run: Run) -> torch.Tensor:
    return _right(run).to(dtype).float()


def _given(run: Run) -> torch.Tensor:
    assert run.amax is not None
    return run.amax


def _right(run: Run) -> torch.Tensor:
    return tensor_scale(_given(run), run.recipe, run.x.dtype)


def _limited(form: Callable[[torch.Tensor], torch.Tensor]) -> Hook:
    """What `form` makes of the amax; where the recipe's own is at a limit, that."""

    def hook(run: Run) -> torch.Tensor:
        amax, right = _given(run), _right(run)
        found = form(amax)
        return torch.where((amax > 0) & found.isfinite() & (right < torch.finfo(torch.float32).max), found, right)

    return hook


def found_amaxes(found: Sequence[Evidence]) -> Iterator[QuantizeDeviation]:
    """Where amaxes are too small: those of some of the elements, and where the others lie. Where too large: stale."""
    above = []
    smaller = larger = True
    for each in found:
        wrong = different_rows(each)
        if not bool(wrong.any()):
            continue
        magnitude = each.subject.x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf)
        given, right = each.shown["amax"].view(-1, 1), _own(each).view(-1, 1)
        own = magnitude if len(given) > 1 else magnitude.view(1, -1)
        smaller &= bool(((own == given).any(1) & (given < right).flatten())[wrong].all())
        larger &= bool((given > right).flatten()[wrong].all())
        above.append(magnitude > given)
    if not above:
        return
    if smaller:
        sentence = f"the amax of the tensor is that of some of its elements; those above it are {place(above)}"
        yield QuantizeDeviation(
            "amax-partial", sentence, _AMAX, hooks={"amax": lambda run: run.evidence.shown["amax"]},
        )  # fmt: skip
    if larger:
        yield QuantizeDeviation(
            "amax-stale", "the amax of the tensor is larger than every magnitude: another tensor's, or one from before",
            _AMAX, hooks={"amax": lambda run: run.evidence.shown["amax"]}, exact=False,
        )  # fmt: skip


def _own(each: Evidence) -> torch.Tensor:
    return _of(Run(each), each.subject.x, each.subject.recipe)


def different_rows(each: Evidence) -> torch.Tensor:
    """bool (1,) or (M,): whether an amax that is shown is wrong."""
    return different(each.shown["amax"], _own(each))


def place(masks: Sequence[torch.Tensor]) -> str:
    """Where the True elements of some matrices lie, for a sentence: `3, all in columns 8-15 modulo 16`."""
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
                return f"{count}, all at {name} {ranges(phases)} modulo {modulus}"
        first, last = int(index.amin()), int(index.amax())
        if last - first < extent // 2:
            return f"{count}, all in {name}s {first} to {last} of {extent}"
    return f"{count} anywhere"
