"""MXFP8 and FP8 against the golden bytes of Transformer Engine: codes and scales, both halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowgauge.reference.ops import quantize, quantize_both
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe
from tests.golden import bits, golden, load, quantize_input
from tests.reference.twins import rowwise_elements


def golden_recipes() -> list[Any]:
    """Parameters: each golden file with each recipe in it that is not of NVFP4."""
    found = []
    for file in golden("quantize_*.npz"):
        (path,), marks = file.values, file.marks
        keys = [] if marks else [key for key in load(path) if key.startswith(("fp8", "mxfp"))]
        names = sorted({key.rsplit(".", 1)[0] for key in keys}) if not marks else [""]
        found += [pytest.param(path, name, id=f"{file.id}-{name}", marks=marks) for name in names]
    return found


def assert_bytes(found: Any, expected: np.ndarray) -> None:
    mine = found.numpy() if expected.dtype == np.uint8 else bits(found).numpy()
    np.testing.assert_array_equal(mine, expected if expected.dtype == np.uint8 else expected.view(np.int32))


def assert_half(q: Quantized | None, arrays: dict[str, np.ndarray], name: str, suffix: str) -> None:
    assert q is not None
    assert q.shape == tuple(arrays["x"].shape if not suffix else arrays["x"].T.shape)
    if f"{name}.scale" in arrays:  # one for the tensor: its inverse
        assert_bytes(q.scales.flatten(), arrays[f"{name}.scale"])
    else:
        assert_bytes(q.scales, arrays[f"{name}.scales{suffix}"])
    if f"{name}.codes{suffix}" in arrays:
        assert_bytes(q.codes, arrays[f"{name}.codes{suffix}"])


@pytest.mark.parametrize(("path", "name"), golden_recipes())
def test_every_recipe_gives_transformer_engines_bytes(path: Path, name: str) -> None:
    arrays = load(path)
    x = quantize_input(path, arrays)
    row, column = quantize_both(x, name)
    assert_half(row, arrays, name, "")
    assert_half(quantize(x, name), arrays, name, "")
    assert_half(column, arrays, name, "_t")
    assert column is not None
    if find_recipe(name).columnwise == "in-place":  # one set of codes for both usages
        assert_bytes(column.codes, arrays[f"{name}.codes"])
    if f"{name}.scale" in arrays:
        np.testing.assert_array_equal(rowwise_elements(column).T, arrays[f"{name}.codes"])


def test_every_recipe_of_the_files_is_found() -> None:
    names = {str(parameter.values[1]) for parameter in golden_recipes()} - {""}
    assert not names or {name.split("-")[0] + "-" + name.split("-")[1] for name in names} == {
        "fp8-block", "fp8-current", "mxfp8-2d"
    }  # fmt: skip
    assert not names or len(names) == 11
