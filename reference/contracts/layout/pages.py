"""Rows in the slots of a cache: those that a kernel stored, the bytes that it must keep, and rows that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.contracts.accepted import Ends, Part, judge_range
from narrowgauge.reference.contracts.changed_steps import OTHER_SCALES, OtherRow, other_row
from narrowgauge.reference.quantize.scaling import block_scales
from narrowgauge.spec.formats import BYTE
from narrowgauge.spec.kv_cache import DATA, SCALES, part_name, single_slots, slots_of
from narrowgauge.spec.program import READ, RENUMBERED, SLOTS, WRITTEN, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

Tensors = Mapping[str, torch.Tensor]
Judge = Callable[[Sequence[Ends], Quantized, torch.Tensor | None], Iterator[tuple[str, Part]]]
"""Judges a quantization, given the ends of what is quantized, and a scale that is given."""


@dataclass(frozen=True)
class Stored:
    """A half of a cache behind a kernel: its parts (pages, page, heads, …), uint8 or float32."""

    parts: Tensors


@dataclass(frozen=True)
class PageSizes:
    """The sizes of a cache."""

    pages: int
    page: int
    heads: int

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        return self.pages * self.page


def slots(program: Program, tensors: Tensors, number: int) -> torch.Tensor:
    """The slots of the tokens, by a step that gives an index: int64 (tokens,)."""
    step = program.steps[number]
    if step.function == SLOTS:
        pages, lengths = (slots(program, tensors, operand) for operand in step.operands)
        return slots_of(pages, lengths, page_sizes(program, tensors).page)
    if step.function == RENUMBERED:
        right, to = slots(program, tensors, step.operands[0]), step.options["to"]
        if isinstance(to, str) and to in OTHER_LENGTHS:
            pages = next(tensors[argument.name] for argument in program.arguments if argument.kind == "Pages")
            sizes = page_sizes(program, tensors)
            return OTHER_LENGTHS[to][1](right, sizes).clamp(max=pages.shape[1] * sizes.page)
        if isinstance(to, str) and to in OTHER_TABLES:
            return OTHER_TABLES[to][1](right)
        if isinstance(to, str):
            return OTHER_SLOTS[to][1](right, page_sizes(program, tensors))
        found = right.clone()
        for one, other in to:
            found[right == one] = other
        return found
    name, row = step.options["name"], step.options.get("row")
    return tensors[name if row is None else f"{name} of row {row}"]


def page_sizes(program: Program, tensors: Tensors) -> PageSizes:
    """Pages, tokens of a page and heads of the cache of a program."""
    cache = next(argument.name for argument in program.arguments if argument.of_cache)
    return PageSizes(*tensors[cache].shape[:3])


def check_slots(program: Program, tensors: Tensors) -> None:
    """Raise ValueError for slots, page numbers and lengths that the cache does not have."""
    kinds = {argument.kind: argument.name for argument in program.arguments}
    if "Cache" not in kinds:
        return
    sizes = page_sizes(program, tensors)
    checked = [("Slots", tensors[kinds["Slots"]], sizes.slots)] if "Slots" in kinds else []
    if "Lengths" in kinds:
        lengths, pages = tensors[kinds["Lengths"]], tensors[kinds["Pages"]]
        most = pages.shape[1] * sizes.page
        if bool(((lengths < 0) | (lengths > most)).any()):
            raise ValueError(
                f"{kinds['Lengths']} holds {int(lengths.max())}; the pages of a request hold {most} tokens"
            )
        used = torch.arange(pages.shape[1], device=pages.device) * sizes.page < lengths.unsqueeze(1)
        checked.append(("Pages", pages[used], sizes.pages))
    for kind, numbers, count in checked:
        beyond = numbers[(numbers >= count) | ((numbers < 0) & (kind == "Pages"))]
        if beyond.numel():
            what = kind.lower()
            raise ValueError(f"{kinds[kind]} holds {int(beyond[0])}; the cache has the {what} 0 to {count - 1}")


def written_slots(program: Program, tensors: Tensors) -> torch.Tensor:
    """1 for the slots that a kernel writes, 0 for those that it keeps, −1 for those of several tokens: int8 (pages,
    page)."""
    sizes = page_sizes(program, tensors)
    step = next(program.steps[n] for n in program.outputs.values() if program.steps[n].function == WRITTEN)
    index = slots(program, tensors, step.operands[2])
    found = torch.zeros(sizes.slots, dtype=torch.int8, device=index.device)
    found[index[index >= 0]] = -1
    found[index[single_slots(index)]] = 1
    return found.view(sizes.pages, sizes.page)


def parts_before(program: Program, tensors: Tensors, half: Step) -> dict[str, torch.Tensor]:
    """The parts of a half of the cache before the kernel."""
    names = {part: f"{half.options['name']}.{part_name(half.options['half'], part)}" for part in (DATA, SCALES)}
    return {part: tensors[name] for part, name in names.items() if name in tensors}


def rows_in(parts: Tensors, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rows in slots: (slots·heads, …) of each part."""
    return {name: part.flatten(0, 1)[places].flatten(0, 1) for name, part in parts.items()}


def read_rows(program: Program, tensors: Tensors, step: Step) -> Quantized:
    """The quantized matrix (tokens·heads, columns) of a step that reads."""
    assert step.function == READ
    half, index = (program.steps[step.operands[0]], step.operands[1])
    rows, row = rows_in(parts_before(program, tensors, half), slots(program, tensors, index)), step.options.get("row")
    if row is not None:
        heads = page_sizes(program, tensors).heads
        for name, part in rows.items():
            shape = dict(zip(step.axes[0].split("*"), (len(part) // max(1, heads), heads), strict=True))
            rows[name] = other_row(part, row, shape)
    scale = given_scale(program, step, tensors)
    return _matrix(rows, step.options["recipe"], scale, torch.float32)


def read_all(program: Program, tensors: Tensors, step: Step) -> Quantized:
    """The rows of all slots, (slots·heads, columns), by the half and the scale of a step that reads."""
    every = torch.arange(page_sizes(program, tensors).slots)
    rows = rows_in(parts_before(program, tensors, program.steps[step.operands[0]]), every)
    return _matrix(rows, step.options["recipe"], given_scale(program, step, tensors), torch.float32)


def given_scale(program: Program, step: Step, tensors: Tensors) -> torch.Tensor | None:
    """The scale that a quantization, or a step that reads, is given; None of one without."""
    if step.function == READ:
        scale = None if len(step.operands) < 3 else tensors[program.steps[step.operands[2]].options["name"]]
    else:
        scale = program.scale_of(step, tensors)
    other = step.options.get("given")
    return scale if scale is None or other is None else OTHER_SCALES[other][1](scale)


def _matrix(rows: Tensors, name: str, scale: torch.Tensor | None, dtype: torch.dtype) -> Quantized:
    recipe, codes = find_recipe(name), rows[DATA]
    columns = codes.shape[1] * (2 if recipe.element.bits == 4 else 1)
    scales = rows.get(SCALES)
    if scales is None:
        assert scale is not None
        scales = torch.cat([block_scales(one.view(1, 1), one.view(1), recipe, dtype) for one in scale])
        if len(scale) > 1:  # a scale for each head is a scale for each row
            recipe, scales = (
                find_recipe(f"fp8-row-{recipe.element.name.lower()}"),
                scales.repeat(len(codes) // len(scale), 1),
            )
    return Quantized(codes, scales, None, recipe, (len(codes), columns))


def store(program: Program, step: Step, q: Quantized, tensors: Tensors) -> Stored:
    """The half of a cache with the rows of `q` (tokens·heads, columns) in the slots of their tokens."""
    half = program.steps[step.operands[1]]
    index, sizes = slots(program, tensors, step.operands[2]), page_sizes(program, tensors)
    kept = (index >= 0) & (index < sizes.slots)
    rows = {DATA: q.codes, SCALES: q.scales}
    found = _rest(program, tensors, half, index, step.options.get("rest"))
    for name, part in found.items():
        part.flatten(0, 1)[index[kept]] = rows[name].unflatten(0, (-1, sizes.heads))[kept]  # type: ignore[no-untyped-call]
    return Stored(found)


def _rest(
    program: Program, tensors: Tensors, half: Step, index: torch.Tensor, rest: str | None
) -> dict[str, torch.Tensor]:
    """The parts of a half of the cache before rows are stored, copied; the `rest` of a wrong kernel is 0."""
    found, page = {}, page_sizes(program, tensors).page
    for name, before in parts_before(program, tensors, half).items():
        found[name] = torch.zeros_like(before) if rest == "cache" else before.clone()
        if rest == "pages":
            found[name][index[index >= 0] // page] = 0
    return found


REST = {"cache": "every byte of the cache that is not stored becomes 0",
        "pages": "the rest of each page with a token becomes 0"}  # fmt: skip
"""Wrong bytes of the other rows, with a sentence."""


def judge_stored(
    program: Program, step: Step, ends: Sequence[Ends], kernel: Stored, tensors: Tensors,
    judge: Judge,
) -> Iterator[tuple[str, Part]]:  # fmt: skip
    """What is accepted of a half of a cache behind a kernel: the rows in the slots of the tokens, by the `judge` of
    their quantization, and the bytes of all other rows, which stay.

    `ends`: those of what is quantized, (tokens·heads, columns). A row of a slot that several tokens have is free.
    """
    quantize, half = (program.steps[operand] for operand in step.operands[:2])
    index, sizes = slots(program, tensors, step.operands[2]), page_sizes(program, tensors)
    before = _rest(program, tensors, half, index, step.options.get("rest"))
    index = torch.where(index < sizes.slots, index, -1)
    tokens = single_slots(index)
    heads = torch.arange(sizes.heads, device=index.device)
    rows = (tokens.unsqueeze(1) * sizes.heads + heads).flatten()
    scale = given_scale(program, quantize, tensors)
    first = None if scale is None else scale[:1]
    matrix = _matrix(rows_in(kernel.parts, index[tokens]), quantize.options["recipe"], first, ends[0].low.dtype)

    def place(row: int, column: int) -> dict[str, int]:
        token, head = divmod(int(rows[row]), sizes.heads)
        page, offset = divmod(int(index[token]), sizes.page)
        return {"token": token, "page": page, "offset": offset, "head": head, "column": column}

    if ends[0].low.shape[1] != matrix.shape[1]:
        raise ValueError(f"rows of {ends[0].low.shape[1]} columns do not fit a cache with rows of {matrix.shape[1]}")
    if len(tokens):
        kept = [end.rows(rows) for end in ends]
        other = step.options.get("scales")
        if other is not None:
            found = _with_scales(judge, ends, kept, matrix, rows, other, sizes)
        elif scale is not None and len(scale) > 1:
            found = _by_head(judge, kept, matrix, scale)
        else:
            found = judge(kept, matrix, scale)
        for name, part in found:
            yield name, replace(part, place=place)
    stays = torch.ones(sizes.slots, dtype=torch.bool, device=index.device).index_fill_(0, index[index >= 0], False)
    for name, after in kernel.parts.items():
        yield "other" if name == DATA else f"other_{name}", _kept(before[name], after, stays, sizes)


def _with_scales(
    judge: Judge, ends: Sequence[Ends], kept: Sequence[Ends], matrix: Quantized, rows: torch.Tensor, other: OtherRow,
    sizes: PageSizes,
) -> Iterator[tuple[str, Part]]:  # fmt: skip
    """The parts of a kernel that makes its codes with the right scales, and stores those of `other` rows.

    Raises ValueError if the right scales are not determined.
    """
    count = len(ends[0].low)
    scales = matrix.scales.new_zeros((count, matrix.scales.shape[1]))
    blank = replace(matrix, codes=matrix.codes.new_zeros((count, matrix.codes.shape[1])), scales=scales,
                    shape=(count, matrix.shape[1]))  # fmt: skip
    right = next(part for name, part in judge(ends, blank, None) if name == "scales")
    if right.lower is not right.upper:
        raise ValueError("the right scales are not determined")
    shape = {"tokens": count // max(1, sizes.heads), "heads": sizes.heads}
    stored = other_row(right.lower, other, shape)[rows]
    yield "scales", judge_range(matrix.scales, stored, stored, fmt=matrix.recipe.scale)
    yield from (part for part in judge(kept, replace(matrix, scales=right.lower[rows]), None) if part[0] == "codes")


def _by_head(judge: Judge, ends: Sequence[Ends], matrix: Quantized, scale: torch.Tensor) -> Iterator[tuple[str, Part]]:
    """The parts of rows (tokens·heads) of which each head has a scale of its own."""
    heads, found = len(scale), dict[str, list[Part]]()
    for head in range(heads):
        rows = torch.arange(head, len(matrix.codes), heads, device=scale.device)
        own = scale[head : head + 1]
        scales = block_scales(own.view(1, 1), own, matrix.recipe, ends[0].low.dtype)
        some = replace(matrix, codes=matrix.codes[rows], scales=scales, shape=(len(rows), matrix.shape[1]))
        for name, part in judge([end.rows(rows) for end in ends], some, own):
            found.setdefault(name, []).append(part)
    for name, parts in found.items():
        actual, lower, upper, wrong = (
            torch.stack([getattr(part, field) for part in parts], 1).flatten(0, 1)
            for field in ("actual", "lower", "upper", "wrong")
        )
        exact = all(part.lower is part.upper for part in parts)
        determined, free = (sum(getattr(p, field) for p in parts) for field in ("determined", "undetermined"))
        yield name, Part(actual, lower, lower if exact else upper, wrong, determined, free, parts[0].fmt)


def _kept(before: torch.Tensor, after: torch.Tensor, kept: torch.Tensor, sizes: PageSizes) -> Part:
    """The bytes of the rows in the slots `kept`, (slots, heads · bytes of a row)."""
    expected, actual = (part.contiguous().view(torch.uint8).flatten(2).flatten(0, 1)[kept] for part in (before, after))
    places = kept.nonzero()[:, 0]

    def place(row: int, column: int) -> dict[str, int]:
        page, offset = divmod(int(places[row]), sizes.page)
        head, byte = divmod(column, max(1, actual.shape[1] // max(1, sizes.heads)))
        return {"page": page, "offset": offset, "head": head, "byte": byte}

    return Part(actual, expected, expected, actual != expected, actual.numel(), 0, BYTE, place=place)


Renumber = Callable[[torch.Tensor, PageSizes], torch.Tensor]


def _moved(offset: int) -> Renumber:
    return lambda index, sizes: torch.where(index < 0, index, (index + offset) % sizes.slots)


def _paged(function: Callable[[torch.Tensor, torch.Tensor, PageSizes], torch.Tensor]) -> Renumber:
    """Other slots by the page and the offset of the right ones."""

    def renumber(index: torch.Tensor, sizes: PageSizes) -> torch.Tensor:
        found = function(index // sizes.page, index % sizes.page, sizes)
        return torch.where(index < 0, index, found % sizes.slots)

    return renumber


def _without(index: torch.Tensor, tokens: slice) -> torch.Tensor:
    """The slots without those of some tokens."""
    found = index.clone()
    found[tokens] = -1
    return found


def _behind(index: torch.Tensor, sizes: PageSizes, first: int | torch.Tensor) -> torch.Tensor:
    """Slots one behind another."""
    return (torch.arange(len(index), device=index.device) + first) % max(1, sizes.slots)


OTHER_SLOTS: Mapping[str, tuple[str, Renumber]] = {
    "next": ("{} is the next slot", _moved(1)),
    "previous": ("{} is the slot before", _moved(-1)),
    "next-page": ("{} is in the next page", _paged(lambda n, t, s: (n + 1) * s.page + t)),
    "previous-page": ("{} is in the page before", _paged(lambda n, t, s: (n - 1) * s.page + t)),
    "first-page": ("{} is in page 0", _paged(lambda n, t, s: t)),
    "first-offset": ("{} is the first slot of its page", _paged(lambda n, t, s: n * s.page)),
    "exchanged": ("page and offset are exchanged in {}", _paged(lambda n, t, s: t * s.pages + n)),
    "reversed": ("the offsets of a page run backwards in {}", _paged(lambda n, t, s: (n + 1) * s.page - 1 - t)),
    "wrong-stride": ("the page is multiplied by the number of pages in {}", _paged(lambda n, t, s: n * s.pages + t)),
    "pages-reversed": ("the pages run backwards in {}", _paged(lambda n, t, s: (s.pages - 1 - n) * s.page + t)),
    "negative-first": ("a negative slot is slot 0 in {}", lambda index, sizes: index.clamp(min=0)),
    "negative-last": ("a negative slot counts from the end in {}", lambda index, sizes: index % max(1, sizes.slots)),
    "negative-end": ("a negative slot is the last slot in {}",
                     lambda index, sizes: torch.where(index < 0, sizes.slots - 1, index)),
    "in-order": ("tokens lie in their own order, whatever {} says", lambda index, sizes: _behind(index, sizes, 0)),
    "last-left-out": ("the last token of {} is not stored", lambda index, sizes: _without(index, slice(-1, None))),
    "first-left-out": ("the first token of {} is not stored", lambda index, sizes: _without(index, slice(1))),
    "odd-left-out": ("every second token of {} is not stored", lambda index, sizes: _without(index, slice(1, None, 2))),
    "half-left-out": ("the second half of the tokens of {} is not stored",
                      lambda index, sizes: _without(index, slice(len(index) // 2, None))),
    "last-page-left-out": ("no token is stored in the last page",
                           lambda index, sizes: torch.where(index // sizes.page == sizes.pages - 1, -1, index)),
    "last-offset-left-out": ("no token is stored in the last slot of a page",
                             lambda index, sizes: torch.where(index % sizes.page == sizes.page - 1, -1, index)),
    "slot-0-left-out": ("no token is stored in slot 0", lambda index, sizes: torch.where(index == 0, -1, index)),
    "from-first": ("tokens lie one behind another from the first slot of {} on",
                   lambda index, sizes: _behind(index, sizes, index[:1])),
}  # fmt: skip
"""Wrong slots, with a sentence."""


OTHER_TABLES: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "table-reversed": ("the entries of a request run backwards in {}", lambda pages: pages.flip(1)),
    "table-next": ("{} has the next entry, and the last one twice", lambda pages: _entries(pages, 1)),
    "table-previous": ("{} has the entry before, and the first one twice", lambda pages: _entries(pages, -1)),
    "table-next-around": ("{} has the next entry, and the first one last", lambda pages: pages.roll(-1, 1)),
    "table-first": ("{} has the first entry of a request alone", lambda pages: pages[:, :1].expand_as(pages)),
}  # fmt: skip
"""Wrong tables of pages (requests, most), with a sentence."""


def _entries(pages: torch.Tensor, by: int) -> torch.Tensor:
    count = pages.shape[1]
    return pages[:, (torch.arange(count, device=pages.device) + by).clamp(0, count - 1)]


OTHER_LENGTHS: Mapping[str, tuple[str, Renumber]] = {
    "one-more": ("{} has one token more", lambda index, sizes: index + 1),
    "one-less": ("{} has one token less", lambda index, sizes: (index - 1).clamp(min=1)),
    "whole-pages": ("{} is rounded up to whole pages", lambda index, sizes: -(-index // sizes.page) * sizes.page),
    "full-pages": ("{} is rounded down to whole pages",
                   lambda index, sizes: torch.where(index < sizes.page, index, index // sizes.page * sizes.page)),
    "one-page-less": ("{} has one page less", lambda index, sizes: (index - sizes.page).clamp(min=1)),
}  # fmt: skip
"""Wrong lengths of requests, with a sentence."""
