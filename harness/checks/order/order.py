"""The order of summation of a GEMM: the tree that was found, its sentence, its picture and its declaration.

A tree is a chain of steps; a step adds columns or further chains (`reference.accumulators.trees.Chain`). Kinds of trees
of 8 columns:

    sequential             ((((((0 + 1) + 2) + 3) + 4) + 5) + 6) + 7     a single chain, a column per step
    aligned, width 4       (0 1 2 3) + (4 5 6 7)                         a single chain, 4 columns per step
    slices, 2 chains       (((0 + 1) + 2) + 3) + (((4 + 5) + 6) + 7)     chains of consecutive columns
    interleaved, 2 chains  (((0 + 2) + 4) + 6) + (((1 + 3) + 5) + 7)     chains of every 2nd column
    tree                   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))     neighbours first

Aligned chains joined one by one are promoted (short chains of equal length), or slices of K (long chains).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal

import torch

from narrowgauge.harness.checks.order.operands import OperandDtype, dtype_name
from narrowgauge.reference.accumulators.trees import Chain, Inputs, NodeArithmetic
from narrowgauge.reference.gemm.split_k import join
from narrowgauge.reference.numbers.blocks import split_columns

Kind = Literal["sequential", "aligned", "tree", "slices", "exact", "other", "unknown"]
_PICTURED = 6
"""Largest number of terms of a chain, and of levels, in a picture."""
_LONGEST_PROMOTED = 1024
"""Largest number of columns of a chain for the name promotion. Aligned chains of equal length, joined in order, have
the bits of promotion and of slices of K: the length decides the name. CUTLASS promotes every 128 columns; longer chains
are named slices."""


_FLOAT16 = 10
"""Fraction bits of a float16 accumulator."""
_MOST_SLICES = 64
"""Largest number of chains for a trial of all ways of slicing K; the name of slices of unequal length has every cut."""


@dataclass(frozen=True)
class Order:
    """How a GEMM adds the products of an output. Fields not settled by the probes are None."""

    shape: tuple[int, int, int]
    """(M, K, N)."""
    dtype: OperandDtype
    """Dtype of both operands, or of a and of b."""
    kind: Kind
    """"sequential": a single chain in order of K. "aligned": steps of several products, aligned and truncated.
    "slices": chains of consecutive columns, joined. "tree": neighbours first. "exact": every order gives the exact
    sums, and no tree can be found. "other": a tree of no kind above. "unknown": no tree found."""
    tree: Chain | None = None
    arithmetic: NodeArithmetic | None = None
    """The arithmetic with a right prediction of every checked output, or None."""
    checked: int = 0
    """Number of outputs of random products compared with their prediction."""
    wrong: int = 0
    """Checked outputs that differ from the prediction of the best arithmetic."""
    calls: int = 0
    """Calls of the function."""
    reason: str = ""
    """Why the order is not confirmed."""

    @property
    def confirmed(self) -> bool:
        """Whether the order predicts every checked output to the bit."""
        return self.arithmetic is not None and not self.reason

    @property
    def width(self) -> int | None:
        """Number of products added at once; 1 if every addition has two terms."""
        return None if self.tree is None else self.tree.width

    @property
    def fraction(self) -> int | None:
        """Fraction bits kept of an aligned product."""
        model = self.arithmetic.model if self.arithmetic else None
        return model.fraction if model else None

    @property
    def kept(self) -> int | None:
        """Fraction bits of the accumulator of aligned products."""
        model = self.arithmetic.model if self.arithmetic else None
        return model.kept if model else None

    @property
    def rounding(self) -> Literal["nearest", "toward zero"] | None:
        """Rounding of the accumulator."""
        if self.arithmetic is None:
            return None
        return "toward zero" if self.arithmetic.model and not self.arithmetic.model.nearest else "nearest"

    @property
    def _rounding(self) -> str:
        return "to nearest" if self.rounding == "nearest" else "toward zero"

    @property
    def inputs(self) -> Inputs | None:
        """Conversion of float32 operands to TF32; "exact" without."""
        return self.arithmetic.inputs if self.arithmetic else None

    @property
    def slices(self) -> Slices | None:
        """The chains of products and their joins; None without a tree."""
        return None if self.tree is None else Slices.of(self.tree)

    @property
    def promoted(self) -> int | None:
        """Number of columns between additions of an aligned accumulator to a float32 sum; None: never, or not
        regularly."""
        found = self.slices
        if self.tree is None or found is None or self.width == 1 or not found.promotes:
            return None
        if (split := self._split) is not None:
            return split.promoted
        return found.chain if found.regular else None

    @property
    def _split(self) -> Split | None:
        return None if self.tree is None else split_of(self.tree, self.shape[1], self._reduced_in)

    @property
    def _reduced_in(self) -> torch.dtype:
        return self.arithmetic.reduced_in if self.arithmetic else torch.float32

    @property
    def splits(self) -> int | None:
        """Number of slices of K; 1 without slices. Short aligned chains of equal length are promoted, not slices.

        Source: docs/accumulators.md#trees.
        """
        if self.tree is None or self.slices is None:
            return None
        if self.width != 1 and (split := self._split) is not None:
            return split.slices if isinstance(split.slices, int) else len(split.slices) + 1
        return self.slices.outer if self.width != 1 or self.slices.nested else self.slices.chains

    @property
    def reduction(self) -> Literal["in order", "tree", "other"] | None:
        """Whether the sums are joined in order of K, or neighbours first; None for a single chain."""
        if self.tree is None or self.slices is None or self.slices.chains < 2:
            return None
        if (split := self._split) is not None and split.tree:
            return "tree"
        return "in order" if self.tree.columns() == sorted(self.tree.columns()) else "other"

    @property
    def declares(self) -> str | None:
        """The order as a value of a backend's {"gemm": …}; None if no declaration has exactly this order."""
        if not self.confirmed or self.tree is None or self.arithmetic is None:
            return None
        return declaration(self.tree, self.arithmetic, self.shape[1])

    def __str__(self) -> str:
        """The order as a sentence."""
        size = "×".join(map(str, self.shape))
        name = dtype_name(self.dtype)
        if self.kind == "exact":
            return f"{size} {name}: any order gives the exact sums; {self.checked} outputs equal them to the bit"
        if self.tree is None:
            return f"{size} {name}: order not found: {self.reason}"
        parts = [self._steps()]
        reduced_in = str(self._reduced_in).removeprefix("torch.")
        if (nth := Interleaved.of(self.tree)) is not None:
            parts.append(f"{nth}, in {reduced_in}")
        elif (found := self.slices) is not None and found.chains > 1:
            how = {"in order": "in order", "tree": "as a tree"}.get(
                self.reduction or "", "in another order than that of K"
            )
            if self.promoted is not None:
                parts.append(f"promoted to float32 every {self.promoted} columns")
                if found.outer > 1:
                    parts.append(f"{found.outer} slices of K added {how}, in {reduced_in}")
            else:
                length = f"of {found.chain} columns" if found.regular else f"of up to {found.chain} columns"
                parts.append(f"{found.chains} chains {length} joined {how}, in {reduced_in}")
        if self.confirmed:
            parts.append(f"{self.checked} outputs predicted to the bit")
        else:
            parts.append(f"not confirmed: {self.reason}")
        return f"{size} {name}: {'; '.join(parts)}"

    def _steps(self) -> str:
        if self.width != 1:
            bits = f", {self.fraction} fraction bits kept" if self.fraction is not None else ""
            bits += f", operands converted to TF32 ({self.inputs})" if self.inputs not in (None, "exact") else ""
            rounding = ""
            if self.kept is not None:
                kept = "float16" if self.kept == _FLOAT16 else f"{self.kept} bits"
                rounding = f", rounded {self._rounding} to {kept}"
            return f"{self.width} products aligned{bits}{rounding}"
        if self.kind == "tree":
            return "neighbours are added first"
        order = self._order_of_products()
        if self.arithmetic is None:
            return f"one product at a time, {order}"
        if self.arithmetic.model is not None:
            dtype = "float16" if self.kept == _FLOAT16 else "float32"
            return f"one product at a time, {order}, {dtype} rounded {self._rounding}"
        text = f"one product at a time, {order}, float32 rounded to nearest"
        if self.dtype is not torch.float32:  # products of narrower numbers are float32 numbers
            return text
        return text + (", fused multiply-add" if self.arithmetic.fused else ", products rounded to float32")

    def _order_of_products(self) -> str:
        columns = self.tree.columns() if self.tree else []
        if columns == sorted(columns):
            return "in order of K"
        if self.tree and Interleaved.of(self.tree):
            return "in order of K in each chain"
        if set(columns[:2]) == {0, 1} and columns[2:] == [column ^ 1 for column in range(2, len(columns))]:
            return "in pairs of columns, the second column first"
        return "not in order"

    def picture(self) -> str:
        """The tree as lines of text; long chains and deep levels are cut, with the number of terms left out."""
        return "no tree was found" if self.tree is None else "\n".join(_lines(self.tree, "", 0))

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values; the tree as nested lists [first, [terms of a step], …]."""
        names = ("kind", "width", "fraction", "kept", "rounding", "inputs", "promoted", "splits", "reduction",
                 "declares", "confirmed", "checked", "wrong", "calls", "reason")  # fmt: skip
        return {
            "M": self.shape[0],
            "K": self.shape[1],
            "N": self.shape[2],
            "dtype": dtype_name(self.dtype),
            **{name: getattr(self, name) for name in names},
            "sentence": str(self),
            "tree": None if self.tree is None else _nested(self.tree),
        }


@dataclass(frozen=True)
class Slices:
    """The chains of products in a tree."""

    chains: int
    """Number of chains of products."""
    chain: int
    """Columns of the longest chain."""
    regular: bool
    """Whether all chains have the same length, but for the last chain of a slice in order of K."""
    outer: int
    """Number of slices of K. The chains before the first nested sum (a joined sum of several chains) are a slice; every
    sum from the first nested sum on is a further slice."""
    nested: bool
    """Whether a joined sum has several chains."""
    promotes: bool
    """Whether the tree has several chains."""

    @classmethod
    def of(cls, tree: Chain) -> Slices:
        """The chains of a tree."""
        groups = _chain_lengths(tree)
        nested = [number for number, group in enumerate(groups) if len(group) > 1]
        # Chains joined singly to the first chain belong to its slice, up to the first nested sum.
        first = nested[0] if nested else len(groups)
        slices = [[length for group in groups[:first] for length in group], *groups[first:]]
        flat = [length for group in groups for length in group]
        longest = max(flat)
        regular = all(set(group[:-1]) <= {longest} for group in slices)
        return cls(len(flat), longest, regular, len(slices), bool(nested), len(flat) > 1)


@dataclass(frozen=True)
class Interleaved:
    """Chains of every n-th column, or of every n-th tile of columns, as in vector registers and some split-K
    kernels."""

    chains: int
    tile: int
    """Number of consecutive columns of a tile."""
    joined: str
    """Order of the sums of the chains."""

    @classmethod
    def of(cls, tree: Chain) -> Interleaved | None:
        """The chains of a tree; None for a tree without interleaved chains."""
        leaves = _own_columns(tree)
        tile = next((number for number, column in enumerate(leaves[0]) if column != number), 0)
        count, columns = len(leaves), sum(map(len, leaves))
        if count < 2 or tile == 0:
            return None
        numbers = range(columns)
        if leaves != [[column for column in numbers if column // tile % count == one] for one in range(count)]:
            return None
        # The same tree with the columns of each chain side by side has slices of K.
        moved = _renumbered(tree, {column: number for number, column in enumerate(chain.from_iterable(leaves))})
        cuts = tuple(accumulate(map(len, leaves)))[:-1]
        for joined, split in (("in order", Split(cuts)), ("as a tree", Split(cuts, tree=True))):
            if moved == in_split_slices(columns, split, tree.width):
                return cls(count, tile, joined)
        return cls(count, tile, "in another order")

    def __str__(self) -> str:
        nth = {2: "2nd", 3: "3rd"}.get(self.chains, f"{self.chains}th")
        every = f"{nth} column" if self.tile == 1 else f"{nth} tile of {self.tile} columns"
        return f"{self.chains} chains of every {every}, joined {self.joined}"


def _own_columns(tree: Chain) -> list[list[int]]:
    """The columns of the chains, in order: first of the outer chain, then of the chains joined to it."""
    terms = [tree.first, *(one for step in tree.steps for one in step)]
    own = [one for one in terms if isinstance(one, int)]
    inner = [columns for one in terms if isinstance(one, Chain) for columns in _own_columns(one)]
    return [*([own] if own else []), *inner]


def _renumbered(tree: Chain, numbers: dict[int, int]) -> Chain:
    def term(one: int | Chain) -> int | Chain:
        return numbers[one] if isinstance(one, int) else _renumbered(one, numbers)

    return Chain(term(tree.first), tuple(tuple(term(one) for one in step) for step in tree.steps))


def _chain_lengths(tree: Chain) -> list[list[int]]:
    """Number of columns of the first chain; then, per joined sum, the numbers of columns of its chains."""
    joined = [one for step in tree.steps for one in step if isinstance(one, Chain)]
    if isinstance(tree.first, Chain):
        joined.insert(0, tree.first)
    inner = [[length for group in _chain_lengths(chain) for length in group] for chain in joined]
    own = len(tree.columns()) - sum(sum(group) for group in inner)
    return [*([[own]] if own else []), *inner]


def sequential(columns: range, width: int = 1) -> int | Chain:
    """The chain of `columns` in order, `width` at a time; a single column is the column."""
    groups = [tuple(columns[start : start + width]) for start in range(0, len(columns), width)]
    first, *others = groups
    steps = ([first[1:]] if len(first) > 1 else []) + others
    return Chain(first[0], tuple(steps)) if steps else first[0]


def in_slices(columns: int | range, length: int, width: int = 1) -> Chain:
    """Slices of `length` columns, a chain per slice, added in order. `columns`: a number or a range of columns."""
    every = range(columns) if isinstance(columns, int) else columns
    return _joined([sequential(every[start : start + length], width) for start in range(0, len(every), length)])


@dataclass(frozen=True)
class Split:
    """Slices of K, by the terms of a declaration."""

    slices: int | tuple[int, ...] = 1
    """Number of slices, or the first columns of all slices but the first."""
    promoted: int | None = None
    """Number of columns of the chains in a slice, added in order; None: a slice is a single chain."""
    tree: bool = False
    """Whether neighbouring sums of slices are added first; else in order."""


def in_split_slices(columns: int, split: Split, width: int = 1) -> Chain:
    """The tree of slices of K. Chains take `width` columns at a time."""
    parts = [
        in_slices(range(columns)[part], split.promoted or columns, width)
        for part in split_columns(columns, split.promoted or width, split.slices)
    ]
    terms: list[int | Chain] = [part if part.steps else part.first for part in parts]
    found = join(terms, lambda one, other: _joined([one, other]), tree=split.tree)
    return found if isinstance(found, Chain) else Chain(found)


def _joined(parts: list[int | Chain]) -> Chain:
    """The sum of the parts, from left to right."""
    first = parts[0] if isinstance(parts[0], Chain) else Chain(parts[0])
    return Chain(first.first, (*first.steps, *((part,) for part in parts[1:])))


def split_of(tree: Chain, columns: int, reduced_in: torch.dtype = torch.float32) -> Split | None:
    """The slices of K of a tree, the shortest name first; None for a tree without slices.

    Promoted sums are float32: chains joined in a narrower dtype are slices.
    """
    if tree == in_slices(columns, columns, tree.width):
        return Split()
    found = Slices.of(tree)
    if found.chains > _MOST_SLICES:
        candidates = [Split(1, found.chain), Split(found.outer, found.chain)]
    else:
        candidates = list(_possible_splits(tree, columns, found))
    for split in candidates:
        promotes = split.promoted is not None and reduced_in is torch.float32 and tree.width > 1
        if split.promoted is not None and not (promotes and split.promoted % tree.width == 0):
            continue
        if tree == in_split_slices(columns, split, tree.width):
            return split
    return None


def _possible_splits(tree: Chain, columns: int, found: Slices) -> Iterator[Split]:
    """The splits with the chains of the tree, the shortest name first."""
    chains, length, width = found.chains, found.chain, tree.width
    if length > _LONGEST_PROMOTED and length == next(split_columns(columns, width, chains)).stop:
        yield Split(chains)
        yield Split(chains, tree=True)
    yield Split(1, length)
    yield Split(found.outer, length)
    yield Split(chains)
    yield Split(chains, tree=True)
    groups = _chain_lengths(tree)
    cuts = tuple(accumulate(one for group in groups for one in group))[:-1]
    yield Split(cuts)
    yield Split(cuts, tree=True)
    ends = list(accumulate(sum(group) for group in groups))
    first = next((number for number, group in enumerate(groups) if len(group) > 1), len(groups))
    yield Split(tuple(ends[max(first - 1, 0) : -1]), length)
    for slices in range(3, chains):
        yield Split(slices, length, tree=True)


def neighbours_first(columns: int) -> Chain | None:
    """The tree of `columns`, a power of two, with additions of neighbours first; None if no power of two."""
    if columns & (columns - 1) or columns < 2:
        return None

    def chain(first: int, count: int) -> int | Chain:
        if count == 1:
            return first
        steps = []
        size = 1
        while size < count:
            steps.append((chain(first + size, size),))
            size *= 2
        return Chain(first, tuple(steps))

    found = chain(0, columns)
    assert isinstance(found, Chain)
    return found


def kind_of(tree: Chain, columns: int) -> Kind:
    """The kind of a tree of `columns` columns."""
    if tree.width > 1:
        return "aligned"
    if tree == in_slices(columns, columns):
        return "sequential"
    if tree == neighbours_first(columns):
        return "tree"
    return "slices" if Slices.of(tree).chains > 1 and tree.columns() == sorted(tree.columns()) else "other"


def declaration(tree: Chain, arithmetic: NodeArithmetic, columns: int) -> str | None:
    """The name of the order of summation with exactly this tree and arithmetic, or None."""
    model = arithmetic.model
    if arithmetic.inputs != "exact":
        return None
    if model is None and tree == neighbours_first(columns):
        return "tree"
    split = split_of(tree, columns, arithmetic.reduced_in)
    if split is None:
        return None
    ends = "-tree" if split.tree else ""
    cuts = split.slices if isinstance(split.slices, tuple) else ()
    slices = f"split-at-{'-'.join(map(str, cuts))}" if cuts else f"split-{split.slices}"
    if model is not None:
        if model.nearest or model.kept != min(model.fraction, 23) or tree.width == 1:
            return None
        name = f"aligned-{model.fraction}-{tree.width}" + (f"-{split.promoted}" if split.promoted else "")
        ends += "-out" if arithmetic.reduced_in is not torch.float32 else ""
        return name if split.slices == 1 else f"{slices}-{name}{ends}"
    if split.slices == 1 and split.promoted is None:
        return "sequential"
    if split.promoted is not None or arithmetic.reduced_in is not torch.float32:
        return None
    return slices + ends


def _nested(chain: Chain) -> list[Any]:
    def term(one: int | Chain) -> Any:
        return one if isinstance(one, int) else _nested(one)

    return [term(chain.first), *([term(one) for one in step] for step in chain.steps)]


def _range(columns: list[int]) -> str:
    if len(columns) > 1 and columns == list(range(columns[0], columns[-1] + 1)):
        return f"{columns[0]}–{columns[-1]}"
    shown = ", ".join(map(str, columns[:4]))
    return shown if len(columns) <= 4 else f"{shown}, … ({len(columns)} columns)"


def _lines(chain: Chain, indent: str, level: int) -> list[str]:
    """Lines of a chain: its products, then the chains joined to it."""
    lines = [f"{indent}chain of {len(chain.columns())} columns: {_range(chain.columns())}"]
    if level >= _PICTURED:
        return lines
    runs: list[tuple[str, list[int]]] = []
    for step in chain.steps:
        products = [one for one in step if isinstance(one, int)]
        if products and len(products) == len(step):
            label = "one by one" if len(step) == 1 else "at once"
            if label == "one by one" and runs and runs[-1][0] == label:
                runs[-1][1].append(products[0])
            else:
                runs.append((label, products))
    start = chain.first
    if isinstance(start, int):
        lines.append(f"{indent}  starts with {start}")
    else:
        lines += _lines(start, indent + "  ", level + 1)
    for label, products in runs[:_PICTURED]:
        lines.append(f"{indent}  + {_range(products)} {label}")
    if len(runs) > _PICTURED:
        lines.append(f"{indent}  + … {len(runs) - _PICTURED} more steps of products")
    joined = [step for step in chain.steps if any(isinstance(one, Chain) for one in step)]
    for step in joined[:_PICTURED]:
        lines.append(f"{indent}  + {'joined with' if len(step) == 1 else f'{len(step)} terms at once:'}")
        for one in step:
            lines += _lines(one, indent + "      ", level + 1) if isinstance(one, Chain) else [f"{indent}      {one}"]
    if len(joined) > _PICTURED:
        lines.append(f"{indent}  + … {len(joined) - _PICTURED} more chains")
    return lines
