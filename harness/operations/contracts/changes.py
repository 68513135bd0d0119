"""Causes of wrong bytes under a contract: the same contract with one step changed.

To explain wrong bytes, the contract is evaluated once more with one change at one step. The change is a candidate if
the kernel's bytes fit the changed contract. A change that is not in the list may give the same bytes, so the sentence
says how many were tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowgauge.harness.checks.stage import StageResult
from narrowgauge.harness.operations.stages.outcome import Cause, Limit
from narrowgauge.reference.contracts.evaluate import judged
from narrowgauge.spec.program import ONCE, QUANTIZE, Program, Step
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe, recipes

Shown = Mapping[str, torch.Tensor | Quantized]
_ROWS = 32
"""Rows that are tried first: a change that fits them is evaluated on all rows."""
_LEFT_OUT = (1, 8, 16)
"""Elements of a row that a sum may leave out: a thread's tail, or a vector of 16-bit or 8-bit elements."""


@dataclass(frozen=True)
class Change:
    """A contract with one step changed."""

    name: str
    sentence: str
    program: Program


class Editor:
    """Makes programs with one step changed. Steps before and after keep their order."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def replaced(self, number: int, step: Step) -> Program:
        """The program with another step at a number; a cast that is left out gives its operand's dtype on."""
        steps = list(self.program.steps)
        steps[number] = step
        for later, other in enumerate(steps):
            if other.recipe is not None and other.operands[0] == number and other.dtype != step.dtype:
                steps[later] = replace(other, dtype=step.dtype)
        return replace(self.program, steps=tuple(steps))

    def inserted(self, number: int, function: str, dtype: str, **options: Any) -> Program:
        """The program with a step behind a number, whose result the later steps take."""
        steps, new = list(self.program.steps), number + 1
        moved = [
            replace(step, operands=tuple(new if n == number else n + (n > number) for n in step.operands))
            for step in steps[new:]
        ]
        axes = steps[number].axes
        steps[new:] = [Step(function, (number,), options, axes, dtype, steps[number].line), *moved]
        outputs = {name: n + (n > number) for name, n in self.program.outputs.items()}
        return replace(self.program, steps=tuple(steps), outputs=outputs)


def changes(program: Program) -> Iterator[Change]:
    """Every single change of every step."""
    editor = Editor(program)
    hidden = set(range(len(program.steps))) - set(program.outputs.values())
    for number, step in enumerate(program.steps):
        where = f"line {step.line}"
        for name, sentence, changed in _CHANGES.get(step.function, _no_changes)(editor, number, step):
            if number in hidden or step.recipe is not None or changed.outputs != program.outputs:
                yield Change(f"{step.function}-{number}:{name}", f"{sentence} ({where})", changed)


Made = Iterator[tuple[str, str, Program]]


def _no_changes(editor: Editor, number: int, step: Step) -> Made:
    return iter(())


def _cast(editor: Editor, number: int, step: Step) -> Made:
    out = replace(step, function="float32", dtype="float32")
    yield "left-out", f"the cast to {step.dtype} is left out", editor.replaced(number, out)
    truncated = replace(step, options={"rounding": "truncate"})
    yield "truncated", f"the cast to {step.dtype} truncates", editor.replaced(number, truncated)


def _add(editor: Editor, number: int, step: Step) -> Made:
    a, b = step.operands
    yield "second-left-out", f"{_operand(editor, b)} is not added", editor.replaced(number, _only(step, a))
    yield "first-left-out", f"{_operand(editor, a)} is not added", editor.replaced(number, _only(step, b))
    subtracted = replace(step, function="subtract" if step.function == "add" else "add")
    verb = "subtracted" if step.function == "add" else "added"
    yield "sign", f"{_operand(editor, b)} is {verb}", editor.replaced(number, subtracted)


def _multiply(editor: Editor, number: int, step: Step) -> Made:
    a, b = step.operands
    for one, other, which in ((a, b, "second"), (b, a, "first")):
        yield (
            f"{which}-left-out",
            f"there is no factor {_operand(editor, other)}",
            editor.replaced(number, _only(step, one)),
        )
        divided = replace(step, function="divide", operands=(one, other))
        yield f"{which}-divides", f"{_operand(editor, other)} divides", editor.replaced(number, divided)
        if _is_input(editor, other):
            changed = editor.inserted(other, "add_one", "float32")
            yield f"{which}-plus-one", f"the factor is 1 + {_operand(editor, other)}", changed
            for axis, what in ((-1, "column"), (-2, "row")):
                if len(editor.program.steps[other].axes) >= -axis and editor.program.steps[other].axes[axis] != "1":
                    changed = editor.inserted(other, "rolled", editor.program.steps[other].dtype, axis=axis)
                    yield f"{which}-of-next-{what}", f"{_operand(editor, other)} is that of the next {what}", changed


def _divide(editor: Editor, number: int, step: Step) -> Made:
    a, b = step.operands
    inverted = replace(step, operands=(b, a))
    yield (
        "inverted",
        f"{_operand(editor, b)} / {_operand(editor, a)} in place of the quotient",
        editor.replaced(number, inverted),
    )
    yield "left-out", f"there is no division by {_operand(editor, b)}", editor.replaced(number, _only(step, a))
    product = replace(step, function="multiply", options={})
    yield "multiplied", f"{_operand(editor, b)} multiplies", editor.replaced(number, product)


def _reduction(editor: Editor, number: int, step: Step) -> Made:
    noun = step.function
    for count in _LEFT_OUT:
        for name, columns in (("last", (0, -count)), ("first", (count, None))):
            changed = replace(step, options={**step.options, "columns": columns})
            some = f"the {name} {count} elements" if count > 1 else f"the {name} element"
            yield f"{name}-{count}-left-out", f"the {noun} leaves out {some} of a row", editor.replaced(number, changed)
    half = replace(step, options={**step.options, "half": True})
    yield "half", f"the {noun} takes the first half of a row alone", editor.replaced(number, half)
    if step.function == "mean":
        fewer = replace(step, options={**step.options, "less": 1})
        yield "by-k-minus-1", "the mean divides by K − 1", editor.replaced(number, fewer)
    if step.function == "amax":
        signed = replace(step, function="maximum_of", options={})
        yield (
            "without-magnitude",
            "the amax is the largest number and not the largest magnitude",
            editor.replaced(number, signed),
        )
    yield from _narrow(editor, number, step, noun)


def _function(editor: Editor, number: int, step: Step) -> Made:
    if step.function not in ("rsqrt", "sqrt"):
        opposite = editor.inserted(step.operands[0], "negative", "float32")
        yield "of-minus-x", f"{step.function} takes its argument with the other sign", opposite
    if step.function in ("exp", "exp2"):
        other = replace(step, function="exp2" if step.function == "exp" else "exp", options={})
        yield "base", f"{other.function} in place of {step.function}", editor.replaced(number, other)
    if step.function == "rsqrt":
        yield "root", "sqrt in place of rsqrt", editor.replaced(number, replace(step, function="sqrt", options={}))
    yield from _narrow(editor, number, step, step.function)


def _narrow(editor: Editor, number: int, step: Step, noun: str) -> Made:
    for dtype in ("bfloat16", "float16"):
        yield f"in-{dtype}", f"the {noun} is kept in {dtype}", editor.inserted(number, "cast", dtype)


def _limit(editor: Editor, number: int, step: Step) -> Made:
    a, b = step.operands
    yield "left-out", f"there is no {step.function} with {_operand(editor, b)}", editor.replaced(number, _only(step, a))


def _part(editor: Editor, number: int, step: Step) -> Made:
    other = replace(step, options={**step.options, "part": 1 - step.options["part"]})
    half = ("first", "second")[step.options["part"]]
    yield "other-half", f"the other half in place of the {half}", editor.replaced(number, other)


def _quantize(editor: Editor, number: int, step: Step) -> Made:
    recipe = find_recipe(step.recipe or "")
    for name in recipes():
        other = find_recipe(name)
        same = (other.element, other.block, other.scale, other.tensor_scale == "given", other.granularity) == (
            recipe.element, recipe.block, recipe.scale, recipe.tensor_scale == "given", recipe.granularity
        )  # fmt: skip
        if same and other != recipe:
            changed = replace(step, options={**step.options, "recipe": name})
            yield f"as-{name}", f"the recipe is {name}", editor.replaced(number, changed)


_CHANGES: dict[str, Callable[[Editor, int, Step], Made]] = {
    "cast": _cast, "add": _add, "subtract": _add, "multiply": _multiply, "divide": _divide, "sum": _reduction,
    "mean": _reduction, "amax": _reduction, "maximum": _limit, "minimum": _limit, "part": _part, QUANTIZE: _quantize,
    **dict.fromkeys(("exp", "exp2", "rsqrt", "sqrt", "tanh", "erf"), _function),
}  # fmt: skip
"""Changes of each kind of step."""


def _only(step: Step, operand: int) -> Step:
    """One operand alone, in the shape of the step."""
    return replace(step, function="expanded", operands=(operand, *step.operands), options={})


def _is_input(editor: Editor, number: int) -> bool:
    step = editor.program.steps[number]
    return step.function == "argument" or (step.function == "float32" and _is_input(editor, step.operands[0]))


def _operand(editor: Editor, number: int) -> str:
    """The name of an operand in a sentence."""
    step = editor.program.steps[number]
    if step.function == "argument":
        return str(step.options["name"])
    if step.function == "constant":
        return f"{step.options['value']:g}"
    if step.function in ("float32", "cast", ONCE):
        return _operand(editor, step.operands[0])
    return f"the {step.function} of line {step.line}"


# ---- search ----------------------------------------------------------------------------------------------------------


def changed_causes(
    program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown, stage: StageResult, limit: Limit
) -> Iterable[Cause]:
    """The changes under which all results of the kernel are right."""
    few = _some_rows(program, tensors, shown, stage)
    tried, found = 0, []
    for change in changes(program):
        if not limit.may_try():
            break
        tried += 1
        if (few is None or _fits(change.program, *few, amax=False)) and _fits(change.program, tensors, shown):
            found.append(change)
    for change in found:
        yield change.name, f"{change.sentence}: the bytes are those of this change, among {tried} that were tried"


def _fits(program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown, *, amax: bool = True) -> bool:
    """Whether all results are right. `amax`: whether the amax of a tensor is judged; that of some rows is another."""
    try:
        parts = judged(program, tensors, _as(program, shown))
        return not any(bool(part.wrong.any()) for name, part in parts if amax or not name.endswith("amax"))
    except ValueError:  # the change hides the amax of the tensor
        return False


def _as(program: Program, shown: Shown) -> Shown:
    """The results with the recipes of a changed contract."""
    found = dict(shown)
    for name, number in program.outputs.items():
        result = found.get(name)
        if isinstance(result, Quantized):
            found[name] = replace(result, recipe=find_recipe(program.steps[number].recipe or ""))
    return found


def _some_rows(
    program: Program, tensors: Mapping[str, torch.Tensor], shown: Shown, stage: StageResult
) -> tuple[dict[str, torch.Tensor], Shown] | None:
    """Inputs and results of some rows, wrong ones if there are any. None if rows cannot be judged alone."""
    axis, height = program.arguments[0].axes[:1], tensors[program.arguments[0].name].shape[0]
    by_rows = [program.steps[number].axes[:1] == axis for number in program.outputs.values()]
    if not all(by_rows) or height <= _ROWS or not all(map(_has_rows, shown.values())):
        return None
    wrong = stage.wrong_elements
    rows = torch.arange(_ROWS, device=tensors[program.arguments[0].name].device)
    if wrong is not None and wrong.shape[0] == height:
        rows = wrong.any(1).nonzero()[:_ROWS, 0]
    some = {a.name: tensors[a.name][rows] if a.axes[:1] == axis else tensors[a.name] for a in program.arguments}
    return some, {name: _rows_of(result, rows) for name, result in shown.items()}


def _has_rows(result: torch.Tensor | Quantized) -> bool:
    """Whether rows of a result are the result of rows, given its amax."""
    if isinstance(result, torch.Tensor):
        return True
    alone = result.recipe.whole or result.recipe.block[0] == 1
    scaled = result.recipe.tensor_scale in ("none", "given") or result.amax is not None
    return alone and scaled and not result.transposed and not result.swizzled


def _rows_of(result: torch.Tensor | Quantized, rows: torch.Tensor) -> torch.Tensor | Quantized:
    if isinstance(result, torch.Tensor):
        return result[rows]
    scales = result.scales if result.recipe.whole else result.scales[rows]
    amax = result.amax if result.amax is None or result.recipe.granularity == "tensor" else result.amax[rows]
    return replace(result, codes=result.codes[rows], scales=scales, amax=amax, shape=(len(rows), result.shape[1]))
