"""Which dialect a quantizer speaks: its bytes beside those of every dialect of its recipe, on every input family.

A dialect (`spec.dialects`) is one library's setting of what the definition of a format leaves open. Two dialects
agree on most random inputs and part on ties, subnormal numbers and zeros, so the families decide.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from rich.table import Table

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.families import families_of
from narrowgauge.harness.cases.schema import DTYPES, problem
from narrowgauge.harness.checks.finding import float_view, spaced
from narrowgauge.harness.inputs.inputs import Inputs, make_inputs
from narrowgauge.harness.operations.stages.quantized import code_view, no_codes, scale_view
from narrowgauge.harness.report.text import plural, share
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.spec.dialects import DIALECTS, MX_DIALECTS
from narrowgauge.spec.formats import E4M3, E8M0
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

SHAPE = (64, 256)
"""(M, K) of every input: whole tiles of every recipe, and blocks enough for what a family puts into them in turn."""
_DIALECTS_OF = {E4M3: DIALECTS, E8M0: MX_DIALECTS}
"""Dialects by the format of the block scales."""


@dataclass
class Agreement:
    """How far a quantizer agrees with one dialect, over all inputs."""

    dialect: str
    inputs: int = 0
    explained: int = 0
    """Inputs with every code and every scale byte equal."""
    refused: int = 0
    """Inputs that the dialect itself refuses: an all-zero tensor, say."""
    elements: int = 0
    """Elements of the inputs that it does not refuse."""
    codes: int = 0
    """Of these, equal codes; then codes that are equal where -0 is 0, and equal decoded values."""
    unsigned: int = 0
    values: int = 0
    blocks: int = 0
    scales: int = 0
    """Equal ones of the stored block scales."""
    leaves: str = ""
    """Where it is left first: input, how many, the first place, both bytes."""

    @property
    def figures(self) -> tuple[int, ...]:
        """What two dialects share that the inputs do not tell apart; the larger, the nearer."""
        return self.explained, self.codes + self.scales, self.codes, self.unsigned, self.values


@dataclass
class Survey:
    """A quantizer beside the dialects of a recipe."""

    recipe: str
    inputs: int
    """Inputs that it quantized."""
    agreements: list[Agreement]
    """The nearest first."""
    left_out: list[str] = field(default_factory=list)
    """Inputs that it did not quantize, with its words."""

    @property
    def spoken(self) -> list[Agreement]:
        """The dialects that give its bytes on every input: more than one where no input tells them apart."""
        return [one for one in self.agreements if one.explained == self.inputs]


def dialects_of(recipe: Recipe) -> list[Recipe]:
    """The recipe in every dialect that it has.

    Raises ValueError where there is but one, and for a recipe that rotates: there the order of summation decides too.
    """
    if recipe.transform:
        raise ValueError(f"recipe {recipe} rotates in an order that is free; ask for the recipe without the rotation")
    found = []
    for name in _DIALECTS_OF.get(recipe.scale, {}):
        try:
            found.append(find_recipe(f"{recipe.name}@{name}"))
        except ValueError:  # the dialect and a part of the name exclude each other
            continue
    if len(found) < 2:
        raise ValueError(f"recipe {recipe} has one dialect, and nothing to tell apart; `narrowgauge run` judges it")
    return found


def survey(backend: Backend, name: str = "nvfp4", *, device: str = "cpu", seed: int = 0) -> Survey:
    """Run quantize of `backend`, asked for the recipe `name`, on every family and dtype, beside every dialect.

    Bytes are compared as they are stored; amax and tensor scale, which dialects show in different forms, are not.
    Raises ValueError as `dialects_of` does and for an unknown recipe, BackendError where the backend quantizes no
    input at all, Unsupported where it says of each that it does not.
    """
    recipe = find_recipe(name)
    rules = dialects_of(recipe)
    agreements = [Agreement(one.dialect) for one in rules]
    left_out: list[str] = []
    first: Exception | None = None
    count = 0
    for case in _cases(recipe):
        inputs = make_inputs(case, seed=seed).to(device)
        words = f"{case.inputs} {case.dtype}"
        try:
            options = {"scale": inputs.scale.get("x"), "random": inputs.random.get("x")}
            kernel = backend.quantize(inputs.x, recipe, **options)  # type: ignore[arg-type]
        except (BackendError, Unsupported) as error:
            first = first or error
            left_out.append(f"{words}: {error}")
            continue
        count += 1
        for agreement, dialect in zip(agreements, rules, strict=True):
            _compare(agreement, words, inputs, kernel, dialect)
    if first is not None and not count:
        raise first
    agreements.sort(key=lambda one: one.figures, reverse=True)
    return Survey(str(recipe), count, agreements, left_out)


def _cases(recipe: Recipe) -> list[Case]:
    point = {"operation": "quantize", "recipe": str(recipe), "shape": list(SHAPE), "usage": "rowwise"}
    return [
        Case("quantize", str(recipe), SHAPE, dtype, family)
        for family in families_of("quantize")
        for dtype in DTYPES
        if not problem({**point, "dtype": dtype, "inputs": family})
    ]


def _compare(agreement: Agreement, words: str, inputs: Inputs, kernel: Quantized, recipe: Recipe) -> None:
    agreement.inputs += 1
    try:
        oracle = reference.quantize(inputs.x, recipe, random=inputs.random.get("x"))
    except ValueError:
        agreement.refused += 1
        agreement.leaves = agreement.leaves or f"{words}, which it refuses"
        return
    columns = oracle.shape[1]
    actual, expected = (elements(q.codes, columns, recipe) for q in (kernel, oracle))
    one, other = linear_scales(kernel), linear_scales(oracle)
    codes, scales = actual == expected, one == other
    agreement.elements += codes.numel()
    agreement.blocks += scales.numel()
    agreement.codes += int(codes.sum())
    agreement.scales += int(scales.sum())
    if bool(codes.all()) and bool(scales.all()):
        agreement.explained += 1
        agreement.unsigned += codes.numel()
        agreement.values += codes.numel()
        return
    negative = 1 << (recipe.element.bits - 1)
    zeros = [t.masked_fill(t == negative, 0) for t in (actual, expected)]
    agreement.unsigned += int((zeros[0] == zeros[1]).sum())
    agreement.values += int(_same_values(replace(oracle, codes=kernel.codes, scales=one), oracle).sum())
    if not agreement.leaves:
        shown = (
            _first_scale(~scales, one, other, recipe)
            if not bool(scales.all())
            else _first_code(~codes, actual, expected, inputs.x, recipe)
        )
        agreement.leaves = f"{words}: {shown}"


def _same_values(kernel: Quantized, oracle: Quantized) -> torch.Tensor:
    """bool (M, K): equal values, -0 = 0 and NaN = NaN; a byte that is no code has none."""
    bad = no_codes(kernel)
    found = reference.dequantize(replace(kernel, codes=kernel.codes.masked_fill(bad, 0)))
    expected = reference.dequantize(oracle)
    same = (found == expected) | (found.isnan() & expected.isnan())
    return same & ~bad if bool(bad.any()) else same  # packed codes, which all stand for something, are two a byte


def _first_scale(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, recipe: Recipe) -> str:
    row, block = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
    (a, a_bits), (e, e_bits) = (scale_view(t[row, block], recipe.scale) for t in (actual, expected))
    of = f"{spaced(int(wrong.sum()))} of {spaced(wrong.numel())} block scales"
    return f"{of}, the first at row {row}, block {block}: {a_bits} = {a}, where it has {e_bits} = {e}"


def _first_code(
    wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, recipe: Recipe
) -> str:
    row, column = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
    (a, a_bits), (e, e_bits) = (code_view(int(t[row, column]), recipe.element) for t in (actual, expected))
    value, raw = float_view(x[row, column])
    of = f"{spaced(int(wrong.sum()))} of {spaced(wrong.numel())} codes"
    place = f"row {row}, column {column} (x = {value}, {raw})"
    return f"{of}, the first at {place}: {a_bits} = {a}, where it has {e_bits} = {e}"


def sentence(found: Survey) -> str:
    """What the backend speaks, or what is nearest and where that is left first."""
    of = plural(found.inputs, "input")
    if found.spoken:
        names, tie = _named(found.spoken)
        text = f"speaks {names}{tie}: every byte of {of}"
    else:
        nearest = found.agreements[0]
        names, tie = _named([one for one in found.agreements if one.figures == nearest.figures])
        text = f"agrees with no dialect everywhere; nearest {names}{tie}: {nearest.explained} of {of}"
        text += f"; leaves it first at {nearest.leaves}"
    if found.left_out:
        text += (
            f". Left out {plural(len(found.left_out), 'input')} that it does not quantize, first {found.left_out[0]}"
        )
    return text


def _named(agreements: list[Agreement]) -> tuple[str, str]:
    """Names, and that nothing tells them apart where they are several."""
    names = [one.dialect for one in agreements]
    if len(names) == 1:
        return names[0], ""
    return f"{', '.join(names[:-1])} or {names[-1]}", ", which no input here tells apart"


def table(found: Survey) -> Table:
    """A row a dialect, the nearest first: shares of equal codes, scale bytes and values, and inputs explained."""
    shown = Table(box=None, pad_edge=False)
    for heading in ("dialect", "codes", "codes, -0 = 0", "scale bytes", "decoded values", "inputs explained", ""):
        shown.add_column(heading, justify="left" if heading in ("dialect", "") else "right")
    for one in found.agreements:
        shares = [
            share(equal / total) if total else ""
            for equal, total in (
                (one.codes, one.elements), (one.unsigned, one.elements), (one.scales, one.blocks),
                (one.values, one.elements),
            )
        ]  # fmt: skip
        refuses = f"refuses {one.refused}" if one.refused else ""
        shown.add_row(one.dialect, *shares, f"{one.explained}/{one.inputs}", refuses)
    return shown
