"""Single wrong steps of modules and of fused products: each is caught at its stage, and its change is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.diagnosis.cause_names import is_cause
from narrowgauge.harness.diagnosis.formulas.matrix_changes import OPERAND_CHANGES, changed_matrices
from narrowgauge.harness.records.record import Record
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import modules
from narrowgauge.reference import ops as reference
from narrowgauge.reference.high_precision.additions import column_sum
from narrowgauge.reference.high_precision.bounded import Bounded
from narrowgauge.reference.high_precision.norm import norm_backward
from narrowgauge.reference.modules.linear import weight_product
from tests.harness.sample_backends import backend

LINEAR, NORM = "narrowgauge.reference.modules.linear.", "narrowgauge.reference.modules.layer_norm_linear."
SHAPE, SQUARE, TOKENS = (2, 32, 64, 96), (2, 32, 64, 64), torch.arange(64)
DOORS = {name: getattr(modules, name) for name in ("Linear", "LayerNormLinear")}
Change = Callable[..., torch.Tensor]
Step = tuple[str, Any]
"""Name of a function of the reference's modules, and the function in its place."""


def exact(value: torch.Tensor) -> Bounded:
    return Bounded(value.double(), torch.zeros_like(value, dtype=torch.float64))


def decoded(q: Any) -> torch.Tensor:
    return reference.dequantize(q, dtype=torch.float32).double()


def dbias(change: Change) -> Step:
    return f"{LINEAR}column_sum", lambda dy: exact(change(dy))


def norm_gradient(part: int, change: Change) -> Step:
    def door(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, kind: Any, eps: float) -> Any:
        found = list(norm_backward(dy, x, gamma, kind, eps))
        found[part] = exact(change(found[part].value, dy, x))  # type: ignore[union-attr]
        return tuple(found)

    return f"{NORM}norm_backward", door


def dx(change: Change) -> Step:
    def door(a: Any, b: Any, **options: Any) -> torch.Tensor:
        right = reference.gemm(a, b, **options)
        return right if "bias" in options else change(right, a, b)

    return f"{LINEAR}gemm", door


def dw(change: Change) -> Step:
    def door(grad: Any, x: Any) -> Any:
        product = weight_product(grad, x)
        return lambda dtype, c: change(product(dtype, c), grad, x).to(dtype)

    return f"{LINEAR}weight_product", door


def total(dy: torch.Tensor) -> torch.Tensor:
    return column_sum(dy).value


WRONG: list[tuple[str, str, Step]] = [
    ("dbias", "rows-zero:63", dbias(lambda dy: total(dy[:-1]))),
    ("dbias", "rows-zero:48 to 63", dbias(lambda dy: total(dy[:48]))),
    ("dbias", "rows-zero:32 to 63", dbias(lambda dy: total(dy[:32]))),
    ("dbias", "rows-zero:1 to 63", dbias(lambda dy: dy[0])),
    ("dbias", "gain", dbias(lambda dy: total(dy) / len(dy))),
    ("dbias", "gain", dbias(lambda dy: 2 * total(dy))),
    ("dbias", "outputs-zero", dbias(lambda dy: torch.zeros(dy.shape[1]))),
    ("dbias", "matrix-negated", dbias(lambda dy: -total(dy))),
    ("dbias", "matrix-without-signs", dbias(lambda dy: total(dy.abs()))),
    ("dbias", "matrix-one", dbias(lambda dy: total(torch.ones_like(dy)))),
    ("dbias", "columns-of-other", dbias(lambda dy: total(dy).roll(1))),
    ("dbias", "columns-zero:64 to 95", dbias(lambda dy: total(dy) * (torch.arange(96) < 64))),
    ("dbias", "operand-exchanged", dbias(lambda dy: total(decoded(reference.quantize(dy, "mxfp8-e4m3")).bfloat16()))),
    ("dgamma", "rows-zero:32 to 63", norm_gradient(1, lambda right, dy, x: of_rows(dy, x, slice(0, 32)))),
    ("dgamma", "gain", norm_gradient(1, lambda right, dy, x: 2 * right)),
    ("dgamma", "gain", norm_gradient(1, lambda right, dy, x: right / len(dy))),
    ("dgamma", "outputs-zero", norm_gradient(1, lambda right, dy, x: 0 * right)),
    ("dgamma", "result-of-other", norm_gradient(1, lambda right, dy, x: dy.double().sum(0))),
    ("dgamma", "rows-of-other", norm_gradient(1, lambda right, dy, x: of_rows(dy.roll(1, 0), x))),
    ("dbeta", "rows-zero:32 to 63", norm_gradient(2, lambda right, dy, x: dy[:32].double().sum(0))),
    ("dx", "gain", norm_gradient(0, lambda right, dy, x: 2 * right)),
    ("dx", "rows-zero:60 to 63", norm_gradient(0, lambda right, dy, x: right * (TOKENS < 60).unsqueeze(1))),
    ("dx", "result-of-other", norm_gradient(0, lambda right, dy, x: dy)),
    ("dx", "rows-zero:60 to 63", dx(lambda right, a, b: right * (TOKENS < 60).unsqueeze(1))),
    ("dx", "rows-of-other", dx(lambda right, a, b: right.roll(1, 0))),
    ("dx", "rows-of-other", dx(lambda right, a, b: right[:32].repeat(2, 1))),
    ("dx", "columns-of-other", dx(lambda right, a, b: right.roll(1, 1))),
    ("dw", "rows-of-other", dw(lambda right, a, b: right.roll(1, 0))),
    ("dw", "columns-of-other", dw(lambda right, a, b: decoded(a).roll(1, 1) @ decoded(b).T)),
    ("dw", "matrix-zero", dw(lambda right, a, b: 0 * right)),
]  # fmt: skip


SQUARE_WRONG: list[tuple[str, str, Step]] = [
    ("dw", "matrix-transposed", dw(lambda right, a, b: decoded(a).T @ decoded(b).T)),
]
"""Mistakes that square matrices alone allow."""


def of_rows(dy: torch.Tensor, x: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
    """dgamma of these rows, with gamma 1: dgamma does not depend on gamma."""
    return norm_backward(dy[rows], x[rows], torch.ones(x.shape[1]).bfloat16(), "layer", 1e-5)[1].value


@pytest.mark.sampled(40)
@pytest.mark.parametrize(
    ("name", "cause", "step"), [*WRONG, *SQUARE_WRONG],
    ids=[f"{name}-{cause}-{number}" for number, (name, cause, _) in enumerate([*WRONG, *SQUARE_WRONG])],
)  # fmt: skip
def test_the_change_is_named(name: str, cause: str, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = "layernorm-linear" if step[0].startswith(NORM) else "linear"
    shape = SQUARE if cause == "matrix-transposed" else SHAPE
    case = case_from_labels(operation, "MXFP8BlockScaling", shape, "bf16", "normal", ("bias",))
    monkeypatch.setattr(*step)
    record = run_case(case, backend(**DOORS))
    assert (record.verdict, record.stage) == ("fail", f"step 1 {name}"), record.message
    named = "outputs-zero" if cause == "matrix-zero" else cause
    exact_causes = [entry["cause"] for entry in record.explanations if entry["exact"]]
    assert exact_causes[:1] == [named], record.explanations
    assert is_cause(named)


@pytest.mark.parametrize(
    ("cause", "change"), [("matrix-squared", torch.square), ("matrix-through-fp16", lambda m: m.half().to(m.dtype))]
)
def test_changes_of_an_operand(cause: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    m = torch.tensor([[1e-9, 3.0], [1 + 2.0**-20, -5.0]])
    found = {row.cause: changed for row, changed in changed_matrices(OPERAND_CHANGES, m, "x")}
    assert torch.equal(found[cause], change(m))


@pytest.mark.long
def test_another_mistake_has_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_from_labels("linear", "MXFP8BlockScaling", SHAPE, "bf16", "normal", ("bias",))
    for wrong in (lambda dy: total(dy) * 1.37, lambda dy: total(dy[::3]) + 0.5, lambda dy: total(dy).sqrt()):
        monkeypatch.setattr(*dbias(wrong))
        record: Record = run_case(case, backend(**DOORS))
        assert not [entry for entry in record.explanations if entry["exact"]], record.explanations


def test_few_elements_prove_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_from_labels("linear", "MXFP8BlockScaling", (2, 32, 64, 6), "bf16", "normal", ("bias",))
    monkeypatch.setattr(*dbias(lambda dy: 2 * total(dy)))
    first = run_case(case, backend(**DOORS)).explanations[0]
    assert (first["cause"], first["exact"]) == ("gain", False)
    assert "fewer than 10 elements" in first["sentence"]


FUSED: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("bias-ignored", lambda product, c, bias: product(c=c)),
    ("c-ignored", lambda product, c, bias: product(bias=bias)),
    ("bias-twice", lambda product, c, bias: product(torch.float32, c=c, bias=2 * bias)),
    ("output-truncated", lambda product, c, bias: (
        product(torch.float32, c=c, bias=bias).view(torch.int32) & -65536).view(torch.float32)),
    ("rows-zero:31", lambda product, c, bias: torch.nn.functional.pad(product(c=c, bias=bias)[:31], (0, 0, 0, 1))),
    ("matrix-negated", lambda product, c, bias: -product(c=c, bias=bias)),
]  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("cause", "make"), FUSED, ids=[cause for cause, _ in FUSED])
@pytest.mark.parametrize("out_recipe", ["mxfp8-e4m3", "nvfp4"])
def test_a_wrong_product_in_a_fused_kernel(cause: str, make: Change, out_recipe: str) -> None:
    """The gemm of the backend is right; the product inside of the fused kernel has one wrong step."""

    def fused(a: Any, b: Any, recipe: Any, *, out_dtype: Any, c: Any, bias: Any) -> Any:
        def product(dtype: Any = out_dtype, **addends: Any) -> torch.Tensor:
            return reference.gemm(a, b, out_dtype=dtype, **addends)

        return reference.quantize(make(product, c, bias).to(out_dtype), recipe)

    flags = ("tn", out_recipe, "accumulate", "bias")
    case = case_from_labels("gemm-quantized", "mxfp8-e4m3", (32, 128, 64), "bf16xbf16-bf16", "normal", flags)
    doors = {"quantize": reference.quantize, "gemm": reference.gemm, "gemm_quantized": fused}
    record = run_case(case, backend(**doors, declares={"gemm": "tree"}))
    assert record.verdict == "fail"
    assert record.stage.startswith("fused.")
    assert cause in [entry["cause"] for entry in record.explanations if entry["exact"]], record.explanations


def test_other_inputs_refute_a_cause_of_a_product() -> None:
    """A kernel with two mistakes for two kinds of inputs has no exact cause."""

    def of_inputs(a: Any, b: Any, *, out_dtype: Any, c: Any, bias: Any) -> torch.Tensor:
        spread = decoded(a).abs().max() / decoded(a).abs().median()
        addends = {"c": c} if spread > 3 else {"bias": bias}
        return reference.gemm(a, b, out_dtype=out_dtype, **addends)

    def found_of(gemm: Callable[..., torch.Tensor], inputs: str) -> list[dict[str, Any]]:
        case = case_from_labels("gemm", "mxfp8-e4m3", (32, 128, 48), "bf16xbf16-bf16", inputs, ("accumulate", "bias"))
        doors = {"quantize": reference.quantize, "gemm": gemm}
        return run_case(case, backend(**doors, declares={"gemm": "tree"})).explanations

    assert "bias-ignored" not in [found["cause"] for found in found_of(of_inputs, "normal")]
    always, *_ = found_of(
        lambda a, b, *, out_dtype, c, bias: reference.gemm(a, b, out_dtype=out_dtype, bias=bias), "normal"
    )
    assert (always["cause"], always["exact"]) == ("c-ignored", True)
