"""Attention over a cache in pages: right kernels of many schedules pass."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from functools import cache as cached
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.search.work_limit import WorkLimit
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.causes.changes import changes
from narrowgauge.harness.operations.contracts.causes.moved import moved_changes
from narrowgauge.harness.operations.contracts.causes.replay import Keys, Replay, as_shown
from narrowgauge.harness.operations.contracts.causes.search import confirmed
from narrowgauge.harness.operations.contracts.inputs import contract_inputs
from narrowgauge.harness.operations.contracts.judge import judge_contract
from narrowgauge.harness.operations.contracts.sequence_inputs import RULES
from narrowgauge.harness.report.text import remarks
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference.contracts.accepted import Ends, judge_range
from narrowgauge.reference.contracts.evaluate import Evaluation, judged
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.program import Program
from narrowgauge.spec.recipes import find_recipe
from tests.harness.operations.contracts.attention_kernels import RIGHT, WRONG, Attention, polynomial

RECIPE = "fp8-static-e4m3@vllm"
NAMES = ("queries", "q_heads", "dim", "pages", "page", "heads", "v_dim", "requests", "most")
SHAPE, SHARED = (5, 2, 64, 9, 16, 1, 64, 2, 4), (5, 4, 64, 9, 16, 2, 64, 2, 4)
"""A single head of the cache; two heads, shared by two heads of q each."""
TENSORS = ("pages", "lengths", "q_lengths", "k_scale", "v_scale")


@cached
def program(
    dtype: str = "bfloat16", contract: str = "attention", recipe: str = RECIPE, **options: Any
) -> Program:  # fmt: skip
    dtypes = {name: kind.dtypes[0] for name, (kind, _) in CONTRACTS[contract].tensors.items()}
    return CONTRACTS[contract].trace({**dtypes, "q": dtype}, {"recipe": recipe}, options)


@cached
def inputs(
    family: str, dtype: str = "bfloat16", shape: tuple[int, ...] = SHAPE, contract: str = "attention", **options: Any
) -> dict[str, torch.Tensor]:
    steps = program(dtype, contract, **options)
    return contract_inputs(steps, dict(zip(NAMES, shape, strict=True)), family, Draw(""))


def run(kernel: Attention, given: dict[str, torch.Tensor], **options: Any) -> dict[str, torch.Tensor]:
    held = Cache(given["cache.keys"], given["cache.values"], None, None, find_recipe(RECIPE), "nhd", 16)
    pages, lengths, q_lengths, k_scale, v_scale = (given[name] for name in TENSORS)
    options |= {"sinks": given["sinks"]} if "sinks" in given else {}
    found = kernel.attention(
        given["q"], held, pages, lengths, q_lengths, find_recipe(RECIPE), k_scale=k_scale, v_scale=v_scale, **options
    )
    return dict(zip(("output", "lse"), found, strict=True))


def test_a_right_kernel_passes_by_the_name_of_the_operation() -> None:
    kernel, keys = RIGHT["plain"].attention, {"causal": False}
    found = narrowgauge.check(kernel, "attention", recipe=RECIPE, shapes=[SHAPE], keys=keys)
    assert found.passed >= 6
    assert narrowgauge.check(merge, "merge-attention", shapes=[(9, 4, 64)]).passed >= 10


def merge(o_a, lse_a, o_b, lse_b):
    m = torch.maximum(lse_a, lse_b)
    weights = [torch.exp(lse - m).unsqueeze(-1) for lse in (lse_a, lse_b)]
    total = weights[0] + weights[1]
    output = (o_a.float() * weights[0] + o_b.float() * weights[1]) / total
    return output.to(o_a.dtype), m + total.squeeze(-1).log()


@pytest.mark.parametrize("family", RULES)
def test_no_right_kernel_fails(family: str) -> None:
    given = inputs(family)
    evaluation = Evaluation(program(), given)
    ends = {
        name: Ends.of(evaluation.values[number], torch.bfloat16 if name == "output" else torch.float32)
        for name, number in program().outputs.items()
    }
    for name, kernel in RIGHT.items():
        for part, result in run(kernel, given).items():
            judgement = judge_range(result, ends[part].low, ends[part].high, ends[part].nan)
            assert not judgement.wrong.any(), (name, part)


def test_a_report_has_widths_and_results_that_were_not_judged() -> None:
    class WithoutLse(Attention):
        def attention(self, *given: Any, **options: Any) -> torch.Tensor:
            return super().attention(*given, **options)[0]

    shape = (2, 2, 64, 4, 16, 1, 64, 1, 2)
    case = case_from_labels("attention", RECIPE, shape, "bf16", "geometric")
    whole, part = (
        run_case(case, Backend.local("float32", kernel)).to_dict() for kernel in (RIGHT["plain"], WithoutLse())
    )
    assert whole["verdict"] == part["verdict"] == "pass"
    assert 0 < whole["interval_ulps_mean"] <= whole["interval_ulps_max"]
    compared, widths = remarks([whole])
    assert compared == "Every stage of every case was compared."
    assert widths.startswith(f"Widest accepted interval: attention {whole['interval_ulps_max']} ulp, ")
    assert remarks([part])[0] == "Not compared: stages not observed: attention lse (1 case)."


OPTIONS = (
    {"window": 5}, {"window": 17, "causal": False}, {"softcap": 20.0}, {"contract": "attention-sinks"},
    {"contract": "attention-sinks", "window": 20},
)  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", [name for name in RULES if name != "geometric"])
def test_options_of_right_kernels(family: str, options: dict[str, Any]) -> None:
    given = inputs(family, shape=SHARED, **options)
    passed = {name: value for name, value in options.items() if name != "contract"}
    for name in ("plain", "lag 8, bf16", "polynomial, bf16, splits", "e4m3"):
        for part, judgement in judged(program(**options), given, run(RIGHT[name], given, **passed)):
            assert not judgement.wrong.any(), (name, part)
            # Under a soft cap no weight vanishes, and 8-bit weights are undetermined.
            told = part == "lse" or RULES[family].logits is None or "softcap" in options
            assert told or judgement.determined >= 0.8 * judgement.actual.numel()


@pytest.mark.parametrize("family", [name for name, rule in RULES.items() if rule.logits is not None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_structured_results_are_determined(family: str, dtype: str) -> None:
    given = inputs(family, dtype)
    judgement = dict(judged(program(dtype), given, run(RIGHT["plain"], given)))["output"]
    # A form of exp that is off by 2^-13.4 leaves float16 with two numbers.
    share = 0.6 if (family, dtype) == ("geometric", "float16") else 0.9
    assert judgement.determined >= share * judgement.actual.numel()


@pytest.mark.parametrize(("p", "widest"), [("float32", 4), ("bfloat16", 16), ("float16", 8)])
def test_a_declared_dtype_of_the_weights_judges_pinned_inputs(p: str, widest: int) -> None:
    given, declared = inputs("pinned"), {"p": p, "l": "exact", "exponential": "accurate"}
    kernel = Attention(p=getattr(torch, p), tile=1 << 20)
    judgement = dict(judged(program(**declared), given, run(kernel, given)))["output"]
    assert not judgement.wrong.any()
    assert not judgement.undetermined
    ulp = 2.0**-8 * judgement.actual.float().abs()
    width = ((judgement.upper.float() - judgement.lower.float()) / ulp).quantile(0.5)
    assert width <= widest


FIELDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def fields_of(kernel: Attention) -> tuple[tuple[str, str], ...]:
    """What a backend declares of a kernel."""
    return (
        ("p", FIELDS.get(kernel.p) or str(kernel.p).removeprefix("torch.")),
        ("l", "rounded" if kernel.rounded_sum else "exact"),
        ("exponential", "any" if kernel.power is polynomial else "accurate"),
        ("decode", "rounded" if kernel.rounded_keys else "folded"),
    )


@pytest.mark.parametrize("family", ["normal", "pinned"])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_declared_fields_of_right_kernels(family: str, dtype: str) -> None:
    by_fields: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, kernel in RIGHT.items():
        by_fields.setdefault(fields_of(kernel), []).append(name)
    for fields, names in by_fields.items():
        given, steps = inputs(family, dtype, (3, 2, 64, 8, 16, 1, 64, 2, 4)), program(dtype, **dict(fields))
        evaluation = Evaluation(steps, given)
        for part, number in steps.outputs.items():
            ends = Ends.of(evaluation.values[number], torch.float32 if part == "lse" else given["q"].dtype)
            for name in names:
                judgement = judge_range(run(RIGHT[name], given)[part], ends.low, ends.high, ends.nan)
                assert not judgement.wrong.any(), (name, part)


STRUCTURED = [name for name, rule in RULES.items() if rule.logits is not None]


def wrong_elements(kernel: Attention, family: str) -> int:
    given = inputs(family, shape=SHARED)
    return sum(int(part.wrong.sum()) for _, part in judged(program(), given, run(kernel, given)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_kernel_fails(name: str) -> None:
    kernel, _ = WRONG[name]
    families = ("geometric", *STRUCTURED)
    assert any(wrong_elements(kernel, family) for family in families)


SINKS = {"window": 5, "contract": "attention-sinks"}


@pytest.mark.parametrize(
    ("family", "name", "every", "options"),
    [("geometric", "head modulo", 60, {}), pytest.param("one-hot", "last key", 5, SINKS, marks=pytest.mark.long)],
)
def test_changes_are_judged_together_as_alone(family: str, name: str, every: int, options: dict[str, Any]) -> None:
    """Changed scales, masks, indices, sums and slots, on two rows of two requests."""
    given, steps, rows = inputs(family, shape=SHARED, **options), program(**options), torch.tensor([3, 1])
    passed = {name: value for name, value in options.items() if name != "contract"}
    shown = {name: result[rows] for name, result in run(WRONG[name][0], given, **passed).items()}
    together, alone = (Replay(given, shown, rows, Keys(), False) for _ in range(2))
    changed = [change.program for change in changes(steps)][::every]
    for replay in (together, alone):
        replay.remember(steps)
    together.judge_together(changed)
    judged_together = [one for one in changed if together.keys.of_outputs(one)[0] in together.judged]
    assert len(judged_together) > len(changed) / 2
    assert [together.evidence(one, whole=True) for one in changed] == [
        alone.evidence(one, whole=True) for one in changed
    ]


NAMED = ("head modulo", "next value head", "key 17", "to a border", "next request's pages", "o not rescaled")
"""Wrong kernels of indices, masks, pages and sums; each takes 3 seconds of a core."""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMED)
def test_causes_name_what_is_wrong(name: str) -> None:
    """On the families that show most wrong elements."""
    kernel, words = WRONG[name]
    by_count = sorted(STRUCTURED, key=lambda family: -wrong_elements(kernel, family))
    found: list[str] = []
    for family in by_count[:2]:
        given = inputs(family, shape=SHARED)
        outcome = judge_contract(program(), given, run(kernel, given))
        stage = next(stage for stage in outcome.stages if not stage.passed)
        causes = [cause[1] for cause in outcome.causes[stage.stage](stage, WorkLimit()) if type(cause) is tuple]
        found += causes
        if found:
            break
    assert any(words in cause for cause in found), found


UNNAMED = {
    "base of a merge": "output and log-sum-exp are wrong by different factors",
    "output in e4m3": "no change of a contract rounds a result to 8 bits",
    "p in e4m3 without its factor": "no change of a contract has weights without a factor",
    "last dimensions": "keys and values are both wrong",
    "next dimension": "keys and values are both wrong",
}
"""Wrong kernels without a single change of the contract that gives their results, by the reason."""


@pytest.mark.long
def test_most_wrong_kernels_have_a_single_change() -> None:
    """A change with the words of the cause gives every result of a family. Further changes may give the same bytes."""
    named = {name for name, (kernel, words) in WRONG.items() if words and has_change(kernel, words)}
    assert set(WRONG) - named == set(UNNAMED)
    assert len(named) > 0.9 * len(WRONG)


def has_change(kernel: Attention, words: str) -> bool:
    for family in ("one-hot-ends", "geometric", "two-level", "one-hot"):
        given = inputs(family, shape=SHARED)
        shown = run(kernel, given)
        if not wrong_elements(kernel, family) or any(bool(x.isnan().any()) for x in shown.values()):
            continue
        every = itertools.chain(changes(program()), moved_changes(program(), given, shown))
        if any(words in change.sentence and gives(change.program, given, shown) for change in every):
            return True
    return False


def gives(changed: Program, given: dict[str, torch.Tensor], shown: dict[str, torch.Tensor]) -> bool:
    """Whether a changed contract accepts all results. It may not fit the tensors."""
    with suppress(ValueError):
        return not any(bool(part.wrong.any()) for _, part in judged(changed, given, as_shown(changed, shown)))
    return False


@pytest.mark.parametrize("name", ["values of reversed pages", "values of the next page"])
def test_causes_name_the_cells_that_were_read(name: str) -> None:
    kernel, words = WRONG[name]
    given = inputs("one-hot-ends", shape=SHARED)
    shown = run(kernel, given)
    (change,) = moved_changes(program(), given, shown)
    assert words in change.sentence
    assert confirmed(program(), given, shown, [], change.name) == change.sentence
    assert not list(moved_changes(program(), given, run(WRONG["head 0"][0], given)))


@pytest.mark.long
def test_the_families_of_a_shape_take_a_second() -> None:
    """Processor time of making and judging a decode kernel's structured families."""
    steps, shape = program(), dict(zip(NAMES, (4, 8, 128, 14, 16, 2, 128, 4, 3), strict=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        spent = 0.0
        for family in ("normal", *STRUCTURED):  # the first call is slower
            start = time.process_time()
            given = contract_inputs(steps, shape, family, Draw(""))
            shown = {
                "output": torch.zeros(4, 8, 128, dtype=torch.bfloat16),
                "lse": torch.zeros(4, 8),
            }
            assert dict(judged(steps, given, shown))
            spent += 0.0 if family == "normal" else time.process_time() - start
    finally:
        torch.set_num_threads(threads)
    assert spent < 1.0
