"""Rows and columns of a cache in wrong places: the head, token, column or slot, and its right place.

The results name the place: the bytes of a wrong part are searched among all parts. A change of this module
needs no list, and is tried like every change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from narrowgauge.contract.values import Value
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.causes.edits import Editor, Site, Use
from narrowgauge.reference.contracts.accepted import Part, order_of
from narrowgauge.reference.contracts.casts import DTYPES
from narrowgauge.reference.contracts.evaluate import Shown, judged
from narrowgauge.reference.contracts.layout.pages import Stored, page_sizes, read_all, slots
from narrowgauge.reference.contracts.scopes import Scope
from narrowgauge.reference.quantize.dequantize import dequantize
from narrowgauge.spec.formats import FP32
from narrowgauge.spec.kv_cache import DATA, single_slots
from narrowgauge.spec.program import INDEX, READ, RENUMBERED, WEIGHTED, WRITTEN, Program, Step

Tensors = Mapping[str, torch.Tensor]
Pairs = list[tuple[int, int]]
"""Right places, with the place that was taken."""
_MOST = 1 << 24
"""Comparisons of a search at most."""
_NAMED = 4
"""Largest number of places in a sentence."""


def moved_changes(program: Program, tensors: Tensors, shown: Shown) -> Iterator[Change]:
    """The contract with changed rows or columns in the wrong places."""
    if not any(argument.of_cache for argument in program.arguments):
        return
    parts = dict(judged(program, tensors, shown))
    for name, number in program.outputs.items():
        step, result = program.steps[number], shown.get(name)
        if step.function == WRITTEN and isinstance(result, Stored) and f"{name}.codes" in parts:
            yield from _of_stored(program, tensors, number, parts[f"{name}.codes"], result)
        elif isinstance(result, torch.Tensor):
            reads = [n for n in program.cone(number) if program.steps[n].function == READ]
            sums = [n for n in program.cone(number) if program.steps[n].function == WEIGHTED]
            if len(reads) == 1 and program.steps[reads[0]].axes == step.axes:
                yield from _of_read(program, tensors, reads[0], parts[name], number)
            elif sums and name in parts and not isinstance(parts[name], Scope):
                yield from _of_weighted(program, tensors, sums[0], parts[name], step)


def _of_stored(program: Program, tensors: Tensors, number: int, part: Part, result: Stored) -> Iterator[Change]:
    step, sizes = program.steps[number], page_sizes(program, tensors)
    index = slots(program, tensors, step.operands[2])
    tokens = single_slots(index)
    actual, low, high = (x.unflatten(0, (len(tokens), sizes.heads)) for x in _orders(part))  # type: ignore[no-untyped-call]
    sources = [n for n in program.cone(step.operands[0]) if "*" in (program.steps[n].axes or ("",))[0]
               and program.steps[n].function == "argument"]  # fmt: skip
    for axis, word in enumerate(("token", "head", "column")):
        pairs = _pairs(actual, low, high, axis)
        for source in sources if pairs else ():
            if axis == 0:
                pairs = [(int(tokens[right]), int(tokens[other])) for right, other in pairs]
            yield _row_change(program, source, word, pairs)
    # The row of a token somewhere else in the cache, or nowhere.
    after = result.parts[DATA].flatten(0, 1)
    if part.fmt is None or after.shape[-1] != actual.shape[-1] or len(after) * actual.numel() > _MOST:
        return
    everywhere = order_of(after, part.fmt)
    outside = ((actual < low) | (actual > high)).flatten(1).any(1)
    places: Pairs = []
    for token in outside.nonzero()[:, 0].tolist():
        fits = ((everywhere >= low[token]) & (everywhere <= high[token])).flatten(1).all(1).nonzero()[:, 0].tolist()
        places.append((int(index[tokens[token]]), fits[0] if fits else -1))
    if places:
        yield _slot_change(program, step.operands[2], places, sizes.page, "lie in")


def _of_read(program: Program, tensors: Tensors, number: int, part: Part, output: int) -> Iterator[Change]:
    sizes, step = page_sizes(program, tensors), program.steps[number]
    index = slots(program, tensors, step.operands[1])
    actual, low, high = (x.unflatten(0, (len(index), sizes.heads)) for x in _orders(part))  # type: ignore[no-untyped-call]
    for axis, word in ((0, "token"), (1, "head"), (2, "column")):
        if pairs := _pairs(actual, low, high, axis):
            yield _row_change(program, number, word, pairs, output)
    numbers = dequantize(read_all(program, tensors, step), DTYPES[program.steps[output].dtype])
    everywhere = order_of(numbers, None).unflatten(0, (sizes.slots, sizes.heads))  # type: ignore[no-untyped-call]
    if len(everywhere) * actual.numel() > _MOST:
        return
    outside = ((actual < low) | (actual > high)).flatten(1).any(1)
    places = dict[int, int]()
    for token in outside.nonzero()[:, 0].tolist():
        fits = (everywhere == actual[token]).flatten(1).all(1).nonzero()[:, 0].tolist()
        if not fits or places.setdefault(int(index[token]), fits[0]) != fits[0]:
            return
    if places:
        yield _slot_change(program, step.operands[1], list(places.items()), sizes.page, "are read from")


def _of_weighted(program: Program, tensors: Tensors, number: int, part: Part, output: Step) -> Iterator[Change]:
    """Other cells of values, if wrong rows of the output hold the values of a single cell in place of the right cell.

    Several cells may have the same values: the nearest cell with the right offset counts. If all offsets are right,
    the change moves whole pages."""
    read = next(n for n in program.cone(program.steps[number].operands[1]) if program.steps[n].function == READ)
    sizes, step = page_sizes(program, tensors), program.steps[read]
    actual, low, high = (x.flatten(0, 1) for x in _orders(part))
    numbers = dequantize(read_all(program, tensors, step), DTYPES[output.dtype])
    cells = order_of(numbers, None).unflatten(0, (sizes.slots, sizes.heads))  # type: ignore[no-untyped-call]
    wrong = ((actual < low) | (actual > high)).any(1).nonzero()[:, 0].tolist()
    if len(wrong) * cells.numel() > _MOST or bool(part.actual.isnan().any()):
        return
    places, q_heads, page = dict[int, int](), part.actual.shape[1], sizes.page
    for row in wrong:
        of_head = cells[:, row % q_heads * sizes.heads // q_heads]
        right = ((of_head >= low[row]) & (of_head <= high[row])).all(1).nonzero()[:, 0].tolist()
        taken = (of_head == actual[row]).all(1).nonzero()[:, 0].tolist()
        if len(right) == 1 and taken:
            near = min(taken, key=lambda slot: ((slot - right[0]) % page != 0, abs(slot - right[0])))
            places.setdefault(right[0], near)
    pairs = list(places.items())
    if all(right % page == taken % page for right, taken in pairs):
        of_pages = sorted({(right // page, taken // page) for right, taken in pairs})
        pairs = [(right * page + at, taken * page + at) for right, taken in of_pages for at in range(page)]
    if pairs:
        yield _slot_change(program, step.operands[1], pairs, page, "are read from", read)


def _orders(part: Part) -> tuple[torch.Tensor, ...]:
    fmt = None if part.fmt is FP32 else part.fmt
    return tuple(order_of(x, fmt) for x in (part.actual, part.lower, part.upper))


def _pairs(actual: torch.Tensor, low: torch.Tensor, high: torch.Tensor, axis: int) -> Pairs:
    """The wrong places along an axis, with the first place whose accepted numbers fit; empty if a wrong place has no
    such place."""
    a, lower, upper = (x.movedim(axis, 0).flatten(1) for x in (actual, low, high))
    wrong = ((a < lower) | (a > upper)).any(1).nonzero()[:, 0].tolist()
    found: Pairs = []
    if len(wrong) * lower.numel() > _MOST:
        return found
    for place in wrong:
        fits = ((a[place] >= lower) & (a[place] <= upper)).all(1).nonzero()[:, 0].tolist()
        if not fits:
            return []
        found.append((place, fits[0]))
    return found


def _row_change(program: Program, number: int, word: str, pairs: Pairs, output: int | None = None) -> Change:
    """The rows of an argument, or read rows, with changed rows or columns in the given places. `output`: the step with
    the numbers of read rows."""
    editor = Editor(program)
    site = Site(editor, number)
    name = site.option("name") or editor.program.steps[site.step.operands[0]].options["half"]
    own = [list(pair) for pair in pairs]
    if word == "column":
        site = site if output is None else Site(editor, output)
        editor.restart(site.line)
        new = site.made("moved", site.old, pairs=own)
    else:
        editor.restart(site.line)
        new = site.changed(row=[site.step.axes[0].split("*")[word == "head"], own])
    right, other = ([pair[at] for pair in pairs] for at in (0, 1))
    sentence = f"{_places(word, right)} of {name} {_are(right)} of {_places(word, other)}"
    return _change(editor, site, new, f"moved-{word}:{_text(pairs)}", sentence)


def _slot_change(
    program: Program, number: int, pairs: Pairs, page: int, verb: str, reader: int | None = None
) -> Change:  # fmt: skip
    """Wrong slots in place of the given slots, for all steps with these slots, or for the step `reader` alone."""
    editor = Editor(program)
    site = Site(editor, number)
    editor.restart(site.line)
    new = site.made(RENUMBERED, site.old, dtype=INDEX, axes=site.step.axes, to=[list(pair) for pair in pairs])
    stored = [(right, other) for right, other in pairs if other >= 0]
    of_pages = {(right // page, other // page) for right, other in stored}
    of_offsets = {(right % page, other % page) for right, other in stored}
    if not stored:
        sentence = f"no token is stored in {_places('slot', [right for right, _ in pairs])}"
    elif all(right == other for right, other in of_offsets) and len(stored) == len(pairs):
        sentence = _each("page", sorted(of_pages))
    elif all(right == other for right, other in of_pages) and len(stored) == len(pairs):
        sentence = _each("offset", sorted(of_offsets))
    else:
        sentence = _each("slot", pairs)
    users = editor.uses(number) if reader is None else [use for use in editor.uses(number) if use[0] == reader]
    if reader is not None:
        half = program.steps[program.steps[reader].operands[0]].options["half"]
        sentence = sentence.replace("rows", half, 1)
    return _change(editor, site, new, f"moved-slot:{_text(pairs)}", sentence.replace("{verb}", verb), users)


def _each(word: str, pairs: Sequence[tuple[int, int]]) -> str:
    right, other = [right for right, _ in pairs], [other for _, other in pairs]
    return f"rows of {_places(word, right)} {{verb}} {_places(word, other)}"


def _change(
    editor: Editor, site: Site, new: Value, name: str, sentence: str, users: Sequence[Use] | None = None
) -> Change:  # fmt: skip
    changed = editor.with_uses(editor.uses(site.number) if users is None else users, new.number)
    assert changed is not None
    return Change(f"{site.step.function}-{site.number}:{name}", sentence, changed)


def _text(pairs: Pairs) -> str:
    return "+".join(f"{right}={other}" for right, other in pairs)


def _are(places: Sequence[int]) -> str:
    return "is that" if len(places) == 1 else "are those"


def _places(word: str, places: Sequence[int]) -> str:
    some = ", ".join(str(place) for place in places[:_NAMED])
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{word}{'s' * (len(places) > 1)} {some}{more}"
