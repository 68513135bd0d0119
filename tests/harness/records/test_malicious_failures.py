"""Foreign saved failures with contradictions, or with a cost in memory or time: each is a single clear error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from narrowgauge.harness.cases.operations import case_from_labels
from narrowgauge.harness.operations.registry import make_inputs
from narrowgauge.harness.records import saved_failure
from narrowgauge.harness.records.saved_failure import SavedFailureError, load
from tests.harness.refusals import refusal
from tests.harness.sample_backends import QUANTIZE

ABOUT = {"id": QUANTIZE.id, "case": QUANTIZE.labels(), "random": {}, "seed": 0, "backend": "b", "stage": "codes"}
INPUTS = make_inputs(QUANTIZE).tensors
GROUPED = case_from_labels("quantize-grouped", "nvfp4", (96, 32), "bf16", "normal", ("even:3",))


def about(**changes: Any) -> str:
    return json.dumps(ABOUT | changes)


def case(**changes: Any) -> str:
    """Metadata with changed labels of the case."""
    return about(case=QUANTIZE.labels() | changes)


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


MALICIOUS: dict[str, tuple[str, str]] = {
    # Metadata.
    "no JSON": ("{", "JSONDecodeError: "),
    "no table": ("[]", "TypeError: "),
    "deep": (deep(100_000), "cannot be read: RecursionError: "),
    "deep id": (about(id=0).replace('"id": 0', f'"id": {deep(100)}'), "the metadata have [[["),
    "number for an id": (about(id=3), "the metadata have 3 instead of a text"),
    "table for a backend": (about(backend={"a": 1}), "the metadata have {'a': 1} instead of a text"),
    "wide seed": (about(seed=2**70), f"the metadata have {2**70} instead of a whole number of 64 bits"),
    "digits": (about(seed=0).replace('"seed": 0', '"seed": ' + "9" * 5000), "ValueError: Exceeds the limit"),
    "text for a seed": (about(seed="0"), "the metadata have '0' instead of a whole number"),
    "true for a seed": (about(seed=True), "the metadata have True instead of a whole number"),
    "NaN in a shape": (case(shape=[float("nan"), 48]), "the metadata have nan instead of a whole number"),
    "one number for random bits": (about(random={"x": [1]}), "cannot be read: IndexError: "),
    "random bits of another operand": (about(random={"y": [1, 2]}), "the tensor random.y is seed and offset; the case"),
    # The case.
    "operation": (case(operation="__class__"), "cannot be read: KeyError: "),
    "operation of another type": (case(operation=["quantize"]), "the metadata have ['quantize'] instead of a text"),
    "recipe": (case(recipe="nvfp5"), "the case: recipe is 'nvfp5': no recipe is called 'nvfp5'"),
    "dtype": (case(dtype="fp64"), "the case: dtype is 'fp64' (did you mean 'fp16'?); it can be fp32, bf16, fp16"),
    "dimensions": (case(shape=[32]), "the case: shape is [32]; a shape is"),
    "negative": (case(shape=[-1, 48]), "the case: shape is [-1, 48]; a shape is"),
    "two exclude each other": (case(recipe="fp8-current-e4m3", flags=["swizzled"]), "the case: scales is 'swizzled'"),
    "unknown flag": (case(flags=["sleep"]), "a quantize has no flag 'sleep'"),
    "unknown label": (case(exec="1"), "cannot be read: TypeError: "),
    "missing label": (about(case={"operation": "quantize"}), "cannot be read: KeyError: 'recipe'"),
    "too large": (case(shape=[2**20, 2**20]), "the case: does not fit: 1048576x1048576 needs about"),
    "arabic sections": (
        about(case=GROUPED.labels() | {"flags": ["even:٣"]}), "a quantize-grouped has no flag 'even:٣'"
    ),
    # Tensors of a different case: kernels would read beyond their ends.
    "larger case": (case(shape=[64, 48]), "the tensor x is (32, 48) torch.bfloat16; the case has (64, 48) torch."),
    "another dtype": (case(dtype="fp16"), "the tensor x is (32, 48) torch.bfloat16; the case has (32, 48) torch.f"),
    "another operation": (
        about(case=case_from_labels("gemm", "nvfp4", (32, 48, 16), "bf16xbf16-bf16", "normal", ("tn",)).labels()),
        "the tensor w is None; the case has (16, 48) torch.bfloat16",
    ),
    "no random bits": (case(recipe="nvfp4-sr"), "the tensor random.x is None; the case has seed and offset"),
    "no scale": (case(recipe="fp8-delayed-e4m3"), "the tensor scale.x is None; the case has (1,) torch.float32"),
}  # fmt: skip


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_failure_is_one_error(tmp_path, name):
    text, message = MALICIOUS[name]
    path = tmp_path / "a.safetensors"
    save_file(INPUTS, path, metadata={"narrowgauge_saved": "1", "about": text})
    said = refusal("show", QUANTIZE.id, "--saved", path)
    assert said.startswith(f"{path}: cannot be read: ")
    assert message in said


def test_the_same_file_unchanged_is_read(tmp_path):
    save_file(INPUTS, tmp_path / "a.safetensors", metadata={"narrowgauge_saved": "1", "about": about()})
    assert load(tmp_path / "a.safetensors").case == QUANTIZE


def test_words_and_a_counter_of_one_operand_are_refused(tmp_path):
    words = replace(QUANTIZE, recipe="nvfp4-sr", random="words")
    text = about(id=words.id, case=words.labels(), random={"x": [1, 2]})
    path = tmp_path / "a.safetensors"
    save_file(make_inputs(words).tensors, path, metadata={"narrowgauge_saved": "1", "about": text})
    with pytest.raises(SavedFailureError, match=r"the tensor random\.x is seed and offset; the case has \(32, 12\)"):
        load(path)


DOUBLED = (
    b'{"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"x":{"dtype":"F16","shape":[8],"data_offsets":[0,16]}}'
)


HEADERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "header of 2^60 bytes": (
        lambda path: path.write_bytes(struct.pack("<Q", 1 << 60)),
        "its header has 11529215046068",
    ),
    "doubled": (
        lambda path: path.write_bytes(struct.pack("<Q", len(DOUBLED)) + DOUBLED + bytes(16)),
        "two tensors are called 'x'",
    ),
    "large": (
        lambda path: save_file({"x": torch.zeros(saved_failure.LARGEST + (17 << 20), dtype=torch.uint8)}, path),
        " bytes; a saved failure has at most 67108864 bytes of tensors",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_read_before_the_tensors(tmp_path, name):
    make, message = HEADERS[name]
    make(tmp_path / "a.safetensors")
    assert message in refusal("show", QUANTIZE.id, "--saved", tmp_path / "a.safetensors")
