"""Checkpoints of all layouts, right checkpoints and each defect, with and without weights."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from narrowgauge.harness.cli import app
from narrowgauge.harness.tools.checkpoint.assertion import assert_checkpoint
from narrowgauge.harness.tools.checkpoint.files import CheckpointError, open_checkpoint
from narrowgauge.harness.tools.checkpoint.findings import Finding
from narrowgauge.harness.tools.checkpoint.judge import Result, judge_checkpoint
from narrowgauge.reference import ops
from narrowgauge.reference.numbers.encode import encode
from narrowgauge.reference.quantize.layout import swap_nibbles, swizzle
from narrowgauge.spec.dialects import DIALECTS
from narrowgauge.spec.formats import E4M3
from tests.harness.tools.checkpoint import samples, sparse_checkpoint
from tests.harness.tools.checkpoint.samples import LAYERS, Tensors, save

FIRST = LAYERS[0]


def worst(result: Result) -> Finding:
    return result.all_findings[0]


def kinds(result: Result, *severities: str) -> set[str]:
    return {f.kind for f in result.all_findings if f.severity in (severities or ("fail", "warning"))}


# ---- right checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "ModelOpt"])
def test_nvfp4_is_judged_in_its_dialect(tmp_path: Path, layout: str) -> None:
    path = save(tmp_path / "model.safetensors", samples.nvfp4(layout))
    original = save(tmp_path / "bf16.safetensors", samples.weights())
    assert not kinds(judge_checkpoint(path))
    result = judge_checkpoint(path, weights=original)
    assert result.passed(strict=True)
    assert not result.all_findings
    assert [layer.layout for layer in result.layers] == [layout, layout]
    assert [layer.scales for layer in result.layers] == ["absmax", "absmax"]
    assert all({"compressed-tensors": "compressed", "ModelOpt": "modelopt"}[layout] in x.dialect for x in result.layers)
    assert sum(layer.compared for layer in result.layers) == 2 * 96 * 256


def test_no_two_level_dialect_is_accused(tmp_path: Path) -> None:
    original = save(tmp_path / "bf16.safetensors", samples.weights())
    judged = 0
    for name, choices in DIALECTS.items():
        if choices.get("tensor_scale") == "none" or name == "fp-quant":  # different layouts of files
            continue
        layout = "ModelOpt" if choices.get("tensor_scale") == "amax/max" else "compressed-tensors"
        path = save(tmp_path / "model.safetensors", samples.nvfp4(layout, name))
        result = judge_checkpoint(path, weights=original)
        assert result.passed(strict=True), (name, result.all_findings)
        assert all(found.kind == "codes-input-dtype" for found in result.all_findings), name
        judged += 1
    assert judged >= 10


def test_deepseek_and_fp8_rows(tmp_path: Path) -> None:
    for tensors, original in (
        (samples.deepseek(), samples.weights(200, 300)), (samples.fp8_rows(), samples.weights())
    ):  # fmt: skip
        path = save(tmp_path / "model.safetensors", tensors)
        result = judge_checkpoint(path, weights=save(tmp_path / "bf16.safetensors", original))
        assert result.passed(strict=True), result.all_findings
        assert {layer.scales for layer in result.layers} == {"absmax"}


def test_gpt_oss_with_transposed_weights(tmp_path: Path) -> None:
    stored, original = samples.gpt_oss()
    path, weights = save(tmp_path / "model.safetensors", stored), save(tmp_path / "bf16.safetensors", original)
    result = judge_checkpoint(path, weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert [(layer.layout, layer.dialect) for layer in result.layers] == [("gpt-oss", "ocp")]


@pytest.mark.parametrize(("recipe", "kind"), [("mxfp4@ocp", 39), ("nvfp4@qwantize", 40)])
def test_gguf(tmp_path: Path, recipe: str, kind: int) -> None:
    original = samples.weights()[f"{FIRST}.weight"]
    shape = (96, 256)
    stored = {f"{FIRST}.weight": (shape, kind, samples.gguf_blocks(recipe, original)), "norm": ((8,), 0, b"\0" * 32)}
    path = samples.save_gguf(tmp_path / "model.gguf", stored)
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(path, weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert (result.layers[0].recipe, result.layers[0].scales) == (recipe.partition("@")[0], "absmax")


def test_shards_and_folder_with_an_index(tmp_path: Path) -> None:
    tensors = samples.nvfp4("ModelOpt")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    scales = [name for name in tensors if name.endswith("weight_scale")]
    for file, chosen in zip(names, ([n for n in tensors if n not in scales], scales), strict=True):
        save(tmp_path / file, {name: tensors[name] for name in chosen})
    one = judge_checkpoint(tmp_path / names[0])
    assert {f.severity for f in one.all_findings} == {"note"}
    assert "shard" in worst(one).sentence
    assert judge_checkpoint(tmp_path / names[0], tmp_path / names[1]).passed()
    index = {"weight_map": {name: names[name in scales] for name in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert judge_checkpoint(tmp_path).passed()
    index["weight_map"]["lost"] = names[0]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = judge_checkpoint(tmp_path)
    (finding,) = result.all_findings
    assert (finding.kind, finding.tensor, finding.count) == ("lost", "lost", 1)
    assert "is in model-00001" in finding.sentence
    assert not result.passed()
    assert all(layer.elements == 96 * 256 for layer in result.layers)


# ---- defects, without weights ----------------------------------------------------------------------------------------


def nan_scale(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"].view(torch.uint8)[3, 5] = 0x7F


def zero_scales(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"].view(torch.uint8).zero_()


def ones(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"].view(torch.uint8).fill_(0x38)


def full_scales(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"].view(torch.uint8).fill_(0x7E)


def negative_scale(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"].view(torch.uint8)[0, 1] |= 0x80


def no_scales(t: Tensors) -> None:
    del t[f"{FIRST}.weight_scale"]


def no_codes(t: Tensors) -> None:
    del t[f"{FIRST}.weight_packed"]


def no_tensor_scale(t: Tensors) -> None:
    del t[f"{FIRST}.weight_global_scale"]


def zero_tensor_scale(t: Tensors) -> None:
    t[f"{FIRST}.weight_global_scale"].zero_()


def inverted(t: Tensors) -> None:
    t[f"{FIRST}.weight_global_scale"] = 1 / t[f"{FIRST}.weight_global_scale"]


def half_width(t: Tensors) -> None:
    t[f"{FIRST}.weight_scale"] = t[f"{FIRST}.weight_scale"][:, ::2]


def unsigned(t: Tensors) -> None:
    t[f"{FIRST}.weight_packed"] &= 0x77


def unpacked(t: Tensors) -> None:
    t[f"{FIRST}.weight_packed"] &= 0x0F


def clipped(t: Tensors) -> None:
    weight = samples.weights()[f"{FIRST}.weight"]
    q = ops.quantize(weight, "nvfp4@compressed-tensors", amax=weight.float().abs().amax().view(1) / 12)
    t[f"{FIRST}.weight_packed"], t[f"{FIRST}.weight_scale"] = q.codes, q.scales.view(torch.float8_e4m3fn)
    t[f"{FIRST}.weight_global_scale"] = q.tensor_scale


def swapped(t: Tensors) -> None:
    t[f"{FIRST}.weight_packed"] = swap_nibbles(t[f"{FIRST}.weight_packed"])


DEFECTS: list[tuple[Callable[[Tensors], None], str, str, str]] = [
    (nan_scale, "fail", "nan-scale", "row 3, block 5 (columns 80 to 95): byte 0x7F"),
    (zero_scales, "fail", "never-written", "byte 0x00"),
    (ones, "warning", "never-written", ""),
    (full_scales, "warning", "saturated", ""),
    (negative_scale, "fail", "negative-scale", "row 0, block 1"),
    (no_scales, "fail", "scales", ""),
    (no_codes, "fail", "codes", ""),
    (no_tensor_scale, "fail", "tensor-scale", ""),
    (zero_tensor_scale, "fail", "tensor-scale", "0x00000000"),
    (inverted, "fail", "inverted", ""),
    (half_width, "fail", "packed", ""),
    (unsigned, "warning", "unused-codes", ""),
    (unpacked, "warning", "unused-codes", ""),
    (clipped, "warning", "saturated", ""),
    (swapped, "warning", "nibbles", ""),
]


@pytest.mark.parametrize(("defect", "severity", "kind", "first"), DEFECTS, ids=[d[0].__name__ for d in DEFECTS])
def test_a_defect_is_found_without_weights(
    tmp_path: Path, defect: Callable[[Tensors], None], severity: str, kind: str, first: str
) -> None:
    tensors = samples.nvfp4("compressed-tensors")
    defect(tensors)
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors))
    found = [finding for finding in result.all_findings if finding.kind == kind]
    assert [finding.severity for finding in found][:1] == [severity], result.all_findings
    assert first in found[0].first
    assert result.passed() == (severity == "warning")
    assert not result.passed(strict=True)
    if severity == "warning" and kind != "inverted":
        assert "p <= 1e-" in found[0].sentence


# ---- scales and codes that do not belong together, without weights ---------------------------------------------------


def tall(kind: str = "") -> Tensors:
    """NVFP4 or MXFP4 of two matrices with 256 rows, which differ in size."""
    draw, tensors = torch.Generator().manual_seed(3), {}
    for name in LAYERS:
        rows = torch.randn(256, 1, generator=draw).exp()
        q = ops.quantize(torch.randn(256, 1024, generator=draw) * rows * 0.02, kind or "nvfp4@modelopt")
        tensors[f"{name}.weight"] = q.codes
        tensors[f"{name}.weight_scale"] = q.scales if kind else q.scales.view(torch.float8_e4m3fn)
        if not kind:
            tensors[f"{name}.weight_scale_2"] = q.tensor_scale
    return tensors


def tiles(t: Tensors) -> None:
    scales = t[f"{FIRST}.weight_scale"]
    t[f"{FIRST}.weight_scale"] = swizzle(scales.view(torch.uint8)).view(scales.shape).view(scales.dtype)


def scales_of_the_sibling(t: Tensors) -> None:
    first, second = (f"{name}.weight_scale" for name in LAYERS)
    t[first], t[second] = t[second], t[first]


def codes_of_half(t: Tensors) -> None:
    t[f"{FIRST}.weight"][128:] = 0


def half(t: Tensors) -> None:
    codes_of_half(t)
    t[f"{FIRST}.weight_scale"].view(torch.uint8)[128:] = 0


def padding(t: Tensors) -> None:
    t[f"{FIRST}.weight"][129:] = 0
    t[f"{FIRST}.weight_scale"].view(torch.uint8)[129:] = 0


@pytest.mark.parametrize("kind", ["", "mxfp4@ocp"], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("defect", "severity", "finding", "text"),
    [
        (tiles, "warning", "swizzled", "of 256 runs|of 128 runs"),
        (scales_of_the_sibling, "warning", "sibling", "the scales are perhaps those of"),
        (codes_of_half, "fail", "never-written", "rows hold code 0 alone, under scales that differ"),
        (half, "warning", "never-written", "rows hold code 0 alone: they were never written"),
        (padding, "note", "zeros", "rows hold code 0 alone: padding"),
    ],
)
def test_scales_and_codes_that_do_not_belong_together(
    tmp_path: Path, kind: str, defect: Callable[[Tensors], None], severity: str, finding: str, text: str
) -> None:
    tensors = tall(kind)
    right = judge_checkpoint(save(tmp_path / "right.safetensors", tensors))
    assert not right.all_findings
    defect(tensors)
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors))
    found = worst(result)
    assert (found.severity, found.kind) == (severity, finding)
    assert re.search(text, found.sentence)
    assert found.count in (0, 127, 128)


def test_a_fourier_basis_is_not_accused(tmp_path: Path) -> None:
    """Blocks at the ends of the window are small and steep: their codes are small under small scales."""
    n = torch.arange(1024)
    window = torch.hann_window(1024)
    tensors = {}
    for name, wave in zip(LAYERS, (torch.cos, torch.sin), strict=True):
        q = ops.quantize(wave(2 * torch.pi / 1024 * torch.arange(1, 257).view(-1, 1) * n) * window, "nvfp4@modelopt")
        tensors[f"{name}.weight"] = q.codes
        tensors[f"{name}.weight_scale"] = q.scales.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = q.tensor_scale
    found = kinds(judge_checkpoint(save(tmp_path / "model.safetensors", tensors)))
    assert not found & {"swizzled", "sibling"}


def test_matrices_swapped_with_their_scales_are_right_bytes(tmp_path: Path) -> None:
    """Each matrix is the quantization of its own values. Only weights show that the names are exchanged."""
    tensors = tall()
    swapped_ = {name.replace("q_proj", "?").replace("k_proj", "q_proj").replace("?", "k_proj"): t
                for name, t in tensors.items()}  # fmt: skip
    assert not judge_checkpoint(save(tmp_path / "model.safetensors", swapped_)).all_findings


def test_defects_of_other_layouts(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    stored, _ = samples.gpt_oss()
    name = next(name for name in stored if name.endswith("scales"))
    stored[name][1, 2, 3] = 0xFF
    assert kinds(judge_checkpoint(save(path, stored))) == {"nan-scale"}
    stored[name].zero_()
    assert kinds(judge_checkpoint(save(path, stored))) == {"never-written"}
    fp8 = samples.deepseek()
    fp8[f"{FIRST}.weight"].view(torch.uint8)[7, 9] = 0xFF
    fp8[f"{FIRST}.weight_scale_inv"][1, 2] = torch.nan
    result = judge_checkpoint(save(path, fp8))
    assert kinds(result) == {"nan-code", "nan-scale"}
    assert {f.first.partition(":")[0] for f in result.all_findings} == {
        "row 7, column 9", "row 128, block 2 (columns 256 to 299)"
    }  # fmt: skip


def saturated_fp8(t: Tensors) -> None:
    weight, scales = samples.weights(200, 300)[f"{FIRST}.weight"].float(), t[f"{FIRST}.weight_scale_inv"] / 4
    factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    t[f"{FIRST}.weight"] = encode((weight / factors).contiguous(), E4M3).view(torch.float8_e4m3fn)
    t[f"{FIRST}.weight_scale_inv"] = scales


@pytest.mark.parametrize(
    ("defect", "kind", "text"),
    [
        (lambda t: t.update({f"{FIRST}.weight_scale_inv": 1 / t[f"{FIRST}.weight_scale_inv"]}), "inverted", "weight"),
        (lambda t: t[f"{FIRST}.weight_scale_inv"].fill_(1), "never-written", "every one of 6 block scales is 1.0"),
        (saturated_fp8, "saturated", "codes in 6 blocks are the largest, 448"),
    ],
    ids=["inverted", "ones", "saturated"],
)
def test_a_defect_of_float32_scales_is_a_warning(
    tmp_path: Path, defect: Callable[[Tensors], None], kind: str, text: str
) -> None:
    tensors = samples.deepseek()
    defect(tensors)
    (finding,) = judge_checkpoint(save(tmp_path / "model.safetensors", tensors)).all_findings
    assert (finding.severity, finding.kind) == ("fail" if kind == "inverted" else "warning", kind)
    assert text in finding.sentence


@pytest.mark.parametrize(
    ("scales", "kind", "text"),
    [
        (lambda s: s[1].zero_(), "never-written", "blocks with scale 0x00 = 2^-127"),
        (lambda s: s.fill_(127), "never-written", "every one of 1536 block scales is 0x7F = 1"),
        (lambda s: s.sub_(127), "inverted", "another bias"),
    ],
    ids=["an expert of zeros", "ones", "no bias"],
)
def test_a_defect_of_exponents_is_a_warning(
    tmp_path: Path, scales: Callable[[torch.Tensor], object], kind: str, text: str
) -> None:
    stored, originals = samples.gpt_oss()
    scales(stored[next(name for name in stored if name.endswith("scales"))])
    path, weights = save(tmp_path / "model.safetensors", stored), save(tmp_path / "bf16.safetensors", originals)
    (finding,) = judge_checkpoint(path).all_findings
    assert (finding.severity, finding.kind) == ("fail" if kind == "inverted" else "warning", kind)
    assert text in finding.sentence
    # Beside the wrong codes, the finding stays: it names the cause.
    result = judge_checkpoint(path, weights=weights)
    assert kind in kinds(result)
    assert any(kind == "inverted" or f.kind == "codes-given-scales" for f in result.all_findings)


def test_a_tensor_scale_names_nvfp4_with_scales_of_a_wrong_dtype(tmp_path: Path) -> None:
    tensors = samples.nvfp4("ModelOpt")
    tensors[f"{FIRST}.weight_scale"] = tensors[f"{FIRST}.weight_scale"].view(torch.uint8)
    finding = worst(judge_checkpoint(save(tmp_path / "model.safetensors", tensors)))
    assert "dtype U8; a scale of E4M3 has F8_E4M3" in finding.sentence


def test_missing_scales_are_a_finding_beside_weights(tmp_path: Path) -> None:
    stored, originals = samples.gpt_oss()
    del stored[next(name for name in stored if name.endswith("scales"))]
    path, weights = save(tmp_path / "model.safetensors", stored), save(tmp_path / "bf16.safetensors", originals)
    result = judge_checkpoint(path, weights=weights)
    assert (worst(result).kind, result.passed()) == ("scales", False)


@pytest.mark.parametrize(("divisor", "form"), [(1, "amax"), (6, "amax/6"), (448, "amax/448")])
def test_another_form_of_the_tensor_scale_is_named(tmp_path: Path, divisor: int, form: str) -> None:
    tensors, original = samples.nvfp4("ModelOpt"), samples.weights()
    tensors[f"{FIRST}.weight_scale_2"] = original[f"{FIRST}.weight"].float().abs().amax().view(1) / divisor
    weights = save(tmp_path / "bf16.safetensors", original)
    finding = worst(judge_checkpoint(save(tmp_path / "model.safetensors", tensors), weights=weights))
    assert (finding.kind, finding.expected) == ("tensor-scale", "amax/2688")
    assert f"is {form} of the weights" in finding.sentence


# ---- defects, with weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "kind", "scales"), [("mxfp4@gguf", 39, 1), ("nvfp4@mlx-one-level", 40, 4)])
def test_the_order_of_ggml_nibbles(tmp_path: Path, recipe: str, kind: int, scales: int) -> None:
    stored = {}
    for name, weight in samples.weights().items():
        blocks = np.frombuffer(samples.gguf_blocks(recipe, weight), np.uint8).reshape(-1, 17 if kind == 39 else 36)
        if name.startswith(FIRST):
            blocks = np.concatenate([blocks[:, :scales], (blocks[:, scales:] << 4) | (blocks[:, scales:] >> 4)], 1)
        stored[name] = ((96, 256), kind, blocks.tobytes())
    path = samples.save_gguf(tmp_path / "model.gguf", stored)
    assert kinds(judge_checkpoint(path)) == {"nibbles"}
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(path, weights=weights)
    assert (worst(result).kind, {x.verdict for x in result.layers}) == ("nibbles", {"fail", "pass"})


@pytest.mark.parametrize(
    ("defect", "kind", "text"),
    [
        (swapped, "nibbles", "swapped nibbles they are"),
        (inverted, "inverted", "is inverted"),
        (full_scales, "worse-than-zeros", "further from the weights than zeros"),
    ],
)
def test_a_defect_is_found_with_weights(
    tmp_path: Path, defect: Callable[[Tensors], None], kind: str, text: str
) -> None:
    tensors = samples.nvfp4("compressed-tensors")
    defect(tensors)
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors), weights=weights)
    found = [finding for finding in result.all_findings if finding.kind == kind]
    assert [finding.severity for finding in found] == ["fail"], result.all_findings
    assert text in found[0].sentence
    assert {layer.name: layer.verdict for layer in result.layers} == {LAYERS[0]: "fail", LAYERS[1]: "pass"}


def test_one_wrong_code_is_found_with_its_place(tmp_path: Path) -> None:
    tensors = samples.nvfp4("ModelOpt")
    tensors[f"{FIRST}.weight"][11, 4] ^= 0x30
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors), weights=weights)
    assert (worst(result).kind, worst(result).count) == ("codes-given-scales", 1)
    assert worst(result).first.startswith("row 11, column 9: code 0x")


def test_calibrated_scales_are_given_and_codes_judged_under_them(tmp_path: Path) -> None:
    tensors, weight = samples.nvfp4("ModelOpt"), samples.weights()[f"{FIRST}.weight"]
    scales = tensors[f"{FIRST}.weight_scale"].view(torch.uint8)
    scales[::2] -= 1  # one step smaller, as a search for the least error may choose
    tensor_scale = tensors[f"{FIRST}.weight_scale_2"]
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    factors = tensors[f"{FIRST}.weight_scale"].float() * tensor_scale
    scaled = weight.float().view(96, 16, 16) / factors.unsqueeze(2)
    nearest = (scaled.abs().unsqueeze(3) - grid).abs().argmin(3).view(96, 256)
    codes = (nearest + 8 * (scaled < 0).view(96, 256)).to(torch.uint8)
    tensors[f"{FIRST}.weight"] = codes[:, ::2] | codes[:, 1::2] << 4
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors), weights=weights)
    assert kinds(result) == {"calibrated"}, result.all_findings
    assert 700 < worst(result).count <= 48 * 16
    assert result.passed()
    assert not result.passed(strict=True)


def test_a_tensor_scale_shared_with_a_sibling_is_a_note(tmp_path: Path) -> None:
    original, tensors = samples.weights(), samples.nvfp4("ModelOpt")
    amax = torch.stack([weight.float().abs().amax() for weight in original.values()]).amax().view(1)
    for name, weight in original.items():
        q = ops.quantize(weight, "nvfp4@modelopt", amax=amax)
        tensors[name], tensors[f"{name}_scale_2"] = q.codes, q.tensor_scale
        tensors[f"{name}_scale"] = q.scales.view(torch.float8_e4m3fn)
    weights = save(tmp_path / "bf16.safetensors", original)
    result = judge_checkpoint(save(tmp_path / "model.safetensors", tensors), weights=weights)
    assert [finding.kind for finding in result.all_findings] == ["shared-scale"]
    assert {layer.scales for layer in result.layers} == {"absmax"}


def test_weights_of_another_shape_are_not_compared(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", samples.nvfp4("ModelOpt"))
    other = save(tmp_path / "bf16.safetensors", samples.weights(64, 256))
    result = judge_checkpoint(path, weights=other)
    assert not result.passed()
    assert "96x256" in worst(result).sentence
    with pytest.raises(CheckpointError, match="no weights of the quantized matrices"):
        judge_checkpoint(path, weights=save(tmp_path / "none.safetensors", {"a": torch.zeros(2)}))


# ---- damaged files ---------------------------------------------------------------------------------------------------


def header(content: object, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"a.weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header has 0 bytes"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header has 1152921504606846976 bytes"),
        (header(b"{"), "damaged"),
        (header(b"[" * 100_000), "damaged"),
        (header(b'{"a": 1, "a": 2}'), "occurs twice"),
        (header([]), "no list"),
        (header({"a": 1}), "dtype"),
        (header(entry("F7"), b"1234"), "F7"),
        (header(entry(shape=[1 << 61, 1 << 61]), b"1234"), "needs"),
        (header(entry(shape=[-1]), b"1234"), "no lists of counts"),
        (header(entry(shape=[True]), b"1"), "no lists of counts"),
        (header(entry(shape=[1] * 9), b"1"), "no lists of counts"),
        (header(entry(offsets=[4, 0]), b"1234"), "beyond the file"),
        (header(entry(offsets=[0, 1 << 50], shape=[1 << 50]), b"1234"), "beyond the file"),
        (header(entry(offsets=[1, 5]), b"12345"), "begins at byte"),
        (header(entry(), b"12345"), "end at byte"),
        (header({"\x1b[2J": entry()["a.weight"]}, b"1234"), "printable"),
    ],
)
def test_a_damaged_safetensors_file_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUX" + b"\0" * 30, "no GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "counts"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "beyond the file"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 4, 1 << 61), "beyond the file"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 1 << 61, 39, 0), "beyond the file"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"a", 1, 33, 39, 0), "no multiple of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"a", 1000), "dimensions"),
        (b"GGUF" + struct.pack("<IQQQ17sII", 3, 0, 1, 17, b"general.alignment", 4, 0), "its alignment is 0"),
        (b"GGUF" + struct.pack("<IQQ" + "Q1sIQIQ" * 2 + "6x", 3, 2, 0, *[1, b"a", 1, 0, 0, 0] * 2), "a occurs twice"),
    ],
)
def test_a_damaged_gguf_file_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


INDEX = "model.safetensors.index.json"
ONE = header(entry(), b"1234")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no \.safetensors file and no \.gguf file"),
        ({INDEX: b"{"}, "cannot be read as JSON: JSONDecodeError; remove or repair it"),
        ({INDEX: b"[]"}, "has no weight_map"),
        ({INDEX: b'{"weight_map": {"a": 1}}'}, "has no weight_map"),
        ({INDEX: b'{"weight_map": {"a": "../a.safetensors"}}'}, r"'\.\./a\.safetensors' is no \.safetensors file"),
        ({INDEX: b'{"weight_map": {"a": "a.safetensors"}}'}, r"names a\.safetensors, which is missing"),
        ({"a.safetensors": ONE, "b.safetensors": ONE}, r"a\.weight is also in .*a\.safetensors"),
        ({"a.safetensors": ONE, "config.json": b"["}, r"config\.json: cannot be read as JSON"),
        ({"a.safetensors": ONE, "hf_quant_config.json": b"["}, r"hf_quant_config\.json: cannot be read as JSON"),
    ],
)
def test_a_wrong_folder_is_one_clear_error(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_the_quantization_is_read_from_either_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(ONE)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert open_checkpoint(tmp_path).config == {"quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert open_checkpoint(tmp_path).config == {"quant_method": "fp8"}


def test_a_file_that_is_none_or_shrinks_is_named(tmp_path: Path) -> None:
    other = tmp_path / "a.bin"
    other.write_bytes(ONE)
    with pytest.raises(CheckpointError, match=r"unknown suffix '\.bin'; a checkpoint is \.safetensors or \.gguf"):
        open_checkpoint(other)
    path = other.rename(tmp_path / "a.safetensors")
    (tensor,) = open_checkpoint(path).tensors.values()
    path.write_bytes(ONE[:-1])
    with pytest.raises(CheckpointError, match=r"ends inside a\.weight; the file changed while it was read"):
        tensor.read()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        tensor.read()


# ---- names, experts, integers and plain tensors ----------------------------------------------------------------------


def power_of_two_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 codes, and E8M0 scales of 128x128 elements: the least power of two that is at least amax/448."""
    rows, columns = weight.shape
    x = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = x.view(x.shape[0] // 128, 128, -1, 128)
    exponents = torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448)).clamp(-127, 127)
    codes = encode((blocks / torch.exp2(exponents)[:, None, :, None]).view(x.shape)[:rows, :columns].contiguous(), E4M3)
    return codes.view(torch.float8_e4m3fn), (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def block_exponents(suffix: str) -> Tensors:
    found: Tensors = {}
    for name, weight in samples.weights(200, 300).items():
        found[name], found[name.removesuffix(".weight") + suffix] = power_of_two_blocks(weight)
    return found


def experts_as_nibbles() -> Tensors:
    """DeepSeek-V4 experts: two E2M1 codes in an int8, E8M0 scales of 32 elements."""
    found: Tensors = {}
    for name, weight in samples.weights().items():
        q = ops.quantize(weight, "mxfp4@ocp")
        found[name] = q.codes.view(torch.int8)
        found[f"{name.removesuffix('.weight')}.scale"] = q.scales.view(torch.float8_e8m0fnu)
    return found


def of_tensor(suffix: str) -> Tensors:
    """FP8 with a scale for the tensor."""
    found: Tensors = {}
    for name, weight in samples.weights().items():
        scale = weight.float().abs().amax() / torch.tensor(448.0)
        found[name] = encode(weight.float() / scale, E4M3).view(torch.float8_e4m3fn)
        found[name.removesuffix(".weight") + suffix] = scale
    return found


def fused_experts(kind: str) -> tuple[Tensors, Tensors]:
    """Three experts (3, 200, 300) under the same name, with scales per expert."""
    weights = [
        weight * factor
        for factor, weight in zip((1.0, 2.0, 0.5), [*samples.weights(200, 300).values()] * 2, strict=False)
    ]
    if kind == "blocks":
        made = [power_of_two_blocks(weight) for weight in weights]
    else:
        scales = [weight.float().abs().amax() / torch.tensor(448.0) for weight in weights]
        made = [
            (encode(weight.float() / scale, E4M3).view(torch.float8_e4m3fn), scale)
            for weight, scale in zip(weights, scales, strict=True)
        ]
    codes, numbers = (torch.stack([part.view(torch.uint8) if part.dim() == 2 else part for part in parts])
                      for parts in zip(*made, strict=True))  # fmt: skip
    name = "model.layers.0.mlp.experts.gate_up_proj"
    numbers = numbers.view(torch.float8_e8m0fnu) if kind == "blocks" else numbers
    stored = {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": numbers}
    return stored, {name: torch.stack(weights)}


@pytest.mark.parametrize(
    ("tensors", "size", "layout"),
    [
        (block_exponents(".weight_scale_inv"), (200, 300), "DeepSeek"),
        (block_exponents(".scale"), (200, 300), "DeepSeek-V4"),
        (experts_as_nibbles(), (96, 256), "DeepSeek-V4"),
        (of_tensor(".scale_weight"), (96, 256), "ComfyUI"),
    ],
    ids=["exponents", "V4", "V4 experts", "ComfyUI"],
)
def test_right_checkpoints_of_other_names_pass(
    tmp_path: Path, tensors: Tensors, size: tuple[int, int], layout: str
) -> None:
    path = save(tmp_path / "model.safetensors", tensors)
    assert not kinds(judge_checkpoint(path))
    result = judge_checkpoint(path, weights=save(tmp_path / "bf16.safetensors", samples.weights(*size)))
    assert result.passed(strict=True), result.all_findings
    assert {layer.layout for layer in result.layers} == {layout}
    assert {layer.scales for layer in result.layers} == {"absmax"}
    # The same file with one wrong code fails.
    next(t for name, t in tensors.items() if name.endswith(".weight")).view(torch.uint8)[3, 5] ^= 0x21
    changed = judge_checkpoint(save(path, tensors), weights=tmp_path / "bf16.safetensors")
    assert worst(changed).kind == "codes-given-scales"


@pytest.mark.parametrize("kind", ["blocks", "one scale"])
def test_fused_experts_are_judged_one_by_one(tmp_path: Path, kind: str) -> None:
    stored, originals = fused_experts(kind)
    path, weights = save(tmp_path / "model.safetensors", stored), save(tmp_path / "bf16.safetensors", originals)
    result = judge_checkpoint(path, weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert [layer.name[-3:] for layer in result.layers] == ["[0]", "[1]", "[2]"]
    assert [layer.compared for layer in result.layers] == [60_000] * 3
    name = next(iter(stored))
    stored[name].view(torch.uint8)[1, 7, 9] ^= 0x21
    finding = worst(judge_checkpoint(save(path, stored), weights=weights))
    assert (finding.kind, finding.tensor[-3:]) == ("codes-given-scales", "[1]")
    assert finding.first.startswith("row 7, column 9")


def test_scales_of_own_names(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", of_tensor(".factor"))
    assert kinds(judge_checkpoint(path)) == {"scales"}
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(path, weights=weights, scales="{weight}.factor")
    assert result.passed(strict=True), result.all_findings
    assert_checkpoint(path, weights=weights, scales="{weight}.factor")
    with pytest.raises(CheckpointError, match=r"a pattern names the matrix as \{weight\}: \{weight\}\.scale"):
        judge_checkpoint(path, scales="factor")


def packed_words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Words of eight codes of a row, the code `order[i]` of eight in bits 4i to 4i + 3."""
    groups = codes.view(len(codes), -1, 8).long()
    words = sum(groups[:, :, place] << 4 * bit for bit, place in enumerate(order))
    return words.to(torch.uint32).view(torch.int32)


def integers(layout: str) -> Tensors:
    """INT4 in groups of 32 with zero points."""
    found: Tensors = {}
    for name, weight in samples.weights().items():
        base = name.removesuffix(".weight")
        groups = weight.float().view(96, 8, 32)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round()
        codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15).view(96, 256)
        if layout == "pack-quantized":
            found |= {
                f"{base}.weight_packed": packed_words(codes), f"{base}.weight_scale": scales.half(),
                f"{base}.weight_shape": torch.tensor([96, 256]),
                f"{base}.weight_zero_point": packed_words(zeros.T.contiguous()).T.contiguous(),
            }  # fmt: skip
            continue
        order = (0, 2, 4, 6, 1, 3, 5, 7) if layout == "AWQ" else tuple(range(8))
        stored = zeros.T - float(layout == "GPTQ")
        found[f"{base}.qzeros"] = packed_words((stored % 16).contiguous(), order)
        found[f"{base}.scales"] = scales.T.half().contiguous()
        if layout == "AWQ":
            found[f"{base}.qweight"] = packed_words(codes.T.contiguous(), order)
        else:
            found[f"{base}.qweight"] = packed_words(codes).T.contiguous()
            found[f"{base}.g_idx"] = (torch.arange(256) // 32).int()
    return found


INTEGERS = ("GPTQ", "AWQ", "pack-quantized")


@pytest.mark.parametrize("layout", INTEGERS)
def test_integers_are_judged_by_the_weights(tmp_path: Path, layout: str) -> None:
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    path = tmp_path / "model.safetensors"
    result = judge_checkpoint(save(path, integers(layout)), weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert [(layer.layout, layer.recipe, layer.shape) for layer in result.layers] == [
        (layout, "int4, groups of 32", (96, 256))
    ] * 2
    assert all(layer.sqnr_db is not None and layer.sqnr_db > 15 for layer in result.layers)


@pytest.mark.parametrize("layout", INTEGERS)
def test_defects_of_integers(tmp_path: Path, layout: str) -> None:
    weights = save(tmp_path / "bf16.safetensors", samples.weights())
    path = tmp_path / "model.safetensors"

    def found(change: Callable[[Tensors], object]) -> set[str]:
        tensors = integers(layout)
        change(tensors)
        return kinds(judge_checkpoint(save(path, tensors), weights=weights))

    scale = f"{FIRST}.{'weight_scale' if layout == 'pack-quantized' else 'scales'}"
    zero = f"{FIRST}.{'weight_zero_point' if layout == 'pack-quantized' else 'qzeros'}"
    assert found(lambda t: t[scale].view(-1)[3:4].fill_(torch.nan)) == {"nan-scale"}
    assert found(lambda t: t[scale].view(-1)[3:4].mul_(-1)) == {"negative-scale"}
    assert found(lambda t: t.update({scale: t[scale][:-1]})) == {"shape"}
    assert found(lambda t: t.pop(scale)) == {"scales"}
    assert found(lambda t: t.update({scale: t[scale] * 8})) == {"worse-than-zeros"}
    if layout == "GPTQ":
        assert found(lambda t: t[f"{FIRST}.g_idx"][7:8].fill_(8)) == {"group-index"}
        assert found(lambda t: t.update({zero: t[zero] + 0x11111111})) == {"zero-point"}  # version 2, read as version 1


@pytest.mark.parametrize("form", ["rows", "tensor", "zero points"])
def test_int8_in_bytes(tmp_path: Path, form: str) -> None:
    """`int-quantized` of compressed-tensors: bytes with a sign, and a scale of each row or of the tensor."""
    found: Tensors = {}
    for name, weight in samples.weights().items():
        numbers = weight.float()
        low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
        largest = numbers.abs().amax() if form == "tensor" else torch.maximum(-low, high)
        scale = ((high - low) / 255 if form == "zero points" else largest / 127).bfloat16()
        zero = (-128 - low / scale).round() if form == "zero points" else torch.zeros(())
        found[name] = (numbers / scale + zero).round().clamp(-128, 127).to(torch.int8)
        found[f"{name}_scale"] = scale
        if form == "zero points":
            found[f"{name}_zero_point"] = zero.to(torch.int8)
    path, weights = tmp_path / "model.safetensors", save(tmp_path / "bf16.safetensors", samples.weights())
    result = judge_checkpoint(save(path, found), weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert {(layer.layout, layer.compared) for layer in result.layers} == {("int-quantized", 96 * 256)}
    assert all(layer.sqnr_db is not None and layer.sqnr_db > 30 for layer in result.layers)
    name = f"{FIRST}.weight"
    found[name] = -1 - found[name]
    assert kinds(judge_checkpoint(save(path, found), weights=weights)) == {"worse-than-zeros"}


def saved_as_bf16(tensors: Tensors) -> Tensors:
    return {name: t.bfloat16() if t.dtype == torch.float8_e4m3fn else t for name, t in tensors.items()}


def test_codes_saved_as_numbers_are_named(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", saved_as_bf16(samples.deepseek()))
    weights = save(tmp_path / "bf16.safetensors", samples.weights(200, 300))
    for given in (None, weights):
        result = judge_checkpoint(path, weights=given)
        assert kinds(result) == {"codes-as-numbers"}
        assert "every number is a number of E4M3, up to 448" in worst(result).sentence
        assert not result.passed()
    tensors = samples.deepseek() | samples.weights(200, 300)  # the product, with the scale left behind
    (group,) = {f.kind for f in judge_checkpoint(save(path, tensors), weights=weights).all_findings}
    assert group == "unused-scale"


def test_plain_tensors_are_compared_with_the_weights(tmp_path: Path) -> None:
    stored, originals = samples.nvfp4("ModelOpt"), samples.weights()
    extra = {"lm_head.weight": torch.randn(8, 16, generator=torch.Generator().manual_seed(1)),
             "model.norm.weight": torch.ones(256)}  # fmt: skip
    originals |= extra
    stored["lm_head.weight"] = extra["lm_head.weight"].bfloat16()
    path, weights = tmp_path / "model.safetensors", save(tmp_path / "bf16.safetensors", originals)
    result = judge_checkpoint(save(path, stored), weights=weights)
    assert result.passed(strict=True), result.all_findings
    assert result.plain == 8 * 16 + 256
    stored["lm_head.weight"][5, 3] += 1
    stored["model.norm.weight"] = stored["model.norm.weight"] * 2
    result = judge_checkpoint(save(path, stored), weights=weights)
    assert [(f.severity, f.tensor, f.count) for f in result.all_findings] == [
        ("fail", "lm_head.weight", 1), ("warning", "model.norm.weight", 256)
    ]  # fmt: skip
    assert worst(result).first.startswith("row 5, column 3: ")


def test_scales_of_inputs_and_caches_are_mentioned(tmp_path: Path) -> None:
    tensors = samples.nvfp4("ModelOpt") | {
        f"{FIRST}.input_scale": torch.tensor(0.5), f"{FIRST}.k_scale": torch.tensor([0.25]),
    }  # fmt: skip
    path = tmp_path / "model.safetensors"
    result = judge_checkpoint(save(path, tensors))
    assert result.passed(strict=True)
    assert [(f.severity, f.kind) for f in result.all_findings] == [("note", "activation-scale")]
    assert "and 1 more" in worst(result).tensor
    for wrong in (torch.nan, 0.0, -1.0):
        tensors[f"{FIRST}.k_scale"] = torch.tensor([wrong])
        found = worst(judge_checkpoint(save(path, tensors)))
        assert (found.severity, found.kind, found.tensor) == ("fail", "activation-scale", f"{FIRST}.k_scale")


def test_one_cause_is_one_finding(tmp_path: Path) -> None:
    tensors = samples.deepseek()
    for name in list(tensors):
        if name.endswith("scale_inv"):
            tensors[name] = 1 / tensors[name]
    path = save(tmp_path / "model.safetensors", tensors)
    result = judge_checkpoint(path)
    assert not result.passed()
    assert result.sentence.startswith("2 quantized matrices: 1 failure; ")
    weights = save(tmp_path / "bf16.safetensors", samples.weights(200, 300))
    with pytest.raises(AssertionError) as raised:
        assert_checkpoint(path, weights=weights)
    message = str(raised.value)
    assert message.count("the scales are inverted") == 1
    assert "the same in 1 further tensors" in message
    assert "consequence: " in message
    assert "further from the weights than zeros" in message


# ---- command, report, assertion, memory ------------------------------------------------------------------------------


def test_command_report_and_exit_status(tmp_path: Path) -> None:
    good = save(tmp_path / "good.safetensors", samples.nvfp4("ModelOpt"))
    tensors = samples.nvfp4("ModelOpt")
    nan_scale(tensors)
    bad = save(tmp_path / "bad.safetensors", tensors)
    report = tmp_path / "report"

    def invoke(*arguments: str | Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments), "--report-dir", str(report)])
        return result.exit_code, result.output

    assert invoke(good)[0] == 0
    status, output = invoke(bad)
    assert status == 1
    assert "Model-Optimizer/issues/1633" in output
    page, data = (report / "checkpoint.html").read_text(), json.loads((report / "checkpoint.json").read_text())
    assert "byte 0x7F" in page
    assert data["passed"] is False
    assert data["layers"][1]["findings"][0]["kind"] == "nan-scale"
    status, output = invoke(tmp_path / "none.safetensors")
    assert status == 2
    assert "no such file" in output
    plain = save(tmp_path / "plain.safetensors", samples.weights())
    assert invoke(plain)[0] == 2
    assert_checkpoint(good)
    with pytest.raises(AssertionError, match="decode to NaN"):
        assert_checkpoint(bad)


def test_a_sparse_checkpoint_is_read_in_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_checkpoint, "ROWS", 2048)
    monkeypatch.setattr(sparse_checkpoint, "COLUMNS", 4096)
    count = sparse_checkpoint.write(tmp_path / "model.safetensors", 10_000_000)
    largest = 0
    read = torch.frombuffer

    def watched(buffer: bytearray, *, dtype: torch.dtype) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(buffer))
        return read(buffer, dtype=dtype)

    monkeypatch.setattr(torch, "frombuffer", watched)
    monkeypatch.setattr("narrowgauge.harness.tools.checkpoint.scan.SLAB", 1 << 20)
    result = judge_checkpoint(tmp_path / "model.safetensors")
    assert kinds(result, "fail") == {"tensor-scale"}
    assert result.layers[0].elements == 2048 * 4096
    assert count == 2
    assert largest == 1 << 20
