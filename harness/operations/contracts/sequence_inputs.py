"""Inputs of attention over sequences in pages.

The families but `normal` and `pinned` have one right result for every order of sums, every running maximum, every
dtype of the weights and every form of the exponential: the logits of a row are the largest one, less 1, 2 or 3 in base
2, or so low that their weights vanish, and the values are small integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from narrowgauge.harness.cases.keys import nearest
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.inputs.generators import power_of_two
from narrowgauge.harness.operations.contracts.cache_inputs import (
    exact,
    integers,
    positions,
    rounded,
    unused_code,
)
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import Evaluation
from narrowgauge.reference.contracts.interval import Interval, exactly
from narrowgauge.spec.kv_cache import HALVES, has_attention, part_name
from narrowgauge.spec.program import HALF, OF_TOKENS, SCORES, Program
from narrowgauge.spec.recipes import Recipe, find_recipe

_FAR, _FAR_E2M1 = -448.0, -384.0
"""Logits in base 2 with a weight of 0 in float32: an E4M3 number, and an E2M1 number times 64."""
_WHOLE = 2.0**-20
"""Distance of a logit in base 2 from an integer, relative, that a scale of float32 may have."""
_ONE = 32
"""Columns of a block of every recipe."""
_PINNED = 16
"""Number of consecutive keys of which a single key has the largest logit of a row."""


# ---- weights of a row ------------------------------------------------------------------------------------------------


Keys = list[int]
"""The visible keys of a row, in order."""


def _top(draw: Draw) -> float:
    """The logit of a single key, equal to the log-sum-exp in base 2."""
    return (1.0, 4.0, -8.0)[draw.index(3)]


def _one_hot(draw: Draw, keys: Keys, page: int) -> Mapping[int, float]:
    return {keys[draw.index(len(keys))]: _top(draw)}


def _ends(draw: Draw, keys: Keys, page: int) -> Mapping[int, float]:
    """The first and the last key, and those on both sides of the ends of the first and of the last page."""
    last = keys[-1] // page * page
    some = [key for key in (keys[-1], keys[0], last, last - 1, page - 1, page) if keys[0] <= key <= keys[-1]]
    return {some[draw.index(len(some))]: _top(draw)}


def _some(draw: Draw, keys: Keys, count: int) -> Keys:
    """Different keys, with the last key."""
    return [keys[-1], *(keys[place] for place in draw.words(len(keys) - 1).argsort()[: count - 1].tolist())]


def _two_level(draw: Draw, keys: Keys, page: int) -> Mapping[int, float]:
    return dict.fromkeys(_some(draw, keys, 1 << (min(32, len(keys)).bit_length() - 1)), 0.0)


def _geometric(draw: Draw, keys: Keys, page: int) -> Mapping[int, float]:
    """Weights 1, 1/2, …, 2^-10, 2^-10, whose sum is 2: the least are 0 as E4M3 codes without a factor. Fewer keys have
    the first weights, and the last one twice."""
    count = min(12, len(keys))
    logits = [-float(number) for number in range(count - 1)]
    return dict(zip(_some(draw, keys, count), [*logits, logits[-1] if logits else 0.0], strict=True))


def _equal(draw: Draw, keys: Keys, page: int) -> Mapping[int, float]:
    return dict.fromkeys(keys, 0.0)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _any_lengths(requests: int, page: int, most: int) -> list[int]:
    """Lengths that end inside, at the end and at the beginning of a page."""
    return [most - (3, 0, page - 1, page, 1)[request % 5] for request in range(requests)]


def _power_lengths(requests: int, page: int, most: int) -> list[int]:
    largest = 1 << (most.bit_length() - 1)
    return [largest >> request % 3 for request in range(requests)]


def _page_lengths(requests: int, page: int, most: int) -> list[int]:
    return [most - (page + 1, page, page - 1)[request % 3] for request in range(requests)]


@dataclass(frozen=True)
class _Rule:
    """The inputs of a family."""

    logits: Callable[[Draw, Keys, int], Mapping[int, float]] | None = None
    """Logits in base 2 of a few keys, from the visible keys of a row and the tokens of a page; all further weights are
    0.
    None: normal queries and keys."""
    whole: bool = False
    """Whether logits are integers in base 2 that are not all 0."""
    tells_cell: bool = False
    """Whether values are codes of their page, offset, head and dimension, in place of small integers."""
    largest: int = 7
    """The largest of the small integers, at most 4 in E2M1. The sum of the weights times this number is exact by 13
    fraction bits."""
    unused_nan: bool = True
    """Whether the cells without a token are NaN, or else the most negative number."""
    lengths: Callable[[int, int, int], list[int]] = _any_lengths
    pinned: bool = False
    sinks: float = 0.0
    """Deviation of the logits without a token. 0: `_sinks` gives the logits."""


RULES: Mapping[str, _Rule] = {
    "normal": _Rule(sinks=1.0),
    "one-hot": _Rule(_one_hot, tells_cell=True),
    "one-hot-ends": _Rule(_ends, tells_cell=True, unused_nan=False),
    "two-level": _Rule(_two_level),
    "geometric": _Rule(_geometric, whole=True, largest=3),
    "equal": _Rule(_equal, unused_nan=False, lengths=_power_lengths),
    "pinned": _Rule(pinned=True, sinks=1.0),
    "nan-pages": _Rule(_equal, lengths=_page_lengths),
}
"""Rules by the names of `narrowgauge.harness.cases.families.SEQUENCES`."""


# ---- tensors ---------------------------------------------------------------------------------------------------------


def sequences(program: Program, sizes: Mapping[str, int], family: str, draw: Draw) -> dict[str, torch.Tensor]:
    """The arguments of a contract with sequences in pages by name, contiguous on the CPU.

    Raises ValueError for an unknown family, and for a scale that gives no integers in base 2, which `geometric` needs.
    """
    if family not in RULES:
        raise ValueError(f"{family!r} is no input family of {program.name}{nearest(family, RULES)}: {', '.join(RULES)}")
    rule, kinds = RULES[family], {argument.kind: argument for argument in program.arguments}
    q, table, lengths, q_lengths = (kinds[kind] for kind in ("Heads", "Pages", "Lengths", "QueryLengths"))
    rows, q_heads, width, requests, most, pages, page, heads, last = (sizes[name] for name in _SIZES)
    power, scales = draw.index(4), [a.name for a in program.arguments if a.kind == "Scale"]
    found = {name: torch.full((1,), 2.0 ** (power - 3 * number)) for number, name in enumerate(scales)}
    sunk = [a.name for a in program.arguments if a.kind == "Sinks"]
    found |= {name: draw.normal(q_heads) * rule.sinks if rule.sinks else _sinks(q_heads) for name in sunk}
    own = _split(draw, rows, requests, most * page)
    of_request = [max(one, other) for one, other in zip(rule.lengths(requests, page, most * page), own, strict=True)]
    found |= {lengths.name: torch.tensor(of_request), q_lengths.name: torch.tensor(own)}
    found[table.name] = draw.words(pages).argsort()[: requests * most].view(requests, most)
    unit, seen = _unit(program, found, q.dtype), _seen(program, found, rows, (pages, page, heads))
    name, recipe = kinds["Cache"].of_cache, _recipe(program)
    sizes_of_cache = pages, page, heads
    if rule.logits is None:
        queries, keys = draw.normal(rows, q_heads, width), draw.normal(requests, most * page, heads, width)
        if rule.pinned:
            _pin(queries, keys)
        values = rounded(draw.normal(*sizes_of_cache, last), recipe)
    else:
        block = recipe.block[1] if recipe.element.bits == 4 else 0
        queries, keys = _of_logits(rule, draw, own, seen, unit, (q_heads, heads, width, page, block), sunk=bool(sunk))
        keys = torch.nn.functional.pad(keys, (0, 0, 0, 0, 0, most * page - keys.shape[1]))
        place = *sizes_of_cache, last
        values = positions(place, recipe) if rule.tells_cell else integers(draw, rule.largest, place, recipe)
    found[q.name] = queries.to(DTYPES[q.dtype])
    in_pages = _in_pages(keys.float(), found[table.name], (*sizes_of_cache, width))
    held = (torch.arange(most * page) < found[lengths.name].unsqueeze(1)).view(requests, -1, 1, 1)
    used = _in_pages(held, found[table.name], (pages, page, 1, 1))
    store = rounded if rule.logits is None else exact
    for half, parts in (("keys", store(in_pages, recipe)), ("values", values)):
        for part, codes in parts.items():
            unused = unused_code(recipe, part, nan=rule.unused_nan)
            found[f"{name}.{part_name(half, part)}"] = torch.where(used, codes, unused).to(
                torch.float32 if codes.is_floating_point() else torch.uint8
            )
    return {a.name: found[a.name].contiguous() for a in program.arguments}


_SIZES = ("queries", "q_heads", "dim", "requests", "most", "pages", "page", "heads", "v_dim")


def _split(draw: Draw, rows: int, requests: int, most: int) -> list[int]:
    """Rows per request: at least 1 and at most `most`, together `rows`, which fit."""
    cuts = sorted((draw.words(rows - 1).argsort()[: requests - 1] + 1).tolist()) if rows > requests else range(1, rows)
    found = [last - first for first, last in zip([0, *cuts], [*cuts, rows], strict=True)]
    if max(found) > most:
        found = [rows // requests + (request < rows % requests) for request in range(requests)]
    return found


def _logits(program: Program) -> tuple[int, int]:
    """The steps of the products of q and k, and of the logits, whose maximum is subtracted."""
    products = next(number for number, step in enumerate(program.steps) if step.function == SCORES)
    return products, next(step.operands[0] for step in program.steps[products:] if step.function == "largest")


def _unit(program: Program, found: Mapping[str, torch.Tensor], dtype: str) -> float:
    """The logit in base 2 of q = k = 1, of a dimension."""
    one, single = torch.zeros(1, 1, _ONE), torch.ones(1, dtype=torch.int64)
    one[..., 0] = 1.0
    of_kind = {
        "Heads": one.to(DTYPES[dtype]),
        "Pages": single.view(1, 1) - 1,
        "Lengths": single,
        "QueryLengths": single,
    }
    small = {a.name: of_kind.get(a.kind, found.get(a.name, one)) for a in program.arguments}
    small |= _cache(program, one.unsqueeze(0))
    return float(Evaluation(program, small).values[_logits(program)[1]].low) / math.log(2)


def _recipe(program: Program) -> Recipe:
    """The recipe of the cache. Raises ValueError for a program without attention."""
    recipe = find_recipe(next(step.options["recipe"] for step in program.steps if step.function == HALF))
    if not has_attention(recipe):
        raise ValueError(f"a cache of {recipe.name} has no inputs for {program.name}: FP8 with a given scale of the "
                         "tensor or scales of tokens, MXFP8 and NVFP4 have")  # fmt: skip
    return recipe


def _cache(program: Program, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a cache whose keys and values are `x` (N, P, G, D)."""
    name = next(argument.of_cache for argument in program.arguments if argument.of_cache)
    parts = exact(x, _recipe(program))
    return {f"{name}.{part_name(half, part)}": codes for half in HALVES for part, codes in parts.items()}


def _seen(program: Program, found: Mapping[str, torch.Tensor], rows: int, sizes: tuple[int, int, int]) -> torch.Tensor:
    """The visible tokens of a row's request: bool (queries, keys)."""
    logits = _logits(program)[1]
    lengths = next(found[argument.name] for argument in program.arguments if argument.kind == "Lengths")
    zeros = _cache(program, torch.zeros(*sizes, _ONE))
    zeros |= {a.name: torch.zeros(rows, 1, _ONE) for a in program.arguments if a.kind == "Heads"}
    evaluation = Evaluation(program, {**found, **zeros}, rows=slice(0, 0))
    of_keys = exactly(torch.zeros(rows, 1, int(lengths.max())))
    evaluation.values.update(
        {n: of_keys for n, step in enumerate(program.steps) if step.function in (SCORES, OF_TOKENS)}
    )
    values: Interval = evaluation.values[logits]
    return values.low[:, 0] > -torch.inf


def _of_logits(
    rule: _Rule,
    draw: Draw,
    own: list[int],
    seen: torch.Tensor,
    unit: float,
    sizes: tuple[int, int, int, int, int],
    *,
    sunk: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries (M, H, D) and keys (B, S, G, D), float32, with the logits of a rule.

    A pattern of logits has dimensions of its own. The rows and heads that share a head of the keys have different
    patterns, as far as there are dimensions. The first dimension of a pattern gives the logit, and the remaining
    dimensions cancel in pairs. The last size is that of a block of E2M1 elements, else 0: a block has a single pattern,
    whose numbers are multiples of its logit.
    """
    q_heads, heads, width, page, block = sizes
    group, power = q_heads // heads, 2.0 ** -round(math.log2(unit))
    if rule.whole and abs(unit * power - 1) > _WHOLE:
        raise ValueError(
            f"logits in base 2 are multiples of {unit * power:.6g} under this scale; geometric needs integers: a scale "
            "of ln 2 times a power of two"
        )
    queries = torch.zeros(len(seen), q_heads, width)
    keys = torch.zeros(len(own), seen.shape[1], heads, width)
    first = 0
    for request, rows in enumerate(own):
        patterns = min(rows * group, max(1, width // max(4, block)))
        if block:
            patterns = max(n for n in range(1, patterns + 1) if width // block % n == 0)
        wide = width // patterns
        pairs = (wide - 1) // 2
        for head in range(heads):
            for pattern in range(patterns):
                here = slice(pattern * wide, (pattern + 1) * wide)
                alike = torch.arange(pattern, rows * group, patterns)
                some, heads_of = first + alike // group, head * group + alike % group
                sees = seen[some].all(0)
                row = torch.zeros(wide)
                row[0] = power
                row[1 : 1 + 2 * pairs] = (power * power_of_two(draw.below(2, pairs)) * draw.signs(pairs)).repeat(2)
                queries[some.view(-1, 1), heads_of.view(-1, 1), torch.arange(wide) + here.start] = row
                own_keys = keys[request, :, head, here]
                # A key that no row may see would take all weight.
                far = _FAR_E2M1 if block else _FAR
                own_keys[:, 0] = torch.where(seen[some].any(0), far, 0.0)
                cancelling = 1 + draw.below(4 if block else 7, seen.shape[1], pairs).float()
                visible = sees.nonzero()[:, 0].tolist()
                assert rule.logits is not None
                logits = rule.logits(draw, visible, page)
                if len(logits) == 1:  # a log-sum-exp of 0 has no relative error; beside a sink of 0 it is ln 2
                    logits = {key: 0.0 if sunk else logit or 1.0 for key, logit in logits.items()}
                for key, logit in logits.items():
                    own_keys[key, 0] = logit + 0.0  # no −0
                if block:  # multiples of the logit, of 64, or of 1
                    size = own_keys[:, :1].abs()
                    cancelling *= torch.where(size == -far, 64.0, size.clamp(min=1.0))
                own_keys[:, 1 : 1 + 2 * pairs] = torch.cat([cancelling, -cancelling], 1)
        first += rows
    return queries, keys


def _sinks(q_heads: int) -> torch.Tensor:
    """Logits without a token: 0 of even heads, as the largest logit of a row; of odd heads a logit without weight."""
    return torch.arange(q_heads) % 2 * (_FAR * math.log(2))


def _pin(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Let one key of every `_PINNED` have the largest logit of every row: q and this key share a part."""
    width = min(32, queries.shape[-1])
    queries[..., :width] = queries[..., :width].abs().clamp(min=0.5)
    keys[..., :width] = -keys[..., :width].abs()
    keys[:, ::_PINNED] = 0.0
    keys[:, ::_PINNED, :, :width] = 1.0


def _in_pages(x: torch.Tensor, table: torch.Tensor, sizes: tuple[int, int, int, int]) -> torch.Tensor:
    """Tokens of requests (B, S, G, D) in the pages of a table (B, W); 0 elsewhere."""
    cells = torch.zeros(sizes, dtype=x.dtype)
    cells[table] = x.reshape(*table.shape, *sizes[1:3], x.shape[3])
    return cells
