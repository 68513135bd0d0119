"""Power of comparisons and of tests, measured by comparisons whose answers are known."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import narrowgauge
from narrowgauge import adapt
from narrowgauge import contract as c
from narrowgauge.harness.api.judging.judge_call import judge_of
from narrowgauge.harness.power import trial as trials
from narrowgauge.harness.power.in_place import Conventions
from narrowgauge.harness.power.page import page
from narrowgauge.harness.power.result import Power
from narrowgauge.harness.power.subject import QuantizeSubject, find_subject
from narrowgauge.harness.power.tolerance import Tightest
from narrowgauge.harness.power.trial import QuantizeTrial, Results, same_results
from narrowgauge.spec.quantized import Quantized

RECIPE, SHAPE = "mxfp4", (4, 64)


@c.contract
def row_sums(x: c.Matrix):
    """The sum of each row, rounded to the dtype of x."""
    return c.cast(c.sum(c.float32(x)), x.dtype)


@pytest.fixture(scope="module", autouse=True)
def made_once() -> Iterator[None]:
    """The trial of RECIPE and its wrong results are made once for all judges."""
    real = QuantizeSubject.made
    (one,) = real(QuantizeSubject(narrowgauge.recipe(RECIPE)), ["normal"], [SHAPE], [torch.bfloat16], 0)

    def kept(mistake: trials.Mistake) -> trials.Mistake:
        try:
            found = mistake.results()
        except ValueError:
            return mistake
        return replace(mistake, results=lambda: found)

    every = [kept(mistake) for mistake in one.mistakes()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one, "mistakes", lambda: iter(every))
        patch.setattr(
            QuantizeSubject, "made",
            lambda self, *given: [one] if str(self.recipe) == RECIPE and given[1] is None else real(self, *given),
        )  # fmt: skip
        yield


def measured(judge: Callable[..., Any], **options: Any) -> Power:
    return narrowgauge.power(judge, RECIPE, **options)


# ---- judges ----------------------------------------------------------------------------------------------------------


def raising(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def changing(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    equal = torch.equal(actual, expected)
    actual.zero_()
    expected.zero_()
    return equal


def shy(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if not torch.equal(actual, expected):
        raise OSError("the comparison broke")
    return True


def sqnr(least: float, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(20 * torch.log10(expected.norm() / (expected - actual).norm()) >= least)


def sums(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(actual.abs().sum() == expected.abs().sum())


ALL_BUT_ZERO_SIGNS = {"codes-zero", "ties-away", "rows-zero", "scale-order", "signs-lost", "nibbles-swapped"}
JUDGES: dict[str, tuple[Callable[..., Any], set[str], set[str]]] = {
    # name: judge, mistakes that the judge catches, mistakes that the judge accepts
    "always accepts": (lambda a, e: True, set(), {"codes-zero", "ties-away"}),
    "asserts nothing": (lambda a, e: None, set(), {"codes-zero", "ties-away"}),
    "equal values": (torch.equal, ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "equal bits": (
        lambda a, e: torch.equal(a.view(torch.int32), e.view(torch.int32)),
        ALL_BUT_ZERO_SIGNS | {"negative-zero-lost"}, set(),
    ),
    "raises": (raising, ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "raises another error": (shy, ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "changes its arguments": (changing, ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "numpy bool": (lambda a, e: np.bool_(torch.equal(a, e)), ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "tensor bool": (lambda a, e: (a == e).all(), ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "shape": (lambda a, e: a.shape == e.shape, set(), {"codes-zero"}),
    "dtype": (lambda a, e: a.dtype == e.dtype, set(), {"codes-zero"}),
    "finite": (lambda a, e: a.isfinite().all(), set(), {"codes-zero", "ties-away"}),
    "not zero": (lambda a, e: a.any(), {"codes-zero"}, {"ties-away", "signs-lost"}),
    "magnitudes": (lambda a, e: torch.equal(a.abs(), e.abs()), {"ties-away"}, {"signs-lost"}),
    "sum of magnitudes": (sums, {"codes-zero"}, {"signs-lost", "rows-of-other"}),
    "first row": (lambda a, e: torch.equal(a[0], e[0]), {"codes-zero"}, {"rows-zero"}),
    "first columns": (lambda a, e: torch.equal(a[:, :8], e[:, :8]), {"codes-zero"}, {"columns-zero"}),
    "loose": (partial(torch.allclose, rtol=0.5, atol=0.5), {"codes-zero"}, {"ties-away"}),
    "wide": (partial(torch.allclose, rtol=0.51, atol=0.13), {"codes-zero"}, {"ties-away"}),
    "sorted": (lambda a, e: torch.equal(a.flatten().sort()[0], e.flatten().sort()[0]), {"ties-away"}, {"rows-rolled"}),
    "15.8 dB": (partial(sqnr, 15.8), {"codes-zero"}, {"ties-away"}),
    "80 dB": (partial(sqnr, 80), ALL_BUT_ZERO_SIGNS, {"negative-zero-lost"}),
    "cosine": (
        lambda a, e: torch.cosine_similarity(a.flatten(), e.flatten(), dim=0) > 0.9,
        {"codes-zero", "signs-lost"}, {"ties-away"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_catches_what_it_can_see(name: str) -> None:
    judge, caught, missed = JUDGES[name]
    found = measured(judge)
    assert caught <= set(found.caught)
    assert missed <= set(found.known) - set(found.caught)
    assert found.false_alarms == 0
    assert found.passed == (len(found.caught) == len(found.known))


RESULTS: dict[str, tuple[Callable[[Quantized, Quantized], bool], set[str], set[str]]] = {
    "codes": (lambda a, e: torch.equal(a.codes, e.codes), {"nibbles-swapped", "ties-away"}, set()),
    "scales": (lambda a, e: torch.equal(a.scales, e.scales), {"exponent"}, {"nibbles-swapped", "ties-away"}),
    "both": (
        lambda a, e: torch.equal(a.codes, e.codes) and torch.equal(a.scales, e.scales),
        ALL_BUT_ZERO_SIGNS | {"negative-zero-lost", "exponent"}, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_a_judge_of_results_sees_codes_and_scales(name: str) -> None:
    judge, caught, missed = RESULTS[name]
    found = measured(judge, compares="results")
    assert caught <= set(found.caught)
    assert missed <= set(found.known) - set(found.caught)
    assert "computed-in-wider-format" not in found.known  # it has no codes


def test_narrowgauge_refuses_every_wrong_result_of_a_recipe() -> None:
    found = measured(torch.equal)
    assert all(row.narrowgauge == row.results for row in found.rows)
    assert found.right[0].rtol == found.right[0].atol == 0
    assert {"nan-spread", "subnormal-amaxes-flushed"} <= set(found.unseen)  # normal numbers have neither
    assert not set(found.unseen) & set(found.known)


def test_the_quick_verdict_is_that_of_an_assertion() -> None:
    x = narrowgauge.inputs("nvfp4", (8, 32), "normal")
    trial = QuantizeTrial("", x, narrowgauge.recipe("nvfp4"))
    for mistake in list(trial.mistakes())[::7]:
        try:
            q = mistake.results()["quantized"]
        except ValueError:
            continue
        if not isinstance(q, Quantized):
            continue
        stages = judge_of(narrowgauge.assert_quantized)(x, q.codes, q.scales, "nvfp4", amax=q.amax).outcome.stages
        assert trial.accepts({"quantized": q}) == all(stage.passed for stage in stages), mistake.sentence


def test_a_refused_right_result_is_a_false_alarm() -> None:
    found = measured(lambda a, e: False)
    assert found.false_alarms == 1
    assert not found.passed
    assert found.caught == found.known
    assert "refuses 1 of 1" in str(found)


def test_inputs_of_the_user_replace_the_families() -> None:
    x = torch.full((2, 32), 1.0, dtype=torch.bfloat16)
    found = measured(torch.equal, inputs=[x, {"x": -x}])
    assert [each.inputs for each in found.right] == ["inputs[0]", "inputs[1]"]
    assert "ties-away" in found.unseen  # ones are exact
    assert {"codes-zero", "signs-lost"} <= set(found.known)


def test_a_contract_has_right_kernels_that_differ() -> None:
    found = narrowgauge.power(torch.equal, row_sums, shapes=[(8, 64)], dtypes=[torch.float32])
    (right,) = found.right
    assert right.kernels > 1
    assert right.refused > 0  # bits of sums in float32 depend on the order
    assert 0 < right.atol < 1e-4
    halves = next(row for row in found.rows if "first-half" in row.name)
    assert halves.refused == halves.narrowgauge == halves.tightest == halves.results
    close = narrowgauge.power(
        partial(torch.allclose, rtol=0, atol=right.atol), row_sums, shapes=[(8, 64)], dtypes=[torch.float32]
    )
    assert close.false_alarms == 0


def test_a_product_of_packed_codes_is_measured() -> None:
    def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
        return torch.allclose(actual.float(), expected.float(), rtol=0.1, atol=0.1)

    found = narrowgauge.power(close, "scaled-gemm", recipe="nvfp4", shapes=[(4, 32, 8)])
    assert "gemm-4:over-first-half" in found.caught
    assert "matrix-zero" in found.caught


def test_the_text_and_the_data_have_the_rows() -> None:
    found = measured(partial(torch.allclose, rtol=0.5, atol=0.5))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["known"] == list(found.known)
    assert data["rows"][0]["refused"] <= data["rows"][-1]["refused"]
    assert "ties-away" in str(found)
    assert len(found.table.splitlines()) == len(found.rows) + 1
    assert "codes-zero" in found.table
    html = page(found)
    assert html.count('<th scope="row">') == len(found.rows)
    assert all(text in html for text in ("codes-zero", "known mistakes caught", "right kernels, "))


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no recipe": ({"subject": None}, ("no recipe and no contract", 'power(judge, "nvfp4")')),
    "unknown recipe": ({"subject": "nvfp5"}, ("nvfp5", "nvfp4")),
    "twice": ({"recipe": "nvfp4"}, ("given twice",)),
    "keys of a recipe": ({"keys": {"eps": 1}}, ("eps", "contract")),
    "compares": ({"compares": "codes"}, ("compares", "codes", "results")),
    "no shapes": ({"shapes": []}, ("shapes", "default")),
    "unknown family": ({"families": ["normals"], "shapes": [SHAPE]}, ("normals", "normal")),
    "no list": ({"inputs": torch.zeros(2, 32)}, ("inputs", "list")),
    "no tensor": ({"inputs": ["x"]}, ("inputs[0]", "tensor x")),
    "no random": ({"subject": "nvfp4-sr", "inputs": [torch.zeros(2, 32)]}, ("random", "(seed, offset)")),
    "conventions": ({"nibbles": "high-first"}, ("nibbles", "in_place_of")),
    "judge of one argument": ({"judge": lambda actual: True}, ("judge(actual, expected)",)),
    "inputs in place": ({"in_place_of": "json.dumps", "inputs": []}, ("inputs", "judge")),
    "results in place": ({"in_place_of": "json.dumps", "compares": "results"}, ("compares", "judge")),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    options, words = WRONG[name]
    given = {"judge": torch.equal, "subject": RECIPE} | options
    with pytest.raises((ValueError, TypeError)) as raised:
        narrowgauge.power(given.pop("judge"), given.pop("subject"), **given)
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_tightest_tolerance_accepts_what_it_was_made_of() -> None:
    one, other = torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([1.25, 0.0, torch.nan])
    tight = Tightest()
    tight.add([other], [one])
    assert (tight.atol, tight.rtol) == (0.25, 0.25)
    assert tight.accepts([other], [one])
    for wrong in ([1.5, 0.0, torch.nan], [1.25, 0.0, 0.0], [1.25, 0.1, torch.nan], [torch.inf, 0.0, torch.nan]):
        assert not tight.accepts([torch.tensor(wrong)], [one])


# ---- in place of a function ------------------------------------------------------------------------------------------

X = narrowgauge.inputs("nvfp4", (8, 64), "normal")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user, and six mistakes alone."""
    every = trials.list_deviations
    chosen = ("codes-zero", "ties-away", "rounded-up", "scales-of-next-row", "nibbles-swapped", "tensor-scale-ignored")

    def few(*given: Any, **options: Any) -> list[Any]:
        return [each for each in every(*given, **options) if each.cause in chosen]

    monkeypatch.setattr(trials, "list_deviations", few)
    found = ModuleType("own_kernels")
    monkeypatch.setitem(sys.modules, "own_kernels", found)
    return found


def _stored(q: Quantized, conventions: Conventions) -> dict[str, Any]:
    return conventions.parts(q, torch.bfloat16)


FORMS: dict[str, tuple[Callable[[Quantized], Any], dict[str, Any]]] = {
    "codes, scales, amax": (lambda q: (q.codes, q.scales, q.amax), {}),
    "a list": (lambda q: [q.codes, q.scales, q.amax], {}),
    "Quantized": (lambda q: q, {}),
    "Quantized in tiles": (lambda q: narrowgauge.quantize(X, "nvfp4", swizzled=True), {}),
    "mapping": (lambda q: {"codes": q.codes, "scales": q.scales, "amax": q.amax}, {}),
    "mapping with more": (lambda q: {"codes": q.codes, "scales": q.scales, "amax": q.amax, "note": "x"}, {}),
    "narrow dtypes": (lambda q: (q.codes.view(torch.float4_e2m1fn_x2), q.scales.view(torch.float8_e4m3fn), q.amax), {}),
    "values": (narrowgauge.dequantize, {}),
    "values in bfloat16": (lambda q: narrowgauge.dequantize(q).bfloat16(), {}),
    "high nibbles first": (
        lambda q: tuple(_stored(q, Conventions(nibbles="high-first")).values()), {"nibbles": "high-first"},
    ),
    "scales in tiles": (lambda q: tuple(_stored(q, Conventions(layout="128x4")).values()), {"layout": "128x4"}),
    "transposed": (lambda q: tuple(_stored(q, Conventions(transposed=True)).values()), {"transposed": True}),
    "encode scale": (
        lambda q: tuple(_stored(q, Conventions("encode")).values()), {"tensor_scale_is": "encode"},
    ),
    "decode scale": (
        lambda q: tuple(_stored(q, Conventions("decode")).values()), {"tensor_scale_is": "decode"},
    ),
}  # fmt: skip


def _bits(result: Any) -> list[torch.Tensor]:
    if isinstance(result, Quantized):
        result = (result.codes, result.scales, result.amax)
    if isinstance(result, dict):
        result = [value for value in result.values() if isinstance(value, torch.Tensor)]
    parts = result if isinstance(result, tuple | list) else [result]
    return [part.contiguous().flatten().view(torch.uint8) for part in parts]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORMS)
def test_a_wrong_result_has_the_form_of_the_function(name: str, module: Any) -> None:
    form, conventions = FORMS[name]

    def quantize(x: torch.Tensor) -> Any:
        return form(narrowgauge.quantize(x, "nvfp4"))

    module.quantize = quantize
    right = _bits(quantize(X))

    def own_test() -> None:
        result = module.quantize(X)
        assert type(result) is type(form(narrowgauge.quantize(X, "nvfp4")))
        assert all(map(torch.equal, _bits(result), right))

    found = narrowgauge.power(own_test, "nvfp4", in_place_of="own_kernels.quantize", **conventions)
    assert {"codes-zero", "rounded-up", "scales-of-next-row", "nibbles-swapped"} <= set(found.caught)
    assert found.passed
    assert module.quantize is quantize  # put back


def test_a_weak_test_lets_mistakes_pass(module: Any) -> None:
    module.quantize = lambda x: tuple(_stored(narrowgauge.quantize(x, "nvfp4"), Conventions()).values())

    def own_test() -> None:
        assert module.quantize(X)[0].any()

    found = narrowgauge.power(own_test, "nvfp4", in_place_of=module.quantize)
    assert "codes-zero" in found.caught
    assert {"rounded-up", "scales-of-next-row"} <= set(found.known) - set(found.caught)
    assert not found.passed
    assert "in place of" in str(found)
    assert "tightest" not in str(found)


def test_results_of_a_contract_stand_in_place(module: Any) -> None:
    module.row_sums = lambda x: x.float().sum(1).to(x.dtype)

    def own_test() -> bool:
        return torch.allclose(module.row_sums(X).float(), X.float().sum(1), rtol=0.02, atol=0.02)

    found = narrowgauge.power(own_test, row_sums, in_place_of="own_kernels.row_sums")
    assert any("first-half" in name for name in found.caught)
    assert "matrix-zero" in found.caught


def _fails(module: Any) -> None:
    raise AssertionError("always")


def _calls(module: Any) -> None:
    module.quantize(X)


def _exact(module: Any) -> None:
    assert torch.equal(module.quantize(X)[0], narrowgauge.quantize(X, "nvfp4").codes)


IN_PLACE: dict[str, tuple[Callable[[Any], None], str, Callable[[Quantized], Any], tuple[str, ...]]] = {
    "fails itself": (_fails, "own_kernels.quantize", lambda q: q, ("measures nothing", "always")),
    "no call": (lambda module: None, "own_kernels.quantize", lambda q: q, ("does not call",)),
    "no such function": (_calls, "own_kernels.quantise", lambda q: q, ("own_kernels.quantise", "module.function")),
    "other form": (_calls, "own_kernels.quantize", lambda q: 3, ("int", "Quantized")),
    "other conventions": (
        lambda module: None if torch.equal(module.quantize(X)[1], _swizzled(X)) else _fails(module),
        "own_kernels.quantize", lambda q: (q.codes, _swizzled(X), q.amax), ("right results", "layout"),
    ),
}  # fmt: skip


def _swizzled(x: torch.Tensor) -> torch.Tensor:
    return adapt.stored_as(narrowgauge.quantize(x, "nvfp4"), layout="128x4").scales


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_test_that_measures_nothing_is_refused(name: str, module: Any) -> None:
    own_test, place, form, words = IN_PLACE[name]
    module.quantize = lambda x: form(narrowgauge.quantize(x, "nvfp4"))
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        narrowgauge.power(lambda: own_test(module), "nvfp4", in_place_of=place)


def test_a_test_with_arguments_is_refused(module: Any) -> None:
    module.quantize = lambda x: narrowgauge.quantize(x, "nvfp4")
    with pytest.raises(TypeError, match="lambda: _exact"):
        narrowgauge.power(_exact, "nvfp4", in_place_of="own_kernels.quantize")


def test_the_results_of_two_kernels_are_compared_by_bytes() -> None:
    q = narrowgauge.quantize(X, "nvfp4")
    changed = replace(q, codes=q.codes ^ 1)
    results: Results = {"quantized": q}
    assert same_results(results, {"quantized": q})
    assert not same_results({"quantized": changed}, results)
    assert not same_results({"quantized": X}, results)
    assert find_subject("nvfp4", None, {}).label == "quantize nvfp4"
