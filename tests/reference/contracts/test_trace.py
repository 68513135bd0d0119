"""Contracts as data: steps, digest, and functions that are no contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
import torch

from narrowgauge import contract as c
from narrowgauge.contract import ContractError, Program
from tests.reference.contracts.contracts import CONTRACTS, rmsnorm_quantize


def traced(function: Callable[..., Any], **options: Any) -> Program:
    found = c.contract(function)
    dtypes = {name: kind.dtypes[0] for name, (kind, _) in found.tensors.items()}
    return found.trace(dtypes, dict.fromkeys(found.recipes, "nvfp4"), options)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_program_is_data(contract: c.Contract) -> None:
    program = contract.trace(dict.fromkeys(contract.tensors, "bfloat16"), dict.fromkeys(contract.recipes, "nvfp4"), {})
    assert Program.from_json(program.to_json()) == program
    assert program.text().count("\n") == len(program.steps) - 1


def test_the_digest_is_that_of_the_steps() -> None:
    def digest(**changes: Any) -> str:
        dtype, recipe = changes.pop("dtype", "bfloat16"), changes.pop("recipe", "nvfp4")
        return rmsnorm_quantize.trace(dict.fromkeys(("x", "weight"), dtype), {"recipe": recipe}, changes).digest

    others = [digest(eps=1e-5), digest(rounded=False), digest(dtype="float16"), digest(recipe="mxfp4")]
    assert len({digest(), *others}) == 5
    assert digest() == digest(eps=1e-6)


def test_equal_steps_are_one_number() -> None:
    def twice(x: c.Matrix):
        z = c.float32(x)
        return c.cast((z + 1.0) * (z + 1.0), x.dtype)

    assert [step.function for step in traced(twice).steps] == [
        "argument",
        "float32",
        "constant",
        "add",
        "square",
        "cast",
    ]


def branches(x: c.Matrix):
    if c.float32(x) > 0:
        return x
    return c.cast(c.float32(x), x.dtype)


def of_torch(x: c.Matrix):
    return torch.relu(x)  # type: ignore[arg-type]


def of_method(x: c.Matrix):
    return x.relu()


def of_dtypes(x: c.Matrix, w: c.Row):
    return c.float32(x) * w


def of_axes(x: c.Matrix, w: Annotated[c.Row, ("N",)]):
    return c.float32(x) * c.float32(w)


def returns_nothing(x: c.Matrix):
    c.float32(x)


def to_int8(x: c.Matrix):
    return c.cast(c.float32(x), "int8")


def adds_text(x: c.Matrix):
    return c.float32(x) + "1"  # type: ignore[operator]


def divides(x: c.Matrix):
    return c.divide(c.float32(x), 3.0, "fast")


def unscaled(x: c.Matrix):
    return c.quantize(x, "fp8-static-e4m3")


def row(x: c.Row):
    return c.quantize(x, "nvfp4")


def drawn(x: c.Matrix):
    return c.quantize(x, "nvfp4-sr")


def drawn_of_other_rows(x: c.Matrix, bits: Annotated[c.Bits, ("K", "M/4")]):
    return c.quantize(x, "nvfp4-sr", random=bits)


def rotated_float32(x: c.Matrix):
    return c.quantize(c.float32(x), "nvfp4-rht")


def adds_bits(x: c.Matrix, bits: c.Bits):
    return c.float32(bits)


def transposed_row(x: c.Row):
    return c.transposed(x)


def joined_whole(x: c.Matrix):
    return c.joined(x, x)


@pytest.mark.parametrize(
    ("function", "line", "words"),
    [
        (drawn, 1, ["nvfp4-sr", "random=bits", "Bits"]), (drawn_of_other_rows, 1, ["(M, K/4)", "(K, M/4)"]),
        (rotated_float32, 1, ["nvfp4-rht", "float32", "c.cast"]), (adds_bits, 1, ["random bits", "random=bits"]),
        (transposed_row, 1, ["matrix", "(K)"]), (joined_whole, 1, ["half of an axis", "(M, K)"]),
        (branches, 1, ["c.where"]), (of_torch, 1, ["torch.relu"]), (of_method, 1, ["relu", "narrowgauge.contract"]),
        (of_dtypes, 1, ["bfloat16", "c.float32"]), (of_axes, 1, ["(M, K)", "(N)"]), (returns_nothing, 0, ["None"]),
        (to_int8, 1, ["int8", "bfloat16"]), (adds_text, 1, ["'1'"]), (divides, 1, ["fast", "quotient"]),
        (unscaled, 1, ["fp8-static-e4m3", "scale"]), (row, 1, ["matrix", "(K)"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_bad_contract_is_one_error_with_file_and_line(
    function: Callable[..., Any], line: int, words: list[str]
) -> None:
    with pytest.raises(ContractError) as raised:
        traced(function)
    first = function.__code__.co_firstlineno
    assert str(raised.value).startswith(f"{__file__}:{first + line}: ")
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, ["parameter x", "Matrix"]),
        (eval("lambda *, eps: eps"), ["eps", "default"]),
        (eval("lambda: 0"), ["no tensor"]),
        (eval("lambda x=1e-6: x"), ["option x", "*, x=1e-06"]),
    ],
)
def test_a_bad_signature_is_refused(function: Callable[..., Any], words: list[str]) -> None:
    with pytest.raises(ContractError) as raised:
        c.contract(function)
    assert all(word in str(raised.value) for word in words), raised.value


def test_an_unknown_function_is_named_with_those_that_exist() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = c.relu  # type: ignore[attr-defined]
    assert all(word in str(raised.value) for word in ("relu", "maximum", "where"))
