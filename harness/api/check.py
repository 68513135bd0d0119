"""All input families, tails and views of a recipe against a function, in the process of the caller."""

from __future__ import annotations

import os
import re
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

from narrowgauge.adapt.conventions import AnyLayout, Nibbles, TensorScaleIs, check_choice
from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.api.function_backend import OPERATIONS, FunctionBackend, name_of_function
from narrowgauge.harness.api.inputs import make_case, name_of, named, require_keys
from narrowgauge.harness.api.judging.save_arguments import with_variables
from narrowgauge.harness.backends.loading import parameters_of
from narrowgauge.harness.cases.case import Case
from narrowgauge.harness.cases.keys import nearest, one_of
from narrowgauge.harness.cases.operations import OPERATIONS as CASE_CLASSES
from narrowgauge.harness.cases.operations import case_from_id, hold
from narrowgauge.harness.checks.statistics.holm import count_chance_cases
from narrowgauge.harness.diagnosis.cause_names import is_pattern
from narrowgauge.harness.diagnosis.search.nearest_rule import NearestRule, nearest_rule
from narrowgauge.harness.diagnosis.search.work_limit import CASE
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.machine.plain_text import escape
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.operations.stages.outcome import Outcome
from narrowgauge.harness.records.record import elements_compared, new_record
from narrowgauge.harness.report.failure_view import explanation_lines, finding_lines
from narrowgauge.harness.report.groups import Group, group
from narrowgauge.harness.report.text import number, plural
from narrowgauge.harness.running.runner import run_case
from narrowgauge.spec.dtypes import TORCH_DTYPES
from narrowgauge.spec.recipes import RULE_FILE, Recipe, find_recipe
from narrowgauge.spec.scale_layouts import TILES

GROUPS = 3
"""Largest number of groups of failures shown in full."""
TITLES = 10
"""Largest number of further groups, a line per group."""
NAMED = 5
"""Largest number of further cases of a group named in a message, and of reasons of unsupported cases."""
_SEARCHED = 6
"""Largest number of failing cases with a full search for causes. The causes of further cases are mostly the same."""
_KEPT, _KEPT_ELEMENTS = 128, 1 << 16
"""Largest number of outcomes kept for the nearest rule, and of elements of an outcome: 100 MB together."""
_OWN_RANDOM = ("normal", "huge", "zeros", "negative-zeros", "position")
"""Families for a kernel with random bits of its own: statistical tests take seconds per rounding family."""
_CONVENTIONS = ("tensor_scale_is", "layout", "nibbles", "transposed")
_DEFAULTS: dict[str, Any] = {
    "device": "cpu", "seed": 0, "declares": {}, "tensor_scale_is": "amax",
    "layout": "linear", "nibbles": "low-first", "transposed": False, "finite": False, "constraints": {},
}  # fmt: skip
"""Arguments of `check`, beside the operation, for a line to reproduce a failure; only values different from these."""


@dataclass(frozen=True)
class Checked:
    """Summary of a passed check."""

    subject: str
    """Function, operation and recipe."""
    cases: int
    passed: int
    compared: int
    """Number of elements compared with an expected value."""
    unsupported: Mapping[str, int]
    """Reasons of unsupported cases, and their numbers of cases."""

    def __repr__(self) -> str:
        text = f"{self.subject}: {plural(self.passed, 'case')} passed, {number(self.compared)} elements compared"
        return text + _unsupported(self.unsupported)


def check(
    function: Callable[..., Any],
    subject: str | Recipe | Case | Iterable[Case | str] | Contract | None = None,
    *,
    recipe: str | Recipe | Case | Iterable[Case | str] | None = None,
    operation: str | None = None,
    families: Sequence[str] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    keys: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    declares: Mapping[str, str] | None = None,
    tensor_scale_is: TensorScaleIs = "amax",
    layout: AnyLayout = "linear",
    nibbles: Nibbles = "low-first",
    transposed: bool = False,
    finite: bool = False,
    constraints: Mapping[str, Any] | None = None,
) -> Checked:
    """Run a function on all input families, tails and views of a recipe, and judge its results.

    function: a Python function, or a custom op such as `torch.ops.lib.quantize`. It is called with the tensors of its
    operation by position. Further arguments are passed by keyword, and only those that its signature names, so a custom
    op that takes tensors alone fits:

    - quantize: function(x), further recipe, amax, scale, random. Gives (codes, scales[, amax]), a dict or a Quantized;
    - dequantize: function(q), further dtype, recipe. Gives the values (M, K) of that dtype;
    - transform: function(x), further recipe. Gives the rotated x;
    - gemm: function(a, b), further out_dtype, c, bias, recipe. Gives a @ b.T (+ c) (+ bias), (M, N) of dtype out_dtype;
    - a contract: function(tensors of the contract in order), further its recipes, numbers and flags by name. Gives its
      results, as `assert_result` takes them;
    - any other operation that calls one method, also one of your own (docs/add.md): the arguments of the method
      (docs/backends.md#methods), its keyword arguments and recipe by name. Gives the results in order. Of cases with
      usage "both" it is quantize_both, which gives a rowwise and a columnwise result of quantize.

    A mapping has keys among codes, scales, amax and tensor_scale.
    x is a tensor (M, K), in some cases (…, K), a view with other strides, or empty. q, a and b are Quantized of the
    reference; recipe is a Recipe; scale, float32 (1,), is the encode scale of a recipe with delayed scaling; random is
    (seed, offset) of Philox for a recipe with stochastic rounding. A function without random draws random bits of its
    own from torch's generators, and is judged on fewer families, by statistical tests.
    subject: a recipe, its name, or a file of rules (docs/dialects.md#a-rule-of-your-own); or the beginning of ids,
    `gemm/nvfp4`, for the cases with such ids; or cases, which replace families, shapes and dtypes: a case of
    `narrowgauge.matrix`, the id of a case, or a list of these; or a contract (docs/contracts.md), or the name of a
    contract of this package, "rmsnorm-quantize".
    recipe: the same by name; of a contract its recipe, several recipes, or cases. Default of a contract: that of its
    signature.
    operation: an operation of the case files, or dequantize. Default: that of the cases, else quantize.
    families: names of input families (cases/README.md). Default: all families of the operation.
    shapes: (M, K) or (…, K), of a gemm (M, K, N). Default: a matrix of some tiles for all families, and small shapes
    with tails.
    dtypes: dtypes of x, or of the output of gemm: float32, bfloat16, float16.
    keys: further keys of the cases (cases/README.md): {"usage": "both"}, {"sections": "ragged:4"}, {"out_recipe":
    "mxfp8-e4m3"}; of a contract its options: {"eps": 1e-5}.
    device: device of the tensors. Results are judged on it.
    seed: seed of the inputs.
    declares: declarations of a backend (docs/backends.md#declarations), such as {"gemm": "sequential"}.
    tensor_scale_is, layout, nibbles, transposed: conventions of the result of quantize, as of
    `narrowgauge.adapt.quantized`.
    finite: whether the function promises nothing for NaN and infinity: cases with such inputs are left out.
    constraints: what the function takes, such as {"K": 128} (docs/libraries.md#an-adapter-of-your-own). Other
    cases are left out.

    Every case runs twice on guarded copies of its inputs: a write outside of a tensor, an element that is not written
    and a result that is not repeatable are failures too. NotImplementedError makes a case unsupported. So does any
    other exception in a default case that kernels may refuse: a last block that is not full, more than two sizes, a
    size of a gemm that is no multiple of 16, a view that is not contiguous, a call under `torch.no_grad()`, under
    `torch.inference_mode()` or with tensors that require grad. Other exceptions are failures.

    Returns a summary. Raises AssertionError if a case fails, with a group for each cause and a line that reproduces it,
    and if no case passes; ValueError and TypeError for arguments that do not fit together. Settings and generators of
    torch and the floating-point environment are afterwards as before.
    """
    __tracebackhide__ = True
    chosen = {"families": families, "shapes": shapes, "dtypes": dtypes, "keys": keys or {}}
    contract, operation, selected = selected_cases(
        subject, recipe, operation, chosen, layout=layout, parameters=parameters_of(function)
    )
    options: dict[str, Any] = {
        "contract": None if contract in CONTRACTS.values() else contract, "operation": operation,
        "device": str(torch.device(device)), "seed": seed, "declares": dict(declares or {}),
        "tensor_scale_is": tensor_scale_is, "layout": layout, "nibbles": nibbles, "transposed": transposed,
        "finite": finite, "constraints": dict(constraints or {}),
    }  # fmt: skip
    for name in _CONVENTIONS[:3]:
        check_choice(name, options[name])
    if not selected:
        raise ValueError("families, shapes or dtypes is empty; leave it out for the default")
    method, *others = dict.fromkeys(case.called for case, _ in selected)
    if others:
        raise ValueError(f"the cases call {method} and {others[0]}, which a function cannot both be; check them apart")
    changed = [name for name in _CONVENTIONS if options[name] != _DEFAULTS[name]]
    if changed and (operation != "quantize" or method != operation):
        raise ValueError(f"{changed[0]} is a convention of results of quantize; the cases call {method}")
    recipes = "+".join(dict.fromkeys(case.recipe_label for case, _ in selected))
    title = f"{name_of_function(function)}, {operation} {recipes}".rstrip()
    with settings_kept("check", options["device"]):
        outcomes: list[Outcome] = []
        records = _records(function, selected, options, outcomes)
    failed = [record for record in records if record["verdict"] not in ("pass", "unsupported")]
    passed = [record for record in records if record["verdict"] == "pass"]
    unsupported = Counter(record["message"] for record in records if record["verdict"] == "unsupported")
    compared = sum(map(elements_compared, passed))
    if failed or not compared:
        rule = _rule_of(outcomes) if failed and operation == "quantize" else None
        raise AssertionError(_report(title, function, options, failed, len(records), unsupported, rule))
    return Checked(title, len(records), len(passed), compared, unsupported)


# ---- cases -----------------------------------------------------------------------------------------------------------


def selected_cases(
    subject: Any,
    recipe: Any,
    operation: str | None,
    chosen: Mapping[str, Any],
    *,
    layout: AnyLayout = "linear",
    parameters: Collection[str] = (),
) -> tuple[Contract | None, str, list[tuple[Case, bool]]]:
    """The contract of the cases, if any; the operation; and the cases, with True if a right kernel may refuse the case.

    Arguments as of `check`. `chosen`: families, shapes, dtypes and keys. `parameters`: names of the parameters of the
    function. Raises ValueError and TypeError.
    """
    contract, beginning = _contract_of(subject, operation), ""
    if contract is None and _begins_ids(subject) and (begun := CONTRACTS.get(subject.partition("/")[0])) is not None:
        _, recipe, chosen = _beginning(subject, dict(chosen))
        contract, beginning, subject = begun, subject, begun
        recipe = (recipe or None) if hold(begun).declared.recipes else None
    if contract is None:
        return None, *_selected(_one_of(subject, recipe), operation, dict(chosen), layout, parameters)
    if subject is not contract and not (isinstance(subject, str) and subject in CONTRACTS):
        recipe = _one_of(subject, recipe)
    operation, found = _of_contract(contract, operation, recipe, chosen)
    return contract, operation, _begun(beginning, found)


def _one_of(subject: Any, recipe: Any) -> Any:
    """The given argument. Raises TypeError for both or neither."""
    if (subject is None) == (recipe is None):
        wrong = "no recipe is given" if recipe is None else "a recipe is given twice"
        raise TypeError(f'{wrong}; it is check(function, "nvfp4"), or check(function, contract, recipe="nvfp4")')
    return recipe if subject is None else subject


def _contract_of(subject: Any, operation: str | None) -> Contract | None:
    """The given contract, or the package's contract named by the subject or the operation; None: another
    operation."""
    if isinstance(subject, Contract):
        return subject
    return CONTRACTS.get(subject if isinstance(subject, str) else "") or CONTRACTS.get(operation or "")


def _of_contract(
    contract: Contract, operation: str | None, recipe: Any, chosen: Mapping[str, Any]
) -> tuple[str, list[tuple[Case, bool]]]:
    """The name of a contract and its cases, with whether a right function may refuse them."""
    cls = hold(contract)
    if operation not in (None, cls.operation):
        raise ValueError(f"operation is {operation!r}, and the contract is {cls.operation}; leave operation out")
    given = [] if recipe is None else [recipe] if isinstance(recipe, str | Recipe | Case) else list(recipe)
    if given and all(isinstance(entry, Case) or "/" in str(entry) for entry in given):
        if any(chosen[name] for name in ("families", "shapes", "keys")):
            raise ValueError("families, shapes and keys choose cases of a recipe; give a recipe, or cases alone")
        cases = _given(given)
        _require_operation(cases, cls.operation)
        return cls.operation, [(case, False) for case in cases]
    recipes = [str(named(entry)) for entry in given if not isinstance(entry, Case)]
    dtypes = [name_of(dtype) for dtype in chosen["dtypes"]]
    more = {name: chosen[name] for name in ("families", "shapes", "keys")}
    return cls.operation, cls.usual(recipes, dtypes=dtypes, **more)


def _selected(
    recipe: Any, operation: str | None, chosen: dict[str, Any], layout: AnyLayout, known: Collection[str]
) -> tuple[str, list[tuple[Case, bool]]]:
    """The operation, and the cases with whether an exception means that the function does not support the case.

    `chosen`: families, shapes, dtypes and keys of the caller. `known`: names of parameters of the function.
    """
    beginning = ""
    if _begins_ids(recipe):
        beginning = recipe
        of_text, recipe, chosen = _beginning(recipe, chosen)
        operation = operation or of_text
        if of_text != ("quantize" if operation == "dequantize" else operation):
            raise ValueError(f"operation is {operation!r}, and {beginning!r} begins ids of {of_text}; leave it out")
    elif not isinstance(recipe, Recipe) and (not isinstance(recipe, str) or case_from_id(recipe) is not None):
        cases = _given(recipe)
        if chosen["families"] is not None or chosen["shapes"] is not None or chosen["keys"]:
            raise ValueError("families, shapes and keys choose cases of a recipe; give a recipe, or cases alone")
        operation = operation or cases[0].operation
        _check_operation(operation)
        _require_operation(cases, operation)
        return operation, [(case, False) for case in cases]
    operation = operation or "quantize"
    _check_operation(operation)
    return operation, _begun(beginning, _cases(recipe, operation, **chosen, layout=layout, known=known))


def _begins_ids(subject: Any) -> bool:
    """Whether the subject is the beginning of ids, and not an id."""
    return (
        isinstance(subject, str) and "/" in subject and not RULE_FILE.fullmatch(subject)
        and case_from_id(subject) is None
    )  # fmt: skip


def _begun(beginning: str, found: list[tuple[Case, bool]]) -> list[tuple[Case, bool]]:
    """The cases with ids of this beginning. Raises ValueError if none of several does."""
    begun = [pair for pair in found if pair[0].id.startswith(beginning)]
    if found and not begun:
        raise ValueError(
            f"{beginning!r} is no id of a case, and no case of this check begins with it"
            f"{nearest(beginning, [case.id for case, _ in found])}; the first one is {found[0][0].id!r}"
        )
    return begun


def _check_operation(operation: str) -> None:
    """Raise ValueError for an operation without a function to check."""
    others = [name for name, cls in CASE_CLASSES.items() if not cls.composed and name not in OPERATIONS]
    if wrong := one_of([*OPERATIONS, *others])(operation):
        raise ValueError(f"operation {wrong}")


def _beginning(text: str, chosen: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Operation and recipe of the beginning of an id, and the choices of the caller with its shape and all dtypes."""
    operation, *parts = text.split("/")
    if operation not in CASE_CLASSES:
        raise ValueError(f"{text!r} is no id of a case: operation {one_of(CASE_CLASSES)(operation)}")
    place = next((n for n, part in enumerate(parts) if re.fullmatch(r"\d{1,18}(x\d{1,18})+", part, re.ASCII)), None)
    if place is not None and chosen["shapes"] is None:
        chosen = chosen | {"shapes": [tuple(map(int, parts[place].split("x")))]}
        chosen |= {"dtypes": tuple(TORCH_DTYPES.values())} if len(parts) > place + 1 else {}
    return operation, (parts[0] if place != 0 else "nvfp4"), chosen


def _require_operation(cases: Iterable[Case], operation: str) -> None:
    """Raise ValueError for a case of a different operation."""
    for case in cases:
        if case.operation != ("quantize" if operation == "dequantize" else operation):
            remedy = "`narrowgauge run` does" if case.composed else f"give operation={case.operation!r}"
            raise ValueError(f"operation is {operation!r}, which does not run {case.id}; {remedy}")


def _given(recipe: object) -> list[Case]:
    """The cases named by the caller. Raises ValueError and TypeError."""
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
    keys: Mapping[str, Any],
    *,
    layout: AnyLayout,
    known: Collection[str],
) -> list[tuple[Case, bool]]:
    """The cases of a recipe, and whether an exception means that the function does not support the case.

    `known`: names of parameters of the function.
    """
    chosen = named(recipe)
    kind = "quantize" if operation == "dequantize" else operation
    require_keys(kind, keys, ("recipe", "shape", "inputs"))
    cls = CASE_CLASSES[kind]
    own = operation == "quantize" and chosen.rounding == "stochastic" and "random" not in known
    every = list((_OWN_RANDOM if own else cls.families()) if families is None else families)
    few = [family for family in ("normal", "position") if family in every][own:] or every[:1]
    of_tails = [*few, *(f for f in ("amax-2m56-last", "rising") if f in every)]  # an amax that only the tail holds
    shapes_and_main = list(cls.usual_shapes(chosen) if shapes is None else shapes)
    if not shapes_and_main or not every:
        return []
    main, *tails = shapes_and_main
    wanted: list[tuple[Sequence[int], str, Mapping[str, Any], bool]] = [(main, family, {}, False) for family in every]
    for shape in tails:
        optional = shapes is None and cls.may_refuse(shape, chosen)
        wanted += [(shape, family, {}, optional) for family in (every if shapes else of_tails)]
    for shape in (main, *(tails[1:2] if shapes is None else ())):  # options beside whole tiles and beside tails
        refuses = shape != main and cls.may_refuse(shape, chosen)
        wanted += [(shape, few[-1], more, optional or refuses) for more, optional in cls.usual_options(known)]
    wanted += [(main, few[-1], {"autograd": mode}, True) for mode in cls.autograd_modes[1:]]
    cases: dict[Case, bool] = {}
    for shape, family, more, optional in wanted:
        for dtype in dtypes:
            if "out" in more and tuple(dtypes) != (torch.bfloat16,):  # the caller chose the dtypes of outputs
                continue
            values = {**cls.usual_keys(chosen, name_of(dtype)), **more, **keys, "shape": shape, "inputs": family}
            if kind == "quantize" and layout == TILES:
                values["scales"] = "swizzled"
            try:
                case = make_case(kind, chosen, values)
            except ValueError:
                if (shapes is None and shape != main) or (families is None and family != "normal"):
                    continue  # a recipe that rotates whole groups has no such tail, and float16 not every family
                raise
            cases.setdefault(case, optional)
    return list(cases.items())


# ---- running ---------------------------------------------------------------------------------------------------------


def _records(
    function: Callable[..., Any],
    selected: list[tuple[Case, bool]],
    options: Mapping[str, Any],
    outcomes: list[Outcome],
) -> list[dict[str, Any]]:
    """Records of the cases (`harness.records.record`). Outcomes of small quantized matrices are added to `outcomes`."""
    declares = dict(options["declares"])
    stochastic = any(find_recipe(name).rounding == "stochastic" for case, _ in selected for name in case.recipe_names)
    if options["operation"] == "quantize" and stochastic and "random" not in parameters_of(function):
        declares["random"] = "own"
    conventions = {name: options[name] for name in _CONVENTIONS}
    backend = FunctionBackend(
        name_of_function(function), function, selected[0][0], options["operation"], declares=declares,
        conventions=conventions, constraints=options["constraints"],
    )  # fmt: skip

    def keep(_: Inputs, outcome: Outcome) -> None:
        elements = sum(judged.subject.matrix.numel() for judged in outcome.judged)
        if 0 < elements <= _KEPT_ELEMENTS and len(outcomes) < _KEPT:
            outcomes.append(outcome)

    sharing = count_chance_cases(case for case, _ in selected)
    records = []
    # Causes of earlier cases are tried first, and the diagnosis of a small case tries all deviations.
    for case, optional in sorted(selected, key=lambda pair: pair[0].work if pair[0].smallest_first else 0):
        backend.raised = None
        if options["finite"] and not _is_finite(make_inputs(case, seed=options["seed"])):
            record = new_record(case, backend=backend.name, device=options["device"], seed=options["seed"])
            record.verdict, record.message = "unsupported", "finite is True, and the inputs hold NaN or infinity"
            records.append(record.to_dict())
            continue
        failing = sum(record["verdict"] == "fail" for record in records)
        record = run_case(
            case, backend, device=options["device"], seed=options["seed"], sharing=sharing, on_outcome=keep,
            diagnosis=CASE if failing < _SEARCHED else CASE >> 3,
        )  # fmt: skip
        raised = backend.raised
        if raised is not None and record.verdict == "error" and optional:
            record.verdict, record.message = "unsupported", f"{type(raised).__name__}: {raised}"
        elif (
            isinstance(raised, NotImplementedError)
            and record.verdict == "pass"
            and options["operation"] == "dequantize"
        ):  # quantize is judged without it
            record.verdict, record.message = "unsupported", str(raised) or "NotImplementedError"
        records.append(record.to_dict())
    return records


def _rule_of(outcomes: list[Outcome]) -> NearestRule | None:
    """The nearest rule. A search that fails costs itself, not the verdict."""
    try:
        return nearest_rule(outcomes)
    except Exception:
        return None


def _is_finite(inputs: Inputs) -> bool:
    """Whether no input holds NaN or infinity."""
    numbers = (x for x in inputs.tensors.values() if x.is_floating_point())
    return all(bool(x.float().isfinite().all()) for x in numbers)


@contextmanager
def settings_kept(caller: str, device: str) -> Iterator[None]:
    """The default settings of torch, and after the context the settings and the states of the generators of before.

    Raises ValueError for a device without a GPU, and TypeError under FakeTensorMode, with the name of the `caller`.
    """
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {device!r}, and torch sees no GPU; `narrowgauge doctor` says more")
        torch.cuda.init()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with default_settings(), torch.random.fork_rng(devices):
        if type(torch.empty(0)) is not torch.Tensor:
            raise TypeError(f"{caller} needs numbers; tensors of FakeTensorMode have none: call it outside of the mode")
        yield


# ---- report ----------------------------------------------------------------------------------------------------------


def _report(
    subject: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    failed: list[dict[str, Any]],
    count: int,
    unsupported: Mapping[str, int],
    rule: NearestRule | None,
) -> str:
    """The nearest rule, and failures by cause. The first groups have a line to reproduce a case."""
    if not failed and count > sum(unsupported.values()):
        return f"{subject}: nothing was compared, all matrices are empty{_unsupported(unsupported)}"
    if not failed:
        return f"{subject}: no case passed{_unsupported(unsupported)}"
    groups = group(failed)
    lines = [f"{subject}: {len(failed)} of {plural(count, 'case')} did not pass{_unsupported(unsupported)}"]
    named = rule is not None and not rule.wrong and not rule.changes
    wrong = [entry.explanation for entry in groups if entry.verdict == "fail"]
    explained = len(wrong) == 1 and wrong[0] is not None and wrong[0]["exact"]
    if rule is not None and (named or not explained):
        lines.append(f"nearest rule: {rule}")
        if named:
            lines.append(f"next: {reproduction(function, rule.name, options)}")
    for entry in groups[:GROUPS]:
        lines += ["", *_group_lines(entry, failed, function, options)]
    if others := groups[GROUPS:]:
        lines += ["", *(entry.title for entry in others[:TITLES])]
        lines += [f"and {plural(len(others) - TITLES, 'more group')} of failures"] if len(others) > TITLES else []
    if any(record["verdict"] == "error" for record in failed):
        lines += [
            "",
            "inputs that the kernel refuses: raise NotImplementedError, or choose shapes, families and dtypes",
        ]
    return escape("\n".join(lines))


def _group_lines(
    entry: Group, failed: list[dict[str, Any]], function: Callable[..., Any], options: Mapping[str, Any]
) -> list[str]:
    """A group of failures: cause, sentence and elements of the first case, names of further cases."""
    members = [record for record in failed if record in entry.records]
    first = next((record for record in members if entry.explanation in record["explanations"]), members[0])
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
    contract: Contract | None = options["contract"]
    given = _DEFAULTS | {"operation": case.partition("/")[0], "contract": contract}  # which the id says
    changed = "".join(f", {key}={value!r}" for key, value in options.items() if value != given[key])
    parts: list[tuple[str, str, Any]] = [
        (name_of_function(function), str(getattr(function, "__module__", "")), function)
    ]
    if contract is not None:
        parts.append((contract.function.__name__, contract.function.__module__, contract))
    modules = [_module_to_import(*part) for part in parts]
    known = all(modules)
    names = [f"{module}.{name}" if known else name for module, (name, _, _) in zip(modules, parts, strict=True)]
    call = f"narrowgauge.check({', '.join(names)}, {'recipe=' if contract else ''}{case!r}{changed})"
    if not known:
        return call
    imported = ", ".join(dict.fromkeys(["narrowgauge", *modules]))
    return with_variables(shlex.join(["python", "-c", f"import {imported}; {call}"]))


def _module_to_import(name: str, module: str, wanted: Any) -> str:
    """The module in which a fresh process in this folder finds an object by its name, or the empty string."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not wanted or module == "__main__":
        return ""
    top = module.partition(".")[0]
    path = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *site.getsitepackages()]
    spec, here = PathFinder.find_spec(top, path), sys.modules[top].__spec__
    return module if spec is not None and here is not None and spec.origin == here.origin else ""
