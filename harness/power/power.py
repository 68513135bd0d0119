"""Known wrong results that a user's comparison accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from narrowgauge import adapt
from narrowgauge.contract import Contract
from narrowgauge.harness.api.default_settings import callers_settings, default_settings
from narrowgauge.harness.api.function_backend import name_of_function
from narrowgauge.harness.cases.keys import one_of
from narrowgauge.harness.power.compares import Compares
from narrowgauge.harness.power.in_place import Conventions, power_in_place
from narrowgauge.harness.power.result import Counts, Power, RightKernels
from narrowgauge.harness.power.subject import find_subject
from narrowgauge.harness.power.tolerance import Tightest
from narrowgauge.harness.power.trial import Results, Trial, numbered, same_results, tensors_of
from narrowgauge.reference import ops
from narrowgauge.reference.contracts.layout.pages import Stored
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.scale_layouts import LINEAR

Judge = Callable[..., Any]


def power(
    judge: Judge,
    subject: str | Recipe | Contract | None = None,
    *,
    recipe: str | Recipe | None = None,
    inputs: Sequence[Any] | None = None,
    families: Sequence[str] = ("normal",),
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    keys: Mapping[str, Any] | None = None,
    seed: int = 0,
    compares: Literal["values", "results"] = "values",
    in_place_of: str | Callable[..., Any] | None = None,
    tensor_scale_is: adapt.TensorScaleIs = "amax",
    layout: adapt.AnyLayout = LINEAR,
    nibbles: adapt.Nibbles = "low-first",
    transposed: bool = False,
) -> Power:
    """Give a test the results of kernels with known mistakes, and report the mistakes that the test accepts.

    judge: a comparison `judge(actual, expected)`, called once per output, which returns False or raises an exception to
    refuse a result. Or, with `in_place_of`, a test: a function without arguments.
    subject: a recipe or its name, for results of quantize; or a contract (docs/contracts.md), or the name of a contract
    of this package, such as "scaled-gemm".
    recipe: the same by name; of a contract its recipe. Default of a contract: that of its signature.
    inputs: your own inputs, a tensor x (…, K) per call of quantize, or a mapping of the arguments x, scale and random;
    of a contract a mapping of the tensors. Families, shapes and dtypes are then ignored.
    families, shapes, dtypes, keys, seed: of the made inputs, as of `narrowgauge.check`. Default: the family normal at
    the first shape of a check.
    compares: "values" gives the judge decoded values, float32 (M, K); "results" a `Quantized`. Outputs that are not
    quantized are tensors in both.
    in_place_of: a function that the test calls, or the name "module.function". The test runs once per wrong kernel,
    with wrong results in place of the function's results and in the same form: (codes, scales), (codes, scales, amax),
    a mapping, a `Quantized`, or a tensor of values or codes; of a contract the results. The first tensor arguments of a
    call are the inputs.
    tensor_scale_is, layout, nibbles, transposed: conventions of the function's results (docs/adapt.md).

    The mistakes are the changes with which narrowgauge explains wrong bytes: docs/power.md. The smallest tolerance for
    right kernels is measured on the right result and, for a contract, on 8 right kernels with different orders of sums
    and roundings.

    Returns a summary: `known`, `caught`, `rows`, `table`. Raises ValueError and TypeError for wrong arguments, for a
    judge that cannot compare a right result with itself, and for a test that fails with right results.
    """
    if wrong := one_of(list(Compares))(compares):
        raise ValueError(f"compares {wrong}")
    of = find_subject(subject, recipe, dict(keys or {}))
    if in_place_of is not None:
        if inputs is not None or compares != "values":
            wrong = "inputs" if inputs is not None else "compares"
            raise ValueError(
                f"{wrong} belongs to a judge; the test in place of whose function results stand has its own"
            )
        conventions = Conventions(tensor_scale_is, layout, nibbles, transposed=transposed)
        return power_in_place(judge, of, in_place_of, conventions)
    if (tensor_scale_is, layout, nibbles, transposed) != ("amax", LINEAR, "low-first", False):
        raise ValueError("tensor_scale_is, layout, nibbles and transposed are conventions of the function in_place_of")
    with default_settings():
        trials = of.given(inputs) if inputs is not None else of.made(families, shapes, dtypes, seed)
        if not trials:
            raise ValueError("inputs, families, shapes or dtypes is empty; leave it out for the default")
        counts = Counts()
        right = [_measure(trial, judge, compares, counts) for trial in trials]
    return Power(of.label, name_of_function(judge), counts.rows, tuple(right), counts.unseen)


# ---- one input -------------------------------------------------------------------------------------------------------


def _measure(trial: Trial, judge: Judge, compares: str, counts: Counts) -> RightKernels:
    """Give the judge all results of a trial."""
    expected = _compared(trial.right, compares)
    try:
        _judged(judge, _compared(trial.right, compares), expected)
    except AssertionError:
        pass
    except Exception as error:
        raise ValueError(
            f"{name_of_function(judge)} raises {type(error).__name__} for a right result and itself: {error}; it is "
            f"called as judge(actual, expected), compares={compares!r}"
        ) from error
    rights = [trial.right, *trial.others]
    refused = sum(not accepted(judge, _compared(results, compares), expected) for results in rights)
    values, tight = _values(trial.right), Tightest()
    for results in trial.others:
        tight.add(_values(results), values)
    for key, mistake in numbered(trial.mistakes()):
        try:
            results = mistake.results()
        except ValueError:  # no such mistake on these inputs
            continue
        if same_results(results, trial.right):
            counts.add_unseen(key)
            continue
        if compares == Compares.RESULTS and any(type(results[name]) is not type(trial.right[name]) for name in results):
            continue  # values without codes
        counts.add(
            key, refused=not accepted(judge, _compared(results, compares), expected),
            narrowgauge=not trial.accepts(results), tightest=not tight.accepts(_values(results), values),
        )  # fmt: skip
    return RightKernels(trial.label, len(rights), refused, tight.rtol, tight.atol)


def accepted(judge: Judge, actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether a judge accepts all outputs of a result. An exception refuses it."""
    try:
        return _judged(judge, actual, expected)
    except Exception:
        return False


def _judged(judge: Judge, actual: Sequence[Any], expected: Sequence[Any]) -> bool:
    with callers_settings().in_force():
        answers = [judge(a, _copied(e)) for a, e in zip(actual, expected, strict=True)]
    return all(answer is None or bool(answer) for answer in answers)


def _compared(results: Results, compares: str) -> list[Any]:
    """The arguments of a judge: an entry per output, and per part of a cache."""
    found: list[Any] = []
    for result in results.values():
        if compares == Compares.RESULTS and isinstance(result, Quantized):
            found.append(result)
        else:
            found += _values_of(result)
    return [_copied(each) for each in found]


def _copied(result: Any) -> Any:
    """A copy that a judge may change."""
    if not isinstance(result, Quantized):
        return result.clone()
    parts: dict[str, Any] = {name: part.clone() for name, part in vars(result).items() if hasattr(part, "clone")}
    return replace(result, **parts)


def _values(results: Results) -> list[torch.Tensor]:
    return [values for result in results.values() for values in _values_of(result)]


def _values_of(result: torch.Tensor | Quantized | Stored) -> list[torch.Tensor]:
    """The values of an output: a quantization is decoded, without an inverse rotation."""
    return [ops.dequantize(result)] if isinstance(result, Quantized) else tensors_of(result)
