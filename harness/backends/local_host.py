"""A backend in the process of its judge: for a debugger, for assertions in a test, and inside a kernel host."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from narrowgauge.harness.backends.host import CaseEnd, Facts, PreparedRun, Tensors
from narrowgauge.harness.backends.loading import error_location
from narrowgauge.harness.backends.results import (
    BackendError,
    Unsupported,
    checked_conventions,
    read_conventions,
)
from narrowgauge.harness.backends.transfer import KeptResults, tensors_in, to_device
from narrowgauge.harness.cases.keys import Autograd
from narrowgauge.harness.cases.methods import Method
from narrowgauge.harness.cases.operations import every_method
from narrowgauge.harness.machine.float_environment import changes, read_environment, restore
from narrowgauge.harness.machine.gpu_lock import lock_gpu, pop_gpu_error, probe_gpu
from narrowgauge.spec.kv_cache import Cache
from narrowgauge.spec.scale_layouts import LINEAR, TILES

if TYPE_CHECKING:
    import torch

    from narrowgauge.harness.backends.module_driver import Plan, Step
    from narrowgauge.spec.quantized import Quantized

Variation = Callable[[], AbstractContextManager[Any] | None]


class LocalHost:
    """Runs the methods of an object of this process."""

    def __init__(
        self,
        name: str,
        implementation: Any,
        device: torch.device | None = None,
        schedules: int = 0,
        *,
        restores: bool = True,
        methods: Mapping[str, Method] | None = None,
    ) -> None:
        """`restores`: whether the floating-point environment is restored after each call, because the judge shares the
        process. A kernel host restores nothing: there the backend runs as in production. `methods`: methods of
        operations, and methods that describe a backend. None: of all operations."""
        self._restores = restores
        self.autograd: Autograd = "plain"
        self._notes: list[dict[str, str]] = []
        self.implementation, self.device, self.schedules = implementation, device, schedules
        self._methods = every_method() if methods is None else methods
        has = [method for method in self._methods if callable(getattr(implementation, method, None))]
        says = partial(_attribute, name, implementation)
        self.facts = Facts(
            name, frozenset(has), says("declares", {}), (says("dialects", None), says("constraints", {})),
            takes_shuffles=_takes_shuffles(says("variations", None)),
        )  # fmt: skip
        declared = says("conventions", None)
        self._conventions = None if declared is None else checked_conventions(name, declared)
        self.aliases: list[dict[str, str]] = []
        self._kept = KeptResults()
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._variations: list[Variation] = []

    def variations(self, device: torch.device) -> list[str]:
        """Names of the ways of running, as `Host.variations`."""
        variations: dict[str, Variation] = {"first run": contextlib.nullcontext, "second run": contextlib.nullcontext}
        if callable(function := getattr(self.implementation, "variations", None)):
            try:
                variations = dict(function(device, **({"shuffles": self.schedules} if self.schedules else {})))
            except Exception as error:
                raise BackendError(
                    f"variations raised {type(error).__name__}: {error}{error_location(error)}"
                ) from error
            if wrong := [name for name, context in variations.items() if not callable(context)]:
                raise BackendError(f"variations gave {wrong[0]!r} without a function that returns its context")
            if not variations:
                raise BackendError("variations gave none; it names at least one way of running, or is left out")
            if len(variations) == 1:  # a single run shows no change of bytes
                ((name, only),) = variations.items()
                variations[f"{name}, second run"] = only
        self._variations = list(variations.values())
        return list(variations)

    def variation(self, number: int) -> AbstractContextManager[Any]:
        """Context of a variation, by number."""
        return self._variations[number]() or contextlib.nullcontext()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method, on the device of its first tensor."""
        first = next(tensors_in((arguments, options)), None) if self.device is not None else None
        if first is None or self.device is None or first.device.type == self.device.type:
            return self._kept_result(method, *arguments, **options)
        with lock_gpu(self.device.type):
            arguments, options = to_device((arguments, options), self.device)
            return to_device(self.call_on_device(method, *arguments, **options), first.device)

    def call_on_device(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method. Arguments and result are on the device of the backend."""
        assert self.device is not None
        result = self._kept_result(method, *arguments, **options)
        for tensor in tensors_in(result):
            if tensor.device.type != self.device.type:
                raise BackendError(f"{method} gave a tensor on {tensor.device}; its input is on {self.device}")
        return result

    def _kept_result(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method; the first of a case is kept."""
        result = self.run(method, getattr(self.implementation, method), *arguments, **options)
        results = list(tensors_in(result))
        if self._kept.see(method, results, tensors_in((arguments, options))):
            self._copies[method] = [tensor.detach().clone() for tensor in results]
        return result

    @property
    def reused(self) -> bool:
        """Whether a result of the case lies in memory of the first result of a method."""
        return self._kept.reused

    def overwritten(self) -> list[str]:
        """As `Host.overwritten`."""
        pairs = {method: zip(found, self._copies[method], strict=True) for method, found in self._kept.first.items()}
        return [method for method, found in pairs.items() if any(not _same_bytes(now, then) for now, then in found)]

    def run(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The result of a function of the backend: a method, or a method of a module. Raises as `call` does.

        A function without an argument for an optional keyword raises Unsupported. The signature decides: a TypeError
        from the inside of the function is an error.
        """
        if self._conventions is not None and name in self._methods and self._methods[name].converted:
            return self._quantized(name, function, *arguments, **options)
        return self._called(name, function, *arguments, **options)

    def _quantized(
        self, name: str, function: Callable[..., Any], x: torch.Tensor, recipe: Any, **options: Any
    ) -> Quantized:
        """The result of a method, read by the declared conventions. With layout 128x4 the function is never asked for
        swizzled scales, because it always stores them so."""
        from narrowgauge import adapt

        conventions = self._conventions or {}
        tiles = conventions.get("layout") == TILES
        asked = options.get("swizzled", False)
        given = {key: value for key, value in options.items() if not (tiles and key == "swizzled")}
        result = self._called(name, function, x, recipe, **given)
        read = conventions if tiles or not asked else {**conventions, "layout": TILES}
        try:
            q = read_conventions(result, x.shape, recipe, read)
        except (TypeError, ValueError) as error:
            raise BackendError(
                f"{name} gave a result that does not fit the conventions {dict(read)}: {error}"
            ) from error
        linear = asked or q.scale_layout == LINEAR
        return q if linear else replace(q, scales=adapt.stored_as(q).scales, scale_layout=LINEAR)

    def _called(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if missing := _missing_keyword(function, options):
            raise Unsupported(f"{name} of backend {self.facts.name} has no argument {missing!r}")
        before = read_environment() if self._restores else {}
        try:
            with _autograd_mode(self.autograd):
                arguments, options = _with_autograd(self.autograd, (arguments, options))
                # A kernel changes a cache in place: each call has a copy.
                arguments = tuple(one.copy() if isinstance(one, Cache) else one for one in arguments)
                return function(*arguments, **options)
        except NotImplementedError as error:
            raise Unsupported(str(error) or f"{self.facts.name}.{name} is not implemented for this case") from error
        except Exception as error:
            raise BackendError(f"{name} raised {type(error).__name__}: {error}{error_location(error)}") from error
        finally:
            if before and (now := read_environment()) != before:
                self._notes += changes(before, now)
                restore(before)

    def run_module(self, plan: Plan, given: Mapping[str, torch.Tensor]) -> list[Step]:
        """The steps of a module, on the device of `given`."""
        from narrowgauge.harness.backends.module_driver import run

        return run(plan, dict(given), self)

    def seed(self, random: object) -> None:
        """Seed torch's generators by the digest of the text of `random`, or of a text itself."""
        import torch

        text = random if isinstance(random, str) else repr(random)
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
        # torch.manual_seed would keep a traceback of every call for a GPU that is not used.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(number)

    def lock(self) -> AbstractContextManager[None]:
        """The lock of the GPU, if the device is a GPU."""
        return lock_gpu(self.device.type if self.device else "cpu")

    def prepare(self, inputs: Tensors, home: torch.device, poison: int) -> LocalRun:
        """Copies of the inputs between guard zones."""
        return LocalRun(self, inputs, home, poison)

    def repeat(
        self, kind: str, count: int, runs: Sequence[tuple[PreparedRun, PreparedRun]], call: Callable[[Tensors], Tensors]
    ) -> list[list[int]]:
        """As `Host.repeat`."""
        from narrowgauge.harness.backends.concurrency import Run, execute

        pairs = [(new, old) for new, old in runs if isinstance(new, LocalRun) and isinstance(old, LocalRun)]
        inputs = [prepared.inputs() for prepared, _ in pairs]
        given = [Run(list(tensors.values()), partial(call, tensors)) for tensors in inputs]
        device = pairs[0][0].device
        results = execute(kind, count, given, device)
        synchronize(device)
        return [
            [number for number, outputs in enumerate(found, 1) if not _same_tensors(outputs, finished.outputs)]
            for found, (_, finished) in zip(results, pairs, strict=True)
        ]

    def begin_case(self, seconds: float, memory: int) -> None:
        """Forget the results of the case before: nobody interrupts this process."""
        self._kept, self._copies = KeptResults(), {}

    def end_case(self) -> CaseEnd:
        """The error of the GPU not shown by any result. A kernel's fault may show at the next use of the GPU only, and
        may leave a context in which nothing works again."""
        notes, self._notes = self._notes, []
        if self.device is None or self.device.type != "cuda":
            return CaseEnd(notes=notes)
        error = pop_gpu_error()
        if error is None:
            with lock_gpu("cuda"):
                error = probe_gpu()
            pop_gpu_error()
        # The GPU reports the error of a launch once, and the error of a context for ever.
        return CaseEnd(error, usable=not (error and probe_gpu()), notes=notes)


class LocalRun:
    """A prepared run in this process."""

    def __init__(self, host: LocalHost, inputs: Tensors, home: torch.device, poison: int) -> None:
        from narrowgauge.harness.backends.guard import Guard

        self._host, self._home = host, home
        self.device = host.device or home
        self.outputs: Tensors = {}
        """Results of the finished run, on the device of the judge."""
        self._guard = Guard(poison)
        self._guard.place_inputs(inputs)
        self.seconds = 0.0

    @contextmanager
    def running(self, variation: int) -> Iterator[Tensors]:
        """Run under a variation, by number."""
        with self._host.variation(variation), self._guard:
            given = self.inputs()
            synchronize(self.device)
            start = time.perf_counter()
            yield given
            # A fault of a kernel shows in the run that caused it.
            synchronize(self.device)
            self.seconds = time.perf_counter() - start

    def keep(self, outputs: Mapping[str, torch.Tensor]) -> Tensors:
        """Copies of the results on the device of the judge."""
        self.outputs = self._guard.copy_outputs(outputs, self._home)
        return self.outputs

    def inputs(self) -> Tensors:
        """The guarded inputs, on the device of the backend."""
        return self._guard.inputs_on(self.device)

    def violations(self) -> tuple[list[str], list[str]]:
        """Sentences on overwritten guard zones, and sentences on changed inputs."""
        return self._guard.violations()


def _same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether two results have equal names, shapes, dtypes and bytes, perhaps on different devices."""
    return found.keys() == expected.keys() and all(_same_bytes(found[name], one) for name, one in expected.items())


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes, dtypes and bytes, perhaps on different devices."""
    import torch

    from narrowgauge.harness.backends.guarded_memory import element_bytes

    form = (one.shape, one.dtype) == (other.shape, other.dtype)
    return form and torch.equal(element_bytes(one).to(other.device), element_bytes(other))


def _autograd_mode(mode: Autograd) -> AbstractContextManager[Any]:
    """The context of a call."""
    import torch

    if mode == "no-grad":
        return torch.no_grad()
    return torch.inference_mode() if mode == "inference-mode" else contextlib.nullcontext()


def _with_autograd(mode: Autograd, value: Any) -> Any:
    """Arguments of a call, in the same memory. If the mode is requires-grad, their floating-point tensors require grad,
    but for the parts of quantized operands."""
    import torch

    if mode != "requires-grad":
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_() if value.is_floating_point() and value.itemsize > 1 else value
    if isinstance(value, dict):
        return {name: _with_autograd(mode, item) for name, item in value.items()}
    return type(value)([_with_autograd(mode, item) for item in value]) if isinstance(value, list | tuple) else value


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _missing_keyword(function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """The first optional keyword without an argument of the function. Empty without one, and for a function without a
    signature."""
    if options.keys() <= {"out_dtype"}:  # passed always
        return ""
    function = getattr(function, "__func__", function)
    try:
        named = _keywords(function)
    except TypeError:  # an object without a hash
        named = _keywords.__wrapped__(function)
    return "" if named is None else next((name for name in options if name not in named and name != "out_dtype"), "")


@lru_cache(maxsize=1024)
def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments open to passing by name. None: any name, or no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _attribute(name: str, implementation: Any, attribute: str, default: Any) -> Any:
    """An attribute or property of the implementation of the backend `name`. Raises BackendError."""
    try:
        return getattr(implementation, attribute, default)
    except Exception as error:
        place = error_location(error)
        raise BackendError(f"backend {name}: {attribute} raised {type(error).__name__}: {error}{place}") from error


def _takes_shuffles(variations: Any) -> bool:
    try:
        return callable(variations) and "shuffles" in inspect.signature(variations).parameters
    except ValueError:  # a function without a signature
        return False
