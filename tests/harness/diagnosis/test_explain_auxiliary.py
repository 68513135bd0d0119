"""Wrong swizzles, rotations, paddings and histories, each by a single defect: the diagnosis names the defect."""

from dataclasses import replace

import pytest
import torch

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.stages.deviation import rows_of
from narrowgauge.harness.operations.transform.deviations import ROTATIONS as TABLE
from narrowgauge.harness.operations.transform.deviations import Rotation, deviating_rotations, in_order
from narrowgauge.harness.operations.update_scale.deviations import HISTORIES, SCALES, Update
from narrowgauge.harness.running.runner import run_case
from narrowgauge.reference import ops as reference
from narrowgauge.reference.quantize.hadamard import coefficient, signs
from narrowgauge.spec.formats import E4M3
from narrowgauge.spec.recipes import find_recipe
from narrowgauge.spec.scale_layouts import TILED
from tests.harness.sample_backends import backend, rotating

SWIZZLE = case_from_labels("swizzle", "", (300, 20), "u8", "bytes")
TRANSFORM = case_from_labels("transform", "nvfp4-rht", (32, 64), "bf16", "normal")
BUTTERFLY = {"transform": "butterfly"}


def causes(case, **doors):
    """Causes of the first wrong stage, signatures left out, and its name."""
    record = run_case(case, backend(**doors))
    assert record.verdict == "fail", record.message
    assert {e["stage"] for e in record.explanations} <= {record.stage}
    return [e["cause"] for e in record.explanations if e["exact"]], record.stage


# ---- swizzle ---------------------------------------------------------------------------------------------------------


def tiled(scales, order):
    """Padded scales as tiles (i / 128, i / 32 % 4, i % 32, j / 4, j % 4), permuted."""
    padded = TILED["128x4"].pad(scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(order).reshape(rows, columns)


def split_32_4(scales):
    padded = TILED["128x4"].pad(scales)
    rows, columns = padded.shape
    return padded.view(rows // 128, 32, 4, columns // 4, 4).permute(0, 3, 1, 2, 4).reshape(rows, columns)


def unpadded(scales):
    flat = torch.zeros(384 * 20, dtype=torch.uint8)
    flat[: scales.numel()] = scales.flatten()
    return flat.view(384, 20)


def dirty(scales):
    swizzled = reference.swizzle(scales)
    return torch.where(reference.swizzle(torch.ones_like(scales)) == 0, 0x3C, swizzled)


LAYOUTS = {
    "not-swizzled": TILED["128x4"].pad,
    "not-swizzled ": unpadded,
    "swizzle-32-4": split_32_4,
    "swizzle-tiles-by-column": lambda scales: tiled(scales, (3, 0, 2, 1, 4)),
    "swizzle-columns-before-rows": lambda scales: tiled(scales, (0, 3, 2, 4, 1)),
    "swizzle-linear-tiles": lambda scales: tiled(scales, (0, 3, 1, 2, 4)),
    "scales-transposed": lambda scales: reference.swizzle(scales.T.reshape(scales.shape)),
    "padding-not-zeroed": dirty,
}


@pytest.mark.parametrize("cause", LAYOUTS)
def test_a_layout(cause):
    found, stage = causes(SWIZZLE, swizzle=LAYOUTS[cause])
    assert (stage, cause.strip() in found) == ("layout", True)
    assert len(found) <= 2  # 300x20 linear scales are padded by zeros at the end only


def test_a_layout_that_nothing_explains():
    def swizzle(scales):
        swizzled = reference.swizzle(scales)
        swizzled[0, 0] ^= 1
        return swizzled

    assert causes(SWIZZLE, swizzle=swizzle) == ([], "layout")


@pytest.mark.parametrize(
    ("cause", "read"),
    [
        ("not-swizzled", lambda swizzled, shape: swizzled[: shape[0], : shape[1]].contiguous()),
        (
            "swizzle-32-4",
            lambda swizzled, shape: swizzled.view(3, 5, 32, 4, 4).permute(0, 2, 3, 1, 4).reshape(384, 20)[: shape[0]],
        ),
    ],
)
def test_reading_in_another_layout(cause, read):
    found, stage = causes(SWIZZLE, swizzle=reference.swizzle, unswizzle=lambda s, shape: read(s, shape).contiguous())
    assert (stage, found[:1]) == ("unswizzle", [cause])


@pytest.mark.long
def test_tiles_counted_by_columns_that_are_not_padded():
    def unswizzle(swizzled, shape):
        rows, columns = shape
        flat, tiles = swizzled.flatten(), columns // 4
        read = [
            flat[512 * (i // 128 * tiles + j // 4) + 16 * (i % 32) + 4 * (i % 128 // 32) + j % 4]
            for i in range(rows) for j in range(columns)
        ]  # fmt: skip
        return torch.stack(read).view(shape)

    found = causes(
        case_from_labels("swizzle", "", (130, 5), "u8", "bytes"), swizzle=reference.swizzle, unswizzle=unswizzle
    )
    assert found == (["swizzle-columns-not-padded"], "unswizzle")


# ---- rotations -------------------------------------------------------------------------------------------------------


def matrix(group=16, mask=None, before=True, after=False, factor=None):
    """R of a group, float64."""
    recipe = find_recipe("nvfp4-rht").transform
    recipe = replace(recipe, group=group, **({} if mask is None else {"signs": mask}))
    k = torch.arange(group)
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in k] for i in k])
    made = (1.0 - 2.0 * parity).double() * (coefficient(group) if factor is None else factor)
    sigma = signs(recipe).double()
    return made * (sigma[:, None] if before else 1) * (sigma if after else 1)


def rotated(x, by):
    """Exact sums, float32: sums of `normal` numbers are not rounded on the way to bfloat16."""
    return (x.double().view(-1, len(by)) @ by).view(x.shape)


def last_skipped(x, _):
    return torch.cat([rotated(x, matrix())[:, :-16].bfloat16(), x[:, -16:]], 1)


MASK = find_recipe("nvfp4-rht").transform.signs
ROTATIONS = {
    "rotation-missing": lambda x, _: x.clone(),
    "rotation-without-signs": lambda x, _: rotated(x, matrix(mask=0)).bfloat16(),
    "rotation-signs:negated": lambda x, _: rotated(x, matrix(mask=MASK ^ 0xFFFF)).bfloat16(),
    "rotation-signs:reversed": lambda x, _: rotated(x, matrix(mask=int(f"{MASK:016b}"[::-1], 2))).bfloat16(),
    "rotation-signs-after": lambda x, _: rotated(x, matrix(before=False, after=True)).bfloat16(),
    "rotation-without-factor": lambda x, _: rotated(x, matrix(factor=1.0)).bfloat16(),
    "rotation-last-group-skipped": last_skipped,
    "rotation-group:8": lambda x, _: rotated(x, matrix(group=8)).bfloat16(),
    "rotation-group:32": lambda x, _: rotated(x, matrix(group=32)).bfloat16(),
    "rotation-of-columns": lambda x, _: rotated(x.T.contiguous(), matrix()).T.contiguous().bfloat16(),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("declares", [BUTTERFLY, {}], ids=["declared", "free"])
@pytest.mark.parametrize("cause", ROTATIONS)
def test_a_rotation(cause, declares):
    found, stage = causes(TRANSFORM, transform=ROTATIONS[cause], declares=declares)
    assert (found, stage) == ([cause], "output")


def test_signs_that_are_not_wanted():
    case = case_from_labels("transform", "nvfp4-rht-nosign", (32, 64), "bf16", "normal")
    found = causes(case, transform=lambda x, _: rotated(x, matrix()).bfloat16(), declares=BUTTERFLY)
    assert found[0] == ["rotation-signs:te"]


def test_rotations_that_round_otherwise():
    def truncated(x, recipe):
        return (rotated(x, matrix()).float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()

    assert causes(TRANSFORM, transform=truncated, declares=BUTTERFLY)[0] == ["rotation-truncated"]
    doors = rotating(narrow_butterfly)
    assert causes(TRANSFORM, transform=doors["transform"], declares=BUTTERFLY)[0] == ["rotation-through-bf16"]


def narrow_butterfly(terms):
    """The stages of the declared order on the signed terms of each output; each stage rounds to bfloat16."""
    while terms.shape[-1] > 1:
        pairs = terms.unflatten(-1, (-1, 2))
        terms = (pairs[..., 0] + pairs[..., 1]).bfloat16().float()
    return terms[..., 0]


def test_a_stage_that_is_missing():
    case = case_from_labels("transform", "nvfp4-rht32", (32, 64), "bf16", "normal")
    halves = matrix(16, factor=coefficient(32))
    found = causes(case, transform=lambda x, _: rotated(x, halves).bfloat16(), declares=BUTTERFLY)
    assert found[0] == ["rotation-stage-missing"]


@pytest.mark.parametrize("declares", [BUTTERFLY, {}], ids=["declared", "free"])
def test_signs_along_the_row(declares):
    case = case_from_labels("transform", "nvfp4-rht4", (32, 64), "bf16", "normal")
    row = signs(find_recipe("nvfp4-rht").transform).repeat(4).bfloat16()
    found = causes(case, transform=lambda x, _: rotated(x * row, matrix(4, mask=0)).bfloat16(), declares=declares)
    assert found[0] == ["rotation-signs-along-row"]


def test_a_rotation_that_nothing_explains():
    def transform(x, recipe):
        out = reference.transform(x, recipe)
        out[3, 5] += 1
        return out

    for declares in (BUTTERFLY, {}):
        assert causes(TRANSFORM, transform=transform, declares=declares) == ([], "output")


def test_every_rotation_is_another_one():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("nvfp4-rht", "nvfp4-rht32", "nvfp4-rht-nosign"):
        right = reference.transform(x, name)
        rotation = Rotation(x, find_recipe(name), in_order)
        made = list(deviating_rotations(rotation))
        kept = {row.cause for row in made if torch.equal(row.result(rotation).float(), right.float())}
        # Without signs no sign can be missing or displaced.
        none = {"rotation-without-signs", "rotation-signs:reversed", "rotation-signs-after"}
        assert kept == (none if "nosign" in name else set())
        assert len({row.sentence for row in made}) == len(made)
        assert [row.result(rotation).dtype for row in made if row.cause == "rotation-not-rounded"] == [torch.float32]
    names = [row.cause for row in rows_of(TABLE, Rotation(x, find_recipe("nvfp4-rht"), in_order))]
    assert "rotation-truncated" not in names


# ---- padding ---------------------------------------------------------------------------------------------------------

PADDED = case_from_labels("gemm-grouped", "nvfp4", (99, 128, 32), "bf16xbf16-fp32", "normal", ("ragged:3", "padded"))
DOORS = {name: getattr(reference, name) for name in (
    "quantize", "quantize_grouped", "gemm_grouped", "pad_sections", "unpad_sections",
)}  # fmt: skip


def padding(change):
    """A pad_sections with the result of `change(padded, aligned, x, sizes)`."""

    def pad_sections(x, sizes, recipe):
        padded, aligned = reference.pad_sections(x, sizes, recipe)
        return change(padded.clone(), aligned.clone(), x, sizes)

    return causes(PADDED, **{**DOORS, "pad_sections": pad_sections})


@pytest.mark.long
def test_paddings():
    def dirty_rows(padded, aligned, x, sizes):
        padded[int(sizes[0])] = 1.0
        return padded, aligned

    def together(padded, aligned, x, sizes):
        padded.zero_()[: len(x)] = x
        return padded, aligned

    def before(padded, aligned, x, sizes):
        padded.zero_()
        end = 0
        for section, rows in zip(torch.split(x, sizes.tolist()), aligned.tolist(), strict=True):
            end += rows
            padded[end - len(section) : end] = section
        return padded, aligned

    def first_rows(padded, aligned, x, sizes):
        padded[aligned.cumsum(0)[:-1]] = 0
        return padded, aligned

    assert padding(first_rows) == (["padding-wrong-section"], "padding")
    assert padding(dirty_rows) == (["padding-not-zeroed"], "padding")
    assert padding(together) == (["sections-not-padded"], "padding")
    assert padding(before) == (["padding-before-rows"], "padding")
    assert padding(lambda padded, aligned, x, sizes: (padded, sizes)) == (["alignment:1"], "padding")
    assert padding(lambda padded, aligned, x, sizes: (padded, (sizes + 63) // 64 * 64))[0] == ["alignment:64"]


def test_unpadding():
    def unpad_sections(y, sizes, recipe):
        return y[: int(sizes.sum())].clone()

    assert causes(PADDED, **{**DOORS, "unpad_sections": unpad_sections}) == (["unpadding-first-rows"], "unpadding")


# ---- histories -------------------------------------------------------------------------------------------------------

HISTORY = torch.tensor([[3.0, 0.0, 2.0, 1.0, 1e-40], [5.0, 4.0, 1.5, 7.0, 0.0], [0.7, 9.0, 8.0, 2.0, 0.0]])
SCALE = torch.tensor([1.5, 1.6, 1.7, 1.8, 1.9])


def updated(stage, make, name="fp8-delayed-e4m3", inputs="amaxes"):
    """Causes of the history or the scales of `make(history, scale, right)`."""

    def update_scale(history, scale, recipe):
        right = list(reference.update_scale(history, scale, recipe))
        right[stage] = make(history, scale, right[stage])
        return tuple(right)

    found, wrong = causes(case_from_labels("update-scale", name, (8, 64), "fp32", inputs), update_scale=update_scale)
    assert wrong == ("history", "scale")[stage]
    return found


def test_histories():
    zero = torch.zeros(1, 64)
    assert updated(0, lambda history, scale, right: history.clone()) == ["history-not-rolled"]
    assert updated(0, lambda history, scale, right: torch.cat([zero, history[1:]])) == ["history-not-rolled"]
    assert updated(0, lambda history, scale, right: torch.cat([zero, history[:-1]])) == ["history-rolled-back"]
    assert updated(0, lambda history, scale, right: torch.roll(history, -1, 0)) == ["history-first-not-zeroed"]
    lost = updated(0, lambda history, scale, right: torch.cat([right[:-1], history[-1:]]))
    assert lost == ["history-latest-lost"]
    assert updated(0, lambda history, scale, right: torch.zeros_like(right)) == ["history-cleared"]


def test_scales_of_histories():
    def amax(history):
        return history.amax(0)

    def over(most, numbers):  # `448 / numbers` is 448·(1/numbers) in PyTorch
        return torch.full_like(numbers, most) / numbers

    assert updated(1, lambda history, scale, right: scale.clone()) == ["scale-not-updated"]
    recent = updated(
        1, lambda history, scale, right: reference.update_scale(history, scale, "fp8-delayed-e4m3-recent")[1]
    )
    assert recent == ["algorithm:most-recent"]
    assert updated(1, lambda history, scale, right: over(1, right)) == ["scale-inverted"]
    assert "amax-without-latest" in updated(1, lambda history, scale, right: over(448, amax(history[1:])))
    assert "amax-without-oldest" in updated(1, lambda history, scale, right: over(448, amax(history[:-1])))
    assert updated(1, lambda history, scale, right: over(448, history.amax()).expand(64).clone()) == [
        "amax-of-all-tensors"
    ]
    assert updated(1, lambda history, scale, right: over(57344, amax(history))) == ["max-of-other-format"]
    assert updated(1, lambda history, scale, right: 448 * (1 / amax(history))) == ["scale-order:max*(1/amax)"]
    found = updated(1, lambda history, scale, right: over(448, amax(history)), "fp8-delayed-e4m3-margin2")
    assert found == ["margin-ignored"]
    partial = updated(1, lambda history, scale, right: over(448, amax(history[[0, 1, 2, 4, 5, 6]])))
    assert partial == ["history-partial"]
    zero = updated(1, lambda history, scale, right: torch.where(amax(history) == 0, 1.0, right), inputs="amaxes-zeros")
    assert zero == ["zero-amax-updates"]
    infinite = updated(
        1, lambda history, scale, right: torch.where(amax(history).isinf(), 0.0, right), inputs="amaxes-inf"
    )
    assert infinite == ["infinite-amax-updates"]
    found = updated(1, lambda history, scale, right: over(448 * 4, amax(history)), "fp8-delayed-e4m3-margin2")
    assert found == ["margin-inverted"]


def test_every_deviation_of_a_history_changes_one():
    """On its witness each deviation has a wrong history or a wrong scale."""
    nan, infinite = HISTORY.clone(), HISTORY.clone()
    nan[1, 2], infinite[2, 0] = torch.nan, torch.inf
    names = ("fp8-delayed-e4m3-margin2", "fp8-delayed-e5m2-recent", "fp8-delayed-e4m3-bulk")
    for which, table in enumerate((HISTORIES, SCALES)):
        seen = set()
        for history in (HISTORY, nan, infinite, torch.zeros(3, 5)):
            for name in names:
                right = reference.update_scale(history, SCALE, name)[which]
                update = Update(history, SCALE, find_recipe(name))
                every = list(rows_of(table, update))
                seen |= {row.cause for row in every if not torch.equal(row.result(update), right)}
        assert {row.cause for row in every} <= seen | {"update:single", "algorithm:max"}
    assert find_recipe(names[0]).element is E4M3
