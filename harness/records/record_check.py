"""Check of a record from a file: its columns, their ranges, and the verdict that follows from its stages.

The check needs only the record. A record of the runner always passes; a record that was damaged or edited does
not, unless the change is consistent in all columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import itemgetter
from typing import Any, TypedDict

import msgspec

from narrowgauge.harness.cases.keys import TIERS
from narrowgauge.harness.cases.operations import is_composed, is_own
from narrowgauge.harness.machine.timing import PHASES
from narrowgauge.harness.records.record import ENTRIES, PROTECTING, VERDICTS, Record, elements_compared, outputs_of
from narrowgauge.harness.records.typed import COUNT, INT64, NUMBER, has_type, object_type, shown, type_problem, types_of

RULES = ("exact", "bound", "boundary", "statistics", "scope", *PROTECTING)
"""Rules of stages. All but `PROTECTING` compare with an expected value."""
_BOUNDING = ("bound", "boundary")
"""Rules with unbounded elements."""
DEVICES = ("cpu", "cuda")
FULL_BUDGET = 1 + 2.0**-30
"""Largest budget of a correct kernel. Budgets are evaluated in float64, and their last bits depend on the machine."""
_LAST_BITS = 1e-9
"""Tolerance for shares and means, which are rounded quotients of whole numbers."""
_WHOLE = 1 + _LAST_BITS
"""Largest share."""
_COUNTS = ("compared", "mismatches", "max_ulp", "draws", "interval_ulps_max", "bytes_peak")
_SHARES = ("exact_share", "ordered_share", "excused_share", "outside_share", "p_value")
_SECONDS = ("seconds", *(f"seconds_{phase}" for phase in (*PHASES, "total", "core")))
_BUDGETS = ("budget_max", "budget_p99")
_AMOUNTS = (*_BUDGETS, "interval_ulps_mean", *_SECONDS)
_FINITE = (*_COUNTS, *_AMOUNTS)
_finite_of, _shares_of = itemgetter(*_FINITE), itemgetter(*_SHARES)
_OF_OUTPUTS = ("exact_share", "ordered_share", *_BUDGETS, "interval_ulps_max", "interval_ulps_mean")
"""Figures of outputs with the rule `bound`."""
_of_outputs = itemgetter(*_OF_OUTPUTS)
_OF_FAILURES = ("explanations", "findings", "shrunk", "saved", "save_note", "baseline")
"""Columns that are empty in the record of a pass."""
_IN_ID = ("operation", "recipe", "shape", "dtype", "inputs", "flags")
"""Columns of the id of a case."""
_id_parts_of = itemgetter(*_IN_ID)
_COLUMN_WORDS = {"verdict": VERDICTS, "tier": TIERS, "device": DEVICES}
_ENTRY_WORDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("stages", "rule", RULES), ("accuracy", "tensor", ("y", "dx", "dw"))
)  # fmt: skip
"""Words that a column, or a key of the entries in a column, can hold."""
_DIGEST = re.compile("(?:[0-9a-f]{16})?")
_SHAPE = re.compile(r"\d{1,18}(x\d{1,18})*", re.ASCII)
_BINS, _SWEEP = 11, 6
"""Lengths of `budget_histogram` and of `sweep`, if they are not empty."""
_ENTRY_TYPES: dict[str, dict[str, Any]] = {
    "accuracy": dict.fromkeys(("sqnr_db", "relative_error", "cosine"), NUMBER | None) | {"tensor": str},
    "stages": {
        "stage": str, "rule": str, "compared": COUNT, "mismatches": COUNT, "max_ulp": COUNT | None, "excused": COUNT,
        "unbounded": COUNT | None, "sentence": str,
    },
    "explanations": {"cause": str, "sentence": str, "stage": str, "exact": bool},
    "notes": {"cause": str, "sentence": str},
    "findings": {
        "stage": str, "rule": str, "sentence": str, "elements": list[dict[str, Any]], "modulo": dict[str, Any],
        "heat": dict[str, Any], "steps": list[list[INT64]], "census": dict[str, Any],
        "table": dict[str, Any],
    },
}  # fmt: skip
"""Types of the keys of `ENTRIES`."""


def record_problems(record: dict[str, Any]) -> list[str]:
    """Reasons not to trust a record, as phrases with column and value. Empty if the record is consistent."""
    if problem := type_problem(record, _record_type(), "column"):
        return [problem]
    return contradictions(record)


def contradictions(record: dict[str, Any]) -> list[str]:
    """`record_problems` of a record with all columns of the right types."""
    return [*_ranges(record), *_labels(record)] or [*_verdict(record)]


def has_record_type(value: Any) -> bool:
    """Whether a value has all columns of a record, of the right types."""
    return has_type(value, _record_type())


@cache
def _record_type() -> type:
    """The type of a record with its entries: all keys are present, and no further keys."""
    made: type = _nested(object_type)
    return made


@cache
def record_decoder() -> Any:
    """`msgspec.json.Decoder` of records with all columns of the right types: dicts without keys unknown to records."""
    typed_dict: Any = TypedDict  # of names that a type checker does not know
    return msgspec.json.Decoder(_nested(typed_dict))


def _nested(make: Callable[[str, dict[str, Any]], Any]) -> Any:
    """The type of a record, with the types that `make` makes of names and types of keys."""
    lists: dict[str, Any] = {}
    for column, keys in ENTRIES.items():
        entry = make(column, {key: _ENTRY_TYPES[column][key] for key in keys})
        lists[column] = list[entry]  # type: ignore[valid-type]
    return make("Record", types_of(Record) | lists)


def _ranges(record: dict[str, Any]) -> Iterator[str]:
    """Figures that are negative, NaN, infinite, or outside of their range."""
    for name, value in zip(_FINITE, _finite_of(record), strict=True):
        if value is not None and not 0 <= value < math.inf:
            # A wrong kernel can use an infinite budget, if the bound of an output is 0.
            if value == math.inf and name in _BUDGETS and record["verdict"] != "pass":
                continue
            yield f"{name} is {value}, not a finite number ≥ 0"
    sweep = record["sweep"]
    for name, value in zip(("sweep",) * len(sweep) + _SHARES, (*sweep, *_shares_of(record)), strict=True):
        if value is not None and not 0 <= value <= _WHOLE:
            yield f"{name} is {value}, not a share from 0 to 1"
    if record["sqnr_db"] is not None and math.isnan(record["sqnr_db"]):
        yield "sqnr_db is nan"
    for column, length in (("budget_histogram", _BINS), ("sweep", _SWEEP)):
        if len(record[column]) not in (0, length):
            yield f"{column} has {len(record[column])} numbers, not {length}"
    if record["budget_histogram"] and min(record["budget_histogram"]) < 0:
        yield f"budget_histogram is {shown(record['budget_histogram'])}, with a negative count"
    for number, entry in enumerate(record["accuracy"]):
        for key, least, most in (("sqnr_db", -math.inf, math.inf), ("relative_error", 0, math.inf), ("cosine", -1, 1)):
            value = entry[key]
            if value is not None and not (math.isfinite(value) and least - _LAST_BITS <= value <= most + _LAST_BITS):
                yield f"accuracy[{number}].{key} is {value}, outside of its range"


def _labels(record: dict[str, Any]) -> Iterator[str]:
    """Impossible words of a column, and an id that contradicts its columns."""
    for name, words in _COLUMN_WORDS.items():
        if record[name] not in words:
            yield f"{name} is {shown(record[name])}, not {', '.join(words)}"
    for column, key, words in _ENTRY_WORDS:
        for number, word in enumerate([entry[key] for entry in record[column]]):
            if word not in words:
                yield f"{column}[{number}].{key} is {shown(word)}, not {', '.join(words)}"
    for name in ("input_digest", "output_digest"):
        if not _DIGEST.fullmatch(record[name]):
            yield f"{name} is {shown(record[name])}, not 16 hexadecimal digits"
    made = "/".join(filter(None, _id_parts_of(record)))
    if made != record["case"]:
        yield f"case is {shown(record['case'])}, and its columns are those of {shown(made)}"
    if not _SHAPE.fullmatch(record["shape"]):
        yield f"shape is {shown(record['shape'])}, not sizes joined by x"


def _verdict(record: dict[str, Any]) -> Iterator[str]:
    """Columns that contradict the stages, and a verdict that does not follow from them."""
    yield from _sums(record)
    yield from _outputs(record)
    wrong = [stage for stage in record["stages"] if stage["sentence"]]
    found = {finding["stage"] for finding in record["findings"]}
    if found and found - {stage["stage"] for stage in wrong}:
        yield "findings has a stage that is not wrong"
    if record["device"] == "cpu" and record["bytes_peak"] is not None:
        yield f"bytes_peak is {record['bytes_peak']}, GPU memory of a run on a CPU"
    yield from _VERDICTS.get(record["verdict"], _without_result)(record, wrong)


def _sums(record: dict[str, Any]) -> Iterator[str]:
    """Columns that are computed from the stages, and stages that contradict themselves."""
    stages = record["stages"]
    rules = [stage["rule"] for stage in stages]
    wrong = [stage for stage in stages if stage["sentence"]]
    bounded = [stage for stage in stages if stage["rule"] == "boundary"] if "boundary" in rules else []
    of_bounded = sum([stage["compared"] for stage in bounded])
    computed = (
        ("compared", sum([stage["compared"] for stage in stages])),
        ("mismatches", sum([stage["mismatches"] for stage in stages])),
        ("max_ulp", max([stage["max_ulp"] for stage in wrong if stage["max_ulp"] is not None], default=None)),
        ("stage", wrong[0]["stage"] if wrong else ""),
        ("excused_share", sum([stage["excused"] for stage in bounded]) / of_bounded if of_bounded else None),
    )
    for name, value in computed:
        if record[name] != value:
            yield f"{name} is {shown(record[name])}, and {shown(value)} by its stages"
    if (record["draws"] is None) == ("statistics" in rules):
        yield f"draws is {record['draws']}, which contradicts the rules of its stages"
    for number, stage in enumerate(stages):
        if not stage["sentence"] and (stage["mismatches"] or stage["max_ulp"] is not None):
            yield f"stages[{number}] ({shown(stage['stage'])}) has wrong elements, and no sentence"
        if stage["mismatches"] or stage["excused"] or stage["unbounded"]:
            counts = stage["mismatches"], stage["excused"], stage["unbounded"] or 0
            if max(counts) > stage["compared"] and stage["rule"] not in PROTECTING:
                what = "more wrong, excused or unbounded elements than compared elements"
                yield f"stages[{number}] ({shown(stage['stage'])}) has {what}"
        if stage["unbounded"] is not None and stage["rule"] not in _BOUNDING:
            yield f"stages[{number}] ({shown(stage['stage'])}) has unbounded elements, and the rule {stage['rule']}"
        if not stage["stage"]:
            yield f"stages[{number}] has no name"


def _outputs(record: dict[str, Any]) -> Iterator[str]:
    """Figures of the outputs of a GEMM that contradict one another."""
    outputs = outputs_of(record)
    figures = _of_outputs(record)
    given = {name: value for name, value in zip(_OF_OUTPUTS, figures, strict=True) if value is not None}
    if given and not outputs:
        name, value = next(iter(given.items()))
        yield f"{name} is {value}, and no stage has the rule bound"
    for name in ("exact_share", "ordered_share"):
        count = given.get(name, 0) * outputs
        # A module measures the figures of some outputs only.
        if abs(count - round(count)) > _LAST_BITS * max(1, outputs) and not is_composed(record["operation"]):
            yield f"{name} is {given[name]}, and no whole number of {outputs} outputs"
    if (total := given.get("exact_share", 0) + given.get("ordered_share", 0)) > 1 + _LAST_BITS:
        yield f"exact_share and ordered_share are {total} together"
    yield from _ordered(record, "budget_p99", "budget_max")
    yield from _ordered(record, "interval_ulps_mean", "interval_ulps_max")
    histogram, budget = record["budget_histogram"], record["budget_max"]
    if bool(histogram) != (budget is not None):
        yield f"budget_max is {budget}, and budget_histogram is {shown(histogram)}"
    elif sum(histogram) > outputs:
        yield f"budget_histogram counts {sum(histogram)} of {outputs} outputs"
    elif histogram and (histogram[-1] > 0) != (budget >= 1) and abs(budget - 1) > _LAST_BITS:
        yield f"budget_max is {budget}, and {histogram[-1]} outputs are in the last bin of budget_histogram"


def _ordered(record: dict[str, Any], less: str, most: str) -> Iterator[str]:
    """Both figures are measured or neither, and the first is not above the second."""
    low, high = record[less], record[most]
    if (low is None) != (high is None) or (low is not None and low > high * (1 + _LAST_BITS)):
        yield f"{less} is {low}, and {most} is {high}"


def _passed(record: dict[str, Any], wrong: list[dict[str, Any]]) -> Iterator[str]:
    if wrong:
        yield f"verdict is pass, and the stage {shown(wrong[0]['stage'])} is wrong"
    elif not elements_compared(record) and _has_elements(record):
        yield "verdict is pass, and nothing was compared"
    if record["budget_max"] is not None and record["budget_max"] > FULL_BUDGET:
        yield f"verdict is pass, and budget_max is {record['budget_max']}, above 1"
    # An operation of a user may judge by bounds without figures.
    if record["exact_share"] is None and outputs_of(record) and is_own(record["operation"]):
        yield "verdict is pass, a stage has the rule bound, and exact_share is None"
    if bool(record["message"]) != bool(record["known"]):  # the message of a pass says that its failure was known
        yield f"verdict is pass, known is {shown(record['known'])}, and message is {shown(record['message'])}"
    if unexpected := [name for name in _OF_FAILURES if record[name]]:
        yield f"verdict is pass, and {unexpected[0]} is {shown(record[unexpected[0]])}"
    if absent := [name for name in ("input_digest", "output_digest") if not record[name]]:
        yield f"verdict is pass, and {absent[0]} is empty"


def _has_elements(record: dict[str, Any]) -> bool:
    return all(int(extent) > 0 for extent in record["shape"].split("x"))


def _failed(record: dict[str, Any], wrong: list[dict[str, Any]]) -> Iterator[str]:
    if not wrong:
        yield "verdict is fail, and no stage is wrong"
    elif not record["message"].startswith(f"{wrong[0]['stage']}: "):
        yield f"message is {shown(record['message'])}, and the first wrong stage is {shown(wrong[0]['stage'])}"


def _unsupported(record: dict[str, Any], wrong: list[dict[str, Any]]) -> Iterator[str]:
    yield from _without_result(record, wrong)
    for name in ("stages", "output_digest", "known"):
        if record[name]:
            yield f"verdict is unsupported, and {name} is {shown(record[name])}"


def _without_result(record: dict[str, Any], wrong: list[dict[str, Any]]) -> Iterator[str]:
    """Check of error, crash and timeout. The case may have stages: the GPU can report an error after the stages."""
    if not record["message"]:
        yield f"verdict is {record['verdict']}, and message is empty"


_VERDICTS: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], Iterator[str]]] = {
    "pass": _passed, "fail": _failed, "unsupported": _unsupported
}  # fmt: skip
