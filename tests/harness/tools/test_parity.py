"""Parity: kernels with equal bytes, kernels that differ in a choice that is known, and the reports of both."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import narrowgauge
from narrowgauge import contract as c
from narrowgauge.harness.cases.operations import OPERATIONS
from narrowgauge.harness.cli import app
from narrowgauge.harness.inputs.inputs import Inputs
from narrowgauge.harness.operations.quantize.case import QuantizeCase
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.tools.dialect.fit import Fit, fitted
from narrowgauge.harness.tools.dialect.inputs import Given, observe, shape_of
from narrowgauge.harness.tools.dialect.parity import report
from narrowgauge.harness.tools.dialect.parity.choices import Choice, quantizer_choices
from narrowgauge.harness.tools.dialect.parity.parity import Kernel, Parity, pairs
from narrowgauge.spec.recipes import Recipe
from tests.harness.operation_cases import half_long
from tests.harness.sample_backends import backend

Function = Callable[..., Any]
FEW: dict[str, Any] = {"families": ["normal", "nan"]}
"""Cases (16, 128) in bfloat16 of these families alone."""
USUAL: dict[str, Any] = {"families": ["position"], "dtypes": (torch.bfloat16,)}


def options_of(recipe: str, chosen: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The subject and the arguments of a parity: cases, or a recipe with choices of its own."""
    if set(chosen) <= {"families", "dtypes"} and chosen is not USUAL:
        dtypes = chosen.get("dtypes", ("bf16",))
        return [f"quantize/{recipe}/16x128/{dtype}/{name}" for dtype in dtypes for name in chosen["families"]], {}
    return recipe, chosen


def quantizer(recipe: str | Recipe) -> Function:
    """The reference of a recipe or a dialect as a kernel."""
    own = narrowgauge.recipe(recipe) if isinstance(recipe, str) else recipe

    def kernel(x: torch.Tensor) -> Any:
        return narrowgauge.quantize(x, own)

    return kernel


def spoilt(change: Callable[[torch.Tensor, Any], Any], recipe: str = "nvfp4") -> Function:
    """A quantizer whose result is changed."""

    def kernel(x: torch.Tensor) -> Any:
        q = narrowgauge.quantize(x, recipe)
        return change(x, q) or q

    return kernel


def gemm(a: Any, b: Any, out_dtype: torch.dtype) -> torch.Tensor:
    return narrowgauge.gemm(a, b, out_dtype=out_dtype)


def decoded(a: Any, b: Any, out_dtype: torch.dtype) -> torch.Tensor:
    return (narrowgauge.dequantize(a, torch.float32) @ narrowgauge.dequantize(b, torch.float32).T).to(out_dtype)


# ---- equal bytes -----------------------------------------------------------------------------------------------------


def _strided(x: torch.Tensor, q: Any) -> Any:
    return q.codes.T.contiguous().T, q.scales.T.contiguous().T, q.amax


def _at(part: str, change: Callable[[torch.Tensor], torch.Tensor], where: Callable[[torch.Tensor], bool]) -> Function:
    """A quantizer with a changed byte in a few cases."""

    def kernel(x: torch.Tensor) -> Any:
        q = narrowgauge.quantize(x, "nvfp4")
        flat = getattr(q, part).view(torch.uint8).view(-1)
        if flat.numel() and where(x):
            flat[-1:] = change(flat[-1:])
        return q

    return kernel


def _flip(bit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x ^ bit


def _always(x: torch.Tensor) -> bool:
    return True


EQUAL: dict[str, tuple[Function, Function, str, dict[str, Any]]] = {
    "one kernel twice": (quantizer("nvfp4"), quantizer("nvfp4"), "nvfp4", FEW),
    "another name of the dialect": (quantizer("nvfp4"), quantizer("nvfp4@te"), "nvfp4", FEW),
    "a tuple": (quantizer("nvfp4"), spoilt(lambda x, q: (q.codes, q.scales, q.amax)), "nvfp4", FEW),
    "a mapping": (quantizer("nvfp4"), spoilt(lambda x, q: {"codes": q.codes, "scales": q.scales}), "nvfp4", FEW),
    "E4M3 scales": (
        quantizer("nvfp4"), spoilt(lambda x, q: (q.codes, q.scales.view(torch.float8_e4m3fn), q.amax)), "nvfp4", FEW,
    ),
    "int8 codes": (quantizer("nvfp4"), spoilt(lambda x, q: (q.codes.view(torch.int8), q.scales, q.amax)), "nvfp4", FEW),
    "other strides": (quantizer("nvfp4"), spoilt(_strided), "nvfp4", FEW),
    "MX": (quantizer("mxfp8-e4m3"), quantizer("mxfp8-e4m3@te"), "mxfp8-e4m3", FEW),
    "MXFP4": (quantizer("mxfp4"), quantizer("mxfp4"), "mxfp4", FEW),
    "MXFP6": (quantizer("mxfp6-e2m3"), quantizer("mxfp6-e2m3"), "mxfp6-e2m3", FEW),
    "FP8 blocks": (
        quantizer("fp8-block-1x128-e4m3-fp32"), quantizer("fp8-block-1x128-e4m3-fp32"), "fp8-block-1x128-e4m3-fp32",
        FEW,
    ),
    "FP8 current": (quantizer("fp8-current-e4m3"), quantizer("fp8-current-e4m3"), "fp8-current-e4m3", FEW),
    "FP8 rows": (quantizer("fp8-row-e4m3"), quantizer("fp8-row-e4m3"), "fp8-row-e4m3", FEW),
    "dialects on inputs without ties": (
        quantizer("nvfp4"), quantizer(dataclasses.replace(narrowgauge.recipe("nvfp4"), nan_code=0, dialect="own")),
        "nvfp4", FEW | {"families": ["normal"]},
    ),
    "two kernels with one mistake": (_at("codes", _flip(1), _always), _at("codes", _flip(1), _always), "nvfp4", FEW),
    "float16": (quantizer("nvfp4"), quantizer("nvfp4"), "nvfp4", FEW | {"dtypes": ("fp16",)}),
    "all usual shapes": (quantizer("mxfp4"), quantizer("mxfp4"), "mxfp4", USUAL),
    "a product": (gemm, gemm, "mxfp8-e4m3", {"operation": "gemm", "families": ["normal"], "shapes": [(16, 64, 16)]}),
    "an exact product": (
        gemm, decoded, "mxfp8-e4m3", {"operation": "gemm", "families": ["lattice"], "shapes": [(16, 64, 16)]},
    ),
    "dequantize": (
        narrowgauge.dequantize, lambda q, dtype: narrowgauge.dequantize(q, dtype) * 1.0,
        "mxfp4", {"operation": "dequantize", "families": ["normal"], "shapes": [(8, 32)]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", half_long(EQUAL))
def test_equal_bytes_are_true(name: str) -> None:
    f, g, recipe, options = EQUAL[name]
    subject, more = options_of(recipe, options)
    found = narrowgauge.parity(f, g, subject, names=("A", "B"), **more)
    assert found, str(found)
    assert not found.choices
    assert not found.own
    assert re.match(r"A and B give equal bytes: \w+ \S+, \d+ cases?, ", str(found))


# ---- other bytes -----------------------------------------------------------------------------------------------------


class _Every:
    """A kernel with other bytes in every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> Any:
        self.calls += 1
        q = narrowgauge.quantize(x, "nvfp4")
        q.codes.view(-1)[:1] ^= self.calls % 2
        return q


def _refuses(when: Callable[[torch.Tensor], bool]) -> Function:
    def kernel(x: torch.Tensor) -> Any:
        if when(x):
            raise NotImplementedError("no kernel for this x")
        return narrowgauge.quantize(x, "nvfp4")

    return kernel


def _last_bit(a: Any, b: Any, out_dtype: torch.dtype) -> torch.Tensor:
    y = gemm(a, b, out_dtype)
    y.view(torch.int16)[-1, -1] ^= 1
    return y


GEMM = {"operation": "gemm", "families": ["normal"], "shapes": [(16, 64, 16)], "dtypes": (torch.bfloat16,)}
OTHER: dict[str, tuple[Function, Function, dict[str, Any], str]] = {
    "a code": (quantizer("nvfp4"), _at("codes", _flip(16), _always), FEW, r"codes: 2 of 4 096 .* at \[15, 127\]"),
    "two codes of a byte": (quantizer("nvfp4"), _at("codes", _flip(17), _always), FEW, "codes: 4 of 4 096"),
    "the sign of 0": (
        quantizer("nvfp4"),
        quantizer(dataclasses.replace(narrowgauge.recipe("nvfp4"), negative_zero="never", dialect="own")),
        FEW | {"families": ["negative-zeros"]}, "codes: .*0x08 and 0x00",
    ),
    "a scale": (quantizer("nvfp4"), _at("scales", _flip(1), _always), FEW, "from scales on"),
    "an amax": (quantizer("nvfp4"), _at("amax", _flip(1), _always), FEW, "from amax on"),
    "NaN alone": (
        quantizer("nvfp4"), _at("codes", _flip(1), lambda x: bool(x.isnan().any())), FEW, "shown by nan; first",
    ),
    "float16 alone": (
        quantizer("nvfp4"), _at("codes", _flip(1), lambda x: x.dtype is torch.float16),
        FEW | {"dtypes": ("bf16", "fp16")}, "first in quantize/nvfp4/16x128/fp16/normal",
    ),
    "one row alone": (
        quantizer("nvfp4"), _at("codes", _flip(1), lambda x: len(x) == 1), USUAL,
        "first in quantize/nvfp4/1x",
    ),
    "strided x": (
        quantizer("nvfp4"), _at("codes", _flip(1), lambda x: not x.is_contiguous()), USUAL,
        r"position/(strided|transposed) at",
    ),
    "an empty result of one": (quantizer("nvfp4"), _refuses(_always), FEW, "nothing was compared"),
    "a refused family": (quantizer("nvfp4"), _refuses(lambda x: bool(x.isnan().any())), FEW, "B refuses .*/nan"),
    "the first refuses": (_refuses(lambda x: bool(x.isnan().any())), quantizer("nvfp4"), FEW, "A refuses .*/nan"),
    "a changing kernel": (quantizer("nvfp4"), _Every(), FEW, "B in quantize.* codes differ between"),
    "a bit of a product": (gemm, _last_bit, GEMM, r"output: 5 of 1 280 .* by up to 1 step.* at \[15, 15\]"),
    "a product of decoded operands": (gemm, decoded, GEMM | {"dtypes": (torch.float32,)}, "from output on"),
    "a wrong product": (gemm, lambda a, b, out_dtype: 2 * gemm(a, b, out_dtype), GEMM, "B: 256 of 256 outputs differ"),
}  # fmt: skip


@pytest.fixture
def unfitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule is fitted: the search for a rule of a broken quantizer takes seconds."""
    monkeypatch.setattr("narrowgauge.harness.tools.dialect.parity.parity.quantizer_fit", lambda *_: "not in this test")


@cache
def given(
    recipe: str, families: tuple[str, ...] = ("normal", "ties", "e4m3-ties", "nan", "negative-zeros", "zeros")
) -> list[Given]:
    """Few inputs of the fit."""
    cases = [
        QuantizeCase(recipe=recipe, shape=shape_of(narrowgauge.recipe(recipe)), dtype="bf16", inputs=family)
        for family in families
    ]
    made: list[Inputs] = [make_inputs(case, seed=0) for case in cases]
    return [Given(case.inputs, case.dtype, inputs.x) for case, inputs in zip(cases, made, strict=True)]


@pytest.mark.usefixtures("unfitted")
@pytest.mark.parametrize("name", half_long(OTHER))
def test_other_bytes_are_false(name: str) -> None:
    f, g, options, words = OTHER[name]
    recipe = "mxfp8-e4m3" if options.get("operation") else "nvfp4"
    subject, more = options_of(recipe, options)
    found = narrowgauge.parity(f, g, subject, names=("A", "B"), **more)
    assert not found
    assert re.search(words, str(found)), str(found)
    json.dumps(found.as_json())


FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rounding": ("nvfp4", {}, {"rounding": "nearest-away"}),
    "element_scale": ("mxfp4", {"element_scale": "x/s"}, {"element_scale": "x*(1/s)"}),
    "negative_zero": ("nvfp4", {}, {"negative_zero": "never"}),
    "nan_code": ("nvfp4", {}, {"nan_code": 8}),
    "block_scale": ("mxfp8-e4m3", {}, {"block_scale": "amax*2^-emax"}),
    "scale_rounding": ("mxfp4", {}, {"scale_rounding": "down"}),
    "nan": ("nvfp4", {}, {"nan": "propagate"}),
    "zero_block": ("nvfp4", {}, {"zero_block": "1"}),
    "smallest_scale": ("nvfp4", {}, {"smallest_scale": "2^-6"}),
}


@cache
def _fit(recipe: str, changes: tuple[tuple[str, Any], ...]) -> Fit:
    """The rule of a quantizer, taken as known, on its own bytes."""
    rule = dataclasses.replace(narrowgauge.recipe(recipe), dialect="own", **dict(changes))
    kernel = backend(quantize=lambda x, _, **options: narrowgauge.quantize(x, rule, **options))
    return fitted(observe(kernel, narrowgauge.recipe(recipe), given=given(recipe)), [rule])


@pytest.mark.parametrize("name", FIELDS)
def test_the_field_that_differs_is_named(name: str) -> None:
    recipe, first, second = FIELDS[name]
    one, other = (_fit(recipe, tuple(changes.items())) for changes in (first, second))
    found = quantizer_choices(one, other)
    if name == "element_scale":  # a quotient and a product by 1/s of a power of two have equal bytes
        assert found == []
        return
    assert name in [choice.field for choice in found]
    (choice,) = [choice for choice in found if choice.field == name]
    assert choice.values == (getattr(narrowgauge.recipe(recipe), name), second[name])
    assert quantizer_choices(one, one) == []


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice("element_scale", "codes", ("x/s", "x*(1/s)")),
         "scaled element: A divides, x/s; B multiplies by the reciprocal, x*(1/s)"),
        (Choice("block_scale", "scales", ("amax*2^-emax", "amax/max")),
         "block scale: A multiplies, amax*2^-emax; B divides, amax/max"),
        (Choice("rounding", "codes", ("nearest-even", "nearest-away")),
         "rounding of elements: A has nearest-even; B has nearest-away"),
        (Choice("element_scale", "codes", ("x/(s/enc)", "x/(s*dec)")),
         "scaled element: A has x/(s/enc); B has x/(s*dec)"),
        (Choice("zero_block", "scales", ("keep", "amax/6=2^-23")),
         "block scale of 0: A has keep; B has amax/6=2^-23"),
        (Choice("nan_code", "codes", (7, 0)), "code of NaN: A has 7; B has 0"),
    ],
)  # fmt: skip
def test_a_choice_is_a_sentence(choice: Choice, words: str) -> None:
    assert choice.sentence(("A", "B")) == words


# ---- products and contracts ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_rule_of_each_quantizer_is_fitted() -> None:
    found = narrowgauge.parity(
        quantizer("nvfp4@trtllm"), quantizer("nvfp4@modelopt"), options_of("nvfp4", FEW)[0], names=("A", "B")
    )
    text = str(found)
    assert "tensor scale: A multiplies by the reciprocal, (1/amax)*max; B divides, amax/max" in text
    assert "A: speaks trtllm: every byte of 101 inputs" in text
    assert "B: speaks modelopt: every byte of 101 inputs" in text
    broken = narrowgauge.parity(quantizer("nvfp4"), _at("codes", _flip(16), _always), options_of("nvfp4", FEW)[0])
    assert [own.explained for own in broken.own] == [True, False]


@pytest.mark.long
def test_orders_of_products_are_named() -> None:
    def tree(a: Any, b: Any, out_dtype: torch.dtype) -> torch.Tensor:
        left, right = (narrowgauge.dequantize(q, torch.float32) for q in (a, b))
        terms = left.unsqueeze(1) * right
        while terms.shape[2] > 1:
            terms = terms[..., ::2] + terms[..., 1::2]
        return terms[..., 0].to(out_dtype)

    options = GEMM | {"dtypes": (torch.float32,)}
    found = narrowgauge.parity(tree, decoded, "mxfp8-e4m3", names=("A", "B"), **options)
    assert [choice.field for choice in found.choices] == ["order of summation"]
    assert all(own.explained for own in found.own)
    assert "one product at a time" in found.choices[0].values[1]


def test_a_product_that_cannot_be_probed_has_a_width() -> None:
    found = narrowgauge.parity(gemm, decoded, "nvfp4", names=("A", "B"), **GEMM | {"dtypes": (torch.float32,)})
    assert not found.choices
    assert found.found.differences[0].steps
    assert "order not probed: elements E2M1" in str(found)


@c.contract
def scaled_twice(x: c.Matrix, *, factor: float = 2.0, rounded: bool = True):
    """x times 2 and times 3, with a rounding between the two."""
    y = c.float32(x) * factor
    if rounded:
        y = c.cast(y * 1.1, x.dtype)
    return {"y": c.cast(c.float32(y) * 3.0, x.dtype)}


def _scaled(*, rounded: bool) -> Function:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = x.float() * 2.0
        y = (y * 1.1).to(x.dtype).float() if rounded else y
        return (y * 3.0).to(x.dtype)

    return kernel


def test_the_field_of_a_contract_is_named() -> None:
    options = {"families": ["normal", "ladder", "position"], "shapes": [(8, 64)], "dtypes": (torch.bfloat16,)}
    one, other = _scaled(rounded=True), _scaled(rounded=False)
    assert narrowgauge.parity(one, one, scaled_twice, **options)
    found = narrowgauge.parity(one, other, scaled_twice, names=("A", "B"), **options)
    assert [(choice.field, choice.values) for choice in found.choices] == [("rounded", (True, False))]
    assert all(own.explained for own in found.own)
    OPERATIONS.let_go()


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> list[Parity]:
    """Two equal kernels, and a third one."""
    cases = [
        (QuantizeCase(recipe="nvfp4", shape=(16, 32), dtype="bf16", inputs=name), False) for name in ("ties", "nan")
    ]
    away = dataclasses.replace(narrowgauge.recipe("nvfp4"), rounding="nearest-away", dialect="own")
    kernels = [
        Kernel(name, backend(quantize=lambda x, _, rule=rule: narrowgauge.quantize(x, rule)), cases, "cpu", 0)
        for name, rule in (("one", narrowgauge.recipe("nvfp4")), ("same", narrowgauge.recipe("nvfp4")), ("away", away))
    ]
    for kernel, changes in zip(kernels, ({}, {}, {"rounding": "nearest-away"}), strict=True):
        kernel.rule = _fit("nvfp4", tuple(changes.items()))
    return pairs(kernels, "quantize nvfp4")


def test_several_kernels_are_a_table(three: list[Parity]) -> None:
    rows = report.matrix(three)
    assert rows["one"]["same"] == rows["same"]["one"] == "="
    assert rows["one"]["one"] == ""
    assert rows["away"]["one"].startswith("codes ")
    head, *lines = report.text(three).splitlines()
    assert head.split() == ["one", "same", "away"]
    assert lines[0].split()[:2] == ["one", "="]
    assert "rounding of elements: one has nearest-even; away has nearest-away" in report.text(three)


def test_the_page_and_json_have_every_pair(three: list[Parity]) -> None:
    page = report.page(three)
    assert "1 of 3 pairs of kernels give equal bytes" in page
    assert page.count("<h3>") == 3
    found = json.loads(json.dumps(report.as_json(three)))
    assert (found["equal"], len(found["pairs"])) == (False, 3)
    assert found["pairs"][1]["choices"][0]["field"] == "rounding"
    assert found["pairs"][0]["differences"] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("reference",), "BACKENDS is 'reference' alone"),
        (("reference", "reference", "--shape", "12xa"), "--shape is '12xa'"),
        (("reference", "reference", "--recipe", "nvfp5"), "nvfp5"),
        (("reference", "reference", "--family", "normall"), "normall"),
        (("reference", "reference", "--operation", "gem"), "gem"),
        (("reference", "reference", "--contract", "missing.py"), "missing.py"),
        (("reference", "reference", "--device", "tpu"), "tpu"),
    ],
)
def test_wrong_arguments_are_one_clear_error(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["parity", *arguments])
    assert done.exit_code == 2
    assert words in done.output


def test_wrong_calls_name_the_argument() -> None:
    with pytest.raises(TypeError, match="no recipe is given"):
        narrowgauge.parity(gemm, gemm)
    with pytest.raises(ValueError, match="families, shapes or dtypes is empty"):
        narrowgauge.parity(gemm, gemm, "nvfp4", families=[])
    assert "(first)" in str(narrowgauge.parity(gemm, gemm, "mxfp8-e4m3", **GEMM))
