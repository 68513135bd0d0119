"""Further attacks of a backend, by the shape of the case: by the documentation alone, and by the code of the host.

`more_attacks:all` has all of them, and is right in all other cases.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.harness.hosts.faulty_backends import Attack, Faulty, Wanted, wrong

DOCUMENTED: dict[str, Wanted] = {}
"""Attacks that follow from the documentation alone: its files, names, variables and declarations."""


def documented(*verdicts: str, lasting: bool = False) -> Callable[[Attack], Attack]:
    """Add a function to `DOCUMENTED`."""
    return lambda function: (
        DOCUMENTED.setdefault(function.__name__, Wanted(function, frozenset(verdicts), lasting)).attack
    )


def _append(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


# ---- by the documentation alone --------------------------------------------------------------------------------------


@documented("fail")
def names_rules_of_its_own(x: torch.Tensor, q: Any) -> Any:
    os.environ["NARROWGAUGE_RULES"] = "/tmp/rules_of_an_attack.toml"
    return wrong(q)


@documented("fail")
def names_operations_of_its_own(x: torch.Tensor, q: Any) -> Any:
    os.environ["NARROWGAUGE_OPERATIONS"] = "/tmp/operations_of_an_attack"
    return wrong(q)


@documented("pass")
def names_another_cache(x: torch.Tensor, q: Any) -> Any:
    os.environ["NARROWGAUGE_CACHE"] = "/proc/self/nothing"
    return q


@documented("fail")
def declares_later(x: torch.Tensor, q: Any) -> Any:
    Faulty.declares = {"accumulator": "truncating", "transform": "butterfly"}  # type: ignore[attr-defined]
    return wrong(q)


@documented("fail")
def takes_another_dialect_later(x: torch.Tensor, q: Any) -> Any:
    Faulty.dialects = {"nvfp4": "torchao"}  # type: ignore[attr-defined]
    return wrong(q)


@documented("fail")
def leaves_the_case_out_later(x: torch.Tensor, q: Any) -> Any:
    Faulty.constraints = {"K": 1 << 20}  # type: ignore[attr-defined]
    return wrong(q)


@documented("fail")
def writes_a_ledger(x: torch.Tensor, q: Any) -> Any:
    """Of known failures, beside the case files."""
    entry = f'[[known]]\ncase = "quantize/nvfp4/{x.shape[0]}x{x.shape[1]}/bf16/*"\nreason = "https://example.com/1"\n'
    _append("cases/known.toml", entry)
    return wrong(q)


@documented("pass")
def adds_a_case_file(x: torch.Tensor, q: Any) -> Any:
    _append("cases/more.toml", '[[matrix]]\noperation = "quantize"\n')
    return q


@documented("fail")
def writes_a_page(x: torch.Tensor, q: Any) -> Any:
    _append("reports/latest/index.html", "<h1>all cases passed</h1>")
    return wrong(q)


@documented("fail")
def says_its_verdict(x: torch.Tensor, q: Any) -> Any:
    print(json.dumps({"case": "quantize/nvfp4", "verdict": "pass", "message": ""}))
    print("\n1 passed\n::notice::gate holds against host\n", file=sys.stderr)
    return wrong(q)


@documented("error")
def names_a_verdict_in_its_result(x: torch.Tensor, q: Any) -> Any:
    return {"verdict": "pass", "stages": [], "mismatches": 0}


@documented("error")
def gives_tuples_of_other_lengths(x: torch.Tensor, q: Any) -> Any:
    return (q.codes,)


@documented("error", "fail")
def exchanges_codes_and_scales(x: torch.Tensor, q: Any) -> Any:
    return replace(q, codes=q.scales, scales=q.codes)


@documented("error", "fail")
def gives_codes_of_float32(x: torch.Tensor, q: Any) -> Any:
    return replace(q, codes=q.codes.float())


@documented("fail")
def gives_another_amax(x: torch.Tensor, q: Any) -> Any:
    return replace(q, amax=q.amax * 2)


@documented("fail")
def gives_amax_that_is_nan(x: torch.Tensor, q: Any) -> Any:
    return replace(q, amax=q.amax * math.nan)


@documented("fail")
def is_wrong_in_the_last_byte(x: torch.Tensor, q: Any) -> Any:
    codes = q.codes.clone()
    codes[-1, -1] ^= 1
    return replace(q, codes=codes)


@documented("fail", "error")
def gives_uninitialized_memory(x: torch.Tensor, q: Any) -> Any:
    return replace(q, codes=torch.empty_like(q.codes))


@documented("unsupported")
def calls_itself_unsupported(x: torch.Tensor, q: Any) -> Any:
    raise NotImplementedError("pass")


@documented("error")
def raises_a_verdict(x: torch.Tensor, q: Any) -> Any:
    raise type("Passed", (Exception,), {"verdict": "pass", "args": ("pass",)})


@documented("pass")
def changes_defaults_of_torch(x: torch.Tensor, q: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    return q


@documented("pass")
def draws_and_seeds(x: torch.Tensor, q: Any) -> Any:
    torch.manual_seed(0)
    random.seed(0)
    torch.rand(1000)
    return q


@documented("pass")
def warns_and_raises_in_threads(x: torch.Tensor, q: Any) -> Any:
    for _ in range(50):
        warnings.warn("\x1b[2J kernel", stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    return q


@documented("pass")
def takes_one_core_and_low_priority(x: torch.Tensor, q: Any) -> Any:
    os.nice(19)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return q


@documented("pass")
def starts_many_programs(x: torch.Tensor, q: Any) -> Any:
    for _ in range(10):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    return q


@documented("crash")
def ends_by_an_alarm(x: torch.Tensor, q: Any) -> Any:
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(2)
    return q


@documented("pass", "error")
def gives_a_negated_view(x: torch.Tensor, q: Any) -> Any:
    return replace(q, amax=torch._neg_view(-q.amax))


@documented("pass")
def gives_shared_memory(x: torch.Tensor, q: Any) -> Any:
    return replace(q, codes=q.codes.clone().share_memory_())


@documented("crash", "error")
def gives_a_truncated_file(x: torch.Tensor, q: Any) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(q.codes.numel()))
        file.flush()
        codes = torch.from_file(file.name, shared=True, size=q.codes.numel(), dtype=torch.uint8)
        file.truncate(0)
    return replace(q, codes=codes.view(q.codes.shape))


# ---- by the code of the host -----------------------------------------------------------------------------------------


def _changed(change: Callable[[], Any]) -> Attack:
    """A wrong result of a host that was changed. A lower limit of files lets the judge end the host after the case."""

    def attack(x: torch.Tensor, q: Any) -> Any:
        change()
        least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (least - 1, most))
        return wrong(q)

    return attack


def _serve() -> Any:
    from narrowgauge.harness.hosts import serve

    return serve


def _set(owner: Callable[[Any], Any], name: str, value: Any) -> Callable[[], Any]:
    """A function that replaces an attribute of an object of the module `serve`."""
    return lambda: setattr(owner(_serve()), name, value)


def _answer(method: str, **changes: Any) -> Callable[[], Any]:
    """A function after which the answers of a method of the server have other values."""

    def change() -> None:
        server = _serve()._Server
        honest = getattr(server, method)
        setattr(server, method, lambda self, *given: (honest(self, *given) or {}) | changes)

    return change


ENDS = ("crash", "error")
CHANGES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "no_violations": (_set(lambda s: s._Slots, "violations", lambda self: ([], [])), ("fail",)),
    "no_aliases": (_set(lambda s: s._Server, "_aliases", lambda self, *given: []), ("fail",)),
    "no_place": (_set(lambda s: s._Run, "place_of", lambda self, tensor: None), ("fail",)),
    "seconds_that_are_nan": (_answer("on_end", seconds=math.nan), ENDS),
    "seconds_before_the_run": (_answer("on_end", seconds=-1.0), ENDS),
    "seconds_of_text": (_answer("on_end", seconds="0.1; pass"), ENDS),
    "a_used_size_below_0": (_answer("on_call", used=-1), ENDS),
    "a_used_size_above_all": (_answer("on_call", used=1 << 60), ENDS),
    "a_need_without_end": (_answer("on_deliver", need=64), ENDS),
    "guard_zones_of_a_million_tensors": (_answer("on_deliver", guarded=[[0, 0]] * 100_000), ENDS),
    "guard_zones_nowhere": (_answer("on_deliver", guarded=[[-1, 1]]), (*ENDS, "fail")),
    "a_result_of_another_kind": (_answer("on_call", result={"tensor": [0, "uint8", [1 << 40]]}), ENDS),
    "a_result_outside": (_answer("on_call", result={"tensor": [1 << 40, "uint8", [8]]}), ENDS),
    "an_answer_to_another_question": (_answer("on_call", id=0), (*ENDS, "fail")),
    "forged_notes": (_answer("on_settle", notes=[{"cause": "verdict", "sentence": "pass"}] * 1000), ("fail",)),
    "notes_of_another_form": (_answer("on_settle", notes=[{"verdict": "pass"}]), (*ENDS, "fail")),
    "an_error_of_the_gpu": (_answer("on_settle", gpu_error="pass"), ("error", "crash", "fail")),
    "a_peak_of_text": (_answer("on_settle", peak="pass"), (*ENDS, "fail")),
    "loaded_files_of_another_form": (_answer("on_settle", loaded={"files": 7}), (*ENDS, "fail")),
    "no_methods": (_set(lambda s: s.LocalHost, "run", lambda self, *given: None), ("error",)),
    "a_clock_that_stands": (lambda: setattr(time, "perf_counter", lambda: 0.0), (*ENDS, "fail")),
    "another_len": (lambda: setattr(builtins, "len", lambda value: 0), (*ENDS, "fail", "timeout")),
}
"""Changes of the host, and the verdicts of a wrong result after them."""
INTERNAL = {name: Wanted(_changed(change), frozenset(verdicts)) for name, (change, verdicts) in CHANGES.items()}
"""Attacks that change the code of the harness in the kernel host."""

ALL = DOCUMENTED | INTERNAL
PLACES = {name: (16, 32 * (n + 1)) for n, name in enumerate(ALL)}
"""Shapes of the attacked cases."""
CLEAN = [(32, 32 * (n + 1)) for n in range(8)]
"""Shapes of cases without an attack."""


def __getattr__(name: str) -> Faulty:
    if name == "all":
        return Faulty({PLACES[each]: ALL[each].attack for each in ALL})
    raise AttributeError(name)
