"""What goes to a pull request: the Markdown and its budget, GitHub's annotations and the summary of its jobs."""

import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.harness.records.record import Record
from narrowgauge.harness.report import github, groups, markdown

CASES = """# nothing here
[[matrix]]
operation = "quantize"
tier = "quick"
recipe = "nvfp4"
shape = [16, 32]
dtype = "bf16"
inputs = "normal"

[[ matrix ]]
operation = "swizzle"
tier = "full"
shape = [3, 4]
inputs = ["bytes", "position"]
"""


def record(number: int = 0, **changes: Any) -> dict[str, Any]:
    given = {
        "case": f"quantize/r{number}/1x2/bf16/a", "file": "cases/a.toml", "operation": "quantize",
        "recipe": f"r{number}", "shape": "1x2", "dtype": "bf16", "inputs": "a", "flags": "", "tier": "quick",
        "backend": "native", "device": "cpu", "seed": 0, "verdict": "fail", "message": f"wrong {number}",
        "mismatches": number, "stage": "codes", **changes,
    }  # fmt: skip
    return Record(**given).to_dict()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not a job of GitHub, though these tests may be."""
    for name in ("ACTIONS", "STEP_SUMMARY", "SERVER_URL", "REPOSITORY", "RUN_ID", "WORKSPACE"):
        monkeypatch.delenv(f"GITHUB_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


# Markdown.


def test_the_worst_comes_first_and_the_link_last():
    records = [record(n) for n in range(3)] + [record(9, verdict="pass", mismatches=0)]
    lines = markdown.render(records, {"torch": "2.13"}, 1.0, link="https://ci/a<b>").splitlines()
    assert lines[0].startswith("# ✗ narrowgauge: 3 of 4 cases did not pass")
    order = [
        *(f"## ✗ codes wrong, no cause known: 1 case, quantize r{n}" for n in (2, 1, 0)),
        "| operation",
        "| quantize | r2 ",
        "- torch",
    ]
    places = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert places == sorted(places)
    assert [line.split(" | ")[1] for line in lines if line.startswith("| quantize")] == ["r2", "r1", "r0", "r9"]
    assert lines[-1] == "The whole report: <https://ci/a%3Cb%3E>"
    assert markdown.render(records, {}, 1.0).endswith("\nThe whole report: [index.html](index.html)\n")


def test_thousands_of_failures_stay_in_the_budget():
    huge = "€|`<\n" * 4000
    records = [record(n, message=f"{n} {huge}", backend="`€" * 3000, saved=huge, shrunk="1x2") for n in range(60)]
    records += [record(n, case=f"{n}/{m}" + "€" * 2000) for n in range(60) for m in range(50)]
    facts = {"torch €": huge, huge: "x"}
    text = markdown.render(records, facts, 1.0)
    assert markdown.BUDGET // 2 < len(text.encode()) <= markdown.BUDGET == 1 << 20
    assert text.endswith("The whole report: [index.html](index.html)\n")
    assert re.search(r"\n\d+ more groups with [\d ]+ cases left out\.\n", text)
    assert "\n| operation |" in text
    assert "\n- torch €: " in text


# The place of a case.


# Annotations.


def test_a_group_is_one_command_that_is_escaped(tmp_path, monkeypatch):
    Path("cases").mkdir()
    Path("cases/a.toml").write_text(CASES)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path.parent))
    place = {"case": "swizzle/3x4/bytes", "operation": "swizzle", "recipe": "a:b,c%d"}
    explained = [{"cause": "x", "sentence": "5 % off", "stage": "layout", "exact": True}]
    records = [record(7, message="100 % wrong:\r\nall, now", explanations=explained, **place)]
    assert github.commands(records) == [
        f"::error file={tmp_path.name}/cases/a.toml,line=10,title="
        f"{groups.group(records)[0].title.replace('%', '%25').replace(':', '%3A').replace(',', '%2C')}::"
        "swizzle/3x4/bytes: 100 %25 wrong: all, now%0Aexplained exactly by: 5 %25 off"
    ]


def test_at_most_ten_commands_and_the_last_counts_the_rest():
    records = [record(n) for n in range(9)] + [record(20, verdict="pass", known="k"), record(30, verdict="unsupported")]
    quiet = [record(40, verdict="pass"), record(41, known="k")]
    lines = github.commands(records[:9] + records[10:] + quiet)
    assert len(lines) == 10
    assert [re.findall(r"title=.*quantize r(\d+)", line) for line in lines] == [
        [str(n)] for n in [*range(8, -1, -1), 30]
    ]
    assert [line.split(" ")[0] for line in lines] == ["::error"] * 9 + ["::warning"]
    lines = github.commands(records + [record(n) for n in range(50, 60)])
    assert len(lines) == 10
    assert lines[-1] == "::error title=narrowgauge::12 more groups with 12 cases; the summary and the report have them"
    assert github.commands(quiet) == []


# Jobs.


def test_a_job_has_annotations_and_a_summary_within_its_limit(tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    output: list[str] = []
    github.publish([record(3)], {}, 1.0, link="https://ci/1", print_line=output.append)
    assert [line.partition("::quantize")[0] for line in output] == [
        "::error file=cases/a.toml,line=1,title=codes wrong%2C no cause known%3A 1 case%2C quantize r3 bf16"
    ]
    alone = markdown.render([record(3)], {}, 1.0, link="https://ci/1")
    assert summary.read_text(encoding="utf-8") == alone
    github.publish([record(3)], {}, 1.0, link="https://ci/1", print_line=output.append)
    assert summary.read_text(encoding="utf-8") == f"{alone}\n{alone}"
    for left in (300, 10):
        summary.write_bytes(b"x" * (markdown.BUDGET - left))
        github.publish([record(3)], {}, 1.0, link="https://ci/1", print_line=output.append)
        assert summary.stat().st_size <= markdown.BUDGET
    assert summary.stat().st_size == markdown.BUDGET - 10


def test_a_summary_that_cannot_be_written_costs_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    output: list[str] = []
    github.publish([record(3)], {}, 1.0, link="", print_line=output.append)
    assert len(output) == 1
    assert output[0].startswith("the summary of the job cannot be written: ")
