"""Finding the dialect of a quantizer: comparison of its bytes with every dialect of a recipe, on every input family.

A dialect (`spec.dialects`) is a library's choice of the details that a format's definition leaves open. Two dialects
agree on most random inputs and differ on ties, subnormal numbers and zeros, so input families are needed to separate
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from rich.table import Table

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.cases.families import families_of
from narrowgauge.harness.cases.keys import DTYPES
from narrowgauge.harness.cases.memory import room
from narrowgauge.harness.cases.quantize import QuantizeCase
from narrowgauge.harness.checks.finding import float_view, format_count
from narrowgauge.harness.inputs.inputs import Inputs, make_inputs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.stages.quantized import code_view, no_codes, scale_view
from narrowgauge.harness.report.text import plural, share
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.spec.dialects import DIALECTS, MX_DIALECTS
from narrowgauge.spec.formats import E4M3, E8M0
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe, find_recipe

SHAPE = (64, 256)
"""(M, K) of every input: whole tiles of every recipe, with enough blocks for all patterns of a family."""
TIMEOUT = 300.0
"""Seconds that the backend may take for an input."""
_DIALECTS_OF = {E4M3: DIALECTS, E8M0: MX_DIALECTS}
"""Dialects by the format of the block scales."""


@dataclass
class Agreement:
    """Agreement of a quantizer with a dialect over all inputs."""

    dialect: str
    inputs: int = 0
    explained: int = 0
    """Inputs with every code and every scale byte equal."""
    refused: int = 0
    """Inputs refused by the dialect, such as an all-zero tensor."""
    elements: int = 0
    """Elements of the inputs that the dialect does not refuse."""
    codes: int = 0
    """Elements with equal codes. `unsigned`: equal codes if -0 equals 0. `values`: equal decoded values."""
    unsigned: int = 0
    values: int = 0
    blocks: int = 0
    scales: int = 0
    """Equal stored block scales."""
    first_difference: str = ""
    """First difference: input, number of differences, first place, both bytes."""

    @property
    def figures(self) -> tuple[int, ...]:
        """Sort key: larger for a nearer dialect, equal for dialects that the inputs do not separate."""
        return self.explained, self.codes + self.scales, self.codes, self.unsigned, self.values


@dataclass
class Survey:
    """Comparison of a quantizer with the dialects of a recipe."""

    recipe: str
    inputs: int
    """Number of inputs that the backend quantized."""
    agreements: list[Agreement]
    """Agreements, nearest dialect first."""
    skipped: list[str] = field(default_factory=list)
    """Inputs that the backend did not quantize, with its messages."""

    @property
    def matching(self) -> list[Agreement]:
        """Dialects with equal bytes on every input: several if no input separates them."""
        return [agreement for agreement in self.agreements if agreement.explained == self.inputs]


def dialects_of(recipe: Recipe) -> list[Recipe]:
    """The recipe in all its dialects.

    Raises ValueError for a recipe with a single dialect, and for a recipe with rotation, whose bytes also depend on the
    order of summation.
    """
    if recipe.transform:
        raise ValueError(f"recipe {recipe} rotates in an order that is free; ask for the recipe without the rotation")
    dialects = []
    for name in _DIALECTS_OF.get(recipe.scale, {}):
        try:
            dialects.append(find_recipe(f"{recipe.name}@{name}"))
        except ValueError:  # the dialect does not exist for this recipe
            continue
    if len(dialects) < 2:
        raise ValueError(f"recipe {recipe} has one dialect, and nothing to tell apart; `narrowgauge run` judges it")
    return dialects


def survey(backend: Backend, name: str = "nvfp4", *, device: str = "cpu", seed: int = 0) -> Survey:
    """Compare quantize of `backend` with every dialect of the recipe `name`, on every family and dtype.

    Stored bytes are compared, except amax and tensor scale, which dialects store in different forms. Raises ValueError
    as `dialects_of` does and for an unknown recipe. If the backend quantizes no input, the first exception is raised:
    BackendError, Unsupported, or HostLost if an input ended the host.
    """
    recipe = find_recipe(name)
    dialects = dialects_of(recipe)
    agreements = [Agreement(spoken.dialect) for spoken in dialects]
    skipped: list[str] = []
    first: Exception | None = None
    count = 0
    for case in _cases(recipe):
        inputs = make_inputs(case, seed=seed).to(device)
        input_name = f"{case.inputs} {case.dtype}"
        try:
            backend.host.begin_case(TIMEOUT, room(device))
            options = {"scale": inputs.scale.get("x"), "random": inputs.random.get("x")}
            kernel = backend.quantize(inputs.x, recipe, **options)  # type: ignore[arg-type]
            backend.host.end_case()
        except (BackendError, Unsupported, HostLost) as error:
            first = first or error
            skipped.append(f"{input_name}: {escape(str(error))}")
            continue
        count += 1
        for agreement, dialect in zip(agreements, dialects, strict=True):
            _compare(agreement, input_name, inputs, kernel, dialect)
    if first is not None and not count:
        raise first
    agreements.sort(key=lambda agreement: agreement.figures, reverse=True)
    return Survey(str(recipe), count, agreements, skipped)


def _cases(recipe: Recipe) -> list[QuantizeCase]:
    cases = (
        QuantizeCase(recipe=str(recipe), shape=SHAPE, dtype=dtype, inputs=family)
        for family in families_of("quantize")
        for dtype in DTYPES
    )
    return [case for case in cases if not case.problem()]


def _compare(agreement: Agreement, input_name: str, inputs: Inputs, kernel: Quantized, recipe: Recipe) -> None:
    agreement.inputs += 1
    try:
        oracle = reference.quantize(inputs.x, recipe, random=inputs.random.get("x"))
    except ValueError:
        agreement.refused += 1
        agreement.first_difference = agreement.first_difference or f"{input_name}, which it refuses"
        return
    columns = oracle.shape[1]
    actual, expected = (elements(q.codes, columns, recipe) for q in (kernel, oracle))
    actual_scales, expected_scales = linear_scales(kernel), linear_scales(oracle)
    codes, scales = actual == expected, actual_scales == expected_scales
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
    agreement.values += int(_same_values(replace(oracle, codes=kernel.codes, scales=actual_scales), oracle).sum())
    if not agreement.first_difference:
        difference = (
            _first_scale(~scales, actual_scales, expected_scales, recipe)
            if not bool(scales.all())
            else _first_code(~codes, actual, expected, inputs.x, recipe)
        )
        agreement.first_difference = f"{input_name}: {difference}"


def _same_values(kernel: Quantized, oracle: Quantized) -> torch.Tensor:
    """bool (M, K): equal values with -0 = 0 and NaN = NaN. An invalid byte is unequal to all values."""
    invalid = no_codes(kernel)
    values = reference.dequantize(replace(kernel, codes=kernel.codes.masked_fill(invalid, 0)))
    expected = reference.dequantize(oracle)
    same = (values == expected) | (values.isnan() & expected.isnan())
    return same & ~invalid if bool(invalid.any()) else same  # packed codes are all valid, and there are two in a byte


def _first_scale(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, recipe: Recipe) -> str:
    row, block = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
    (a, a_bits), (e, e_bits) = (scale_view(t[row, block], recipe.scale) for t in (actual, expected))
    count = f"{format_count(int(wrong.sum()))} of {format_count(wrong.numel())} block scales"
    return f"{count}, the first at row {row}, block {block}: {a_bits} = {a}, where it has {e_bits} = {e}"


def _first_code(
    wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, recipe: Recipe
) -> str:
    row, column = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
    (a, a_bits), (e, e_bits) = (code_view(int(t[row, column]), recipe.element) for t in (actual, expected))
    value, raw = float_view(x[row, column])
    count = f"{format_count(int(wrong.sum()))} of {format_count(wrong.numel())} codes"
    place = f"row {row}, column {column} (x = {value}, {raw})"
    return f"{count}, the first at {place}: {a_bits} = {a}, where it has {e_bits} = {e}"


def sentence(result: Survey) -> str:
    """The matching dialects, or the nearest dialect and its first difference."""
    inputs = plural(result.inputs, "input")
    if result.matching:
        names, tie = _dialect_names(result.matching)
        text = f"speaks {names}{tie}: every byte of {inputs}"
    else:
        nearest = result.agreements[0]
        names, tie = _dialect_names(
            [agreement for agreement in result.agreements if agreement.figures == nearest.figures]
        )
        text = f"agrees with no dialect everywhere; nearest {names}{tie}: {nearest.explained} of {inputs}"
        text += f"; leaves it first at {nearest.first_difference}"
    if result.skipped:
        text += (
            f". Left out {plural(len(result.skipped), 'input')} that it does not quantize, first {result.skipped[0]}"
        )
    return text


def _dialect_names(agreements: list[Agreement]) -> tuple[str, str]:
    """Names of dialects, and a remark if several dialects tie."""
    names = [agreement.dialect for agreement in agreements]
    if len(names) == 1:
        return names[0], ""
    return f"{', '.join(names[:-1])} or {names[-1]}", ", which no input here tells apart"


def table(result: Survey) -> Table:
    """A row for each dialect, nearest first: shares of equal codes, scale bytes and values, and explained inputs."""
    table_ = Table(box=None, pad_edge=False)
    for heading in ("dialect", "codes", "codes, -0 = 0", "scale bytes", "decoded values", "inputs explained", ""):
        table_.add_column(heading, justify="left" if heading in ("dialect", "") else "right")
    for agreement in result.agreements:
        shares = [
            share(equal / total) if total else ""
            for equal, total in (
                (agreement.codes, agreement.elements),
                (agreement.unsigned, agreement.elements),
                (agreement.scales, agreement.blocks),
                (agreement.values, agreement.elements),
            )
        ]
        refuses = f"refuses {agreement.refused}" if agreement.refused else ""
        table_.add_row(agreement.dialect, *shares, f"{agreement.explained}/{agreement.inputs}", refuses)
    return table_
