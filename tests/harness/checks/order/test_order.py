"""The order of a GEMM, found by probes: GEMMs of known orders, contradictions, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.checks.order.masks import MaskedGemm
from narrowgauge.harness.checks.order.order import Order, Split, in_slices, in_split_slices, neighbours_first
from narrowgauge.harness.checks.order.probe import accumulation_order
from narrowgauge.harness.checks.order.reveal import reveal
from narrowgauge.harness.cli.commands import app
from narrowgauge.harness.operations.gemm.probed_gemm import declaration_for
from narrowgauge.reference.accumulators.hardware import HardwareModel, find_hardware
from narrowgauge.reference.accumulators.product import Composition, product
from narrowgauge.reference.accumulators.trees import Chain, NodeArithmetic, tree_sum
from narrowgauge.reference.numbers.decode import decode_packed
from narrowgauge.reference.numbers.exact import exact_sum
from narrowgauge.spec.formats import E2M1
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.summation import Summation

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


def hardware(name: str, **composition: object) -> Gemm:
    """A GEMM of a hardware model."""
    model = find_hardware(name)
    operand = model.operands[0]

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        how = Composition(**composition)  # type: ignore[arg-type]
        return product(a.float(), b.float(), model, operands=(operand, operand), composition=how)

    return gemm


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "composition", "declares", "fields"),
    [
        ("hopper-bf16", {}, "aligned-25-16", (16, 25, 23, None, 1)),
        ("hopper-fp8", {"promoted": 64}, "aligned-13-32-64", (32, 13, 13, 64, 1)),
        ("hopper-fp8", {"promoted": 32, "splits": 2}, "split-2-aligned-13-32-32", (32, 13, 13, 32, 2)),
        ("volta-fp16", {}, "aligned-23-4", (4, 23, 23, None, 1)),
        ("blackwell-fp8", {}, "aligned-25-32", (32, 25, 23, None, 1)),
    ],
)
def test_hardware_models_are_found(
    name: str, composition: dict[str, int], declares: str | None, fields: tuple[int | None, ...]
) -> None:
    dtype = DTYPES[name.partition("-")[2]]
    order = accumulation_order(hardware(name, **composition), 8, 136, 9, dtype=dtype)
    assert order.confirmed, order
    assert order.kind == "aligned"
    assert order.declares == declares
    assert (order.width, order.fraction, order.kept, order.promoted, order.splits) == fields
    assert order.rounding == "toward zero"


@pytest.mark.parametrize(
    ("width", "apart", "dtype"), [(16, False, "bf16"), (32, True, "fp8"), (48, False, "fp8"), (200, False, "bf16")]
)
def test_groups_that_are_summed_in_float64_are_found(width: int, apart: bool, dtype: str) -> None:
    """Exact sums of groups of products, each rounded once to float32: beside the sum before, or alone."""

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y, total = a.double(), b.double(), torch.zeros(len(a), len(b))
        for k in range(0, x.shape[1], width):
            part = x[:, k : k + width] @ y[:, k : k + width].T
            total = total + part.float() if apart else (total.double() + part).float()
        return total

    order = accumulation_order(gemm, 8, 136, 9, dtype=DTYPES[dtype])
    assert order.confirmed, order
    assert (order.width, order.rounding, order.promoted) == (min(width, 136), "nearest", width if apart else None)


def test_float32_sums_in_blocks_are_no_exact_groups() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = a.double(), b.double()
        halves = [(x[:, part] @ y[:, part].T).float() for part in (slice(0, 7), slice(7, None))]
        return halves[0] * (1 + 2.0**-20) + halves[1]

    assert not accumulation_order(gemm, 8, 40, 9).confirmed


def test_masks_above_the_largest_float16_output() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return hardware("hopper-fp16")(a, b).half()

    order = accumulation_order(gemm, 8, 136, 9, dtype=torch.float16)
    assert order.confirmed, order
    assert order.declares == "aligned-25-16"


@pytest.mark.parametrize(
    ("name", "operands", "fields"),
    [
        ("hopper-fp8", ("e5m2", "e4m3"), (32, 13, 13, "aligned-13-32")),
        ("blackwell-fp8", ("e4m3", "e5m2"), (32, 25, 23, "aligned-25-32")),
        ("hopper-fp16-fp16", ("fp16", "fp16"), (16, 25, 10, None)),
        ("hopper-fp8-fp16", ("e5m2", "e4m3"), (32, 13, 10, None)),
        ("ada-fp8-fp16", ("e4m3", "e4m3"), (16, 13, 10, None)),
    ],
)
def test_operands_of_two_formats_and_float16_accumulators(
    name: str, operands: tuple[str, str], fields: tuple[int | str | None, ...]
) -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert (a.dtype, b.dtype) == dtypes
        return product(a.float(), b.float(), find_hardware(name), operands=operands)

    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "fp16": torch.float16}
    dtypes = formats[operands[0]], formats[operands[1]]
    order = accumulation_order(gemm, 8, 72, 6, dtype=dtypes)
    assert order.confirmed, order
    assert (order.width, order.fraction, order.kept, order.declares) == fields
    assert ("float16" in str(order).partition(":")[2]) == (order.kept == 10)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            Chain(0, ((2,), (4,), (6,), (Chain(1, ((3,), (5,), (7,))),))),
            "2 chains of every 2nd column, joined in order",
        ),
        (
            Chain(0, ((4,), (Chain(1, ((5,),)),), (Chain(2, ((6,), (Chain(3, ((7,),)),))),))),
            "4 chains of every 4th column, joined as a tree",
        ),
        (
            Chain(0, ((1,), (4,), (5,), (Chain(2, ((3,), (6,), (7,))),))),
            "2 chains of every 2nd tile of 2 columns, joined in order",
        ),
        (Chain(0, ((1,), (3,), (2,), (5,), (4,), (7,), (6,))), "in pairs of columns, the second column first"),
    ],
)
def test_chains_of_every_nth_column_are_named(tree: Chain, sentence: str) -> None:
    """As in the float32 and bfloat16 products of libraries on a CPU."""
    order = accumulation_order(float32_tree(tree), 6, 8, 5, dtype=torch.float32)
    assert order.confirmed
    assert sentence in str(order)
    assert order.declares is None


def test_float16_additions_one_by_one() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(a), len(b), dtype=torch.float16)
        for k in range(a.shape[1]):  # the float64 sum of a product and a float16 number is exact
            total = (total.double() + torch.outer(a[:, k], b[:, k]).double()).half()
        return total

    order = accumulation_order(lambda a, b: gemm(a.double(), b.double()), 8, 40, 6, dtype=torch.float16)
    assert order.confirmed, order
    assert (order.kind, order.kept, order.rounding, order.declares) == ("sequential", 10, "nearest", None)


def test_e2m1_sums_are_exact_in_any_order() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = (decode_packed(side.view(torch.uint8), E2M1, 64) for side in (a, b))
        return x @ y.T

    dtype = torch.float4_e2m1fn_x2
    order = accumulation_order(gemm, 8, 64, 6, dtype=dtype)
    assert (order.kind, order.confirmed, order.declares) == ("exact", True, None)
    json.dumps(order.as_json())
    wrong = accumulation_order(lambda a, b: gemm(a, b) * (1 + 2.0**-12), 8, 64, 6, dtype=dtype)
    assert "are not the exact sum" in wrong.reason
    assert not wrong.confirmed
    with pytest.raises(ValueError, match="K is 63"):
        accumulation_order(gemm, 8, 63, 6, dtype=dtype)
    with pytest.raises(ValueError, match="for both"):
        accumulation_order(gemm, 8, 64, 6, dtype=(dtype, torch.float8_e4m3fn))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("tree", "columns", "declares"),
    [
        (in_slices(7168, 3584, 32), 7168, "split-2-aligned-13-32"),
        (in_slices(7168, 1024, 32), 7168, "aligned-13-32-1024"),
        (in_split_slices(7168, Split(2, 128), 32), 7168, "split-2-aligned-13-32-128"),
        (in_split_slices(7170, Split(3, 128), 32), 7170, "split-3-aligned-13-32-128"),
        (in_slices(7168, 4096, 32), 7168, "aligned-13-32-4096"),
        (in_slices(7168, 48, 32), 7168, None),
        (in_split_slices(7168, Split(4, tree=True), 32), 7168, "split-4-aligned-13-32-tree"),
        (in_split_slices(7168, Split(5, 128, tree=True), 32), 7168, "split-5-aligned-13-32-128-tree"),
        (in_split_slices(7168, Split((512, 4096)), 32), 7168, "split-at-512-4096-aligned-13-32"),
        (in_split_slices(7168, Split((512, 4096), 128), 32), 7168, "split-at-512-4096-aligned-13-32-128"),
        (
            in_split_slices(7168, Split((512, 2048, 4096), tree=True), 32),
            7168,
            "split-at-512-2048-4096-aligned-13-32-tree",
        ),
    ],
)
def test_aligned_slices_of_k_are_declared(tree: Chain, columns: int, declares: str | None) -> None:
    model = HardwareModel("probed", ("e4m3",), 32, 13, kept=13)
    order = Order((64, columns, 512), torch.float8_e4m3fn, "aligned", tree, NodeArithmetic(model))
    assert order.declares == declares
    if declares is not None:
        declared = Summation(declares)
        assert declared.aligned is not None
        assert order.promoted == declared.aligned.promoted
        assert order.splits == (declared.slices if isinstance(declared.slices, int) else len(declared.slices) + 1)
        assert (order.reduction == "tree") == declared.joined_as_tree
    narrow = NodeArithmetic(model, reduced_in=torch.bfloat16)
    found = Order((64, columns, 512), torch.bfloat16, "aligned", tree, narrow).declares
    assert found is None or Summation(found).joined_in_output


def random_chain(columns: list[int], generator: random.Random) -> Chain:
    """A random tree of two-term additions over at least two columns."""
    if generator.random() < 0.3 and len(columns) > 2:
        columns = generator.sample(columns, len(columns))
    count = generator.randint(1, len(columns)) if generator.random() < 0.5 else 1
    parts: list[int | Chain] = []
    while columns:
        size = generator.randint(1, len(columns)) if generator.random() < 0.3 else count
        head, columns = columns[:size], columns[size:]
        if len(head) == 1:
            parts.append(head[0])
        elif not columns and not parts:
            parts += head
        else:
            parts.append(random_chain(head, generator))
    first = parts[0]
    return Chain(first, tuple((part,) for part in parts[1:])) if len(parts) > 1 else random_chain(parts, generator)  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_synthetic_orders_are_recovered(seed: int) -> None:
    generator = random.Random(seed)
    columns = generator.choice([2, 3, 7, 16, 33])
    tree = random_chain(list(range(columns)), generator)
    fused = generator.random() < 0.5
    arithmetic = NodeArithmetic(fused=fused)

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tree_sum(tree, a, b, arithmetic)

    order = accumulation_order(gemm, 5, columns, 4, dtype=torch.float32)
    assert order.tree is not None
    assert same_sets(order.tree) == same_sets(tree)
    assert order.confirmed or "predicts" in order.reason
    if order.arithmetic is not None and order.declares == "sequential":
        assert same_sets(tree) == same_sets(in_slices(columns, columns))


def same_sets(tree: Chain) -> set[frozenset[int]]:
    """The columns below each node: a tree without the order of the two terms of an addition."""
    below = {tree.first} if isinstance(tree.first, int) else set(tree.first.columns())
    found = set() if isinstance(tree.first, int) else same_sets(tree.first)
    for step in tree.steps:
        for term in step:
            below |= {term} if isinstance(term, int) else set(term.columns())
            found |= set() if isinstance(term, int) else same_sets(term)
        found |= {frozenset(below)}
    return found


def float32_tree(tree: Chain, **arithmetic: object) -> Gemm:
    how = NodeArithmetic(**arithmetic)  # type: ignore[arg-type]
    return lambda a, b: tree_sum(tree, a, b, how)


def test_declared_orders_are_named() -> None:
    tree = neighbours_first(16)
    assert tree is not None
    for gemm, columns, name in (
        (float32_tree(in_slices(20, 20)), 20, "sequential"),
        (float32_tree(in_slices(20, 7)), 20, "split-3"),
        (float32_tree(tree, fused=False), 16, "tree"),
        (float32_tree(in_split_slices(20, Split(4, tree=True))), 20, "split-4-tree"),
        (float32_tree(in_split_slices(20, Split((3, 12)))), 20, "split-at-3-12"),
    ):
        order = accumulation_order(gemm, 6, columns, 5, dtype=torch.float32)
        assert order.confirmed
        assert order.declares == name
    for length, name in ((32, "blocks"), (64, None)):  # an MXFP8 block has 32 columns
        order = Order((4, 150, 4), torch.float8_e4m3fn, "slices", in_slices(150, length), NodeArithmetic(), 1)
        assert declaration_for(order, find_recipe("mxfp8-e4m3")) == name
    for gemm in (float32_tree(in_slices(20, 20), fused=False), float32_tree(in_slices(20, 20), fused=True)):
        arithmetic = accumulation_order(gemm, 6, 20, 5, dtype=torch.float32).arithmetic
        assert arithmetic is not None
        assert torch.equal(gemm(*(operands := two_operands())), tree_sum(in_slices(20, 20), *operands, arithmetic))


def two_operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(6, 20, generator=generator), torch.randn(5, 20, generator=generator)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inputs", ["exact", "truncated", "ties-away", "nearest-even"])
def test_the_conversion_of_operands_to_tf32_is_found(inputs: str) -> None:
    """By a GEMM of the published model, whose operands are rounded by another formula."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        fraction, exponent = torch.frexp(x.double())
        scaled = fraction * 2**11
        away = scaled.sign() * (scaled.abs() + 0.5).floor()
        kept = {"truncated": scaled.trunc(), "ties-away": away, "nearest-even": scaled.round()}[inputs]
        return torch.ldexp(kept, exponent - 11)

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if inputs == "exact":
            return tree_sum(in_slices(72, 72, 8), a, b, NodeArithmetic(HardwareModel("m", ("tf32",), 8, 25)))
        return product(rounded(a), rounded(b), find_hardware("hopper-tf32"))

    order = accumulation_order(gemm, 8, 72, 6, dtype=torch.float32)
    assert order.confirmed, order
    assert (order.inputs, order.width, order.fraction) == (inputs, 8, 25)
    assert ("TF32" in str(order)) == (order.declares is None) == (inputs != "exact")


def test_slices_reduced_in_the_output_dtype_are_found() -> None:
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return tree_sum(in_slices(24, 8), a, b, NodeArithmetic(reduced_in=torch.bfloat16)).bfloat16()

    order = accumulation_order(gemm, 8, 24, 8)
    assert order.confirmed
    assert order.arithmetic is not None
    assert order.arithmetic.reduced_in is torch.bfloat16
    assert order.declares is None  # "-out" is for aligned orders


@pytest.mark.parametrize(
    ("gemm", "message"),
    [
        (lambda a, b: exact_sum(a.double(), b.double()).to_float32(), "the sum is exact"),
        (lambda a, b: (a @ b.T)[:1], "not a floating-point"),
        (lambda a, b: (a @ b.T).nan_to_num() * 3, "a sum of"),
    ],
)
def test_an_unknown_order_is_said_to_be_unknown(gemm: Gemm, message: str) -> None:
    order = accumulation_order(gemm, 8, 32, 8, dtype=torch.float32)
    assert not order.confirmed
    assert order.kind == "unknown"
    assert order.declares is None
    assert message in str(order)


def test_rows_in_another_order_are_named_and_nothing_is_declared() -> None:
    chains = in_slices(32, 32), in_slices(32, 8)

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        parts = [tree_sum(tree, rows, b, NodeArithmetic()) for tree, rows in zip(chains, (a[:9], a[9:]), strict=True)]
        return torch.cat(parts)

    order = accumulation_order(gemm, 12, 32, 8, dtype=torch.float32)
    assert not order.confirmed
    assert order.declares is None
    assert 0 < order.wrong < order.checked
    assert "9 of 12 checked rows, so other rows add in another order" in str(order)


def test_a_different_rounding_is_not_confirmed() -> None:
    """A chain whose partial sums lose bits in a way of no known arithmetic."""

    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(a), len(b))
        for k in range(a.shape[1]):
            total = torch.nextafter(total + torch.outer(a[:, k], b[:, k]), total * 0)
        return total

    order = accumulation_order(gemm, 6, 12, 6, dtype=torch.float32)
    assert not order.confirmed
    assert order.declares is None


def test_a_reversed_chain_takes_few_calls() -> None:
    columns = 300
    reverse = Chain(columns - 1, tuple((k,) for k in range(columns - 2, -1, -1)))
    gemm = MaskedGemm(float32_tree(reverse), (16, columns, 4), torch.float32, "cpu")
    gemm.calibrate()
    found = reveal(gemm)
    assert found.columns() in (reverse.columns(), [columns - 2, columns - 1, *range(columns - 3, -1, -1)])
    assert gemm.calls < 40


def test_torch_on_a_cpu_is_confirmed_or_has_a_reason() -> None:
    """For any library of the machine: an order without confirmation has a reason and declares nothing."""
    for dtype, shape in ((torch.float32, (16, 96, 8)), (torch.bfloat16, (16, 64, 16))):
        order = accumulation_order(lambda a, b: a @ b.T, *shape, dtype=dtype)
        assert order.confirmed == (not order.reason)
        assert order.confirmed or order.declares is None


def test_the_picture_and_the_json_hold_the_tree() -> None:
    order = accumulation_order(float32_tree(in_slices(12, 4)), 4, 12, 4, dtype=torch.float32)
    assert "chain of 4 columns: 4–7" in order.picture()
    value = json.loads(json.dumps(order.as_json()))
    assert value["tree"] == [0, [1], [2], [3], [[4, [5], [6], [7]]], [[8, [9], [10], [11]]]]
    assert (value["declares"], value["splits"], value["K"]) == ("split-3", 3, 12)
    assert isinstance(order, Order)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [((0, 8, 8), torch.float32, "M is 0"), ((8, 8, 8), torch.float64, "operands of torch.float64 cannot be probed")],
)
def test_arguments_are_checked(shape: tuple[int, int, int], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accumulation_order(lambda a, b: a @ b.T, *shape, dtype=dtype)


@pytest.mark.long
def test_the_command_says_the_order_of_a_backend() -> None:
    invoke = CliRunner().invoke
    found = invoke(app, ["order", "native", "--shape", "8x64x8", "--picture"])
    assert found.exit_code == 0, found.output
    assert 'declares = {"gemm": "sequential"}' in found.output
    blocks = invoke(app, ["order", "native", "--shape", "8x64x8", "--recipe", "mxfp8-e4m3", "--format", "json"])
    assert json.loads(blocks.output)[0]["declares"] == "blocks"
    exact = invoke(app, ["order", "reference", "--shape", "8x64x8"])
    assert exact.exit_code == 0, exact.output
    assert "64 products aligned" in exact.output
    for options, message in ((["--shape", "8x8"], "--shape is '8x8'"), (["--recipe", "nvfp4"], "elements E2M1")):
        wrong = invoke(app, ["order", "native", *options])
        assert wrong.exit_code == 2
        assert message in wrong.output
