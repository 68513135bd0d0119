"""Shrinking: wrong kernels whose smallest failing shape is known, and what cropping keeps of every operation."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.running import shrink as shrinking
from narrowgauge.harness.running.judging import judge
from narrowgauge.harness.running.shrink import crop, shrink
from narrowgauge.reference import ops as reference
from narrowgauge.spec.quantized import GroupedQuantized
from tests.harness.sample_backends import GEMM, QUANTIZE, backend, gemm, quantize

pytestmark = pytest.mark.usefixtures("one_thread")


def shrunk(case, **doors):
    """The shrunk case of a wrong backend with these methods, and the first wrong stage of the whole case."""
    wrong = backend(**doors)
    inputs = make_inputs(case)
    outcome = judge(case, inputs, wrong)
    found = shrink(case, inputs, outcome, wrong)
    stage = next(stage.stage for stage in outcome.stages if not stage.passed)
    if found is not None:
        again = judge(found.case, found.inputs, wrong)
        assert next(stage.stage for stage in again.stages if not stage.passed) == stage
        assert found.calls <= shrinking.CALLS
    return found, stage


def wrong_codes(where):
    """A quantize that flips a bit of the codes at the mask `where(rows, columns)`, bool (M, K)."""

    def change(q):
        rows, columns = (torch.arange(n).view(shape) for n, shape in zip(q.shape, ((-1, 1), (1, -1)), strict=True))
        flip = torch.broadcast_to(where(rows, columns), q.shape).to(torch.uint8)
        flip = torch.nn.functional.pad(flip, (0, q.shape[1] % 2)).view(q.shape[0], -1, 2)
        q.codes ^= flip[..., 0] | flip[..., 1] << 4

    return quantize(change)


LARGE = replace(QUANTIZE, shape=(160, 512))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "where", "shape"),
    [
        (LARGE, lambda i, k: k % 256 == 200, (1, 208)),  # whole blocks up to the column
        (LARGE, lambda i, k: (i == 77) & (k == 300), (78, 304)),  # its place is counted from the beginning
        (LARGE, lambda i, k: (i == 0) & (k % 16 == 3) & (i.numel() > 64), (65, 16)),
        (LARGE, lambda i, k: (i >= 0) & (k % 16 == 3) & (k.numel() > 100), (1, 112)),
        (replace(LARGE, shape=(157, 64)), lambda i, k: (i >= i.numel() // 16 * 16) & (k >= 0), (1, 16)),
        (replace(LARGE, shape=(160, 250)), lambda i, k: (i >= 0) & (k >= k.numel() // 16 * 16), (1, 10)),
        (replace(LARGE, shape=(160, 250)), lambda i, k: (i >= 0) & (k == k.numel() - 1) & (k % 16 != 15), (1, 10)),
    ],
    ids=["column", "place", "more-rows", "more-columns", "tail-of-rows", "tail-of-columns", "last-of-a-tail"],
)
def test_the_smallest_shape_of_a_quantize(case, where, shape):
    found, stage = shrunk(case, quantize=wrong_codes(where))
    assert (found.case.shape, stage) == (shape, "codes")
    assert found.case.id == case.id.replace("x".join(map(str, case.shape)), "x".join(map(str, shape)))


def test_an_amax_has_no_place_and_is_found_by_bisection():
    """A reduction that skips the last row."""
    case = replace(LARGE, inputs="outliers")
    inputs = make_inputs(case)
    inputs.x[-1, 7] = 1e4

    def door(x, recipe):
        return reference.quantize(x, recipe, amax=x[:-1].abs().amax().float().view(1))

    wrong = backend(quantize=door)
    outcome = judge(case, inputs, wrong)
    found = shrink(case, inputs, outcome, wrong)
    assert found.case.shape == (2, 16)
    assert found.inputs.x[1].abs().amax() > found.inputs.x[0].abs().amax()


@pytest.mark.parametrize(
    ("recipe", "usage", "shape", "expected"),
    [
        ("nvfp4-2d", "rowwise", (160, 256), (16, 16)),
        ("nvfp4-rht64", "rowwise", (160, 256), (1, 64)),
        ("mxfp8-e4m3", "rowwise", (160, 256), (1, 32)),
        ("nvfp4", "columnwise", (160, 256), (16, 1)),
        ("mxfp8-e4m3", "columnwise", (160, 256), (32, 1)),
        ("mxfp8-e4m3", "both", (160, 256), (32, 32)),
        ("fp8-current-e4m3", "rowwise", (160, 256), (1, 1)),
    ],
)
def test_blocks_tiles_and_rotated_groups_stay_whole(recipe, usage, shape, expected):
    case = replace(QUANTIZE, recipe=recipe, shape=shape, usage=usage)

    def spoil(q):
        if q is not None:
            q.codes.bitwise_xor_(1)
        return q

    doors = {
        "quantize": quantize(spoil),
        "quantize_both": lambda x, r, **options: [spoil(half) for half in reference.quantize_both(x, r, **options)],
        "declares": {"transform": "butterfly"},
    }
    found, _ = shrunk(case, **doors)
    assert found.case.shape == expected
    assert found.calls == 1


def test_a_cause_is_kept(monkeypatch):
    """A part that fails for another reason is no smaller instance of this failure."""

    def door(x, recipe):
        kind = (lambda i, k: (i >= 0) & (k >= 0)) if x.shape[0] > 40 else (lambda i, k: (i == 0) & (k == 0))
        return wrong_codes(kind)(x, recipe)

    def by_rows(outcome, backend, *, part):
        return [{"cause": "many" if outcome.actual.shape[0] > 40 else "few", "exact": True}]

    wrong, inputs = backend(quantize=door), make_inputs(LARGE)
    outcome = judge(LARGE, inputs, wrong)
    monkeypatch.setattr(shrinking, "explained", by_rows)
    assert shrink(LARGE, inputs, outcome, wrong, cause="many").case.shape == (41, 16)
    assert shrink(LARGE, inputs, outcome, wrong).case.shape == (1, 16)


def test_a_failure_of_the_whole_alone_is_not_shrunk():
    def door(x, recipe):
        whole = tuple(x.shape) == LARGE.shape
        return wrong_codes(lambda i, k: (i >= 0) & (k >= 0) & whole)(x, recipe)

    assert shrunk(LARGE, quantize=door)[0] is None


def test_no_more_calls_and_no_more_work_than_allowed(monkeypatch):
    tries = []

    def door(x, recipe):
        tries.append(tuple(x.shape))
        return wrong_codes(lambda i, k: (i == 77) & (k == 300))(x, recipe)

    wrong, inputs = backend(quantize=door), make_inputs(LARGE)
    outcome = judge(LARGE, inputs, wrong)
    monkeypatch.setattr(shrinking, "CALLS", 5)
    tries.clear()
    found = shrink(LARGE, inputs, outcome, wrong)
    assert len(tries) == 5  # each runs once
    assert found is None or found.calls == 5
    monkeypatch.setattr(shrinking, "CALLS", 40)
    monkeypatch.setattr(shrinking, "WORK", 0.5)
    tries.clear()
    shrink(LARGE, inputs, outcome, wrong)
    assert tries
    assert sum(rows * columns for rows, columns in tries) <= 2 * 0.5 * 160 * 512
    monkeypatch.setattr(shrinking, "LARGEST", 160 * 512 - 1)
    tries.clear()
    assert shrink(LARGE, inputs, outcome, wrong) is None
    assert not tries


# Products, sections, and what moves


def wrong_output(where):
    def change(out):
        rows, columns = (torch.arange(n).view(shape) for n, shape in zip(out.shape, ((-1, 1), (1, -1)), strict=True))
        out += 1e6 * torch.broadcast_to(where(rows, columns), out.shape)

    return gemm(change)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (lambda i, j: (i >= 0) & (j % 32 == 20), (1, 16, 21)),
        (lambda i, j: (i >= 0) & (j >= 0) & (i.numel() > 16), (17, 16, 1)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"layout": "nn", "accumulate": True, "bias": True}])
def test_the_smallest_product(where, expected, options):
    found, stage = shrunk(replace(GEMM, shape=(40, 128, 48), **options), gemm=wrong_output(where))
    assert (found.case.shape, stage) == (expected, "output")
    rows, depth, columns = expected
    shapes = [(rows, depth), (columns, depth)] + [(rows, columns), (columns,)] * bool(options)
    assert [tuple(t.shape) for t in found.inputs.tensors.values()] == shapes


def spoiled_section(number):
    """quantize_grouped with a wrong code in a section of 5 rows or more."""

    def door(x, sizes, recipe, **options):
        parts = reference.quantize_grouped(x, sizes, recipe, **options).sections()
        for part in parts[number:]:
            if part.codes.shape[0] > 4 and part.codes.shape[1]:
                part.codes[4, 0] ^= 1
        return parts

    return door


def test_the_smallest_sections_of_a_quantize():
    case = case_from_labels("quantize-grouped", "nvfp4", (100, 64), "bf16", "normal", ("ragged:5",))
    found, stage = shrunk(case, quantize_grouped=spoiled_section(0))
    assert (found.case.shape, found.case.section_sizes, stage) == ((5, 16), (5,), "codes")
    found, _ = shrunk(case, quantize_grouped=spoiled_section(2))  # two sections before the first wrong one
    assert (found.case.shape, found.case.section_sizes) == ((15, 16), (4, 5, 5)) or len(found.case.section_sizes) == 3
    assert found.case.flags == (f"rows:{','.join(map(str, found.case.section_sizes))}",)


def test_the_smallest_sections_of_a_product():
    case = case_from_labels(
        "gemm-grouped", "nvfp4", (72, 64, 40), "bf16xbf16-fp32", "normal", ("middle:4", "accumulate", "bias")
    )

    def door(a, b, **options):
        out = reference.gemm_grouped(a, b, **options)
        assert isinstance(a, GroupedQuantized)
        starts = a.sizes.cumsum(0) - a.sizes
        for start in starts[a.sizes > 8]:
            out[start + 8, -1] += 1e6
        return out

    found, stage = shrunk(case, gemm_grouped=door)
    assert (found.case.shape, found.case.section_sizes, stage) == ((9, 16, 1), (9,), "output")
    assert [tuple(t.shape) for t in found.inputs.tensors.values()] == [(9, 16), (1, 16), (9, 1), (1, 1)]


def test_the_smallest_swizzle_and_history():
    def swizzle(scales):
        out = reference.swizzle(scales)
        return out ^ 1 if scales.shape[0] > 100 else out

    found, stage = shrunk(case_from_labels("swizzle", "", (150, 12), "", "bytes"), swizzle=swizzle)
    assert (found.case.shape, stage) == ((101, 1), "layout")

    def update(history, scale, recipe):
        rolled, updated = reference.update_scale(history, scale, recipe)
        updated[5:] *= 2
        return rolled, updated

    case = case_from_labels("update-scale", "fp8-delayed-e4m3", (16, 20), "", "amaxes")
    found, stage = shrunk(case, update_scale=update)
    assert (found.case.shape, stage) == ((1, 6), "scale")


# Cropping


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [
        replace(QUANTIZE, recipe="nvfp4-sr", shape=(48, 64), random="words"),
        replace(QUANTIZE, recipe="nvfp4-sr", shape=(48, 64), usage="columnwise", random="words"),
        replace(QUANTIZE, recipe="nvfp4-2d-sr", shape=(48, 64), usage="both", random="words"),
        replace(QUANTIZE, recipe="mxfp8-e4m3-sr", shape=(96, 64), usage="columnwise", random="words"),
        replace(QUANTIZE, recipe="nvfp4-sr", shape=(48, 64)),
        replace(QUANTIZE, recipe="nvfp4", shape=(2, 3, 8, 64), view="strided"),
        replace(QUANTIZE, recipe="fp8-delayed-e5m2", shape=(48, 64)),
        replace(QUANTIZE, shape=(48, 64), amax=True, usage="both"),
        replace(QUANTIZE, recipe="nvfp4-rowscaled", shape=(48, 64), amax=True, usage="columnwise"),
        case_from_labels("transform", "nvfp4-rht32", (48, 64), "bf16", "normal"),
        case_from_labels("quantize-grouped", "nvfp4-rht", (96, 64), "bf16", "normal", ("even:3", "columnwise")),
        case_from_labels("quantize-grouped", "fp8-delayed-e4m3", (96, 64), "bf16", "normal", ("even:3",)),
        case_from_labels("quantize-grouped", "nvfp4", (96, 64), "bf16", "normal", ("even:3", "amax")),
        replace(GEMM, recipe="fp8-block-1x128-e4m3-pow2", w_recipe="fp8-block-128x128-e5m2-pow2", shape=(40, 256, 160)),
        case_from_labels(
            "gemm-grouped", "mxfp8-e4m3", (96, 64, 40), "bf16xbf16-bf16", "normal", ("even:3", "padded", "bias")
        ),
        case_from_labels(
            "gemm-quantized", "nvfp4", (32, 64, 48), "bf16xbf16-bf16", "normal", ("tn", "fp8-delayed-e4m3")
        ),
        case_from_labels(
            "gemm-quantized", "nvfp4", (32, 64, 48), "bf16xbf16-bf16", "normal", ("tn", "nvfp4-2d", "bias")
        ),
    ],
    ids=lambda case: case.id,
)
def test_a_right_kernel_is_right_on_every_part(case):
    """A cropped case is a case: its reference and its kernel agree on the names of the tensors."""
    right = backend(**{door: getattr(reference, door) for door in vars(reference) if not door.startswith("_")})
    inputs = make_inputs(case)
    axes = case.axes
    halves = {name: (axis.extent // 2 // axis.unit * axis.unit, axis.extent) for name, axis in axes.items()}
    for windows in (halves, {name: (0, axis.extent) for name, axis in axes.items()}):
        part, cropped = crop(case, inputs, windows)
        outcome = judge(part, cropped, right)
        assert [stage.sentence for stage in outcome.stages if not stage.passed] == []
        assert sum(stage.compared for stage in outcome.stages) > 0
    assert part.shape[-1] == case.shape[-1]
