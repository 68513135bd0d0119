"""The gate: compared figures, reasons of a failure, and the message of each failure."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.gate.baseline import baseline_of, read, write
from narrowgauge.harness.gate.baseline_notes import add_baseline_notes
from narrowgauge.harness.gate.difference import LISTED
from narrowgauge.harness.gate.figures import (
    BELOW,
    Figures,
    exponent,
    figures,
    parse,
)
from narrowgauge.harness.gate.gate import Judgement, judge, next_commands, show
from narrowgauge.harness.report.failure_view import first_failure
from tests.harness.runs import GPU, product, record, run, saved, stage, wrong


def text(judgement: dict[str, list[str]]) -> list[str]:
    return [f"{kind}: {line}" for kind, lines in judgement.items() for line in lines]


def judged(before: dict[str, Any], after: dict[str, Any]) -> Judgement:
    """A case against its accepted figures, beside an unchanged case."""
    return judge(run(after, record("zeros")), baseline_of(run(before, record("zeros"))))


# Figures


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), (0.0, BELOW), (0, BELOW), (1.0, 0), (1, 0), (0.5, -1), (math.nextafter(0.5, 0), -1), (3, 2),
        (math.nextafter(0.5, 1), -1), (0.5 * (1 + 2.0**-29), 0), (4, 2), (5, 3), (5e-324, -1074), (1e300, 997),
    ],
)  # fmt: skip
def test_a_power_of_two_stands_for_a_figure(value: float | None, expected: int | None) -> None:
    assert exponent(value) == expected


def test_figures_of_records() -> None:
    assert str(figures(record())) == "pass 90"
    assert str(figures(product())) == "pass 561, exact 400+0/561, budget 2^0, width 2^4"
    wrong = product(mismatches=12, max_ulp=3, verdict="fail", budget_max=0.0, ordered_share=161 / 561)
    assert str(figures(wrong)) == "fail 561, wrong 12, ulp 3, exact 400+161/561, budget 0, width 2^4"
    assert str(figures(record(stages=[stage("codes", "boundary", 100, excused=7)]))) == "pass 100, excused 7"
    assert str(figures(product(stages=[], compared=0, exact_share=None, verdict="crash", budget_max=None,
                               interval_ulps_max=None))) == "crash 0"  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        Figures("pass", 5),
        Figures("fail", 5, wrong=2, ulp=0, outputs=5, exact=1, ordered=2, excused=3, budget=-7, width=40),
        Figures("pass", 5, outputs=5, budget=BELOW, width=BELOW),
        Figures("unsupported"),
    ],
)
def test_figures_are_read_as_they_were_written(given: Figures) -> None:
    assert parse(str(given)) == given


WORSE = [
    ({"compared": 500, "stages": [stage("output", "bound", 561), stage("memory", "guard", 1)]}, "499 elements"),
    ({"mismatches": 1}, "1 wrong elements, was 0"),
    ({"max_ulp": 2}, "largest error 2 ulp, was 0"),
    ({"exact_share": 399 / 561}, "399 of 561 outputs exact, was 400 of 561"),
    ({"budget_max": 1.5}, "largest fraction of the bound 2^1, was 2^0"),
    ({"budget_max": None}, "bound not measured, was 2^0"),
    ({"interval_ulps_max": 17}, "widest interval 2^5 ulp, was 2^4 ulp"),
    ({"stages": [stage("output", "bound", 561), stage("x", "boundary", 0, excused=3)]}, "3 elements excused, was 0"),
    ({"verdict": "fail", "message": "output: \n off"}, "fail, was pass (output: off)"),
    ({"verdict": "crash", "compared": 0, "stages": [], "message": "died"}, "crash, was pass (died)"),
]
BETTER = [
    ({"exact_share": 401 / 561}, "401 of 561 outputs exact, was 400 of 561"),
    ({"ordered_share": 61 / 561}, "461 of 561 outputs exact or in the declared order, was 400 of 561"),
    ({"budget_max": 0.5}, "bound 2^-1, was 2^0"),
    ({"interval_ulps_max": None}, "interval not measured, was 2^4 ulp"),
    ({"interval_ulps_max": 8}, "widest interval 2^3 ulp, was 2^4 ulp"),
]


@pytest.mark.parametrize(("change", "message"), WORSE)
def test_a_figure_that_is_worse_fails_by_name(change: dict[str, Any], message: str) -> None:
    judgement = judged(product(), product(**change))
    (line,) = text(judgement.problems)
    assert line.startswith("worse: gemm/nvfp4/33x64x17/bf16xbf16-fp32/normal/tn: ")
    assert message in line
    assert not judgement.passed


@pytest.mark.parametrize(("change", "message"), BETTER)
def test_what_is_better_is_said_and_holds(change: dict[str, Any], message: str) -> None:
    judgement = judged(product(), product(**change))
    assert judgement.passed
    (line,) = text(judgement.notes)
    assert line.startswith("better: gemm/nvfp4/33x64x17/bf16xbf16-fp32/normal/tn: ")
    assert message in line


@pytest.mark.parametrize(("before", "after", "passed"), [("fail", "pass", True), ("fail", "error", False),
                                                         ("crash", "fail", False), ("fail", "fail", True)])  # fmt: skip
def test_a_verdict_gets_better_by_pass_alone(before: str, after: str, passed: bool) -> None:
    given = [record(), record("zeros", verdict=before)], [record(), record("zeros", verdict=after)]
    assert judge(run(*given[1]), baseline_of(run(*given[0]))).passed is passed


# Runs


def test_a_case_that_did_not_run() -> None:
    judgement = judge(run(record()), baseline_of(run(record(), record("zeros"))))
    assert text(judgement.problems) == ["did not run: quantize/nvfp4/64x128/bf16/zeros"]


def test_an_interrupted_run() -> None:
    cases = [record(), record("zeros"), record("ties")]
    part = run(cases[0], cases=[case["case"] for case in cases])
    judgement = judge(part, baseline_of(run(*cases[:2])))
    assert text(judgement.problems) == [
        "interrupted: 2 of 3 cases did not run, the first quantize/nvfp4/64x128/bf16/zeros",
        "did not run: quantize/nvfp4/64x128/bf16/zeros",
    ]
    # Also if every case of the baseline ran.
    assert list(judge(part, baseline_of(run(cases[0]))).problems) == ["interrupted"]


def test_nothing_was_compared() -> None:
    """Guard zones and repeated runs compare a kernel with itself: these stages alone prove no result correct."""
    alone = record(compared=10, stages=[stage("memory", "guard", 10)])
    assert text(judge(run(alone), baseline_of(run(alone))).problems) == ["nothing was compared: no element in 1 case"]


def test_a_figure_that_is_not_finite() -> None:
    judgement = judged(product(), product(budget_max=math.nan))
    assert text(judgement.problems) == ["not finite: gemm/nvfp4/33x64x17/bf16xbf16-fp32/normal/tn: budget_max is nan"]
    judgement = judged(product(), product(budget_max=math.inf, verdict="fail", message="output: off"))
    assert text(judgement.problems)[0].endswith("/normal/tn: budget_max is inf (output: off)")
    # NaN is no better interval.
    judgement = judged(product(), product(interval_ulps_max=math.nan))
    assert text(judgement.problems)[0].endswith("/normal/tn: interval_ulps_max is nan")


def test_a_case_with_two_records() -> None:
    judgement = judge(run(record(), record(mismatches=5)), baseline_of(run(record(mismatches=5))))
    assert text(judgement.problems) == ["recorded twice: quantize/nvfp4/64x128/bf16/normal: 2 records"]


def test_a_shard() -> None:
    judgement = judge(run(record(), shard="2/4"), baseline_of(run(record())))
    assert text(judgement.problems) == [
        "a part: the run is shard 2/4 of a matrix; narrowgauge merge joins all shards into one"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda", "environment": GPU}, "another architecture: the baseline is of host, the run of sm_90"),
        ({"backend": "reference"}, "another backend: the baseline is of native, the run of reference"),
        ({"seed": 7}, "another seed: the baseline is of 0, the run of 7"),
    ],
)
def test_a_run_of_something_else(change: dict[str, Any], message: str) -> None:
    judgement = judge(run(record(mismatches=1), **change), baseline_of(run(record())))
    assert text(judgement.problems) == [f"{message}: no case was compared"]
    kind = message.partition(":")[0]
    assert judgement.sentence("a.json") == f"gate fails against a.json: 0 cases as accepted, {kind}"


H100 = {"GPU": "NVIDIA H100 80GB HBM3, compute capability 9.0"}
B200 = {"GPU": "NVIDIA B200, compute capability 10.0"}


def test_the_gate_compares_architectures_and_not_products(tmp_path: Path) -> None:
    """A run of an H100 holds against the baseline of an H200. A run of a B200 does not."""
    kept = {"device": "cuda", "environment": GPU}
    write(baseline_of(run(record(device="cuda"), **kept)), tmp_path / "sm_90.json")
    accepted = read(tmp_path / "sm_90.json")
    assert (accepted.architecture, accepted.device) == ("sm_90", "NVIDIA H200")
    assert judge(run(record(device="cuda"), device="cuda", environment=H100), accepted).passed
    other = judge(run(record(device="cuda"), device="cuda", environment=B200), accepted)
    assert text(other.problems) == [
        "another architecture: the baseline is of sm_90, the run of sm_100: no case was compared"
    ]


def test_a_report_names_the_baseline_of_failing_cases(tmp_path: Path) -> None:
    write(baseline_of(run(record(), record("zeros"))), tmp_path / "host.json")
    (tmp_path / "other.json").write_text("{", encoding="utf-8")
    bad = {"verdict": "fail", "mismatches": 3}
    records = [record(**bad), record("ties", **bad), record("zeros"), record(backend="reference", **bad)]
    records.append(record(device="cuda", **bad))
    add_baseline_notes(records, GPU, tmp_path)  # the baseline of a GPU is made below
    assert [one["baseline"] for one in records] == [
        "host.json has pass 90 accepted", "host.json has no such case", "", "", ""
    ]  # fmt: skip
    assert "baseline: host.json has pass 90 accepted" in first_failure(records[0])
    write(baseline_of(run(record(device="cuda"), device="cuda", environment=GPU)), tmp_path / "sm_90.json")
    add_baseline_notes(records[-1:], H100, tmp_path)
    assert records[-1]["baseline"] == "sm_90.json has pass 90 accepted"


# The baseline in a report


def test_new_cases() -> None:
    judgement = judge(
        run(record(), record("zeros"), record("ties", verdict="fail", message="off")), baseline_of(run(record()))
    )
    assert text(judgement.notes) == ["new: quantize/nvfp4/64x128/bf16/zeros: pass 90"]
    assert text(judgement.problems) == ["new, and not pass: quantize/nvfp4/64x128/bf16/ties: fail 90 (off)"]


def test_more_skips_than_accepted() -> None:
    skipped = {"verdict": "unsupported", "message": "no door gemm"}
    accepted = baseline_of(run(record(), record("zeros", **skipped)))
    assert judge(run(record(), record("zeros", **skipped)), accepted).passed
    judgement = judge(run(record(), record("zeros", **skipped), record("ties", **skipped)), accepted)
    assert text(judgement.problems) == [
        "new, and not pass: quantize/nvfp4/64x128/bf16/ties: unsupported 90 (no door gemm)",
        "more skips: 2 cases unsupported, and 1 accepted; most often: no door gemm (2)",
    ]


def test_what_is_printed() -> None:
    console = Console(file=io.StringIO(), width=80)
    many = [record(f"file:{n:03}") for n in range(LISTED + 2)]
    show(judge(run(record(budget_max=0.1, inputs="[b]")), baseline_of(run(*many))), "host.json", console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [lines[0], lines[2], lines[3]] == [
        "new: 1", "    quantize/nvfp4/64x128/bf16/[b]: pass 90, budget 2^-3", "did not run: 52",
    ]  # fmt: skip
    assert "1 case" in lines[1]
    assert lines[-3:] == [
        "  quantize/nvfp4/64x128/bf16/file:049",
        "  … and 2 more",
        "gate fails against host.json: 0 cases as accepted, 52 did not run, 1 new",
    ]


# The command


def narrowgauge(*message: object) -> Any:
    return CliRunner().invoke(app, list(map(str, message)))


def test_the_command(tmp_path: Path) -> None:
    accepted, good, bad = (tmp_path / name for name in ("host.json", "good", "bad"))
    saved(good, run(record(), product()))
    saved(bad, run(wrong(), product()))
    assert narrowgauge("baseline", "accept", "--run", good, "--baseline", accepted).exit_code == 0
    judgement = narrowgauge("gate", "--run", good, "--baseline", accepted)
    assert (judgement.exit_code, judgement.stdout.replace("\n", "")) == (
        0, f"gate holds against {accepted}: 2 cases as acceptednext: nothing to do: every case is as accepted",
    )  # fmt: skip
    judgement = narrowgauge("gate", "--run", bad, "--baseline", accepted)
    assert judgement.exit_code == 1
    for part in ("worse: 1\n", "codes wrong, no cause known", "1 wrong elements, was 0", "quantize nvfp4 bf16"):
        assert part in judgement.stdout
    assert "report:" not in judgement.stdout
    (bad / "index.html").touch()
    judgement = narrowgauge("gate", "--run", bad, "--baseline", accepted)
    assert f"report: {bad}/index.html#case=quantize%2Fnvfp4%2F64x128%2Fbf16%2Fnormal\n" in judgement.stdout


def test_a_known_failure_satisfies_the_gate() -> None:
    """A figure outside of the baseline, a worse figure, an infinite figure; another failure of the run does not. A
    pass of a case that is known to fail is named."""
    expected = {"verdict": "fail", "known": "ties (https://x)", "message": "codes: off"}
    infinite = {"budget_max": math.inf, "budget_histogram": [560, *[0] * 9, 1]}
    records = [
        record("zeros", **expected), wrong("ties", 3, known="ties (https://x)"), product(**expected, **infinite),
        record("inf", known="inf (https://y)", message="passes, though it is known to fail: delete k.toml"), record(),
    ]  # fmt: skip
    accepted = baseline_of(run(record(), record("ties"), product(), record("inf")))
    judgement = judge(run(*records), accepted)
    assert judgement.passed
    names = [f"quantize/nvfp4/64x128/bf16/{family}" for family in ("zeros", "ties", "inf")]
    assert text(judgement.notes) == [
        f"known to fail: {names[0]}: ties (https://x)", f"known to fail: {names[1]}: ties (https://x)",
        f"known to fail: {product()['case']}: ties (https://x)",
        f"known to fail, and pass: {names[2]}: passes, though it is known to fail: delete k.toml",
    ]  # fmt: skip
    records[-1] = wrong()
    assert text(judge(run(*records), accepted).problems) == [
        "worse: quantize/nvfp4/64x128/bf16/normal: fail, was pass; 1 wrong elements, was 0 (codes: 1 of 90 codes wrong)"
    ]


BAD = {"verdict": "fail", "stage": "codes", "message": "codes: off", "mismatches": 1}
ACCEPT = "narrowgauge baseline accept --baseline b/host.json --run r"
SHOW = "narrowgauge show quantize/nvfp4/64x128/bf16/{} --backend native --device cpu"
AGAIN = "narrowgauge run -k nvfp4"
NEXT: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "as accepted": ([record(), record("ties")], {}, ["nothing to do: every case is as accepted"]),
    "known": (
        [record(**BAD, known="why"), record("ties")], {},
        ["nothing to do: every case is as accepted, or known to fail"],
    ),
    "new": ([record(), record("ties"), record("nan")], {}, [f"{ACCEPT}  # to keep what is new"]),
    "worse": ([record(), record("ties", **BAD)], {}, [SHOW.format("ties"), f"{ACCEPT}  # if the change is intended"]),
    "new, not pass": (
        [record(), record("ties"), record("nan", **BAD)], {},
        [SHOW.format("nan"), f"{ACCEPT}  # if the change is intended"],
    ),
    "skipped": (
        [record(), record("ties", verdict="unsupported", message="no", compared=0, stages=[])], {},
        [SHOW.format("ties"), f"{ACCEPT}  # if the change is intended"],
    ),
    "gone": (
        [record()], {},
        ["narrowgauge run  # with the cases that did not run", f"{ACCEPT}  # if they are gone on purpose"],
    ),
    "interrupted": ([record()], {"cases": [record()["case"], record("ties")["case"]]}, [f"{AGAIN} --resume"]),
    "nothing": ([], {}, [AGAIN]),
    "nothing, unknown command": ([], {"command": ""}, ["narrowgauge run --backend native --device cpu"]),
    "shard": ([record(), record("ties")], {"shard": "1/2"}, ["narrowgauge merge r OTHER_SHARD…"]),
    "another seed with a baseline": (
        [record(seed=7)], {"seed": 7}, ["narrowgauge gate --baseline b/seven.json --run r"],
    ),
    "another backend": (
        [record(backend="a.b:C")], {"backend": "a.b:C"},
        [f"{ACCEPT.replace('host.json', 'host-a-b-C.json')}  # for a baseline of this kind of run"],
    ),
    "another architecture": (
        [record(device="cuda")], {"device": "cuda", "environment": GPU},
        [f"{ACCEPT.replace('host.json', 'sm_90.json')}  # for a baseline of this kind of run"],
    ),
}  # fmt: skip
"""Records of a run and its other fields, and the commands after its comparison with a baseline of two cases."""


@pytest.mark.parametrize("name", NEXT)
def test_the_gate_ends_with_the_next_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(baseline_of(run(record(), record("ties"))), Path("b/host.json"))
    write(baseline_of(run(record(seed=7), seed=7)), Path("b/seven.json"))
    records, changes, expected = NEXT[name]
    finished = run(*records, **{"command": AGAIN, **changes})
    judgement = judge(finished, read(Path("b/host.json")))
    following = next_commands(judgement, finished, Path("b/host.json"), Path("r"))
    assert following == expected
    console = Console(file=io.StringIO(), width=80)
    show(judgement, "b/host.json", console, following=following)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()[-len(expected) :]
    assert lines == [f"{'or' if number else 'next'}: {line}" for number, line in enumerate(expected)]


def test_a_missing_file_is_followed_by_a_command(tmp_path: Path) -> None:
    saved(tmp_path / "run", run(record()))
    result = narrowgauge("gate", "--run", tmp_path / "run", "--baseline", tmp_path / "none.json")
    accept = f"narrowgauge baseline accept --baseline {tmp_path}/none.json --run {tmp_path}/run"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, f"next: {accept}")
    result = narrowgauge("gate", "--run", tmp_path / "none", "--baseline", tmp_path / "none.json")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2, f"next: narrowgauge run --report-dir {tmp_path}/none",
    )  # fmt: skip


def test_cases_are_grouped_by_cause_and_dimensions() -> None:
    away = [{"cause": "ties-away", "sentence": "ties round away", "stage": "codes", "exact": True}]
    bad = [wrong(f"i{n}", n + 1, max_ulp=3, explanations=away) for n in range(12)]
    better = [product(f"b{n}", budget_max=0.25 * n) for n in range(1, 3)]
    accepted = [record(f"i{n}") for n in range(12)] + [product(f"b{n}", budget_max=1.0) for n in range(1, 3)]
    groups = judge(run(*bad, *better), baseline_of(run(*accepted))).groups
    (found,) = groups["worse"]
    assert found.title.startswith("codes wrong, explained exactly by ties round away: ")
    for part in ("fail, was pass", "largest error 3 ulp, was 0", "78 wrong elements, was 0", "12 cases, all quantize"):
        assert part in found.title
    assert found.notes[0][0].endswith("/i11")  # the worst case first
    (found,) = groups["better"]
    assert "largest fraction of the bound 2^-1, was 2^0; 2 cases, all gemm nvfp4" in found.title
