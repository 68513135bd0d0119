"""Hypotheses for quantized matrices: several matrices, deviations without effect, the cost of a search, witnesses."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.bit_equality import equal_bits
from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.diagnosis.explain import explain
from narrowgauge.harness.diagnosis.quantize import explain_quantize
from narrowgauge.harness.diagnosis.quantize.deviation import Replay, can_replay_rows
from narrowgauge.harness.diagnosis.quantize.deviation_list import list_deviations
from narrowgauge.harness.diagnosis.quantize.further_inputs import PROOFS
from narrowgauge.harness.diagnosis.quantize.kernel_matrix import kernel_matrix
from narrowgauge.harness.diagnosis.quantize.recipe_fields import field_deviations
from narrowgauge.harness.diagnosis.search.history import SEARCHES, SearchHistory
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.operations.stages.quantized import Subject, quantize_stages
from narrowgauge.harness.running import runner
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import pack
from narrowgauge.spec.formats import E2M1, E4M3
from narrowgauge.spec.recipes import find_recipe
from tests.harness.sample_backends import backend, rotating, without_amax
from tests.harness.wrong_steps import (
    STEPS,
    case,
    causes,
    cut_down,
    exchanged,
    grid,
    record_of,
    right_amax,
    rotated,
    signed_blocks,
    ties_away,
    truncated_to,
    unclamped,
    wrong,
    wrong_amax,
    wrong_tensor,
)

pytestmark = pytest.mark.usefixtures("history")


# The matrix is a part of several, or has a transposed layout.


@pytest.mark.parametrize("columnwise", [False, True])
def test_sections_have_one_explanation(columnwise):
    def grouped(x, sizes, recipe, *, columnwise=False):
        door = wrong(blocks=signed_blocks)
        return [door(part.T if columnwise else part, recipe) for part in torch.split(x, sizes.tolist())]

    flags = ("front:4", *(["columnwise"] if columnwise else []))
    record = record_of(
        case_from_labels("quantize-grouped", "nvfp4", (96, 64), "bf16", "normal", flags), quantize_grouped=grouped
    )
    assert causes(record)[0] == "block-amax-without-fabs"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("source", "exact"), [([0, 0, 0], True), ([0, 0, 2], False)])
def test_sections_with_the_result_of_another_section(source, exact):
    def grouped(x, sizes, recipe):
        parts = [reference.quantize(part, recipe) for part in torch.split(x, sizes.tolist())]
        return [parts[number] for number in source]

    wanted = case_from_labels("quantize-grouped", "nvfp4", (96, 64), "bf16", "normal", ("even:3",))
    record = record_of(wanted, quantize_grouped=grouped)
    assert ("section-of-neighbour" in causes(record)) == exact, record.explanations


def test_sections_of_different_deviations_have_none():
    def grouped(x, sizes, recipe):
        steps = [{"codes": lambda s: cut_down(s.scaled, E2M1)}, {"stored": lambda s: pack(s.codes) & 0x77}]
        return [wrong(**each)(part, recipe) for each, part in zip(steps, torch.split(x, sizes.tolist()), strict=True)]

    wanted = case_from_labels("quantize-grouped", "nvfp4", (96, 64), "bf16", "normal", ("even:2",))
    assert causes(record_of(wanted, quantize_grouped=grouped)) == []


HIDDEN = [
    ("amax-without-fabs", "nvfp4-rowscaled", {"amax": lambda s: s.x.clamp(min=0).float().amax(1)}),
    ("rotation-without-signs", "nvfp4-rht", {"x": lambda s: rotated(s, first=False).bfloat16()}),
    ("block-amax-without-fabs", "nvfp4", {"blocks": signed_blocks}),
    ("block-amax-without-fabs", "nvfp4", {"blocks": signed_blocks, "amax": right_amax}),
    ("tensor-scale-order:1/(amax/max)", "fp8-current-e5m2", wrong_tensor(lambda s, a: (a / 57344).reciprocal())),
]


@pytest.mark.parametrize(("cause", "recipe", "steps"), HIDDEN)
def test_numbers_that_the_kernel_does_not_show(cause, recipe, steps):
    def quantize(x, recipe):
        return replace(wrong(**steps)(x, recipe), amax=None, tensor_scale=None)

    record = record_of(case(recipe), quantize=quantize)
    assert record.stage == "scales"
    assert causes(record)[0] == cause, record.explanations


@pytest.mark.parametrize("recipe", ["nvfp4-rht", "nvfp4-rht64-nosign"])
def test_rotations_in_another_order_of_sums(recipe):
    mask = 0 if find_recipe(recipe).transform.signs else 0xD7E8
    record = run_case(case(recipe), backend(**rotating(signs=mask)))
    assert record.stages[2]["rule"] == "boundary"
    assert causes(record) == [f"rotation-{'signs:te' if mask else 'without-signs'}"]


def test_two_bugs():
    door = wrong(blocks=signed_blocks, amax=right_amax, codes=lambda s: cut_down(s.scaled, E2M1) & 7)
    record = record_of(case("nvfp4"), quantize=door)
    assert [(e["cause"], e["sentence"], e["stage"], e["exact"]) for e in record.explanations] == [(
        "block-amax-without-fabs",
        "block amaxes: of the elements, not of their magnitudes; codes must have another reason", "scales", False,
    )]  # fmt: skip


# Deviations without effect, and the cost of a search.


@pytest.mark.parametrize(
    "recipe", ["nvfp4", "nvfp4-2d-4over6-448-mae", "nvfp4-rht-sr", "mxfp8-e4m3", "fp8-block-128x128"]
)
def test_right_kernels_have_no_explanation(recipe):
    record = record_of(case(recipe), quantize=wrong())
    assert (record.verdict, record.explanations) == ("pass", [])


def spoiled(x, recipe, **options):
    """A third of the codes have a changed last bit: no rule does so."""
    q = reference.quantize(x, recipe, **options)
    mask = torch.rand(q.codes.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    return replace(q, codes=torch.where(mask, q.codes ^ 1, q.codes))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "recipe", ["nvfp4-rht-sr", "nvfp4", "mxfp8-e4m3-2d", "nvfp4-4over6-448-mse", "fp8-current-e4m3"]
)
def test_what_nothing_explains(recipe):
    recipe = recipe.replace("-e4m3-2d", "-2d")
    assert causes(record_of(case(recipe), quantize=spoiled)) == []


@pytest.fixture
def work(monkeypatch):
    """The limits of the diagnoses of a test."""
    limits = []

    class Limit(WorkLimit):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            limits.append(self)

    monkeypatch.setattr(runner, "WorkLimit", Limit)
    return limits


def test_searches_that_find_nothing_are_few(work, monkeypatch):
    assert SEARCHES > 2
    monkeypatch.setattr(explain_quantize, "SEARCHES", 2)
    for columns in range(4):
        assert causes(record_of(case("nvfp4", shape=(16, 64 + 16 * columns)), quantize=spoiled)) == []
    assert [limit.tried > 0 for limit in work] == [True, True, False, False]
    # Further recipes and stages have separate searches.
    assert causes(record_of(case("nvfp4-2d"), quantize=spoiled)) == []
    assert work[-1].tried


def test_what_explained_a_case_is_tried_first(history, work):
    door = wrong(codes=lambda s: cut_down(s.scaled, E2M1))
    for _ in range(SEARCHES + 2):
        assert causes(record_of(case("nvfp4"), quantize=door)) == ["truncated"]
    assert history.recent_causes == ["truncated"]
    assert work[-1].spent < work[0].spent
    # A cause of no earlier case is still found: only the searches with a result are used up.
    record = record_of(case("nvfp4"), quantize=wrong(stored=exchanged))
    assert causes(record) == ["nibbles-swapped"]
    assert history.recent_causes == ["nibbles-swapped", "truncated"]


# Further inputs.


@pytest.mark.parametrize(
    ("cause", "inputs", "steps"),
    [
        ("amax-through-fp16", "uniform", {"amax": lambda s: truncated_to(20)(right_amax(s))}),
        ("input-truncated:bf16", "ties", {"x": lambda s: truncated_to(18)(s.matrix), "amax": right_amax}),
    ],
)
def test_a_cause_must_give_the_bytes_of_further_inputs(cause, inputs, steps):
    """Numbers cut to 18 or 20 bits: on these inputs another mistake has the same bytes."""
    record = record_of(case("nvfp4", inputs, dtype="fp32"), quantize=wrong(**steps))
    assert record.verdict == "fail"
    assert cause not in {entry["cause"] for entry in record.explanations}


def test_further_inputs_separate_causes():
    steps = {"factors": lambda s: torch.nextafter(unclamped(s), torch.tensor(torch.inf))}
    record = record_of(case("nvfp4", "e2m1-ties", dtype="fp32"), quantize=wrong(**steps))
    assert causes(record) == ["element-factor-ulp"]
    record = record_of(case("nvfp4", "e2m1-ties", dtype="fp32"), quantize=wrong(codes=ties_away))
    assert causes(record) == ["ties-away"]


def test_a_kernel_that_fails_on_further_inputs_keeps_its_causes():
    """A kernel that raises on all further inputs, and a kernel with a second mistake for inputs with NaN."""

    calls = []

    def raises(x, recipe):
        if len(calls) and not torch.equal(x, calls[0]):
            raise RuntimeError("other inputs")
        calls.append(x.clone())
        return wrong(codes=ties_away)(x, recipe)

    def second(s):
        codes = ties_away(s)
        return codes.masked_fill(s.x.isnan(), 3)

    for door in (raises, wrong(codes=second)):
        assert "ties-away" in causes(record_of(case("nvfp4", "e2m1-ties"), quantize=door))


def test_further_inputs_run_for_few_recipes_of_a_cause():
    runs = []

    def quantize(x, recipe):
        runs.append(x.shape)
        return wrong(codes=ties_away)(x, recipe)

    spent = []
    for recipe in ("nvfp4", "nvfp4", "nvfp4-2d", "nvfp4@te-2.8", "nvfp4-rowscaled", "nvfp4-4over6-448-mae"):
        before = len(runs)
        assert "ties-away" in causes(record_of(case(recipe, "e2m1-ties"), quantize=quantize))
        spent.append(len(runs) - before)
    assert spent[1] < spent[0]
    assert spent[2 : PROOFS + 1] == [spent[0]] * (PROOFS - 1)
    assert spent[PROOFS + 1] < spent[0]


# The amax of a part of a tensor, or of an earlier call.


def amax_causes(quantize, seeds):
    """Causes of the amaxes of a kernel: a pair of cause and exactness for each case. The inputs of the cases differ."""
    kernel = backend(quantize=quantize)
    records = [run_case(case("nvfp4"), kernel, seed=seed) for seed in range(seeds)]
    return [(e["cause"], e["exact"]) for r in records for e in r.explanations if e["cause"].startswith("amax")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", [slice(4, 8), slice(0, 8)])
def test_the_amax_of_a_part_is_named_unless_by_chance(part):
    found = amax_causes(wrong(**wrong_amax(lambda s: s.x.view(64, 8, 16)[:, :, part])), 24)
    assert ("amax-partial", True) not in found[:2], "one tensor shows no part"
    assert ("amax-partial", True) in found[-4:]


@pytest.mark.parametrize("recipe", ["fp8-current-e4m3", "nvfp4"])
def test_the_amax_of_a_part_is_named_where_none_is_returned(recipe):
    """The scale tells the amax. Three of four rows are left out."""

    def door(x, recipe):
        part = wrong(blocks=lambda s: torch.full_like(STEPS["blocks"](s), s.x[: len(s.x) // 4].abs().float().amax()))
        return without_amax((part if recipe.whole else wrong(amax=half))(x, recipe))

    def half(s):
        return s.x[: len(s.x) // 4].abs().float().amax().view(1)

    kernel = backend(quantize=door)
    records = [run_case(case(recipe, "outliers"), kernel, seed=seed) for seed in range(24)]
    found = [record.explanations[0] for record in records if record.verdict == "fail"]
    assert {each["cause"] for each in found} == {"amax-too-small", "amax-partial"}
    assert (found[-1]["cause"], found[-1]["exact"]) == ("amax-partial", True)
    assert found[-1]["sentence"].endswith("the end of the memory")


def test_an_amax_without_magnitudes_needs_ten_negative_elements():
    found = amax_causes(wrong(**wrong_amax(lambda s: s.x.clamp(min=0))), 40)
    assert found[0] == ("amax-too-small", False), "one tensor has too few elements above the amax"
    assert found[-1] == ("amax-without-fabs", True)


def test_a_kept_amax_is_never_that_of_a_part():
    kept = []

    def kept_amax(s):
        kept.append(right_amax(s))
        return kept[len(kept) // 2 - 1] if len(kept) > 1 else kept[0]  # neither the first nor the last: unknown

    found = amax_causes(wrong(amax=kept_amax), 24)
    assert ("amax-too-small", False) in found
    assert "amax-partial" not in dict(found)

    first = []

    def first_amax(s):
        first.append(right_amax(s))
        return first[0]

    assert ("amax-stale", True) in amax_causes(wrong(amax=first_amax), 6)


# No deviation is the recipe itself.

WITNESSES = (
    "normal", "low-rows", "every-exponent", "ties", "near-ties", "e4m3-ties", "nan", "inf", "subnormal", "huge",
    "zeros", "single", "scale-edges", "normal-1e3", "normal-1e-28", "exponents", "uniform", "negative-zeros",
    "normal-1e-3",
)  # fmt: skip
RULES = (
    "nvfp4-2d", "nvfp4-rowscaled", "nvfp4-sr", "nvfp4-rht", "nvfp4-4over6-256-mae", "nvfp4@torchao", "nvfp4@qwantize",
    "mxfp8-2d", "mxfp8-e5m2-sr", "mxfp6-e3m2@ocp", "fp8-block-1x128-e4m3-fp32", "fp8-block-128x128-e5m2",
    "fp8-current-e5m2", "fp8-current-e4m3-pow2-eps1000.0", "fp8-delayed-e4m3",
)  # fmt: skip
WITH_A_TEST = {
    "padding-not-zeroed",
    "scales-in-layout:128x4",
    "scales-in-layout:blackwell-ragged",
    "scales-in-layout:hopper-mxfp4",
    "scales-in-layout:hopper-mxfp4-4",
    "tail-dropped",
    "stochastic-sections-restart",
    *(f"stochastic-other-block:{bits}-bits" for bits in range(9, 19)),
    "four-over-six-order:tree",
    "scale-order:amax*(1/6)",
}


def of_reference(recipe, inputs, dtype):
    """What a right kernel leaves to explain."""
    given = make_inputs(case(recipe, inputs, shape=(32, 256), dtype=dtype))
    x, scale, random = given.x, given.get("scale.x"), given.random("x")
    q = reference.quantize(x, recipe, scale=scale, random=random)
    return kernel_matrix(quantize_stages(Subject(x, find_recipe(recipe), random), q, q)[1])


def changed(deviation, matrix):
    """The stages in which a deviation differs from a right kernel; empty if its recipe refuses the matrix."""
    try:
        replay = Replay(matrix, deviation)
        return {
            s
            for s in deviation.stages
            if s in matrix.kernel_stages and not equal_bits(replay.compute_stage(s), matrix.kernel_stages[s])
        }
    except ValueError:
        return set()


def same_by_rows(deviation, matrix):
    """Whether a tile or a row alone has the bytes of the whole matrix."""
    rows = matrix.tile_rows("codes", 19)
    part, whole = (Replay(each, deviation) for each in (matrix.select_rows(rows), matrix))
    stages = ["codes"] if len(whole.scales) != len(whole.matrix) else ["scales", "codes"]
    return all(equal_bits(part.compute_stage(stage), whole.compute_stage(stage)[rows]) for stage in stages)


def test_every_deviation_has_a_witness_and_works_on_rows():
    seen, without = set(), {}
    for recipe in RULES:
        kinds = [(i, d) for i in WITNESSES for d in ("fp32", "bf16") if "rht" not in recipe or d == "bf16"]
        matrices = [of_reference(recipe, *kinds[0])]
        first = matrices[0]
        wrong_stages = {
            stage: [torch.zeros_like(kernel_stage).bool()] for stage, kernel_stage in first.kernel_stages.items()
        }
        for deviation in list_deviations([first], wrong_stages, SearchHistory()):
            name = deviation.cause, deviation.sentence
            known = name in seen or deviation.cause in WITH_A_TEST
            for number, kind in enumerate(kinds) if not known else ():
                matrices += [of_reference(recipe, *kind)] if number == len(matrices) else []
                if changed(deviation, matrices[number]):
                    seen.add(name)
                    assert not can_replay_rows(deviation, first) or same_by_rows(deviation, matrices[number]), (
                        name,
                        recipe,
                    )
                    break
            else:
                without.setdefault(deviation.cause, set()).add(name)
    assert len({cause for cause, _ in seen}) > 180
    assert {cause for cause, names in without.items() if not names & seen} <= WITH_A_TEST


def test_a_scale_beside_a_tie_tells_a_sixth_from_a_division_by_6():
    points = grid(E4M3)[64:80]
    amax = torch.nextafter(6 * (points[1:] + points[:-1]) / 2, torch.tensor(0.0))
    x = torch.zeros(15, 16)
    x[:, 5] = amax
    divided, multiplied = (encode(v, E4M3) for v in (amax / 6, amax * (1 / 6)))
    assert not torch.equal(divided, multiplied)
    recipe = find_recipe("nvfp4@qwantize")
    (deviation,) = [d for d in field_deviations(recipe) if d.cause == "scale-order:amax*(1/6)"]
    q = reference.quantize(x, recipe)
    matrix = kernel_matrix(quantize_stages(Subject(x, recipe), q, q)[1])
    assert equal_bits(Replay(matrix, deviation).compute_stage("scales"), multiplied.unsqueeze(1))


def test_causes_and_searches_of_a_contract_are_its_own():
    """A cause of a contract is confirmed without a search, and says nothing about another contract."""
    history, searched = SearchHistory(), []

    def found(subject, causes):
        outcome = Outcome([StageResult("y", "exact", 9, 9, 1, "9 of 9 elements differ")], subject=subject)
        outcome.confirms = lambda cause: f"the sentence of {cause}"
        outcome.causes["y"] = lambda stage, limit: searched.append(subject) or causes
        return [each.sentence for each in explain(outcome, history)]

    assert found("a", [("cast-7:left-out", "a cast")]) == ["a cast"]
    assert found("a", []) == [
        "the sentence of cast-7:left-out: the bytes are those of this change, as in an earlier case"
    ]
    for _ in range(4):
        assert found("b", []) == []
    assert found("c", []) == []
    assert searched == ["a", "b", "b", "c"]
