"""A case on a backend: inputs, run, checks, record. No function of this module raises for a fault of a backend."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported, error_location
from narrowgauge.harness.backends.host import CaseEnd, HostLost
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.cost import KEPT, home_of, shortage
from narrowgauge.harness.diagnosis.search.work_limit import CASE, WorkLimit
from narrowgauge.harness.machine.float_environment import read_environment, require_default
from narrowgauge.harness.machine.gpu_lock import JUDGE_QUEUE, lock_gpu
from narrowgauge.harness.machine.process import wait_for_gpus_asleep
from narrowgauge.harness.machine.timing import CHECKS, PHASES, count_seconds, stopwatch
from narrowgauge.harness.records.record import STACK, Record, new_record
from narrowgauge.harness.running.judging import BETWEEN_RUNS, FurtherCases, explained, judge, two_runs

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.inputs.capture import Captured
    from narrowgauge.harness.inputs.inputs import Inputs
    from narrowgauge.harness.operations.stages.outcome import Outcome
    from narrowgauge.harness.running.save_failures import Keeper

    OnOutcome = Callable[[Inputs, Outcome], None]

COMPARING = ("exact", "bound", "boundary", "statistics", "scope")
"""Rules that compare results with expected values."""
_RESULTS = 1 << 28
"""Bytes that results may have beyond the memory of the case."""
_PART = 1 << 17
_WITHOUT_LIMIT = "narrowgauge show has no limit"
ALLCLOSE = 8e-3
"""The tolerance of Transformer Engine's own NVFP4 GEMM test, reported and never used for a verdict."""


class Examiner(Protocol):
    """Runs failing cases again (`harness.running.earlier_cases`)."""

    def examine(self, record: Record, case: Case, *, sharing: int, timeout: float, started: float) -> bool:
        """Run a failing case again in a kernel host of its own. Returns whether the case passes in this host."""


def run_case(
    case: Case,
    backend: Backend,
    *,
    device: str = "cpu",
    seed: int = 0,
    captures: Captured | None = None,
    inputs: Inputs | None = None,
    keeper: Keeper | None = None,
    earlier: Examiner | None = None,
    on_outcome: OnOutcome | None = None,
    sharing: int = 1,
    timeout: float = float("inf"),
    untrusted: bool = False,
    options: str = "",
    diagnosis: float = CASE,
) -> Record:
    """Run and judge one case on `device` ("cpu", "cuda"). `captures` holds the tensors of a case made from a file.

    `inputs` replace the inputs made from the seed. `keeper` shrinks and saves a failure; None: failures are not saved.
    `earlier` runs a failing case again in a kernel host of its own; None: nothing is said about earlier calls.
    `on_outcome` is called with the inputs and the outcome of a judged case. `sharing`: number of cases that share the
    false alarms of the run (`harness.checks.statistics.holm`). `timeout`: seconds for the calls of a backend in a host.
    `untrusted`: a failing case runs on the inputs of another seed, too, and equal results are a finding. `options`: the
    column of this name. `diagnosis`: work after which the search for causes stops, as of
    `harness.diagnosis.search.work_limit`.
    """
    started, busy = time.perf_counter(), time.process_time()
    record = new_record(case, backend=backend.name, device=device, seed=seed, options=options)
    record.declares = ", ".join(f"{key}: {value}" for key, value in sorted(backend.declares.items()))
    with_earlier = None
    if earlier is not None:
        with_earlier = partial(earlier.examine, record, case, sharing=sharing, timeout=timeout, started=started)
    home = home_of(case, device) if backend.device is not None else device
    _give_back_memory(device)
    if home == "cuda":
        import torch

        wait_for_gpus_asleep()
        torch.cuda.reset_peak_memory_stats()
    with stopwatch(home) as watch:
        try:
            require_default(read_environment())  # of the judge: a kernel cannot change it from its host
            backend.host.begin_case(timeout, case.memory + _RESULTS)
            _measure(
                record, case, backend, home, seed=seed, captures=captures, inputs=inputs, keeper=keeper,
                with_earlier=with_earlier, on_outcome=on_outcome, sharing=sharing, untrusted=untrusted,
                diagnosis=diagnosis,
            )  # fmt: skip
            end = backend.host.end_case()
            require_default(read_environment())
        except HostLost as lost:
            _lose(record, lost)
            end = CaseEnd()
        except (BackendError, RuntimeError) as error:  # the backend cannot be loaded again, or the judge rounds upward
            record.verdict, record.message = "error", str(error)
            end = CaseEnd()
    for phase in PHASES:
        setattr(record, f"seconds_{phase}", round(watch.seconds[phase], 6))
    _settle(record, end)
    if with_earlier is not None and record.verdict in ("error", "crash"):
        with_earlier()
    if device == "cuda":
        record.bytes_peak = end.peak + (torch.cuda.max_memory_allocated() if home == "cuda" else 0)
    record.seconds_total, record.seconds_core = time.perf_counter() - started, time.process_time() - busy
    return record


def _measure(
    record: Record,
    case: Case,
    backend: Backend,
    home: str,
    *,
    seed: int,
    captures: Captured | None,
    inputs: Inputs | None,
    keeper: Keeper | None,
    with_earlier: Callable[[], bool] | None,
    on_outcome: OnOutcome | None,
    sharing: int,
    untrusted: bool,
    diagnosis: float,
) -> None:
    """Fill the record of a case, with any outcome."""
    if problem := shortage(case, record.device):
        record.verdict, record.message = "error", problem
        return
    try:
        if reason := backend.offer.reason(case):
            raise Unsupported(f"backend {backend.name} {reason}")
        with count_seconds("inputs"):
            if inputs is None:
                inputs = make_case_inputs(case, seed=seed, captures=captures, device="cpu")
        record.input_digest = digest(inputs.tensors.values())
        # Copies to a GPU and from it take no time of the kernels of others: they are made outside of the turn.
        with count_seconds("inputs"):
            inputs = inputs.to(home)
        with lock_gpu(home, JUDGE_QUEUE):
            with count_seconds(CHECKS):
                outcome = judge(case, inputs, backend, sharing=sharing)
            _fill(record, outcome)
            record.notes += outcome.notes
            record.notes += [_seen_by_host(case, record.device)] if untrusted else []
        record.output_digest = digest(outcome.outputs.values())
        if on_outcome is not None:
            on_outcome(inputs, outcome)
        if record.verdict == "fail":
            _show_elements(record, case, inputs, outcome)
            outcome.aliases = backend.host.aliases
            with count_seconds("diagnosis"):
                again = partial(two_runs, case, inputs, outcome, backend, seed + 1) if untrusted else None
                alike = all(stage.passed for stage in outcome.stages if stage.stage in BETWEEN_RUNS)
                further = FurtherCases(case, inputs, backend, seed, brief=alike)
                limit = WorkLimit(diagnosis, remedy=_WITHOUT_LIMIT)
                record.explanations = explained(outcome, backend, runs=again, limit=limit, further=further)
                if limit.note:
                    record.notes.append({"cause": "diagnosis-stopped", "sentence": limit.note})
                if with_earlier is not None and with_earlier():
                    record.save_note = "not saved: the case passes alone"
                elif keeper is not None:
                    keeper.keep(record, case, inputs, outcome, backend)
    except Unsupported as error:
        record.verdict, record.message = "unsupported", str(error)
    except BackendError as error:
        record.verdict, record.message = "error", str(error)
    except HostLost:
        raise
    except Exception as error:  # a result that no check can read costs its own case, not the run
        record.verdict, record.message = (
            "error",
            f"cannot be judged: {type(error).__name__}: {error}{error_location(error)}",
        )


def _lose(record: Record, lost: HostLost) -> None:
    """Write the end of a host into the record of its case."""
    record.verdict, record.message = lost.verdict, f"{lost}{_before(record)}"
    record.explanations = []
    if lost.stack:
        record.notes.append({"cause": STACK, "sentence": f"innermost call first\n{lost.stack}"})
    if lost.cause:
        sentence = f"the kernel {lost}"
        record.explanations = [{"cause": lost.cause, "sentence": sentence, "stage": "memory", "exact": True}]


def _settle(record: Record, end: CaseEnd) -> None:
    """Write the state of the host after the case into its record: an error of the GPU that no result has shown."""
    record.notes += end.notes
    if end.gpu_error:
        words = "after the case the GPU reports" if end.usable else "the GPU no longer answers this process:"
        record.message = f"{words} {end.gpu_error}{_before(record)}"
        record.verdict = "error" if end.usable else "crash"
    if "OutOfMemory" in record.message and record.device == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _before(record: Record) -> str:
    """What was known of a case before its host was lost or its GPU reported an error, as the end of a sentence."""
    return f"; before that, {record.verdict}: {record.message.splitlines()[0]}" if record.message else ""


def _give_back_memory(device: str) -> None:
    """Free what torch keeps of a large case before: the processes of a run share a GPU and could fill it."""
    if device == "cuda":
        import torch

        if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def make_case_inputs(case: Case, *, seed: int, captures: Captured | None, device: str) -> Inputs:
    """The case's inputs, on `device`."""
    from narrowgauge.harness.operations.registry import make_inputs

    return make_inputs(case, seed=seed, captured=captures).to(device)


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """64 bits of BLAKE2 over the tensors' bytes; every NaN counts as the same one."""
    import torch

    from narrowgauge.harness.backends.guarded_memory import element_bytes

    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if tensor is None:
            continue
        # A part stays in a core's cache until its bytes are counted.
        for part in torch.split(tensor.detach().cpu().contiguous().view(-1), _PART):
            plain = part
            # The sum is NaN if a number is. It takes a tenth of the time of `isnan`. torch adds no FP8.
            if part.is_floating_point() and part.element_size() > 1 and bool(part.sum().isnan()):
                plain = part.masked_fill(part.isnan(), torch.nan)
            state.update(element_bytes(plain).numpy().data)
    return state.hexdigest()


def _seen_by_host(case: Case, device: str) -> dict[str, str]:
    """A note on evidence that only the kernel host sees. This evidence can fail a case, and proves no result right."""
    seen = ["writes beside temporary tensors"]
    seen.append("writes beside results" if device == "cuda" else "where the guard zones of results lie")
    seen.append("that a second call with equal inputs ran the kernel again")
    seen += [f"the {case.repeats} further calls"] if case.repeats else []
    return {"cause": "seen-by-host", "sentence": f"seen by the kernel host alone: {', '.join(seen)}"}


def _fill(record: Record, outcome: Outcome) -> None:
    if any(product.order.truncates for product in outcome.products) and "accumulator: " not in record.declares:
        record.declares = ", ".join(filter(None, [record.declares, "gemm_order: truncating"]))
    wrong = [s for s in outcome.stages if not s.passed]
    record.stages = [s.entry() for s in outcome.stages]
    record.compared = sum(s.compared for s in outcome.stages)
    record.mismatches = sum(s.mismatches for s in outcome.stages)
    record.findings = [s.finding for s in wrong if s.finding is not None]
    record.max_ulp = max((s.max_ulp for s in wrong if s.max_ulp is not None), default=None)
    bounded = [s for s in outcome.stages if s.rule == "boundary"]
    if any(s.compared for s in bounded):
        record.excused_share = sum(s.excused for s in bounded) / sum(s.compared for s in bounded)
    if any(s.rule == "statistics" for s in outcome.stages):
        record.draws = sum(s.draws for s in outcome.stages)
    for stage in outcome.stages:
        for name, value in stage.figures.items():
            setattr(record, name, value)
    if wrong:
        record.verdict, record.stage, record.message = "fail", wrong[0].stage, f"{wrong[0].stage}: {wrong[0].sentence}"
    elif not any(s.compared for s in outcome.stages if s.rule in COMPARING) and _size(record):
        record.verdict, record.message = "error", "nothing was compared"
    elif record.budget_max is not None and not record.budget_max <= 1:
        record.verdict, record.message = "error", f"passes with a budget of {record.budget_max:.3g}, above 1"
    record.accuracy = outcome.accuracy
    record.numbers = outcome.numbers
    record.seconds = outcome.seconds
    if outcome.actual is not None and outcome.expected is not None and outcome.actual.numel():
        for name, value in informative(outcome.actual, outcome.expected).items():
            setattr(record, name, value)


def _show_elements(record: Record, case: Case, inputs: Inputs, outcome: Outcome) -> None:
    """Add the elements around the first wrong one, as `narrowgauge show` prints them, to the first finding."""
    from narrowgauge.harness.operations.registry import operation_of

    if record.findings and (table := operation_of(case).show(inputs, outcome, None)):
        record.findings[0]["table"] = table.plain()


def _size(record: Record) -> bool:
    return all(int(extent) > 0 for extent in record.shape.split("x"))


def informative(actual: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """The figures of conventional tests; no verdict depends on it.

    allclose at 8e-3; signal over difference in dB (inf where equal); shares within a relative 1e-1 … 1e-6.
    """
    import torch

    from narrowgauge.harness.checks.row_chunks import row_chunks

    if actual is expected:
        return {"allclose": True, "sqnr_db": float("inf"), "sweep": [1.0] * 6}
    noise = signal = 0.0
    close, within = True, [0] * 6
    for rows in row_chunks(actual):
        a, e = actual[rows].double(), expected[rows].double()
        same = (a == e) | (a.isnan() & e.isnan())
        signal += float((e.nan_to_num(posinf=0.0, neginf=0.0) ** 2).sum())
        if bool(same.all()):
            within = [count + a.numel() for count in within]
            continue
        difference = torch.where(same, 0.0, (a - e).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
        noise += float((difference**2).sum())
        relative = difference / e.abs()
        near = (difference <= ALLCLOSE + ALLCLOSE * e.abs()) & torch.isfinite(difference)
        close = close and bool((near | same).all())
        within = [count + int(((relative <= 10.0**-n) | same).sum()) for n, count in enumerate(within, 1)]
    return {
        "allclose": close,
        "sqnr_db": float(10 * torch.log10(torch.tensor(signal / noise))) if noise else float("inf"),
        "sweep": [count / actual.numel() for count in within],
    }
