"""Records: everything measured about one case on one backend, one row of a table.

The columns are the schema of the Parquet and CSV tables, and reports/SCHEMA.md says what each means. A change of a
column, or of the keys of what a column holds, changes `SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.machine.timing import PARTS

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 7
VERDICTS = ("pass", "fail", "error", "crash", "timeout", "unsupported")
"""pass: right. fail: a result is wrong. error: the backend raised, or gave something that is no result. crash: its
process died. timeout: it did not end. unsupported: it says that it does not do this."""
OUTCOMES = (*VERDICTS, "unexpected", "known")
"""Verdicts, seen beside the ledger (`harness.gate.ledger`). known: a failure that it expects. unexpected: a pass,
where it expects a failure."""


@dataclass
class Record:
    """One row. Figures that were not measured are None, never 0."""

    case: str
    file: str
    operation: str
    recipe: str
    shape: str
    dtype: str
    inputs: str
    flags: str
    tier: str
    backend: str
    device: str
    seed: int
    verdict: str = "pass"
    stage: str = ""
    """First stage that is wrong."""
    message: str = ""
    """One sentence: how many, how far, where; or why there is no result."""
    known: str = ""
    """Why the ledger expects this case to fail, and the link to its issue; nothing where it does not, or where the
    case failed in another way."""
    compared: int = 0
    """Elements compared, all stages together."""
    mismatches: int = 0
    """Elements that are wrong, all stages together."""
    max_ulp: int | None = None
    """Largest distance of a wrong element, in steps of its own format."""
    exact_share: float | None = None
    """Share of outputs in docs/tolerance.md#exact-sums: any order of summation gives the same bits."""
    ordered_share: float | None = None
    """Share of outputs in tier 1: judged by the order of summation that the backend declares. The rest is in tier 2."""
    excused_share: float | None = None
    """Share of elements that are right by docs/tolerance.md#boundary, though not the bytes of the reference's order."""
    outside_share: float | None = None
    """Share of outputs of a gemm outside the bounds of the reference's own operands: end to end, and in no verdict. 0
    where operands and product are right; a wrong operand shows here and fails where it was made."""
    p_value: float | None = None
    """Smallest p-value of the tests that a right kernel fails by chance, of docs/tolerance.md#boundary and
    #stochastic-rounding,
    adjusted for their number: a right kernel's is below q in at most a share q of cases."""
    draws: int | None = None
    """Roundings by random bits of the backend's own that were counted."""
    budget_max: float | None = None
    """Largest |out - centre| / budget of a gemm; above 1 no right kernel goes."""
    budget_p99: float | None = None
    budget_histogram: list[int] = field(default_factory=list)
    """Outputs of a gemm by budget used: ten bins of 0.1, then what is above 1."""
    interval_ulps_max: int | None = None
    """Widest accepted interval, in ulps of the output: a wide one is a weak test."""
    interval_ulps_mean: float | None = None
    allclose: bool | None = None
    """For information: what allclose(rtol=8e-3, atol=8e-3) on the values would have said; of a gemm end to end."""
    sqnr_db: float | None = None
    """For information: signal over difference between kernel's and reference's values; inf where they are equal."""
    sweep: list[float] = field(default_factory=list)
    """For information: share of values within a relative 1e-1, 1e-2, … 1e-6 of the reference's."""
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    """For information: what quantizing costs. Of a module one entry each for its y, dx and dw beside those of the same
    unquantized inputs in float64, of the last step: tensor, sqnr_db, relative_error, cosine
    (`harness.operations.modules.accuracy`)."""
    seconds: float | None = None
    """First call of the backend's operation, compilation included where it happens there."""
    seconds_inputs: float | None = None
    """Of `seconds_total`, as the next four: what `harness.machine.timing.PARTS` says of the part."""
    seconds_backend: float | None = None
    seconds_reference: float | None = None
    seconds_checks: float | None = None
    seconds_diagnosis: float | None = None
    seconds_total: float | None = None
    """All that the case took. Cases are divided into shards by it (`harness.running.shard`)."""
    seconds_core: float | None = None
    """Of processors, while the case took those: of all threads of its process."""
    bytes_peak: int | None = None
    """Of a GPU's memory: what torch had allocated at once, the inputs included."""
    input_digest: str = ""
    output_digest: str = ""
    """Of the bytes that the backend gave: equal on two machines where the results are."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """One entry a stage: stage, rule, compared, mismatches, max_ulp, excused, sentence (empty where right)."""
    explanations: list[dict[str, Any]] = field(default_factory=list)
    """What explains the first wrong stage, the best first: cause, sentence, stage, exact (`harness.diagnosis`)."""
    shrunk: str = ""
    """Smallest shape found at which a part of the inputs fails in the same way; nothing where none smaller does, or
    the search was not made: it is for the first failure of a kind in a process."""
    saved: str = ""
    """Path of the saved inputs, of that shape, and of the results of kernel and reference (`harness.records.saved`)."""
    save_note: str = ""
    """Why a failure that should be is not shrunk or saved."""
    baseline: str = ""
    """What the baseline of this device, backend and seed says of a case that did not pass."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """One entry a wrong stage, for people: `harness.checks.finding` says what is in it."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values only: it crosses processes and goes into JSON."""
        # What a backend raised may hold what is no Unicode, a file's name say, and no file of the report would take it.
        return asdict(self) | {"message": self.message.encode(errors="replace").decode()}


NESTED = ("budget_histogram", "sweep", "accuracy", "stages", "explanations", "findings")
"""Columns that hold lists: JSON in Parquet, and left out of CSV."""
ENTRIES = {
    "accuracy": ("tensor", "sqnr_db", "relative_error", "cosine"),
    "stages": ("stage", "rule", "compared", "mismatches", "max_ulp", "excused", "sentence"),
    "explanations": ("cause", "sentence", "stage", "exact"),
    "findings": ("stage", "rule", "sentence", "elements", "modulo", "heat", "steps", "census"),
}
"""Keys of the entries of columns that hold objects."""

_FRAME_TYPES = {
    "seed": "int64", "compared": "int64", "mismatches": "int64", "max_ulp": "Int64", "interval_ulps_max": "Int64",
    "draws": "Int64", "bytes_peak": "Int64", "p_value": "float64",
    "exact_share": "float64", "ordered_share": "float64", "excused_share": "float64", "outside_share": "float64",
    "budget_max": "float64", "budget_p99": "float64", "interval_ulps_mean": "float64", "sqnr_db": "float64",
    "seconds": "float64", **{f"seconds_{part}": "float64" for part in (*PARTS, "total", "core")}, "allclose": "boolean",
}  # fmt: skip


def to_frame(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Records (`Record.to_dict`) as a table sorted by case and backend, every column of the schema present."""
    return _frame(records, [f.name for f in fields(Record)])


def _frame(records: Iterable[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    import json

    import pandas as pd

    rows = [[json.dumps(r[name]) if name in NESTED else r[name] for name in columns] for r in records]
    frame = pd.DataFrame(rows, columns=columns)
    frame = frame.astype({name: _FRAME_TYPES.get(name, "str") for name in columns})
    return frame.sort_values(["case", "backend"], ignore_index=True)


def summarize(records: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Counts and worst figures per operation × recipe × dtype."""
    frame = _frame(records, [f.name for f in fields(Record) if f.name not in NESTED])
    pairs = zip(frame["verdict"], frame["known"], strict=True)
    frame["outcome"] = [outcome({"verdict": verdict, "known": known}) for verdict, known in pairs]
    by = frame.groupby(["operation", "recipe", "dtype"], sort=True)
    table = by["outcome"].value_counts().unstack(fill_value=0).reindex(columns=list(OUTCOMES), fill_value=0)
    table.insert(0, "cases", by.size())
    table["compared"] = by["compared"].sum()
    table["mismatches"] = by["mismatches"].sum()
    table["max_ulp"] = by["max_ulp"].max()
    table["exact_share"] = by["exact_share"].mean()
    table["ordered_share"] = by["ordered_share"].mean()
    table["budget_max"] = by["budget_max"].max()
    table["seconds"] = by["seconds"].sum(min_count=1)
    return table.reset_index()


PROTECTING = ("guard", "repeat")
"""Rules that hold a kernel against itself: what they count says nothing about what is right."""


def elements_compared(record: dict[str, Any]) -> int:
    """Elements of a record that were compared with what they should be, all stages together."""
    itself = (stage["compared"] for stage in record["stages"] if stage.get("rule") in PROTECTING)
    return int(record["compared"] - sum(itself))


def outcome(record: dict[str, Any]) -> str:
    """One of `OUTCOMES`: the verdict, unless the ledger of known failures knows the case."""
    if not record["known"]:
        return str(record["verdict"])
    return "unexpected" if record["verdict"] == "pass" else "known"


def succeeded(records: Iterable[dict[str, Any]]) -> bool:
    """Whether every case passed or failed as the ledger expects, none that it expects to fail passed, and something
    was compared."""
    records = list(records)
    return all(outcome(r) in ("pass", "known") for r in records) and any(elements_compared(r) for r in records)


def new_record(case: Case, *, backend: str, device: str, seed: int) -> Record:
    """The record of a case before anything was measured."""
    return Record(
        case=case.id, file=case.file, operation=case.operation, recipe=case.recipe,
        shape="x".join(map(str, case.shape)), dtype=case.dtype, inputs=case.inputs, flags="+".join(case.flags),
        tier=case.tier, backend=backend, device=device, seed=seed,
    )  # fmt: skip
