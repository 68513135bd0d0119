"""Rows in the slots of a cache: those that a kernel stored, the bytes that it must keep, and rows that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from narrowgauge.reference.contracts.accepted import Ends, Part
from narrowgauge.reference.quantize.scaling import block_scales
from narrowgauge.spec.formats import BYTE
from narrowgauge.spec.kv_cache import DATA, SCALES, part_name, single_slots, slots_of
from narrowgauge.spec.program import READ, RENUMBERED, SLOTS, WRITTEN, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A half of a cache behind a kernel: its parts (pages, page, heads, …), uint8 or float32."""

    parts: Tensors


@dataclass(frozen=True)
class _Sizes:
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
        return slots_of(pages, lengths, _sizes(program, tensors).page)
    if step.function == RENUMBERED:
        return OTHER_SLOTS[step.options["to"]][1](slots(program, tensors, step.operands[0]), _sizes(program, tensors))
    name, row = step.options["name"], step.options.get("row")
    return tensors[name if row is None else f"{name} of row {row}"]


def _sizes(program: Program, tensors: Tensors) -> _Sizes:
    cache = next(argument.name for argument in program.arguments if argument.of_cache)
    return _Sizes(*tensors[cache].shape[:3])


def check_slots(program: Program, tensors: Tensors) -> None:
    """Raise ValueError for slots, page numbers and lengths that the cache does not have."""
    kinds = {argument.kind: argument.name for argument in program.arguments}
    if "Cache" not in kinds:
        return
    sizes = _sizes(program, tensors)
    for kind, count, what in (("Slots", sizes.slots, "slots"), ("Pages", sizes.pages, "pages")):
        numbers = tensors[kinds[kind]] if kind in kinds else torch.zeros(0, dtype=torch.int64)
        beyond = numbers[(numbers >= count) | ((numbers < 0) & (kind == "Pages"))]
        if beyond.numel():
            raise ValueError(f"{kinds[kind]} holds {int(beyond[0])}; the cache has the {what} 0 to {count - 1}")
    if "Lengths" in kinds:
        lengths, most = tensors[kinds["Lengths"]], tensors[kinds["Pages"]].shape[1] * sizes.page
        if bool(((lengths < 0) | (lengths > most)).any()):
            raise ValueError(
                f"{kinds['Lengths']} holds {int(lengths.max())}; the pages of a request hold {most} tokens"
            )


def written_slots(program: Program, tensors: Tensors) -> torch.Tensor:
    """1 for the slots that a kernel writes, 0 for those that it keeps, −1 for those of several tokens: int8 (pages,
    page)."""
    sizes = _sizes(program, tensors)
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
    rows = rows_in(parts_before(program, tensors, half), slots(program, tensors, index))
    scale = None if len(step.operands) < 3 else tensors[program.steps[step.operands[2]].options["name"]]
    return _matrix(rows, step.options["recipe"], scale, torch.float32)


def _matrix(rows: Tensors, name: str, scale: torch.Tensor | None, dtype: torch.dtype) -> Quantized:
    recipe, codes = find_recipe(name), rows[DATA]
    columns = codes.shape[1] * (2 if recipe.element.bits == 4 else 1)
    scales = rows.get(SCALES)
    if scales is None:
        assert scale is not None
        scales = block_scales(scale.view(1, 1), scale, recipe, dtype)
    return Quantized(codes, scales, None, recipe, (len(codes), columns))


def judge_stored(
    program: Program, step: Step, ends: Sequence[Ends], kernel: Stored, tensors: Tensors,
    judge: Callable[[Sequence[Ends], Quantized], Iterator[tuple[str, Part]]],
) -> Iterator[tuple[str, Part]]:  # fmt: skip
    """What is accepted of a half of a cache behind a kernel: the rows in the slots of the tokens, by the `judge` of
    their quantization, and the bytes of all other rows, which stay.

    `ends`: those of what is quantized, (tokens·heads, columns). A row of a slot that several tokens have is free.
    """
    quantize, half = (program.steps[operand] for operand in step.operands[:2])
    before, index = parts_before(program, tensors, half), slots(program, tensors, step.operands[2])
    sizes = _sizes(program, tensors)
    index = torch.where(index < sizes.slots, index, -1)
    tokens = single_slots(index)
    heads = torch.arange(sizes.heads, device=index.device)
    rows = (tokens.unsqueeze(1) * sizes.heads + heads).flatten()
    scale = program.scale_of(quantize, tensors)
    matrix = _matrix(rows_in(kernel.parts, index[tokens]), quantize.options["recipe"], scale, ends[0].low.dtype)

    def place(row: int, column: int) -> dict[str, int]:
        token, head = divmod(int(rows[row]), sizes.heads)
        page, offset = divmod(int(index[token]), sizes.page)
        return {"token": token, "page": page, "offset": offset, "head": head, "column": column}

    if len(tokens):
        for name, part in judge([end.rows(rows) for end in ends], matrix):
            yield name, replace(part, place=place)
    kept = torch.ones(sizes.slots, dtype=torch.bool, device=index.device).index_fill_(0, index[index >= 0], False)
    for name, after in kernel.parts.items():
        yield "other" if name == DATA else f"other_{name}", _kept(before[name], after, kept, sizes)


def _kept(before: torch.Tensor, after: torch.Tensor, kept: torch.Tensor, sizes: _Sizes) -> Part:
    """The bytes of the rows in the slots `kept`, (slots, heads · bytes of a row)."""
    expected, actual = (part.contiguous().view(torch.uint8).flatten(2).flatten(0, 1)[kept] for part in (before, after))
    places = kept.nonzero()[:, 0]

    def place(row: int, column: int) -> dict[str, int]:
        page, offset = divmod(int(places[row]), sizes.page)
        head, byte = divmod(column, max(1, actual.shape[1] // max(1, sizes.heads)))
        return {"page": page, "offset": offset, "head": head, "byte": byte}

    return Part(actual, expected, expected, actual != expected, actual.numel(), 0, BYTE, place=place)


Renumber = Callable[[torch.Tensor, _Sizes], torch.Tensor]


def _moved(offset: int) -> Renumber:
    return lambda index, sizes: torch.where(index < 0, index, (index + offset) % sizes.slots)


def _paged(function: Callable[[torch.Tensor, torch.Tensor, _Sizes], torch.Tensor]) -> Renumber:
    """Other slots by the page and the offset of the right ones."""

    def renumber(index: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
        found = function(index // sizes.page, index % sizes.page, sizes)
        return torch.where(index < 0, index, found % sizes.slots)

    return renumber


def _behind(index: torch.Tensor, sizes: _Sizes, first: int | torch.Tensor) -> torch.Tensor:
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
    "in-order": ("tokens lie in their own order, whatever {} says", lambda index, sizes: _behind(index, sizes, 0)),
    "from-first": ("tokens lie one behind another from the first slot of {} on",
                   lambda index, sizes: _behind(index, sizes, index[:1])),
}  # fmt: skip
"""Wrong slots, with a sentence."""
