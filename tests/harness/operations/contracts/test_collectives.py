"""Collectives: right kernels pass, every mistake fails and is named, and every field changes the accepted results."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.contracts.case import ContractCase
from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.harness.running.worker import Settings, backend_in_host
from narrowgauge.reference import ops
from narrowgauge.reference.contracts.accepted import Ends
from narrowgauge.reference.contracts.evaluate import Evaluation
from narrowgauge.reference.contracts.quantized import hidden_values
from narrowgauge.spec.program import Program, stripe
from narrowgauge.spec.recipes import find_recipe

KERNELS = "tests.harness.operations.contracts.collective_kernels"


def collective(
    operation: str, family: str, ranks: int, shape: tuple[int, int], recipe: str = "mxfp8-e4m3"
) -> ContractCase:
    cls = OPERATIONS[operation]
    assert issubclass(cls, ContractCase)
    return cls._made(recipe, "bf16", shape, {"inputs": family, "option_ranks": ranks})


def record(kernel: str, operation: str, family: str, ranks: int = 2, shape: tuple[int, int] = (16, 256)) -> Record:
    case = collective(operation, family, ranks, shape)
    with backend_in_host(Settings(backend=f"{KERNELS}:{kernel}")) as backend:
        return run_case(case, backend, timeout=100.0)


REDUCE, SCATTER, GATHER, NORM = "all-reduce", "reduce-scatter", "all-gather", "all-reduce-norm-quantize"
MISTAKES = [
    ("LastLeftOut", REDUCE, "normal", 2, "quantize(x.1) is not added"),
    ("FirstLeftOut", REDUCE, "powers", 3, "quantize(x.0) is not added"),
    ("OwnTwice", REDUCE, "normal", 2, "quantize(x.0) is added twice"),
    ("OwnTwiceInStripe", REDUCE, "normal", 2, "in the rows that rank 0 reduces"),
    ("OwnScales", REDUCE, "powers", 2, "decodes the codes of all ranks with its own scales"),
    ("FirstScales", REDUCE, "powers", 2, "decodes the codes of all ranks with its own scales"),
    ("StripesExchanged", REDUCE, "normal", 2, "stripe j of the result holds the rows of stripe j + 1 of 2"),
    ("SumOfCodes", REDUCE, "powers", 2, "codes are added in place of values"),
    ("OwnAmax", REDUCE, "powers", 2, "the scales of the sum are those of the rank's own input"),
    ("FirstAmax", REDUCE, "powers", 2, "the scales of the sum are those of the rank's own input"),
    ("NotQuantized", REDUCE, "normal", 2, "quantize(x.0) is not quantized"),
    ("NotRequantized", REDUCE, "normal", 2, "is not quantized"),
    ("Average", REDUCE, "normal", 2, "is divided by the number of terms"),
    ("Maximum", REDUCE, "normal", 2, "the largest term is in place of"),
    ("RoundedHops", REDUCE, "normal", 3, "reduce is 'bf16-hops', which the backend can declare"),
    ("Stale", REDUCE, "normal", 2, "differ between first run and second run"),
    ("OneRank", REDUCE, "normal", 2, "quantize(x.0) is not added"),
    ("LastLeftOut", SCATTER, "normal", 2, "quantize(x.1) is not added"),
    ("StripesExchanged", SCATTER, "normal", 2, "stripe j of the result holds the rows of stripe j + 1 of 2"),
    ("OwnScales", SCATTER, "powers", 2, "decodes the codes of all ranks with its own scales"),
    ("LastLeftOut", NORM, "normal", 2, "x.1 is not added"),
    ("OwnTwice", NORM, "normal", 2, "x.0 is added twice"),
    ("ResidualLeftOut", NORM, "normal", 2, "residual is not added"),
    ("EpsLeftOut", NORM, "ladder", 2, "1e-06 is not added"),
    ("Average", NORM, "normal", 2, "is divided by the number of terms"),
    ("StripesExchanged", GATHER, "normal", 2, "the codes of rank 1 in slice 0"),
    ("OwnScales", GATHER, "normal", 2, "rank 0 holds the scales of rank 0 in slice 1"),
]
"""Kernel, operation, family, ranks, and words of the cause."""
UNNAMED = [("ResidualTwice", NORM, "normal", 2)]
"""Mistakes that are caught and have no cause in the list."""
FEW = [MISTAKES[6], MISTAKES[-1]]
"""Mistakes whose search takes no time."""


def assert_named(kernel: str, operation: str, family: str, ranks: int, words: str) -> None:
    found = record(kernel, operation, family, ranks)
    assert found.verdict == "fail", found.message
    causes = [cause["sentence"] for cause in found.explanations]
    assert any(words in text for text in [*causes[:1], found.message]), (found.message, causes)


@pytest.mark.parametrize("mistake", FEW, ids=lambda m: f"{m[0]}-{m[1]}")
def test_mistakes_of_places_are_named(mistake: tuple[str, str, str, int, str]) -> None:
    assert_named(*mistake)


@pytest.mark.long
@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in FEW], ids=lambda m: f"{m[0]}-{m[1]}-{m[3]}")
def test_mistakes_are_named(mistake: tuple[str, str, str, int, str]) -> None:
    assert_named(*mistake)


@pytest.mark.long
@pytest.mark.parametrize("mistake", UNNAMED, ids=lambda m: m[0])
def test_other_mistakes_are_caught(mistake: tuple[str, str, str, int]) -> None:
    assert record(*mistake).verdict == "fail"


def test_ranks_that_add_in_other_orders_are_found() -> None:
    """Each rank's sum in float32 is right by itself."""
    cls = OPERATIONS[NORM]
    assert issubclass(cls, ContractCase)
    case = cls._made("fp8-row-e4m3", "fp32", (8, 256), {"inputs": "normal", "option_ranks": 3, "weight_dtype": "fp32"})
    with backend_in_host(Settings(backend=f"{KERNELS}:OwnFirst")) as backend:
        found = run_case(case, backend, timeout=100.0)
    assert found.verdict == "fail"
    assert [s["stage"] for s in found.stages if s["mismatches"]] == ["ranks"]
    assert [cause["cause"] for cause in found.explanations[:1]] == ["ranks-differ"]


def test_a_right_kernel_passes_in_all_stages() -> None:
    found = record("Right", REDUCE, "cancelling", 3, (7, 256))
    assert (found.verdict, [s["stage"] for s in found.stages]) == ("pass", ["memory", "repeat", "output", "ranks"])


@pytest.mark.long
@pytest.mark.parametrize("operation", [REDUCE, SCATTER, GATHER, NORM])
@pytest.mark.parametrize("kernel", ["Right", "Reversed", "InFloat64", "Fused", "native"])
def test_right_kernels_are_never_refused(operation: str, kernel: str) -> None:
    families = [name for name in OPERATIONS[operation].families() if name != "amax-largest-first"]
    declared = {"rank-order"} if kernel == "native" else set()
    with backend_in_host(Settings(backend="native" if declared else f"{KERNELS}:{kernel}")) as backend:
        for recipe in ("mxfp8-e4m3", "fp8-block-1x128-e4m3-fp32"):
            for shape in ((7, 256), (1, 300)):
                for ranks in (2, 3):
                    for family in families:
                        case = collective(operation, family, ranks, shape, recipe)
                        found = run_case(case, backend, timeout=60.0)
                        assert found.verdict == "pass", (case.id, found.message)


def test_a_rank_keeps_its_own_stripe() -> None:
    assert record("OwnStripe", REDUCE, "normal", 3, (7, 256)).verdict == "pass"


@pytest.mark.long
def test_a_kept_stripe_needs_a_declaration() -> None:
    assert record("OwnStripeUndeclared", REDUCE, "normal", 3, (7, 256)).verdict == "fail"
    assert record("Right", REDUCE, "only-last", 2, (1, 256)).verdict == "pass"


def test_stripes_cover_all_rows_once() -> None:
    for rows in (0, 1, 5, 8, 13):
        for ranks in (2, 3, 8):
            every = [row for rank in range(ranks) for row in range(rows)[stripe(rows, ranks, rank)]]
            assert every == list(range(rows))


# ---- fields ----------------------------------------------------------------------------------------------------------


def program(operation: str, ranks: int = 2, recipe: str = "mxfp8-e4m3", **options: Any) -> Program:
    contract = CONTRACTS[operation]
    kinds = {name: kind.dtypes for name, (kind, _) in contract.tensors.items()}
    dtypes = {name: "bfloat16" if "bfloat16" in known else known[0] for name, known in kinds.items()}
    return contract.trace(dtypes, {"recipe": recipe}, {"ranks": ranks, **options})


def ends(made: Program, output: str, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    given = {a.name: tensors[a.name] for a in made.arguments}
    number = made.outputs[output]
    step = made.steps[number]
    value = Evaluation(made, given).values[step.operands[0] if step.recipe else number]
    return value.low, value.high


def differ(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return any(not torch.equal(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(one, other, strict=True))


def inputs(ranks: int = 3, rows: int = 4, columns: int = 64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    made = {f"x.{rank}": torch.randn(rows, columns, generator=draw).bfloat16() for rank in range(ranks)}
    made |= {"residual": torch.randn(rows, columns, generator=draw).bfloat16()}
    return made | {"weight": torch.randn(columns, generator=draw).bfloat16(), "scale": torch.tensor([0.5])}


@pytest.mark.parametrize(
    ("operation", "output", "options", "more"),
    [
        (REDUCE, "output", {"reduce": "bf16-hops"}, {}),
        (SCATTER, "own_stripe", {"reduce": "bf16-hops"}, {}),
        (NORM, "residual", {"accumulate": "rounded"}, {}),
        (NORM, "quantized", {"bias": 1.0}, {}),
        (NORM, "quantized", {"eps": 0.5}, {}),
        (NORM, "quantized", {"sum_of": "unrounded", "product_of": "unrounded", "rounded": "none"}, {}),
        (NORM, "quantized", {"order": "weight-first", "rounded": "first"}, {}),
        (NORM, "residual", {"zeros": "positive"}, {"zeros": True}),
    ],
    ids=str,
)
def test_fields_change_what_is_accepted(
    operation: str, output: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    tensors = inputs()
    if more:
        tensors = {name: -torch.zeros_like(t) if t.dim() == 2 else t for name, t in tensors.items()}
    assert differ(ends(program(operation, 3), output, tensors), ends(program(operation, 3, **options), output, tensors))


def test_a_declared_order_accepts_less() -> None:
    """1 + 2^-24 + 2^-24 is 1 or 1 + 2^-23."""
    tensors = {f"x.{rank}": torch.full((1, 32), x).bfloat16() for rank, x in enumerate((1.0, 2.0**-24, 2.0**-24))}
    free, ordered = (program(SCATTER, 3, reduce=reduce) for reduce in ("any", "rank-order"))
    sums = [next(n for n, s in enumerate(p.steps) if s.function == "cast") for p in (free, ordered)]
    values = [Evaluation(p, tensors).values[p.steps[n].operands[0]] for p, n in zip((free, ordered), sums, strict=True)]
    assert float((values[0].high - values[0].low).max()) > float((values[1].high - values[1].low).max())


def test_own_stripe_is_another_result() -> None:
    assert set(program(REDUCE, own_stripe=True).outputs) == {"output", "quantized", "own_stripe"}
    tensors = inputs(2)
    made = program(REDUCE, own_stripe=True)
    assert differ(ends(made, "own_stripe", tensors), ends(made, "output", tensors))


def test_a_contract_of_ranks_says_how_many() -> None:
    from narrowgauge import contract as c

    def summed(x: c.Ranks):  # type: ignore[no-untyped-def]
        """A sum."""
        return c.sum([c.float32(one) for one in x])

    summed.__annotations__ = {"x": c.Ranks}
    with pytest.raises(c.ContractError, match=r"give it the option ranks: int = 2 behind"):
        c.contract(summed)


@pytest.mark.parametrize("ranks", [1, 65])
def test_a_group_has_some_processes(ranks: int) -> None:
    assert collective(REDUCE, "normal", ranks, (4, 64)).problem() == f"ranks is {ranks}; a group has 2 to 64 processes"


# ---- hidden quantizations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp8-e4m3", "fp8-block-1x128-e4m3", "fp8-block-1x128-e4m3-fp32", "fp8-row-e4m3"])
def test_values_of_hidden_quantizations_hold(recipe: str) -> None:
    """Quantizations of numbers between two ends, also at ties and at steps of scales, lie between the values."""
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    for scale in (1.0, 2.0**-30, 3e4):
        y = torch.randn(6, 256, generator=generator) * scale
        y[:2] = (y[:2] * 16 / scale).round() / 16 * scale
        high = y.clone()
        for _ in range(3):
            high = torch.nextafter(high, torch.tensor(torch.inf))
        values = hidden_values(Ends(y, high), find_recipe(recipe), None, 1)
        steps = [y]
        for _ in range(3):
            steps.append(torch.nextafter(steps[-1], torch.tensor(torch.inf)))
        every = torch.stack(steps)
        for _ in range(20):
            choice = torch.tensor([[draw.randrange(4) for _ in range(256)] for _ in range(6)])
            one = every.gather(0, choice.unsqueeze(0))[0]
            found = ops.dequantize(ops.quantize(one, recipe)).double()
            slack = found.abs() * 2.0**-24  # the product of code and scale is rounded once
            assert bool(((values.low - slack <= found) & (found <= values.high + slack)).all())


def test_a_hidden_amax_of_the_tensor_is_refused() -> None:
    y = torch.ones(2, 32)
    with pytest.raises(
        ValueError, match=r"line 7 is hidden.*amax of the tensor: let the kernel return the quantization"
    ):
        hidden_values(Ends(y, y * 2), find_recipe("nvfp4"), None, 7)
