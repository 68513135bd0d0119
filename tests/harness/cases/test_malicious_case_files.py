"""Case files that cost memory or time, or that look like a different case: each is a single clear error."""

import os

import pytest

from narrowgauge.harness.cases import case_file, toml_file
from narrowgauge.harness.cases.case_file import CaseFileError, load
from narrowgauge.harness.cases.keys import LARGEST_SIZE
from tests.harness.refusals import refusal
from tests.harness.small_toml import matrix


def wrapped(text: str) -> str:
    """The text with an element of a list on each line."""
    return text.replace(", ", ",\n")


def large_product(usages: int) -> str:
    """A table with usages × 400 × 3 cases."""
    shapes = [[1, 16 * k] for k in range(1, 401)]
    return wrapped(matrix(shape=shapes, dtype=["fp32", "bf16", "fp16"], usage=["rowwise"] * usages))


GROUPED = {"operation": "quantize-grouped", "shape": [16, 32], "dtype": "bf16"}
MALICIOUS = {
    # Expansion.
    "product": (large_product(200), "[[matrix]] 1: its lists make 240000 cases, 240000 with the tables before it"),
    "tables": (large_product(40) * 3, "[[matrix]] 3: its lists make 48000 cases, 144000 with the tables before it"),
    "all keys": (
        wrapped(matrix(usage=["both"] * 4000, view=["strided"] * 4000, scales=["linear"] * 4000)),
        f"its lists make 256000000000 cases, 256000000000 with the tables before it; a file has at most "
        f"{case_file.MOST_CASES}: shorten the lists, or divide the file",
    ),
    # Size and depth.
    "large": ("# \n" * 100_000, f"has more than {toml_file.LARGEST} bytes"),
    "long line": ("a = 1" + " " * 3000, f"line 1 has 3005 characters, the limit is {toml_file.LONGEST}; break"),
    "long key": ("\n" + "k" * 5000 + " = 1", "line 2 has 5004 characters"),
    "dots": ("a." * 20_000 + "a = 1", "line 1 has 40005 characters"),
    "long text": (
        matrix(recipe=None) + 'recipe = """\n' + ("x" * 100 + "\n") * 50 + '"""',
        "the text 'xxxxxxxxxxxxxxxxxxxx'… has 5050 characters; the limit is 2000",
    ),
    "arrays": ("a = " + "[\n" * 5000, "lists or tables are nested too deeply; a case file needs at most 6"),
    "inline tables": ("a = " + "{a = " * 390, "lists or tables are nested"),
    "closed arrays": ("matrix = " + "[" * 100 + "]" * 100, "nested more than 6 deep; write fewer brackets or dots"),
    "dotted tables": ("[[matrix]]\nshape" + ".a" * 900 + " = 1", "nested more than 6 deep"),
    "dotted head": ("[" + ".".join("a" * 900) + "]", "nested more than 6 deep"),
    # Numbers.
    "digits": ("a = " + "9" * 1900, "the number 0x"),
    "wide": ("a = 0x" + "f" * 1900, "the number 0xffffffffffffffffff… has more than 64 bits"),
    "size": (matrix(shape=[2**60, 16]), "2 to 4 sizes that are not negative and at most 2^40"),
    "many sizes": (matrix(shape=[16] * 300), "2 to 4 sizes"),
    "arabic sections": (matrix(**GROUPED, sections="even:٤"), "sections is 'even:٤'; there can be 1 to 256 sections"),
    "superscript": (matrix(**GROUPED, sections="even:²"), "sections is 'even:²'; there can be 1 to 256 sections"),
    "signed": (matrix(**GROUPED, sections="even:+4"), "sections is 'even:+4'; "),
    "underscore": (matrix(**GROUPED, sections="even:1_0"), "sections is 'even:1_0'; "),
    "arabic rows": (matrix(**GROUPED, sections="rows:٨,8"), "rows are numbers with commas between them"),
    "long rows": (matrix(**GROUPED, sections="rows:" + "9" * 1900), "rows are numbers with commas between them"),
    "many rows": (matrix(**GROUPED, sections="rows:" + ",".join("0" * 900)), "there can be 1 to 256 sections"),
    "fullwidth margin": (matrix(recipe="fp8-delayed-e4m3-margin３"), "no recipe is called 'fp8-delayed-e4m3-margin３'"),
    "long margin": (matrix(recipe="fp8-delayed-e4m3-margin" + "9" * 50), "no recipe is called"),
    "arabic eps": (matrix(recipe="fp8-current-e4m3-eps١"), "no recipe is called"),
    "long recipe": (matrix(recipe="nvfp4" * 390), "no recipe is called"),
    # Values of a wrong kind.
    "table for a recipe": (matrix(recipe=None) + "recipe = {a = 1}", "recipe is {'a': 1}, not a recipe's name"),
    "list of lists": (wrapped(matrix(recipe=[["nvfp4"] * 300])), "characters), not a recipe's name"),
    "date": (matrix(dtype=None) + "dtype = 1979-05-27", "dtype is datetime.date(1979, 5, 27); it can be"),
    "nan": (matrix(shape=None) + "shape = [nan, inf]", "shape is [nan, inf]; a shape is"),
    "many keys": ("\n".join(f"k{n} = 1" for n in range(10_000)), "it has 'k0', 'k1', 'k2', 'k3', 'k4', and no [["),
    "no table": ("matrix = [" + "1,\n" * 10_000 + "]", "[[matrix]] 1: is 1; a matrix is a table of keys"),
    "NUL": ("\0", "not TOML: "),
}  # fmt: skip


@pytest.mark.sampled(19)
@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_case_file_is_one_error(tmp_path, name):
    text, message = MALICIOUS[name]
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    said = refusal("list", path)
    assert said.startswith(f"{path}: ")
    assert message in said


def test_a_case_file_that_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for path in (tmp_path / "fifo.toml", tmp_path / "zero.toml"):
        assert "it is no regular file" in refusal("list", path)


def test_the_limits_themselves_are_allowed(tmp_path, monkeypatch):
    path = tmp_path / "a.toml"
    path.write_text(matrix(shape=[LARGEST_SIZE, 16], dtype="bf16"))
    assert [case.shape for case in load(path)] == [(LARGEST_SIZE, 16)]
    path.write_text(matrix())
    monkeypatch.setattr(case_file, "MOST_CASES", 4)
    assert len(load(path)) == 4
    monkeypatch.setattr(case_file, "MOST_CASES", 3)
    with pytest.raises(CaseFileError, match="its lists make 4 cases, 4 with the tables before it; a file has at "):
        load(path)
