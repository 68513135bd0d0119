"""Inputs of contracts follow from the types of the arguments."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.contract.declaration import TYPES
from narrowgauge.harness.inputs.draw import Draw
from narrowgauge.harness.operations.contracts.inputs import FAMILIES, KINDS, RULES, contract_inputs
from narrowgauge.spec.program import Program, Tensor

SIZES = {"M": 29, "K": 96}
ONE, ROW, SCALES = ("x", "Matrix", ("M", "K")), ("w", "Row", ("K",)), ("s", "Scale", ("1",))
ALL = [ONE, ("y", "Matrix", ("M", "K")), ("z", "Matrix", ("M", "K")), ROW, ("a", "Scalar", ()), SCALES]


def made(
    family: str, dtype: str = "bfloat16", key: str = "a", sizes: dict[str, int] | None = None
) -> dict[str, torch.Tensor]:
    arguments = [Tensor(n, kind, axes, dtype if kind in ("Matrix", "Row") else "float32") for n, kind, axes in ALL]
    return contract_inputs(Program("all", "", tuple(arguments), (), {}), sizes or SIZES, family, Draw(key))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_every_type_shape_and_dtype(family: str, dtype: str) -> None:
    for sizes in ({"M": 1, "K": 1}, {"M": 3, "K": 17}, {"M": 0, "K": 8}, {"M": 2, "K": 0}, SIZES):
        tensors, again = made(family, dtype, sizes=sizes), made(family, dtype, sizes=sizes)
        shapes = {"x": (sizes["M"], sizes["K"]), "w": (sizes["K"],), "a": (), "s": (1,)}
        assert {name: tuple(tensors[name].shape) for name in shapes} == shapes
        assert str(tensors["x"].dtype) == str(tensors["w"].dtype) == f"torch.{dtype}"
        assert all(torch.equal(bits(tensors[name]), bits(again[name])) for name in tensors)
        assert tensors["s"] > 0
        assert tensors["a"].isfinite()
        assert tensors["w"].isfinite().all()
        assert family in ("nan", "inf") or tensors["x"].isfinite().all()


def test_matrices_of_one_shape_differ() -> None:
    same = {family for family in FAMILIES if len({bits(made(family)[n]).numpy().tobytes() for n in "xyz"}) < 3}
    assert same == {"zeros", "negative-zeros"}


def test_rows_tell_where_their_numbers_lie() -> None:
    w = made("normal", sizes={"M": 1, "K": 4096})["w"].float()
    assert 1000 < (w < 0).sum() < 3000
    assert len(w[:509].abs().unique()) == 509
    assert not any((w == w.roll(shift)).all() for shift in (1, 8, 16, 2048))
    assert (w != w.roll(1)).all()


def test_families_have_the_property_that_they_state() -> None:
    x = {family: made(family, "float32")["x"].double() for family in FAMILIES}
    rows = x["ladder"].square().mean(1).log2() / 2
    assert rows.min() < -35
    assert rows.max() > 35
    assert (x["negative"] <= 0).all()
    assert (x["offset"].mean(1).abs() > 6 * x["offset"].std(1)).all()
    assert (x["cancelling"].sum(1).abs() < x["cancelling"].abs().sum(1) / 8).all()
    assert made("cancelling")["x"].float().add(made("cancelling")["y"]).abs().median() < 0.5
    assert made("lattice")["w"].unique().tolist() == [-2, -1, 0, 1, 2]


def test_every_type_and_rule_is_known() -> None:
    # Codes come from `operand_inputs`, and arguments of attention from `sequence_inputs`.
    assert {*KINDS, "Codes", "QueryLengths", "Sinks"} == {kind.__name__ for kind in TYPES}
    assert set(RULES) <= set(FAMILIES)
    with pytest.raises(ValueError, match="laddder") as raised:
        made("laddder")
    assert "ladder" in str(raised.value)
