"""Causes of wrong kernels that are written by hand, and the table of changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.contracts.norm import rmsnorm
from narrowgauge.contracts.training import silu_mul_backward
from narrowgauge.harness.operations.contracts.causes.changes import changes, short_changes
from narrowgauge.harness.operations.contracts.causes.replay import Keys
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.wrong_kernels import WRONG, Wrong
from tests.reference.contracts.contracts import COMPOSED, CONTRACTS, layer_norm

FEW = (
    "rmsnorm-quantize: rs of the next row", "rmsnorm-quantize: amax before cast", "rmsnorm-quantize: truncated codes",
    "add-rmsnorm: residual is x", "add-rmsnorm: norm of the unrounded sum", "layernorm: mean square",
    "clamped-swiglu: up above alone", "softmax: sum in bf16",
)  # fmt: skip
"""A kernel for each part of the search; the others are tested by `test_a_certain_cause_is_right`."""

PASSED = {"gelu-mul-quantize: ties away", "softmax: exp in fp16 for the sum"}
"""Mistakes that these inputs do not show."""
NOT_NAMED = {
    "rmsnorm-quantize: squares in bf16", "rmsnorm-quantize: no eps", "rmsnorm-quantize: amax without tail",
    "rmsnorm-quantize: scaled in bf16", "rmsnorm-quantize: amax/448", "gelu-mul-quantize: 0.0447",
    "gelu-mul-quantize: erf", "gelu-mul-quantize: up in fp16 act", "gelu-mul-quantize: nibbles",
    "gelu-mul-quantize: no −0", "clamped-swiglu: gate not clamped", "relu-squared-quantize: scale rounded down",
    "silu-mul-quantize: no activation",
}  # fmt: skip
"""Caught mistakes with bytes that further changes give too, or almost."""


def sentences(wrong: Wrong, *, exact: bool = True) -> list[str]:
    return [str(each["sentence"]) for each in wrong.verdict().explanations if each["exact"] or not exact]


def named(wrong: Wrong, found: str) -> bool:
    """Whether a sentence names the mistake of a kernel."""
    return any(all(word in found for word in words.split("&")) for words in wrong.words.split("|") if wrong.words)


@c.contract
def row_sums(x: c.Matrix):
    """The sum of the rows."""
    return c.cast(c.sum(c.float32(x), axis=0), x.dtype)


@pytest.mark.parametrize("wrong", {each.contract.name: each for each in WRONG}.values(), ids=str)
def test_the_right_kernels_pass(wrong: Wrong) -> None:
    assert replace(wrong, mistake="").verdict().passed


@pytest.mark.sampled(12)
@pytest.mark.parametrize("wrong", [each for each in WRONG if str(each) in FEW], ids=str)
def test_a_mistake_is_named(wrong: Wrong) -> None:
    found = sentences(wrong)
    assert len(found) == 1, found
    assert named(wrong, found[0]), found


@pytest.mark.long
@pytest.mark.parametrize("mistake", ["bias after", "softplus"])
def test_no_cause_is_certain_of_a_mistake_outside_of_the_list(mistake: str) -> None:
    wrong = next(each for each in WRONG if str(each) == f"router: {mistake}")
    assert not sentences(wrong)
    assert any(found.startswith("none of ") and "pairs" in found for found in sentences(wrong, exact=False))


@pytest.mark.long
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_certain_cause_is_right(wrong: Wrong) -> None:
    """All mistakes within the list are named, but those of `NOT_NAMED`; those outside of the list have no cause."""
    verdict = wrong.verdict()
    found = [str(each["sentence"]) for each in verdict.explanations if each["exact"]]
    assert verdict.passed == (str(wrong) in PASSED)
    assert bool(wrong.words and str(wrong) not in NOT_NAMED | PASSED) == (len(found) == 1), found
    assert len(found) != 1 or named(wrong, found[0]), found


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum of the rows, rounded to bfloat16 after each row."""
    found = torch.zeros(x.shape[1])
    for row in x:
        found = (found + row).bfloat16().float()
    return found


SIZES: tuple[tuple[int, ...], ...] = ((64, 128), (128,), (128,))
X, W, B = (torch.randn(size, generator=torch.Generator().manual_seed(1)).bfloat16() for size in SIZES)
Z, MEAN = X.float(), X.float().mean(1, keepdim=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("contract", "result", "words"),
    [
        (layer_norm, (Z - MEAN) * (Z.var(1, keepdim=True) + 1e-5).rsqrt() * W + B, "divides by K − 1"),
        (layer_norm, Z * (Z.square().mean(1, keepdim=True) + 1e-5).rsqrt() * W + B, "mean(x) is not subtracted from x"),
        (row_sums, Z[:-8].sum(0), "sum(x) leaves out the last 8 elements of a column"),
        (row_sums, Z.mean(0), "sum(x) is divided by K"),
        (row_sums, in_order(Z), "each partial sum of sum(x), in their order, is rounded to bfloat16"),
    ],
)
def test_a_mistake_in_a_composed_step_is_named(contract: c.Contract, result: torch.Tensor, words: str) -> None:
    given = (X, W, B)[: len(contract.tensors)]
    verdict = narrowgauge.explain(narrowgauge.assert_result, contract, result.bfloat16(), *given, diagnose="full")
    found = [str(each["sentence"]) for each in verdict.explanations if each["exact"]]
    assert len(found) == 1, found
    assert words in found[0]


@pytest.mark.long
def test_an_orientation_made_of_the_other_one_is_named() -> None:
    @c.contract
    def halves(x: c.Matrix, recipe: c.Recipe):
        return c.quantize_both(c.cast(c.float32(x) * 2.0, x.dtype), recipe)

    rows, _ = narrowgauge.quantize_both(X * 2, "mxfp8-e4m3")
    _, columns = narrowgauge.quantize_both(narrowgauge.dequantize(rows), "mxfp8-e4m3")
    given = {"rowwise": rows, "columnwise": columns}
    verdict = narrowgauge.explain(narrowgauge.assert_result, halves, given, X, recipe="mxfp8-e4m3", diagnose="full")
    assert "made of the decoded values of the other orientation" in str(verdict).split("\n")[0], verdict


@pytest.mark.long
def test_sizes_tell_which_parts_leave_elements_out() -> None:
    program = rmsnorm.trace({"x": "bfloat16", "weight": "bfloat16"}, {}, {})

    def parts(columns: int) -> list[str]:
        tensors = {"x": torch.zeros(3, columns), "weight": torch.zeros(columns)}
        return [change.name.rpartition(":")[2] for change in short_changes(program, tensors)]

    assert parts(600) == [f"over-first-{n}" for n in (256, 512, 592, 576)]
    assert parts(256) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "taken", "words"), [(600, 256, "the first 256 of 600"), (600, 576, "behind the last whole 32")]
)
def test_a_sum_over_a_part_of_the_loop_is_named(columns: int, taken: int, words: str) -> None:
    x = narrowgauge.inputs("nvfp4", (24, columns), "normal")
    y = x.double() * torch.rsqrt(x[:, :taken].double().square().sum(1, keepdim=True) / columns + 1e-6)
    verdict = narrowgauge.explain(
        narrowgauge.assert_result, rmsnorm, y.bfloat16(), x, torch.ones(columns).bfloat16(), diagnose="full"
    )
    found = [each["sentence"] for each in verdict.explanations if each["exact"]]
    assert len(found) == 1
    assert words in found[0]


def test_a_few_rows_are_no_certain_cause() -> None:
    """Ten wrong elements in eight rows exclude a contract; a kernel of four rows shows at most a possible cause."""
    wrong = next(each for each in WRONG if str(each) == "rmsnorm-quantize: 1 + w")
    x, w = wrong.inputs
    found = sentences(replace(wrong, inputs=(x[:4].contiguous(), w)), exact=False)
    assert any("the factor is 1 + weight" in each and "too few" in each for each in found), found
    assert not sentences(replace(wrong, inputs=(x[:4].contiguous(), w)))


def test_changes_that_are_equal_on_every_input_are_one_cause() -> None:
    @c.contract
    def difference(x: c.Matrix, y: c.Matrix):
        return c.cast(c.square(c.float32(x) - c.float32(y)) + 1.0, x.dtype)

    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, 64, generator=draw).bfloat16() for _ in range(2))
    wrong = ((x.float() + y.float()).square() + 1).bfloat16()
    verdict = narrowgauge.explain(narrowgauge.assert_result, difference, wrong, x, y, diagnose="full")
    found = [each["sentence"] for each in verdict.explanations if each["exact"]]
    assert len(found) == 1, found
    assert "y is added to x" in found[0] or "is added" in found[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("recipe", "codes"),
    [("fp8-row-e4m3", (126, 254, 0)), ("nvfp4", (0, 8)), ("nvfp4@torchao", (7,)), ("mxfp8-e4m3", (126,))],
)
def test_another_code_of_nan_is_named(recipe: str, codes: tuple[int, ...]) -> None:
    """NaN gives 7E or FE in kernels with a clamp before the rounding, 7F in the rest."""

    @c.contract
    def twice(x: c.Matrix, recipe: c.Recipe):
        return c.quantize(c.cast(c.float32(x) * 2.0, x.dtype), recipe)

    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 5] = torch.nan
    own = find_recipe(recipe)
    right = narrowgauge.quantize(x * 2, recipe)
    narrowgauge.assert_result(twice, right, x, recipe=recipe)
    for code in codes:
        wrong = replace(narrowgauge.quantize(x * 2, replace(own, nan_code=code)), recipe=own)
        verdict = narrowgauge.explain(narrowgauge.assert_result, twice, wrong, x, recipe=recipe, diagnose="full")
        found = [str(each["sentence"]) for each in verdict.explanations]
        assert found[0].startswith(f"NaN becomes the code {code:#x} (line "), found


@pytest.mark.parametrize("contract", [*CONTRACTS, *COMPOSED, silu_mul_backward], ids=lambda contract: contract.name)
def test_changes_can_run_and_have_names_of_their_own(contract: c.Contract) -> None:
    program = contract.trace(dict.fromkeys(contract.tensors, "bfloat16"), dict.fromkeys(contract.recipes, "nvfp4"), {})
    found = list(changes(program))
    assert len({change.name for change in found}) == len(found)
    assert len({Keys().of_outputs(change.program) for change in found}) > 1
    for change in found:
        results = [(change.program.steps[n], program.steps[m]) for n, m in
                   zip(change.program.outputs.values(), program.outputs.values(), strict=True)]  # fmt: skip
        assert all(step.recipe is not None or step.dtype == right.dtype for step, right in results)
        assert all(operand < number for number, step in enumerate(change.program.steps) for operand in step.operands)
        assert "{" not in change.sentence
        assert "(line " in change.sentence
