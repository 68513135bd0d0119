"""Judging every n-th call of a custom op or Python function in a running program."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from narrowgauge.harness.api.assertions import assert_quantized
from narrowgauge.harness.api.function_backend import name_of_function
from narrowgauge.harness.api.judging.judge_call import judge_of
from narrowgauge.harness.checks.distance import format_count
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.watch.copies import HostCopy, copied, map_tensors, reason_not_to_judge
from narrowgauge.harness.watch.judge_process import JudgeProcess
from narrowgauge.harness.watch.replaced import Call, Names, replace
from narrowgauge.spec.quantized import Quantized

Adapter = Callable[..., Mapping[str, Any] | None]
MOST_FAILURES = 16
"""Failures whose reports are kept; all failures are counted."""
MOST_ERRORS = 4
"""Texts of different errors of the watcher that are kept."""


@dataclass(frozen=True)
class Failure:
    """A call with a wrong result."""

    call: int
    """Number of the call, from 1."""
    report: str
    """The report of the assertion. It ends with `reproduction`."""
    reproduction: str
    """A shell command that repeats the failure on the saved arguments, or the reason for having none."""


class watch:
    """Judge every n-th call of a custom op or Python function with its real inputs, in a process beside the program.

    `with narrowgauge.watch(torch.ops.lib.quantize, adapter, every=1000) as watched:` watches the calls in the block, of
    all threads. `start()` and `stop()` do the same without a block.

    function: `torch.ops.lib.name`, an overload of it, a function of `torch.library.custom_op`, or a Python function of
    a module or class. Kernels for CPU and CUDA are watched; fake kernels, gradients and all further ops are unchanged.
    adapter: function `adapter(result, *args, **kwargs)` that returns the arguments of the assertion by name, or None to
    skip the call. `args` and `kwargs` have the tensors of before the call. `result` is the result of the call; for a
    result of None, it is a dict of the arguments by name, after the call. Without an adapter, `x` is the first tensor
    argument, and the result is (codes, scales), (codes, scales, amax), a mapping with these keys, or a Quantized.
    every: the calls 1, 1 + every, 1 + 2·every, … are judged.
    assertion: an assertion of narrowgauge.
    pending: calls that are copied and not yet judged. Further calls are dropped and counted.
    wait: seconds that `stop` waits for the calls not yet judged.
    options: arguments of the assertion equal in every call, for example `recipe` and `layout`.

    Inputs are copied before the call and arguments of the assertion after it. A GPU's tensors are copied on the current
    stream; the judge works on a CPU. Errors of the watcher, also of the adapter, are counted and never reach the
    program; exceptions of the function pass unchanged. `stop` prints the summary to stderr if a call failed or the
    watcher had an error.

    Raises TypeError for arguments that the assertion does not have and for an assertion or function of another kind,
    ValueError for numbers out of range and, at the start, for a function that no module has.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        adapter: Adapter | None = None,
        *,
        every: int = 1000,
        assertion: Callable[..., None] = assert_quantized,
        pending: int = 4,
        wait: float = 60.0,
        **options: Any,
    ) -> None:
        for name, value in (("every", every), ("pending", pending)):
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if adapter is None and assertion is not assert_quantized:
            raise TypeError("an assertion other than assert_quantized needs an adapter, which names its arguments")
        judge = judge_of(assertion)
        self._parameters = inspect.signature(judge).parameters
        self._name = judge.__name__
        self._check(options)
        self._function, self._adapter = function, adapter or _default_adapter
        self._every, self._pending, self._wait, self._options = every, pending, wait, options
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._busy = threading.local()
        self._calls = 0
        self._counts: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._judge: JudgeProcess | None = None
        self._replaced: ExitStack | None = None
        self.failures: list[Failure] = []
        """The first 16 failures, in order of their judgement."""

    def start(self) -> watch:
        """Begin to watch. Raises RuntimeError if it has begun already."""
        if self._replaced is not None:
            raise RuntimeError("this watch has started already; stop it first, or make another one")
        self._judge = JudgeProcess(self._name, self._pending, self._answered)
        self._replaced = replace(self._function, self)
        return self

    def stop(self) -> bool:
        """Put the function back, wait for the calls not yet judged, and end the judging process; whether the summary
        was printed."""
        if self._replaced is None or self._judge is None:
            return False
        self._replaced.close()
        self._replaced = None
        self._judge.close(self._wait)
        printed = bool(self._counts["failed"] or self._errors)
        if printed:
            print(self.summary(), file=sys.stderr)
        return printed

    __enter__ = start

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def calls(self) -> int:
        """Calls seen so far."""
        return self._calls

    @property
    def failed(self) -> int:
        """Calls with a wrong result."""
        return self._counts["failed"]

    @property
    def judged(self) -> int:
        """Calls with a verdict."""
        return self._counts["passed"] + self._counts["failed"]

    @property
    def dropped(self) -> int:
        """Calls that were to be judged when the judge had no place."""
        return self._counts["dropped"]

    def summary(self) -> str:
        """Counts of calls, the calls not judged with their reasons, and the reports of the failures."""
        with self._lock:
            waiting = self._counts["taken"] - self.judged - self._counts["errors"]
            lines = [
                f"watch {name_of_function(self._function)}: {format_count(self._calls)} calls, "
                f"{format_count(self.judged)} judged, {format_count(self.failed)} failed"
            ]
            if self.dropped:
                lines.append(f"{format_count(self.dropped)} dropped: the judge was behind; every={self._every}")
            lines += [f"{format_count(count)} not judged: {reason}" for reason, count in self._skipped.items()]
            if waiting:
                lines.append(f"{format_count(waiting)} without a verdict yet")
            lines += [f"{format_count(count)} with an error: {text}" for text, count in self._errors.items()]
            for failure in self.failures:
                lines += ["", f"call {failure.call}:", failure.report]
        return escape("\n".join(lines))

    # ---- calls -------------------------------------------------------------------------------------------------------

    def counted(self) -> int:
        with self._lock:
            self._calls += 1
            number = self._calls
        return number if (number - 1) % self._every == 0 else 0

    def observed(self, number: int, call: Call, names: Names, args: Any, kwargs: Any) -> Any:
        before = self._before(args, kwargs)
        if before is None:
            return call(*args, **kwargs)
        assert self._judge is not None
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self._judge.release()
            with self._lock:
                self._skipped["the function raised an exception"] += 1
            raise
        self._after(number, result, before, lambda: names(args, kwargs))
        return result

    def _before(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Copies of the arguments, and a place at the judge; None for a call without a judgement."""
        judge = self._judge
        if judge is None or getattr(self._busy, "adapting", False) or os.getpid() != self._process_id:
            return None
        reserved = False
        try:
            with torch.no_grad():
                if reason := reason_not_to_judge(args, kwargs):
                    with self._lock:
                        self._skipped[reason] += 1
                    return None
                reserved = judge.reserve()
                if not reserved:
                    with self._lock:
                        self._counts["dropped"] += 1
                    return None
                return copied(args), copied(kwargs)
        except Exception as error:
            if reserved:
                judge.release()
            self._failed_itself(error)
            return None

    def _after(self, number: int, result: Any, before: tuple[Any, Any], names: Callable[[], Mapping[str, Any]]) -> None:
        judge = self._judge
        assert judge is not None
        self._busy.adapting = True
        try:
            with torch.no_grad():
                if result is None:
                    result = names()
                arguments = self._adapter(result, *before[0], **before[1])
                if arguments is None:
                    judge.release()
                    with self._lock:
                        self._skipped["the adapter returned None"] += 1
                    return
                arguments = {**self._options, **arguments}
                self._check(arguments)
                copy = HostCopy(arguments)
            with self._lock:
                self._counts["taken"] += 1
            judge.submit(number, copy)
        except Exception as error:
            judge.release()
            self._failed_itself(error)
        finally:
            self._busy.adapting = False

    def _answered(self, number: int, reply: Mapping[str, Any]) -> None:
        with self._lock:
            if "failed" in reply:
                self._counts["failed"] += 1
                if len(self.failures) < MOST_FAILURES:
                    self.failures.append(Failure(number, reply["failed"], reply["reproduction"]))
            elif "error" in reply:
                self._counts["errors"] += 1
                self._keep_error(reply["error"])
            else:
                self._counts["passed"] += 1

    def _failed_itself(self, error: Exception) -> None:
        with self._lock:
            self._keep_error(f"{type(error).__name__}: {error}")

    def _keep_error(self, text: str) -> None:
        """Count an error. The lock is held."""
        self._errors[text if text in self._errors or len(self._errors) < MOST_ERRORS else "other errors"] += 1

    def _check(self, arguments: Mapping[str, Any]) -> None:
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            return  # the tensors of a contract
        if unknown := arguments.keys() - self._parameters.keys():
            known = ", ".join(sorted(self._parameters))
            raise TypeError(f"{self._name} has no argument {', '.join(sorted(unknown))}; it has {known}")


def _default_adapter(result: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of `assert_quantized` from the result of a quantizer."""
    tensors: list[torch.Tensor] = []
    map_tensors((args, kwargs), tensors.append)
    if not tensors:
        raise TypeError("the call has no tensor argument; give an adapter")
    parts: dict[str, Any] = {"x": tensors[0]}
    if isinstance(result, Quantized):
        found = {name: getattr(result, name) for name in ("codes", "scales", "amax", "tensor_scale", "recipe")}
        return parts | found | {"layout": result.scale_layout}
    if isinstance(result, (tuple, list)) and 2 <= len(result) <= 3:
        result = dict(zip(("codes", "scales", "amax"), result, strict=False))
    if not isinstance(result, Mapping) or not {"codes", "scales"} <= result.keys():
        raise TypeError(
            f"the result is a {type(result).__name__}; without an adapter it is (codes, scales), "
            "(codes, scales, amax), a mapping with these keys, or a Quantized"
        )
    return parts | {name: result[name] for name in ("codes", "scales", "amax", "tensor_scale") if name in result}
