"""Known mistakes of every kind of step, as rows of a table, and their changed contracts.

A row names the functions of the changed steps, the mistake, a sentence about the mistake, and the value in place of the
right value. A row may run over several values, for example the dtypes of a rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from narrowgauge.contract import steps as c
from narrowgauge.contract.values import Value
from narrowgauge.harness.operations.contracts.causes.changed_recipes import changed_quantizations
from narrowgauge.harness.operations.contracts.causes.edits import OUTPUT, Editor, Scope, Site, other_rows
from narrowgauge.harness.operations.contracts.causes.formulas import formula
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.changed_steps import CHANGED_CODES, CHANGED_MATRICES, OTHER_SCALES, OtherRow
from narrowgauge.reference.contracts.functions import FUNCTIONS
from narrowgauge.reference.contracts.layout.attention import OTHER_INDICES
from narrowgauge.reference.contracts.layout.attention import WEIGHTS as ALL_WEIGHTS
from narrowgauge.reference.contracts.layout.pages import OTHER_LENGTHS, OTHER_SLOTS, OTHER_TABLES, REST
from narrowgauge.reference.contracts.layout.routed import RENUMBERINGS, SOME_CHOICES
from narrowgauge.spec.formats import FP32, INT4
from narrowgauge.spec.kv_cache import HALVES
from narrowgauge.spec.program import (
    ACCUMULATED,
    CODES,
    COLUMNS,
    DECODE,
    DEQUANTIZE,
    DIVISIONS,
    FACTOR,
    GEMM,
    HALF,
    HEADS,
    INDEX,
    INTEGERS,
    JOINED,
    OF_EXPERT,
    QUANTIZE,
    READ,
    RENUMBERED,
    RESCALED,
    ROTATED,
    SCORES,
    SEGMENTS,
    SLOTS,
    WEIGHTED,
    WEIGHTS,
    WRITTEN,
    Program,
    Tensor,
)
from narrowgauge.spec.recipe import RHT_GROUPS
from narrowgauge.spec.recipes import find_recipe


@dataclass(frozen=True)
class Change:
    """A contract with a mistake."""

    name: str
    """`function-number:row`, and where the wrong value is taken: `cast-7:left-out:in-9`."""
    sentence: str
    program: Program
    row: str = ""
    """Name of the row of the table; empty for a change that the table does not have."""


@dataclass(frozen=True)
class Row:
    """A mistake of the named functions."""

    functions: tuple[str, ...]
    name: str
    sentence: str
    """The step is {self}, its operands are {a} and {b}, its dtype is {dtype}, and the value of `over` is {v}."""
    edit: Callable[[Site, Any], Value | None]
    """The value in place of the step, for a value of `over`. None: the mistake is no mistake here."""
    over: Callable[[Site], Iterable[Any]] = lambda site: ("",)
    apart: bool = False
    """Whether a single user of several may take the wrong value."""
    of_operand: bool = False
    """Whether the edit gives the first operand of all steps of this function."""


def changes(program: Program, like: Collection[Change] | None = None) -> Iterator[Change]:
    """Every single change of every step. `like`: only changes with the table rows of these changes."""
    editor, rows = Editor(program), None if like is None else {change.row for change in like}
    for number, step in enumerate(program.steps):
        site = Site(editor, number)
        for row in _ROWS.get(step.function, ()):
            if rows is None or row.name in rows:
                yield from _changes_of(editor, site, row)
    yield from _exchanged_scales(program)


def _exchanged_scales(program: Program) -> Iterator[Change]:
    """Two given scales of equal axes, exchanged."""
    kinds = {argument.name: argument.kind for argument in program.arguments}
    scales = [(number, step) for number, step in enumerate(program.steps)
              if step.function == "argument" and kinds.get(step.options["name"]) in ("Scale", "Scales")]  # fmt: skip
    for (number, one), (place, other) in itertools.combinations(scales, 2):
        if one.axes == other.axes and one.options["name"] != other.options["name"]:
            steps = list(program.steps)
            steps[number], steps[place] = other, one
            names = one.options["name"], other.options["name"]
            sentence = f"{' and '.join(names)} are exchanged"
            yield Change(f"argument-{number}:exchanged-{names[1]}", sentence, replace(program, steps=tuple(steps)))


def short_changes(program: Program, tensors: Mapping[str, torch.Tensor]) -> Iterator[Change]:
    """Sums and maxima of the first elements of each row alone: of one pass of a block of threads, or of whole vectors.

    The sizes of the inputs tell if elements are left out.
    """
    editor = Editor(program)
    sizes = {axis: size for a in program.arguments if a.name in tensors
             for axis, size in zip(a.axes, tensors[a.name].shape, strict=True)}  # fmt: skip
    for number, step in enumerate(program.steps):
        if step.function in _REDUCED:
            site = Site(editor, number)
            size = sizes.get(site.a.axes[0 if step.across_rows else -1], 0)
            yield from _changes_of(editor, site, replace(_SHORT, over=partial(_first_elements, size)))


def _first_elements(size: int, _: Site) -> list[tuple[str, str, tuple[float, float | None, int]]]:
    """Numbers of first elements of `size`, for a sum of only these."""
    ends = {n: f"takes the first {n} of {size} elements alone" for n in _PASSES if n < size}
    for n in _PADDED:
        if n < size and size % n:
            ends.setdefault(size // n * n, f"leaves out those of {size} elements behind the last whole {n}")
    return [(f"first-{end}", words, (0, end, 1)) for end, words in ends.items()]


def _changes_of(editor: Editor, site: Site, row: Row) -> Iterator[Change]:
    step, program = site.step, editor.program
    if row.of_operand:
        alike = {n for n, other in enumerate(program.steps) if other.function == step.function}
        scopes = [Scope("", "", [use for use in editor.uses(site.a.number) if use[0] in alike])]
    else:
        scopes = list(site.scopes(apart=row.apart))
    for value in row.over(site):
        editor.restart(site.line)
        new = row.edit(site, value)
        if new is None:
            continue
        name, words = (str(value), value) if not isinstance(value, tuple) else (value[0], value[1])
        sentence = row.sentence.format(v=words, dtype=site.dtype, **site.names)
        for scope in scopes:
            taken = new if scope.cast is None else Site(editor, scope.cast).changed_operand(new)
            changed = editor.with_uses(scope.uses, taken.number)
            if changed is not None:
                yield Change(
                    f"{step.function}-{site.number}:{row.name}{name and f'-{name}'}{scope.name}",
                    f"{sentence}{scope.phrase} (line {site.line})",
                    changed,
                    row.name,
                )


# ---- values that rows run over ---------------------------------------------------------------------------------------

_NARROW = ("bfloat16", "float16")
_EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_CONSTANTS = (
    (math.sqrt(2 / math.pi), math.sqrt(math.pi / 2), 2 / math.sqrt(math.pi), math.sqrt(0.5), math.sqrt(2), 2 / math.pi),
    (1.702, 1.7, 1.72, 1.0, math.log2(math.e), 2 * math.sqrt(2 / math.pi)),
    (0.044715, 0.04475, 0.044175, 0.04715, 0.044715 * math.sqrt(2 / math.pi), 0.44715, 0.0044715),
    (math.sqrt(0.5), math.sqrt(2), 0.5, math.sqrt(2 / math.pi)),
)
_DIMS = (64, 128, 192, 256)
"""Sizes of a head. The root of a size, or the size, divides the logits of attention."""
_LEFT_OUT = (1, 2, 4, 8, 16, 32, 64)
"""Elements of a row left out by a sum: a thread's tail, or vectors of a warp."""
_PADDED = (8, 16, 32, 64, 128, 256, 512, 1024)
_PASSES = (256, 512, 1024, 2048, 4096)
"""Number of elements of a row read at once by the threads of a block: a kernel without a loop takes these alone."""


def _other_constants(site: Site) -> list[float]:
    """A constant doubled, halved, negated, left out, with fewer digits, and its usual neighbours."""
    value = site.option("value")
    found = [0.0, 2 * value, value / 2, -value, 1.0]
    if value and float(value).is_integer():
        found += [value - 1, value + 1, 1 / value]
    for digits in (2, 3, 4):
        found.append(float(f"{value:.{digits - 1}e}"))
    if 0 < value <= _EPSILONS[-1]:
        found += [*_EPSILONS, math.sqrt(value), value * value]
    if 0 < value < 0.5 and any(step.function == SCORES for step in site.editor.program.steps):
        found += [dim**power for dim in _DIMS for power in (-0.5, -1.0)]
    for family in _CONSTANTS:
        if any(abs(value / other - 1) < 1e-3 for other in family):
            found += family
    unlike: dict[str, float] = {}
    for other in found:
        if abs(other - value) > 1e-7 * abs(value):
            unlike.setdefault(f"{other:.7g}", other)
    return list(unlike.values())


_Later = tuple[str, str, list[tuple[int, int]]]
"""Name, sentence, and a chain of steps up to the sum or product, each with the place of its operand in the chain."""
_DEEPEST = 3
"""Steps from a sum or a product to the step behind which a wrong kernel adds or multiplies."""


def _main(program: Program, number: int) -> int | None:
    """The place of the computed operand, or of the larger of two arguments; None: of neither."""
    operands = program.steps[number].operands

    def size(operand: int) -> tuple[bool, int]:
        step = program.steps[operand]
        while step.function in ("float32", "cast"):
            step = program.steps[step.operands[0]]
        return step.function not in ("argument", "constant"), len(step.axes)

    if len(operands) == 1:
        return 0
    if len(operands) != 2 or size(operands[0]) == size(operands[1]):
        return None
    return int(size(operands[1]) > size(operands[0]))


def _later(site: Site) -> list[_Later]:
    """Sums and products with an argument or a constant, moved from before the step to behind it."""
    program, found = site.editor.program, list[_Later]()
    chain: list[tuple[int, int]] = []
    number = site.number
    for _ in range(_DEEPEST + 1):
        step, place = program.steps[number], _main(program, number)
        if place is None or step.dtype != "float32" or step.axes != site.step.axes:
            break
        if chain and step.function in ("add", "multiply"):
            other = _named(Value(site.editor, step.operands[1 - place]))
            if any(program.steps[before].function != step.function for before, _ in chain):
                does = "added" if step.function == "add" else "a factor"
                name = f"{step.function}-{number}"
                found.append((name, f"{other} is {does} after {_NAMES.get(site.step.function, site.step.function)}",
                              [*chain, (number, place)]))  # fmt: skip
        if step.function not in _ELEMENTWISE or (chain and len(site.editor.uses(number)) != 1):
            break
        chain.append((number, place))
        number = step.operands[place]
    return found


def _applied_later(site: Site, later: _Later) -> Value:
    *chain, (number, place) = later[2]
    steps = site.editor.program.steps

    def rebuilt(of: int, at: int, value: Value) -> Value:
        operands = [Value(site.editor, operand) for operand in steps[of].operands]
        operands[at] = value
        return site.editor.add(
            steps[of].function, tuple(operands), steps[of].axes, steps[of].dtype, **steps[of].options
        )

    value = Value(site.editor, steps[number].operands[place])
    for before, at in reversed(chain):
        value = rebuilt(before, at, value)
    return rebuilt(number, place, value)


def _named(value: Value) -> str:
    assert isinstance(value.trace, Editor)
    return formula(value.trace.program, value.number)


def _moved(other: Value, summed: Value) -> list[tuple[str, str, Value, Value, Value]]:
    """The constant in the sum of a factor, moved to the second factor."""
    step, trace = summed.step, summed.trace
    operands = [Value(trace, number) for number in step.operands] if step.function == "add" else []
    constants = [value for value in operands if value.step.function == "constant"]
    rest = [value for value in operands if value.step.function != "constant"]
    return [("", _named(constants[0]), other, constants[0], rest[0])] if len(constants) == len(rest) == 1 else []


def _some_columns(site: Site) -> list[tuple[str, str, tuple[float, float | None, int]]]:
    """Elements of a row, or of a column, for a sum of only these. Of the keys of a request see `_left_out_keys`."""
    if site.a.axes[-1:] == ("keys",):
        return []
    row = "column" if site.step.across_rows else "row"
    found: list[tuple[str, str, tuple[float, float | None, int]]] = []
    for count in _LEFT_OUT:
        elements = f"{count} elements" if count > 1 else "element"
        found += [
            (f"last-{count}-left-out", f"leaves out the last {elements} of a {row}", (0, -count, 1)),
            (f"first-{count}-left-out", f"leaves out the first {elements} of a {row}", (count, None, 1)),
        ]
    return [
        *found,
        ("first-half", f"takes the first half of a {row} alone", (0, 0.5, 1)),
        ("second-half", f"takes the second half of a {row} alone", (0.5, None, 1)),
        ("even", f"takes every second element of a {row} alone", (0, None, 2)),
        ("odd", f"takes every second element of a {row} alone, from the second on", (1, None, 2)),
    ]


def _readings(site: Site) -> list[tuple[str, str]]:
    """Wrong readings of a quantized argument, as far as its recipe has them."""
    name, recipe = site.option("name"), find_recipe(site.option("recipe"))
    without = {"nibbles"} if recipe.element.bits != 4 else set[str]()
    if not recipe.zero_points:
        without |= {view for view in CHANGED_CODES if view.startswith("zeros-")}
    if recipe.element is not INT4 or recipe.scale is not FP32 or recipe.spans_k:
        without.add("extended")
    if not recipe.element.signed:
        without.add("unsigned")
    if recipe.spans_k:
        without |= {view for view in CHANGED_CODES if view.endswith(("block", "-pairs", "-even")) or "-halves" in view}
    views: dict[str, Any] = {view: entry for view, entry in CHANGED_CODES.items() if view not in without}
    if any(step.function == OF_EXPERT for step in site.editor.program.steps):
        views |= CHANGED_MATRICES
    return [(view, phrase.format(name)) for view, (phrase, _) in views.items()]


def _slices(site: Site) -> list[tuple[str, str, tuple[float, float | None, int]]]:
    """Parts of K that a product may take alone; of a product of known numbers, any of `_some_columns`."""
    known = site.a.step.function != QUANTIZE
    return [some for some in _some_columns(site) if known or some[0] in _SLICES]


def _terms(site: Site) -> list[tuple[str, str, int]]:
    """The terms of a sum of several values."""
    return [(str(n), _named(term), n) for n, term in enumerate(site.operands)]


def _without_term(site: Site, left_out: int) -> Value:
    """A sum with a value left out."""
    terms = [term for number, term in enumerate(site.operands) if number != left_out]
    return c.float32(terms[0]) if len(terms) == 1 else c.sum(terms)


def _largest_term(site: Site) -> Value:
    found = site.operands[0]
    for term in site.operands[1:]:
        found = c.maximum(found, term)
    return found


def _halves_in(site: Site, dtype: str) -> Value | None:
    """The sum of two products over a half of K each, rounded to a dtype."""
    if site.a.step.function == QUANTIZE:
        return None
    parts = [site.changed_operand(_some_of_operand(site, some)) for some in ((0, 0.5, 1), (0.5, None, 1))]
    one, other = (c.float32(_rounded(site, part, dtype)) for part in parts)
    return one + other


_SLICES = ("last-32-left-out", "last-64-left-out", "first-32-left-out", "first-half", "second-half")
"""Parts of K that a product may take alone."""


def _some_of_operand(site: Site, columns: tuple[float, float | None, int]) -> Value:
    """The first operand of a product, with 0 in place of the remaining columns; for a quantization, in the quantized
    numbers."""
    step = site.a.step
    if step.function != QUANTIZE:
        return site.made("kept", site.a, columns=columns)
    x, *scale = (Value(site.editor, operand) for operand in step.operands)
    kept = site.made("kept", x, columns=columns)
    return site.editor.add(step.function, (kept, *scale), step.axes, step.dtype, **step.options)


def _divisors(site: Site) -> list[tuple[str, str, tuple[str, float]]]:
    return [
        ("k-minus-1", "K − 1", ("plus", -1)),
        ("k-plus-1", "K + 1", ("plus", 1)),
        ("half-k", "K/2", ("times", 0.5)),
        ("twice-k", "2·K", ("times", 2)),
        *((f"padded-{n}", f"the next multiple of {n} of K", ("padded", n)) for n in _PADDED),
    ]


def _other_forms(site: Site) -> list[tuple[str, str]]:
    function = FUNCTIONS[site.step.function]
    used = site.option("forms") or function.default
    return [(form, f"the form {form} of the function") for form in function.forms if form not in used]


def _other_arguments(site: Site) -> list[tuple[str, str, Tensor]]:
    """Wrong arguments of the same axes."""
    kind = site.dtype if site.dtype in INTEGERS else ""
    rows = (
        site.step.axes[:1]
        if site.dtype not in INTEGERS and any(other.of_cache for other in site.editor.program.arguments)
        else ()
    )
    others = [
        other
        for other in site.editor.program.arguments
        # Keys and values of a cache may have as many columns: sizes that differ exclude the change.
        if (other.axes == site.step.axes or (rows and other.axes[:1] == rows and other.kind == "Matrix"))
        and other.name != site.option("name")
        and (other.dtype if other.dtype in INTEGERS else "") == kind
    ]
    return [(other.name, other.name, other) for other in others]


def _has_columns(site: Site) -> bool:
    return site.dtype not in INTEGERS and site.step.axes[-1:] not in ((), ("1",))


def _activations(site: Site) -> Iterable[tuple[str, str, Callable[[Value], Value]]]:
    """Wrong activations of the step's operand."""
    if site.inner is None or not site.inner[1] & {"exp", "exp2", "tanh", "erf", "maximum", "where"}:
        return ()
    x = formula(site.editor.program, site.inner[0].number)
    return [(name, f"{name}({x})", function) for name, function in _ACTIVATIONS.items()]


_ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "silu": c.silu,
    "gelu_tanh": c.gelu,
    "gelu_erf": lambda x: c.gelu(x, "erf"),
    "quick_gelu": lambda x: x * c.sigmoid(x * 1.702),
    "sigmoid": c.sigmoid,
    "tanh": c.tanh,
    "relu": lambda x: c.maximum(x, 0.0),
    "relu_squared": lambda x: c.square(c.maximum(x, 0.0)),
    "identity": lambda x: x,
}


def _other_orders(site: Site) -> list[tuple[str, str, str]]:
    """Wrong orders of columns with as many columns: wrong pairs, and exchanged pairs without a sign."""
    order = site.option("order")
    alike = (
        ("repeated", "repeated-pairs") if order.startswith("repeated") else ("rotated", "rotated-pairs", "exchanged")
    )
    return [(other, f"the order {other} of the columns", other) for other in alike if other != order]


def _other_rows(site: Site) -> list[tuple[str, str, OtherRow]]:
    """Wrong rows for a number per row."""
    has_rows = (len(site.step.axes) > 1 or site.dtype == INDEX) and site.step.axes[0] != "1"
    return [(name, phrase, row) for row, name, phrase in other_rows(site.step.axes)] if has_rows else []


def _other_slots(site: Site) -> list[tuple[str, str]]:
    """Wrong slots of a step with stored or read rows."""
    steps, users = site.editor.program.steps, {user for user, _ in site.editor.uses(site.number) if user != OUTPUT}
    if not any(steps[user].function in (WRITTEN, READ) for user in users):
        return []
    name = str(site.option("name", "the page numbers"))
    return [(to, phrase.format(name)) for to, (phrase, _) in OTHER_SLOTS.items()]


def _of_table(site: Site, to: tuple[str, str]) -> Value:
    """The slots of a wrong table of pages."""
    pages, lengths = site.operands
    table = site.made(RENUMBERED, pages, dtype=INDEX, axes=pages.axes, to=to[0])
    return site.editor.add(SLOTS, (table, lengths), site.step.axes, INDEX)


def _scales_of_others(site: Site) -> list[tuple[str, str, Tensor]]:
    """Wrong arguments of the type Scale."""
    place = 1 if site.step.function == QUANTIZE else 2
    if len(site.operands) <= place or site.operands[place].step.function != "argument":
        return []
    own = site.operands[place].step.options.get("name")
    return [
        (a.name, a.name, a) for a in site.editor.program.arguments if a.kind in ("Scale", "Scales") and a.name != own
    ]


def _with_scale(site: Site, other: tuple[str, str, Tensor]) -> Value:
    scale = site.editor.add("argument", (), other[2].axes, "float32", name=other[0])
    place = 1 if site.step.function == QUANTIZE else 2
    operands = (*site.operands[:place], scale)
    return site.editor.add(site.step.function, operands, site.step.axes, site.dtype, **site.step.options)


def _stored_scales(site: Site) -> list[tuple[str, str, OtherRow]]:
    """Rows with scales stored in place of the right scales."""
    recipe = find_recipe(site.a.step.recipe or "")
    return [] if recipe.whole else [(name, phrase, row) for row, name, phrase in other_rows(site.a.axes)]


def _other_half(site: Site) -> list[str]:
    return [half for half in HALVES if half != site.option("half")]


# ---- sequences -------------------------------------------------------------------------------------------------------

_TILES = (16, 32, 64, 128)
_FIRST_ROWS = [(f"{n}", f"rows {n} to {2 * n - 1} of each {2 * n} have the q of the {n} rows before", n)
               for n in (16, 32, 64, 128)]  # fmt: skip
_SPLITS = (2, 3, 4, 5, 7, 8)
_INDEX_NAMES = {SEGMENTS: "request", HEADS: "head"}
_KEYS = 64
"""Keys that may be left out, a key per change."""
_INDICES = 4
"""Numbers of an index that may replace one another."""


def _other_indices(site: Site) -> list[tuple[str, str, str]]:
    """Wrong numbers of an index, by a rule."""
    name = _INDEX_NAMES.get(site.step.function) if site.dtype == INDEX else None
    return [] if name is None else [(to, phrase.format(name), to) for to, (phrase, _) in OTHER_INDICES.items()]


def _single_indices(site: Site) -> list[tuple[str, str, tuple[int, int]]]:
    """A number of an index replaced by a wrong number."""
    name = _INDEX_NAMES.get(site.step.function) if site.dtype == INDEX else None
    pairs = itertools.permutations(range(_INDICES), 2) if name else ()
    return [(f"{other}-for-{right}", f"{name} {other} is read for {name} {right}", (right, other))
            for right, other in pairs]  # fmt: skip


def _left_out_keys(site: Site) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Keys left out by a wrong mask, with logits of −∞."""
    if site.operands[2].step.options.get("value") != -math.inf:
        return []
    found: list[tuple[str, str, tuple[Any, ...]]] = []
    for count in (1, *_LEFT_OUT[1:]):
        keys = f"{count} keys" if count > 1 else "key"
        found += [(f"last-{count}", f"the last {keys} of a row", ("last", count)),
                  (f"first-{count}", f"the first {keys} of a row", ("first", count))]  # fmt: skip
    for size in _TILES:
        found += [(f"last-tile-{size}", f"the last tile of {size} keys", ("tile", size, -1)),
                  (f"from-tile-{size}", f"the first key of each tile of {size} but the first", ("border", size, 0)),
                  (f"to-tile-{size}", f"the last key of each tile of {size}", ("border", size, -1))]  # fmt: skip
    for splits in _SPLITS:
        found += [
            (f"split-{number}-of-{splits}", f"split {number} of {splits}", ("split", splits, number))
            for number in (range(splits) if splits < 4 else (0, splits - 1))
        ]
    for size, number in itertools.product(_TILES[:1], range(1, 8)):
        keys = f"keys {number * size} to {number * size + size - 1}"
        found.append((f"tile-{number}-of-{size}", keys, ("tile", size, number)))
    return [*found, *((f"key-{key}", f"key {key}", ("key", key)) for key in range(_KEYS))]


def _other_values(site: Site) -> list[tuple[str, str, str, int]]:
    """Values that the weights of other keys multiply, by kinds of `OTHER_VALUES` and tiles of keys."""
    both = [(f"exchanged-{n}", f"keys {n} apart in each {2 * n} have the values of each other", "exchanged", n)
            for n in (1, 8, 64)]  # fmt: skip
    first = [(f"first-{n}", f"keys {n} to {2 * n - 1} of each {2 * n} have the values of the keys before", "first", n)
             for n in (8, 16, 32, 64)]  # fmt: skip
    return [
        *both, *first,
        *((f"last-{n}", f"the values of the last tile of {n} keys are left out, and their weights are not",
           "last-left-out", n) for n in _TILES),
        *((f"next-{n}", f"weights of each tile of {n} keys multiply the values of the next tile", "next", n)
          for n in _TILES),
    ]  # fmt: skip


def _keys_behind(site: Site) -> list[tuple[str, str, str, int]]:
    """Keys behind the end of a row that its mask shows, or last tokens that are zeros."""
    if site.operands[2].step.options.get("value") != -math.inf:
        return []
    more = [(f"more-{n}", f"rows see {n} more key{'s' * (n > 1)}, zeros behind the last token", "more", n)
            for n in (1, 2)]  # fmt: skip
    return [
        *more, ("zeros-1", "the last token of a request is read as zeros", "zeros", 1),
        *((f"tile-{n}", f"rows see all keys of their last tile of {n}, zeros behind the last token", "tile", n)
          for n in _TILES),
    ]  # fmt: skip


def _moved_masks(site: Site) -> list[tuple[str, str, float]]:
    """Masks with an end a few keys, or tiles, before or behind the right end."""
    if not any(step.function == SCORES for step in site.editor.program.steps):
        return []
    moves = (1, -1, 2, -2, 15, -15, 16, -16, 32, -32)
    return [(str(by), f"{abs(by)} {'more' if by > 0 else 'fewer'}", float(by)) for by in moves]


def _differences(site: Site) -> Value | None:
    """The logits less their maximum, of a sum of weights; None of another sum."""
    step = next((s for s in site.editor.program.steps if s.function == WEIGHTS), None)
    if step is None or site.a.step.function not in (WEIGHTS, RESCALED):
        return None
    return Value(site.editor, step.operands[1])


def _not_rescaled(site: Site, tile: int) -> Value | None:
    """A sum of weights without rescaling for a growing maximum."""
    d = _differences(site)
    return None if d is None else site.changed_operand(site.made("of_running", site.a, d, tile=tile))


def _of_splits(site: Site, splits: int) -> Value | None:
    d = _differences(site)
    return None if d is None else site.changed_operand(site.made("averaged", site.a, d, splits=splits))


def _lengths_of_tokens(site: Site) -> list[tuple[str, str]]:
    """Wrong lengths of an argument with numbers of tokens."""
    users = {site.editor.program.steps[user].function for user, _ in site.editor.uses(site.number) if user != OUTPUT}
    read = SLOTS in users and len(site.step.axes) == 1
    return [(to, phrase.format(site.option("name"))) for to, (phrase, _) in OTHER_LENGTHS.items()] if read else []


def _other_positions(site: Site) -> list[tuple[str, str]]:
    """Wrong rows, or experts, of an argument with a number per choice of a token."""
    users = {site.editor.program.steps[user].function for user, _ in site.editor.uses(site.number) if user != OUTPUT}
    index = site.step.dtype == INDEX  # the table that it names rows of has these users too
    others = next((RENUMBERINGS[user] for user in RENUMBERINGS if index and user in users), {})
    return [(to, sentence) for to, (sentence, _) in others.items()]


def _normalisers(site: Site) -> list[tuple[str, str]]:
    """Sums of the weights of choices, by which a kernel may divide the weights."""
    positions, steps = _positions(site), site.editor.program.steps
    weights = site.dtype not in INTEGERS and any(steps[n].axes == site.step.axes for n in positions)
    return [("all", "all choices"), ("named", "the choices that name a row")] if weights else []


def _positions(site: Site) -> list[int]:
    """The steps that name the row of each choice."""
    return [step.operands[1] for step in site.editor.program.steps if step.function == ACCUMULATED]


def _normalised(site: Site, over: tuple[str, str]) -> Value:
    weights = c.float32(site.old)
    named = [Value(site.editor, number) for number in _positions(site)[: over[0] == "named"]]
    return weights / site.made("total_of", weights, *named)


def _zero(site: Site) -> Value:
    return site.editor.add("constant", (), (), "float32", value=0.0)


def _narrowed(site: Site, dtype: str) -> Value | None:
    source = site.source(site.number)
    if source.dtype in INTEGERS:
        return None
    if source.function == "constant":
        value = torch.tensor(source.options["value"], dtype=torch.float64)
        exact = bool(value == value.to(DTYPES[dtype]).double())
    else:
        exact = source.dtype == dtype
    return None if exact else _rounded(site, site.old, dtype)


def _rounded(site: Site, x: Value, dtype: str, **options: Any) -> Value:
    return site.made("cast", x, dtype=dtype, **options)


# ---- edits of several steps ------------------------------------------------------------------------------------------


def _is_input(site: Site, value: Value) -> bool:
    return site.source(value.number).function == "argument"


def _to_dtype(site: Site, dtype: str) -> Value | None:
    """A cast to a wrong dtype; of a result, a cast to the wrong dtype before the cast."""
    if dtype == site.dtype:
        return None
    other = _rounded(site, site.a, dtype)
    return site.changed_operand(other) if any(use[0] == OUTPUT for use in site.editor.uses(site.number)) else other


def _added_constant(site: Site) -> tuple[Value, Value] | None:
    """The number and the constant of a function of their sum."""
    step = site.editor.program.steps[site.a.number]
    if step.function != "add":
        return None
    one, other = (Value(site.editor, operand) for operand in step.operands)
    if other.step.function == "constant":
        return one, other
    return (other, one) if one.step.function == "constant" else None


def _with_constant(form: Callable[[Site, Value, Value], Value]) -> Callable[[Site, Any], Value | None]:
    def edit(site: Site, _: Any) -> Value | None:
        found = _added_constant(site)
        return None if found is None else form(site, *found)

    return edit


def _about_mean(site: Site, _: Any) -> Value | None:
    """The mean square without the subtraction of the mean, or with it if the right formula has none."""
    square = site.a.step
    if square.function != "square":
        return None
    x = Value(site.editor, square.operands[0])
    if x.step.function == "subtract" and site.editor.steps[x.step.operands[1]].function in ("mean", "merged"):
        return c.mean(c.square(Value(site.editor, x.step.operands[0])))
    return c.mean(c.square(x - c.mean(x)))


# ---- the table -------------------------------------------------------------------------------------------------------

_SUMS = ("add", "subtract")
_REDUCED = ("sum", "mean", "amax", "largest")
_ELEMENTWISE = ("add", "multiply", "square", "maximum", "minimum", "negative", "absolute", *FUNCTIONS)
_NAMES = {"add": "the addition", "multiply": "the multiplication", "square": "squaring", "negative": "the minus sign"}
_ROUNDED = ("add", "subtract", "multiply", "divide", "square", "sum", "sum_of", "any_of", "mean", *FUNCTIONS)
"""Steps with rounded float32 results."""

_SHORT = Row(_REDUCED, "over", "{self} {v}", lambda s, v: s.changed(columns=v[2]))

ROWS: tuple[Row, ...] = (
    # casts
    Row(("cast",), "left-out", "{a} is not rounded to {dtype}", lambda s, _: c.float32(s.a), apart=True),
    Row(("cast",), "to", "{a} is rounded to {v} in place of {dtype}", _to_dtype, lambda s: _NARROW),
    Row(("cast",), "twice", "{a} is rounded to {v} before it is rounded to {dtype}",
        lambda s, v: None if v == s.dtype else s.changed_operand(_rounded(s, s.a, v)), lambda s: _NARROW),
    Row(("cast",), "truncated", "{a} is truncated to {dtype}", lambda s, _: s.changed(rounding="truncate")),
    # roundings that the contract does not have
    Row((*_ROUNDED, "maximum", "minimum", "where", "amax", "constant"), "in", "{self} is rounded to {v}", _narrowed,
        lambda s: _NARROW, apart=True),
    Row(("argument",), "in", "{self} is rounded to {v}", _narrowed, lambda s: _NARROW, apart=True),
    Row(_ROUNDED, "truncated", "{self} is truncated to {v}",
        lambda s, v: s.made("cast", s.old, dtype=v, rounding="truncate"), lambda s: ("bfloat16", "float16")),
    Row(_ROUNDED, "negated", "{self} has the other sign", lambda s, _: -s.old),
    # sums
    Row(("add",), "second-left-out", "{b} is not added to {a}", lambda s, _: s.alone(s.a), apart=True),
    Row(("add",), "first-left-out", "{a} is not added to {b}", lambda s, _: s.alone(s.b), apart=True),
    Row(("subtract",), "second-left-out", "{b} is not subtracted from {a}", lambda s, _: s.alone(s.a), apart=True),
    Row(("subtract",), "first-left-out", "−({b}) is in place of {self}", lambda s, _: -s.alone(s.b)),
    Row(("add",), "second-subtracted", "{b} is subtracted from {a}", lambda s, _: s.a - s.b),
    Row(("add",), "first-subtracted", "{a} is subtracted from {b}", lambda s, _: s.b - s.a),
    Row(("subtract",), "added", "{b} is added to {a}", lambda s, _: s.a + s.b),
    Row(_SUMS, "second-twice", "{b} is taken twice in {self}", lambda s, _: s.as_function(s.step.function, s.old, s.b)),
    Row(("add",), "first-twice", "{a} is taken twice in {self}", lambda s, _: s.old + s.a),
    Row(("sum_of",), "left-out", "{v} is not added in {self}", lambda s, v: _without_term(s, v[2]), _terms),
    Row(("sum_of",), "twice", "{v} is added twice in {self}", lambda s, v: s.old + s.operands[v[2]], _terms),
    Row(("sum_of",), "mean", "{self} is divided by the number of terms", lambda s, _: s.old / float(len(s.operands))),
    Row(("sum_of",), "largest", "the largest term is in place of {self}", lambda s, _: _largest_term(s)),
    Row(_ELEMENTWISE, "later", "{v}", _applied_later, _later),
    Row(("multiply",), "constant-moved", "{v} is added to the other factor of {self}",
        lambda s, v: (v[2] + v[3]) * v[4], lambda s: [*_moved(s.a, s.b), *_moved(s.b, s.a)]),
    Row(_SUMS, "product", "{a} and {b} are multiplied in place of {self}", lambda s, _: s.a * s.b),
    # products
    Row(("multiply",), "second-left-out", "{a} is not multiplied by {b}", lambda s, _: s.alone(s.a), apart=True),
    Row(("multiply",), "first-left-out", "{b} is not multiplied by {a}", lambda s, _: s.alone(s.b), apart=True),
    Row(("multiply",), "second-divides", "{b} divides {a}", lambda s, _: s.a / s.b),
    Row(("multiply",), "first-divides", "{a} divides {b}", lambda s, _: s.b / s.a),
    Row(("multiply",), "second-twice", "{b} is a factor twice", lambda s, _: s.old * s.b),
    Row(("multiply",), "first-twice", "{a} is a factor twice", lambda s, _: s.old * s.a),
    Row(("multiply",), "sum", "{a} and {b} are added in place of {self}", lambda s, _: s.a + s.b),
    Row(("multiply",), "second-plus-one", "the factor is 1 + {b}",
        lambda s, _: s.a * (c.float32(s.b) + 1.0) if _is_input(s, s.b) else None),
    Row(("multiply",), "first-plus-one", "the factor is 1 + {a}",
        lambda s, _: (c.float32(s.a) + 1.0) * s.b if _is_input(s, s.a) else None),
    Row(("square",), "left-out", "{a} is not squared", lambda s, _: s.a),
    Row(("square",), "magnitude", "|{a}| is in place of {self}", lambda s, _: abs(s.a)),
    Row(("square",), "cube", "the third power of {a} is in place of {self}", lambda s, _: s.old * s.a),
    # quotients
    Row(("divide",), "inverted", "the quotient is {b} by {a} in place of {self}", lambda s, _: s.b / s.a),
    Row(("divide",), "left-out", "{a} is not divided by {b}", lambda s, _: s.alone(s.a), apart=True),
    Row(("divide",), "multiplied", "{a} is multiplied by {b}", lambda s, _: s.a * s.b),
    Row(("divide",), "twice", "{a} is divided by {b} twice", lambda s, _: s.old / s.b),
    Row(("divide",), "reciprocal-in", "the reciprocal of {b} is rounded to {v}",
        lambda s, v: s.a * c.float32(_rounded(s, 1.0 / s.b, v)), lambda s: _NARROW),
    Row(("divide",), "form", "{self} is computed in the form {v}", lambda s, v: s.changed(form=v),
        lambda s: [form for form in DIVISIONS if s.option("form") not in (None, form)]),
    # sums and maxima of rows
    replace(_SHORT, over=_some_columns),
    Row(("sum",), "partly-in", "each partial sum of {self}, in their order, is rounded to {v}",
        lambda s, v: s.changed(to=v), lambda s: _NARROW),
    Row(("mean",), "by", "{self} divides by {v}", lambda s, v: s.changed(divisor=v[2]), _divisors),
    Row(("mean",), "of-half", "{self} takes half of a row alone and divides by K/2",
        lambda s, _: s.changed(columns=(0, 0.5, 1), divisor=("times", 0.5))),
    Row(("mean",), "sum", "{self} is not divided by K", lambda s, _: s.as_function("sum")),
    Row(("mean",), "about-mean", "{self} has the mean subtracted or not, unlike the contract", _about_mean),
    Row(("sum",), "mean", "{self} is divided by K", lambda s, _: s.as_function("mean")),
    Row(("sum", "mean"), "amax", "the largest magnitude is in place of {self}", lambda s, _: s.as_function("amax")),
    Row(("amax",), "without-magnitude", "{self} is the largest number and not the largest magnitude",
        lambda s, _: s.as_function("largest")),
    Row(("amax",), "smallest", "{self} is the magnitude of the smallest number",
        lambda s, _: -s.as_function("largest", -s.a)),
    Row(("largest",), "magnitude", "{self} is the largest magnitude", lambda s, _: s.as_function("amax")),
    Row((*_REDUCED, "argument"), "of-row", "{self} is that of {v}",
        lambda s, v: s.in_row(v[2]), _other_rows, apart=True),
    # functions
    Row(("exp", "exp2", "tanh", "erf"), "of-minus-x", "the argument of {self} has the other sign",
        lambda s, _: s.as_function(s.step.function, -s.a)),
    Row(("exp",), "base", "exp2 in place of {self}", lambda s, _: s.as_function("exp2")),
    Row(("exp2",), "base", "exp in place of {self}", lambda s, _: s.as_function("exp")),
    Row(("rsqrt",), "root", "sqrt in place of {self}", lambda s, _: s.as_function("sqrt")),
    Row(("rsqrt",), "reciprocal", "1/({a}) in place of {self}", lambda s, _: 1.0 / s.a),
    Row(("sqrt",), "reciprocal", "rsqrt in place of {self}", lambda s, _: s.as_function("rsqrt")),
    Row(("tanh", "erf"), "other", "{v} in place of {self}", lambda s, v: s.as_function(v), lambda s: ("tanh", "erf")),
    Row(tuple(FUNCTIONS), "left-out", "{a} is in place of {self}", lambda s, _: s.a),
    Row(tuple(FUNCTIONS), "form", "{self} is {v}", lambda s, v: s.changed(forms=[v[0]]), _other_forms),
    Row(("rsqrt",), "constant-beside", "{self} is 1/(√ + constant)",
        _with_constant(lambda s, x, eps: 1.0 / (c.sqrt(x) + eps))),
    Row(("rsqrt", "sqrt"), "constant-limits", "the constant of {self} is a lower limit and not added",
        _with_constant(lambda s, x, eps: s.as_function(s.step.function, c.maximum(x, eps.step.options["value"])))),
    Row(("any_of", "multiply", "divide", "maximum", "where"), "activation", "{v} in place of {self}",
        lambda s, v: v[2](s.inner[0]) if s.inner is not None else None, _activations),
    # clamps, comparisons and choices
    Row(("maximum",), "second-left-out", "{a} has no lower limit {b}", lambda s, _: s.alone(s.a), apart=True),
    Row(("minimum",), "second-left-out", "{a} has no upper limit {b}", lambda s, _: s.alone(s.a), apart=True),
    Row(("maximum", "minimum"), "first-left-out", "{self} is {b}", lambda s, _: s.alone(s.b)),
    Row(("maximum", "largest"), "zero", "0 is in place of {self}", lambda s, _: s.alone(_zero(s))),
    Row(("maximum",), "exchanged", "the smaller in place of {self}", lambda s, _: s.as_function("minimum")),
    Row(("minimum",), "exchanged", "the larger in place of {self}", lambda s, _: s.as_function("maximum")),
    Row(("minimum",), "both-sides", "{a} is limited to −({b}) too", lambda s, _: c.maximum(s.old, -s.b)),
    Row(("maximum",), "both-sides", "{a} is limited to −({b}) too", lambda s, _: c.minimum(s.old, -s.b)),
    Row(("where",), "exchanged", "{self} takes the other of the two values",
        lambda s, _: c.where(s.a, s.operands[2], s.b)),
    Row(("where",), "first", "{self} takes {b} always", lambda s, _: s.alone(s.b)),
    Row(("where",), "second", "{self} takes its third operand always", lambda s, _: s.alone(s.operands[2])),
    Row(("compare",), "relation", "the comparison is {v} in {self}", lambda s, v: s.changed(relation=v),
        lambda s: [r for r in (">", ">=", "<", "<=") if r != s.option("relation")]),
    Row(("negative",), "left-out", "{self} has no minus sign", lambda s, _: s.a, apart=True),
    Row(("absolute",), "left-out", "{self} has the sign of {a}", lambda s, _: s.a, apart=True),
    # constants and arguments
    Row(("constant",), "other", "{v:.7g} in place of {self}", lambda s, v: s.changed(value=v), _other_constants,
        apart=True),
    Row(("argument",), "of-column", "{self} is that of the {v} column",
        lambda s, v: s.made("rolled", s.old, columns=v[2]) if _has_columns(s) else None,
        lambda s: (("1", "next", 1), ("-1", "previous", -1)), apart=True),
    Row(("argument",), "other", "{v} is in place of {self}",
        lambda s, v: s.editor.add("argument", (), v[2].axes, v[2].dtype, name=v[0]), _other_arguments, apart=True),
    # halves
    Row(("part",), "other-half", "the other half is in place of {self}",
        lambda s, _: s.changed(part=1 - s.option("part"))),
    Row(("part",), "halves", "the halves of {a} are {v}",
        lambda s, v: s.made(COLUMNS, s.a, order=v[2]) if s.option("part") == 0 else None,
        lambda s: (("exchanged", "exchanged", "exchanged"),
                   ("interleaved", "its even and its odd columns", "even-odd")), of_operand=True),
    Row((COLUMNS,), "order", "{v} in place of {self}", lambda s, v: s.changed(order=v[2]), _other_orders),
    Row((COLUMNS,), "sign", "{self} has the other sign",
        lambda s, _: -s.old if "rotated" in s.option("order") else None),
    Row((DEQUANTIZE,), "unquantized", "{a} is not quantized",
        lambda s, _: c.float32(Value(s.editor, s.a.step.operands[0])) if s.a.step.recipe is not None else None),
    Row((JOINED,), "halves", "the halves of {self} are {v}", lambda s, v: s.made(COLUMNS, s.old, order=v),
        lambda s: ("exchanged", "interleaved")),
    Row((ROTATED,), "left-out", "{a} is not rotated", lambda s, _: c.float32(s.a)),
    Row((ROTATED,), "signs", "the rotation of {a} has no signs",
        lambda s, _: s.changed(signs=0) if s.option("signs") else None),
    Row((ROTATED,), "group", "groups of {v} elements are rotated in {self}", lambda s, v: s.changed(group=v),
        lambda s: [group for group in RHT_GROUPS if group != s.option("group")]),
    Row((QUANTIZE,), "as", "{v}", lambda s, v: v[2](s), changed_quantizations),
    # caches
    Row(("argument", SLOTS), "slots", "{v}",
        lambda s, v: s.made(RENUMBERED, s.old, dtype=INDEX, axes=s.step.axes, to=v[0]), _other_slots, apart=True),
    Row((SLOTS,), "table", "{v}", _of_table,
        lambda s: [(to, phrase.format(s.a.step.options["name"])) for to, (phrase, _) in OTHER_TABLES.items()],
        apart=True),
    Row((WRITTEN,), "rest", "{v}", lambda s, v: s.changed(rest=v[0]), lambda s: REST.items()),
    Row((READ,), "scale", "{v}", lambda s, v: s.changed(given=v[0]),
        lambda s: [(n, phrase) for n, (phrase, _) in OTHER_SCALES.items()] if len(s.operands) > 2 else []),
    Row((QUANTIZE, READ), "scale-of", "the scale is {v}", _with_scale, _scales_of_others),
    Row((WRITTEN,), "scales", "the stored scales are those of {v}",
        lambda s, v: s.changed(scales=v[2]), _stored_scales),
    Row((READ,), "of-row", "{a} are those of {v}", lambda s, v: s.changed(row=v[2]), _other_rows),
    Row((HALF,), "other", "the {v} are in place of the {self}", lambda s, v: s.changed(half=v), _other_half),
    # quantized arguments and products
    Row((CODES,), "as", "{v}", lambda s, v: s.changed(view=v[0]), _readings),
    Row((DECODE,), "to", "{a} is decoded to {v} in place of {dtype}", lambda s, v: s.made(DECODE, s.a, dtype=v),
        lambda s: [v for v in (*_NARROW, "exact") if v != s.dtype]),
    Row((FACTOR, GEMM), "in", "{self} is rounded to {v}", _narrowed, lambda s: _NARROW),
    Row((FACTOR,), "inverted", "{self} is inverted", lambda s, _: 1.0 / s.old),
    Row((GEMM,), "over", "the sum of {self} {v}", lambda s, v: s.changed_operand(_some_of_operand(s, v[2])), _slices),
    # sequences
    Row((SEGMENTS, HEADS), "of", "{v} is read in place of the right one", lambda s, v: s.changed(to=v[2]),
        _other_indices, apart=True),
    Row((SEGMENTS, HEADS), "of", "{v}", lambda s, v: s.changed(to=v[2]), _single_indices),
    Row(("argument",), "length", "{v}",
        lambda s, v: s.made(RENUMBERED, s.old, dtype=INDEX, axes=s.step.axes, to=v[0]), _lengths_of_tokens),
    Row(("where",), "leaves-out", "{v} is left out", lambda s, v: s.made("left_out", s.old, keys=v[2]),
        _left_out_keys),
    Row(("compare",), "moved", "rows see {v} keys than they do", lambda s, v: s.changed_second(s.b + v[2]),
        _moved_masks),
    Row((WEIGHTED, "sum"), "not-rescaled",
        "the sum of {self} is not rescaled when the maximum of tiles of {v} keys grows", _not_rescaled,
        lambda s: _TILES),
    Row((WEIGHTS,), "to", "the weights are rounded to {v}", lambda s, v: s.changed(to=v),
        lambda s: [v for v in ALL_WEIGHTS if v != s.option("to")]),
    Row((WEIGHTED,), "values", "{v}",
        lambda s, v: s.changed_operand(s.made("with_other_values", s.a, kind=v[2], size=v[3])), _other_values),
    Row((RESCALED,), "lanes", "weights are relative to the maximum of their half of each {v} keys",
        lambda s, v: s.made("of_lanes", s.old, s.b, group=v), lambda s: (2, 4, 8, 16)),
    Row(("where",), "behind", "{v}", lambda s, v: s.made("behind_the_end", s.old, s.b, kind=v[2], size=v[3]),
        _keys_behind),
    Row((SCORES,), "first-rows", "{v}",
        lambda s, v: s.changed_operand(s.made("of_first_rows", s.a, *s.operands[2:4], size=v[2])),
        lambda s: _FIRST_ROWS),
    Row((SCORES,), "heads", "the heads of q that share a head are {v} apart in place of neighbours",
        lambda s, v: s.changed_operand(s.made("regrouped", s.a, group=v)), lambda s: (2, 4, 8)),
    Row((WEIGHTED,), "averaged", "{v} splits are averaged without their weights", _of_splits, lambda s: _SPLITS),
    # mixtures of experts
    Row(("argument",), "position", "{v}",
        lambda s, v: s.made(RENUMBERED, s.old, dtype=INDEX, axes=s.step.axes, to=v[0]), _other_positions),
    Row(("argument",), "normalised", "{self} is divided by its sum over {v}", _normalised, _normalisers),
    Row((ACCUMULATED,), "of", "{v}", lambda s, v: s.changed(choices=v[0]),
        lambda s: [(some, sentence) for some, (sentence, _) in SOME_CHOICES.items() if some != "all"]),
    Row((ACCUMULATED,), "partly-in", "each partial sum of the choices is rounded to {v}",
        lambda s, v: s.changed(to=v, order="choices"),
        lambda s: [v for v in _NARROW if v != s.option("to")]),
    Row((GEMM,), "halves-in", "the sums of the halves of K of {self} are rounded to {v}", _halves_in,
        lambda s: _NARROW),
)  # fmt: skip
"""The table of changes."""

_ROWS = {
    function: tuple(row for row in ROWS if function in row.functions)
    for function in {function for row in ROWS for function in row.functions}
}
