"""Hosts: objects that run the methods of a backend, in the judge's process or in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from narrowgauge.harness.cases.keys import Autograd

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.backends.module_driver import Plan, Step

Tensors = dict[str, "torch.Tensor"]


class HostLost(Exception):
    """The host of a case has ended, or was ended. The message says why.

    `verdict`: that of the case. `cause`: name of the explanation, if the reason is known. `stack`: the frames of the
    user's code at the end, innermost first, each on a line.
    """

    def __init__(self, verdict: str, message: str, *, cause: str = "", stack: str = "") -> None:
        super().__init__(message)
        self.verdict, self.cause, self.stack = verdict, cause, stack


@dataclass(frozen=True)
class Facts:
    """What a backend says of itself."""

    name: str
    methods: frozenset[str]
    """Its methods that operations call, and those that describe it (`harness.cases.operations`)."""
    declares: Any
    """Its attribute `declares`, unchecked."""
    offers: Any
    """Its attributes `dialects` and `constraints`, unchecked."""
    takes_shuffles: bool
    """Whether its `variations` has the argument `shuffles`."""


@dataclass
class CaseEnd:
    """State of a host after a case."""

    gpu_error: str = ""
    """Error of the GPU that was reported after the last result."""
    usable: bool = True
    """Whether the GPU still answers the host."""
    peak: int = 0
    """Largest GPU memory in bytes that torch allocated in the host during the case."""
    notes: list[dict[str, str]] = field(default_factory=list)
    """Observations with their causes: a changed rounding mode, processes left behind."""


class PreparedRun(Protocol):
    """A run on inputs between guard zones. The zones and all new memory hold a poison byte."""

    seconds: float
    """Seconds of the calls of the run."""

    def running(self, variation: int) -> AbstractContextManager[Tensors]:
        """Run under a variation, by number. Gives the inputs to pass to methods within the context."""

    def keep(self, outputs: Mapping[str, torch.Tensor]) -> Tensors:
        """The results of the run, in memory of the judge."""

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""


class Host(Protocol):
    """Runs the methods of a backend."""

    autograd: Autograd
    """How methods are called (`harness.cases.case.Case`)."""
    schedules: int
    """Number of thread shuffles to request from `variations`. 0: the backend's default."""
    aliases: list[dict[str, str]]
    """Results of the case that share memory with an input or with an earlier result: cause, sentence."""

    @property
    def reused(self) -> bool:
        """Whether a result of the case lies in memory of the first result of a method."""

    @property
    def facts(self) -> Facts:
        """The facts of the backend."""

    @property
    def device(self) -> torch.device | None:
        """Device of the backend. None: the device of its inputs."""

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running (`PreparedRun.running` takes their numbers). Raises BackendError."""

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method, on the device of the arguments. Raises Unsupported or BackendError."""

    def run_module(self, plan: Plan, given: Mapping[str, torch.Tensor]) -> list[Step]:
        """The steps of a module. Raises as `call` does."""

    def seed(self, random: object) -> None:
        """Seed torch's generators. A backend that uses these generators then repeats its draws."""

    def lock(self) -> AbstractContextManager[None]:
        """Context of several calls: the lock of the GPU, if this process has to hold it for them."""

    def prepare(self, inputs: Tensors, home: torch.device, poison: int) -> PreparedRun:
        """Place inputs of the device `home` between guard zones."""

    def repeat(
        self, kind: str, count: int, runs: Sequence[tuple[PreparedRun, PreparedRun]], call: Callable[[Tensors], Tensors]
    ) -> list[list[int]]:
        """Run prepared runs `count` times more (`backends.concurrency`), each a pair with the finished run on the same
        inputs. Gives for each run the numbers of the calls, from 1 on, that gave other bytes than the finished run.

        Raises as `call` does.
        """

    def overwritten(self) -> list[str]:
        """Methods of the case whose first result has other bytes now."""

    def begin_case(self, seconds: float, memory: int) -> None:
        """Begin a case of `seconds` at most, whose results have `memory` bytes at most."""

    def end_case(self) -> CaseEnd:
        """End a case."""
