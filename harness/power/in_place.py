"""Known wrong results in the place of a function that a user's test calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge import adapt
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import name_of_function
from narrowgauge.harness.power.result import Counts, Key, Power
from narrowgauge.harness.power.subject import Subject
from narrowgauge.harness.power.trial import Mistake, Results, Trial, numbered, same_results
from narrowgauge.harness.watch import replaced
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import with_layout
from narrowgauge.reference.quantize.scaling import tensor_scale
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.scale_layouts import LINEAR

_RIGHT: Key = ("", "", 0)
"""Key of the right kernel."""


@dataclass(frozen=True)
class Conventions:
    """Conventions of the results of the function, as of `narrowgauge.adapt.quantized`."""

    tensor_scale_is: adapt.TensorScaleIs = "amax"
    layout: adapt.AnyLayout = LINEAR
    nibbles: adapt.Nibbles = "low-first"
    transposed: bool = False

    def parts(self, q: Quantized, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
        """The tensors of `q` by name in these conventions. `dtype`: of the quantized matrix."""
        codes, scales = adapt.stored_as(q, layout=self.layout, nibbles=self.nibbles, transposed=self.transposed)
        number = q.amax
        if number is not None and self.tensor_scale_is != "amax":
            own = tensor_scale(number, q.recipe, dtype)
            encodes = q.recipe.tensor_scale != "amax/max"
            number = own if (self.tensor_scale_is == "encode") == encodes else 1 / own
        return {"codes": codes, "scales": scales, "amax": number}


def power_in_place(
    test: Callable[[], Any], subject: Subject, function: str | Callable[..., Any], conventions: Conventions
) -> Power:
    """Run a test once per wrong kernel, with wrong results in place of a function's results. Raises as `power`."""
    name = name_of_function(test)
    try:
        inspect.signature(test).bind()
    except TypeError as error:
        raise TypeError(
            f"{name} needs arguments: {error}; give a test without arguments, such as lambda: {name}(128)"
        ) from None
    target = _found(function) if isinstance(function, str) else function
    shown = function if isinstance(function, str) else name_of_function(function)
    place = _Place(subject, conventions)
    with replaced.replace(target, place):
        if reason := _reason(test):
            raise ValueError(f"{name} fails with the results of {shown} itself, so it measures nothing: {reason}")
        if not place.calls:
            raise ValueError(f"{name} does not call {shown}; give the function whose results the test compares")
        place.begin(_RIGHT)
        if reason := _reason(test):
            raise ValueError(
                f"{name} fails with narrowgauge's right results in place of those of {shown}: {reason}; give the "
                "conventions of its results (layout, nibbles, tensor_scale_is, transposed), the recipe or the options"
            )
        counts = Counts()
        for key in dict.fromkeys(key for call in place.calls for key in call.wrong):
            place.begin(key)
            refused = bool(_reason(test))
            if place.differs:
                counts.add(key, refused=refused, narrowgauge=place.refused)
            else:
                counts.add_unseen(key)
    return Power(subject.label, f"{name} in place of {shown}", counts.rows, (), counts.unseen, tight=False)


def _found(name: str) -> Any:
    """The object of a name `module.function`. Raises ValueError."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        with suppress(ImportError, AttributeError):
            found: Any = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                found = getattr(found, part)
            return found
    raise ValueError(f"in_place_of is {name!r}, and there is no such function; it is module.function")


def _reason(test: Callable[[], Any]) -> str:
    """The reason of a failing test: its exception, or its result False. Empty if the test passes."""
    try:
        answer = test()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest.fail raises no Exception
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "it returns False" if isinstance(answer, bool) and not answer else ""


@dataclass
class _Call:
    """A call of the function in the first run of the test."""

    arguments: list[torch.Tensor]
    trial: Trial
    wrong: dict[Key, Mistake]


class _Place:
    """Observer of the function (`harness.watch.replaced`) that replaces the results of its calls."""

    def __init__(self, subject: Subject, conventions: Conventions) -> None:
        self._subject, self._conventions = subject, conventions
        self.calls: list[_Call] = []
        self._key: Key | None = None
        self._number = 0
        self.differs = self.refused = False
        """Whether a result of this run differs from the right result, and whether narrowgauge refuses a result."""

    def begin(self, key: Key) -> None:
        """The next run has results of the kernel with this key."""
        self._key, self._number, self.differs, self.refused = key, 0, False, False

    def counted(self) -> int:
        return 1

    def observed(self, number: int, call: Callable[..., Any], names: replaced.Names, args: Any, kwargs: Any) -> Any:
        with default_settings():
            mine = self._call(args, kwargs)
        template = call(*args, **kwargs)
        if self._key is None:
            return template
        with default_settings():
            right = mine.trial.right
            results: Results = right
            if (mistake := mine.wrong.get(self._key)) is not None:
                with suppress(ValueError):  # no such mistake on these inputs
                    results = mistake.results()
            try:
                given = _formed(template, results, self._conventions, mine.arguments[0].dtype)
            except ValueError:
                if self._key == _RIGHT:
                    raise
                return _formed(template, right, self._conventions, mine.arguments[0].dtype)
            if not same_results(results, right):
                self.differs = True
                self.refused |= not mine.trial.accepts(results)
        return given

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        """The call with its mistakes, taken from the first run if the arguments are equal."""
        self._number += 1
        tensors = [x.detach() for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        known = self.calls[self._number - 1] if self._number <= len(self.calls) and self._key is not None else None
        if known is not None and len(known.arguments) == len(tensors):
            pairs = zip(known.arguments, tensors, strict=True)
            if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs):
                return known
        own = iter([x.clone() for x in tensors])
        arguments = [next(own) if isinstance(x, torch.Tensor) else x for x in args]
        named = {name: next(own) if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        trial = self._subject.trial(f"call {self._number}", arguments, named)
        made = _Call([x.clone() for x in tensors], trial, dict(numbered(trial.mistakes())))
        if self._key is None:
            self.calls.append(made)
        return made


# ---- the form of a result --------------------------------------------------------------------------------------------


def _formed(template: Any, results: Results, conventions: Conventions, dtype: torch.dtype) -> Any:
    """Results in the form of the function's own result. Raises ValueError for an unknown form."""
    if len(results) == 1:
        (result,) = results.values()
        return _output(template, result, conventions, dtype)
    if isinstance(template, Mapping):
        return {**template, **{name: _output(template[name], result, conventions, dtype)
                               for name, result in results.items() if name in template}}  # fmt: skip
    if not isinstance(template, tuple | list):
        raise ValueError(f"the function gives one result, and there are {len(results)}: {', '.join(results)}")
    found: list[Any] = []
    rest = list(template)
    apart = len(template) > len(results)
    for result in results.values():
        count = (3 if result.amax is not None else 2) if apart and isinstance(result, Quantized) else 1
        own, rest = rest[:count], rest[count:]
        formed = _output(own[0] if count == 1 else own, result, conventions, dtype)
        found += [formed] if count == 1 else formed
    return type(template)(found)


def _output(template: Any, result: Any, conventions: Conventions, dtype: torch.dtype) -> Any:
    if isinstance(template, torch.Tensor):
        if not isinstance(result, Quantized):
            return _as(template, result)
        if template.is_floating_point() and template.element_size() > 1:
            return _as(template, ops.dequantize(result))
        return _as(template, conventions.parts(result, dtype)["codes"])
    if not isinstance(result, Quantized):
        raise ValueError("numbers that are not quantized have no codes")
    if isinstance(template, Quantized):
        parts = {name: getattr(result, name) for name in ("codes", "scales", "amax")}
        return with_layout(replace(template, **parts, tensor_scale=None, scale_layout=LINEAR), template.scale_layout)
    parts = conventions.parts(result, dtype)
    if isinstance(template, Mapping):
        own = parts | {"tensor_scale": parts["amax"]}
        return {name: _as(value, own[name]) if name in own else value for name, value in template.items()}
    if isinstance(template, tuple | list):
        return type(template)([_as(value, part) for value, part in zip(template, parts.values(), strict=False)])
    kind = type(template).__name__
    raise ValueError(f"the function gives an object of type {kind}; it is read as tensors, or as a Quantized")


def _as(template: Any, part: torch.Tensor | None) -> Any:
    """A tensor in the dtype and shape of the function's own tensor. Raises ValueError if the sizes differ."""
    if template is None or part is None:
        return template
    if not isinstance(template, torch.Tensor):
        raise ValueError(f"a part of the result is a {type(template).__name__}; wrap the function to give tensors")
    wide = template.is_floating_point() and template.element_size() > 1 and part.is_floating_point()
    found = part.to(template.dtype) if wide else part.contiguous().flatten().view(template.dtype)
    if found.numel() != template.numel():
        raise ValueError(
            f"the function gives a tensor {tuple(template.shape)}, and the result is {tuple(part.shape)}: give layout, "
            "nibbles or transposed"
        )
    return found.reshape(template.shape).to(template.device)
