"""Inputs of contracts: the tensors of a family by the types of the arguments.

A matrix has the numbers of a generator (`harness.inputs.generators`), and a row or a scale has fitting numbers. `RULES`
has the numbers of the families, `KINDS` the makers of the types. A family `aimed:<change>:<seed>` has numbers of
`Aimed`, which `harness.operations.contracts.strength.aim` looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from narrowgauge.harness.cases.axes import size_of
from narrowgauge.harness.cases.families import PRODUCTS, RANK_FAMILIES, Kind, families_for
from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import generate, power_of_two
from narrowgauge.harness.inputs.inputs import earlier_scale
from narrowgauge.harness.operations.contracts.operand_inputs import mixture, plain_operand, quantized_operand
from narrowgauge.harness.operations.contracts.sequence_inputs import sequences
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import parts_of
from narrowgauge.reference.quantize.quantize import quantize
from narrowgauge.spec.program import CHOSEN, CODES, OF_EXPERT, SCORES, Program, Tensor
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

FAMILIES = families_for((Kind.CONTRACT,), ())
"""Input families of contracts by name."""
OWN = tuple(family.name for family in PRODUCTS)
"""Families of contracts of quantized matrices."""
_RANKS = tuple(family.name for family in RANK_FAMILIES)
_STEPS = 509
"""Distinct magnitudes of a row: a prime below four binades of bfloat16."""


# ---- rows and numbers ------------------------------------------------------------------------------------------------


def _distinct(draw: Draw, columns: int) -> torch.Tensor:
    """Numbers of both signs from 1/4 to 4: 509 columns have different magnitudes, and neighbours are far apart."""
    number = (37 * torch.arange(columns) + draw.index(_STEPS)) % _STEPS
    return power_of_two(number // 128 - 2) * (1 + number % 128 / 128) * draw.signs(columns)


def _positive(draw: Draw, columns: int) -> torch.Tensor:
    return _distinct(draw, columns).abs()


def _negative(draw: Draw, columns: int) -> torch.Tensor:
    return -_positive(draw, columns)


def _integers(draw: Draw, columns: int) -> torch.Tensor:
    """0, 1 and 2 of both signs: products are exact, and 1 + w may be 0."""
    return draw.below(3, columns) * draw.signs(columns)


def _some_zero(draw: Draw, columns: int) -> torch.Tensor:
    """One number in 8 is 0 or −0."""
    return torch.where(draw.one_in(8, columns), 0.0, 1.0) * _distinct(draw, columns)


def _ordinary(draw: Draw) -> float:
    """No power of two, from 1/8 to 8."""
    return float((1 + (1 + draw.index(126)) / 128) * 2.0 ** (draw.index(6) - 3))


def _power(draw: Draw) -> float:
    return float(2.0 ** (draw.index(7) - 3))


def _tiny(draw: Draw) -> float:
    return _ordinary(draw) * 2.0**-64


def _huge(draw: Draw) -> float:
    return _ordinary(draw) * 2.0**64


# ---- families --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The numbers of the arguments in a family."""

    row: Callable[[Draw, int], torch.Tensor] = _distinct
    """The numbers of a row (K,), float32."""
    number: Callable[[Draw], float] = _ordinary
    """A scalar or a scale: positive and finite."""
    roles: tuple[str, str] = ("x", "w")
    """Roles of the first matrix and of further matrices, for `harness.inputs.generators`."""
    cancels: bool = False
    """Whether half of the elements of a further matrix are near the first matrix's elements, with the opposite sign."""


RULES: Mapping[str, Rule] = {
    "position": Rule(number=_power),
    "lattice": Rule(row=_integers, number=_power),
    "positive": Rule(row=_positive),
    "negative": Rule(row=_negative),
    "cancelling": Rule(roles=("w", "w"), cancels=True),
    "inf": Rule(row=_some_zero),
    "subnormal": Rule(number=_tiny),
    "amax-largest-first": Rule(number=_huge),
}
"""Rules of families; others have `Rule()`."""
UNNAMED = ("lattice", "position")
"""Families with NaN in rows without a position."""


# ---- aimed families --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aimed:
    """Numbers with a few parameters, given as places in their lists; the first place is the simplest."""

    choices: tuple[int, ...]
    """Places in `LISTS`."""
    stream: int = 0
    """Number of the random stream."""

    LISTS: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "magnitude": (0, -4, 4, -8, 8, -12, 12, -20, 20, -32, 32, -48, 48, -62, 62),
        "spread": (0, 3, 12),
        "offset": (0, 8, -8, 64),
        "density": (1, 2, 16, 256),
        "row": (0, 1),
    }
    """Exponent of all numbers, range of their exponents, mean in deviations, one in so many elements is not 0, and
    whether rows have integers and powers of two."""

    @property
    def seed(self) -> int:
        """The parameters and the stream as a single number."""
        seed = self.stream
        for values, choice in zip(self.LISTS.values(), self.choices, strict=True):
            seed = seed * len(values) + choice
        return seed

    @staticmethod
    def of(seed: int) -> Aimed:
        """The parameters of a number."""
        choices = []
        for values in reversed(list(Aimed.LISTS.values())):
            seed, choice = divmod(seed, len(values))
            choices.append(choice)
        return Aimed(tuple(reversed(choices)), seed)

    def matrix(self, draw: Draw, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A matrix of these numbers, float32."""
        values = zip(self.LISTS.values(), self.choices, strict=True)
        magnitude, spread, offset, density, _ = (places[choice] for places, choice in values)
        exponent = magnitude + draw.below(spread + 1, rows, columns)
        if dtype == torch.float16:
            exponent = exponent.clamp(-14, 7)
        kept = draw.one_in(density, rows, columns)
        return torch.where(kept, (draw.normal(rows, columns) + offset) * power_of_two(exponent), 0.0)

    @property
    def rule(self) -> Rule:
        """The numbers of the further arguments."""
        return Rule(row=_integers, number=_power) if self.choices[-1] else Rule()


def _aimed(family: str) -> Aimed | None:
    """The parameters of a family `aimed:<change>:<seed>`; None for other families."""
    prefix, _, rest = family.partition(":")
    seed = rest.rpartition(":")[2]
    return Aimed.of(int(seed)) if prefix == "aimed" and seed.isdecimal() else None


# ---- types -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """An argument to make."""

    argument: Tensor
    shape: tuple[int, ...]
    family: str
    rule: Rule
    draw: Draw
    aimed: Aimed | None
    before: Mapping[str, torch.Tensor]
    """The matrices before it, float32."""
    rows: int
    """Rows open to an index."""
    sizes: Mapping[str, int]
    last_rank: int = 0
    logarithm: bool = False
    """Whether the contract takes exponentials of the argument."""


def _matrix(want: _Wanted) -> torch.Tensor:
    rows, columns = want.shape
    number = len(want.before)
    role = want.rule.roles[min(number, 1)]
    family = "normal" if want.family in _RANKS else want.family
    dtype = DTYPES[want.argument.dtype]
    if want.aimed is not None:
        return want.aimed.matrix(want.draw, rows, columns, dtype)
    x = generate(family, want.draw, (rows, columns), dtype, role, find_recipe("nvfp4")).float()
    first = next((other for other in want.before.values() if other.shape == x.shape), None)
    if want.rule.cancels and first is not None:
        near = -first * (1 + want.draw.uniform(rows, columns) / 16)
        x = torch.where(want.draw.one_in(2, rows, columns), near, x)
    # A third matrix of positions would be the second one.
    return x.roll(number - 1, -1) if number > 1 else x


def _of_rank(want: _Wanted) -> torch.Tensor:
    """The matrix of a rank: of a family of groups, else of a shared family."""
    rank, last = int(want.argument.name.rpartition(".")[2]), want.last_rank
    if want.family not in _RANKS:
        return _matrix(want)
    rows, columns = want.shape
    x = want.draw.normal(rows, columns)
    match want.family:
        case "only-first" | "only-last":
            return x if rank == (0 if want.family == "only-first" else last) else torch.zeros(rows, columns)
        case "powers":
            return x * 2.0**rank
        case "nan-rank":
            if rank == last:
                x[rows // 2] = torch.nan
        case "padding-rows":
            behind = torch.tensor([0.0, torch.nan, torch.finfo(DTYPES[want.argument.dtype]).max])
            count = min(rows - 1, len(behind))
            x[rows - count :] = behind[:count].unsqueeze(1)
        case "exact-sums":
            x = want.draw.below(17, rows, columns) - 8.0
            x[:, ::16] = 448.0  # every block, so that amax/448 is 1
    return x


def _row(want: _Wanted) -> torch.Tensor:
    return want.rule.row(want.draw, want.shape[0])


def _number(want: _Wanted) -> torch.Tensor:
    return torch.full(want.shape, want.rule.number(want.draw))


def _scales(want: _Wanted) -> torch.Tensor:
    return torch.tensor([want.rule.number(want.draw) for _ in range(want.shape[0])], dtype=torch.float32)


def _index(want: _Wanted) -> torch.Tensor:
    """Any rows in any order, with the last row first."""
    index = want.draw.below(want.rows, *want.shape).long()
    index[:1] = want.rows - 1
    return index


def _column(want: _Wanted) -> torch.Tensor:
    """Positive, as the saved statistics of rows are. To logarithms 96 or −96 is added in every second row, which is
    beyond the range of exp."""
    found = _positive(want.draw, math.prod(want.shape)).view(want.shape)
    if not want.logarithm:
        return found
    beyond = torch.tensor([0.0, 96.0, 0.0, -96.0])[torch.arange(len(found)) % 4]
    return found + beyond.view(-1, *[1] * (found.dim() - 1))


def _heads(want: _Wanted) -> torch.Tensor:
    """A matrix with a row per token and head."""
    rows, heads, columns = want.shape
    return _matrix(replace(want, shape=(rows * heads, columns))).view(want.shape)


def _bits(want: _Wanted) -> torch.Tensor:
    return want.draw.words(*want.shape)


def _slots(want: _Wanted) -> torch.Tensor:
    """Slots in any order, each once. The first token lies in the last slot, the second in the first slot of a page; one
    token in 8 has no place."""
    count, page = want.sizes["pages"] * want.sizes["page"], want.sizes["page"]
    order = want.draw.words(count).argsort(stable=True)
    first = torch.tensor([count - 1, page * want.draw.index(want.sizes["pages"])])
    order = torch.cat([first, order[~torch.isin(order, first)]])[: want.shape[0]]
    return torch.where(torch.arange(len(order)) % 8 == 5, -1 - want.draw.index(3), order)


def _lengths(want: _Wanted) -> torch.Tensor:
    """Tokens of requests: full, none, and a page less one, a page, a page and one more, then any number."""
    page, most = want.sizes["page"], want.sizes["page"] * want.sizes["most"]
    some = torch.tensor([most, 0, page - 1, page, page + 1]).clamp(0, most)
    return torch.cat([some, want.draw.below(most + 1, *want.shape).long()])[: want.shape[0]]


def _pages(want: _Wanted) -> torch.Tensor:
    """Page numbers in any order, each once as far as there are pages."""
    count, pages = want.shape[0] * want.shape[1], want.sizes["pages"]
    orders = [want.draw.words(pages).argsort(stable=True) for _ in range(-(-count // max(1, pages)))]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *orders])[:count].view(want.shape)


def _cached(want: _Wanted) -> torch.Tensor:
    """Bytes of a cache: any codes, and scales of middling numbers."""
    if want.argument.dtype == "float32":
        return power_of_two(want.draw.below(9, *want.shape) - 4) * (1 + want.draw.below(128, *want.shape) / 128)
    scales = want.argument.name.endswith("scales")
    found = want.draw.below(32, *want.shape) + 48 if scales else want.draw.below(256, *want.shape)
    return found.to(torch.uint8)


def _positions(want: _Wanted) -> torch.Tensor:
    """Rows of choices in any order, each once, the last row and the first row first. One choice in 8 names none."""
    order = want.draw.words(want.rows).argsort(stable=True)
    ends = torch.tensor([want.rows - 1, 0])[: want.rows]
    order = torch.cat([ends, order[~torch.isin(order, ends)]])
    count = want.shape[0] * want.shape[1]
    found = torch.full((count,), -1)
    found[: len(order)] = order[:count]
    return torch.where(torch.arange(count) % 8 == 5, -1, found).view(want.shape)


def _router_weights(want: _Wanted) -> torch.Tensor:
    """Weights of choices, from 1/16 to 1, or powers of two."""
    if want.rule.number is _power:
        return power_of_two(-want.draw.below(7, *want.shape))
    return (1 + 15 * want.draw.uniform(*want.shape).abs()) / 16


KINDS: Mapping[str, Callable[[_Wanted], torch.Tensor]] = {
    "Matrix": _matrix, "Ranks": _of_rank, "QuantizedRanks": _of_rank, "Row": _row, "Column": _column,
    "Scalar": _number, "Scale": _number, "Scales": _scales,
    "Index": _index, "Bits": _bits, "Slots": _slots, "Lengths": _lengths, "Heads": _heads, "Pages": _pages,
    "Cache": _cached, "Positions": _positions, "RouterWeights": _router_weights,
}  # fmt: skip
"""Makers of the types of `narrowgauge.contract`: float32, and int64 of an index, int32 of random bits."""


def contract_inputs(
    program: Program, sizes: Mapping[str, int], family: str, draw: Draw, number: int = 0
) -> dict[str, torch.Tensor]:
    """The arguments of a contract by name, contiguous on the CPU, in their dtypes, the same bytes for equal draws.

    `sizes`: elements along the named axes. Matrices are of the family, and all different, except in families of zeros.
    A row has numbers of both signs that show their places, a scalar and a scale are positive and finite; `RULES` has
    the exceptions. An aimed family has the same bytes for every draw. `number`: of the product in a batch, whose scales
    differ. Raises ValueError for an unknown family and an axis without a size.
    """
    if any(step.function == SCORES for step in program.steps):
        return sequences(program, sizes, family, draw)
    if any(step.function == OF_EXPERT for step in program.steps):
        given = mixture(program, sizes, family, draw)
        stored = {name: part for name, part in given.items() if isinstance(part, Quantized)}
        plain = {name: part for name, part in given.items() if isinstance(part, torch.Tensor)}
        return plain | parts_of(program, stored)
    aimed = _aimed(family)
    product = any(step.function == CODES for step in program.steps)
    direct = product and family in (*OWN, "lattice")
    last_rank = sum(argument.kind.endswith("Ranks") for argument in program.arguments) - 1
    families = [*FAMILIES, *(OWN if product else _RANKS if last_rank > 0 else ())]
    if aimed is None and family not in families:
        known = ", ".join([*families, "aimed:<change>:<seed>"])
        raise ValueError(f"{family!r} is no input family of contracts{nearest(family, families)}: {known}")
    rule = RULES.get(family, Rule()) if aimed is None else aimed.rule
    draw = draw if aimed is None else Draw(family)
    found, matrices = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    exponents = {n for number, step in enumerate(program.steps) if step.function == "exp" for n in program.cone(number)}
    logarithms = {program.steps[n].options["name"] for n in exponents if program.steps[n].function == "argument"}
    for step in program.steps:
        if step.function == CODES:
            rows, columns = (size_of(axis, sizes) for axis in step.axes)
            name, recipe = step.options["name"], find_recipe(step.options["recipe"])
            if direct:
                first = step.axes[0] == program.arguments[0].axes[0]
                q = quantized_operand(family, draw, recipe, rows, columns, first=first, number=number)
                found |= parts_of(program, {name: q})
                continue
            argument = Tensor(name, "Matrix", step.axes, "bfloat16")
            before = matrices or {"": torch.zeros(0, 0)}
            x = _matrix(_Wanted(argument, (rows, columns), family, rule, draw, aimed, before, 1, sizes)).bfloat16()
            scale = earlier_scale(draw, x, recipe).view(1) if recipe.tensor_scale == "given" else None
            found |= parts_of(program, {argument.name: quantize(x, recipe, scale=scale)})
    for argument in program.arguments:
        if argument.of_codes:
            continue
        shape = tuple(size_of(axis, sizes) for axis in argument.axes)
        rows = sizes.get(program.tables.get(argument.name, ""), 1)
        if direct and argument.kind == "Matrix":
            found[argument.name] = plain_operand(family, draw, *shape).to(DTYPES[argument.dtype])
            continue
        made = KINDS[argument.kind](
            _Wanted(
                argument,
                shape,
                family,
                rule,
                draw,
                aimed,
                matrices,
                rows,
                sizes,
                last_rank,
                logarithm=argument.name in logarithms,
            )
        )
        found[argument.name] = (made.to(DTYPES[argument.dtype]) if argument.dtype in DTYPES else made).contiguous()
        if argument.kind in ("Matrix", "Heads", "Ranks", "QuantizedRanks"):
            matrices[argument.name] = made.flatten(0, -2)
    for step in program.steps:
        if step.function == CHOSEN and family in UNNAMED:
            table, positions = (program.steps[number].options["name"] for number in step.operands)
            found[table][~torch.isin(torch.arange(len(found[table])), found[positions])] = torch.nan
    return found
