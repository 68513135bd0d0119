"""A cause for every failing record, and as few causes as possible."""

from typing import Any

import pytest

from narrowgauge.harness.diagnosis.assign_causes import assign_causes
from narrowgauge.harness.diagnosis.explanation import NOT_PROVED, UNTRIED_RIVALS, Explanation
from narrowgauge.harness.operations.stages.possible_cause import FREE, GIVES_EVERY_BYTE


def failing(name: str, *causes: str, recipe: str = "") -> dict[str, Any]:
    """A record with explanations in this order; `~cause` is a signature, and `!cause` gives every byte of a record with
    a diagnosis that stopped. Its kind is its own, or of a recipe."""
    explanations = []
    for cause in causes:
        explanation = Explanation(cause.lstrip("~!"), cause.lstrip("!"), "codes", exact=cause[0] != "~")
        explanations.append((explanation.with_untried_rivals() if cause[0] == "!" else explanation).to_dict())
    kind = {"operation": "quantize", "recipe": recipe or name, "stage": "codes"}
    return {"case": name, **kind, "explanations": explanations}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], []),
        ([failing("a")], []),
        ([failing("a", "x"), failing("b", "y", "x"), failing("c", "y", "x")], [("x", "abc")]),
        ([failing("a", "x"), failing("b", "x"), failing("c", "y")], [("x", "ab"), ("y", "c")]),
        # Equally often: the cause that stands higher in the lists, then the name.
        ([failing("a", "y", "x"), failing("b", "y", "x")], [("y", "ab")]),
        ([failing("a", "y", "x"), failing("b", "x", "y")], [("x", "ab")]),
        # A signature never stands before a cause that gives the bytes, and never in its place.
        ([failing("a", "x", "~s"), failing("b", "~s"), failing("c", "~s")], [("x", "a"), ("s", "bc")]),
        ([failing("a", "x", "y"), failing("b", "x"), failing("c", "y"), failing("d", "y")], [("y", "acd"), ("x", "b")]),
    ],
)
def test_causes_cover_the_records_greedily(records: list[dict[str, Any]], expected: list[tuple[str, str]]) -> None:
    found = [(explanation["cause"], "".join(r["case"] for r in taken)) for explanation, taken in assign_causes(records)]
    assert found == expected
    assert all(
        any(e["cause"] == explanation["cause"] for e in r["explanations"])
        for explanation, taken in assign_causes(records)
        for r in taken
    )


def test_records_that_do_not_separate_two_causes() -> None:
    (explanation, _) = assign_causes([failing("a", "x", "y", "z"), failing("b", "x", "y")])[0]
    assert (explanation["cause"], explanation["exact"], explanation["sentence"]) == ("x", False, "x; or: y")
    (explanation, _) = assign_causes([failing("a", "x", "y"), failing("b", "z", "x")])[0]
    assert (explanation["cause"], explanation["exact"], explanation["sentence"]) == ("x", True, "x")


def test_an_exact_cause_explains_every_case_of_its_kind() -> None:
    alike = [failing("a", "x", recipe="r"), failing("b", "x", "y", recipe="r")]
    assert [explanation["exact"] for explanation, _ in assign_causes([*alike, failing("c")])] == [True]
    # A further case of the kind has different bytes, with a different cause, with a place or without explanation.
    for other in (failing("c", "y", recipe="r"), failing("c", "~s", recipe="r"), failing("c", recipe="r")):
        (explanation, members), *_ = assign_causes([*alike, other])
        assert (explanation["cause"], explanation["exact"], len(members)) == ("x", False, 2)
        assert explanation["sentence"].endswith("; explains 2 of 3 cases that fail at this stage")
    assert alike[0]["explanations"][0]["exact"]  # the record is unchanged
    # Records covered by an earlier cause count also for a second cause that gives their bytes.
    records = [failing("a", "x", "y", recipe="r"), failing("b", "x", recipe="s"), failing("c", "y", recipe="r")]
    assert {explanation["cause"]: explanation["exact"] for explanation, _ in assign_causes(records)} == {
        "x": False, "y": True,
    }  # fmt: skip


def test_a_cause_is_exact_if_one_diagnosis_is_complete() -> None:
    stopped, complete = failing("a", "!x", recipe="r"), failing("b", "x", recipe="r")
    for records, sentence in (([stopped], "x" + UNTRIED_RIVALS), ([stopped, complete], "x")):
        ((explanation, members),) = assign_causes(records)
        assert (explanation["sentence"], explanation["exact"]) == (sentence, len(records) == 2)
        assert members == records
    # A cause that was not tried where the diagnosis stopped is a rival still.
    ((explanation, _),) = assign_causes([stopped, failing("b", "x", "y", recipe="r")])
    assert (explanation["sentence"], explanation["exact"]) == ("x; or: y", False)


def test_a_hint_counts_if_another_case_proves_the_cause() -> None:
    def hint(recipe: str) -> dict[str, Any]:
        entry = Explanation("x", f"x{NOT_PROVED}", "codes", exact=False).to_dict()
        return {**failing("a", recipe=recipe), "explanations": [entry]}

    assert assign_causes([hint("r")]) == []
    for recipe, members in (("r", "ab"), ("s", "b")):
        ((explanation, explained),) = assign_causes([hint(recipe), failing("b", "x", recipe="r")])
        assert (explanation["sentence"], explanation["exact"]) == ("x", True)
        assert "".join(record["case"] for record in explained) == members


def test_a_sentence_about_other_numbers_is_counted() -> None:
    def of(case: str, sentence: str, *, exact: bool = True) -> dict[str, Any]:
        return {**failing(case, recipe="r"), "explanations": [Explanation("x", sentence, "codes", exact).to_dict()]}

    records = [of("a", "vectors of 8 (3 of 4)"), of("b", "vectors of 4"), of("c", "vectors of 4; 2 of 9 are so")]
    ((explanation, members),) = assign_causes(records)
    assert (explanation["sentence"], explanation["exact"], len(members)) == (
        "vectors of 4; so in 2 of 3 cases",
        True,
        3,
    )
    ((explanation, _),) = assign_causes(records[1:])
    assert explanation["sentence"] == "vectors of 4"


def test_a_cause_of_free_inputs_explains_all_cases_or_none() -> None:
    records = [failing("a", "x", recipe="r"), failing("b", "x", recipe="r")]
    entry = records[0]["explanations"][0]
    records[0]["explanations"] = [{**entry, "sentence": f"x{GIVES_EVERY_BYTE}{FREE}", "exact": False}]
    assert [explanation["cause"] for explanation, _ in assign_causes(records)] == ["x"]
    records[1]["explanations"] = []
    assert assign_causes(records) == []
