"""Messages to a kernel host, and their answers. A host is lost if it ends, hangs or writes bytes that are no message.

The transport announces the end of a process to the owners of its memory, which free the memory: the transport knows no
memory itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.hosts import codec
from narrowgauge.harness.hosts.frames import FrameError
from narrowgauge.harness.hosts.output import Stack
from narrowgauge.harness.hosts.remote.process import HostProcess
from narrowgauge.harness.hosts.starter import Channel, StarterError
from narrowgauge.harness.machine.process import ending
from narrowgauge.harness.machine.timing import count_as_other

_END = 5.0
"""Seconds for the end of a host after its connection is closed."""


class Interpreter(Protocol):
    """An interpreter of its own for a host."""

    variables: dict[str, str]
    """Environment variables of its start."""

    def finding(self, process: int) -> str:
        """Reason of the interpreter for the end of a process. Empty without a reason."""


class Transport:
    """Sends messages to a host. The first message after the end of a host starts a new host."""

    def __init__(
        self,
        channel: Channel,
        marker: str,
        interpreter: Interpreter | None,
        hidden: Sequence[str] | None,
        gpu: str = "",
    ) -> None:
        """`marker`: name of the shared memory. `interpreter`: of the host; None: the host is a fork. `hidden`, `gpu`:
        as of `Channel.start`."""
        self.process: HostProcess | None = None
        self.orphaned = False
        """Whether the process that starts the hosts has ended: a backend can kill its parent."""
        self.seconds, self.deadline = 0.0, float("inf")
        self.on_start: Callable[[], None] = lambda: None
        """Called after the start of a process. Raises BackendError if the host cannot be used."""
        self.on_end: list[Callable[[], None]] = []
        """Called at the end of a process."""
        self.lost_at = 0.0
        """When the last process was found to be lost (time.monotonic); 0 while it runs."""
        self.input_at: Callable[[Any], str] = lambda offset: "its inputs"
        """Name of the input at a byte of the shared memory to which the host wrote."""
        self._channel, self._marker, self._interpreter, self._hidden = channel, marker, interpreter, hidden
        self._gpu = gpu
        self._outbox: list[dict[str, Any]] = []
        self._asked = 0
        self._problem = ""
        """Reason why the backend cannot be loaded."""

    def expect(self, seconds: float) -> None:
        """Set the seconds that all answers may take from now on."""
        self.seconds, self.deadline = seconds, time.monotonic() + seconds

    def start(self) -> HostProcess:
        """The process of the host, started on first use. Raises BackendError, also again after a failed start."""
        if self.process is not None:
            return self.process
        try:
            if self._problem:
                raise BackendError(self._problem)
            variables = self._interpreter.variables if self._interpreter else None
            self._outbox, self.lost_at = [], 0.0
            self.process = HostProcess(self._channel, self._marker, variables, self._hidden, self._gpu)
            self.on_start()
        except (StarterError, BackendError) as error:
            self.orphaned |= isinstance(error, StarterError)
            self._problem = str(error)
            raise BackendError(self._problem) from error
        return self.process

    def close(self, *, wait: float = 0.0, keeps_stacks: bool = False) -> int | None:
        """End the process, after `wait` seconds, and its descendants. Gives its exit status. `keeps_stacks`: do not
        close the file of its stacks."""
        if self.process is None:
            return None
        process, self.process = self.process, None
        for free in self.on_end:
            free()
        try:
            return process.end(wait=wait)
        except StarterError:
            self.orphaned = True
            return None
        finally:
            if not keeps_stacks:
                process.stacks.close()

    def abandon(self) -> None:
        """Forget a process that ended together with a second host."""
        process, self.process = self.process, None
        if process is not None:
            for free in self.on_end:
                free()
            process.close()
            process.stacks.close()

    def lose(self, verdict: str, message: str = "", *, cause: str = "") -> HostLost:
        """The exception for a host ended now. Without a message: how the process ended. The message of a host
        without a result, or after a crash, has the line of the user."""
        process, self.lost_at = self.process, time.monotonic()
        if verdict == "timeout" and process is not None:
            process.stacks.ask(process.pid)
        status = self.close(wait=0.0 if message else _END, keeps_stacks=True)
        stack = Stack()
        if process is not None:
            stack = process.stacks.read() if verdict in ("crash", "timeout") else stack
            process.stacks.close()
            if self._interpreter is not None and (found := self._interpreter.finding(process.pid)):
                return HostLost("crash", f"sanitizer: {found}")
        if self.orphaned and not message:
            return HostLost(verdict, "the process died, and so did the process that starts kernel hosts")
        message = message or f"the process died ({ending(status)})"
        place = f" at {stack.place}" if stack.place else ""
        return HostLost(verdict, f"{message}{place}", cause=cause, stack=stack.frames)

    def post(self, message: dict[str, Any]) -> None:
        """Send a message without an answer, together with the next message: each wakes the host."""
        self.start()
        self._outbox.append(message)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message without an answer."""
        connection = self.start().connection
        messages, self._outbox = [*self._outbox, message], []
        try:
            if descriptors and len(messages) > 1:
                connection.send(*messages[:-1], deadline=self.deadline)
                messages = messages[-1:]
            connection.send(*messages, descriptors=descriptors, deadline=self.deadline)
        except TimeoutError:
            raise self.lose("timeout", self.too_late) from None
        except FrameError:
            raise self.lose("crash") from None

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """The answer to a message. Raises HostLost without an answer."""
        asked = time.monotonic()
        self._asked += 1
        self.send(message | {"id": self._asked}, descriptors)
        assert self.process is not None
        connection = self.process.connection
        while connection not in (news := self.process.news(self.deadline)):
            if not news:
                raise self.lose("timeout", self.too_late)
            if self.process.ended(news):
                raise self.lose("crash")
        try:
            answer, descriptors = connection.receive(deadline=self.deadline)
        except TimeoutError:
            raise self.lose("timeout", self.too_late) from None
        except FrameError as error:
            words = f"the backend wrote into the connection of its process: {error}"
            raise self.lose("crash", "" if "clos" in str(error) else words) from None
        for descriptor in descriptors:
            os.close(descriptor)
        waited = answer.get("waited")
        if isinstance(waited, float) and 0 < waited < time.monotonic() - asked:
            count_as_other(waited)
        if "fault" in answer:
            place = self.input_at(answer["fault"])
            raise self.lose("error", f"writes to its input: {place}", cause="changes-its-input")
        if answer.get("id") != self._asked:
            raise self.lose("crash", "the backend wrote into the connection of its process: a false answer")
        return answer

    @contextmanager
    def reading(self, noun: str) -> Iterator[None]:
        """Read an answer. The host is ended if the answer cannot be read."""
        try:
            yield
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            words = f"the process of the backend sent {noun} that cannot be read: {type(error).__name__}: {error}"
            raise self.lose("crash", words[: codec.TEXT]) from error

    @property
    def too_late(self) -> str:
        """The message for a host without an answer."""
        return f"no result after {self.seconds:g} s"


def number_of_bytes(number: Any) -> int:
    """A number of bytes of an answer. Raises ValueError if it is none."""
    if not isinstance(number, int) or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} bytes")
    return number
