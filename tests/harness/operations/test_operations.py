"""Every operation, recipe and option: the reference passes, and every stage is seen."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.contract import Contract
from narrowgauge.contracts import CONTRACTS
from narrowgauge.harness.cases.operations import OPERATIONS, case_from_id, case_from_labels
from narrowgauge.harness.inputs.inputs import laid_out
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.quantize import quantize_grouped
from narrowgauge.spec.recipes import find_recipe, recipe_names
from tests.harness.operation_cases import (
    REFERENCE,
    fails,
    gemm_case,
    grouped_case,
    packing_case,
    passes,
    quantize_case,
    run,
    stages,
    swizzle_case,
)
from tests.harness.sample_backends import quantize

# The reference passes everything, and every stage is seen.

# The rule for the next scale of delayed scaling changes no quantize.
RECIPES = [name for name in recipe_names() if "@" not in name and not name.endswith(("-recent", "-bulk"))]


@pytest.mark.parametrize("view", ["strided", "transposed"])
@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 64), (2, 3, 8, 64)])
@pytest.mark.parametrize("flags", [(), ("columnwise",), ("both",)])
def test_views_are_given_as_views(view, shape, flags):
    seen = []

    def spying(door):
        def call(x, *arguments, **options):
            seen.append((tuple(x.shape), x.stride()))
            return door(x, *arguments, **options)

        return call

    doors = {name: spying(REFERENCE[name]) for name in ("quantize", "quantize_both")}
    case = quantize_case("nvfp4-rht", *flags, view, shape=shape)
    passes(case, **doors)
    x = make_inputs(case).x
    wanted = laid_out(x, view)
    assert not wanted.is_contiguous()
    assert torch.equal(wanted, x)
    assert set(seen) == {(tuple(x.shape), wanted.stride())}
    assert tuple(x.shape) == ((64, 48) if flags == ("columnwise",) else shape)


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise", "both"])
def test_random_bits_are_given_as_seed_and_offset_or_as_words(usage, words):
    given = []

    def spying(door):
        def call(x, recipe, **options):
            given.append(options["random"])
            return door(x, recipe, **options)

        return call

    flags = [f for f in (usage, "words" if words else "") if f not in ("rowwise", "")]
    doors = {name: spying(REFERENCE[name]) for name in ("quantize", "quantize_both")}
    case = quantize_case("nvfp4-sr", *flags)
    passes(case, **doors)
    if not words:
        assert len(set(given)) == 1
        assert all(0 <= number < 2**63 for number in given[0])
        again = make_inputs(case).random("x")
        assert given[0] == again != make_inputs(case, seed=1).random("x")
    elif usage == "both":
        assert [tuple(t.shape) for t in given[0]] == [(48, 16), (64, 12)]
    else:
        assert tuple(given[0].shape) == ((48, 16) if usage == "rowwise" else (64, 12))
        assert given[0].dtype == torch.int32


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sections", ["even:4", "front:4", "middle:4", "end:4", "ragged:3", "even:1"])
@pytest.mark.parametrize("usage", [(), ("columnwise",)])
@pytest.mark.parametrize(
    "name", ["nvfp4", "nvfp4-2d", "nvfp4-rht", "nvfp4-2d-4over6-448-mse", "nvfp4-rht-sr", "nvfp4-sr"]
)
def test_sections_pass(name, usage, sections):
    shape = (192, 64) if sections != "ragged:3" or not usage or "rht" not in name else (272, 64)
    record = passes(grouped_case(name, sections, *usage, shape=shape))
    assert list(stages(record)) == ["memory", "repeat", "amax", "tensor scale", "scales", "codes"]
    assert stages(record)["codes"]["compared"] == shape[0] * shape[1]


@pytest.mark.parametrize("layout", ["tn", "nn", "nt"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4-rowscaled+nvfp4-2d", "nvfp4-sr", "nvfp4-2d-4over6-256-mae"])
def test_transposed_operands_are_columnwise_halves(recipe, layout):
    calls = []

    def spying(name):
        def call(x, recipe_, **options):
            calls.append((name, tuple(x.shape), options.get("rowwise", True)))
            return REFERENCE[name](x, recipe_, **options)

        return call

    case = gemm_case(recipe, layout)
    passes(case, gemm=reference.gemm, **{name: spying(name) for name in ("quantize", "quantize_both")})
    x = ("quantize_both", (64, 48), False) if layout == "nt" else ("quantize", (48, 64), True)
    w = ("quantize", (32, 64), True) if layout == "tn" else ("quantize_both", (64, 32), False)
    assert calls == [x, w]
    calls.clear()
    passes(case, gemm=reference.gemm, quantize=spying("quantize"))
    assert calls == [("quantize", (48, 64), True), ("quantize", (32, 64), True)]


# Missing methods.


def recipes_of(contract: Contract) -> list[str]:
    """A recipe that a contract takes; none for a contract with a default."""
    if "" not in contract.recipes.values():
        return []
    return ["fp8-static-e4m3" if "cache" in contract.tensors else "fp8-row-e4m3"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_door_that_is_not_there_is_unsupported(operation):
    cases = {
        "quantize": quantize_case("nvfp4", "both"),
        "transform": case_from_labels("transform", "nvfp4-rht", (16, 32), "bf16", "normal"),
        "update-scale": case_from_labels("update-scale", "fp8-delayed-e4m3", (4, 3), "", "amaxes"),
        "gemm-quantized": gemm_case("mxfp8-e4m3", "tn", "mxfp8-e4m3", operation="gemm-quantized"),
        "swizzle": swizzle_case(), "pack-scales": packing_case("128x4"),
        "quantize-grouped": grouped_case("nvfp4", "even:4"),
        "gemm": gemm_case("nvfp4", "tn"), "gemm-grouped": gemm_case("nvfp4", "even:4", operation="gemm-grouped"),
        "grouped-linear": case_from_labels(
            "grouped-linear", "MXFP8BlockScaling", (8, 32, 16), "bf16", "normal", ("even:2",)
        ),
        "permute": case_from_id("permute/6x32/bf16/routed/experts:5+choices:3"),
        **{name: OPERATIONS[name].usual(recipes_of(contract))[0][0] for name, contract in CONTRACTS.items()},
        **{name: case_from_labels(name, "MXFP8BlockScaling", (1, 8, 32, 16), "bf16", "normal", flags)
           for name, flags in (("linear", ()), ("layernorm-linear", ()), ("transformer-layer", ("heads:2",)))},
        "moe-layer": case_from_id("moe-layer/MXFP8BlockScaling/16x32x16/bf16/normal/rows:15,0,17"),
    }  # fmt: skip
    record = run(cases[operation], dequantize=reference.dequantize)
    assert record.verdict == "unsupported"
    assert record.message.startswith("backend wrong has no ")


def test_options_are_passed_only_if_they_differ_from_the_default():
    """A method of a user's own need not know these arguments."""

    def alone(*given):
        return reference.quantize(*given)

    def grouped(*given):
        return quantize_grouped(*given)

    for case in (quantize_case("nvfp4"), quantize_case("nvfp4", "columnwise"), quantize_case("nvfp4-rowscaled")):
        passes(case, quantize=alone)
    passes(grouped_case("nvfp4", "even:4"), quantize_grouped=grouped)
    passes(
        gemm_case("nvfp4", "even:4", operation="gemm-grouped"),
        gemm_grouped=lambda a, b, *, out_dtype: reference.gemm_grouped(a, b, out_dtype=out_dtype),
    )


@pytest.mark.sampled(48)
@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("name", RECIPES)
def test_one_wrong_byte_of_any_recipe_is_found(name, part):
    def spoil(q):
        numbers = getattr(q, part)
        if numbers.dtype == torch.float32:
            numbers.view(torch.int32)[-1, -1] ^= 1
        else:
            numbers[17, 3] ^= 1

    record = fails(quantize_case(name, shape=(32, 128)), part, quantize=quantize(spoil))
    assert stages(record)[part]["mismatches"] == 1


# Dialects: a backend with the dialect of a library is judged by the dialect.

SPOKEN = [name for name in recipe_names() if "@" in name]


@pytest.mark.long
@pytest.mark.parametrize("name", SPOKEN)
def test_a_backend_that_speaks_another_dialect_fails_in_it(name):
    """The dialect is te except for the name: te-native quantizes to the same bytes."""
    recipe = find_recipe(name)

    def quantize(x, _, **options):
        return replace(reference.quantize(x, recipe.name, **options), recipe=recipe)

    verdicts = {
        run(quantize_case(name, dtype=dtype, inputs=inputs, shape=(64, 128)), quantize=quantize).verdict
        for dtype in ("fp32", "bf16")
        for inputs in ("e4m3-ties", "huge", "low-rows", "scale-edges", "negative-zeros", "amax-2m126-first")
    }
    assert ("fail" in verdicts) == (name != "nvfp4@te-native")
