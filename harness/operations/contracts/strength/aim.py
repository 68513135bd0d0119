"""Inputs for a change missed by the input families: draw, keep what moves the wrong bytes out, shrink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.inputs import Aimed, contract_inputs
from narrowgauge.harness.operations.contracts.strength.sets import Sets
from narrowgauge.harness.operations.contracts.strength.table import Cell, decided, judges, outside, sampled, sizes_of
from narrowgauge.spec.program import Program

TRIES = 300
"""Largest number of drawn inputs of a search."""
_STRANGERS = 60
"""Number of inputs drawn without regard to the best inputs before."""


@dataclass(frozen=True)
class Aim:
    """Inputs that show a change."""

    family: str
    """`aimed:<change>:<seed>`, a family of `contract_inputs`: its bytes depend on the text and on the sizes alone."""
    cell: Cell
    """What these inputs show."""


def aim(program: Program, change: Change, shape: tuple[int, int], tries: int = TRIES) -> Aim | None:
    """Search inputs of a shape (rows, columns) that show a change of `wrong_programs`; None without found inputs.

    A search is the same for the same contract, change and shape. Inputs with disjoint sets are returned at once, else
    the ones with the most bytes beyond the sets of the contract, if sampled kernels are refused on them.
    """
    sizes = sizes_of(program, *shape)

    def sets(aimed: Aimed) -> Sets | None:
        family = _family(change, aimed)
        made = Sets.of(program, contract_inputs(program, sizes, family, Draw(family)))
        return made if judges(made) else None

    def surely(aimed: Aimed) -> bool:
        plain = sets(aimed)
        cell = None if plain is None else decided(plain, change)
        return cell is not None and cell.verdict == "surely"

    draw = Draw(f"aim|{program.digest}|{change.name}|{shape}")
    best, most = Aimed((0,) * len(Aimed.LISTS)), 0.0
    for number in range(tries):
        tried = _stranger(draw) if number < _STRANGERS else _beside(best, draw)
        plain = sets(tried)
        if plain is None:
            continue
        if surely(tried):
            return Aim(_family(change, _shrunk(tried, surely)), Cell("surely"))
        share = outside(plain, change)
        if share > most:
            best, most = tried, share
    plain = sets(best) if most else None
    cell = None if plain is None else sampled(plain, change)
    return Aim(_family(change, best), cell) if cell is not None and cell.seen else None


def _family(change: Change, aimed: Aimed) -> str:
    return f"aimed:{change.name}:{aimed.seed}"


def _stranger(draw: Draw) -> Aimed:
    """Any parameters."""
    return Aimed(tuple(draw.index(len(values)) for values in Aimed.LISTS.values()), draw.index(1000))


def _beside(best: Aimed, draw: Draw) -> Aimed:
    """The best parameters with a changed parameter, and a new random stream."""
    place = draw.index(len(best.choices))
    other = _stranger(draw)
    changed = best.choices[:place] + other.choices[place : place + 1] + best.choices[place + 1 :]
    return Aimed(changed, other.stream)


def _shrunk(aimed: Aimed, surely: Callable[[Aimed], bool]) -> Aimed:
    """Simpler parameters that show the change as surely: the first sufficient place of every list."""
    simpler = replace(aimed, stream=0)
    aimed = simpler if surely(simpler) else aimed
    for place, choice in enumerate(aimed.choices):
        for smaller in range(choice):
            tried = replace(aimed, choices=(*aimed.choices[:place], smaller, *aimed.choices[place + 1 :]))
            if surely(tried):
                aimed = tried
                break
    return aimed
