"""The order in which a GEMM adds: its tree from masks, its arithmetic from predictions to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from narrowgauge.harness.checks.order.masks import GemmFunction, MaskedGemm, OrderUnknown
from narrowgauge.harness.checks.order.operands import FP4, SPREAD, OperandDtype, rounded
from narrowgauge.harness.checks.order.order import Order, Slices, in_slices, kind_of, sequential
from narrowgauge.harness.checks.order.reveal import reveal
from narrowgauge.reference.accumulators.hardware import HardwareModel
from narrowgauge.reference.accumulators.product import DTYPES
from narrowgauge.reference.accumulators.trees import INPUTS, Chain, NodeArithmetic, tree_sum_of_pairs

_HALF = 10
"""Fraction bits of a float16 accumulator."""
_FRACTIONS = range(1, 42)
_EXACT = 40
"""Fraction bits of a model that truncates only its result."""
_CHECKED_ROWS, _CHECKED_COLUMNS = 64, 6
_FEW_COLUMNS, _PROBED_TWICE = 40, 1024
"""Columns above and up to which a tree without a confirmed arithmetic is probed again, at every column."""
_EXACT_FP4 = 2**24 // 144
"""K up to which float32 sums of E2M1 products are exact in any order."""
_FAMILIES = ("normal", "wide", "cancelling")
"""Random products that an order must predict."""
_SINGLE_CALLS = 3000
"""Most columns for which a single output is probed."""


def accumulation_order(
    function: GemmFunction,
    M: int,
    K: int,
    N: int,
    *,
    dtype: OperandDtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Order:
    """The order in which `function` adds the products of an output.

    function(a, b) takes a (M, K) and b (N, K) of `dtype`, on `device`, and returns a·bᵀ (M, N) in a floating-point
    dtype, without scales or bias. dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, or a pair of
    them for a and b; or float4_e2m1fn_x2, which holds two numbers in an element: a is (M, K/2), the first number in the
    low nibble.

    The tree of additions comes from masks (FPRev, arXiv 2411.00442). An arithmetic is confirmed only if it predicts
    random products to the bit, in rows and columns all over the output; otherwise the result has the found order, and
    the reason against its confirmation.

    `seed`: of the random products. Raises ValueError for another dtype, or a size below 1.
    """
    for name, size in (("M", M), ("K", K), ("N", N)):
        if size < 1:
            raise ValueError(f"{name} is {size}; a GEMM to be probed has at least 1")
    gemm = MaskedGemm(function, (M, K, N), dtype, device)
    if gemm.dtypes == (FP4, FP4):
        if K % 2:
            raise ValueError(f"K is {K}; operands of {FP4} hold two numbers in an element, so K is even")
        return _of_exact_products(gemm, seed)
    order = _by_masks(gemm, seed)
    return order if order.confirmed else _of_exact_groups(gemm, seed) or order


def _by_masks(gemm: MaskedGemm, seed: int) -> Order:
    """The order by its tree of additions."""
    shape = (gemm.rows, gemm.columns, gemm.others)
    try:
        gemm.calibrate()
        tree = _tree(gemm)
    except OrderUnknown as error:
        return Order(shape, gemm.dtype, "unknown", calls=gemm.calls, reason=str(error))
    order = _confirmed(gemm, tree, seed)
    if order.confirmed or not _FEW_COLUMNS < gemm.columns <= _PROBED_TWICE:
        return order
    try:
        probed = reveal(gemm, infers=False)
    except OrderUnknown:
        return order
    return order if probed == tree else _confirmed(gemm, probed, seed)


def _of_exact_groups(gemm: MaskedGemm, seed: int) -> Order | None:
    """The order of a GEMM that adds groups of products exactly, as float64 does, and rounds each sum to float32: beside
    the sum of the groups before, or alone. Masks do not tell the columns of such a group apart. None if no order of
    this kind predicts every output.
    """
    if torch.float32 in gemm.dtypes or gemm.columns < 2:  # float64 rounds sums of float32 products
        return None
    columns = range(gemm.columns)
    try:
        width, apart = _exact_groups(gemm)
    except OrderUnknown:
        return None
    tree = in_slices(columns, width, width) if apart else sequential(columns, width)
    assert isinstance(tree, Chain)
    a, b, results = _samples(gemm, seed)
    names = {dtype: name for name, dtype in DTYPES.items()}
    operands = tuple(names[dtype] for dtype in gemm.dtypes)
    arithmetic = NodeArithmetic(HardwareModel("probed", operands, width, _EXACT, kept=23, nearest=True))
    if not torch.equal(tree_sum_of_pairs(tree, a, b, arithmetic).to(gemm.out_dtype).double(), results):
        return None
    shape = (gemm.rows, gemm.columns, gemm.others)
    return Order(shape, gemm.dtype, kind_of(tree, gemm.columns), tree, arithmetic, len(results), 0, gemm.calls)


def _exact_groups(gemm: MaskedGemm) -> tuple[int, bool]:
    """Columns of the first group, in which a mask and its negative lose no small product, and whether the sum of a
    group is rounded before it is added to the sum of the groups before. Raises OrderUnknown if outputs contradict one
    another."""
    large, least = gemm.scale()
    small = max(least, large * 2.0 ** (2 - _EXACT))  # float32 loses it beside the mask, and float64 does not
    low, high = 1, gemm.columns
    while high - low > 1:
        last = (low + high) // 2
        (total,) = gemm.measured([{0: large, 1: small, last: -large}])
        low, high = (last, high) if total == small else (low, last)
    width = low + 1
    if width + 2 > gemm.columns:
        return width, False
    (total,) = gemm.measured([{0: large, width: small, width + 1: -large}])
    return width, total != small


def _samples(gemm: MaskedGemm, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The checked outputs of all families: rows of a and of b (S, K), float32, and results (S,), float64."""
    samples = [_sample(gemm, family, seed + number) for number, family in enumerate(_FAMILIES)]
    a, b, results = (torch.cat(tensors) for tensors in zip(*samples, strict=True))
    return a, b, results


def _tree(gemm: MaskedGemm) -> Chain:
    """The tree of all outputs, or of the first output if outputs contradict one another."""
    try:
        return reveal(gemm)
    except OrderUnknown:
        if gemm.columns > _SINGLE_CALLS:
            raise
        gemm.single = True
        return reveal(gemm)


def _of_exact_products(gemm: MaskedGemm, seed: int) -> Order:
    """The order of E2M1 operands, if every order gives the exact sums.

    The products are multiples of 1/4 up to 36, a range of 2^8: no product masks a second product. Float32 sums of K up
    to 2^24/144 columns are exact in any order.
    """
    shape = (gemm.rows, gemm.columns, gemm.others)
    a, b, results = _samples(gemm, seed)
    exact = (a.double() * b.double()).sum(1).float().to(gemm.out_dtype).double()
    wrong, checked = int((exact != results).sum()), len(results)
    if gemm.columns > _EXACT_FP4:
        reason = f"float32 sums of E2M1 products are exact up to K = {_EXACT_FP4}, and no mask tells their order beyond"
    elif wrong:
        reason = (
            f"{wrong} of {checked} outputs are not the exact sum, which float32 additions in any order give; products "
            "of E2M1 have no range for masks"
        )
    else:
        return Order(shape, gemm.dtype, "exact", None, NodeArithmetic(), checked, 0, gemm.calls)
    return Order(shape, gemm.dtype, "unknown", checked=checked, wrong=wrong, calls=gemm.calls, reason=reason)


def _confirmed(gemm: MaskedGemm, tree: Chain, seed: int) -> Order:
    shape = (gemm.rows, gemm.columns, gemm.others)
    kind = kind_of(tree, gemm.columns)
    a, b, results = _samples(gemm, seed)
    sizes = [len(rows) * len(columns) for _ in _FAMILIES for rows, columns in _parts(gemm)]
    checked = len(results)
    best: tuple[int, NodeArithmetic, list[torch.Tensor]] | None = None
    try:
        for arithmetic in _arithmetics(gemm, tree):
            predicted = tree_sum_of_pairs(tree, a, b, arithmetic).to(gemm.out_dtype).double()
            wrong = list(torch.split(predicted != results, sizes))
            count = sum(int(part.sum()) for part in wrong)
            if best is None or count < best[0]:
                best = count, arithmetic, wrong
            if count == 0:
                break
    except (ValueError, OrderUnknown) as error:
        return Order(shape, gemm.dtype, kind, tree, checked=checked, wrong=checked, calls=gemm.calls, reason=str(error))
    assert best is not None
    count, found, wrong = best
    if count == 0:
        return Order(shape, gemm.dtype, kind, tree, found, checked, 0, gemm.calls)
    return Order(
        shape, gemm.dtype, kind, tree, checked=checked, wrong=count, calls=gemm.calls, reason=_difference(gemm, wrong)
    )


def _difference(gemm: MaskedGemm, wrong: list[torch.Tensor]) -> str:
    """Which outputs the best arithmetic does not predict."""
    rows, columns = _rows_and_columns(gemm)
    bad = sum(part.view(len(rows), -1).any(1).int() for part in wrong[0::2])
    bad_columns = sum(part.view(-1, len(columns)).any(0).int() for part in wrong[1::2])
    assert isinstance(bad, torch.Tensor)
    assert isinstance(bad_columns, torch.Tensor)
    total, count = sum(part.numel() for part in wrong), sum(int(part.sum()) for part in wrong)
    right_rows = [row for row, is_bad in zip(rows, bad.tolist(), strict=True) if not is_bad]
    right_columns = [column for column, is_bad in zip(columns, bad_columns.tolist(), strict=True) if not is_bad]
    text = f"the best arithmetic for this tree predicts {total - count} of {total} outputs"
    for name, right, every in (("rows", right_rows, rows), ("columns", right_columns, columns)):
        if right and len(right) < len(every):
            text += f"; all of {len(right)} of {len(every)} checked {name}, so other {name} add in another order"
    return text


def _rows_and_columns(gemm: MaskedGemm) -> tuple[list[int], list[int]]:
    """Up to 64 rows and 64 columns, all over the output."""
    return _spread(gemm.rows, _CHECKED_ROWS), _spread(gemm.others, _CHECKED_ROWS)


def _spread(size: int, count: int) -> list[int]:
    """Up to `count` different indices from 0 to size − 1, both included."""
    return sorted({index * (size - 1) // max(1, count - 1) for index in range(count)})


def _parts(gemm: MaskedGemm) -> Iterator[tuple[list[int], list[int]]]:
    """Rows and columns of the checked outputs: many rows of few columns, and few rows of many columns."""
    rows, columns = _rows_and_columns(gemm)
    yield rows, _spread(gemm.others, _CHECKED_COLUMNS)
    yield _spread(gemm.rows, _CHECKED_COLUMNS), columns


def _sample(gemm: MaskedGemm, family: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The checked outputs of random operands: rows of a and of b (S, K), float32, and results (S,), float64."""
    generator = torch.Generator().manual_seed(seed)
    operands: list[torch.Tensor] = []
    for rows, dtype in zip((gemm.rows, gemm.others), gemm.dtypes, strict=True):
        spread = SPREAD[dtype]
        x = torch.randn(rows, gemm.columns, generator=generator)
        if family == "wide":
            x *= 2.0 ** torch.randint(-spread, spread + 1, x.shape, generator=generator)
            if dtype is torch.float32:  # half of these numbers are ties of TF32
                x[:, ::2] = (x[:, ::2].contiguous().view(torch.int32) & -(1 << 12)).view(torch.float32)
        elif family == "cancelling" and gemm.columns > 1:
            half = gemm.columns // 2
            sign = 1 if operands else -1
            x[:, half : 2 * half] = sign * x[:, :half] * (1 + 0.01 * torch.randn(rows, half, generator=generator))
        operands.append(rounded(x, dtype))
    a, b = operands
    y = gemm.run(a, b)
    pairs = [(row, column) for rows, columns in _parts(gemm) for row in rows for column in columns]
    i, j = torch.tensor(pairs).T
    return a[i], b[j], y[i, j]


def _arithmetics(gemm: MaskedGemm, tree: Chain) -> Iterator[NodeArithmetic]:
    """The known arithmetics that a tree allows, the most common first."""
    reductions = [torch.float32]
    if gemm.out_dtype not in (torch.float32, torch.float64) and Slices.of(tree).chains > 1:
        reductions.append(gemm.out_dtype)
    names = {dtype: name for name, dtype in DTYPES.items()}
    operands = tuple(names[dtype] for dtype in gemm.dtypes)
    half = gemm.out_dtype is torch.float16
    if tree.width == 1:
        for dtype in reductions:
            yield NodeArithmetic(None, fused=True, reduced_in=dtype)
            yield NodeArithmetic(None, fused=False, reduced_in=dtype)
            yield NodeArithmetic(HardwareModel("probed", operands, 1, _EXACT, kept=23), reduced_in=dtype)
            if half:
                model = HardwareModel("probed", operands, 1, _EXACT, kept=_HALF, nearest=True)
                yield NodeArithmetic(model, reduced_in=dtype)
        return
    fraction = _fraction(gemm, tree)
    for kept in dict.fromkeys((min(fraction, 23), 23, 13, *((_HALF,) if half else ()))):
        for nearest in (False, True):
            for dtype in reductions:
                model = HardwareModel("probed", operands, tree.width, fraction, kept=kept, nearest=nearest)
                for inputs in INPUTS if torch.float32 in gemm.dtypes else INPUTS[:1]:
                    yield NodeArithmetic(model, reduced_in=dtype, inputs=inputs)


def _fraction(gemm: MaskedGemm, tree: Chain) -> int:
    """F: the smallest product beside M and −M that is not lost is M·2^-F. Raises OrderUnknown if none is."""
    first, second, third = _added_at_once(tree)
    large, small = gemm.scale()
    largest = torch.finfo(gemm.out_dtype).max  # float16 outputs end far below the masks
    fractions = [bits for bits in _FRACTIONS if min(small, 1.0) <= large * 2.0**-bits <= largest]
    sums = gemm.measured([{first: large * 2.0**-bits, second: large, third: -large} for bits in fractions])
    kept = [bits for bits, total in zip(fractions, sums, strict=True) if total == large * 2.0**-bits]
    if not kept or kept != fractions[: len(kept)] or len(kept) == len(fractions):
        raise OrderUnknown(f"products are aligned, but products beside masks are kept down to {kept} bits")
    return kept[-1]


def _added_at_once(tree: Chain) -> tuple[int, int, int]:
    """Three columns that meet in a single addition: a product or a sum of products, and two products."""
    for number, step in enumerate(tree.steps):
        products = [one for one in step if isinstance(one, int)]
        if len(products) >= 2:
            first = tree.first if isinstance(tree.first, int) else tree.first.columns()[0]
            return first, products[0], products[1]
        for one in (*step, *((tree.first,) if number == 0 else ())):
            if isinstance(one, Chain) and one.width > 1:
                return _added_at_once(one)
    raise OrderUnknown("sums are added at once, but no products; no model defines such an addition")
