"""Holm's steps: the tests of a run share its false alarms, and a wrong stage names the rejecting tests."""

import math
from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.checks.stage import StageResult, merge_stages
from narrowgauge.harness.checks.statistics.decision import decide
from narrowgauge.harness.checks.statistics.holm import FALSE_ALARM, count_chance_cases, holm
from narrowgauge.harness.checks.statistics.statistical_tests import StatisticalTest

NVFP4 = case_from_labels("quantize", "nvfp4-sr", (96, 128), "fp32", "normal")


def test_holm_steps_down():
    def rejected(*p_values, level=0.05):
        return holm([math.log(p) for p in p_values], math.log(level))

    assert rejected(0.01, 0.04, 0.03) == [True, False, False]  # 0.05/3, then 0.05/2
    assert rejected(0.01, 0.04, 0.02) == [True, True, True]  # 0.05/3, 0.05/2, 0.05
    assert rejected(0.02, 0.02, 0.02) == [False, False, False]
    assert holm([-math.inf, 0.0], math.log(1e-9)) == [True, False]
    assert holm([], 0.0) == []


def test_holm_keeps_the_level_where_some_tests_are_wrong():
    """Six right tests beside two that always reject: any of the six does in at most 1 of 20 runs."""
    runs = 4000
    p_values = torch.rand(runs, 6, generator=torch.Generator().manual_seed(3)).clamp(min=1e-12).log().tolist()
    false = sum(any(holm([-100.0, -100.0, *some], math.log(0.05))[2:]) for some in p_values)
    assert 0.03 * runs < false < 0.05 * runs + 5 * math.sqrt(0.05 * 0.95 * runs)


def test_what_chance_can_fail_shares_the_false_alarms():
    cases = [
        NVFP4, replace(NVFP4, recipe="nvfp4"), replace(NVFP4, recipe="nvfp4-rht"),
        case_from_labels("swizzle", "", (8, 8), "", "bytes"),
        case_from_labels("gemm", "nvfp4+nvfp4-rht", (8, 16, 8), "bf16xbf16-bf16", "normal", ("tn",)),
        case_from_labels("gemm-quantized", "nvfp4", (16, 16, 16), "bf16xbf16-bf16", "normal", ("tn", "nvfp4-rht")),
        case_from_labels("gemm-quantized", "nvfp4", (16, 16, 16), "bf16xbf16-bf16", "normal", ("tn", "nvfp4")),
    ]  # fmt: skip
    assert count_chance_cases(cases) == 4
    assert count_chance_cases(cases[1:2]) == count_chance_cases([]) == 1


def test_all_stages_of_a_case_decide_together():
    def stages(*log_p):
        return [
            StageResult(str(n), "statistics", 1, tests=[StatisticalTest(f"test {n}", p, "odd")])
            for n, p in enumerate(log_p)
        ]

    level = math.log(FALSE_ALARM)
    found = stages(level - 2, level - 0.5, 0.0)
    decide(found)
    assert [s.sentence for s in found] == ["test 0: odd, p <= 1e-9", "", ""]  # a single test passes 1e-9/3
    assert found[0].figures == {"p_value": pytest.approx(3 * FALSE_ALARM * math.exp(-2))}
    found = stages(level - 2, level - 1, level - 0.5)
    decide(found)
    assert [s.passed for s in found] == [False, False, False]
    found = stages(level - 2, level - 1, level - 0.5)
    decide(found, 10)
    assert [s.passed for s in found] == [True, True, True]
    plain = StageResult("codes", "exact", 1)
    decide([plain])
    assert plain.figures == {}


def test_a_sentence_has_the_surest_of_each_kind():
    given = [
        ("a 1", -90.0, "a"),
        ("a 2", -99.0, "a"),
        ("b", -80.0, ""),
        ("c", -70.0, ""),
        ("d", -60.0, ""),
        ("e", -1.0, ""),
    ]
    result = StageResult(
        "codes", "statistics", 1, tests=[StatisticalTest(t, p, f"of {t}", kind=kind) for t, p, kind in given]
    )
    decide([result])
    assert result.sentence == ("a 2: of a 2, p <= 1e-42; b: of b, p <= 1e-34; c: of c, p <= 1e-30; rejected too by d")


def test_a_wrong_stage_keeps_its_first_sentence():
    result = StageResult("codes", "statistics", 1, sentence="wrong", tests=[StatisticalTest("bias", -math.inf, "odd")])
    decide([result])
    assert result.sentence == "wrong"


def test_tests_of_sections_say_which():
    parts = [
        [StageResult("codes", "statistics", 1, 5, max_ulp=n, tests=[StatisticalTest("bias", p, "odd")], draws=3)]
        for n, p in ((2, 0.0), (1, -99.0))
    ]
    (found,) = merge_stages(parts, "section")
    decide([found])
    assert found.sentence == "bias: section 1 of 2: odd, p <= 1e-42"
    assert (found.compared, found.mismatches, found.max_ulp, found.draws) == (2, 10, 2, 6)
