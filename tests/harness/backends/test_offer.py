"""The offer of a backend: cases in its dialects, within its constraints."""

import re
from types import SimpleNamespace

import pytest

from narrowgauge.harness.backends.backend import Backend
from narrowgauge.harness.backends.offer import Offer
from narrowgauge.harness.backends.results import BackendError
from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.spec.dialects import DIALECTS, FP8_DIALECTS, MX_DIALECTS
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.matrix import quick_cases


def case(recipe="nvfp4", shape=(64, 128), dtype="bf16", operation="quantize", flags=()):
    return case_from_labels(operation, recipe, shape, dtype, "normal", flags)


def backend(**attributes):
    return Backend.local("sample", SimpleNamespace(quantize=reference.quantize, gemm=reference.gemm, **attributes))


def test_a_recipe_stands_for_its_dialects():
    offer = backend(dialects={"nvfp4": ["torchao", "te"], "mxfp4": "gguf"}).offer
    chosen, others = offer.select([case(), case("nvfp4@torchao"), case("nvfp4@jax"), case("mxfp4"), case("mxfp8-e4m3")])
    assert [one.recipe for one in chosen] == ["nvfp4@torchao", "nvfp4", "mxfp4@gguf"]
    assert others == {"offers nvfp4 in torchao and te, not in jax": 1, "offers no recipe mxfp8-e4m3": 1}


def test_both_operands_of_a_product_have_the_dialect():
    """DeepGEMM multiplies blocks of 1x128 by blocks of 128x128, both in its own dialect."""
    blocks = "fp8-block-1x128-e4m3-fp32+fp8-block-128x128-e4m3-fp32"
    product = case(blocks, (16, 128, 128), "bf16xbf16-bf16", "gemm", ("tn",))
    first, second = blocks.split("+")
    offer = backend(dialects={first: ["deepgemm", "te", "vllm"], second: ["te", "deepgemm"]}).offer
    names = [("@deepgemm", "@deepgemm"), ("", "")]
    assert [one.recipe_names for one in offer.select([product])[0]] == [(first + a, second + b) for a, b in names]
    chosen, others = backend(dialects={first: "deepgemm", second: "te"}).offer.select([product])
    assert (chosen, others) == ([], {f"offers {first} in deepgemm, not in te": 1})


@pytest.mark.parametrize(
    ("recipe", "served"),
    [
        ("fp8-delayed-e4m3", "fp8-static-e4m3@vllm"),
        ("fp8-current-e5m2", "fp8-current-e5m2fnuz"),
        ("fp8-current-e4m3", "fp8-row-e4m3fnuz@modelopt"),
        ("fp8-block-1x128-e4m3-fp32", "fp8-block-1x128-e4m3fnuz-fp32@deepgemm"),
    ],
)
def test_recipes_without_cases_take_those_of_a_similar_recipe(recipe, served):
    name, _, dialect = served.partition("@")
    chosen, _ = backend(dialects={name: dialect or "te"}).offer.select([case(recipe)])
    assert [one.recipe for one in chosen] == [served]


@pytest.mark.long
def test_every_dialect_has_quick_cases():
    quick = [one for one in quick_cases() if one.operation == "quantize"]
    tables = (DIALECTS, MX_DIALECTS, *FP8_DIALECTS.values())
    bases = dict.fromkeys(name.partition("@")[0] for name in recipe_names())
    # Compositions of stages of simpler operations: two of MX, and the update of the scale of delayed scaling.
    bases = [base for base in bases if not re.search(r"mxfp(6|8-e5m2).*-2d|-recent|-bulk", base)]
    pairs = [(base, dialect) for base in bases for dialect in {name for table in tables for name in table}]
    named = [(base, dialect) for base, dialect in pairs if has_dialect(base, dialect)]
    assert len(named) > 300
    assert [pair for pair in named if not Offer({pair[0]: (pair[1],)}).select(quick)[0]] == []


def has_dialect(base, dialect):
    try:
        return bool(find_recipe(f"{base}@{dialect}"))
    except ValueError:
        return False


def test_both_operands_of_a_product_are_in_the_dialect():
    offer = backend(dialects={"nvfp4": "torchao"}).offer
    product = case(operation="gemm", shape=(16, 32, 8), dtype="bf16xbf16-fp32", flags=("tn",))
    (chosen,), _ = offer.select([product])
    assert chosen.recipe_names == ("nvfp4@torchao", "nvfp4@torchao")


def test_quantize_both_alone_is_an_offer_of_both_halves():
    only = Backend.local(
        "sample", SimpleNamespace(quantize_both=reference.quantize_both, dialects={"mxfp8-e4m3": "te"})
    )
    both, row = case("mxfp8-e4m3", flags=("both",)), case("mxfp8-e4m3")
    assert only.offer.select([both, row]) == ([both], {"has no quantize": 1})
    assert run_case(both, only).verdict == "pass"


def test_operations_without_a_method_are_no_part_of_an_offer():
    swizzle = case(operation="swizzle", recipe="", dtype="", shape=(4, 4))
    assert backend(dialects={"nvfp4": "te"}).offer.select([swizzle]) == ([], {"has no swizzle": 1})


@pytest.mark.parametrize(
    ("constraints", "inside", "outside", "reason"),
    [
        ({"K": 64}, case(), case(shape=(64, 96)), "takes multiples of 64 as K"),
        ({"M": [64]}, case(), case(shape=(32, 128)), "takes M 64"),
        ({"dtype": ["bf16", "fp16"]}, case(), case(dtype="fp32"), "takes dtype bf16 or fp16"),
        ({"usage": ["rowwise"]}, case(), case(flags=("both",)), "takes usage rowwise"),
        # The blocks of the columnwise result run along M.
        ({"K": 64}, case(shape=(64, 96), flags=("columnwise",)), case(shape=(96, 64), flags=("both",)),
         "takes multiples of 64 as K"),
        ({"N": 8}, case(operation="gemm", shape=(3, 32, 8), dtype="bf16xbf16-fp32", flags=("tn",)),
         case(operation="gemm", shape=(8, 32, 3), dtype="bf16xbf16-fp32", flags=("tn",)), "takes multiples of 8 as N"),
        ({"dtype": ["bf16"]}, case(),
         case(operation="gemm", shape=(8, 32, 8), dtype="bf16xfp32-fp32", flags=("tn",)), "takes dtype bf16"),
    ],
)  # fmt: skip
def test_constraints_leave_cases_out(constraints, inside, outside, reason):
    offer = backend(constraints=constraints).offer
    assert (offer.reason(inside), offer.reason(outside)) == ("", reason)
    assert offer.select([inside, outside]) == ([inside], {reason: 1})


def test_a_case_that_is_not_offered_is_unsupported():
    record = run_case(case("mxfp4"), backend(dialects={"nvfp4": "te"}))
    assert (record.verdict, record.message) == ("unsupported", "backend sample offers no recipe mxfp4")


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"dialects": ["nvfp4"]}, "dialects is ['nvfp4']; it maps names of recipes to dialects"),
        ({"dialects": {"nvfp5": "te"}}, "nvfp5"),
        ({"dialects": {"nvfp4": "torcha"}}, "torcha"),
        ({"constraints": {"k": 16}}, "constraints has 'k'"),
        ({"constraints": {"K": 0}}, "constraints has 'K': 0; it is a number that divides it, or a list of sizes"),
        ({"constraints": {"dtype": "bf16"}}, "it is a list of values"),
        ({"constraints": 128}, "constraints is 128; it maps M, K, N"),
    ],
)
def test_a_wrong_attribute_is_one_clear_error(attributes, words):
    with pytest.raises(BackendError, match="backend sample") as error:
        backend(**attributes)
    assert words in str(error.value)
