"""Ledgers that excuse everything, or cost memory or time: each is a single clear error."""

import pytest

from narrowgauge.harness.cases import toml_file
from narrowgauge.harness.gate import ledger
from tests.harness.refusals import refusal
from tests.harness.small_toml import known, matrix

EVERYTHING = ("*", "**", "?*", "*/*", "*/*/*", "quantize*", "[a-z]*", "*normal", "[!x]*", "*/bf16/*", "*6*")
"""Patterns that match all cases of `matrix(dtype="bf16")`."""
MALICIOUS = {
    # Entries without content.
    "doubled": (
        known() + known(reason="another", issue="https://b/c"),
        "[[known]] 2: expects the same failures as {path}: [[known]] 1; delete one of the two",
    ),
    "doubled verdict": (known() + known(verdict="fail"), "[[known]] 2: expects the same failures as"),
    "many": ("[[known]]\n" * (ledger.MOST + 1), f"has 1001 [[known]] tables, at most {ledger.MOST}; join entries"),
    "list for a pattern": (known(case=None) + "case = ['*', '*']", "[[known]] 1: case is ['*', '*']; it is text"),
    "table for a pattern": (known(case=None) + "case = {a = 1}", "[[known]] 1: case is {'a': 1}; it is text"),
    "no pattern": (known(case=" "), "[[known]] 1: case is ' '; it is text, and not empty"),
    # Size and depth.
    "large": ("# \n" * 100_000, f"has more than {toml_file.LARGEST} bytes, the limit of a ledger; divide"),
    "long pattern": (known(case="*a" * 1200), "line 3 has 2409 characters, the limit is 2000; break the line"),
    "long reason": (known(reason=None) + 'reason = """\n' + "why\n" * 600 + '"""', "has 2400 characters; the limit"),
    "arrays": ("known = " + "[\n" * 5000, "lists or tables are nested too deeply; a ledger needs at most 6"),
    "dotted tables": ("[[known]]\ncase" + ".a" * 900 + " = 1", "nested more than 6 deep"),
    "wide": ("[[known]]\ncase = 0x" + "f" * 1900, "has more than 64 bits"),
    "long key": (known() + "k" * 1900 + ' = "a"', "[[known]] 1: unknown key 'kkk"),
    "long cause": (known(cause="c" * 1900), "characters); it is one of the column explanations"),
    "backtracking": (known(case="*a" * 300 + "b"), "matches no case: correct or narrow the pattern, or delete"),
    "ranges": (known(case="[z-a]*"), "case '[z-a]*' matches no case"),
    "many strangers": ("".join(known(case=f"{n}*") for n in range(900)), "; and 895 more: correct or narrow the patt"),
}  # fmt: skip


@pytest.fixture
def cases(tmp_path):
    (tmp_path / "cases").mkdir()
    path = tmp_path / "cases" / "a.toml"
    path.write_text(matrix(dtype="bf16"))
    return path


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_ledger_is_one_error(tmp_path, cases, name):
    text, message = MALICIOUS[name]
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    said = refusal("run", cases, "--known", path, "--report-dir", tmp_path / "report")
    assert said.startswith(f"{path}: ")
    assert message.replace("{path}", str(path)) in said


@pytest.mark.sampled(12)
@pytest.mark.parametrize("pattern", EVERYTHING)
def test_a_pattern_that_matches_every_case_is_refused(tmp_path, cases, pattern):
    """Beside the case files and by --known, also for a second backend."""
    for name, options in (("cases/known.toml", ()), ("mine.toml", ("--known", tmp_path / "mine.toml"))):
        (tmp_path / name).write_text(known(case=pattern, backend="mine:Backend"))
        said = refusal("run", cases, *options, "--report-dir", tmp_path / "report")
        assert said.startswith(f"{tmp_path / name}: [[known]] 1: case {pattern!r} matches all 2 cases: ")
        assert "narrow the pattern" in said
        (tmp_path / name).unlink()
