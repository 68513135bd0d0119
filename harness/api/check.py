"""All input families, tails and views of a recipe against a function, in the process of the caller."""

from __future__ import annotations

import os
import shlex
import site
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

import torch

from narrowgauge.adapt.conventions import Layout, Nibbles, TensorScaleIs, check_choice
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import OPERATIONS, FunctionBackend, name_of_function, parameters_of
from narrowgauge.harness.api.inputs import make_case, name_of, named, operands_of
from narrowgauge.harness.api.save_arguments import with_variables
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import keys_of, one_of, sizes_of
from narrowgauge.harness.cases.operations import OPERATIONS as CASE_CLASSES
from narrowgauge.harness.cases.operations import case_from_id
from narrowgauge.harness.checks.statistics.holm import count_chance_cases
from narrowgauge.harness.diagnosis.cause_names import is_pattern
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.records.record import elements_compared
from narrowgauge.harness.report.failure_view import explanation_lines, finding_lines
from narrowgauge.harness.report.groups import Group, group
from narrowgauge.harness.report.text import number, plural
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.recipes import RULE_FILE, Recipe, find_recipe

GROUPS = 10
"""Groups of failures that a message shows."""
NAMED = 5
"""Further cases of a group that a message names, and reasons of unsupported cases."""
_OWN_RANDOM = ("normal", "huge", "zeros", "negative-zeros", "position")
"""Families for a kernel with random bits of its own: statistical tests take seconds for each family that rounds."""
_VIEWS = ("strided", "transposed")
_CONVENTIONS = ("tensor_scale_is", "layout", "nibbles", "transposed")
_DEFAULTS: dict[str, Any] = {
    "operation": "quantize", "device": "cpu", "seed": 0, "declares": {}, "tensor_scale_is": "amax",
    "layout": "linear", "nibbles": "low-first", "transposed": False,
}  # fmt: skip
"""Arguments of `check` that a line to reproduce a failure needs, if they differ from these."""


@dataclass(frozen=True)
class Checked:
    """Summary of a check that passed."""

    subject: str
    """Function, operation and recipe."""
    cases: int
    passed: int
    compared: int
    """Elements that were compared with an expected value."""
    unsupported: Mapping[str, int]
    """Reasons of unsupported cases, and their numbers of cases."""

    def __repr__(self) -> str:
        text = f"{self.subject}: {plural(self.passed, 'case')} passed, {number(self.compared)} elements compared"
        return text + _unsupported(self.unsupported)


def check(
    function: Callable[..., Any],
    recipe: str | Recipe | Case | Iterable[Case],
    *,
    operation: str = "quantize",
    families: Sequence[str] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    device: torch.device | str = "cpu",
    seed: int = 0,
    declares: Mapping[str, str] | None = None,
    tensor_scale_is: TensorScaleIs = "amax",
    layout: Layout = "linear",
    nibbles: Nibbles = "low-first",
    transposed: bool = False,
) -> Checked:
    """Run a function on all input families, tails and views of a recipe, and judge its results.

    function: a Python function, or a custom op such as `torch.ops.lib.quantize`. It is called with the tensors of its
    operation by position. Further arguments are passed by keyword, and only those that its signature names, so a custom
    op that takes tensors alone fits:

    - quantize: function(x), further recipe, amax, scale, random. Gives (codes, scales[, amax]), a dict or a Quantized;
    - dequantize: function(q), further dtype, recipe. Gives the values (M, K) of that dtype;
    - transform: function(x), further recipe. Gives the rotated x;
    - gemm: function(a, b), further out_dtype, c, bias, recipe. Gives a @ b.T (+ c) (+ bias), (M, N) of dtype out_dtype;
    - any other operation with one method, also one of your own (docs/add.md): the tensors of its inputs, further recipe
      and the keys of its cases. Gives the results in order.

    A mapping has keys among codes, scales, amax and tensor_scale.
    x is a tensor (M, K), in some cases (…, K), a view with other strides, or empty. q, a and b are Quantized of the
    reference; recipe is a Recipe; scale, float32 (1,), is the encode scale of a recipe with delayed scaling; random is
    (seed, offset) of Philox for a recipe with stochastic rounding. A function without random draws random bits of its
    own from torch's generators, and is judged on fewer families, by statistical tests.
    recipe: a recipe or its name; or cases, which replace families, shapes and dtypes: a case of `narrowgauge.matrix`,
    the id of a case, or a list of these.
    families: names of input families (cases/README.md). Default: all families of the operation.
    shapes: (M, K) or (…, K), of a gemm (M, K, N). Default: a matrix of some tiles for all families, and small shapes
    with tails.
    dtypes: dtypes of x, or of the output of gemm: float32, bfloat16, float16.
    device: device of the tensors. Results are judged on it.
    seed: seed of the inputs.
    declares: declarations of a backend (docs/backends.md#declarations), such as {"gemm": "sequential"}.
    tensor_scale_is, layout, nibbles, transposed: conventions of the result of quantize, as of
    `narrowgauge.adapt.quantized`.

    Every case runs twice on guarded copies of its inputs: a write outside of a tensor, an element that is not written
    and a result that is not repeatable are failures too. NotImplementedError makes a case unsupported. So does any
    other exception in a default case that kernels may refuse: a last block that is not full, more than two sizes, no
    element, a size of a gemm that is no multiple of 16, a view that is not contiguous. Other exceptions are failures.

    Returns a summary. Raises AssertionError if a case fails, with a group for each cause and a line that reproduces it,
    and if no case passes; ValueError and TypeError for arguments that do not fit together. Settings and generators of
    torch and the floating-point environment are afterwards as before.
    """
    __tracebackhide__ = True
    of_recipe = isinstance(recipe, str) and ("/" not in recipe or RULE_FILE.fullmatch(recipe))
    by_cases = not (isinstance(recipe, Recipe) or of_recipe)
    cases = _given(recipe) if by_cases else []
    if cases and operation == "quantize" and cases[0].operation not in OPERATIONS:
        operation = cases[0].operation
    others = [name for name, cls in CASE_CLASSES.items() if not cls.composed and name not in OPERATIONS]
    if wrong := one_of([*OPERATIONS, *others])(operation):
        raise ValueError(f"operation {wrong}")
    options: dict[str, Any] = {
        "operation": operation, "device": str(torch.device(device)), "seed": seed, "declares": dict(declares or {}),
        "tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": transposed,
    }  # fmt: skip
    for name in _CONVENTIONS[:3]:
        check_choice(name, options[name])
    changed = [name for name in _CONVENTIONS if options[name] != _DEFAULTS[name]]
    if operation != "quantize" and changed:
        raise ValueError(f"{changed[0]} is a convention of results of quantize; operation is {operation!r}")
    if not by_cases:
        assert isinstance(recipe, str | Recipe)
        selected = _cases(
            recipe, operation, families, shapes, dtypes, swizzled=layout == "128x4", known=parameters_of(function)
        )
    elif families is None and shapes is None:
        _require_operation(cases, operation)
        selected = [(case, False) for case in cases]
    else:
        raise ValueError("families and shapes choose cases of a recipe; give a recipe with them, or cases alone")
    if not selected:
        raise ValueError("families, shapes or dtypes is empty; leave it out for the default")
    recipes = "+".join(dict.fromkeys(case.recipe_label for case, _ in selected))
    subject = f"{name_of_function(function)}, {operation} {recipes}".rstrip()
    with default_settings(), _generators_kept(options["device"]):
        if type(torch.empty(0)) is not torch.Tensor:
            raise TypeError("check needs numbers; tensors of FakeTensorMode have none: call it outside of the mode")
        records = _records(function, selected, options)
    failed = [record for record in records if record["verdict"] not in ("pass", "unsupported")]
    passed = [record for record in records if record["verdict"] == "pass"]
    unsupported = Counter(record["message"] for record in records if record["verdict"] == "unsupported")
    compared = sum(map(elements_compared, passed))
    if failed or not compared:
        raise AssertionError(_report(subject, function, options, failed, len(records), unsupported))
    return Checked(subject, len(records), len(passed), compared, unsupported)


# ---- cases -----------------------------------------------------------------------------------------------------------


def _require_operation(cases: Iterable[Case], operation: str) -> None:
    """Raise ValueError for a case of another operation."""
    for case in cases:
        if case.operation != ("quantize" if operation == "dequantize" else operation):
            remedy = "`narrowgauge run` does" if case.composed else f"give operation={case.operation!r}"
            raise ValueError(f"operation is {operation!r}, which does not run {case.id}; {remedy}")


def _given(recipe: object) -> list[Case]:
    """The cases that the caller named. Raises ValueError and TypeError."""
    named = [recipe] if isinstance(recipe, Case | str) else recipe
    if not isinstance(named, Iterable):
        raise TypeError(
            f"recipe is a recipe, a case, the id of a case, or a list of these; not {type(recipe).__name__}"
        )
    cases = []
    for entry in named:
        case = case_from_id(entry) if isinstance(entry, str) else entry
        if not isinstance(case, Case):
            raise ValueError(f"{entry!r} is no case, and no id of a case with an input family")
        cases.append(case)
    if not cases:
        raise ValueError("recipe is an empty list of cases")
    return cases


def _cases(
    recipe: str | Recipe,
    operation: str,
    families: Sequence[str] | None,
    shapes: Sequence[Sequence[int]] | None,
    dtypes: Sequence[torch.dtype],
    *,
    swizzled: bool,
    known: Collection[str],
) -> list[tuple[Case, bool]]:
    """The cases of a recipe, and whether an exception means that the function does not support the case.

    `known`: names of parameters of the function.
    """
    chosen = named(recipe)
    kind = "quantize" if operation == "dequantize" else operation
    own = operation == "quantize" and chosen.rounding == "stochastic" and "random" not in known
    every = list((_OWN_RANDOM if own else CASE_CLASSES[kind].families()) if families is None else families)
    few = [family for family in ("normal", "position") if family in every][own:] or every[:1]
    shapes_and_main = list(_default_shapes(kind, chosen) if shapes is None else shapes)
    if not shapes_and_main or not every:
        return []
    main, *tails = shapes_and_main
    wanted: list[tuple[Sequence[int], str, dict[str, Any], bool]] = [(main, family, {}, False) for family in every]
    for shape in tails:
        optional = shapes is None and _is_optional(shape, chosen, kind)
        wanted += [(shape, family, {}, optional) for family in (every if shapes else few)]
    if kind == "gemm":
        switches = [{"c": "accumulate", "bias": "bias"}[addend] for addend in ("c", "bias") if addend in known]
        wanted += [(main, few[-1], {switch: True}, False) for switch in switches]
        wanted += [(main, few[-1], dict.fromkeys(switches, True), False)] if len(switches) == 2 else []
    elif "view" in fields_of(kind):
        wanted += [(main, few[-1], {"view": view}, True) for view in _VIEWS]
    cases: dict[Case, bool] = {}
    for shape, family, values, optional in wanted:
        for dtype in dtypes:
            keys: dict[str, Any] = {"shape": shape, "inputs": family, **values}
            if kind == "gemm":
                keys |= operands_of(chosen, torch.bfloat16) | {"out": name_of(dtype)}
            elif "dtype" in fields_of(kind):
                keys["dtype"] = name_of(dtype)
            if kind == "quantize" and swizzled:
                keys["scales"] = "swizzled"
            try:
                case = make_case(kind, chosen, keys)
            except ValueError:
                if (shapes is None and shape != main) or (families is None and family != "normal"):
                    continue  # a recipe that rotates whole groups has no such tail, and float16 not every family
                raise
            cases.setdefault(case, optional)
    return list(cases.items())


def fields_of(kind: str) -> list[str]:
    """Fields of the cases of an operation that are keys."""
    return [key.field for key in keys_of(CASE_CLASSES[kind])]


def _default_shapes(kind: str, recipe: Recipe) -> list[tuple[int, ...]]:
    """A matrix of some tiles, then shapes with tails."""
    height, width = (1, 32) if recipe.spans_k else recipe.block
    width = max(width, recipe.transform.group if recipe.transform else 1)
    if kind == "gemm":
        return [(64, max(256, 2 * width), 48), (1, width, 16), (33, 3 * width, 17)]
    main = (max(128, 2 * height), max(256, 2 * width))
    full = [(1, width), (129, 3 * width)]
    if len(names := sizes_of(CASE_CLASSES[kind])) != 2:
        raise ValueError(
            f"a {kind} has a shape [{', '.join(names)}]; give shapes, such as shapes=[{[128] * len(names)}]"
        )
    if kind != "quantize":
        return [main, *full]
    return [main, *full, (5, 2 * width + width // 2), (3, width + 1), (2, 3, 2 * width), (0, 2 * width)]


def _is_optional(shape: Sequence[int], recipe: Recipe, kind: str) -> bool:
    """Whether kernels may refuse a shape."""
    height, width = (1, 1) if recipe.spans_k else recipe.block
    if kind == "gemm":
        return any(size % 16 for size in shape) or bool(shape[1] % width)
    return len(shape) != 2 or 0 in shape or bool(shape[0] % height or shape[1] % width)


# ---- running ---------------------------------------------------------------------------------------------------------


def _records(
    function: Callable[..., Any], selected: list[tuple[Case, bool]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Records of the cases (`harness.records.record`)."""
    declares = dict(options["declares"])
    stochastic = any(find_recipe(name).rounding == "stochastic" for case, _ in selected for name in case.recipe_names)
    if options["operation"] == "quantize" and stochastic and "random" not in parameters_of(function):
        declares["random"] = "own"
    conventions = {name: options[name] for name in _CONVENTIONS}
    backend = FunctionBackend(
        name_of_function(function), function, options["operation"], declares=declares, conventions=conventions
    )
    sharing = count_chance_cases(case for case, _ in selected)
    records = []
    # The diagnosis of a small failing case tries all deviations within its time.
    for case, optional in sorted(selected, key=lambda pair: pair[0].work):
        backend.raised = None
        record = run_case(case, backend, device=options["device"], seed=options["seed"], sharing=sharing)
        raised = backend.raised
        if raised is not None and record.verdict == "error" and optional:
            record.verdict, record.message = "unsupported", f"{type(raised).__name__}: {raised}"
        elif isinstance(raised, NotImplementedError) and record.verdict == "pass":  # quantize is judged without it
            record.verdict, record.message = "unsupported", str(raised) or "NotImplementedError"
        records.append(record.to_dict())
    return records


@contextmanager
def _generators_kept(device: str) -> Iterator[None]:
    """The states of torch's generators of before, after the context. Raises ValueError for a device without a GPU."""
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, and torch sees no GPU; `narrowgauge doctor` says more")
        torch.cuda.init()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        yield


# ---- report ----------------------------------------------------------------------------------------------------------


def _report(
    subject: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    failed: list[dict[str, Any]],
    count: int,
    unsupported: Mapping[str, int],
) -> str:
    """Failures by cause, each with a line that reproduces it."""
    if not failed and count > sum(unsupported.values()):
        return f"{subject}: nothing was compared, all matrices are empty{_unsupported(unsupported)}"
    if not failed:
        return f"{subject}: no case passed{_unsupported(unsupported)}"
    groups = group(failed)
    lines = [f"{subject}: {len(failed)} of {plural(count, 'case')} did not pass{_unsupported(unsupported)}"]
    for entry in groups[:GROUPS]:
        lines += ["", *_group_lines(entry, failed, function, options)]
    if len(groups) > GROUPS:
        lines += ["", f"and {plural(len(groups) - GROUPS, 'more group')} of failures"]
    if any(record["verdict"] == "error" for record in failed):
        lines += [
            "",
            "inputs that the kernel refuses: raise NotImplementedError, or choose shapes, families and dtypes",
        ]
    return escape("\n".join(lines))


def _group_lines(
    entry: Group, failed: list[dict[str, Any]], function: Callable[..., Any], options: Mapping[str, Any]
) -> list[str]:
    """A group of failures: cause, sentence and elements of its first case, names of further cases."""
    first = next(record for record in failed if record in entry.records)
    others = [record["case"] for record in failed if record in entry.records and record is not first]
    explanations = first["explanations"]
    if entry.explanation is not None and not entry.explanation["exact"]:  # other cases of this kind have other bytes
        explanations = [entry.explanation, *(e for e in explanations if is_pattern(e["cause"]))]
    lines = [entry.title, *explanation_lines(explanations)]
    lines += [f"{first['verdict']}: {first['message']}", f"case: {first['case']}"]
    lines += [f"reproduce: {reproduction(function, first['case'], options)}", *finding_lines(first["findings"])]
    if judged := ", ".join(f"{stage['stage']} {'✗' if stage['sentence'] else '✓'}" for stage in first["stages"]):
        lines += ["", f"stages: {judged}"]
    if others:
        more = f" and {number(len(others) - NAMED)} more" if len(others) > NAMED else ""
        lines += [f"also: {', '.join(others[:NAMED])}{more}"]
    return lines


def _unsupported(reasons: Mapping[str, int]) -> str:
    """`; 3 unsupported: not contiguous (2), no float32 (1)`, or the empty string."""
    if not reasons:
        return ""
    first_lines: Counter[str] = Counter()
    for reason, count in reasons.items():
        first_lines[reason.partition("\n")[0]] += count
    listed = [f"{reason} ({number(count)})" for reason, count in first_lines.most_common(NAMED)]
    more = [plural(len(first_lines) - NAMED, "more reason")] if len(first_lines) > NAMED else []
    return f"; {number(sum(reasons.values()))} unsupported: {', '.join([*listed, *more])}"


def reproduction(function: Callable[..., Any], case: str, options: Mapping[str, Any]) -> str:
    """The call that checks a single case: a shell command if a fresh process finds the function by its name, else a
    line of Python for a place where the function has its name."""
    name = name_of_function(function)
    changed = "".join(f", {key}={value!r}" for key, value in options.items() if value != _DEFAULTS[key])
    call = f"narrowgauge.check({name}, {case!r}{changed})"
    module = _module_to_import(function)
    if not module:
        return call
    call = call.replace(name, f"{module}.{name}", 1)
    return with_variables(shlex.join(["python", "-c", f"import narrowgauge, {module}; {call}"]))


def _module_to_import(function: Callable[..., Any]) -> str:
    """The module in which a fresh process in this folder finds the function by its name, or the empty string."""
    module = str(getattr(function, "__module__", ""))
    found: Any = sys.modules.get(module)
    for part in name_of_function(function).split("."):
        found = getattr(found, part, None)
    if found is not function or module == "__main__":
        return ""
    top = module.partition(".")[0]
    path = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *site.getsitepackages()]
    spec, here = PathFinder.find_spec(top, path), sys.modules[top].__spec__
    return module if spec is not None and here is not None and spec.origin == here.origin else ""
