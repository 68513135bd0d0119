"""What could inputs show? Every verdict of the table is confirmed by kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contract import Contract, Program
from narrowgauge.contracts import CONTRACTS as SHIPPED
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.causes.changes import Change
from narrowgauge.harness.operations.contracts.inputs import FAMILIES, Aimed, contract_inputs
from narrowgauge.harness.operations.contracts.results import named_results
from narrowgauge.harness.operations.contracts.strength.aim import aim
from narrowgauge.harness.operations.contracts.strength.kernel import Kernel, mutants, wrong_programs
from narrowgauge.harness.operations.contracts.strength.sets import Sets
from narrowgauge.harness.operations.contracts.strength.table import (
    Cell,
    decided,
    judges,
    sampled,
    sizes_of,
    strength_json,
    strength_table,
    strength_text,
    unseen,
)
from narrowgauge.reference.contracts.evaluate import judged
from tests.reference.contracts.contracts import (
    CONTRACTS,
    add_rmsnorm,
    rmsnorm_quantize,
    scaled_rows,
    silu_mul_quantize,
)

SHAPE = (8, 136)


@c.contract
def rmsnorm_of_depth(x: c.Matrix, weight: c.Row, recipe: c.Recipe, *, depth: int = 40):
    """`rmsnorm_quantize` with sums of a declared depth."""
    z = c.float32(x)
    rs = c.rsqrt(c.mean(c.square(z), depth=depth) + 1e-6)
    y = c.float32(c.cast(z * rs, x.dtype))
    return c.quantize(c.cast(y * c.float32(weight), x.dtype), recipe)


def traced(contract: Contract, recipe: str = "fp8-row-e4m3", dtype: str = "bfloat16", **options: Any) -> Program:
    dtypes = {name: dtype if dtype in kind.dtypes else "float32" for name, (kind, _) in contract.tensors.items()}
    return contract.trace(dtypes, dict.fromkeys(contract.recipes, recipe), options)


def changed(program: Program, step: str, change: str) -> Change:
    return next(
        found
        for found in wrong_programs(program)
        if found.name.startswith(f"{step}-") and found.name.endswith(f":{change}")
    )


def plain(program: Program, family: str, shape: tuple[int, int]) -> Sets:
    sizes = sizes_of(program, *shape)
    return Sets.of(program, contract_inputs(program, sizes, family, Draw(f"test|{family}")))


def verdict(program: Program, change: Change, family: str, shape: tuple[int, int] = SHAPE) -> str:
    """The verdict of the sets; each is confirmed by 32 kernels."""
    sets = plain(program, family, shape)
    assert judges(sets)
    cell, kernels = decided(sets, change), sampled(sets, change)
    if cell is None:
        return "perhaps"
    assert kernels.caught == (32 if cell.verdict == "surely" else 0), (family, cell, kernels)
    return cell.verdict


def test_a_cast_left_out_is_surely_seen() -> None:
    program = traced(rmsnorm_quantize)
    assert verdict(program, changed(program, "cast", "left-out"), "normal", (4, 4096)) == "surely"


def test_eps_is_seen_on_the_ladder_alone() -> None:
    program = traced(rmsnorm_quantize, eps=1e-6)
    change = changed(program, "add", "second-left-out")
    assert verdict(program, change, "ladder") == "surely"
    assert verdict(program, change, "normal", (4, 4096)) == "no"
    assert verdict(program, change, "normal") == "no"


def test_a_mean_by_k_minus_1_is_seen_with_a_declared_depth() -> None:
    program, deep = traced(rmsnorm_quantize), traced(rmsnorm_of_depth)
    shape = (64, 4096)
    any_order, depth = (decided(plain(p, "normal", shape), changed(p, "mean", "by-k-minus-1")) for p in (program, deep))
    assert any_order is None or any_order.verdict != "surely"
    assert depth == Cell("surely")
    assert sampled(plain(deep, "normal", (8, 4096)), changed(deep, "mean", "by-k-minus-1")).caught == 32
    assert verdict(program, changed(program, "mean", "by-k-minus-1"), "normal", (4, 128)) == "surely"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("contract", "recipe"),
    [(rmsnorm_quantize, "fp8-row-e4m3"), (silu_mul_quantize, "nvfp4"),
     (add_rmsnorm, ""), (SHIPPED["add-rmsnorm-quantize-static"], "fp8-static-e4m3@vllm")],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_verdicts_of_sets_are_those_of_kernels(contract: Contract, recipe: str) -> None:
    program = traced(contract, recipe)
    found: dict[str, int] = {}
    for family in ("normal", "zeros", "nan", "amax-largest-first"):
        sets = plain(program, family, SHAPE)
        if not judges(sets):
            continue
        for change in wrong_programs(program)[::4]:
            cell = decided(sets, change)
            if cell is None:
                continue
            results = Kernel(change.program, 1)(**sets.tensors)
            parts = judged(program, sets.tensors, named_results(program, sets.tensors, results))
            wrong = any(bool(part.wrong.any()) for _, part in parts)
            assert wrong == (cell.verdict == "surely"), (family, change.name, cell)
            found[cell.verdict] = found.get(cell.verdict, 0) + 1
    assert min(found["surely"], found["no"]) > 10, found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["rmsnorm-quantize", "add-rmsnorm-quantize"])
def test_kernels_that_are_judged_together_are_refused_alone(name: str) -> None:
    program = traced(SHIPPED[name], "fp8-row-e4m3")
    sets, alone = (plain(program, "ladder", SHAPE) for _ in range(2))
    assert sets.stackable
    alone.__dict__["stackable"] = False
    unknown = [change for change in wrong_programs(program) if decided(sets, change) is None]
    counts = [(sampled(sets, change, 4), sampled(alone, change, 4)) for change in unknown[::8]]
    assert [one for one, _ in counts] == [other for _, other in counts]
    assert len({one.caught for one, _ in counts}) > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_kernels_are_right_and_those_of_changes_run(contract: Contract) -> None:
    program = traced(contract)
    for family in FAMILIES:
        tensors = plain(program, family, SHAPE).tensors
        for seed in (None, 1):
            results = named_results(program, tensors, Kernel(program, seed)(**tensors))
            assert not any(bool(part.wrong.any()) for _, part in judged(program, tensors, results)), (family, seed)
    for name, mutant in mutants(program):
        assert mutant(**tensors).keys() == Kernel(program)(**tensors).keys(), name


def test_a_mutant_fails_in_a_users_test() -> None:
    x, weight = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    program = traced(rmsnorm_quantize)
    mutant = dict(mutants(program))[changed(program, "multiply", "second-plus-one").name]
    with pytest.raises(AssertionError, match="1 \\+ weight"):
        narrowgauge.assert_result(program, mutant(x=x, weight=weight[0]), x=x, weight=weight[0], diagnose="full")


def test_of_several_formulas_the_changed_one_is_left() -> None:
    program = traced(silu_mul_quantize)
    change = changed(program, "divide", "inverted")
    assert verdict(program, change, "normal") == "surely"


def test_a_table_has_a_row_for_each_change_and_shape() -> None:
    program = traced(scaled_rows)
    rows = strength_table(program, shapes=((8, 136), (2, 512)), families=("normal", "zeros", "ladder"))
    assert len(rows) == 2 * len(wrong_programs(program))
    text, data = strength_text(rows), json.loads(strength_json(rows))
    line = next(line for line in text.splitlines() if line.startswith("amax-2") and "first-half" in line)
    assert line.split()[1:] == ["over-first-half", "8x136", "yes", "no", "yes"]
    assert [row["cells"]["normal"]["verdict"] for row in data if row["change"] == "over-first-half"] == [
        "surely",
        "surely",
    ]
    assert text.count("invisible here: within the bound") == 2 * list(unseen(rows).values()).count(True)
    assert unseen(rows)["amax-2:in-bfloat16"]  # an amax of bfloat16 is one
    assert not unseen([replace(rows[0], cells={"normal": Cell("perhaps", 0)})])[rows[0].name]


@pytest.mark.long
def test_aimed_inputs_show_what_families_miss() -> None:
    program = traced(scaled_rows)
    rows = strength_table(program, shapes=(SHAPE,))
    change = changed(program, "amax", "over-first-1-left-out")
    assert change.name in unseen(rows)
    found = aim(program, change, SHAPE)
    assert found is not None
    assert found == aim(program, change, SHAPE)
    assert found.family.startswith(f"aimed:{change.name}:")
    assert verdict(program, change, found.family) == found.cell.verdict == "surely"
    sizes = sizes_of(program, *SHAPE)
    one, other = (contract_inputs(program, sizes, found.family, Draw(key))["x"] for key in "ab")
    assert torch.equal(one, other)
    assert change.name not in unseen(strength_table(program, shapes=(SHAPE,), families=(*FAMILIES, found.family)))
    assert aim(program, changed(program, "amax", "in-bfloat16"), SHAPE, tries=20) is None


def test_the_seed_of_aimed_inputs_holds_their_parameters() -> None:
    for seed in (0, 1, 17, 123_456):
        assert Aimed.of(seed).seed == seed
