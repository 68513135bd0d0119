"""Formulas of steps, for the sentences about changes."""

from __future__ import annotations

from narrowgauge.spec.program import (
    ACCUMULATED,
    CHOSEN,
    CODES,
    COLUMNS,
    DECODE,
    DEQUANTIZE,
    HALF,
    HEADS,
    JOINED,
    OF_EXPERT,
    ONCE,
    PLACES,
    READ,
    RESCALED,
    ROWS_OF_CHOICES,
    SCORES,
    SEGMENTS,
    SLOTS,
    SQUEEZED,
    TAKE,
    TRANSPOSED,
    UNSQUEEZED,
    WEIGHTED,
    WEIGHTS,
    Program,
    Step,
)

_LONGEST = 44
_SUM, _PRODUCT, _ATOM = 1, 2, 3
_INFIX = {
    "add": ("{} + {}", _SUM), "subtract": ("{} − {}", _SUM), "multiply": ("{}·{}", _PRODUCT),
    "divide": ("{}/{}", _PRODUCT),
}  # fmt: skip
_ORDINALS = ("first", "second")
_SHORT = {
    SCORES: "q·k", WEIGHTED: "Σ p·v", RESCALED: "p", WEIGHTS: "the rounded p", SEGMENTS: "request", HEADS: "head",
    PLACES: "key", SLOTS: "slots",
}  # fmt: skip
"""Formulas of the steps of sequences."""


def formula(program: Program, number: int) -> str:
    """The formula of a step, from the names of the arguments; inner parts of a long formula are "…"."""
    found = _text(program, number, 99)[0]
    for depth in (4, 3, 2, 1):
        if len(found) <= _LONGEST:
            break
        found = _text(program, number, depth)[0]
    return found


def _text(program: Program, number: int, depth: int) -> tuple[str, int]:
    """The formula and how strongly it binds."""
    step = program.steps[number]
    if step.function in (
        "float32",
        "cast",
        "merged",
        ONCE,
        DECODE,
        DEQUANTIZE,
        READ,
        SQUEEZED,
        UNSQUEEZED,
        ROWS_OF_CHOICES,
    ):
        return _text(program, step.operands[0], depth)
    if step.function == HALF:
        return str(step.options["half"]), _ATOM
    if step.function in ("argument", CODES):
        return str(step.options["name"]), _ATOM
    if step.function == HALF:
        return str(step.options["half"]), _ATOM
    if step.function in _SHORT:
        return _SHORT[step.function], _ATOM
    if step.function == "constant":
        return f"{step.options['value']:.6g}", _ATOM
    if step.function == "part":
        return f"the {_ORDINALS[step.options['part']]} half of {_text(program, step.operands[0], depth)[0]}", _ATOM
    if step.function == COLUMNS:
        return f"{_text(program, step.operands[0], depth)[0]} {step.options['order']}", _ATOM
    if step.function in (TAKE, CHOSEN, OF_EXPERT):
        table, index = (_text(program, operand, depth)[0] for operand in step.operands)
        return f"{table}[{index}]", _ATOM
    if depth == 0:
        return "…", _ATOM
    if step.function == "any_of":
        return _text(program, step.operands[0], depth)
    operands = [_text(program, operand, depth - 1) for operand in step.operands]
    if step.function in _INFIX:
        pattern, binding = _INFIX[step.function]
        strict = step.function in ("subtract", "divide")
        (a, one), (b, other) = operands
        a = f"({a})" if one < binding else a
        b = f"({b})" if other < binding or (strict and other == binding) else b
        return pattern.format(a, b), binding
    return _applied(step, operands)


def _applied(step: Step, operands: list[tuple[str, int]]) -> tuple[str, int]:
    texts = [text for text, _ in operands]
    inner = texts[0] if operands[0][1] == _ATOM and " " not in texts[0] else f"({texts[0]})"
    if step.function == "square":
        return f"{inner}²", _ATOM
    if step.function == "negative":
        return f"−{inner}", _PRODUCT
    if step.function == "absolute":
        return f"|{texts[0]}|", _ATOM
    if step.function == "compare":
        return f"{texts[0]} {step.options['relation']} {texts[1]}", 0
    if step.function in ("roundings", TRANSPOSED):
        return operands[0]
    if step.function == JOINED:
        return f"({texts[0]}, {texts[1]})", _ATOM
    name = "sum" if step.function in ("sum_of", ACCUMULATED) else step.function
    return f"{name}({', '.join(texts)})", _ATOM
