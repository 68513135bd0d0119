"""Reading, comparing and restoring the floating-point environment."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from narrowgauge.harness.machine import float_environment
from narrowgauge.harness.machine.float_environment import (
    DOWN,
    KEPT,
    NEAREST,
    UP,
    ZERO,
    changes,
    read_environment,
    require_default,
    restore,
    restored_environment,
)
from tests.paths import ROOT

ROUNDING = {
    "x86_64": {NEAREST: 0, DOWN: 0x400, UP: 0x800, ZERO: 0xC00},
    "aarch64": {NEAREST: 0, UP: 0x400000, DOWN: 0x800000, ZERO: 0xC00000},
}.get(os.uname().machine, {})
known_registers = pytest.mark.skipif(not ROUNDING, reason="the registers of this machine are unknown")
x86_only = pytest.mark.skipif(os.uname().machine != "x86_64", reason="for x86-64")


@pytest.fixture
def libm() -> Iterator[ctypes.CDLL]:
    """The C library. Its default floating-point environment is set after the test."""
    library = ctypes.CDLL("libm.so.6")
    library.fesetmode.argtypes = (ctypes.c_void_p,)
    yield library
    library.fesetmode(-1)  # FE_DFL_MODE


def causes(notes: list[dict[str, str]]) -> list[str]:
    return [note["cause"] for note in notes]


# ---- registers -------------------------------------------------------------------------------------------------------


@known_registers
@pytest.mark.parametrize("mode", [UP, DOWN, ZERO])
def test_a_changed_rounding_mode_is_a_note_and_is_restored(libm: ctypes.CDLL, mode: str) -> None:
    before = read_environment()
    libm.fesetround(ROUNDING[mode])
    after, probed = read_environment(), float_environment._probe_arithmetic()
    restore(before)
    assert libm.fegetround() == ROUNDING[NEAREST]
    assert read_environment() == before
    assert probed == {"rounding-mode": mode, "subnormal-numbers": KEPT}
    (note,) = changes(before, after)  # fesetround also sets the x87 unit, without a second note
    assert note["cause"] == "changes-rounding-mode"
    assert f"from 'to nearest' to {mode!r}" in note["sentence"]
    assert f"torch in this thread round {mode}" in note["sentence"]


def set_x87(precision: int, rounding: int) -> Callable[[ctypes.CDLL], object]:
    def change(libm: ctypes.CDLL) -> None:
        mode = (ctypes.c_uint16 * 4)()
        libm.fegetmode(mode)
        mode[0] = mode[0] & 0xF0FF | precision << 8 | rounding << 10
        libm.fesetmode(mode)

    return change


@x86_only
@pytest.mark.parametrize(
    ("change", "cause", "parts"),
    [
        (set_x87(2, 0), "changes-x87-precision", ["'64 bits' to '53 bits'", "long double"]),
        (set_x87(3, 3), "changes-x87-rounding-mode", ["'to nearest' to 'toward zero'", "long double"]),
        (lambda libm: libm.feenableexcept(4 | 8), "changes-trapped-exceptions",
         ["'none' to 'division by zero, overflow'", "SIGFPE"]),
    ],
)  # fmt: skip
def test_each_setting_of_the_registers_is_a_note_and_is_restored(
    libm: ctypes.CDLL, change: Callable[[ctypes.CDLL], object], cause: str, parts: list[str]
) -> None:
    before = read_environment()
    with restored_environment():
        change(libm)
        after = read_environment()
    assert read_environment() == before
    restore(after)
    assert read_environment() == after
    (note,) = changes(before, after)
    assert note["cause"] == cause
    assert all(part in note["sentence"] for part in parts), note


@known_registers
def test_unknown_registers_are_probed_and_not_restored(libm: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_environment, "_libm", None)
    before = read_environment()
    assert (before["rounding-mode"], before["subnormal-numbers"]) == (NEAREST, KEPT)
    restore(before)
    libm.fesetround(ROUNDING[UP])
    after = read_environment()
    with pytest.raises(RuntimeError, match=r"rounding mode.*'toward \+inf'.*'to nearest'.*process of its own"):
        restore(before)
    assert causes(changes(before, after)) == ["changes-rounding-mode"]


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"mxcsr": 0x5F80, "x87-control-word": 0x33F}, ["rounding mode", UP, NEAREST, "LD_PRELOAD"]),
        ({"mxcsr": 0x9F80, "x87-control-word": 0x33F}, ["subnormal numbers", "results", KEPT, "-ffast-math"]),
        ({"mxcsr": 0x1FC0, "x87-control-word": 0x33F}, ["subnormal numbers", "operands", KEPT, "-ffast-math"]),
        ({"fpcr": 3 << 22}, ["rounding mode", ZERO, NEAREST]),
        ({"rounding-mode": DOWN, "subnormal-numbers": KEPT}, ["rounding mode", DOWN, NEAREST]),
    ],
)
def test_a_judge_with_another_environment_is_refused(environment: dict[str, str | int], parts: list[str]) -> None:
    with pytest.raises(RuntimeError) as error:
        require_default(environment)
    assert all(part in str(error.value) for part in parts), error.value


def test_the_default_environment_is_accepted() -> None:
    require_default(read_environment())
    require_default({"fpcr": 0})


# ---- settings of torch, each in a separate process -------------------------------------------------------------------

TORCH_CHANGES = {
    "default dtype": ("torch.set_default_dtype(torch.float64)", ["default-dtype"], ["float32", "float64"]),
    "default device": ("torch.set_default_device('cuda')", ["default-device"], ["'cpu' to 'cuda'"]),
    "deterministic": (
        "torch.use_deterministic_algorithms(True)", ["deterministic-algorithms"], ["not required", "else an error"],
    ),
    "warnings": (
        "torch.use_deterministic_algorithms(True, warn_only=True)", ["deterministic-algorithms"], ["else a warning"],
    ),
    "high": ("torch.set_float32_matmul_precision('high')", ["matmul-precision"], ["tf32 (GPU), tf32 (CPU)"]),
    "medium": ("torch.set_float32_matmul_precision('medium')", ["matmul-precision"], ["tf32 (GPU), bf16 (CPU)"]),
    "allow_tf32": ("torch.backends.cuda.matmul.allow_tf32 = True", ["matmul-precision"], ["tf32 (GPU)"]),
    "fp32_precision": ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", ["matmul-precision"], ["tf32 (GPU)"]),
    "flags that contradict": (
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'; mixed = read_environment();"
        "torch.set_float32_matmul_precision('highest'); restore(mixed); assert read_environment() == mixed",
        ["matmul-precision"], ["tf32 (GPU), ieee (CPU)"],
    ),
    "cudnn": ("torch.backends.cudnn.allow_tf32 = False", ["cudnn-precision"], ["tf32 (convolutions)", "ieee (conv"]),
    "bf16": (
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
        ["bf16-reduction"], ["'allowed' to 'forbidden'"],
    ),
    "fp16": (
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
        ["fp16-reduction"], ["'allowed' to 'forbidden'"],
    ),
    "accumulation": (
        "torch.backends.cuda.matmul.allow_fp16_accumulation = True",
        ["fp16-accumulation"], ["'forbidden' to 'allowed'"],
    ),
    "two": (
        "torch.set_default_dtype(torch.float16); torch.backends.cuda.matmul.allow_tf32 = True",
        ["default-dtype", "matmul-precision"], ["float16"],
    ),
}  # fmt: skip
REGISTER_CHANGES = {
    "flush": ("torch.set_flush_denormal(True)", "changes-subnormal-numbers", "(operands and results)"),
    "library": ("ctypes.CDLL(sys.argv[1])", "changes-subnormal-numbers", "flushed to zero"),
}

PROGRAM = """
import ctypes, json, sys, torch
from narrowgauge.harness.machine.float_environment import changes, read_environment, restore

found = {}
for name, change in json.load(sys.stdin).items():
    before = read_environment()
    exec(change)
    after = read_environment()
    restore(before)
    found[name] = {
        "notes": changes(before, after),
        "left": changes(before, read_environment()),
        "flags": [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, str(torch.empty(0).dtype)],
        "initialised": torch.cuda.is_initialized(),
    }
print(json.dumps(found))
"""


def run_python(program: str, *arguments: str, given: str = "") -> str:
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, input=given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Notes of each change and changes left after `restore`, from a process that ran all changes in turn."""
    library = tmp_path_factory.mktemp("library") / "fast.so"
    programs = {name: change for name, (change, *_) in (TORCH_CHANGES | REGISTER_CHANGES).items()}
    if which("g++"):
        source: Path = library.with_suffix(".cpp")
        source.write_text("extern int one() { return 1; }")
        # g++ 13 and later link crtfastmath.o, which sets flush-to-zero, into a library only with -mdaz-ftz.
        for options in (["-mdaz-ftz"], []):
            command = ["g++", "-ffast-math", "-shared", "-fPIC", *options, str(source), "-o", str(library)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                break
    else:
        del programs["library"]
    found: dict[str, Any] = json.loads(run_python(PROGRAM, str(library), given=json.dumps(programs)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", TORCH_CHANGES)
def test_each_setting_of_torch_is_a_note_and_is_restored(observed: dict[str, Any], name: str) -> None:
    _, settings, parts = TORCH_CHANGES[name]
    notes = observed[name]["notes"]
    assert causes(notes) == [f"changes-torch-{setting}" for setting in settings]
    assert all(any(part in note["sentence"] for note in notes) for part in parts), notes
    assert observed[name]["left"] == []
    assert observed[name]["flags"] == ["highest", True, "torch.float32"]
    assert not observed[name]["initialised"]


@pytest.mark.long
@known_registers
@pytest.mark.parametrize("name", REGISTER_CHANGES)
def test_flushed_subnormals_are_a_note_and_are_restored(observed: dict[str, Any], name: str) -> None:
    if name not in observed:
        pytest.skip("no g++")
    _, cause, part = REGISTER_CHANGES[name]
    (note,) = observed[name]["notes"]
    assert note["cause"] == cause
    assert part in note["sentence"]
    assert observed[name]["left"] == []
