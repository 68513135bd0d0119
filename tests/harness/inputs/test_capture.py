"""Captured tensors: reading each kind of file, and the messages for wrong files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.harness.inputs.capture import Captured, CaptureError, Header, captured_cases, refused
from narrowgauge.harness.operations.registry import make_inputs

WEIGHT = torch.linspace(-3, 3, 48 * 32).view(48, 32)
TENSORS = {
    "layer.weight": WEIGHT,
    "layer.half": WEIGHT.half(),
    "layer.brain": WEIGHT.bfloat16(),
    "layer.bias": WEIGHT[0].clone(),
    "ids": torch.arange(6).view(2, 3),
}
MATRICES = ["layer.weight", "layer.half", "layer.brain"]


@pytest.fixture
def safetensors(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def saved_by_torch(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_safetensors(safetensors):
    captured = Captured.load(safetensors)
    assert sorted(captured.headers) == sorted(MATRICES)
    for name in MATRICES:
        assert captured[name].dtype == TENSORS[name].dtype
        assert torch.equal(captured[name], TENSORS[name])
    assert captured.note() == f"{safetensors}: left out 2 that are no matrix of fp32, bf16, fp16: ids, layer.bias"


@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_torch_files_of_nested_dictionaries_and_lists(tmp_path, suffix):
    content = {"step": 3, "model": {"a": torch.nn.Parameter(WEIGHT), "rest": [WEIGHT[0], WEIGHT.T]}}
    captured = Captured.load(saved_by_torch(tmp_path / f"checkpoint{suffix}", content))
    assert list(captured.headers) == ["model.a", "model.rest.1"]
    assert not captured["model.a"].requires_grad
    assert captured["model.rest.1"].is_contiguous()
    assert torch.equal(captured["model.rest.1"], WEIGHT.T)
    assert list(captured.left_out) == ["model.rest.0"]


def test_errors_of_files(tmp_path):
    with pytest.raises(CaptureError, match=r"a\.pt: there is no such file"):
        Captured.load(tmp_path / "a.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CaptureError, match=r"folder\.pt: there is no such file"):
        Captured.load(tmp_path / "folder.pt")
    known = r"\.safetensors, \.npy, \.npz, \.pt, \.pth"
    with pytest.raises(CaptureError, match=rf"a\.bin: unknown suffix '\.bin'; captured tensors are {known}"):
        Captured.load(tmp_path / "a.bin")


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".npz", ".pt", ".pth"])
@pytest.mark.parametrize("content", [b"", b"{", b"garbage" * 50, b"PK\x03\x04" + b"x" * 100, bytes(16), b"\x80\x02K"])
def test_damaged_files_say_so_in_one_line(tmp_path, suffix, content):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match=rf"a\{suffix}: cannot be read as \{suffix}: .") as error:
        Captured.load(path)
    assert "\n" not in str(error.value)


def test_nothing_in_a_file_is_executed(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch_file = saved_by_torch(tmp_path / "a.pt", {"a": Malicious()})
    np.savez(tmp_path / "a.npz", a=np.array([Malicious()], dtype=object))
    for path in (torch_file, tmp_path / "a.npz"):
        with pytest.raises(CaptureError, match="cannot be read"):
            Captured.load(path)
    assert not (tmp_path / "executed").exists()


def test_cases_of_a_file(safetensors):
    captured = Captured.load(safetensors, ["layer.weight", "layer.brain"])
    cases = captured_cases(captured)
    assert [case.id for case in cases] == [
        "gemm/nvfp4/128x32x48/fp32xfp32-bf16/model.safetensors:layer.weight/tn",
        "gemm/nvfp4/128x32x48/fp32xfp32-fp32/model.safetensors:layer.weight/tn",
        "quantize/nvfp4/48x32/fp32/model.safetensors:layer.weight",
        "quantize/nvfp4/48x32/fp32/model.safetensors:layer.weight/columnwise",
        "gemm/nvfp4/128x32x48/bf16xbf16-bf16/model.safetensors:layer.brain/tn",
        "gemm/nvfp4/128x32x48/bf16xbf16-fp32/model.safetensors:layer.brain/tn",
        "quantize/nvfp4/48x32/bf16/model.safetensors:layer.brain",
        "quantize/nvfp4/48x32/bf16/model.safetensors:layer.brain/columnwise",
    ]
    assert {(case.tier, case.file) for case in cases} == {("quick", str(safetensors))}
    cases = captured_cases(captured, recipes=["nvfp4", "nvfp4@te-2.8"])
    assert [(case.operation, case.recipe) for case in cases[3:5]] == [
        ("quantize", "nvfp4"),
        ("gemm", "nvfp4@te-2.8"),
    ]


def test_inputs_are_the_captured_tensors(safetensors):
    captured = Captured.load(safetensors, ["layer.brain"])
    gemm, _, rowwise, columnwise = captured_cases(captured)
    brain = TENSORS["layer.brain"]
    assert torch.equal(make_inputs(rowwise, captured=captured).x, brain)
    transposed = make_inputs(columnwise, captured=captured).x
    assert torch.equal(transposed, brain.T)
    assert transposed.is_contiguous()
    given = make_inputs(gemm, captured=captured)
    assert torch.equal(given["w"], brain)
    assert given.x.shape == (128, 32)
    assert given.x.dtype == torch.bfloat16


def test_inputs_that_do_not_fit(safetensors):
    brain = Captured.load(safetensors, ["layer.brain"])
    case = captured_cases(Captured.load(safetensors, ["layer.half"]))[2]
    with pytest.raises(ValueError, match=r"'model\.safetensors:layer\.half' is not in .*, which gave layer\.brain"):
        make_inputs(case, captured=brain)
    changed = Captured(safetensors, {"layer.half": Header("fp32", (16, 32), lambda: WEIGHT[:16])})
    with pytest.raises(ValueError, match=r"the case is \(48, 32\) torch\.float16, but .* is \(16, 32\) torch\.float32"):
        make_inputs(case, captured=changed)


def test_impossible_recipes_of_a_tensor_are_left_out_and_named(safetensors):
    captured = Captured.load(safetensors, ["layer.weight", "layer.brain"])
    recipes = ["nvfp4-2d", "nvfp4-rht", "nvfp4-rht32", "nvfp4-sr"]
    cases = captured_cases(captured, recipes=recipes)
    assert [case.id for case in cases if case.recipe == "nvfp4-rht"] == [
        "gemm/nvfp4-rht/128x32x48/bf16xbf16-bf16/model.safetensors:layer.brain/nt",
        "gemm/nvfp4-rht/128x32x48/bf16xbf16-fp32/model.safetensors:layer.brain/nt",
        "quantize/nvfp4-rht/48x32/bf16/model.safetensors:layer.brain",
        "quantize/nvfp4-rht/48x32/bf16/model.safetensors:layer.brain/columnwise",
    ]
    assert len([case for case in cases if case.recipe == "nvfp4-rht32"]) == 3  # 48 rows are no whole groups of 32
    assert len([case for case in cases if case.recipe in ("nvfp4-2d", "nvfp4-sr")]) == 16
    assert refused(captured, recipes=recipes) == [
        f"{safetensors}: layer.weight makes no gemm case: recipe nvfp4-rht rotates bf16 alone, not fp32",
        f"{safetensors}: layer.weight makes no quantize case: recipe nvfp4-rht rotates bf16 alone, not fp32",
        f"{safetensors}: layer.weight makes no gemm case: recipe nvfp4-rht32 rotates bf16 alone, not fp32",
        f"{safetensors}: layer.weight makes no quantize case: recipe nvfp4-rht32 rotates bf16 alone, not fp32",
        f"{safetensors}: layer.brain makes no quantize case: "
        "recipe nvfp4-rht32 rotates whole groups of 32; M = 48 is no multiple of it",
    ]
    assert refused(captured) == []
