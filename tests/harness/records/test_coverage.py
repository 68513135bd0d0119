from __future__ import annotations

import re

import pytest

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.inputs.reached import BitSet, Reached
from narrowgauge.harness.records import coverage
from narrowgauge.spec.formats import E2M1
from tests.harness.runs import record


def quantize(shape: tuple[int, ...], dtype: str = "bf16", inputs: str = "normal", recipe: str = "nvfp4"):
    return case_from_labels("quantize", recipe, shape, dtype, inputs)


def recorded(case, **changes):
    return {**record(inputs=case.inputs, recipe=case.recipe_label, **changes), "case": case.id}


CASES = [
    *(quantize(shape, dtype) for shape in [(128, 256), (64, 96), (33, 77), (1, 7168)] for dtype in ("bf16", "fp32")),
    quantize((128, 256), inputs="nan"),
    quantize((128, 256), recipe="mxfp4"),
    case_from_labels("gemm", "nvfp4", (128, 256, 128), "bf16xbf16-fp16", "lattice", ("tn",)),
]


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        ((128, 256), ["multiples of 128"]),
        ((2, 64, 384), ["multiples of 128"]),
        ((48, 128), ["multiples of 16"]),
        ((33, 77), ["tails"]),
        ((0, 128), ["empty"]),
        ((1, 7168), ["tails", "K from 4096", "M to 128 with K from 1024"]),
        ((256, 1024), ["multiples of 128"]),
    ],
)
def test_shape_classes_of_matrices(shape, classes):
    assert coverage.shape_classes(quantize(shape)) == classes


def test_a_product_has_a_class_for_its_inner_extent():
    def product(*shape):
        return case_from_labels("gemm", "nvfp4", shape, "bf16xbf16-bf16", "normal", ("tn",))

    assert coverage.shape_classes(product(128, 7168, 2048)) == [
        "multiples of 128", "K from 4096", "M to 128 with K from 1024",
    ]  # fmt: skip
    assert coverage.shape_classes(product(256, 128, 7168)) == ["multiples of 128"]


def test_lines_name_what_ran_and_what_did_not():
    written = coverage.lines(CASES, [recorded(CASES[0])])
    text = " ".join(" ".join(written).split())
    assert "1 of the 9 cases" in text  # quantizes of nvfp4: neither a recipe nor an operation that never ran counts
    assert "operations 1 of 2: quantize; not gemm" in text
    assert "inputs 1 of 2: normal; not nan" in text
    assert "lattice" not in text
    assert "dtypes 1 of 2: bf16; not fp32" in text
    assert "fp16" not in text
    assert "shapes 1 of 5: multiples of 128; not multiples of 16, tails, K from 4096" in text
    assert re.search(r"options (\d+) of (\d+) pairs of values of two keys", text)
    assert "warning: less than half of the cases and of the shapes ran" in text
    assert all(len(line) <= 80 for line in written)


def test_numbers_that_the_inputs_reach_are_joined():
    possible, empty = BitSet(16, 255), BitSet(0)
    packed = [Reached(E2M1, BitSet(16, bits), possible, empty, empty, empty).pack() for bits in (0b11, 0b110)]
    records = [recorded(case, numbers=text) for case, text in zip(CASES, packed, strict=False)]
    sentence = " ".join(" ".join(coverage.lines(CASES, records)).split())
    assert "numbers of the pairs of a scale and a side of a rounding boundary: nvfp4 37.5 % warning" in sentence
    nothing = [records[0], recorded(CASES[1], numbers=packed[1], verdict="unsupported", compared=0, stages=[])]
    assert "nvfp4 25.0 %" in " ".join(" ".join(coverage.lines(CASES, nothing)).split())
    of_many = [record(recipe=f"mxfp4@own-{n}", numbers=packed[0]) for n in range(6)]
    others = [recorded(CASES[0]) | {"recipe": one["recipe"], "numbers": one["numbers"]} for one in of_many]
    assert "; 2 more recipes up to mxfp4@own-5 25.0 %" in " ".join(" ".join(coverage.lines(CASES, others)).split())


@pytest.mark.parametrize(("recipe", "inputs", "said"), [
    ("mxfp8-e4m3", "normal", True), ("mxfp8-e4m3", "lattice", False), ("nvfp4", "normal", False),
])  # fmt: skip
def test_products_without_exact_sums_are_named(recipe: str, inputs: str, said: bool) -> None:
    case = case_from_labels("gemm", recipe, (128, 256, 128), "bf16xbf16-fp16", inputs, ("tn",))
    text = " ".join(" ".join(coverage.lines([case], [recorded(case)])).split())
    assert ("none of 1 products is exact in any order: add the family lattice" in text) == said
