"""The differences of a quantizer from the nearest dialect, as the text of an issue for its authors.

Every difference has a program that shows it, and a third opinion in exact rational numbers, which shares no code with
the quantizer or with the reference.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from narrowgauge.harness.backends.backend import Backend, BackendError, Unsupported
from narrowgauge.harness.backends.host import HostLost
from narrowgauge.harness.backends.loading import LIBRARIES, load_implementation
from narrowgauge.harness.cases.cost import room
from narrowgauge.harness.operations.quantize.call import quantize
from narrowgauge.harness.operations.stages.quantized import code_view, scale_view
from narrowgauge.harness.tools.dialect.differences import KINDS, SAME_VALUES, Difference, classified
from narrowgauge.harness.tools.dialect.fit import Fit
from narrowgauge.harness.tools.dialect.inputs import TIMEOUT, shape_of
from narrowgauge.harness.tools.dialect.report import changes, sentence
from narrowgauge.harness.tools.dialect.rules import raw
from narrowgauge.harness.tools.dialect.versions import line
from narrowgauge.reference.quantize.layout import elements, linear_scales
from narrowgauge.spec.formats import FP32, Format
from narrowgauge.spec.recipes import Recipe, find_recipe

_MOST = 3
"""Largest number of classes of differences in an issue."""


def issue(fit: Fit, backend: Backend, name: str, *, seed: int = 0) -> str:
    """Markdown: versions, and for the first classes of differences a program, the bytes, and exact numbers.

    `backend`, `name`: the quantizer and its name, which small inputs are tried on. `seed`: that of the fit.
    """
    differences = classified(fit.rules, fit.nearest.plain)
    if not differences:
        return f"{name}: {sentence(fit)}. There is nothing to report."
    differences.sort(key=_interest)
    kinds = [difference.kind for difference in differences if difference.kind not in SAME_VALUES]
    listed = ", ".join(kinds[:_MOST]) or "bytes with equal values"
    title = f"# {fit.recipe} in {name} differs from {fit.nearest.dialect}: {listed}"
    parts = [title, f"Versions: {line(name)}.{_calls(name, fit.recipe)}"]
    for difference in differences[:_MOST]:
        parts += _part(fit, backend, name, difference, seed)
    if len(differences) > _MOST:
        parts.append("## Further differences\n\n" + "\n".join(f"- {other}" for other in differences[_MOST:]))
    parts.append(f"## All inputs\n\n{sentence(fit)}.")
    return "\n\n".join(parts)


def _interest(difference: Difference) -> tuple[bool, bool, bool]:
    """Key of the order of an issue: ordinary numbers first, bytes with equal values last."""
    special = any(word in difference.kind for word in ("special", "NaN", "infinity", "subnormal", "ends"))
    return difference.kind in SAME_VALUES, special, difference.known


def _calls(name: str, recipe: str) -> str:
    """The function of the library that a built-in adapter calls, as a sentence."""
    if name.partition(":")[0] not in LIBRARIES:
        return ""
    calls: dict[str, str] = getattr(load_implementation(name), "calls", {})
    call = calls.get(recipe.partition("@")[0]) or calls.get("")
    return f" The backend calls `{call}`." if call else ""


def _part(fit: Fit, backend: Backend, name: str, difference: Difference, seed: int) -> list[str]:
    stack, place, rule = fit.observed.stacks[difference.place.stack], difference.place, fit.nearest.plain
    own = f"bytes by a choice of its own: {changed}" if (changed := changes(fit)) and fit.explained else ""
    meaning = KINDS.get(difference.kind, own or "bytes that no known choice explains")
    values = " Decoded values are the same." if difference.kind in SAME_VALUES else ""
    text = [f"## {difference}", f"Class: {meaning}.{values}"]
    of_scales = place.stage == "scales"
    height = len(stack.scales) // len(stack.names) if of_scales else stack.height
    number, row = divmod(place.row, height)
    x = stack.x[number * stack.height : (number + 1) * stack.height]
    kernel = (stack.scales if of_scales else stack.codes)[place.row, place.column]
    small = _small(x, rule, place.stage, row, place.column)
    if _shows(fit, backend, small, place.stage, row, place.column, kernel):
        text.append(_program(fit, name, small, place.stage, row, place.column))
    else:
        text.append(_whole_program(fit, name, stack.names[number], place.stage, row, place.column, seed))
    made = fit.rules.scales(place.stack, rule)[0] if of_scales else fit.rules.codes(place.stack, rule)
    view, fmt = (scale_view, rule.scale) if of_scales else (_code_view, rule.element)
    (a, a_bits), (e, e_bits) = (
        view(t[place.row, place.column], fmt) for t in (kernel.view(1, 1).expand_as(made), made)
    )
    text.append(f"Actual: {a_bits} = {a}. Expected, by dialect {fit.nearest.dialect}: {e_bits} = {e}.")
    scale = None if of_scales else _scale_of(stack.scales, rule, number, row, place.column, len(stack.names))
    text.append(_opinion(x, rule, place.stage, row, place.column, scale))
    return text


def _code_view(code: torch.Tensor, fmt: Format) -> tuple[float | str, str]:
    return code_view(int(code), fmt)


# ---- a small input ---------------------------------------------------------------------------------------------------


def _block(x: torch.Tensor, rule: Recipe, stage: str, row: int, column: int) -> tuple[slice, slice]:
    """Rows and columns of the block with a scale or an element."""
    if rule.whole:
        return slice(0, x.shape[0]), slice(0, x.shape[1])
    height, width = rule.block
    first = row * rule.stored_rows if stage == "scales" else row
    across = column if stage == "scales" else column // width
    return slice(first // height * height, first // height * height + height), slice(
        across * width, (across + 1) * width
    )


def _small(x: torch.Tensor, rule: Recipe, stage: str, row: int, column: int) -> torch.Tensor:
    """`x` with zeros for all elements but the element, the amax of its block, and the amax of the tensor."""
    kept = torch.zeros_like(x, dtype=torch.bool)
    rows, columns = _block(x, rule, stage, row, column)
    inside = torch.zeros_like(kept)
    inside[rows, columns] = True
    for region in (torch.ones_like(kept), inside):
        magnitude = x.float().abs().nan_to_num(nan=math.inf).masked_fill(~region, -1.0)
        kept.view(-1)[int(magnitude.argmax())] = True
    if stage == "codes":
        kept[row, column] = True
    return torch.where(kept, x, torch.zeros_like(x))


def _shows(
    fit: Fit, backend: Backend, x: torch.Tensor, stage: str, row: int, column: int, expected: torch.Tensor
) -> bool:
    """Whether the quantizer gives the same byte for the small input."""
    recipe = find_recipe(fit.recipe)
    if recipe.rounding == "stochastic" or recipe.tensor_scale == "given":
        return False
    try:
        backend.host.begin_case(TIMEOUT, room(str(x.device.type)))
        q = quantize(backend, x, recipe)
        backend.host.end_case()
    except (BackendError, Unsupported, HostLost):
        return False
    codes = elements(q.codes, x.shape[1], fit.nearest.plain)
    if recipe.element.bits == 4 and fit.observed.packing == "high-first":
        codes = codes.view(len(codes), -1, 2).flip(2).reshape(codes.shape)
    got = (linear_scales(q) if stage == "scales" else codes)[row, column]
    return bool(torch.equal(raw(got.view(1, 1)), raw(expected.view(1, 1))))


def _printed(fit: Fit, stage: str, row: int, column: int) -> str:
    """A line that prints the actual bits of the issue."""
    recipe = find_recipe(fit.recipe)
    if stage == "scales":
        place = f"q.scales[{row}, {column}]"
        return f"print({place}.item())" if recipe.scale is FP32 else f'print(f"0b{{{place}:08b}}")'
    if recipe.element.bits != 4:
        return f'print(f"0b{{q.codes[{row}, {column}]:0{recipe.element.bits}b}}")'
    high = (column % 2 == 1) == (fit.observed.packing == "low-first")
    return f'print(f"0b{{q.codes[{row}, {column // 2}] {">> 4" if high else "& 15"}:04b}}")'


def _program(fit: Fit, name: str, x: torch.Tensor, stage: str, row: int, column: int) -> str:
    dtype = str(x.dtype)
    lines = [f"x = torch.zeros({x.shape[0]}, {x.shape[1]}, dtype={dtype})"]
    for i, j in ((x != 0) | x.isnan() | x.signbit()).nonzero().tolist():
        value = float(x[i, j])
        lines.append(f"x[{i}, {j}] = " + (repr(value) if math.isfinite(value) else f'float("{value}")'))
    return _code_block([*lines, *_call(fit, name), _printed(fit, stage, row, column)])


def _whole_program(fit: Fit, name: str, input_name: str, stage: str, row: int, column: int, seed: int) -> str:
    family, dtype = input_name.split(" ")
    shape = shape_of(fit.observed.recipe)
    lines = [
        "from narrowgauge.harness.operations.quantize.case import QuantizeCase",
        "from narrowgauge.harness.operations.registry import make_inputs",
        "",
        f'case = QuantizeCase(recipe="{fit.recipe}", shape={shape}, dtype="{dtype}", inputs="{family}")',
        f"x = make_inputs(case, seed={seed}).x",
    ]
    return _code_block([*lines, *_call(fit, name), _printed(fit, stage, row, column)])


def _call(fit: Fit, name: str) -> list[str]:
    return [f'q = quantize(load_backend("{name}"), x, narrowgauge.recipe("{fit.recipe}"))']


def _code_block(lines: list[str]) -> str:
    head = [
        "import narrowgauge",
        "import torch",
        "from narrowgauge.harness.backends.backend import load_backend",
        "from narrowgauge.harness.operations.quantize.call import quantize",
        "",
    ]
    return "\n".join(["```python", *head, *lines, "```"])


# ---- a third opinion -------------------------------------------------------------------------------------------------


def _scale_of(scales: torch.Tensor, rule: Recipe, number: int, row: int, column: int, inputs: int) -> torch.Tensor:
    """The quantizer's scale of an element."""
    height = len(scales) // inputs
    across = 0 if rule.whole else column // rule.block[1]
    return scales[number * height + (0 if rule.whole else row // rule.stored_rows), across]


def _opinion(x: torch.Tensor, rule: Recipe, stage: str, row: int, column: int, scale: torch.Tensor | None) -> str:
    """The byte by exact rational numbers, without the roundings on the way."""
    rows, columns = _block(x, rule, stage, row, column)
    block, tensor = _amax(x[rows, columns]), _amax(x[row : row + 1] if rule.granularity == "row" else x)
    decode = Fraction(1)
    if rule.tensor_scale != "none" and not rule.whole:
        if tensor is None or tensor == 0:
            return "Exact numbers: none, because the amax of the tensor is 0, infinite or NaN."
        decode = tensor / Fraction(rule.max_product)
    if stage == "scales":
        if block is None:
            return "Exact numbers: none, because the amax of the block is infinite or NaN."
        largest = Fraction(rule.element.max)
        if rule.block_scale == "amax*2^-emax":
            largest = Fraction(2) ** math.floor(math.log2(largest))
        exact = block / largest / decode
        formula = f"amax/{float(largest):g}" + ("" if decode == 1 else "/(tensor amax/2688)")
        return f"Exact numbers: {formula} = {float(exact)!r}. {_nearest_text(exact, rule.scale, rule.scale_rounding)}"
    assert scale is not None
    stored = float(scale) if rule.scale is FP32 else rule.scale.value(int(scale))
    value = float(x[row, column])
    if not math.isfinite(value) or not math.isfinite(stored) or stored == 0:
        return f"Exact numbers: none, because x is {value} and the block scale is {stored}."
    exact = Fraction(value) / (Fraction(stored) * decode)
    return f"Exact numbers: x/scale = {float(exact)!r} under the stored scales. {_nearest_text(exact, rule.element)}"


def _amax(x: torch.Tensor) -> Fraction | None:
    """The largest magnitude, or None if it is infinite or NaN."""
    largest = float(x.double().abs().max())
    return Fraction(largest) if math.isfinite(largest) else None


def _nearest_text(exact: Fraction, fmt: Format, rounding: str = "") -> str:
    """The nearest numbers of a format. `rounding`: the rule's rounding of a power of two; `up` and `down` are said."""
    if fmt is FP32:
        return f"The nearest float32 number is {float(torch.tensor(float(exact)))!r}."
    if not fmt.signed:
        if exact == 0:
            return "It has no power of two."
        power = math.floor(math.log2(exact)) if exact > 0 else 0
        power += (Fraction(2) ** (power + 1) <= exact) - (Fraction(2) ** power > exact)
        lowest, highest = -fmt.bias, fmt.max_code - fmt.bias
        if power < lowest:
            return f"The smallest scale is 2^{lowest} (code 0)."
        if power >= highest:
            return f"The largest scale is 2^{highest} (code {fmt.max_code})."
        codes = f"codes {power - lowest} and {power - lowest + 1}"
        text = f"The powers of two around it are 2^{power} and 2^{power + 1} ({codes})."
        direction = rounding.removesuffix("-log2")
        if direction in ("up", "down"):
            up = direction == "up" and Fraction(2) ** power != exact
            text += f" Rounded {direction} it is 2^{power + up} (code {power - lowest + up})."
        return text
    distances = sorted((abs(Fraction(v) - abs(exact)), code) for code, v in enumerate(fmt.values[: fmt.max_code + 1]))
    (least, code), (second, other) = distances[:2]
    sign = fmt.sign_code if exact < 0 else 0
    found = f"{code_view(code | sign, fmt)[1]} = {fmt.value(code | sign)}"
    if least == second and abs(exact) <= fmt.max:
        return f"It is a tie of {found} and {code_view(other | sign, fmt)[1]} = {fmt.value(other | sign)}."
    return f"The nearest number is {found}."
