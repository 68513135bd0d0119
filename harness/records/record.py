"""Records: all measurements of a case on a backend, a row of a table.

The columns are the schema of the Parquet and CSV tables; docs/schema.md explains them. `SCHEMA` is raised with every
change of a column, or of the keys inside a column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.machine.plain_text import plain_value

SCHEMA = 13
VERDICTS = ("pass", "fail", "error", "crash", "timeout", "unsupported")
"""pass: correct. fail: a result is wrong. error: the backend raised an exception, or returned an invalid result. crash:
the process died. timeout: the case did not end in time. unsupported: the backend does not support the case."""
OUTCOMES = (*VERDICTS, "unexpected", "known")
"""Verdicts combined with the ledger (`harness.gate.ledger`). known: an expected failure. unexpected: a pass of a case
expected to fail by the ledger."""


@dataclass
class Record:
    """A row. Figures that were not measured are None, never 0."""

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
    """First wrong stage."""
    message: str = ""
    """One sentence: how many elements, how far, and their place; or why the case has no result."""
    known: str = ""
    """Reason and issue link of the ledger entry of this failure. Empty without an entry, or if the case
    failed in another way."""
    compared: int = 0
    """Compared elements of all stages."""
    mismatches: int = 0
    """Wrong elements of all stages."""
    max_ulp: int | None = None
    """Largest distance of a wrong element, in steps of its own format."""
    exact_share: float | None = None
    """Share of outputs in docs/tolerance.md#exact-sums: any order of summation gives the same bits."""
    ordered_share: float | None = None
    """Share of outputs in tier 1: judged by the declared order of summation of the backend. The rest is in tier 2."""
    excused_share: float | None = None
    """Share of elements accepted by docs/tolerance.md#boundary whose bytes differ from the reference's order."""
    outside_share: float | None = None
    """Share of GEMM outputs outside the bounds of the reference's own operands, end to end; part of no verdict. 0 if
    operands and product are right. A wrong operand shows here, and fails at its own stage."""
    p_value: float | None = None
    """Smallest p-value of the statistical tests (docs/tolerance.md#boundary and #stochastic-rounding), adjusted for
    their number. A correct kernel falls below q in at most a share q of cases."""
    draws: int | None = None
    """Number of tested roundings with the backend's own random bits."""
    budget_max: float | None = None
    """Largest |out - centre| / budget of a GEMM. At most 1 for a correct kernel."""
    budget_p99: float | None = None
    budget_histogram: list[int] = field(default_factory=list)
    """GEMM outputs by used budget: ten bins of width 0.1, then a bin above 1."""
    interval_ulps_max: int | None = None
    """Widest accepted interval, in ulps of the output. A wide interval is a weak test."""
    interval_ulps_mean: float | None = None
    allclose: bool | None = None
    """For information: result of allclose(rtol=8e-3, atol=8e-3) on the values; for a GEMM end to end."""
    sqnr_db: float | None = None
    """For information: signal over difference between the kernel's and the reference's values; inf if they are
    equal."""
    sweep: list[float] = field(default_factory=list)
    """For information: share of values within a relative 1e-1, 1e-2, … 1e-6 of the reference's values."""
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    """For information: accuracy cost of quantizing. For a module an entry each for y, dx and dw of the last step
    against the same unquantized inputs in float64: tensor, sqnr_db, relative_error, cosine
    (`harness.operations.modules.accuracy`)."""
    numbers: str = ""
    """For information: scales, codes and sides of rounding boundaries that the inputs reach, as bit sets
    (`harness.inputs.reached`). Empty for other operations than a rowwise quantize with byte scales."""
    seconds: float | None = None
    """First call of the backend's operation, including compilation in this call."""
    seconds_inputs: float | None = None
    """Part of `seconds_total`, like the next four columns: the phases of `harness.machine.timing.PHASES`."""
    seconds_backend: float | None = None
    seconds_reference: float | None = None
    seconds_checks: float | None = None
    seconds_diagnosis: float | None = None
    seconds_total: float | None = None
    """Total time of the case. Cases are divided into shards by it (`harness.running.shard`)."""
    seconds_core: float | None = None
    """Processor time of all threads of the process during `seconds_total`."""
    bytes_peak: int | None = None
    """Largest GPU memory allocated by torch during the case, with the inputs."""
    input_digest: str = ""
    output_digest: str = ""
    """Digest of the bytes returned by the backend: equal on two machines if the results are equal."""
    stages: list[dict[str, Any]] = field(default_factory=list)
    """An entry for each stage: stage, rule, compared, mismatches, max_ulp, excused, sentence (empty if correct)."""
    explanations: list[dict[str, Any]] = field(default_factory=list)
    """Explanations of the first wrong stage, best first: cause, sentence, stage, exact (`harness.diagnosis`)."""
    shrunk: str = ""
    """Smallest shape with the same failure on a part of the inputs. Empty if no smaller shape fails, or if the
    search was not made: it is made for the first failure of a kind in a process."""
    saved: str = ""
    """Path of the saved inputs, of that shape, with the results of kernel and reference
    (`harness.records.saved_failure`)."""
    save_note: str = ""
    """Why a failure was not shrunk or saved."""
    options: str = ""
    """Further options of the `narrowgauge show` that runs the case as this run did: `--schedules 4`, or `--after` and
    the id of an earlier case. The words are quoted for a shell."""
    declares: str = ""
    """Declarations of the backend about its results (`harness.backends.backend`): `accumulator: truncating`; of the
    product
    of this case, `gemm_order: truncating`. Verdicts depend on it."""
    baseline: str = ""
    """Figures of the baseline of this device, backend and seed, for a case that did not pass."""
    notes: list[dict[str, Any]] = field(default_factory=list)
    """Observations that change no verdict: cause, sentence. For example a rounding mode changed by the backend, or
    processes left behind."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """An entry for each wrong stage, for people (`harness.checks.finding`)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values only: the record crosses processes and is written as JSON. Text is escaped and cut
        (`harness.machine.plain_text`)."""
        # Messages, stages and findings can contain text of the backend.
        return {name: plain_value(getattr(self, name)) for name in _COLUMNS}


_COLUMNS = tuple(column.name for column in fields(Record))


NESTED = ("budget_histogram", "sweep", "accuracy", "stages", "explanations", "notes", "findings")
"""Columns with lists: JSON in Parquet, omitted from CSV."""
ENTRIES = {
    "accuracy": ("tensor", "sqnr_db", "relative_error", "cosine"),
    "stages": ("stage", "rule", "compared", "mismatches", "max_ulp", "excused", "unbounded", "sentence"),
    "explanations": ("cause", "sentence", "stage", "exact"),
    "notes": ("cause", "sentence"),
    "findings": ("stage", "rule", "sentence", "elements", "modulo", "heat", "steps", "census", "table"),
}
"""Keys of the entries in columns with objects."""

STATE_BETWEEN_CALLS = "state-between-calls"
"""Cause of a failure that a kernel host of its own does not show, and shows after earlier cases."""
PASSES_ALONE = "passes-alone"
"""Cause of a failure that a kernel host of its own does not show, after earlier cases neither."""
STACK = "stack"
"""Cause of the note with the stack of a host that crashed or gave no result in time."""
PROTECTING = ("guard", "repeat")
"""Rules that compare a kernel with itself. Their counts prove no correctness."""


def elements_compared(record: dict[str, Any]) -> int:
    """Number of elements of a record compared with an expected value, in all stages."""
    itself = [stage["compared"] for stage in record["stages"] if stage.get("rule") in PROTECTING]
    return int(record["compared"] - sum(itself))


def outputs_of(record: dict[str, Any]) -> int:
    """Number of elements of a record compared with the bound of a sum: the outputs of a product."""
    return sum([stage["compared"] for stage in record["stages"] if stage["rule"] == "bound"])


def outcome(record: dict[str, Any]) -> str:
    """One of `OUTCOMES`: the verdict, unless the ledger of known failures lists the case."""
    if not record["known"]:
        return str(record["verdict"])
    return "unexpected" if record["verdict"] == "pass" else "known"


def succeeded(records: Iterable[dict[str, Any]], *, strict: bool = False) -> bool:
    """Whether at least one case passed with compared elements, and no case failed beside the expected failures of the
    ledger. An unsupported case is a failure only if `strict`."""
    records = list(records)
    accepted = ("pass", "known") if strict else ("pass", "known", "unsupported")
    passed = any(elements_compared(record) for record in records if record["verdict"] == "pass")
    return passed and all(outcome(record) in accepted for record in records)


def new_record(case: Case, *, backend: str, device: str, seed: int, options: str = "") -> Record:
    """Record of a case before any measurement."""
    return Record(
        case=case.id, file=case.file, operation=case.operation, recipe=case.recipe_label,
        shape=case.shape_label, dtype=case.dtype_label, inputs=case.inputs, flags="+".join(case.flags),
        tier=case.tier_on(device), backend=backend, device=device, seed=seed, options=options,
    )  # fmt: skip
