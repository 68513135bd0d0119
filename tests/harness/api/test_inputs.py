"""`narrowgauge.inputs` and `narrowgauge.matrix`: the tensors and the cases of the harness."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import narrowgauge
from narrowgauge.harness.api.inputs import inputs, matrix
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id
from narrowgauge.harness.operations.registry import make_inputs
from tests.matrix import all_cases

pytest_plugins = ["pytester"]
TURNED = "nvfp4-rht"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8-e4m3", "fp8-block-1x128", TURNED])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_tensors_are_those_of_the_case(recipe: str, seed: int) -> None:
    name = str(narrowgauge.recipe(recipe))
    for family in OPERATIONS["quantize"].families():
        case = case_from_id(f"quantize/{name}/32x128/bf16/{family}")
        assert case is not None
        x = inputs(recipe, (32, 128), family, seed)
        assert x.is_contiguous()
        assert torch.equal(x.view(torch.int16), make_inputs(case, seed=seed).x.view(torch.int16)), family
    layout = "nt" if recipe == TURNED else "tn"
    for family in OPERATIONS["gemm"].families():
        case = case_from_id(f"gemm/{name}/8x128x6/bf16xbf16-bf16/{family}/{layout}")
        assert case is not None
        made = make_inputs(case, seed=seed)
        assert list(made.tensors) == ["x", "w"]
        for found, expected in zip(
            inputs(recipe, (8, 128, 6), family, seed, operation="gemm"), made.tensors.values(), strict=True
        ):
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), family


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("nvfp4", (2, 16), "nromal"), ValueError, "family is 'nromal' (did you mean 'normal'?); it can be normal, "),
        (("nvfp4", (2, 16), "cancelling"), ValueError, "family is 'cancelling'; it can be normal, "),
        (("nvfp4", (16,), "normal"), ValueError, "shape is [16]; a shape is [M, K]"),
        (("nvfp4", (-1, 16), "normal"), ValueError, "shape is [-1, 16]"),
        (("nvfp5", (2, 16), "normal"), ValueError, "no recipe is called 'nvfp5'"),
        ((TURNED, (2, 17), "normal"), ValueError, "rotates whole groups of 16"),
    ],
)
def test_wrong_arguments_of_inputs_are_named(arguments: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        inputs(*arguments)


def test_wrong_keywords_of_inputs_are_named() -> None:
    with pytest.raises(TypeError, match="dtype is float32, bfloat16, float16, not float64"):
        inputs("nvfp4", (2, 16), "normal", dtype=torch.float64)
    with pytest.raises(ValueError, match="operation is 'swizzle'; it can be quantize, transform, gemm"):
        inputs("nvfp4", (2, 16), "position", operation="swizzle")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="which is 0 in fp16"):
        inputs("nvfp4", (2, 16), "normal-1e-28", dtype=torch.float16)


# ---- matrix ----------------------------------------------------------------------------------------------------------


def test_the_matrix_is_a_selection_of_the_shipped_cases() -> None:
    shipped = all_cases()
    quick = matrix("nvfp4")
    assert quick == [
        case for case in shipped
        if case.operation == "quantize" and case.recipe_names == ("nvfp4",) and case.tier == "quick"
    ]  # fmt: skip
    assert len(quick) < len(matrix("nvfp4", device="cuda")) < len(matrix("nvfp4", "full"))
    mixed = matrix("mxfp8-e5m2", operation="gemm")
    assert any(len(set(case.recipe_names)) == 2 for case in mixed)
    narrow = matrix("nvfp4", dtype="bf16", usage="both", shape=(128, 128), tier="full")
    assert narrow
    assert all(case.id.startswith("quantize/nvfp4/128x128/bf16/") and "both" in case.id for case in narrow)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tier": "quikc"}, "tier is 'quikc' (did you mean 'quick'?); it can be quick, full"),
        ({"device": "gpu"}, "device is 'gpu' (did you mean 'cpu'?); it can be cpu, cuda"),
        ({"operation": "quantise"}, "operation is 'quantise' (did you mean 'quantize'?)"),
        ({"usge": "both"}, "no key of quantize is called 'usge' (did you mean 'usage'?)"),
        ({"usage": "all"}, "usage is 'all'; it can be rowwise, columnwise, both"),
        ({"shape": (5, 5)}, "no case of the tier quick is quantize of nvfp4, shape=(5, 5)"),
        ({"operation": "transform"}, "no case of the tier quick is transform of nvfp4"),
    ],
)
def test_wrong_arguments_of_matrix_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        matrix("nvfp4", **arguments)
