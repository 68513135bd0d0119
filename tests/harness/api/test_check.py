"""`narrowgauge.check`: correct functions pass, wrong functions fail with their cause and a line that reproduces it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.library import Library

import narrowgauge
from narrowgauge.harness.api.check import check, selected_cases
from narrowgauge.harness.machine.float_environment import read_environment
from narrowgauge.reference import ops
from narrowgauge.spec.recipes import find_recipe
from tests.harness.api import checked_functions
from tests.paths import ROOT

SMALL: dict[str, Any] = {"families": ["normal", "position"], "shapes": [(32, 64)]}
ONE: dict[str, Any] = {"families": ["normal"], "shapes": [(8, 64)], "dtypes": [torch.bfloat16]}


def report(function: Callable[..., Any], recipe: Any = "nvfp4", **arguments: Any) -> str:
    """The text of a failed check."""
    with pytest.raises(AssertionError) as caught:
        check(function, recipe, **arguments)
    return str(caught.value)


# ---- correct functions -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed-e4m3"])
def test_the_reference_passes_every_default_case(recipe: str) -> None:
    done = check(ops.quantize, recipe)
    assert done.cases == done.passed >= 24
    assert done.compared > 500_000
    assert not done.unsupported
    assert re.fullmatch(rf"quantize, quantize {recipe}: \d+ cases passed, [\d ]+ elements compared", repr(done))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("operation", "recipe"), [("dequantize", "nvfp4"), ("transform", "nvfp4-rht"), ("gemm", "nvfp4")]
)
def test_the_reference_passes_the_other_operations(operation: Any, recipe: str) -> None:
    function = getattr(ops, operation)
    done = check(function, recipe, operation=operation)
    assert done.cases == done.passed > 15
    if operation == "gemm":  # with c, with bias, with both, and with float16 outputs, at two shapes
        alone = check(lambda a, b: ops.gemm(a, b, out_dtype=torch.bfloat16), recipe, operation="gemm")
        assert alone.cases == done.cases - 8


def test_a_mode_of_autograd_is_called_by_default() -> None:
    def halved(x: torch.Tensor, recipe: Any) -> Any:
        return ops.quantize(x * 0.5 if torch.is_inference_mode_enabled() else x, recipe)

    with pytest.raises(AssertionError, match=r"1 of \d+ cases did not pass") as caught:
        check(halved, "mxfp8-e4m3", families=["normal"])
    assert "explained exactly by it is right in a plain call, and wrong under torch.inference_mode()" in str(
        caught.value
    )


def swizzled(x: torch.Tensor) -> dict[str, torch.Tensor]:
    q = ops.quantize(x, "nvfp4", swizzled=True)
    assert q.amax is not None
    return {
        "codes": (q.codes >> 4 | q.codes << 4).view(torch.float4_e2m1fn_x2),
        "scales": q.scales.view(torch.float8_e4m3fn),
        "tensor_scale": q.amax / 2688,
    }  # fmt: skip


def sections_apart(a: Any, b: Any) -> torch.Tensor:
    """Grouped GEMM by gemm."""
    return torch.cat([ops.gemm(q, w, out_dtype=torch.bfloat16) for q, w in zip(a.sections(), b, strict=True)])


def test_ids_of_contracts_choose_recipe_and_shape() -> None:
    chosen: dict[str, Any] = {"families": ["normal"], "shapes": None, "dtypes": (torch.bfloat16,), "keys": {}}
    for beginning in ("kv-write/fp8-static-e4m3@vllm-kv", "merge-attention/64x96x256"):
        contract, operation, cases = selected_cases(beginning, None, None, chosen)
        assert contract is not None
        assert operation == beginning.partition("/")[0]
        assert [case for case, _ in cases if not case.id.startswith(beginning)] == []
        assert cases
    with pytest.raises(ValueError, match="no case of this check begins with it"):
        selected_cases("merge-attention/64x96x256/fp64", None, None, chosen)


def largest_outputs(a: Any, b: Any, recipe: Any) -> Any:
    """The quantization of the largest correct output: that of a kernel with another order of summation."""
    return ops.quantize(narrowgauge.bounds(a, b, out_dtype=torch.bfloat16)[1], recipe)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("function", "beginning", "keys"),
    [
        (sections_apart, "gemm-grouped/mxfp8-e4m3/128x64x48", {"sections": "ragged:4"}),
        (ops.gemm_grouped, "gemm-grouped/nvfp4", {}),
        (ops.gemm_quantized, "gemm-quantized/nvfp4", {"out_recipe": "fp8-current-e4m3"}),
        (largest_outputs, "gemm-quantized/mxfp8-e4m3", {"out_recipe": "nvfp4"}),
        (largest_outputs, "gemm-quantized/nvfp4/33x48x17", {"out_recipe": "mxfp8-e4m3"}),
        (ops.quantize_both, "quantize/mxfp8-e4m3", {"usage": "both"}),
        (ops.quantize_grouped, "quantize-grouped/nvfp4", {}),
    ],
)
def test_right_functions_of_any_operation_pass(function: Any, beginning: str, keys: dict[str, Any]) -> None:
    done = check(
        function, beginning, keys=keys, families=["normal", "cancelling" if "gemm" in beginning else "position"]
    )
    assert done.cases == done.passed >= 2
    assert not done.unsupported
    assert beginning.partition("/")[0] in repr(done)


WRONG_GEMMS: dict[str, Callable[..., torch.Tensor]] = {
    "a partial block of K": lambda a, b, out_dtype: (
        ops.gemm(a, b, out_dtype=out_dtype) * (1 + (a.shape[1] % a.recipe.block[1] != 0))
    ),
    "float16 outputs": lambda a, b, out_dtype: ops.gemm(
        a, b, out_dtype=torch.bfloat16 if out_dtype == torch.float16 else out_dtype
    ).to(out_dtype),
    "c beside a tail": lambda a, b, out_dtype, c=None: ops.gemm(
        a, b, out_dtype=out_dtype, c=c if len(a.codes) % 16 == 0 else None
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRONG_GEMMS)
def test_default_cases_of_a_gemm_show_a_mistake(name: str) -> None:
    assert "did not pass" in report(WRONG_GEMMS[name], operation="gemm", families=["normal", "position"])


@pytest.mark.long
def test_wrong_functions_of_any_operation_fail() -> None:
    def one_section(a: Any, b: Any) -> torch.Tensor:
        return torch.cat([ops.gemm(q, b[0], out_dtype=torch.bfloat16) for q in a.sections()])

    def changed(a: Any, b: Any, recipe: Any) -> Any:
        q = largest_outputs(a, b, recipe)
        q.codes[:1, :1] ^= 8
        return q

    def not_cast(a: Any, b: Any, recipe: Any) -> Any:
        return ops.quantize(ops.gemm(a, b, out_dtype=torch.float32), recipe)

    def halves(x: torch.Tensor, recipe: Any) -> Any:
        row, column = ops.quantize_both(x, recipe)
        column.codes[:1, :1] ^= 8
        return row, column

    few = {"families": ["normal"]}
    assert "output: " in report(one_section, "gemm-grouped/nvfp4", **few)
    assert "fused.codes" in report(changed, "gemm-quantized/nvfp4", **few)
    assert "explained exactly by outputs are quantized" in report(not_cast, "gemm-quantized/nvfp4", **few)
    assert "columnwise.codes" in report(halves, "nvfp4", keys={"usage": "both"}, **few)


def test_scales_that_follow_from_more_than_bounds() -> None:
    """float32 scales of an amax that is known to within bounds are judged if no sum can round."""
    case = "gemm-quantized/nvfp4/33x48x17/bf16xbf16-bf16/{}/tn+fp8-block-1x128-e4m3-fp32"
    assert check(ops.gemm_quantized, case.format("lattice")).passed == 1
    text = report(ops.gemm_quantized, case.format("cancelling"))
    assert "no case passed; 1 unsupported: these sums depend on their order" in text

    def without_amax(a: Any, b: Any, recipe: Any) -> Any:
        q = largest_outputs(a, b, recipe)
        return q.codes, q.scales

    assert "return the amax too" in report(without_amax, "gemm-quantized/nvfp4/33x48x17", families=["cancelling"])


@pytest.mark.long
def test_results_are_read_by_convention() -> None:
    conventions: dict[str, Any] = {"layout": "128x4", "nibbles": "high-first", "tensor_scale_is": "decode"}
    assert check(swizzled, "nvfp4", **SMALL, **conventions).passed == 7
    for name in conventions:
        kept = {key: value for key, value in conventions.items() if key != name}
        assert "did not pass" in report(swizzled, **ONE, **kept), name
    padded = report(
        lambda x: swizzled(x) | {"scales": swizzled(x)["scales"].view(torch.uint8) | 1}, **ONE, **conventions
    )
    assert "layout" in padded


@pytest.mark.long
def test_random_bits_given_and_own() -> None:
    given: dict[str, Any] = {"families": ["normal"], "shapes": [(128, 256)]}

    def exact(x: torch.Tensor, random: tuple[int, int]) -> Any:
        return ops.quantize(x, "nvfp4-sr", random=random)

    def own(x: torch.Tensor) -> Any:
        return ops.quantize(x, "nvfp4-sr", random=(int(torch.randint(0, 2**40, ())), 0))

    def ignored(x: torch.Tensor, random: tuple[int, int]) -> Any:
        return own(x)

    def to_nearest(x: torch.Tensor) -> Any:
        return ops.quantize(x, "nvfp4")

    assert check(exact, "nvfp4-sr", **given).passed == 6
    assert check(own, "quantize/nvfp4-sr/128x256/bf16/normal").passed == 1
    assert check(own, "nvfp4-sr", families=["zeros"], shapes=[(0, 32), (32, 64)]).passed == 7
    assert "codes" in report(to_nearest, "nvfp4-sr", **given)
    assert "codes" in report(ignored, "nvfp4-sr", **given)
    assert check(ignored, "nvfp4-sr", families=["zeros"], shapes=[(32, 64)], declares={"random": "own"}).passed == 6


# ---- custom ops ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    library = Library("ng_check", "FRAGMENT")
    library.define("quantize(Tensor x) -> (Tensor, Tensor, Tensor)")
    library.impl("quantize", checked_functions.correct, "CompositeExplicitAutograd")
    library.define("wrong(Tensor x) -> (Tensor, Tensor, Tensor)")
    library.impl("wrong", checked_functions.first_column_wrong, "CPU")
    yield library
    library._destroy()


# ---- wrong functions -------------------------------------------------------------------------------------------------


def test_failures_are_grouped_by_cause() -> None:
    def ties_away(x: torch.Tensor) -> Any:
        if x.shape[-1] == 48:
            raise ValueError("48 columns")
        return ops.quantize(x, replace(narrowgauge.recipe("nvfp4"), rounding="nearest-toward-zero"))

    text = report(ties_away, families=["normal", "e2m1-ties", "zeros"], shapes=[(32, 64), (8, 48)])
    head, first, second, *_ = re.split(r"^(?=.*: \d cases, quantize nvfp4)", text, flags=re.MULTILINE)
    assert re.fullmatch(r"ties_away, quantize nvfp4: \d of 11 cases did not pass\n\n", head)
    assert first.startswith("codes wrong, explained exactly by elements: ties round toward zero: 4 cases, ")
    assert "explained exactly by: elements: ties round toward zero" in first
    assert first.count("reproduce: ") == second.count("reproduce: ") == 1
    assert "error: quantize raised ValueError: 48 columns (at test_check.py:" in second
    assert text.index("explained exactly by: ") < text.index("fail: codes: ") < text.index("reproduce: ")
    assert "raise NotImplementedError, or choose shapes" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "case", "sentence"),
    [
        (checked_functions.tail_wrong, "1x16/bf16/normal", "codes"),
        pytest.param(
            checked_functions.writes_its_input, "1x16/bf16/normal", "input x were changed", marks=pytest.mark.long
        ),
    ],
)
def test_the_line_of_a_failure_reproduces_it_in_a_process(
    function: Callable[..., Any], case: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = report(function, families=["normal"])
    assert f"case: quantize/nvfp4/{case}\n" in text
    line = next(line for line in text.splitlines() if line.startswith("reproduce: "))
    program, *arguments = shlex.split(line.removeprefix("reproduce: "))
    assert program == "python"
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    failure = next(line for line in text.splitlines() if line.startswith(("fail: ", "error: ")))
    assert failure in done.stderr
    assert sentence in failure


# ---- unsupported cases -----------------------------------------------------------------------------------------------


def test_a_kernel_may_refuse_tails_and_views_only() -> None:
    done = check(checked_functions.refuses_tails_and_views, "nvfp4")
    assert done.passed + sum(done.unsupported.values()) == done.cases
    assert sum(done.unsupported.values()) == 10  # three shapes of two families, and two views of two shapes
    assert done.unsupported["AssertionError: x is contiguous"] == 4
    assert repr(done).endswith("1 more reason") or "AssertionError: x is contiguous (4)" in repr(done)
    text = report(checked_functions.raises_at_129_rows)
    assert "error: quantize raised RuntimeError: too many rows (at checked_functions.py:" in text
    text = report(checked_functions.raises_without_rows, families=["normal"])
    assert "error: quantize raised RuntimeError: CUDA error: invalid configuration argument" in text
    assert "case: quantize/nvfp4/0x32/bf16/normal" in text
    text = report(checked_functions.refuses_tails_and_views, shapes=[(3, 17)], families=["normal"])
    assert "error: quantize raised RuntimeError: shape (3, 17) is no multiple" in text


def test_only_unsupported_cases_are_a_failure() -> None:
    assert "nothing was compared" in report(ops.quantize, "mxfp8-e4m3", shapes=[(0, 32)], families=["normal"])
    text = report(checked_functions.refuses_everything, **SMALL)
    assert "no case passed; 7 unsupported: no kernel for this (7)" in text
    text = report(checked_functions.refuses_everything, "nvfp4", operation="dequantize", **SMALL)
    assert "no case passed; 7 unsupported" in text
    given = "gemm/nvfp4/16x32x16/bf16xbf16-bf16/normal/tn+bias"
    text = report(lambda a, b: ops.gemm(a, b, out_dtype=torch.bfloat16), given, operation="gemm")
    assert "no parameter 'bias'" in text
    text = report(lambda x: ops.quantize(x, "fp8-delayed-e4m3", scale=torch.ones(1)), "fp8-delayed-e4m3", **SMALL)
    assert "no parameter 'scale'" in text


# ---- state of the process --------------------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "environment": read_environment(), "threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"), "generator": torch.get_rng_state().tolist(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip


@pytest.mark.long
def test_settings_are_restored_and_the_function_sees_the_callers() -> None:
    seen = []

    def function(x: torch.Tensor) -> Any:
        seen.append((torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        torch.rand(3)
        with torch.autocast("cpu", enabled=False):
            torch.set_default_dtype(torch.float32)
            return checked_functions.correct(x)

    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            before = state()
            check(function, "nvfp4", **SMALL)
            assert state() == before
            with pytest.raises(AssertionError):
                check(checked_functions.first_column_wrong, "nvfp4", **ONE)
            with pytest.raises(AssertionError):
                check(checked_functions.refuses_everything, "nvfp4-sr", **SMALL)
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
    assert set(seen) == {(torch.float64, True, True)}


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_cases_of_the_matrix_and_ids_are_run_as_they_are() -> None:
    cases = narrowgauge.matrix("nvfp4", dtype="bf16", usage="rowwise", view="contiguous", scales="linear")[:3]
    assert check(checked_functions.correct, cases).cases == 3
    assert check(checked_functions.correct, cases[0].id).cases == check(checked_functions.correct, cases[0]).cases == 1


@pytest.mark.parametrize(
    ("recipe", "arguments", "error", "text"),
    [
        ("nvfp5", {}, ValueError, "no recipe is called 'nvfp5' (did you mean 'nvfp4'"),
        ("nvfp4", {"operation": "quantise"}, ValueError, "operation is 'quantise' (did you mean 'quantize'?)"),
        ("nvfp4", {"families": ["nromal"]}, ValueError, "family is 'nromal' (did you mean 'normal'?)"),
        ("nvfp4", {"families": []}, ValueError, "families, shapes or dtypes is empty"),
        ("nvfp4", {"shapes": []}, ValueError, "families, shapes or dtypes is empty"),
        ("nvfp4", {"shapes": [(3,)]}, ValueError, "shape is [3]"),
        ("nvfp4", {"dtypes": [torch.float64]}, TypeError, "not float64"),
        ("nvfp4", {"layout": "4x128"}, ValueError, "layout"),
        ("mxfp8-e4m3", {"operation": "gemm", "layout": "128x4"}, ValueError, "layout is a convention of"),
        ("nvfp4", {"operation": "transform"}, ValueError, "no transform"),
        ("nvfp4-rht", {"shapes": [(3, 17)]}, ValueError, "rotates whole groups of 16"),
        ("fp8-block-128x128", {"operation": "gemm", "keys": {"w_recipe": "nvfp4"}}, ValueError, "cannot be multiplied"),
        ("quantize/nvfp4/3x16/bf16/nromal", {}, ValueError, "no id of a case"),
        ("quantize/nvfp4/3x16/bf16/normal", {"families": ["normal"]}, ValueError, "families, shapes and keys choose"),
        ("gemm/nvfp4/3x16x3/bf16xbf16-bf16/normal/tn", {"operation": "transform"}, ValueError, "operation='gemm'"),
        ("gemm/nvfp4", {"operation": "quantize"}, ValueError, "'gemm/nvfp4' begins ids of gemm; leave it out"),
        ("gem/nvfp4", {}, ValueError, "operation is 'gem' (did you mean 'gemm'?)"),
        ("gemm/nvfp4/64x256x48/fp8", {}, ValueError, "the first one is 'gemm/nvfp4/64x256x48/bf16xbf16-fp32/"),
        ("nvfp4", {"keys": {"usge": "both"}}, ValueError, "'usge' (did you mean 'usage'?)"),
        ("nvfp4", {"keys": {"usage": "all"}}, ValueError, "usage is 'all'"),
        ("nvfp4", {"keys": {"usage": "both"}, "layout": "128x4"}, ValueError, "the cases call quantize_both"),
        ([f"quantize/nvfp4/3x16/bf16/normal{end}" for end in ("", "/both")], {}, ValueError, "check them apart"),
        ([], {}, ValueError, "empty list of cases"),
        (3, {}, TypeError, "not int"),
        ("nvfp4", {"declares": {"gemm": "backwards"}}, Exception, "backwards"),
        (replace(narrowgauge.recipe("nvfp4"), nan="propagate"), {}, ValueError, "save_rule(recipe, 'own.toml')"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(recipe: Any, arguments: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        check(checked_functions.correct, recipe, **arguments)


# ---- which recipe is it ----------------------------------------------------------------------------------------------

TWO: dict[str, Any] = {"families": ["normal", "nan", "zeros"], "shapes": [(32, 256)]}


def test_a_function_of_another_recipe_is_told_its_recipe() -> None:
    own = "fp8-block-1x128-e4m3-fp32@vllm"

    def kernel(x: torch.Tensor) -> Any:
        q = ops.quantize(x, own)
        return q.codes, q.scales

    text = report(kernel, "fp8-block-1x128", **TWO)
    line = next(line for line in text.splitlines() if line.startswith("nearest rule: "))
    assert re.match(rf"nearest rule: {own} explains all [\d ]+ bytes \(as asked [\d ]+ differ\)", line), line
    assert f"next: narrowgauge.check(kernel, '{own}'" in text
    done = check(kernel, own, **TWO)
    assert done.cases == done.passed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("own", ["fp8-block-1x128-e4m3-fp32-eps1e-10@modelopt", "fp8-block-1x128-e4m3-pow2-eps0.0001"])
def test_another_epsilon_and_dialect_is_told(own: str) -> None:

    def kernel(x: torch.Tensor) -> Any:
        q = ops.quantize(x, own)
        return q.codes, q.scales

    assert f"nearest rule: {own} explains all " in report(kernel, "fp8-block-1x128", **TWO)


def test_small_mistakes_together_are_a_rule_and_what_it_leaves() -> None:
    rule = replace(find_recipe("nvfp4"), rounding="nearest-away", negative_zero="rounded")

    def kernel(x: torch.Tensor) -> Any:
        q = ops.quantize(x, rule)
        q.codes[3, :2] ^= 0x22
        return q.codes, q.scales, q.amax

    families = ["normal", "negative-zeros", "nan", "e2m1-ties", "position"]
    text = report(kernel, families=families, shapes=[(32, 64)])
    line = next(line for line in text.splitlines() if line.startswith("nearest rule: "))
    for words in ("nvfp4 with ", "rounding nearest-away", "negative_zero rounded", "codes"):
        assert words in line
    assert re.search(r" leaves \d+ of [\d ]+ codes and scales unexplained: ", line)


def test_a_mistake_at_a_place_is_no_rule() -> None:
    assert "nearest rule" not in report(checked_functions.first_column_wrong, **SMALL)


def test_inputs_beyond_the_promise_are_left_out() -> None:
    def kernel(x: torch.Tensor) -> Any:
        assert x.shape[1] % 32 == 0
        q = ops.quantize(x.nan_to_num(nan=3.0), "nvfp4")
        return q.codes, q.scales, q.amax

    chosen: dict[str, Any] = {"families": ["normal", "nan"], "shapes": [(32, 64), (8, 48)]}
    assert "nan" in report(kernel, **chosen)
    done = check(kernel, "nvfp4", **chosen, finite=True, constraints={"K": 32})
    assert done.passed == done.cases - sum(done.unsupported.values()) >= 1
    assert {reason.partition(", ")[0] for reason in done.unsupported} == {
        "finite is True", "backend kernel takes multiples of 32 as K",
    }  # fmt: skip
    assert "finite=True, constraints={'K': 32}" in report(
        kernel, families=["normal"], shapes=[(32, 64)], finite=True, constraints={"K": 32}, layout="128x4"
    )
