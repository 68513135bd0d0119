"""Certificates of a GEMM: right products are certified, wrong ones named by codes, scales and column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.api.default_settings import default_settings
from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.certify.certificate import CertificateError
from narrowgauge.harness.certify.products import (
    COLUMNS,
    Products,
    Side,
    certificate_of_products,
    prove_products,
    side_of,
)
from narrowgauge.harness.cli import app
from narrowgauge.reference import ops
from narrowgauge.reference.quantize.layout import elements
from narrowgauge.spec.quantized import Quantized
from narrowgauge.spec.recipes import find_recipe

Gemm = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    with default_settings():
        yield


def backend_of(gemm: Gemm) -> Backend:
    return Backend.local("own", SimpleNamespace(gemm=gemm))


def some(recipe: str) -> Side:
    """A sixteenth of the rows of an operand."""
    side = side_of(find_recipe(recipe), "cpu", 0)
    rows = torch.arange(len(side.codes)).view(16, -1).T.flatten()[:128]
    return Side(side.recipe, side.codes[rows], side.scales[rows])


def proved(gemm: Gemm, recipe: str = "nvfp4", places: int = 2) -> Products:
    return prove_products(backend_of(gemm), some(recipe), places)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8-e5m2"])
def test_products_of_the_reference_are_right(recipe: str) -> None:
    found = proved(ops.gemm, recipe)
    assert found.wrong == []
    assert (found.places, found.outputs) == (2, 2 * 128 * 128)


def test_an_operand_has_every_code_under_every_scale() -> None:
    side = side_of(find_recipe("nvfp4"), "cpu", 0)
    pairs = set(zip(side.codes.tolist(), side.scales.tolist(), strict=True))
    assert len(pairs) == 16 * 127
    a, b = side.at(37, alone=True), side.at(37, alone=False)
    codes = [elements(q.codes, COLUMNS, q.recipe) for q in (a, b)]
    assert bool((codes[0][:, 37] == side.codes).all())
    assert int(codes[0].count_nonzero()) == int(side.codes.count_nonzero())
    assert bool((codes[1][:, 37] == side.codes).all())
    assert bool((a.scales[:, 2] == side.scales).all())
    assert int((a.scales[:, 3] != side.scales).sum()) > 1900
    large = side_of(find_recipe("mxfp8-e4m3"), "cpu", 0)
    assert len(large.codes.unique()) == 256
    assert len(large.scales.unique()) == 255


def test_a_wrong_product_is_named_by_its_codes() -> None:
    def gemm(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
        """The product of two codes 7 is that of 7 and 6."""
        y = ops.gemm(a, b, **options)
        lower = ops.gemm(replace(a, codes=a.codes - (a.codes & 7 == 7).byte()), b, **options)
        sevens = (elements(a.codes, COLUMNS, a.recipe)[:, 0] == 7).view(-1, 1) & (
            elements(b.codes, COLUMNS, b.recipe)[:, 0] == 7
        )
        return torch.where(sevens, lower, y)

    (wrong,) = proved(gemm).wrong
    assert wrong.rule is not None
    assert wrong.rule.conditions == {
        "magnitude of the code of a": [6.0, 6.0], "magnitude of the code of b": [6.0, 6.0],
        "sign of the code of a": ["+"], "sign of the code of b": ["+"],
    }  # fmt: skip
    assert wrong.first["column of K"] == 0
    assert wrong.first["code of a"]["decimal"] == "6"


def test_the_scale_of_another_block_is_a_wrong_product() -> None:
    def gemm(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
        return ops.gemm(replace(a, scales=torch.cat([a.scales[:, :4], a.scales[:, 4:].roll(1, 1)], 1)), b, **options)

    found = proved(gemm)
    assert found.places == 2  # the first half of K is right
    assert found.wrong


@pytest.mark.parametrize("recipe", ["fp8-current-e4m3", "nvfp4-2d", "nvfp4-rowscaled"])
def test_recipes_without_a_proof_are_refused(recipe: str) -> None:
    with pytest.raises(CertificateError, match="needs scales of 8 bits for blocks of a row"):
        certificate_of_products(backend_of(ops.gemm), "own", find_recipe(recipe), "cpu", 1, 0)


def test_a_kernel_that_fails_has_no_certificate() -> None:
    def gemm(a: Quantized, b: Quantized, **options: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    with pytest.raises(CertificateError, match=r"own, nvfp4: fails on an input of the proof.*no memory"):
        certificate_of_products(backend_of(gemm), "own", find_recipe("nvfp4"), "cpu", 1, 0)


@pytest.mark.long
def test_the_command_certifies_products(tmp_path: Path) -> None:
    arguments = ["certify", "reference", "--operation", "gemm", "--recipe", "mxfp8-e4m3", "--places", "1"]
    result = CliRunner().invoke(app, [*arguments, "--report-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "proved: products: every pair of two codes under 4 scales of both" in result.output
    assert "sampled: order of summation at 64x512x64: " in result.output
    assert "sampled: places of a product in K: 1 of 128" in result.output
